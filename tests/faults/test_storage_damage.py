"""Files of a run that are cut, flipped, missing, or of another kind: named, and never taken for whole."""

from __future__ import annotations

import hashlib
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
from covey.loop.checkpoint import (
    CheckpointStore,
    DamagedCheckpoint,
    open_checkpoint,
    step_folders,
)
from covey.loop.folder import find_unfinished, read_info
from tests.conftest import byte_tokenizer
from tests.faults.storage import outcome, prepare, the_run, train
from tests.loop.test_checkpoint import store, trained_learner

CASES = 6  # places in each file; the slow test has many


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with checkpoints of steps 1 and 2."""
    folder, learner = tmp_path_factory.mktemp("saved"), trained_learner()
    for step in (1, 2):
        store(folder).save(step, learner, byte_tokenizer(), {"best": None})
    return folder


@pytest.fixture
def checkpoints(saved: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(saved, tmp_path / "checkpoints"))


def files_of(checkpoint: Path) -> list[str]:
    return sorted(str(path.relative_to(checkpoint)) for path in checkpoint.rglob("*") if path.is_file())


def places(size: int, rng: random.Random, count: int) -> list[int]:
    """The first byte, the last, those around the middle, and any others."""
    return [0, size - 1, size // 2, *(rng.randrange(size) for _ in range(count - 3))]


def flipped(data: bytes, at: int, bit: int) -> bytes:
    return data[:at] + bytes([data[at] ^ (1 << bit)]) + data[at + 1 :]


def damages(data: bytes, rng: random.Random, count: int) -> list[bytes]:
    """Cut and flipped at every class of place; emptied; with a byte too many; zeroed, as after a loss of power."""
    found = [flipped(data, at, rng.randrange(8)) for at in places(len(data), rng, count)]
    found += [data[:at] for at in places(len(data), rng, count)]
    return [*found, b"", data + b"\n", bytes(len(data))]


def check_all_damages(checkpoints: Path, count: int, seed: int) -> int:
    """Every file of the newest checkpoint, damaged in every way: named, or still loaded as it was saved."""
    newest, rng, cases = checkpoints / "step-000002", random.Random(seed), 0
    state = open_checkpoint(newest).state
    for name in files_of(newest):
        path = newest / name
        data = path.read_bytes()
        for damaged in damages(data, rng, count):
            path.write_bytes(damaged)
            cases += 1
            try:
                found = open_checkpoint(newest)
            except DamagedCheckpoint as error:
                assert "step-000002" in str(error)
            else:  # a manifest may change where nothing changes with it: the case of a hash's letter, a space
                assert name == "manifest.json" and json.loads(damaged) == json.loads(data), (name, damaged[:200])
                assert found.state == state
        path.write_bytes(data)
    assert open_checkpoint(newest).state == state
    return cases


def test_every_file_of_a_checkpoint_damaged_in_every_way(checkpoints: Path) -> None:
    assert check_all_damages(checkpoints, CASES, seed=0) > 100


@pytest.mark.slow
def test_every_file_of_a_checkpoint_damaged_in_many_ways(checkpoints: Path) -> None:
    assert sum(check_all_damages(checkpoints, 60, seed) for seed in range(1, 5)) > 4000


@pytest.mark.parametrize("name", ["manifest.json", "state.json", "optimizer.safetensors", "model/model.safetensors"])
def test_a_missing_file(checkpoints: Path, name: str) -> None:
    (checkpoints / "step-000002" / name).unlink()
    warned: list[str] = []
    found = store(checkpoints).latest(warned.append)
    assert found is not None and found.step == 1
    assert "step-000002" in warned[0] and Path(name).name in warned[0]


JSON_OF_ANOTHER_KIND = ["[]", "null", "3", '"text"', "{}", "[" * 100_000, '{"step": "two"}', "\udcff"]


@pytest.mark.parametrize("text", JSON_OF_ANOTHER_KIND, ids=lambda text: text[:8])
@pytest.mark.parametrize("name", ["manifest.json", "state.json"])
def test_json_of_another_kind(checkpoints: Path, name: str, text: str) -> None:
    """Also where the manifest agrees with it."""
    newest = checkpoints / "step-000002"
    (newest / name).write_text(text, errors="surrogateescape")
    if name != "manifest.json":
        resign(newest)
    with pytest.raises(DamagedCheckpoint, match="step-000002 is damaged"):
        open_checkpoint(newest)
    found = store(checkpoints).latest(lambda text: None)
    assert found is not None and found.step == 1


def resign(checkpoint: Path) -> None:
    """A manifest of what is there now: damage that no checksum tells."""
    hashes = {name: hashlib.sha256((checkpoint / name).read_bytes()).hexdigest() for name in files_of(checkpoint)}
    hashes.pop("manifest.json")
    (checkpoint / "manifest.json").write_text(json.dumps(hashes))


@pytest.mark.parametrize(
    "outside", ["../step-000001/state.json", "/etc/hostname", "model/../../step-000001/state.json"]
)
def test_a_manifest_that_names_what_lies_outside(checkpoints: Path, outside: str) -> None:
    newest = checkpoints / "step-000002"
    manifest = json.loads((newest / "manifest.json").read_text())
    real = Path(outside) if outside.startswith("/") else newest / outside
    manifest[outside] = hashlib.sha256(real.read_bytes()).hexdigest() if real.is_file() else "0" * 64
    (newest / "manifest.json").write_text(json.dumps(manifest))
    with pytest.raises(DamagedCheckpoint, match="not inside it"):
        open_checkpoint(newest)


@pytest.mark.parametrize("planted", ["model/adapter_config.json", "critic.safetensors", "model/pytorch_model.bin"])
def test_a_file_that_the_manifest_does_not_name(checkpoints: Path, planted: str) -> None:
    (checkpoints / "step-000002" / planted).write_text("{}")
    with pytest.raises(DamagedCheckpoint, match="is not in its manifest"):
        open_checkpoint(checkpoints / "step-000002")
    (checkpoints / "step-000001" / "notes.md").write_text("a reader's own")
    assert open_checkpoint(checkpoints / "step-000001").step == 1


def test_where_all_are_damaged_nothing_is_begun_anew(checkpoints: Path) -> None:
    for step in (1, 2):
        (checkpoints / f"step-{step:06d}" / "manifest.json").write_bytes(b"")
    with pytest.raises(InputError) as told:
        store(checkpoints).latest(lambda text: None)
    for words in ("no checkpoint that is whole", "step-000001", "step-000002", "resume=disable"):
        assert words in str(told.value)
    assert len(step_folders(checkpoints)) == 2  # both are still where they were


def test_one_that_cannot_be_read(checkpoints: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A bad sector."""
    import covey.loop.checkpoint as room

    read = room._sha256

    def broken(path: Path) -> str:
        if "step-000002" in str(path) and path.name == "optimizer.safetensors":
            raise OSError(5, "Input/output error", str(path))
        return read(path)

    monkeypatch.setattr(room, "_sha256", broken)
    warned: list[str] = []
    found = store(checkpoints).latest(warned.append)
    assert found is not None and found.step == 1 and "Input/output error" in warned[0]


