"""Covey's algorithms in verl 0.9: advantage estimators `gvpo`, `covey_gdpo`, `dgdo` and the policy loss `gvpo`.

verl loads `verl_plugin.py` wherever it is imported, through the entry point `verl.plugins`, and that calls `register`.

GVPO. A loss in verl sees rows of a micro-batch without their groups, so β(ρ − ρ̄) must be in the advantage; an estimator
sees only rewards, so it must be in the rewards. verl's KL in the reward does that: with `use_kl_in_reward` and
`kl_penalty=kl` the token rewards of an answer sum to R − βρ, with log-probs from before the first update, and β is
`kl_ctrl.kl_coef`. The estimator centres and scales them,

    A_i = β N / (G (k−1)) · w_i,    w = (R − R̄) − β(ρ − ρ̄)            N answers, G groups, k answers in the group

and the loss is −Σ_t A_i log π, averaged over answers, which equals Covey's average over groups. It is exact for the
first update of a batch; in later updates w is stale, because it keeps its value from before the first. Without
`use_kl_in_reward` the anchor is the sampling policy (Covey's reference=old), where ρ is 0 at the first update.

GDPO and DGDO need each reward by itself. verl passes the reward columns only to the estimator called `gdpo`, so that
name is wrapped: `+algorithm.gdpo_estimator=covey_gdpo` or `dgdo` selects Covey's, and without the key it is verl's own.
Only the trainer of `trainer.use_v1=false` has the columns.

DGDO's weights are kept in the process that computes advantages. verl's checkpoints do not contain them, so a resumed
run restarts with the warm-up.
"""

from __future__ import annotations

import dataclasses
import functools
import warnings
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from covey.algorithms.dgdo import Dgdo
from covey.algorithms.functional import advantages, index_groups
from covey.algorithms.gdpo import Gdpo
from covey.algorithms.gvpo import Gvpo
from covey.algorithms.ops import group_size
from covey.errors import InputError, unknown

Estimate = tuple[Tensor, Tensor]  # advantages and returns, [N, T]
Estimator = Callable[..., Estimate]

_DGDO: dict[tuple[str, ...], dict[str, Any]] = {}  # the state of each set of rewards


def gvpo_advantage(
    token_level_rewards: Tensor, response_mask: Tensor, index: Any, config: Any = None, **_: Any
) -> Estimate:
    """β N / (G (k−1)) · w of each answer, on its tokens."""
    gvpo = _gvpo(config)
    mask_NT = response_mask.bool()
    group_N, nonempty_N = index_groups(index.tolist()).to(mask_NT.device), mask_NT.any(-1)
    reward_N = token_level_rewards.sum(-1)  # R − βρ
    weight_N = gvpo.weights(torch.zeros_like(reward_N), reward_N, group_N, nonempty_N)
    divisor_N = (group_size(group_N, reward_N.dtype, nonempty_N) - int(gvpo.use_bessel_correction)).clamp(min=1)
    per_group = len(group_N) / max(len(group_N[nonempty_N].unique()), 1)
    found_NT = (gvpo.beta * per_group * weight_N / divisor_N)[:, None] * mask_NT
    return found_NT, found_NT


