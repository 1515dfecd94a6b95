"""Memory of a training pass, predicted from the model's shapes, and the plan of passes that fits into it.

Per layer and token the backward pass keeps (D hidden size, H and K all query and key heads, I MLP size):

    norms       their input in float32 and their normalised input, D each
    inputs      of the matrices: D for q, k and v, H for o, D for gate and up, I for down
    attention   queries and output H each, keys and values K each, one log-sum per head
    MLP         gate, its activation and up, I each

Matrices that are not trained keep no input; an adapter keeps its own, as float32 if it is float32. Scaled dot products
(attention.py) also keep copies: of the output, and of keys and values with their prompt's. With activation
checkpointing a layer keeps its input, D, and all of the above for one layer at a time. Besides, a pass holds the
gradients of one layer, or the logits of one chunk with their gradient and that of the output matrix.

These sizes are those of eager layers. Compiled layers keep less (about 3 I + 6.5 D in half precision), so on a GPU one
measured pass corrects them where the plan depends on it.

Plans are tried from the fastest to the smallest: activations kept or checkpointed, each with logits in large or small
chunks. The first that holds the longest expected row is used, with as many tokens in a pass as fit.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch

from covey.config.schema import LearnerConfig
from covey.errors import InputError
from covey.learner.attention import CHUNK
from covey.learner.forward import is_one_product
from covey.learner.logprobs import chunk_rows
from covey.learner.optimizer import EIGHT_BIT, MasterAdamW
from covey.learner.parallel import local_part
from covey.memory import GIB, gpu_free, machine_memory
from covey.models.families import causal_lm, decoder, layers_of
from covey.models.quantization import is_quantized

if TYPE_CHECKING:
    from covey.models.loading import Reference

MOST_TOKENS = 10_240  # of a pass on a GPU: larger ones are hardly faster
CPU_TOKENS = 8192  # of a pass on a CPU, halved until it fits
CPU_TARGET = 1024  # there, small prompt groups share a pass up to this: as fast as larger passes, with less memory
LEAST_TOKENS = 256  # of any pass
SMALLER = 8  # a plan may divide the usual chunk of logits by this
GPU_SHARE = 0.85  # of a GPU's free memory that is planned for; the rest is for fragmentation and workspaces
CPU_SHARE = 0.6  # of a machine's memory that a pass may take
CPU_TOTAL = 0.9  # of a machine's memory that the learner may take, states and engine included
PROBE_TOKENS = 1024  # of the measured pass
LEAST_SCALE = 0.4  # of a correction


@dataclass(frozen=True)
class Demand:
    """What a run will ask of the learner's memory."""

    prompt: int = 0  # tokens of the longest expected prompt
    answer: int = 0  # tokens of the longest expected answer to it
    setting: str = "rollout.max_tokens"  # that bounds the answer
    checkpointing: bool | None = None  # as set; None: where it is needed
    sampled: bool = True  # False: demonstrations
    refuse: bool = False  # a run whose longest row cannot fit
    cache_share: float = 0.0  # of free memory that the engine's cache may take
    cache_bytes: float = 0.0  # that it takes at most
    engine_share: float = 0.0  # of the whole GPU that another process takes
    copied: float = 0.0  # bytes of a copy of the policy for the engine
    images: int | None = None  # tokens of images in the longest row; None: at most those of the prompt
    full_kl: bool = False  # every update loads the reference
    sample_full_kl: bool = False  # the same once per step
    teacher_kl: bool = False  # every update loads the teacher
    teacher_top: bool = False  # updates compute the KL to its most likely tokens

    @property
    def kl_copies(self) -> int:
        """Tensors of the size of a chunk of logits that KLs need: logits, probabilities and ratios of another model, or
        only the policy's probabilities."""
        return 3 * (self.full_kl or self.sample_full_kl) + 3 * self.teacher_kl + 2 * self.teacher_top

    @property
    def longest(self) -> int:
        return self.prompt + self.answer

    def describe(self) -> str:
        what = "answers" if self.sampled else "demonstrations"
        return f"{what} of up to {self.answer:,} tokens"


