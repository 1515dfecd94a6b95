"""What editors and type checkers see of `import covey`."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import pytest

import covey

ROOT = Path(__file__).parents[2]
SNIPPET = """
import covey
from covey import Gvpo

trainer = covey.Trainer("m", [{"question": "a"}], algorithm=Gvpo(beta=0.01))
for step in trainer:
    reveal_type(step.metrics)
reveal_type(covey.train())
reveal_type(Gvpo().beta)
Gvpo(bta=1)
covey.Trainer(tasks=3)
trainer.lr = "high"
"""
SEEN = ['"dict[str, float]"', '"covey.training.run.Run"', '"float"']
WRONG = ['Unexpected keyword argument "bta" for "Gvpo"', 'Argument "tasks" to "Trainer"', 'has type "str", variable']


def test_every_public_name_is_imported_for_type_checkers_from_its_home() -> None:
    (guarded,) = (
        node
        for node in ast.parse(Path(covey.__file__).read_text()).body
        if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING"
    )
    imports = [node for node in guarded.body if isinstance(node, ast.ImportFrom)]
    found = {alias.name: node.module for node in imports for alias in node.names}
    assert found == covey._HOMES
    assert sorted(covey.__all__) == sorted([*found, "__version__"])
    assert (Path(covey.__file__).parent / "py.typed").is_file()


@pytest.mark.slow
def test_mypy_sees_real_signatures(tmp_path: Path) -> None:
    (tmp_path / "snippet.py").write_text(SNIPPET)
    command = [
        sys.executable,
        "-m",
        "mypy",
        "--config-file",
        str(ROOT / "pyproject.toml"),
        str(tmp_path / "snippet.py"),
    ]
    told = subprocess.run(command, cwd=ROOT, capture_output=True, text=True).stdout
    lines = [line for line in told.splitlines() if "snippet.py" in line and '" defined in "' not in line]
    assert len(lines) == len(SEEN) + len(WRONG), told
    for line, text in zip(lines, [*SEEN, *WRONG], strict=True):
        assert text in line
