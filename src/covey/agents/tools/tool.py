"""What goes wrong with a tool call, and whose fault it is.

What the model did wrong is an observation: it reads the text and may do better. What the infrastructure did wrong ends
the episode as a failure, which is neither learned from nor compared with.
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
    """The model's mistake. `text` is what it is shown; `detail`, where the tool raised, is for the user alone."""

    def __init__(self, kind: Kind, text: str, detail: str = "") -> None:
        super().__init__(kind, text, detail)  # all of them: an exception is pickled by its arguments
        self.kind = kind
        self.text = text
        self.detail = detail

    def __str__(self) -> str:
        return self.text


class ToolFailure(NamedFailure):
    """The infrastructure's fault. `cause` is short and countable: tool_timeout, tool_crash, tool_result, sandbox,
    search, or a word of a user's own tool."""

    @property
    def failure(self) -> Failure:
        return Failure(self.cause, hide(self.message))


# -- What a docstring says of a function and of its parameters ---------------------------------------------------------
# Three ways of writing are read:
#
# Args:                          :param query: What to look for.        Search.  Args: query: what  top_k: how many
# query: What to look for.
# top_k (int): How many.

ARGS = re.compile(r"(?:^|(?<=\s))(?:Args|Arguments|Parameters)[ \t]*:[ \t]*", re.MULTILINE)
FIELD = re.compile(r"^[ \t]*:(\w+)[ \t]*([^:\n]*):", re.MULTILINE)
SECTION = re.compile(
    r"(?:^|(?<=\s))(?:Returns?|Raises|Yields?)[ \t]*:(?!\S)|^[ \t]*(?:Examples?|Notes?)[ \t]*:[ \t]*$", re.MULTILINE
)


def read_docstring(text: str | None, parameters: Iterable[str]) -> tuple[str, dict[str, str]]:
    """The first paragraph, and a description for each parameter that has one."""
    text = inspect.cleandoc(text or "")
    found: dict[str, str] = {}
    starts = [len(text)]
    if args := ARGS.search(text):
        starts.append(args.start())
        found |= _sections(text, args, list(parameters))
    if fields := list(FIELD.finditer(text)):
        starts.append(fields[0].start())
        found |= _fields(text, fields, list(parameters))
    if end := SECTION.search(text):
        starts.append(end.start())
    paragraph = re.split(r"\n[ \t]*\n", text[: min(starts)].strip())[0]
    return _one_line(paragraph), found


def _sections(text: str, args: re.Match[str], parameters: list[str]) -> dict[str, str]:
    """`name: text` and `name (type): text`. On the line of `Args:` itself names may follow each other on one line."""
    if not parameters:
        return {}
    body = text[args.end() :]
    if end := SECTION.search(body):
        body = body[: end.start()]
    on_one_line = bool(body.split("\n", 1)[0].strip())
    if not on_one_line and "\n" in text[: args.start()]:  # cleandoc moves all lines after the first to the margin
        body = _indented(body)
    before = r"(?:^|(?<=[\s;,]))" if on_one_line else r"^[ \t]*"
    names = "|".join(re.escape(name) for name in parameters)
    entry = re.compile(rf"{before}({names})[ \t]*(?:\([^)\n]*\))?[ \t]*:(?!:)", re.MULTILINE)
    return _between(body, list(entry.finditer(body)))


def _indented(body: str) -> str:
    """The lines of a section: it ends where a line begins at the margin."""
    lines = body.split("\n")[1:]
    end = next((n for n, line in enumerate(lines) if line.strip() and not line[0].isspace()), len(lines))
    return "\n".join(lines[:end])


def _fields(text: str, fields: list[re.Match[str]], parameters: list[str]) -> dict[str, str]:
    """`:param name:` and `:param type name:`; a field ends where the next begins, or at an empty line."""
    found = {}
    for field, following in zip_longest(fields, fields[1:]):
        words = field[2].split()
        if field[1] in ("param", "parameter", "arg", "argument") and words and words[-1] in parameters:
            body = text[field.end() : following.start() if following else len(text)]
            found[words[-1]] = _one_line(re.split(r"\n[ \t]*\n", body)[0])
    return found


def _between(body: str, entries: list[re.Match[str]]) -> dict[str, str]:
    found: dict[str, str] = {}
    for entry, following in zip_longest(entries, entries[1:]):
        text = body[entry.end() : following.start() if following else len(body)]
        found.setdefault(entry[1], _one_line(text).rstrip(";,"))
    return found


def _one_line(text: str) -> str:
    return " ".join(text.split())


