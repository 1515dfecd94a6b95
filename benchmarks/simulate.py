"""Compares predicted and measured step times: small runs on a CPU, calibrated on one of them.

    .venv/bin/python benchmarks/simulate.py [--steps 8]

A small random model and an agent that writes two replies, with a wait between them like for a slow tool. The speeds of
the device are measured with one setting; settings with other group sizes, lengths, modes and staleness are predicted
and then run. The first setting is repeated before each of them, since the speed of the machine may change.
"""

from __future__ import annotations

import argparse
import json
import random
import subprocess
import sys
import tempfile
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from kit.command import run_covey
from tiny import table

LOW, HIGH = 1.0, 6.0  # seconds of the tool
AGENT = """
import asyncio, collections, zlib
attempts = collections.Counter()
async def agent(policy, task):
    attempts[task.id] += 1
    share = zlib.crc32(f"{task.id} {attempts[task.id]}".encode()) % 1000 / 1000
    reply = await policy.ask(task.messages)
    await asyncio.sleep(LOW + (HIGH - LOW) * share)
    first = {"role": "assistant", "content": reply.text}
    return (await policy.ask([*task.messages, first, {"role": "user", "content": "Are you sure?"}])).text
"""
SETTINGS = [
    *("data=sort", "algorithm=grpo", "agent=tool.py:agent", "learner.lr=1e-6", "logging.episodes_per_step=16"),
    *("eval.before=false", "eval.after=false", "loop.save_final=false", "resume=disable", "model=model"),
    "loop.threads=1",
]


@dataclass(frozen=True)
class Setting:
    groups: int
    attempts: int
    tokens: int
    staleness: int = 0

    @property
    def name(self) -> str:
        mode = f"async, staleness {self.staleness}" if self.staleness else "sync"
        return f"{self.groups} × {self.attempts}, {self.tokens} tokens a reply, {mode}"

    @property
    def first(self) -> int:
        """Steps at the start that are not counted."""
        return self.staleness + 1

    def words(self) -> list[str]:
        mode = ["mode=async", f"mode.max_staleness={self.staleness}"] if self.staleness else ["mode=sync"]
        sizes = [f"data.train_batch_size={self.groups}", f"rollout.group_size={self.attempts}"]
        return [*sizes, f"rollout.max_tokens={self.tokens}", *mode]


FIRST = Setting(4, 4, 32)
OTHERS = (
    Setting(4, 4, 32, staleness=1),
    Setting(4, 4, 32, staleness=3),
    Setting(4, 8, 32),
    Setting(4, 4, 64),
    Setting(4, 8, 64, staleness=2),
)


def make_model(folder: Path) -> None:
    """A random Llama of 3 million parameters with the built-in tokenizer, which hardly ever samples the end token."""
    import torch
    from transformers import AutoTokenizer, LlamaConfig, LlamaForCausalLM

    from covey.models.loading import locate

    tokenizer = AutoTokenizer.from_pretrained(locate("smollm2-135m").path)
    config = LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=64,
        intermediate_size=256,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=1024,
        tie_word_embeddings=True,
        eos_token_id=tokenizer.eos_token_id,
    )
    torch.manual_seed(0)
    LlamaForCausalLM(config).save_pretrained(folder)
    tokenizer.save_pretrained(folder)


def run(folder: Path, setting: Setting, steps: int, number: int) -> Path:
    """Run the setting and return the run's folder."""
    place = folder / "-".join(
        map(str, ("run", number, setting.groups, setting.attempts, setting.tokens, setting.staleness))
    )
    line = ["train", *SETTINGS, *setting.words()]
    line += [f"loop.total_steps={steps}", f"logging.output_dir={place}"]
    run_covey(line, cwd=folder, stdout=subprocess.DEVNULL)
    (found,) = place.glob("*/*")
    return found


def measured(path: Path, first: int) -> dict[str, float]:
    """Means over the steps, without the first ones, which warm up and fill the window."""
    records = [json.loads(line) for line in (path / "metrics.jsonl").read_text().splitlines()]
    steps = [record["metrics"] for record in records if record["kind"] == "step"][first:]
    return {
        "step": mean(step["timing/step"] for step in steps),
        "learning": mean(step["timing/update"] + step["timing/annotate"] for step in steps),
        "age": mean(step.get("policy/age", 0.0) for step in steps),
        "age_max": max(step.get("policy/age_max", 0.0) for step in steps),
    }


