"""Read data files into rows: JSON, JSONL, Parquet and CSV, the text formats also gzipped.

Mistakes are reported with their place and an excerpt:

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

WIDTH = 100  # characters of a line in an excerpt
MAX_NAME, MAX_NAMES = 60, 40  # characters of a name and number of names in a message
MAX_UNPACKED = 256 * 2**20  # bytes that any gzipped file may unpack to
MAX_RATIO = 200  # a file that unpacks to more bytes must not exceed this multiple of its own size
SURROGATE = re.compile(r"\\u[dD][89a-fA-F]")  # may be half of a surrogate pair
DIGITS = re.compile(r"\d{4301}")  # one more than Python reads in a number
KEY_FIX = "keep one of the two"
OBJECT_FIX = 'a row looks like {"question": "1+1", "answer": "2"}'


class RepeatedKey(json.JSONDecodeError):
    """An object has the same key twice, so its value is ambiguous."""

    def __init__(self, key: str, text: str, within: dict[str, Any], value: Any) -> None:
        super().__init__(f"An object has the key {names([key])!r} twice", text, max(0, text.rfind(json.dumps(key))))
        self.within = within  # the object
        self.value = value  # the whole parsed value


class RowMistake(InputError):
    """A mistake at a known row of a file."""

    def __init__(self, text: str, number: int) -> None:
        super().__init__(text, number)  # both: exceptions are pickled by their arguments
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
    """The rows of one file, with the means to report a mistake in one of them."""

    path: Path
    unit: str  # what row numbers count: "line" of a text file, "item" of a JSON list, "row" of a Parquet file
    rows: list[Row]
    lines: Sequence[str] = ()  # the file's text, if row numbers count lines

    def place(self, row: Row) -> str:
        return f"{self.path}, {self.unit} {row.number}"

    def mistake(self, row: Row, text: str, *fixes: str) -> RowMistake:
        if self.lines:
            return _mistake_in_text(self.path, self.lines, row.number, text, *fixes)
        return _mistake(self.path, self.unit, row.number, text, _shown(row.number, row.values), fixes)


def read_table(path: Path, suffix: str | None = None, broken: list[RowMistake] | None = None) -> Table:
    """Read a file by its own suffix or the one given. A file without rows is a mistake. With `broken`, mistakes in
    lines of JSONL are appended to it instead of raised."""
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
    lines = _text(path).split("\n")  # not splitlines: JSON strings may contain other line separators
    table = Table(path, "line", [], lines)
    for number, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        try:
            try:
                values = read_json(line)
            except json.JSONDecodeError as error:
                raise _not_json(path, lines, number, error) from error
            if not isinstance(values, dict):
                raise _mistake_in_text(path, lines, number, f"expected an object, got {kind(values)}", OBJECT_FIX)
            table.rows.append(Row(number, values))
        except RowMistake as mistake:
            if broken is None:
                raise
            broken.append(mistake)
    return table


def read_json(text: str) -> Any:
    """Parse JSON. Valid JSON that later steps cannot handle is also a mistake: huge numbers, deep nesting, repeated
    keys, and unpaired surrogates, which no tokenizer reads."""
    repeated: list[tuple[str, dict[str, Any]]] = []

    def from_pairs(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        values = dict(pairs)
        if len(values) < len(pairs):
            keys = [key for key, _ in pairs]
            repeated.append((next(key for key in keys if keys.count(key) > 1), values))
        return values

    try:
        value = json.loads(text, object_pairs_hook=from_pairs)
    except json.JSONDecodeError:
        raise
    except RecursionError:
        raise json.JSONDecodeError(TOO_DEEP, text, 0) from None
    except ValueError:
        match = DIGITS.search(text)
        raise json.JSONDecodeError("A number has too many digits", text, match.start() if match else 0) from None
    if text.count("[") + text.count("{") > MAX_DEPTH and not is_shallow(value):
        raise json.JSONDecodeError(TOO_DEEP, text, 0)
    if repeated:
        raise RepeatedKey(repeated[0][0], text, repeated[0][1], value)
    if SURROGATE.search(text):
        try:
            json.dumps(value, ensure_ascii=False).encode()
        except UnicodeEncodeError as error:
            code = f"\\u{ord(error.object[error.start]):04x}"
            position = max(0, text.lower().find(code))
            raise json.JSONDecodeError("A string has half of a surrogate pair", text, position) from None
    return value


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
            text = f"expected an object, got {kind(values)}"
            raise _mistake(path, "item", number, text, _shown(number, values), [OBJECT_FIX])
    return Table(path, "item", [Row(number, values) for number, values in enumerate(items, start=1)])


def _repeated_in(path: Path, error: RepeatedKey) -> InputError:
    """Report the item of the list that has the repeated key, if the file is a list."""
    items = error.value if isinstance(error.value, list) else list(error.value.values())
    lists = [items] if isinstance(error.value, list) else [one for one in items if isinstance(one, list)]
    reason = error.msg[0].lower() + error.msg[1:]
    for number, item in enumerate((item for one in lists for item in one), start=1):
        if _contains(item, error.within):
            return _mistake(path, "item", number, reason, _shown(number, item), [KEY_FIX])
    return InputError(f"{path}: {reason}\n  fix: {KEY_FIX}")


def _contains(value: Any, target: dict[str, Any]) -> bool:
    inside = value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
    return value is target or any(_contains(one, target) for one in inside)


def _only_list(path: Path, values: dict[str, Any]) -> list[Any]:
    lists = [key for key, value in values.items() if isinstance(value, list)]
    if len(lists) != 1:
        raise InputError(
            f"{path}: expected a list of objects, or an object with one list, got an object with {len(lists)} lists\n"
            f"  keys here: {names(values)}\n  fix: make the file a list of objects"
        )
    items: list[Any] = values[lists[0]]
    return items


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
    csv.field_size_limit(sys.maxsize)  # the whole file is in memory already
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
    except (pyarrow.ArrowException, OSError, ValueError, OverflowError) as error:  # also invalid text and dates
        reason = next(iter(str(error).splitlines()), type(error).__name__)
        raise InputError(
            f"{path}: not a readable Parquet file ({reason})\n  fix: write or download it again"
        ) from error
    return Table(path, "row", [Row(number, values) for number, values in enumerate(rows, start=1)])


def _check_columns(path: Path, fields: Iterable[Any], within: str = "") -> None:
    """Refuse duplicate names of columns, and of fields within a struct, both of which Parquet allows."""
    import pyarrow

    fields = list(fields)
    seen = [field.name for field in fields]
    if twice := sorted({name for name in seen if seen.count(name) > 1}):
        raise InputError(f"{path}: two columns are called {names([within + twice[0]])}\n  fix: rename one")
    for field in fields:
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
    """Limited in size: a small gzip file can unpack to more than the memory."""
    limit = max(MAX_UNPACKED, MAX_RATIO * len(data))
    with gzip.GzipFile(fileobj=io.BytesIO(data)) as file:
        unpacked = file.read(limit + 1)
    if len(unpacked) > limit:
        raise InputError(
            f"{path}: unpacks to more than {limit >> 20} MiB, {MAX_RATIO} times its own size or more\n"
            "  fix: give the file without gzip, if that is what it should hold"
        )
    return unpacked


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
    lines = [f"{path}, {unit} {number}: {text}", *excerpt, *(f"  fix: {fix}" for fix in fixes)]
    return RowMistake("\n".join(lines), number)


def _shown(number: int, value: Any) -> list[str]:
    return [f"  {number} | {_clip(json.dumps(value, ensure_ascii=False, default=str))}"]


def _excerpt(lines: Sequence[str], number: int, column: int = 1) -> list[str]:
    """The line, and the one before it."""
    numbers = [n for n in (number - 1, number) if n >= 1]
    width = len(str(number))
    return [f"  {n:>{width}} | {_clip(lines[n - 1], column if n == number else 1)}" for n in numbers]


def _clip(line: str, column: int = 1) -> str:
    """Shorten a long line such that `column` stays visible."""
    start = max(0, column - WIDTH * 3 // 4)
    return ("…" if start else "") + line[start : start + WIDTH] + ("…" if len(line) > start + WIDTH else "")


def names(columns: Iterable[str]) -> str:
    """Names for a message, shortened: a file that is not a data file may have any number of columns with any name."""
    first = list(islice(columns, MAX_NAMES + 1))
    shown = [name if len(name) <= MAX_NAME else f"{name[:MAX_NAME]}…" for name in first[:MAX_NAMES]]
    return ", ".join([*shown, *(["…"] if len(first) > MAX_NAMES else [])]) or "none"


def kind(value: Any) -> str:
    """The JSON name of a value's type, for messages."""
    if value is None:
        return "null"
    if isinstance(value, bool):
        return "true" if value else "false"
    names = {str: "a string", int: "a number", float: "a number", list: "a list", dict: "an object"}
    return names.get(type(value), f"a {type(value).__name__}")


FORMATS: dict[str, Callable[[Path], Table]] = {
    ".json": _read_json,
    ".jsonl": _read_jsonl,
    ".ndjson": _read_jsonl,
    ".csv": _read_csv,
}
READERS: dict[str, Callable[[Path], Table]] = {
    **{suffix + packed: read for suffix, read in FORMATS.items() for packed in ("", ".gz")},
    ".parquet": _read_parquet,
}
SUFFIXES = tuple(READERS)
