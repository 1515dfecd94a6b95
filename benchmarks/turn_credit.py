"""Credit per turn against credit per episode: a walk of up to twelve turns, learned by a tiny random model.

    .venv/bin/python benchmarks/turn_credit.py               tables on stdout
    .venv/bin/python benchmarks/turn_credit.py --write       also into docs/experiments.md

A path has six cells. In each, one of six letters leads to the next cell, another one back; all other symbols stay. Two
paths differ in these letters, and the model sees which path it is on and, each turn, which cell it is in. All runs of a
seed start from the same model and differ only in how the same walk is paid and credited:

    outcome         GRPO; 1 for reaching the end, nothing on the way
    grpo            GRPO on the sum of the turn rewards: 1/6 for a step ahead, −1/6 for a step back
    turn_returns    the same turn rewards, each turn credited with the rewards from it on
    gigpo           the same, turns in the same cell compared with each other
    ppo             the same, with a critic

Settings were chosen on seed 100. `--write` updates the tables of docs/experiments.md. About fifteen minutes on one
core.
"""

from __future__ import annotations

import argparse
import json
import random
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import mean
from typing import Any

from tiny import make_model, table, write_section
from transformers import GenerationConfig

import covey

PATHS = "ab"
CELLS = "012345"
LETTERS = "uvwxyz"
TURNS = 12
STEPS = 120
LAST = 10  # steps of the mean at the end
ALGORITHMS: dict[str, dict[str, Any]] = {
    "outcome": {"algorithm": "grpo"},
    "grpo": {"algorithm": "grpo"},
    "turn_returns": {"algorithm": "turn_returns"},
    "gigpo": {"algorithm": "gigpo"},
    "ppo": {"algorithm": "ppo", "critic": {"lr": 1e-3}},
}


def moves(path: str, cell: int) -> tuple[str, str]:
    """The letters that lead ahead and back."""
    ahead, back = random.Random(f"{path}{cell}").sample(LETTERS, 2)
    return ahead, back


class Walk:
    """Pays for turns."""

    def reset(self, task: covey.Task) -> covey.Observation:
        self.path, self.cell = task.answer, 0
        return covey.Observation([*task.messages, {"role": "user", "content": CELLS[0]}], state=0)

    def step(self, reply: str) -> covey.Observation | covey.Done:
        ahead, back = moves(self.path, self.cell)
        moved = 1 if reply == ahead else -1 if reply == back and self.cell else 0
        self.cell += moved
        if self.cell == len(CELLS):
            return covey.Done(reward=self.final(moved))
        return covey.Observation(CELLS[self.cell], reward=moved / len(CELLS), state=self.cell)

    def final(self, moved: int) -> dict[str, float]:
        return {"reward": moved / len(CELLS), "arrived": 1.0}

    def end(self, reason: str) -> covey.Done:
        return covey.Done(reward={"reward": 0.0, "arrived": 0.0})


class PaidAtTheEnd(Walk):
    """The same walk; only arriving is paid."""

    def step(self, reply: str) -> covey.Observation | covey.Done:
        result = super().step(reply)
        return result if isinstance(result, covey.Done) else covey.Observation(result.content, state=result.state)

    def final(self, moved: int) -> dict[str, float]:
        return {"reward": 1.0, "arrived": 1.0}


@dataclass(frozen=True)
class Outcome:
    name: str
    seed: int
    arrived: tuple[float, ...]  # share of the episodes that reached the end, in every step

    @property
    def last(self) -> float:
        return mean(self.arrived[-LAST:])

    @property
    def half(self) -> int | None:
        """The first step from which on, over LAST steps, half of the episodes arrived."""
        windows = range(len(self.arrived) - LAST + 1)
        return next((at for at in windows if mean(self.arrived[at : at + LAST]) >= 0.5), None)


def train(name: str, seed: int, steps: int = STEPS) -> Outcome:
    with tempfile.TemporaryDirectory() as scratch:
        symbols = PATHS + CELLS + LETTERS
        model = make_model(Path(scratch, "model"), symbols, seed=seed, initializer_range=0.3)
        GenerationConfig(eos_token_id=list(range(len(symbols) + 1))).save_pretrained(model)  # one symbol ends a reply
        run = covey.train(
            model=str(model),
            tasks=[{"question": path, "answer": path} for path in PATHS * 2],
            agent=PaidAtTheEnd if name == "outcome" else Walk,
            data={"train_batch_size": 4},
            rollout={"group_size": 8, "max_tokens": 1},
            learner={"lr": 1e-3},
            loop={"total_steps": steps, "save_final": False, "threads": 1},
            eval={"before": False},
            logging={"to": [], "output_dir": f"{scratch}/runs", "episodes_per_step": 0},
            resume="disable",
            seed=seed,
            **{"agent.max_turns": TURNS, **ALGORITHMS[name]},
        )
        records = [json.loads(line) for line in (run.path / "metrics.jsonl").read_text().splitlines()]
    steps_only = [record["metrics"] for record in records if record["kind"] == "step"]
    return Outcome(name, seed, tuple(metrics["reward/given/arrived/mean"] for metrics in steps_only))


def report(outcomes: Sequence[Outcome]) -> str:
    seeds = sorted({o.seed for o in outcomes})
    rows = []
    for name in dict.fromkeys(o.name for o in outcomes):
        own = {o.seed: o for o in outcomes if o.name == name}
        cells = [f"{own[s].last:.2f} ({'never' if own[s].half is None else own[s].half})" for s in seeds]
        rows.append([f"`{name}`", *cells, f"{mean(o.last for o in own.values()):.2f}"])
    return table(["arrived (half from step)", *(f"seed {s}" for s in seeds), "mean"], rows)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--only", nargs="+", choices=list(ALGORITHMS), default=list(ALGORITHMS))
    parser.add_argument("--write", action="store_true", help="put the table into docs/experiments.md")
    options = parser.parse_args()
    start, outcomes = time.perf_counter(), []
    for seed in options.seeds:
        for name in options.only:
            outcomes.append(train(name, seed))
            last = outcomes[-1]
            print(f"seed {seed}  {name}  arrived {last.last:.3f}, half from step {last.half}", flush=True)
    minutes = (time.perf_counter() - start) / 60
    text = f"{report(outcomes)}\n\nRun time: {minutes:.0f} minutes on one core."
    print(f"\n{text}")
    if options.write:
        write_section("turn_credit", text)


if __name__ == "__main__":
    main()
