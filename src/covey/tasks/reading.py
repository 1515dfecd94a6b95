"""Data files into rows: JSON, JSONL, Parquet and CSV, the text ones also gzipped.

A mistake in a file is told with the place and what stands there:

    train.jsonl, line 2: not JSON (expected a value at column 14)
      1 | {"question": "1+1", "answer": "2"}
      2 | {"question": oops}
"""

from __future__ import annotations

import codecs
import csv
import gzip
import io
import json
import re
import sys
import zlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

from covey.errors import InputError
from covey.storage import MAX_DEPTH, TOO_DEEP, is_shallow

WIDTH = 100  # characters of a line that an excerpt shows
LONGEST_NAME, MOST_NAMES = 60, 40  # characters, columns that a message shows
LARGEST = 256 * 2**20  # bytes that a gzipped file may always hold; more only where it is not all the same
DENSEST = 200  # times its own size
HALF = re.compile(r"\\u[dD][89a-fA-F]")  # may be half of a surrogate pair
DIGITS = re.compile(r"\d{4301}")  # Python reads no longer numbers


class RepeatedKey(json.JSONDecodeError):
    """An object with a key that is given twice: which value counts is not defined."""

    def __init__(self, key: str, text: str, within: dict[str, Any], value: Any) -> None:
        super().__init__(f"An object has the key {names([key])!r} twice", text, max(0, text.rfind(json.dumps(key))))
        self.within = within  # the object
        self.value = value  # all that was read


class RowMistake(InputError):
    """A mistake at a known place of a file."""

    def __init__(self, text: str, number: int) -> None:
        super().__init__(text, number)  # both: an exception is pickled by its arguments
        self.text = text
        self.number = number

    def __str__(self) -> str:
        return self.text


@dataclass(frozen=True, slots=True)
class Row:
    number: int  # from 1, in the table's unit
    values: dict[str, Any]


@dataclass(frozen=True, slots=True)
class Table:
    """The rows of one file, and how to point at one of them."""

    path: Path
    unit: str  # what numbers count: "line" of a text file, "item" of a JSON list, "row" of a Parquet file
    rows: list[Row]
    lines: Sequence[str] = ()  # the file's text, where numbers count lines

    def mistake(self, row: Row, text: str, *fixes: str) -> RowMistake:
        if self.lines:
            return _mistake_in_text(self.path, self.lines, row.number, text, *fixes)
        shown = json.dumps(row.values, ensure_ascii=False, default=str)
        return _mistake(self.path, self.unit, row.number, text, [f"  {row.number} | {_clip(shown)}"], fixes)


def read_table(path: Path, suffix: str | None = None, broken: list[RowMistake] | None = None) -> Table:
    """Read a file by its suffix, or as if it had another. Every row is a dict of columns; a file without rows is a
    mistake. With `broken`, lines of JSONL that cannot be read are put there, and the others are returned."""
    ending = suffix or "".join(path.suffixes[-2:]).lower()
    read = READERS.get(ending) or READERS.get(path.suffix.lower())
    if read is None:
        raise InputError(f"{path}: unsupported file type\n  fix: use one of {', '.join(SUFFIXES)}")
    try:
        table = _read_jsonl(path, broken) if read is _read_jsonl else read(path)
    except OSError as error:
        raise InputError(f"{path}: cannot be read ({error.strerror})") from error
    if not table.rows and not broken:
        raise InputError(f"{path}: empty (no rows)\n  fix: write at least one row, or leave the file out")
    return table


def _read_jsonl(path: Path, broken: list[RowMistake] | None = None) -> Table:
    lines = _text(path).split("\n")  # not splitlines: JSON strings may hold other line separators
    table = Table(path, "line", [], lines)
    for number, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        try:
            table.rows.append(Row(number, _object(path, lines, number)))
        except RowMistake as error:
            if broken is None:
                raise
            broken.append(error)
    return table


def _object(path: Path, lines: Sequence[str], number: int) -> dict[str, Any]:
    try:
        values = read_json(lines[number - 1])
    except json.JSONDecodeError as error:
        raise _not_json(path, lines, number, error) from error
    if not isinstance(values, dict):
        raise _mistake_in_text(path, lines, number, f"expected an object, got {kind(values)}", OBJECT_FIX)
    return values


