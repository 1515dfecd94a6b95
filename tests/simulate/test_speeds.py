"""Speeds and lengths: assumed from a model's size, and measured in runs and benchmarks."""

from __future__ import annotations

import itertools
import json
from pathlib import Path
from typing import Any

import pytest

from covey.errors import InputError
from covey.simulate.hardware import (
    DecodeCurve,
    Device,
    Episodes,
    Shape,
    Speeds,
    Turn,
    assumed_episodes,
    assumed_speeds,
    fit_line,
    shape_from_name,
)
from covey.simulate.measured import benchmark_speeds, learn_speed, read_benchmarks, run_episodes, run_speeds, run_steps
from covey.simulate.simulation import Deployment, Workload, simulate

SHAPE = Shape(2, 8, 16, 4, 2, 2, 100, tied=True, source="made up")
DEVICE = Device("made up", 1e3, 1e3, 1e9, 1e6, 1e5, 0.01, 0.5, 2)


def test_between_points_and_beyond_them() -> None:
    decode = DecodeCurve(((1.0, 2.0), (3.0, 4.0), (5.0, 10.0)))
    assert [decode.seconds(n) for n in (1, 2, 3, 4, 5, 7)] == [2.0, 3.0, 4.0, 7.0, 10.0, 16.0]
    assert DecodeCurve.line(1.0, 0.5).seconds(6) == 4.0
    assert DecodeCurve(((8.0, 3.0),)).seconds(100) == 3.0
    assert decode.scaled(2.0).seconds(4) == 14.0


def test_a_line_is_fitted_only_to_informative_points() -> None:
    assert fit_line([1, 2, 3, 4], [5.0, 7.0, 9.0, 11.0]) == pytest.approx((3.0, 2.0))
    assert fit_line([1, 2, 3], [5.0, 7.0, 9.0]) is None  # too few
    assert fit_line([100, 101, 99, 100], [1.0, 2.0, 3.0, 4.0]) is None  # too alike
    assert fit_line([1, 2, 3, 4], [4.0, 3.0, 2.0, 1.0]) is None  # more work, less time
    assert fit_line([1, 2, 3, 4], [1.0, 3.0, 5.0, 7.0]) is None  # starts below 0


def test_assumed_speeds_by_hand() -> None:
    """body = 2 · (8·2·(2·4 + 2·2) + 3·8·16) = 2 · (192 + 384) = 1152, output 800: 1952 numbers, 3904 bytes. A token of
    the cache has 2·2·2·2 numbers, 32 bytes."""
    assert (SHAPE.body, SHAPE.output, SHAPE.parameters, SHAPE.kv_bytes(2)) == (1152, 800, 1952, 32)
    found = assumed_speeds(SHAPE, DEVICE, context=10)
    assert found.decode.seconds(4) == pytest.approx(2 * 0.01 + (3904 + 4 * 320) / 1e3 + 2 * 1952 * 4 / 1e3)
    assert found.prefill == pytest.approx(2 * 1952 / 500)
    assert found.learn_token == pytest.approx((6 * 1952 + 12 * 2 * 8 * 5) / 500)
    assert found.learn_fixed == pytest.approx(32 * 1952 / 1e3)
    again = assumed_speeds(SHAPE, DEVICE, context=10, passes=2.0, checkpointing=True)
    assert again.learn_token == pytest.approx(2 * 4 / 3 * found.learn_token)


