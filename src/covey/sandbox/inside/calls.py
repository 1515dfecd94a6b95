"""The two processes of a hidden test, each in its own sandbox: one answers calls, the other makes them.

The process of the solution (`serve`) receives the arguments of a call, never the expected result, and has no access to
the verdict. Whatever the solution does to its process, it can only answer or fail to answer. The process of the tests
(`run_tests`) gets plain values back and compares them on its own side. Each result goes to the host at once, through a
descriptor that the solution does not have.

A call is one line: {"do": ..., "target": name or reference, "args": ...}. An answer is one line: {"value": ...},
{"raised": [type, text]} or {"unsupported": text}.
"""

from __future__ import annotations

import builtins
import json
import os
import sys
import types
from collections.abc import Callable
from typing import Any, NoReturn

from covey.sandbox.inside import program
from covey.sandbox.inside.values import Unsupported, dumps, loads

# -- The solution ----------------------------------------------------------------------------------------------------


def serve(request: dict[str, Any]) -> None:
    os.close(request["control"])
    program.prepare(request)
    answers = os.fdopen(request["answers"], "w", buffering=1, encoding="utf-8")
    module = types.ModuleType("solution")
    sys.modules["solution"] = module
    path = os.path.join(os.getcwd(), "solution.py")
    with open(path, "w", encoding="utf-8", errors="surrogatepass") as file:
        file.write(request["code"])
    try:
        exec(compile(request["code"], path, "exec", dont_inherit=True), module.__dict__)
    except BaseException as error:
        print(json.dumps({"failed": program.trace(error)[-2000:]}), file=answers)
        return
    print(json.dumps({"loaded": True}), file=answers)
    kept: list[Any] = []
    with open(request["calls"], encoding="utf-8") as calls:
        for line in calls:
            print(_answer(json.loads(line), module, kept), file=answers)


def _answer(call: dict[str, Any], module: types.ModuleType, kept: list[Any]) -> str:
    def refer(value: Any) -> Any:
        kept.append(value)
        return [len(kept) - 1, type(value).__name__]

    try:
        target = _named(module, call["target"]) if isinstance(call["target"], str) else kept[call["target"]]
        value = OPERATIONS[call["do"]](target, *loads(call["args"], lambda reference: kept[reference]))
        return json.dumps({"value": dumps(value, refer)})
    except Unsupported as error:
        return json.dumps({"unsupported": str(error)})
    except BaseException as error:  # SystemExit too: a call that exits did not return a value
        return json.dumps({"raised": [type(error).__name__, str(error)[:2000]]})


def _named(module: types.ModuleType, name: str) -> Any:
    if name not in module.__dict__:
        raise NameError(f"the solution does not define {name}")
    return module.__dict__[name]


OPERATIONS: dict[str, Callable[..., Any]] = {
    "call": lambda target, args, kwargs: target(*args, **kwargs),
    "get": getattr,
    "set": setattr,
    "item": lambda target, key: target[key],
    "length": len,
    "truth": bool,
    "iterate": iter,
    "next": next,
    "text": str,
}


# -- The tests -------------------------------------------------------------------------------------------------------

MAX_ANSWER = 16 * 2**20  # characters of one answer
# Methods of text and sets that return a truth value: an object of the solution could return True from all of them.
PREDICATES = frozenset(
    {"startswith", "endswith"} | {name for kind in (str, bytes, set, float) for name in dir(kind) if name[:2] == "is"}
)


class Gone(Exception):
    """The solution's process has ended, or violates the protocol."""


class SolutionError(Exception):
    """An exception of a type defined by the solution."""


