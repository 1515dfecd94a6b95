"""Hidden tests of a code reward, in the three shapes that data sets have.

    Asserts    statements that call functions of the solution: MBPP
    Function   a prompt, an entry point and a test that defines check(candidate): HumanEval
    Cases      what a program reads and what it must print

The solution and the tests run in two sandboxes. The solution only answers calls: it is told arguments, never what is
expected, and it holds no descriptor that a verdict travels on. Tests compare plain values on their own side. So it
gains nothing by printing, exiting, patching asserts or builtins, searching memory and stack, or returning objects that
are equal to everything. Of stdin/stdout cases the expected output never enters a sandbox at all.

What cannot be tested this way is counted as failed, with the reason: comparing objects of the solution's own classes,
passing functions of the tests to the solution, and changes that it makes to its arguments (it gets copies).
"""

from __future__ import annotations

import ast
import asyncio
import builtins
import os
import sys
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

from covey.errors import InputError
from covey.sandbox.outcome import SandboxError, TestResult, Verdict

if TYPE_CHECKING:
    from covey.sandbox.process import Process
    from covey.sandbox.sandbox import Sandbox

BUILTINS = frozenset(dir(builtins))


class Tests(Protocol):
    async def judge(self, sandbox: Sandbox, solution: str) -> Verdict: ...


@dataclass(frozen=True)
class Asserts:
    tests: tuple[str, ...]
    setup: str = ""  # runs before the tests, on their side
    functions: tuple[str, ...] | None = None  # names that the solution gives; None: found in the tests

    async def judge(self, sandbox: Sandbox, solution: str) -> Verdict:
        functions = self.functions if self.functions is not None else given_names(self.tests, self.setup)
        meant = used_as_modules(self.tests, self.setup)
        modules = [name for name in functions if name in meant]
        setup = [f"import {name}" for name in modules] + [self.setup]
        named = [{"name": test.strip(), "source": test} for test in self.tests]
        theirs = [name for name in functions if name not in modules]
        return await _judge(sandbox, solution, named, setup, theirs, [])


@dataclass(frozen=True)
class Function:
    prompt: str  # imports, helpers, and the head of the function
    entry_point: str
    test: str  # defines check(candidate)

    async def judge(self, sandbox: Sandbox, solution: str) -> Verdict:
        """`solution` is the whole function, or only what continues the prompt."""
        whole = f"{self.prompt}\n\n{solution}" if _defines(solution, self.entry_point) else self.prompt + solution
        named = [{"name": f"check({self.entry_point})", "source": f"check({self.entry_point})"}]
        # Helpers come from the prompt, on the tests' side too: the solution's own versions are not asked.
        return await _judge(sandbox, whole, named, [self.prompt, self.test], [], [self.entry_point])


@dataclass(frozen=True)
class Cases:
    cases: tuple[tuple[str, str], ...]  # input, output

    async def judge(self, sandbox: Sandbox, solution: str) -> Verdict:
        return Verdict.of(
            list(await asyncio.gather(*(self._case(sandbox, solution, *case) for case in enumerate(self.cases))))
        )

    async def _case(self, sandbox: Sandbox, solution: str, number: int, case: tuple[str, str]) -> TestResult:
        given, expected = case
        # A right answer must fit, with as many blanks again, which do not count.
        room = max(sandbox.limits.output_bytes, 2 * len(expected.encode("utf-8", errors="surrogatepass")) + 1024)
        outcome = await sandbox.within(None, output_bytes=room).run(solution, stdin=given)
        name = f"case {number + 1}"
        if outcome.killed:
            return TestResult(name, False, f"killed: {outcome.killed}")
        if outcome.exit_code != 0:
            last = outcome.stderr.strip().splitlines()[-1:]
            return TestResult(name, False, f"exit code {outcome.exit_code}: {''.join(last)}")
        same = _lines(outcome.stdout) == _lines(expected)
        return TestResult(name, same, "" if same else "printed something else")


def hidden_tests(columns: Mapping[str, Any]) -> Tests:
    """The tests in a row of data: MBPP's and HumanEval's columns, or `cases` / `tests` with input and output."""
    if "test" in columns and "entry_point" in columns:
        return Function(str(columns.get("prompt", "")), str(columns["entry_point"]), str(columns["test"]))
    if _is_list(columns.get("test_list")) and _is_list(columns.get("test_imports") or ()):
        imports = columns.get("test_imports") or ()
        setup = "\n".join([*map(str, imports), str(columns.get("test_setup_code") or "")])
        return Asserts(tuple(map(str, columns["test_list"])), setup)
    for name in ("cases", "tests"):
        found = columns.get(name)
        if isinstance(found, Sequence) and found and all(map(_is_case, found)):
            return Cases(tuple((str(case["input"]), str(case["output"])) for case in found))
    raise InputError(
        f"no tests in a row with the columns {', '.join(sorted(columns))}\n"
        "  a code reward reads  test_list (and test_imports, test_setup_code), or\n"
        '  prompt + entry_point + test, or  cases = [{"input": ..., "output": ...}]'
    )


def _is_list(found: Any) -> bool:
    return isinstance(found, Sequence) and not isinstance(found, str)


def _is_case(found: Any) -> bool:
    return isinstance(found, Mapping) and {"input", "output"} <= set(found)


