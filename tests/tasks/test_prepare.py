"""Preparing: what is taken out, what is refused by line, where files come from, and what is left when it fails."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from covey.errors import Absent, InputError
from covey.tasks import DATASETS
from covey.tasks.datasets.dataset import Hub, Source, Url, normalize_question
from covey.tasks.datasets.math_sets import last_boxed
from covey.tasks.datasets.prepare import prepare
from covey.tasks.reading import read_table

GSM8K = DATASETS["gsm8k"]


def row(question: str, answer: str = "#### 2") -> dict[str, str]:
    return {"question": question, "answer": answer}


def write(path: Path, *rows: Any) -> str:
    path.write_text("\n".join(line if isinstance(line, str) else json.dumps(line) for line in rows))
    return str(path)


def questions(path: Path) -> list[str]:
    return [result.values["question"] for result in read_table(path).rows]


@pytest.mark.parametrize(
    ("one", "other", "same"),
    [
        ("What is $x + 1$?", "what is x+1", True),
        ("What is x+1?", "What is x-1?", False),
        ("It costs 1.5 euros.", "It costs 15 euros", False),
        ("It costs 1,500 euros.", "It costs 1500 euros.", False),  # who knows: a list, or a thousand
        (r"Find $\dfrac{1}{2}\, \left( x \right)$.", r"find \frac{1}{2}(x)", True),
        ("A “quoted” word", 'a "quoted" word', True),
        (r"\leftarrow", r"arrow", False),
    ],
)
def test_when_two_questions_are_the_same(one: str, other: str, same: bool) -> None:
    assert (normalize_question(one) == normalize_question(other)) is same


@pytest.mark.parametrize(
    ("solution", "answer"),
    [
        (r"so \boxed{3} or \boxed{\frac{1}{2}}.", r"\frac{1}{2}"),
        (r"$\boxed 7$", "7"),
        (r"\fbox{a}", "a"),
        (r"\boxed{cut", None),
        ("no box", None),
    ],
)
def test_the_last_box(solution: str, answer: str | None) -> None:
    assert last_boxed(solution) == answer


def test_repeats_and_overlap_are_dropped_from_training_only(tmp_path: Path) -> None:
    train = write(
        tmp_path / "train.jsonl",
        row("What is 1 + 1?"),
        row("What is 2 + 2?", "#### 4"),
        row("what is 2+2", "#### 4"),  # the same text, written otherwise
        row("What is 2 + 2?", "#### 4"),  # the same row
        row("What is 3 + 3?", "#### "),
        row("What is 5 + 5?", "#### 10"),
    )
    test = write(tmp_path / "test.jsonl", row("What is 5+5 ?"), row("What is 6 + 6?"), row("What is 6 + 6?"))
    manifest = prepare(GSM8K, [train, test], tmp_path / "out").manifest
    assert questions(tmp_path / "out/train.parquet") == ["What is 1 + 1?", "What is 2 + 2?"]
    assert questions(tmp_path / "out/test.parquet") == ["What is 5+5 ?", "What is 6 + 6?", "What is 6 + 6?"]
    assert manifest["dropped"] == {
        "train": {
            "no answer": {"rows": 1, "first": ["gsm8k/train/4"]},
            "repeats a question": {"rows": 1, "first": ["gsm8k/train/2 = gsm8k/train/1"]},
            "repeats a row": {"rows": 1, "first": ["gsm8k/train/3 = gsm8k/train/1"]},
            "asked in test": {"rows": 1, "first": ["gsm8k/train/5 = gsm8k/test/0"]},
        }
    }
    assert manifest["repeated_in_evaluation"] == {
        "test": {"repeats a row": {"rows": 1, "first": ["gsm8k/test/2 = gsm8k/test/1"]}}
    }
    assert manifest["overlap_checked_with"] == ["test"]


def test_training_rows_that_another_set_asks(tmp_path: Path) -> None:
    asked = {"problem": "What is $1+1$?", "answer": "2", "id": 7}
    other = {"problem": "What is $2+2$?", "answer": "4"}
    prepare(DATASETS["aime24"], [write(tmp_path / "aime24.jsonl", asked)], tmp_path / "data/aime24")
    train = write(tmp_path / "deepscaler.jsonl", {**asked, "id": None}, other)
    manifest = prepare(DATASETS["deepscaler"], [train], tmp_path / "data/deepscaler").manifest
    assert manifest["rows"] == {"train": 1}
    assert manifest["dropped"]["train"]["asked in aime24"]["first"] == ["deepscaler/train/0 = aime24/7"]
    assert manifest["overlap_checked_with"] == ["aime24"] and manifest["overlap_not_checked_with"] == ["amc23"]


@pytest.mark.parametrize(
    ("broken", "message"),
    [
        ('{"question": oops}', "train.jsonl, line 2: not JSON (expected a value at column 14)"),
        ({"question": "1+1"}, "train.jsonl, line 2: no column answer (columns here: question)"),
        (row("1+1", "two"), "train.jsonl, line 2: not a row of gsm8k (answer has no `#### number` at its end)"),
    ],
)
def test_damaged_rows_are_reported_by_line(tmp_path: Path, broken: Any, message: str) -> None:
    file = write(tmp_path / "train.jsonl", row("2+2"), broken)
    with pytest.raises(InputError) as caught:
        prepare(GSM8K, [file], tmp_path / "out")
    assert message in str(caught.value) and "  2 | " in str(caught.value)
    assert not (tmp_path / "out").exists()


def test_files_are_identified_by_name_or_keyword(tmp_path: Path) -> None:
    strange = write(tmp_path / "problems.jsonl", row("1+1"))
    with pytest.raises(InputError, match="which file of gsm8k is this"):
        prepare(GSM8K, [strange], tmp_path / "out")
    assert prepare(GSM8K, [f"test={strange}"], tmp_path / "out").manifest["rows"] == {"test": 1}
    with pytest.raises(InputError, match="gsm8k has files for train, test, not for dev"):
        prepare(GSM8K, [f"dev={strange}"], tmp_path / "out")
    with pytest.raises(Absent, match="no such file"):
        prepare(GSM8K, [str(tmp_path / "none.jsonl")], tmp_path / "out")


def test_answers_that_are_missing(tmp_path: Path) -> None:
    asked = {"id": "parallel_0", "question": [[{"role": "user", "content": "?"}]], "function": []}
    file = write(tmp_path / "BFCL_v4_parallel.json", asked)
    with pytest.raises(InputError, match="no ground truth for id parallel_0: give the file of possible_answer too"):
        prepare(DATASETS["bfcl"], [file], tmp_path / "out")


def test_rows_with_their_own_passages(tmp_path: Path) -> None:
    """As HotpotQA, 2WikiMultihopQA (lists as text) and MuSiQue publish them."""
    hotpot = {
        "_id": "a",
        "question": "Who?",
        "answer": "Ann",
        "supporting_facts": [["One", 0], ["One", 1]],
        "context": [["One", ["First. ", "Second."]], ["Two", ["Third."]]],
    }
    packed = {key: json.dumps(value) if isinstance(value, list) else value for key, value in hotpot.items()}
    musique = {
        "id": "a",
        "question": "Who?",
        "answer": "Ann",
        "answer_aliases": ["Anne"],
        "paragraphs": [
            {"title": "One", "paragraph_text": "First. Second.", "is_supporting": True},
            {"title": "Two", "paragraph_text": "Third.", "is_supporting": False},
        ],
    }
    for name, raw, answers in (
        ("hotpotqa", hotpot, ["Ann"]),
        ("2wiki", packed, ["Ann"]),
        ("musique", musique, ["Ann", "Anne"]),
    ):
        out = tmp_path / name
        prepare(DATASETS[name], [write(tmp_path / f"{name}_train.jsonl", raw)], out)
        (result,) = read_table(out / "train.parquet").rows
        assert result.values["answer"] == answers and result.values["gold_titles"] == ["One"]
        passages = [json.loads(line) for line in (out / "corpus.jsonl").read_text().splitlines()]
        assert [(one["title"], one["text"]) for one in passages] == [("One", "First. Second."), ("Two", "Third.")]


def test_other_column_names(tmp_path: Path) -> None:
    """DAPO's rows for verl: the problem in words of its own, the answer inside reward_model."""
    expected_text = (
        "Solve the following math problem step by step. The last line of your response should be of the form Answer: "
        "$Answer (without quotes) where $Answer is the answer to the problem.\n\nWhat is 1+1?\n\n"
        'Remember to put your answer on its own line after "Answer:".'
    )
    raw = {"prompt": [{"role": "user", "content": expected_text}], "reward_model": {"ground_truth": "2"}}
    prepare(DATASETS["dapo_math"], [write(tmp_path / "dapo.jsonl", raw)], tmp_path / "out")
    (result,) = read_table(tmp_path / "out/train.parquet").rows
    assert (result.values["question"], result.values["answer"]) == ("What is 1+1?", "2")
    short = {"prompt": "What is 1+1?", "solution": "2"}  # as others have shortened them
    prepare(DATASETS["dapo_math"], [write(tmp_path / "dapo.jsonl", short)], tmp_path / "out")
    assert read_table(tmp_path / "out/train.parquet").rows[0].values["answer"] == "2"


