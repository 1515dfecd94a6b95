"""Tasks from files: what is read, and what every mistake is told like."""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from typing import Any

import pytest

from covey.config.schema import DataConfig
from covey.errors import Absent, InputError
from covey.tasks import load_tasks, tasks_of_rows
from covey.types import Task

ROW = {"question": "1+1", "answer": "2"}
TASK = Task("t.jsonl:0", ({"role": "user", "content": "1+1"},), "2", {})


@pytest.fixture(autouse=True)
def in_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def write(name: str, *lines: Any) -> str:
    Path(name).parent.mkdir(parents=True, exist_ok=True)
    Path(name).write_text("\n".join(line if isinstance(line, str) else json.dumps(line) for line in lines))
    return name


def train(files: Any, **settings: Any) -> tuple[Task, ...]:
    return load_tasks(DataConfig(train_files=files, **settings), seed=0).train


def mistake(files: Any, **settings: Any) -> str:
    with pytest.raises(InputError) as caught:
        train(files, **settings)
    return str(caught.value)


def parquet(name: str, rows: list[dict[str, Any]]) -> str:
    import pyarrow
    import pyarrow.parquet

    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), name)
    return name


# What is read


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("t.jsonl", '{"question": "1+1", "answer": "2"}'),
        ("t.jsonl", '\n{"question": "1+1", "answer": "2"}\r\n  \n'),
        ("t.ndjson", '{"question": "1+1", "answer": "2"}'),
        ("t.json", '[{"question": "1+1", "answer": "2"}]'),
        ("t.json", '{"version": 1, "data": [{"question": "1+1", "answer": "2"}]}'),
        ("t.csv", "question,answer\n1+1,2\n"),
        ("t.csv", 'answer,question\r\n\r\n2,"1+1"\r\n'),
    ],
)
@pytest.mark.parametrize("mark", [b"", b"\xef\xbb\xbf"])
@pytest.mark.parametrize("zipped", [False, True])
def test_every_text_format_gives_the_same_task(name: str, content: str, mark: bytes, zipped: bool) -> None:
    data = mark + content.encode()
    name = name + ".gz" if zipped else name
    Path(name).write_bytes(gzip.compress(data) if zipped else data)
    (task,) = train(name)
    assert task == Task(f"{name}:0", TASK.messages, "2", {})


def test_parquet_rows_are_tasks() -> None:
    rows = [{"question": "1+1", "answer": "2", "level": 3, "data_id": 7}]
    assert train(parquet("t.parquet", rows)) == (Task("7", TASK.messages, "2", {"level": 3}),)


def test_a_null_question_leaves_the_next_column() -> None:
    (task,) = tasks_of_rows([{"question": None, "messages": [{"role": "user", "content": "1+1?"}]}], "tasks")
    assert task.messages == ({"role": "user", "content": "1+1?"},)


def test_other_columns_are_kept() -> None:
    write("t.jsonl", ROW | {"data_id": "a", "level": 3, "tags": ["x"]})
    assert train("t.jsonl") == (Task("a", TASK.messages, "2", {"level": 3, "tags": ["x"]}),)


def test_a_csv_cell_may_span_lines() -> None:
    write("t.csv", "question,answer", '"1', '+1",2')
    assert train("t.csv")[0].messages == ({"role": "user", "content": "1\n+1"},)


def test_verl_rows() -> None:
    prompt = [{"role": "system", "content": "Be short."}, {"role": "user", "content": "1+1"}]
    judged = {"style": "rule", "ground_truth": "2"}
    rows = [{"data_source": "sums", "prompt": prompt, "reward_model": judged, "extra_info": {"index": 5}}]
    columns = {"data_source": "sums", "reward_model": judged, "extra_info": {"index": 5}}
    expected = Task("t.parquet:0", tuple(prompt), "2", columns)
    assert train(parquet("t.parquet", rows)) == (expected,)


