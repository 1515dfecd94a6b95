"""Rows and batches made by hand for the learner's tests."""

from __future__ import annotations

import random

import torch

from covey.algorithms.ops import make_batch
from covey.types import Batch, Sample


def rows_of(groups: int, attempts: int, *, vocabulary: int = 64, seed: int = 0, gaps: bool = False) -> list[Sample]:
    """Ragged prompts and answers; with `gaps`, tokens in the middle that were not sampled."""
    rng = random.Random(seed)
    rows: list[Sample] = []
    for _ in range(groups):
        prompt = tuple(rng.randrange(3, vocabulary) for _ in range(rng.randint(2, 9)))
        for _ in range(attempts):
            answer = tuple(rng.randrange(3, vocabulary) for _ in range(rng.randint(1, 7)))
            mask = tuple(not (gaps and 1 <= i <= 2 and len(answer) > 3) for i in range(len(answer)))
            # near those of a uniform policy over 64 tokens, so that ratios stay moderate
            logprobs = tuple(-(3.6 + rng.random()) * on for on in mask)
            rows.append(Sample(prompt, answer, mask, logprobs, (0,) * len(answer), len(rows)))
    return rows


def batch_of(rows: list[Sample], attempts: int, *, dtype: torch.dtype = torch.float64, seed: int = 0) -> Batch:
    """Random rewards, reference log-probs and advantages for rows in groups of `attempts`."""
    torch.manual_seed(seed)
    width = max(len(row.response_ids) for row in rows)
    mask = torch.zeros(len(rows), width, dtype=torch.bool)
    old = torch.zeros(len(rows), width, dtype=dtype)
    for i, row in enumerate(rows):
        mask[i, : len(row.mask)] = torch.tensor(row.mask)
        old[i, : len(row.logprobs)] = torch.tensor(row.logprobs, dtype=dtype)
    ref = torch.where(mask, -3.6 - torch.rand(mask.shape, dtype=dtype), torch.zeros((), dtype=dtype))
    episode = torch.arange(len(rows))
    rewards = torch.randn(len(rows), dtype=dtype)
    return make_batch(
        rows=tuple(rows),
        group_N=episode // attempts,
        rewards_N=rewards,
        episode_R=episode,
        mask_RT=mask,
        old_logprobs_RT=old,
        ref_logprobs_RT=ref,
        advantages_RT=rewards[:, None].expand(mask.shape).clone(),
    )
