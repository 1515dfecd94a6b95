"""On-policy distillation: the policy answers, and a teacher π_T scores each of its tokens.

Agarwal et al. 2023 (GKD), https://arxiv.org/abs/2306.13649
Gu et al. 2023 (MiniLLM), https://arxiv.org/abs/2306.08543
Lu et al. 2025 (Thinking Machines), "On-Policy Distillation"

    sampled   A_t −= coef · Σ_{s≥t} discount^(s−t) d_s        d_s = log π_old(y_s) − log π_T(y_s)
    full      L   += coef · aggregate(KL_t)                   KL_t = Σ_v π(v) log π(v)/π_T(v), over the vocabulary
    top_k     L   += coef · aggregate(KL_t)                   over the teacher's k most likely tokens, all others
                                                              being one class: at most the full KL

With discount 0 a token answers for itself alone (Thinking Machines): in expectation, `sampled` has the gradient of
`full`, Σ_t ∇KL_t at the sampled prefixes, with more variance. With discount 1 it has the gradient of KL(π ‖ π_T) of
whole answers (MiniLLM). With a reward R of the answer, the optimum with discount 1 is π ∝ π_T e^{R/coef}; with
discount 0 the fixed point is π(v|s) ∝ π_T(v|s) e^{Q(s,v)/coef}, where Q is the mean reward of π after v. The two are
equal for answers of one token.

Deviations: MiniLLM's single-step term, length normalisation and mixed sampling are omitted, as are GKD's forward KL and
its share of demonstrations. The advantage is added after the estimator's own normalisation, and the loss clips the sum.
Shapes: N episodes, R rows, T tokens.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, ClassVar

from covey.algorithms.ops import backward_sum, from_timeline, masked_mean, timeline, to_timeline
from covey.imports import torch
from covey.protocols import Advantages, LossTerm, Metrics, Needs, TokenOutputs
from covey.types import Batch, Sample, Samples

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True, slots=True)
class NoRewards:
    """The estimator of a teacher alone: rewards are measured, and have no advantage."""

    needs: ClassVar[Needs] = Needs()

    def advantages(self, samples: Samples) -> Advantages:
        return Advantages(torch.zeros_like(samples.old_logprobs_RT))


@dataclass(frozen=True, slots=True)
class Teacher:
    """What any algorithm learns from a teacher beside its rewards. The settings are those of the section `teacher`."""

    kl: str = "sampled"
    coef: float = 1.0
    discount: float = 0.0

    @property
    def needs(self) -> Needs:
        return Needs(teacher=self.kl == "sampled", teacher_kl=self.kl == "full", teacher_top=self.kl == "top_k")

    def add_to(self, advantages: Advantages, samples: Samples) -> Advantages:
        """With kl=sampled, the advantages of tokens with the teacher's part."""
        if self.kl != "sampled":
            return advantages
        assert samples.teacher_logprobs_RT is not None, "distillation needs the teacher's log-probs"
        values, old_RT = advantages.values, samples.old_logprobs_RT
        scored_RT = samples.mask_RT & scored(samples.rows, old_RT)
        cost_RT = (old_RT - samples.teacher_logprobs_RT.to(old_RT.dtype)).where(scored_RT, 0)
        values_RT = values if values.dim() == 2 else values[samples.episode_R][:, None]
        metrics = {"distill/kl": masked_mean(cost_RT, scored_RT), "distill/share": _share(scored_RT, samples.mask_RT)}
        total_RT = values_RT - self.coef * self._with_later(cost_RT, samples)
        return replace(advantages, values=total_RT, metrics={**advantages.metrics, **metrics})

    def _with_later(self, cost_RT: Tensor, samples: Samples) -> Tensor:
        """The cost of each token and, discounted, of the sampled tokens after it."""
        if self.discount == 0:
            return cost_RT
        places_NL, valid_NL = timeline(samples.mask_RT, samples.episode_R, samples.episodes)
        return from_timeline(
            backward_sum(to_timeline(cost_RT, places_NL, valid_NL), self.discount), places_NL, valid_NL, cost_RT
        )

    def loss(
        self, out: TokenOutputs, batch: Batch, aggregate: Callable[[Tensor, Batch], LossTerm]
    ) -> dict[str, LossTerm]:
        if out.teacher_kl is None:
            return {}
        kl_RT = out.teacher_kl.where(batch.mask_RT & scored(batch.rows, out.teacher_kl), 0)
        return {"distill": aggregate(self.coef * kl_RT, batch)}

    def metrics(self, out: TokenOutputs, batch: Batch) -> Metrics:
        if out.teacher_kl is None:
            return {}
        scored_RT = batch.mask_RT & scored(batch.rows, out.teacher_kl)
        return {"distill/kl": masked_mean(out.teacher_kl, scored_RT), "distill/share": _share(scored_RT, batch.mask_RT)}


def scored(rows: Sequence[Sample], like: Tensor) -> Tensor:
    """Whether the teacher scores each row, [R, 1]."""
    return torch.tensor([row.teacher_prompt_ids != () for row in rows], device=like.device)[:, None]


def teacher_rows(rows: Sequence[Sample]) -> list[Sample]:
    """The rows as the teacher reads them: its own prompts before the same responses."""
    return [replace(row, prompt_ids=row.teacher_prompt_ids) if row.teacher_prompt_ids else row for row in rows]


def _share(scored_RT: Tensor, mask_RT: Tensor) -> float:
    return float(scored_RT.sum() / mask_RT.sum().clamp(min=1))
