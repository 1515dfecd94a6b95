"""The processes that learn together, and this one's place among them.

Every rank is called with the same arguments and gives the same answers: each runs its share of the forward passes, and
what was found is summed over all. Ranks of a team (tensor parallelism) read the same rows and split the layers'
matrices: a share is a team's, and sums are over teams. Of one process, nothing here costs anything.

    ranks in teams of 2     0 1 | 2 3 | 4 5        shares 0 | 1 | 2;  rank 3 adds up with 1 and 5
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
from covey.learner.forward import causal_lm
from covey.weights.names import is_sharded


@dataclass(frozen=True)
class Ranks:
    rank: int = 0
    world: int = 1
    device: torch.device | None = None  # this rank's own; None: where the model is
    team: int = 1  # ranks that share the layers' matrices
    mesh: Any = None  # torch's, teams × members; of one rank there is none

    @classmethod
    def join(
        cls, rank: int, world: int, meet: str | dist.Store, device: torch.device, *, timeout_s: float = 1800.0
    ) -> Ranks:
        """Meet the others: at `file:///PATH` or in a store. NCCL between GPUs, gloo between CPUs."""
        if device.type == "cuda":
            torch.cuda.set_device(device)
        dist.init_process_group(
            "nccl" if device.type == "cuda" else "gloo",
            init_method=meet if isinstance(meet, str) else None,
            store=None if isinstance(meet, str) else meet,
            rank=rank,
            world_size=world,
            timeout=timedelta(seconds=timeout_s),
        )
        return cls(rank, world, device).in_teams(1)

    def in_teams(self, team: int) -> Ranks:
        """The same ranks with other teams. All must call it."""
        from torch.distributed.device_mesh import init_device_mesh

        if self.world == 1:
            return self
        assert self.device is not None and self.world % team == 0
        shape = (self.world // team, team)
        mesh = init_device_mesh(self.device.type, shape, mesh_dim_names=("shares", "members"))
        return replace(self, team=team, mesh=mesh)

    def leave(self) -> None:
        if self.world > 1:
            dist.destroy_process_group()

    @property
    def first(self) -> bool:
        """Whether this is the rank that writes for all."""
        return self.rank == 0

    @property
    def share(self) -> int:
        """The number of this rank's share of the rows."""
        return self.rank // self.team

    @property
    def shares(self) -> int:
        return self.world // self.team

    @property
    def member(self) -> int:
        """The number of this rank in its team."""
        return self.rank % self.team

    def sum(self, part: Tensor) -> Tensor:
        """The sum over all shares, where and as `part` is; it may be written to."""
        return part if self.shares == 1 else self._sum(part, "shares")

    def sum_in_team(self, part: Tensor) -> Tensor:
        return part if self.team == 1 else self._sum(part, "members")

    def _sum(self, part: Tensor, over: str) -> Tensor:
        total = part.to(self.device, torch.uint8 if part.dtype == torch.bool else part.dtype).contiguous()
        dist.all_reduce(total, group=self.mesh.get_group(over))
        return total.to(part.device, part.dtype)

    def sum_in_place(self, parts: Iterable[Tensor]) -> None:
        """Over all shares, all of them under way at once. They lie on this rank's device."""
        if self.shares > 1:
            group = self.mesh.get_group("shares")
            for work in [dist.all_reduce(part, group=group, async_op=True) for part in parts]:
                work.wait()

    def smallest(self, number: int) -> int:
        """Of all ranks."""
        if self.world == 1:
            return number
        found = torch.tensor(number, device=self.device)
        dist.all_reduce(found, dist.ReduceOp.MIN)
        return int(found)

    def any(self, here: bool) -> bool:
        return -self.smallest(-int(here)) == 1

    def wait_for_all(self) -> None:
        """Nobody goes on before everybody is here."""
        self.smallest(0)


ALONE = Ranks()


# -- Tensor parallelism: the ranks of a team share the matrices of every layer, as transformers' plan for the model sa--
# colwise   q, k, v, gate, up: a rank has some of the outputs, so some of the heads
# rowwise   o, down: a rank has some of the inputs; what they make of them is added up over the team
#
# Between layers every rank of a team has the same activations, bit for bit. Embedding, norms and output matrix are
# whole on every member. A norm inside of attention (of queries and keys) sees only a member's heads: its gradient is a
# part.

