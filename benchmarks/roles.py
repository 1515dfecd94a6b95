"""Two roles with rewards of their own: both sides of a game, learned by a tiny random model that plays itself.

    .venv/bin/python benchmarks/roles.py               tables on stdout
    .venv/bin/python benchmarks/roles.py --write       also into docs/experiments.md

The game is that of examples/two_players.py: take one or two counters, who takes the last one wins. Backward induction
solves it: the first player loses from 3 and 6 counters, wins from 4 and 5, and nobody can do better against perfect
play. The same model plays both roles. `roles` rewards the winner with 1 and the loser with −1. `shared` gives both the
sum, which is always 0. Settings were chosen on seed 100. `--write` updates the table of docs/experiments.md. About five
minutes on one core.
"""

from __future__ import annotations

import argparse
import json
import runpy
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

GAME = Path(__file__).parent.parent / "examples" / "two_players.py"
TakeAway: Any = runpy.run_path(str(GAME))["TakeAway"]
WINNER = {3: "second", 4: "first", 5: "first", 6: "second"}  # with perfect play
SYMBOLS = "123456abcdef"  # six of them are never a move
STEPS = 300
LEARNER = {"lr": 1e-3, "entropy_coef": 0.03}  # without the bonus, players stop to try moves before the other is good
FEW = 10  # steps of the means at the start and at the end


class Game(TakeAway):  # type: ignore[misc]
    """The same game; a prompt is only the size of the pile."""

    def reset(self, task: covey.Task) -> covey.Observation:
        self.start = int(task.answer)
        return super().reset(task)  # type: ignore[no-any-return]

    def observe(self) -> covey.Observation:
        return covey.Observation(str(self.pile), role=self.player)

    def won_by(self, winner: str) -> covey.Done:
        right = float(winner == WINNER[self.start])
        return covey.Done(reward={"reward": 0.0, **self.rewards(winner), f"right{self.start}": right})

    def rewards(self, winner: str) -> dict[str, float]:
        return dict(super().won_by(winner).reward)


class SharedReward(Game):
    def rewards(self, winner: str) -> dict[str, float]:
        return {}


@dataclass(frozen=True)
class Outcome:
    name: str
    seed: int
    right: tuple[dict[int, float], ...]  # share of the games won by the player who should win, by step and pile

    def mean(self, pile: int, steps: slice) -> float:
        return mean(step[pile] for step in self.right[steps])


def train(name: str, seed: int, steps: int = STEPS) -> Outcome:
    with tempfile.TemporaryDirectory() as scratch:
        model = make_model(Path(scratch, "model"), SYMBOLS, seed=seed, initializer_range=0.3)
        GenerationConfig(eos_token_id=list(range(len(SYMBOLS) + 1))).save_pretrained(model)  # one symbol ends a reply
        run = covey.train(
            model=str(model),
            tasks=[{"question": str(pile), "answer": str(pile)} for pile in WINNER],
            agent=Game if name == "roles" else SharedReward,
            algorithm="grpo",
            data={"train_batch_size": len(WINNER)},
            rollout={"group_size": 16, "max_tokens": 1},
            learner=LEARNER,
            loop={"total_steps": steps, "save_final": False, "threads": 1},
            eval={"before": False},
            logging={"to": [], "output_dir": f"{scratch}/runs", "episodes_per_step": 0},
            resume="disable",
            seed=seed,
        )
        records = [json.loads(line) for line in (run.path / "metrics.jsonl").read_text().splitlines()]
    metrics = [record["metrics"] for record in records if record["kind"] == "step"]
    return Outcome(name, seed, tuple({p: step[f"reward/given/right{p}/mean"] for p in WINNER} for step in metrics))


def report(outcomes: Sequence[Outcome]) -> str:
    rows = []
    for o in outcomes:
        cells = [f"{o.mean(p, slice(FEW)):.2f} → {o.mean(p, slice(-FEW, None)):.2f}" for p in WINNER]
        rows.append([f"`{o.name}`", str(o.seed), *cells])
    return table(["won by who should win", "seed", *(f"{p} counters: {who}" for p, who in WINNER.items())], rows)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--write", action="store_true", help="put the table into docs/experiments.md")
    options = parser.parse_args()
    start, outcomes = time.perf_counter(), []
    for name in ("roles", "shared"):
        for seed in options.seeds:
            outcomes.append(train(name, seed))
            print(f"{name}  seed {seed}  {outcomes[-1].right[-1]}", flush=True)
    minutes = (time.perf_counter() - start) / 60
    text = f"{report(outcomes)}\n\nRun time: {minutes:.0f} minutes on one core."
    print(f"\n{text}")
    if options.write:
        write_section("roles", text)


if __name__ == "__main__":
    main()
