"""Soak test: thousands of steps with an agent whose tools fail. Does memory or any other resource grow?

    .venv/bin/python benchmarks/soak.py [--steps 20000] [--minutes 60] [--mode sync|async] [--picture soak.png]

A tiny random model makes four attempts at two tasks per step, with several turns each. It calls a tool in a worker
process that fails one time in twenty (an exception, a hang until its deadline, a crash of its process, megabytes of
output), a tool with state, the calculator, and the Python sandbox, whose code fails too. The reward runs in worker
processes. Checkpoints are written every 100 steps, evaluations run every 200, two episodes of each step are logged, and
the console output goes to a file.

Every few seconds the run's processes are inspected through /proc. The first half is the warm-up, in which the engine's
cache and the allocator's arenas grow to their peak demand. After it, memory against steps is fitted by least squares;
the interval of the slope is the 2.5 to 97.5 % range of a moving-block bootstrap of the residuals, with blocks of a
tenth of the samples, because neighbouring samples are correlated. The counts (files, threads, processes, sandboxes,
temporary files, shared memory) may exceed the maximum of the warm-up by a few, since the number of sandboxes and
workers at a moment is random. All processes must have ended at the end.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
from kit.caller import Call, save
from kit.processes import Seen, descendants, look

ROOT = Path(__file__).resolve().parent.parent
RESULTS = ROOT / "benchmarks" / "results"
MEMORY = {"rss": "driver, RSS", "uss": "driver, its own alone (USS)", "tree_pss": "all processes, PSS"}
ON_A_GPU = {"perf/gpu_memory_gib": "tensors on the GPU, the step's most", "perf/gpu_reserved_gib": "held of the GPU"}
FEW_PAGES = 0.1  # MiB: 25 of them
MANY = 1000  # steps
COUNTS = {  # how far each may exceed the maximum of the warm-up
    "files": 8,
    "threads": 2,
    "tree_files": 120,
    "tree_threads": 24,
    "children": 16,
    "sandboxes": 8,
    "zombies": 4,
    "temporary": 24,
    "shared_memory": 2,
}
CALLS: list[Call] = [
    *(("flaky", {"n": n}) for n in range(12)),
    *(("note", {"text": text}) for text in ("a", "b", "c", "d")),
    *(("calculator", {"expression": text}) for text in ("1+2", "10/3", "2**100", "1/0")),
    ("python_executor", {"code": "x = sum(range(1000))\nprint(x)"}),
    ("python_executor", {"code": "print(x)"}),
    ("unknown", {"n": 1}),
]
TOOLS = '''
import os, random, time
import covey

chance = random.SystemRandom()  # workers are forks of one process: another generator would be the same in all

@covey.tool(timeout=0.3)
def flaky(n: int) -> str:
    """Tell a number. One time in twenty it fails.

    Args:
        n: The number.
    """
    if chance.random() < 0.05:
        return chance.choice([fail, hang, crash, talk])()
    return f"number {n}"

def fail():
    raise ValueError("the tool failed")

def hang():
    time.sleep(1000)

def crash():
    os._exit(3)

def talk():
    for _ in range(2000):
        print("x" * 1000)
    return "y" * 1_000_000

def note(text: str, state: dict) -> str:
    """Remember a text.

    Args:
        text: What to remember.
    """
    notes = state.setdefault("notes", [])
    notes.append(text)
    return f"{len(notes)} notes"

def score(task, episode):
    if chance.random() < 0.002:
        os._exit(4)
    return (hash(episode.final_answer) % 100) / 100
'''
SETTINGS = [
    *("model=model", "data.train_files=tasks.jsonl", "data.val_files=val.jsonl", "reward=tools.py:score"),
    *("agent=hf", "agent.tools=[tools.py:flaky,tools.py:note,calculator,python_executor]", "agent.format=hermes"),
    *("agent.max_turns=4", "agent.max_tool_tokens=24", "sandbox.seconds=2", "algorithm=grpo", "learner.lr=1e-6"),
    *("data.train_batch_size=2", "rollout.group_size=4", "rollout.max_tokens=12", "loop.threads=1"),
    *("loop.save_every=100", "loop.keep_last=2", "eval.every=200", "logging.episodes_per_step=2"),
]
COMMAND = [sys.executable, "-c", "import sys; from covey.cli.main import main; sys.exit(main())", "train", *SETTINGS]


@dataclass(frozen=True)
class Moment:
    seconds: float
    step: int
    seen: Seen


@dataclass(frozen=True)
class Slope:
    """MiB per 1,000 steps."""

    value: float
    low: float
    high: float

    @property
    def flat(self) -> bool:
        return self.low <= 0 <= self.high

    def verdict(self, steps: float) -> str:
        """The verdict after `steps` steps. Memory is counted in pages of 4 KiB; after many steps, a few more pages are
        not growth."""
        if self.flat:
            return "indistinguishable from zero"
        more = self.value * steps / 1000
        if abs(more) < FEW_PAGES and steps >= MANY:
            return f"level ({1024 * more:+.0f} KiB in {steps:,.0f} steps)"
        return "grows" if more > 0 else "shrinks"


def prepare(folder: Path) -> None:
    save(folder / "model", CALLS)
    for name, count in (("tasks", 64), ("val", 4)):
        rows = [{"question": f"{name} {number}", "answer": "x"} for number in range(count)]
        (folder / f"{name}.jsonl").write_text("\n".join(map(json.dumps, rows)))
    (folder / "tools.py").write_text(TOOLS)
    (folder / "temporary").mkdir()


# -- watching -----------------------------------------------------------------------------------------------------


class Steps:
    """Counts the steps of a run by the lines of its metrics file."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.count = 0
        self._offset = 0

    def read(self) -> int:
        for path in [*self.folder.glob("outputs/*/*/metrics.jsonl")][:1]:
            with path.open("rb") as file:
                file.seek(self._offset)
                text = file.read()
            whole = text[: text.rfind(b"\n") + 1]
            self._offset += len(whole)
            self.count += whole.count(b'"kind": "step"') + whole.count(b'"kind":"step"')
        return self.count


