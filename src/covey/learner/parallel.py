"""Training on several processes: data parallelism, sharding (FSDP2) and tensor parallelism.

Every rank is called with the same arguments and returns the same results. Each runs its part of the forward passes, and
sums are over all ranks. The ranks of a tensor-parallel group read the same rows and split the layers' matrices, so rows
are divided over the groups, and sums are over groups. A single process communicates nothing.

    tp_size=2     ranks 0 1 | 2 3 | 4 5        dp_rank 0 | 1 | 2;  rank 3 sums with ranks 1 and 5
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from datetime import timedelta
from fnmatch import fnmatchcase
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from covey.config.schema import LearnerConfig
from covey.errors import InputError
from covey.models.families import (
    COLWISE,
    REPLICATED,
    ROWWISE,
    TENSOR_PARALLEL_STYLES,
    causal_lm,
    decoder,
    layers_of,
)
from covey.weights.names import is_sharded


@dataclass(frozen=True)
class Ranks:
    rank: int = 0
    world_size: int = 1
    device: torch.device | None = None  # this rank's own; None: wherever the model is
    tp_size: int = 1  # ranks of a tensor-parallel group
    mesh: Any = None  # torch's DeviceMesh, ("dp", "tp"); None for a single process

    @classmethod
    def join(
        cls, rank: int, world_size: int, rendezvous: str | dist.Store, device: torch.device, *, timeout_s: float = 1800
    ) -> Ranks:
        """Join the process group by an address (`tcp://…`, `file:///PATH`) or a store. NCCL on GPUs, gloo on CPUs."""
        if device.type == "cuda":
            torch.cuda.set_device(device)
        dist.init_process_group(
            "nccl" if device.type == "cuda" else "gloo",
            init_method=rendezvous if isinstance(rendezvous, str) else None,
            store=None if isinstance(rendezvous, str) else rendezvous,
            rank=rank,
            world_size=world_size,
            timeout=timedelta(seconds=timeout_s),
        )
        return cls(rank, world_size, device).with_tensor_parallel(1)

    def with_tensor_parallel(self, tp_size: int) -> Ranks:
        """These ranks, arranged in tensor-parallel groups of this size. All ranks must call it."""
        from torch.distributed.device_mesh import init_device_mesh

        if self.world_size == 1:
            return self
        assert self.device is not None and self.world_size % tp_size == 0
        shape = (self.world_size // tp_size, tp_size)
        mesh = init_device_mesh(self.device.type, shape, mesh_dim_names=("dp", "tp"))
        return replace(self, tp_size=tp_size, mesh=mesh)

    def leave(self) -> None:
        if self.world_size > 1:
            dist.destroy_process_group()

    @property
    def is_first(self) -> bool:
        """Whether this rank writes files for all."""
        return self.rank == 0

    @property
    def dp_rank(self) -> int:
        """Which part of the rows this rank computes."""
        return self.rank // self.tp_size

    @property
    def dp_size(self) -> int:
        return self.world_size // self.tp_size

    @property
    def tp_rank(self) -> int:
        """This rank's place in its tensor-parallel group."""
        return self.rank % self.tp_size

    def sum(self, part: Tensor) -> Tensor:
        """Sum over data-parallel ranks, on `part`'s device and in its dtype. May overwrite `part`."""
        return part if self.dp_size == 1 else self._sum(part, "dp")

    def sum_over_tp(self, part: Tensor) -> Tensor:
        return part if self.tp_size == 1 else self._sum(part, "tp")

    def _sum(self, part: Tensor, dim: str) -> Tensor:
        total = part.to(self.device, torch.uint8 if part.dtype == torch.bool else part.dtype).contiguous()
        dist.all_reduce(total, group=self.mesh.get_group(dim))
        return total.to(part.device, part.dtype)

    def sum_in_place(self, parts: Iterable[Tensor]) -> None:
        """Sum tensors on this rank's device over data-parallel ranks, all at once."""
        if self.dp_size > 1:
            group = self.mesh.get_group("dp")
            for work in [dist.all_reduce(part, group=group, async_op=True) for part in parts]:
                work.wait()

    def min(self, number: int) -> int:
        """The smallest number of all ranks."""
        if self.world_size == 1:
            return number
        smallest = torch.tensor(number, device=self.device)
        dist.all_reduce(smallest, dist.ReduceOp.MIN)
        return int(smallest)

    def any(self, condition: bool) -> bool:
        return -self.min(-int(condition)) == 1

    def barrier(self) -> None:
        self.min(0)


SINGLE_PROCESS = Ranks()


# -- Tensor parallelism ------------------------------------------------------------------------------------------------
# A tensor-parallel group splits the matrices of every layer, by transformers' plan for the model:
#
#     colwise   q, k, v, gate, up: each rank has some of the outputs, and so some of the heads
#     rowwise   o, down: each rank has some of the inputs; their results are summed over the group
#
# Between layers all ranks of a group have the same activations, bit for bit. Embedding, norms and output matrix are
# replicated. A norm of queries or keys inside attention sees only its rank's heads, so its gradient must be summed over
# the group.


