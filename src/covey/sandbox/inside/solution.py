"""A solution that answers calls. It runs alone: it sees the arguments of a call, never what is expected of it, and has
no way to the verdict. Whatever it does to this process, it can only answer, or fail to.

A call is one line: {"do": ..., "target": name or reference, "args": ...}. An answer is one line: {"value": ...},
{"raised": [type, text]} or {"unsupported": text}.
"""

from __future__ import annotations

import json
import os
import sys
import types
from collections.abc import Callable
from typing import Any

from covey.sandbox.inside import program
from covey.sandbox.inside.values import Unsupported, dumps, loads


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
        value = DO[call["do"]](target, *loads(call["args"], lambda reference: kept[reference]))
        return json.dumps({"value": dumps(value, refer)})
    except Unsupported as error:
        return json.dumps({"unsupported": str(error)})
    except BaseException as error:  # SystemExit too: a call that exits has not answered
        return json.dumps({"raised": [type(error).__name__, str(error)[:2000]]})


def _named(module: types.ModuleType, name: str) -> Any:
    if name not in module.__dict__:
        raise NameError(f"the solution does not define {name}")
    return module.__dict__[name]


DO: dict[str, Callable[..., Any]] = {
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
