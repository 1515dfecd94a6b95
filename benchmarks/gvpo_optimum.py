"""Does GVPO converge to the optimum of the KL-regularised problem? The optimum is computed exactly.

    .venv/bin/python benchmarks/gvpo_optimum.py [--seeds 0 1 ...] [--write]

Answers have at most three letters out of seven, so a question has 400 of them and every sum over answers is exact:

    π*(y) ∝ π_ref(y) e^{R(y)/β}     E_π[R]     KL(π ‖ π_ref)     total variation ½ Σ |π − π*|

An answer ends with the end token, or without it after three letters, as in sampling. R is the share of the three
positions (a letter, or empty) where the answer agrees with the question's target. GVPO with reference=initial trains
with three values of β; GRPO without a KL is the contrast. The policy is measured at its checkpoints.

All settings and tolerances were fixed on seeds 100–104; the seed covers the model and the sampling. `--write` updates
the tables of docs/experiments.md. About ten minutes on one core.
"""

from __future__ import annotations

import argparse
import itertools
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import mean
from typing import Any

import torch
from tiny import make_model, table, write_section
from torch import Tensor
from transformers import AutoModelForCausalLM

import covey

LETTERS = "abcdefg"
MOST = 3  # tokens of an answer
QUESTIONS = {"a": "bcd", "b": "ee", "c": "gfa", "d": "c"}
BETAS = (0.5, 0.2, 0.1)
STEPS, EVERY = 400, 40  # updates, and updates between two measurements

# Tolerances for "at the optimum", for the mean over the questions.
REWARD_WITHIN = 0.02  # |E_π[R] − E_π*[R]|
KL_WITHIN = 0.15  # |KL(π) − KL(π*)| / KL(π*), at the end
KL_BELOW = 1.25  # KL(π) / KL(π*), at every checkpoint
VARIATION_BELOW = 0.12  # total variation distance to π*, at the end


@dataclass(frozen=True)
class Question:
    """One question with all its A answers."""

    rewards_A: Tensor
    reference_A: Tensor  # log π_ref


@dataclass(frozen=True)
class Figures:
    """Means over the questions."""

    reward: float
    kl: float  # to the reference
    variation: float  # distance to π*


@dataclass(frozen=True)
class Outcome:
    algorithm: str
    beta: float
    seed: int
    optimum: Figures
    course: Mapping[int, Figures]  # by updates; 0 is the reference itself

    @property
    def last(self) -> Figures:
        return self.course[max(self.course)]

    @property
    def highest_kl(self) -> float:
        return max(figures.kl for figures in self.course.values())

    @property
    def within(self) -> bool:
        last, best = self.last, self.optimum
        return (
            abs(last.reward - best.reward) <= REWARD_WITHIN
            and abs(last.kl - best.kl) <= KL_WITHIN * best.kl
            and self.highest_kl <= KL_BELOW * best.kl
            and last.variation <= VARIATION_BELOW
        )


def score(text: str, answer: str) -> float:
    """The share of positions that agree; positions after the end of a text are empty."""
    return sum(a == b for a, b in zip(text.ljust(MOST), answer.ljust(MOST), strict=True)) / MOST


@covey.reward
def agreement(final_answer: str, answer: str) -> float:
    return score(final_answer, answer)


def all_answers(letters: int = len(LETTERS), most: int = MOST) -> list[tuple[int, ...]]:
    """Token ids of all possible answers. Shorter ones end with token 0, the longest have no end token."""
    words = (itertools.product(range(1, letters + 1), repeat=length) for length in range(most + 1))
    return [word if len(word) == most else (*word, 0) for words_of_length in words for word in words_of_length]


@torch.no_grad()
def answer_logprobs(model: Any, prompt: Sequence[int], answers: Sequence[tuple[int, ...]]) -> Tensor:
    """log π(answer | prompt) of each answer, in float64. Padding follows the answer, so no token attends to it."""
    width = max(map(len, answers))
    ids = torch.tensor([[*prompt, *answer, *[0] * (width - len(answer))] for answer in answers])
    sampled = torch.tensor([[place < len(answer) for place in range(width)] for answer in answers])
    logprobs = torch.log_softmax(model(ids[:, :-1]).logits.double(), -1)[:, len(prompt) - 1 :]
    return (logprobs.gather(-1, ids[:, len(prompt) :, None])[..., 0] * sampled).sum(-1)


def optimum(question: Question, beta: float) -> Tensor:
    """log π* of each answer."""
    return torch.log_softmax(question.reference_A + question.rewards_A / beta, 0)


def measure(policies: Sequence[Tensor], questions: Sequence[Question], beta: float) -> Figures:
    """`policies`: log π of each question's answers."""
    found = []
    for policy_A, question in zip(policies, questions, strict=True):
        pi_A, best_A = policy_A.exp(), optimum(question, beta).exp()
        kl = (pi_A * (policy_A - question.reference_A)).sum()
        found.append(torch.stack([(pi_A * question.rewards_A).sum(), kl, (pi_A - best_A).abs().sum() / 2]))
    return Figures(*torch.stack(found).mean(0).tolist())


