"""A run with a cluster of its own: it ends with the run."""

from __future__ import annotations

from pathlib import Path

import pytest

from covey.cluster import start
from covey.cluster.placement import Node
from covey.errors import LearnerLost
from tests.cluster.here import trained

ray = pytest.importorskip("ray")


@pytest.mark.slow
def test_requests_in_progress_at_the_end_start_no_other_cluster(
    tiny_model_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The run is ended while engines sample ahead."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(start, "this_machine", lambda: Node(start.LOCALHOST, 2))
    settings = {"mode.name": "async", "mode.max_staleness": 3, "loop.total_steps": 50}
    settings |= {"rollout.max_tokens": 400, "rollout.max_sequences": 1}  # one is always in progress
    apart = trained(
        tiny_model_folder,
        monkeypatch,
        **{"cluster.name": "ray", "cluster.rollout_devices": 1, "loop.max_minutes": 0.01, **settings},
    )
    assert 0 < len(apart.steps()) < 50  # it was ended before
    assert not ray.is_initialized()


@pytest.mark.slow
def test_a_learner_that_rays_memory_monitor_kills(
    tiny_model_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """With a threshold that every machine exceeds: after the restarts, the error names the cause and what to lower."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("RAY_memory_usage_threshold", "0.001")
    monkeypatch.setenv("RAY_memory_monitor_refresh_ms", "250")
    with pytest.raises(
        LearnerLost, match=r"(?s)Ray's memory monitor killed it: .* lower cluster\.rollout_devices"
    ) as error:
        trained(tiny_model_folder, monkeypatch, **{"cluster.name": "ray", "cluster.max_restarts": 1})
    assert "checkpoint" not in str(error.value)  # there is none
    said = "".join(capfd.readouterr())
    assert said.index("starting Ray on this machine") < said.index("restart 1 of 1") and "\x1b[" not in said
    assert not ray.is_initialized()