def test_a_damaged_one_takes_no_place_of_a_whole_one(checkpoints: Path) -> None:
    """It is set aside: of two that are kept, both are whole."""
    (checkpoints / "step-000002" / "state.json").write_text("")
    kept, learner = store(checkpoints, keep_last=2), trained_learner()
    assert kept.latest(lambda text: None) is not None
    assert (checkpoints / "damaged-step-000002").is_dir()
    for step in (3, 4):
        kept.save(step, learner, byte_tokenizer(), {"best": None})
    assert sorted(p.name for p in checkpoints.iterdir()) == ["damaged-step-000002", "step-000003", "step-000004"]


def test_later_ones_of_an_earlier_attempt_take_no_place_either(checkpoints: Path) -> None:
    store(checkpoints, keep_last=1).save(1, trained_learner(), byte_tokenizer(), {"best": None})
    assert open_checkpoint(checkpoints / "step-000001").step == 1  # what was just written is not deleted
    assert sorted(p.name for p in checkpoints.iterdir()) == ["step-000001", "step-000002"]


def test_other_things_in_the_folder_are_left_alone(checkpoints: Path, tmp_path: Path) -> None:
    """Copies under other names are no checkpoints; of links only the link goes."""
    (tmp_path / "elsewhere").mkdir()
    shutil.move(checkpoints / "step-000001", tmp_path / "elsewhere" / "one")
    (checkpoints / "step-000001").symlink_to(tmp_path / "elsewhere" / "one")
    shutil.copytree(checkpoints / "step-000002", checkpoints / "step-000002-copy")
    (checkpoints / "step-notes.txt").write_text("a reader's own")
    assert open_checkpoint(checkpoints / "step-000001").step == 1
    kept = store(checkpoints, keep_last=1)
    kept.save(3, trained_learner(), byte_tokenizer(), {"best": None})
    assert sorted(p.name for p in checkpoints.iterdir()) == ["step-000002-copy", "step-000003", "step-notes.txt"]
    assert (tmp_path / "elsewhere" / "one" / "state.json").is_file()


