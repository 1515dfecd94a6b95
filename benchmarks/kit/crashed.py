"""The tiny run that is killed and resumed, and the comparison of its results."""

from __future__ import annotations

import hashlib
import json
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from covey.telemetry.key_metrics import is_machine_dependent

STEPS, TASKS, ATTEMPTS = 5, 2, 3
REWARD = """
import asyncio, os, time, zlib
def variety(final_answer):
    return len(set(final_answer)) / 10
def short(final_answer):
    return -len(final_answer)
async def slow(policy, task):
    text = ""
    for turn in range(2):
        text = (await policy.ask([*task.messages, {"role": "user", "content": f"{turn}"}])).text
        await asyncio.sleep((zlib.crc32(f"{task.id} {turn}".encode()) % 50) / 1000)
    return text
def wait():
    time.sleep(os.urandom(1)[0] / 5000)
def hesitant(final_answer):
    wait()
    return len(set(final_answer)) / 10
class Play:
    def reset(self, task):
        self.turns = 0
        wait()
        return [*task.messages]
    def step(self, reply):
        from covey import Done
        wait()
        self.turns += 1
        return Done(reward=len(set(reply)) / 10) if self.turns == 3 else f"{len(reply)} a"
"""
COMMON = ("model=model", "learner.lr=1e-3", "loop.threads=1", "logging.to=[]", f"loop.total_steps={STEPS}")
TRAIN = (
    *("train", *COMMON, "data.train_files=tasks.jsonl", "data.val_files=held.jsonl", "algorithm=grpo"),
    *(f"data.train_batch_size={TASKS}", f"rollout.group_size={ATTEMPTS}", "rollout.max_tokens=6"),
    *("reward=reward.py:variety", "loop.save_every=2", "loop.keep_last=1", "eval.every=3", "eval.batch_size=4"),
)
# The background's groups are kept in every checkpoint: all are, so that each can be looked at.
AHEAD = ("agent=reward.py:slow", "mode=async", "mode.max_staleness=2", "loop.save_every=1", "loop.keep_last=99")
MODES: dict[str, tuple[str, ...]] = {
    "sync": TRAIN,
    "async-fifo": (*TRAIN, *AHEAD),
    "async-sample": (*TRAIN, *AHEAD, "mode.max_uses=2", "data.train_batch_size=4"),
    "lora": (*TRAIN, "model.lora.rank=4"),
    "ppo": (*TRAIN, "algorithm=ppo", "critic.warmup_steps=1", "algorithm.kl_coef=0.1", "algorithm.kl_target=0.01"),
    "dgdo": (*TRAIN, "algorithm=dgdo", "algorithm.warmup_steps=1", "reward=[reward.py:variety,reward.py:short]"),
    "tools": (*TRAIN, "agent=reward.py:Play", "reward=[given,reward.py:hesitant]", "rollout.max_tokens=4"),
    "sft": (
        *("sft", *COMMON, "data.train_files=shown.jsonl", "data.val_files=shown_held.jsonl", "data.train_batch_size=2"),
        *("loop.save_every=2", "loop.keep_last=1", "eval.every=3"),
    ),
}


def prepare(folder: Path) -> Path:
    """A model, tasks, demonstrations and a reward."""
    from tiny import make_model

    folder.mkdir(parents=True, exist_ok=True)
    symbols = "0123456789abcdefghijklmnopqrstuvwxyz "
    make_model(folder / "model", symbols, seed=0, initializer_range=0.3)
    for name, numbers in (("tasks", range(7)), ("held", range(90, 93))):
        rows = [{"question": f"task {i}", "answer": "x"} for i in numbers]
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    for name, numbers in (("shown", range(7)), ("shown_held", range(90, 93))):
        rows = [{"question": f"task {i}", "answer": f"ab{i}c"} for i in numbers]
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (folder / "reward.py").write_text(REWARD)
    return folder


def copy(prepared: Path, folder: Path) -> Path:
    """Link the inputs into another folder. They are only read."""
    folder.mkdir(parents=True)
    for path in prepared.iterdir():
        if path.name in ("model", "reward.py") or path.suffix == ".jsonl":
            (folder / path.name).symlink_to(path)
    return folder


def runs(folder: Path) -> list[Path]:
    return sorted(path.parent for path in folder.glob("outputs/*/*/run.json"))


def status(run: Path) -> str:
    return str(json.loads((run / "run.json").read_text())["status"])


