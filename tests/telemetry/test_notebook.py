"""Progress in a notebook. IPython is stood in for: a display that can be updated, as its documentation describes."""

from __future__ import annotations

import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

import covey
from tests.trainer.conftest import ROWS, SMALL, vowels


class Output:
    def __init__(self, shown: list[list[dict[str, str]]], first: dict[str, str]) -> None:
        self.pictures = [first]
        shown.append(self.pictures)

    def update(self, picture: dict[str, str], *, raw: bool) -> None:
        assert raw
        self.pictures.append(picture)


def install(monkeypatch: pytest.MonkeyPatch, shell: Any) -> list[list[dict[str, str]]]:
    shown: list[list[dict[str, str]]] = []

    def display(picture: dict[str, str], *, raw: bool, display_id: bool) -> Output:
        assert raw and display_id
        return Output(shown, picture)

    package, inner = ModuleType("IPython"), ModuleType("IPython.display")
    package.get_ipython = lambda: shell  # type: ignore[attr-defined]
    package.version_info = (9, 0, 0)  # type: ignore[attr-defined]  # matplotlib asks
    inner.display = display  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "IPython", package)
    monkeypatch.setitem(sys.modules, "IPython.display", inner)
    return shown


def train(model: Path) -> covey.Run:
    settings = SMALL | {"logging.verbosity": "info"}
    return covey.train(str(model), ROWS, vowels, validation=ROWS[:2], **settings)


def test_one_output_is_redrawn(
    tiny_model_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    shown = install(monkeypatch, SimpleNamespace(kernel=object()))
    run = train(tiny_model_folder)
    (pictures,) = shown
    texts = [picture["text/plain"] for picture in pictures]
    assert "step 0 of 3" in texts[0] and "starting" in texts[0]
    assert [n for n in range(4) if any(f"step {n} of 3" in text for text in texts)] == [0, 1, 2, 3]
    mean = run.metrics[-1]["reward/mean"]
    assert f"reward {mean:.3f}" in texts[-1] and texts[-1].endswith("finished")
    assert all(picture["text/html"].startswith("<pre>") for picture in pictures)
    assert "step  1/3" not in capsys.readouterr().out


def test_ipython_at_a_terminal_is_no_notebook(
    tiny_model_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    shown = install(monkeypatch, SimpleNamespace())
    train(tiny_model_folder)
    assert shown == [] and "step  1/3" in capsys.readouterr().out
