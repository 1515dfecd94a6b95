"""Types of a tool's parameters: their JSON schema, and conversion of the values that a model writes.

Models write JSON with wrong types: "3" for an integer, a list inside a string. A value with only one possible meaning
is converted; any other raises a `ValueError` that says what was expected.
"""

from __future__ import annotations

import inspect
import json
import math
import types
from collections.abc import Mapping, Sequence
from enum import Enum
from typing import Annotated, Any, Literal, Union, get_args, get_origin

from covey.errors import InputError

SIMPLE = {str: "string", int: "integer", float: "number", bool: "boolean", types.NoneType: "null"}
LISTS = (list, Sequence)
DICTS = (dict, Mapping)
SUPPORTED = "str, int, float, bool, list, dict, Literal, Enum, X | None, Any"


def schema_of(annotation: Any) -> dict[str, Any]:
    """JSON schema of an annotation. `InputError` for a type that a model cannot write."""
    origin, arguments = get_origin(annotation), get_args(annotation)
    if annotation is Any:
        return {}
    if annotation in SIMPLE:
        return {"type": SIMPLE[annotation]}
    if origin is Annotated:
        return schema_of(arguments[0])
    if origin is Literal:
        return _choice(list(arguments))
    if origin in (Union, types.UnionType):
        return _union([schema_of(member) for member in arguments])
    if annotation in LISTS or origin in LISTS:
        return {"type": "array", "items": schema_of(arguments[0]) if arguments else {}}
    if annotation in DICTS or origin in DICTS:
        values = schema_of(arguments[1]) if arguments else {}
        return {"type": "object"} | ({"additionalProperties": values} if values else {})
    if _is_enum(annotation):
        return _choice(_enum_values(annotation))
    raise InputError(f"its type {_name(annotation)} cannot be written by a model\n  fix: use {SUPPORTED}")


def _choice(values: list[Any]) -> dict[str, Any]:
    if any(type(value) not in SIMPLE for value in values):
        raise InputError(f"the choice {values!r} has values that JSON does not have")
    kinds = list(dict.fromkeys(SIMPLE[type(value)] for value in values))
    return {"type": kinds[0] if len(kinds) == 1 else kinds, "enum": values}


def _union(members: list[dict[str, Any]]) -> dict[str, Any]:
    if all(list(member) == ["type"] and isinstance(member["type"], str) for member in members):
        kinds = list(dict.fromkeys(member["type"] for member in members))
        return {"type": kinds[0] if len(kinds) == 1 else kinds}
    return {"anyOf": members}


def _is_enum(annotation: Any) -> bool:
    return inspect.isclass(annotation) and issubclass(annotation, Enum)


def _enum_values(kind: type[Enum]) -> list[Any]:
    """The values of the members, or their names if some value is not JSON."""
    values = [member.value for member in kind]
    return values if all(type(value) in SIMPLE for value in values) else [member.name for member in kind]


def _name(annotation: Any) -> str:
    return annotation.__name__ if inspect.isclass(annotation) else str(annotation)


def coerce(annotation: Any, value: Any) -> Any:
    """`value` converted to the annotation's type, or `ValueError`."""
    origin, arguments = get_origin(annotation), get_args(annotation)
    if annotation is Any:
        return value
    if annotation in SIMPLE:
        return _SIMPLE[annotation](value)
    if origin is Annotated:
        return coerce(arguments[0], value)
    if origin is Literal:
        return _choose(list(arguments), value)
    if origin in (Union, types.UnionType):
        return _one_of(arguments, value)
    if annotation in LISTS or origin in LISTS:
        return [_item(n, arguments[0] if arguments else Any, v) for n, v in enumerate(_container(list, value))]
    if annotation in DICTS or origin in DICTS:
        key, kind = arguments or (Any, Any)
        return {coerce(key, k): _item(repr(k), kind, v) for k, v in _container(dict, value).items()}
    assert _is_enum(annotation), annotation  # schema_of refuses everything else
    values = _enum_values(annotation)
    try:
        return list(annotation)[values.index(_choose(values, value))]
    except ValueError:
        if isinstance(value, str) and value in annotation.__members__:
            return annotation[value]
        raise


