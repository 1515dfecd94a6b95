"""Weights, gradients and optimiser state shared out over ranks (torch's FSDP2).

Every decoder layer is a unit that is gathered when it runs and let go afterwards; embedding, last norm and output
matrix are the root's, which stays whole from the forward pass to the end of the backward pass: the output matrix is
used outside of its module's own forward, and may be the embedding itself. `Whole` is that root: it runs any work
inside of its forward, so that torch's hooks see it.

In teams of ranks the layers' matrices are split before that (`teams.py`), and a shard is a part of a member's part.

A shard is the master: trained weights in half precision become float32 shards that are gathered in half precision,
and gradients are summed over ranks in float32. They are sums already, so nothing divides them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn

from covey.config.schema import LearnerConfig
from covey.errors import InputError
from covey.learner.forward import causal_lm
from covey.learner.ranks import Ranks
from covey.learner.teams import parts_of_gradients, split_matrices

Span = tuple[int, int]  # first and last + 1
Block = tuple[Span, Span | None]  # rows of a weight, and columns where it does not have all of them

HALVES = (torch.bfloat16, torch.float16)
BYTES_PER_WEIGHT = 18  # trained in half precision: itself, master, gradient and two moments
MEMORY_SHARE = 0.5  # of a GPU that these may take before they are shared out; the rest is for activations


def shards(config: LearnerConfig, ranks: Ranks, size: int) -> bool:
    """Whether weights are shared out: as asked, or else where one GPU would be too full with so many bytes."""
    if ranks.world == 1:
        return False
    if config.tensor_parallel > 1:
        return True
    if config.parallel != "auto":
        return config.parallel == "fsdp"
    if ranks.device is None or ranks.device.type != "cuda":
        return False
    memory = torch.cuda.get_device_properties(ranks.device).total_memory
    return size > MEMORY_SHARE * memory


def bytes_to_train(model: Any) -> int:
    return sum(p.numel() * (BYTES_PER_WEIGHT if p.requires_grad else p.element_size()) for p in model.parameters())


def check_shards(config: LearnerConfig, *, adapter: bool) -> None:
    if config.offload_weights:
        raise InputError(
            "learner.offload_weights moves whole weights, and learner.parallel=fsdp shares them out\n"
            "  use learner.offload_optimizer: then shards wait in CPU memory"
        )
    if config.offload_optimizer and adapter:
        raise InputError(
            "learner.offload_optimizer with learner.parallel=fsdp keeps shards in CPU memory, where adapters cannot be "
            "merged\n  leave it out: an adapter's optimiser is small"
        )
    if config.tensor_parallel > 1 and adapter:
        raise InputError(
            "learner.tensor_parallel splits the matrices that an adapter is added to\n"
            "  with model.lora leave it out: learner.parallel=fsdp shares the model out too"
        )


class Whole(nn.Module):
    """The root of a sharded model: while work runs inside, the weights it uses are whole."""

    def __init__(self, model: Any) -> None:
        super().__init__()
        self.model = model
        self.busy = False

    def forward(self, work: Callable[[], Any]) -> Any:
        self.busy = True
        try:
            return work()
        finally:
            self.busy = False


def shard(model: Any, ranks: Ranks, *, offload: bool = False) -> None:
    """Share a model out, in place. It may be in CPU memory: only one unit at a time is whole on the device.
    `offload`: shards live in CPU memory, where the optimiser then works."""
    from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, OffloadPolicy, fully_shard

    assert ranks.device is not None
    dtypes = {name: p.dtype for name, p in model.named_parameters()}
    half = next((dtype for dtype in dtypes.values() if dtype in HALVES), None)
    for weight in model.parameters():
        if weight.requires_grad and weight.dtype in HALVES:
            weight.data = weight.data.float()
    if ranks.team > 1:
        split_matrices(causal_lm(model), ranks)
    on_gpu = ranks.device.type == "cuda"
    settings: dict[str, Any] = {
        "mesh": ranks.mesh["shares"],
        "mp_policy": MixedPrecisionPolicy(param_dtype=half, reduce_dtype=torch.float32 if half else None),
        "offload_policy": CPUOffloadPolicy() if offload and on_gpu else OffloadPolicy(),
    }
    for layer in causal_lm(model).base_model.layers:
        fully_shard(layer, **settings)
    whole: Any = Whole(model)
    fully_shard(whole, **settings)
    for module in whole.modules():
        if hasattr(module, "set_gradient_divide_factor"):
            module.set_gradient_divide_factor(1.0)
            module.set_force_sum_reduction_for_comms(True)
    parts = parts_of_gradients(model) if ranks.team > 1 else set()
    for name, weight in model.named_parameters():
        weight.working_dtype = dtypes[name]
        weight.part_of_gradient = name in parts  # of a rank; the team's is the sum
    model.__dict__["whole"] = whole  # not as a submodule: it is the other way round
    with torch.no_grad():  # torch finds out who is the root, and where shards lie from now on
        whole(tuple)
    at_rest(model)


def inside(model: Any, work: Callable[[], Any]) -> Any:
    """Do work with a model's weights, which may be shared out. Tensors with a gradient must be returned in a tuple."""
    whole = model.__dict__.get("whole")
    return work() if whole is None or whole.busy else whole(work)


