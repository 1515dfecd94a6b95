"""covey eval from end to end: models, tasks, figures, a kill and a restart, mistakes."""

from __future__ import annotations

import gzip
import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from covey.cli.main import main
from tests.conftest import byte_tokenizer, tiny_llama

# Of a random model's replies some hold a digit. It counts its calls in a file, and can kill the evaluation: it runs in
# a worker, a child of a child of that.
REWARD = """
import os, pathlib, signal
def digit(final_answer):
    with open("calls", "ab", buffering=0) as counter:
        counter.write(b".")
        calls = counter.tell()
    if calls == int(os.environ.get("KILL_AT_CALL", "0")):
        run = int(pathlib.Path(f"/proc/{os.getppid()}/stat").read_text().rpartition(")")[2].split()[1])
        os.kill(run, signal.SIGKILL)
    return float(any(letter.isdigit() for letter in final_answer))
"""
SMALL = ("rollout.max_tokens=6", "reward=reward.py:digit", "eval.batch_size=2")


@pytest.fixture(scope="module")
def second_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("second") / "model"
    tokenizer = byte_tokenizer()
    tiny_llama(vocabulary=len(tokenizer), seed=1, eos_token_id=tokenizer.eos_token_id).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


@pytest.fixture(autouse=True)
def in_a_folder_of_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    torch.set_num_threads(1)  # as in the evaluation that is killed
    Path("reward.py").write_text(REWARD)


def results(folder: str) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((Path(folder) / "results.json").read_text())
    return found


def answers(folder: str) -> list[dict[str, Any]]:
    lines = (Path(folder) / "answers.jsonl").read_text().splitlines()
    return sorted(map(json.loads, lines), key=lambda a: (a["model"], a["task"], a["index"], a["attempt"]))


def calls() -> int:
    return Path("calls").stat().st_size


