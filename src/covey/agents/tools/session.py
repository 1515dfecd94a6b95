"""The tool session of one episode: it runs the calls of each turn and holds the state of the episode's tools.

    async with tools.open(pool, cut=cut) as session:
        results = await session.call(calls)

The calls of a turn run concurrently, and results keep the order of the calls. Calls of tools that share `state` run one
after another, in that order. A mistake of the model becomes a result whose text the model reads; a fault of the
infrastructure raises `ToolFailure`, which ends the episode. The state is always released at the end of the block.

Users' tools run in workers (`WorkerTool`). Only as much of a result as may be shown leaves the worker, so huge outputs
are never transferred.
"""

from __future__ import annotations

import asyncio
import inspect
import json
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from types import TracebackType
from typing import TYPE_CHECKING, Any

from covey.agents.tools.tool import Tool, ToolFailure, ToolMistake
from covey.errors import describe_error, error_message, nearest
from covey.images import ImageMistake, images_of, is_image, is_picture, with_images
from covey.protocols import Observation, check_turn_reward
from covey.redact import hide
from covey.types import Image, ImageFile, ToolUse
from covey.workers import RemoteError, WorkerDied, WorkerPool, WorkerSession, WorkerTimeout

if TYPE_CHECKING:
    from covey.tool_calls import Call

# -- Results as text ---------------------------------------------------------------------------------------------------

CHARACTERS_PER_TOKEN = 32  # more than any text has: characters beyond are dropped before anything is tokenised
NO_OUTPUT = "(no output)"
UNSEEN_DETAIL = "it returned an image, and this model reads text only"
UNSEEN = "the tool returned an image, and this model cannot see images"

Cut = Callable[[str, int], str]
"""`cut(text, limit)`: the longest beginning of a text that has at most `limit` tokens."""


def cut_by_characters(text: str, limit: int) -> str:
    """For use without a tokenizer: four characters per token."""
    return text[: 4 * limit]


@dataclass(frozen=True, slots=True)
class Output:
    """The beginning of a text, the length of the whole, and pictures beside it."""

    text: str
    length: int
    images: tuple[Image | ImageFile, ...] = ()
    reward: float | None = None  # that the turn receives from the tool


def render_result(tool: str, value: Any, characters: int) -> Output:
    """A return value as text, at most `characters` of it. A value that is not JSON is a fault of the tool's author."""
    if isinstance(value, Observation):
        if value.state is not None:
            raise ToolFailure("tool_result", f"tool {tool} returned a state; only environments have states")
        try:
            check_turn_reward(value.reward)
        except ValueError as error:
            raise ToolFailure("tool_result", f"tool {tool}: {error}") from error
        return replace(render_result(tool, value.content, characters), reward=value.reward)
    parts = value if isinstance(value, list) else [value]
    if any(map(is_picture, parts)):
        return _with_pictures(tool, parts, characters)
    if value is None:
        text = NO_OUTPUT
    elif isinstance(value, str):
        text = value
    elif isinstance(value, (bool, int, float, list, dict)):
        try:
            text = json.dumps(value, ensure_ascii=False)
        except (TypeError, ValueError, RecursionError) as error:
            raise _bad_result(tool, f"a {type(value).__name__} that is not JSON ({error})") from error
    else:
        raise _bad_result(tool, type(value).__name__)
    return Output(text[:characters], len(text))


def _with_pictures(tool: str, parts: Sequence[Any], characters: int) -> Output:
    """Texts and pictures, as `render_result` gives them."""
    texts = [part for part in parts if not is_picture(part)]
    try:
        content = [part if is_image(part) else {"image": part} for part in parts if is_picture(part)]
        images = images_of(with_images([{"role": "tool", "content": content}]))
        text = "".join(part if isinstance(part, str) else part["text"] for part in texts)
    except (ImageMistake, KeyError, TypeError) as error:
        raise _bad_result(tool, f"images that cannot be read ({error})") from error
    return Output(text[:characters], len(text), tuple(images))