def load(folder: Path) -> list[Tensor]:
    """log π of each question's answers, under the model in this folder."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float64)
    return [answer_logprobs(model, [LETTERS.index(q) + 1 for q in question], all_answers()) for question in QUESTIONS]


def read(answer: tuple[int, ...]) -> str:
    return "".join(LETTERS[token - 1] for token in answer if token)


def train(algorithm: str, beta: float, seed: int, steps: int = STEPS, every: int = EVERY) -> Outcome:
    settings = {"algorithm.beta": beta, "algorithm.reference": "initial"} if algorithm == "gvpo" else {}
    with tempfile.TemporaryDirectory() as scratch:
        start = make_model(Path(scratch, "model"), LETTERS, seed=seed, initializer_range=0.2, width=64)
        run = covey.train(
            model=str(start),
            tasks=[{"question": question, "answer": answer} for question, answer in QUESTIONS.items()],
            reward=agreement,
            algorithm=algorithm,
            data={"train_batch_size": len(QUESTIONS)},
            rollout={"group_size": 32, "max_tokens": MOST, "temperature": 1.0},
            learner={"lr": 5e-4, "schedule": "cosine"},
            loop={"total_steps": steps, "save_every": every, "keep_last": steps, "threads": 1},
            logging={"to": [], "output_dir": f"{scratch}/runs", "episodes_per_step": 0},
            resume="disable",
            seed=seed,
            **settings,
        )
        reference = load(start)
        questions = [
            Question(torch.tensor([score(read(y), answer) for y in all_answers()], dtype=torch.float64), logprobs_A)
            for answer, logprobs_A in zip(QUESTIONS.values(), reference, strict=True)
        ]
        course = {0: measure(reference, questions, beta)}
        for folder in sorted((run.path / "checkpoints").glob("step-*")):
            course[int(folder.name.removeprefix("step-"))] = measure(load(folder / "model"), questions, beta)
    best = measure([optimum(question, beta) for question in questions], questions, beta)
    return Outcome(algorithm, beta, seed, best, course)


def ends(outcomes: Sequence[Outcome]) -> str:
    """The final policy of every run, beside the optimum."""
    rows = []
    for o in outcomes:
        known = o.algorithm == "gvpo"
        rows.append(
            [
                f"GVPO β={o.beta:g}" if known else "GRPO, no KL",
                str(o.seed),
                f"{o.course[0].reward:.3f}",
                f"{o.last.reward:.3f}",
                f"{o.optimum.reward:.3f}" if known else "",
                f"{o.last.kl:.3f}",
                f"{o.highest_kl:.3f}",
                f"{o.optimum.kl:.3f}" if known else "",
                f"{o.last.variation:.3f}" if known else "",
                ("yes" if o.within else "**no**") if known else "",
            ]
        )
    header = ["", "seed", "E[R] untrained", "E[R] trained", "E[R] of π*", "KL trained", "KL at most", "KL of π*"]
    return table([*header, "distance to π*", "within tolerances"], rows)


def courses(outcomes: Sequence[Outcome]) -> str:
    """KL and distance over time, means over the seeds."""
    kinds = list(dict.fromkeys((o.algorithm, o.beta) for o in outcomes))
    of = {kind: [o for o in outcomes if (o.algorithm, o.beta) == kind] for kind in kinds}
    steps = list(outcomes[0].course)
    rows = []
    for step in steps:
        rows.append([str(step), *(f"{mean(o.course[step].kl for o in of[kind]):.3f}" for kind in kinds)])
        rows[-1] += [f"{mean(o.course[step].variation for o in of[k]):.3f}" for k in kinds if k[0] == "gvpo"]
    best = [f"{mean(o.optimum.kl for o in of[k]):.3f}" if k[0] == "gvpo" else "" for k in kinds]
    rows.append(["π*", *best, *("0" for k in kinds if k[0] == "gvpo")])
    names = [f"β={beta:g}" if algorithm == "gvpo" else "GRPO" for algorithm, beta in kinds]
    header = ["updates", *(f"KL, {name}" for name in names), *(f"distance, {n}" for n in names if n != "GRPO")]
    return table(header, rows)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, nargs="+", default=list(range(5)))
    parser.add_argument("--write", action="store_true", help="put the tables into docs/experiments.md")
    options = parser.parse_args()
    start = time.perf_counter()
    outcomes = []
    for algorithm, beta in [*(("gvpo", beta) for beta in BETAS), ("grpo", BETAS[-1])]:
        for seed in options.seeds:
            outcomes.append(train(algorithm, beta, seed))
            print(f"{algorithm}  β {beta}  seed {seed}  {outcomes[-1].last}  π*: {outcomes[-1].optimum}", flush=True)
    minutes = (time.perf_counter() - start) / 60
    runs = [o for o in outcomes if o.algorithm == "gvpo"]
    text = (
        f"{ends(outcomes)}\n\n{sum(o.within for o in runs)} of {len(runs)} runs of GVPO are within all tolerances.\n\n"
        f"Over time, means over the seeds:\n\n{courses(outcomes)}\n\nRun time: {minutes:.0f} minutes on one core."
    )
    print(f"\n{text}")
    if options.write:
        write_section("gvpo_optimum", text)


if __name__ == "__main__":
    main()
