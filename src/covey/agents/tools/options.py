"""Settings of a built-in tool: the fields of a dataclass, from a mapping that a user wrote."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import fields
from typing import Any, get_type_hints

from covey.agents.tools.values import coerce
from covey.errors import InputError, unknown


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
