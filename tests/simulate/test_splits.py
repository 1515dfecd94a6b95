"""Splits of devices: their memory, messages and times, by hand."""

from __future__ import annotations

import dataclasses
import json
import math
from pathlib import Path

import pytest

from covey.app.compose import compose_command
from covey.app.simulation import passes
from covey.cli.main import main
from covey.cli.parse import parse
from covey.simulate.hardware import GIB, NODE, DecodeCurve, Device, Episodes, Shape, Speeds, Turn, device
from covey.simulate.simulation import Workload
from covey.simulate.splits import (
    Job,
    Memory,
    Split,
    Training,
    activation_bytes,
    all_splits,
    best,
    engine_memory,
    learner_memory,
    max_sequences,
    predict,
    states,
)

SHAPE = Shape(2, 8, 16, 4, 2, 2, 100, tied=True, source="made up")  # 1952 parameters
DEVICE = Device("made up", 1e3, 1e6, 1e9, 1000.0, 100.0, 0.01, 0.5, 2)
JOB = Job(
    work=Workload(4, 2, Episodes(((Turn(10),),), prompt=20)),  # 4 · (20 + 2 · 10) = 160 tokens
    speeds=Speeds(DecodeCurve.line(0.1, 0.0), prefill=0.0, learn_token=0.05, learn_fixed=0.5),
    shape=SHAPE,
    device=DEVICE,
    training=Training(),
)


def test_bytes_of_a_parameter() -> None:
    """Half precision 2 + 6 + 12, as measured on an H200; float32 4 + 4 + 8; shared out over four."""
    assert states(SHAPE, DEVICE, Training(), 1) == Memory(2 * 1952, 6 * 1952, 12 * 1952)
    single = dataclasses.replace(DEVICE, itemsize=4)
    assert states(SHAPE, single, Training(), 4).total == 16 * 1952 / 4
    adapters = states(SHAPE, DEVICE, Training(reference=True, trained=0.01), 1)  # the base is the reference
    assert adapters.total == pytest.approx(2 * 1952 + 18 * 19.52)
    away = Training(reference=True, offload_optimizer=True, offload_reference=True)
    assert states(SHAPE, DEVICE, away, 1).total == 8 * 1952
    assert states(SHAPE, DEVICE, Training(reference=True), 1).reference == 2 * 1952


def test_activations_of_a_token_are_what_an_h200_showed() -> None:
    """Qwen2.5-0.5B: 959 KiB a token (docs/benchmarks.md), to within 2 %."""
    shape = Shape(24, 896, 4864, 14, 2, 64, 151_936, tied=True, source="its config.json")
    assert activation_bytes(shape, 2, checkpointing=False) == pytest.approx(959 * 1024, rel=0.02)
    one = 2 * (3 * 4864 + 6.5 * 896)
    assert activation_bytes(shape, 2, checkpointing=True) == 24 * 2 * 896 + one


def test_a_micro_batch_is_what_fits_or_what_was_set() -> None:
    each = activation_bytes(SHAPE, 2, checkpointing=False)  # 2 · 2 · (48 + 52) = 400
    assert each == 400
    room = 20 * 1952 + 10 * 400 + 399
    memory, micro = learner_memory(SHAPE, DEVICE, Training(), 1, tokens=1000, available=room)
    assert micro == 10 and memory.activations == 4000 and memory.total == 20 * 1952 + 4000
    assert learner_memory(SHAPE, DEVICE, Training(), 1, tokens=7, available=room)[1] == 7
    assert learner_memory(SHAPE, DEVICE, Training(micro_batch_tokens=500), 1, tokens=1000, available=room)[1] == 500


def test_an_engine_has_weights_and_a_cache() -> None:
    """32 bytes a token: 5 answers of 100 tokens."""
    assert engine_memory(SHAPE, DEVICE, 5, 100, 1) == Memory(weights=3904, cache=16000)
    assert max_sequences(SHAPE, DEVICE, 100, 1, available=3904 + 16000) == 5
    assert max_sequences(SHAPE, DEVICE, 100, 2, available=1952 + 16000) == 10
    assert max_sequences(SHAPE, DEVICE, 100, 1, available=3000) == 0


