"""A user's tool inside a worker: called, and its result brought into a form that can travel.

Only the beginning of a result leaves the worker, so that a gigabyte costs nothing on the way.
"""

from __future__ import annotations

import inspect
from collections.abc import Awaitable, Mapping
from dataclasses import dataclass
from typing import Any

from covey.agents.tools.errors import ToolFailure, ToolMistake
from covey.agents.tools.output import Output, rendered
from covey.agents.tools.tool import Tool
from covey.errors import message_of, said
from covey.redact import hide


@dataclass(frozen=True, slots=True)
class InWorker:
    """What a pool of workers is given for a tool. Returns an `Output`, or the `ToolMistake` or `ToolFailure` that the
    call ended in."""

    tool: Tool

    def __call__(self, arguments: Mapping[str, Any], characters: int, state: dict[str, Any]) -> Any:
        # Not a coroutine itself: a plain function may want to run an event loop of its own.
        try:
            checked = self.tool.check(arguments)
            value = self.tool.function(**checked, **({"state": state} if self.tool.stateful else {}))
            if inspect.isawaitable(value):
                return self._later(value, characters)
            return rendered(self.tool.name, value, characters)
        except Exception as error:
            return told(error, characters)

    async def _later(self, value: Awaitable[Any], characters: int) -> Output | ToolMistake | ToolFailure:
        try:
            return rendered(self.tool.name, await value, characters)
        except Exception as error:
            return told(error, characters)


def told(error: Exception, characters: int) -> ToolMistake | ToolFailure:
    """A tool's own exception is for the model to read, unless it says that the infrastructure is at fault."""
    match error:
        case ToolFailure():
            return ToolFailure(error.cause, error.message[:characters])
        case ToolMistake():
            return ToolMistake(error.kind, error.text[:characters])
    text = f"error: {type(error).__name__}: {message_of(error)}".removesuffix(": ")
    return ToolMistake("raised", text[:characters], hide(said(error))[:characters])
