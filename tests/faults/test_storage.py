"""A full, read-only or broken disk ends a run with a message and an exit code, and the same command resumes."""

from __future__ import annotations

import errno
import json
import os
import resource
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from covey.app.train import is_finished
from covey.cli.main import main
from covey.storage import StorageFailed, storage_errno, write_atomically, writing
from covey.telemetry.jsonl import JsonlFiles, PartWriter
from covey.telemetry.telemetry import Telemetry
from covey.training.checkpoint import CheckpointStore, step_folders
from covey.training.folder import RunFolder
from tests.faults.storage import SmallDisk, outcome, prepare, small_disk, the_run, train


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory, tiny_model_folder: Path) -> dict[str, Any]:
    """The outcome of the undisturbed run."""
    folder = prepare(tmp_path_factory.mktemp("whole"))
    assert train(folder, tiny_model_folder) == 0
    return outcome(the_run(folder))


def before(method: str, call: int, happens: Callable[[], None]) -> Callable[..., Any]:
    """Wrap a method so that something happens before one of its calls."""
    owner, name = PLACES[method]
    original, calls = getattr(owner, name), 0

    def replaced(*args: Any, **options: Any) -> Any:
        nonlocal calls
        calls += 1
        if calls == call:
            happens()
        return original(*args, **options)

    return replaced


PLACES: dict[str, tuple[Any, str]] = {
    "checkpoint": (CheckpointStore, "save"),
    "metrics": (Telemetry, "record"),
    "status": (RunFolder, "set_status"),
}

# What is in progress when the disk is full, what cannot be written then, and the step that the run goes on after. A
# line of metrics may still fit into the last page of its file; then the checkpoint of that step is the first to fail.
MOMENTS = [
    pytest.param("checkpoint", 1, ("checkpoints/step-000001",), None, marks=pytest.mark.slow),
    ("checkpoint", 3, ("checkpoints/step-000003",), 2),
    ("metrics", 3, (".jsonl", "checkpoints/step-000003"), 2),
    pytest.param("metrics", 4, (".jsonl", "checkpoints/step-000004"), 3, marks=pytest.mark.slow),
]


@pytest.mark.parametrize(("moment", "call", "named", "last"), MOMENTS)
def test_a_disk_that_fills_up_while_training(
    tmp_path: Path,
    tiny_model_folder: Path,
    whole: dict[str, Any],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    moment: str,
    call: int,
    named: tuple[str, ...],
    last: int | None,
) -> None:
    """The message has the path, the free space and the step; no partial file is left; the resumed run ends as if
    undisturbed."""
    with small_disk(tmp_path / "disk", 4000) as disk:
        folder = prepare(disk.path / "work")
        with monkeypatch.context() as patch:
            owner, name = PLACES[moment]
            patch.setattr(owner, name, before(moment, call, disk.fill))
            assert train(folder, tiny_model_folder) == 1
        output = capsys.readouterr().err
        run = the_run(folder)
        assert (
            "cannot write" in output
            and any(name in output for name in named)
            and "No space left on device" in output
            and "free" in output
        )
        assert "Traceback" not in output and len(output.strip().splitlines()) < 25
        expected = "there is no checkpoint to continue from" if last is None else f"after step {last}"
        assert expected in output
        assert not list(run.glob("checkpoints/.writing-*")) and not list(run.glob("**/.run.json"))
        assert [p.name for p in run.glob("checkpoints/*")] == ([] if last is None else [f"step-{last:06d}"])
        for line in (run / "metrics.jsonl").read_bytes().splitlines(keepends=True):
            assert line.endswith(b"\n") and json.loads(line)["kind"] == "step"
        disk.free()
        if last is None:
            shutil.rmtree(folder / "outputs")
        assert train(folder, tiny_model_folder) == 0
        assert outcome(the_run(folder)) == whole


