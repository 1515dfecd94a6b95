"""Damaged records, downloads and prepared data sets are reported, and never used as intact."""

from __future__ import annotations

import json
import random
import shutil
import threading
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
import torch

from covey.cli.main import main
from covey.errors import InputError
from covey.training.checkpoint import CheckpointStore
from covey.training.folder import find_unfinished, read_info
from tests.conftest import byte_tokenizer
from tests.faults.storage import outcome, prepare, the_run, train
from tests.faults.test_storage_damage import flipped, resign

# -- a whole run --------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def halfway(tmp_path_factory: pytest.TempPathFactory, tiny_model_folder: Path) -> Path:
    """A run that ended after one step of four."""
    folder = prepare(tmp_path_factory.mktemp("halfway"))
    assert train(folder, tiny_model_folder, "loop.max_minutes=0") == 0
    return folder


@pytest.fixture
def stopped(halfway: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(halfway, tmp_path / "run"))


def test_a_run_whose_checkpoints_are_all_damaged_is_refused(
    stopped: Path, tiny_model_folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """By the same command, which would otherwise start again from step 0."""
    weights = the_run(stopped) / "checkpoints/step-000001/model/model.safetensors"
    weights.write_bytes(weights.read_bytes()[:1000])
    assert train(stopped, tiny_model_folder, "loop.max_minutes=100") == 2
    output = capsys.readouterr().err
    assert "no intact checkpoint" in output and "model/model.safetensors does not match its checksum" in output
    assert len(list(stopped.glob("outputs/*/*"))) == 1


def test_torn_lines_are_repaired_on_resume(stopped: Path, tmp_path: Path, tiny_model_folder: Path) -> None:
    whole = prepare(tmp_path / "whole")
    assert train(whole, tiny_model_folder) == 0
    run = the_run(stopped)
    for name in ("metrics.jsonl", "episodes.jsonl"):
        with (run / name).open("ab") as file:
            file.write(b'{"kind": "step", "step": 1, "metr')
    assert train(stopped, tiny_model_folder, "loop.max_minutes=100") == 0
    assert outcome(run) == outcome(the_run(whole))


@pytest.mark.parametrize("name", ["metrics.jsonl", "episodes.jsonl"])
def test_records_truncated_before_the_checkpoint(
    stopped: Path, tiny_model_folder: Path, capsys: pytest.CaptureFixture[str], name: str
) -> None:
    path = the_run(stopped) / name
    path.write_bytes(path.read_bytes()[:-5])
    assert train(stopped, tiny_model_folder, "loop.max_minutes=100") == 2
    assert name in capsys.readouterr().err


def put(path: str, text: str | None) -> Callable[[Path], None]:
    def change(run: Path) -> None:
        (run / path).unlink() if text is None else (run / path).write_text(text)

    return change


def flip_a_word(run: Path) -> None:
    path = run / "metrics.jsonl"
    path.write_text(path.read_text().replace('"metrics"', '"metsics"', 1))


@pytest.mark.parametrize(
    ("change", "named"),
    [
        (put("run.json", ""), "run.json is damaged"),
        (put("run.json", "[]"), "run.json is damaged"),
        (put("run.json", '{"status": "run'), "run.json is damaged"),
        (put("run.json", '{"project": "covey"}'), "run.json is damaged"),
    ],
)
def test_readers_of_a_damaged_run_name_the_file(
    stopped: Path, capsys: pytest.CaptureFixture[str], change: Callable[[Path], None], named: str
) -> None:
    """covey train resume=..., covey report, covey runs: a message, no traceback."""
    run = the_run(stopped)
    change(run)
    from covey.telemetry.report import summarise

    with pytest.raises(InputError, match=r"run.json: not a run.json of covey"):
        summarise(run)
    with pytest.raises(InputError, match=named):
        read_info(run)
    assert main(["report", str(run)]) == 2
    assert "run.json: not a run.json of covey" in capsys.readouterr().err


def test_a_damaged_line_does_not_prevent_resuming(stopped: Path, tiny_model_folder: Path) -> None:
    """It is reported, and the others are read. All bytes stay, so that the offsets of the record are still valid."""
    run = the_run(stopped)
    flip_a_word(run)
    with pytest.warns(UserWarning, match=r"metrics.jsonl, line 1 is damaged and skipped"):
        assert train(stopped, tiny_model_folder, "loop.max_minutes=100") == 0
    assert "3 of 4 steps, finished" in (run / "summary.md").read_text()


@pytest.mark.parametrize(
    "line", [b"[1, 2]", b'{"kind": 3}', b"\xff\xfe", b"", b"[" * 9999, b'{"kind":"eval","step":1,"metrics":{"a":"b"}}']
)
def test_lines_that_are_not_records(tmp_path: Path, line: bytes) -> None:
    from covey.telemetry.history import read_history

    good = b'{"kind": "step", "step": 0, "metrics": {"a": 1}}\n'
    (tmp_path / "metrics.jsonl").write_bytes(good + line + b"\n" + good + good[:20])
    with pytest.warns(UserWarning, match="line 2 is damaged"):
        assert len(read_history(tmp_path).steps) == 2


def test_covey_runs_shows_the_others(stopped: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    from covey.dashboard.runs import Library

    run = the_run(stopped)
    for name in ("broken", "torn"):
        shutil.copytree(run, run.with_name(name))
    (run.with_name("broken") / "run.json").write_text('{"status"')
    flip_a_word(run.with_name("torn"))
    library = Library([stopped / "outputs"])
    library.poll()
    assert "broken" in " ".join(library.skipped)
    assert {shown.folder.name for shown in library.runs} == {run.name, "torn"}
    assert {shown.folder.name: shown.state()["done"] for shown in library.runs} == {run.name: 1, "torn": 0}
    with pytest.raises(InputError, match=r"not a run.json of covey|no run found"):  # a run that was named explicitly
        Library([run.with_name("broken")])


def test_damaged_episodes_are_skipped_by_the_viewer(stopped: Path) -> None:
    """Every line truncated or bit-flipped in turn: the index has the others, with all columns of equal length."""
    from covey.dashboard.episodes import EpisodeIndex

    path = the_run(stopped) / "episodes.jsonl"
    good = path.read_bytes().splitlines(keepends=True)
    rng = random.Random(0)
    bad = [flipped(good[0][:-1], rng.randrange(len(good[0]) - 1), 5) for _ in range(60)]
    bad = [line.replace(b"\n", b" ") + b"\n" for line in bad] + [
        b"{}\n",
        b"[]\n",
        b"\xff\n",
        good[0][: len(good[0]) // 2] + b"\n",
    ]
    path.write_bytes(b"".join([*bad, *good]))
    found = EpisodeIndex(path.parent)
    found.poll()
    assert found.broken == len(bad) + len(good) - len(found)
    assert len(good) <= len(found) < len(good) + len(bad)
    columns = [*found.numbers.values(), *found.rewards.values(), found.task, found.stop, found.failure, found.parts]
    assert {len(column) for column in columns} == {len(found)}
    assert [found.read(len(found) - len(good) + i)["task_id"] for i in range(len(good))] == [
        json.loads(line)["task_id"] for line in good
    ]


def test_an_invalid_run_json_is_reported_and_skipped(stopped: Path) -> None:
    run = the_run(stopped)
    (run / "run.json").write_text('{"project": 1, "experiment"')
    warned: list[str] = []
    assert find_unfinished(stopped / "outputs", "covey", "x", "y", warned.append) is None
    assert "run.json is damaged" in warned[0] and "not resumed" in warned[0]


def test_a_missing_run_json_is_reported(stopped: Path) -> None:
    (the_run(stopped) / "run.json").unlink()
    warned: list[str] = []
    assert find_unfinished(stopped / "outputs", "covey", "x", "y", warned.append) is None
    assert "run.json is missing" in warned[0] and "not resumed" in warned[0]


def test_a_damaged_checkpoint_is_not_evaluated(
    stopped: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(stopped)
    run = the_run(stopped)
    weights = run / "checkpoints/step-000001/model/model.safetensors"
    weights.write_bytes(flipped(weights.read_bytes(), 5000, 3))
    for name in (str(run), str(weights.parent.parent)):
        assert main(["eval", name, "data.val_files=tasks.jsonl"]) == 2
        assert "model.safetensors does not match its checksum" in capsys.readouterr().err
    resign(weights.parent.parent)
    (run / "config.yaml").write_text("data: [")
    assert main(["eval", str(run), "data.val_files=tasks.jsonl"]) == 2
    assert "config.yaml" in capsys.readouterr().err


def test_a_model_with_truncated_weights(
    tmp_path: Path, tiny_model_folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    model = Path(shutil.copytree(tiny_model_folder, tmp_path / "model"))
    weights = model / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:5000])
    assert train(prepare(tmp_path / "work"), model) == 2
    assert f"{weights} is damaged: 5,000 bytes" in capsys.readouterr().err


def test_another_model_s_checkpoint_in_the_run(
    stopped: Path, tmp_path: Path, tiny_model_folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Intact by its manifest, but of a model with different layers."""
    from covey.config.schema import LearnerConfig
    from covey.learner.learner import Learner
    from tests.conftest import tiny_llama

    tokenizer = byte_tokenizer()
    other = Learner(tiny_llama(vocabulary=len(tokenizer), num_hidden_layers=1), LearnerConfig(), total_updates=1)
    state = json.loads((the_run(stopped) / "checkpoints/step-000001/state.json").read_text())
    CheckpointStore(the_run(stopped) / "checkpoints", keep_last=2, keep_best=True).save(2, other, tokenizer, state)
    assert train(stopped, tiny_model_folder, "loop.max_minutes=100") == 2
    assert "of another model" in capsys.readouterr().err


def test_torn_records_of_an_evaluation(tmp_path: Path) -> None:
    from covey.evaluation.answers import EvalFolder

    EvalFolder(tmp_path / "out", {"a": 1}, "covey eval").close()
    (tmp_path / "out" / "eval.json").write_text('{"comm')
    with pytest.raises(InputError, match=r"eval.json is damaged"):
        EvalFolder(tmp_path / "out", {"a": 1}, "covey eval")


def test_a_judge_whose_cache_is_full_still_judges(tmp_path: Path) -> None:
    from covey.rewards.judge import Judge

    judge = Judge(url="http://localhost:1/v1", model="m", cache=str(tmp_path / "replies.jsonl"))
    (tmp_path / "replies.jsonl").mkdir()  # not appendable, even for root
    with pytest.warns(UserWarning, match="no further reply is kept there"):
        judge._store("key", "7")
    judge._store("other", "8")
    assert judge._replies == {"key": "7", "other": "8"}


# -- downloads and prepared sets ------------------------------------------------------------------------------------


def test_an_incomplete_download_leaves_no_file(tmp_path: Path) -> None:
    """The server announces more than it sends, and the HTTP library reports the end of the file."""
    from covey.errors import Absent
    from covey.tasks.datasets.dataset import Source, Url
    from covey.tasks.datasets.fetch import fetch

    class Short(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(200)
            self.send_header("Content-Length", "1000")
            self.end_headers()
            self.wfile.write(b'{"question": "1+1"}\n')

        def log_message(self, *words: Any) -> None:
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Short) as http:
        thread = threading.Thread(target=http.serve_forever)
        thread.start()
        try:
            source = Source("train", Url(f"http://127.0.0.1:{http.server_port}/a/train.jsonl"), ())
            with pytest.raises(Absent, match="ended after 20 of 1000 bytes"):
                fetch("gsm8k", source, tmp_path)
        finally:
            http.shutdown()
            thread.join()


@pytest.mark.parametrize("text", ["", "[]", '{"name": "gsm8k"}', '{"name": "gsm8k", "rows": 3, "outputs": {}}'])
def test_a_prepared_set_with_a_damaged_manifest(tmp_path: Path, text: str) -> None:
    from covey.tasks.datasets.load import read_manifest

    (tmp_path / "manifest.json").write_text(text)
    with pytest.raises(InputError, match=r"(?s)manifest.json.*covey data prepare gsm8k"):
        read_manifest("gsm8k", tmp_path)


def test_flipped_weights_for_another_process_are_noticed(tmp_path: Path) -> None:
    from covey.weights.files import WeightsDamaged, read_weights, write_weights

    manifest = write_weights(iter([("a", torch.ones(100))]), tmp_path, 1)
    path = Path(manifest.path)
    for data in (flipped(path.read_bytes(), 300, 1), path.read_bytes()[:-1], b""):
        path.write_bytes(data)
        with pytest.raises(WeightsDamaged, match="does not match its checksum"):
            read_weights(manifest, patience=0.0)
