"""Passages to search: a folder of .txt, .md and .jsonl, or one JSONL, JSON or Parquet file with title and text.

A record of a file is one passage. A text of a folder is cut at its empty lines into passages of about a screen.
"""

from __future__ import annotations

import asyncio
import json
import os
import re
import shutil
import tempfile
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cache
from hashlib import blake2b
from pathlib import Path
from typing import TYPE_CHECKING, Any

from covey.agents.tools.tool import Tool, ToolMistake, tool
from covey.errors import Absent, InputError, nearest
from covey.imports import install_extra

if TYPE_CHECKING:
    import bm25s

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


# -- search: BM25 over a local corpus, with the bm25s package ----------------------------------------------------------
# The index is made once for a corpus and kept beside it, in `.covey-index/`, under a hash of the corpus' content (or in
# the user's cache folder where nothing can be written there). All episodes of a run share it.

MOST = 20  # passages of one search
LAYOUT = "1"  # of the index folder: another one, another hash


@dataclass(frozen=True)
class SearchOptions:
    corpus: str | None = None  # a folder of .txt, .md, .jsonl, or a JSONL, JSON or Parquet file with title and text
    top_k: int = 3  # passages, unless the model asks for another number


def make_search(options: SearchOptions) -> Tool:
    if options.corpus is None:
        raise InputError(f"tool search: which corpus?\n  fix: {KEY}=FILE_OR_FOLDER")
    if not 1 <= options.top_k <= MOST:
        raise InputError(f"agent.tool_options.search.top_k must lie in 1..{MOST}, got {options.top_k}")
    index = open_index(Path(options.corpus).expanduser().resolve())

    async def search(query: str, top_k: int = options.top_k) -> str:
        """Search a collection of documents and return the passages that fit best.

        Args:
            query: What to look for: a few words, a name, a question.
            top_k: How many passages to return.
        """
        if top_k < 1:
            raise ToolMistake("bad_arguments", f"error: search: top_k must be at least 1, got {top_k}")
        # In a thread: a search in a large corpus would hold up every other episode. It always ends.
        return numbered(await asyncio.to_thread(index.find, query, min(top_k, MOST)))

    return replace(tool(search), inline=True)


def numbered(passages: list[Passage]) -> str:
    found = (f"[{n}] {passage.title}\n{passage.text}".replace("] \n", "]\n") for n, passage in enumerate(passages, 1))
    return "\n\n".join(found) or "nothing found"


@dataclass(frozen=True)
class Index:
    passages: list[Passage]
    bm25: bm25s.BM25

    def find(self, query: str, top_k: int) -> list[Passage]:
        """The best passages that share a word with the query, best first; equals in the order of the corpus."""
        import numpy as np

        words = _words([query])[0]
        known = [word for word in words if word in self.bm25.vocab_dict]
        if not known:
            return []
        scores = self.bm25.get_scores(known)
        best = np.argsort(-scores, kind="stable")[:top_k]
        return [self.passages[n] for n in best if scores[n] > 0]


@cache
def open_index(corpus: Path) -> Index:
    try:
        import bm25s
    except ImportError as error:
        raise Absent(f"tool search needs the package bm25s\n  fix: {install_extra('search')}") from error
    files = corpus_files(corpus)
    passages = read_corpus(files)
    if not passages:
        raise InputError(f"{KEY}={corpus}: there is no passage in it")
    name = f"{fingerprint(files)}-{LAYOUT}-{bm25s.__version__}"
    for home in _homes(corpus):
        if (home / name).is_dir():
            return Index(passages, bm25s.BM25.load(home / name, show_progress=False))
    made = bm25s.BM25()
    made.index(_words([f"{passage.title}\n{passage.text}" for passage in passages]), show_progress=False)
    _keep(made, name, _homes(corpus))
    return Index(passages, made)


def _words(texts: list[str]) -> Any:
    import bm25s

    return bm25s.tokenize(texts, stopwords="en", return_ids=False, show_progress=False)


def _homes(corpus: Path) -> list[Path]:
    """Where an index may be kept. A folder that is marked read-only stays as it is, also where we could write."""
    folder = corpus if corpus.is_dir() else corpus.parent
    beside = [folder / ".covey-index"] if folder.stat().st_mode & 0o222 else []
    cached = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "covey" / "search"
    return [*beside, cached]


def _keep(made: bm25s.BM25, name: str, homes: list[Path]) -> None:
    """Written beside and renamed: an index is whole or absent. Where nothing can be written it is made each time."""
    for home in homes:
        try:
            home.mkdir(parents=True, exist_ok=True)
            draft = Path(tempfile.mkdtemp(prefix=".draft-", dir=home))
        except OSError:
            continue
        try:
            made.save(draft, show_progress=False)
            draft.rename(home / name)
        except OSError:  # the disk is full, or another run was faster
            shutil.rmtree(draft, ignore_errors=True)
        return