@pytest.mark.slow
@pytest.mark.parametrize("kilobytes", [*range(8, 200, 16), *range(200, 1000, 40)])
def test_a_disk_of_any_size(
    tmp_path: Path, tiny_model_folder: Path, whole: dict[str, Any], capsys: pytest.CaptureFixture[str], kilobytes: int
) -> None:
    """Wherever the disk becomes full, the run ends with a message and an exit code, and resumes when there is
    space, to the same weights and records."""
    with small_disk(tmp_path / "disk", kilobytes) as disk:
        folder = prepare(disk.path / "work")
        code = train(folder, tiny_model_folder)
        output = capsys.readouterr().err
        if code:
            assert "cannot write" in output and "No space left on device" in output and "Traceback" not in output
        disk.resize(8000)
        finished = [run for run in folder.glob("outputs/*/*") if (run / "run.json").exists() and is_finished(run)]
        resumed = [run for run in folder.glob("outputs/*/*") if step_folders(run / "checkpoints")]
        if not finished:
            assert code in (1, 2) and train(folder, tiny_model_folder) == 0
        runs = [run for run in folder.glob("outputs/*/*") if (run / "run.json").exists() and is_finished(run)]
        assert len(runs) == 1 and (not resumed or runs == resumed)
        assert outcome(runs[0]) == whole


