"""Broken data files, and answers that a reward cannot parse, are refused before a model loads, with place and fix."""

from __future__ import annotations

import inspect
import json
import os
import socket
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pyarrow
import pyarrow.parquet
import pytest

from covey.cli.main import main
from covey.rewards.builtin import REWARDS

GOOD = '{"question": "1+1?", "answer": "2"}'
SMALL = ["rollout.max_tokens=4", "data.train_batch_size=1", "loop.total_steps=1"]


@pytest.fixture(autouse=True)
def no_model_is_loaded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("covey.models.loading.load_policy", lambda *_, **__: pytest.fail("a model was loaded"))
    yield


def refused(words: Sequence[str], texts: Sequence[str], capsys: pytest.CaptureFixture[str]) -> None:
    """The exit code of a user's mistake, the sentence, no traceback, and nothing left behind."""
    before = sorted(Path().rglob("*"))
    assert main(list(words)) == 2, words
    message = capsys.readouterr().err
    for part in (*texts, "nothing was started"):
        assert part in message, words
    assert "Traceback" not in message
    assert sorted(Path().rglob("*")) == before, f"{words} left something behind"


# -- files -------------------------------------------------------------------------------------------------------------


def text(content: str) -> Callable[[Path], Any]:
    return lambda path: path.write_text(content)


def bound_socket(path: Path) -> None:
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(path.name)  # a full path may be too long for a socket


def parquet(*columns: tuple[str, Any]) -> Callable[[Path], Any]:
    names, values = zip(*columns, strict=True)
    return lambda path: pyarrow.parquet.write_table(pyarrow.Table.from_arrays([*values], names=[*names]), path)


STRINGS = pyarrow.array(["1+1?"])
PAIR = pyarrow.StructArray.from_arrays([STRINGS, STRINGS], names=["text", "text"])
NOT_A_FILE = "fix: write the data to a file first, and name that"

FILES: dict[str, tuple[str, Callable[[Path], Any], tuple[str, ...]]] = {
    "a named pipe": ("data.jsonl", os.mkfifo, ("data.jsonl is a named pipe, not a file", NOT_A_FILE)),
    "a socket": ("data.jsonl", bound_socket, ("data.jsonl is a socket, not a file", NOT_A_FILE)),
    "the null device": ("/dev/null", lambda path: None, ("/dev/null is a device, not a file", NOT_A_FILE)),
    "a device without an end": ("/dev/zero", lambda path: None, ("/dev/zero is a device, not a file", NOT_A_FILE)),
    "a link to a device": ("data.jsonl", lambda path: path.symlink_to("/dev/null"), ("data.jsonl is a device",)),
    "a link to nothing": ("data.jsonl", lambda path: path.symlink_to("gone"), ("data.jsonl is a link to gone, which",)),
    "a folder": ("data.jsonl", Path.mkdir, ("data.jsonl is a folder\n  fix: name the files in it",)),
    "a pattern of pipes": ("*.jsonl", lambda path: os.mkfifo("a.jsonl"), ("a.jsonl is a named pipe, not a file",)),
    "a key twice in a line": (
        "data.jsonl",
        text(f'{GOOD}\n{{"question": "1+1?", "answer": "2", "answer": "3"}}\n'),
        ("data.jsonl, line 2: an object has the key 'answer' twice\n", '  2 | {"question"', "fix: keep one of the two"),
    ),
    "a key twice within a line": (
        "data.jsonl",
        text(f'{GOOD}\n{{"question": "1+1?", "answer": "2", "more": [{{"a": 1, "a": 1}}]}}\n'),
        ("data.jsonl, line 2: an object has the key 'a' twice",),
    ),
    "a key twice in a list": (
        "data.json",
        text(f'[{GOOD},\n{GOOD}, {{"question": "1+1?", "answer": "2", "answer": "3"}}]'),
        ("data.json, item 3: an object has the key 'answer' twice\n  3 | ", "fix: keep one of the two"),
    ),
    "a key twice around a list": (
        "data.json",
        text(f'{{"rows": [{GOOD}], "rows": [{GOOD}]}}'),
        ("data.json: an object has the key 'rows' twice",),
    ),
    "a column twice in CSV": ("data.csv", text("question,answer,answer\n1,2,3\n"), ("two columns are called answer",)),
    "a column twice in Parquet": (
        "data.parquet",
        parquet(("question", STRINGS), ("answer", STRINGS), ("answer", STRINGS)),
        ("data.parquet: two columns are called answer\n  fix: rename one",),
    ),
    "a field twice in Parquet": (
        "data.parquet",
        parquet(("question", STRINGS), ("answer", STRINGS), ("more", PAIR)),
        ("data.parquet: two columns are called more.text\n  fix: rename one",),
    ),
    "an answer that is NaN": (
        "data.jsonl",
        text(f'{GOOD}\n{{"question": "1+1?", "answer": NaN}}\n'),
        ("data.jsonl, line 2: answer is nan, which is not a number", "fix: give the answer, or take the row out"),
    ),
    "an answer that is NaN in Parquet": (
        "data.parquet",
        parquet(("question", pyarrow.array(["1+1?", "2"])), ("answer", pyarrow.array([2.0, float("nan")]))),
        ("data.parquet, row 2: answer is nan, which is not a number",),
    ),
}


