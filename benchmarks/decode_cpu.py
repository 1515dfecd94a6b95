"""Decoding on a CPU with the built-in model, with the weights as they are and repacked for the matrix product.

.venv/bin/python benchmarks/decode_cpu.py [--threads 2] [--rows 64,16]

Answers of 48 tokens to 8 questions. The two variants alternate. Seconds are wall time, or CPU time with
one thread, which does not depend on the load of the machine.
"""

from __future__ import annotations

import argparse
import asyncio
import statistics
import time
from typing import Any

import torch

from covey.config.schema import ModelConfig
from covey.models.loading import load_policy, open_source
from covey.rollout.embedded import EmbeddedEngine, cpu_batch
from covey.rollout.rendering import Renderer
from covey.types import Sampling

REPEATS, TOKENS, QUESTIONS = 5, 48, 8
WAYS = {"as they are": 10**9, "laid out": cpu_batch.MIN_STEPS}  # least number of steps for which weights are repacked


def decode(engine: EmbeddedEngine, prompts: list[tuple[int, ...]], rows: int, now: Any) -> tuple[float, float]:
    """Seconds per decoding step, and before the second token: prefill and repacking."""
    ticks: list[float] = []

    async def answers() -> None:
        start = now()
        asked = [
            asyncio.create_task(engine.generate(prompts[n % QUESTIONS], Sampling(max_tokens=TOKENS, seed=n)))
            for n in range(rows)
        ]
        while engine.generated_tokens < first + rows:
            await asyncio.sleep(0.001)
        ticks.extend((start, now()))
        await asyncio.gather(*asked)
        ticks.append(now())

    first = engine.generated_tokens
    asyncio.run(answers())
    asyncio.run(engine.publish(engine.model, version=0))
    start, begun, end = ticks
    return (end - begun) / (TOKENS - 1), begun - start


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--rows", default="64,16")
    asked = parser.parse_args()
    torch.set_num_threads(asked.threads)
    now = time.process_time if asked.threads == 1 else time.perf_counter
    config = ModelConfig(device="cpu")
    source = open_source(config)
    engine = EmbeddedEngine(load_policy(source, config), eos_ids=[], decode=source.tokenizer.decode)
    renderer = Renderer(source.tokenizer)
    prompts = [
        renderer.prompt([{"role": "user", "content": f"What is {13 * n + 5} + {7 * n}? Explain why."}])
        for n in range(QUESTIONS)
    ]
    print(f"torch {torch.__version__}, {asked.threads} threads, {TOKENS} tokens, median of {REPEATS}")
    for rows in map(int, asked.rows.split(",")):
        steps: dict[str, list[float]] = {way: [] for way in WAYS}
        starts: dict[str, list[float]] = {way: [] for way in WAYS}
        for _ in range(REPEATS):
            for way, worth in WAYS.items():
                cpu_batch.MIN_STEPS = worth
                step, start = decode(engine, prompts, rows, now)
                steps[way].append(step)
                starts[way].append(start)
        for way in WAYS:
            step = statistics.median(steps[way])
            print(
                f"{rows:4} rows  {way:12} {step * 1e3:7.1f} ms a step  {rows / step:7.0f} tokens/s  "
                f"{statistics.median(starts[way]):6.2f} s before"
            )
        plain, packed = WAYS
        ratios = sorted(b / a for a, b in zip(steps[plain], steps[packed], strict=True))
        print(f"{rows:4} rows  ratio {statistics.median(ratios):.2f}  ({ratios[0]:.2f} to {ratios[-1]:.2f})")
    engine.close()


if __name__ == "__main__":
    main()