class Predictor:
    """Predicts like `covey simulate`, from the measurements of one run."""

    def __init__(self, first: Path, setting: Setting, model: Path) -> None:
        from transformers import AutoConfig

        from covey.simulate.hardware import Shape, assumed_speeds, device
        from covey.simulate.measured import run_episodes, run_speeds, run_steps, with_waits
        from covey.simulate.simulation import Workload

        draw = random.Random(0)
        seen = run_episodes(first, run_steps(first))
        seen = replace(seen, examples=seen.examples * 4)  # for more samples of the wait
        self.episodes = with_waits(seen, lambda: draw.uniform(LOW, HIGH))
        shape = Shape.from_config(AutoConfig.from_pretrained(model), "its config.json")
        base = assumed_speeds(shape, device("cpu"), seen.prompt + seen.length / 2)
        work = Workload(setting.groups, setting.attempts, self.episodes)
        self.first = setting
        self.speeds, self.figures = run_speeds(first, work, base, updates=1, epochs=1, lead=0, capacity=256)

    def predict(self, setting: Setting, steps: int) -> dict[str, float]:
        from covey.simulate.hardware import FORWARD_PASS
        from covey.simulate.simulation import Deployment, Workload, simulate

        speeds = self.speeds
        passes = 1 + FORWARD_PASS * (setting.staleness > 0)  # samples of older policies need another forward pass
        longer = setting.tokens / self.first.tokens  # every answer has full length
        turns = tuple(
            tuple(replace(turn, tokens=round(turn.tokens * longer)) for turn in episode)
            for episode in self.episodes.examples
        )
        work = Workload(setting.groups, setting.attempts, replace(self.episodes, examples=turns))
        assert speeds.publish is not None

        def learn(tokens: float, longest: float) -> float:
            return speeds.learn_fixed + passes * speeds.learn_token * tokens

        place = Deployment(1, True, setting.staleness, speeds.decode, speeds.prefill, 256, learn, speeds.publish)
        first = setting.first
        runs = [simulate(work, place, steps, seed=seed, open_ended=False) for seed in range(8)]
        return {
            "step": mean((found[-1].ended - found[first - 1].ended) / (steps - first) for found in runs),
            "learning": mean(step.learning for found in runs for step in found[first:]),
            "age": mean(step.age for found in runs for step in found[first:]),
            "age_max": max(step.age_max for found in runs for step in found[first:]),
        }


def mean(values: Any) -> float:
    found = list(values)
    return sum(found) / len(found)


HEADER = (
    "",
    "setting",
    "measured s/step",
    "predicted",
    "error",
    "learning s",
    "predicted",
    "age",
    "predicted",
    "oldest",
)


def cells(kind: str, name: str, real: dict[str, float], predicted: dict[str, float]) -> list[str]:
    return [
        *(
            kind,
            name,
            f"{real['step']:.2f}",
            f"{predicted['step']:.2f}",
            f"{100 * (predicted['step'] / real['step'] - 1):+.0f} %",
        ),
        *(f"{real['learning']:.2f}", f"{predicted['learning']:.2f}", f"{real['age']:.2f}", f"{predicted['age']:.2f}"),
        f"{real['age_max']:.0f} / {predicted['age_max']:.0f}",
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=8)
    steps = parser.parse_args().steps
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        (folder / "tool.py").write_text(f"LOW, HIGH = {LOW}, {HIGH}\n{AGENT}")
        make_model(folder / "model")
        rows = []
        for number, setting in enumerate(OTHERS):
            first = run(folder, FIRST, steps, number)
            predictor = Predictor(first, FIRST, folder / "model")
            rows.append(
                cells("calibrated on", FIRST.name, measured(first, FIRST.first), predictor.predict(FIRST, steps))
            )
            predicted = predictor.predict(setting, steps)  # before the run
            real = measured(run(folder, setting, steps, number), setting.first)
            rows.append(cells("predicted", setting.name, real, predicted))
            print(*(" | ".join(row) for row in rows[-2:]), sep="\n", file=sys.stderr, flush=True)
    print(table(HEADER, rows))


if __name__ == "__main__":
    main()
