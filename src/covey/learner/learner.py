"""The learner: annotates samples with what policies say of them, and turns a mini-batch into one optimiser step.

    mini-batch → micro-batches by token budget → loss sums / counts of the whole mini-batch → gradient → AdamW

The split into micro-batches never changes the gradient: losses are sums, divided once by counts over the mini-batch,
and where a loss couples the members of a group that is split, a first pass without gradient tells it about all of them.

Shapes: N episodes, R rows, T response tokens, M sampled tokens.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from covey.algorithms.aggregation import divide
from covey.algorithms.ops import effective_sample_size, episode_sum, masked_mean, probability_ratio
from covey.config.schema import CriticConfig, LearnerConfig
from covey.errors import RunFailed
from covey.learner import attention
from covey.learner.critic import Critic
from covey.learner.forward import CompiledLayers, causal_lm
from covey.learner.optimizer import MasterAdamW
from covey.learner.packing import Bunch, Packed, in_step, pack, share_out
from covey.learner.parallel import ALONE, Ranks, at_rest, bytes_to_train, inside, own_part, shard, shards
from covey.learner.saving import check_finite, load_state, load_tensors, save_model, save_state, save_tensors
from covey.learner.token_scores import Ask, say
from covey.memory import affordable_tokens, bytes_per_token
from covey.models.loading import Reference
from covey.protocols import Algorithm, Couples, LossTerm, Metrics, Needs, TokenOutputs, TokenTrace
from covey.types import Batch, Sample, Samples


class NonFiniteError(RunFailed):
    """Too many updates in a row had a loss or gradient that is not a number."""


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
        ranks: Ranks = ALONE,
    ) -> None:
        """With `critic` settings a critic learns beside the policy: on `critic_backbone`, or on the policy's own. On
        several `ranks`, models may be given in CPU memory where they are going to be sharded."""
        self.model = model
        self.config = config
        self.reference = reference
        self.ranks = ranks
        self.dtype = next(model.parameters()).dtype  # that weights are used and published in
        # Adapters may be float32 on float16 weights: what counts is what gradients flow through.
        half = any(p.dtype == torch.float16 for p in model.parameters())
        self.sharded = shards(config, ranks, bytes_to_train(model))
        if self.sharded:
            self._shard()
        self.scaler = torch.amp.GradScaler((ranks.device or next(model.parameters()).device).type, enabled=half)
        common: dict[str, Any] = {"scaler": self.scaler, "ranks": ranks}
        self.optimizer = MasterAdamW(model.named_parameters(), config, total_updates, **common)
        self.critic: Critic | None = None
        if critic is not None:
            self.critic = Critic(model, critic, config, total_updates=total_updates, backbone=critic_backbone, **common)
        wanted = self.device.type == "cuda" if config.compile is None else config.compile
        self.layers = CompiledLayers(model) if wanted and not self.sharded else None
        self._token_budget = config.micro_batch_tokens
        self.skipped = 0
        self.skipped_in_a_row = 0
        self._home: torch.device | None = None  # where the weights belong, while they are not there

    def _shard(self) -> None:
        shard(self.model, self.ranks, offload=self.config.offload_optimizer)
        if self.reference is not None and not self.reference.adapter:
            shard(self.reference.model, self.ranks, offload=self.config.offload_reference)

    @property
    def device(self) -> torch.device:
        if self.sharded:  # shards may be elsewhere
            assert self.ranks.device is not None
            return self.ranks.device
        return next(iter(self.optimizer.working.values())).device

    @property
    def _dtype(self) -> torch.dtype:
        """Log-probs are float32, also of bfloat16 weights; float64 weights keep theirs."""
        return torch.promote_types(next(iter(self.optimizer.working.values())).dtype, torch.float32)

    def weights(self) -> Any:
        """The module itself: an engine in this process samples from it without a copy. Where it is sharded, all ranks
        must read it together (`sharding.full_weights`)."""
        return self.model

    def offload(self) -> None:
        """With `offload_weights`, the weights wait in CPU memory; the engine has a copy of its own."""
        if self.config.offload_weights and self.device.type == "cuda":
            self._home = self.device
            self._move(torch.device("cpu"))
            torch.cuda.empty_cache()

    def reload(self) -> None:
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
        self._find_budget()
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
        model = model or self.model
        for bunches, counts in self._passes(self._shares(rows), rows):
            packed = pack(rows, bunches).to(self.device)
            with self._reading(packed):
                out = self._forward(packed, (len(_flat(bunches)), width), temperature, ask, model)
            for name in out.__slots__:
                if (part := getattr(out, name)) is not None:
                    whole = columns.setdefault(name, torch.zeros(len(rows), width, dtype=part.dtype))
                    if counts:
                        whole[torch.tensor(_flat(bunches))] = part.cpu()
        self._rest_shards()
        return TokenOutputs(**{name: self.ranks.sum(column) for name, column in columns.items()})

    def _shares(self, rows: Sequence[Sample]) -> list[list[list[Bunch]]]:
        """The micro-batches of every rank: all find out the same."""
        return share_out(rows, self._find_budget(), self.config.micro_batch_size, self.ranks.shares)

    def _passes(self, shares: list[list[list[Bunch]]], rows: Sequence[Sample]) -> list[tuple[list[Bunch], bool]]:
        """This rank's micro-batches, and whether they count. Shards are gathered by all ranks together, or by none."""
        return in_step(shares, self.ranks.share, rows, alike=self.sharded)

    def _rest_shards(self) -> None:
        at_rest(self.model)
        if self.reference is not None:
            at_rest(self.reference.model)

    def _find_budget(self) -> int:
        """Found out once, with the policy as it trains: not while its adapter is switched off."""
        if self._token_budget is None:
            found = affordable_tokens(self.device, self._try_tokens, bytes_per_token(causal_lm(self.model)))
            self._token_budget = self.ranks.smallest(found)
        return self._token_budget

    @torch.enable_grad()
    def _try_tokens(self, count: int) -> None:
        """A forward and backward pass over so many tokens that change nothing, to see what they cost."""
        row = Sample((0,), (0,) * count, (True,) * count, (0.0,) * count, (0,) * count, 0)
        packed = pack([row], [[0]]).to(self.device)
        with self._reading(packed):
            out = self._forward(packed, (1, count), 1.0, Ask(values=self.critic is not None), self.model)
            (out.logprobs.sum() * 0).backward()
        self._zero_grad()

    @contextmanager
    def _reading(self, packed: Packed) -> Iterator[None]:
        """The line is read until its backward pass is over; by compiled layers where that is wanted and possible."""
        fast = attention.choose(causal_lm(self.model), packed.layout)
        with attention.reading(packed.layout), self.layers.active() if fast and self.layers else nullcontext():
            yield

    def _forward(
        self, packed: Packed, shape: tuple[int, int], temperature: float, ask: Ask, model: Any
    ) -> TokenOutputs:
        """What is said of the tokens of a micro-batch, [R, T], rows in the order of the bunches."""
        at = (packed.row_M, packed.column_M)
        empty_RT = torch.zeros(shape, dtype=self._dtype, device=self.device)

        def laid_out(column_M: Tensor | None) -> Tensor | None:
            return None if column_M is None else empty_RT.to(column_M.dtype).index_put(at, column_M)

        nothing_M = empty_RT.new_zeros(len(packed.target_M))
        learned = self.config.entropy_coef != 0

        def work() -> tuple[Tensor | None, ...]:
            return say(
                model, packed, temperature, ask, nothing_M, self.critic, self.reference, entropy_gradient=learned
            )

        logprobs, entropy, values, full_kl, first = map(laid_out, inside(model, work))
        assert logprobs is not None and entropy is not None
        return TokenOutputs(logprobs, entropy, values, full_kl, first)

    # -- one optimiser step --------------------------------------------------------------------------------------

    def update(self, batch: Batch, algorithm: Algorithm) -> tuple[Metrics, TokenTrace]:
        shares = self._shares(batch.rows)
        passes = self._passes(shares, batch.rows)
        if _splits(batch, [bunches for share in shares for bunches in share], algorithm.couples):
            batch = replace(batch, policy_sum_N=self._policy_sums(batch))
        here = _to(batch, self.device)
        self._zero_grad()
        with self._asked(algorithm.needs.full_kl):
            said, losses = self._gradients(batch, here, passes, algorithm)
        # Numbers are read only now: to read one is to wait for the GPU.
        sums = {name: torch.stack([each[name] for each in losses]).sum() for name in losses[0]}
        loss = {name: float(self.ranks.sum(sum_)) for name, sum_ in sums.items()}
        total = sum(loss.values())
        stepped = self._step(total)
        metrics, trace = self._tell(self._in_order(said, passes, here), here, algorithm)
        return metrics | {f"{name}/loss": x for name, x in loss.items()} | {"loss/total": total} | stepped, trace

    def _gradients(
        self, batch: Batch, here: Batch, passes: list[tuple[list[Bunch], bool]], algorithm: Algorithm
    ) -> tuple[list[TokenOutputs], list[dict[str, Tensor]]]:
        """What was said in each pass, and its share of each term of the loss: nothing of one that does not count.
        `here` is the batch on the device."""
        ask = Ask(values=self.critic is not None, full_kl=algorithm.needs.full_kl)
        said: list[TokenOutputs] = []
        losses: list[dict[str, Tensor]] = []
        for bunches, counts in passes:
            index = _flat(bunches)
            packed = pack(batch.rows, bunches).to(self.device)
            with self._reading(packed):
                shape = (len(index), batch.mask_RT.shape[1])
                out = self._forward(packed, shape, batch.temperature, ask, self.model)
                terms = divide(self._loss(out, here.take(index), algorithm), batch)
                terms = terms if counts else {name: 0 * term for name, term in terms.items()}
                self.scaler.scale(torch.stack(list(terms.values())).sum()).backward()
            said.append(_detached(out))
            losses.append({name: term.detach() for name, term in terms.items()})
        self._rest_shards()
        return said, losses

    def _in_order(
        self, said: Sequence[TokenOutputs], passes: list[tuple[list[Bunch], bool]], batch: Batch
    ) -> TokenOutputs:
        """What was said on all ranks, in the order of the batch's rows."""
        order = [i for bunches, counts in passes if counts for i in _flat(bunches)]
        at = torch.tensor(order, dtype=torch.long).to(self.device)

        def whole(name: str) -> Tensor | None:
            if getattr(said[0], name) is None:
                return None
            found: Tensor = getattr(said[0], name).new_zeros(batch.mask_RT.shape)
            parts = [getattr(part, name) for part, (_, counts) in zip(said, passes, strict=True) if counts]
            return self.ranks.sum(found.index_copy(0, at, torch.cat(parts)) if parts else found)

        logprobs, entropy = whole("logprobs"), whole("entropy")
        assert logprobs is not None and entropy is not None
        return TokenOutputs(logprobs, entropy, whole("values"), whole("full_kl"))

    def _asked(self, often: bool) -> AbstractContextManager[None]:
        """The reference stays at hand where every micro-batch asks it."""
        return self.reference.present() if often and self.reference is not None else nullcontext()

    @torch.no_grad()
    def _tell(self, out: TokenOutputs, batch: Batch, algorithm: Algorithm) -> tuple[Metrics, TokenTrace]:
        """Statistics of the mini-batch, and what the episode reader shows of it."""
        mask, log_ratio = batch.mask_RT, out.logprobs - batch.old_logprobs_RT
        ratio = probability_ratio(out.logprobs, batch.old_logprobs_RT)
        entropy = masked_mean(out.entropy, mask)
        columns = (torch.where(mask, x, torch.zeros_like(x)) for x in (batch.advantages_RT, ratio, out.entropy))
        metrics = {
            "policy/entropy": entropy,
            "actor/entropy_loss": entropy,
            "policy/ratio_mean": masked_mean(ratio, mask),
            "policy/ratio_max": float(ratio[mask].max()) if bool(mask.any()) else 1.0,
            "policy/kl_old": masked_mean(-log_ratio, mask),
            "policy/ess": effective_sample_size(ratio[mask]),
            **({} if self.critic is None else self.critic.metrics(out, batch)),
        }
        return metrics | algorithm.metrics(out, batch), TokenTrace(*(column.float().cpu() for column in columns))

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
        # In float16 the scale of the loss is found by overflowing: with a sound loss that is no sign of trouble, until
        # the loss is not scaled up any more.
        expected = finite and self.scaler.is_enabled() and self.scaler.get_scale() >= 1
        self.skipped_in_a_row = 0 if made or expected else self.skipped_in_a_row + 1
        if self.skipped_in_a_row >= self.config.max_skipped:
            raise NonFiniteError(
                f"{self.skipped_in_a_row} updates in a row had a loss or gradient that is not finite\n"
                "  likely causes: learner.lr too high, a reward that returns huge values, or float16 (try bfloat16)"
            )
        clipped = float(norm > self.config.grad_clip) if self.config.grad_clip else 0.0
        return found | {"optim/lr": rate, "optim/skipped": self.skipped, "grad/norm": norm, "grad/clipped": clipped}

    # -- checkpoints ---------------------------------------------------------------------------------------------

    def save(self, folder: Path) -> None:
        """Model, optimiser and critic into a folder that all ranks see; all must be called. Raises `NonFiniteWeights`
        before anything is written."""
        optimizer = self.optimizer
        check_finite(self._saved_tensors(), self.ranks)
        save_model(self.model, folder / "model", self.ranks, sharded=self.sharded)
        save_state(optimizer.tensors(), optimizer.blocks(), folder, self.ranks, optimizer.twice())
        if self.critic is not None and self.ranks.first:
            save_tensors(self.critic.tensors(), folder / "critic.safetensors")
        self.ranks.wait_for_all()

    def _saved_tensors(self) -> dict[str, Tensor]:
        """This rank's part of all that is trained, by name: weights, optimiser state and critic."""
        found = {name: own_part(weight) for name, weight in self.optimizer.working.items()}
        found |= {f"optimizer: {name}": tensor for name, tensor in self.optimizer.tensors().items()}
        critic = {} if self.critic is None else self.critic.tensors()
        return found | {f"critic: {name}": tensor for name, tensor in critic.items()}

    def counters(self) -> dict[str, Any]:
        """What else there is to know, as JSON."""
        return {
            "updates": self.optimizer.steps,
            "scaler": self.scaler.state_dict(),
            "skipped": self.skipped,
            "skipped_in_a_row": self.skipped_in_a_row,
            "critic": None if self.critic is None else self.critic.counters(),
        }

    def restore(self, folder: Path, counters: dict[str, Any]) -> None:
        """Everything but the weights, which the model was loaded with."""
        self.optimizer.load(load_state(folder, self.optimizer.blocks()), counters["updates"])
        self.scaler.load_state_dict(counters["scaler"])
        if self.critic is not None:
            self.critic.load(load_tensors(folder / "critic.safetensors"), counters["critic"])
        self.skipped = counters["skipped"]
        self.skipped_in_a_row = counters["skipped_in_a_row"]