def test_a_link_in_the_place_of_a_new_one(checkpoints: Path, tmp_path: Path) -> None:
    shutil.copytree(checkpoints / "step-000002", tmp_path / "other")
    (checkpoints / "step-000003").symlink_to(tmp_path / "other")
    store(checkpoints).save(3, trained_learner(), byte_tokenizer(), {"best": None})
    assert not (checkpoints / "step-000003").is_symlink() and open_checkpoint(checkpoints / "step-000003").step == 3
    assert open_checkpoint(tmp_path / "other").step == 2


def test_a_million_steps_are_in_order(tmp_path: Path) -> None:
    for step in (999_999, 1_000_000, 20):
        (tmp_path / f"step-{step:06d}").mkdir()
    assert [p.name for p in step_folders(tmp_path)] == ["step-000020", "step-999999", "step-1000000"]


def test_moments_of_another_model_are_refused(checkpoints: Path) -> None:
    from covey.config.schema import LearnerConfig
    from covey.learner.learner import Learner
    from tests.conftest import tiny_llama

    found = open_checkpoint(checkpoints / "step-000002")
    wide = Learner(tiny_llama(intermediate_size=96), LearnerConfig(), total_updates=1)
    with pytest.raises(InputError, match=r"another model: .* is \[32, 64\] there, \[32, 96\] here"):
        wide.restore(found.folder, found.state["learner"])
    flat = Learner(tiny_llama(num_hidden_layers=1), LearnerConfig(), total_updates=1)
    with pytest.raises(InputError, match="another model: it knows a weight"):
        flat.restore(found.folder, found.state["learner"])


# -- a whole run --------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def halfway(tmp_path_factory: pytest.TempPathFactory, tiny_model_folder: Path) -> Path:
    """A run that was ended after one step of four."""
    folder = prepare(tmp_path_factory.mktemp("halfway"))
    assert train(folder, tiny_model_folder, "loop.max_minutes=0") == 0
    return folder


@pytest.fixture
def stopped(halfway: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(halfway, tmp_path / "run"))


