"""Kills runs at random instants, several times each, and resumes them until they finish.

    .venv/bin/python benchmarks/faults.py [--runs 40] [--seed 0] [--modes sync async-fifo async-sample]
                                          [--signals KILL TERM INT] [--kills 5] [--jobs 2]

A tiny random model on the CPU. Each mode first runs once without signals, as the baseline. In every further run, the
process gets a signal at a random instant, up to `--kills` times, and the same command is repeated until it exits by
itself. One instant in six is during start-up (settings, tasks, model, checkpoint); the others are later.

    sync            a run is sound if weights, optimiser, state, episodes, and metrics without timings are
                    bit-identical to those of the baseline
    async-fifo      sampling ahead, every group is trained on once. A run is sound if every group that was started is
                    trained on exactly once, and every checkpoint contains each as trained on, complete or in progress
    async-sample    the same with mode.max_uses=2, where steps also reuse earlier groups

Modes and signals alternate. The processes are forks of one that has imported everything (kit/nest.py).
"""

from __future__ import annotations

import argparse
import json
import random
import signal
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from kit import crashed
from kit.injure import Plan
from kit.nest import Child, Nest
from tiny import table

RESULTS = Path(__file__).parent / "results" / "faults.json"
SIGNALS = {"KILL": signal.SIGKILL, "TERM": signal.SIGTERM, "INT": signal.SIGINT}
MODES = ("sync", "async-fifo", "async-sample", "sft", "lora", "ppo")
CODES = {"KILL": {-9}, "TERM": {-15, 143}, "INT": {130}}  # besides 0; SIGTERM before training begins is not caught


@dataclass(frozen=True)
class Result:
    mode: str
    signal: str
    number: int
    kills: int  # signals that reached the process
    resumed: int  # commands that resumed from a checkpoint
    sound: bool  # identical, or no group is lost or repeated
    lost: int  # steps missing in the metrics, or lost groups
    repeated: int
    codes: tuple[int, ...]
    wrong: tuple[str, ...] = ()  # what differs


@dataclass(frozen=True)
class Alone:
    """The baseline: the run without signals."""

    making: float  # seconds until training begins
    training: float
    outcome: dict[str, Any]


def left_alone(nest: Nest, inputs: Path, base: Path, mode: str) -> Alone:
    folder = crashed.copy(inputs, base / f"{mode}-alone")
    began = time.monotonic()
    child = start(nest, folder, mode)
    wait_until_made(child)
    made = time.monotonic()
    assert child.wait(300) == 0, child.log()
    return Alone(made - began, time.monotonic() - made, crashed.outcome(folder))


def start(nest: Nest, folder: Path, mode: str) -> Child:
    (folder / "made.txt").unlink(missing_ok=True)
    made = ["run-files", "sft-run-files"]
    plan = Plan(tickets=str(folder / "tickets.txt"), log=str(folder / "made.txt"), places=made)
    return nest.start(folder, crashed.MODES[mode], plan)


def wait_until_made(child: Child) -> None:
    made = child.folder / "made.txt"
    while child.running(0.005) and not (made.exists() and "after" in made.read_text()):
        pass


def one_run(nest: Nest, folder: Path, mode: str, name: str, number: int, given: Any, alone: Alone) -> Result:
    chance = random.Random(f"{given.seed} {mode} {name} {number}")
    codes: list[int] = []
    kills = resumed = 0
    while True:
        resumed += bool(list(folder.glob("outputs/*/*/checkpoints/step-*")))
        child = start(nest, folder, mode)
        if kills < given.kills:
            early = chance.random() < 1 / 6
            if not early:
                wait_until_made(child)
            child.running(chance.uniform(0, alone.making if early else alone.training))
            kills += child.signal(SIGNALS[name])
        codes.append(child.wait(300))
        if codes[-1] == 0 or codes[-1] not in CODES[name] or any(map(_finished, crashed.runs(folder))):
            break
    return judge(folder, mode, name, number, kills, resumed, tuple(codes), alone)


def _finished(run: Path) -> bool:
    return crashed.status(run) == "finished"


