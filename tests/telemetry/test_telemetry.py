"""Telemetry: stage times, records, sinks and trackers."""

from __future__ import annotations

import re
import sys
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from covey.config.schema import LoggingConfig
from covey.errors import InputError
from covey.imports import install_extra
from covey.telemetry import EpisodeView, RunInfo, Telemetry, check_logging, read_history
from covey.telemetry.base import Sink
from covey.telemetry.console import WarningsOnly
from covey.telemetry.jsonl import JsonlFiles


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


class Listener(Sink):
    """Records its events."""

    def __init__(self) -> None:
        self.stages: list[str | None] = []
        self.steps: list[dict[str, float]] = []
        self.evaluations: list[dict[str, float]] = []
        self.closed: list[str] = []

    def stage(self, name: str | None) -> None:
        self.stages.append(name)

    def step(
        self,
        index: int,
        metrics: Mapping[str, float],
        sample: EpisodeView | None,
        episodes: Sequence[Mapping[str, Any]],
    ) -> None:
        self.steps.append(dict(metrics))

    def evaluation(self, step: int, metrics: Mapping[str, float], sample: EpisodeView | None) -> None:
        self.evaluations.append(dict(metrics))

    def close(self, status: str) -> None:
        self.closed.append(status)


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def listener() -> Listener:
    return Listener()


@pytest.fixture
def telemetry(tmp_path: Path, clock: Clock, listener: Listener) -> Telemetry:
    return Telemetry(JsonlFiles(tmp_path), [listener], now=clock)


def test_a_step_gets_the_time_of_its_stages_and_an_evaluation_its_own(
    telemetry: Telemetry, clock: Clock, listener: Listener
) -> None:
    with telemetry.stage("evaluate"):
        clock.now += 7
    with telemetry.stage("rollout"):
        clock.now += 4
    clock.now += 100  # unmeasured
    with telemetry.stage("update"):
        clock.now += 1
    telemetry.step(0, {"reward/mean": 0.5, "perf/generated_tokens": 600}, None, [])
    telemetry.evaluation(1, {"eval/accuracy": 0.1}, None)
    with telemetry.stage("checkpoint"):
        clock.now += 2
    telemetry.step(1, {}, None, [])

    first, second = listener.steps
    assert first == {
        "reward/mean": 0.5,
        "perf/generated_tokens": 600,
        "perf/tokens_per_second": 150.0,
        "timing/rollout": 4.0,
        "timing/generation_time": 4.0,
        "timing/update": 1.0,
        "timing/step": 5.0,
    }
    assert listener.evaluations == [{"eval/accuracy": 0.1, "timing/evaluate": 7.0}]
    assert second == {"timing/checkpoint": 2.0, "timing/step": 2.0}


def test_throughput_in_async_mode_is_per_step(tmp_path: Path, clock: Clock, listener: Listener) -> None:
    """Per second of the step: the learner hardly waits, and a step's tokens may have been sampled before it."""
    telemetry = Telemetry(JsonlFiles(tmp_path), [listener], now=clock, asynchronous=True)
    for tokens in (600, 0):
        with telemetry.stage("rollout"):
            clock.now += 1
        with telemetry.stage("update"):
            clock.now += 3
        telemetry.step(0, {"perf/generated_tokens": tokens}, None, [])
    assert [step["perf/tokens_per_second"] for step in listener.steps] == [150.0, 0.0]


def test_memory_is_measured_once_for_all_sinks(tmp_path: Path) -> None:
    """Reading the peak resets it."""
    looks = iter((10.0, 1.0, 1.0))
    first, second = Listener(), Listener()
    telemetry = Telemetry(JsonlFiles(tmp_path), [first, second], memory=lambda: {"perf/gpu_memory_gib": next(looks)})
    telemetry.step(0, {}, None, [])
    assert first.steps == second.steps == [{"perf/gpu_memory_gib": 10.0}]
    assert read_history(tmp_path).training("perf/gpu_memory_gib") == [(0, 10.0)]


