"""Tools from functions: their schemas, and conversion of the arguments that a model writes."""

from __future__ import annotations

import asyncio
import inspect
from enum import Enum, IntEnum
from functools import partial
from typing import Annotated, Any, Literal, Optional

import pytest

import covey
from covey.agents.tools.tool import Tool, ToolMistake, read_docstring
from covey.errors import InputError


class Colour(Enum):
    RED = "red"
    DARK_BLUE = "dark blue"


class Level(IntEnum):
    LOW = 1
    HIGH = 2


class Odd(Enum):
    A = (1, 2)
    B = (3, 4)


def parameters(function: Any) -> dict[str, Any]:
    return Tool.of(function).schema()["function"]["parameters"]


def test_the_schema_of_the_documented_example() -> None:
    @covey.tool(timeout=10, max_output_tokens=512)
    async def search(query: str, top_k: int = 3) -> str:
        """Search the corpus.  Args: query: What to look for. top_k: How many: at most ten."""
        return f"{query} {top_k}"

    assert search.schema() == {
        "type": "function",
        "function": {
            "name": "search",
            "description": "Search the corpus.",
            "parameters": {
                "type": "object",
                "properties": {
                    "query": {"type": "string", "description": "What to look for."},
                    "top_k": {"type": "integer", "description": "How many: at most ten.", "default": 3},
                },
                "required": ["query"],
            },
        },
    }
    assert (search.timeout, search.max_output_tokens, search.ends, search.stateful) == (10.0, 512, False, False)
    assert asyncio.run(search("a", top_k=2)) == "a 2"  # still the function
    assert search.__name__ == "search" and list(inspect.signature(search).parameters) == ["query", "top_k"]


@pytest.mark.parametrize(
    ("annotation", "schema"),
    [
        (str, {"type": "string"}),
        (int, {"type": "integer"}),
        (float, {"type": "number"}),
        (bool, {"type": "boolean"}),
        (list, {"type": "array", "items": {}}),
        (list[int], {"type": "array", "items": {"type": "integer"}}),
        (list[list[str]], {"type": "array", "items": {"type": "array", "items": {"type": "string"}}}),
        (dict, {"type": "object"}),
        (dict[str, float], {"type": "object", "additionalProperties": {"type": "number"}}),
        (Optional[int], {"type": ["integer", "null"]}),  # noqa: UP045
        (str | None, {"type": ["string", "null"]}),
        (int | str, {"type": ["integer", "string"]}),
        (list[int] | None, {"anyOf": [{"type": "array", "items": {"type": "integer"}}, {"type": "null"}]}),
        (Literal["a", "b"], {"type": "string", "enum": ["a", "b"]}),
        (Literal[1, "x"], {"type": ["integer", "string"], "enum": [1, "x"]}),
        (Colour, {"type": "string", "enum": ["red", "dark blue"]}),
        (Level, {"type": "integer", "enum": [1, 2]}),
        (Odd, {"type": "string", "enum": ["A", "B"]}),
        (Any, {}),
        (Annotated[int, "how many"], {"type": "integer", "description": "how many"}),
    ],
)
def test_types_become_json_schema(annotation: Any, schema: dict[str, Any]) -> None:
    def function(x):
        return x

    function.__annotations__["x"] = annotation
    assert parameters(function)["properties"]["x"] == schema


def test_defaults_and_missing_annotations() -> None:
    def function(a, b=None, c: int = None, d: Colour = Colour.RED, *, e: list[int] = [1]):  # noqa: B006, RUF013
        return a

    assert parameters(function) == {
        "type": "object",
        "properties": {
            "a": {"type": "string"},
            "b": {"type": ["string", "null"]},
            "c": {"type": ["integer", "null"]},
            "d": {"type": "string", "enum": ["red", "dark blue"], "default": "red"},
            "e": {"type": "array", "items": {"type": "integer"}, "default": [1]},
        },
        "required": ["a"],
    }


def test_state_is_hidden_from_the_model() -> None:
    def remember(note: str, state: dict[str, Any]) -> str:
        """Keep a note."""
        return note

    made = Tool.of(remember)
    assert made.stateful and list(parameters(remember)["properties"]) == ["note"]
    with pytest.raises(ToolMistake, match="unknown argument 'state'"):
        made.check({"note": "x", "state": {}})