def test_answers_inside_solutions(tmp_path: Path) -> None:
    """MATH as its authors publish it; a solution without a box has no answer that could be compared."""
    rows = [{"problem": f"{n}?", "solution": text} for n, text in enumerate((r"So $\boxed{\frac12}$.", "So it is."))]
    manifest = prepare(DATASETS["math"], [write(tmp_path / "train.jsonl", *rows)], tmp_path / "out").manifest
    assert read_table(tmp_path / "out/train.parquet").rows[0].values["answer"] == r"\frac12"
    assert manifest["dropped"]["train"] == {
        r"no \boxed answer in the solution": {"rows": 1, "first": ["train.jsonl, line 2"]}
    }


# Written whole, or not at all


def test_only_what_was_prepared_is_replaced(tmp_path: Path) -> None:
    file = write(tmp_path / "train.jsonl", row("1+1"))
    out = tmp_path / "out"
    out.mkdir()
    (out / "letters.txt").write_text("mine")
    with pytest.raises(InputError, match="holds other files"):
        prepare(GSM8K, [file], out)
    assert [path.name for path in out.iterdir()] == ["letters.txt"]
    (out / "letters.txt").unlink()
    prepare(GSM8K, [file], out)
    write(tmp_path / "train.jsonl", row("2+2"))
    prepare(GSM8K, [file], out)
    assert questions(out / "train.parquet") == ["2+2"]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["out", "train.jsonl"]


