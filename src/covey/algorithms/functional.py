"""The algorithms as plain functions, for use inside other trainers and for comparison with them.

    advantages("grpo", rewards, groups)                       rewards → advantages
    policy_loss("gvpo", logprobs, old, adv, mask, groups=…)   advantages, log-probs → loss
    compute_gvpo_advantage(...)                               GVPO's finished weight, for trainers whose loss sees rows
    GVPOLoss(beta=0.1)(logprobs, ref, rewards, groups, mask)  all of GVPO in one call

Shapes: N answers, T tokens. `groups` names the prompt of each answer, as integers or strings.
"""

from __future__ import annotations

import warnings
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from covey.algorithms import make
from covey.algorithms.gvpo import Gvpo
from covey.algorithms.ops import divide, group_size, make_batch
from covey.algorithms.ppo_clip import PpoClip
from covey.errors import unknown
from covey.protocols import Metrics, TokenOutputs
from covey.types import Batch, Samples

Groups = Tensor | Sequence[Hashable]
Rewards = Tensor | Mapping[str, Tensor]

LOSSES: dict[str, type] = {"gvpo": Gvpo, "ppo_clip": PpoClip, "ppo": PpoClip, "grpo": PpoClip}


def advantages(
    name: str,
    rewards: Rewards,
    groups: Groups,
    *,
    mask: Tensor | None = None,
    weights: Mapping[str, float] | None = None,
    **options: Any,
) -> Tensor:
    """Advantages of N answers: [N]. `rewards` is [N], token rewards [N, T] (summed under `mask`), or a dict of named
    [N] columns (NaN: never scored), added with `weights` (1 where not given). advantages("gvpo") is R − R̄."""
    algorithm = make(name, **options)
    group_N = index_groups(groups)
    _warn_about_singletons(name, group_N)
    columns = rewards if isinstance(rewards, Mapping) else {"reward": _per_answer(rewards, mask)}
    some = next(iter(columns.values()))
    if some.shape != (len(group_N),):
        raise ValueError(f"rewards have shape {tuple(some.shape)} but there are {len(group_N)} group labels")
    dtype = some.dtype if some.is_floating_point() else torch.get_default_dtype()
    rows = torch.zeros(len(group_N), 1, dtype=dtype)
    samples = Samples(
        rows=(),
        group_N=group_N.to(some.device),
        rewards=columns,
        weights={key: (weights or {}).get(key, 1.0) for key in columns},
        episode_R=torch.arange(len(group_N)),
        mask_RT=torch.ones_like(rows, dtype=torch.bool),
        old_logprobs_RT=rows.to(some.device),
    )
    return algorithm.advantages(samples).values


def policy_loss(
    name: str,
    logprobs: Tensor,
    old_logprobs: Tensor,
    advantages: Tensor,
    mask: Tensor,
    *,
    groups: Groups | None = None,
    ref_logprobs: Tensor | None = None,
    aggregation: str | None = None,
    **options: Any,
) -> tuple[Tensor, Metrics]:
    """The loss and its statistics. Log-probs and `mask` are [N, T]; `advantages` [N] or [N, T].

    policy_loss("gvpo") wants R − R̄ as advantages and subtracts the β term itself, from the current log-probs; it needs
    `groups`, and `ref_logprobs` unless reference="old".
    """
    if name not in LOSSES:
        raise unknown("loss", name, LOSSES)
    if aggregation is not None:
        if LOSSES[name] is Gvpo:
            raise ValueError("gvpo sums over tokens by its theory (a mean changes its optimum): leave aggregation out")
        options["aggregation"] = aggregation
    objective = LOSSES[name](**options)
    if objective.couples_groups and groups is None:
        raise ValueError(f"{name} couples the answers of a prompt: pass groups=, the prompt of each answer")
    if objective.needs.reference and ref_logprobs is None:
        hint = "or reference='old' to anchor at the sampling policy" if name == "gvpo" else "or kl_coef=0"
        raise ValueError(f"{name} needs ref_logprobs= with these settings, {hint}")
    group_N = index_groups(groups) if groups is not None else torch.arange(len(logprobs))
    batch = _batch(group_N.to(logprobs.device), old_logprobs, ref_logprobs, advantages, mask.bool())
    out = TokenOutputs(logprobs, torch.zeros_like(logprobs))
    terms = divide(objective.loss(out, batch), batch)
    found = objective.metrics(out, batch) | {f"loss/{key}": float(term.detach()) for key, term in terms.items()}
    return torch.stack(list(terms.values())).sum(), found


