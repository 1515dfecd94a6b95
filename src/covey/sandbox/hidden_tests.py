"""Hidden tests of a code reward, in the three formats that data sets have.

    Asserts    statements that call functions of the solution: MBPP
    Function   a prompt, an entry point and a test that defines check(candidate): HumanEval
    Cases      stdin and the expected stdout of a program

The solution and the tests run in two sandboxes. The solution only answers calls: it receives the arguments, never the
expected value, and has no descriptor that reports a verdict. The tests compare plain values in their own process. So
the solution gains nothing by printing, exiting, patching asserts or builtins, searching memory and stack, or returning
objects that are equal to everything. The expected output of `Cases` never enters a sandbox.

Tests that need more than that fail, with the reason: comparing objects of the solution's own classes, passing functions
of the tests to the solution, and reading changes that it makes to its arguments (it gets copies).
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
from covey.sandbox.process import SandboxError

if TYPE_CHECKING:
    from covey.sandbox.process import Process
    from covey.sandbox.sandbox import Sandbox

BUILTINS = frozenset(dir(builtins))


@dataclass(frozen=True)
class TestResult:
    __test__ = False  # not collected by pytest

    name: str
    passed: bool
    reason: str = ""  # why it failed


@dataclass(frozen=True)
class Verdict:
    passed: int
    total: int
    detail: tuple[TestResult, ...]

    @classmethod
    def of(cls, results: list[TestResult]) -> Verdict:
        return cls(sum(result.passed for result in results), len(results), tuple(results))


class Tests(Protocol):
    async def judge(self, sandbox: Sandbox, solution: str) -> Verdict: ...


@dataclass(frozen=True)
class Asserts:
    tests: tuple[str, ...]
    setup: str = ""  # runs before the tests, in their process
    functions: tuple[str, ...] | None = None  # names that the solution defines; None: found in the tests

    async def judge(self, sandbox: Sandbox, solution: str) -> Verdict:
        functions = self.functions if self.functions is not None else solution_names(self.tests, self.setup)
        used = used_as_modules(self.tests, self.setup)
        modules = [name for name in functions if name in used]
        setup = [f"import {name}" for name in modules] + [self.setup]
        named = [{"name": test.strip(), "source": test} for test in self.tests]
        remote = [name for name in functions if name not in modules]
        return await _judge(sandbox, solution, named, setup, remote, [])


@dataclass(frozen=True)
class Function:
    prompt: str  # imports, helpers, and the head of the function
    entry_point: str
    test: str  # defines check(candidate)

    async def judge(self, sandbox: Sandbox, solution: str) -> Verdict:
        """`solution` is the whole function, or a continuation of the prompt."""
        whole = f"{self.prompt}\n\n{solution}" if _defines(solution, self.entry_point) else self.prompt + solution
        named = [{"name": f"check({self.entry_point})", "source": f"check({self.entry_point})"}]
        # Tests use the prompt's own helpers, never the solution's versions of them.
        return await _judge(sandbox, whole, named, [self.prompt, self.test], [], [self.entry_point])


@dataclass(frozen=True)
class Cases:
    cases: tuple[tuple[str, str], ...]  # (stdin, expected stdout)

    async def judge(self, sandbox: Sandbox, solution: str) -> Verdict:
        return Verdict.of(
            list(await asyncio.gather(*(self._case(sandbox, solution, *case) for case in enumerate(self.cases))))
        )

    async def _case(self, sandbox: Sandbox, solution: str, number: int, case: tuple[str, str]) -> TestResult:
        stdin, expected = case
        # The correct output must fit, with the same amount of whitespace on top, which does not count.
        output_bytes = max(
            sandbox.limits.output_bytes, 2 * len(expected.encode("utf-8", errors="surrogatepass")) + 1024
        )
        outcome = await sandbox.within(None, output_bytes=output_bytes).run(solution, stdin=stdin)
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
        cases = columns.get(name)
        if isinstance(cases, Sequence) and cases and all(map(_is_case, cases)):
            return Cases(tuple((str(case["input"]), str(case["output"])) for case in cases))
    raise InputError(
        f"no tests in a row with the columns {', '.join(sorted(columns))}\n"
        "  a code reward reads  test_list (and test_imports, test_setup_code), or\n"
        '  prompt + entry_point + test, or  cases = [{"input": ..., "output": ...}]'
    )


def _is_list(value: Any) -> bool:
    return isinstance(value, Sequence) and not isinstance(value, str)


def _is_case(value: Any) -> bool:
    return isinstance(value, Mapping) and {"input", "output"} <= set(value)


# -- Running the solution and the tests, each in its own sandbox -----------------------------------------------------


async def _judge(
    sandbox: Sandbox,
    solution: str,
    tests: list[dict[str, str]],
    setup: list[str],
    functions: list[str],
    entry_points: list[str],
) -> Verdict:
    trusted: dict[str, Any] = {
        "role": "tests",
        "tests": tests,
        "setup": setup,
        "functions": functions,
        "entry_points": entry_points,
    }
    async with sandbox.gate:
        processes: list[Process] = []
        files: list[int] = []
        try:
            try:
                for _ in range(2):
                    files += os.pipe()
                call_reader, call_writer, answer_reader, answer_writer = files
                untrusted = {"role": "solution", "code": solution, "calls": call_reader, "answers": answer_writer}
                trusted |= {"calls": call_writer, "answers": answer_reader}
                for request in (untrusted, trusted):
                    descriptors = (request["calls"], request["answers"])
                    processes.append(sandbox.process(request, capture=False, pass_fds=descriptors))
            except OSError as error:  # too many open files
                raise SandboxError(f"no pipe between the two sandboxes: {error}") from error
            finally:
                for file in files:
                    os.close(file)
            await asyncio.gather(*(process.ready() for process in processes))
            return await _results(processes[1], [test["name"] for test in tests], sandbox.limits.seconds)
        finally:
            for process in processes:
                process.close()


async def _results(process: Process, names: list[str], seconds: float) -> Verdict:
    """A test without a result has failed, whatever ended the process. It is never counted as a failure of the
    infrastructure: a solution could cause that to avoid its verdict."""
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


# -- Reading tests ---------------------------------------------------------------------------------------------------


def solution_names(tests: Sequence[str], setup: str) -> tuple[str, ...]:
    """The names that tests use and that neither they nor their setup define: the solution has to define them.

    Builtins are not replaced: a solution that defines `set` does not change how tests compare. Only if the tests use no
    other name, the tested function has a builtin's name (`sum` in MBPP), and it is the outermost call."""
    trees = [_parsed(text) for text in (*tests, setup)]
    nodes = [node for tree in trees for node in ast.walk(tree)]
    used = {node.id for node in nodes if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Load)}
    free = used - BUILTINS - _defined(nodes)
    if free:
        return tuple(sorted(free))
    for node in nodes:
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name):
            return (node.func.id,)
    return ()


def used_as_modules(tests: Sequence[str], setup: str) -> set[str]:
    """Names of standard library modules whose attributes the tests read, and that they never call: a solution's own
    function may be called `copy` or `bisect`."""
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
    except (SyntaxError, ValueError, RecursionError, MemoryError) as error:  # a null byte; nested too deeply
        why = error.msg if isinstance(error, SyntaxError) else str(error) or "nested too deeply"
        raise InputError(f"a hidden test is not Python: {why}\n  {text[:200]!r}") from None


def _defines(source: str, name: str) -> bool:
    try:
        with warnings.catch_warnings(action="ignore", category=SyntaxWarning):  # in a model's code: not worth a line
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
    """Lines without trailing whitespace, and without blank lines at the end."""
    return [line.rstrip() for line in text.rstrip().splitlines()]