def _bad_result(tool: str, what: str) -> ToolFailure:
    return ToolFailure(
        "tool_result",
        f"tool {tool} returned {what}; it may return a string, number, bool, None, list or dict, a picture, or "
        "covey.Observation",
    )


def truncate(output: Output, limit: int, cut: Cut) -> str:
    """At most `limit` tokens, followed by a mark that says how much was cut."""
    text = output.text[: limit * CHARACTERS_PER_TOKEN]
    # Tokenizers refuse lone surrogates. Replacing them keeps the length.
    text = cut(text.encode("utf-8", "replace").decode("utf-8"), limit)
    return text if len(text) == output.length else f"{text}\n[cut: {len(text)} of {output.length} characters]"


# -- Calls inside a worker ---------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class WorkerTool:
    """A tool as a function for a worker pool. It returns an `Output`, or the `ToolMistake` or `ToolFailure` of the
    call."""

    tool: Tool

    def __call__(self, arguments: Mapping[str, Any], characters: int, state: dict[str, Any]) -> Any:
        # Not a coroutine itself: a plain function may run an event loop of its own.
        try:
            checked = self.tool.check(arguments)
            value = self.tool.function(**checked, **({"state": state} if self.tool.stateful else {}))
            if inspect.isawaitable(value):
                return self._await(value, characters)
            return render_result(self.tool.name, value, characters)
        except Exception as error:
            return as_tool_error(error, characters)

    async def _await(self, value: Awaitable[Any], characters: int) -> Output | ToolMistake | ToolFailure:
        try:
            return render_result(self.tool.name, await value, characters)
        except Exception as error:
            return as_tool_error(error, characters)


def as_tool_error(error: Exception, characters: int) -> ToolMistake | ToolFailure:
    """The model reads the exception of a tool, unless the tool raised a `ToolFailure`."""
    match error:
        case ToolFailure():
            return ToolFailure(error.cause, error.message[:characters])
        case ToolMistake():
            return ToolMistake(error.kind, error.text[:characters])
    text = f"error: {type(error).__name__}: {error_message(error)}".removesuffix(": ")
    return ToolMistake("raised", text[:characters], hide(describe_error(error))[:characters])


# -- The session -------------------------------------------------------------------------------------------------------

MAX_SHOWN_NAME = 64  # characters of the name of an unknown tool, in the message to the model


@dataclass(frozen=True, slots=True)
class ToolResult:
    """The result of a call. `ended`: the tool ends the episode, with `answer` as the final answer."""

    call: Call
    text: str
    use: ToolUse
    ended: bool = False
    answer: str | None = None
    images: tuple[Image | ImageFile, ...] = ()
    reward: float | None = None  # that the turn receives from the tool


def reward_of_tools(results: Sequence[ToolResult]) -> float | None:
    """The sum of the rewards that a turn receives from its tools; None if it receives none."""
    rewards = [result.reward for result in results if result.reward is not None]
    return sum(rewards) if rewards else None