def test_answer_takes_precedence_over_verls_ground_truth() -> None:
    write("t.jsonl", ROW | {"reward_model": {"ground_truth": "3"}})
    assert train("t.jsonl")[0].answer == "2"


def test_messages_keep_extra_fields_but_not_parquet_nulls() -> None:
    call = [{"name": "add", "arguments": "1 1"}]
    messages = [
        {"role": "user", "content": "1+1"},
        {"role": "assistant", "content": None, "tool_calls": call},
        {"role": "tool", "content": "2", "tool_calls": None},
    ]
    assert train(parquet("t.parquet", [{"messages": messages}]))[0].messages == (
        {"role": "user", "content": "1+1"},
        {"role": "assistant", "content": "", "tool_calls": call},
        {"role": "tool", "content": "2"},
    )


def test_system_prompt_is_added_if_missing() -> None:
    own = [{"role": "system", "content": "Mine."}, {"role": "user", "content": "2+2"}]
    write("t.jsonl", ROW, {"messages": own})
    first, second = train("t.jsonl", system_prompt="Ours.")
    assert first.messages == ({"role": "system", "content": "Ours."}, {"role": "user", "content": "1+1"})
    assert second.messages == tuple(own)


def test_files_of_a_glob_are_sorted() -> None:
    for name in ("b/2.jsonl", "b/1.jsonl", "a/3.jsonl"):
        write(name, {"question": name})
    result = train(["b/*.jsonl", "a/3.jsonl"])
    assert [task.id for task in result] == ["1.jsonl:0", "2.jsonl:0", "3.jsonl:0"]


def test_files_of_the_same_name_get_their_folder_in_ids() -> None:
    result = train([write("a/t.jsonl", ROW), write("b/t.jsonl", ROW)])
    assert [task.id for task in result] == ["a/t.jsonl:0", "b/t.jsonl:0"]