def test_a_nested_stage_is_shown_but_counts_towards_the_outer_one(
    telemetry: Telemetry, clock: Clock, listener: Listener
) -> None:
    with telemetry.stage("evaluate"):
        clock.now += 1
        with telemetry.stage("rollout"):
            clock.now += 2
        clock.now += 3
    telemetry.evaluation(0, {}, None)
    telemetry.step(0, {}, None, [])
    assert listener.evaluations == [{"timing/evaluate": 6.0}]
    assert listener.steps == [{}]
    assert listener.stages == ["evaluate", "rollout", "evaluate", None]


def test_a_record_made_inside_its_stage_has_the_time_so_far(
    telemetry: Telemetry, clock: Clock, listener: Listener
) -> None:
    with telemetry.stage("evaluate"):
        clock.now += 5
        telemetry.evaluation(0, {}, None)
    assert listener.evaluations == [{"timing/evaluate": 5.0}]


def test_a_stage_ends_when_it_raises(telemetry: Telemetry, clock: Clock, listener: Listener) -> None:
    with pytest.raises(RuntimeError), telemetry.stage("update"):
        clock.now += 3
        raise RuntimeError
    telemetry.step(0, {}, None, [])
    assert listener.stages == ["update", None]
    assert listener.steps == [{"timing/update": 3.0, "timing/step": 3.0}]


def test_closing_twice_has_no_effect(telemetry: Telemetry, listener: Listener) -> None:
    telemetry.close("failed")
    telemetry.close("finished")
    assert listener.closed == ["failed"]


@pytest.mark.parametrize(
    ("extra", "module"),
    [("wandb", "wandb"), ("tensorboard", "torch.utils.tensorboard"), ("mlflow", "mlflow"), ("trackio", "trackio")],
)
def test_a_missing_extra_is_reported_before_anything_is_written(
    monkeypatch: pytest.MonkeyPatch, info: RunInfo, extra: str, module: str
) -> None:
    monkeypatch.setitem(sys.modules, module, None)  # importing it fails
    logging = LoggingConfig(to=[extra])
    for attempt in (
        lambda: check_logging(logging),
        lambda: Telemetry.open(info, logging, metrics_offset=None, episodes_offset=None),
    ):
        with pytest.raises(InputError, match=re.escape(install_extra(extra))):
            attempt()
    assert not info.folder.exists()


@pytest.fixture(autouse=True)
def nothing_of_the_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("covey.telemetry.telemetry.memory_metrics", dict)


class FakeWandb:
    """The part of wandb that we use."""

    def __init__(self) -> None:
        self.started: list[dict[str, Any]] = []
        self.logged: list[dict[str, float]] = []
        self.exit_codes: list[int] = []

    def init(self, **options: Any) -> FakeWandb:
        self.started.append(options)
        return self

    def define_metric(self, name: str, step_metric: str | None = None) -> None: ...

    def log(self, values: dict[str, float]) -> None:
        self.logged.append(values)

    def finish(self, exit_code: int) -> None:
        self.exit_codes.append(exit_code)


def test_wandb_gets_our_names_and_a_resumed_run_its_old_id(monkeypatch: pytest.MonkeyPatch, info: RunInfo) -> None:
    fake = FakeWandb()
    monkeypatch.setitem(sys.modules, "wandb", fake)
    logging = LoggingConfig(project="p", experiment="e", to=["wandb"], tags=["baseline"], notes="lower lr")

    first = Telemetry.open(info, logging, metrics_offset=None, episodes_offset=None)
    first.step(0, {"reward/mean": 0.5}, None, [])
    metrics_offset, episodes_offset = first.offsets()
    first.close("interrupted")
    resumed = replace(info, first_step=1)
    second = Telemetry.open(resumed, logging, metrics_offset=metrics_offset, episodes_offset=episodes_offset)
    second.evaluation(1, {"eval/accuracy": 0.25}, None)
    second.close("finished")

    assert fake.logged == [{"reward/mean": 0.5, "step": 0}, {"eval/accuracy": 0.25, "step": 1}]
    assert [start["id"] for start in fake.started] == [(info.folder / "wandb_run_id").read_text().strip()] * 2
    assert (fake.started[0]["project"], fake.started[0]["name"], fake.started[0]["config"]) == ("p", "e", {"seed": 0})
    labels = [(start["tags"], start["notes"]) for start in fake.started]
    assert labels == [(["baseline"], "lower lr"), (None, None)], "what was changed on its page stays"
    assert fake.exit_codes == [1, 0]


