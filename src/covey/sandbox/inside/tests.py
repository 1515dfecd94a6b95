"""Hidden tests. The functions they call live in another sandbox; a test sees plain values that came back, and compares
them here. Each result goes to the host at once, through a descriptor that the solution does not have.
"""

from __future__ import annotations

import builtins
import json
import os
from typing import Any, NoReturn

from covey.sandbox.inside import program
from covey.sandbox.inside.values import Unsupported, dumps, loads

LONGEST = 16 * 2**20  # characters of one answer
# What text and sets are asked with yes or no as the answer: an object could agree to all of it.
PREDICATES = frozenset(
    {"startswith", "endswith"} | {name for kind in (str, bytes, set, float) for name in dir(kind) if name[:2] == "is"}
)


class Gone(Exception):
    """The solution's process has ended, or speaks nonsense."""


class SolutionError(Exception):
    """An exception of a type that only the solution knows."""


class Line:
    """Asks and waits for the answer."""

    def __init__(self, calls: int, answers: int) -> None:
        self._calls = os.fdopen(calls, "w", buffering=1, encoding="utf-8")
        self._answers = os.fdopen(answers, encoding="utf-8", errors="replace")

    def answer(self) -> dict[str, Any]:
        try:
            line = self._answers.readline(LONGEST)
        except OSError as error:
            raise Gone(str(error)) from None
        if not line:
            raise Gone("the solution's process ended")
        try:
            found = json.loads(line)
        except (ValueError, RecursionError):
            raise Gone("the solution's process sent no answer of ours, or one that is too long") from None
        if not isinstance(found, dict):
            raise Gone("the solution's process sent no answer of ours")
        return found

    def ask(self, do: str, target: Any, *args: Any) -> Any:
        call = {"do": do, "target": target, "args": dumps(list(args), _reference)}
        try:
            print(json.dumps(call), file=self._calls)
        except OSError:
            raise Gone("the solution's process ended") from None
        found = self.answer()
        if "raised" in found:
            _raise(found["raised"])
        if "unsupported" in found:
            raise Unsupported(f"the solution returned {str(found['unsupported'])[:200]}")
        try:
            return loads(str(found["value"]), self._remote)
        except (KeyError, ValueError):
            raise Gone("the solution's process sent no value of ours") from None

    def _remote(self, reference: Any) -> Remote:
        number, kind = reference
        return Remote(self, int(number), str(kind))


def _reference(value: Any) -> Any:
    if type(value) is Remote and isinstance(value._target, int):
        return value._target
    raise Unsupported(f"a test passes a {type(value).__name__}, which cannot reach the solution")


def _raise(raised: Any) -> NoReturn:
    kind, text = (str(part) for part in raised)
    known = getattr(builtins, kind, None)
    ordinary = isinstance(known, type) and issubclass(known, Exception) and not issubclass(known, UnicodeError)
    if known in (AssertionError, StopIteration) or not ordinary:
        raise SolutionError(f"{kind}: {text}")
    raise known(text)  # type: ignore[misc]


class Remote:
    """Something that stayed in the solution's process: a function, a class, an object. It can be called, read, written
    to and iterated over; it is equal to nothing, because its own opinion on that is worth nothing."""

    __slots__ = ("_kind", "_line", "_target")

    def __init__(self, line: Line, target: Any, kind: str) -> None:
        for name, value in (("_line", line), ("_target", target), ("_kind", kind)):
            object.__setattr__(self, name, value)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self._line.ask("call", self._target, list(args), kwargs)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        if name in PREDICATES:
            raise Unsupported(f"the solution returned a {self._kind}, whose word on {name} is not taken")
        return self._line.ask("get", self._target, name)

    def __setattr__(self, name: str, value: Any) -> None:
        self._line.ask("set", self._target, name, value)

    def __getitem__(self, key: Any) -> Any:
        return self._line.ask("item", self._target, key)

    def __len__(self) -> int:
        return int(self._line.ask("length", self._target))

    def __bool__(self) -> bool:
        return bool(self._line.ask("truth", self._target))

    def __str__(self) -> str:
        return str(self._line.ask("text", self._target))

    def __iter__(self) -> Any:
        iterator = self._line.ask("iterate", self._target)
        while True:
            try:
                value = self._line.ask("next", iterator._target)
            except SolutionError as error:
                if str(error).startswith("StopIteration"):
                    return
                raise
            yield value

    def _incomparable(self, other: object) -> NoReturn:
        raise Unsupported(f"the solution returned a {self._kind}, which cannot be compared outside its process")

    __eq__ = __ne__ = __lt__ = __le__ = __gt__ = __ge__ = _incomparable
    __hash__ = None  # type: ignore[assignment]


def run(request: dict[str, Any]) -> None:
    program.prepare(request)
    line = Line(request["calls"], request["answers"])
    names = [test["name"] for test in request["tests"]]
    try:
        space = _space(request, line)
    except BaseException as error:
        for number in range(len(names)):
            _report(request, number, _reason(error))
        return
    for number, test in enumerate(request["tests"]):
        try:
            exec(compile(test["source"], "<test>", "exec", dont_inherit=True), space)
        except BaseException as error:
            _report(request, number, _reason(error))
        else:
            _report(request, number, "")


def _space(request: dict[str, Any], line: Line) -> dict[str, Any]:
    """The names that tests see: what trusted code defines, and the solution's functions from the other side."""
    first = line.answer()
    if "failed" in first:
        last = str(first["failed"]).strip().splitlines()[-1:]
        raise Gone(f"the solution does not load: {''.join(last)}")
    space: dict[str, Any] = {"__name__": "tests"}
    for name in request["functions"]:
        space[name] = Remote(line, name, "function")
    for source in request["setup"]:
        exec(compile(source, "<setup>", "exec", dont_inherit=True), space)
    for name in request["entry_points"]:  # stronger than what the setup defines: a prompt's stub
        space[name] = Remote(line, name, "function")
    return space


def _reason(error: BaseException) -> str:
    """Why a test did not pass; never empty."""
    if type(error) is AssertionError:
        return f"assertion failed: {error}" if str(error) else "assertion failed"
    if isinstance(error, (Unsupported, Gone, SolutionError)):
        return str(error) or type(error).__name__
    return f"{type(error).__name__}: {error}"


def _report(request: dict[str, Any], number: int, reason: str) -> None:
    message = {"test": number, "passed": not reason, "reason": reason[:500]}
    os.write(request["control"], (json.dumps(message) + "\n").encode())