class Client:
    """Sends calls to the solution's process and waits for the answers."""

    def __init__(self, calls: int, answers: int) -> None:
        self._calls = os.fdopen(calls, "w", buffering=1, encoding="utf-8")
        self._answers = os.fdopen(answers, encoding="utf-8", errors="replace")

    def answer(self) -> dict[str, Any]:
        try:
            line = self._answers.readline(MAX_ANSWER)
        except OSError as error:
            raise Gone(str(error)) from None
        if not line:
            raise Gone("the solution's process ended")
        try:
            message = json.loads(line)
        except (ValueError, RecursionError):
            raise Gone("the solution's process sent an invalid answer, or one that is too long") from None
        if not isinstance(message, dict):
            raise Gone("the solution's process sent an invalid answer")
        return message

    def call(self, do: str, target: Any, *args: Any) -> Any:
        message = {"do": do, "target": target, "args": dumps(list(args), _reference)}
        try:
            print(json.dumps(message), file=self._calls)
        except OSError:
            raise Gone("the solution's process ended") from None
        answer = self.answer()
        if "raised" in answer:
            _raise(answer["raised"])
        if "unsupported" in answer:
            raise Unsupported(f"the solution returned {str(answer['unsupported'])[:200]}")
        try:
            return loads(str(answer["value"]), self._remote)
        except (KeyError, ValueError):
            raise Gone("the solution's process sent an invalid value") from None

    def _remote(self, reference: Any) -> Remote:
        number, kind = reference
        return Remote(self, int(number), str(kind))


def _reference(value: Any) -> Any:
    if type(value) is Remote and isinstance(value._target, int):
        return value._target
    raise Unsupported(f"a test passes a {type(value).__name__}, which cannot be passed to the solution")


def _raise(raised: Any) -> NoReturn:
    kind, text = (str(part) for part in raised)
    known = getattr(builtins, kind, None)
    ordinary = isinstance(known, type) and issubclass(known, Exception) and not issubclass(known, UnicodeError)
    if known in (AssertionError, StopIteration) or not ordinary:
        raise SolutionError(f"{kind}: {text}")
    raise known(text)  # type: ignore[misc]


class Remote:
    """A function, class or object that stayed in the solution's process. It can be called, read, written to and
    iterated over. Comparing it raises Unsupported: the solution's own answer to a comparison cannot be trusted."""

    __slots__ = ("_client", "_kind", "_target")

    def __init__(self, client: Client, target: Any, kind: str) -> None:
        for name, value in (("_client", client), ("_target", target), ("_kind", kind)):
            object.__setattr__(self, name, value)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self._client.call("call", self._target, list(args), kwargs)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        if name in PREDICATES:
            raise Unsupported(f"the solution returned a {self._kind}, whose own {name} is not trusted")
        return self._client.call("get", self._target, name)

    def __setattr__(self, name: str, value: Any) -> None:
        self._client.call("set", self._target, name, value)

    def __getitem__(self, key: Any) -> Any:
        return self._client.call("item", self._target, key)

    def __len__(self) -> int:
        return int(self._client.call("length", self._target))

    def __bool__(self) -> bool:
        return bool(self._client.call("truth", self._target))

    def __str__(self) -> str:
        return str(self._client.call("text", self._target))

    def __iter__(self) -> Any:
        iterator = self._client.call("iterate", self._target)
        while True:
            try:
                value = self._client.call("next", iterator._target)
            except SolutionError as error:
                if str(error).startswith("StopIteration"):
                    return
                raise
            yield value

    def _incomparable(self, other: object) -> NoReturn:
        raise Unsupported(f"the solution returned a {self._kind}, which cannot be compared outside its process")

    __eq__ = __ne__ = __lt__ = __le__ = __gt__ = __ge__ = _incomparable
    __hash__ = None  # type: ignore[assignment]


def run_tests(request: dict[str, Any]) -> None:
    program.prepare(request)
    client = Client(request["calls"], request["answers"])
    names = [test["name"] for test in request["tests"]]
    try:
        space = _namespace(request, client)
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


def _namespace(request: dict[str, Any], client: Client) -> dict[str, Any]:
    """The names that tests see: definitions of trusted code, and remote references to the solution's functions."""
    first = client.answer()
    if "failed" in first:
        last = str(first["failed"]).strip().splitlines()[-1:]
        raise Gone(f"the solution does not load: {''.join(last)}")
    space: dict[str, Any] = {"__name__": "tests"}
    for name in request["functions"]:
        space[name] = Remote(client, name, "function")
    for source in request["setup"]:
        exec(compile(source, "<setup>", "exec", dont_inherit=True), space)
    for name in request["entry_points"]:  # replaces the stub that a prompt's setup defines
        space[name] = Remote(client, name, "function")
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
