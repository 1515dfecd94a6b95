"""User callbacks.

    on_step(trainer, step)              after the update of a step, before it is recorded
    on_evaluation(trainer, metrics)     after an evaluation, before it is recorded
    on_checkpoint(trainer, path)        after a checkpoint was written

A callback is an object with any of these methods, or a function, which is an `on_step`. `on_step` and `on_evaluation`
may return a dict of numbers, which are recorded with the metrics. An error in a callback ends the run.
"""

from __future__ import annotations

import math
import traceback
from collections.abc import Awaitable, Callable, Mapping, Sequence
from functools import partial
from itertools import takewhile
from pathlib import Path
from typing import Any

from covey.errors import InputError, RunFailed
from covey.protocols import Metrics

PACKAGE = str(Path(__file__).parents[1])
EVENTS = ("on_step", "on_evaluation", "on_checkpoint")


class CallbackFailed(RunFailed):
    """A callback raised an error, or returned something else than a dict of numbers."""


async def call_here(function: Callable[[], Any]) -> Any:
    return function()


class Callbacks:
    """`owner` returns the first argument of every callback. `call` runs a callback, by default in the run's own
    thread; a `Driver` runs it in the thread that called it."""

    def __init__(
        self,
        callbacks: Sequence[Any] = (),
        owner: Callable[[], Any] = lambda: None,
        call: Callable[[Callable[[], Any]], Awaitable[Any]] = call_here,
    ) -> None:
        self.callbacks = check_callbacks(callbacks)
        self.owner = owner
        self.call = call

    async def on_step(self, step: Any) -> Metrics:
        return await self._call_all("on_step", step)

    async def on_evaluation(self, metrics: Metrics) -> Metrics:
        return await self._call_all("on_evaluation", metrics)

    async def on_checkpoint(self, path: Any) -> None:
        await self._call_all("on_checkpoint", path)

    async def _call_all(self, event: str, value: Any) -> Metrics:
        """Call every callback that handles this event, in order. Returns their metrics."""
        metrics: Metrics = {}
        for callback in self.callbacks:
            if _method(callback, event) is not None:
                metrics |= await self.call(partial(_call_one, event, callback, self.owner(), value))
        return metrics


def check_callbacks(callbacks: Any) -> list[Any]:
    callbacks = list(callbacks) if isinstance(callbacks, Sequence) else [callbacks]
    for callback in callbacks:
        if isinstance(callback, type) or not any(_method(callback, event) for event in EVENTS):
            hint = f" (give an instance: {callback.__name__}())" if isinstance(callback, type) else ""
            raise InputError(
                f"callback {_name(callback)} has none of {', '.join(EVENTS)}{hint}\n"
                "  a callback is a function f(trainer, step), or an object with one of these methods"
            )
    return callbacks


def _method(callback: Any, event: str) -> Callable[..., Any] | None:
    method = getattr(callback, event, None)
    if callable(method):
        return method
    is_function = event == "on_step" and callable(callback) and not any(hasattr(callback, name) for name in EVENTS)
    return callback if is_function else None


def _call_one(event: str, callback: Any, owner: Any, value: Any) -> Metrics:
    method = _method(callback, event)
    assert method is not None
    try:
        returned = method(owner, value)
    except Exception as error:
        frames = traceback.extract_tb(error.__traceback__)[1:]  # without this function
        frames = list(takewhile(lambda frame: not frame.filename.startswith(PACKAGE), frames))  # and the trainer's
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
