"""Which anchor and which β suit GVPO, with short and with long answers? Against GRPO, at equal samples.

    .venv/bin/python benchmarks/gvpo_anchor.py [--seeds 0 1 ...] [--outcomes FILE] [--write]

A tiny model counts modulo ten: the question is a step and a first digit, the answer adds the step again and again, a
digit per token, until the token limit. Every digit can be written with one of three symbols, and the model is free to
choose: such freedom is most of the entropy of a real answer, and a change of it costs nats that no reward pays for. The
reward is 1 if no digit is wrong, else 0, whichever symbols are used.

    short    6 tokens
    long     100 tokens

The model is pretrained on answers with slips, so that it knows the task and samples mistakes: a slip writes a random
digit, from which the counting goes on. Slips are chosen so that the first accuracy is about the same for both lengths.
Then each arm trains from the same weights, on the same questions and with the same number of answers. The measure is
the share of right answers among those that were sampled for training: on average over the run, and in its last ten
steps. There are thirty questions, all trained on.

All settings were fixed on seed 100; a seed covers the model, its pretraining, the order of the questions and the
sampling. `--outcomes` keeps what is done in a file, from which the next call continues. `--write` updates the tables of
docs/algorithms/gvpo.md.
"""

from __future__ import annotations

import argparse
import json
import math
import random
import tempfile
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import mean, stdev
from typing import Any

import torch
from tiny import make_model, table, write_section
from transformers import AutoModelForCausalLM, AutoTokenizer

import covey
from covey.types import Episode

PAGE = Path(__file__).parent.parent / "docs" / "algorithms" / "gvpo.md"
WRITTEN = ("0123456789", "abcdefghij", "ABCDEFGHIJ")  # the symbols of each digit
STRIDES = (1, 2, 3)
VALUE = {symbol: value for symbols in WRITTEN for value, symbol in enumerate(symbols)}
STEPS, TASKS, ATTEMPTS = 40, 8, 8
T_975 = {2: 12.71, 3: 4.303, 4: 3.182, 5: 2.776, 6: 2.571, 7: 2.447, 8: 2.365, 9: 2.306, 10: 2.262}  # by seeds


@dataclass(frozen=True)
class Length:
    tokens: int
    slips: float  # share of slips in pretraining
    pretraining: int  # steps
    batch: int  # answers of a step of pretraining
    lr: float


LENGTHS = {"short": Length(6, 0.2, 400, 64, 2e-3), "long": Length(100, 0.0125, 400, 8, 2e-3)}


@dataclass(frozen=True)
class Arm:
    name: str
    settings: dict[str, Any]
    mini_batches: int = 1


def gvpo(name: str, mini_batches: int = 1, **settings: Any) -> Arm:
    return Arm(name, {"algorithm": "gvpo", **{f"algorithm.{k}": v for k, v in settings.items()}}, mini_batches)


ARMS = (
    Arm("grpo", {"algorithm": "grpo"}),
    *(gvpo(f"initial, β {beta}", reference="initial", beta=beta) for beta in (0.1, 0.03, 0.01)),
    gvpo("old, β 0.1", reference="old", beta=0.1),
    gvpo("old, β 0.1, 4 mini-batches", 4, reference="old", beta=0.1),
    *(gvpo(f"moving, {n}, β 0.1", reference="moving", reference_every=n, beta=0.1) for n in (5, 20)),
)


@dataclass(frozen=True)
class Outcome:
    length: str
    arm: str
    seed: int
    before: float
    average: float  # over all steps
    after: float  # over the last ten
    entropy: float  # per token, at the end
    nats: float  # ρ of an answer at the end, to the anchor
    pull: float  # of the last ten steps, and the spread of the rewards
    spread: float
    seconds: float


@covey.reward
def right(episodes: Sequence[Episode], answer: str) -> list[float]:
    """1 for answers without a wrong digit. A group is scored in one call, which is quicker."""
    return [float("".join(str(VALUE[symbol]) for symbol in episode.final_answer) == answer) for episode in episodes]


def count(step: int, first: int, tokens: int, slips: float = 0.0, drawn: random.Random | None = None) -> list[int]:
    values, value = [], first
    for _ in range(tokens):
        value = (value + step) % 10
        if drawn is not None and drawn.random() < slips:
            value = drawn.randrange(10)
        values.append(value)
    return values


def questions(tokens: int) -> list[dict[str, str]]:
    pairs = [(step, first) for step in STRIDES for first in range(10)]
    return [{"question": f"{s}{f}", "answer": "".join(map(str, count(s, f, tokens)))} for s, f in pairs]


def pretrain(folder: Path, length: Length, seed: int, steps: int) -> None:
    """Cross-entropy on answers with slips, each digit written with a random one of its symbols."""
    tokenizer, model = AutoTokenizer.from_pretrained(folder), AutoModelForCausalLM.from_pretrained(folder)
    ids, drawn = tokenizer.get_vocab(), random.Random(seed + 1)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, steps)
    for _ in range(steps):
        rows = []
        for _ in range(length.batch):
            pair = drawn.choice(STRIDES), drawn.randrange(10)
            values = count(*pair, length.tokens, length.slips, drawn)
            symbols = [*map(str, pair), *(WRITTEN[drawn.randrange(3)][value] for value in values)]
            rows.append([ids[symbol] for symbol in symbols])
        inputs = torch.tensor(rows)
        labels = inputs.clone()
        labels[:, :2] = -100
        optimizer.zero_grad()
        model(input_ids=inputs, labels=labels).loss.backward()
        optimizer.step()
        schedule.step()
    model.save_pretrained(folder)


