"""Deaths of actors and errors that they raise, and calls after the end of their cluster."""

from __future__ import annotations

import asyncio
from concurrent.futures import Future
from typing import Any

import pytest

from covey.cluster import learner
from covey.cluster.actors import ActorLost, actor_error, kill, result
from covey.cluster.learner import LearnerActor

ray = pytest.importorskip("ray")


def test_whatever_ended_an_actor_it_is_lost() -> None:
    for error in (
        ray.exceptions.ActorDiedError(),
        ray.exceptions.OutOfMemoryError("the node is low on memory"),
        ray.exceptions.WorkerCrashedError(),
        ray.exceptions.NodeDiedError("gone"),
    ):
        assert isinstance(actor_error(error), ActorLost), error
    cancelled = ray.exceptions.TaskCancelledError()
    assert actor_error(cancelled) is cancelled


def test_an_error_keeps_the_traceback_of_the_actor() -> None:
    raised = ray.exceptions.RayTaskError("f", "Traceback\nFile far_away.py, line 3", ValueError("x"), ip="127.0.0.1")
    found = actor_error(raised.as_instanceof_cause())
    assert type(found) is ValueError and "far_away.py" in found.__notes__[0]


def test_after_the_end_of_a_cluster_no_other_is_started(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ray starts a cluster when it is called without one."""
    called: list[str] = []
    for name in ("init", "cancel", "kill"):
        monkeypatch.setattr(ray, name, lambda *given, name=name, **named: called.append(name))
    monkeypatch.setattr(ray, "is_initialized", lambda: False)

    class Reference:
        def future(self) -> Future[Any]:
            return Future()

    async def scene() -> None:
        job = asyncio.ensure_future(result(Reference()))
        await asyncio.sleep(0)
        job.cancel()
        with pytest.raises(asyncio.CancelledError):
            await job
        kill(object())

    asyncio.run(scene())
    assert called == []


@pytest.mark.parametrize("way", ["broadcast", "write"])
def test_ranks_stay_in_step_where_sending_breaks_off(way: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Any) -> None:
    gathered: list[int] = []

    def weights(model: Any) -> Any:
        for number in range(5):
            gathered.append(number)
            yield str(number), number

    class Broken:
        def send(self, named: Any, bucket: int) -> None:
            next(named)
            raise RuntimeError("connection closed")

    class Learner:
        def weights(self) -> None:
            return None

    def full(named: Any, folder: Any, version: int) -> None:
        next(named)
        raise OSError("no space left")

    monkeypatch.setattr(learner, "trained_weights", weights)
    monkeypatch.setattr(learner, "bucket_size", lambda model: 1)
    monkeypatch.setattr(learner, "write_weights", full)
    actor = LearnerActor()
    actor.learner, actor._group = Learner(), Broken()  # type: ignore[assignment]
    with pytest.raises((RuntimeError, OSError)):
        actor.broadcast() if way == "broadcast" else actor.write(tmp_path, 1)
    assert gathered == [0, 1, 2, 3, 4]