@dataclass(frozen=True)
class PassShapes:
    """The sizes of a model that determine the memory of a pass. Sizes of activations are in elements."""

    layers: int
    hidden: int
    queries: int  # all query heads
    keys: int  # all key heads
    heads: int
    inner: int  # of the MLP; of all active experts
    vocabulary: int
    itemsize: int  # bytes of an activation
    norms: int = 2  # of the hidden size, per layer
    head_norms: bool = False  # queries and keys are normalised too
    trained: bool = True  # the layers' own weights
    trained_output: bool = True
    inputs: bool = True  # of the layers' matrices are kept
    copies: int = 0  # bytes per layer and token: inputs of float32 adapters of half-precision weights
    flash: bool = False
    quadratic: bool = False  # attention keeps the scores of all pairs
    logit_bytes: int = 12  # of one logit of a chunk, with its copies in the forward pass
    backward_logit_bytes: int = 8  # of one in the backward pass, at most
    logit_rows: int = 1  # tokens in a chunk of logits of the usual size
    prompt: int = 0  # tokens of the longest prompt
    fixed: int = 0  # bytes of weights that a pass gathers, or dequantises
    scale: float = 1.0  # of what layers keep: measured / predicted
    per_token: float | None = None  # of a vision tower: patches for each token of a pass

    @classmethod
    def of(
        cls, model: Any, demand: Demand, *, gpu: bool, tensor_parallel: int = 1, gathered: bool = False
    ) -> PassShapes:
        """`gathered`: each layer's weights are gathered from shards for its passes."""
        lm = causal_lm(model)
        config = lm.config.get_text_config(decoder=True)
        heads = config.num_attention_heads
        dim = getattr(config, "head_dim", None) or config.hidden_size // heads
        key_heads = getattr(config, "num_key_value_heads", None) or heads
        embedding, layer = lm.get_input_embeddings().weight, layers_of(decoder(lm))[0]
        dtype: torch.dtype = getattr(embedding, "working_dtype", embedding.dtype)
        window = getattr(config, "sliding_window", None)
        within = window is None or demand.longest <= window
        flash = gpu and dtype.itemsize == 2 and dim % 8 == 0 and dim <= 256 and within
        head = lm.get_output_embeddings()  # None: the backbone of a critic
        output = embedding[:0] if head is None else head.weight
        kernels = gpu and is_one_product(lm) and not demand.kl_copies
        logit_bytes = dtype.itemsize if kernels else (3 + demand.kl_copies) * max(4, dtype.itemsize)
        norms = [m.weight.numel() for n, m in layer.named_modules() if "norm" in n and hasattr(m, "weight")]
        own = [p for n, p in layer.named_parameters() if "lora_" not in n and p.dim() > 1]
        whole = [*layer.parameters(), *layer.parameters(), embedding, output]
        return cls(
            layers=config.num_hidden_layers,
            hidden=config.hidden_size,
            queries=heads * dim // tensor_parallel,
            keys=key_heads * dim // tensor_parallel,
            heads=heads // tensor_parallel,
            inner=_inner(config) // tensor_parallel,
            vocabulary=len(output),
            itemsize=dtype.itemsize,
            norms=sum(size == config.hidden_size for size in norms) or 2,
            head_norms=any(size in (dim, heads * dim) and size != config.hidden_size for size in norms),
            trained=any(p.requires_grad for p in own),
            trained_output=head is not None and output.requires_grad,
            inputs=any(p.requires_grad and p.dtype == dtype for p in layer.parameters() if p.dim() > 1),
            copies=sum(
                m.in_features * weight.itemsize
                for m in layer.modules()
                for weight in _adapter_weights(m)
                if weight.dtype != dtype
            ),
            logit_bytes=logit_bytes,
            # With a KL, autograd goes through the chunks, and keeps the gradient of the output matrix between them.
            backward_logit_bytes=logit_bytes if demand.kl_copies else 8,
            logit_rows=chunk_rows(max(1, len(output)), gpu=kernels),
            flash=flash,
            quadratic=gpu and not flash and key_heads != heads,
            prompt=demand.prompt,
            fixed=(2 * dtype.itemsize * sum(p.numel() for p in whole) if gathered else 0)
            + max(
                (dtype.itemsize * p.quant_state.shape.numel() for p in layer.parameters() if is_quantized(p)), default=0
            ),
        )

    def layer_bytes(self, longest: int) -> float:
        """Kept per token by one layer for its backward pass."""
        size, exact = self.itemsize, max(4, self.itemsize)
        norms = self.norms * self.hidden * (exact + (size if self.trained else 0))
        if self.head_norms:
            norms += (self.queries + self.keys) * (exact + (size if self.trained else 0))
        inputs = size * (2 * self.hidden + self.inner) if self.inputs else 0
        attention: float = size * (2 * self.queries + 2 * self.keys) + 4 * self.heads
        if not self.flash:
            attention += size * (self.queries + 2 * self.keys * (1 + self.prompt / CHUNK))
        if self.quadratic:
            attention += size * self.heads * longest
        return self.scale * (norms + inputs + attention + size * 3 * self.inner + self.copies)

    def _rows(self, tokens: int) -> int:
        """Rows of activations in a pass over `tokens`."""
        return tokens if self.per_token is None else math.ceil(tokens * self.per_token)

    def held(self, tokens: int, longest: int, *, checkpointing: bool) -> float:
        """Activations that a forward pass leaves for the backward pass."""
        tokens = self._rows(tokens)
        layer = self.hidden * self.itemsize if checkpointing else self.layer_bytes(longest)
        last = self.hidden * (max(4, self.itemsize) + 3 * self.itemsize)  # the last norm, and the states it returns
        mask = 0 if self.flash else self.itemsize * max(CHUNK, longest)  # one for all layers
        return tokens * (self.layers * layer + last + mask)

    def transient(self, tokens: int, longest: int, *, checkpointing: bool, logit_rows: int) -> float:
        """What the backward pass needs besides: the larger of the output layer's and of one decoder layer's share."""
        tokens = self._rows(tokens)
        logits, half = min(logit_rows, tokens) * self.vocabulary, self.itemsize < 4
        gradient = self.vocabulary * self.hidden * (4 + self.itemsize * half) if self.trained_output else 0
        last = max(logits * self.logit_bytes, logits * min(self.logit_bytes, self.backward_logit_bytes) + gradient)
        last += tokens * self.hidden * self.itemsize
        layer: float = tokens * (
            self.itemsize * (3 * self.inner + 2 * self.hidden) + (4 * self.inner if self.copies else 0)
        )
        if checkpointing:
            layer += tokens * self.layer_bytes(longest)
        return self.fixed + max(last, layer)


