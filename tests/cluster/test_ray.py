"""Whole runs with actors in a real cluster, against the same run in one process."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from covey.cluster.engines import RayEngine
from tests.cluster.here import ATTEMPTS, STEPS, TASKS, difference, small_cluster, trained

pytest.importorskip("ray")
RAY = {"cluster.name": "ray", "cluster.rollout_devices": 2}


@pytest.fixture(scope="module")
def cluster() -> Iterator[Any]:
    with small_cluster() as found:
        yield found


@pytest.fixture(autouse=True)
def elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def test_a_killed_engine_changes_nothing(
    cluster: Any, tiny_model_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In the second step one of two engines hangs and is killed while it has requests in progress: they are asked
    again, every task is trained exactly once, and the weights are those of the run in one process."""
    asked: list[int] = []
    engines: list[RayEngine] = []
    generate = RayEngine.generate

    async def watched(engine: RayEngine, *given: Any) -> Any:
        engines[:] = [engine]
        asked.append(1)
        per_step = TASKS * ATTEMPTS
        if len(asked) == per_step + 1:
            os.kill(engine.replicas[0].pid, signal.SIGSTOP)
        if len(asked) == 2 * per_step:
            os.kill(engine.replicas[0].pid, signal.SIGKILL)
        return await generate(engine, *given)

    alone = trained(tiny_model_folder, monkeypatch)
    monkeypatch.setattr(RayEngine, "generate", watched)
    apart = trained(tiny_model_folder, monkeypatch, **RAY)
    assert apart.trained == alone.trained and len(apart.trained) == STEPS
    assert not apart.failures and apart.steps() == alone.steps() == [0, 1, 2]
    assert difference(apart, alone) < 1e-5
    (engine,) = engines
    assert engine.replaced == 1 and engine.reissued == ATTEMPTS  # the attempts at one task share an engine
    assert engine.generated_tokens > 0


def test_a_cluster_of_our_own_cannot_be_reached_from_outside(cluster: Any) -> None:
    import ray

    assert [node["NodeManagerAddress"] for node in ray.nodes()] == ["127.0.0.1"]
    assert os.environ["RAY_AUTH_MODE"] == "token" and "RAY_AUTH_TOKEN" not in os.environ  # children must not have it
    assert ray.get(ray.remote(lambda: len(os.environ["RAY_AUTH_TOKEN"])).remote()) == 64
    assert not ray.get_runtime_context().worker.node.address_info["webui_url"]


@pytest.mark.slow
@pytest.mark.parametrize(
    "settings",
    [
        {"cluster.rollout_devices": None},
        {"cluster.transport": "file"},
        {"cluster.transport": "collective"},
        {"algorithm": "gvpo", "model.lora.rank": 2, "learner.mini_batch_size": 1},
        {"algorithm": "dgdo"},
        {"cluster.learner_devices": 2, "learner.parallel": "ddp"},
        {"cluster.learner_devices": 2, "learner.parallel": "fsdp", "cluster.transport": "collective"},
        {
            "cluster.learner_devices": 2,
            "learner.tensor_parallel": 2,
            "learner.eps": 1e-4,
        },  # products in parts: rounding
        {"mode.name": "async", "mode.max_staleness": 0, "mode.update": "drain"},
    ],
    ids=lambda settings: " ".join(f"{k}={v}" for k, v in settings.items()),
)
def test_the_weights_are_those_of_one_process(
    cluster: Any, tiny_model_folder: Path, monkeypatch: pytest.MonkeyPatch, settings: dict[str, Any]
) -> None:
    own = {name: value for name, value in settings.items() if not name.startswith(("cluster.", "learner.tensor"))}
    alone = trained(tiny_model_folder, monkeypatch, **own)
    apart = trained(tiny_model_folder, monkeypatch, **(RAY | settings))
    assert apart.trained == alone.trained and not apart.failures
    assert difference(apart, alone) < 1e-5
    assert apart.run.pipeline.algorithm.state_dict() == alone.run.pipeline.algorithm.state_dict()


