"""Mutation testing: which changes are made to a text, and that the tests run on the changed package."""

from __future__ import annotations

import ast
import importlib
import os
import subprocess
import sys
from typing import Any

import pytest

from tests.benchmarks.conftest import BENCHMARKS


@pytest.fixture
def mutants() -> Any:
    return importlib.import_module("mutants")


@pytest.mark.parametrize(
    ("source", "changed"),
    [
        ("x = a < b", {"x = (a <= b)"}),
        ("x = a is b", {"x = (a is not b)"}),
        ("x = é + b  # why", {"x = (é - b)  # why"}),  # columns count bytes
        ("x = a * b / c", {"x = (a * b * c)", "x = (a / b) / c"}),
        ("x = 3", {"x = 4", "x = (2)"}),
        ("x = 17", set()),
        ("x = not a", {"x = (a)"}),
        ("x = a or b", {"x = (a and b)"}),
        ("x += a", {"x -= a", "pass"}),
        ("f(a)", {"pass"}),
        ("x = a if b else c", {"x = a if True else c", "x = a if False else c"}),
        ("if a:\n    x = b", {"if True:\n    x = b", "if False:\n    x = b"}),
        ("while a:\n    x = b", {"while False:\n    x = b"}),
        ("def f() -> int | None:\n    return a", {"def f() -> int | None:\n    return None"}),
        ("def f() -> int:\n    return a", set()),
        ("def f() -> None:\n    return", set()),
        ("x: Range[0, 1] = a", set()),
        ('raise ValueError(f"{a + b}")', set()),
        ("assert a < b", set()),
    ],
)
def test_every_kind_of_change(mutants: Any, source: str, changed: set[str]) -> None:
    assert {one.source for one in mutants.mutants_of("file.py", source)} == changed


def test_all_mutants_are_python_and_differ_from_the_file(mutants: Any) -> None:
    source = (mutants.PACKAGE / "rollout/asynchronous.py").read_text()
    found = list(mutants.mutants_of("rollout/asynchronous.py", source))
    assert len(found) > 40
    for one in found:
        assert ast.dump(ast.parse(one.source)) != ast.dump(ast.parse(source)), one


@pytest.mark.slow
def test_a_mutant_is_killed_by_the_tests_of_its_file() -> None:
    """Seed 0 draws a mutant that changes what a window does; the tests see it only if they import the copy."""
    words = ["--sample", "1", "--files", "rollout/asynchronous.py"]
    clean = {name: value for name, value in os.environ.items() if not name.startswith(("PYTEST_", "PYTHONPATH"))}
    found = subprocess.run(
        [sys.executable, str(BENCHMARKS / "mutants.py"), *words], capture_output=True, text=True, env=clean, timeout=150
    )
    assert found.returncode == 0, found.stderr
    assert found.stdout.splitlines()[3:] == ["| rollout/asynchronous.py | 1 | 1 | 0 | 100 % |"]
