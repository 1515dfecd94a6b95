"""Actors in Ray: how they are started on their seats, and how their ends are told apart from their errors."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from covey.cluster.messages import cause_of_death, plain
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
            f"the cluster is large enough for {plan.describe()}, but its devices were not free for {STARTING:g} s\n"
            "  wait until they are, or end what uses them: ray status, ray list actors"
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
    """At once. What it was asked and has not answered never comes. After the cluster's end there is nobody to end."""
    import ray

    if ray.is_initialized():
        ray.kill(actor, no_restart=True)


async def answer(reference: Any, *, cancels: bool = True) -> Any:
    """What a call returns, or raises there. Who gives up cancels it there too, where the cluster is still up."""
    import ray

    try:
        return await asyncio.wrap_future(reference.future())
    except asyncio.CancelledError:
        if cancels and ray.is_initialized():
            ray.cancel(reference)
        raise
    except ray.exceptions.RayError as error:
        raise untangled(error) from None


def answers(references: list[Any]) -> list[Any]:
    """The same for several, without an event loop. The first that fails counts, and nobody waits for the others."""
    import ray

    found, waiting = {}, list(references)
    try:
        while waiting:
            (done,), waiting = ray.wait(waiting, num_returns=1)
            found[done] = ray.get(done)
    except ray.exceptions.RayError as error:
        raise untangled(error) from None
    return [found[reference] for reference in references]


def first_lost(references: list[Any], seconds: float) -> ActorLost | None:
    """The first whose actor turns out to be gone. One that is only slow to answer is not."""
    import ray

    waiting, until = list(references), time.monotonic() + seconds
    while waiting:
        done, waiting = ray.wait(waiting, num_returns=1, timeout=max(0.0, until - time.monotonic()))
        if not done:
            return None
        try:
            answers(done)
        except ActorLost as error:
            return error
    return None


def untangled(error: Exception) -> Exception:
    """The exception as it was raised in the actor, with the traceback from there as a note; or `ActorLost`, whatever
    ended its process: Ray has a class of its own for several ends."""
    import ray

    if isinstance(error, ray.exceptions.RayTaskError):
        if not isinstance(error.cause, Exception):
            return error
        error.cause.add_note(f"in the actor:\n{plain(str(error))}")
        return error.cause
    if isinstance(error, ray.exceptions.TaskCancelledError):
        return error
    return ActorLost(cause_of_death(str(error)))
