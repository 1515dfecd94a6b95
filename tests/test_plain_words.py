"""The search for words of the old style (tools/plain_words.py): what it finds, what it lets pass, and the tree."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent

spec = importlib.util.spec_from_file_location("plain_words", ROOT / "tools" / "plain_words.py")
assert spec is not None and spec.loader is not None
plain_words = importlib.util.module_from_spec(spec)
spec.loader.exec_module(plain_words)


@pytest.mark.parametrize(
    ("text", "phrases"),
    [
        ("the shape of the house: rooms", ["rooms", "the house"]),
        ("a message\n    # under\n    # way", ["under way"]),
        ("What is no number is none of ours.", ["is none"]),
        ("read it, or wait for so many seconds", ["so many"]),
        ("A request who waits is told. Who enters, waits.", [". Who enters", "is told", "request who waits"]),
        ("a decode flight with others in flight", ["flight"]),
        ("def f(_told: int)", ["_told"]),
        ("hidden by walls; the wall time; a wall-clock limit", ["walls"]),
    ],
)  # fmt: skip
def test_what_it_finds(text: str, phrases: list[str]) -> None:
    assert sorted(phrase for _, phrase, _ in plain_words.findings(text)) == phrases


@pytest.mark.parametrize(
    "text",
    [
        "There is none. x is None and y",
        "Users who want to wait; people who have 8 GPUs. Who is it for?",
        "so many that nothing fits; room for one more; as many tokens as possible",
        "goes on; left-padded; a team of people",
    ],
)
def test_ordinary_english_passes(text: str) -> None:
    assert list(plain_words.findings(text)) == []


def test_lines_and_exit_codes(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    page = tmp_path / "page.md"
    page.write_text("# Title\n\nThe requests\nunder way.\n")
    (tmp_path / "data.bin").write_bytes(b"\xff the house")
    assert plain_words.main([str(tmp_path)]) == 1
    found, last = capsys.readouterr().out.splitlines()
    assert found == f"{page}:4: 'under way'  write: in progress, pending" and last.startswith("plain words: 1 ")
    page.write_text("# Title\n")
    assert plain_words.main([str(tmp_path)]) == 0


def test_the_tree_uses_plain_words(capsys: pytest.CaptureFixture[str]) -> None:
    code = plain_words.main([str(ROOT / path) for path in plain_words.PATHS])
    assert code == 0, capsys.readouterr().out
