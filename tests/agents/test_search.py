"""search: corpora, the saved index, and real questions."""

from __future__ import annotations

import asyncio
import json
import re
import shutil
from pathlib import Path
from typing import Any

import pytest

from covey.agents.tools.search import PASSAGE, corpus_files, fingerprint, read_corpus
from covey.agents.tools.toolset import resolve_tools
from covey.errors import Absent, InputError
from covey.imports import install_extra
from covey.tool_calls import Call

PASSAGES = [
    {"title": "Paris", "text": "Paris is the capital of France, on the river Seine."},
    {"title": "Berlin", "text": "Berlin is the capital of Germany, on the river Spree."},
    {"title": "Seine", "text": "The Seine is a river that flows into the English Channel."},
    {"title": "", "text": "Bananas are yellow."},
]


@pytest.fixture
def corpus(tmp_path: Path) -> Path:
    file = tmp_path / "corpus.jsonl"
    file.write_text("\n".join(map(json.dumps, PASSAGES)) + "\n")
    return file


def ask(corpus: Path, **arguments: Any) -> str:
    async def go() -> str:
        async with resolve_tools(["search"], {"search": {"corpus": str(corpus)}}).open() as session:
            (result,) = await session.call([Call("search", arguments)])
            return result.text

    return asyncio.run(go())


def test_every_kind_of_file_holds_the_same_passages(tmp_path: Path, corpus: Path) -> None:
    pa = pytest.importorskip("pyarrow")
    import pyarrow.parquet as pq

    (tmp_path / "corpus.json").write_text(json.dumps(PASSAGES))
    pq.write_table(pa.Table.from_pylist([{**row, "extra": 1} for row in PASSAGES]), tmp_path / "corpus.parquet")
    expected = read_corpus([corpus])
    assert [(passage.title, passage.text) for passage in expected] == [(r["title"], r["text"]) for r in PASSAGES]
    for name in ("corpus.json", "corpus.parquet"):
        assert read_corpus(corpus_files(tmp_path / name)) == expected


def test_a_folder_of_texts(tmp_path: Path) -> None:
    folder = tmp_path / "docs"
    (folder / "deep").mkdir(parents=True)
    (folder / ".git").mkdir()
    (folder / "a.txt").write_text("first paragraph\n\nsecond paragraph\n")
    (folder / "deep/b.md").write_text("# A title\n\n" + "\n\n".join("word " * 100 for _ in range(5)))
    (folder / "c.jsonl").write_text('{"contents": "from a record"}\n\n')
    (folder / ".git/no.txt").write_text("hidden")
    (folder / "picture.png").write_bytes(b"\x89PNG")
    found = read_corpus(corpus_files(folder))
    assert (found[0].title, found[0].text) == ("a", "first paragraph\n\nsecond paragraph")
    assert (found[1].title, found[1].text) == ("", "from a record")
    assert {passage.title for passage in found[2:]} == {"A title"} and len(found) == 5
    assert all(len(passage.text) <= PASSAGE + 10 for passage in found)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ('{"text": "a"}\n{"text": oops}\n', r"corpus\.jsonl, line 2: not JSON"),
        ('{"title": "a"}\n', r"corpus\.jsonl, line 1: a passage needs a column `text`.*it has: title"),
        ("[1, 2]\n", r"corpus\.jsonl, line 1: a passage needs"),
    ],
)
def test_a_damaged_corpus_says_where(corpus: Path, text: str, message: str) -> None:
    corpus.write_text(text)
    with pytest.raises(InputError, match=message):
        read_corpus([corpus])


def test_a_missing_corpus(tmp_path: Path, corpus: Path) -> None:
    with pytest.raises(
        Absent, match=r"(?s)agent\.tool_options\.search\.corpus: no such file.*did you mean   .*corpus\.jsonl"
    ):
        corpus_files(tmp_path / "corpus.json1")
    with pytest.raises(InputError, match=r"no \.txt, \.md or \.jsonl"):
        (tmp_path / "empty").mkdir()
        corpus_files(tmp_path / "empty")
    with pytest.raises(InputError, match=r"agent\.tool_options\.search\.corpus=FILE_OR_FOLDER"):
        resolve_tools(["search"])


