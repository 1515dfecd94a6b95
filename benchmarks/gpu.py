"""Runs all GPU benchmarks, each part in its own process with a time limit, and reports failures.

    python benchmarks/gpu.py [--parts step,decode,memory,scaling] [--out DIR] [--limit 480]

Parts are step, decode, memory, scaling, regime, lora, modes and vision. If a part fails or exceeds its time limit, the
next ones still run, and the exit code is 1. Arguments after `--` are passed to every part.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from kit.child import run_limited
from kit.report import RESULTS, read
from tiny import table

HERE = Path(__file__).parent
GRACE = 30  # seconds to report what was measured within the limit
PARTS = ("step", "decode", "memory", "scaling", "regime", "lora", "modes", "vision")


def run_part(part: str, words: Sequence[str], out: Path, limit: float) -> tuple[str, float]:
    """How the part ended, and its seconds. Its output is printed."""
    print(f"== {part}", flush=True)
    start = time.perf_counter()
    command = [sys.executable, str(HERE / f"{part}.py"), "--out", str(out), "--limit", str(limit), *words]
    code = run_limited(command, limit + GRACE)
    seconds = time.perf_counter() - start
    ended = "ok" if code == 0 else f"not done after {limit:.0f} s" if code is None else f"exit code {code}"
    return ended, seconds


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--parts", default="step,decode,memory,scaling", help=f"of {', '.join(PARTS)}")
    parser.add_argument("--out", type=Path, default=RESULTS)
    parser.add_argument("--limit", type=float, default=480, help="seconds of a part")
    parser.add_argument("words", nargs="*", help="for every part; default --device cuda")
    chosen = parser.parse_args(argv)
    parts = chosen.parts.split(",")
    if unknown := [part for part in parts if part not in PARTS]:
        parser.error(f"unknown part {unknown[0]}; there are {', '.join(PARTS)}")
    began = time.time()
    words = chosen.words or ["--device", "cuda"]
    ends = [(part, *run_part(part, words, chosen.out, chosen.limit)) for part in parts]
    for path in sorted(chosen.out.glob("*.json")):
        if path.stat().st_mtime >= began:
            print(f"\n{path.stem}\n{table(read(path).header, read(path).cells)}")
    print("\n" + table(("part", "ended", "s"), [(part, end, f"{seconds:.0f}") for part, end, seconds in ends]))
    return 0 if all(end == "ok" for _, end, _ in ends) else 1


if __name__ == "__main__":
    raise SystemExit(main())
