"""The list of algorithms, by name. Each has a file of its own.

An algorithm is an estimator (rewards → advantages) with a loss (advantages, log-probs → a loss per token). Each can be
combined with others: `algorithm=gdpo algorithm.loss=gspo`. The settings of an algorithm are the fields of its parts.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from covey.algorithms.cispo import Cispo
from covey.algorithms.covariance import ClipCov, KlCov
from covey.algorithms.dgdo import Dgdo
from covey.algorithms.dppo import Dppo
from covey.algorithms.gae import Gae
from covey.algorithms.gdpo import Gdpo
from covey.algorithms.gigpo import Gigpo
from covey.algorithms.gmpo import Gmpo
from covey.algorithms.gpg import Gpg
from covey.algorithms.grpo import Grpo
from covey.algorithms.grpo_passk import GrpoPassk
from covey.algorithms.gspo import Gspo
from covey.algorithms.gvpo import Gvpo
from covey.algorithms.maxrl import Maxrl
from covey.algorithms.online_dpo import OnlineDpo
from covey.algorithms.opo import Opo
from covey.algorithms.otb import Otb
from covey.algorithms.policy_gradient import PolicyGradient
from covey.algorithms.ppo_clip import PpoClip
from covey.algorithms.raft import Raft
from covey.algorithms.reinforce_plus_plus import ReinforcePlusPlus, ReinforcePlusPlusBaseline
from covey.algorithms.remax import Remax
from covey.algorithms.rloo import Rloo
from covey.algorithms.sapo import Sapo
from covey.algorithms.turn_returns import TurnReturns
from covey.algorithms.vespo import Vespo

Defaults = Mapping[str, Any]


def unsupported(cls: type) -> Mapping[str, str]:
    """Reasons why an estimator or loss does not support some settings, by the first word of the setting; "loss": why it
    is only compatible with itself; "kl_in=reward": why a KL may only be in the loss."""
    return getattr(cls, "unsupported", {})


@dataclass(frozen=True)
class Loss:
    objective: type
    defaults: Defaults = field(default_factory=dict)  # where they differ from the defaults of the parts

    @property
    def exchangeable(self) -> bool:
        """Whether other estimators can use this loss."""
        return "loss" not in unsupported(self.objective)


LOSSES: dict[str, Loss] = {
    "ppo_clip": Loss(PpoClip, {"aggregation": "seq-mean-token-mean"}),
    "dapo": Loss(PpoClip, {"clip_high": 0.28}),
    "dr_grpo": Loss(PpoClip, {"aggregation": "seq-mean-token-sum-norm"}),
    "gspo": Loss(Gspo, {"aggregation": "seq-mean-token-mean"}),
    "cispo": Loss(Cispo),
    "sapo": Loss(Sapo, {"aggregation": "seq-mean-token-mean"}),
    "luspo": Loss(Gspo, {"aggregation": "seq-mean-token-sum"}),
    "gmpo": Loss(Gmpo, {"aggregation": "seq-mean-token-mean"}),
    "vespo": Loss(Vespo),
    "dppo_tv": Loss(Dppo, {"aggregation": "seq-mean-token-sum-norm"}),
    "dppo_kl": Loss(
        Dppo, {"aggregation": "seq-mean-token-sum-norm", "divergence": "kl", "clip_low": 0.05, "clip_high": 0.05}
    ),
    "clip_cov": Loss(ClipCov),
    "kl_cov": Loss(KlCov),
    "policy_gradient": Loss(PolicyGradient),
    "gvpo": Loss(Gvpo),
    "online_dpo": Loss(OnlineDpo),
}


@dataclass(frozen=True)
class Entry:
    estimator: type
    loss: str
    paper: str
    summary: str
    defaults: Defaults = field(default_factory=dict)
    also: tuple[str, ...] = ()  # other spellings of the name


_OVER_TOKENS = {"aggregation": "token-mean"}

ALGORITHMS: dict[str, Entry] = {
    "gvpo": Entry(Gvpo, "gvpo", "2504.19599", "group variance: centred rewards, KL inside the weights, no clipping"),
    "grpo": Entry(
        Grpo,
        "ppo_clip",
        "2402.03300",
        "group-normalised rewards with PPO's clipped loss",
        also=("grpo_vectorized",),
    ),
    "dr_grpo": Entry(
        Grpo,
        "dr_grpo",
        "2503.20783",
        "GRPO without its two biases: no σ, no length in the mean",
        {"std_normalize": False},
    ),
    "dapo": Entry(
        Grpo,
        "dapo",
        "2503.14476",
        "GRPO with a higher upper clip, token mean, overlong punishment and dynamic sampling",
        {"filter_groups": True, "overlong_buffer": 0.2},
    ),
    "gspo": Entry(Grpo, "gspo", "2507.18071", "one ratio per answer, so that answers are clipped as a whole"),
    "cispo": Entry(Grpo, "cispo", "2506.13585", "clips importance weights instead of gradients: no token is silenced"),
    "sapo": Entry(Grpo, "sapo", "2511.20347", "a smooth gate instead of a clip"),
    "luspo": Entry(Grpo, "luspo", "2602.05261", "GSPO without its 1/length: a long answer counts for all its tokens"),
    "gmpo": Entry(
        Grpo, "gmpo", "2507.20673", "the geometric mean of an answer's clipped token ratios", also=("geo_mean",)
    ),
    "vespo": Entry(Grpo, "vespo", "2602.10693", "a smooth weight of the answer's whole importance ratio"),
    "dppo": Entry(
        Grpo,
        "dppo_tv",
        "2602.04879",
        "a trust region of divergence instead of a clipped ratio",
        {"std_normalize": False},
    ),
    "clip_cov": Entry(Grpo, "clip_cov", "2505.22617", "skips a few of the tokens that make the entropy collapse"),
    "kl_cov": Entry(Grpo, "kl_cov", "2505.22617", "a KL on the few tokens that make the entropy collapse"),
    "maxrl": Entry(
        Maxrl, "ppo_clip", "2602.02710", "centred rewards over their mean: climbs log p instead of p", _OVER_TOKENS
    ),
    "gdpo": Entry(Gdpo, "ppo_clip", "2601.05242", "several rewards, each normalised by itself before they are added"),
    "dgdo": Entry(Dgdo, "ppo_clip", "", "GDPO whose reward weights follow how unstable each reward is"),
    "ppo": Entry(
        Gae, "ppo_clip", "1707.06347", "a critic's advantages (GAE) with the clipped loss", _OVER_TOKENS, ("gae",)
    ),
    "reinforce_plus_plus": Entry(
        ReinforcePlusPlus,
        "ppo_clip",
        "2501.03262",
        "token returns normalised over the batch: no critic, no group",
        _OVER_TOKENS,
        ("reinforce++",),
    ),
    "reinforce_plus_plus_baseline": Entry(
        ReinforcePlusPlusBaseline,
        "ppo_clip",
        "2501.03262",
        "the group mean subtracted, then normalised over the batch",
        _OVER_TOKENS,
        ("reinforce++_baseline", "reinforce++-baseline"),
    ),
    "rloo": Entry(
        Rloo, "policy_gradient", "2402.14740", "each answer against the mean of the others", also=("rloo_vectorized",)
    ),
    "remax": Entry(Remax, "policy_gradient", "2310.10505", "each answer against the greedy answer"),
    "opo": Entry(Opo, "policy_gradient", "2505.23585", "the baseline of least variance: rewards weighted by length"),
    "gpg": Entry(Gpg, "policy_gradient", "2504.02546", "the plain gradient, corrected for answers without signal"),
    "grpo_passk": Entry(GrpoPassk, "ppo_clip", "2503.19595", "only the best answer counts: for pass@k"),
    "turn_returns": Entry(TurnReturns, "ppo_clip", "2505.11821", "GRPO for each turn, over the rewards from it on"),
    "gigpo": Entry(
        Gigpo,
        "ppo_clip",
        "2505.10978",
        "GRPO, and turns compared with turns in the same state",
        _OVER_TOKENS,
    ),
    "otb": Entry(
        Otb,
        "ppo_clip",
        "2602.07078",
        "the baseline of least variance at each token",
        _OVER_TOKENS,
        ("optimal_token_baseline", "tir_optimal_token_baseline"),
    ),
    "raft": Entry(Raft, "ppo_clip", "2504.11343", "imitates the answers with a positive reward", also=("raft++",)),
    "online_dpo": Entry(
        OnlineDpo, "online_dpo", "2402.04792", "a preference loss on the best against the worst answer", also=("dpo",)
    ),
}

ALIASES = {other: name for name, entry in ALGORITHMS.items() for other in entry.also}
