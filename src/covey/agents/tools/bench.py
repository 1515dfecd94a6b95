"""The workbench of one episode: runs the calls of a turn, and holds what its tools hold.

    async with tools.open(pool, cut=cut) as bench:
        results = await bench.call(calls)

The calls of a turn run at the same time; results keep the order of the calls. Calls that share a state run one after
another, in that order. A mistake of the model's is a result whose text it reads; a fault of the infrastructure is a
`ToolFailure`, which ends the episode. However the block is left, what was held is released.
"""

from __future__ import annotations

import asyncio
import inspect
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from types import TracebackType
from typing import Any, Protocol

from covey.agents.calls import Call
from covey.agents.tools.errors import ToolFailure, ToolMistake
from covey.agents.tools.output import CHARACTERS_PER_TOKEN, Cut, Output, by_characters, rendered, within
from covey.agents.tools.tool import Tool
from covey.errors import nearest
from covey.types import ToolUse
from covey.workers import RemoteError, WorkerDied, WorkerTimeout

LONGEST_NAME = 64  # of a tool that does not exist, when the model is told so


class Session(Protocol):
    """One worker for one episode, with a `state` of its own."""

    async def call(self, name: str, /, *args: Any, seconds: float, **kwargs: Any) -> Any: ...

    async def close(self) -> None: ...


class Runner(Protocol):
    """Where users' functions run so that they can be killed: `covey.workers`."""

    async def call(self, name: str, /, *args: Any, seconds: float, **kwargs: Any) -> Any: ...

    async def session(self) -> Session: ...


@dataclass(frozen=True, slots=True)
class ToolResult:
    """What became of a call. `ended`: the tool ends the episode, with `answer`."""

    call: Call
    text: str
    use: ToolUse
    ended: bool = False
    answer: str | None = None


class Bench:
    def __init__(
        self,
        tools: Mapping[str, Tool],
        runner: Runner | None,
        *,
        cut: Cut = by_characters,
        max_tokens: int = 512,
        seconds: float = 10.0,
        waiting: Callable[[], AbstractContextManager[None]] = nullcontext,
    ) -> None:
        self.tools = tools
        self.runner = runner
        self.cut = cut
        self.max_tokens = max_tokens
        self.seconds = seconds
        self.waiting = waiting
        self.state: dict[str, Any] = {}  # of tools that run here; the others' is in their worker
        self.held: Session | None = None
        self.turns = {True: asyncio.Lock(), False: asyncio.Lock()}  # for states here, and in the worker

    async def call(self, calls: Sequence[Call]) -> list[ToolResult]:
        """Run the calls of one turn. The first `ToolFailure` stops the others and is raised."""
        try:
            async with asyncio.TaskGroup() as group:
                running = [group.create_task(self._result(call)) for call in calls]
        except BaseExceptionGroup as errors:
            first = errors.exceptions[0]
        else:
            return [task.result() for task in running]
        raise first

    async def _result(self, call: Call) -> ToolResult:
        start = time.perf_counter()
        tool = self.tools.get(call.name)
        limit = (tool.max_output_tokens if tool else None) or self.max_tokens
        answer, kind, detail = None, None, ""
        try:
            if call.problem is not None:
                raise ToolMistake("malformed", f"error: {call.problem}")
            if tool is None:
                raise self._unknown(call.name)
            checked = tool.check(call.arguments)
            output = await self._run(tool, checked, limit * CHARACTERS_PER_TOKEN)
            answer = tool.answer(checked) if tool.ends else None
        except ToolMistake as mistake:
            output, kind, detail = Output(mistake.text, len(mistake.text)), mistake.kind, mistake.detail
        use = ToolUse(call.name, time.perf_counter() - start, kind, detail)
        return ToolResult(call, within(output, limit, self.cut), use, answer is not None, answer)

    def _unknown(self, name: str) -> ToolMistake:
        name = name if len(name) <= LONGEST_NAME else f"{name[:LONGEST_NAME]}…"
        guess = nearest(name, self.tools)
        hint = f" (did you mean {guess}?)" if guess else ""
        known = ", ".join(self.tools) or "none"
        return ToolMistake("unknown_tool", f"error: there is no tool {name!r}{hint}; the tools are: {known}")

    async def _run(self, tool: Tool, checked: Mapping[str, Any], characters: int) -> Output:
        if not tool.stateful:
            return await self._anywhere(tool, checked, characters)
        async with self.turns[tool.inline]:
            return await self._anywhere(tool, checked, characters)

    async def _anywhere(self, tool: Tool, checked: Mapping[str, Any], characters: int) -> Output:
        if tool.inline:
            return await self._here(tool, checked, characters)
        return await self._in_worker(tool, checked, characters)

    async def _here(self, tool: Tool, checked: Mapping[str, Any], characters: int) -> Output:
        value = tool.function(**checked, **({"state": self.state} if tool.stateful else {}))
        return rendered(tool.name, await value if inspect.isawaitable(value) else value, characters)

    async def _in_worker(self, tool: Tool, checked: Mapping[str, Any], characters: int) -> Output:
        assert self.runner is not None  # ToolSet.open has seen to it
        seconds = tool.timeout or self.seconds
        where: Runner | Session = self.runner
        try:
            if tool.stateful:
                where = self.held = self.held or await self._worker()
            came = await where.call(tool.key, tool.plain(checked), characters, seconds=seconds)
        except WorkerTimeout as error:
            raise ToolFailure("tool_timeout", f"tool {tool.name} took longer than {seconds:g} seconds") from error
        except WorkerDied as error:
            raise ToolFailure("tool_crash", f"tool {tool.name} ended its worker: {error}") from error
        except RemoteError as error:  # not the tool's own exception: those come as values
            raise ToolFailure("tool_crash", f"tool {tool.name}: {error}") from error
        if isinstance(came, Output):
            return came
        raise came

    async def _worker(self) -> Session:
        """A worker of the episode's own. Waiting until one is free is not the episode's time."""
        assert self.runner is not None
        with self.waiting():
            return await self.runner.session()

    async def __aenter__(self) -> Bench:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        # Shielded: an episode that is cancelled once more while it cleans up still gives everything back.
        await asyncio.shield(asyncio.ensure_future(self._release()))

    async def _release(self) -> None:
        held, self.held = self.held, None
        values, self.state = list(self.state.values()), {}
        try:
            await close_all(values)
        finally:
            if held is not None:
                await held.close()


async def close_all(values: Sequence[Any]) -> None:
    """`aclose` or `close` of everything that has one; the first error is raised when all had their turn."""
    problems = []
    for value in values:
        close = getattr(value, "aclose", None) or getattr(value, "close", None)
        try:
            done = close() if callable(close) else None
            if inspect.isawaitable(done):
                await done
        except Exception as error:
            problems.append(error)
    if problems:
        raise problems[0]