def judge(
    folder: Path, mode: str, name: str, number: int, kills: int, resumed: int, codes: tuple[int, ...], alone: Alone
) -> Result:
    try:
        if mode.startswith("async"):
            lost, repeated = crashed.account(folder)
            wrong = [] if crashed.steps_once(folder) else ["steps"]
        else:
            lost, repeated = gaps(folder)
            wrong = crashed.differences(alone.outcome, crashed.outcome(folder))
    except Exception as error:  # nothing to compare: the run did not finish, or its files cannot be read
        lost, repeated, wrong = crashed.STEPS, 0, [f"{error!r}: {(folder / 'log.txt').read_text()[-1000:]}"]
    sound = not wrong and lost == repeated == 0
    return Result(mode, name, number, kills, resumed, sound, lost, repeated, codes, tuple(wrong))


def gaps(folder: Path) -> tuple[int, int]:
    """Steps that are missing in the metrics, and steps that occur twice."""
    steps = [r["step"] for r in crashed.records(crashed.finished_run(folder)) if r["kind"] == "step"]
    return len(set(range(crashed.STEPS)) - set(steps)), len(steps) - len(set(steps))


def plan(given: Any) -> Iterator[tuple[str, str, int]]:
    kinds = [(mode, name) for mode in given.modes for name in given.signals]
    for number in range(given.runs):
        yield *kinds[number % len(kinds)], number


def page(results: Sequence[Result]) -> str:
    head = ["mode", "signal", "runs", "kills", "resumed", "identical / conserved", "lost", "repeated"]
    rows = []
    for mode, name in dict.fromkeys((r.mode, r.signal) for r in results):
        mine = [r for r in results if (r.mode, r.signal) == (mode, name)]
        counts = [
            sum(values)
            for values in zip(*((r.kills, r.resumed, r.sound, r.lost, r.repeated) for r in mine), strict=True)
        ]
        rows.append([mode, f"SIG{name}", str(len(mine)), *map(str, counts)])
    rows.append(["all", "", str(len(results)), *(str(sum(int(row[at]) for row in rows)) for at in range(3, 8))])
    return table(head, rows)


def measure(given: Any) -> list[Result]:
    results: list[Result] = []
    with tempfile.TemporaryDirectory(prefix="faults-") as name:
        base = Path(name)
        inputs = crashed.prepare(base / "inputs")
        # One nest per thread, since a nest handles one request at a time.
        with ThreadPoolExecutor(given.jobs) as threads:
            nests = list(threads.map(lambda _: Nest(), range(given.jobs)))
        try:
            alone = {mode: left_alone(nests[0], inputs, base, mode) for mode in given.modes}

            def work(at: int) -> list[Result]:
                return [
                    _print_result(given, _one(nests[at], inputs, base, given, alone, *job))
                    for job in jobs[at :: given.jobs]
                ]

            jobs = list(plan(given))
            with ThreadPoolExecutor(given.jobs) as threads:
                for found in threads.map(work, range(given.jobs)):
                    results += found
        finally:
            for nest in nests:
                nest.close()
    return sorted(results, key=lambda r: r.number)


def _one(
    nest: Nest, inputs: Path, base: Path, given: Any, alone: dict[str, Alone], mode: str, name: str, number: int
) -> Result:
    folder = crashed.copy(inputs, base / f"{number}")
    return one_run(nest, folder, mode, name, number, given, alone[mode])


def _print_result(given: Any, result: Result) -> Result:
    print(f"{result.number + 1}/{given.runs} {result}", file=sys.stderr, flush=True)
    return result


def main(words: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=int, default=40, help="of all modes and signals together")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--modes", nargs="+", choices=MODES, default=MODES[:3])
    parser.add_argument("--signals", nargs="+", choices=SIGNALS, default=list(SIGNALS))
    parser.add_argument("--kills", type=int, default=5, help="of one run, at most")
    parser.add_argument("--jobs", type=int, default=2, help="runs at once")
    parser.add_argument("--out", type=Path, default=RESULTS)
    given = parser.parse_args(words)
    began = time.monotonic()
    results = measure(given)
    found = {"seconds": round(time.monotonic() - began, 1), "seed": given.seed, "results": [asdict(r) for r in results]}
    given.out.parent.mkdir(parents=True, exist_ok=True)
    given.out.write_text(json.dumps(found, indent=1))
    print(page(results))
    print(f"\n{sum(r.kills for r in results)} signals in {found['seconds']} s")
    return 0 if all(result.sound for result in results) else 1


if __name__ == "__main__":
    sys.exit(main())