def train(name: str, arm: Arm, seed: int, model: Path, scratch: Path, steps: int) -> Outcome:
    length = LENGTHS[name]
    start = time.perf_counter()
    run = covey.train(
        model=str(model),
        tasks=questions(length.tokens),
        reward=right,
        data={"train_batch_size": TASKS},
        rollout={"group_size": ATTEMPTS, "max_tokens": length.tokens},
        learner={"lr": length.lr, "mini_batch_size": TASKS // arm.mini_batches},
        loop={"total_steps": steps, "save_final": False, "threads": 1},
        logging={"to": [], "output_dir": str(scratch), "episodes_per_step": 0},
        resume="disable",
        seed=seed,
        **arm.settings,
    )
    rewards = [metrics["reward/mean"] for metrics in run.metrics]
    last = run.metrics[-10:]

    def end(metric: str) -> float:
        return mean(metrics.get(metric, math.nan) for metrics in last)

    return Outcome(
        *(name, arm.name, seed, rewards[0], mean(rewards), mean(rewards[-10:]), end("policy/entropy")),
        *(end("gvpo/mean_log_ratio"), end("gvpo/pull"), end("gvpo/reward_spread"), time.perf_counter() - start),
    )


def train_all(
    seeds: Sequence[int],
    lengths: Sequence[str],
    arms: Sequence[Arm],
    steps: int,
    pretraining: int | None,
    file: Path | None,
) -> list[Outcome]:
    lines = file.read_text().splitlines() if file is not None and file.exists() else []
    outcomes = [Outcome(**json.loads(line)) for line in lines]
    for seed in seeds:
        for name in lengths:
            length, done = LENGTHS[name], {o.arm for o in outcomes if (o.seed, o.length) == (seed, name)}
            if done >= {arm.name for arm in arms}:
                continue
            with tempfile.TemporaryDirectory() as scratch:
                shape: dict[str, Any] = {"initializer_range": 0.1, "width": 64, "context": length.tokens + 2}
                model = make_model(Path(scratch, "model"), "".join(WRITTEN), seed=seed, **shape)
                pretrain(model, length, seed, length.pretraining if pretraining is None else pretraining)
                for arm in arms:
                    if arm.name not in done:
                        outcomes.append(train(name, arm, seed, model, Path(scratch, "runs"), steps))
                        print(f"seed {seed}  {outcomes[-1]}", flush=True)
                        if file is not None:
                            with file.open("a") as out:
                                out.write(json.dumps(asdict(outcomes[-1])) + "\n")
    return outcomes


def interval(values: Sequence[float]) -> str:
    """Mean and 95 % interval over seeds, by Student's t."""
    if len(values) < 2:
        return f"{values[0]:+.3f}"
    return f"{mean(values):+.3f} ± {T_975[len(values)] * stdev(values) / math.sqrt(len(values)):.3f}"


def report(outcomes: Sequence[Outcome], name: str) -> str:
    found = [o for o in outcomes if o.length == name]
    names = list(dict.fromkeys(o.arm for o in found))
    by_arm = {arm: [o for o in found if o.arm == arm] for arm in names}
    first = by_arm[names[0]]
    rows = []
    for arm, those in by_arm.items():
        pairs = list(zip(those, first, strict=True))
        differences = (
            [interval([getattr(o, what) - getattr(f, what) for o, f in pairs]) for what in ("average", "after")]
            if arm != names[0]
            else ["", ""]
        )
        means = {what: mean(getattr(o, what) for o in those) for what in ("average", "after", "entropy", "nats")}
        pull = ["", ""]
        if not math.isnan(means["nats"]):
            pull = [f"{means['nats']:.1f}", f"{mean(o.pull for o in those):.2f} / {mean(o.spread for o in those):.2f}"]
        rows.append([arm, f"{means['average']:.3f}", f"{means['after']:.3f}", *differences])
        rows[-1] += [f"{means['entropy']:.2f}", *pull]
    header = ["", "average over the run", "after it", f"average − {names[0]}", f"after − {names[0]}"]
    header += ["entropy", "nats to the anchor", "pull / spread"]
    return f"{table(header, rows)}\n\nBefore training: {mean(o.before for o in first):.3f}."


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, nargs="+", default=list(range(10)))
    parser.add_argument("--lengths", nargs="+", choices=list(LENGTHS), default=list(LENGTHS))
    parser.add_argument("--arms", nargs="+", choices=[arm.name for arm in ARMS], help="only these")
    parser.add_argument("--steps", type=int, default=STEPS)
    parser.add_argument("--pretraining", type=int)
    parser.add_argument("--outcomes", type=Path, help="keep outcomes in this file, and skip those that it has")
    parser.add_argument("--write", action="store_true", help="put the tables into docs/algorithms/gvpo.md")
    options = parser.parse_args()
    arms = [arm for arm in ARMS if not options.arms or arm.name in options.arms]
    found = train_all(options.seeds, options.lengths, arms, options.steps, options.pretraining, options.outcomes)
    names = [arm.name for arm in arms]
    outcomes = sorted((o for o in found if o.arm in names), key=lambda o: (names.index(o.arm), o.seed))
    tokens = {name: LENGTHS[name].tokens for name in options.lengths}
    text = "\n\n".join(f"**Answers of {tokens[name]} tokens.**\n\n{report(outcomes, name)}" for name in tokens)
    seeds, minutes = ", ".join(map(str, options.seeds)), sum(o.seconds for o in outcomes) / 60
    text += f"\n\nSeeds {seeds}; ± is the 95 % interval over seeds. Run time: {minutes:.0f} minutes on one core."
    print(f"\n{text}")
    if options.write:
        write_section("gvpo_anchor", text, PAGE)


if __name__ == "__main__":
    main()
