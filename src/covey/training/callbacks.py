"""A user's callbacks: what they are called with, what they may return, and how their errors end the run.

    on_step(trainer, step)              after the update of a step, before it is recorded
    on_evaluation(trainer, metrics)     after an evaluation, before it is recorded
    on_checkpoint(trainer, path)        after a checkpoint was written

A callback is an object with any of these methods, or a function, which is an `on_step`. What `on_step` and
`on_evaluation` return (a dict of numbers, or None) is recorded with the metrics.
"""

from __future__ import annotations

import math
import traceback
from collections.abc import Awaitable, Callable, Mapping, Sequence
from functools import partial
from typing import Any

from covey.errors import InputError, RunFailed
from covey.protocols import Metrics

EVENTS = ("on_step", "on_evaluation", "on_checkpoint")


class CallbackFailed(RunFailed):
    """A callback raised, or returned what is not a dict of numbers."""


async def call_here(function: Callable[[], Any]) -> Any:
    return function()


class Callbacks:
    """`owner` is the first argument of every call. `call` runs a function of the user's, by default where the run is:
    a `Driver` runs it in the thread that waits for the run."""

    def __init__(
        self,
        given: Sequence[Any] = (),
        owner: Callable[[], Any] = lambda: None,
        call: Callable[[Callable[[], Any]], Awaitable[Any]] = call_here,
    ) -> None:
        self.given = check_callbacks(given)
        self.owner = owner
        self.call = call

    async def on_step(self, step: Any) -> Metrics:
        return await self._all("on_step", step)

    async def on_evaluation(self, metrics: Metrics) -> Metrics:
        return await self._all("on_evaluation", metrics)

    async def on_checkpoint(self, path: Any) -> None:
        await self._all("on_checkpoint", path)

    async def _all(self, event: str, value: Any) -> Metrics:
        """Every callback that has this event, in order; the metrics that they return."""
        found: Metrics = {}
        for callback in self.given:
            if _method(callback, event) is not None:
                found |= await self.call(partial(_one, event, callback, self.owner(), value))
        return found


def check_callbacks(given: Any) -> list[Any]:
    callbacks = list(given) if isinstance(given, Sequence) else [given]
    for callback in callbacks:
        if isinstance(callback, type) or not any(_method(callback, event) for event in EVENTS):
            made = f" (give an instance: {callback.__name__}())" if isinstance(callback, type) else ""
            raise InputError(
                f"callback {_name(callback)} has none of {', '.join(EVENTS)}{made}\n"
                "  a callback is a function f(trainer, step), or an object with one of these methods"
            )
    return callbacks


def _method(callback: Any, event: str) -> Callable[..., Any] | None:
    method = getattr(callback, event, None)
    if callable(method):
        return method
    plain = event == "on_step" and callable(callback) and not any(hasattr(callback, name) for name in EVENTS)
    return callback if plain else None


def _one(event: str, callback: Any, owner: Any, value: Any) -> Metrics:
    method = _method(callback, event)
    assert method is not None
    try:
        returned = method(owner, value)
    except Exception as error:
        frames = traceback.extract_tb(error.__traceback__)[1:]  # without this function
        place = f"\n  {frames[-1].filename}, line {frames[-1].lineno}" if frames else ""
        raise CallbackFailed(f"callback {_name(callback)} raised {type(error).__name__}: {error}{place}") from error
    if returned is None or event == "on_checkpoint":
        return {}
    if not isinstance(returned, Mapping) or not all(_is_metric(name, number) for name, number in returned.items()):
        code = getattr(getattr(method, "__func__", method), "__code__", None)
        place = f"\n  {code.co_filename}, line {code.co_firstlineno}" if code is not None else ""
        raise CallbackFailed(
            f"callback {_name(callback)} must return None or a dict of names and numbers, got {returned!r:.200}{place}"
        )
    return {name: float(number) for name, number in returned.items()}


def _is_metric(name: Any, number: Any) -> bool:
    if not isinstance(name, str):
        return False
    try:
        return not isinstance(number, str) and not math.isinf(float(number))
    except (TypeError, ValueError):
        return False


def _name(callback: Any) -> str:
    return str(getattr(callback, "__qualname__", None) or type(callback).__qualname__)