@dataclass(frozen=True)
class PassPlan:
    checkpointing: bool
    logit_rows: int  # tokens whose logits are held at once
    tokens: int  # of a pass, unless a single row has more
    peak: float  # predicted bytes of the largest pass
    fits: bool

    def describe(self) -> str:
        kept = "checkpointed" if self.checkpointing else "kept"
        chunks = f"in chunks of {self.logit_rows:,} tokens" if self.logit_rows < self.tokens else "at once"
        return f"activations {kept}, logits {chunks}"


@dataclass(frozen=True)
class PassMemory:
    """Plans the passes of one learner within the memory that is left beside weights, states and cache."""

    shapes: tuple[PassShapes, ...]  # of the models that a pass goes through
    demand: Demand
    total: float  # bytes of the device
    states: float  # bytes of it that are taken, or will be, besides passes and the engine
    gpu: bool
    tokens: int | None = None  # of a pass, as set

    @property
    def taken(self) -> float:
        """Bytes of states and engine."""
        free = max(0.0, self.total - self.states)
        cache = min(self.demand.cache_share * free, self.demand.cache_bytes)
        return self.states + cache + self.demand.engine_share * self.total

    @property
    def available(self) -> float:
        """Bytes that a pass may take."""
        left = self.total - self.taken
        return GPU_SHARE * left if self.gpu else min(CPU_SHARE * self.total, left - (1 - CPU_TOTAL) * self.total)

    def peak(self, tokens: int, longest: int, *, checkpointing: bool, logit_rows: int) -> float:
        """Predicted bytes of a pass over `tokens`, whose longest row has `longest`."""
        held = sum(each.held(tokens, longest, checkpointing=checkpointing) for each in self.shapes)
        return held + max(
            each.transient(tokens, longest, checkpointing=checkpointing, logit_rows=logit_rows) for each in self.shapes
        )

    def plan(self, longest: int) -> PassPlan:
        """The fastest plan that holds a row of `longest` tokens, or else the smallest."""
        rows, chosen = self.shapes[0].logit_rows, self.demand.checkpointing
        plans = [
            self._plan_with(checkpointing, logit_rows, longest)
            for checkpointing in ((False, True) if chosen is None else (chosen,))
            for logit_rows in (rows, max(1, rows // SMALLER))
        ]
        return next((plan for plan in plans if plan.fits), plans[-1])

    def _plan_with(self, checkpointing: bool, logit_rows: int, longest: int) -> PassPlan:
        def peak(tokens: int) -> float:
            row = min(tokens, longest) if longest else tokens
            return self.peak(tokens, row, checkpointing=checkpointing, logit_rows=logit_rows)

        tokens = self.tokens or self._most_tokens(lambda tokens: peak(tokens) <= self.available)
        needed = peak(max(self.tokens or LEAST_TOKENS, longest))
        return PassPlan(checkpointing, logit_rows, tokens, max(needed, peak(tokens)), needed <= self.available)

    def _most_tokens(self, fits: Callable[[int], bool]) -> int:
        if self.gpu:
            return max(LEAST_TOKENS, largest(fits, MOST_TOKENS))
        tokens = CPU_TOKENS  # halved, so that small differences in memory rarely change the split of a batch
        while tokens > LEAST_TOKENS and not fits(tokens):
            tokens //= 2
        return tokens

    @property
    def undecided(self) -> bool:
        """Whether the plan would be another if layers kept less than predicted."""
        plan, settled = self.plan(self.demand.longest), self.demand.checkpointing
        if settled is None and (plan.checkpointing or not plan.fits):
            return True
        return not plan.checkpointing and self.tokens is None and plan.tokens < MOST_TOKENS

    @property
    def probe_tokens(self) -> int:
        """Tokens of a pass to measure, with activations kept; 0 if not even a small one would fit."""
        rows = self.shapes[0].logit_rows
        fits = [
            n
            for n in (PROBE_TOKENS, LEAST_TOKENS)
            if self.peak(n, n, checkpointing=False, logit_rows=rows) <= self.available
        ]
        return fits[0] if fits else 0

    def corrected(self, measured: float, tokens: int) -> PassMemory:
        """With what one pass has kept, in place of the prediction."""
        measured_here = [each for each in self.shapes if each.per_token is None]  # the pass had no images
        predicted = sum(each.held(tokens, tokens, checkpointing=False) for each in measured_here)
        scale = max(LEAST_SCALE, measured / predicted)
        shapes = (replace(each, scale=scale) if each in measured_here else each for each in self.shapes)
        return replace(self, shapes=tuple(shapes))

    def note(self) -> str:
        """What was chosen, in one line."""
        plan = self.plan(self.demand.longest)
        used = f"{(self.taken + plan.peak) / GIB:.1f} GiB of {self.total / GIB:.0f} predicted"
        return f"{self.demand.describe()}: {plan.describe()}, passes of {plan.tokens:,} tokens; {used}"

    def check(self) -> None:
        """Refuse a run whose longest row fits with no plan."""
        plan, demand = self.plan(self.demand.longest), self.demand
        if plan.fits or not demand.refuse or self.tokens is not None:
            return

        def fits(answer: int) -> bool:
            return self.plan(demand.prompt + answer).fits

        shorter = largest(fits, demand.answer)
        fixes = [
            f"lower {demand.setting} to {shorter:,}" if fits(shorter) else "use model.lora.rank=16 or a smaller model"
        ]
        if plan.checkpointing is False:
            fixes.append("remove model.gradient_checkpointing=false")
        if demand.cache_share:
            fixes.append("lower rollout.max_sequences or rollout.memory")
        if self.gpu:
            fixes.append("set learner.offload_optimizer=true")
        raise InputError(
            f"{demand.describe()} do not fit into memory: with {plan.describe()}, a pass over "
            f"one is predicted to take {plan.peak / GIB:.1f} GiB, and {max(0.0, self.available) / GIB:.1f} of "
            f"{self.total / GIB:.0f} GiB are left beside weights, optimiser and cache\n"
            f"  {', or '.join(fixes)}; learner.micro_batch_tokens=1024 starts it without this check"
        )


def device_memory(device: torch.device, models: Sequence[Any], optimizers: Sequence[MasterAdamW]) -> tuple[int, int]:
    """Bytes of the device, and bytes that are taken, or will be by the first update. On a CPU they follow from the
    settings alone, so that a resumed run plans the same passes."""
    if device.type == "cuda":
        total = torch.cuda.get_device_properties(device).total_memory
        return total, total - gpu_free(device) + sum(optimizer.pending_bytes() for optimizer in optimizers)
    weights = sum(local_part(p).nbytes for model in models for p in model.parameters())
    return machine_memory(), weights + sum(optimizer.state_bytes() for optimizer in optimizers)


def offloaded_bytes(demand: Demand, reference: Reference | None, teacher: Reference | None) -> int:
    """Bytes of models in CPU memory that an update loads for all its passes. Both may be the same model."""
    loaded = {id(one): one for one in (demand.full_kl and reference, demand.teacher_kl and teacher) if one}
    return sum(p.nbytes for one in loaded.values() if one.offload for p in one.model.parameters())


def check_states(
    config: LearnerConfig, *, weights: int, trained: int, copies: int, itemsize: int, memory: int, teacher: int = 0
) -> None:
    """Refuse a model whose weights and states alone exceed a GPU, before they are loaded. `weights`, `trained`: numbers
    of parameters; `copies`: models of `weights` parameters on the GPU, with the reference; `itemsize`: of a weight;
    `teacher`: bytes of another model."""
    half = itemsize == 2
    gradient = 4 if half and not config.offload_optimizer else itemsize
    moments = 2 if config.optimizer == EIGHT_BIT else 8
    states = 0 if config.offload_optimizer else moments + (4 if half else 0)
    needed = copies * itemsize * weights + trained * (gradient + states) + teacher
    if needed > memory:
        raise InputError(
            f"{needed / GIB:.0f} GiB of weights, gradients and optimiser states do not fit into the GPU's "
            f"{memory / GIB:.0f} GiB, without any activation\n"
            "  use model.lora.rank=16, learner.optimizer=adamw8bit, learner.offload_optimizer=true, "
            "or several learners with learner.parallel=fsdp"
        )


def largest(fits: Callable[[int], bool], most: int) -> int:
    """The largest number up to `most` that fits, or 1. All smaller numbers fit too."""
    low, high = 1, most + 1
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if fits(middle) else (low, middle)
    return low


def _adapter_weights(module: Any) -> list[torch.Tensor]:
    return [adapter.weight for adapter in getattr(module, "lora_A", {}).values()]


def _inner(config: Any) -> int:
    """The MLP's size; of a mixture, that of the experts that a token uses, with their copies of its input."""
    used = getattr(config, "num_experts_per_tok", None)
    if not used or not getattr(config, "moe_intermediate_size", None):
        size = getattr(config, "intermediate_size", None) or getattr(config, "ffn_dim", None) or 4 * config.hidden_size
        return int(max(size) if isinstance(size, (list, tuple)) else size)  # a list: one for each layer
    shared = getattr(config, "shared_expert_intermediate_size", None) or 0
    return int(used * (config.moe_intermediate_size + config.hidden_size) + shared)
