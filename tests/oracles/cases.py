"""Random steps by seed, in float64, with the difficulties of real ones: uneven groups with interleaved answers, groups
of equal rewards, answers of all lengths, gaps for tool output, log-ratios of ±50.

Shapes: N answers, T tokens.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from covey.types import Samples

SEEDS = range(20)


@dataclass(frozen=True)
class Case:
    groups: list[str]
    rewards: Tensor  # [N]
    mask: Tensor  # [N, T] bool
    logprobs: Tensor
    old: Tensor
    ref: Tensor
    values: Tensor
    advantages: Tensor  # [N, T], any

    def on_last_token(self, rewards: Tensor | None = None) -> Tensor:
        """[N] rewards → [N, T], the format of trainers with token rewards."""
        rewards = self.rewards if rewards is None else rewards
        place = torch.arange(self.mask.shape[1])
        last = (self.mask * place).max(-1).values
        return torch.where(place == last[:, None], rewards[:, None], 0.0)


def case(
    seed: int, *, holes: bool = False, extreme: bool = False, empty: bool = False, sizes: list[int] | None = None
) -> Case:
    random = torch.Generator().manual_seed(seed)
    sizes = sizes or torch.randint(2, 7, (4,), generator=random).tolist()
    labels = [f"prompt {number}" for number, size in enumerate(sizes) for _ in range(size)]
    order = torch.randperm(len(labels), generator=random).tolist()
    groups = [labels[i] for i in order]
    count, length = len(groups), 12
    mask = _mask(count, length, holes, empty, random)
    logprobs = -torch.rand(count, length, generator=random, dtype=torch.float64) * 3
    return Case(
        groups=groups,
        rewards=_rewards(groups, random),
        mask=mask,
        logprobs=logprobs,
        old=logprobs - _log_ratio(count, length, extreme, random),
        ref=logprobs - 0.5 * _normal(count, length, random),
        values=_normal(count, length, random),
        advantages=_normal(count, length, random),
    )


def side_by_side(case: Case) -> Case:
    """The same step with the answers to a prompt next to each other."""
    order = sorted(range(len(case.groups)), key=lambda i: case.groups[i])
    moved = {name: value[order] for name, value in vars(case).items() if isinstance(value, Tensor)}
    return replace(case, groups=[case.groups[i] for i in order], **moved)


def _normal(count: int, length: int, random: torch.Generator) -> Tensor:
    return torch.randn(count, length, generator=random, dtype=torch.float64)


def _mask(count: int, length: int, holes: bool, empty: bool, random: torch.Generator) -> Tensor:
    lengths = torch.randint(1, length + 1, (count, 1), generator=random)
    place = torch.arange(length)
    mask = place < lengths
    if holes:
        gap = torch.rand(count, length, generator=random) < 0.3
        mask &= ~gap | (place == lengths - 1)
    if empty:
        mask[torch.randint(count, (1,), generator=random)] = False
    return mask


def _rewards(groups: list[str], random: torch.Generator) -> Tensor:
    """Binary rewards in one group, equal ones in another, random ones in the rest."""
    rewards = torch.randn(len(groups), generator=random, dtype=torch.float64)
    binary = (rewards > 0).double()
    named = {"prompt 0": torch.full_like(rewards, 0.1), "prompt 1": binary}
    return torch.stack([named.get(label, rewards)[i] for i, label in enumerate(groups)])


def _log_ratio(count: int, length: int, extreme: bool, random: torch.Generator) -> Tensor:
    ratio = 0.4 * _normal(count, length, random)
    if not extreme:
        return ratio
    shock = torch.rand(count, length, generator=random)
    return torch.where(shock < 0.1, 50.0, torch.where(shock > 0.9, -50.0, ratio))


def samples(case: Case, rewards: Tensor | None = None) -> Samples:
    """A step as Covey's training loop has it, for a KL in the reward, which `advantages` does not cover."""
    number: dict[str, int] = {}
    return Samples(
        rows=(),
        group_N=torch.tensor([number.setdefault(label, len(number)) for label in case.groups]),
        rewards={"reward": case.rewards if rewards is None else rewards},
        weights={"reward": 1.0},
        longest_N=case.mask.sum(-1),
        truncated_N=torch.zeros(len(case.groups), dtype=torch.bool),
        episode_R=torch.arange(len(case.groups)),
        mask_RT=case.mask,
        old_logprobs_RT=case.old,
        ref_logprobs_RT=case.ref,
        values_RT=case.values,
    )


def gradient(loss: Tensor, of: Tensor) -> Tensor:
    (found,) = torch.autograd.grad(loss, of)
    return found