def at_rest(model: Any) -> None:
    """Only shards are left; after a forward pass without a backward pass the root would stay whole."""
    whole = model.__dict__.get("whole")
    if whole is None:
        return
    if hasattr(whole, "reset_iter_state"):  # newer torch: forgets the order of layers too, which else a backward does
        whole.reset_iter_state()
        return
    for module in whole.modules():
        if hasattr(module, "reshard"):
            module.reshard()


def is_sharded(weight: Tensor) -> bool:
    return hasattr(weight, "full_tensor")


def own_part(weight: Tensor) -> Tensor:
    """This rank's rows of a weight: the memory itself, not a copy."""
    part: Tensor = weight.detach().to_local() if is_sharded(weight) else weight  # type: ignore[attr-defined]
    return part


def split_along(weight: Any) -> int | None:
    """The dimension along which members of a team have parts of a weight; None: each has all of it."""
    if not is_sharded(weight) or len(weight.placements) == 1 or not weight.placements[1].is_shard():
        return None
    return int(weight.placements[1].dim)


def own_block(weight: Tensor, ranks: Ranks) -> Block:
    """What this rank has of a sharded weight: of its team member's rows, its share."""
    along = split_along(weight)
    begin, end = _chunk(0, weight.shape[0], ranks.member, ranks.team) if along == 0 else (0, weight.shape[0])
    rows = _chunk(begin, end, ranks.share, ranks.shares)
    columns = _chunk(0, weight.shape[1], ranks.member, ranks.team) if along == 1 else None
    part = own_part(weight)
    assert part.shape[0] == rows[1] - rows[0], "torch shares out in another way"
    assert columns is None or part.shape[1] == columns[1] - columns[0], "torch splits in another way"
    return rows, columns


def _chunk(begin: int, end: int, number: int, count: int) -> Span:
    """As torch.chunk shares out."""
    each = -(-(end - begin) // count)
    return min(end, begin + each * number), min(end, begin + each * (number + 1))


def working_dtype(weight: Tensor) -> torch.dtype:
    """The precision in which a weight is used and published; of a shard, not that of the master."""
    found: torch.dtype = getattr(weight, "working_dtype", weight.dtype)
    return found


@torch.no_grad()
def full_weights(model: Any, *, trained_only: bool = False) -> Iterator[tuple[str, Tensor]]:
    """Every weight once, whole, in its working precision. All ranks must go through it together."""
    for name, weight in model.named_parameters():
        if weight.requires_grad or not trained_only:
            yield name, whole_weight(weight)


def whole_weight(weight: Any) -> Tensor:
    """All rows of a weight, gathered on the device that ranks talk through: shards may wait in CPU memory."""
    if not is_sharded(weight):
        whole: Tensor = weight.detach()
        return whole
    full: Tensor = weight.detach().to(weight.device_mesh.device_type, working_dtype(weight)).full_tensor()
    return full
