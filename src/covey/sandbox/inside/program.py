"""Runs one program as a script, or a session: cells that share a namespace, as in a notebook."""

from __future__ import annotations

import builtins
import itertools
import os
import sys

TYPE_CHECKING = False  # see isolation.py
if TYPE_CHECKING:
    from typing import Any

PACKAGE_FILES = "<sandbox>"  # file names of this package's modules in a sandbox (tiers.py)


def run(request: dict[str, Any]) -> None:
    os.close(request["control"])
    space = _main(request)
    path = os.path.join(os.getcwd(), "main.py")
    with open(path, "w", encoding="utf-8", errors="surrogatepass") as file:
        file.write(request["code"])
    space["__file__"] = path
    sys.argv[:] = [path]
    try:
        exec(compile(request["code"], path, "exec", dont_inherit=True), space)
    except SystemExit:
        raise
    except BaseException as error:
        show(error)
        sys.exit(1)


def session(request: dict[str, Any]) -> None:
    """Runs a cell, writes its exit code for the keeper and stops itself; the keeper wakes it for the next cell."""
    import json
    import signal

    os.close(request["control"])
    space = _main(request)
    me, code = os.getpid(), 0
    with open(request["commands"], encoding="utf-8") as commands:
        for number in itertools.count(1):
            os.write(request["codes"], bytes([code & 0xFF]))
            os.kill(me, signal.SIGSTOP)
            if not (line := commands.readline()):
                return
            code = _cell(json.loads(line)["code"], f"<cell {number}>", space)
            for stream in (sys.stdout, sys.stderr):
                try:
                    stream.flush()
                except Exception:  # noqa: S112 - the program closed or replaced the stream
                    continue
            if os.getpid() != me:  # a child forked by the cell: not the session
                os._exit(code & 0xFF)


def _cell(source: str, name: str, space: dict[str, Any]) -> int:
    import ast
    import linecache

    linecache.cache[name] = (len(source), None, source.splitlines(True), name)  # for tracebacks
    try:
        tree = ast.parse(source, name)
        last = tree.body.pop() if tree.body and isinstance(tree.body[-1], ast.Expr) else None
        exec(compile(tree, name, "exec", dont_inherit=True), space)
        if isinstance(last, ast.Expr):
            value = eval(compile(ast.Expression(last.value), name, "eval", dont_inherit=True), space)
            if value is not None:
                print(repr(value))
    except SystemExit as error:
        return error.code if isinstance(error.code, int) else int(error.code is not None)
    except BaseException as error:
        show(error)
        return 1
    return 0


def _main(request: dict[str, Any]) -> dict[str, Any]:
    """Write the files of the request and return the namespace of a new __main__."""
    for name, text in request["files"].items():
        if folder := os.path.dirname(name):
            os.makedirs(folder, exist_ok=True)
        with open(name, "w", encoding="utf-8", errors="surrogatepass") as file:
            file.write(text)
    prepare(request)
    module = type(sys)("__main__")
    sys.modules["__main__"] = module
    return module.__dict__


def prepare(request: dict[str, Any]) -> None:
    """Before any role runs untrusted code: the import path, line buffering, and the names that site.py would define."""
    sys.path[:] = [os.getcwd(), *sys.path, *request["folders"]]
    for stream in (sys.stdout, sys.stderr):
        stream.reconfigure(line_buffering=True, errors="backslashreplace")  # type: ignore[union-attr]
    builtins.exit = builtins.quit = sys.exit  # type: ignore[assignment]


def show(error: BaseException) -> None:
    """Print the traceback, without the frames of this package."""
    print(trace(error), end="", file=sys.stderr)


def trace(error: BaseException) -> str:
    import traceback

    frames = error.__traceback__
    while frames is not None and frames.tb_frame.f_code.co_filename.startswith(PACKAGE_FILES):
        frames = frames.tb_next
    try:
        return "".join(traceback.format_exception(type(error), error, frames))
    except Exception:  # an exception of the program that cannot be printed
        return f"{type(error).__name__}\n"