def extreme(name: str) -> Callable[[float, float], float] | None:
    """How a statistic of parts becomes one of the whole: the larger, the smaller, or (None) their mean."""
    words = name.rsplit("/", 1)[-1].split("_")
    return max if "max" in words else min if "min" in words else None


def _flat(bunches: list[Bunch]) -> list[int]:
    return [index for bunch in bunches for index in bunch]


def _detached(out: TokenOutputs) -> TokenOutputs:
    values, full_kl = (None if x is None else x.detach() for x in (out.values, out.full_kl))
    return TokenOutputs(out.logprobs.detach(), out.entropy.detach(), values, full_kl)


def _splits(batch: Batch, micro_batches: list[list[Bunch]], couples: Couples) -> bool:
    """Whether a micro-batch holds only a part of what the loss must see as a whole."""
    if couples == "nothing":
        return False
    of_row = batch.episode_R if couples == "episodes" else batch.group_N[batch.episode_R]
    homes: dict[int, int] = {}
    for number, bunches in enumerate(micro_batches):
        for index in _flat(bunches):
            if homes.setdefault(int(of_row[index]), number) != number:
                return True
    return False


def _to(batch: Batch, device: torch.device) -> Batch:
    moved: dict[str, Any] = {
        name: value.to(device) for name in batch.__slots__ if isinstance(value := getattr(batch, name), Tensor)
    }
    return replace(batch, **moved)