def test_the_report_of_a_finished_run(
    tmp_path: Path, tiny_model_folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    import covey.training.run

    write = covey.training.run.write_report
    with small_disk(tmp_path / "disk", 4000) as disk:
        folder = prepare(disk.path / "work")

        def full(path: Path, status: str) -> Path:
            disk.fill()
            return write(path, status)

        with monkeypatch.context() as patch:
            patch.setattr("covey.training.run.write_report", full)
            assert train(folder, tiny_model_folder) == 1
        output = capsys.readouterr().err
        run = the_run(folder)
        assert "curve.png: No space left" in output and "the same command continues from the last checkpoint" in output
        assert json.loads((run / "run.json").read_text())["status"] != "finished"
        assert not list(run.glob("*.png")) and not list(run.glob("*.md"))
        disk.free()
        assert train(folder, tiny_model_folder) == 0  # only the missing report is written
        assert the_run(folder) == run and (run / "summary.md").exists()


def test_a_status_that_cannot_be_written_hides_no_error(
    tmp_path: Path, tiny_model_folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The disk stays full: the first error is reported, and the lock is released."""
    with small_disk(tmp_path / "disk", 4000) as disk:
        folder = prepare(disk.path / "work")
        with monkeypatch.context() as patch:
            patch.setattr(CheckpointStore, "save", before("checkpoint", 2, disk.fill))
            patch.setattr(RunFolder, "set_status", before("status", 1, disk.fill))
            assert train(folder, tiny_model_folder) == 1
        assert "step-000002: No space" in capsys.readouterr().err
        run = the_run(folder)
        assert json.loads((run / "run.json").read_text())["status"] == "running"  # as it was
        disk.free()
        assert train(folder, tiny_model_folder) == 0
        assert json.loads((run / "run.json").read_text())["status"] == "finished"


@pytest.mark.parametrize("what", ["output_dir", "the run to go on with"])
def test_a_read_only_folder_is_refused_before_anything_starts(
    tmp_path: Path, tiny_model_folder: Path, capsys: pytest.CaptureFixture[str], what: str
) -> None:
    with small_disk(tmp_path / "disk", 4000) as disk:
        folder = prepare(disk.path / "work")
        if what != "output_dir":
            assert train(folder, tiny_model_folder, "loop.max_minutes=0") == 0
        disk.read_only(True)
        try:
            assert train(folder, tiny_model_folder, *(["loop.max_minutes=100"] if what != "output_dir" else [])) == 2
        finally:
            disk.read_only(False)
    output = capsys.readouterr().err
    assert "Read-only file system" in output and "logging.output_dir" in output and "nothing was started" in output


def test_an_output_folder_that_is_a_file(
    tmp_path: Path, tiny_model_folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = prepare(tmp_path)
    (folder / "outputs").write_text("a file")
    assert train(folder, tiny_model_folder) == 2
    assert "cannot write to outputs: Not a directory" in capsys.readouterr().err


@contextmanager
def largest_file(size: int) -> Iterator[None]:
    """Limit the size of files of this process: like a quota, but without root."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


@pytest.mark.parametrize("size", [50_000, 150_000])  # the weights do not fit; the optimiser state does not fit
def test_a_file_size_limit_keeps_the_best_checkpoint(tmp_path: Path, size: int) -> None:
    from tests.conftest import byte_tokenizer
    from tests.training.test_checkpoint import store, trained_learner

    learner, checkpoints = trained_learner(), store(tmp_path, keep_last=1)
    best = {"best": {"step": 1, "value": 0.9}}
    for step in (1, 2):
        checkpoints.save(step, learner, byte_tokenizer(), best)
    with largest_file(size), pytest.raises(StorageFailed, match="step-000003: File too large"):
        checkpoints.save(3, learner, byte_tokenizer(), best)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["step-000001", "step-000002"]
    found = checkpoints.latest(print)
    assert found is not None and found.step == 2


def test_a_disk_error_at_any_sync_keeps_the_previous_checkpoint(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Input/output error at each sync of a checkpoint in turn: it is complete or absent each time."""
    from tests.conftest import byte_tokenizer
    from tests.training.test_checkpoint import store, trained_learner

    learner, checkpoints, sync, calls = trained_learner(), store(tmp_path, keep_last=1), os.fsync, 0
    checkpoints.save(1, learner, byte_tokenizer(), {"best": None})

    def breaks(handle: int) -> None:
        nonlocal calls
        calls += 1
        if calls == ended + 1:
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        sync(handle)

    monkeypatch.setattr(os, "fsync", breaks)
    ended = 0
    while True:
        calls = 0
        try:
            checkpoints.save(2, learner, byte_tokenizer(), {"best": None})
        except StorageFailed as error:
            assert "step-000002: Input/output error" in str(error)
        else:
            break  # there are no more syncs
        found = checkpoints.latest(print)
        assert found is not None and found.step in (1, 2)
        names = {p.name for p in tmp_path.iterdir()}
        assert names == {"step-000001"} or (found.step == 2 and names == {"step-000001", "step-000002"})
        ended += 1
    assert ended >= 10  # files and folders of a checkpoint, and its parent


def test_lines_are_written_atomically(tmp_path: Path) -> None:
    writer = PartWriter(tmp_path / "episodes.jsonl", 0)
    writer.write(b"1" * 99 + b"\n")
    with largest_file(150), pytest.raises(StorageFailed, match=r"episodes.jsonl: File too large"):
        writer.write(b"2" * 99 + b"\n")  # half of it fits
    assert (tmp_path / "episodes.jsonl").read_bytes() == b"1" * 99 + b"\n"
    writer.write(b"3" * 9 + b"\n")  # there is space again
    assert writer.synced() == 110
    writer.close()
    assert (tmp_path / "episodes.jsonl").read_bytes() == b"1" * 99 + b"\n" + b"3" * 9 + b"\n"


def test_records_close_after_a_failed_write(tmp_path: Path) -> None:
    files = JsonlFiles(tmp_path)
    with largest_file(10), pytest.raises(StorageFailed, match=r"metrics.jsonl"):
        files.step(0, {"reward/mean": 0.5}, None, [])
    with largest_file(10):
        files.close("failed")
    assert (tmp_path / "metrics.jsonl").read_bytes() == b""


def test_a_failed_atomic_write_leaves_the_file_unchanged(tmp_path: Path) -> None:
    path = tmp_path / "run.json"
    write_atomically(path, "before")
    with largest_file(3), pytest.raises(StorageFailed, match=r"run.json: File too large"):
        write_atomically(path, "afterwards")
    assert path.read_text() == "before" and [p.name for p in tmp_path.iterdir()] == ["run.json"]


@pytest.mark.parametrize(
    ("error", "number"),
    [
        (OSError(errno.ENOSPC, "No space left on device"), errno.ENOSPC),
        (RuntimeError("Error while serializing: I/O error: No space left on device (os error 28)"), errno.ENOSPC),
        (Exception("ray: OSError: [Errno 122] Disk quota exceeded"), errno.EDQUOT),
        (OSError(errno.EIO, "Input/output error"), errno.EIO),
        (ConnectionResetError(errno.ECONNRESET, "gone"), None),
        (ValueError("nothing of a disk"), None),
        (FileNotFoundError(errno.ENOENT, "gone"), None),
    ],
)
def test_storage_errors_of_every_library_are_recognised(error: Exception, number: int | None) -> None:
    assert storage_errno(error) == number
    wrapped = RuntimeError("something went wrong")
    wrapped.__cause__ = error
    assert storage_errno(wrapped) == number


def test_other_errors_are_not_changed(tmp_path: Path) -> None:
    with pytest.raises(ZeroDivisionError), writing(Path("x")):
        raise ZeroDivisionError
    with pytest.raises(FileNotFoundError), writing(tmp_path / "out" / "copy"):
        (tmp_path / "what is copied").read_bytes()
    with pytest.raises(StorageFailed, match="copy: No such file or directory"), writing(tmp_path / "out" / "copy"):
        (tmp_path / "out" / "copy").write_bytes(b"x")


# -- other commands -----------------------------------------------------------------------------------------------


def test_data_prepare_on_a_full_disk(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The earlier prepared set stays, and nothing is left next to it."""
    monkeypatch.chdir(tmp_path)
    row = {"question": "1+1", "answer": "because\n#### 2"}
    (tmp_path / "train.jsonl").write_text(json.dumps(row) + "\n")
    command = ["data", "prepare", "gsm8k", "--from", "train=train.jsonl", "--out", "disk/gsm8k"]
    with small_disk(tmp_path / "disk", 100) as disk:
        assert main(command) == 0
        first = {p.name: p.read_bytes() for p in (disk.path / "gsm8k").iterdir()}
        disk.fill()
        capsys.readouterr()
        assert main(command) == 1
        output = capsys.readouterr().err
        assert "cannot write disk/gsm8k: No space left" in output and "Traceback" not in output
        assert {p.name: p.read_bytes() for p in (disk.path / "gsm8k").iterdir()} == first
        assert sorted(p.name for p in disk.path.iterdir()) == ["ballast", "gsm8k"]


def test_an_export_without_space_leaves_nothing(
    tmp_path: Path, tiny_model_folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with largest_file(50_000):
        assert main(["export", str(tiny_model_folder), str(tmp_path / "out")]) == 1
    assert f"cannot write {tmp_path / 'out'}: File too large" in capsys.readouterr().err
    assert not list(tmp_path.iterdir())


def test_a_conversion_without_space_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The built-in model's cache, with a small model in place of the GGUF file."""
    from covey.models import builtin
    from tests.conftest import byte_tokenizer, tiny_llama

    monkeypatch.setattr("transformers.AutoTokenizer.from_pretrained", lambda *a, **k: byte_tokenizer())
    monkeypatch.setattr("transformers.AutoModelForCausalLM.from_pretrained", lambda *a, **k: tiny_llama())
    monkeypatch.setattr(builtin, "_clear_quantisation", lambda model: None)
    folder = tmp_path / "models" / "small"
    with largest_file(50_000), pytest.raises(StorageFailed, match="small: File too large"):
        builtin._convert(tmp_path / "x.gguf", folder)
    assert not list(folder.parent.iterdir())
    builtin._convert(tmp_path / "x.gguf", folder)
    assert (folder / "model.safetensors").is_file()


def test_weights_for_another_process_are_complete_or_absent(tmp_path: Path) -> None:
    from covey.weights.files import write_weights
    from covey.weights.names import named_weights
    from tests.conftest import tiny_llama

    with largest_file(50_000), pytest.raises(StorageFailed, match=r"version-1.safetensors: File too large"):
        write_weights(named_weights(tiny_llama()), tmp_path, 1)
    assert not list(tmp_path.iterdir())


def test_an_evaluation_on_a_full_disk_resumes(
    tmp_path: Path, tiny_model_folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from covey.evaluation.answers import EvalFolder

    monkeypatch.chdir(prepare(tmp_path))
    words = ["eval", str(tiny_model_folder), "data.val_files=tasks.jsonl", "reward=exact", "rollout.max_tokens=3"]
    assert main([*words, "--out", "whole"]) == 0
    append, disk = EvalFolder.append, SmallDisk(tmp_path / "disk")
    calls = 0

    def filled(folder: EvalFolder, answers: Any) -> None:
        nonlocal calls
        calls += 1
        if calls == 3:
            with (tmp_path / "disk/out/answers.jsonl").open("a") as file:  # half a line, as if that much had fit
                file.write('{"model": "ti')
            disk.fill()
            (tmp_path / "disk/out/answers.jsonl").open("a").write("x" * 4096)
        append(folder, answers)

    with small_disk(tmp_path / "disk", 100):
        with monkeypatch.context() as patch:
            patch.setattr(EvalFolder, "append", filled)
            assert main([*words, "--out", "disk/out"]) == 1
        output = capsys.readouterr().err
        assert "No space left" in output
        disk.free()
        assert main([*words, "--out", "disk/out"]) == 0
        assert "2 of 4 answers are there already" in capsys.readouterr().err
        same = [json.loads((tmp_path / at / "results.json").read_text())["results"] for at in ("whole", "disk/out")]
        assert same[0] == same[1]
