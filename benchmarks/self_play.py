"""Self-play against the current policy and against past ones: rock, paper, scissors, learned by a tiny random model.

    .venv/bin/python benchmarks/self_play.py             a table on stdout
    .venv/bin/python benchmarks/self_play.py --write     also into docs/experiments.md

Both players are the same model and see the same one-symbol question; only the role `player` is trained. All runs of a
seed start from the same model and differ only in who plays the role `opponent`:

    current     the policy that is trained
    past        one of the last ten policies of every tenth step, drawn before each step

Two measures of every policy of the second half, computed from the log-probs of the sampled moves:

    exploitability      what the best reply wins against it: 0 if it plays each move with probability 1/3, which loses
                        to nobody, 1 if it always makes the same move
    against its past    what it wins against the policies of 10, 20, ..., 100 steps before

Settings were chosen on seed 100.
"""

from __future__ import annotations

import argparse
import math
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import mean, stdev
from typing import Any

from tiny import make_model, table, write_section
from transformers import GenerationConfig

import covey
from covey.protocols import Policy
from covey.types import Episode, Messages, Task

MOVES = "rps"
QUESTION = "q"
STEPS = 200
EVERY, KEEP = 10, 10  # of the past policies
OPPONENTS: dict[str, dict[str, Any]] = {
    "current": {},
    "past": {"agent.opponents": ["opponent"], "agent.opponent_options": {"every": EVERY, "keep": KEEP}},
}


def payoff(mine: str, other: str) -> int:
    """1 if `mine` beats `other`, −1 if it loses. What is no move loses to any move."""
    if mine not in MOVES or other not in MOVES:
        return (mine in MOVES) - (other in MOVES)
    return (0, 1, -1)[(MOVES.index(mine) - MOVES.index(other)) % 3]


def exploitability(probabilities: dict[str, float]) -> float:
    """What the best reply to these moves wins."""
    return max(sum(p * payoff(move, other) for other, p in probabilities.items()) for move in MOVES)


def reward(mine: dict[str, float], other: dict[str, float]) -> float:
    """What a strategy wins on average against another one."""
    return sum(p * q * payoff(a, b) for a, p in mine.items() for b, q in other.items())


class Game:
    """Both move at the same time. In this process: an environment would have a process of its own for every episode."""

    reward = "given"

    def opening(self, task: Task) -> tuple[Messages, None]:
        return task.messages, None

    async def run(self, policy: Policy, task: Task) -> Episode:
        mine = await policy.ask(task.messages, role="player")
        other = await policy.ask(task.messages, role="opponent", trained=False)
        score = float(payoff(mine.text, other.text))
        given = {"player": score, "opponent": -score}
        return Episode(task, tuple(policy.turns), task.messages, stop=mine.stop, given=given)


@dataclass(frozen=True)
class Outcome:
    name: str
    seed: int
    strategies: tuple[dict[str, float], ...]  # of the player, in every step

    @property
    def exploitability(self) -> float:
        return mean(map(exploitability, self.strategies[len(self.strategies) // 2 :]))

    @property
    def against_past(self) -> float:
        games = [
            reward(self.strategies[at], self.strategies[at - EVERY * back])
            for at in range(len(self.strategies) // 2, len(self.strategies))
            for back in range(1, KEEP + 1)
            if at >= EVERY * back
        ]
        return mean(games)


def strategy_of(step: covey.Step) -> dict[str, float]:
    """The probabilities of the player's moves; those that no attempt made share what is left."""
    turns = [turn for group in step.groups for episode in group.episodes for turn in episode.turns]
    symbols = "?" + MOVES + QUESTION  # token 0 ends an answer
    seen = {symbols[t.completion_ids[0]]: math.exp(t.logprobs[0]) for t in turns if t.role == "player"}
    missing = [move for move in MOVES if move not in seen]
    rest = max(0.0, 1.0 - sum(seen.values()))
    return seen | {move: rest / len(missing) for move in missing}


def train(name: str, seed: int, steps: int = STEPS, **changes: Any) -> Outcome:
    with tempfile.TemporaryDirectory() as scratch:
        symbols = MOVES + QUESTION
        model = make_model(Path(scratch, "model"), symbols, seed=seed, initializer_range=0.3)
        GenerationConfig(eos_token_id=list(range(len(symbols) + 1))).save_pretrained(model)  # one symbol ends a reply
        settings: dict[str, Any] = {
            "algorithm": "dr_grpo",
            "data": {"train_batch_size": 1},
            "rollout": {"group_size": 64, "max_tokens": 1},
            "learner": {"lr": 1e-3, "entropy_coef": 0.1},
            "loop": {"total_steps": steps, "save_final": False, "threads": 1},
            "eval": {"before": False},
            "logging": {"to": [], "output_dir": f"{scratch}/runs", "episodes_per_step": 0},
            "resume": "disable",
            "seed": seed,
        }
        with covey.Trainer(
            model=str(model),
            tasks=[{"question": QUESTION, "answer": ""}],
            agent=Game(),
            **(settings | OPPONENTS[name] | changes),
        ) as trainer:
            return Outcome(name, seed, tuple(strategy_of(step) for step in trainer))


def interval(values: Sequence[float]) -> str:
    """Mean ± standard error."""
    if len(values) == 1:
        return f"{values[0]:.2f}"
    return f"{mean(values):.2f} ± {stdev(values) / math.sqrt(len(values)):.2f}"


def report(outcomes: Sequence[Outcome]) -> str:
    seeds = sorted({o.seed for o in outcomes})
    rows = []
    for name in dict.fromkeys(o.name for o in outcomes):
        own = {o.seed: o for o in outcomes if o.name == name}
        cells = [f"{own[seed].exploitability:.2f} / {own[seed].against_past:+.2f}" for seed in seeds]
        one, other = ([getattr(o, key) for o in own.values()] for key in ("exploitability", "against_past"))
        rows.append([f"`{name}`", *cells, interval(one), interval(other)])
    header = ["opponent", *(f"seed {s}" for s in seeds), "exploitability", "against its past"]
    return table(header, rows)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--only", nargs="+", choices=list(OPPONENTS), default=list(OPPONENTS))
    parser.add_argument("--write", action="store_true", help="put the table into docs/experiments.md")
    options = parser.parse_args()
    start, outcomes = time.perf_counter(), []
    for seed in options.seeds:
        for name in options.only:
            outcomes.append(train(name, seed))
            last = outcomes[-1]
            print(
                f"seed {seed}  {name}  {last.exploitability:.3f}, against its past {last.against_past:+.3f}", flush=True
            )
    minutes = (time.perf_counter() - start) / 60
    text = f"{report(outcomes)}\n\nRun time: {minutes:.0f} minutes on one core."
    print(f"\n{text}")
    if options.write:
        write_section("self_play", text)


if __name__ == "__main__":
    main()
