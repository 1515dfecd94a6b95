"""The learner: annotates samples with what policies say of them, and turns a mini-batch into one optimiser step.

    mini-batch → micro-batches by token budget → loss sums / counts of the whole mini-batch → gradient → AdamW

The split into micro-batches never changes the gradient: losses are sums, divided once by counts over the mini-batch,
and where a loss couples the members of a group that is split, a first pass without gradient tells it about all of them.

Shapes: N episodes, R rows, T response tokens, M sampled tokens.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from covey.algorithms.ops import divide, effective_sample_size, episode_sum, masked_mean, probability_ratio
from covey.config.schema import LearnerConfig
from covey.errors import RunFailed
from covey.learner.forward import token_logprobs
from covey.learner.models import Reference
from covey.learner.optimizer import MasterAdamW
from covey.learner.packing import pack, plan
from covey.protocols import Algorithm, LossTerm, Metrics, Needs, TokenOutputs, TokenTrace
from covey.types import Batch, Sample, Samples


class NonFiniteError(RunFailed):
    """Too many updates in a row had a loss or gradient that is not a number."""


class Learner:
    def __init__(
        self, model: Any, config: LearnerConfig, *, total_updates: int, reference: Reference | None = None
    ) -> None:
        self.model = model
        self.config = config
        self.reference = reference
        # Adapters may be float32 on float16 weights: what counts is what gradients flow through.
        half = any(p.dtype == torch.float16 for p in model.parameters())
        self.optimizer = MasterAdamW(model.named_parameters(), config, total_updates, scale_loss=half)
        self.skipped = 0
        self.skipped_in_a_row = 0

    @property
    def device(self) -> torch.device:
        return next(iter(self.optimizer.working.values())).device

    @property
    def _dtype(self) -> torch.dtype:
        """Log-probs are float32, also of bfloat16 weights; float64 weights keep theirs."""
        return torch.promote_types(next(iter(self.optimizer.working.values())).dtype, torch.float32)

    def weights(self) -> Any:
        """The module itself: an engine in this process samples from it without a copy."""
        return self.model

    # -- what policies say of samples ---------------------------------------------------------------------------

    def annotate(self, samples: Samples, needs: Needs) -> Samples:
        """Reference log-probs if the algorithm needs them."""
        if not needs.reference:
            return samples
        assert self.reference is not None, "the algorithm needs a reference policy and none was loaded"
        with self.reference.active() as model:
            return replace(samples, ref_logprobs_RT=self.logprobs(samples.rows, samples.temperature, model))

    @torch.no_grad()
    def logprobs(self, rows: Sequence[Sample], temperature: float, model: Any = None) -> Tensor:
        """Log-probs of the sampled tokens of rows under a model (by default the policy), [R, T] on the CPU."""
        width = max(len(row.response_ids) for row in rows)
        found_RT = torch.zeros(len(rows), width, dtype=self._dtype)
        for lines in plan(rows, self.config.micro_batch_tokens, self.config.micro_batch_size):
            out = self._forward(rows, lines, temperature, width, model or self.model)
            found_RT[torch.tensor(_flat(lines))] = out.logprobs.cpu()
        return found_RT

    def _forward(
        self, rows: Sequence[Sample], lines: list[list[int]], temperature: float, width: int, model: Any
    ) -> TokenOutputs:
        """Log-probs and entropies of a micro-batch, [R, T], rows in the order of the lines."""
        packed = pack(rows, lines).to(self.device)
        logprob_M, entropy_M = token_logprobs(
            model, packed, temperature, entropy_gradient=self.config.entropy_coef != 0
        )
        at = (packed.row_M, packed.column_M)
        empty_RT = logprob_M.new_zeros(len(_flat(lines)), width)
        return TokenOutputs(empty_RT.index_put(at, logprob_M), empty_RT.index_put(at, entropy_M))

    # -- one optimiser step --------------------------------------------------------------------------------------

    def update(self, batch: Batch, algorithm: Algorithm) -> tuple[Metrics, TokenTrace]:
        micro_batches = plan(batch.rows, self.config.micro_batch_tokens, self.config.micro_batch_size)
        if algorithm.couples_groups and _splits_a_group(batch, micro_batches):
            batch = replace(batch, policy_sum_N=self._policy_sums(batch))
        width = batch.mask_RT.shape[1]
        trace = TokenTrace(*(torch.zeros(len(batch.rows), width) for _ in range(3)))
        tally = _Tally()
        self.optimizer.zero_grad()
        for lines in micro_batches:
            index = _flat(lines)
            view = _to(batch.take(index), self.device)
            out = self._forward(batch.rows, lines, batch.temperature, width, self.model)
            terms = divide(self._loss(out, view, algorithm), view)
            self.optimizer.backward(torch.stack(list(terms.values())).sum())
            self._trace(trace, index, out, view)
            tally.add_terms(terms)
            tally.add(self._token_metrics(out, view), weight=int(view.mask_RT.sum()))
            tally.add(algorithm.metrics(out, view), weight=len(view.episode_R.unique()))
        return tally.result() | self._step(tally.loss()), trace

    def _loss(self, out: TokenOutputs, view: Batch, algorithm: Algorithm) -> dict[str, LossTerm]:
        terms = algorithm.loss(out, view)
        if self.config.entropy_coef:
            terms["entropy"] = LossTerm(-self.config.entropy_coef * out.entropy[view.mask_RT].sum(), "tokens")
        return terms

    @torch.no_grad()
    def _policy_sums(self, batch: Batch) -> Tensor:
        """Σ log π of every episode of the mini-batch under the weights of the moment."""
        logprobs_RT = self.logprobs(batch.rows, batch.temperature)
        return episode_sum(logprobs_RT, batch.mask_RT, batch.episode_R, len(batch.group_N))

    def _step(self, loss: float) -> Metrics:
        finite = math.isfinite(loss)
        if finite:
            rate, norm, made = self.optimizer.step()
        else:
            self.optimizer.zero_grad()
            rate, norm, made = 0.0, math.nan, False
        self.skipped += not made
        # In float16 the scale of the loss is found by overflowing: with a sound loss that is no sign of trouble.
        expected = finite and self.optimizer.scaler.is_enabled()
        self.skipped_in_a_row = 0 if made or expected else self.skipped_in_a_row + 1
        if self.skipped_in_a_row >= self.config.max_skipped:
            raise NonFiniteError(
                f"{self.skipped_in_a_row} updates in a row had a loss or gradient that is not finite\n"
                "  likely causes: learner.lr too high, a reward that returns huge values, or float16 (try bfloat16)"
            )
        clipped = float(norm > self.config.grad_clip) if self.config.grad_clip else 0.0
        return {"optim/lr": rate, "optim/skipped": self.skipped, "grad/norm": norm, "grad/clipped": clipped}

    @torch.no_grad()
    def _token_metrics(self, out: TokenOutputs, view: Batch) -> Metrics:
        mask, log_ratio = view.mask_RT, out.logprobs - view.old_logprobs_RT
        ratio = probability_ratio(out.logprobs, view.old_logprobs_RT)
        entropy = masked_mean(out.entropy, mask)
        return {
            "policy/entropy": entropy,
            "actor/entropy_loss": entropy,
            "policy/ratio_mean": masked_mean(ratio, mask),
            "policy/ratio_max": float(ratio[mask].max()),
            "policy/kl_old": masked_mean(-log_ratio, mask),
            "policy/ess": effective_sample_size(ratio[mask]),
        }

    def _trace(self, trace: TokenTrace, index: list[int], out: TokenOutputs, view: Batch) -> None:
        at = torch.tensor(index)
        ratio = probability_ratio(out.logprobs.detach(), view.old_logprobs_RT)
        for column, value in (
            (trace.advantage, view.advantages_RT),
            (trace.ratio, ratio),
            (trace.entropy, out.entropy),
        ):
            column[at] = torch.where(view.mask_RT, value.detach(), torch.zeros_like(value)).float().cpu()


class _Tally:
    """Sums the loss terms of micro-batches and averages their statistics, weighted by the tokens or episodes they are
    of; a name with max or min in it keeps the extreme."""

    def __init__(self) -> None:
        self.terms: dict[str, float] = {}
        self.sums: dict[str, float] = {}
        self.weights: dict[str, float] = {}
        self.extremes: dict[str, float] = {}

    def add_terms(self, terms: dict[str, Tensor]) -> None:
        for name, value in terms.items():
            self.terms[name] = self.terms.get(name, 0.0) + float(value.detach())

    def add(self, metrics: Metrics, weight: int) -> None:
        for name, value in metrics.items():
            if (pick := extreme(name)) is not None:
                self.extremes[name] = pick(self.extremes.get(name, value), value)
            else:
                self.sums[name] = self.sums.get(name, 0.0) + value * weight
                self.weights[name] = self.weights.get(name, 0) + weight

    def loss(self) -> float:
        return sum(self.terms.values())

    def result(self) -> Metrics:
        found = {name: value / max(self.weights[name], 1) for name, value in self.sums.items()} | self.extremes
        return found | {f"{name}/loss": value for name, value in self.terms.items()} | {"loss/total": self.loss()}


def extreme(name: str) -> Callable[[float, float], float] | None:
    """How a statistic of parts becomes one of the whole: the larger, the smaller, or (None) their mean."""
    words = name.rsplit("/", 1)[-1].split("_")
    return max if "max" in words else min if "min" in words else None


def _flat(lines: list[list[int]]) -> list[int]:
    return [index for line in lines for index in line]


def _splits_a_group(batch: Batch, micro_batches: list[list[list[int]]]) -> bool:
    homes: dict[int, int] = {}
    for number, lines in enumerate(micro_batches):
        for index in _flat(lines):
            group = int(batch.group_N[batch.episode_R[index]])
            if homes.setdefault(group, number) != number:
                return True
    return False


def _to(batch: Batch, device: torch.device) -> Batch:
    moved: dict[str, Any] = {
        name: value.to(device) for name in batch.__slots__ if isinstance(value := getattr(batch, name), Tensor)
    }
    return replace(batch, **moved)