COLWISE, ROWWISE, PART_OF_GRADIENT = "colwise", "rowwise", "replicated_with_grad_allreduce"


def check_teams(config: Any, team: int) -> None:
    """Whether a model can be split so, before its weights are loaded. `config` is transformers'."""
    text = config.get_text_config(decoder=True)
    plan = layer_plan(config)
    if not plan or (other := sorted(set(plan.values()) - {COLWISE, ROWWISE, PART_OF_GRADIENT})):
        why = f"its plan has {', '.join(other)}" if plan else "transformers has no plan for it"
        raise InputError(
            f"learner.tensor_parallel={team}: {config.model_type} models cannot be split, {why}\n"
            "  leave it out: learner.parallel=fsdp shares any model out"
        )
    sizes = {name: getattr(text, name, None) for name in ("num_attention_heads", "num_key_value_heads")}
    sizes["intermediate_size"] = getattr(text, "intermediate_size", None)
    for name, size in sizes.items():
        if size is not None and size % team:
            raise InputError(
                f"learner.tensor_parallel={team} does not divide the model's {name}, {size}\n"
                f"  use a number that divides {', '.join(f'{n} ({s})' for n, s in sizes.items() if s is not None)}"
            )


def layer_plan(config: Any) -> dict[str, str]:
    """How transformers would split the layers' modules: {"layers.*.mlp.up_proj": "colwise", ...}."""
    plan = getattr(config.get_text_config(decoder=True), "base_model_tp_plan", None) or {}
    return {pattern: style for pattern, style in plan.items() if pattern.startswith("layers.")}


def split_matrices(lm: Any, ranks: Ranks) -> None:
    """In place. Weights may be in CPU memory, where they stay."""
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

    mesh, plan = ranks.mesh["members"], layer_plan(lm.config)
    blocks = {pattern.rpartition(".")[0] for pattern in plan}  # layers.*.self_attn, layers.*.mlp
    for name, module in lm.base_model.named_modules():
        style = style_of(name, plan)
        inside = any(fnmatchcase(name, f"{block}.*") for block in blocks)
        if style is None and inside and list(module.parameters(recurse=False)):
            raise InputError(  # each member would have a part of its gradient, and nobody would add them up
                f"learner.tensor_parallel: {name} has weights that the plan for {lm.config.model_type} models leaves "
                "out\n  leave it out: learner.parallel=fsdp shares any model out"
            )
        if style in (COLWISE, ROWWISE):
            assert isinstance(module, nn.Linear), f"{name} is no matrix"
            parallelize_module(module, mesh, ColwiseParallel() if style == COLWISE else RowwiseParallel())


def style_of(name: str, plan: dict[str, str]) -> str | None:
    """Of a module of the backbone. A star in a pattern stands for a layer's number."""
    return next((style for pattern, style in plan.items() if fnmatchcase(name, pattern)), None)


def parts_of_gradients(model: Any) -> set[str]:
    """The weights, by their names in `model`, whose gradient on a rank is a part of the team's."""
    lm = causal_lm(model)
    plan, before = layer_plan(lm.config), f"{lm.base_model_prefix}."
    modules = {name: name.removeprefix(before).rpartition(".")[0] for name, _ in model.named_parameters()}
    return {name for name, module in modules.items() if style_of(module, plan) == PART_OF_GRADIENT}


# -- Weights, gradients and optimiser state shared out over ranks (torch's FSDP2) --------------------------------------
# Every decoder layer is a unit that is gathered when it runs and let go afterwards; embedding, last norm and output
# matrix are the root's, which stays whole from the forward pass to the end of the backward pass: the output matrix is
# used outside of its module's own forward, and may be the embedding itself. `Whole` is that root: it runs any work
# inside of its forward, so that torch's hooks see it.
#
# In teams of ranks the layers' matrices are split before that (`teams.py`), and a shard is a part of a member's part.
#
# A shard is the master: trained weights in half precision become float32 shards that are gathered in half precision,
# and gradients are summed over ranks in float32. They are sums already, so nothing divides them.

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
