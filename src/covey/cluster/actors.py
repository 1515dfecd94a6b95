"""What Ray says, in one plain sentence: without colour codes, ids and advice about Ray's own settings."""

from __future__ import annotations

import asyncio
import re
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from covey.cluster.placement import Plan, Seat
from covey.errors import InputError

LONGEST = 300  # characters of a message that is passed on

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


def plain(text: str) -> str:
    return _COLOUR.sub("", text)


def cause_of_death(text: str) -> str:
    """Why an actor is gone, from Ray's error. For want of memory, a second line says what to lower."""
    text = plain(text)
    if "low on memory" in text or "OUT_OF_MEMORY" in text:
        return f"Ray's memory monitor killed it: {_memory(text)}\n  {LESS_MEMORY}"
    place = _PLACE.search(text)
    process = f"its process (pid {place[1]} on {place[2]})" if place else "its process"
    if "connection error" in text:  # Ray saw the connection close, and knows no more
        return f"{process} was killed or crashed (if the kernel was out of memory, dmesg says so)"
    if (detail := _DETAIL.search(text)) is not None:
        return f"{process} ended: {_short(detail[1])}"
    lines = [line for line in text.splitlines() if line and not line.startswith("\t")]
    return _short(lines[-1]) if lines else f"{process} ended"


def _memory(text: str) -> str:
    if (found := _MEMORY.search(text)) is None:
        return "its machine was low on memory"
    return f"{found[2]} of {found[3]} GB of memory on {found[1]} were in use"


def last_message(output: str) -> str:
    """The last thing that Ray's log lines or an exception said."""
    lines = [_LOG_PREFIX.sub("", line).strip() for line in plain(output).splitlines()]
    return _short(next((line for line in reversed(lines) if line), "no message"))


def _short(text: str) -> str:
    text = " ".join(text.split())
    return text if len(text) <= LONGEST else text[: LONGEST - 1] + "…"


def relay(data: Mapping[str, Any], ignore_prefix: bool = False) -> None:
    """Stands in for Ray's printing of messages from the cluster. The death of a worker is reported by who used it."""
    for line in data["lines"]:
        if not any(known in line for known in _REPORTED):
            print(f"Ray: {_short(plain(line))}", file=sys.stderr)


# -- Actors in Ray: how they are started on their seats, and how their ends are told apart from their errors -----------

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
