"""The reward math_verify beside math-verify alone, and answers that are meant to hurt it."""

from __future__ import annotations

import asyncio
import random
import resource
import statistics
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from covey.rewards.math import verify_process
from covey.rewards.math.rewards import math_verify
from kit.scoring_checks import lines

CHUNK = 500  # answers that one is given before it is the other's turn
DEADLINE = 1.0  # seconds for one hostile answer


def pairs(data: Path, count: int) -> list[tuple[str, str]]:
    """Distinct (gold, reply): half of the replies hold the right answer, half that of another problem."""
    names = ("math_train/math_train", "math_eval/math500", "math_train/deepscaler_sub_1209", "math_train/dapo_math_17k")
    golds = [
        str(row["answer"]) for name in names for row in lines(data / f"{name}.jsonl") if str(row["answer"]).strip()
    ]
    draw = random.Random(0)
    golds = draw.sample(golds, count)
    others = [*golds[1:], golds[0]]
    said = [gold if i % 2 else other for i, (gold, other) in enumerate(zip(golds, others, strict=True))]
    return [
        (gold, f"In step {i} we add both sides. Therefore the answer is $\\boxed{{{text}}}$.")
        for i, (gold, text) in enumerate(zip(golds, said, strict=True))
    ]


def speed(todo: Sequence[tuple[str, str]], repeats: int) -> str:
    """In turns, so that a busy machine slows both. Nothing is remembered from one repeat to the next."""
    ours, theirs, agree = [], [], 0
    ask(todo[:50])  # starts the process, and imports the package here
    alone(todo[:50])
    for repeat in range(repeats):
        verify_process._verify.cache_clear()
        mine = other = 0.0
        for start in range(0, len(todo), CHUNK):
            part = todo[start : start + CHUNK]
            verdicts, seconds = ask(part)
            mine += seconds
            found, seconds = alone(part)
            other += seconds
            agree += sum(a == b for a, b in zip(verdicts, found, strict=True)) if repeat == 0 else 0
            print(f"\rrepeat {repeat + 1}: {start + len(part)} of {len(todo)}", end="", file=sys.stderr)
        ours.append(1000 * mine / len(todo))
        theirs.append(1000 * other / len(todo))
    print(file=sys.stderr)
    ratios = [a / b for a, b in zip(ours, theirs, strict=True)]
    rows = {"reward `math_verify`": ours, "math-verify alone, in this process": theirs, "ratio": ratios}
    table = [
        f"| {len(todo):,} answers, one after another | ms an answer | repeats |",
        "|---|---:|---|",
        *(
            f"| {name} | {statistics.median(found):.2f} | {', '.join(f'{x:.2f}' for x in found)} |"
            for name, found in rows.items()
        ),
        "",
        f"The two agree on {agree:,} of {len(todo):,} verdicts.",
    ]
    return "\n".join(table)


def ask(todo: Sequence[tuple[str, str]]) -> tuple[list[bool], float]:
    async def one_by_one() -> list[bool]:
        return [(await math_verify(gold, reply))["reward"] == 1 for gold, reply in todo]

    start = time.perf_counter()
    return asyncio.run(one_by_one()), time.perf_counter() - start


def alone(todo: Sequence[tuple[str, str]]) -> tuple[list[bool], float]:
    """As its documentation shows it, with its own time limits."""
    import logging

    import math_verify

    logging.disable(logging.CRITICAL)
    start = time.perf_counter()
    found = [
        bool(math_verify.verify(math_verify.parse(f"\\boxed{{{gold}}}"), math_verify.parse(reply)))
        for gold, reply in todo
    ]
    return found, time.perf_counter() - start


def adversarial() -> list[tuple[str, str, str]]:
    """1,000 of (kind, gold, reply): forty kinds of them in 25 sizes."""
    made = []
    for size in range(25):
        n = 10 * 2 ** (size % 12) + size
        made += [(kind, gold, reply) for gold in ("\\frac{3}{7}", "(1,\\sin x)") for kind, reply in _hostile(n, size)]
    assert len(made) == 1000, len(made)
    return made


