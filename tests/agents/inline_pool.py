"""A worker pool that runs functions in this process."""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import Callable, Mapping
from typing import Any

from covey.agents.tools.session import close_all
from covey.workers import WorkerDied, WorkerTimeout


class InlineSession:
    def __init__(self, functions: Mapping[str, Callable[..., Any]]) -> None:
        self.functions = functions
        self.state: dict[str, Any] = {}
        self.closed = False

    async def call(self, name: str, /, *args: Any, seconds: float, **kwargs: Any) -> Any:
        try:
            async with asyncio.timeout(seconds):
                value = self.functions[name](*args, state=self.state, **kwargs)
                return await value if inspect.isawaitable(value) else value
        except TimeoutError:
            raise WorkerTimeout(name, seconds) from None
        except SystemExit as error:
            raise WorkerDied(name, f"exit code {error.code}") from None

    async def close(self) -> None:
        self.closed = True
        await close_all(list(self.state.values()))


class InlinePool:
    def __init__(self, functions: Mapping[str, Callable[..., Any]]) -> None:
        self.functions = functions
        self.sessions: list[InlineSession] = []

    async def call(self, name: str, /, *args: Any, seconds: float, **kwargs: Any) -> Any:
        return await InlineSession(self.functions).call(name, *args, seconds=seconds, **kwargs)

    async def session(self) -> InlineSession:
        self.sessions.append(InlineSession(self.functions))
        return self.sessions[-1]