def read_json(text: str) -> Any:
    """The value of a text. What JSON allows, but nothing after it can take, is a mistake in it too: numbers and nesting
    without end, a key that is given twice, and half characters, which no tokenizer reads."""
    repeated: list[tuple[str, dict[str, Any]]] = []

    def of_pairs(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        found = dict(pairs)
        if len(found) < len(pairs):
            keys = [key for key, _ in pairs]
            repeated.append((next(key for key in keys if keys.count(key) > 1), found))
        return found

    try:
        value = json.loads(text, object_pairs_hook=of_pairs)
    except json.JSONDecodeError:
        raise
    except RecursionError:
        raise json.JSONDecodeError(TOO_DEEP, text, 0) from None
    except ValueError:
        found = DIGITS.search(text)
        raise json.JSONDecodeError("A number has too many digits", text, found.start() if found else 0) from None
    if text.count("[") + text.count("{") > MAX_DEPTH and not is_shallow(value):
        raise json.JSONDecodeError(TOO_DEEP, text, 0)
    if repeated:
        raise RepeatedKey(repeated[0][0], text, repeated[0][1], value)
    if HALF.search(text) and (half := _half_character(value, text)) is not None:
        raise json.JSONDecodeError("A string has half of a surrogate pair", text, half)
    return value


def _half_character(value: Any, text: str) -> int | None:
    """About where one is written, if there is one."""
    try:
        json.dumps(value, ensure_ascii=False).encode()
    except UnicodeEncodeError as error:
        code = f"\\u{ord(error.object[error.start]):04x}"
        return max(0, text.lower().find(code))
    return None


def _read_json(path: Path) -> Table:
    text = _text(path)
    if not text.strip():
        return Table(path, "item", [])
    try:
        items = read_json(text)
    except RepeatedKey as error:
        raise _repeated_in(path, error) from error
    except json.JSONDecodeError as error:
        fixes = []
        if error.msg == "Extra data" and text[error.pos] == "{":
            fixes = ["one object per line is JSONL: rename the file to end in .jsonl"]
        raise _not_json(path, text.split("\n"), error.lineno, error, *fixes) from error
    if isinstance(items, dict):
        items = _only_list(path, items)
    if not isinstance(items, list):
        raise InputError(f"{path}: expected a list of objects, got {kind(items)}\n  fix: {OBJECT_FIX}")
    for number, values in enumerate(items, start=1):
        if not isinstance(values, dict):
            shown = _clip(json.dumps(values, ensure_ascii=False))
            text = f"expected an object, got {kind(values)}"
            raise _mistake(path, "item", number, text, [f"  {number} | {shown}"], [OBJECT_FIX])
    return Table(path, "item", [Row(number, values) for number, values in enumerate(items, start=1)])


def _repeated_in(path: Path, error: RepeatedKey) -> InputError:
    """In which item of a list, if it is in one: the text has no lines to point at."""
    items = error.value if isinstance(error.value, list) else list(error.value.values())
    lists = [items] if isinstance(error.value, list) else [one for one in items if isinstance(one, list)]
    reason = error.msg[0].lower() + error.msg[1:]
    for number, item in enumerate((item for one in lists for item in one), start=1):
        if _holds(item, error.within):
            shown = _clip(json.dumps(item, ensure_ascii=False))
            return _mistake(path, "item", number, reason, [f"  {number} | {shown}"], [KEY_FIX])
    return InputError(f"{path}: {reason}\n  fix: {KEY_FIX}")


def _holds(value: Any, wanted: dict[str, Any]) -> bool:
    inside = value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
    return value is wanted or any(_holds(one, wanted) for one in inside)


def _only_list(path: Path, values: dict[str, Any]) -> list[Any]:
    lists = [key for key, value in values.items() if isinstance(value, list)]
    if len(lists) != 1:
        raise InputError(
            f"{path}: expected a list of objects, or an object with one list, got an object with {len(lists)} lists\n"
            f"  keys here: {names(values)}\n  fix: make the file a list of objects"
        )
    found: list[Any] = values[lists[0]]
    return found


def _read_csv(path: Path) -> Table:
    lines = _text(path).split("\n")
    table = Table(path, "line", [], lines)
    header: list[str] = []
    for number, cells in _csv_records(path, lines):
        if not header:
            header = cells
            if twice := sorted({name for name in header if header.count(name) > 1}):
                raise _mistake_in_text(path, lines, number, f"two columns are called {names(twice[:1])}", "rename one")
        elif len(cells) != len(header):
            wrong = f"{len(cells)} cells, but the header names {len(header)} columns"
            fix = "put text that holds a comma or a line break in double quotes"
            raise _mistake_in_text(path, lines, number, wrong, fix)
        else:
            table.rows.append(Row(number, dict(zip(header, cells, strict=True))))
    return table


def _csv_records(path: Path, lines: Sequence[str]) -> Iterator[tuple[int, list[str]]]:
    """Each record with the line it starts on; a quoted cell may span several."""
    csv.field_size_limit(sys.maxsize)  # all of it is in memory already
    reader = csv.reader((line + "\n" for line in lines), strict=True)
    start = 1
    try:
        for cells in reader:
            if cells:
                yield start, cells
            start = reader.line_num + 1
    except csv.Error as error:
        raise _mistake_in_text(path, lines, start, f"not CSV ({error})") from error


def _read_parquet(path: Path) -> Table:
    import pyarrow
    import pyarrow.parquet

    try:
        table = pyarrow.parquet.ParquetFile(path).read()
        _check_columns(path, table.schema)
        rows = table.to_pylist()
    except InputError:
        raise
    except (pyarrow.ArrowException, OSError, ValueError, OverflowError) as error:  # also text and dates that are none
        reason = next(iter(str(error).splitlines()), type(error).__name__)
        raise InputError(
            f"{path}: not a readable Parquet file ({reason})\n  fix: write or download it again"
        ) from error
    return Table(path, "row", [Row(number, values) for number, values in enumerate(rows, start=1)])


def _check_columns(path: Path, fields: Iterable[Any], within: str = "") -> None:
    """Parquet allows two columns of one name, and two such fields of a structure."""
    import pyarrow

    found = list(fields)
    seen = [field.name for field in found]
    if twice := sorted({name for name in seen if seen.count(name) > 1}):
        raise InputError(f"{path}: two columns are called {names([within + twice[0]])}\n  fix: rename one")
    for field in found:
        kind = field.type
        while pyarrow.types.is_list(kind) or pyarrow.types.is_large_list(kind):
            kind = kind.value_type
        if pyarrow.types.is_struct(kind):
            _check_columns(path, list(kind), f"{within}{field.name}.")


def _text(path: Path) -> str:
    """The file's text, without a byte order mark."""
    data = path.read_bytes()
    if path.suffix.lower() == ".gz":
        try:
            data = _unpacked(path, data)
        except (OSError, EOFError, zlib.error) as error:
            raise InputError(f"{path}: not a readable gzip file ({error})\n  fix: download it again") from error
    data = data.removeprefix(codecs.BOM_UTF8)
    try:
        return data.decode("utf-8").replace("\r\n", "\n").replace("\r", "\n")
    except UnicodeDecodeError as error:
        number = data.count(b"\n", 0, error.start) + 1
        lines = data.decode("utf-8", errors="replace").split("\n")
        text = f"not UTF-8 (byte 0x{data[error.start]:02x})"
        raise _mistake_in_text(path, lines, number, text, "save the file as UTF-8") from error


def _unpacked(path: Path, data: bytes) -> bytes:
    """A small file can hold more than any memory: gigabytes of one letter."""
    most = max(LARGEST, DENSEST * len(data))
    with gzip.GzipFile(fileobj=io.BytesIO(data)) as file:
        found = file.read(most + 1)
    if len(found) > most:
        raise InputError(
            f"{path}: unpacks to more than {most >> 20} MiB, {DENSEST} times its own size or more\n"
            "  fix: give the file without gzip, if that is what it should hold"
        )
    return found


def _not_json(path: Path, lines: Sequence[str], number: int, error: json.JSONDecodeError, *fixes: str) -> RowMistake:
    reason = error.msg.replace("Expecting value", "expected a value").replace("Expecting", "expected")
    reason = reason[0].lower() + reason[1:].removesuffix(" at")
    excerpt = _excerpt(lines, number, error.colno)
    if isinstance(error, RepeatedKey):
        return _mistake(path, "line", number, reason, excerpt, [KEY_FIX])
    return _mistake(path, "line", number, f"not JSON ({reason} at column {error.colno})", excerpt, fixes)


def _mistake_in_text(path: Path, lines: Sequence[str], number: int, text: str, *fixes: str) -> RowMistake:
    return _mistake(path, "line", number, text, _excerpt(lines, number), fixes)


def _mistake(path: Path, unit: str, number: int, text: str, excerpt: Sequence[str], fixes: Sequence[str]) -> RowMistake:
    told = "\n".join([f"{path}, {unit} {number}: {text}", *excerpt, *(f"  fix: {fix}" for fix in fixes)])
    return RowMistake(told, number)


def _excerpt(lines: Sequence[str], number: int, column: int = 1) -> list[str]:
    """The line and the one before it."""
    numbers = [n for n in (number - 1, number) if n >= 1]
    width = len(str(number))
    return [f"  {n:>{width}} | {_clip(lines[n - 1], column if n == number else 1)}" for n in numbers]


def _clip(line: str, column: int = 1) -> str:
    """A long line cut so that `column` is seen."""
    start = max(0, column - WIDTH * 3 // 4)
    return ("…" if start else "") + line[start : start + WIDTH] + ("…" if len(line) > start + WIDTH else "")


def names(found: Iterable[str]) -> str:
    """For messages: in a file that is something else, columns may have any name, and there may be any number."""
    first = list(islice(found, MOST_NAMES + 1))
    shown = [name if len(name) <= LONGEST_NAME else f"{name[:LONGEST_NAME]}…" for name in first[:MOST_NAMES]]
    return ", ".join([*shown, *(["…"] if len(first) > MOST_NAMES else [])]) or "none"


def kind(value: Any) -> str:
    """The JSON name of a value's type, for messages."""
    if value is None:
        return "null"
    if isinstance(value, bool):
        return "true" if value else "false"
    names = {str: "a string", int: "a number", float: "a number", list: "a list", dict: "an object"}
    return names.get(type(value), f"a {type(value).__name__}")


KEY_FIX = "keep one of the two"
OBJECT_FIX = 'a row looks like {"question": "1+1", "answer": "2"}'

READERS: dict[str, Callable[[Path], Table]] = {
    ".json": _read_json,
    ".json.gz": _read_json,
    ".jsonl": _read_jsonl,
    ".jsonl.gz": _read_jsonl,
    ".ndjson": _read_jsonl,
    ".ndjson.gz": _read_jsonl,
    ".csv": _read_csv,
    ".csv.gz": _read_csv,
    ".parquet": _read_parquet,
}
SUFFIXES = tuple(READERS)