def plain(value: Any) -> Any:
    """`value` as JSON: a member of an Enum becomes the value that a model writes for it."""
    if isinstance(value, Enum):
        return _enum_values(type(value))[list(type(value)).index(value)]
    if isinstance(value, list):
        return [plain(item) for item in value]
    if isinstance(value, dict):
        return {plain(key): plain(item) for key, item in value.items()}
    return value


def _text(value: Any) -> str:
    if isinstance(value, str):
        return value
    if isinstance(value, (bool, int, float)):
        return json.dumps(value)
    raise ValueError(f"must be a string, got {_shown(value)}")


def _integer(value: Any) -> int:
    number = _number(value, "an integer")
    if number != int(number):
        raise ValueError(f"must be an integer, got {_shown(value)}")
    return int(number)


def _float(value: Any) -> float:
    try:
        return float(_number(value, "a number"))
    except OverflowError:
        raise ValueError("must be a number of reasonable size") from None


def _number(value: Any, expected: str) -> int | float:
    if isinstance(value, str):
        for read in (int, float):
            try:
                value = read(value)
                break
            except ValueError:
                pass
    is_number = isinstance(value, (int, float)) and not isinstance(value, bool)
    if not is_number or (isinstance(value, float) and not math.isfinite(value)):
        raise ValueError(f"must be {expected}, got {_shown(value)}")
    return value


def _boolean(value: Any) -> bool:
    word = value.strip().lower() if isinstance(value, str) else value
    if word in (True, "true", "1"):  # 1 and 1.0 equal True
        return True
    if word in (False, "false", "0"):
        return False
    raise ValueError(f"must be true or false, got {_shown(value)}")


def _null(value: Any) -> None:
    if value is not None and not (isinstance(value, str) and value.strip().lower() in ("null", "none")):
        raise ValueError(f"must be null, got {_shown(value)}")


_SIMPLE: dict[Any, Any] = {str: _text, int: _integer, float: _float, bool: _boolean, types.NoneType: _null}


def _container(kind: type, value: Any) -> Any:
    """A list or a dict, or one written as JSON in a string."""
    expected = "a list" if kind is list else "an object"
    parsed = value
    if isinstance(value, str):
        try:
            parsed = json.loads(value)
        except (ValueError, RecursionError):
            raise ValueError(f"must be {expected}, got {_shown(value)}") from None
    if not isinstance(parsed, kind):
        raise ValueError(f"must be {expected}, got {_shown(value)}")
    return parsed


def _item(place: Any, kind: Any, value: Any) -> Any:
    try:
        return coerce(kind, value)
    except ValueError as error:
        raise ValueError(f"[{place}] {error}") from None


def _choose(options: list[Any], value: Any) -> Any:
    for option in options:
        if type(option) is type(value) and option == value:
            return option
    written = value.strip() if isinstance(value, str) else json.dumps(value, default=str)
    for normalise in (str.__str__, str.casefold):
        for option in options:
            if normalise(_text_of(option)) == normalise(written):
                return option
    raise ValueError(f"must be one of {', '.join(json.dumps(option) for option in options)}, got {_shown(value)}")


def _text_of(option: Any) -> str:
    return option if isinstance(option, str) else json.dumps(option)


def _one_of(members: tuple[Any, ...], value: Any) -> Any:
    """Convert to the first member of a union that accepts the value; members of the value's own type come first."""
    problems = []
    for member in sorted(members, key=lambda member: type(value) is not (get_origin(member) or member)):
        try:
            return coerce(member, value)
        except ValueError as error:
            problems.append(str(error))
    expected = dict.fromkeys(problem.split(", got ")[0] for problem in problems)
    raise ValueError(f"{' or '.join(expected)}, got {_shown(value)}")


def _shown(value: Any) -> str:
    text = json.dumps(value, default=str, ensure_ascii=False) if not isinstance(value, float) else str(value)
    return text if len(text) <= 60 else text[:57] + "..."
