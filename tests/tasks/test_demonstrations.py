"""Demonstrations from files: every form that is read, and what every mistake is told like."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pyarrow
import pyarrow.parquet
import pytest

from covey.config.schema import DataConfig
from covey.errors import InputError
from covey.tasks.demonstrations import load_demonstrations
from covey.types import Demonstration

USER, ASSISTANT = {"role": "user", "content": "1+1"}, {"role": "assistant", "content": "2"}
ARGUMENTS = {"expression": "1+1"}
CALL = {"type": "function", "function": {"name": "calculator", "arguments": ARGUMENTS}}
TOOL = {"type": "function", "function": {"name": "calculator", "parameters": {"type": "object", "properties": {}}}}


@pytest.fixture(autouse=True)
def in_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def write(*rows: Any, name: str = "d.jsonl") -> str:
    Path(name).write_text("\n".join(row if isinstance(row, str) else json.dumps(row) for row in rows))
    return name


def read(*rows: Any, **settings: Any) -> tuple[Demonstration, ...]:
    return load_demonstrations(DataConfig(train_files=write(*rows), **settings), 0).train


def mistake(*rows: Any) -> list[str]:
    with pytest.raises(InputError) as caught:
        read(*rows)
    return str(caught.value).splitlines()


@pytest.mark.parametrize(
    "row",
    [
        {"messages": [USER, ASSISTANT]},
        {"messages": json.dumps([USER, ASSISTANT])},
        {"question": "1+1", "answer": 2},
        {"prompt": "1+1", "response": "2"},
        {"prompt": [USER], "completion": [ASSISTANT]},
        {"prompt": "1+1", "completion": "2", "answer": "not this"},
    ],
    ids=[
        "messages",
        "messages as JSON text",
        "question and answer",
        "prompt and response",
        "lists",
        "answer comes last",
    ],
)
def test_forms(row: dict[str, Any]) -> None:
    assert read(row) == (Demonstration("d.jsonl:0", (USER, ASSISTANT), None, "d.jsonl, line 1"),)


@pytest.mark.parametrize(
    "call",
    [
        CALL,
        CALL["function"],
        {"function": {"name": "calculator", "arguments": json.dumps(ARGUMENTS)}},
    ],
    ids=["OpenAI", "bare", "arguments as JSON text"],
)
def test_calls_and_schemas(call: dict[str, Any]) -> None:
    text = [
        USER,
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "content": "2"},
        ASSISTANT,
    ]
    for tools in ([TOOL], [TOOL["function"]], json.dumps([TOOL]), [json.dumps(TOOL)]):
        (result,) = read({"messages": text, "tools": tools})
        assert result.messages[1] == {"role": "assistant", "content": "", "tool_calls": [CALL]}
        assert result.tools == (TOOL,)


def test_parquet_nulls_are_dropped() -> None:
    text = [USER | {"tool_calls": None}, {"role": "assistant", "content": "", "tool_calls": [CALL]}]
    function = {"name": "f", "parameters": {"type": "object"}}
    tools = [
        {"type": "function", "function": function},
        {"type": "function", "function": {"name": "g", "description": "x"}},
    ]
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist([{"messages": text, "tools": tools}]), "d.parquet")
    (result,) = load_demonstrations(DataConfig(train_files="d.parquet"), 0).train
    assert result.messages[0] == USER and result.place == "d.parquet, row 1"
    assert result.tools == tuple(tools)


def test_parquet_does_not_give_a_call_the_arguments_of_another() -> None:
    """Parquet gives all `arguments` the same fields, and fills those of other calls with nulls."""
    calls = [{"name": "search", "arguments": {"query": "x", "sites": [{"a": 1}]}}, CALL["function"]]
    rows = [{"messages": [USER, {"role": "assistant", "content": "", "tool_calls": [call]}]} for call in calls]
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), "d.parquet")
    found = load_demonstrations(DataConfig(train_files="d.parquet"), 0).train
    assert [one.messages[1]["tool_calls"][0]["function"] for one in found] == calls
    null = {"name": "f", "arguments": {"x": None}}  # a null that the user wrote
    (one,) = read({"messages": [USER, {"role": "assistant", "tool_calls": [null]}]})
    assert one.messages[1]["tool_calls"][0]["function"] == null


def test_replies_in_the_question_are_context() -> None:
    (one,) = read({"prompt": [USER, ASSISTANT, USER], "completion": [ASSISTANT]})
    assert one.messages == (USER, ASSISTANT | {"weight": 0}, USER, ASSISTANT)


def test_splits_sizes_and_warnings() -> None:
    rows = [{"question": str(i), "answer": str(i)} for i in range(4)]
    data = DataConfig(train_files=write(*rows), val_files=write(*rows[3:], name="v.jsonl"), train_size=9)
    result = load_demonstrations(data, 0)
    assert (len(result.train), len(result.validation)) == (4, 1)
    assert result.warnings == (
        "data.train_size=9, but there are only 4 demonstrations",
        "1 of 1 validation demonstrations are trained on too",
    )
    assert result.description == "d.jsonl: 4 demonstrations, 1 for validation"
    assert [d.id for d in read(*rows, train_size=2)] == ["d.jsonl:0", "d.jsonl:1"]


def test_the_system_prompt_is_added_if_missing() -> None:
    own = {"role": "system", "content": "own"}
    plain, prompted = read({"messages": [USER, ASSISTANT]}, {"messages": [own, USER, ASSISTANT]}, system_prompt="s")
    assert [m["role"] for m in plain.messages] == ["system", "user", "assistant"]
    assert plain.messages[0]["content"] == "s" and prompted.messages[0] == own


GOOD = {"messages": [USER, ASSISTANT]}


@pytest.mark.parametrize(
    ("row", "first_line"),
    [
        ({"messages": [USER]}, "no message of the assistant: there is nothing to learn from"),
        ({"messages": [USER, ASSISTANT | {"weight": 0.5}]}, "messages[1].weight must be 0 or 1, got 0.5"),
        (
            {"messages": [USER, ASSISTANT | {"weight": 0}]},
            "every message of the assistant has weight 0: there is nothing to learn from",
        ),
        ({"text": "1+1"}, "no column messages, question or prompt (columns here: text)"),
        ({"question": "1+1"}, "no column answer, response or completion (columns here: question)"),
        ({"question": "1+1", "answer": " "}, "answer is empty"),
        ({"question": {}, "answer": "2"}, "question must be a string or a list of messages, got an object"),
        ({"messages": "[oops"}, "messages is not JSON (Expecting value at character 1)"),
        (
            {"messages": [USER, {"role": "asistant", "content": ""}]},
            "messages[1] has unknown role 'asistant' (did you mean assistant?)",
        ),
        (
            {"messages": [USER | {"tool_calls": [CALL]}, ASSISTANT]},
            "messages[0].tool_calls: only the assistant calls tools, not role user",
        ),
        (
            {"messages": [USER, ASSISTANT | {"tool_calls": CALL}]},
            "messages[1].tool_calls must be a list of calls, got an object",
        ),
        (
            {"messages": [USER, ASSISTANT | {"tool_calls": [{"arguments": {}}]}]},
            "messages[1].tool_calls[0] has no name",
        ),
        (
            {"messages": [USER, ASSISTANT | {"tool_calls": [{"name": "f", "arguments": "{1}"}]}]},
            "messages[1].tool_calls[0].arguments is not JSON "
            "(Expecting property name enclosed in double quotes at character 1)",
        ),
        (
            {"messages": [USER, ASSISTANT | {"tool_calls": [{"name": "f", "arguments": [1]}]}]},
            "messages[1].tool_calls[0].arguments must be an object, got a list",
        ),
        (GOOD | {"tools": TOOL}, "tools must be a list of schemas, got an object"),
        (GOOD | {"tools": [{"type": "function"}]}, "tools[0] has no name"),
        (
            {"messages": [USER, {"role": "assistant", "content": [{"type": "image"}]}]},
            "messages[1].content has a part that is not text: image",
        ),
        ("{oops}", "not JSON (expected property name enclosed in double quotes at column 2)"),
    ],
)
def test_mistakes_name_their_line(row: Any, first_line: str) -> None:
    lines = mistake(GOOD, row)
    assert lines[0] == f"d.jsonl, line 2: {first_line}"
    assert lines[1].startswith("  1 | {") and lines[2].startswith("  2 | ")


def test_text_parts_are_joined() -> None:
    parts = [{"type": "text", "text": "1+"}, {"type": "text", "text": "1"}]
    assert read({"messages": [{"role": "user", "content": parts}, ASSISTANT]})[0].messages == (USER, ASSISTANT)


def test_validation_files_alone_are_not_enough() -> None:
    with pytest.raises(InputError, match=r"data.val_files is given without data.train_files"):
        load_demonstrations(DataConfig(val_files=write(GOOD)), 0)