def test_tensorboard_purges_repeated_steps_but_keeps_the_evaluation_at_the_checkpoint(
    monkeypatch: pytest.MonkeyPatch, info: RunInfo
) -> None:
    written: list[tuple[str, float, int]] = []
    opened: list[dict[str, Any]] = []

    def writer(**options: Any) -> SimpleNamespace:
        opened.append(options)
        Path(options["log_dir"]).mkdir(exist_ok=True)  # as the real one does
        return SimpleNamespace(
            add_scalar=lambda *scalar: written.append(scalar), flush=lambda: None, close=lambda: None
        )

    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", SimpleNamespace(SummaryWriter=writer))
    logging = LoggingConfig(to=["tensorboard"])
    first = Telemetry.open(info, logging, metrics_offset=None, episodes_offset=None)
    first.evaluation(0, {"eval/accuracy": 0.1}, None)
    first.step(0, {"reward/mean": 0.5}, None, [])
    first.evaluation(1, {"eval/accuracy": 0.2}, None)
    metrics_offset, episodes_offset = first.offsets()
    first.close("interrupted")
    assert written == [("eval/accuracy", 0.1, 0), ("reward/mean", 0.5, 0), ("eval/accuracy", 0.2, 1)]

    written.clear()
    resumed = replace(info, first_step=1)
    Telemetry.open(resumed, logging, metrics_offset=metrics_offset, episodes_offset=episodes_offset).close("finished")
    assert [options["purge_step"] for options in opened] == [None, 1]
    assert written == [("eval/accuracy", 0.2, 1)]

    written.clear()  # from a checkpoint of step 0, after the evaluation before training
    Telemetry.open(info, logging, metrics_offset=metrics_offset, episodes_offset=episodes_offset).close("finished")
    assert opened[-1]["purge_step"] == 0
    assert written == [("eval/accuracy", 0.1, 0), ("eval/accuracy", 0.2, 1)]


class FakeMlflow:
    """The part of mlflow that we use, server and client in one."""

    def __init__(self) -> None:
        self.experiments: list[str] = []
        self.runs: list[tuple[str, str]] = []
        self.tags: dict[str, str] = {}
        self.params: list[tuple[str, str]] = []
        self.metrics: list[tuple[str, float, int]] = []
        self.statuses: list[str] = []
        self.entities = SimpleNamespace(
            Metric=lambda key, value, when, step: (key, value, step), Param=lambda key, value: (key, value)
        )

    def MlflowClient(self) -> FakeMlflow:
        return self

    def get_experiment_by_name(self, name: str) -> SimpleNamespace | None:
        return SimpleNamespace(experiment_id=name) if name in self.experiments else None

    def create_experiment(self, name: str) -> str:
        self.experiments.append(name)
        return name

    def create_run(self, experiment_id: str, run_name: str, tags: dict[str, str]) -> SimpleNamespace:
        self.tags |= tags
        self.runs.append((experiment_id, run_name))
        return SimpleNamespace(info=SimpleNamespace(run_id=f"id{len(self.runs)}"))

    def update_run(self, run_id: str, status: str) -> None:
        self.statuses.append(f"{run_id} {status}")

    set_terminated = update_run

    def log_batch(self, run_id: str, metrics: Sequence[Any] = (), params: Sequence[Any] = ()) -> None:
        assert run_id == f"id{len(self.runs)}" and len(params) <= 100
        self.metrics += metrics
        self.params += params