def watch(folder: Path, words: list[str], every: float) -> tuple[list[Moment], int, list[int]]:
    """Run a command. Returns the samples, its exit code, and the processes that it left behind."""
    paths = os.pathsep.join([str(ROOT / "src"), os.environ.get("PYTHONPATH", "")])
    environment = os.environ | {"PYTHONPATH": paths, "TMPDIR": str(folder / "temporary")}
    steps, moments, begin, known = Steps(folder), [], time.monotonic(), set[int]()
    with (folder / "log.txt").open("ab") as log:
        process = subprocess.Popen([*COMMAND, *words], cwd=folder, stdout=log, stderr=log, env=environment)
    try:
        while process.poll() is None:
            seen, step = look(process.pid, folder / "temporary"), steps.read()
            known |= set(descendants(process.pid))
            if seen is not None and step:
                moments.append(Moment(time.monotonic() - begin, step, seen))
            time.sleep(every)
    finally:
        process.terminate()
        code = process.wait(60)
    time.sleep(1)
    left = [pid for pid in known if _mark(folder) in _environment(pid)]
    return moments, code, left


def _mark(folder: Path) -> bytes:
    return f"TMPDIR={folder / 'temporary'}".encode()


def _environment(pid: int) -> bytes:
    try:
        return Path(f"/proc/{pid}/environ").read_bytes()
    except OSError:
        return b""


# -- judging ------------------------------------------------------------------------------------------------------


