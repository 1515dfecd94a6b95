"""Wiring of cluster=ray: the same learner and engines as in one process, made inside of actors."""

from __future__ import annotations

import dataclasses
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from covey.app.models import Parts
from covey.config.schema import Config
from covey.errors import InputError

if TYPE_CHECKING:
    from covey.cluster.engines import RayEngine
    from covey.cluster.learner import RemoteLearner
    from covey.cluster.placement import Node, Plan
    from covey.models.loading import ModelSource
    from covey.protocols import Algorithm
    from covey.training.checkpoint import Checkpoint
    from covey.weights.transport import FileTransport


@dataclass(frozen=True)
class Carried:
    """What travels to an actor: no tasks, no rewards, no agents."""

    config: Config
    algorithm: Algorithm
    model: ModelSource | None
    total_steps: int


@dataclass(frozen=True)
class Remote:
    learner: RemoteLearner
    engine: RayEngine
    notes: tuple[str, ...]  # for the console: what runs where, and how weights travel


def settle_cluster(config: Config) -> tuple[Config, list[str]]:
    """Engines that share the learners' GPUs are one to a GPU; and warnings about settings that ask for more."""
    size = config.rollout.tensor_parallel
    if config.cluster.name != "ray":
        return config, []
    if config.cluster.rollout_devices is not None or size == 1:
        return config, _crowded(config)
    rollout = dataclasses.replace(config.rollout, tensor_parallel=1)
    return dataclasses.replace(config, rollout=rollout), [
        f"rollout.tensor_parallel={size} has no effect: engines share the learners' GPUs, one to each\n"
        f"  where the model is too large for that, give them their own: cluster.rollout_devices={size} or a multiple"
    ]


def _crowded(config: Config) -> list[str]:
    """A warning where more processes work at the same time than this machine has cores for them."""
    from covey.cluster.start import address_of, in_a_cluster, own_machine

    wanted = config.cluster
    if address_of(wanted) is not None or in_a_cluster():
        return []
    try:
        plan = plan_of(config, [own_machine()])
    except InputError:  # `check_cluster` raises it
        return []
    if not plan.crowded:
        return []
    engines = f" and cluster.rollout_devices={wanted.rollout_devices}" if wanted.rollout_devices else ""
    return [
        f"{plan.processes} processes share {plan.cores} {'core' if plan.cores == 1 else 'cores'}: "
        f"cluster.learner_devices={wanted.learner_devices}{engines}\n"
        "  steps are faster with one process on a core"
    ]


def check_cluster(config: Config) -> None:
    """All that can be said before a cluster is at hand."""
    from covey.cluster.start import address_of, in_a_cluster, own_machine, require_ray

    team, learners = config.learner.tensor_parallel, config.cluster.learner_devices
    if learners % team:
        raise InputError(
            f"learner.tensor_parallel={team}, and cluster.learner_devices={learners} is no multiple of it\n"
            f"  {team} learners share a layer's matrices: use cluster=ray cluster.learner_devices={team} or a multiple"
        )
    if config.cluster.name != "ray":
        return
    require_ray()
    if config.rollout.devices is not None:
        raise InputError(
            f"rollout.devices={config.rollout.devices} with cluster=ray, where Ray hands out GPUs\n"
            "  say how many: cluster.rollout_devices"
        )
    if ":" in config.model.device:
        raise InputError(f"model.device={config.model.device} with cluster=ray, where Ray hands out GPUs\n  use cuda")
    if address_of(config.cluster) is None and not in_a_cluster():
        plan_of(config, [own_machine()])


def plan_of(config: Config, nodes: list[Node]) -> Plan:
    from covey.cluster.placement import choose_transport, place

    gpu = config.model.device.startswith("cuda") or (config.model.device == "auto" and any(n.gpus for n in nodes))
    plan = place(config.cluster, nodes, gpu=gpu, tensor_parallel=config.rollout.tensor_parallel)
    choose_transport(config.cluster.transport, plan)  # refuses what cannot be
    return plan


