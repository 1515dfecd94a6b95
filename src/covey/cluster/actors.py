"""Actors of Ray: starting and killing them, waiting for their results, and distinguishing dead processes from
exceptions.

Ray's messages are shortened to one sentence, without colour codes, ids and advice about Ray's own settings.
"""

from __future__ import annotations

import asyncio
import re
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from covey.cluster.placement import Plan, Slot
from covey.errors import InputError
from covey.weights.transport import ReceiverLost

# -- Ray's messages --------------------------------------------------------------------------------------------------

LONGEST = 300  # characters of a message

LESS_MEMORY = (
    "lower cluster.rollout_devices or cluster.learner_devices (each process has its own copy of the model),\n"
    "  learner.micro_batch_tokens, rollout.max_sequences or rollout.memory; or take a smaller model, or model.lora.rank"
)

_COLOUR = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]")
_LOG_PREFIX = re.compile(r"^\[[^\]]*\] (?:\(\w+\) )?(?:[\w.]+:\d+: )?")  # [date time W pid tid] file.cc:210:
_MEMORY = re.compile(r"\(IP: ([^,)]+).*?\)[^(]*?([\d.]+)GB(?: used)? / ([\d.]+)GB", re.DOTALL)
_PLACE = re.compile(r"\bpid: (\d+).*?\bip: (\S+)", re.DOTALL)
_DETAIL = re.compile(r"Worker exit detail: (.+?)(?= (?:Some common causes|There are some potential)|\n|$)")
_REPORTED = ("A worker died or was killed", "worker(s) were killed due to the node running low")


def cause_of_death(text: str) -> str:
    """Why an actor died, from Ray's error. If it ran out of memory, a second line says which settings to lower."""
    text = _COLOUR.sub("", text)
    if "low on memory" in text or "OUT_OF_MEMORY" in text:
        memory = "its machine was low on memory"
        if (usage := _MEMORY.search(text)) is not None:
            memory = f"{usage[2]} of {usage[3]} GB of memory on {usage[1]} were in use"
        return f"Ray's memory monitor killed it: {memory}\n  {LESS_MEMORY}"
    place = _PLACE.search(text)
    process = f"its process (pid {place[1]} on {place[2]})" if place else "its process"
    if "connection error" in text:  # Ray saw the connection close, and knows nothing else
        return f"{process} was killed or crashed (if the kernel was out of memory, dmesg says so)"
    if (detail := _DETAIL.search(text)) is not None:
        return f"{process} ended: {_short(detail[1])}"
    lines = [line for line in text.splitlines() if line and not line.startswith("\t")]
    return _short(lines[-1]) if lines else f"{process} ended"


def last_message(output: str) -> str:
    """The last message in Ray's log lines or in an exception."""
    lines = [_LOG_PREFIX.sub("", line).strip() for line in _COLOUR.sub("", output).splitlines()]
    return _short(next((line for line in reversed(lines) if line), "no message"))


def _short(text: str) -> str:
    text = " ".join(text.split())
    return text if len(text) <= LONGEST else text[: LONGEST - 1] + "…"


def relay(data: Mapping[str, Any], ignore_prefix: bool = False) -> None:
    """Replaces Ray's printing of messages from the cluster. Deaths of workers are skipped: their callers report
    them."""
    for line in data["lines"]:
        if not any(known in line for known in _REPORTED):
            print(f"Ray: {_short(_COLOUR.sub('', line))}", file=sys.stderr)


# -- Actors ----------------------------------------------------------------------------------------------------------

MAX_CONCURRENCY = 10_000  # calls that an engine's actor may have in progress
STARTING = 300.0  # seconds to wait for the reserved devices


class ActorLost(ReceiverLost):
    """The process behind an actor has died or cannot be reached."""


@contextmanager
def placement_group(plan: Plan) -> Iterator[Any]:
    """The plan's bundles reserved in Ray, each on its machine, until the run ends."""
    from ray.util.placement_group import placement_group as create
    from ray.util.placement_group import remove_placement_group

    device = "GPU" if plan.gpu else "CPU"
    bundles = [{"CPU": b.devices, device: b.devices, f"node:{b.node}": 0.001} for b in plan.bundles]
    group = create(bundles, strategy="PACK")
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


def spawn(kind: type, plan: Plan, slot: Slot, group: Any, *, max_concurrency: int = 1) -> Any:
    """A new actor in its slot. It has loaded nothing yet."""
    import ray
    from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

    amount = slot.share * plan.bundles[slot.bundle].devices
    where = PlacementGroupSchedulingStrategy(placement_group=group, placement_group_bundle_index=slot.bundle)
    return (
        ray.remote(kind)
        .options(
            num_cpus=amount,
            num_gpus=amount if plan.gpu else 0,
            max_concurrency=max_concurrency,
            max_restarts=0,  # a replacement must be given weights first
            scheduling_strategy=where,
        )
        .remote()
    )


def kill(actor: Any) -> None:
    """Kill an actor at once, without waiting for its calls. Does nothing if the cluster is down already."""
    import ray

    if ray.is_initialized():
        ray.kill(actor, no_restart=True)


async def result(reference: Any, *, cancels: bool = True) -> Any:
    """The result of a call, or the exception that it raised. Cancelling the wait cancels the call too."""
    import ray

    try:
        return await asyncio.wrap_future(reference.future())
    except asyncio.CancelledError:
        if cancels and ray.is_initialized():
            ray.cancel(reference)
        raise
    except ray.exceptions.RayError as error:
        raise actor_error(error) from None


def results(references: list[Any]) -> list[Any]:
    """The results of several calls, without an event loop. The first failure is raised at once."""
    import ray

    result_of, waiting = {}, list(references)
    try:
        while waiting:
            (done,), waiting = ray.wait(waiting, num_returns=1)
            result_of[done] = ray.get(done)
    except ray.exceptions.RayError as error:
        raise actor_error(error) from None
    return [result_of[reference] for reference in references]


def first_lost(references: list[Any], seconds: float) -> ActorLost | None:
    """The first of these calls whose actor has died. One that is only slow does not count."""
    import ray

    waiting, until = list(references), time.monotonic() + seconds
    while waiting:
        done, waiting = ray.wait(waiting, num_returns=1, timeout=max(0.0, until - time.monotonic()))
        if not done:
            return None
        try:
            results(done)
        except ActorLost as error:
            return error
    return None


def actor_error(error: Exception) -> Exception:
    """The exception that the actor raised, with its traceback as a note; `ActorLost` if its process ended, for which
    Ray has several classes."""
    import ray

    if isinstance(error, ray.exceptions.RayTaskError):
        if not isinstance(error.cause, Exception):
            return error
        error.cause.add_note(f"in the actor:\n{_COLOUR.sub('', str(error))}")
        return error.cause
    if isinstance(error, ray.exceptions.TaskCancelledError):
        return error
    return ActorLost(cause_of_death(str(error)))