def slope(steps: np.ndarray, values: np.ndarray, resamples: int = 2000) -> Slope:
    """Least squares, and a moving-block bootstrap of its residuals."""
    n = len(steps)
    x = steps - steps.mean()
    fit = float(x @ values / (x @ x))
    residuals = values - values.mean() - fit * x
    length = max(2, n // 10)
    rng = np.random.default_rng(0)
    starts = rng.integers(0, n - length + 1, (resamples, -(-n // length)))
    drawn = residuals[(starts[:, :, None] + np.arange(length)).reshape(resamples, -1)[:, :n]]
    found = fit + (drawn - drawn.mean(1, keepdims=True)) @ x / (x @ x)
    low, high = np.percentile(found, (2.5, 97.5))
    return Slope(1000 * fit, 1000 * float(low), 1000 * float(high))


def grown(steps: np.ndarray, values: np.ndarray) -> dict[str, Any]:
    found = slope(steps, values)
    ends = {"first": round(float(values[0]), 1), "last": round(float(values[-1]), 1)}
    return ends | asdict(found) | {"verdict": found.verdict(float(steps[-1] - steps[0]))}


def judge(moments: list[Moment], code: int, left: list[int], folder: Path) -> dict[str, Any]:
    moments = [m for m in moments if m.step < moments[-1].step]  # without the last step, when memory is freed
    begin = max(3, len(moments) // 2)
    assert len(moments) >= begin + 10, f"only {len(moments)} samples:\n{(folder / 'log.txt').read_text()[-3000:]}"
    early, late = moments[:begin], moments[begin:]
    steps = np.array([moment.step for moment in late], float)
    memory = {name: grown(steps, np.array([getattr(m.seen, name) for m in late])) for name in MEMORY}
    counts = {}
    for name, more in COUNTS.items():
        first, later = (max(getattr(m.seen, name) for m in part) for part in (early, late))
        counts[name] = {
            "warm_up": first,
            "after": later,
            "last": getattr(late[-1].seen, name),
            "flat": later <= first + more,
        }
    (run,) = folder.glob("outputs/*/*")
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    for name in ON_A_GPU:
        if points := [(row["step"], row["metrics"][name]) for row in rows if name in row["metrics"]]:
            after = np.array([point for point in points if point[0] >= steps[0]])
            memory[name] = grown(after[:, 0], 1024 * after[:, 1])
    failures: dict[str, int] = {}
    for row in rows:
        for name, value in row["metrics"].items():
            if name.startswith(("episodes/failed/", "agent/error/", "agent/tool/")) and value and row["kind"] == "step":
                failures[name] = failures.get(name, 0) + round(value)
    return {
        "exit_code": code,
        "status": json.loads((run / "run.json").read_text())["status"],
        "steps": sum(row["kind"] == "step" for row in rows),
        "evaluations": sum(row["kind"] == "eval" for row in rows),
        "samples": len(moments),
        "seconds": round(moments[-1].seconds),
        "warm_up_steps": early[-1].step,
        "memory": memory,
        "counts": counts,
        "failures": failures,
        "left_processes": len(left),
        "left_temporary": sorted(str(path.name) for path in (folder / "temporary").iterdir()),
        "moments": [{"seconds": m.seconds, "step": m.step, **asdict(m.seen)} for m in moments],
    }


def sound(found: dict[str, Any]) -> bool:
    memory = all(one["verdict"] != "grows" for one in found["memory"].values())
    counts = all(count["flat"] for count in found["counts"].values())
    return memory and counts and not found["left_processes"] and not found["left_temporary"]


def table(found: dict[str, Any], mode: str) -> str:
    lines = [
        f"{found['steps']} steps, {found['evaluations']} evaluations, {found['seconds'] / 60:.0f} minutes, "
        f"mode={mode}, {found['status']}; {found['samples']} samples; warm-up: {found['warm_up_steps']} steps.",
        "",
        "| memory | after warm-up | at the end | MiB per 1,000 steps (95 %) | verdict |",
        "|---|---|---|---|---|",
    ]
    for name, one in found["memory"].items():
        lines.append(
            f"| {(MEMORY | ON_A_GPU)[name]} | {one['first']:.0f} MiB | {one['last']:.0f} MiB "
            f"| {one['value']:+.3f} ({one['low']:+.3f} to {one['high']:+.3f}) | {one['verdict']} |"
        )
    lines += ["", "| | most in the warm-up | most after it | at the end |", "|---|---|---|---|"]
    for name, count in found["counts"].items():
        mark = "" if count["flat"] else "  **grows**"
        lines.append(f"| {name.replace('_', ' ')} | {count['warm_up']} | {count['after']}{mark} | {count['last']} |")
    lines += ["", ", ".join(f"{name} {count}" for name, count in sorted(found["failures"].items()))]
    lines += [f"left behind: {found['left_processes']} processes, {len(found['left_temporary'])} temporary files"]
    return "\n".join(lines)


def draw(found: dict[str, Any], path: Path) -> None:
    from matplotlib.figure import Figure

    moments = found["moments"]
    steps = [moment["step"] for moment in moments]
    figure = Figure(figsize=(7, 4.2))
    upper, lower = figure.subplots(2, 1, sharex=True)
    for name, words in MEMORY.items():
        upper.plot(steps, [moment[name] for moment in moments], label=words, linewidth=1)
    upper.set_ylabel("MiB")
    upper.set_ylim(bottom=0)
    upper.legend(fontsize=7, ncols=3, loc="lower right")
    for name in ("files", "threads", "children", "sandboxes", "temporary"):
        lower.plot(steps, [moment[name] for moment in moments], label=name, linewidth=1)
    lower.set_xlabel("step")
    lower.legend(fontsize=7, ncols=5)
    for axes in (upper, lower):
        axes.axvspan(0, found["warm_up_steps"], color="0.92")
    figure.tight_layout()
    figure.savefig(path, dpi=120)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=20_000, help="at most")
    parser.add_argument("--minutes", type=float, default=60.0, help="at most")
    parser.add_argument("--mode", choices=("sync", "async"), default="sync")
    parser.add_argument("--every", type=float, default=2.0, help="seconds between two looks")
    parser.add_argument("--picture", type=Path)
    parser.add_argument("--set", nargs="*", default=[], help="further settings, key=value")
    given = parser.parse_args()
    words = [f"mode={given.mode}", f"loop.total_steps={given.steps}", f"loop.max_minutes={given.minutes}", *given.set]
    with tempfile.TemporaryDirectory(prefix="soak-") as name:
        folder = Path(name)
        prepare(folder)
        moments, code, left = watch(folder, words, given.every)
        found = judge(moments, code, left, folder)
    RESULTS.mkdir(exist_ok=True)
    stem = RESULTS / f"soak-{given.mode}-{time.strftime('%Y%m%d-%H%M%S')}"
    stem.with_suffix(".json").write_text(json.dumps(found, indent=1))
    stem.with_suffix(".md").write_text(table(found, given.mode) + "\n")
    if given.picture:
        draw(found, given.picture)
    print(table(found, given.mode))
    return 0 if sound(found) else 1


if __name__ == "__main__":
    sys.exit(main())