@pytest.mark.slow
def test_two_models_on_two_tasks_killed_and_gone_on_with(
    tiny_model_folder: Path, second_model: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = [
        "eval",
        str(tiny_model_folder),
        str(second_model),
        "--tasks",
        "arithmetic,sort",
        "--n",
        "4",
        "--limit",
        "5",
    ]
    words += SMALL
    assert main([*words, "--out", "whole"]) == 0
    shown, total = capsys.readouterr().out, 2 * 2 * 5 * 4
    assert calls() == total and len(answers("whole")) == total
    assert "maj@n" in shown and "sign-flip test" in (Path("whole") / "results.md").read_text()

    os.remove("calls")
    killed = subprocess.run(
        [sys.executable, "-m", "covey.cli.main", *words, "--out", "killed"],
        env=os.environ | {"KILL_AT_CALL": "50", "OMP_NUM_THREADS": "1"},  # the second model, its first task
        capture_output=True,
        timeout=300,
    )
    assert killed.returncode == -signal.SIGKILL, killed.stderr
    whole = [line for line in (Path("killed") / "answers.jsonl").read_text().splitlines() if line]
    assert 40 <= len(whole) < 50
    with (Path("killed") / "answers.jsonl").open("a") as file:
        file.write(json.dumps({"model": "half a line"})[:-5])
    os.remove("calls")
    assert main([*words, "--out", "killed"]) == 0
    assert calls() == total - len(whole)
    assert f"{len(whole)} of {total} answers are there already" in capsys.readouterr().err
    assert answers("killed") == answers("whole")
    for part in ("results", "comparisons"):
        assert results("killed")[part] == results("whole")[part]

    # the figures are those of the answers
    first = results("whole")["results"][0]
    own = [a["rewards"]["digit"] for a in answers("whole") if (a["model"], a["task"]) == (first["model"], "arithmetic")]
    assert first["task"] == "arithmetic" and 0 < first["pass@1"]["value"] < 1
    assert first["pass@1"]["value"] == first["avg@4"]["value"] == pytest.approx(sum(own) / 20)
    assert first["pass@4"]["value"] == sum(any(own[i : i + 4]) for i in range(0, 20, 4)) / 5
    assert len(results("whole")["comparisons"]) == 2

    # everything is there: no model is loaded, also where only the reading of the answers is another
    os.remove("calls")
    assert main([*words, "--out", "killed", "--k", "1,3"]) == 0
    assert not Path("calls").exists() and "pass@3" in results("killed")["results"][0]
    assert main([*words, "--out", "killed", "eval.temperature=0.7"]) == 2
    assert "eval · temperature   there 1.0, here 0.7" in capsys.readouterr().err


def test_a_run_on_its_own_tasks_and_on_others(tiny_model_folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    small = ["data.val_size=4", "data.train_batch_size=2", "rollout.group_size=2", "loop.total_steps=1", *SMALL]
    small += ["reward.weights={digit: 2}", "eval.before=false", "data.options.count=3", "logging.to=[]"]
    assert main(["train", f"model={tiny_model_folder}", "data=sort", *small]) == 0
    (run,) = (path.parent for path in Path("outputs").glob("*/*/run.json"))
    assert main(["eval", str(run), "--out", "own"]) == 0
    assert results("own")["results"][0]["task"] == "sort" and results("own")["results"][0]["reward"] == "digit"
    assert main(["eval", str(tiny_model_folder), str(run), "--out", "pair"]) == 0  # the run and what it started from
    assert "differently" not in capsys.readouterr().err
    (pair,) = results("pair")["comparisons"]
    assert (pair["task"], pair["tasks"]) == ("sort", 4)
    assert main(["eval", str(run), "--tasks", "arithmetic", "--limit", "3", "--out", "others"]) == 0
    (found,) = results("others")["results"]
    assert (found["mode"], found["tasks"], found["reward"]) == (
        "greedy",
        3,
        "number",
    )  # neither its reward nor its options
    assert found["tokens"]["mean"] <= 6  # but its longest answer

    Path("mine.jsonl").write_text('{"question": "1+1?", "answer": "2"}\n{"question": "2+2?", "answer": "4"}\n')
    capsys.readouterr()
    assert main(["eval", str(run), str(tiny_model_folder), "--tasks", "sort", "--out", "others"]) == 2
    # 6 of the run's, 256 by default
    assert "are evaluated on sort with different settings (max_tokens)" in capsys.readouterr().err
    assert main(["eval", str(run), "--tasks", "mine.jsonl", "reward=exact"]) == 0
    assert "mine.jsonl" in capsys.readouterr().out
    (folder,) = Path("outputs/eval").iterdir()
    assert {path.name for path in folder.iterdir()} >= {"answers.jsonl", "results.json", "results.md"}


def trained(model: Path, *settings: str) -> str:
    """A run of one step."""
    small = ("data.train_batch_size=2", "rollout.group_size=2", "loop.total_steps=1", "rollout.max_tokens=6")
    silent = ("eval.before=false", "eval.after=false", "logging.to=[]", "resume=disable")
    before = set(Path("outputs").glob("*/*/run.json"))
    assert main(["train", f"model={model}", *small, *silent, *settings]) == 0
    (run,) = {*Path("outputs").glob("*/*/run.json")} - before
    return str(run.parent)


def test_a_named_data_set_replaces_the_files_of_a_run(tiny_model_folder: Path) -> None:
    Path("mine.jsonl").write_text('{"question": "1+1?", "answer": "2"}\n')
    run = trained(tiny_model_folder, "data.train_files=mine.jsonl", "data.val_files=mine.jsonl")
    assert main(["eval", run, "data=sort", "data.val_size=3", "--out", "named"]) == 0
    (found,) = results("named")["results"]
    assert (found["task"], found["tasks"], found["reward"]) == ("sort", 3, "sorted")


def test_runs_with_files_of_one_name_are_not_compared(
    tiny_model_folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for folder, question in (("a", "1+1?"), ("b", "say 2")):
        Path(folder).mkdir()
        Path(folder, "test.jsonl").write_text(json.dumps({"question": question, "answer": "2"}) + "\n")
    settings = [[f"data.{split}_files={folder}/test.jsonl" for split in ("train", "val")] for folder in "ab"]
    first, second = (trained(tiny_model_folder, *one) for one in settings)
    assert main(["eval", first, second, "--out", "pair"]) == 0
    assert [one["task"] for one in results("pair")["results"]] == ["a/test.jsonl", "b/test.jsonl"]
    assert not results("pair")["comparisons"]
    Path("b/test.jsonl").write_bytes(Path("a/test.jsonl").read_bytes())  # a copy is the same set of tasks
    other = trained(tiny_model_folder, *settings[1], "reward=math_verify")
    capsys.readouterr()
    assert main(["eval", first, other, "--out", "copy"]) == 0
    assert [one["task"] for one in results("copy")["comparisons"]] == ["test.jsonl"]
    assert "are evaluated on test.jsonl with different settings (reward)" in capsys.readouterr().err


def test_tasks_in_a_file_of_any_name(tiny_model_folder: Path) -> None:
    name = "my tasks (1).jsonl.gz"
    Path(name).write_bytes(gzip.compress(b'{"question": "1+1?", "answer": "2"}\n'))
    assert main(["eval", str(tiny_model_folder), "--tasks", name, "rollout.max_tokens=4", "--out", "zipped"]) == 0
    assert [one["task"] for one in results("zipped")["results"]] == [name]


def test_settings_of_the_other_mode_are_warned_of(tiny_model_folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["eval", str(tiny_model_folder), "--tasks", "sort", "--limit", "1", "rollout.max_tokens=4"]
    unused = "has no effect with eval.modes=[greedy]: it is for the mode sampled"
    assert main([*words, "--n", "2", "eval.modes=[greedy]", "eval.top_p=0.9"]) == 0
    error = capsys.readouterr().err
    assert f"warning: eval.n {unused}" in error and f"warning: eval.top_p {unused}" in error
    assert main([*words, "--n", "1"]) == 0 and main([*words, "--n", "2", "eval.top_p=0.9"]) == 0
    assert unused not in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (["--tasks", "arithmetik"], "did you mean   arithmetic?"),
        (["--tasks", "sort", "--n", "4", "--k", "8"], "fix: --n 8, or --k 4"),
        (["--tasks", "sort", "--k", "2"], "pass@2 needs 2 answers to each task, and there are 1"),
        (["nowhere", "--tasks", "sort"], "unknown model  nowhere"),
        (["data.train_files=mine.jsonl"], "mine.jsonl has no validation tasks"),
        (["--tasks", "sort", "data=sort"], "--tasks and data=sort contradict"),
        (["--tasks", "sort", "--n", "4", "eval.n=2"], "--n and eval.n=2 contradict"),
        (["--tasks", "sort", "--n", "4", "eval.temperature=0"], "are one answer, 4 times"),
        (["--tasks", "sort", "--n", "none"], "--n wants a whole number, at least 1"),
        (["--tasks", "sort", "--solved", "high"], "--solved wants a number"),
        (["--tasks", "sort", "--json", "a.json"], "--json is for one model on its own tasks"),
        (["--tasks", "sort", "--out", "taken"], "has other files and no evaluation"),
        (["{model}", "--tasks", "sort"], "is named twice"),
    ],
)
def test_mistakes_end_before_a_model_is_loaded(
    words: list[str],
    told: str,
    tiny_model_folder: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def load(*arguments: object) -> None:
        raise AssertionError("a model is loaded")

    monkeypatch.setattr("covey.models.loading.load_policy", load)
    Path("mine.jsonl").write_text('{"question": "1+1?", "answer": "2"}\n')
    Path("taken").mkdir()
    (Path("taken") / "notes.txt").write_text("mine")
    words = [word.format(model=tiny_model_folder) for word in words]
    assert main(["eval", str(tiny_model_folder), *words]) == 2
    assert told in capsys.readouterr().err
    assert not Path("outputs").exists()


def test_a_reward_that_fails_everywhere_ends_with_its_cause(
    tiny_model_folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    Path("bad.py").write_text("def bad(final_answer):\n    raise KeyError('gone')\n")
    words = [str(tiny_model_folder), "--tasks", "sort", "--limit", "2", "reward=bad.py:bad", "rollout.max_tokens=4"]
    assert main(["eval", *words, "--out", "failed"]) == 1
    assert "KeyError" in capsys.readouterr().err
    assert results("failed")["results"][0]["failures"] == {"reward": 2}
