"""search: BM25 over a local corpus, with the package bm25s.

A corpus is a folder of .txt, .md and .jsonl files, or one JSONL, JSON or Parquet file with `text` and `title`. A record
is one passage. A text file is split at empty lines into passages of about PASSAGE characters.

The index is built once per corpus and saved beside it in `.covey-index/`, under a hash of the corpus' content, or in
the user's cache folder if the corpus' folder is read-only. All episodes of a run share it.
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
from covey.imports import require

if TYPE_CHECKING:
    import bm25s

KEY = "agent.tool_options.search.corpus"
RECORDS = (".jsonl", ".json", ".parquet")
TEXTS = (".txt", ".md")
TEXT_COLUMNS = ("text", "contents", "content")
PASSAGE = 1200  # characters of a passage of a text file


@dataclass(frozen=True, slots=True)
class Passage:
    title: str
    text: str


def corpus_files(path: Path) -> list[Path]:
    """The files of a corpus, in order."""
    if path.is_file():
        if path.suffix not in (*RECORDS, *TEXTS):
            raise InputError(f"{KEY}={path}: a corpus is {', '.join((*RECORDS, *TEXTS))}, or a folder of them")
        return [path]
    if not path.is_dir():
        lines = [f"{KEY}: no such file or folder  {path}"]
        if path.parent.is_dir() and (guess := nearest(path.name, (entry.name for entry in path.parent.iterdir()))):
            lines.append(f"  did you mean   {path.with_name(guess)}?")
        raise Absent("\n".join(lines))
    files = [
        entry
        for entry in sorted(path.rglob("*"))
        if entry.suffix in (*TEXTS, ".jsonl")
        and not any(part.startswith(".") for part in entry.relative_to(path).parts)
    ]
    if not files:
        raise InputError(f"{KEY}={path}: no .txt, .md or .jsonl file in this folder")
    return files


def fingerprint(files: Iterable[Path]) -> str:
    """A hash of the names and contents of the files, independent of their folder."""
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
        return _records(_parquet(file))
    return _records(_jsonl(file) if file.suffix == ".jsonl" else _json(file))


def _text(file: Path) -> Iterator[Passage]:
    try:
        text = file.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise InputError(f"{file}: not UTF-8 text ({error})") from error
    heading = re.match(r"\s*#\s+(.+)", text) if file.suffix == ".md" else None
    title = heading[1].strip() if heading else file.stem
    passage: list[str] = []
    for paragraph in filter(None, (part.strip() for part in re.split(r"\n\s*\n", text))):
        if passage and sum(map(len, passage)) + len(paragraph) > PASSAGE:
            yield Passage(title, "\n\n".join(passage))
            passage = []
        passage.append(paragraph)
    if passage:
        yield Passage(title, "\n\n".join(passage))


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
        columns = [name for name in table.schema_arrow.names if name in ("title", *TEXT_COLUMNS)]
        for batch in table.iter_batches(columns=columns):
            for row in batch.to_pylist():
                yield f"{file}, row {number}", row
                number += 1
    except (pyarrow.ArrowException, OSError) as error:
        raise InputError(f"{file}: not a readable Parquet file ({str(error).splitlines()[0]})") from error


def _records(rows: Iterator[tuple[str, Any]]) -> Iterator[Passage]:
    for place, row in rows:
        is_row = isinstance(row, Mapping)
        text = next((row[column] for column in TEXT_COLUMNS if column in row), None) if is_row else None
        if not isinstance(text, str):
            names = _without_surrogates(", ".join(map(str, row)))[:200] if is_row else ""
            columns = f"; it has: {names or 'nothing'}" if is_row else ""
            raise InputError(f"{place}: a passage needs a column `text` (and may have `title`){columns}")
        yield Passage(_without_surrogates(str(row.get("title") or "")), _without_surrogates(text))


def _without_surrogates(text: str) -> str:
    """JSON can hold lone surrogates, which tokenizers refuse."""
    return text.encode(errors="replace").decode()


# -- Index and search --------------------------------------------------------------------------------------------------

MAX_PASSAGES = 20  # of one search
LAYOUT = "1"  # version of the index folder's layout, part of its name


@dataclass(frozen=True)
class SearchOptions:
    corpus: str | None = None  # a folder of .txt, .md, .jsonl, or a JSONL, JSON or Parquet file with title and text
    top_k: int = 3  # passages, unless the model requests another number


def make_search(options: SearchOptions) -> Tool:
    if options.corpus is None:
        raise InputError(f"tool search: which corpus?\n  fix: {KEY}=FILE_OR_FOLDER")
    if not 1 <= options.top_k <= MAX_PASSAGES:
        raise InputError(f"agent.tool_options.search.top_k must lie in 1..{MAX_PASSAGES}, got {options.top_k}")
    index = open_index(Path(options.corpus).expanduser().resolve())

    async def search(query: str, top_k: int = options.top_k) -> str:
        """Search a collection of documents and return the passages that fit best.

        Args:
            query: What to look for: a few words, a name, a question.
            top_k: How many passages to return.
        """
        if top_k < 1:
            raise ToolMistake("bad_arguments", f"error: search: top_k must be at least 1, got {top_k}")
        # In a thread: a search in a large corpus would block all other episodes.
        return format_passages(await asyncio.to_thread(index.find, query, min(top_k, MAX_PASSAGES)))

    return replace(tool(search), inline=True)


def format_passages(passages: list[Passage]) -> str:
    entries = (f"[{n}] {passage.title}\n{passage.text}".replace("] \n", "]\n") for n, passage in enumerate(passages, 1))
    return "\n\n".join(entries) or "nothing found"


@dataclass(frozen=True)
class Index:
    passages: list[Passage]
    bm25: bm25s.BM25

    def find(self, query: str, top_k: int) -> list[Passage]:
        """The best passages that share a word with the query, best first; ties in the order of the corpus."""
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
    bm25s = require("bm25s", "search", "tool search needs the package bm25s")
    files = corpus_files(corpus)
    passages = read_corpus(files)
    if not passages:
        raise InputError(f"{KEY}={corpus}: there is no passage in it")
    name = f"{fingerprint(files)}-{LAYOUT}-{bm25s.__version__}"
    folders = _index_folders(corpus)
    for folder in folders:
        if (folder / name).is_dir():
            return Index(passages, bm25s.BM25.load(folder / name, show_progress=False))
    bm25 = bm25s.BM25()
    bm25.index(_words([f"{passage.title}\n{passage.text}" for passage in passages]), show_progress=False)
    _save(bm25, name, folders)
    return Index(passages, bm25)


def _words(texts: list[str]) -> Any:
    import bm25s

    return bm25s.tokenize(texts, stopwords="en", return_ids=False, show_progress=False)


def _index_folders(corpus: Path) -> list[Path]:
    """Folders that may hold the index. Nothing is written to a folder marked read-only, even with the rights to."""
    folder = corpus if corpus.is_dir() else corpus.parent
    beside = [folder / ".covey-index"] if folder.stat().st_mode & 0o222 else []
    cached = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "covey" / "search"
    return [*beside, cached]


def _save(bm25: bm25s.BM25, name: str, folders: list[Path]) -> None:
    """Save the index in the first writable folder. Renaming a finished draft makes this atomic."""
    for folder in folders:
        try:
            folder.mkdir(parents=True, exist_ok=True)
            draft = Path(tempfile.mkdtemp(prefix=".draft-", dir=folder))
        except OSError:
            continue
        try:
            bm25.save(draft, show_progress=False)
            draft.rename(folder / name)
        except OSError:  # the disk is full, or another run saved it first
            shutil.rmtree(draft, ignore_errors=True)
        return