def test_a_split_that_was_prepared_before_is_not_lost(tmp_path: Path) -> None:
    train, test = write(tmp_path / "train.jsonl", row("1+1")), write(tmp_path / "test.jsonl", row("5+5"))
    out = tmp_path / "out"
    prepare(GSM8K, [train, test], out)
    write(tmp_path / "train.jsonl", row("2+2"))
    with pytest.raises(InputError) as caught:
        prepare(GSM8K, [train], out)
    assert str(caught.value) == (
        f"{out} holds test rows of an earlier preparation (1), which the files given have none of: they would be lost\n"
        "  fix: give their files too, or another folder with --out, or delete that one"
    )
    assert questions(out / "train.parquet") == ["1+1"] and questions(out / "test.parquet") == ["5+5"]
    prepare(GSM8K, [train, test], out)
    assert questions(out / "train.parquet") == ["2+2"] and questions(out / "test.parquet") == ["5+5"]


def test_a_damaged_preparation_can_be_replaced(tmp_path: Path) -> None:
    train, test = write(tmp_path / "train.jsonl", row("1+1")), write(tmp_path / "test.jsonl", row("5+5"))
    out = tmp_path / "out"
    prepare(GSM8K, [train, test], out)
    (out / "manifest.json").write_text("{")
    prepare(GSM8K, [train], out)
    assert sorted(path.name for path in out.iterdir()) == ["manifest.json", "train.parquet"]


