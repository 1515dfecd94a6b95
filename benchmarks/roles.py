"""Two roles with rewards of their own: a proposer against a solver, both played by one tiny random model.

    .venv/bin/python benchmarks/roles.py               tables on stdout
    .venv/bin/python benchmarks/roles.py --write       also into docs/experiments.md

The proposer writes one of six letters, the solver must answer with the letter's partner. The solver is rewarded with 1
if it does, else with 0, the proposer with 1 minus that; a symbol that is not one of the letters loses. Whatever is
proposed, a perfect solver knows the answer, so the value of the game is 1 for the solver and 0 for the proposer. In
`roles` each is rewarded by itself; `shared` gives both the sum, which is always 1. Settings were chosen on seed 100.
`--write` updates the table of docs/experiments.md. About five minutes on one core.
"""

from __future__ import annotations

import argparse
import json
import math
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean

from tiny import make_model, table, write_section
from transformers import GenerationConfig

import covey

PARTNER = dict(zip("abcdef", "uvwxyz", strict=True))
SYMBOLS = "?" + "".join(PARTNER) + "".join(PARTNER.values())
STEPS = 200
FEW = 10  # steps of a mean
TIMES = {"first": 0, "at 20": 20, "at 60": 60, "last": -FEW}  # the first step of each mean


class Riddle:
    """A prompt is `?` for the proposer and the proposed letter for the solver."""

    def reset(self, task: covey.Task) -> covey.Observation:
        self.letter = ""
        return covey.Observation("?", role="proposer")

    def step(self, reply: str) -> covey.Observation | covey.Done:
        if self.letter:
            return self.solved(float(reply == PARTNER[self.letter]))
        if reply not in PARTNER:
            return self.solved(1.0)
        self.letter = reply
        return covey.Observation(reply, role="solver")

    def solved(self, right: float) -> covey.Done:
        asked = {"right": right, "proposed": 1.0} if self.letter else {"proposed": 0.0}
        return covey.Done(reward={"reward": 1.0, **self.rewards(right), **asked})

    def rewards(self, right: float) -> dict[str, float]:
        return {"proposer": 1 - right, "solver": right}


class SharedReward(Riddle):
    def rewards(self, right: float) -> dict[str, float]:
        return {}


@dataclass(frozen=True)
class Outcome:
    name: str
    seed: int
    right: tuple[float, ...]  # share of the proposed letters that were answered correctly, by step; NaN: none proposed
    proposed: tuple[float, ...]  # share of the games with a letter

    def at(self, column: Sequence[float], start: int) -> float:
        values = [v for v in column[start : start + FEW if start >= 0 else None] if not math.isnan(v)]
        return fmean(values) if values else math.nan


def train(name: str, seed: int, steps: int = STEPS) -> Outcome:
    with tempfile.TemporaryDirectory() as scratch:
        model = make_model(Path(scratch, "model"), SYMBOLS, seed=seed, initializer_range=0.3)
        GenerationConfig(eos_token_id=list(range(len(SYMBOLS) + 1))).save_pretrained(model)  # one symbol ends a reply
        run = covey.train(
            model=str(model),
            tasks=[{"question": "?", "answer": ""}],
            agent=Riddle if name == "roles" else SharedReward,
            algorithm="grpo",
            data={"train_batch_size": 1},
            rollout={"group_size": 64, "max_tokens": 1},
            learner={"lr": 1e-3, "entropy_coef": 0.1},
            loop={"total_steps": steps, "save_final": False, "threads": 1},
            eval={"before": False},
            logging={"to": [], "output_dir": f"{scratch}/runs", "episodes_per_step": 0},
            resume="disable",
            seed=seed,
        )
        records = [json.loads(line) for line in (run.path / "metrics.jsonl").read_text().splitlines()]
    metrics = [record["metrics"] for record in records if record["kind"] == "step"]
    right = tuple(step.get("reward/given/right/mean", math.nan) for step in metrics)
    return Outcome(name, seed, right, tuple(step["reward/given/proposed/mean"] for step in metrics))


def report(outcomes: Sequence[Outcome]) -> str:
    rows = []
    for o in outcomes:
        cells = [f"{o.at(o.right, start):.2f} ({o.at(o.proposed, start):.2f})" for start in TIMES.values()]
        rows.append([f"`{o.name}`", str(o.seed), *cells])
    return table(["solved (proposed)", "seed", *(f"{name} {FEW} steps" for name in TIMES)], rows)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--write", action="store_true", help="put the table into docs/experiments.md")
    options = parser.parse_args()
    start, outcomes = time.perf_counter(), []
    for name in ("roles", "shared"):
        for seed in options.seeds:
            outcomes.append(train(name, seed))
            print(report(outcomes[-1:]), flush=True)
    minutes = (time.perf_counter() - start) / 60
    text = f"{report(outcomes)}\n\nRun time: {minutes:.0f} minutes on one core."
    print(f"\n{text}")
    if options.write:
        write_section("roles", text)


if __name__ == "__main__":
    main()
