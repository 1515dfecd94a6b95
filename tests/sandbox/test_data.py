"""Reference solutions of MBPP and HumanEval must pass their own tests with solution and tests in separate sandboxes."""

from __future__ import annotations

import asyncio
import gzip
import json
import os
from pathlib import Path
from typing import Any

import pytest

from covey.sandbox import Limits, Sandbox, Verdict, hidden_tests
from tests.sandbox.conftest import run

# What does not pass, and why: nothing in these sets.
EXCEPTIONS: dict[str, str] = {}


def problems(shared: Path) -> dict[str, tuple[str, dict[str, Any]]]:
    """Name: reference solution, row."""
    here = shared / "data" / "code"
    found = {}
    for line in (here / "mbpp.jsonl").read_text().splitlines():
        row = json.loads(line)
        found[f"mbpp/{row['task_id']}"] = (row["code"], row)
    for row in json.loads((here / "sanitized-mbpp.json").read_text()):
        found[f"sanitized/{row['task_id']}"] = (row["code"], row)
    for line in gzip.decompress((here / "HumanEval.jsonl.gz").read_bytes()).decode().splitlines():
        row = json.loads(line)
        found[row["task_id"]] = (row["canonical_solution"], row)
    return found


async def judge(sandbox: Sandbox, chosen: dict[str, tuple[str, dict[str, Any]]]) -> dict[str, Verdict]:
    verdicts = await asyncio.gather(*(sandbox.check(code, hidden_tests(row)) for code, row in chosen.values()))
    return dict(zip(chosen, verdicts, strict=True))


def failed(verdicts: dict[str, Verdict]) -> dict[str, str]:
    return {
        name: next(result.reason for result in verdict.detail if not result.passed)
        for name, verdict in verdicts.items()
        if verdict.passed < verdict.total
    }


SPECIAL = ("mbpp/126", "mbpp/367", "mbpp/533", "mbpp/596", "mbpp/601", "HumanEval/32", "HumanEval/38", "HumanEval/50")


def test_reference_solutions_of_a_few_problems_pass(isolated: Sandbox, shared: Path) -> None:
    """Those that need something special (a function named sum, objects, types, helpers), and some others."""
    every = problems(shared)
    chosen = {name: every[name] for name in (*SPECIAL, *list(every)[::120])}
    sandbox = Sandbox(isolated.tier, Limits(seconds=60), max_concurrent=2)
    assert failed(run(judge(sandbox, chosen))) == {}


def test_the_solution_of_another_problem_fails(isolated: Sandbox, shared: Path) -> None:
    every = problems(shared)
    mixed = {"mixed": (every["mbpp/2"][0], every["mbpp/3"][1])}
    assert run(judge(isolated, mixed))["mixed"].passed == 0


@pytest.mark.slow
def test_reference_solutions_pass(isolated: Sandbox, shared: Path) -> None:
    sandbox = Sandbox(isolated.tier, Limits(seconds=60), max_concurrent=os.cpu_count() or 1)
    verdicts = run(judge(sandbox, problems(shared)))
    assert len(verdicts) == 974 + 427 + 164
    assert failed(verdicts) == EXCEPTIONS
