"""Joining a cluster that does not respond, and messages before Ray is up."""

from __future__ import annotations

import pytest

from covey.cluster import start
from covey.config.schema import ClusterConfig
from covey.errors import InputError

pytest.importorskip("ray")


def test_an_address_where_nothing_answers(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ray alone would try for minutes and print warnings."""
    monkeypatch.setattr(start, "JOIN_SECONDS", 2.0)
    config = ClusterConfig(name="ray", address="127.0.0.1:1")
    with (
        pytest.raises(InputError, match=r"no Ray cluster answers at 127\.0\.0\.1:1 within 2 s"),
        start.open_cluster(config),
    ):
        pass
    assert not start.in_a_cluster()


def test_a_join_that_fails_says_why(monkeypatch: pytest.MonkeyPatch) -> None:
    with (
        pytest.raises(InputError, match=r"no Ray cluster answers at nonsense: ValueError: .*nonsense"),
        start.open_cluster(ClusterConfig(name="ray", address="nonsense")),
    ):
        pass


def test_the_announcement_before_opening_a_cluster(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    monkeypatch.setattr(start, "in_a_cluster", lambda: False)
    assert "starting Ray on this machine" in start.opening(ClusterConfig(name="ray"))
    monkeypatch.setenv("RAY_ADDRESS", "10.0.0.1:6379")
    assert "joining the Ray cluster at 10.0.0.1:6379, within 60 s" in start.opening(ClusterConfig(name="ray"))