class Search:
    def __call__(self, n: int) -> str:
        """An object that can be called."""
        return str(n)


def test_objects_and_partials_are_functions_too() -> None:
    assert Tool.of(Search()).schema()["function"] == {
        "name": "Search",
        "description": "An object that can be called.",
        "parameters": {"type": "object", "properties": {"n": {"type": "integer"}}, "required": ["n"]},
    }

    def add(a: int, b: int) -> int:
        return a + b

    assert covey.tool(name="add_one")(partial(add, b=1)).check({"a": "2"}) == {"a": 2}


def positional(a: int, /) -> int:
    return a


def arguments(*many: int) -> int:
    return 0


def keywords(**many: int) -> int:
    return 0


def unwritable(x: complex) -> str:
    return ""


def unknown_type(x: NoSuchType) -> str:  # noqa: F821
    return ""


def odd_default(x: Any = object()) -> str:  # noqa: B008
    return ""


@pytest.mark.parametrize(
    ("function", "message"),
    [
        (positional, "do without a: 'int'"),
        (arguments, r"do without \*many"),
        (keywords, r"do without \*\*many"),
        (unwritable, "parameter x: its type complex cannot be written by a model"),
        (unknown_type, "NoSuchType"),
        (odd_default, "its default is not JSON"),
        (lambda x: x, "fix: @covey.tool"),
    ],
)
def test_functions_that_a_model_cannot_call_are_refused(function: Any, message: str) -> None:
    with pytest.raises(InputError, match=message):
        covey.tool(function)


def test_limits_are_checked() -> None:
    with pytest.raises(InputError, match="timeout must be more than 0"):
        covey.tool(timeout=0)(positional_free)
    with pytest.raises(InputError, match="max_output_tokens must be at least 1"):
        covey.tool(max_output_tokens=0)(positional_free)


def positional_free(x: str) -> str:
    return x


GOOGLE = """Find things.

    More about it.

    Args:
        query: What to look for,
            over two lines. query: again
        top_k (int, optional): How many.
        nobody: not a parameter

    Returns:
        query: not this one
    """
FIELDS = """Find things.

    :param query: What to look for,
        over two lines.
    :param int top_k: How many.
    :returns: a text
    :raises ValueError: top_k: never
    """


@pytest.mark.parametrize(
    ("text", "query", "top_k"),
    [
        (GOOGLE, "What to look for, over two lines. query: again", "How many. nobody: not a parameter"),
        (FIELDS, "What to look for, over two lines.", "How many."),
        ("Find things.  Args: query: what; top_k: many  Returns: text", "what", "many"),
        ("Find\n    things.  Args: top_k: many, query: what\n    to find", "what to find", "many"),
        ("Find things. Arguments:\n  query - what", None, None),
        ("Find things.", None, None),
        ("Find things.\n\nArgs:\n  query: what\n\nNote:\n  query: no\n", "what", None),
    ],
)
def test_docstrings(text: str, query: str | None, top_k: str | None) -> None:
    description, found = read_docstring(text, ["query", "top_k"])
    assert description == "Find things."
    assert (found.get("query"), found.get("top_k")) == (query, top_k)


def test_a_docstring_without_anything() -> None:
    assert read_docstring("Slow. Note: it costs money.", ["x"]) == ("Slow. Note: it costs money.", {})
    assert read_docstring(None, ["x"]) == ("", {})
    assert read_docstring("Args:\n    x: only this", ["x"]) == ("", {"x": "only this"})


