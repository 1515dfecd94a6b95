"""Builds a run with cluster=ray: the same learner and engines as in one process, inside Ray actors."""

from __future__ import annotations

import dataclasses
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from covey.app.models import BuildSpec, LongestRow
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
class ActorSpec:
    """The build specification that is sent to an actor: no tasks, rewards or agents."""

    config: Config
    algorithm: Algorithm
    model: ModelSource | None
    total_steps: int
    task_count: int
    longest_row: LongestRow


@dataclass(frozen=True)
class RemoteParts:
    learner: RemoteLearner
    engine: RayEngine
    notes: tuple[str, ...]  # for the console: placement and weight transport


def resolve_cluster(config: Config) -> tuple[Config, list[str]]:
    """Resolve rollout.tensor_parallel, and return warnings. Engines on the learners' GPUs take one GPU each."""
    size = config.rollout.tensor_parallel
    if config.cluster.name != "ray":
        return config, []
    if config.cluster.rollout_devices is not None or size == 1:
        return config, _oversubscription(config)
    rollout = dataclasses.replace(config.rollout, tensor_parallel=1)
    return dataclasses.replace(config, rollout=rollout), [
        f"rollout.tensor_parallel={size} has no effect: engines share the learners' GPUs, one engine per GPU\n"
        f"  if the model is too large for that, give them their own: cluster.rollout_devices={size} or a multiple"
    ]


def _oversubscription(config: Config) -> list[str]:
    """A warning if more processes compute at the same time than this machine has cores."""
    from covey.cluster.start import address_of, in_a_cluster, own_machine

    cluster = config.cluster
    if address_of(cluster) is not None or in_a_cluster():
        return []
    try:
        plan = placement_plan(config, [own_machine()])
    except InputError:  # `check_cluster` raises it
        return []
    if not plan.crowded:
        return []
    engines = f" and cluster.rollout_devices={cluster.rollout_devices}" if cluster.rollout_devices else ""
    return [
        f"{plan.processes} processes share {plan.cores} {'core' if plan.cores == 1 else 'cores'}: "
        f"cluster.learner_devices={cluster.learner_devices}{engines}\n"
        "  steps are faster with one process per core"
    ]


def check_cluster(config: Config) -> None:
    """Check everything that can be checked before a cluster is available."""
    group, learners = config.learner.tensor_parallel, config.cluster.learner_devices
    if learners % group:
        raise InputError(
            f"learner.tensor_parallel={group}, and cluster.learner_devices={learners} is not a multiple of it\n"
            f"  {group} learners share each matrix: use cluster=ray cluster.learner_devices={group} or a multiple"
        )
    if config.cluster.name != "ray":
        return
    from covey.cluster.start import address_of, in_a_cluster, own_machine, require_ray

    require_ray()
    if config.rollout.devices is not None:
        raise InputError(
            f"rollout.devices={config.rollout.devices} with cluster=ray, where Ray assigns the GPUs\n"
            "  set their number: cluster.rollout_devices"
        )
    if ":" in config.model.device:
        raise InputError(f"model.device={config.model.device} with cluster=ray, where Ray assigns the GPUs\n  use cuda")
    if address_of(config.cluster) is None and not in_a_cluster():
        placement_plan(config, [own_machine()])


def placement_plan(config: Config, nodes: list[Node]) -> Plan:
    from covey.cluster.placement import choose_transport, place

    gpu = config.model.device.startswith("cuda") or (config.model.device == "auto" and any(n.gpus for n in nodes))
    plan = place(config.cluster, nodes, gpu=gpu, tensor_parallel=config.rollout.tensor_parallel)
    choose_transport(config.cluster.transport, plan)  # raises if the transport is impossible
    return plan