def test_splits_are_of_whole_machines_where_there_are_several() -> None:
    assert [split.name for split in all_splits(1)] == ["1 shared"]
    assert [split.name for split in all_splits(4)] == ["4 shared", "3 + 1", "2 + 2", "1 + 3"]
    names = [split.name for split in all_splits(512)]
    assert names == ["512 shared", "448 + 64", "384 + 128", "256 + 256", "128 + 384", "64 + 448"]
    assert all(split.rollout % 4 == 0 for split in all_splits(8, engine_devices=4))


def test_one_device_alternates_between_sampling_and_learning() -> None:
    """Sampling 10 · 0.1 s, learning 0.5 + 160 · 0.05 s, publishing 3904 bytes at 1e6 a second."""
    found = predict(JOB, Split(1, 1, True), 0)
    assert found.fits and found.parallel == "ddp"
    assert found.step == pytest.approx(1.0 + 8.5 + 0.003904)
    assert found.learner_busy == pytest.approx(8.5 / found.step)
    assert found.engines_busy == pytest.approx(1.0 / found.step)
    assert found.tokens_per_second == pytest.approx(80 / found.step)
    measured = dataclasses.replace(JOB, speeds=dataclasses.replace(JOB.speeds, publish=0.25))
    assert predict(measured, Split(1, 1, True), 0).step == pytest.approx(1.0 + 8.5 + 0.25)


def test_gradients_are_sent_once_per_update() -> None:
    """Four ranks of ddp: 2 · 3/4 · 4 bytes · 1952 over 1000 bytes a second; two updates, twice."""
    found = predict(dataclasses.replace(JOB, parallel="ddp"), Split(4, 4, False), 0)
    assert found.messages == pytest.approx(2 * 0.75 * 4 * 1952 / 1000)
    assert found.learning == pytest.approx(0.5 + 40 * 0.05 + found.messages)
    twice = predict(dataclasses.replace(JOB, parallel="ddp", updates=2), Split(4, 4, False), 0)
    assert twice.messages == pytest.approx(2 * found.messages)


def test_sharded_weights_are_sent_with_every_micro_batch() -> None:
    """40 tokens of a rank in micro-batches of 30: two passes of (2 · 2 + 4) bytes · 1952 · 3/4; a quarter of the
    update each. Published: gathered, and sent."""
    job = dataclasses.replace(JOB, parallel="fsdp", training=Training(micro_batch_tokens=30))
    found = predict(job, Split(4, 4, False), 0)
    assert found.messages == pytest.approx(2 * 8 * 1952 * 0.75 / 1000)
    assert found.learning == pytest.approx(0.5 / 4 + 40 * 0.05 + found.messages)
    assert found.publishing == pytest.approx(2 * 3904 / 1000)


def test_beyond_one_machine_the_network_counts() -> None:
    inside, beyond = (
        predict(dataclasses.replace(JOB, parallel="ddp"), Split(n, 1, False), 0) for n in (NODE, NODE + 1)
    )
    assert beyond.messages / inside.messages == pytest.approx((8 / 9) / (7 / 8) * 10)


def test_with_more_ranks_than_rows_the_longest_row_counts() -> None:
    found = predict(dataclasses.replace(JOB, parallel="ddp"), Split(100, 4, False), 0)
    assert found.learning - found.messages == pytest.approx(0.5 + 30 * 0.05)


def test_in_async_mode_sampling_overlaps_with_learning() -> None:
    """Sampling 1 s, learning 8.5 s, publishing 3904 bytes at 1000 a second."""
    assert predict(JOB, Split(1, 1, False), 0).step == pytest.approx(1.0 + 8.5 + 3.904)
    found = predict(JOB, Split(1, 1, False), 1)
    assert found.step == pytest.approx(8.5 + 3.904)
    assert (found.age, found.age_max) == (pytest.approx(1.0), 1)


