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
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

from covey.cluster.actors import last_message, relay
from covey.cluster.placement import Node
from covey.config.schema import ClusterConfig
from covey.errors import Absent, InputError
from covey.imports import install_extra

LOCALHOST = "127.0.0.1"
PER_CORE = 2  # processes on one core of a machine without a GPU, at most: each has its own copy of the model
JOIN_SECONDS = 60.0  # in which a running cluster must answer

# Ray itself would try for minutes, in native code that no signal interrupts: so another process tries first.
_JOIN = """
import logging, sys
import ray
try:
    ray.init(address=sys.argv[1], log_to_driver=False, logging_level=logging.ERROR, configure_logging=False)
except Exception as error:
    sys.exit(f"{type(error).__name__}: {error}")
"""


@dataclass(frozen=True)
class Cluster:
    nodes: tuple[Node, ...]
    own: bool  # started for this run

    def describe(self) -> str:
        return "started for this run, on this machine alone" if self.own else f"joined, machines: {len(self.nodes)}"


def require_ray() -> None:
    if importlib.util.find_spec("ray") is None:
        raise Absent(f"cluster=ray needs Ray:  {install_extra('ray')}\n  or use cluster=local")


def address_of(config: ClusterConfig) -> str | None:
    """Of a running cluster; None: there is none, and one is started."""
    return config.address or os.environ.get("RAY_ADDRESS") or None


def this_machine() -> Node:
    import torch

    return Node(LOCALHOST, len(os.sched_getaffinity(0)), torch.cuda.device_count())


def own_machine() -> Node:
    """This machine in a cluster for this run alone: without a GPU, processes may share cores."""
    here = this_machine()
    return here if here.gpus else replace(here, per_core=PER_CORE)


def opening(config: ClusterConfig) -> str:
    """What `open_cluster` is about to do, which may take a while."""
    if in_a_cluster():
        return "cluster=ray: learners and engines load the model in the Ray cluster of this process ..."
    if (address := address_of(config)) is None:
        return "cluster=ray: starting Ray on this machine, where learners and engines then load the model ..."
    return f"cluster=ray: joining the Ray cluster at {address}, within {JOIN_SECONDS:g} s ..."


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
            yield Cluster((own_machine(),) if address is None else _inventory(), own=address is None)
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
    ray._private.worker.print_to_stdstream = relay
    quiet: dict[str, Any] = {"log_to_driver": False, "logging_level": logging.ERROR, "configure_logging": False}
    if address is not None:
        _check_answers(address)
        try:
            ray.init(address=address, **quiet)
        except (ConnectionError, ValueError, RuntimeError) as error:
            raise _no_answer(address, f": {last_message(str(error))}") from error
        return
    ray_constants.ENABLE_RAY_CLUSTER = False  # one machine: every port on the loopback interface
    here = this_machine()
    seats = config.learner_devices + (config.rollout_devices or 0)
    cpus = here.cpus if here.gpus else max(here.cpus, seats)  # as many as processes, since these may share cores
    ray.init(address="local", num_cpus=cpus, num_gpus=here.gpus, include_dashboard=False, **quiet)


def _check_answers(address: str) -> None:
    """Whether this machine can join the cluster there, tried by another process that can be stopped."""
    command = [sys.executable, "-c", _JOIN, address]
    try:
        tried = subprocess.run(command, capture_output=True, text=True, timeout=JOIN_SECONDS, errors="replace")
    except subprocess.TimeoutExpired as error:
        said = (error.stderr or b"").decode(errors="replace").splitlines()
        reason = f": {last_message(said[0])}" if said else ""
        raise _no_answer(address, f" within {JOIN_SECONDS:g} s{reason}") from error
    if tried.returncode != 0:
        raise _no_answer(address, f": {last_message(tried.stderr)}")


def _no_answer(address: str, how: str) -> InputError:
    return InputError(
        f"no Ray cluster answers at {address}{how}\n"
        "  check that it runs (ray status), that Ray's versions are equal, and that RAY_AUTH_TOKEN is its token\n"
        "  or leave cluster.address and RAY_ADDRESS out: then one is started on this machine"
    )


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
