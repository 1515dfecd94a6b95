"""A Ray cluster for a run: one that is running, or one of this machine's own that ends with the run.

A cluster of our own listens on 127.0.0.1 alone, wants a token that only this run knows, has no dashboard and reports
nothing to anybody.
"""

from __future__ import annotations

import importlib
import importlib.util
import logging
import os
import secrets
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

from covey.cluster.placement import Node
from covey.config.schema import ClusterConfig
from covey.errors import Absent, InputError

LOCALHOST = "127.0.0.1"


@dataclass(frozen=True)
class Cluster:
    nodes: tuple[Node, ...]
    own: bool  # started for this run

    def describe(self) -> str:
        return "started for this run, on this machine alone" if self.own else f"joined, machines: {len(self.nodes)}"


def require_ray() -> None:
    if importlib.util.find_spec("ray") is None:
        raise Absent("cluster=ray needs Ray:  pip install 'covey[ray]'\n  or use cluster=local")


def address_of(config: ClusterConfig) -> str | None:
    """Of a running cluster; None: there is none, and one is started."""
    return config.address or os.environ.get("RAY_ADDRESS") or None


def this_machine() -> Node:
    import torch

    return Node(LOCALHOST, len(os.sched_getaffinity(0)), torch.cuda.device_count())


def own_machine(config: ClusterConfig) -> Node:
    """As Ray is told of it in a cluster for this run alone: without a GPU, processes may share cores."""
    here = this_machine()
    seats = config.learner_devices + (config.rollout_devices or 0)
    return here if here.gpus else replace(here, cpus=max(here.cpus, seats))


@contextmanager
def open_cluster(config: ClusterConfig) -> Iterator[Cluster]:
    """Joined or started, and left or stopped. Where this process is in a cluster already, it stays there."""
    require_ray()
    if in_a_cluster():
        yield Cluster(_inventory(), own=False)
        return
    address = address_of(config)
    with _environment(own=address is None):
        _init(address, config)
        if address is None:
            os.environ.pop("RAY_AUTH_TOKEN", None)  # Ray has read it; programs and workers that we start must not
        try:
            yield Cluster(_inventory(), own=address is None)
        finally:
            import ray

            ray.shutdown()


def in_a_cluster() -> bool:
    """Whether this process is in one already. Does not import Ray, which is slow."""
    return "ray" in sys.modules and bool(sys.modules["ray"].is_initialized())


def _init(address: str | None, config: ClusterConfig) -> None:
    import ray
    from ray._private import auto_init_hook, ray_constants

    auto_init_hook.enable_auto_connect = False  # else a late call, after the run's end, would start another cluster
    quiet: dict[str, Any] = {"log_to_driver": False, "logging_level": logging.ERROR, "configure_logging": False}
    if address is not None:
        try:
            ray.init(address=address, **quiet)
        except (ConnectionError, ValueError, RuntimeError) as error:
            raise InputError(
                f"no Ray cluster answers at {address}: {str(error).splitlines()[0]}\n"
                "  see that it runs (ray status), that versions are equal, and that RAY_AUTH_TOKEN is its token\n"
                "  or leave cluster.address and RAY_ADDRESS out: then one is started on this machine"
            ) from error
        return
    ray_constants.ENABLE_RAY_CLUSTER = False  # one machine: every port on the loopback interface
    here = own_machine(config)
    ray.init(address="local", num_cpus=here.cpus, num_gpus=here.gpus, include_dashboard=False, **quiet)


@contextmanager
def _environment(*, own: bool) -> Iterator[None]:
    """What Ray and its processes read when they start; put back afterwards."""
    wanted = {"RAY_USAGE_STATS_ENABLED": "0"}
    if own:
        wanted |= {
            "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0",  # how Ray spells "one machine only"
            "RAY_AUTH_MODE": "token",
            "RAY_AUTH_TOKEN": secrets.token_hex(32),
        }
    before = {name: os.environ.get(name) for name in wanted}
    os.environ.update(wanted)
    _read_again()
    try:
        yield
    finally:
        for name, value in before.items():
            os.environ.pop(name, None) if value is None else os.environ.update({name: value})
        _read_again()


def _read_again() -> None:
    """Ray remembers what it read when it was imported. Older versions know no tokens."""
    raylet: Any = importlib.import_module("ray._raylet")
    if hasattr(raylet, "AuthenticationTokenLoader"):
        raylet.AuthenticationTokenLoader.instance().reset_cache()
        raylet.Config.initialize("")


def _inventory() -> tuple[Node, ...]:
    import ray

    rows = [row for row in ray.nodes() if row["Alive"]]
    found = [
        Node(r["NodeManagerAddress"], int(r["Resources"].get("CPU", 0)), int(r["Resources"].get("GPU", 0)))
        for r in rows
    ]
    return tuple(sorted(found, key=lambda node: node.name))
