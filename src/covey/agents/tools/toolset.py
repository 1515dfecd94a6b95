"""Settings of a built-in tool: the fields of a dataclass, from a mapping that a user wrote."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, fields, replace
from typing import Any, get_type_hints

from covey.agents.tools.calculator import calculator
from covey.agents.tools.google import GoogleOptions, make_google_search
from covey.agents.tools.python import PythonOptions, Sandbox, make_python
from covey.agents.tools.schema import coerce
from covey.agents.tools.search import SearchOptions, make_search
from covey.agents.tools.session import Bench, Cut, InWorker, Runner, by_characters
from covey.agents.tools.tool import Tool, configured, tool
from covey.errors import InputError, unknown
from covey.imports import load_function


def read_options(place: str, kind: type | None, given: Mapping[str, Any], also: Sequence[str] = ()) -> Any:
    """An object of `kind`, or None where a tool has no options. `also` are names that are known besides."""
    hints = {field.name: get_type_hints(kind)[field.name] for field in fields(kind)} if kind is not None else {}
    values = {}
    for name, value in given.items():
        if name not in hints:
            raise unknown(f"option in {place}", name, [*hints, *also])
        try:
            values[name] = coerce(hints[name], value)
        except ValueError as error:
            raise InputError(f"{place}.{name} {error}") from error
    return None if kind is None else kind(**values)


# -- The tools that come with Covey, by the name that users type -------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Builtin:
    make: Callable[[Any, Sandbox | None], Tool]  # from its options, and where code of the model's runs
    options: type | None = None


@tool(ends=True)
def answer(answer: str) -> str:
    """Give the final answer. This ends the conversation.

    Args:
        answer: The final answer, and nothing else.
    """
    return answer


BUILTIN: dict[str, Builtin] = {
    "calculator": Builtin(lambda _, __: replace(calculator, inline=True)),
    "python_executor": Builtin(make_python, PythonOptions),
    "code_interpreter": Builtin(make_python, PythonOptions),
    "search": Builtin(lambda options, _: make_search(options), SearchOptions),
    "google_search": Builtin(lambda options, _: make_google_search(options), GoogleOptions),
    "answer": Builtin(lambda _, __: replace(answer, inline=True)),
}
SAME = {"code_interpreter": "python_executor"}


def same_tool(one: str, other: str) -> bool:
    return SAME.get(one, one) == SAME.get(other, other)


# -- Which tools an agent has: by name, `module:function`, `file.py:function`, or functions themselves -----------------

OPTIONS = "agent.tool_options"
TOKENS = "max_output_tokens"
MCP = "mcp:"  # before the address or the name of a tool server

ToolName = str | Tool | Callable[..., Any]


@dataclass(frozen=True)
class Limits:
    """Options of every tool; a built-in one has no timeout, or one of its own."""

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
        """What must run in workers: the functions for a pool."""
        return {tool.key: InWorker(tool) for tool in self.tools if not tool.inline}

    def schemas(self) -> list[dict[str, Any]]:
        """As chat templates take them: `tools=`."""
        return [tool.schema() for tool in self.tools]

    def open(
        self,
        runner: Runner | None = None,
        *,
        cut: Cut = by_characters,
        max_tokens: int = 512,
        seconds: float = 10.0,
        waiting: Callable[[], AbstractContextManager[None]] = nullcontext,
    ) -> Bench:
        """A bench for one episode, to be used with `async with`.

        `runner` is a pool of workers that has `functions`, needed if there are any. `cut(text, limit)` is the longest
        beginning of a text that has `limit` tokens. `max_tokens` (agent.max_tool_tokens) and `seconds`
        (agent.tool_seconds) are the limits of tools that have none of their own. Inside `waiting()` the episode's clock
        stands still.
        """
        assert runner is not None or not self.functions, f"{list(self.functions)} need workers"
        tools = {tool.name: tool for tool in self.tools}
        return Bench(tools, runner, cut=cut, max_tokens=max_tokens, seconds=seconds, waiting=waiting)


def resolve_tools(
    names: Sequence[ToolName],
    options: Mapping[str, Any] | None = None,
    *,
    sandbox: Sandbox | None = None,
    seconds: float = 10.0,
) -> ToolSet:
    """`options` is agent.tool_options: settings by the name of a tool, or of a tool server. `sandbox` runs what
    python_executor is given. `seconds` is agent.tool_seconds, for tools of servers (`mcp:...`), which are asked now."""
    options = options or {}
    found: list[Tool] = []
    servers = [name for name in names if isinstance(name, str) and name.startswith(MCP)]
    for one in (one for name in names for one in _find_all(name, options, sandbox, seconds)):
        if clash := next((other for other in found if same_tool(other.name, one.name)), None):
            other = "" if clash.name == one.name else f" (the same as {clash.name})"
            fix = "name it once, or rename one with @covey.tool(name=...)"
            raise InputError(f"two tools are called {one.name}{other}\n  fix: {fix}")
        found.append(one)
    known = [*(tool.name for tool in found), *(name.removeprefix(MCP) for name in servers)]
    for key in options:
        if key not in known:
            raise unknown(f"tool in {OPTIONS}", key, known)
    return ToolSet(tuple(found))


def _find_all(name: ToolName, options: Mapping[str, Any], sandbox: Sandbox | None, seconds: float) -> Sequence[Tool]:
    if isinstance(name, str) and name.startswith(MCP):
        from covey.agents.tools.mcp import mcp_tools  # a server has several

        return mcp_tools(name, options, seconds)
    return [_find(name, options, sandbox)]


def _find(name: ToolName, options: Mapping[str, Any], sandbox: Sandbox | None) -> Tool:
    if not isinstance(name, str):
        return _users(Tool.of(name), options)
    if name in BUILTIN:
        return _builtin(name, options, sandbox)
    if ":" in name:
        function = load_function("tool", name)
        if not callable(function):
            raise InputError(f"tool {name} is not a function")
        return _users(Tool.of(function), options)
    if name.endswith(".py"):
        raise InputError(f"tool {name} names no function\n  fix: {name}:FUNCTION")
    raise unknown("tool", name, BUILTIN)


def _builtin(name: str, options: Mapping[str, Any], sandbox: Sandbox | None) -> Tool:
    own = _options(name, options)
    kind = BUILTIN[name]
    rest = {key: value for key, value in own.items() if key != TOKENS}
    made = kind.make(read_options(f"{OPTIONS}.{name}", kind.options, rest, [TOKENS]), sandbox)
    return _limited(replace(made, name=name), {TOKENS: own[TOKENS]} if TOKENS in own else {})


def _users(tool: Tool, options: Mapping[str, Any]) -> Tool:
    return _limited(tool, _options(tool.name, options))


def _limited(tool: Tool, own: Mapping[str, Any]) -> Tool:
    limits = read_options(f"{OPTIONS}.{tool.name}", Limits, own)
    return configured(tool, timeout=limits.timeout, max_output_tokens=limits.max_output_tokens)


def _options(name: str, options: Mapping[str, Any]) -> Mapping[str, Any]:
    own = options.get(name) or {}
    if not isinstance(own, Mapping):
        raise InputError(f"{OPTIONS}.{name} must be a mapping of settings, got {own!r}")
    return own
