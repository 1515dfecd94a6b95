"""Does a cluster run survive SIGKILL of one of its processes at a random moment? Every role is tested.

    .venv/bin/python benchmarks/kills.py [--runs 30] [--roles engine learner reward driver] [--seed 0]

A tiny random model on CPUs, one learner and one engine in Ray, and a slow reward in a worker process. The first run is
the baseline, without a kill. In each further run, one process of the role is killed at a random moment of a random
step; if it is the driver, the same command is repeated. A run is sound if it finishes, has every step exactly once, and
no weight differs from the baseline by more than 1e-5: then nothing was lost and nothing was trained on twice. A killed
reward fails its episode, which the run counts, so there the weights may differ.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from safetensors.torch import load_file

ROLES = ("engine", "learner", "reward", "driver")
STEPS, TASKS, ATTEMPTS = 10, 2, 4
LIMIT = 300.0  # seconds of one command
REWARD = """
import time
def score(task, episode):
    time.sleep(0.1)
    return len(set(episode.final_answer)) / 10
"""
SETTINGS = [
    *("model=model", "data.train_files=tasks.jsonl", "reward=reward.py:score", "algorithm=grpo", "learner.lr=1e-3"),
    *(f"data.train_batch_size={TASKS}", f"rollout.group_size={ATTEMPTS}", "rollout.max_tokens=16", "loop.threads=1"),
    *(f"loop.total_steps={STEPS}", "loop.save_every=1", "loop.keep_last=1", "logging.to=[]"),
    *("cluster=ray", "cluster.rollout_devices=1"),
]
COMMAND = [sys.executable, "-c", "import sys; from covey.cli.main import main; sys.exit(main())", "train", *SETTINGS]


@dataclass(frozen=True)
class Result:
    role: str
    killed: int  # processes
    finished: bool
    steps_once: bool
    difference: float  # the largest, of any weight
    failed: int  # episodes

    @property
    def sound(self) -> bool:
        return self.finished and self.steps_once and (self.difference <= 1e-5 or self.failed > 0)


def prepare(folder: Path) -> None:
    """A model, tasks and a reward."""
    from tiny import make_model

    symbols = "0123456789abcdefghijklmnopqrstuvwxyz "
    make_model(folder / "model", symbols, seed=0, initializer_range=0.3)
    rows = [{"question": f"task {i}", "answer": "x"} for i in range(2 * TASKS)]
    (folder / "tasks.jsonl").write_text("\n".join(map(json.dumps, rows)))
    (folder / "reward.py").write_text(REWARD)


# -- processes ----------------------------------------------------------------------------------------------------


def children(pid: int) -> list[int]:
    try:
        return [int(word) for task in Path(f"/proc/{pid}/task").iterdir() for word in _read(task / "children").split()]
    except OSError:
        return []


def descendants(pid: int) -> Iterator[int]:
    for child in children(pid):
        yield child
        yield from descendants(child)


def members(role: str, driver: int) -> list[int]:
    """The processes of a role among the descendants of a driver. Ray's have names; reward workers are grandchildren of
    the driver, forked by the template process."""
    if role == "driver":
        return [driver]
    if role == "reward":
        mine = _read(Path(f"/proc/{driver}/cmdline"))
        forks = [child for child in children(driver) if _read(Path(f"/proc/{child}/cmdline")) == mine]
        return [child for fork in forks for child in children(fork)]
    title = {"engine": "ray::RolloutActor", "learner": "ray::LearnerActor"}[role]
    return [pid for pid in descendants(driver) if _read(Path(f"/proc/{pid}/cmdline")).startswith(title)]


def _read(path: Path) -> str:
    try:
        return path.read_text()
    except OSError:
        return ""


# -- one run ------------------------------------------------------------------------------------------------------


def start(folder: Path) -> subprocess.Popen[bytes]:
    log = (folder / "log.txt").open("ab")
    source = str(Path(__file__).resolve().parent.parent / "src")
    environment = os.environ | {"PYTHONPATH": os.pathsep.join([source, os.environ.get("PYTHONPATH", "")])}
    return subprocess.Popen(COMMAND, cwd=folder, stdout=log, stderr=log, env=environment)


def steps_of(folder: Path) -> list[int]:
    (path,) = [*folder.glob("outputs/*/*/metrics.jsonl")][:1] or [folder / "nothing"]
    rows = [json.loads(line) for line in _read(path).splitlines() if line.endswith("}")]
    return [row["step"] for row in rows if row["kind"] == "step"]


def one_run(folder: Path, role: str | None, chance: random.Random) -> int:
    """Run the training and kill at most one process of the role. Returns the number of killed processes."""
    process = start(folder)
    killed = 0
    if role is not None:
        step, pause = chance.randrange(1, STEPS - 3), chance.uniform(0, 0.3)
        while process.poll() is None and len(steps_of(folder)) < step:
            time.sleep(0.02)
        time.sleep(pause)
        if found := members(role, process.pid):
            os.kill(chance.choice(found), signal.SIGKILL)
            killed = 1
    process.wait(LIMIT)
    if role == "driver" and killed:
        start(folder).wait(LIMIT)
    return killed


def inspect(folder: Path, role: str, killed: int, reference: Path) -> Result:
    runs = sorted(folder.glob("outputs/*/*"))
    path = runs[-1]
    finished = json.loads((path / "run.json").read_text())["status"] == "finished"
    rows = [json.loads(line) for line in (path / "metrics.jsonl").read_text().splitlines()]
    failed = sum(int(row["metrics"]["episodes/failed"]) for row in rows if row["kind"] == "step")
    difference = _difference(path, next(reference.glob("outputs/*/*"))) if finished else float("inf")
    return Result(role, killed, finished, steps_of(folder) == list(range(STEPS)), difference, failed)


def _difference(one: Path, other: Path) -> float:
    name = f"checkpoints/step-{STEPS:06d}/model/model.safetensors"
    mine, theirs = load_file(one / name), load_file(other / name)
    return max(float((mine[key] - theirs[key]).abs().max()) for key in theirs)


def measure(folder: Path, role: str, number: int, seed: int) -> Result:
    """One run in which a process of a role is killed, against the one in `folder/alone`."""
    mine = folder / f"{role}-{number}"
    mine.mkdir()
    prepare(mine)
    killed = one_run(mine, role, random.Random(f"{seed} {role} {number}"))
    return inspect(mine, role, killed, folder / "alone")


def left_alone(folder: Path) -> None:
    (folder / "alone").mkdir()
    prepare(folder / "alone")
    one_run(folder / "alone", None, random.Random())
    assert steps_of(folder / "alone") == list(range(STEPS)), (folder / "alone" / "log.txt").read_text()


def table(results: list[Result]) -> str:
    lines = [
        "| killed | runs | hit | finished | every step once | weights as without | failed episodes |",
        "|" + "---|" * 7,
    ]
    for role in dict.fromkeys(result.role for result in results):
        rows = [result for result in results if result.role == role]
        same = sum(row.difference <= 1e-5 for row in rows)
        lines.append(
            f"| {role} | {len(rows)} | {sum(r.killed for r in rows)} | {sum(r.finished for r in rows)} "
            f"| {sum(r.steps_once for r in rows)} | {same} | {sum(r.failed for r in rows)} |"
        )
    return "\n".join(lines)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=int, default=30, help="of all roles together")
    parser.add_argument("--roles", nargs="+", choices=ROLES, default=ROLES)
    parser.add_argument("--seed", type=int, default=0)
    given = parser.parse_args()
    results: list[Result] = []
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        left_alone(folder)
        for number in range(given.runs):
            role = given.roles[number % len(given.roles)]
            results.append(measure(folder, role, number, given.seed))
            print(f"{number + 1}/{given.runs} {results[-1]}", file=sys.stderr, flush=True)
    print(table(results))
    return 0 if all(result.sound for result in results) else 1


if __name__ == "__main__":
    sys.exit(main())
