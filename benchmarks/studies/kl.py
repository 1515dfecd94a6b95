"""How far a run's policy moved from its start model: mean log π(token) − log π_start(token) over sampled tokens.

    python benchmarks/studies/kl.py RUN START_MODEL OUT.json

It reads the answers that the run recorded (episodes.jsonl), so all algorithms are measured alike and after training, at
no cost in their steps. It is the estimator k1, in nats per token; before the first update it is 0 up to rounding.
"""

from __future__ import annotations

import json
import sys
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import Any

MOST_STEPS = 100  # of a longer run, this many steps with equal distances


def rows_by_step(run: Path) -> dict[int, list[dict[str, Any]]]:
    from covey.telemetry import read_episodes

    found: dict[int, list[dict[str, Any]]] = defaultdict(list)
    for episode in read_episodes(run / "episodes.jsonl"):
        found[episode["step"]] += episode["rows"]
    steps = sorted(found)
    stride = -(-len(steps) // MOST_STEPS)
    return {step: found[step] for step in steps[::stride]}


def measure(run: Path, start: Path) -> dict[str, list[float]]:
    import torch
    from transformers import AutoModelForCausalLM

    device = "cuda" if torch.cuda.is_available() else "cpu"
    dtype = torch.bfloat16 if device == "cuda" else torch.float32
    model = AutoModelForCausalLM.from_pretrained(start, dtype=dtype).to(device).eval()
    steps, values = [], []
    for step, rows in rows_by_step(run).items():
        differences = [value for row in rows for value in _differences(model, row, device)]
        if differences:
            steps.append(float(step))
            values.append(sum(differences) / len(differences))
    return {"step": steps, "per_token": values}


def _differences(model: Any, row: dict[str, Any], device: str) -> Iterator[float]:
    import torch

    prompt, response = row["prompt_ids"], row["response_ids"]
    if not response:
        return
    ids = torch.tensor([prompt + response], device=device)
    with torch.no_grad():
        logits = model(ids[:, :-1], use_cache=False, logits_to_keep=len(response)).logits[0].float()
    target = ids[0, -len(response) :, None]
    start = (logits.gather(-1, target) - logits.logsumexp(-1, keepdim=True))[:, 0].tolist()
    for sampled, own, before in zip(row["mask"], row["logprobs"], start, strict=True):
        if sampled:
            yield own - before


if __name__ == "__main__":
    run, start, out = map(Path, sys.argv[1:])
    out.write_text(json.dumps(measure(run, start)) + "\n")