@pytest.mark.parametrize(
    ("annotation", "written", "value"),
    [
        (int, "3", 3),
        (int, " -3 ", -3),
        (int, 3.0, 3),
        (int, "3.0", 3),
        (float, 3, 3.0),
        (float, "2.5", 2.5),
        (bool, "true", True),
        (bool, "False", False),
        (bool, 0, False),
        (str, 5, "5"),
        (str, 2.5, "2.5"),
        (str, True, "true"),
        (list[int], "[1, 2]", [1, 2]),
        (list[int], ["1", 2.0], [1, 2]),
        (list, '["a", {"b": 1}]', ["a", {"b": 1}]),
        (dict[str, int], '{"a": "1"}', {"a": 1}),
        (dict[int, list[bool]], {"1": ["true"]}, {1: [True]}),
        (int | None, None, None),
        (int | None, "null", None),
        (str | None, "null", "null"),
        (int | str, "3", "3"),
        (int | str, 3, 3),
        (list[int] | str, "[1]", "[1]"),
        (int | float, 2.5, 2.5),
        (Literal["a", "b"], "b", "b"),
        (Literal["Asc", "Desc"], "desc", "Desc"),
        (Literal[1, 2], "2", 2),
        (Literal[True, 1], 1, 1),
        (Colour, "dark blue", Colour.DARK_BLUE),
        (Colour, "Red", Colour.RED),
        (Colour, "DARK_BLUE", Colour.DARK_BLUE),
        (Level, "2", Level.HIGH),
        (Odd, "B", Odd.B),
        (Any, {"x": [None]}, {"x": [None]}),
    ],
)
def test_arguments_with_a_clear_meaning_are_converted(annotation: Any, written: Any, value: Any) -> None:
    found = accepting(annotation).check({"x": written})["x"]
    assert found == value and type(found) is type(value)


@pytest.mark.parametrize(
    ("annotation", "written", "message"),
    [
        (int, "three", 'must be an integer, got "three"'),
        (int, 2.5, "must be an integer, got 2.5"),
        (int, True, "must be an integer, got true"),
        (int, "9" * 5000, "must be an integer"),
        (int, None, "must be an integer, got null"),
        (float, "nan", "must be a number, got nan"),
        (float, float("inf"), "must be a number, got inf"),
        (float, 10**400, "must be a number of reasonable size"),
        (bool, "yes", 'must be true or false, got "yes"'),
        (str, ["a"], r'must be a string, got \["a"\]'),
        (str, None, "must be a string, got null"),
        (list[int], "1, 2", 'must be a list, got "1, 2"'),
        (list[int], "[" * 100_000, "must be a list"),
        (list[int], '{"a": 1}', "must be a list"),
        (list[int], [1, "x"], r'\[1\] must be an integer, got "x"'),
        (dict[str, int], {"a": "x"}, r"\['a'\] must be an integer"),
        (int | None, "x", 'must be an integer or must be null, got "x"'),
        (Literal["a", 1], "c", 'must be one of "a", 1, got "c"'),
        (Colour, "green", 'must be one of "red", "dark blue"'),
    ],
)
def test_other_arguments_are_mistakes_that_name_the_expected_type(annotation: Any, written: Any, message: str) -> None:
    with pytest.raises(ToolMistake, match=message) as caught:
        accepting(annotation).check({"x": written})
    assert caught.value.kind == "bad_arguments" and len(caught.value.text) < 400


def accepting(annotation: Any) -> Tool:
    def function(x):
        return x

    function.__annotations__["x"] = annotation
    return Tool.of(function)


def test_a_mistake_names_everything_at_once() -> None:
    def search(query: str, top_k: int = 3, order: Literal["up", "down"] = "up", near: float | None = None) -> str:
        return query

    with pytest.raises(ToolMistake) as caught:
        Tool.of(search).check({"topk": 3, "order": "left"})
    assert caught.value.text == (
        "error: search: unknown argument 'topk' (did you mean 'top_k'?); missing argument 'query'; "
        'argument \'order\' must be one of "up", "down", got "left"\n'
        'expected: search(query: string, top_k: integer = 3, order: "up" | "down" = "up", near: number | null = null)'
    )


def test_checked_arguments_travel_as_json() -> None:
    def paint(colours: list[Colour], level: Level) -> str:
        return ""

    made = Tool.of(paint)
    checked = made.check({"colours": ["red", "DARK_BLUE"], "level": 2})
    assert made.plain(checked) == {"colours": ["red", "dark blue"], "level": 2}
    assert made.check(made.plain(checked)) == checked


def test_the_answer_is_the_argument() -> None:
    def submit(solution: str) -> str:
        return "thanks"

    def guess(answer: int, sure: bool) -> str:
        return "thanks"

    def pair(a: int, b: int) -> str:
        return "thanks"

    assert Tool.of(submit).answer({"solution": "42"}) == "42"
    assert Tool.of(guess).answer({"answer": 42, "sure": True}) == "42"
    assert Tool.of(pair).answer({"a": 1, "b": 2}) == '{"a": 1, "b": 2}'