# -- solution and tests, each in a sandbox of its own ----------------------------------------------------------------


async def _judge(
    sandbox: Sandbox,
    solution: str,
    tests: list[dict[str, str]],
    setup: list[str],
    functions: list[str],
    entry_points: list[str],
) -> Verdict:
    trusted = {"role": "tests", "tests": tests, "setup": setup, "functions": functions, "entry_points": entry_points}
    async with sandbox.gate:
        processes: list[Process] = []
        files: list[int] = []
        try:
            try:
                for _ in range(2):
                    files += os.pipe()
                call_reader, call_writer, answer_reader, answer_writer = files
                ends = {"calls": call_reader, "answers": answer_writer}
                other = {"calls": call_writer, "answers": answer_reader}
                for request, mine in (({"role": "solution", "code": solution}, ends), (trusted, other)):
                    options = {"capture": False, "pass_fds": tuple(mine.values())}
                    processes.append(sandbox.process({**request, **mine}, **options))
            except OSError as error:  # too many open files
                raise SandboxError(f"no pipe between two sandboxes: {error}") from error
            finally:
                for file in files:
                    os.close(file)
            await asyncio.gather(*(process.ready() for process in processes))
            return await _listen(processes[1], [test["name"] for test in tests], sandbox.limits.seconds)
        finally:
            for process in processes:
                process.close()


async def _listen(process: Any, names: list[str], seconds: float) -> Verdict:
    """Whatever ends the tests before a test has passed, that test has failed. It is never called our failure: a
    solution could bring that about, and be spared the judgement."""
    found: dict[int, TestResult] = {}
    timer = asyncio.get_running_loop().call_later(seconds, process.kill, "deadline")
    try:
        while len(found) < len(names) and (message := await process.message()) is not None:
            if "killed" in message:
                process.killed = str(message["killed"])
            else:
                number = message["test"]
                found[number] = TestResult(names[number], message["passed"], message["reason"])
    finally:
        timer.cancel()
    missing = {"deadline": f"not done after {seconds:g} s", None: "the tests' process ended"}
    reason = missing.get(process.killed, f"killed: {process.killed}")
    return Verdict.of([found.get(number, TestResult(name, False, reason)) for number, name in enumerate(names)])


# -- reading tests ---------------------------------------------------------------------------------------------------


def given_names(tests: Sequence[str], setup: str) -> tuple[str, ...]:
    """The names that tests use and nobody on their side defines: those are the solution's to give.

    A builtin stays what it is: a solution that defines `set` does not change how tests compare. Only where tests
    call nothing else, the function in question bears a builtin's name (`sum` in MBPP), and the outermost call is it."""
    trees = [_parsed(text) for text in (*tests, setup)]
    nodes = [node for tree in trees for node in ast.walk(tree)]
    used = {node.id for node in nodes if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Load)}
    free = used - BUILTINS - _defined(nodes)
    if free:
        return tuple(sorted(free))
    for node in (node for tree in trees for node in ast.walk(tree)):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name):
            return (node.func.id,)
    return ()


def used_as_modules(tests: Sequence[str], setup: str) -> set[str]:
    """Names of the standard library that tests read something from and never call: a solution's own function may be
    called `copy` or `bisect`."""
    nodes = [node for text in (*tests, setup) for node in ast.walk(_parsed(text))]
    read = {node.value.id for node in nodes if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name)}
    called = {node.func.id for node in nodes if isinstance(node, ast.Call) and isinstance(node.func, ast.Name)}
    return (read - called) & sys.stdlib_module_names


def _defined(nodes: Sequence[ast.AST]) -> set[str]:
    found: set[str] = set()
    for node in nodes:
        match node:
            case ast.Name(id=name, ctx=ast.Store()) | ast.arg(arg=name):
                found.add(name)
            case ast.FunctionDef(name=name) | ast.AsyncFunctionDef(name=name) | ast.ClassDef(name=name):
                found.add(name)
            case ast.alias(name=name, asname=other):
                found.add(other or name.partition(".")[0])
            case ast.ExceptHandler(name=str(name)):
                found.add(name)
    return found


def _parsed(text: str) -> ast.Module:
    try:
        with warnings.catch_warnings(action="ignore", category=SyntaxWarning):
            return ast.parse(text)
    except (SyntaxError, ValueError, RecursionError, MemoryError) as error:  # a zero byte; nested too deeply
        why = error.msg if isinstance(error, SyntaxError) else str(error) or "nested too deeply"
        raise InputError(f"a hidden test is not Python: {why}\n  {text[:200]!r}") from None


def _defines(source: str, name: str) -> bool:
    try:
        with warnings.catch_warnings(action="ignore", category=SyntaxWarning):  # of a model's code: no line is worth it
            tree = ast.parse(source)
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return False
    functions = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)
    return any(
        (isinstance(node, functions) and node.name == name)
        or (isinstance(node, ast.Assign) and any(isinstance(t, ast.Name) and t.id == name for t in node.targets))
        for node in tree.body
    )


def _lines(text: str) -> list[str]:
    """Without blanks at the ends of lines, nor blank lines at the end."""
    return [line.rstrip() for line in text.rstrip().splitlines()]