def test_the_fingerprint_depends_on_the_content(corpus: Path) -> None:
    before = fingerprint([corpus])
    corpus.touch()
    assert fingerprint([corpus]) == before
    corpus.write_text(corpus.read_text().replace("yellow", "orange"))
    assert fingerprint([corpus]) != before


def test_the_package_is_named_if_it_is_missing(corpus: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(__import__("sys").modules, "bm25s", None)
    with pytest.raises(Absent, match=re.escape(install_extra("search"))):
        resolve_tools(["search"], {"search": {"corpus": str(corpus)}})


def test_passages_come_numbered_best_first(corpus: Path) -> None:
    pytest.importorskip("bm25s", reason="bm25s is not installed")
    assert ask(corpus, query="capital of France", top_k=2) == (
        "[1] Paris\nParis is the capital of France, on the river Seine.\n\n"
        "[2] Berlin\nBerlin is the capital of Germany, on the river Spree."
    )
    assert ask(corpus, query="bananas", top_k="5") == "[1]\nBananas are yellow."
    assert ask(corpus, query="zebra") == "nothing found"
    assert ask(corpus, query="") == "nothing found"
    assert ask(corpus, query="river", top_k=0).startswith("error: search: top_k must be at least 1")
    assert ask(corpus, query="river", top_k=99).count("[") == 3


def test_the_scores_are_those_of_the_formula(corpus: Path) -> None:
    """Lucene's BM25 by hand: ln(1 + (N − n + ½)/(n + ½)) · tf/(tf + k1(1 − b + b·len/mean)), k1 = 1.5, b = 0.75."""
    pytest.importorskip("bm25s", reason="bm25s is not installed")
    from math import log

    from covey.agents.tools.search import _words, open_index

    lengths = [len(words) for words in _words([f"{row['title']}\n{row['text']}" for row in PASSAGES])]
    idf = log(1 + (4 - 2 + 0.5) / (2 + 0.5))  # "seine" is in two of four: once in Paris, twice in Seine
    mean = sum(lengths) / 4
    expected = [idf * tf / (tf + 1.5 * (0.25 + 0.75 * n / mean)) for tf, n in zip((1, 0, 2, 0), lengths, strict=True)]
    assert open_index(corpus).bm25.get_scores(["seine"]) == pytest.approx(expected, rel=1e-5)


def test_the_index_is_saved_beside_the_corpus_and_reused(corpus: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    bm25s = pytest.importorskip("bm25s", reason="bm25s is not installed")
    from covey.agents.tools.search import open_index

    first = ask(corpus, query="river Spree")
    (kept,) = (corpus.parent / ".covey-index").iterdir()
    open_index.cache_clear()
    monkeypatch.setattr(bm25s.BM25, "index", lambda *_, **__: pytest.fail("it was made again"))
    assert ask(corpus, query="river Spree") == first
    assert [entry.name for entry in kept.parent.iterdir()] == [kept.name]  # no draft is left


def test_a_corpus_in_a_read_only_folder(corpus: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("bm25s", reason="bm25s is not installed")
    cache = tmp_path / "cache"
    monkeypatch.setenv("XDG_CACHE_HOME", str(cache))
    folder = tmp_path / "read_only"
    folder.mkdir()
    moved = corpus.rename(folder / corpus.name)
    folder.chmod(0o555)
    try:
        assert ask(moved, query="bananas").startswith("[1]")
        assert [entry.name for entry in folder.iterdir()] == [corpus.name]  # also for root, who could write there
        assert len(list((cache / "covey/search").iterdir())) == 1
    finally:
        folder.chmod(0o755)


def test_real_questions_find_their_passages(shared: Path, tmp_path: Path) -> None:
    pytest.importorskip("bm25s", reason="bm25s is not installed")
    from covey.agents.tools.search import open_index

    index = open_index(Path(shutil.copy(shared / "data/qa/corpus.jsonl", tmp_path)))
    questions = [json.loads(line) for line in (shared / "data/qa/questions.jsonl").open()]
    questions = [q for q in questions if q["gold_complete"] and "gold_titles" in q][::10]
    found = [{passage.title for passage in index.find(q["question"], 5)} & set(q["gold_titles"]) for q in questions]
    assert len(questions) > 200
    assert sum(map(bool, found)) / len(questions) > 0.95  # 0.975 of all of them
    assert "Lilu (mythology)" in {p.title for p in index.find("If Gallu is a demon Lilu is what?", 5)}