def test_a_run_whose_checkpoints_are_all_damaged_is_refused(
    stopped: Path, tiny_model_folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """With the same command, which would otherwise begin anew from step 0."""
    weights = the_run(stopped) / "checkpoints/step-000001/model/model.safetensors"
    weights.write_bytes(weights.read_bytes()[:1000])
    assert train(stopped, tiny_model_folder, "loop.max_minutes=100") == 2
    told = capsys.readouterr().err
    assert "no checkpoint that is whole" in told and "model/model.safetensors does not match its checksum" in told
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
def test_records_that_were_cut_before_the_checkpoint(
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
    """covey train resume=..., covey report, covey runs: words, no traceback."""
    run = the_run(stopped)
    change(run)
    from covey.telemetry.report import summarise

    with pytest.raises(InputError, match=named):
        summarise(run)
    with pytest.raises(InputError, match=named):
        read_info(run)
    assert main(["report", str(run)]) == 2
    assert named in capsys.readouterr().err


def test_a_damaged_line_does_not_keep_a_run_from_going_on(stopped: Path, tiny_model_folder: Path) -> None:
    """It is told of, and the others are read; all bytes are still there, so that the record's offsets hold."""
    run = the_run(stopped)
    flip_a_word(run)
    with pytest.warns(UserWarning, match=r"metrics.jsonl, line 1 is damaged and left out"):
        assert train(stopped, tiny_model_folder, "loop.max_minutes=100") == 0
    assert "3 of 4 steps, finished" in (run / "summary.md").read_text()


@pytest.mark.parametrize(
    "line", [b"[1, 2]", b'{"kind": 3}', b"\xff\xfe", b"", b"[" * 9999, b'{"kind":"eval","step":1,"metrics":{"a":"b"}}']
)
def test_lines_that_are_no_record(tmp_path: Path, line: bytes) -> None:
    from covey.telemetry.history import read_history

    good = b'{"kind": "step", "step": 0, "metrics": {"a": 1}}\n'
    (tmp_path / "metrics.jsonl").write_bytes(good + line + b"\n" + good + good[:20])
    with pytest.warns(UserWarning, match="line 2 is damaged"):
        assert len(read_history(tmp_path).steps) == 2


def test_covey_runs_shows_the_others(stopped: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    from covey.dash.runs import Library

    run = the_run(stopped)
    for name in ("broken", "torn"):
        shutil.copytree(run, run.with_name(name))
    (run.with_name("broken") / "run.json").write_text('{"status"')
    flip_a_word(run.with_name("torn"))
    with pytest.warns(UserWarning, match="that run is left out"):
        library = Library([stopped / "outputs"])
    with pytest.warns(UserWarning, match="is damaged and left out"):
        library.poll()
    assert {shown.folder.name for shown in library.runs} == {run.name, "torn"}
    assert {shown.folder.name: shown.state()["done"] for shown in library.runs} == {run.name: 1, "torn": 0}
    with pytest.raises(InputError, match=r"broken/run.json is damaged"):  # one that was named itself
        Library([run.with_name("broken")])


def test_episodes_that_are_damaged_are_left_out_of_the_reader(stopped: Path) -> None:
    """Every line of the file cut or flipped somewhere: the index holds the others, all columns of one length."""
    from covey.dash.episodes import Episodes

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
    found = Episodes(path.parent)
    with pytest.warns(UserWarning, match="an episode is damaged and left out"):
        found.poll()
    assert len(good) <= len(found) < len(good) + len(bad)
    columns = [*found.numbers.values(), *found.rewards.values(), found.task, found.stop, found.failure, found.parts]
    assert {len(column) for column in columns} == {len(found)}
    assert [found.read(len(found) - len(good) + i)["task_id"] for i in range(len(good))] == [
        json.loads(line)["task_id"] for line in good
    ]


def test_a_run_json_that_is_none_is_told_and_passed_by(stopped: Path) -> None:
    run = the_run(stopped)
    (run / "run.json").write_text('{"project": 1, "experiment"')
    warned: list[str] = []
    assert find_unfinished(stopped / "outputs", "covey", "x", "y", warned.append) is None
    assert "run.json is damaged" in warned[0] and "not resumed" in warned[0]


def test_a_run_json_that_is_missing_is_told(stopped: Path) -> None:
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


def test_a_model_whose_weights_are_cut(
    tmp_path: Path, tiny_model_folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    model = Path(shutil.copytree(tiny_model_folder, tmp_path / "model"))
    weights = model / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:5000])
    assert train(prepare(tmp_path / "work"), model) == 2
    assert f"the weights of {model} are damaged" in capsys.readouterr().err


def test_another_model_s_checkpoint_in_the_run(
    stopped: Path, tmp_path: Path, tiny_model_folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Whole by its manifest, and of a model with other layers."""
    from covey.config.schema import LearnerConfig
    from covey.learner.learner import Learner
    from tests.conftest import tiny_llama

    tokenizer = byte_tokenizer()
    other = Learner(tiny_llama(vocabulary=len(tokenizer), num_hidden_layers=1), LearnerConfig(), total_updates=1)
    state = json.loads((the_run(stopped) / "checkpoints/step-000001/state.json").read_text())
    CheckpointStore(the_run(stopped) / "checkpoints", keep_last=2, keep_best=True).save(2, other, tokenizer, state)
    assert train(stopped, tiny_model_folder, "loop.max_minutes=100") == 2
    assert "of another model" in capsys.readouterr().err


def test_records_of_an_evaluation_that_was_torn(tmp_path: Path) -> None:
    from covey.evaluation.answers import EvalFolder

    EvalFolder(tmp_path / "out", {"a": 1}, "covey eval").close()
    (tmp_path / "out" / "eval.json").write_text('{"comm')
    with pytest.raises(InputError, match=r"eval.json is damaged"):
        EvalFolder(tmp_path / "out", {"a": 1}, "covey eval")


def test_a_judge_whose_cache_is_full_still_judges(tmp_path: Path) -> None:
    from covey.rewards.judge import Judge

    judge = Judge(url="http://localhost:1/v1", model="m", cache=str(tmp_path / "replies.jsonl"))
    (tmp_path / "replies.jsonl").mkdir()  # which cannot be appended to, by root neither
    with pytest.warns(UserWarning, match="no further reply is kept there"):
        judge._remember("key", "7")
    judge._remember("other", "8")
    assert judge._known == {"key": "7", "other": "8"}


# -- downloads and prepared sets ------------------------------------------------------------------------------------


def test_a_download_that_ends_early_is_no_file(tmp_path: Path) -> None:
    """The server promises more than it sends; the reader's library calls that the end of the file."""
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
def test_a_prepared_set_whose_manifest_is_damaged(tmp_path: Path, text: str) -> None:
    from covey.tasks.datasets.load import read_manifest

    (tmp_path / "manifest.json").write_text(text)
    with pytest.raises(InputError, match=r"(?s)manifest.json is damaged.*covey data prepare gsm8k"):
        read_manifest("gsm8k", tmp_path)


def test_flipped_weights_for_another_process_are_noticed(tmp_path: Path) -> None:
    from covey.cluster.transport import WeightsDamaged, read_notice, write_notice

    notice = write_notice(iter([("a", torch.ones(100))]), tmp_path, 1)
    path = Path(notice.path)
    for data in (flipped(path.read_bytes(), 300, 1), path.read_bytes()[:-1], b""):
        path.write_bytes(data)
        with pytest.raises(WeightsDamaged, match="does not match its checksum"):
            read_notice(notice, patience=0.0)
