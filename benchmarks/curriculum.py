"""Task samplers (`data.sampler`) against uniform sampling, on sums of mixed difficulty at equal samples.

    .venv/bin/python benchmarks/curriculum.py [--seeds 0 1 ...] [--write]

A tiny model is pretrained on a few sums of each level, so that it solves some tasks always, some sometimes and most
never. Then GRPO trains it with each sampler, from the same weights, with the same number of answers. The measure is the
mean success of sampled answers to held-out sums, on average over the run and after it. All settings were fixed on seed
100; a seed covers the model, its pretraining, the tasks and the sampling. `--write` updates the table of
docs/curriculum.md.
"""

from __future__ import annotations

import argparse
import math
import random
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import mean, stdev
from typing import Any

import torch
from tiny import END, make_model, table, write_section
from transformers import AutoModelForCausalLM, AutoTokenizer

import covey

SYMBOLS = "0123456789+="
PAGE = Path(__file__).parent.parent / "docs" / "curriculum.md"
DIGITS = {"easy": (1, 1), "medium": (2, 1), "hard": (2, 2), "very hard": (3, 2)}  # of the two numbers
TRAINED, HELD_OUT = 400, 60  # tasks of each level; "easy" has 100 sums in all
SHOWN = {"easy": 0.4, "medium": 0.3, "hard": 0.2, "very hard": 0.1}  # shares of the levels in pretraining
PRETRAINING, STEPS, TASKS, ATTEMPTS = 1500, 400, 16, 8
SAMPLERS: dict[str, dict[str, Any]] = {
    "uniform": {},
    "band": {},
    "uncertainty": {},
    "priority": {},
    "buckets": {"sampler_options": {"column": "level", "levels": list(DIGITS)}},
}
T_975 = {2: 12.71, 3: 4.303, 4: 3.182, 5: 2.776, 6: 2.571, 7: 2.447, 8: 2.365, 9: 2.306, 10: 2.262}  # by seeds


@dataclass(frozen=True)
class Outcome:
    sampler: str
    seed: int
    before: float
    average: float  # over the evaluations after the first
    after: float
    flat: float  # share of zero-variance groups


@covey.reward
def right(final_answer: str, answer: str) -> float:
    return float(final_answer == answer)


