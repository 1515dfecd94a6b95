"""Outputs of forward passes: those of all micro-batches and ranks as one table, and the metrics of an update.

Shapes: R rows, T response tokens.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from covey.algorithms.ops import effective_sample_size, masked_mean, probability_ratio
from covey.learner.critic import Critic
from covey.learner.packing import Pass, row_indices
from covey.learner.parallel import Ranks
from covey.protocols import Algorithm, Metrics, TokenOutputs, TokenTrace
from covey.types import Batch


def collect(
    outputs: Sequence[TokenOutputs],
    passes: Sequence[Pass],
    shape: tuple[int, ...],
    device: torch.device | str,
    ranks: Ranks,
) -> TokenOutputs:
    """The outputs of all ranks on a device, [R, T], in the order of the rows. Waits for the GPU only if it copies to
    the CPU."""
    order = [i for micro_batch, counts in passes if counts for i in row_indices(micro_batch)]
    row_R = torch.tensor(order, dtype=torch.long).to(device)

    def column(name: str) -> Tensor | None:
        if (first := getattr(outputs[0], name)) is None:
            return None
        column_RT = torch.zeros(shape, dtype=first.dtype, device=device)
        parts = [getattr(part, name) for part, (_, counts) in zip(outputs, passes, strict=True) if counts]
        return ranks.sum(column_RT.index_copy(0, row_R, torch.cat(parts).to(device)) if parts else column_RT)

    columns: dict[str, Any] = {name: column(name) for name in TokenOutputs.__slots__}
    return TokenOutputs(**columns)


def detached(out: TokenOutputs) -> TokenOutputs:
    return replace(out, **{name: x.detach() for name in out.__slots__ if (x := getattr(out, name)) is not None})


@torch.no_grad()
def update_metrics(
    out: TokenOutputs, batch: Batch, algorithm: Algorithm, critic: Critic | None
) -> tuple[Metrics, TokenTrace]:
    mask, log_ratio = batch.mask_RT, out.logprobs - batch.old_logprobs_RT
    ratio = probability_ratio(out.logprobs, batch.old_logprobs_RT)
    entropy = masked_mean(out.entropy, mask)
    columns = (torch.where(mask, x, torch.zeros_like(x)) for x in (batch.advantages_RT, ratio, out.entropy))
    metrics = {
        "policy/entropy": entropy,
        "actor/entropy_loss": entropy,
        "policy/ratio_mean": masked_mean(ratio, mask),
        "policy/ratio_max": float(ratio[mask].max()) if bool(mask.any()) else 1.0,
        "policy/kl_old": masked_mean(-log_ratio, mask),
        "policy/ess": effective_sample_size(ratio[mask]),
        **({} if critic is None else critic.metrics(out, batch)),
    }
    return metrics | algorithm.metrics(out, batch), TokenTrace(*(column.float().cpu() for column in columns))
