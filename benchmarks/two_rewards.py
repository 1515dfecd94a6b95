"""Two conflicting rewards: which algorithm keeps the lower one from collapsing?

    .venv/bin/python benchmarks/two_rewards.py [--seeds 0 1 ...] [--write]

A tiny random model has to list eight letters. `recall` is the share of the list that it names, `brevity` is
1 − letters/8. A right letter adds as much recall as it costs brevity, so on the Pareto front both sum to 1, and the sum
does not distinguish four right letters from none. GRPO on the sum, GDPO and DGDO train from the same model on the same
questions; the measure is the lower of the two rewards on held-out questions.

A second table shows the limit of this effect: if letters cost half, the sum itself favours recall. All settings were
chosen on seeds 100–104; the seed covers the model, the order of the questions and the sampling. `--write` updates the
tables of docs/experiments.md. About six minutes on one core.
"""

from __future__ import annotations

import argparse
import json
import math
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import mean, stdev
from typing import Any

from tiny import make_model, table, write_section

import covey

LETTERS = "abcdefghijklmnop"
LISTS = {"a": LETTERS[:8], "b": LETTERS[8:]}  # a question's first letter names the list, the second has no meaning
HELD_OUT = "mnop"  # second letters that are never trained on
MOST = 8  # letters of an answer
STEPS = 200
ANSWERS = 64  # to each held-out question, after training
ALGORITHMS: dict[str, dict[str, Any]] = {
    "grpo": {},
    "gdpo": {},
    "dgdo": {"warmup_steps": STEPS // 10, "beta_warmup_steps": STEPS // 5},  # its defaults are for longer runs
}
PRICE = 1 / 8  # cost of a letter in brevity, equal to the recall of a right one
HALF_PRICE = 1 / 16


@dataclass(frozen=True)
class Outcome:
    algorithm: str
    seed: int
    before: tuple[float, float]  # recall and brevity of the random model
    recall: float
    brevity: float
    weights: tuple[float, ...]  # DGDO's weight of recall in every step after its warm-up

    @property
    def worst(self) -> float:
        return min(self.recall, self.brevity)


@covey.reward
def recall(final_answer: str, answer: str) -> float:
    return len(set(final_answer) & set(answer)) / len(answer)


def brevity(price: float) -> Callable[..., float]:
    @covey.reward(name="brevity")
    def score(final_answer: str) -> float:
        return 1 - price * len(final_answer)

    return score


def questions() -> tuple[list[dict[str, str]], list[dict[str, str]]]:
    """Training questions and held-out questions."""
    rows = [{"question": name + second, "answer": letters} for name, letters in LISTS.items() for second in LETTERS]
    return (
        [row for row in rows if row["question"][1] not in HELD_OUT],
        [row for row in rows if row["question"][1] in HELD_OUT],
    )


def train(algorithm: str, seed: int, price: float, steps: int = STEPS) -> Outcome:
    training, held_out = questions()
    with tempfile.TemporaryDirectory() as scratch:
        run = covey.train(
            model=str(make_model(Path(scratch, "model"), LETTERS, seed=seed, initializer_range=0.3)),
            tasks=training,
            validation=held_out,
            reward=[recall, brevity(price)],
            algorithm=algorithm,
            data={"train_batch_size": 8},
            rollout={"group_size": 8, "max_tokens": MOST},
            learner={"lr": 1e-3},
            loop={"total_steps": steps, "save_final": False, "threads": 1},
            eval={"modes": ["sampled"], "n": ANSWERS},
            logging={"to": [], "output_dir": f"{scratch}/runs", "episodes_per_step": 0},
            resume="disable",
            seed=seed,
            **{f"algorithm.{key}": value for key, value in ALGORITHMS[algorithm].items()},
        )
        records = [json.loads(line)["metrics"] for line in (run.path / "metrics.jsonl").read_text().splitlines()]
    (_, first), (_, last) = run.evaluations
    weights = tuple(r["dgdo/recall/weight"] for r in records if r.get("dgdo/in_warmup") == 0)
    before = (first["eval/sampled/recall"], first["eval/sampled/brevity"])
    return Outcome(algorithm, seed, before, last["eval/sampled/recall"], last["eval/sampled/brevity"], weights)


def sign_test(differences: Sequence[float]) -> float:
    """Two-sided p-value of the sign test; ties are dropped."""
    above, below = sum(d > 0 for d in differences), sum(d < 0 for d in differences)
    n, most = above + below, max(above, below)
    return min(1.0, 2 * sum(math.comb(n, k) for k in range(most, n + 1)) * 0.5**n)


def comparison(outcomes: Sequence[Outcome], better: str, other: str) -> list[str]:
    """A paired comparison of the lower reward of two algorithms, over seeds."""
    worst = {(o.algorithm, o.seed): o.worst for o in outcomes}
    seeds = sorted({o.seed for o in outcomes})
    differences = [worst[better, seed] - worst[other, seed] for seed in seeds]
    error = f"{stdev(differences) / math.sqrt(len(seeds)):.3f}" if len(seeds) > 1 else "–"
    ahead = f"{sum(d > 0 for d in differences)} of {len(seeds)}"
    pair = f"{better.upper()} − {other.upper()}"
    return [pair, f"{mean(differences):+.3f}", error, ahead, f"{sign_test(differences):.3g}"]


def report(outcomes: Sequence[Outcome]) -> str:
    """Every seed, the means, and the paired comparisons."""
    by_seed: dict[int, list[Outcome]] = {}
    for outcome in outcomes:
        by_seed.setdefault(outcome.seed, []).append(outcome)
    rows = []
    for seed, found in by_seed.items():
        cells = [f"{o.recall:.3f} / {o.brevity:.3f}" for o in found]
        rows.append([str(seed), "{:.3f} / {:.3f}".format(*found[0].before), *cells, *(f"{o.worst:.3f}" for o in found)])
    columns = [[o for o in outcomes if o.algorithm == name] for name in ALGORITHMS]
    before = [mean(o.before[i] for o in columns[0]) for i in (0, 1)]
    means = [f"{mean(o.recall for o in c):.3f} / {mean(o.brevity for o in c):.3f}" for c in columns]
    rows.append(
        ["mean", "{:.3f} / {:.3f}".format(*before), *means, *(f"{mean(o.worst for o in c):.3f}" for c in columns)]
    )
    names = [name.upper() for name in ALGORITHMS]
    header = ["seed", "untrained: recall / brevity", *(f"{n}: recall / brevity" for n in names)]
    pairs = [("gdpo", "grpo"), ("dgdo", "grpo"), ("dgdo", "gdpo")]
    sums = ", ".join(
        f"{name.upper()} {mean(o.recall + o.brevity for o in c):.3f}"
        for name, c in zip(ALGORITHMS, columns, strict=True)
    )
    weights = [w for o in outcomes for w in o.weights]
    return "\n\n".join(
        [
            table([*header, *(f"{n}: worse" for n in names)], rows),
            table(
                ["worse reward, paired by seed", "mean difference", "standard error", "seeds ahead", "sign test p"],
                [comparison(outcomes, *pair) for pair in pairs],
            ),
            f"Mean sum of the two: {sums}.\n"
            f"DGDO's weight of recall, after its warm-up, moved between {min(weights):.2f} and {max(weights):.2f}.",
        ]
    )


def train_all(seeds: Sequence[int], price: float) -> list[Outcome]:
    outcomes = []
    for seed in seeds:
        for algorithm in ALGORITHMS:
            outcomes.append(train(algorithm, seed, price))
            done = outcomes[-1]
            print(f"seed {seed}  {algorithm}  recall {done.recall:.3f}  brevity {done.brevity:.3f}", flush=True)
    return outcomes


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, nargs="+", default=list(range(10)))
    parser.add_argument("--write", action="store_true", help="put the tables into docs/experiments.md")
    options = parser.parse_args()
    start = time.perf_counter()
    full = report(train_all(options.seeds, PRICE))
    half = report(train_all(options.seeds[:5], HALF_PRICE))
    minutes = (time.perf_counter() - start) / 60
    text = (
        f"**A letter costs what a right one pays (1/8).**\n\n{full}\n\n"
        f"**A letter costs half of that (1/16); the first five seeds.**\n\n{half}\n\n"
        f"Run time: {minutes:.0f} minutes on one core."
    )
    print(f"\n{text}")
    if options.write:
        write_section("two_rewards", text)


if __name__ == "__main__":
    main()