def test_a_split_that_does_not_fit_is_never_the_best() -> None:
    small = dataclasses.replace(JOB, device=dataclasses.replace(DEVICE, memory=20 * 1952.0))
    found = predict(small, Split(1, 1, False), 0)
    assert not found.fits and math.isnan(found.step)
    assert best([found]) is None
    assert best([found, predict(JOB, Split(1, 1, False), 0)]).split == Split(1, 1, False)  # type: ignore[union-attr]


def test_weights_are_sharded_only_if_necessary() -> None:
    tight = dataclasses.replace(DEVICE, memory=25 * 1952.0)
    assert predict(JOB, Split(4, 4, False), 0).parallel == "ddp"
    assert predict(dataclasses.replace(JOB, device=tight), Split(4, 4, False), 0).parallel == "fsdp"


# -- the command ------------------------------------------------------------------------------------------------------


def test_a_recipe_is_simulated_and_every_figure_labelled(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    written = tmp_path / "found.json"
    words = ["gvpo_math_small", "--gpus", "16", "--gpu", "h100", "--answer-tokens", "50", "--json", str(written)]
    assert main(["simulate", *words, "rollout.max_tokens=100", "data.train_batch_size=4"]) == 0
    told = capsys.readouterr().out
    assert "no accuracy is claimed beyond that scale" in told
    assert told.count("(assumed)") >= 5 and "(measured)" not in told
    found = json.loads(written.read_text())
    assert [split["best"] for split in found["splits"]].count(True) == 1
    assert {split["mode"] for split in found["splits"]} == {"sync", "async, staleness 1"}
    chosen = next(split for split in found["splits"] if split["best"])
    assert chosen["step"] == min(split["step"] for split in found["splits"] if split["fits"])
    assert max(split["learner"]["weights"] for split in found["splits"]) < 80 * GIB


def test_tokens_of_older_policies_take_another_forward_pass() -> None:
    """Synchronous GRPO: one pass; async: a third more. GVPO needs its reference in both, if it has one."""
    grpo = compose_command(parse(["algorithm=grpo"])).config
    assert [passes(grpo, lead) for lead in (0, 1)] == pytest.approx([1.0, 4 / 3])
    gvpo = compose_command(parse(["algorithm=gvpo", "algorithm.reference=initial"])).config
    assert [passes(gvpo, lead) for lead in (0, 1)] == pytest.approx([4 / 3, 4 / 3])


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["demo"], "--gpus"),
        (["demo", "--gpus", "8", "--gpu", "h1000"], "did you mean   h100"),
        (["demo", "--gpus", "8", "--tool-seconds", "5:1"], "LOW:HIGH"),
        (["dmo", "--gpus", "8"], "demo"),
        (["demo", "--gpus", "8", "model=org/unknown"], "nor is it in its name"),
    ],
)
def test_mistakes_are_reported(words: list[str], said: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["simulate", *words]) == 2
    assert said in capsys.readouterr().err


def test_a_run_of_one_device_gives_measured_figures(
    tmp_path: Path, tiny_model_folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    small = ["data=sort", "algorithm=grpo", "data.train_batch_size=2", "rollout.group_size=2", "rollout.max_tokens=8"]
    end = ["loop.total_steps=3", "loop.save_final=false", "eval.before=false", "eval.after=false", "logging.to=[]"]
    assert main(["train", f"model={tiny_model_folder}", *small, *end]) == 0
    (run,) = tmp_path.glob("outputs/*/*")
    capsys.readouterr()
    assert main(["simulate", str(run), "--gpus", "1"]) == 0
    told = capsys.readouterr().out
    assert "1 × cpu" in told and told.count("(measured)") == 4
    assert main(["simulate", str(run), "--gpus", "8", "--gpu", "h200"]) == 0  # a GPU is no CPU: lengths alone
    assert capsys.readouterr().out.count("(measured)") == 1
    assert main(["simulate", str(run), "--gpus", "8", "--turns", "2"]) == 2


def test_devices_are_in_their_makers_order() -> None:
    """Each is faster than the one before it in everything that counts."""
    old, hopper, newer, newest = (device(name) for name in ("a100", "h100", "h200", "b200"))
    assert old.flops < hopper.flops == newer.flops < newest.flops
    assert old.bandwidth < hopper.bandwidth < newer.bandwidth < newest.bandwidth
