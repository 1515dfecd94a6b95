"""Serializes plain values as JSON text.

Decoding always gives a genuine value of a known type, whatever the other process sent: an object with an `__eq__` of
its own cannot pass. Subclasses become their base type (a namedtuple becomes a tuple). Every other object stays in its
process and is sent as a reference.
"""

from __future__ import annotations

import json
import math
from collections import Counter, OrderedDict, deque
from collections.abc import Callable
from datetime import date, datetime, time, timedelta
from decimal import Decimal
from fractions import Fraction
from typing import Any

TAG = "$"
TYPES = {
    kind.__name__: kind
    for kind in (bool, int, float, complex, str, bytes, list, tuple, dict, set, frozenset, type(None), object, range)
}  # the only types that can be sent as values themselves
COLLECTIONS: tuple[Any, ...] = (list, tuple, set, frozenset, deque)
LARGE = 2**63  # larger integers are sent in hexadecimal: Python limits the number of decimal digits it parses


class Unsupported(Exception):
    """A value that cannot be sent."""


def dumps(value: Any, refer: Callable[[Any], Any]) -> str:
    """`refer` returns a reference to a value that cannot be sent, or raises Unsupported."""
    try:
        return json.dumps(_encode(value, refer))
    except RecursionError:
        raise Unsupported("a value nested too deeply, or in itself") from None


def loads(text: str, resolve: Callable[[Any], Any]) -> Any:
    """`resolve` turns a reference into an object. ValueError if `dumps` did not write the text."""
    try:
        return _decode(json.loads(text), resolve)
    except (KeyError, TypeError, AttributeError, RecursionError, ArithmeticError) as error:
        raise ValueError(f"not a value: {type(error).__name__}") from None


def _encode(value: Any, refer: Callable[[Any], Any]) -> Any:
    def many(values: Any) -> list[Any]:
        return [_encode(item, refer) for item in values]

    if value is None or value is True or value is False:
        return value
    if isinstance(value, int):
        number = int.__index__(value)
        return number if abs(number) < LARGE else {TAG: "int", "v": hex(number)}
    if isinstance(value, float):
        real = float.__float__(value)
        return real if math.isfinite(real) else {TAG: "float", "v": float.__repr__(real)}
    if isinstance(value, str):
        return str.__str__(value)
    if type(value) is list:
        return many(value)
    for kind in (Counter, OrderedDict, dict):
        if isinstance(value, kind):
            pairs = [[_encode(key, refer), _encode(item, refer)] for key, item in dict.items(value)]
            return {TAG: kind.__name__, "v": pairs}
    for sequence in COLLECTIONS:
        if isinstance(value, sequence):
            return {TAG: sequence.__name__, "v": many(sequence.__iter__(value))}
    if type(value) in (bytes, bytearray):
        return {TAG: type(value).__name__, "v": value.hex()}
    if type(value) is complex:
        return {TAG: "complex", "v": many((value.real, value.imag))}
    if type(value) is range:
        return {TAG: "range", "v": many((value.start, value.stop, value.step))}
    if type(value) in (Decimal, Fraction):
        return {TAG: type(value).__name__, "v": str(value)}
    if type(value) in (datetime, date, time) and getattr(value, "tzinfo", None) is None:
        return {TAG: type(value).__name__, "v": value.isoformat()}
    if type(value) is timedelta:
        return {TAG: "timedelta", "v": [value.days, value.seconds, value.microseconds]}
    if any(value is kind for kind in TYPES.values()):
        return {TAG: "type", "v": value.__name__}
    return {TAG: "reference", "v": refer(value)}


MAKE: dict[str, Callable[[Any], Any]] = {
    "int": lambda text: int(text, 16),
    "float": float,
    "list": list,
    "tuple": tuple,
    "set": set,
    "frozenset": frozenset,
    "deque": deque,
    "complex": lambda parts: complex(*parts),
    "range": lambda parts: range(*parts),
    "bytes": bytes.fromhex,
    "bytearray": bytearray.fromhex,
    "Decimal": Decimal,
    "Fraction": Fraction,
    "datetime": datetime.fromisoformat,
    "date": date.fromisoformat,
    "time": time.fromisoformat,
    "type": lambda name: TYPES[name],
    "timedelta": lambda parts: timedelta(*parts),
}
MAPPINGS = {"dict": dict, "Counter": Counter, "OrderedDict": OrderedDict}


def _decode(value: Any, resolve: Callable[[Any], Any]) -> Any:
    if isinstance(value, list):
        return [_decode(item, resolve) for item in value]
    if not isinstance(value, dict):
        return value
    tag, content = value[TAG], value["v"]
    if tag == "reference":
        return resolve(content)
    if tag in MAPPINGS:
        pairs = {_decode(key, resolve): _decode(item, resolve) for key, item in content}
        return MAPPINGS[tag](pairs)
    return MAKE[tag](_decode(content, resolve) if isinstance(content, list) else str(content))