def gvpo_loss(
    old_log_prob: Tensor,
    log_prob: Tensor,
    advantages: Tensor,
    response_mask: Tensor,
    loss_agg_mode: str = "token-mean",
    config: Any = None,
    rollout_is_weights: Tensor | None = None,
) -> tuple[Tensor, dict[str, Any]]:
    """−Σ_t A_i log π over the tokens of an answer, averaged over answers."""
    from verl.trainer.ppo.core_algos import agg_loss

    if loss_agg_mode != "seq-mean-token-sum":
        raise InputError(
            f"gvpo sums over tokens by its theory; loss_agg_mode={loss_agg_mode} would change its optimum or scale\n"
            "  set actor_rollout_ref.actor.loss_agg_mode=seq-mean-token-sum"
        )
    if rollout_is_weights is not None:
        raise InputError(
            "importance weights would break GVPO's zero sum; it is valid for samples of any policy as it is\n"
            "  set algorithm.rollout_correction.rollout_is=null"
        )
    if config.use_kl_loss:
        raise InputError(
            "a KL loss breaks GVPO's zero sum: its KL is inside the weights\n"
            "  set actor_rollout_ref.actor.use_kl_loss=false algorithm.use_kl_in_reward=true"
        )
    mask_NT = response_mask.bool()
    loss = agg_loss(-advantages * log_prob, mask_NT, loss_agg_mode, **config.global_batch_info)
    moved_N = torch.where(mask_NT, log_prob.detach() - old_log_prob, 0.0).sum(-1)
    return loss, {
        "actor/ppo_kl": -float(moved_N.sum() / mask_NT.sum().clamp(min=1)),
        "actor/gvpo_stale_log_ratio": float(moved_N.abs().mean()),  # how far ρ has moved since w was computed
    }


def _gvpo(config: Any) -> Gvpo:
    """GVPO with verl's settings: β is kl_ctrl.kl_coef; the rest may be added as `+algorithm.gvpo.clip_weight=…`."""
    if config is None:
        raise InputError("gvpo takes β from algorithm.kl_ctrl.kl_coef, and no algorithm settings were passed")
    if config.get("use_kl_in_reward") and config.get("kl_penalty") not in ("kl", "k1"):
        raise InputError(
            f"gvpo needs the log-ratio itself; algorithm.kl_penalty={config.get('kl_penalty')} is another estimator\n"
            "  set algorithm.kl_penalty=kl"
        )
    if config.get("use_kl_in_reward") and config.kl_ctrl.type != "fixed":
        raise InputError("gvpo's β scales the loss and its optimum, and may not move: set algorithm.kl_ctrl.type=fixed")
    correction = config.get("rollout_correction") or {}
    for key in ("rollout_is", "rollout_rs", "bypass_mode"):
        if correction.get(key):
            raise InputError(
                f"algorithm.rollout_correction.{key} breaks GVPO: weights and rejections break its zero sum, and\n"
                "  bypass_mode replaces the loss by another; gvpo is valid for samples of any policy as it is"
            )
    known = [f.name for f in dataclasses.fields(Gvpo) if not f.name.startswith(("beta", "reference"))]
    return Gvpo(beta=float(config.kl_ctrl.kl_coef), **_settings("gvpo", config, known))


def gdpo_advantage(
    token_level_rewards: Tensor,
    response_mask: Tensor,
    index: Any,
    config: Any = None,
    non_tensor_batch: Mapping[str, Any] | None = None,
    **_: Any,
) -> Estimate:
    """Covey's GDPO: normalised over answers at the end, not over tokens."""
    columns, weights = _columns("covey_gdpo", config, non_tensor_batch, token_level_rewards)
    options = _settings("covey_gdpo", config, [f.name for f in dataclasses.fields(Gdpo)])
    return _on_tokens(advantages("gdpo", columns, index.tolist(), weights=weights, **options), response_mask)


def dgdo_advantage(
    token_level_rewards: Tensor,
    response_mask: Tensor,
    index: Any,
    config: Any = None,
    non_tensor_batch: Mapping[str, Any] | None = None,
    **_: Any,
) -> Estimate:
    """DGDO, whose weights persist between calls. Settings may be added as `+algorithm.dgdo.warmup_steps=…`."""
    columns, weights = _columns("dgdo", config, non_tensor_batch, token_level_rewards)
    options = _settings("dgdo", config, [f.name for f in dataclasses.fields(Dgdo) if f.init])
    state = _DGDO.setdefault(tuple(columns), {})
    found_N = advantages("dgdo", columns, index.tolist(), weights=weights, state=state, **options)
    return _on_tokens(found_N, response_mask)


