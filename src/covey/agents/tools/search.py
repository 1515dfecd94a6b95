"""search: BM25 over a local corpus, with the bm25s package.

The index is made once for a corpus and kept beside it, in `.covey-index/`, under a hash of the corpus' content (or in
the user's cache folder where nothing can be written there). All episodes of a run share it.
"""

from __future__ import annotations

import asyncio
import os
import shutil
import tempfile
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from covey.agents.tools.corpus import KEY, Passage, corpus_files, fingerprint, read_corpus
from covey.agents.tools.errors import ToolMistake
from covey.agents.tools.tool import Tool, tool
from covey.errors import Absent, InputError
from covey.install import install_extra

if TYPE_CHECKING:
    import bm25s

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