def check_tensor_parallel(config: Any, tp_size: int) -> None:
    """Refuse a model that cannot be split this way, before its weights are loaded. `config` is transformers'."""
    text = config.get_text_config(decoder=True)
    plan = tensor_parallel_plan(config)
    if not plan or (other := sorted(set(plan.values()) - TENSOR_PARALLEL_STYLES)):
        why = f"its plan has {', '.join(other)}" if plan else "transformers has no plan for it"
        raise InputError(
            f"learner.tensor_parallel={tp_size}: {config.model_type} models cannot be split, {why}\n"
            "  remove it: learner.parallel=fsdp shards any model"
        )
    sizes = {name: getattr(text, name, None) for name in ("num_attention_heads", "num_key_value_heads")}
    sizes["intermediate_size"] = getattr(text, "intermediate_size", None)
    for name, size in sizes.items():
        if size is not None and size % tp_size:
            raise InputError(
                f"learner.tensor_parallel={tp_size} does not divide the model's {name}, {size}\n"
                f"  use a number that divides {', '.join(f'{n} ({s})' for n, s in sizes.items() if s is not None)}"
            )


def tensor_parallel_plan(config: Any) -> dict[str, str]:
    """transformers' plan for the layers' modules: {"layers.*.mlp.up_proj": "colwise", ...}."""
    plan = getattr(config.get_text_config(decoder=True), "base_model_tp_plan", None) or {}
    return {pattern: style for pattern, style in plan.items() if pattern.startswith("layers.")}


def apply_tensor_parallel(lm: Any, ranks: Ranks) -> None:
    """Split the layers' matrices, in place. Weights in CPU memory stay there."""
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

    mesh, plan = ranks.mesh["tp"], tensor_parallel_plan(lm.config)
    blocks = {pattern.rpartition(".")[0] for pattern in plan}  # layers.*.self_attn, layers.*.mlp
    for name, module in decoder(lm).named_modules():
        style = style_of(name, plan)
        in_block = any(fnmatchcase(name, f"{block}.*") for block in blocks)
        if style is None and in_block and list(module.parameters(recurse=False)):
            raise InputError(  # each rank would have a part of its gradient, which is never summed
                f"learner.tensor_parallel: {name} has weights that the plan for {lm.config.model_type} models does not "
                "cover\n  remove it: learner.parallel=fsdp shards any model"
            )
        if style in (COLWISE, ROWWISE):
            assert isinstance(module, nn.Linear), f"{name} is not a linear layer"
            parallelize_module(module, mesh, ColwiseParallel() if style == COLWISE else RowwiseParallel())


def style_of(name: str, plan: dict[str, str]) -> str | None:
    """The style of a module of the backbone. A star in a pattern stands for a layer's index."""
    return next((style for pattern, style in plan.items() if fnmatchcase(name, pattern)), None)


def partial_gradients(model: Any) -> set[str]:
    """Names of the weights in `model` whose gradient must be summed over the tensor-parallel group."""
    lm = causal_lm(model)
    plan, stack = tensor_parallel_plan(lm.config), decoder(lm)
    norms = [module for name, module in stack.named_modules() if style_of(name, plan) == REPLICATED]
    weights = {weight for module in norms for weight in module.parameters(recurse=False)}
    return {name for name, weight in model.named_parameters() if weight in weights}


# -- Sharding (torch's FSDP2) ------------------------------------------------------------------------------------------
# Every decoder layer is a unit that is gathered for its forward and backward pass. Embedding, last norm and output
# matrix belong to the root, which stays gathered from the forward pass to the end of the backward pass: the output
# matrix is used outside of its module's forward, and may be tied to the embedding. `FsdpRoot` is that root.
#
# With tensor parallelism, matrices are split first and then sharded.
#
# The shard is the master weight: trained half-precision weights become float32 shards that are gathered in half
# precision. Gradients are summed over ranks in float32 and not averaged: losses are sums divided by global counts.

Span = tuple[int, int]  # first, last + 1
Block = tuple[Span, Span | None]  # rows of a weight, and columns unless it has all of them

HALVES = (torch.bfloat16, torch.float16)
BYTES_PER_WEIGHT = 18  # of a trained half-precision weight: itself, master, gradient and two moments
MEMORY_SHARE = 0.5  # of a GPU that these may take unsharded; the rest is for activations


def should_shard(config: LearnerConfig, ranks: Ranks, size: int) -> bool:
    """Whether to shard: as configured, or with `auto` if `size` bytes would take too much of a GPU."""
    if ranks.world_size == 1:
        return False
    if config.tensor_parallel > 1:
        return True
    if config.parallel != "auto":
        return config.parallel == "fsdp"
    if ranks.device is None or ranks.device.type != "cuda":
        return False
    memory = torch.cuda.get_device_properties(ranks.device).total_memory
    return size > MEMORY_SHARE * memory


def training_bytes(model: Any) -> int:
    return sum(p.numel() * (BYTES_PER_WEIGHT if p.requires_grad else p.element_size()) for p in model.parameters())


