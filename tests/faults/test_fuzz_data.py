"""Data files of any content: they are read, or refused with the file's name, and what is read can be worked on."""

from __future__ import annotations

import gzip
import io
import json
import os
import tempfile
from collections.abc import Callable
from contextlib import redirect_stderr, redirect_stdout
from pathlib import Path
from typing import Any
from unittest import mock

from hypothesis import strategies as st

from covey.agents.tools.search import corpus_files, read_corpus
from covey.cli.data import main as data_command
from covey.config.schema import DataConfig
from covey.errors import InputError
from covey.tasks import DATASETS
from covey.tasks.check import check_files
from covey.tasks.datasets import load_dataset
from covey.tasks.datasets.prepare import prepare
from covey.tasks.demonstrations import read_demonstrations
from covey.tasks.files import find_files, read_tasks
from covey.tasks.reading import SUFFIXES
from tests.faults.fuzzing import Target, json_values, mixed, numbers, scalars, suite, texts

COLUMNS = ["question", "messages", "prompt", "answer", "data_id", "response", "tools", "reward_model", "ground_truth"]
INNER = ["role", "content", "tool_calls", "function", "name", "arguments", "text", "type", "id"]
ROLES = ["user", "assistant", "system", "tool", "human", ""]
CALL = '{"function": {"name": "f", "arguments": {"x": 1}}}'

content = st.one_of(texts, json_values(INNER))
messages = st.lists(
    st.one_of(
        st.fixed_dictionaries(
            {"role": st.one_of(st.sampled_from(ROLES), scalars)},
            optional={"content": content, "tool_calls": content | st.just([json.loads(CALL)]), "id": scalars},
        ),
        content,
    ),
    max_size=4,
)
rows = st.one_of(
    st.dictionaries(st.one_of(st.sampled_from(COLUMNS), texts), st.one_of(scalars, messages, content), max_size=5),
    st.fixed_dictionaries({"messages": messages}, optional={"tools": content, "data_id": scalars}),
    st.fixed_dictionaries({"question": texts}, optional={"answer": content, "data_id": st.integers(0, 3)}),
    json_values(COLUMNS + INNER),
)
lines = st.one_of(
    st.builds(lambda row, plain: json.dumps(row, ensure_ascii=plain), rows, st.booleans()),
    st.builds(lambda depth, mark: '{"question": ' + mark * depth, st.integers(1, 20_000), st.sampled_from('[{"')),
    st.builds(lambda depth: '{"question": ' + "[" * depth + "]" * depth + "}", st.integers(1, 3000)),
    st.builds(lambda size: f'{{"question": "?", "answer": {"9" * size}}}', st.integers(4000, 6000)),
    st.builds(lambda size: f'{{"question": "{"x" * size}"}}', st.integers(100_000, 1_000_000)),
    st.just('{"question": "a", "answer": "\\ud800"}'),
    texts,
    mixed(['{"question": "1+1"', "}", ",", '"', "[", "\r", "\n", "NaN", "{}"]),
)
encodings = st.sampled_from(["utf-8", "utf-8-sig", "utf-16", "latin-1", "utf-32"])
whole_texts = st.lists(lines, max_size=5).flatmap(
    lambda result: st.sampled_from(["\n", "\r\n", "\n\n", ",", ""]).map(lambda mark: mark.join(result))
)
listed = st.lists(rows, max_size=4).map(lambda result: json.dumps(result))
encoded = st.builds(
    lambda text, name: text.encode(name, errors="surrogatepass" if name.startswith("utf") else "replace"),
    st.one_of(whole_texts, listed),
    encodings,
)
contents = st.one_of(encoded, encoded.map(gzip.compress), st.binary(max_size=200))
damaged = st.builds(lambda data, end, more: data[: end % (len(data) + 1)] + more, contents, st.integers(0), st.binary())
files = st.tuples(st.one_of(contents, damaged), st.sampled_from([*SUFFIXES, ".txt", "", ".JSONL", ".jsonl.gz.gz"]))


def _in_a_file(use: Callable[[Path], Any]) -> Callable[[tuple[bytes, str]], None]:
    def check(given: tuple[bytes, str]) -> None:
        data, suffix = given
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder, f"d{suffix}")
            path.write_bytes(data)
            use(path)

    return check


