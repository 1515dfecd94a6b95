"""covey data check: everything that is wrong, in the order of the file."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from covey.tasks.check import Report, check_files, quantiles, statistics
from covey.types import Task


@pytest.fixture(autouse=True)
def in_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def write(name: str, *lines: Any) -> str:
    Path(name).write_text("\n".join(line if isinstance(line, str) else json.dumps(line) for line in lines))
    return name


def message(report: Report) -> list[str]:
    return [str(mistake).splitlines()[0] for mistake in report.mistakes]


GOOD = {"question": "1+1", "answer": "2"}


def test_every_mistake_by_line() -> None:
    file = write(
        "t.jsonl",
        GOOD,
        '{"question": oops}',
        {"question": "2+2", "answer": " "},
        [3],
        {"query": "3+3", "answer": "6"},
        {"question": "4+4", "answer": "8", "data_id": "a"},
        {"question": "5+5", "answer": "10", "data_id": "a"},
    )
    report = check_files([file])
    assert message(report) == [
        "t.jsonl, line 2: not JSON (expected a value at column 14)",
        "t.jsonl, line 3: answer is empty",
        "t.jsonl, line 4: expected an object, got a list",
        "t.jsonl, line 5: no column question (columns here: query, answer)",
        "t.jsonl, line 7: data_id 'a' is also in t.jsonl, line 6",
    ]
    assert report.rows == {Path("t.jsonl"): 5} and report.remarks == []


def test_questions_that_repeat_are_remarks() -> None:
    train = write("train.jsonl", GOOD, {"question": "1 + 1", "answer": "2"}, {"question": "2+2", "answer": "4"})
    test = write("test.jsonl", {"question": "3+3", "answer": "6"}, {"question": "2 + 2 ?", "answer": "4"})
    report = check_files([train, test])
    assert report.mistakes == []
    assert report.remarks == [
        "train.jsonl: 1 question is asked before: line 2 (as 1)",
        "test.jsonl: 1 question is asked in train.jsonl too: line 2 (as 3)",
    ]


def test_tasks_without_answers_are_fine() -> None:
    assert check_files([write("t.jsonl", {"question": "Write a poem."})]).mistakes == []


def test_a_file_that_cannot_be_read_is_one_mistake() -> None:
    files = [write("t.json", "[1, 2"), write("good.jsonl", GOOD), write("empty.jsonl", "")]
    report = check_files(files)
    assert [line.partition(":")[0] for line in message(report)] == ["t.json, line 1", "empty.jsonl"]
    assert report.rows == {Path("good.jsonl"): 1}


def test_demonstrations_end_with_the_assistant() -> None:
    asked, text = {"role": "user", "content": "1+1"}, {"role": "assistant", "content": "2"}
    file = write(
        "demos.jsonl", {"messages": [asked, text]}, {"messages": [asked]}, {"messages": [asked, {"role": "x"}]}
    )
    assert message(check_files([file])) == [
        "demos.jsonl, line 2: no message of the assistant: there is nothing to learn from",
        "demos.jsonl, line 3: messages[1] has unknown role 'x'",
    ]
    pairs = write("pairs.jsonl", {"question": "1+1", "response": "2"}, {"question": "1+1"})
    assert check_files([pairs]).mistakes == []
    assert "no column answer, response or completion" in message(check_files([pairs], demonstrations=True))[0]


def test_statistics() -> None:
    assert quantiles([5, 1, 3, 2, 4]) == (1, 2, 3, 4, 5, 5)
    assert quantiles([]) == ()
    tasks = [Task(str(n), ({"role": "user", "content": "x" * n},), None, {"level": n or None}) for n in range(3)]
    result = statistics(tasks)
    assert (result.rows, result.columns, result.question, result.answer) == (
        3,
        {"level": "number"},
        (0, 0, 1, 2, 2, 2),
        (),
    )
