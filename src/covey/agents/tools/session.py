"""What a tool returned, as text for the model: within its limit, and with a mark where something was cut off."""

from __future__ import annotations

import asyncio
import inspect
import json
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from types import TracebackType
from typing import Any, Protocol

from covey.agents.formats.base import Call
from covey.agents.tools.tool import Tool, ToolFailure, ToolMistake
from covey.errors import describe_error, error_message, nearest
from covey.redact import hide
from covey.types import ToolUse
from covey.workers import RemoteError, WorkerDied, WorkerTimeout

CHARACTERS_PER_TOKEN = 32  # more than any text has: what lies beyond is dropped before anything is tokenised
NOTHING = "(no output)"

Cut = Callable[[str, int], str]
"""The longest beginning of a text that has at most so many tokens."""


@dataclass(frozen=True, slots=True)
class Output:
    """The beginning of a text, and how many characters it had."""

    text: str
    length: int


def by_characters(text: str, limit: int) -> str:
    """Where no tokenizer is at hand: four characters a token."""
    return text[: 4 * limit]


def rendered(tool: str, value: Any, characters: int) -> Output:
    """A return value as text, no more than `characters` of it. One that is not JSON is a fault of the tool's author."""
    if value is None:
        text = NOTHING
    elif isinstance(value, str):
        text = value
    elif isinstance(value, (bool, int, float, list, dict)):
        text = _json(tool, value)
    else:
        raise _wrong(tool, f"returned {type(value).__name__}")
    return Output(text[:characters], len(text))


def _json(tool: str, value: Any) -> str:
    try:
        return json.dumps(value, ensure_ascii=False)
    except (TypeError, ValueError, RecursionError) as error:
        raise _wrong(tool, f"returned a {type(value).__name__} that is not JSON ({error})") from error


def _wrong(tool: str, what: str) -> ToolFailure:
    return ToolFailure("tool_result", f"tool {tool} {what}; it may return a string, number, bool, None, list or dict")


def within(output: Output, limit: int, cut: Cut) -> str:
    """At most `limit` tokens, and behind them a mark that says how much is missing."""
    whole = output.text[: limit * CHARACTERS_PER_TOKEN]
    text = cut(readable(whole), limit)
    return text if len(text) == output.length else f"{text}\n[cut: {len(text)} of {output.length} characters]"


def readable(text: str) -> str:
    """Halves of surrogate pairs are no characters, and tokenizers refuse them. The length stays."""
    return text.encode("utf-8", "replace").decode("utf-8")


# -- A user's tool inside a worker: called, and its result brought into a form that can travel -------------------------
# Only the beginning of a result leaves the worker, so that a gigabyte costs nothing on the way.


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
    text = f"error: {type(error).__name__}: {error_message(error)}".removesuffix(": ")
    return ToolMistake("raised", text[:characters], hide(describe_error(error))[:characters])


# -- The workbench of one episode: runs the calls of a turn, and holds what its tools hold -----------------------------
# async with tools.open(pool, cut=cut) as bench:
# results = await bench.call(calls)
#
# The calls of a turn run at the same time; results keep the order of the calls. Calls that share a state run one after
# another, in that order. A mistake of the model's is a result whose text it reads; a fault of the infrastructure is a
# `ToolFailure`, which ends the episode. However the block is left, what was held is released.

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