def reads_tasks(path: Path) -> None:
    try:
        tasks = read_tasks("data.train_files", str(path))
    except InputError as error:
        _names(error, path)
        return
    for task in tasks:
        _sayable([task.id, task.messages, task.answer, task.columns])


def reads_demonstrations(path: Path) -> None:
    try:
        result = read_demonstrations("data.train_files", str(path))
    except InputError as error:
        _names(error, path)
        return
    for one in result:
        _sayable([one.id, one.messages, one.tools])


def checks(path: Path) -> None:
    report = check_files([str(path)])
    for mistake in report.mistakes:
        _names(mistake, path)
    for words in (["check", str(path)], ["show", str(path)]):
        out = io.TextIOWrapper(io.BytesIO(), encoding="utf-8")
        with redirect_stdout(out), redirect_stderr(out):
            try:
                assert data_command(words) in (0, 1, 2)
            except InputError as error:
                _names(error, path)


def finds_files(given: Any) -> None:
    try:
        find_files("data.train_files", given)
    except InputError as error:
        assert "data.train_files" in str(error)


def _names(error: InputError, path: Path) -> None:
    text = str(error)
    assert path.name in text, text
    assert len(text) < 5000, len(text)
    text.encode()  # it can be printed


def _sayable(value: Any) -> None:
    """A tokenizer takes every string, and a record of the run can be written."""
    json.dumps(value, default=str, ensure_ascii=False).encode()


def _parquet(columns: dict[str, list[Any]]) -> bytes:
    import pyarrow
    import pyarrow.parquet

    size = max(map(len, columns.values()), default=0)
    table = {}
    for name, values in columns.items():
        values = values + [None] * (size - len(values))
        try:
            table[name] = pyarrow.array(values)
            pyarrow.parquet.write_table(pyarrow.table({name: table[name]}), io.BytesIO())
        except (pyarrow.ArrowException, OverflowError, UnicodeEncodeError):  # a column has one type
            table[name] = pyarrow.array([json.dumps(value, default=str) for value in values])
    out = io.BytesIO()
    pyarrow.parquet.write_table(pyarrow.table(table), out)
    return out.getvalue()


cells = st.one_of(
    st.lists(texts.map(lambda text: text.encode(errors="replace").decode()), min_size=1, max_size=3),
    st.lists(st.integers(-5, 5), min_size=1, max_size=3),
    st.lists(st.floats(), min_size=1, max_size=3),
    st.lists(st.dates() | st.none(), min_size=1, max_size=3),
    st.lists(st.datetimes(), min_size=1, max_size=3),
    st.lists(st.decimals(allow_nan=False, places=2, min_value=-9, max_value=9), min_size=1, max_size=3),
    st.lists(st.binary(max_size=5), min_size=1, max_size=3),
    st.lists(messages, min_size=1, max_size=3),
)
column_names = st.one_of(st.sampled_from(COLUMNS), st.text(st.characters(codec="utf-8"), max_size=8))
tables = st.dictionaries(column_names, cells, max_size=4).map(_parquet)
cut_tables = st.builds(lambda data, end: data[: end % (len(data) + 1)], tables, st.integers(0))


def _flipped(data: bytes, places: list[tuple[int, int]]) -> bytes:
    damaged = bytearray(data)
    for place, change in places:
        damaged[-1 - place % len(damaged)] ^= change  # what says how the rest is read stands at the end
    return bytes(damaged)


flips = st.lists(st.tuples(st.integers(0), st.integers(1, 255)), min_size=1, max_size=5)
parquet_files = st.one_of(tables, cut_tables, st.builds(_flipped, tables, flips)).map(lambda data: (data, ".parquet"))
names_of_files = st.one_of(
    texts,
    st.lists(texts | scalars, max_size=3),
    json_values(["x"]),
    st.sampled_from(["~nobody/x.jsonl", "[", "**", "a" * 5000, "x" * 300, "\x00", "/proc/self/mem", "/"]),
    numbers,
)

# -- public data sets and passages -----------------------------------------------------------------------------------

