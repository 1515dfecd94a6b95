"""Two roles with rewards of their own: the prisoner's dilemma, both sides played by one tiny random model.

    .venv/bin/python benchmarks/roles.py               tables on stdout
    .venv/bin/python benchmarks/roles.py --write       also into docs/experiments.md

Each player cooperates (c) or defects (d) without seeing the other's move. Whatever the other does, d pays more for
oneself and less for both together, so theory gives two different ends:

    roles     each player is rewarded with its own payoff: both defect, and have 1
    shared    both are rewarded with the sum of the payoffs: both cooperate, and have 3

Settings were chosen on seed 100. `--write` updates the table of docs/experiments.md. A few minutes on one core.
"""

from __future__ import annotations

import argparse
import json
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean

from tiny import make_model, table, write_section
from transformers import GenerationConfig

import covey

PAYOFF = {("c", "c"): (3, 3), ("c", "d"): (0, 5), ("d", "c"): (5, 0), ("d", "d"): (1, 1)}
SYMBOLS = "12cdefghijkl"  # the prompts of the two players, their moves, and symbols that are not a move
STEPS = 100
FEW = 10  # steps of the means at the start and at the end


class Dilemma:
    """A prompt is `1` for the first player and `2` for the second. A symbol that is not a move costs 1 and ends it."""

    def reset(self, task: covey.Task) -> covey.Observation:
        self.moves = ""
        return covey.Observation("1", role="first")

    def step(self, reply: str) -> covey.Observation | covey.Done:
        if reply not in ("c", "d"):
            return self.paid(*((0, -1) if self.moves else (-1, 0)), {})
        self.moves += reply
        if len(self.moves) == 1:
            return covey.Observation("2", role="second")
        first, second = self.moves
        return self.paid(*PAYOFF[first, second], {"defected": self.moves.count("d") / 2})

    def paid(self, first: float, second: float, told: dict[str, float]) -> covey.Done:
        return covey.Done(reward={**self.rewards(first, second), "payoff": (first + second) / 2, **told})

    def rewards(self, first: float, second: float) -> dict[str, float]:
        return {"reward": first + second, "first": first, "second": second}


class SharedReward(Dilemma):
    def rewards(self, first: float, second: float) -> dict[str, float]:
        return {"reward": first + second}


@dataclass(frozen=True)
class Outcome:
    name: str
    seed: int
    defected: tuple[float, ...]  # share of the moves, by step
    payoff: tuple[float, ...]  # mean over both players


def train(name: str, seed: int, steps: int = STEPS) -> Outcome:
    with tempfile.TemporaryDirectory() as scratch:
        model = make_model(Path(scratch, "model"), SYMBOLS, seed=seed, initializer_range=0.3)
        GenerationConfig(eos_token_id=list(range(len(SYMBOLS) + 1))).save_pretrained(model)  # one symbol ends a reply
        run = covey.train(
            model=str(model),
            tasks=[{"question": "1", "answer": ""}],
            agent=Dilemma if name == "roles" else SharedReward,
            algorithm="grpo",
            data={"train_batch_size": 1},
            rollout={"group_size": 32, "max_tokens": 1},
            learner={"lr": 1e-3},
            loop={"total_steps": steps, "save_final": False, "threads": 1},
            eval={"before": False},
            logging={"to": [], "output_dir": f"{scratch}/runs", "episodes_per_step": 0},
            resume="disable",
            seed=seed,
        )
        records = [json.loads(line) for line in (run.path / "metrics.jsonl").read_text().splitlines()]
    metrics = [record["metrics"] for record in records if record["kind"] == "step"]
    defected = tuple(step["reward/given/defected/mean"] for step in metrics if "reward/given/defected/mean" in step)
    return Outcome(name, seed, defected, tuple(step["reward/given/payoff/mean"] for step in metrics))


def change(values: Sequence[float]) -> str:
    return f"{fmean(values[:FEW]):.2f} → {fmean(values[-FEW:]):.2f}" if values else "no move"


def report(outcomes: Sequence[Outcome]) -> str:
    rows = [[f"`{o.name}`", str(o.seed), change(o.defected), change(o.payoff)] for o in outcomes]
    return table(["rewards", "seed", "moves that defect", "payoff of a player"], rows)


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