# -- A tool is a plain function with a name, a description and parameters that a model can fill in ---------------------
# @covey.tool(timeout=10, max_output_tokens=512)
# async def search(query: str, top_k: int = 3) -> str:
# """Search the corpus.
#
# Args:
# query: What to look for.
# top_k: How many passages.
# """
#
# A parameter called `state` is not the model's: it is a dict that belongs to one episode and is shared by its tools.
# What lies in it and has `close` or `aclose` is closed when the episode ends.

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
    """A function and what a model is told of it. Calling it calls the function."""

    name: str
    description: str
    function: Callable[..., Any]
    parameters: tuple[Parameter, ...]
    stateful: bool = False  # it asks for `state`
    timeout: float | None = None  # seconds of one call; None: agent.tool_seconds
    max_output_tokens: int | None = None  # None: agent.max_tool_tokens
    ends: bool = False  # calling it ends the episode
    inline: bool = False  # ours, and cannot hang: it runs on the event loop, not in a worker

    def __post_init__(self) -> None:
        # What a function shows of itself: help(), inspect.signature and pickle by name work as before.
        for attribute in ("__name__", "__qualname__", "__module__", "__doc__"):
            self.__dict__[attribute] = getattr(self.function, attribute, None)
        self.__dict__["__wrapped__"] = self.function

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self.function(*args, **kwargs)

    @classmethod
    def of(cls, function: Callable[..., Any]) -> Tool:
        return function if isinstance(function, Tool) else tool(function)

    def schema(self) -> dict[str, Any]:
        """As OpenAI's interface and chat templates have it."""
        properties = {parameter.name: dict(parameter.schema) for parameter in self.parameters}
        required = [parameter.name for parameter in self.parameters if parameter.required]
        parameters = {"type": "object", "properties": properties, "required": required}
        about = {"name": self.name, "description": self.description, "parameters": parameters}
        return {"type": "function", "function": about}

    def check(self, arguments: Mapping[str, Any]) -> dict[str, Any]:
        """Arguments of a call, each as its parameter wants it; or `ToolMistake`, which tells the model what to mend."""
        known = {parameter.name: parameter for parameter in self.parameters}
        problems = [
            f"unknown argument {name[:60]!r}{_guess(name[:60], known)}" for name in arguments if name not in known
        ]
        found = {}
        for name, parameter in known.items():
            if name not in arguments:
                if parameter.required:
                    problems.append(f"missing argument {name!r}")
                continue
            try:
                found[name] = coerce(parameter.annotation, arguments[name])
            except ValueError as error:
                problems.append(f"argument {name!r} {error}")
        if problems:
            raise ToolMistake("bad_arguments", f"error: {self.name}: {'; '.join(problems)}\n{self.usage()}")
        return found

    def usage(self) -> str:
        """One line: `expected: search(query: string, top_k: integer = 3)`."""
        return f"expected: {self.name}({', '.join(map(_usage, self.parameters))})"

    @property
    def key(self) -> str:
        """Its name among the functions of a pool of workers, where rewards are too."""
        return f"tool:{self.name}"

    def plain(self, checked: Mapping[str, Any]) -> dict[str, Any]:
        """Checked arguments as JSON has them, for the way to another process."""
        return {name: plain(value) for name, value in checked.items()}

    def answer(self, checked: Mapping[str, Any]) -> str:
        """What a tool that ends the episode was given: its argument `answer`, its only one, or all of them."""
        given = self.plain(checked)
        value = given.get("answer", next(iter(given.values())) if len(given) == 1 else given)
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
    """Make a tool of a function, `def` or `async def`. `ends=True`: calling it ends the episode."""

    def make(function: Callable[..., Any]) -> Tool:
        made = read(function, name)
        return configured(replace(made, ends=ends), timeout=timeout, max_output_tokens=max_output_tokens)

    return make if function is None else make(function)


def configured(tool: Tool, *, timeout: float | None = None, max_output_tokens: int | None = None) -> Tool:
    """The same tool with limits of its own, where any are given."""
    if timeout is not None and not timeout > 0:
        raise InputError(f"tool {tool.name}: timeout must be more than 0 seconds, got {timeout}")
    if max_output_tokens is not None and max_output_tokens < 1:
        raise InputError(f"tool {tool.name}: max_output_tokens must be at least 1, got {max_output_tokens}")
    return replace(
        tool,
        timeout=tool.timeout if timeout is None else float(timeout),
        max_output_tokens=tool.max_output_tokens if max_output_tokens is None else max_output_tokens,
    )


def read(function: Callable[..., Any], name: str | None = None) -> Tool:
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
    own = [parameter for parameter in signature if parameter.name != STATE]
    description, about = read_docstring(_annotated(function).__doc__, [parameter.name for parameter in own])
    parameters = tuple(_parameter(name, p, hints.get(p.name, str), about.get(p.name)) for p in own)
    return Tool(name, description, function, parameters, stateful=len(own) < len(signature))


def _annotated(function: Callable[..., Any]) -> Any:
    """Where annotations and docstring are: a partial's function, the `__call__` of an object."""
    if isinstance(function, partial):
        return _annotated(function.func)
    return function if inspect.isroutine(function) else type(function).__call__


def _parameter(tool: str, parameter: inspect.Parameter, annotation: Any, description: str | None) -> Parameter:
    required = parameter.default is parameter.empty
    if get_origin(annotation) is Annotated and description is None:
        description = next((note for note in get_args(annotation)[1:] if isinstance(note, str)), None)
    if parameter.default is None and annotation is not Any:
        annotation = Optional[annotation]  # noqa: UP045  (`|` does not take every annotation)
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