def start_remote(
    prepared: Parts, checkpoint: Checkpoint | None, folder: Path, threads: int, resources: ExitStack
) -> Remote:
    """Actors with their models. Everything ends with `resources`."""
    from covey.cluster.actors import MAX_CONCURRENCY, placement_group, spawn
    from covey.cluster.engines import RayEngine, RolloutActor
    from covey.cluster.learner import LearnerActor, RemoteLearner
    from covey.cluster.placement import choose_transport
    from covey.cluster.start import open_cluster

    config, folder = prepared.config, folder.absolute()
    cluster = resources.enter_context(open_cluster(config.cluster))
    plan = plan_of(config, list(cluster.nodes))
    group = resources.enter_context(placement_group(plan))
    transport, why = choose_transport(config.cluster.transport, plan)
    carried = _carried(prepared, gpu=plan.gpu)
    load = partial(load_engine, carried, folder, plan.colocated)
    each, per_learner = (max(1, threads // plan.busiest(slots)) for slots in (plan.engines, plan.learners))
    weights = _weight_transport(transport, carried, folder)
    engine = RayEngine(
        len(plan.engines),
        lambda index: spawn(RolloutActor, plan, plan.engines[index], group, max_concurrency=MAX_CONCURRENCY),
        lambda index, actor: actor.load.remote(load, index, each),
        weights,
        colocated=plan.colocated,
    )
    resources.callback(engine.close)
    ranks = [spawn(LearnerActor, plan, slot, group) for slot in plan.learners]
    build = partial(load_learner, carried, _absolute(checkpoint))
    learner = RemoteLearner(ranks, build, gpu=plan.gpu, threads=per_learner)
    resources.callback(learner.close)
    if checkpoint is not None:  # here too: the algorithm's advantages are computed in this process
        prepared.algorithm.load_state_dict(checkpoint.state["algorithm"])
    where = f"; files lie in {weights.folder}, not in memory" if _misses_memory(transport, weights.folder) else ""
    notes = (
        f"cluster=ray ({cluster.describe()}): {plan.describe()}",
        f"CPU threads: {per_learner} for each learner, {each} for each engine",
        f"weights travel by {transport}: {why}{where}",
    )
    return Remote(learner, engine, notes)


def _carried(prepared: Parts, *, gpu: bool) -> Carried:
    """Paths as every process finds them, and the device that its place has."""
    source, config = prepared.model, prepared.config
    assert source is not None
    if Path(source.path).is_dir():
        source = dataclasses.replace(source, path=str(Path(source.path).absolute()))
    if source.adapter is not None:
        source = dataclasses.replace(source, adapter=source.adapter.absolute())
    model = dataclasses.replace(config.model, device="cuda" if gpu else "cpu")
    return Carried(dataclasses.replace(config, model=model), prepared.algorithm, source, prepared.total_steps)


def _absolute(checkpoint: Checkpoint | None) -> Checkpoint | None:
    return None if checkpoint is None else dataclasses.replace(checkpoint, folder=checkpoint.folder.absolute())


def _weight_transport(transport: str, carried: Carried, folder: Path) -> FileTransport:
    from covey.models.loading import trained_count
    from covey.weights.files import locked_weights_folder
    from covey.weights.transport import CollectiveTransport, FileTransport

    if transport == "collective":
        return CollectiveTransport(folder / "weights")
    if transport == "shared_memory":
        assert carried.model is not None
        size = 4 * trained_count(carried.model, carried.config.model)
        return FileTransport(*locked_weights_folder(2 * size))  # two versions for a moment
    return FileTransport(folder / "weights")


def _misses_memory(transport: str, folder: Path) -> bool:
    from covey.weights.files import SHARED_MEMORY

    return transport == "shared_memory" and SHARED_MEMORY not in folder.parents


# -- in the actors ----------------------------------------------------------------------------------------------


def load_learner(carried: Carried, checkpoint: Checkpoint | None, rank: int, world: int, meet: Any) -> Any:
    from covey.app.models import make_learner
    from covey.learner.parallel import Ranks
    from covey.models.loading import pick_device

    ranks = Ranks.join(rank, world, meet, pick_device(carried.config.model.device)) if world > 1 else None
    return make_learner(carried, checkpoint, ranks)


def load_engine(carried: Carried, folder: Path, colocated: bool, index: int) -> tuple[Any, Any]:
    """The engine's own copy of the model, and the engine. For vLLM the copy waits in CPU memory."""
    from covey.app.models import make_engine
    from covey.models.loading import load_policy, pick_device, pick_dtype

    config, source = carried.config, carried.model
    assert source is not None
    model = config.model
    if config.rollout.name == "vllm":
        dtype = str(pick_dtype(model.dtype, pick_device(model.device))).removeprefix("torch.")
        model = dataclasses.replace(model, device="cpu", dtype=dtype, gradient_checkpointing=False)
    policy = load_policy(source, model, seed=config.seed)
    return policy, make_engine(carried, policy, log=folder / f"vllm-{index}.log", shared=colocated)