def finished_run(folder: Path) -> Path:
    """The finished run. Others were killed before their first checkpoint, so they could not be resumed."""
    (run,) = [run for run in runs(folder) if status(run) == "finished"]
    others = [other for other in runs(folder) if other != run]
    left = [other for other in others if list(other.glob("checkpoints/step-*"))]
    assert not left, f"not gone on with: {left}"
    return run


def records(run: Path) -> list[dict[str, Any]]:
    """metrics.jsonl without its timings. A damaged line raises an error."""
    found = []
    for line in (run / "metrics.jsonl").read_bytes().splitlines(keepends=True):
        assert line.endswith(b"\n"), line
        record = json.loads(line)
        for name in [n for n in record["metrics"] if is_machine_dependent(n)]:
            assert record["metrics"].pop(name) >= 0, name
        found.append(record)
    return found


def outcome(folder: Path) -> dict[str, Any]:
    """Everything that must not depend on kills: hashes of weights, optimiser and state, records without timings."""
    run = finished_run(folder)
    last = run / "checkpoints" / f"step-{STEPS:06d}"
    found: dict[str, Any] = {
        str(path.relative_to(last)): hashlib.sha256(path.read_bytes()).hexdigest()
        for path in sorted(last.rglob("*"))
        if path.is_file() and path.name not in ("manifest.json", "state.json")
    }
    # Offsets count the bytes of timings too.
    state = json.loads((last / "state.json").read_text())
    state.pop("metrics_offset")
    found["state"] = state
    found["records"] = records(run)
    found["episodes"] = (run / "episodes.jsonl").read_text()
    found["checkpoints"] = sorted(path.name for path in (run / "checkpoints").iterdir())
    found["files"] = sorted(p.name for p in run.iterdir() if not p.name.startswith("."))
    return found


def differences(one: dict[str, Any], other: dict[str, Any]) -> list[str]:
    """The names of the parts that differ."""
    return [name for name in one.keys() | other.keys() if one.get(name) != other.get(name)]


def steps_once(folder: Path) -> bool:
    kinds = Counter((record["kind"], record["step"]) for record in records(finished_run(folder)))
    steps = sorted(step for kind, step in kinds if kind == "step")
    return steps == list(range(STEPS)) and set(kinds.values()) == {1}


# --- sampling ahead: nothing lost, nothing twice -------------------------------------------------------------------


def tickets(path: Path) -> dict[int, list[int]]:
    """The groups that each step was trained on. Of a step repeated after a kill, the last repetition counts."""
    lines = [[int(word) for word in line.split()] for line in path.read_text().splitlines()]
    return {numbers[0]: numbers[1:] for numbers in lines}


def account(folder: Path) -> tuple[int, int]:
    """Groups that were lost, and groups that were trained on as new more than once."""
    taken = tickets(folder / "tickets.txt")
    found = Counter(number for numbers in taken.values() for number in numbers)
    size = len(taken[0])
    everybody = set(range(STEPS * size))
    assert found.keys() <= everybody
    lost, repeated = len(everybody - found.keys()), sum(count - 1 for count in found.values())
    for state in map(_state, sorted(finished_run(folder).glob("checkpoints/step-*"))):
        before = [number for step in range(state["step"]) for number in taken[step]]
        kept = [row[0] for row in state["source"]["window"]["tickets"]]
        whole = Counter([*before, *kept])
        given = set(range(state["source"]["window"]["given"]))
        lost += len(given - whole.keys())
        repeated += sum(count - 1 for count in whole.values()) + len(whole.keys() - given)
        complete = set(state["source"]["window"]["complete"])
        assert complete == {int(number) for number in state["source"]["groups"]}
        assert complete <= set(kept)
    return lost, repeated


def _state(checkpoint: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((checkpoint / "state.json").read_text())
    return found


def uses(folder: Path) -> Counter[str]:
    """How often each reused group was trained on, according to the steps."""
    counts: Counter[str] = Counter()
    for record in records(finished_run(folder)):
        if record["kind"] == "step":
            counts["fresh"] += int(record["metrics"]["groups/total"] - record["metrics"].get("groups/reused", 0))
            counts["reused"] += int(record["metrics"].get("groups/reused", 0))
    return counts


def words(mode: str, *settings: str) -> Sequence[str]:
    return (*MODES[mode], *settings)
