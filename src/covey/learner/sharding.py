"""Weights, gradients and optimiser state shared out over ranks (torch's FSDP2).

Every decoder layer is a unit that is gathered when it runs and let go afterwards; embedding, last norm and output
matrix are the root's, which stays whole from the forward pass to the end of the backward pass: the output matrix is
used outside of its module's own forward, and may be the embedding itself. `Whole` is that root: it runs any work
inside of its forward, so that torch's hooks see it.

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

HALVES = (torch.bfloat16, torch.float16)
BYTES_PER_WEIGHT = 18  # trained in half precision: itself, master, gradient and two moments
MEMORY_SHARE = 0.5  # of a GPU that these may take before they are shared out; the rest is for activations


def shards(config: LearnerConfig, ranks: Ranks, size: int) -> bool:
    """Whether weights are shared out: as asked, or else where one GPU would be too full with so many bytes."""
    if ranks.world == 1:
        return False
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
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, OffloadPolicy, fully_shard

    assert ranks.device is not None
    dtypes = {name: p.dtype for name, p in model.named_parameters()}
    half = next((dtype for dtype in dtypes.values() if dtype in HALVES), None)
    for weight in model.parameters():
        if weight.requires_grad and weight.dtype in HALVES:
            weight.data = weight.data.float()
    on_gpu = ranks.device.type == "cuda"
    settings: dict[str, Any] = {
        "mesh": init_device_mesh(ranks.device.type, (ranks.world,)),
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
    for name, weight in model.named_parameters():
        weight.working_dtype = dtypes[name]
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


def own_rows(weight: Tensor, ranks: Ranks) -> tuple[int, int]:
    """First and last + 1 of the rows of a sharded weight that this rank has: as torch.chunk shares out."""
    each = -(-weight.shape[0] // ranks.world)
    first, last = (min(weight.shape[0], each * number) for number in (ranks.rank, ranks.rank + 1))
    assert own_part(weight).shape[0] == last - first, "torch shares out in another way"
    return first, last


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