def _columns(
    name: str, config: Any, non_tensor_batch: Mapping[str, Any] | None, like: Tensor
) -> tuple[dict[str, Tensor], dict[str, float]]:
    """The named rewards and their weights, from verl's own settings."""
    if non_tensor_batch is None:
        raise InputError(
            f"{name} needs each reward by itself, and verl passes them only to the estimator called gdpo\n"
            f"  set algorithm.adv_estimator=gdpo +algorithm.gdpo_estimator={name} trainer.use_v1=false"
        )
    keys = (config.get("gdpo_reward_keys") if config is not None else None) or []
    absent = [key for key in keys if key not in non_tensor_batch]
    if not keys or absent:
        raise InputError(
            f"{name}: name the rewards by +algorithm.gdpo_reward_keys=[a,b], keys of what compute_score returns\n"
            f"  not among this batch's: {', '.join(absent) or 'none named'}; there are {', '.join(non_tensor_batch)}"
        )
    if config.get("use_kl_in_reward"):
        raise InputError(
            f"{name} normalises each reward by itself, and the KL is not one of them\n"
            "  set algorithm.use_kl_in_reward=false actor_rollout_ref.actor.use_kl_loss=true"
        )
    shares = list(config.get("gdpo_reward_weights") or [1.0] * len(keys))
    if len(shares) != len(keys):
        raise InputError(f"algorithm.gdpo_reward_weights has {len(shares)} weights for {len(keys)} rewards")
    columns = {key: _scores(non_tensor_batch[key]).to(like) for key in keys}
    return columns, dict(zip(keys, map(float, shares), strict=True))


def _scores(values: Any) -> Tensor:
    """A reward column as numbers; NaN for a missing reward."""
    return torch.tensor([float("nan") if value is None else float(value) for value in values], dtype=torch.float64)


def _settings(name: str, config: Any, known: list[str]) -> dict[str, Any]:
    """The settings under `algorithm.NAME`."""
    options = dict(config.get(name) or {})
    for key in options:
        if key not in known:
            raise unknown(f"setting of {name}", key, known)
    return options


def _on_tokens(advantage_N: Tensor, response_mask: Tensor) -> Estimate:
    found_NT = advantage_N[:, None] * response_mask
    return found_NT, found_NT


ESTIMATORS: dict[str, Estimator] = {
    "gvpo": gvpo_advantage,
    "covey_gdpo": gdpo_advantage,
    "dgdo": dgdo_advantage,
}


def _wrap_gdpo(original: Estimator) -> Estimator:
    """The estimator `gdpo`: that of verl, unless algorithm.gdpo_estimator names one of Covey's."""

    @functools.wraps(original)
    def gdpo(*args: Any, **kwargs: Any) -> Estimate:
        config = kwargs.get("config")
        name = None if config is None else config.get("gdpo_estimator")
        if name is None:
            return original(*args, **kwargs)
        chosen = {key: estimator for key, estimator in ESTIMATORS.items() if key != "gvpo"}
        if name not in chosen:
            raise unknown("algorithm.gdpo_estimator", name, chosen)
        return chosen[name](*args, **kwargs)

    return gdpo


def register() -> None:
    """Register the names with verl. A name that is already taken is kept, with a warning."""
    from verl.trainer.ppo import core_algos

    estimators, losses = core_algos.ADV_ESTIMATOR_REGISTRY, core_algos.POLICY_LOSS_REGISTRY
    if estimators.get("gvpo") is gvpo_advantage:
        return
    for registry, functions in ((estimators, ESTIMATORS), (losses, {"gvpo": gvpo_loss})):
        for name, function in functions.items():
            if registry.setdefault(name, function) is not function:
                warnings.warn(f"verl already has {name!r}: Covey's is not registered", stacklevel=2)
    if "gdpo" in estimators:
        estimators["gdpo"] = _wrap_gdpo(estimators["gdpo"])