@pytest.mark.slow
def test_an_engine_that_stands_still_changes_nothing(
    cluster: Any, tiny_model_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Stopped, not killed, while it has requests in progress: only the liveness checks notice."""
    from covey.cluster import engines as engine_module

    asked: list[int] = []
    generate = RayEngine.generate

    async def watched(engine: RayEngine, *given: Any) -> Any:
        asked.append(1)
        if len(asked) == TASKS * ATTEMPTS + 1:
            os.kill(engine.replicas[0].pid, signal.SIGSTOP)
        return await generate(engine, *given)

    alone = trained(tiny_model_folder, monkeypatch)
    monkeypatch.setattr(RayEngine, "generate", watched)
    monkeypatch.setattr(engine_module, "PULSE", 1.0)
    monkeypatch.setattr(engine_module, "HUNG", 10.0)
    apart = trained(tiny_model_folder, monkeypatch, **RAY)
    assert apart.trained == alone.trained and not apart.failures
    assert apart.run.engine.replaced == 1
    assert difference(apart, alone) < 1e-5


@pytest.mark.slow
def test_a_broadcast_in_which_an_engine_dies(
    cluster: Any, tiny_model_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The others get the weights by file, and the next broadcast is in a new group."""
    from covey.weights.transport import CollectiveTransport

    broadcast, pids = CollectiveTransport._broadcast, []

    async def interrupted(transport: CollectiveTransport, source: Any, version: int, receivers: Any) -> None:
        if version == 1:
            os.kill(pids[0], signal.SIGKILL)
        await broadcast(transport, source, version, receivers)

    started = RayEngine._all_started

    async def noted(engine: RayEngine) -> None:
        await started(engine)
        pids.append(engine.replicas[0].pid)

    monkeypatch.setattr(CollectiveTransport, "_broadcast", interrupted)
    monkeypatch.setattr(RayEngine, "_all_started", noted)
    alone = trained(tiny_model_folder, monkeypatch)
    apart = trained(tiny_model_folder, monkeypatch, **RAY, **{"cluster.transport": "collective"})
    assert apart.run.engine.replaced == 1
    assert difference(apart, alone) < 1e-5


def killed_at_its_second_update(monkeypatch: pytest.MonkeyPatch, rank: int) -> list[int]:
    """The learner's process of that rank; a list that fills with its process ids, one for each update that begins."""
    from covey.cluster.learner import RemoteLearner

    update, calls = RemoteLearner.update, list[int]()

    def killed(learner: RemoteLearner, *given: Any) -> Any:
        calls.append(learner.pids[rank])
        if len(calls) == 2:
            os.kill(learner.pids[rank], signal.SIGKILL)
        return update(learner, *given)

    monkeypatch.setattr(RemoteLearner, "update", killed)
    return calls


@pytest.mark.slow
def test_after_a_learner_is_killed_the_run_continues_from_the_last_checkpoint(
    cluster: Any, tiny_model_folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    alone = trained(tiny_model_folder, monkeypatch)
    calls = killed_at_its_second_update(monkeypatch, rank=0)
    apart = trained(tiny_model_folder, monkeypatch, **RAY)
    assert len(calls) == STEPS + 1 and len(set(calls)) == 2  # the second update was made again, by another process
    assert apart.steps() == [0, 1, 2] and apart.run.path.name != "" and apart.run.first_step == 1
    assert apart.trained == [alone.trained[i] for i in (0, 1, 1, 2)]
    assert difference(apart, alone) < 1e-5
    assert "restart 1 of 3" in capsys.readouterr().err


@pytest.mark.slow
def test_a_killed_rank_is_a_lost_learner(
    cluster: Any, tiny_model_folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The other rank notices first, as an error of the collective."""
    calls = killed_at_its_second_update(monkeypatch, rank=1)
    two = {"cluster.learner_devices": 2, "learner.parallel": "ddp"}
    apart = trained(tiny_model_folder, monkeypatch, **(RAY | two))
    assert len(calls) == STEPS + 1 and len(set(calls)) == 2
    assert apart.steps() == [0, 1, 2] and apart.run.first_step == 1
    assert "restart 1 of 3" in capsys.readouterr().err


@pytest.mark.slow
def test_engines_keep_sampling_while_the_learner_trains(
    cluster: Any, tiny_model_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings = {"mode.name": "async", "mode.max_staleness": 1, "loop.total_steps": 6}
    apart = trained(tiny_model_folder, monkeypatch, **RAY, **settings)
    order = [task for step in apart.trained for task in step]
    assert len(apart.trained) == 6 and len(order) == 6 * TASKS * ATTEMPTS and not apart.failures
    # Three passes over four tasks: each is trained three times, with all of its attempts.
    assert {order.count(task) for task in order} == {3 * ATTEMPTS}
    import json

    lines = map(json.loads, (apart.run.path / "metrics.jsonl").read_text().splitlines())
    ages = [row["metrics"]["policy/age_max"] for row in lines if row["kind"] == "step"]
    assert max(ages) == 1.0
