"""Steps and mini-batches made by hand for the tests of the algorithms, all in float64.

Shapes: N episodes, R rows, T tokens.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from covey.algorithms import ALGORITHMS, LOSSES, make
from covey.algorithms.aggregation import divide
from covey.algorithms.algorithm import Algorithm
from covey.algorithms.ops import make_batch
from covey.protocols import TokenOutputs
from covey.types import Batch, Samples

F64 = torch.float64
NAN = float("nan")

NEEDS = {name: make(name).needs for name in ALGORITHMS}
# Algorithms that compare the answers of a group, one advantage per answer; and those with an advantage per token.
GROUP_ESTIMATORS = [name for name, needs in NEEDS.items() if needs.min_group_size > 1 and not needs.score_norms]
TOKEN_ESTIMATORS = ["ppo", "reinforce_plus_plus"]
WITHOUT_CRITIC = [name for name, needs in NEEDS.items() if not needs.values]
# Losses that any estimator can use, and algorithms that can use any of them.
EXCHANGEABLE = [name for name, loss in LOSSES.items() if loss.exchangeable]
COMBINABLE = [name for name, entry in ALGORITHMS.items() if entry.loss in EXCHANGEABLE]
# Losses with an estimator of their own, and no other.
PAIRED = [name for name, loss in LOSSES.items() if not loss.exchangeable]


def tensor(*values: Any) -> Tensor:
    return torch.tensor(values, dtype=F64)


def samples_of(
    rewards: Mapping[str, Sequence[float] | Tensor] | Sequence[float],
    groups: Sequence[int] | Tensor,
    *,
    mask: Sequence[Sequence[int]] | None = None,
    episode: Sequence[int] | None = None,
    weights: Mapping[str, float] | None = None,
    **columns: Any,
) -> Samples:
    """A step. `episode` names the episode of each token row; without it, and without a mask, each has a row of one
    token."""
    table = rewards if isinstance(rewards, Mapping) else {"reward": rewards}
    mask_RT = torch.ones(len(groups), 1, dtype=torch.bool) if mask is None else torch.tensor(mask, dtype=torch.bool)
    columns.setdefault("truncated_N", torch.zeros(len(groups), dtype=torch.bool))
    columns.setdefault("old_logprobs_RT", torch.zeros(mask_RT.shape, dtype=F64))
    owner_R = torch.arange(len(groups)) if episode is None else torch.tensor(episode)
    rows_N = torch.zeros(len(groups), dtype=torch.int64)
    columns.setdefault("longest_N", rows_N.scatter_reduce(0, owner_R, mask_RT.sum(-1), "amax"))
    return Samples(
        rows=(),
        group_N=torch.as_tensor(groups),
        rewards={name: torch.as_tensor(column, dtype=F64) for name, column in table.items()},
        weights={name: (weights or {}).get(name, 1.0) for name in table},
        episode_R=owner_R,
        mask_RT=mask_RT,
        **columns,
    )


def random_batch(seed: int = 0, *, spread: float = 0.3, **changes: Any) -> tuple[Tensor, Batch]:
    """Log-probs of a policy, and a mini-batch of 7 episodes in 3 uneven groups as 9 ragged rows with holes: episodes 1
    and 4 are forked into two rows each, and the rows lie in no order. `spread` is how far the policies are apart."""
    rng = torch.Generator().manual_seed(seed)
    lengths = torch.tensor([5, 3, 1, 4, 2, 5, 3, 4, 2])
    mask_RT = torch.arange(5) < lengths[:, None]
    mask_RT[0, 2] = mask_RT[5, 1] = False  # what a tool wrote

    def noise() -> Tensor:
        return torch.randn(mask_RT.shape, generator=rng, dtype=F64)

    old_RT = -1.5 + 0.5 * noise()
    columns: dict[str, Any] = {
        "rows": (None,) * len(mask_RT),
        "group_N": torch.tensor([0, 0, 1, 1, 1, 2, 2]),
        "rewards_N": torch.randn(7, generator=rng, dtype=F64),
        "episode_R": torch.tensor([1, 4, 0, 2, 1, 3, 6, 5, 4]),
        "mask_RT": mask_RT,
        "old_logprobs_RT": old_RT,
        "ref_logprobs_RT": old_RT + spread * noise(),
        "advantages_RT": noise(),
        "max_tokens": 10,
    }
    return old_RT + spread * noise(), make_batch(**(columns | changes))


def outputs(logprobs_RT: Tensor, **columns: Tensor) -> TokenOutputs:
    return TokenOutputs(logprobs_RT, torch.zeros_like(logprobs_RT), **columns)


def total_loss(algorithm: Algorithm, logprobs_RT: Tensor, batch: Batch) -> Tensor:
    """All terms, divided as the learner divides them."""
    return torch.stack(list(divide(algorithm.loss(outputs(logprobs_RT), batch), batch).values())).sum()


def value_and_gradient(loss: Callable[[Tensor], Tensor], at: Tensor) -> tuple[Tensor, Tensor]:
    x = at.clone().requires_grad_()
    value = loss(x)
    (gradient,) = torch.autograd.grad(value, x)
    return value.detach(), gradient


def same(found: Any, expected: Any, tolerance: float = 1e-12) -> None:
    """Equal within rounding."""
    torch.testing.assert_close(
        torch.as_tensor(found, dtype=F64), torch.as_tensor(expected, dtype=F64), atol=tolerance, rtol=tolerance
    )


def all_groups(actions: int, size: int) -> tuple[Tensor, Tensor]:
    """Every group of `size` draws from `actions` actions, as one step: the action and the group of each answer."""
    drawn = torch.tensor(list(itertools.product(range(actions), repeat=size)))
    return drawn.flatten(), torch.arange(len(drawn)).repeat_interleave(size)


def expected_gradient(logits: Tensor, advantages_N: Tensor, action_N: Tensor, group_N: Tensor) -> Tensor:
    """E[ mean_i A_i ∇ log π(a_i) ] of a softmax bandit, where the step holds every possible group."""
    policy = torch.softmax(logits, -1)
    log_chance_G = torch.zeros(int(group_N[-1]) + 1, dtype=F64).index_add(0, group_N, policy.log()[action_N])
    score_NA = torch.nn.functional.one_hot(action_N, len(logits)).to(F64) - policy  # ∇ log π(a), row by row
    size = len(group_N) // len(log_chance_G)
    return (log_chance_G.exp()[group_N] * advantages_N) @ score_NA / size


def true_gradient(logits: Tensor, rewards_A: Tensor) -> Tensor:
    """∇ E[R] of a softmax bandit: π_a (R_a − E R)."""
    policy = torch.softmax(logits, -1)
    return policy * (rewards_A - policy @ rewards_A)
