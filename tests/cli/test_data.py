"""covey data, and training on what it prepared."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from covey.cli.main import main


@pytest.fixture(autouse=True)
def in_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("DATA_DIR", raising=False)


def rows(name: str, *questions: str) -> str:
    lines = [json.dumps({"question": question, "answer": f"It is\n#### {len(question)}"}) for question in questions]
    Path(name).write_text("\n".join(lines))
    return name


def prepare_small() -> None:
    assert (
        main(["data", "prepare", "gsm8k", "--from", rows("train.jsonl", "a", "bb", "b b"), rows("test.jsonl", "c")])
        == 0
    )


def test_prepare_tells_what_it_did(capsys: pytest.CaptureFixture[str]) -> None:
    prepare_small()
    assert capsys.readouterr().out == (
        "gsm8k: 2 train, 1 test rows in data/gsm8k\n"
        "  dropped from train: 1 (repeats a question), for example gsm8k/train/2 = gsm8k/train/1\n"
        "  no training question occurs in test\n"
    )
    assert sorted(path.name for path in Path("data/gsm8k").iterdir()) == [
        "manifest.json",
        "test.parquet",
        "train.parquet",
    ]


def test_prepare_elsewhere(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    file = rows("train.jsonl", "a")
    assert main(["data", "prepare", "gsm8k", "--from", file, "--out", "other"]) == 0
    assert Path("other/manifest.json").is_file()
    monkeypatch.setenv("DATA_DIR", str(tmp_path / "sets"))
    assert main(["data", "prepare", "--from", file, "--out", "third", "gsm8k"]) == 0
    assert main(["data", "prepare", "gsm8k", f"--from={file}"]) == 0
    assert Path("sets/gsm8k/train.parquet").is_file() and Path("third/train.parquet").is_file()


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (["prepare"], "name a data set: gsm8k"),
        (["prepare", "gms8k"], "did you mean   gsm8k?"),
        (["prepare", "gsm8k", "--from"], "--from wants files after it"),
        (["prepare", "gsm8k", "math", "--out", "x"], "--out is the folder of one set"),
        (["shwo"], "did you mean   show?"),
        (["show", "gsm8k"], "fix: covey data prepare gsm8k"),
        (["show", "sort", "-n", "x"], "-n wants a whole number"),
        (["check"], "name the files to check"),
    ],
)
def test_mistakes(words: list[str], told: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["data", *words]) == 2
    assert told in capsys.readouterr().err


def test_show_a_set(capsys: pytest.CaptureFixture[str]) -> None:
    prepare_small()
    capsys.readouterr()
    assert main(["data", "show", "gsm8k", "-n", "1", "data.options.prompt='{question} = ?'"]) == 0
    assert capsys.readouterr().out == (
        "gsm8k (data/gsm8k): 2 training and 1 validation tasks\n"
        "grade school mathematics in words; MIT; github.com/openai/grade-school-math\n"
        "reward math_verify\n"
        "\n"
        "training: 2 tasks\n"
        "  columns     answer (text), solution (text)\n"
        "  characters       min     25%     50%     75%     95%     max\n"
        "    question         5       5       5       6       6       6\n"
        "    answer           1       1       1       1       1       1\n"
        "\n"
        "  gsm8k/train/0\n"
        "  | [user] a = ?\n"
        "  answer: 1\n"
        "\n"
        "validation: 1 tasks\n"
        "  columns     answer (text), solution (text)\n"
        "  characters       min     25%     50%     75%     95%     max\n"
        "    question         5       5       5       5       5       5\n"
        "    answer           1       1       1       1       1       1\n"
        "\n"
        "  gsm8k/test/0\n"
        "  | [user] c = ?\n"
        "  answer: 1\n"
    )


def test_show_files_generated_tasks_and_the_list(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["data", "show", rows("t.jsonl", "a", "bb", "ccc")]) == 0
    assert capsys.readouterr().out.startswith("t.jsonl: 3 tasks\n")
    assert main(["data", "show", "arithmetic", "data.val_size=3"]) == 0
    assert "reward number" in capsys.readouterr().out
    prepare_small()
    capsys.readouterr()
    assert main(["data", "show"]) == 0
    out = capsys.readouterr().out
    assert "2 train, 1 test (prepared); reward math_verify; MIT" in out
    assert "541 test (not prepared); reward ifeval; Apache-2.0" in out


def test_check(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["data", "check", rows("good.jsonl", "a", "bb")]) == 0
    assert capsys.readouterr().out == "good.jsonl 2 rows: good\n"
    Path("bad.jsonl").write_text('{"question": "a", "answer": "1"}\n{"question": 3}\n')
    assert main(["data", "check", "bad.jsonl", "good.jsonl"]) == 1
    out = capsys.readouterr().out
    assert out.startswith("bad.jsonl, line 2: question must be a string, got a number\n")
    assert "remark: good.jsonl: 1 question is asked in bad.jsonl too: line 1 (as 1)\n" in out
    assert out.endswith("bad.jsonl 2 rows, good.jsonl 2 rows: 1 mistake\n")


def test_training_on_a_set(capsys: pytest.CaptureFixture[str], tiny_model_folder: Path) -> None:
    words = ["train", "data=gsm8k", f"model={tiny_model_folder}", "rollout.max_tokens=8", "--validate-only"]
    assert main(words) == 0  # on another machine, perhaps, where it is prepared
    out = capsys.readouterr().out
    assert "math_verify × 1" in out and "warning: not on this machine: data=gsm8k is not prepared" in out
    assert main([*words, "--strict"]) == 2
    assert "fix: covey data prepare gsm8k" in capsys.readouterr().err
    prepare_small()
    capsys.readouterr()
    assert main([*words, "--strict"]) == 0
    assert "gsm8k (data/gsm8k): 2 training and 1 validation tasks" in capsys.readouterr().out


def test_a_set_for_evaluation_is_not_trained_on(capsys: pytest.CaptureFixture[str], tiny_model_folder: Path) -> None:
    Path("aime24.jsonl").write_text(json.dumps({"problem": "1+1", "answer": "2"}))
    assert main(["data", "prepare", "aime24", "--from", "aime24.jsonl"]) == 0
    assert main(["train", "data=aime24", f"model={tiny_model_folder}", "--validate-only"]) == 2
    assert "data=aime24 is for evaluation: there is nothing in it to train on" in capsys.readouterr().err


def test_a_set_holds_no_demonstrations(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["sft", "data=gsm8k", "--validate-only"]) == 2
    assert "data=gsm8k has tasks but no demonstrations to imitate" in capsys.readouterr().err
