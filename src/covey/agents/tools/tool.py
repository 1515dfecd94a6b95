"""Tools: plain functions with a name, a description and parameters that a model can fill in.

    @covey.tool(timeout=10, max_output_tokens=512)
    async def search(query: str, top_k: int = 3) -> str:
        \"\"\"Search the corpus.

        Args:
            query: What to look for.
            top_k: How many passages.
        \"\"\"

The model does not see a parameter called `state`: it is a dict that belongs to one episode and is shared by its tools.
Values in it that have `close` or `aclose` are closed when the episode ends.

A `ToolMistake` is the model's mistake: the model reads its text and may do better. A `ToolFailure` is the fault of the
infrastructure: it ends the episode as a failure, which is neither trained on nor part of its group's statistics.
"""

from __future__ import annotations

import inspect
import json
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from itertools import zip_longest
from typing import Annotated, Any, Literal, Optional, get_args, get_origin, get_type_hints, overload

from covey.agents.tools.schema import coerce, plain, schema_of
from covey.errors import InputError, NamedFailure, nearest
from covey.redact import hide
from covey.types import Failure

Kind = Literal["malformed", "unknown_tool", "bad_arguments", "raised", "deadline"]


class ToolMistake(Exception):
    """The model's mistake. The model is shown `text`; only the user sees `detail`, the place where the tool raised."""

    def __init__(self, kind: Kind, text: str, detail: str = "") -> None:
        super().__init__(kind, text, detail)  # exceptions are pickled by their arguments
        self.kind = kind
        self.text = text
        self.detail = detail

    def __str__(self) -> str:
        return self.text


class ToolFailure(NamedFailure):
    """A fault of the infrastructure. Failures are counted by `cause`: tool_timeout, tool_crash, tool_result, sandbox,
    search, or a word that a user's tool chooses."""

    @property
    def failure(self) -> Failure:
        return Failure(self.cause, hide(self.message))


# -- Docstrings --------------------------------------------------------------------------------------------------------

ARGS = re.compile(r"(?:^|(?<=\s))(?:Args|Arguments|Parameters)[ \t]*:[ \t]*", re.MULTILINE)
FIELD = re.compile(r"^[ \t]*:(\w+)[ \t]*([^:\n]*):", re.MULTILINE)
SECTION = re.compile(
    r"(?:^|(?<=\s))(?:Returns?|Raises|Yields?)[ \t]*:(?!\S)|^[ \t]*(?:Examples?|Notes?)[ \t]*:[ \t]*$", re.MULTILINE
)


def read_docstring(text: str | None, parameters: Iterable[str]) -> tuple[str, dict[str, str]]:
    """The first paragraph, and a description for each parameter that has one. Three styles are supported:

    Args:                          :param query: What to look for.      Search.  Args: query: what  top_k: how many
        query: What to look for.
        top_k (int): How many.
    """
    text = inspect.cleandoc(text or "")
    descriptions: dict[str, str] = {}
    starts = [len(text)]
    if args := ARGS.search(text):
        starts.append(args.start())
        descriptions |= _sections(text, args, list(parameters))
    if fields := list(FIELD.finditer(text)):
        starts.append(fields[0].start())
        descriptions |= _fields(text, fields, list(parameters))
    if end := SECTION.search(text):
        starts.append(end.start())
    paragraph = re.split(r"\n[ \t]*\n", text[: min(starts)].strip())[0]
    return _one_line(paragraph), descriptions


def _sections(text: str, args: re.Match[str], parameters: list[str]) -> dict[str, str]:
    """`name: text` and `name (type): text`, one per line, or several on the line of `Args:`."""
    if not parameters:
        return {}
    body = text[args.end() :]
    if end := SECTION.search(body):
        body = body[: end.start()]
    on_one_line = bool(body.split("\n", 1)[0].strip())
    if not on_one_line and "\n" in text[: args.start()]:  # cleandoc moves all lines after the first to the margin
        lines = body.split("\n")[1:]  # the section ends at the first line that is not indented
        end_line = next((n for n, line in enumerate(lines) if line.strip() and not line[0].isspace()), len(lines))
        body = "\n".join(lines[:end_line])
    before = r"(?:^|(?<=[\s;,]))" if on_one_line else r"^[ \t]*"
    names = "|".join(re.escape(name) for name in parameters)
    entry = re.compile(rf"{before}({names})[ \t]*(?:\([^)\n]*\))?[ \t]*:(?!:)", re.MULTILINE)
    entries = list(entry.finditer(body))
    descriptions: dict[str, str] = {}
    for found, following in zip_longest(entries, entries[1:]):
        description = body[found.end() : following.start() if following else len(body)]
        descriptions.setdefault(found[1], _one_line(description).rstrip(";,"))
    return descriptions


