"""The learner: annotates samples with what policies say of them, and turns a mini-batch into one optimiser step.

    mini-batch → micro-batches by token budget → loss sums / counts of the whole mini-batch → gradient → AdamW

The split into micro-batches never changes the gradient: losses are sums, divided once by counts over the mini-batch,
and where a loss couples the members of a group that is split, a first pass without gradient tells it about all of them.

Shapes: N episodes, R rows, T response tokens, M sampled tokens.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from covey.algorithms.aggregation import divide
from covey.algorithms.ops import effective_sample_size, episode_sum, masked_mean, probability_ratio
from covey.config.schema import CriticConfig, LearnerConfig
from covey.errors import RunFailed
from covey.learner.critic import Critic
from covey.learner.forward import RefLogits, causal_lm, final_logits, hidden_states, token_logprobs
from covey.learner.models import Reference
from covey.learner.optimizer import MasterAdamW
from covey.learner.packing import Packed, pack, plan
from covey.protocols import Algorithm, Couples, LossTerm, Metrics, Needs, TokenOutputs, TokenTrace
from covey.types import Batch, Sample, Samples


class NonFiniteError(RunFailed):
    """Too many updates in a row had a loss or gradient that is not a number."""


@dataclass(frozen=True)
class Ask:
    """What to find out about sampled tokens."""

    policy: bool = True  # log-probs and entropy
    values: bool = False  # the critic's
    full_kl: bool = False  # to the reference, over the vocabulary


class Learner:
    def __init__(
        self,
        model: Any,
        config: LearnerConfig,
        *,
        total_updates: int,
        reference: Reference | None = None,
        critic: CriticConfig | None = None,
        critic_backbone: Any = None,
    ) -> None:
        """With `critic` settings a critic learns beside the policy: on `critic_backbone`, or on the policy's own."""
        self.model = model
        self.config = config
        self.reference = reference
        # Adapters may be float32 on float16 weights: what counts is what gradients flow through.
        half = any(p.dtype == torch.float16 for p in model.parameters())
        self.scaler = torch.amp.GradScaler(next(model.parameters()).device.type, enabled=half)
        self.optimizer = MasterAdamW(model.named_parameters(), config, total_updates, scaler=self.scaler)
        self.critic: Critic | None = None
        if critic is not None:
            self.critic = Critic(
                model, critic, config, total_updates=total_updates, scaler=self.scaler, backbone=critic_backbone
            )
        self.skipped = 0
        self.skipped_in_a_row = 0
        self._home: torch.device | None = None  # where the weights belong, while they are not there

    @property
    def device(self) -> torch.device:
        return next(iter(self.optimizer.working.values())).device

    @property
    def _dtype(self) -> torch.dtype:
        """Log-probs are float32, also of bfloat16 weights; float64 weights keep theirs."""
        return torch.promote_types(next(iter(self.optimizer.working.values())).dtype, torch.float32)

    @property
    def _token_budget(self) -> int:
        return self.config.micro_batch_tokens or 8192

    def weights(self) -> Any:
        """The module itself: an engine in this process samples from it without a copy."""
        return self.model

    def rest(self) -> None:
        """With `offload_weights`, the weights wait in CPU memory; the engine has a copy of its own."""
        if self.config.offload_weights and self.device.type == "cuda":
            self._home = self.device
            self._move(torch.device("cpu"))
            torch.cuda.empty_cache()

    def wake(self) -> None:
        if self._home is not None:
            self._move(self._home)
            self._home = None

    @torch.no_grad()
    def _move(self, device: torch.device) -> None:
        for weight in self.model.parameters():
            weight.data = weight.data.to(device)

    # -- what policies say of samples ---------------------------------------------------------------------------

    def annotate(self, samples: Samples, needs: Needs) -> Samples:
        """Whatever the algorithm needs to know of the samples before the first update."""
        if self.critic is not None:
            self.critic.steps += 1
        if needs.reference:
            assert self.reference is not None, "the algorithm needs a reference policy and none was loaded"
            with self.reference.active() as model:
                found = self.logprobs(samples.rows, samples.temperature, model)
            samples = replace(samples, ref_logprobs_RT=found)
        ask = Ask(policy=needs.proximal or needs.sample_full_kl, values=needs.values, full_kl=needs.sample_full_kl)
        if not (ask.policy or ask.values):
            return samples
        out = self.outputs(samples.rows, samples.temperature, ask)
        samples = replace(samples, values_RT=out.values, full_kl_RT=out.full_kl)
        if needs.proximal:
            sampled_RT = samples.old_logprobs_RT
            samples = replace(samples, sampling_logprobs_RT=sampled_RT, old_logprobs_RT=out.logprobs)
        return samples

    def logprobs(self, rows: Sequence[Sample], temperature: float, model: Any = None) -> Tensor:
        """Log-probs of the sampled tokens of rows under a model (by default the policy), [R, T] on the CPU."""
        return self.outputs(rows, temperature, Ask(), model).logprobs

    @torch.no_grad()
    def outputs(self, rows: Sequence[Sample], temperature: float, ask: Ask, model: Any = None) -> TokenOutputs:
        """What is said of the sampled tokens of rows, [R, T] on the CPU, without gradient."""
        width = max(len(row.response_ids) for row in rows)
        columns: dict[str, Tensor] = {}
        for lines in plan(rows, self._token_budget, self.config.micro_batch_size):
            out = self._forward(rows, lines, temperature, width, ask, model or self.model)
            for name in out.__slots__:
                if (part := getattr(out, name)) is not None:
                    whole = columns.setdefault(name, torch.zeros(len(rows), width, dtype=part.dtype))
                    whole[torch.tensor(_flat(lines))] = part.cpu()
        return TokenOutputs(**columns)

    def _forward(
        self, rows: Sequence[Sample], lines: list[list[int]], temperature: float, width: int, ask: Ask, model: Any
    ) -> TokenOutputs:
        """What is said of the tokens of a micro-batch, [R, T], rows in the order of the lines."""
        packed = pack(rows, lines).to(self.device)
        at = (packed.row_M, packed.column_M)
        empty_RT = torch.zeros(len(_flat(lines)), width, dtype=self._dtype, device=self.device)

        def laid_out(column_M: Tensor | None) -> Tensor | None:
            return None if column_M is None else empty_RT.to(column_M.dtype).index_put(at, column_M)

        logprob_M = entropy_M = empty_RT.new_zeros(len(packed.target_M))
        kl_M = value_M = hidden_MD = None
        shares = ask.values and self.critic is not None and self.critic.shared
        if ask.policy or shares:
            hidden_MD = hidden_states(model, packed)
        if ask.policy:
            assert hidden_MD is not None
            logprob_M, entropy_M, kl_M = token_logprobs(
                model,
                hidden_MD,
                packed.target_M,
                temperature,
                entropy_gradient=self.config.entropy_coef != 0,
                reference=self._reference(packed) if ask.full_kl else None,
            )
        if ask.values:
            assert self.critic is not None, "the algorithm needs a critic and none was made"
            value_M = self.critic.values(packed, hidden_MD)
        logprobs, entropy = laid_out(logprob_M), laid_out(entropy_M)
        assert logprobs is not None and entropy is not None
        return TokenOutputs(logprobs, entropy, laid_out(value_M), laid_out(kl_M))

    def _reference(self, packed: Packed) -> tuple[Tensor, RefLogits]:
        """The reference's hidden states, and the way from them to its logits."""
        assert self.reference is not None, "the full KL needs a reference policy and none was loaded"
        reference = self.reference

        def logits(hidden: Tensor) -> Tensor:
            with reference.active() as model:
                return final_logits(causal_lm(model), hidden)

        with torch.no_grad(), reference.active() as model:
            return hidden_states(model, packed), logits

    # -- one optimiser step --------------------------------------------------------------------------------------

    def update(self, batch: Batch, algorithm: Algorithm) -> tuple[Metrics, TokenTrace]:
        micro_batches = plan(batch.rows, self._token_budget, self.config.micro_batch_size)
        if _splits(batch, micro_batches, algorithm.couples):
            batch = replace(batch, policy_sum_N=self._policy_sums(batch))
        width = batch.mask_RT.shape[1]
        ask = Ask(values=self.critic is not None, full_kl=algorithm.needs.full_kl)
        trace = TokenTrace(*(torch.zeros(len(batch.rows), width) for _ in range(3)))
        tally = _Tally()
        self._zero_grad()
        for lines in micro_batches:
            index = _flat(lines)
            view = _to(batch.take(index), self.device)
            out = self._forward(batch.rows, lines, batch.temperature, width, ask, self.model)
            terms = divide(self._loss(out, view, algorithm), view)
            self.scaler.scale(torch.stack(list(terms.values())).sum()).backward()
            self._trace(trace, index, out, view)
            tally.add_terms(terms)
            tokens = int(view.mask_RT.sum())
            tally.add(self._token_metrics(out, view), weight=tokens)
            episodes = len(view.episode_R.unique())
            tally.add(algorithm.metrics(out, view), weight=episodes if algorithm.couples == "groups" else tokens)
        ess = effective_sample_size(trace.ratio[batch.mask_RT])
        return tally.result() | {"policy/ess": ess} | self._step(tally.loss()), trace

    def _loss(self, out: TokenOutputs, view: Batch, algorithm: Algorithm) -> dict[str, LossTerm]:
        critic = self.critic
        if critic is not None and critic.warming_up:
            return {"value": critic.loss(out, view)}
        terms = algorithm.loss(out, view)
        if self.config.entropy_coef:
            terms["entropy"] = LossTerm(-self.config.entropy_coef * out.entropy[view.mask_RT].sum(), "tokens")
        return terms if critic is None else terms | {"value": critic.loss(out, view)}

    def _zero_grad(self) -> None:
        self.optimizer.zero_grad()
        if self.critic is not None:
            self.critic.zero_grad()

    @torch.no_grad()
    def _policy_sums(self, batch: Batch) -> Tensor:
        """Σ log π of every episode of the mini-batch under the weights of the moment."""
        logprobs_RT = self.logprobs(batch.rows, batch.temperature)
        return episode_sum(logprobs_RT, batch.mask_RT, batch.episode_R, len(batch.group_N))

    def _step(self, loss: float) -> Metrics:
        """Update weights, unless the loss or a gradient is not finite."""
        finite = math.isfinite(loss)
        rate, norm, made = 0.0, math.nan, False
        found: Metrics = {}
        if finite:
            made = True
            if self.critic is not None:
                found, made = self.critic.step()
            if self.critic is not None and self.critic.warming_up:
                norm = 0.0
            else:
                rate, norm, moved = self.optimizer.step()
                made = made and moved
            self.scaler.update()
        else:
            self._zero_grad()
        self.skipped += not made
        # In float16 the scale of the loss is found by overflowing: with a sound loss that is no sign of trouble.
        expected = finite and self.scaler.is_enabled()
        self.skipped_in_a_row = 0 if made or expected else self.skipped_in_a_row + 1
        if self.skipped_in_a_row >= self.config.max_skipped:
            raise NonFiniteError(
                f"{self.skipped_in_a_row} updates in a row had a loss or gradient that is not finite\n"
                "  likely causes: learner.lr too high, a reward that returns huge values, or float16 (try bfloat16)"
            )
        clipped = float(norm > self.config.grad_clip) if self.config.grad_clip else 0.0
        return found | {"optim/lr": rate, "optim/skipped": self.skipped, "grad/norm": norm, "grad/clipped": clipped}

    @torch.no_grad()
    def _token_metrics(self, out: TokenOutputs, view: Batch) -> Metrics:
        mask, log_ratio = view.mask_RT, out.logprobs - view.old_logprobs_RT
        ratio = probability_ratio(out.logprobs, view.old_logprobs_RT)
        entropy = masked_mean(out.entropy, mask)
        return {
            "policy/entropy": entropy,
            "actor/entropy_loss": entropy,
            "policy/ratio_mean": masked_mean(ratio, mask),
            "policy/ratio_max": float(ratio[mask].max()) if bool(mask.any()) else 1.0,
            "policy/kl_old": masked_mean(-log_ratio, mask),
            **({} if self.critic is None else self.critic.metrics(out, view)),
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


def _splits(batch: Batch, micro_batches: list[list[list[int]]], couples: Couples) -> bool:
    """Whether a micro-batch holds only a part of what the loss must see as a whole."""
    if couples == "nothing":
        return False
    of_row = batch.episode_R if couples == "episodes" else batch.group_N[batch.episode_R]
    homes: dict[int, int] = {}
    for number, lines in enumerate(micro_batches):
        for index in _flat(lines):
            if homes.setdefault(int(of_row[index]), number) != number:
                return True
    return False


def _to(batch: Batch, device: torch.device) -> Batch:
    moved: dict[str, Any] = {
        name: value.to(device) for name in batch.__slots__ if isinstance(value := getattr(batch, name), Tensor)
    }
    return replace(batch, **moved)
