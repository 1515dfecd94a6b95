"""Online DPO: the preference loss on the best against the worst answer of a group.

Rafailov et al. 2023, https://arxiv.org/abs/2305.18290; online: Guo et al. 2024, https://arxiv.org/abs/2402.04792

    h_i = Σ_t log π_θ(y_i,t) / π_ref(y_i,t)                    π_ref: the start model
    L   = −log σ( β (h_best − h_worst) )                        averaged over groups

The rewards only choose the pair. With rewards of 0 and 1 many answers are best or worst: L is then the mean over all
pairs of one best and one worst answer, which is its expectation over a random choice. A group of equal rewards has no
pair and no loss.

In token form, each token has the gradient of L with respect to its own log π, and an equal part of the value of L.

Deviations: pairs by reward instead of an AI judge. Guo et al. sample two answers; more of them give clearer pairs.
Shapes: N episodes, G groups, K answers of the largest group, R rows, T tokens.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from covey.algorithms.ops import group_size, group_std, group_sum, policy_sum
from covey.imports import torch
from covey.protocols import Advantages, Couples, Metrics, Needs, TokenOutputs
from covey.ranges import Positive, check_ranges
from covey.types import Batch, Samples

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True, slots=True)
class OnlineDpo:
    term: ClassVar[str] = "policy"
    couples: ClassVar[Couples] = "groups"
    on_policy_only: ClassVar[bool] = False
    needs: ClassVar[Needs] = Needs(reference=True, min_group_size=2, advised_group_size=4)
    unsupported: ClassVar[Mapping[str, str]] = {
        "kl": "the preference loss contains the KL to the reference (algorithm.beta)",
        "correction": "a preference holds whichever policy sampled the pair: there is no ratio to correct",
        "reject": "a preference holds whichever policy sampled the pair: there is no ratio to reject by",
        "aggregation": "the preference loss compares log-probs of whole answers, summed over tokens",
        "norm": "the preference loss compares log-probs of whole answers, summed over tokens",
        "teacher": "its loss compares whole answers and has no advantage of single tokens: use algorithm=grpo",
        "loss": "its loss compares the best with the worst answer of a group, chosen by reward: they belong together",
    }

    beta: Positive = 0.1  # strength of the KL constraint to the start model

    def __post_init__(self) -> None:
        check_ranges(self, "algorithm.")

    def advantages(self, samples: Samples) -> Advantages:
        """1 for the best and −1 for the worst answer, shared among equals: the direction of L where h = 0."""
        best_N, worst_N = _extremes(samples.total_reward(), samples.group_N, samples.lengths() > 0)
        best_N, worst_N = (x / group_sum(x, samples.group_N).clamp(min=1) for x in (best_N, worst_N))
        return Advantages(best_N - worst_N)

    def loss(self, out: TokenOutputs, batch: Batch) -> Tensor:
        slope_N, loss_N, _ = self._preferences(out, batch)
        tokens_N = group_sum(batch.length_N.to(loss_N.dtype), batch.group_N).clamp(min=1)
        of_token = out.logprobs - out.logprobs.detach()  # 0, with the gradient of log π
        return slope_N[batch.episode_R][:, None] * of_token + (loss_N / tokens_N)[batch.episode_R][:, None]

    def _preferences(self, out: TokenOutputs, batch: Batch) -> tuple[Tensor, Tensor, Tensor]:
        """∂L/∂h of each answer, L of its group, and the group's mean β (h_best − h_worst), [N] each."""
        assert batch.ref_sum_N is not None, "online DPO needs reference log-probs"
        h_N = policy_sum(out, batch) - batch.ref_sum_N
        best_N, worst_N = _extremes(batch.rewards_N.to(h_N.dtype), batch.group_N, batch.length_N > 0)
        cell_N, shape = _cells(batch.group_N)

        def grid(x_N: Tensor) -> Tensor:
            return x_N.new_zeros(shape).view(-1).index_put((cell_N,), x_N).view(shape)

        h_GK, best_GK, worst_GK = grid(h_N), grid(best_N), grid(worst_N)
        pair_GKK = best_GK[:, :, None] * worst_GK[:, None, :]
        pair_GKK = pair_GKK / pair_GKK.sum((1, 2), keepdim=True).clamp(min=1)
        margin_GKK = self.beta * (h_GK[:, :, None] - h_GK[:, None, :])
        slope_GKK = -self.beta * torch.sigmoid(-margin_GKK) * pair_GKK
        slope_GK = slope_GKK.sum(2) - slope_GKK.sum(1)
        of_group = (-torch.nn.functional.logsigmoid(margin_GKK), margin_GKK)
        loss_G, margin_G = ((x_GKK * pair_GKK).sum((1, 2)) for x_GKK in of_group)
        return slope_GK.view(-1)[cell_N], loss_G[batch.group_N], margin_G[batch.group_N]

    def metrics(self, out: TokenOutputs, batch: Batch) -> Metrics:
        """Over the groups of this micro-batch that have a pair."""
        _, _, margin_N = self._preferences(out, batch)
        best_N, _ = _extremes(batch.rewards_N.to(margin_N.dtype), batch.group_N, batch.length_N > 0)
        share_N = 1 / group_size(batch.group_N, margin_N.dtype)  # every group counts once
        here_N = torch.zeros_like(share_N).index_fill(0, batch.episode_R, 1.0)
        paired_N = (group_sum(best_N, batch.group_N) > 0) & (group_sum(here_N, batch.group_N) > 0)
        pairs = float(share_N[paired_N].sum())
        return {
            "dpo/pairs": pairs / max(float(share_N[group_sum(here_N, batch.group_N) > 0].sum()), 1.0),
            "dpo/margin": float((margin_N * share_N)[paired_N].sum()) / max(pairs, 1.0),
        }


def _extremes(rewards_N: Tensor, group_N: Tensor, valid_N: Tensor) -> tuple[Tensor, Tensor]:
    """1.0 for the best answers of a group, and for the worst; none of them in a group of equal rewards."""
    differs_N = valid_N & (group_std(rewards_N, group_N, valid_N) > 0)
    ends = []
    for how, without in (("amax", -torch.inf), ("amin", torch.inf)):
        kept_N = rewards_N.masked_fill(~valid_N, without)
        end_G = kept_N.new_full((len(group_N),), without).scatter_reduce(0, group_N, kept_N, how)  # G ≤ N
        ends.append((differs_N & (kept_N == end_G[group_N])).to(rewards_N.dtype))
    return ends[0], ends[1]


def _cells(group_N: Tensor) -> tuple[Tensor, tuple[int, int]]:
    """Each answer's place in a [G, K] grid with a row per group, and the shape of the grid."""
    size_G = torch.bincount(group_N)
    order_N = group_N.argsort(stable=True)
    rank_N = torch.empty_like(order_N)
    rank_N[order_N] = torch.arange(len(group_N), device=group_N.device) - (size_G.cumsum(0) - size_G)[group_N[order_N]]
    widest = int(size_G.max())
    return group_N * widest + rank_N, (len(size_G), widest)