def compute_gvpo_advantage(
    rewards: Tensor,
    logprobs: Tensor,
    ref_logprobs: Tensor,
    groups: Groups,
    mask: Tensor | None = None,
    *,
    beta: float = 0.1,
    clip_weight: float | None = None,
    normalize_weights: bool = True,
) -> Tensor:
    """GVPO's finished weight w = (R − R̄) − β(ρ − ρ̄) of each answer, [N], without gradient.

    For trainers whose loss is −Σ w log π over single rows: it then lacks only the factor β/(k−1). Do not pass it to
    policy_loss("gvpo"), which subtracts the β term itself. Log-probs are [N, T] with `mask`, or sums [N].
    """
    group_N = index_groups(groups).to(logprobs.device)
    ratio_N = _per_answer(logprobs - ref_logprobs, mask).detach()
    gvpo = Gvpo(beta=beta, clip_weight=clip_weight, normalize_weights=normalize_weights)
    valid_N = None if mask is None or logprobs.dim() == 1 else mask.bool().any(-1)
    return gvpo.weights(ratio_N, _per_answer(rewards, mask), group_N, valid_N)


@dataclass(frozen=True)
class GVPOLoss:
    """GVPO in one call: log-probs of the policy and of its anchor, rewards, groups → scalar loss."""

    beta: float = 0.1
    use_bessel_correction: bool = True
    clip_weight: float | None = None
    normalize_weights: bool = True

    def __call__(
        self, logprobs: Tensor, ref_logprobs: Tensor, rewards: Tensor, groups: Groups, mask: Tensor | None = None
    ) -> Tensor:
        mask = torch.ones_like(logprobs, dtype=torch.bool) if mask is None else mask.bool()
        centred = advantages("gvpo", rewards.to(logprobs.dtype), groups, mask=mask)
        loss, _ = policy_loss(
            "gvpo", logprobs, logprobs.detach(), centred, mask, groups=groups, ref_logprobs=ref_logprobs, **vars(self)
        )
        return loss


def _warn_about_singletons(name: str, group_N: Tensor) -> None:
    alone = int((group_size(group_N) == 1).sum())
    if alone:
        warnings.warn(f"{alone} groups have a single answer: {name} learns nothing from them", stacklevel=3)


def index_groups(groups: Groups) -> Tensor:
    """Labels → 0..G-1 in order of first appearance."""
    labels: list[Hashable] = groups.tolist() if isinstance(groups, Tensor) else list(groups)
    number: dict[Hashable, int] = {}
    return torch.tensor([number.setdefault(label, len(number)) for label in labels], dtype=torch.int64)


def _per_answer(x: Tensor, mask: Tensor | None) -> Tensor:
    if x.dim() == 1:
        return x
    return (x if mask is None else torch.where(mask.bool(), x, torch.zeros_like(x))).sum(-1)


def _batch(group_N: Tensor, old: Tensor, ref: Tensor | None, advantage: Tensor, mask: Tensor) -> Batch:
    """One row per answer; a token-level advantage counts as a reward by its mean."""
    per_answer, per_token = advantage, advantage
    if advantage.dim() == 1:
        per_token = advantage[:, None].expand(old.shape)
    else:
        per_answer = _per_answer(advantage, mask) / mask.sum(-1).clamp(min=1)
    return make_batch(
        rows=(),
        group_N=group_N,
        rewards_N=per_answer,
        episode_R=torch.arange(len(group_N), device=old.device),
        mask_RT=mask,
        old_logprobs_RT=old,
        ref_logprobs_RT=ref,
        advantages_RT=per_token.to(old.dtype),
    )
