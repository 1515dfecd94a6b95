"""The Ray cluster of a run: a running one that it joins, or one that it starts on this machine and stops at its end.

A cluster started here listens on 127.0.0.1 only, requires a token that only this run has, runs no dashboard and reports
no usage.
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
PER_CORE = 2  # the most processes per core on a machine without a GPU: each has its own copy of the model
JOIN_SECONDS = 60.0  # a running cluster must respond within

# Ray tries for minutes, in native code that no signal interrupts. So another process, which can be killed, tries first.
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
    """The address of a running cluster; None: start one."""
    return config.address or os.environ.get("RAY_ADDRESS") or None


def this_machine() -> Node:
    import torch

    return Node(LOCALHOST, len(os.sched_getaffinity(0)), torch.cuda.device_count())


def own_machine() -> Node:
    """This machine as a cluster of its own: without a GPU, processes may share cores."""
    machine = this_machine()
    return machine if machine.gpus else replace(machine, per_core=PER_CORE)


def opening(config: ClusterConfig) -> str:
    """A message that announces what `open_cluster` does next, which may take a while."""
    if in_a_cluster():
        return "cluster=ray: learners and engines load the model in the Ray cluster of this process ..."
    if (address := address_of(config)) is None:
        return "cluster=ray: starting Ray on this machine, where learners and engines then load the model ..."
    return f"cluster=ray: joining the Ray cluster at {address}, within {JOIN_SECONDS:g} s ..."


@contextmanager
def open_cluster(config: ClusterConfig) -> Iterator[Cluster]:
    """Join or start a cluster; leave or stop it at the end. A process that is in a cluster already stays in it."""
    require_ray()
    if in_a_cluster():
        yield Cluster(_inventory(), own=False)
        return
    address = address_of(config)
    with _environment(own=address is None):
        _init(address, config)
        if address is None:
            os.environ.pop("RAY_AUTH_TOKEN", None)  # Ray has read it; programs and workers of the run must not see it
        try:
            yield Cluster((own_machine(),) if address is None else _inventory(), own=address is None)
        finally:
            import ray

            ray.shutdown()


def in_a_cluster() -> bool:
    """Whether this process is connected to a cluster. Does not import Ray, which is slow."""
    return "ray" in sys.modules and bool(sys.modules["ray"].is_initialized())


def _init(address: str | None, config: ClusterConfig) -> None:
    import ray
    from ray._private import auto_init_hook, ray_constants

    auto_init_hook.enable_auto_connect = False  # otherwise a call after the run's end would start another cluster
    ray._private.worker.print_to_stdstream = relay
    quiet: dict[str, Any] = {"log_to_driver": False, "logging_level": logging.ERROR, "configure_logging": False}
    if address is not None:
        _check_reachable(address)
        try:
            ray.init(address=address, **quiet)
        except (ConnectionError, ValueError, RuntimeError) as error:
            raise _unreachable(address, f": {last_message(str(error))}") from error
        return
    ray_constants.ENABLE_RAY_CLUSTER = False  # one machine: bind every port to the loopback interface
    machine = this_machine()
    processes = config.learner_devices + (config.rollout_devices or 0)
    cpus = machine.cpus if machine.gpus else max(machine.cpus, processes)  # processes may share cores
    ray.init(address="local", num_cpus=cpus, num_gpus=machine.gpus, include_dashboard=False, **quiet)


def _check_reachable(address: str) -> None:
    """Check that the cluster responds, from another process, which can be killed."""
    command = [sys.executable, "-c", _JOIN, address]
    try:
        probe = subprocess.run(command, capture_output=True, text=True, timeout=JOIN_SECONDS, errors="replace")
    except subprocess.TimeoutExpired as error:
        lines = (error.stderr or b"").decode(errors="replace").splitlines()
        reason = f": {last_message(lines[0])}" if lines else ""
        raise _unreachable(address, f" within {JOIN_SECONDS:g} s{reason}") from error
    if probe.returncode != 0:
        raise _unreachable(address, f": {last_message(probe.stderr)}")


def _unreachable(address: str, how: str) -> InputError:
    return InputError(
        f"no Ray cluster answers at {address}{how}\n"
        "  check that it runs (ray status), that Ray's versions are equal, and that RAY_AUTH_TOKEN is its token\n"
        "  or unset cluster.address and RAY_ADDRESS: then one is started on this machine"
    )


@contextmanager
def _environment(*, own: bool) -> Iterator[None]:
    """Environment variables that Ray and its processes read when they start; restored afterwards."""
    variables = {"RAY_USAGE_STATS_ENABLED": "0"}
    if own:
        variables |= {
            "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0",  # Ray's switch for "one machine only"
            "RAY_AUTH_MODE": "token",
            "RAY_AUTH_TOKEN": secrets.token_hex(32),
        }
    before = {name: os.environ.get(name) for name in variables}
    os.environ.update(variables)
    _reload_settings()
    try:
        yield
    finally:
        for name, value in before.items():
            os.environ.pop(name, None) if value is None else os.environ.update({name: value})
        _reload_settings()


def _reload_settings() -> None:
    """Make Ray read the environment again: it caches it at import. Older versions have no tokens."""
    raylet: Any = importlib.import_module("ray._raylet")
    if hasattr(raylet, "AuthenticationTokenLoader"):
        raylet.AuthenticationTokenLoader.instance().reset_cache()
        raylet.Config.initialize("")


def _inventory() -> tuple[Node, ...]:
    import ray

    rows = [row for row in ray.nodes() if row["Alive"]]
    nodes = [
        Node(r["NodeManagerAddress"], int(r["Resources"].get("CPU", 0)), int(r["Resources"].get("GPU", 0)))
        for r in rows
    ]
    return tuple(sorted(nodes, key=lambda node: node.name))
