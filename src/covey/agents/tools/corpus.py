"""Passages to search: a folder of .txt, .md and .jsonl, or one JSONL, JSON or Parquet file with title and text.

A record of a file is one passage. A text of a folder is cut at its empty lines into passages of about a screen.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from hashlib import blake2b
from pathlib import Path
from typing import Any

from covey.errors import Absent, InputError, nearest

KEY = "agent.tool_options.search.corpus"
RECORDS = (".jsonl", ".json", ".parquet")
TEXTS = (".txt", ".md")
TEXT_COLUMNS = ("text", "contents", "content")
PASSAGE = 1200  # characters of a passage cut from a text


@dataclass(frozen=True, slots=True)
class Passage:
    title: str
    text: str


def corpus_files(path: Path) -> list[Path]:
    """The files of a corpus, in order; or what is wrong with the setting."""
    if path.is_file():
        if path.suffix not in (*RECORDS, *TEXTS):
            raise InputError(f"{KEY}={path}: a corpus is {', '.join((*RECORDS, *TEXTS))}, or a folder of them")
        return [path]
    if not path.is_dir():
        lines = [f"{KEY}: no such file or folder  {path}"]
        if path.parent.is_dir() and (guess := nearest(path.name, (entry.name for entry in path.parent.iterdir()))):
            lines.append(f"  did you mean   {path.with_name(guess)}?")
        raise Absent("\n".join(lines))
    found = [
        entry
        for entry in sorted(path.rglob("*"))
        if entry.suffix in (*TEXTS, ".jsonl")
        and not any(part.startswith(".") for part in entry.relative_to(path).parts)
    ]
    if not found:
        raise InputError(f"{KEY}={path}: no .txt, .md or .jsonl file in this folder")
    return found


def fingerprint(files: Iterable[Path]) -> str:
    """A hash of what is in the files, whatever they are called and wherever they lie."""
    digest = blake2b(digest_size=16)
    for file in files:
        digest.update(f"{file.name}\0{file.stat().st_size}\0".encode())
        with file.open("rb") as stream:
            while block := stream.read(1 << 20):
                digest.update(block)
    return digest.hexdigest()


def read_corpus(files: Iterable[Path]) -> list[Passage]:
    return [passage for file in files for passage in _read(file)]


def _read(file: Path) -> Iterator[Passage]:
    if file.suffix in TEXTS:
        return _text(file)
    if file.suffix == ".parquet":
        return _records(file, _parquet(file))
    return _records(file, _jsonl(file) if file.suffix == ".jsonl" else _json(file))


def _text(file: Path) -> Iterator[Passage]:
    try:
        text = file.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise InputError(f"{file}: not UTF-8 text ({error})") from error
    heading = re.match(r"\s*#\s+(.+)", text) if file.suffix == ".md" else None
    title = heading[1].strip() if heading else file.stem
    held: list[str] = []
    for paragraph in filter(None, (part.strip() for part in re.split(r"\n\s*\n", text))):
        if held and sum(map(len, held)) + len(paragraph) > PASSAGE:
            yield Passage(title, "\n\n".join(held))
            held = []
        held.append(paragraph)
    if held:
        yield Passage(title, "\n\n".join(held))


def _jsonl(file: Path) -> Iterator[tuple[str, Any]]:
    with file.open("rb") as lines:
        for number, line in enumerate(lines, 1):
            if line.strip():
                try:
                    yield f"{file}, line {number}", json.loads(line.decode())
                except UnicodeDecodeError as error:
                    raise InputError(f"{file}, line {number}: not UTF-8 text ({error})") from error
                except (ValueError, RecursionError) as error:
                    raise InputError(f"{file}, line {number}: not JSON ({error})") from error


def _json(file: Path) -> Iterator[tuple[str, Any]]:
    try:
        rows = json.loads(file.read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as error:
        raise InputError(f"{file}: not JSON ({error})") from error
    if not isinstance(rows, list):
        raise InputError(f"{file}: a corpus is a list of objects with title and text")
    return ((f"{file}, entry {number}", row) for number, row in enumerate(rows))


def _parquet(file: Path) -> Iterator[tuple[str, Any]]:
    import pyarrow
    import pyarrow.parquet as pq

    number = 0
    try:
        table = pq.ParquetFile(file)
        wanted = [name for name in table.schema_arrow.names if name in ("title", *TEXT_COLUMNS)]
        for batch in table.iter_batches(columns=wanted):
            for row in batch.to_pylist():
                yield f"{file}, row {number}", row
                number += 1
    except (pyarrow.ArrowException, OSError) as error:
        raise InputError(f"{file}: not a readable Parquet file ({str(error).splitlines()[0]})") from error


def _records(file: Path, rows: Iterator[tuple[str, Any]]) -> Iterator[Passage]:
    for place, row in rows:
        text = next((row[column] for column in TEXT_COLUMNS if column in row), None) if _is_row(row) else None
        if not isinstance(text, str):
            named = _whole(", ".join(map(str, row)))[:200] if _is_row(row) else ""
            columns = f"; it has: {named or 'nothing'}" if _is_row(row) else ""
            raise InputError(f"{place}: a passage needs a column `text` (and may have `title`){columns}")
        # Half characters, which JSON can write, are none: what is searched is shown to a model.
        yield Passage(_whole(str(row.get("title") or "")), _whole(text))


def _whole(text: str) -> str:
    return text.encode(errors="replace").decode()


def _is_row(row: Any) -> bool:
    return isinstance(row, Mapping)
