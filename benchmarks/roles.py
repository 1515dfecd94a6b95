"""Roles with rewards of their own against one shared reward: two small games, learned by a tiny random model.

    .venv/bin/python benchmarks/roles.py             tables on stdout
    .venv/bin/python benchmarks/roles.py --write     also into docs/experiments.md

    letters     planner, executor and judge each reply with one letter, which depends on the question and the role, and
                see nothing of each other. A role is right or wrong; shared: every role has the mean of the three
    prisoners   two players keep silent (k) or talk (t): 3 each if both keep silent, 1 each if both talk; who talks
                alone has 5, the other 0. Shared: both have the mean of the two

All runs of a seed start from the same model and differ only in what the reward names: `own` each role, `shared` none.
Settings were chosen on seeds from 100 on.
"""

from __future__ import annotations

import argparse
import math
import random
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean, stdev
from typing import Any

from tiny import make_model, table, write_section
from transformers import GenerationConfig

import covey
from covey.protocols import Policy
from covey.types import Episode, Messages, Task

QUESTIONS, LETTERS = "abcd", "uvwxyz"
ROLES = {"planner": "1", "executor": "2", "judge": "3"}  # and what its question ends with
PLAYERS = {"first": "5", "second": "6"}
PAYOFFS = {"kk": (3, 3), "tt": (1, 1), "tk": (5, 0), "kt": (0, 5)}
SYMBOLS = QUESTIONS + LETTERS + "kt12356p"
LAST = 10  # steps of the mean at the end


def wanted(question: str, role: str) -> str:
    return random.Random(f"{question}{role}").choice(LETTERS)


def letters(question: str, replies: Mapping[str, str]) -> dict[str, float]:
    return {role: float(reply == wanted(question, role)) for role, reply in replies.items()}


def prisoners(question: str, replies: Mapping[str, str]) -> dict[str, float]:
    """What is neither of the two moves counts as talking."""
    moves = "".join("k" if reply == "k" else "t" for reply in replies.values())
    return dict(zip(replies, map(float, PAYOFFS[moves]), strict=True))


@dataclass(frozen=True)
class Game:
    """Each role replies once. In this process: an environment would have a process of its own for every episode."""

    roles: Mapping[str, str]
    score: Any
    shared: bool
    reward = "given"

    def opening(self, task: Task) -> tuple[Messages, None]:
        return task.messages, None

    async def run(self, policy: Policy, task: Task) -> Episode:
        question = str(task.messages[-1]["content"])
        replies = {}
        for role, mark in self.roles.items():
            reply = await policy.ask([{"role": "user", "content": question + mark}], role=role)
            replies[role] = reply.text
        scores = self.score(question, replies)
        extras = {f"scored_{role}": value for role, value in scores.items()}
        named = {"reward": fmean(scores.values())} if self.shared else scores
        return Episode(task, tuple(policy.turns), task.messages, stop=reply.stop, given=named | extras)


GAMES: dict[str, tuple[Mapping[str, str], Any, str, int]] = {  # roles, scores, questions, steps
    "letters": (ROLES, letters, QUESTIONS, 80),
    "prisoners": (PLAYERS, prisoners, "p", 60),
}


@dataclass(frozen=True)
class Outcome:
    game: str
    name: str
    seed: int
    course: tuple[float, ...]  # mean score of a role, in every step

    @property
    def mean(self) -> float:
        return fmean(self.course)

    @property
    def last(self) -> float:
        return fmean(self.course[-LAST:])


def train(game: str, name: str, seed: int, steps: int | None = None, **changes: Any) -> Outcome:
    roles, score, questions, usual = GAMES[game]
    with tempfile.TemporaryDirectory() as scratch:
        model = make_model(Path(scratch, "model"), SYMBOLS, seed=seed, initializer_range=0.3)
        GenerationConfig(eos_token_id=list(range(len(SYMBOLS) + 1))).save_pretrained(model)  # one symbol ends a reply
        settings: dict[str, Any] = {
            "algorithm": "grpo",
            "data": {"train_batch_size": 4},
            "rollout": {"group_size": 8, "max_tokens": 1},
            "learner": {"lr": 1e-3},
            "loop": {"total_steps": steps or usual, "save_final": False, "threads": 1},
            "eval": {"before": False},
            "logging": {"to": [], "output_dir": f"{scratch}/runs", "episodes_per_step": 0},
            "resume": "disable",
            "seed": seed,
        }
        run = covey.train(
            model=str(model),
            tasks=[{"question": question, "answer": ""} for question in (questions * 4)[:4]],
            agent=Game(roles, score, shared=name == "shared"),
            **(settings | changes),
        )
        scores = [fmean(m[f"reward/given/scored_{role}/mean"] for role in roles) for m in run.metrics]
    return Outcome(game, name, seed, tuple(scores))


def interval(values: Sequence[float]) -> str:
    """Mean ± standard error."""
    if len(values) == 1:
        return f"{values[0]:.2f}"
    return f"{fmean(values):.2f} ± {stdev(values) / math.sqrt(len(values)):.2f}"


def report(outcomes: Sequence[Outcome]) -> str:
    seeds = sorted({o.seed for o in outcomes})
    rows = []
    for game, name in dict.fromkeys((o.game, o.name) for o in outcomes):
        own = {o.seed: o for o in outcomes if (o.game, o.name) == (game, name)}
        cells = [f"{own[seed].mean:.2f} / {own[seed].last:.2f}" for seed in seeds]
        means, lasts = ([getattr(o, key) for o in own.values()] for key in ("mean", "last"))
        rows.append([game, f"`{name}`", *cells, interval(means), interval(lasts)])
    header = ["game", "rewards", *(f"seed {s}" for s in seeds), "whole run", f"last {LAST} steps"]
    return table(header, rows)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--write", action="store_true", help="put the table into docs/experiments.md")
    options = parser.parse_args()
    start, outcomes = time.perf_counter(), []
    for game in GAMES:
        for seed in options.seeds:
            for name in ("own", "shared"):
                outcomes.append(train(game, name, seed))
                print(f"{game}  seed {seed}  {name}  {outcomes[-1].last:.3f}", flush=True)
    minutes = (time.perf_counter() - start) / 60
    text = f"{report(outcomes)}\n\nRun time: {minutes:.0f} minutes on one core."
    print(f"\n{text}")
    if options.write:
        write_section("roles", text)


if __name__ == "__main__":
    main()
