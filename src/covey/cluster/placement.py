"""Placement: which learner and which engine gets which devices of a cluster. Pure arithmetic, without Ray.

    settings + the cluster's machines  →  Plan(bundles, slots)     or an error that names both

A bundle is a number of devices reserved on one machine. Engines without devices of their own share a learner's bundle;
each gets half.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from covey.config.schema import ClusterConfig
from covey.errors import Absent, InputError


@dataclass(frozen=True)
class Node:
    name: str  # address
    cpus: int
    gpus: int = 0
    per_core: int = 1  # processes that may share a core, where no GPU is used

    def devices(self, gpu: bool) -> int:
        return min(self.gpus, self.cpus) if gpu else self.cpus * self.per_core  # a GPU needs a core to drive it


@dataclass(frozen=True)
class Bundle:
    node: str
    devices: int = 1


@dataclass(frozen=True)
class Slot:
    """The devices of one actor: a bundle, and the actor's share of it."""

    index: int
    bundle: int
    share: float  # of each device of the bundle


@dataclass(frozen=True)
class Plan:
    gpu: bool
    bundles: tuple[Bundle, ...]
    learners: tuple[Slot, ...]
    engines: tuple[Slot, ...]
    cores: int  # of the machines used

    @property
    def colocated(self) -> bool:
        """True if engines and learners share devices and alternate."""
        return bool(self.engines) and self.engines[0].share < 1

    @property
    def nodes(self) -> tuple[str, ...]:
        return tuple(dict.fromkeys(bundle.node for bundle in self.bundles))

    def node(self, slot: Slot) -> str:
        return self.bundles[slot.bundle].node

    @property
    def crowded(self) -> bool:
        """True if processes that work at the same time share cores."""
        return not self.gpu and self.processes > self.cores

    @property
    def processes(self) -> int:
        """The number of processes that work at the same time."""
        return sum(bundle.devices for bundle in self.bundles)

    def busiest(self, slots: Sequence[Slot]) -> int:
        """The largest number of these actors on one machine."""
        return max(Counter(self.node(slot) for slot in slots).values())

    def describe(self) -> str:
        roles = f"{_count(len(self.learners), 'learner')}, {_count(len(self.engines), 'engine')}"
        machines = f"{_count(len(self.nodes), 'machine')}: {', '.join(self.nodes)}"
        if self.gpu:
            where = "the learners'" if self.colocated else "their own"
            return f"{roles} on {where} GPUs; {machines}"
        turns = ", which alternate with the learners" if self.colocated else ""
        share = f"{_count(self.processes, 'process', 'es')} at a time on {_count(self.cores, 'core')}"
        return f"{roles}{turns}; {share}; {machines}"


def place(config: ClusterConfig, nodes: Sequence[Node], *, gpu: bool, tensor_parallel: int = 1) -> Plan:
    """Learners first, packed onto as few machines as possible, then engines on the remaining devices."""
    requested, available = _requested(config, gpu, tensor_parallel), _available(nodes, gpu)
    if len(nodes) < config.nodes:
        raise _too_small(
            f"cluster.nodes={config.nodes}, but the cluster has {_count(len(nodes), 'machine')}", requested, available
        )
    free = {n.name: n.devices(gpu) for n in sorted(nodes, key=lambda n: (-n.devices(gpu), n.name))}
    bundles: list[Bundle] = []

    def take(devices: int) -> int:
        for name, left in free.items():
            if left >= devices:
                free[name] -= devices
                bundles.append(Bundle(name, devices))
                return len(bundles) - 1
        raise _too_small("the cluster is too small for this run", requested, available)

    own_devices = config.rollout_devices is not None
    share = 1.0 if own_devices else 0.5
    learners = tuple(Slot(i, take(1), share) for i in range(config.learner_devices))
    if not own_devices:
        if tensor_parallel > 1:
            raise InputError(
                f"rollout.tensor_parallel={tensor_parallel}, and engines have no devices of their own\n"
                f"  give them some: cluster.rollout_devices={tensor_parallel} or a multiple"
            )
        engines = tuple(Slot(slot.index, slot.bundle, share) for slot in learners)
        return Plan(gpu, tuple(bundles), learners, engines, _cores(nodes, bundles))
    count, rest = divmod(config.rollout_devices or 0, tensor_parallel)
    if rest:
        raise InputError(
            f"cluster.rollout_devices={config.rollout_devices} is not a multiple of rollout.tensor_parallel="
            f"{tensor_parallel}\n  every engine takes {tensor_parallel} devices of one machine"
        )
    engines = tuple(Slot(i, take(tensor_parallel), share) for i in range(count))
    return Plan(gpu, tuple(bundles), learners, engines, _cores(nodes, bundles))


def _cores(nodes: Sequence[Node], bundles: Sequence[Bundle]) -> int:
    used = {bundle.node for bundle in bundles}
    return sum(node.cpus for node in nodes if node.name in used)


def _requested(config: ClusterConfig, gpu: bool, tensor_parallel: int) -> str:
    device = "GPU" if gpu else "CPU"
    engines = "engines on the learners' devices"
    if config.rollout_devices is not None:
        engines = f"{_count(config.rollout_devices, device)} for engines"
        engines += f", {tensor_parallel} of one machine for each" if tensor_parallel > 1 else ""
    machines = f" on {_count(config.nodes, 'machine')}" if config.nodes > 1 else ""
    return f"{_count(config.learner_devices, device)} for learners, {engines}{machines}"


def _available(nodes: Iterable[Node], gpu: bool) -> str:
    def limit(node: Node) -> str:
        return "" if gpu or node.per_core == 1 else f"; {node.per_core} processes at a time on a core, at most"

    rows = [f"{n.name}: {_count(n.cpus, 'CPU')}, {_count(n.gpus, 'GPU')}{limit(n)}" for n in nodes]
    return "\n              ".join(rows) or "no machine"


def _too_small(problem: str, requested: str, available: str) -> Absent:
    return Absent(
        f"{problem}\n  requested   {requested}\n  available   {available}\n"
        "  lower cluster.learner_devices or cluster.rollout_devices, or join a larger cluster: cluster.address"
    )


def _count(number: int, what: str, plural: str = "s") -> str:
    return f"{number} {what}{'' if number == 1 else plural}"


def choose_transport(setting: str, plan: Plan | None) -> tuple[str, str]:
    """The weight transport (`covey.weights`) of a run, and the reason. `plan` is None if engine and learner share a
    process."""
    if plan is None:
        return "in_process", "the engine samples with the learner's own weights"
    machines = len(plan.nodes)
    if setting == "shared_memory" and machines > 1:
        raise InputError(
            f"cluster.transport=shared_memory, but the run is on {machines} machines: {', '.join(plan.nodes)}\n"
            "  use cluster.transport=auto, collective, or file"
        )
    if setting == "collective" and plan.gpu and plan.colocated:
        raise InputError(
            "cluster.transport=collective: NCCL allows one member per GPU, and engines share the learners' GPUs\n"
            "  use cluster.transport=auto, or give engines their own: cluster.rollout_devices"
        )
    if setting != "auto":
        return setting, "as set"
    if machines == 1:
        return "shared_memory", "all on one machine"
    if plan.gpu and plan.colocated:
        return "file", f"{machines} machines, whose engines share the learners' GPUs: through the run's folder"
    return "collective", f"{machines} machines: broadcast by {'NCCL' if plan.gpu else 'gloo'}"