def test_assumed_answers_are_cut_and_have_their_median() -> None:
    found = assumed_episodes(answer=100, longest=300, prompt=7, turns=2, wait=(1.0, 3.0), count=4000)
    lengths = sorted(turn.tokens for turns in found.examples for turn in turns)
    assert lengths[-1] == 300 and 95 <= lengths[len(lengths) // 2] <= 105
    assert found.waits == pytest.approx(2.0, abs=0.05)
    assert all(turns[-1].wait == 0 for turns in found.examples)


@pytest.mark.parametrize(
    ("name", "billions"), [("Qwen/Qwen2.5-7B-Instruct", 7.6), ("org/model-1.5b", 1.5), ("x/smol-360M", 0.5)]
)
def test_a_size_is_read_from_a_name(name: str, billions: float) -> None:
    found = shape_from_name(name)
    assert found is not None
    assert found.parameters / 1e9 == pytest.approx(billions, rel=0.05)


def test_a_name_without_a_size_has_no_shape() -> None:
    assert shape_from_name("org/v2.5-instruct") is None


# -- Runs ------------------------------------------------------------------------------------------------------------


def row(prompt: int, mask: list[int]) -> dict[str, Any]:
    return {"prompt_ids": [0] * prompt, "mask": mask}


def write_run(folder: Path, steps: list[dict[str, float]], rows: list[list[dict[str, Any]]]) -> Path:
    folder.mkdir(exist_ok=True)
    lines = [json.dumps({"kind": "step", "step": n, "metrics": m}) for n, m in enumerate(steps)]
    (folder / "metrics.jsonl").write_text("\n".join(lines) + "\n")
    (folder / "episodes.jsonl").write_text("".join(json.dumps({"schema": 1, "rows": r}) + "\n" for r in rows))
    return folder


def step(**changes: float) -> dict[str, float]:
    found = {"episodes/total": 4.0, "groups/total": 2.0, "response/length_mean": 6.0}
    return found | {name.replace("__", "/"): value for name, value in changes.items()}


def test_turns_are_read_from_what_was_sampled(tmp_path: Path) -> None:
    """Two turns in one row, then a rewritten history. 12 s of tools in 4 episodes of 3 turns: 1.5 s each."""
    steps = [step(agent__turns_mean=3.0, timing__tools=12.0)] * 2
    rows = [[row(5, [1, 1, 0, 0, 0, 1]), row(9, [1, 1, 1, 1])], [row(7, [1, 1])]]
    found = run_episodes(write_run(tmp_path / "run", steps, rows), steps)
    assert found.examples == ((Turn(2, 1.5, 3), Turn(1, 1.5, 9), Turn(4)), (Turn(2),))
    assert found.prompt == 6
    assert (found.tokens, found.length, found.waits) == (4.5, 10.5, 1.5)


def test_a_run_of_one_step_is_refused(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="two or more"):
        run_steps(write_run(tmp_path / "run", [step()], []))


def test_learning_is_an_update_and_its_tokens() -> None:
    """4 rows and 2 prompts of 10: 4 · length + 20 tokens; 2 updates of 0.5 s and 0.01 s a token."""
    episodes = Episodes(((Turn(6),),), prompt=10)
    lengths = (99.0, 5.0, 10.0, 20.0, 40.0)  # the first step does not count
    seconds = [2 * 0.5 + 0.01 * (4 * length + 20) for length in lengths]
    steps = [
        step(response__length_mean=length, timing__update=s - 0.1, timing__annotate=0.1)
        for length, s in zip(lengths, seconds, strict=True)
    ]
    assert learn_speed(steps, episodes, updates=2, epochs=1, fixed=9.0) == pytest.approx((0.5, 0.01))


def test_with_equal_steps_an_update_takes_the_assumed_time() -> None:
    """44 tokens and one update in 2.7 s, of which 0.5 s are assumed to be the update's."""
    steps = [step(timing__update=2.7)] * 3
    episodes = Episodes(((Turn(6),),), prompt=10)
    assert learn_speed(steps, episodes, updates=1, epochs=1, fixed=0.5) == pytest.approx((0.5, 0.05))


@pytest.mark.parametrize("lead", [0, 2])
def test_the_speed_of_a_simulated_run_is_recovered(tmp_path: Path, lead: int) -> None:
    """A run that is itself simulated, on an engine 3.7 times slower than assumed, with tools."""
    base = Speeds(DecodeCurve.line(0.01, 0.002), 0.001, 0.0, 0.0)
    turns = (Turn(20, wait=1.5, observation=4), Turn(10))
    work = Workload(2, 2, Episodes((turns,), 10))
    slow = Deployment(1, True, lead, base.decode.scaled(3.7), 0.0037, 64, lambda tokens, longest: 0.8, 0.1)
    ends = [0.0, *(s.ended for s in simulate(work, slow, 6, open_ended=False))]
    steps = [
        step(timing__rollout=b - a - 0.9, timing__update=0.8, timing__publish=0.1, agent__turns_mean=2.0)
        | {"timing/tools": 4 * 1.5, "response/length_mean": 30.0}
        for a, b in itertools.pairwise(ends)
    ]
    folder = write_run(tmp_path / "run", steps, [[row(10, [1] * 20 + [0] * 4 + [1] * 10)]])
    assert run_episodes(folder, steps) == work.episodes
    found, figures = run_speeds(folder, work, base, updates=1, epochs=1, lead=lead, capacity=64)
    assert found.decode.seconds(4) == pytest.approx(3.7 * 0.018, rel=1e-4)
    assert found.prefill == pytest.approx(0.0037, rel=1e-4)
    assert found.publish == pytest.approx(0.1)
    assert all(figure.measured for figure in figures)


# -- Benchmarks ------------------------------------------------------------------------------------------------------


def write_result(path: Path, name: str, rows: list[dict[str, Any]], **settings: Any) -> Path:
    path.write_text(json.dumps({"name": name, "device": "NVIDIA H200", "rows": rows, "settings": settings}))
    return path


def test_decoding_and_learning_are_read_from_benchmarks(tmp_path: Path) -> None:
    decoded = [
        {"model": "qwen2.5-0.5b", "side": side, "batch": batch, "decode_tokens_per_s": speed}
        for side, batch, speed in [("covey", 1, 100.0), ("covey", 8, 400.0), ("transformers", 8, 40.0)]
    ]
    learned = [
        {
            "load": {"prompts": 2, "group": group, "prompt_tokens": 10, "answer_tokens": 20},
            "sampling_s": 1.0,
            "learning_s": 0.5 + 0.01 * (20 + 40 * group),
        }
        for group in (1, 2, 4, 8)
    ]
    files = [
        write_result(tmp_path / "scaling.json", "scaling", learned, model="qwen2.5-0.5b"),
        write_result(tmp_path / "decode.json", "decode", decoded),
    ]
    base = Speeds(DecodeCurve.line(1.0, 1.0), 1.0, 1.0, 1.0)
    found, figures = benchmark_speeds(read_benchmarks(files), "Qwen/Qwen2.5-0.5B-Instruct", base)
    assert found.decode.points == ((1, 0.01), (8, 0.02))
    assert (found.learn_fixed, found.learn_token) == pytest.approx((0.5, 0.01))
    assert {figure.source for figure in figures} == {"scaling.json, NVIDIA H200", "decode.json, NVIDIA H200"}


def test_one_point_scales_the_assumed_curve(tmp_path: Path) -> None:
    row = {"model": "tiny-1b", "side": "covey", "batch": 4, "decode_tokens_per_s": 2.0}
    base = Speeds(DecodeCurve.line(1.0, 0.25), 1.0, 1.0, 1.0)  # 2 s of assumed, 4 / 2 = 2 s of measured: × 1
    path = write_result(tmp_path / "decode.json", "decode", [row | {"decode_tokens_per_s": 0.5}])
    found, _ = benchmark_speeds(read_benchmarks([path]), "org/Tiny-1B", base)
    assert found.decode.seconds(4) == pytest.approx(8.0) and found.decode.seconds(0) == pytest.approx(4.0)


def test_files_without_measurements_of_the_model_are_named(tmp_path: Path) -> None:
    path = write_result(tmp_path / "decode.json", "decode", [])
    with pytest.raises(InputError, match=r"decode\.json: no measurements of org/Tiny-1B"):
        benchmark_speeds(read_benchmarks([path]), "org/Tiny-1B", Speeds(DecodeCurve.line(1, 1), 1, 1, 1))
    (tmp_path / "other.json").write_text("[")
    with pytest.raises(InputError, match="cannot be read"):
        read_benchmarks([tmp_path / "other.json"])
