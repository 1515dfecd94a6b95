"""Actors in Ray: how they are started on their seats, and how their ends are told apart from their errors."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from covey.cluster.placement import Plan, Seat
from covey.errors import InputError

AT_ONCE = 10_000  # calls that an engine's actor may have under way
STARTING = 300.0  # seconds in which a place must be free


class ActorLost(Exception):
    """The process behind an actor is gone, or no longer to be reached."""


@contextmanager
def reserved(plan: Plan) -> Iterator[Any]:
    """The plan's bundles in Ray, each on its machine, until the run ends."""
    from ray.util.placement_group import placement_group, remove_placement_group

    device = "GPU" if plan.gpu else "CPU"
    bundles = [{"CPU": b.devices, device: b.devices, f"node:{b.node}": 0.001} for b in plan.bundles]
    group = placement_group(bundles, strategy="PACK")
    if not group.wait(STARTING):
        remove_placement_group(group)
        raise InputError(
            f"the cluster has what the run asks for ({plan.describe()}), but not free\n"
            "  wait for who uses it, or end that: ray status, ray list actors"
        )
    try:
        yield group
    finally:
        remove_placement_group(group)


def spawn(kind: type, plan: Plan, seat: Seat, group: Any, *, at_once: int = 1) -> Any:
    """A fresh actor on its seat. It has loaded nothing yet."""
    import ray
    from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

    amount = seat.share * plan.bundles[seat.bundle].devices
    where = PlacementGroupSchedulingStrategy(placement_group=group, placement_group_bundle_index=seat.bundle)
    return (
        ray.remote(kind)
        .options(
            num_cpus=amount,
            num_gpus=amount if plan.gpu else 0,
            max_concurrency=at_once,
            max_restarts=0,  # whoever replaces an actor must give it weights first
            scheduling_strategy=where,
        )
        .remote()
    )


def end(actor: Any) -> None:
    """At once. What it was asked and has not answered never comes."""
    import ray

    ray.kill(actor, no_restart=True)


async def answer(reference: Any) -> Any:
    """What a call returns, or raises there. Who gives up cancels it there too."""
    import ray

    try:
        return await asyncio.wrap_future(reference.future())
    except asyncio.CancelledError:
        ray.cancel(reference)
        raise
    except ray.exceptions.RayError as error:
        raise untangled(error) from None


def answers(references: list[Any]) -> list[Any]:
    """The same for several, without an event loop. The first that fails counts."""
    import ray

    try:
        return list(ray.get(references))
    except ray.exceptions.RayError as error:
        raise untangled(error) from None


def untangled(error: Exception) -> Exception:
    """The exception as it was raised in the actor, or `ActorLost`."""
    import ray

    if isinstance(error, ray.exceptions.RayTaskError):
        return error.cause if isinstance(error.cause, Exception) else error
    if isinstance(error, ray.exceptions.RayActorError):
        return ActorLost(str(error).splitlines()[0])
    return error
