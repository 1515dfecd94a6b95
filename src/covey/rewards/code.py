"""The `code_reward`: runs the code of a reply against hidden tests in the sandbox.

A solution that fails, hangs or does not parse earns 0 for the tests it fails. If the sandbox itself fails, its
exception propagates, and the episode is excluded as an infrastructure failure.
"""

from __future__ import annotations

import ast
import warnings
from collections.abc import Mapping, Sequence
from typing import Any, Protocol, TypeGuard

from covey.errors import InputError
from covey.replies import PYTHON, blocks, thinking_end
from covey.rewards.function import inline, reward
from covey.types import Task


class Verdict(Protocol):
    @property
    def passed(self) -> int: ...

    @property
    def total(self) -> int: ...


class Sandbox(Protocol):
    """The part of `covey.sandbox.Sandbox` that is used here. `check` raises SandboxError if the tests cannot be run."""

    async def check(self, solution: str, tests: Any, *, seconds: float | None = None) -> Verdict: ...


def _check(task: Task) -> None:
    try:
        tests_in(task)
    except InputError as error:
        raise InputError(f"{task.where}: {error}") from error


@inline
@reward(check=_check)
async def code_reward(
    final_answer: str, task: Task, sandbox: Sandbox, all: bool = False, seconds: float | None = None
) -> dict[str, float]:
    """The share of the task's hidden tests that the reply's code passes; with `all`, 1 only if it passes every test.

    `seconds` limits all tests of one solution; the default is sandbox.seconds. Extras: passed, total.
    """
    verdict = await sandbox.check(last_code(final_answer), tests_in(task), seconds=seconds)
    if verdict.total == 0:
        raise ValueError("the task has no hidden tests")
    share = verdict.passed / verdict.total
    return {"reward": float(share == 1) if all else share, "passed": verdict.passed, "total": verdict.total}


def last_code(reply: str) -> str:
    """The last fenced block of Python, else the last fenced block, else the whole reply, each after the thinking.
    Indentation beyond that of the fence is kept: the code may continue a function."""
    text = reply[thinking_end(reply) or 0 :]
    fenced = [block for block in blocks(text) if block.code.strip()]  # a stray fence at the end opens an empty block
    candidates = [block.code for block in fenced if block.language in PYTHON] or [block.code for block in fenced]
    return candidates[-1] if candidates else text


def tests_in(task: Task) -> Any:
    """The hidden tests in the columns of a task."""
    from covey.sandbox import hidden_tests

    return hidden_tests(_columns(task))


def _columns(task: Task) -> Mapping[str, Any]:
    """The task's columns, with `inputs` and `outputs` joined into `cases`, and with HumanEval's `prompt` restored if it
    became the question."""
    columns = dict(task.columns)
    inputs, outputs = columns.get("inputs"), columns.get("outputs")
    if _is_list(inputs) and _is_list(outputs):
        if len(inputs) != len(outputs):
            raise InputError(f"{len(inputs)} inputs and {len(outputs)} outputs")
        columns["cases"] = [{"input": a, "output": b} for a, b in zip(inputs, outputs, strict=True)]
    question = task.messages[-1].get("content") if task.messages else None
    if "prompt" not in columns and isinstance(question, str) and _defines(question, columns.get("entry_point")):
        columns["prompt"] = question
    return columns


def _is_list(value: Any) -> TypeGuard[Sequence[Any]]:
    return isinstance(value, Sequence) and not isinstance(value, str)


def _defines(source: str, name: Any) -> bool:
    try:
        with warnings.catch_warnings(action="ignore", category=SyntaxWarning):  # most questions are not Python
            tree = ast.parse(source)
    except (SyntaxError, ValueError, RecursionError):
        return False
    return any(isinstance(node, ast.FunctionDef) and node.name == name for node in tree.body)