@pytest.mark.parametrize("case", FILES)
def test_files_that_are_not_data(case: str, tiny_model_folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    name, make, texts = FILES[case]
    make(Path(name))
    model = f"model={tiny_model_folder}"
    refused(["train", "--validate-only", "--strict", model, f"data.train_files={name}", *SMALL], texts, capsys)
    refused(["train", model, f"data.train_files={name}", *SMALL], texts, capsys)
    refused(["eval", str(tiny_model_folder), f"data.val_files={name}"], texts, capsys)
    if "NaN" not in case:  # a demonstration's answer is text
        refused(["sft", model, f"data.train_files={name}"], texts, capsys)


@pytest.mark.parametrize("case", ["a named pipe", "a socket", "the null device", "a folder"])
def test_files_that_are_not_data_fail_the_check(case: str, capsys: pytest.CaptureFixture[str]) -> None:
    name, make, texts = FILES[case]
    make(Path(name))
    refused(["data", "check", name], texts, capsys)
    if case != "the null device":
        refused(["data", "show", name], texts, capsys)


def test_the_check_names_every_row_with_a_duplicate_key(capsys: pytest.CaptureFixture[str]) -> None:
    Path("data.jsonl").write_text('{"question": "a", "question": "b"}\n' + GOOD + '\n{"question": "c", "x": 1, "x": 2}')
    assert main(["data", "check", "data.jsonl"]) == 1
    message = capsys.readouterr().out
    assert "line 1: an object has the key 'question' twice" in message
    assert "line 3: an object has the key 'x' twice" in message
    assert "2 mistakes" in message


# -- answers -----------------------------------------------------------------------------------------------------------

# Rewards, with an answer or columns that each of them can read, and some that it cannot.
UNREADABLE: dict[str, tuple[dict[str, Any], list[dict[str, Any]]]] = {
    "number": ({"answer": "72"}, [{"answer": text} for text in ("three sevenths", "", "nan", "1 or 2", "#### ")]),
    "math_reward_string_equal": ({"answer": "#### 72"}, [{"answer": text} for text in ("three sevenths", "", "nan")]),
    "math_equal": ({"answer": "\\frac37"}, [{"answer": ""}, {"answer": "  "}, {"answer": []}, {"answer": ["1", ""]}]),
    "math_verify": ({"answer": "\\frac37"}, [{"answer": ""}, {"answer": "\\boxed{}"}]),
    "countdown": (
        {"numbers": [1, 2], "target": 3},
        [{"numbers": "1 2", "target": 3}, {"numbers": [1, 2], "target": "three"}, {"numbers": [1, "2"], "target": 3}],
    ),
    "qa_f1_reward": ({"answer": ["Paris"]}, [{"answer": {"words": ["Paris"]}}]),
    "sorted": ({"numbers": [2, 1]}, [{"numbers": "2 1"}, {"numbers": [2, None]}]),
}


@pytest.mark.parametrize(
    ("reward", "unreadable"), [(reward, bad) for reward, (_, several) in UNREADABLE.items() for bad in several]
)
def test_answers_that_the_reward_cannot_parse(
    reward: str, unreadable: dict[str, Any], tiny_model_folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    readable = UNREADABLE[reward][0]
    rows = [{"question": f"{number}?", **one} for number, one in enumerate([readable, unreadable, readable])]
    Path("data.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    texts = ["data.jsonl, line 2: ", reward, "cannot read "]
    if getattr(REWARDS[reward], "reward_gold", None) is not None:
        texts += [f"the answer {unreadable['answer']!r} (", "fix: correct the answer, take the task out"]
    model = f"model={tiny_model_folder}"
    refused(
        ["train", "--validate-only", model, "data.train_files=data.jsonl", f"reward={reward}", *SMALL],
        texts,
        capsys,
    )
    refused(["eval", str(tiny_model_folder), "data.val_files=data.jsonl", f"reward={reward}"], texts, capsys)


@pytest.mark.parametrize("reward", UNREADABLE)
def test_answers_that_the_reward_can_parse(reward: str, tiny_model_folder: Path) -> None:
    Path("data.jsonl").write_text(json.dumps({"question": "?", **UNREADABLE[reward][0]}))
    words = ["train", "--validate-only", f"model={tiny_model_folder}", "data.train_files=data.jsonl"]
    assert main([*words, f"reward={reward}", *SMALL]) == 0


def test_wrong_answers_in_a_second_file_name_that_file(
    tiny_model_folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    Path("a.jsonl").write_text(GOOD)
    pyarrow.parquet.write_table(pyarrow.table({"question": ["?", "!"], "answer": ["1", "one"]}), "b.parquet")
    words = ["train", f"model={tiny_model_folder}", "data.train_files=a.jsonl", "data.val_files=b.parquet"]
    refused([*words, "reward=number"], ["b.parquet, row 2: reward number cannot read the answer 'one'"], capsys)


def test_every_reward_parses_answers_before_training() -> None:
    """A built-in reward declares how it parses the answer, or has another check. `exact` accepts any text."""
    asking = {name for name, call in REWARDS.items() if "answer" in inspect.signature(call).parameters}
    hooks = ("reward_check", "reward_gold")
    unchecked = {name for name in asking if not any(getattr(REWARDS[name], hook, None) for hook in hooks)}
    assert unchecked == {"exact"}
