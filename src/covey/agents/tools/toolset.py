"""The built-in tools, and the tools of an agent.

Tools are named by a built-in name, `module:function`, `file.py:function` or `mcp:SERVER`, or given as functions. Their
options come from agent.tool_options, by the name of the tool or of the tool server.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, fields, replace
from typing import TYPE_CHECKING, Any, get_type_hints

from covey.agents.tools.schema import coerce
from covey.agents.tools.session import Cut, ToolSession, WorkerTool, cut_by_characters
from covey.agents.tools.tool import Tool, tool, with_limits
from covey.errors import InputError, unknown
from covey.imports import load_function
from covey.workers import WorkerPool

if TYPE_CHECKING:
    from covey.sandbox import Sandbox

OPTIONS = "agent.tool_options"
TOKENS = "max_output_tokens"
MCP = "mcp:"  # before the address or the name of a tool server

ToolName = str | Tool | Callable[..., Any]


# -- Built-in tools ----------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Builtin:
    make: Callable[[Any, Sandbox | None], Tool]  # from its options and the sandbox
    options: type | None = None


@tool(ends=True)
def answer(answer: str) -> str:
    """Give the final answer. This ends the conversation.

    Args:
        answer: The final answer, and nothing else.
    """
    return answer


def _calculator() -> Builtin:
    from covey.agents.tools.calculator import calculator

    return Builtin(lambda _, __: replace(calculator, inline=True))


def _python() -> Builtin:
    from covey.agents.tools.python import PythonOptions, make_python

    return Builtin(make_python, PythonOptions)


def _search() -> Builtin:
    from covey.agents.tools.search import SearchOptions, make_search

    return Builtin(lambda options, _: make_search(options), SearchOptions)


def _google_search() -> Builtin:
    from covey.agents.tools.google import GoogleOptions, make_google_search

    return Builtin(lambda options, _: make_google_search(options), GoogleOptions)


BUILTIN: dict[str, Callable[[], Builtin]] = {  # their modules are imported when they are used
    "calculator": _calculator,
    "python_executor": _python,
    "code_interpreter": _python,
    "search": _search,
    "google_search": _google_search,
    "answer": lambda: Builtin(lambda _, __: replace(answer, inline=True)),
}
SYNONYMS = {"code_interpreter": "python_executor"}


def read_options(setting: str, kind: type | None, values: Mapping[str, Any], also: Sequence[str] = ()) -> Any:
    """An options object of `kind` from a user's mapping; None if the tool has no options. Error messages list the names
    in `also` as known too."""
    hints = {field.name: get_type_hints(kind)[field.name] for field in fields(kind)} if kind is not None else {}
    options = {}
    for name, value in values.items():
        if name not in hints:
            raise unknown(f"option in {setting}", name, [*hints, *also])
        try:
            options[name] = coerce(hints[name], value)
        except ValueError as error:
            raise InputError(f"{setting}.{name} {error}") from error
    return None if kind is None else kind(**options)


# -- The tools of an agent ---------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Limits:
    """Options that every tool has. Built-in tools have no `timeout`, or one of their own."""

    timeout: float | None = None
    max_output_tokens: int | None = None


@dataclass(frozen=True)
class ToolSet:
    tools: tuple[Tool, ...]

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(tool.name for tool in self.tools)

    @property
    def functions(self) -> dict[str, Callable[..., Any]]:
        """The functions that a worker pool must have to run these tools."""
        return {tool.key: WorkerTool(tool) for tool in self.tools if not tool.inline}

    def schemas(self) -> list[dict[str, Any]]:
        """For the `tools=` argument of chat templates."""
        return [tool.schema() for tool in self.tools]

    def open(
        self,
        pool: WorkerPool | None = None,
        *,
        cut: Cut = cut_by_characters,
        max_tokens: int = 512,
        seconds: float = 10.0,
        waiting: Callable[[], AbstractContextManager[None]] = nullcontext,
        sees_images: bool = True,
    ) -> ToolSession:
        """A session for one episode, to be used with `async with`.

        `pool` must have `functions`; it is needed if there are any. `cut(text, limit)` is the longest beginning
        of a text that has `limit` tokens. `max_tokens` (agent.max_tool_tokens) and `seconds` (agent.tool_seconds) are
        the limits of tools without their own. The episode's clock is stopped inside `waiting()`. Without `sees_images`,
        the model reads in words that a tool returned an image.
        """
        assert pool is not None or not self.functions, f"{list(self.functions)} need workers"
        return ToolSession(
            tools={tool.name: tool for tool in self.tools},
            pool=pool,
            cut=cut,
            max_tokens=max_tokens,
            seconds=seconds,
            waiting=waiting,
            sees_images=sees_images,
        )


def resolve_tools(
    names: Sequence[ToolName],
    options: Mapping[str, Any] | None = None,
    *,
    sandbox: Sandbox | None = None,
    seconds: float = 10.0,
) -> ToolSet:
    """The tools with these names. `options` is agent.tool_options. `sandbox` runs the code of python_executor.
    `seconds` is agent.tool_seconds, for the tools of servers (`mcp:...`), which are contacted here."""
    options = options or {}
    tools: list[Tool] = []
    for new in (resolved for name in names for resolved in _resolve(name, options, sandbox, seconds)):
        if clash := next((other for other in tools if _canonical(other.name) == _canonical(new.name)), None):
            other = "" if clash.name == new.name else f" (the same as {clash.name})"
            fix = "name it once, or rename one with @covey.tool(name=...)"
            raise InputError(f"two tools are called {new.name}{other}\n  fix: {fix}")
        tools.append(new)
    servers = [name.removeprefix(MCP) for name in names if isinstance(name, str) and name.startswith(MCP)]
    known = [*(tool.name for tool in tools), *servers]
    for key in options:
        if key not in known:
            raise unknown(f"tool in {OPTIONS}", key, known)
    return ToolSet(tuple(tools))


def _canonical(name: str) -> str:
    return SYNONYMS.get(name, name)


def _resolve(name: ToolName, options: Mapping[str, Any], sandbox: Sandbox | None, seconds: float) -> Sequence[Tool]:
    """The tools that a name stands for: all tools of a server, otherwise one."""
    if not isinstance(name, str):
        return [_users_tool(name, options)]
    if name.startswith(MCP):
        from covey.agents.tools.mcp import mcp_tools

        return mcp_tools(name, options, seconds)
    if name in BUILTIN:
        return [_builtin(name, options, sandbox)]
    if ":" in name:
        function = load_function("tool", name)
        if not callable(function):
            raise InputError(f"tool {name} is not a function")
        return [_users_tool(function, options)]
    if name.endswith(".py"):
        raise InputError(f"tool {name} names no function\n  fix: {name}:FUNCTION")
    raise unknown("tool", name, BUILTIN)


def _builtin(name: str, options: Mapping[str, Any], sandbox: Sandbox | None) -> Tool:
    own = _options(name, options)
    builtin = BUILTIN[name]()
    rest = {key: value for key, value in own.items() if key != TOKENS}
    made = builtin.make(read_options(f"{OPTIONS}.{name}", builtin.options, rest, [TOKENS]), sandbox)
    return _limited(replace(made, name=name), {TOKENS: own[TOKENS]} if TOKENS in own else {})


def _users_tool(function: Callable[..., Any], options: Mapping[str, Any]) -> Tool:
    tool = Tool.of(function)
    return _limited(tool, _options(tool.name, options))


def _limited(tool: Tool, own: Mapping[str, Any]) -> Tool:
    limits = read_options(f"{OPTIONS}.{tool.name}", Limits, own)
    return with_limits(tool, limits.timeout, limits.max_output_tokens)


def _options(name: str, options: Mapping[str, Any]) -> Mapping[str, Any]:
    own = options.get(name) or {}
    if not isinstance(own, Mapping):
        raise InputError(f"{OPTIONS}.{name} must be a mapping of settings, got {own!r}")
    return own