def test_home_is_expanded(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    write("t.jsonl", ROW)
    assert train("~/t.jsonl") == train("~/*.jsonl") == (TASK,)


def test_sizes_take_the_first_tasks() -> None:
    write("t.jsonl", *({"question": f"{i}+{i}"} for i in range(5)))
    assert [task.id for task in train("t.jsonl", train_size=2)] == ["t.jsonl:0", "t.jsonl:1"]


def test_without_val_files_validation_is_empty() -> None:
    tasks = load_tasks(DataConfig(train_files=write("t.jsonl", ROW)), seed=0)
    assert (tasks.validation, tasks.reward, tasks.warnings) == ((), None, ())
    assert tasks.description == "1 training tasks from t.jsonl"


def test_val_files_alone_are_for_evaluation() -> None:
    tasks = load_tasks(DataConfig(val_files=write("t.jsonl", ROW)), seed=0)
    assert (tasks.train, tasks.validation) == ((), (TASK,))


# What is worth a warning


def test_a_validation_question_that_is_trained_on_is_a_warning() -> None:
    write("t.jsonl", ROW, {"question": "2+2"})
    write("v.jsonl", {"question": "3+3"}, {"question": " 1+1\n"})
    tasks = load_tasks(DataConfig(train_files="t.jsonl", val_files="v.jsonl"), seed=0)
    assert tasks.warnings == ("1 of 2 validation tasks ask a question that is trained on, the first is v.jsonl:1",)


def test_settings_without_effect_are_a_warning() -> None:
    write("t.jsonl", {"messages": [{"role": "system", "content": "Mine."}, {"role": "user", "content": "1+1"}]})
    data = DataConfig(train_files="t.jsonl", train_size=3, options={"digits": 2}, system_prompt="Ours.")
    assert load_tasks(data, seed=0).warnings == (
        "data.options is not used: it belongs to generated tasks, and data files are given",
        "data.train_size=3, but there are only 1 tasks",
        "data.system_prompt is not used: every task brings a system message of its own",
    )


# Mistakes in what a file is


def test_not_json() -> None:
    write("train.jsonl", ROW, '{"question": oops}')
    assert mistake("train.jsonl") == (
        "train.jsonl, line 2: not JSON (expected a value at column 14)\n"
        '  1 | {"question": "1+1", "answer": "2"}\n'
        '  2 | {"question": oops}'
    )


def test_lines_are_counted_as_an_editor_does() -> None:
    write("t.jsonl", *[ROW] * 8, "", '{"question": "3', ROW)
    assert mistake("t.jsonl") == (
        't.jsonl, line 10: not JSON (unterminated string starting at column 14)\n   9 | \n  10 | {"question": "3'
    )


def test_a_long_line_is_cut_around_the_mistake() -> None:
    write("t.jsonl", '{"question": "' + "a" * 500 + '" oops}')
    first, excerpt = mistake("t.jsonl").split("\n")
    assert first == "t.jsonl, line 1: not JSON (expected ',' delimiter at column 517)"
    assert excerpt == "  1 | …" + "a" * 72 + '" oops}'


def test_json_mistakes_name_the_line_too() -> None:
    write("t.json", "[", ' {"question": "1+1"},', ' {"question" "2+2"}', "]")
    assert mistake("t.json") == (
        "t.json, line 3: not JSON (expected ':' delimiter at column 14)\n"
        '  2 |  {"question": "1+1"},\n'
        '  3 |  {"question" "2+2"}'
    )


def test_jsonl_that_is_called_json() -> None:
    write("t.json", ROW, ROW)
    assert mistake("t.json").endswith("\n  fix: one object per line is JSONL: rename the file to end in .jsonl")


@pytest.mark.parametrize("content", ["", "\n \n"])
@pytest.mark.parametrize("name", ["t.jsonl", "t.json", "t.csv"])
def test_empty_file(name: str, content: str) -> None:
    write(name, content)
    assert mistake(name) == f"{name}: empty (no rows)\n  fix: write at least one row, or leave the file out"


@pytest.mark.parametrize(("name", "content"), [("t.json", "[]"), ("t.csv", "question,answer\n")])
def test_a_file_without_rows_is_empty(name: str, content: str) -> None:
    write(name, content)
    assert mistake(name).startswith(f"{name}: empty (no rows)")


def test_a_row_that_is_not_an_object() -> None:
    write("t.jsonl", ROW, "[1, 2]")
    assert mistake("t.jsonl") == (
        "t.jsonl, line 2: expected an object, got a list\n"
        '  1 | {"question": "1+1", "answer": "2"}\n'
        "  2 | [1, 2]\n"
        '  fix: a row looks like {"question": "1+1", "answer": "2"}'
    )
    write("t.json", [ROW, 5])
    assert mistake("t.json").startswith("t.json, item 2: expected an object, got a number\n  2 | 5\n")


def test_json_that_is_not_a_list() -> None:
    write("t.json", '"text"')
    assert mistake("t.json").startswith("t.json: expected a list of objects, got a string\n")
    write("t.json", {"train": [ROW], "test": [ROW]})
    assert mistake("t.json") == (
        "t.json: expected a list of objects, or an object with one list, got an object with 2 lists\n"
        "  keys here: train, test\n"
        "  fix: make the file a list of objects"
    )


def test_not_utf8() -> None:
    Path("t.jsonl").write_bytes(b'{"question": "1+1"}\n{"question": "caf\xe9"}\n')
    assert mistake("t.jsonl") == (
        "t.jsonl, line 2: not UTF-8 (byte 0xe9)\n"
        '  1 | {"question": "1+1"}\n'
        '  2 | {"question": "caf�"}\n'
        "  fix: save the file as UTF-8"
    )


def test_csv_row_of_another_length() -> None:
    write("t.csv", "question,answer", "1+1,2", "1, 2 or 3?,3")
    assert mistake("t.csv") == (
        "t.csv, line 3: 3 cells, but the header names 2 columns\n"
        "  2 | 1+1,2\n"
        "  3 | 1, 2 or 3?,3\n"
        "  fix: put text that holds a comma or a line break in double quotes"
    )


def test_csv_quote_that_never_ends() -> None:
    write("t.csv", "question,answer", "1+1,2", '"2+2,4', "3+3,6")
    assert mistake("t.csv").startswith("t.csv, line 3: not CSV (unexpected end of data)\n")


def test_csv_column_named_twice() -> None:
    write("t.csv", "question,answer,answer", "1+1,2,2")
    assert mistake("t.csv").startswith("t.csv, line 1: two columns are called answer\n")


def test_corrupt_parquet() -> None:
    Path("t.parquet").write_bytes(b"PAR1 nothing of the kind")
    message = mistake("t.parquet")
    assert message.startswith("t.parquet: not a readable Parquet file (")
    assert message.endswith("\n  fix: write or download it again")


def test_corrupt_gzip() -> None:
    Path("t.jsonl.gz").write_bytes(gzip.compress(b'{"question": "1+1"}')[:-9])
    assert mistake("t.jsonl.gz").startswith("t.jsonl.gz: not a readable gzip file (")


def test_unsupported_suffix() -> None:
    write("t.txt", ROW)
    assert mistake("t.txt") == (
        "t.txt: unsupported file type\n"
        "  fix: use one of .json, .json.gz, .jsonl, .jsonl.gz, .ndjson, .ndjson.gz, .csv, .csv.gz, .parquet"
    )


# Mistakes in which files are named


def test_file_not_found() -> None:
    write("data/train.jsonl", ROW)
    assert mistake("data/trian.jsonl") == (
        "data.train_files: no such file data/trian.jsonl\n  did you mean   data/train.jsonl?"
    )
    assert mistake("dta/train.jsonl") == (
        "data.train_files: no such file dta/train.jsonl\n  there is no folder dta either"
    )


def test_glob_without_a_match() -> None:
    assert mistake("data/*.jsonl") == "data.train_files: no file matches data/*.jsonl"


@pytest.mark.parametrize("files", ["t.jsonl", "no/t.jsonl", "*.jsonl"])
def test_a_missing_file_is_absent_rather_than_wrong(files: str) -> None:
    with pytest.raises(Absent):
        train(files)


def test_folder() -> None:
    write("data/train.jsonl", ROW)
    assert mistake("data") == (
        "data.train_files: data is a folder\n  fix: name the files in it, for example data/*.jsonl"
    )


def test_file_named_twice() -> None:
    write("t.jsonl", ROW)
    assert mistake(["t.jsonl", "*.jsonl"]) == "data.train_files names t.jsonl twice\n  fix: name every file once"


@pytest.mark.parametrize("nothing", ["", [], 5])
def test_no_file_named(nothing: Any) -> None:
    assert mistake(nothing) == f"data.train_files must be a file or a list of files, got {nothing!r}"


# Mistakes in a row


def test_missing_question() -> None:
    write("t.jsonl", ROW, {"qestion": "2+2", "answer": "4"})
    assert mistake("t.jsonl") == (
        "t.jsonl, line 2: no column question (columns here: qestion, answer)\n"
        '  1 | {"question": "1+1", "answer": "2"}\n'
        '  2 | {"qestion": "2+2", "answer": "4"}\n'
        "  fix: rename column qestion to question"
    )


def test_missing_question_without_a_near_name() -> None:
    # `solution` is nearer to `question` than it looks; to offer it would train on the answers.
    assert mistake(parquet("t.parquet", [{"solution": "4", "task": "2+2"}])) == (
        "t.parquet, row 1: no column question (columns here: solution, task)\n"
        '  1 | {"solution": "4", "task": "2+2"}\n'
        "  fix: name the column with the question `question`, or give `messages`, a list of {role, content}"
    )


def test_question_by_another_usual_name() -> None:
    write("t.jsonl", {"solution": "4", "problem": "2+2"})
    assert mistake("t.jsonl").endswith("\n  fix: rename column problem to question")


@pytest.mark.parametrize(
    ("value", "expected_message"),
    [
        (None, "question must be a string, got null"),
        (5, "question must be a string, got a number"),
        ([], "question must be a string, got a list"),
        (True, "question must be a string, got true"),
        ("  ", "question is empty"),
    ],
)
def test_question_of_the_wrong_type(value: Any, expected_message: str) -> None:
    write("t.jsonl", ROW, ROW, {"question": value})
    assert mistake("t.jsonl").startswith(f"t.jsonl, line 3: {expected_message}\n")


@pytest.mark.parametrize(
    ("messages", "expected_message"),
    [
        ("1+1", "messages must be a list of messages, got a string"),
        ([], "messages must be a list of messages, got an empty list"),
        (["1+1"], "messages[0] must be an object, got a string"),
        ([{"content": "1+1"}], "messages[0] has no role"),
        ([{"role": "user"}], "messages[0] has no content"),
        ([{"role": "user", "content": 5}], "messages[0].content must be a string, got a number"),
    ],
)
def test_malformed_messages(messages: Any, expected_message: str) -> None:
    write("t.jsonl", {"messages": messages})
    assert mistake("t.jsonl") == (
        f"t.jsonl, line 1: {expected_message}\n"
        f"  1 | {json.dumps({'messages': messages})}\n"
        '  fix: a message looks like {"role": "user", "content": "What is 1+1?"}'
    )


def test_unknown_role() -> None:
    write("t.jsonl", {"prompt": [{"role": "users", "content": "1+1"}]})
    assert mistake("t.jsonl") == (
        "t.jsonl, line 1: prompt[0] has unknown role 'users' (did you mean user?)\n"
        '  1 | {"prompt": [{"role": "users", "content": "1+1"}]}\n'
        "  fix: roles are system, user, assistant, tool"
    )


def test_messages_that_end_with_the_reply() -> None:
    write("t.jsonl", {"messages": [{"role": "user", "content": "1+1"}, {"role": "assistant", "content": "2"}]})
    message = mistake("t.jsonl")
    assert message.startswith(
        "t.jsonl, line 1: messages must end with the user's message, but ends with role assistant\n"
    )
    assert message.endswith("\n  fix: leave out the reply: the model is to write it")


@pytest.mark.parametrize("other", ["1+1", "2+2"])
def test_two_rows_of_one_data_id(other: str) -> None:
    lines = [{"question": f"{i}+0", "data_id": str(i)} for i in range(2, 8)]
    lines[2] = {"question": "1+1", "data_id": "x"}
    write("t.jsonl", *lines, {"question": other, "data_id": "x"})
    assert mistake("t.jsonl") == (
        "t.jsonl: data_id 'x' on lines 3 and 7\n  fix: give every task a data_id of its own, or leave the column out"
    )


def test_one_data_id_in_two_files() -> None:
    write("a.jsonl", ROW | {"data_id": "x"})
    write("b.json", [ROW, ROW | {"data_id": "x"}])
    assert mistake(["a.jsonl", "b.json"]).startswith("data_id 'x' in a.jsonl, line 1, and in b.json, item 2\n")


def test_data_id_of_the_wrong_type() -> None:
    write("t.jsonl", ROW | {"data_id": [1]})
    assert mistake("t.jsonl").startswith("t.jsonl, line 1: data_id must be a string or a whole number, got a list\n")


def test_mistakes_in_validation_files_name_their_own_setting() -> None:
    with pytest.raises(InputError, match=r"^data\.val_files: no such file v\.jsonl"):
        load_tasks(DataConfig(train_files=write("t.jsonl", ROW), val_files="v.jsonl"), seed=0)