def start_remote(
    prepared: BuildSpec, checkpoint: Checkpoint | None, folder: Path, threads: int, resources: ExitStack
) -> RemoteParts:
    """Start the actors and their models. All are closed with `resources`."""
    from covey.cluster.actors import MAX_CONCURRENCY, placement_group, spawn
    from covey.cluster.engines import RayEngine, RolloutActor
    from covey.cluster.learner import LearnerActor, RemoteLearner
    from covey.cluster.placement import choose_transport
    from covey.cluster.start import open_cluster
    from covey.weights.files import SHARED_MEMORY

    config, folder = prepared.config, folder.absolute()
    cluster = resources.enter_context(open_cluster(config.cluster))
    plan = placement_plan(config, list(cluster.nodes))
    group = resources.enter_context(placement_group(plan))
    transport, why = choose_transport(config.cluster.transport, plan)
    spec = _actor_spec(prepared, gpu=plan.gpu)
    load = partial(load_engine, spec, folder, plan.colocated)
    each, per_learner = (max(1, threads // plan.busiest(slots)) for slots in (plan.engines, plan.learners))
    weights = _weight_transport(transport, spec, folder)
    engine = RayEngine(
        len(plan.engines),
        lambda index: spawn(RolloutActor, plan, plan.engines[index], group, max_concurrency=MAX_CONCURRENCY),
        lambda index, actor: actor.load.remote(load, index, each),
        weights,
        colocated=plan.colocated,
    )
    resources.callback(engine.close)
    ranks = [spawn(LearnerActor, plan, slot, group) for slot in plan.learners]
    build = partial(load_learner, spec, _absolute(checkpoint))
    learner = RemoteLearner(ranks, build, gpu=plan.gpu, threads=per_learner)
    resources.callback(learner.close)
    if checkpoint is not None:  # advantages are computed in this process too
        prepared.algorithm.load_state_dict(checkpoint.state["algorithm"])
    on_disk = transport == "shared_memory" and SHARED_MEMORY not in weights.folder.parents
    where = f"; files are in {weights.folder}, not in memory" if on_disk else ""
    notes = (
        f"cluster=ray ({cluster.describe()}): {plan.describe()}",
        f"CPU threads: {per_learner} for each learner, {each} for each engine",
        f"weights travel by {transport}: {why}{where}",
    )
    return RemoteParts(learner, engine, notes)


def _actor_spec(prepared: BuildSpec, *, gpu: bool) -> ActorSpec:
    """The specification with absolute paths and the device type of the actors."""
    source, config = prepared.model, prepared.config
    assert source is not None
    if Path(source.path).is_dir():
        source = dataclasses.replace(source, path=str(Path(source.path).absolute()))
    if source.adapter is not None:
        source = dataclasses.replace(source, adapter=source.adapter.absolute())
    model = dataclasses.replace(config.model, device="cuda" if gpu else "cpu")
    config = dataclasses.replace(config, model=model)
    return ActorSpec(
        config, prepared.algorithm, source, prepared.total_steps, prepared.task_count, prepared.longest_row
    )


def _absolute(checkpoint: Checkpoint | None) -> Checkpoint | None:
    return None if checkpoint is None else dataclasses.replace(checkpoint, folder=checkpoint.folder.absolute())


def _weight_transport(name: str, spec: ActorSpec, folder: Path) -> FileTransport:
    from covey.models.loading import trained_count
    from covey.weights.files import locked_weights_folder
    from covey.weights.transport import CollectiveTransport, FileTransport

    if name == "collective":
        return CollectiveTransport(folder / "weights")
    if name == "shared_memory":
        assert spec.model is not None
        size = 4 * trained_count(spec.model, spec.config.model)
        return FileTransport(*locked_weights_folder(2 * size))  # two versions exist during a transfer
    return FileTransport(folder / "weights")


# -- In the actors -----------------------------------------------------------------------------------------------------


def load_learner(spec: ActorSpec, checkpoint: Checkpoint | None, rank: int, world: int, meet: Any) -> Any:
    from covey.app.models import make_learner, plan_memory
    from covey.learner.parallel import Ranks
    from covey.models.loading import pick_device

    ranks = Ranks.join(rank, world, meet, pick_device(spec.config.model.device)) if world > 1 else None
    learner = make_learner(spec, checkpoint, ranks)
    plan_memory(spec, learner)
    return learner


def load_engine(spec: ActorSpec, folder: Path, colocated: bool, index: int) -> tuple[Any, Any]:
    """The engine and its own copy of the model. For vLLM the copy stays in CPU memory."""
    from covey.app.models import make_engine
    from covey.models.loading import load_policy, pick_device, pick_dtype

    config, source = spec.config, spec.model
    assert source is not None
    model = config.model
    if config.rollout.name == "vllm":
        dtype = str(pick_dtype(model.dtype, pick_device(model.device))).removeprefix("torch.")
        model = dataclasses.replace(model, device="cpu", dtype=dtype, gradient_checkpointing=False)
    policy = load_policy(source, model, seed=config.seed)
    return policy, make_engine(spec, policy, log=folder / f"vllm-{index}.log", shared=colocated)
