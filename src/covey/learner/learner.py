"""The learner: annotates samples with log-probs and values, and turns each mini-batch into one optimiser step.

    mini-batch → micro-batches by token budget → loss sums / counts over the whole mini-batch → gradient → AdamW

The split into micro-batches never changes the gradient. Losses are sums, divided once by counts over the mini-batch. If
a loss couples the members of a group and micro-batches split that group, a first pass without gradient computes the
log-probs of the whole mini-batch.

Shapes: N episodes, R rows, T response tokens, M sampled tokens.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from covey.algorithms.aggregation import divide
from covey.algorithms.distill import teacher_rows
from covey.algorithms.ops import masked_sum
from covey.config.schema import CriticConfig, LearnerConfig
from covey.errors import InputError, RunFailed
from covey.learner.attention import packed_attention, select_attention
from covey.learner.critic import Critic
from covey.learner.layers import CompiledLayers
from covey.learner.optimizer import MasterAdamW
from covey.learner.outputs import collect, detached, update_metrics
from covey.learner.packing import (
    MicroBatch,
    Packed,
    Pass,
    pack,
    passes_of_rank,
    plan_micro_batches,
    row_indices,
    splits_coupled,
)
from covey.learner.parallel import (
    SINGLE_PROCESS,
    Ranks,
    local_part,
    reshard,
    run_unsharded,
    shard_model,
    should_shard,
    training_bytes,
)
from covey.learner.pass_memory import (
    CPU_TARGET,
    Demand,
    PassMemory,
    PassPlan,
    PassShapes,
    device_memory,
    offloaded_bytes,
)
from covey.learner.routing import RoutingReplay, replaying
from covey.learner.saving import check_finite, load_state, load_tensors, save_model, save_state, save_tensors
from covey.learner.token_scores import TeacherInput, TokenQuery, score_tokens
from covey.learner.tower_memory import tower_shapes
from covey.models.families import causal_lm
from covey.models.loading import Reference, set_checkpointing
from covey.models.products import fast_linears
from covey.models.quantization import is_quantized
from covey.protocols import Algorithm, LossTerm, Metrics, Needs, TokenOutputs, TokenTrace
from covey.types import Batch, Sample, Samples

if TYPE_CHECKING:
    from covey.models.vision import VisionProcessor

REFERENCE = "reference/"  # of the names of a moving reference's weights in a checkpoint


class NonFiniteError(RunFailed):
    """Too many updates in a row had a non-finite loss or gradient."""


class Learner:
    def __init__(
        self,
        model: Any,
        config: LearnerConfig,
        *,
        total_updates: int,
        critic_only_updates: int = 0,
        reference: Reference | None = None,
        critic: CriticConfig | None = None,
        critic_backbone: Any = None,
        teacher: Reference | None = None,
        vision: VisionProcessor | None = None,
        ranks: Ranks = SINGLE_PROCESS,
    ) -> None:
        """The critic's learning rate has its schedule over `total_updates`, the policy's over those after the first
        `critic_only_updates`. With `critic` settings, trains a critic on `critic_backbone`, or else on the policy's own
        backbone. Without a `teacher`, an algorithm that needs one has the policy itself. `vision` prepares the images
        of a vision-language model. Models that will be sharded over `ranks` may be in CPU memory."""
        self.model = model
        self.config = config
        self.reference = reference
        self.teacher = teacher
        self.vision = vision
        self.ranks = ranks
        self.dtype = next(model.parameters()).dtype  # in which weights are used and published
        # Adapters may be float32 on float16 weights, and gradients flow through both.
        half = any(p.dtype == torch.float16 for p in model.parameters())
        self.sharded = should_shard(config, ranks, training_bytes(model))
        if self.sharded:
            shard_model(model, ranks, offload=config.offload_optimizer)
            for other in dict.fromkeys((reference, teacher)):
                if other is not None and not other.adapter:
                    shard_model(other.model, ranks, offload=config.offload_reference)
        self.scaler = torch.amp.GradScaler((ranks.device or next(model.parameters()).device).type, enabled=half)
        common: dict[str, Any] = {"scaler": self.scaler, "ranks": ranks}
        policy_updates = max(1, total_updates - critic_only_updates)
        self.optimizer = MasterAdamW(model.named_parameters(), config, policy_updates, **common)
        self.critic: Critic | None = None
        if critic is not None:
            self.critic = Critic(model, critic, config, total_updates=total_updates, backbone=critic_backbone, **common)
        self.routing: RoutingReplay | None = None
        if config.replay_routing:
            if ranks.world_size > 1:
                raise InputError(
                    "learner.replay_routing needs the routes of all rows in one process\n"
                    "  use one learner: cluster.learner_devices=1"
                )
            self.routing = RoutingReplay(model)
        quantized = any(is_quantized(p) for p in model.parameters())
        fast = self.device.type == "cuda" and not quantized
        compiled = fast if config.compile is None else config.compile
        self.compiled_layers = CompiledLayers(model) if compiled and not self.sharded and not self.routing else None
        self._memory: PassMemory | None = None
        self._logit_rows: int | None = None  # tokens whose logits are held at once; None: the usual number
        self.skipped = 0
        self.skipped_in_a_row = 0
        self.reference_steps = 0  # training steps that a moving reference has seen
        self._offloaded_from: torch.device | None = None

    @property
    def device(self) -> torch.device:
        if self.sharded:  # shards may be in CPU memory
            assert self.ranks.device is not None
            return self.ranks.device
        return next(iter(self.optimizer.working.values())).device

    def weights(self) -> Any:
        """The module itself, from which an engine in this process samples without a copy. If it is sharded, all ranks
        must read it together (`covey.weights.names.full_weights`)."""
        return self.model

    def offload(self) -> None:
        """With `offload_weights`, move the weights to CPU memory while the engine samples from its own copy."""
        if self.config.offload_weights and self.device.type == "cuda":
            self._offloaded_from = self.device
            self._move(torch.device("cpu"))
            torch.cuda.empty_cache()

    def reload(self) -> None:
        if self._offloaded_from is not None:
            self._move(self._offloaded_from)
            self._offloaded_from = None

    @torch.no_grad()
    def _move(self, device: torch.device) -> None:
        for weight in self.model.parameters():
            weight.data = weight.data.to(device)

    # -- Annotating samples ------------------------------------------------------------------------------------------

    def annotate(self, samples: Samples, needs: Needs) -> Samples:
        """Add what the algorithm needs before the first update: reference log-probs, values, own log-probs."""
        if self.critic is not None:
            self.critic.steps += 1
        if needs.reference:
            if needs.reference_every:
                self._move_reference(needs.reference_every)
            self._plan_passes(samples.rows)  # with the adapter, if there is one
            assert self.reference is not None, "the algorithm needs a reference policy and none was loaded"
            with self.reference.active() as model:
                ref_logprobs_RT = self.logprobs(samples.rows, samples.temperature, model, replay=False)
            samples = replace(samples, ref_logprobs_RT=ref_logprobs_RT)
        if needs.teacher and samples.teacher_logprobs_RT is None:  # an endpoint has scored them before
            with nullcontext(self.model) if self.teacher is None else self.teacher.active() as model:
                teacher_RT = self.logprobs(teacher_rows(samples.rows), samples.temperature, model, replay=False)
            samples = replace(samples, teacher_logprobs_RT=teacher_RT)
        query = TokenQuery(
            logprobs=needs.proximal or needs.sample_full_kl or needs.score_norms,
            values=needs.values,
            full_kl=needs.sample_full_kl,
            score_norms=needs.score_norms,
        )
        if self.routing is not None:
            query = replace(query, logprobs=True)
        if not (query.logprobs or query.values):
            return samples
        with ExitStack() as stack:
            if needs.sample_full_kl and self.reference is not None:
                stack.enter_context(self.reference.loaded())  # once for all passes
            if self.routing is not None:
                stack.enter_context(self.routing.record())
            out = self.outputs(samples.rows, samples.temperature, query)
        samples = replace(samples, values_RT=out.values, full_kl_RT=out.full_kl, score_norms_RT=out.score_norms)
        if needs.proximal:
            sampled_RT = samples.old_logprobs_RT
            samples = replace(samples, sampling_logprobs_RT=sampled_RT, old_logprobs_RT=out.logprobs)
        return samples

    def _move_reference(self, every: int) -> None:
        """At the beginning of a step: after each `every` steps the policy becomes the reference."""
        assert self.reference is not None, "the algorithm needs a reference policy and none was loaded"
        if self.reference_steps and self.reference_steps % every == 0:
            self._reshard()
            self.reference.move({name: local_part(weight) for name, weight in self.optimizer.working.items()})
        self.reference_steps += 1

    def logprobs(self, rows: Sequence[Sample], temperature: float, model: Any = None, *, replay: bool = True) -> Tensor:
        """Log-probs of the rows' sampled tokens under a model, by default the policy, [R, T] on the CPU."""
        return self.outputs(rows, temperature, TokenQuery(), model, replay=replay).logprobs

    @torch.no_grad()
    def outputs(
        self,
        rows: Sequence[Sample],
        temperature: float,
        query: TokenQuery,
        model: Any = None,
        *,
        replay: bool = True,
    ) -> TokenOutputs:
        """Scores of the rows' sampled tokens, [R, T] on the CPU, without gradient. `replay`: record or replay routes,
        with `learner.replay_routing`."""
        width = max(len(row.response_ids) for row in rows)
        model = model or self.model
        passes = self._passes(self._plan(rows), rows)
        outputs: list[TokenOutputs] = []  # read only at the end, because reading one waits for the GPU
        for micro_batch, _ in passes:
            packed = pack(rows, micro_batch, self.vision).to(self.device)
            with self._attending(packed), replaying(self.routing if replay else None, rows, micro_batch):
                shape = (len(row_indices(micro_batch)), width)
                outputs.append(self._forward(packed, shape, temperature, query, model))
        self._reshard()
        return collect(outputs, passes, (len(rows), width), "cpu", self.ranks)

    # -- Forward passes ----------------------------------------------------------------------------------------------

    def _plan(self, rows: Sequence[Sample]) -> list[list[MicroBatch]]:
        """The micro-batches of every rank. All ranks compute the same plan."""
        on_cpu = self.device.type == "cpu" and self.config.micro_batch_tokens is None
        tokens, most = self._plan_passes(rows).tokens, self.config.micro_batch_size
        return plan_micro_batches(rows, tokens, most, self.ranks.dp_size, CPU_TARGET if on_cpu else None)

    def _passes(self, plan: list[list[MicroBatch]], rows: Sequence[Sample]) -> list[Pass]:
        """This rank's forward passes. Sharded ranks gather weights together, so all make the same number."""
        return passes_of_rank(plan, self.ranks.dp_rank, rows, same_count=self.sharded)

    def _reshard(self) -> None:
        reshard(self.model)
        for other in (self.reference, self.teacher):
            if other is not None:
                reshard(other.model)

    # -- Memory ------------------------------------------------------------------------------------------------------

    def plan_memory(self, demand: Demand) -> None:
        """Plan the passes of a run, before its first step. All ranks must call it."""
        models, gpu = self._trained_models(), self.device.type == "cuda"
        optimizers = [self.optimizer, *(self.critic.optimizers.values() if self.critic is not None else ())]
        others = dict.fromkeys(other for other in (self.reference, self.teacher) if other and not other.adapter)
        total, states = device_memory(self.device, [*models, *(other.model for other in others)], optimizers)
        # A GPU holds the engine's copy already, but not yet the models that updates load.
        states += offloaded_bytes(demand, self.reference, self.teacher) if gpu else int(demand.copied)
        common: dict[str, Any] = {"gpu": gpu, "tensor_parallel": self.config.tensor_parallel, "gathered": self.sharded}
        memory = PassMemory(
            (
                *(PassShapes.of(model, demand, **common) for model in models),
                *filter(None, (tower_shapes(model, demand) for model in models)),
            ),
            demand,
            total=self.ranks.min(total),
            states=-self.ranks.min(-states),
            gpu=gpu,
            tokens=self.config.micro_batch_tokens,
        )
        if gpu and memory.undecided and (tokens := memory.probe_tokens):
            self._use(replace(memory.plan(0), checkpointing=False))
            held = -self.ranks.min(-self._trial_pass(tokens))
            memory = memory.corrected(held, tokens)
        self._memory = memory
        memory.check()
        self._use(memory.plan(demand.longest))

    def memory_note(self) -> str:
        assert self._memory is not None, "plan_memory is called first"
        return self._memory.note()

    def _plan_passes(self, rows: Sequence[Sample]) -> PassPlan:
        """The plan for these rows: the run's, unless a row is longer than expected."""
        if self._memory is None:  # not part of a run: the model stays as it is
            self.plan_memory(Demand(checkpointing=causal_lm(self.model).is_gradient_checkpointing))
        assert self._memory is not None
        plan = self._memory.plan(max(self._memory.demand.longest, max(row.length for row in rows)))
        self._use(plan)
        return plan

    def _trained_models(self) -> list[Any]:
        backbone = None if self.critic is None else self.critic.backbone
        return [self.model] if backbone is None else [self.model, backbone]

    def _use(self, plan: PassPlan) -> None:
        self._logit_rows = plan.logit_rows
        for model in self._trained_models():
            if causal_lm(model).is_gradient_checkpointing != plan.checkpointing:
                set_checkpointing(model, plan.checkpointing)

    @torch.enable_grad()
    def _trial_pass(self, tokens: int) -> int:
        """A forward and backward pass that changes nothing. Returns the bytes that it keeps between the two."""
        row = Sample((0,), (0,) * tokens, (True,) * tokens, (0.0,) * tokens, (0,) * tokens, 0)
        packed = pack([row], [[0]]).to(self.device)
        before = torch.cuda.memory_allocated(self.device)
        with self._attending(packed):
            query = TokenQuery(values=self.critic is not None)
            out = self._forward(packed, (1, tokens), 1.0, query, self.model)
            held = torch.cuda.memory_allocated(self.device) - before
            (out.logprobs.sum() * 0).backward()
        self._zero_grad()
        torch.cuda.empty_cache()
        return held

    @contextmanager
    def _attending(self, packed: Packed) -> Iterator[None]:
        """Open until the backward pass is over. Uses compiled layers if they are enabled and attention is flash."""
        flash = select_attention(causal_lm(self.model), packed.layout)
        compiled = self.compiled_layers.active() if flash and self.compiled_layers else nullcontext()
        linears = fast_linears() if self.device.type == "cpu" else nullcontext()
        with packed_attention(packed.layout), compiled, linears:
            yield

    def _forward(
        self,
        packed: Packed,
        shape: tuple[int, int],
        temperature: float,
        query: TokenQuery,
        model: Any,
        teacher: TeacherInput | None = None,
    ) -> TokenOutputs:
        """Scores of a micro-batch, [R, T], rows in the order of `row_indices`."""
        # Log-probs are float32 even of bfloat16 weights, and float64 of float64 weights.
        dtype = torch.promote_types(next(iter(self.optimizer.working.values())).dtype, torch.float32)
        empty_RT = torch.zeros(shape, dtype=dtype, device=self.device)
        zeros_M = empty_RT.new_zeros(len(packed.target_M))
        entropy_gradient = self.config.entropy_coef != 0
        scores = run_unsharded(
            model,
            lambda: score_tokens(
                model,
                packed,
                temperature,
                query,
                zeros_M,
                self.critic,
                self.reference,
                entropy_gradient=entropy_gradient,
                logit_rows=self._logit_rows,
                teacher=teacher,
                routing=self.routing,
            ),
        )

        def unpack(column_M: Tensor | None) -> Tensor | None:
            if column_M is None:
                return None
            return empty_RT.to(column_M.dtype).index_put((packed.row_M, packed.column_M), column_M)

        outputs: dict[str, Any] = {name: unpack(column_M) for name, column_M in scores._asdict().items()}
        return TokenOutputs(**outputs)

    # -- One optimiser step ------------------------------------------------------------------------------------------

    def update(self, batch: Batch, algorithm: Algorithm) -> tuple[Metrics, TokenTrace]:
        plan = self._plan(batch.rows)
        passes = self._passes(plan, batch.rows)
        if splits_coupled(batch, [micro_batch for share in plan for micro_batch in share], algorithm.couples):
            batch = algorithm.first_pass(self.outputs(batch.rows, batch.temperature, TokenQuery()), batch)
        on_device = batch.to(self.device)
        self._zero_grad()
        # Every micro-batch of a full KL calls the reference or the teacher: it is loaded once for all.
        needs = algorithm.needs
        called = [self.reference if needs.full_kl else None, self.teacher if needs.teacher_kl else None]
        with ExitStack() as loaded:
            for other in called:
                if other is not None:
                    loaded.enter_context(other.loaded())
            outputs, losses = self._accumulate_gradients(batch, on_device, passes, algorithm)
        # Values are read only now, because reading one waits for the GPU.
        sums = {name: torch.stack([part[name] for part in losses]).sum() for name in losses[0]}
        loss = {name: float(self.ranks.sum(sum_)) for name, sum_ in sums.items()}
        total = sum(loss.values())
        step_metrics = self._step(total)
        out = collect(outputs, passes, on_device.mask_RT.shape, self.device, self.ranks)
        metrics, trace = update_metrics(out, on_device, algorithm, self.critic)
        return metrics | {f"{name}/loss": x for name, x in loss.items()} | {"loss/total": total} | step_metrics, trace

    def _accumulate_gradients(
        self, batch: Batch, on_device: Batch, passes: list[Pass], algorithm: Algorithm
    ) -> tuple[list[TokenOutputs], list[dict[str, Tensor]]]:
        """Forward and backward for each pass. Returns the outputs of each pass and its part of each loss term (0 if it
        does not count)."""
        needs = algorithm.needs
        compared = needs.teacher_kl or needs.teacher_top
        query = TokenQuery(values=self.critic is not None, full_kl=needs.full_kl, teacher_kl=compared)
        outputs: list[TokenOutputs] = []
        losses: list[dict[str, Tensor]] = []
        for micro_batch, counts in passes:
            index = row_indices(micro_batch)
            packed = pack(batch.rows, micro_batch, self.vision).to(self.device)
            with self._attending(packed), replaying(self.routing, batch.rows, micro_batch):
                shape = (len(index), batch.mask_RT.shape[1])
                teacher = self._teacher_input(on_device, micro_batch, packed) if compared else None
                out = self._forward(packed, shape, batch.temperature, query, self.model, teacher)
                terms = divide(self._loss(out, on_device.take(index), algorithm), batch)
                terms = terms if counts else {name: 0 * term for name, term in terms.items()}
                self.scaler.scale(torch.stack(list(terms.values())).sum()).backward()
            outputs.append(detached(out))
            losses.append({name: term.detach() for name, term in terms.items()})
        self._reshard()
        return outputs, losses

    def _teacher_input(self, batch: Batch, micro_batch: MicroBatch, packed: Packed) -> TeacherInput:
        """What the teacher adds to a micro-batch: the same tokens after its own prompts, or its most likely tokens."""
        if batch.teacher_top is None:
            return TeacherInput(self.teacher, pack(teacher_rows(batch.rows), micro_batch).to(self.device))
        row_M = batch.row_R.new_tensor(row_indices(micro_batch))[packed.row_M]
        return TeacherInput(top=batch.teacher_top[row_M, packed.column_M])

    def _loss(self, out: TokenOutputs, view: Batch, algorithm: Algorithm) -> dict[str, LossTerm]:
        critic = self.critic
        if critic is not None and critic.warming_up:
            return {"value": critic.loss(out, view)}
        terms = algorithm.loss(out, view)
        if self.config.entropy_coef:
            terms["entropy"] = LossTerm(-self.config.entropy_coef * masked_sum(out.entropy, view.mask_RT), "tokens")
        return terms if critic is None else terms | {"value": critic.loss(out, view)}

    def _zero_grad(self) -> None:
        self.optimizer.zero_grad()
        if self.critic is not None:
            self.critic.zero_grad()

    def _step(self, loss: float) -> Metrics:
        """Update the weights, unless the loss or a gradient is not finite."""
        finite = math.isfinite(loss)
        rate, norm, updated = 0.0, math.nan, False
        metrics: Metrics = {}
        if finite:
            updated = True
            if self.critic is not None:
                metrics, updated = self.critic.step()
            if self.critic is not None and self.critic.warming_up:
                norm = 0.0
            else:
                rate, norm, policy_updated = self.optimizer.step()
                updated = updated and policy_updated
            self.scaler.update()
        else:
            self._zero_grad()
        self.skipped += not updated
        # In float16 the loss scale is found by letting gradients overflow. That is expected while the loss itself is
        # finite and is still scaled up.
        expected = finite and self.scaler.is_enabled() and self.scaler.get_scale() >= 1
        self.skipped_in_a_row = 0 if updated or expected else self.skipped_in_a_row + 1
        if self.skipped_in_a_row >= self.config.max_skipped:
            raise NonFiniteError(
                f"{self.skipped_in_a_row} updates in a row had a loss or gradient that is not finite\n"
                "  likely causes: learner.lr too high, a reward that returns huge values, or float16 (try bfloat16)"
            )
        clipped = float(norm > self.config.grad_clip) if self.config.grad_clip else 0.0
        return metrics | {"optim/lr": rate, "optim/skipped": self.skipped, "grad/norm": norm, "grad/clipped": clipped}

    # -- Checkpoints -------------------------------------------------------------------------------------------------

    def save(self, folder: Path) -> None:
        """Write model, optimiser, critic and a moving reference into a folder that all ranks see. All ranks must call
        it.

        Raises `NonFiniteWeights` before anything is written.
        """
        optimizer = self.optimizer
        check_finite(self._trained_tensors(), self.ranks)
        save_model(self.model, folder / "model", self.ranks, sharded=self.sharded)
        if self.vision is not None and self.ranks.is_first:
            self.vision.save_pretrained(folder / "model")
        tensors = optimizer.tensors() | self._moved_reference()
        save_state(tensors, optimizer.blocks(), folder, self.ranks, optimizer.replicated())
        if self.critic is not None and self.ranks.is_first:
            save_tensors(self.critic.tensors(), folder / "critic.safetensors")
        self.ranks.barrier()

    def _moved_reference(self) -> dict[str, Tensor]:
        """This rank's part of a reference that moves, as names of its checkpoint."""
        if self.reference is None or not self.reference_steps:
            return {}
        moved = self.reference.moved_weights(self.optimizer.working)
        return {f"{REFERENCE}{name}": tensor for name, tensor in moved.items()}

    def _trained_tensors(self) -> dict[str, Tensor]:
        """This rank's part of everything that is trained, by name: weights, optimiser state and critic."""
        tensors = {name: local_part(weight) for name, weight in self.optimizer.working.items()}
        tensors |= {f"optimizer: {name}": tensor for name, tensor in self.optimizer.tensors().items()}
        critic = {} if self.critic is None else self.critic.tensors()
        return tensors | {f"critic: {name}": tensor for name, tensor in critic.items()}

    def counters(self) -> dict[str, Any]:
        """The remaining state of a checkpoint, as JSON values: counters and the loss scale."""
        return {
            "updates": self.optimizer.steps,
            "scaler": self.scaler.state_dict(),
            "skipped": self.skipped,
            "skipped_in_a_row": self.skipped_in_a_row,
            "reference_steps": self.reference_steps,
            "critic": None if self.critic is None else self.critic.counters(),
        }

    def restore(self, folder: Path, counters: dict[str, Any], *, moving: bool = False) -> None:
        """Load everything but the weights: the model was loaded with them. `moving`: the reference is updated during
        training, and continues from its saved weights."""
        tensors = load_state(folder, self.optimizer.blocks())
        moved = {
            name.removeprefix(REFERENCE): tensors.pop(name) for name in list(tensors) if name.startswith(REFERENCE)
        }
        self.optimizer.load(tensors, counters["updates"])
        if moving and self.reference is not None:
            self.reference_steps = counters.get("reference_steps", 0)  # not in checkpoints of earlier versions
            if moved:
                self.reference.move({name: part.to(self.device) for name, part in moved.items()})
        self.scaler.load_state_dict(counters["scaler"])
        if self.critic is not None:
            self.critic.load(load_tensors(folder / "critic.safetensors"), counters["critic"])
        self.skipped = counters["skipped"]
        self.skipped_in_a_row = counters["skipped_in_a_row"]