def test_an_earlier_one_stays_when_writing_fails(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = write(tmp_path / "train.jsonl", row("1+1"))
    prepare(GSM8K, [file], tmp_path / "out")
    write(tmp_path / "train.jsonl", row("2+2"))

    def full(path: Path) -> None:
        raise OSError("no space left")

    monkeypatch.setattr("covey.tasks.datasets.prepare.sync_tree", full)
    with pytest.raises(OSError, match="no space left"):
        prepare(GSM8K, [file], tmp_path / "out")
    assert questions(tmp_path / "out/train.parquet") == ["1+1"]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["out", "train.jsonl"]


# From their homes


@pytest.fixture
def server(tmp_path: Path) -> Iterator[str]:
    class Quiet(SimpleHTTPRequestHandler):
        def log_message(self, *words: Any) -> None:
            pass

    (tmp_path / "home").mkdir()
    with ThreadingHTTPServer(("127.0.0.1", 0), partial(Quiet, directory=str(tmp_path / "home"))) as http:
        thread = threading.Thread(target=http.serve_forever)
        thread.start()
        yield f"http://127.0.0.1:{http.server_port}"
        http.shutdown()
        thread.join()


def test_from_an_address(tmp_path: Path, server: str) -> None:
    write(tmp_path / "home/train.jsonl", row("1+1"))
    homed = replace(GSM8K, sources=(Source("train", Url(f"{server}/train.jsonl"), ()),))
    manifest = prepare(homed, [], tmp_path / "out").manifest
    assert manifest["sources"][0]["from"] == f"{server}/train.jsonl" and manifest["rows"] == {"train": 1}


def test_a_home_that_cannot_be_reached(tmp_path: Path, server: str) -> None:
    homed = replace(GSM8K, sources=(Source("train", Url(f"{server}/gone.jsonl"), ()),))
    with pytest.raises(Absent) as caught:
        prepare(homed, [], tmp_path / "out")
    assert str(caught.value) == (
        f"{server}/gone.jsonl cannot be reached: the server says 404 File not found\n"
        "  fix: get the file on a machine that reaches it, then\n"
        "       covey data prepare gsm8k --from train=FILE     (and the other files of the set, if any)"
    )


def test_from_the_hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import huggingface_hub

    for piece in (0, 1):
        write(tmp_path / f"train-{piece}.jsonl", row(f"{piece}+1"))
    there = ["README.md", "train-1.jsonl", "train-0.jsonl", "test.jsonl"]
    asked: list[str | None] = []

    def about(self: Any, repo: str, revision: str | None) -> Any:
        asked.append(revision)
        return SimpleNamespace(sha="c0ffee" if revision is None else revision)

    def files(self: Any, repo: str, repo_type: str, revision: str) -> list[str]:
        assert revision in ("c0ffee", "beef")
        return there

    def download(repo: str, file: str, repo_type: str, revision: str) -> str:
        assert revision in ("c0ffee", "beef"), "every file is of that commit"
        return str(tmp_path / file)

    monkeypatch.setattr(huggingface_hub.HfApi, "dataset_info", about)
    monkeypatch.setattr(huggingface_hub.HfApi, "list_repo_files", files)
    monkeypatch.setattr(huggingface_hub, "hf_hub_download", download)
    homed = replace(GSM8K, sources=(Source("train", Hub("someone/gsm8k", "train-*.jsonl"), ()),))
    manifest = prepare(homed, [], tmp_path / "out").manifest
    assert [source["file"] for source in manifest["sources"]] == ["train-0.jsonl", "train-1.jsonl"]
    assert questions(tmp_path / "out/train.parquet") == ["0+1", "1+1"]
    assert {source["from"] for source in manifest["sources"]} == {f"{homed.sources[0].home} @ c0ffee"}
    pinned = prepare(homed, [], tmp_path / "pinned", "beef").manifest
    assert {source["from"] for source in pinned["sources"]} == {f"{homed.sources[0].home} @ beef"}
    assert asked == [None, "beef"]

    def unreachable(self: Any, repo: str, repo_type: str, revision: str) -> None:
        raise ConnectionError("no network here")

    monkeypatch.setattr(huggingface_hub.HfApi, "list_repo_files", unreachable)
    with pytest.raises(Absent, match=r"someone/gsm8k: train-\*\.jsonl cannot be reached: no network here"):
        prepare(homed, [], tmp_path / "other")