def test_mlflow_gets_our_names_and_settings_and_a_resumed_run_its_old_page(
    monkeypatch: pytest.MonkeyPatch, info: RunInfo
) -> None:
    fake = FakeMlflow()
    monkeypatch.setitem(sys.modules, "mlflow", fake)
    logging = LoggingConfig(project="p", experiment="e", to=["mlflow"], tags=["long run", "a=b"], notes="lower lr")
    settings = {"seed": 0, "model": {"name": "m", "lora": {}}, "reward": {f"r{n}": 1.0 for n in range(150)}}

    first = Telemetry.open(replace(info, config=settings), logging, metrics_offset=None, episodes_offset=None)
    first.step(0, {"reward/mean": 0.5, "reward/größe(1)/mean": 1.0}, None, [])
    metrics_offset, episodes_offset = first.offsets()
    first.close("interrupted")
    resumed = replace(info, first_step=1, config=settings)
    second = Telemetry.open(resumed, logging, metrics_offset=metrics_offset, episodes_offset=episodes_offset)
    second.evaluation(1, {"eval/accuracy": 0.25}, None)
    second.close("finished")

    assert fake.metrics == [("reward/mean", 0.5, 0), ("reward/gr__e_1_/mean", 1.0, 0), ("eval/accuracy", 0.25, 1)]
    assert fake.params[:4] == [("seed", "0"), ("model.name", "m"), ("model.lora", "{}"), ("reward.r0", "1.0")]
    assert len(fake.params) == 153
    assert fake.tags == {"long run": "true", "a_b": "true", "mlflow.note.content": "lower lr"}
    assert (fake.experiments, fake.runs) == (["p"], [("p", "e")])
    assert fake.statuses == ["id1 KILLED", "id1 RUNNING", "id1 FINISHED"]

    Telemetry.open(replace(info, folder=info.folder / "b"), logging, metrics_offset=None, episodes_offset=None).close(
        "failed"
    )
    assert (fake.experiments, fake.runs, fake.statuses[-1]) == (["p"], [("p", "e"), ("p", "e")], "id2 FAILED")


def test_a_failing_tracker_is_dropped_with_a_warning(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], listener: Listener
) -> None:
    class Broken(Listener):
        external = True

        def evaluation(self, step: int, metrics: Mapping[str, float], sample: EpisodeView | None) -> None:
            raise ConnectionError("no server")

    broken = Broken()
    telemetry = Telemetry(JsonlFiles(tmp_path), [broken, listener, WarningsOnly(sys.stdout)])
    telemetry.step(0, {"a": 1.0}, None, [])
    telemetry.evaluation(1, {"b": 2.0}, None)
    telemetry.step(1, {"a": 3.0}, None, [])
    telemetry.close("finished")
    assert (broken.steps, broken.closed) == ([{"a": 1.0}], [])
    assert (listener.steps, listener.closed) == ([{"a": 1.0}, {"a": 3.0}], ["finished"])
    assert listener.evaluations == [{"b": 2.0}] and len(read_history(tmp_path).evaluations) == 1
    assert (
        "Broken failed and receives nothing more from this run: ConnectionError('no server')" in capsys.readouterr().out
    )


def test_an_error_of_a_local_sink_ends_the_run(tmp_path: Path) -> None:
    class Broken(Listener):
        def note(self, text: str) -> None:
            raise OSError("disk full")

    with pytest.raises(OSError, match="disk full"):
        Telemetry(JsonlFiles(tmp_path), [Broken()]).note("x")


def test_trackio_gets_our_names_and_a_resumed_run_its_old_name(monkeypatch: pytest.MonkeyPatch, info: RunInfo) -> None:
    started: list[dict[str, Any]] = []
    logged: list[tuple[dict[str, float], int]] = []

    def init(**options: Any) -> SimpleNamespace:
        started.append(options)
        return SimpleNamespace(log=lambda metrics, step: logged.append((metrics, step)), finish=lambda: None)

    monkeypatch.setitem(sys.modules, "trackio", SimpleNamespace(init=init))
    logging = LoggingConfig(project="p", experiment="e", to=["trackio"])
    for resumed in (info, replace(info, first_step=1), replace(info, folder=info.folder / "b")):
        telemetry = Telemetry.open(resumed, logging, metrics_offset=None, episodes_offset=None)
        telemetry.step(resumed.first_step, {"reward/mean": 0.5}, None, [])
        telemetry.close("finished")

    assert logged == [({"reward/mean": 0.5}, 0), ({"reward/mean": 0.5}, 1), ({"reward/mean": 0.5}, 0)]
    first, second, other = (start["name"] for start in started)
    assert first == second != other and first.startswith("e-")
    assert all((s["project"], s["resume"], s["config"]) == ("p", "allow", {"seed": 0}) for s in started)
