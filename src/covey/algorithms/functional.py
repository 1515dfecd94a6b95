"""The algorithms as plain functions, for other trainers and for comparison with them.

    advantages("grpo", rewards, groups)                       rewards → advantages
    policy_loss("gspo", logprobs, old, adv, mask)             advantages, log-probs → loss
    compute_gvpo_advantage(...)                               GVPO's weight w, for trainers whose loss sees single rows
    GVPOLoss(beta=0.1)(logprobs, ref, rewards, groups, mask)  all of GVPO in one call

Shapes: N answers, T tokens, G groups. `groups` names the prompt of each answer, as integers or strings.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Hashable, Mapping, MutableMapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal, overload

import torch
from torch import Tensor

from covey.algorithms.aggregation import divide
from covey.algorithms.algorithm import Algorithm
from covey.algorithms.assemble import make
from covey.algorithms.catalogue import ALGORITHMS, ALIASES, LOSSES, unsupported
from covey.algorithms.gvpo import Gvpo
from covey.algorithms.ops import group_size, make_batch
from covey.errors import unknown
from covey.protocols import Metrics, TokenOutputs
from covey.types import Batch, Samples, Turns

Groups = Tensor | Sequence[Hashable]
Column = Tensor | Sequence[float | None]
Rewards = Column | Mapping[str, Column]
RewardTensors = Tensor | Mapping[str, Tensor]

# Names of losses. The name of an algorithm means the loss and the aggregation that it trains with.
LOSS_NAMES = {name: name for name in LOSSES} | {"vanilla": "ppo_clip", "reinforce": "policy_gradient"}


@overload
def advantages(
    name: str,
    rewards: Rewards,
    groups: Groups,
    *,
    mask: Tensor | None = ...,
    values: Tensor | None = ...,
    baseline_rewards: Tensor | None = ...,
    score_norms: Tensor | None = ...,
    turns: Tensor | None = ...,
    states: Sequence[Sequence[Hashable]] | None = ...,
    weights: Mapping[str, float] | None = ...,
    state: MutableMapping[str, Any] | None = ...,
    with_returns: Literal[False] = ...,
    **options: Any,
) -> Tensor: ...


@overload
def advantages(
    name: str,
    rewards: Rewards,
    groups: Groups,
    *,
    mask: Tensor | None = ...,
    values: Tensor | None = ...,
    baseline_rewards: Tensor | None = ...,
    score_norms: Tensor | None = ...,
    turns: Tensor | None = ...,
    states: Sequence[Sequence[Hashable]] | None = ...,
    weights: Mapping[str, float] | None = ...,
    state: MutableMapping[str, Any] | None = ...,
    with_returns: Literal[True],
    **options: Any,
) -> tuple[Tensor, Tensor]: ...


def advantages(
    name: str,
    rewards: Rewards,
    groups: Groups,
    *,
    mask: Tensor | None = None,
    values: Tensor | None = None,
    baseline_rewards: Tensor | None = None,
    score_norms: Tensor | None = None,
    turns: Tensor | None = None,
    states: Sequence[Sequence[Hashable]] | None = None,
    weights: Mapping[str, float] | None = None,
    state: MutableMapping[str, Any] | None = None,
    with_returns: bool = False,
    **options: Any,
) -> Any:
    """Advantages of N answers: [N], or [N, T] for token-level estimators (ppo, reinforce_plus_plus, otb).

    rewards           [N], token rewards [N, T], or a dict of named [N] columns, summed with `weights` (default 1);
                      [N] may also be a list of numbers. NaN (None in a list): not scored. An answer without any score
                      is skipped and gets advantage 0. Token-level estimators put a [N] reward on an answer's last
                      token.
    mask              [N, T], the sampled tokens: for token-level estimators, opo, and token rewards
    values            [N, T] of a critic, for ppo; with_returns=True also returns the returns
    baseline_rewards  [N], the greedy answer's reward, for remax
    score_norms       [N, T], 1 − 2 π(y_t) + Σ_v π(v)² of each token, for otb
    turns             [N, T], the number of each token's turn, from 0, for turn_returns, gigpo and ppo's turn_gamma;
                      token rewards [N, T] are those of their turns. None: every answer is one turn
    states            the state of each turn, for gigpo: for each answer a list with one entry per turn. None: only the
                      first turns of a group are in the same state
    state             a dict in which dgdo keeps its weights between calls
    """
    algorithm = make(name, **options)
    group_N = index_groups(groups)
    if algorithm.needs.values and (values is None or mask is None):
        raise ValueError(f"{name} needs values=, a critic's value of each token, and mask=")
    if algorithm.needs.greedy_baseline and baseline_rewards is None:
        raise ValueError(f"{name} needs baseline_rewards=, the reward of the greedy answer to each answer's prompt")
    if algorithm.needs.score_norms and (score_norms is None or mask is None):
        raise ValueError(f"{name} needs score_norms=, 1 − 2 π(y) + Σ_v π(v)² of each token, and mask=")
    columns = _as_tensors(rewards)
    if isinstance(columns, Tensor) and columns.dim() == 2 and algorithm.uses_named_rewards:
        columns = _per_answer(columns, mask)
    _check_shape(columns, group_N)
    scored = _scored(columns, mask)
    given = (mask, values, baseline_rewards, score_norms)
    mask, values, baseline, norms = (None if x is None else x[scored] for x in given)
    kept_N = index_groups(group_N[scored.cpu()])
    if algorithm.needs.min_group_size > 1:
        _warn_about_singletons(algorithm.name, kept_N)
    samples = _samples(kept_N, _take(columns, scored), mask, values, baseline, weights or {})
    samples = replace(samples, score_norms_RT=norms)
    if turns is not None:
        kept_states = None if states is None else [states[i] for i in scored.nonzero()[:, 0].tolist()]
        samples = replace(samples, turns=_turns(samples, turns[scored], kept_states))
    if state:
        algorithm.load_state_dict(state)
    result = algorithm.advantages(samples)
    if state is not None:
        state.update(algorithm.state_dict())
    if not with_returns:
        return _spread(result.values, scored)
    if result.returns is None:
        raise ValueError(f"{name} has no returns: only algorithms with a critic or token returns do")
    return _spread(result.values, scored), _spread(result.returns, scored)


def _turns(samples: Samples, number_NT: Tensor, states: Sequence[Sequence[Hashable]] | None) -> Turns:
    """The turns of answers with one row each."""
    if number_NT.shape != samples.mask_RT.shape:
        raise ValueError(f"turns= has shape {tuple(number_NT.shape)}, mask= has {tuple(samples.mask_RT.shape)}")
    count_N = torch.where(samples.mask_RT, number_NT, 0).amax(-1).long() + 1
    if states is not None and [len(own) for own in states] != count_N.tolist():
        raise ValueError(f"states= needs one entry for each turn: {count_N.tolist()} turns of the scored answers")
    places = [(n, t) for n, count in enumerate(count_N.tolist()) for t in range(count)]
    keys = [(int(samples.group_N[n]), (t and n, t) if states is None else states[n][t]) for n, t in places]
    first_N = count_N.cumsum(0) - count_N
    device = samples.group_N.device
    return Turns(
        episode_K=torch.tensor([n for n, _ in places], device=device),
        number_K=torch.tensor([t for _, t in places], device=device),
        reward_K=torch.full((len(places),), torch.nan, dtype=torch.float64, device=device),
        state_K=index_groups(keys).to(device),
        turn_RT=torch.where(samples.mask_RT, number_NT.long() + first_N[:, None], -1),
    )


def _spread(x: Tensor, scored: Tensor) -> Tensor:
    """Values of the scored answers, with 0 for the others."""
    spread = x.new_zeros(len(scored), *x.shape[1:])
    spread[scored] = x
    return spread


def _as_tensors(rewards: Rewards) -> RewardTensors:
    if isinstance(rewards, Mapping):
        return {name: _as_tensor(column) for name, column in rewards.items()}
    return _as_tensor(rewards)


def _as_tensor(column: Column) -> Tensor:
    if isinstance(column, Tensor):
        return column
    return torch.tensor([math.nan if number is None else float(number) for number in column])


def _check_shape(rewards: RewardTensors, group_N: Tensor) -> None:
    for column in rewards.values() if isinstance(rewards, Mapping) else [rewards]:
        if len(column) != len(group_N) or column.dim() > (1 if isinstance(rewards, Mapping) else 2):
            raise ValueError(f"rewards have shape {tuple(column.shape)} but there are {len(group_N)} group labels")


def _scored(rewards: RewardTensors, mask: Tensor | None) -> Tensor:
    """A mask of the answers with at least one reward. The others are skipped: a missing reward is not a reward of 0."""
    if isinstance(rewards, Mapping):
        return ~torch.stack([column.isnan() for column in rewards.values()]).all(0)
    return ~_per_answer(rewards, mask).isnan()


def _take(rewards: RewardTensors, scored: Tensor) -> RewardTensors:
    if isinstance(rewards, Mapping):
        return {name: column[scored] for name, column in rewards.items()}
    return rewards[scored]


def _samples(
    group_N: Tensor,
    rewards: RewardTensors,
    mask: Tensor | None,
    values: Tensor | None,
    baseline: Tensor | None,
    weights: Mapping[str, float],
) -> Samples:
    """One row per answer. Token rewards become `token_rewards_RT`, and the reward per answer is then 0."""
    per_token = rewards if isinstance(rewards, Tensor) and rewards.dim() == 2 else None
    some = rewards if isinstance(rewards, Tensor) else next(iter(rewards.values()))
    dtype = some.dtype if some.is_floating_point() else torch.get_default_dtype()
    if mask is None:
        mask = torch.ones(len(some), 1 if per_token is None else per_token.shape[1], dtype=torch.bool)
    mask, group_N = mask.bool().to(some.device), group_N.to(some.device)
    empty = torch.zeros(len(some), dtype=dtype, device=some.device)
    columns = rewards if isinstance(rewards, Mapping) else {"reward": empty if per_token is not None else some}
    baseline_G = None
    if baseline is not None:
        baseline_G = torch.zeros(int(group_N.max()) + 1 if len(group_N) else 0, dtype=dtype, device=some.device)
        baseline_G[group_N] = baseline.to(dtype)
    return Samples(
        rows=(),
        group_N=group_N,
        rewards=columns,
        weights={key: weights.get(key, 1.0) for key in columns},
        longest_N=mask.sum(-1),
        truncated_N=torch.zeros_like(group_N, dtype=torch.bool),
        episode_R=torch.arange(len(group_N), device=some.device),
        mask_RT=mask,
        old_logprobs_RT=torch.zeros(mask.shape, dtype=dtype, device=some.device),
        values_RT=values,
        token_rewards_RT=None if per_token is None else per_token.where(mask, 0),
        baseline_rewards_G=baseline_G,
    )


def policy_loss(
    name: str,
    logprobs: Tensor,
    old_logprobs: Tensor,
    advantages: Tensor,
    mask: Tensor,
    *,
    groups: Groups | None = None,
    ref_logprobs: Tensor | None = None,
    sampling_logprobs: Tensor | None = None,
    aggregation: str | None = None,
    **options: Any,
) -> tuple[Tensor, Metrics]:
    """The loss and its metrics. Log-probs and `mask` are [N, T]; `advantages` [N] or [N, T]. `name` is a loss, or an
    algorithm, which means its loss and aggregation.

    The KL settings work here too (kl_coef with ref_logprobs; kl_old_coef). With `sampling_logprobs` of the engine,
    advantages are multiplied by truncated importance weights (correction, correction_cap).

    policy_loss("gvpo") takes R − R̄ as advantages and subtracts the β term, computed from the current log-probs; it
    needs `groups`. Its anchor is `ref_logprobs` if they are given (reference="initial"), else `old_logprobs`.
    """
    if ref_logprobs is not None and ALIASES.get(name, name) == "gvpo":
        options = {"reference": "initial"} | options
    algorithm = _with_loss(name, aggregation, sampling_logprobs is not None, options)
    if algorithm.couples == "groups" and groups is None:
        raise ValueError(f"{name} couples the answers of a prompt: pass groups=, the prompt of each answer")
    if algorithm.kl is not None and algorithm.kl.kl_coef and algorithm.kl.kl_in == "reward":
        raise ValueError("a KL in the reward must be subtracted before advantages are computed: use kl_in='loss' here")
    if algorithm.needs.full_kl:
        raise ValueError("the full KL needs logits of the whole vocabulary, and this function sees only log-probs")
    if algorithm.needs.reference and ref_logprobs is None:
        hint = "or kl_coef=0" if algorithm.kl is not None else "or reference='old' to anchor at the sampling policy"
        raise ValueError(f"{name} needs ref_logprobs= with these settings, {hint}")
    group_N = index_groups(groups) if groups is not None else torch.arange(len(logprobs))
    batch = _batch(group_N.to(logprobs.device), old_logprobs, ref_logprobs, advantages, mask.bool())
    metrics: Metrics = {}
    if sampling_logprobs is not None and algorithm.correction is not None and algorithm.correction.active:
        weight, metrics = algorithm.correction.weights(
            old_logprobs, sampling_logprobs, batch.mask_RT, batch.episode_R, len(group_N)
        )
        batch = replace(batch, advantages_RT=batch.advantages_RT * weight)
    out = TokenOutputs(logprobs, torch.zeros_like(logprobs))
    terms = divide(algorithm.loss(out, batch), batch)
    metrics = metrics | algorithm.metrics(out, batch)
    metrics |= {f"{key}/loss": float(term.detach()) for key, term in terms.items()}
    return torch.stack(list(terms.values())).sum(), metrics


def _with_loss(name: str, aggregation: str | None, corrected: bool, options: dict[str, Any]) -> Algorithm:
    """An algorithm with this loss; its estimator is not used, since the advantages are given."""
    name = ALIASES.get(name, name)
    if name not in LOSS_NAMES and name not in ALGORITHMS:
        raise unknown("loss", name, {**LOSS_NAMES, **ALGORITHMS})
    if aggregation is not None:
        options = options | {"aggregation": aggregation}
    loss = LOSSES[LOSS_NAMES.get(name) or ALGORITHMS[name].loss]
    if corrected:
        if reason := unsupported(loss.objective).get("correction"):
            raise ValueError(f"{name} does not take sampling_logprobs: {reason}")
        options = {"correction": "token"} | options
    if name in LOSS_NAMES and loss.exchangeable:
        return make("grpo", loss=LOSS_NAMES[name], **options)
    return make(name, **options)


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
    """GVPO's weight w = (R − R̄) − β(ρ − ρ̄) of each answer, [N], without gradient.

    For trainers whose loss is −Σ w log π over single rows: only the factor β/(k−1) is then missing. Do not pass it to
    policy_loss("gvpo"), which subtracts the β term itself. Log-probs are [N, T] with `mask`, or sums [N]. A reward of
    NaN was never given: that answer has weight 0 and does not count in its group.
    """
    group_N = index_groups(groups).to(logprobs.device)
    ratio_N = _per_answer(logprobs - ref_logprobs, mask).detach()
    gvpo = Gvpo(beta=beta, clip_weight=clip_weight, normalize_weights=normalize_weights)
    reward_N = _per_answer(rewards, mask)
    valid_N = ~reward_N.isnan()
    if mask is not None and logprobs.dim() == 2:
        valid_N = valid_N & mask.bool().any(-1)
    return gvpo.weights(ratio_N, reward_N.nan_to_num(nan=0.0), group_N, valid_N)


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
        mask = mask & ~_per_answer(rewards, mask).isnan()[:, None]  # exclude answers without a reward
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
        max_tokens=mask.shape[1],
    )
