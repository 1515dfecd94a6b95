"""Synchronous and asynchronous training with slow tools: episodes per minute for the same work.

    .venv/bin/python benchmarks/async_tools.py [--steps 6] [--staleness 1 2 3]

SmolLM2-135M on a CPU. The agent writes two replies and waits 1 to 20 seconds between them, like for a slow tool. The
wait depends only on task and attempt, so it is the same in every mode. Each mode runs in its own process. Waiting does
not depend on the speed of the machine, so there is little noise.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import tempfile
import time
from pathlib import Path
from typing import Any

from kit.command import run_covey

LOW, HIGH = 1.0, 20.0  # seconds of the tool
AGENT = """
import asyncio, collections, zlib
attempts = collections.Counter()
async def agent(policy, task):
    attempts[task.id] += 1
    wait = LOW + (HIGH - LOW) * (zlib.crc32(f"{task.id} {attempts[task.id]}".encode()) % 1000) / 1000
    reply = await policy.ask(task.messages)
    await asyncio.sleep(wait)
    said = {"role": "assistant", "content": reply.text}
    return (await policy.ask([*task.messages, said, {"role": "user", "content": "Are you sure? Say it again."}])).text
"""
SETTINGS = [
    *("data=sort", "data.train_batch_size=4", "rollout.group_size=4", "rollout.max_tokens=16", "algorithm=grpo"),
    *("agent=tool.py:agent", "eval.before=false", "eval.after=false", "loop.save_final=false", "learner.lr=1e-6"),
]


def measure(mode: list[str], steps: int) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as folder:
        Path(folder, "tool.py").write_text(f"LOW, HIGH = {LOW}, {HIGH}\n{AGENT}")
        line = ["train", *SETTINGS, *mode, f"loop.total_steps={steps}"]
        start = time.perf_counter()
        run_covey(line, cwd=folder, stdout=subprocess.DEVNULL)
        whole = time.perf_counter() - start
        (path,) = Path(folder).glob("outputs/*/*/metrics.jsonl")
        records = [json.loads(record) for record in path.read_text().splitlines()]
    found = [record["metrics"] for record in records if record["kind"] == "step"]
    seconds = sum(step["timing/step"] for step in found)
    return {
        "seconds": seconds,
        "with_start": whole,
        "episodes_per_minute": 60 * sum(step["episodes/total"] for step in found) / seconds,
        "age": sum(step.get("policy/age", 0.0) for step in found) / len(found),
        "age_max": max(step.get("policy/age_max", 0.0) for step in found),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=6)
    parser.add_argument("--staleness", type=int, nargs="+", default=[1, 2, 3])
    options = parser.parse_args()
    modes = {"sync": ["mode=sync"]}
    modes |= {f"async, staleness {n}": ["mode=async", f"mode.max_staleness={n}"] for n in options.staleness}
    print("| mode | s | episodes per minute | × sync | age of a token, mean | oldest |\n|---|---|---|---|---|---|")
    first = None
    for name, words in modes.items():
        found = measure(words, options.steps)
        first = first or found["episodes_per_minute"]
        print(
            f"| {name} | {found['seconds']:.0f} | {found['episodes_per_minute']:.1f} | "
            f"{found['episodes_per_minute'] / first:.2f} | {found['age']:.2f} | {found['age_max']:.0f} |",
            flush=True,
        )


if __name__ == "__main__":
    main()