def _hostile(n: int, i: int) -> list[tuple[str, str]]:
    boxed = {
        "nesting": "(" * n + "1" + ")" * n,
        "fractions": "\\frac{1}{" * n + "2" + "}" * n,
        "roots": "\\sqrt{" * n + "2" + "}" * n,
        "towers": "9^{" * (i % 6 + 3) + "9" + "}" * (i % 6 + 3),
        "exponents": f"10^{{{10 ** (i % 12 + 3)}}}",
        "factorials": f"{10 ** (i % 8 + 2)}!" + "!" * (i % 3),
        "digits": "9" * n + f"\\sin {i}",
        "powers": f"(x+y+z+w)^{{{n}}}",
        "sums": "+".join(f"\\sin(x_{{{k}}})" for k in range(n)),
        "integrals": f"\\int_0^{{{n}}} e^{{x^{{{i + 2}}}}} \\sin(x^{{{n}}}) dx",
        "big sums": f"\\sum_{{k=1}}^{{10^{{{i + 3}}}}} \\frac{{1}}{{k^{{{i + 2}}}}}",
        "equations": f"x^{{{n}}} + x^{{{n - 1}}} = {i}",
    }
    plain = {
        "open braces": f"\\boxed{{{'{' * n}{i}",
        "boxes": "\\boxed{" * n + str(i),
        "megabytes": f"{i} so " * (n * 25) + "the answer is 5",
        "a long number": "The answer is " + "7" * (n * 10) + f".{i}",
        "blanks": f"answer{' ' * n * 10}is{' ' * n * 10}{i}",
        "commas": f"\\boxed{{{','.join('1' * n)},{i}}}",
        "unicode": f"\\boxed{{{'∑∫√∞' * n}{i}}}",
        "surrogates": f"The answer is {chr(0x1D7D8 + i % 10) * n}٣\u202e\u0000",
    }
    return [*((kind, f"\\boxed{{{text}}}") for kind, text in boxed.items()), *plain.items()]


def safety(todo: Sequence[tuple[str, str, str]]) -> str:
    largest = len(todo) * 11 // 25
    asyncio.run(_hurt(todo[largest : largest + 40]))  # what is built once, and room for the longest
    before, start = resident(), time.perf_counter()
    slowest, late, right = asyncio.run(_hurt(todo))
    seconds, after = time.perf_counter() - start, resident()
    size = max(len(reply) for _, _, reply in todo)
    children = resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss / 1024
    table = [
        f"| {len(todo):,} answers meant to hurt, up to {size / 1e6:.1f} MB | |",
        "|---|---:|",
        f"| seconds for all, {DEADLINE:g} s allowed for each | {seconds:.0f} |",
        f"| the slowest | {slowest:.2f} s |",
        f"| not finished by math-verify in time: wrong, counted as `timeout` | {late} |",
        f"| called right | {right} |",
        f"| memory of this process before and after | {before:.0f} MB, {after:.0f} MB |",
        f"| largest process that math-verify ran in (limit 4 GB of addresses) | {children:.0f} MB |",
    ]
    return "\n".join(table)


async def _hurt(todo: Sequence[tuple[str, str, str]]) -> tuple[float, int, int]:
    slowest, late, right = 0.0, 0, 0
    for number, (kind, gold, reply) in enumerate(todo):
        start = time.perf_counter()
        found = await math_verify(gold, reply, deadline=DEADLINE)
        seconds = time.perf_counter() - start
        slowest, late, right = max(slowest, seconds), late + int(found["timeout"]), right + int(found["reward"])
        if number % 20 == 0:
            print(f"\rhostile: {number} of {len(todo)}, {late} late", end="", file=sys.stderr)
        if seconds > 3 * DEADLINE or found["reward"]:
            print(f"\n{kind}: {seconds:.1f} s, reward {found['reward']:g}, {reply[:60]!r}", file=sys.stderr)
    print(file=sys.stderr)
    return slowest, late, right


def resident() -> float:
    """Megabytes."""
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * resource.getpagesize() / 2**20