RAW = {column for dataset in DATASETS.values() for names in dataset.columns for column in names.split("|")}
RAW |= {"id", "type", "level", "unique_id", "dataset", "split", "paragraphs", "context", "supporting_facts", "title"}
raw_cells = st.one_of(
    scalars,
    json_values([*RAW, *INNER]),
    st.sampled_from(["#### 7", "\\boxed{7}", [{"role": "user", "content": "?"}], [[{"role": "user", "content": "?"}]]]),
)


def _raw_rows(dataset: Any) -> st.SearchStrategy[Any]:
    """Rows with all columns that the set asks for, and anything in them."""
    wanted = {names.split("|")[0]: raw_cells | texts for names in dataset.columns}
    more = st.dictionaries(st.sampled_from(sorted(RAW)), raw_cells, max_size=3)
    row = st.builds(lambda one, other: {**other, **one}, st.fixed_dictionaries(wanted), more)
    return st.tuples(st.just(dataset), st.lists(row, min_size=1, max_size=3))


raw_sets = st.sampled_from(list(DATASETS.values())).flatmap(_raw_rows)


def prepares(given: tuple[Any, list[dict[str, Any]]]) -> None:
    """A set is written and can be loaded, or it is told what is wrong with which row."""
    dataset, result = given
    with tempfile.TemporaryDirectory() as folder, mock.patch.dict(os.environ, {"DATA_DIR": folder}):
        source = next(one for one in dataset.sources if one.split in dataset.rows)
        path = Path(folder, "raw.jsonl")
        path.write_text("".join(json.dumps(row) + "\n" for row in result))
        try:
            prepare(dataset, [f"{source.split}={path}"], Path(folder, dataset.name))
        except InputError as error:
            assert dataset.name in str(error) or "raw.jsonl" in str(error)
            return
        tasks = load_dataset(DataConfig(name=dataset.name))
        _sayable([task.messages for task in (*tasks.train, *tasks.validation)])


def loads_manifests(data: bytes) -> None:
    with tempfile.TemporaryDirectory() as folder, mock.patch.dict(os.environ, {"DATA_DIR": folder}):
        Path(folder, "gsm8k").mkdir()
        Path(folder, "gsm8k", "manifest.json").write_bytes(data)
        try:
            load_dataset(DataConfig(name="gsm8k"))
        except InputError as error:
            assert "gsm8k" in str(error)


manifests = st.one_of(
    contents,
    json_values(["name", "rows", "outputs", "train", "test"]).map(lambda v: json.dumps(v).encode()),
    json_values(["train", "test"]).map(lambda v: json.dumps({"name": "gsm8k", "rows": v, "outputs": {}}).encode()),
    json_values(["train.parquet", "sha256"]).map(
        lambda v: json.dumps({"name": "gsm8k", "rows": {"train": 1}, "outputs": v}).encode()
    ),
)


def reads_corpus(path: Path) -> None:
    try:
        passages = read_corpus(corpus_files(path))
    except InputError as error:
        _names(error, path)
    else:
        _sayable([[one.title, one.text] for one in passages])


passages = st.builds(
    lambda result: "".join(json.dumps(one) + "\n" for one in result).encode(),
    st.lists(json_values(["title", "text", "contents"]), max_size=4),
)
corpora = st.tuples(
    st.one_of(contents, passages), st.sampled_from([".jsonl", ".json", ".txt", ".md", ".parquet", ".x"])
)

TARGETS = [
    Target("data/prepare", raw_sets, prepares, 60),
    Target("data/manifests", manifests, loads_manifests, 60),
    Target("data/corpus", corpora, _in_a_file(reads_corpus), 60),
    Target("data/tasks", files, _in_a_file(reads_tasks), 150),
    Target("data/demonstrations", files, _in_a_file(reads_demonstrations), 150),
    Target("data/check", files, _in_a_file(checks), 80),
    Target("data/parquet-tasks", parquet_files, _in_a_file(reads_tasks), 40),
    Target("data/parquet-demonstrations", parquet_files, _in_a_file(reads_demonstrations), 40),
    Target("data/parquet-check", parquet_files, _in_a_file(checks), 30),
    Target("data/names", names_of_files, finds_files, 100),
]
test_fuzz = suite(TARGETS)