def _fields(text: str, fields: list[re.Match[str]], parameters: list[str]) -> dict[str, str]:
    """`:param name:` and `:param type name:`. A field ends at the next field or at an empty line."""
    descriptions = {}
    for field, following in zip_longest(fields, fields[1:]):
        words = field[2].split()
        if field[1] in ("param", "parameter", "arg", "argument") and words and words[-1] in parameters:
            body = text[field.end() : following.start() if following else len(text)]
            descriptions[words[-1]] = _one_line(re.split(r"\n[ \t]*\n", body)[0])
    return descriptions


def _one_line(text: str) -> str:
    return " ".join(text.split())


# -- Tools -------------------------------------------------------------------------------------------------------------

STATE = "state"
NAME = re.compile(r"[A-Za-z0-9_-]{1,64}")


@dataclass(frozen=True, slots=True)
class Parameter:
    name: str
    annotation: Any
    schema: Mapping[str, Any]  # with its description and default
    required: bool


@dataclass(frozen=True, eq=False)
class Tool:
    """A function and its description for the model. Calling the tool calls the function."""

    name: str
    description: str
    function: Callable[..., Any]
    parameters: tuple[Parameter, ...]
    stateful: bool = False  # it has a parameter `state`
    timeout: float | None = None  # seconds per call; None: agent.tool_seconds
    max_output_tokens: int | None = None  # None: agent.max_tool_tokens
    ends: bool = False  # calling it ends the episode
    inline: bool = False  # built in and cannot hang: it runs on the event loop, not in a worker

    def __post_init__(self) -> None:
        # So that help(), inspect.signature and pickling by name work as for the function.
        for attribute in ("__name__", "__qualname__", "__module__", "__doc__"):
            self.__dict__[attribute] = getattr(self.function, attribute, None)
        self.__dict__["__wrapped__"] = self.function

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self.function(*args, **kwargs)

    @classmethod
    def of(cls, function: Callable[..., Any]) -> Tool:
        return function if isinstance(function, Tool) else tool(function)

    def schema(self) -> dict[str, Any]:
        """The tool as JSON schema, in the form of OpenAI's API and of chat templates."""
        properties = {parameter.name: dict(parameter.schema) for parameter in self.parameters}
        required = [parameter.name for parameter in self.parameters if parameter.required]
        parameters = {"type": "object", "properties": properties, "required": required}
        function = {"name": self.name, "description": self.description, "parameters": parameters}
        return {"type": "function", "function": function}

    def check(self, arguments: Mapping[str, Any]) -> dict[str, Any]:
        """The arguments of a call, converted to their types. Raises a `ToolMistake` that lists all problems."""
        known = {parameter.name: parameter for parameter in self.parameters}
        problems = [
            f"unknown argument {name[:60]!r}{_guess(name[:60], known)}" for name in arguments if name not in known
        ]
        checked = {}
        for name, parameter in known.items():
            if name not in arguments:
                if parameter.required:
                    problems.append(f"missing argument {name!r}")
                continue
            try:
                checked[name] = coerce(parameter.annotation, arguments[name])
            except ValueError as error:
                problems.append(f"argument {name!r} {error}")
        if problems:
            raise ToolMistake("bad_arguments", f"error: {self.name}: {'; '.join(problems)}\n{self.usage()}")
        return checked

    def usage(self) -> str:
        """One line: `expected: search(query: string, top_k: integer = 3)`."""
        return f"expected: {self.name}({', '.join(map(_usage, self.parameters))})"

    @property
    def key(self) -> str:
        """Its name in a worker pool, which holds reward functions as well."""
        return f"tool:{self.name}"

    def plain(self, checked: Mapping[str, Any]) -> dict[str, Any]:
        """Checked arguments as JSON values, to send them to a worker."""
        return {name: plain(value) for name, value in checked.items()}

    def answer(self, checked: Mapping[str, Any]) -> str:
        """The final answer from a tool that ends the episode: its argument `answer`, its only argument, or all of
        them."""
        arguments = self.plain(checked)
        value = arguments.get("answer", next(iter(arguments.values())) if len(arguments) == 1 else arguments)
        return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)


def _guess(name: str, known: Mapping[str, Any]) -> str:
    guess = nearest(name, known)
    return f" (did you mean {guess!r}?)" if guess else ""


