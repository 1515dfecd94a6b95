"""The cells of the notebooks run in order, as Jupyter runs them: in one namespace, while an event loop is running, and
with the last expression of each shown. The constants of the cell tagged `parameters` are replaced by small ones, as
papermill does it."""

from __future__ import annotations

import ast
import asyncio
import json
import re
from pathlib import Path
from typing import Any

import pytest

from tests.examples.conftest import EXAMPLES

NOTEBOOKS = sorted(EXAMPLES.glob("*.ipynb"))
SMALL = {
    "first_run": {"STEPS": 2, "QUESTIONS": 2, "HELD_OUT": 4},
    "own_reward_and_agent": {"STEPS": 2, "QUESTIONS": 2, "ROWS": 8},
}


def cells(path: Path) -> list[dict[str, Any]]:
    return json.loads(path.read_text())["cells"]


def source(cell: dict[str, Any]) -> str:
    return "".join(cell["source"])


async def run_cell(text: str, space: dict[str, Any]) -> Any:
    """The value of its last expression, if it ends with one."""
    tree = ast.parse(text)
    last = tree.body.pop() if isinstance(tree.body[-1], ast.Expr) else None
    exec(compile(tree, "<cell>", "exec"), space)
    return None if last is None else eval(compile(ast.Expression(last.value), "<cell>", "eval"), space)


def show(value: Any) -> list[str]:
    """The forms in which Jupyter would show it."""
    forms = ("_repr_html_", "_repr_png_", "__repr__")
    return [form for form in forms if hasattr(value, form) and getattr(value, form)() is not None]


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_every_cell_runs(path: Path, model_folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    space: dict[str, Any] = {"__name__": "__main__"}
    shown: list[str] = []

    async def session() -> None:
        for cell in cells(path):
            if cell["cell_type"] != "code":
                continue
            value = await run_cell(source(cell), space)
            if "parameters" in cell["metadata"].get("tags", ()):
                changed = SMALL[path.stem] | {"MODEL": str(model_folder)}
                assert set(changed) <= set(space)
                space.update(changed)
            if value is not None:
                shown.extend(show(value))

    asyncio.run(session())
    assert "_repr_png_" in shown  # the curve
    assert space["trainer"].steps_done == 2


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_a_notebook_is_whole_and_holds_no_output(path: Path) -> None:
    """The form of nbformat 4.5, which editors refuse to open otherwise."""
    book = json.loads(path.read_text())
    assert (book["nbformat"], book["nbformat_minor"]) == (4, 5)
    assert book["metadata"]["kernelspec"]["name"] == "python3"
    assert len({cell["id"] for cell in book["cells"]}) == len(book["cells"])
    for cell in book["cells"]:
        assert isinstance(cell["metadata"], dict) and all(isinstance(line, str) for line in cell["source"])
        if cell["cell_type"] == "code":
            assert cell["outputs"] == [] and cell["execution_count"] is None
        else:
            assert cell["cell_type"] == "markdown" and "outputs" not in cell


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_the_links_of_a_notebook_lead_somewhere(path: Path) -> None:
    texts = [source(cell) for cell in cells(path) if cell["cell_type"] == "markdown"]
    targets = re.findall(r"\]\((?!http)([^)]+)\)", "\n".join(texts))
    assert targets and all((EXAMPLES / target).is_file() for target in targets)


def test_both_notebooks_are_here() -> None:
    assert {path.stem for path in NOTEBOOKS} == set(SMALL)