def check_sharding(config: LearnerConfig, *, adapter: bool) -> None:
    if config.offload_weights:
        raise InputError(
            "learner.offload_weights moves whole weights, and learner.parallel=fsdp shards them\n"
            "  use learner.offload_optimizer, which keeps shards in CPU memory"
        )
    if config.offload_optimizer and adapter:
        raise InputError(
            "learner.offload_optimizer with learner.parallel=fsdp keeps shards in CPU memory, where adapters cannot be "
            "merged\n  remove it: an adapter's optimiser is small"
        )
    if config.tensor_parallel > 1 and adapter:
        raise InputError(
            "learner.tensor_parallel splits the matrices that an adapter is added to\n"
            "  with model.lora remove it: learner.parallel=fsdp shards the model too"
        )


class FsdpRoot(nn.Module):
    """The root of a sharded model. Any work runs inside its forward, so that torch's hooks gather the weights."""

    def __init__(self, model: Any) -> None:
        super().__init__()
        self.model = model
        self.running = False

    def forward(self, work: Callable[[], Any]) -> Any:
        self.running = True
        try:
            return work()
        finally:
            self.running = False


def shard_model(model: Any, ranks: Ranks, *, offload: bool = False) -> None:
    """Shard a model in place. It may be in CPU memory: only one unit at a time is whole on the device.

    `offload`: shards stay in CPU memory, where the optimiser then runs.
    """
    from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, OffloadPolicy, fully_shard

    assert ranks.device is not None
    dtypes = {name: p.dtype for name, p in model.named_parameters()}
    half = next((dtype for dtype in dtypes.values() if dtype in HALVES), None)
    for weight in model.parameters():
        if weight.requires_grad and weight.dtype in HALVES:
            weight.data = weight.data.float()
    if ranks.tp_size > 1:
        apply_tensor_parallel(causal_lm(model), ranks)
    on_gpu = ranks.device.type == "cuda"
    settings: dict[str, Any] = {
        "mesh": ranks.mesh["dp"],
        "mp_policy": MixedPrecisionPolicy(param_dtype=half, reduce_dtype=torch.float32 if half else None),
        "offload_policy": CPUOffloadPolicy() if offload and on_gpu else OffloadPolicy(),
    }
    for layer in layers_of(decoder(causal_lm(model))):
        fully_shard(layer, **settings)
    root: Any = FsdpRoot(model)
    fully_shard(root, **settings)
    for module in root.modules():
        if hasattr(module, "set_gradient_divide_factor"):
            module.set_gradient_divide_factor(1.0)
            module.set_force_sum_reduction_for_comms(True)
    partial = partial_gradients(model) if ranks.tp_size > 1 else set()
    for name, weight in model.named_parameters():
        weight.working_dtype = dtypes[name]
        weight.partial_gradient = name in partial
    model.__dict__["fsdp_root"] = root  # not a submodule: the model is the root's
    with torch.no_grad():  # torch initialises the root and the shards' places in the first forward
        root(tuple)
    reshard(model)


def run_unsharded(model: Any, work: Callable[[], Any]) -> Any:
    """Run work that uses the model's weights, sharded or not. Tensors with a gradient must be returned in a tuple."""
    root = model.__dict__.get("fsdp_root")
    return work() if root is None or root.running else root(work)


def reshard(model: Any) -> None:
    """Free gathered weights. After a forward pass without a backward pass, torch would keep the root gathered."""
    root = model.__dict__.get("fsdp_root")
    if root is None:
        return
    if hasattr(root, "reset_iter_state"):  # newer torch: also resets the order of layers, as a backward pass does
        root.reset_iter_state()
        return
    for module in root.modules():
        if hasattr(module, "reshard"):
            module.reshard()


def local_part(weight: Tensor) -> Tensor:
    """This rank's part of a weight: the memory itself, not a copy."""
    part: Tensor = weight.detach().to_local() if is_sharded(weight) else weight  # type: ignore[attr-defined]
    return part


def tensor_parallel_dim(weight: Any) -> int | None:
    """The dimension along which a tensor-parallel group splits a weight; None: it is replicated."""
    if not is_sharded(weight) or len(weight.placements) == 1 or not weight.placements[1].is_shard():
        return None
    return int(weight.placements[1].dim)


def local_block(weight: Tensor, ranks: Ranks) -> Block:
    """The rows and columns of a sharded weight that this rank has."""
    dim = tensor_parallel_dim(weight)
    begin, end = _chunk(0, weight.shape[0], ranks.tp_rank, ranks.tp_size) if dim == 0 else (0, weight.shape[0])
    rows = _chunk(begin, end, ranks.dp_rank, ranks.dp_size)
    columns = _chunk(0, weight.shape[1], ranks.tp_rank, ranks.tp_size) if dim == 1 else None
    part = local_part(weight)
    assert part.shape[0] == rows[1] - rows[0], "torch shards rows differently"
    assert columns is None or part.shape[1] == columns[1] - columns[0], "torch splits columns differently"
    return rows, columns


def _chunk(begin: int, end: int, index: int, count: int) -> Span:
    """A chunk of a span, of the sizes that torch.chunk gives."""
    each = -(-(end - begin) // count)
    return min(end, begin + each * index), min(end, begin + each * (index + 1))