def _usage(parameter: Parameter) -> str:
    schema = parameter.schema
    if "enum" in schema:
        kind = " | ".join(json.dumps(value) for value in schema["enum"])
    elif "anyOf" in schema:
        kind = " | ".join(str(member.get("type", "any")) for member in schema["anyOf"])
    else:
        kinds = schema.get("type", "any")
        kind = kinds if isinstance(kinds, str) else " | ".join(kinds)
    default = "" if parameter.required else f" = {json.dumps(schema.get('default'))}"
    return f"{parameter.name}: {kind}{default}"


@overload
def tool(function: Callable[..., Any], /) -> Tool: ...


@overload
def tool(
    *,
    name: str | None = None,
    timeout: float | None = None,
    max_output_tokens: int | None = None,
    ends: bool = False,
) -> Callable[[Callable[..., Any]], Tool]: ...


def tool(
    function: Callable[..., Any] | None = None,
    /,
    *,
    name: str | None = None,
    timeout: float | None = None,
    max_output_tokens: int | None = None,
    ends: bool = False,
) -> Any:
    """Turn a function (`def` or `async def`) into a tool. `ends=True`: calling it ends the episode."""

    def make(function: Callable[..., Any]) -> Tool:
        return with_limits(replace(_from_function(function, name), ends=ends), timeout, max_output_tokens)

    return make if function is None else make(function)


def with_limits(tool: Tool, timeout: float | None, max_output_tokens: int | None) -> Tool:
    """The tool with new limits, where they are not None."""
    if timeout is not None and not timeout > 0:
        raise InputError(f"tool {tool.name}: timeout must be more than 0 seconds, got {timeout}")
    if max_output_tokens is not None and max_output_tokens < 1:
        raise InputError(f"tool {tool.name}: max_output_tokens must be at least 1, got {max_output_tokens}")
    return replace(
        tool,
        timeout=tool.timeout if timeout is None else float(timeout),
        max_output_tokens=tool.max_output_tokens if max_output_tokens is None else max_output_tokens,
    )


def _from_function(function: Callable[..., Any], name: str | None) -> Tool:
    """A tool from a function's signature and docstring."""
    name = name or str(getattr(function, "__name__", type(function).__name__))
    if not NAME.fullmatch(name):
        raise InputError(f"tool {name}: a name has letters, digits, _ and - only\n  fix: @covey.tool(name='...')")
    try:
        signature = list(inspect.signature(function).parameters.values())
        hints = get_type_hints(_annotated(function), include_extras=True)
    except (TypeError, ValueError, NameError) as error:
        raise InputError(f"tool {name}: its parameters cannot be read ({error})") from error
    for parameter in signature:
        if parameter.kind not in (parameter.POSITIONAL_OR_KEYWORD, parameter.KEYWORD_ONLY):
            raise InputError(f"tool {name}: a model gives every argument by its name\n  fix: do without {parameter}")
    visible = [parameter for parameter in signature if parameter.name != STATE]
    description, descriptions = read_docstring(_annotated(function).__doc__, [parameter.name for parameter in visible])
    parameters = tuple(_parameter(name, p, hints.get(p.name, str), descriptions.get(p.name)) for p in visible)
    return Tool(name, description, function, parameters, stateful=len(visible) < len(signature))


def _annotated(function: Callable[..., Any]) -> Any:
    """The object with the annotations and the docstring: a partial's function, or an object's `__call__`."""
    if isinstance(function, partial):
        return _annotated(function.func)
    return function if inspect.isroutine(function) else type(function).__call__


def _parameter(tool: str, parameter: inspect.Parameter, annotation: Any, description: str | None) -> Parameter:
    required = parameter.default is parameter.empty
    if get_origin(annotation) is Annotated and description is None:
        description = next((note for note in get_args(annotation)[1:] if isinstance(note, str)), None)
    if parameter.default is None and annotation is not Any:
        annotation = Optional[annotation]  # noqa: UP045  (`|` does not accept every annotation)
    try:
        schema = schema_of(annotation)
    except InputError as error:
        raise InputError(f"tool {tool}, parameter {parameter.name}: {error}") from error
    if description:
        schema["description"] = description
    if not required and parameter.default is not None:
        default = plain(parameter.default)
        try:
            json.dumps(default)
        except TypeError as error:
            raise InputError(f"tool {tool}, parameter {parameter.name}: its default is not JSON ({error})") from error
        schema["default"] = default
    return Parameter(parameter.name, annotation, schema, required)