def sums(seed: int) -> tuple[list[dict[str, str]], list[dict[str, str]]]:
    """Tasks to train on, and held-out ones, of every level."""
    drawn, training, held_out = random.Random(seed), [], []
    for level, (first, second) in DIGITS.items():
        pairs = [(a, b) for a in numbers(first) for b in numbers(second)]
        rows = [
            {"question": f"{a}+{b}=", "answer": str(a + b), "level": level}
            for a, b in drawn.sample(pairs, min(TRAINED + HELD_OUT, len(pairs)))
        ]
        split = min(HELD_OUT, len(rows) // 5)
        held_out += rows[:split]
        training += rows[split:]
    return training, held_out


def numbers(digits: int) -> range:
    return range(10 ** (digits - 1) if digits > 1 else 0, 10**digits)


def pretrain(folder: Path, rows: Sequence[dict[str, str]], seed: int, steps: int) -> None:
    """Cross-entropy on the answers of the training tasks, most of them easy."""
    tokenizer, model = AutoTokenizer.from_pretrained(folder), AutoModelForCausalLM.from_pretrained(folder)
    optimizer, drawn = torch.optim.AdamW(model.parameters(), lr=3e-3), random.Random(seed + 1)
    by_level = {level: [row for row in rows if row["level"] == level] for level in DIGITS}
    for _ in range(steps):
        levels = drawn.choices(list(SHOWN), list(SHOWN.values()), k=32)
        batch = [drawn.choice(by_level[level]) for level in levels]
        inputs = tokenizer([row["question"] + row["answer"] + END for row in batch], padding=True, return_tensors="pt")
        labels = inputs["input_ids"].clone()
        for at, row in enumerate(batch):
            labels[at, : len(row["question"])] = -100
            labels[at, len(row["question"]) + len(row["answer"]) + 1 :] = -100
        optimizer.zero_grad()
        model(**inputs, labels=labels).loss.backward()
        optimizer.step()
    model.save_pretrained(folder)


def train(sampler: str, seed: int, model: Path, scratch: Path, steps: int) -> Outcome:
    training, held_out = sums(seed)
    run = covey.train(
        model=str(model),
        tasks=training,
        validation=held_out,
        reward=right,
        algorithm="grpo",
        data={"train_batch_size": TASKS, "sampler": sampler, **SAMPLERS[sampler]},
        rollout={"group_size": ATTEMPTS, "max_tokens": 5},
        learner={"lr": 3e-4},
        loop={"total_steps": steps, "save_final": False, "threads": 1},
        eval={"modes": ["sampled"], "n": 4, "every": steps // 10},
        logging={"to": [], "output_dir": str(scratch), "episodes_per_step": 0},
        resume="disable",
        seed=seed,
    )
    (_, first), *others = run.evaluations
    found = [metrics["eval/accuracy"] for _, metrics in others]
    flat = mean(metrics["groups/flat"] for metrics in run.metrics)
    return Outcome(sampler, seed, first["eval/accuracy"], mean(found), found[-1], flat)


def train_all(seeds: Sequence[int], steps: int, pretraining: int) -> list[Outcome]:
    outcomes = []
    for seed in seeds:
        with tempfile.TemporaryDirectory() as scratch:
            model = make_model(Path(scratch, "model"), SYMBOLS, seed=seed, initializer_range=0.1, width=64)
            pretrain(model, sums(seed)[0], seed, pretraining)
            for sampler in SAMPLERS:
                done = train(sampler, seed, model, Path(scratch, "runs"), steps)
                outcomes.append(done)
                print(f"seed {seed}  {done}", flush=True)
    return outcomes


def interval(values: Sequence[float]) -> str:
    """Mean and 95 % interval over seeds, by Student's t."""
    if len(values) < 2:
        return f"{values[0]:+.3f}"
    return f"{mean(values):+.3f} ± {T_975[len(values)] * stdev(values) / math.sqrt(len(values)):.3f}"


def report(outcomes: Sequence[Outcome]) -> str:
    by_sampler = {name: [o for o in outcomes if o.sampler == name] for name in SAMPLERS}
    uniform = by_sampler["uniform"]
    rows = [
        [
            f"`{name}`",
            f"{mean(o.average for o in found):.3f}",
            f"{mean(o.after for o in found):.3f}",
            interval([o.average - u.average for o, u in zip(found, uniform, strict=True)]) if name != "uniform" else "",
            interval([o.after - u.after for o, u in zip(found, uniform, strict=True)]) if name != "uniform" else "",
            f"{mean(o.flat for o in found):.2f}",
        ]
        for name, found in by_sampler.items()
    ]
    header = ["sampler", "average over the run", "after it"]
    header += ["average − uniform", "after − uniform", "zero-variance groups"]
    before = mean(o.before for o in uniform)
    seeds = ", ".join(str(o.seed) for o in uniform)
    return f"{table(header, rows)}\n\nBefore training: {before:.3f}. Seeds {seeds}; ± is the 95 % interval over seeds."


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--steps", type=int, default=STEPS)
    parser.add_argument("--pretraining", type=int, default=PRETRAINING)
    parser.add_argument("--write", action="store_true", help="put the table into docs/curriculum.md")
    options = parser.parse_args()
    start = time.perf_counter()
    text = report(train_all(options.seeds, options.steps, options.pretraining))
    text += f"\nRun time: {(time.perf_counter() - start) / 60:.0f} minutes on one core."
    print(f"\n{text}")
    if options.write:
        write_section("curriculum", text, PAGE)


if __name__ == "__main__":
    main()