@dataclass(eq=False, kw_only=True)
class ToolSession:
    """Opened by `ToolSet.open`, which explains the fields."""

    tools: Mapping[str, Tool]
    pool: WorkerPool | None
    cut: Cut
    max_tokens: int
    seconds: float
    waiting: Callable[[], AbstractContextManager[None]]
    sees_images: bool

    def __post_init__(self) -> None:
        self.state: dict[str, Any] = {}  # of tools that run in this process; workers keep their own
        self.worker: WorkerSession | None = None
        # The state in this process, and that in the worker.
        self.state_locks = {True: asyncio.Lock(), False: asyncio.Lock()}

    async def call(self, calls: Sequence[Call]) -> list[ToolResult]:
        """Run the calls of one turn. The first `ToolFailure` cancels the others and is raised."""
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
        answer, mistake_kind, detail = None, None, ""
        try:
            if call.problem is not None:
                raise ToolMistake("malformed", f"error: {call.problem}")
            if tool is None:
                raise self._unknown_tool(call.name)
            checked = tool.check(call.arguments)
            output = await self._run(tool, checked, limit * CHARACTERS_PER_TOKEN)
            answer = tool.answer(checked) if tool.ends else None
            if output.images and not self.sees_images:
                mistake_kind, detail = None if output.text else "image", UNSEEN_DETAIL
                note = f"({UNSEEN})\n" if output.text else f"error: {UNSEEN}"
                output = replace(output, text=note + output.text, length=output.length + len(note), images=())
        except ToolMistake as mistake:
            output, mistake_kind, detail = Output(mistake.text, len(mistake.text)), mistake.kind, mistake.detail
        arguments = None if call.problem is not None else call.arguments
        use = ToolUse(call.name, time.perf_counter() - start, mistake_kind, detail, arguments)
        text = truncate(output, limit, self.cut)
        return ToolResult(call, text, use, answer is not None, answer, output.images, output.reward)

    def _unknown_tool(self, name: str) -> ToolMistake:
        name = name if len(name) <= MAX_SHOWN_NAME else f"{name[:MAX_SHOWN_NAME]}…"
        guess = nearest(name, self.tools)
        hint = f" (did you mean {guess}?)" if guess else ""
        known = ", ".join(self.tools) or "none"
        return ToolMistake("unknown_tool", f"error: there is no tool {name!r}{hint}; the tools are: {known}")

    async def _run(self, tool: Tool, checked: Mapping[str, Any], characters: int) -> Output:
        run = self._run_inline if tool.inline else self._run_in_worker
        if not tool.stateful:
            return await run(tool, checked, characters)
        async with self.state_locks[tool.inline]:
            return await run(tool, checked, characters)

    async def _run_inline(self, tool: Tool, checked: Mapping[str, Any], characters: int) -> Output:
        value = tool.function(**checked, **({"state": self.state} if tool.stateful else {}))
        return render_result(tool.name, await value if inspect.isawaitable(value) else value, characters)

    async def _run_in_worker(self, tool: Tool, checked: Mapping[str, Any], characters: int) -> Output:
        assert self.pool is not None  # checked by ToolSet.open
        seconds = tool.timeout or self.seconds
        where: WorkerPool | WorkerSession = self.pool
        try:
            if tool.stateful:
                if self.worker is None:
                    with self.waiting():  # for a free worker: this time is not counted as the episode's
                        self.worker = await self.pool.session()
                where = self.worker
            output = await where.call(tool.key, tool.plain(checked), characters, seconds=seconds)
        except WorkerTimeout as error:
            raise ToolFailure("tool_timeout", f"tool {tool.name} took longer than {seconds:g} seconds") from error
        except WorkerDied as error:
            raise ToolFailure("tool_crash", f"tool {tool.name} ended its worker: {error}") from error
        except RemoteError as error:  # not the tool's own exception, which is returned as a value
            raise ToolFailure("tool_crash", f"tool {tool.name}: {error}") from error
        if isinstance(output, Output):
            return output
        raise output

    async def __aenter__(self) -> ToolSession:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        # Shielded: an episode that is cancelled again during its clean-up still releases everything.
        await asyncio.shield(asyncio.ensure_future(self._release()))

    async def _release(self) -> None:
        worker, self.worker = self.worker, None
        values, self.state = list(self.state.values()), {}
        try:
            await close_all(values)
        finally:
            if worker is not None:
                await worker.close()


async def close_all(values: Sequence[Any]) -> None:
    """Call `aclose` or `close` of each value that has one, then raise the first error."""
    errors = []
    for value in values:
        close = getattr(value, "aclose", None) or getattr(value, "close", None)
        try:
            done = close() if callable(close) else None
            if inspect.isawaitable(done):
                await done
        except Exception as error:
            errors.append(error)
    if errors:
        raise errors[0]
