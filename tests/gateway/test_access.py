"""Access to the gateway: keys, closing of episodes, size limits, hidden columns, the queue of attempts."""

from __future__ import annotations

import asyncio
import datetime
import json
import socket
from collections.abc import Iterator
from typing import Any

import pytest

from covey.app.parts import hide_reward_columns
from covey.errors import Absent, InputError
from covey.gateway.agent import GatewayAgent, program_environment
from covey.gateway.openai_api import RequestRefused
from covey.gateway.registry import ClosedEpisode, EpisodeRules, Registry, public_task
from covey.gateway.server import bind
from covey.rewards import resolve_rewards
from covey.types import Task
from tests.gateway.running_gateway import USER, RunningGateway, ScriptedEngine, serve_engine


@pytest.fixture(scope="module")
def gateway() -> Iterator[RunningGateway]:
    with serve_engine(ScriptedEngine(lambda prompt, _: "hello")) as made:
        yield made


def chat(gateway: RunningGateway, key: str, **more: Any) -> Any:
    return gateway.post("/v1/chat/completions", key=key, json={"model": "tiny", "messages": [USER]}, **more)


def test_models_and_a_reply_with_the_episodes_name(gateway: RunningGateway) -> None:
    opened = gateway.open()
    assert [model.id for model in gateway.client(opened["key"]).models.list()] == ["tiny"]
    assert chat(gateway, opened["key"]).headers["x-covey-episode"] == opened["id"]


def test_wrong_keys_open_nothing(gateway: RunningGateway) -> None:
    from openai import AuthenticationError

    known = len(gateway.registry._open)
    for key in (
        "wrong",
        f"{gateway.registry.token[:-1]}:x",
        gateway.registry.token + "x",
        f"{gateway.registry.token}:",
    ):
        assert chat(gateway, key).status_code == 401
        assert gateway.post("/episodes", key=key).status_code == 401
    with pytest.raises(AuthenticationError):
        gateway.client("wrong").models.list()
    assert gateway.post("/v1/chat/completions", headers={"authorization": "Basic eA=="}, json={}).status_code == 401
    assert len(gateway.registry._open) == known


def test_each_key_that_begins_with_the_token_is_an_episode(gateway: RunningGateway) -> None:
    token = gateway.registry.token
    idents = [
        chat(gateway, key).headers["x-covey-episode"] for key in (f"{token}:a", f"{token}:b", f"{token}:a", token)
    ]
    assert idents[0] == idents[2] and len(set(idents)) == 3
    assert chat(gateway, token).headers["x-covey-episode"] == idents[3]
    assert gateway.registry._open[idents[1]].metadata == {"name": "b"}


def test_an_episode_is_closed_once_by_its_own_key_or_the_token(gateway: RunningGateway) -> None:
    mine, other = gateway.open(), gateway.open()
    chat(gateway, mine["key"])
    path = f"/episodes/{mine['id']}/reward"
    assert gateway.post(path, key=other["key"], json={"reward": 1}).status_code == 403
    assert gateway.post("/episodes/nowhere/reward", key=other["key"], json={"reward": 1}).status_code == 403
    assert gateway.post("/episodes/nowhere/reward", json={"reward": 1}).status_code == 404
    for body in ({}, {"reward": "high"}, {"rewards": [1]}, {"reward": None}):
        assert gateway.post(path, key=mine["key"], json=body).status_code == 400
    nan = gateway.post(path, key=mine["key"], content=b'{"reward": NaN}')
    assert nan.status_code == 400 and "finite" in nan.json()["error"]["message"]
    first = gateway.post(path, key=mine["key"], json={"reward": 1, "rewards": {"style": 0.25}})
    assert first.status_code == 200 and first.json()["rewards"] == {"reward": 1.0, "style": 0.25}
    for again in (path, "/episodes/current/reward", f"/episodes/{mine['id']}/finish"):
        assert gateway.post(again, key=mine["key"], json={"reward": 0}).status_code == 409
    late = chat(gateway, mine["key"])
    assert late.status_code == 410 and late.json()["error"]["code"] == "episode_over"
    episode = gateway.episode(mine["id"])
    assert episode.given == {"reward": 1.0, "style": 0.25} and len(episode.turns) == 1


def test_an_episode_whose_time_ran_out(gateway: RunningGateway) -> None:
    opened = gateway.open()
    episode = gateway.registry._open[opened["id"]]
    gateway.registry.end(episode)
    assert gateway.post("/episodes/current/reward", key=opened["key"], json={"reward": 1}).status_code == 410
    assert episode.rewards is None


def test_only_the_token_opens_episodes(gateway: RunningGateway) -> None:
    assert gateway.post("/episodes", key=gateway.open()["key"]).status_code == 403


def test_other_hosts_and_pages_are_refused(gateway: RunningGateway) -> None:
    key = gateway.open()["key"]
    assert chat(gateway, key, headers={"host": "evil.example"}).status_code == 403
    assert chat(gateway, key, headers={"host": f"127.0.0.1.evil.example:{gateway.server.port}"}).status_code == 403
    assert chat(gateway, key, headers={"origin": "http://evil.example"}).status_code == 403
    assert chat(gateway, key, headers={"origin": "null"}).status_code == 403
    assert (
        chat(gateway, key, headers={"origin": gateway.url, "host": f"localhost:{gateway.server.port}"}).status_code
        == 200
    )


def test_bodies_are_bounded_and_must_be_json(gateway: RunningGateway) -> None:
    from covey.gateway.server import MAX_BODY

    key = gateway.open()["key"]
    big = gateway.post("/v1/chat/completions", key=key, content=b'"' + b"x" * MAX_BODY + b'"')
    assert big.status_code == 413
    for content in (b"{", b"[1]", b"[" * 100_000):
        answer = gateway.post("/v1/chat/completions", key=key, content=content)
        assert answer.status_code == 400 and "error" in answer.json()


def test_unknown_routes_and_methods_are_refused_in_openais_form(gateway: RunningGateway) -> None:
    import httpx

    for answer in (gateway.post("/v1/embeddings", json={}), httpx.get(gateway.url + "/v1/chat/completions")):
        assert answer.status_code == 404 and answer.json()["error"]["type"] == "not_found_error"


def test_columns_of_any_type_are_shown(gateway: RunningGateway) -> None:
    import httpx

    episode = gateway.registry.open_new(Task("t", (USER,), columns={"when": datetime.date(2026, 1, 2)}))
    shown = httpx.get(f"{gateway.url}/episodes/current", headers={"authorization": f"Bearer {episode.key}"})
    assert shown.json()["task"]["columns"] == {"when": "2026-01-02"} and shown.json()["turns"] == 0


def test_it_listens_on_this_machine_only(gateway: RunningGateway) -> None:
    with socket.socket() as other, pytest.raises(OSError):
        other.settimeout(2)
        other.connect(("127.0.0.2", gateway.server.port))


def test_a_port_in_use_is_reported() -> None:
    with bind(0) as taken, pytest.raises(Absent, match=r"gateway\.port=0 takes a free one"):
        taken.listen()
        bind(taken.getsockname()[1])


def test_a_program_never_sees_the_answer() -> None:
    columns = {
        "hint": "h",
        "level": 3,
        "solution": "because",
        "reward_model": {"ground_truth": "42"},
        "gold": "42",
        "deep": {"a": [{"b": "42"}]},
    }
    shown = public_task(Task("t", (USER,), answer="42", columns=columns))
    assert shown == {"id": "t", "messages": [USER], "columns": {"hint": "h", "level": 3}}
    assert "42" not in json.dumps(shown)


@pytest.mark.parametrize(
    ("answer", "columns"),
    [
        ("72", {"target": 72}),
        ("72", {"label": " 72\n"}),
        (72, {"label": "72"}),
        ("72", {"extra_info": {"answer": "It is 8 times 9.", "index": 3}}),
        (None, {"test_list": ["assert f(1) == 2"], "test": "def check(f): ...", "tests": ["..."], "cases": [{}]}),
        (None, {"outputs": ["3"], "canonical_solution": "return 1", "answers": ["a"], "tool_calls": [{"name": "f"}]}),
    ],
)
def test_solution_columns_have_many_names(answer: Any, columns: dict[str, Any]) -> None:
    assert public_task(Task("t", (USER,), answer, {**columns, "level": 3}))["columns"] == {"level": 3}


def test_columns_that_rewards_use_are_hidden(gateway: RunningGateway) -> None:
    import httpx

    def close(final_answer: str, expected: str, question: str, tolerance: float = 0.1) -> float:
        return 1.0

    hidden = resolve_rewards(close, None, {}).columns
    assert hidden == {"expected", "tolerance"}
    agent = GatewayAgent(EpisodeRules("tiny"), port=0, patience=1.0)
    hide_reward_columns(agent, resolve_rewards(close, None, {}))
    assert agent.rules.hidden == hidden
    task = Task("t", (USER,), columns={"expected": "about 7", "tolerance": 0.5, "level": 3})
    episode = Registry(agent.rules).open(None, task)  # type: ignore[arg-type]
    assert json.loads(program_environment(episode, "", {})["COVEY_TASK"])["columns"] == {"level": 3}
    served = gateway.registry.open_new(task)
    served.rules = agent.rules
    shown = httpx.get(f"{gateway.url}/episodes/current", headers={"authorization": f"Bearer {served.key}"})
    assert shown.json()["task"]["columns"] == {"level": 3}


def test_old_episodes_are_forgotten_in_order(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("covey.gateway.registry.MAX_CLOSED", 2)
    registry = Registry(EpisodeRules("tiny"))
    episodes = [registry.open(None, Task(str(n), ())) for n in range(3)]  # type: ignore[arg-type]
    for episode in episodes:
        registry.end(episode)
    with pytest.raises(RequestRefused, match="401"):
        registry.caller(episodes[0].key)
    assert all(isinstance(registry.caller(episode.key), ClosedEpisode) for episode in episodes[1:])


def test_a_token_from_the_environment_must_be_long(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COVEY_TOKEN", "a-long-enough-token")
    assert Registry(EpisodeRules("tiny")).token == "a-long-enough-token"
    monkeypatch.setenv("COVEY_TOKEN", "short")
    with pytest.raises(InputError, match="16 characters"):
        Registry(EpisodeRules("tiny"))


def test_attempts_are_taken_in_the_order_they_were_offered() -> None:
    async def scene() -> None:
        registry = Registry(EpisodeRules("tiny"))
        episodes = [registry.open(None, Task(str(n), ())) for n in range(2)]  # type: ignore[arg-type]
        assert await registry.take(0.01) is None
        waiting = asyncio.create_task(registry.take(5))
        await asyncio.sleep(0)
        offers = [asyncio.create_task(registry.offer(episode, 5)) for episode in episodes]
        assert await waiting is episodes[0]
        assert await registry.take(1) is episodes[1]
        assert await asyncio.gather(*offers) == [True, True]
        for episode in episodes:
            registry.end(episode)
        last = registry.open(None, Task("2", ()))  # type: ignore[arg-type]
        assert await registry.offer(last, 0.05) is False  # nobody comes
        assert await registry.take(0.01) is None  # and it waits no longer

    asyncio.run(scene())


def test_no_attempt_is_abandoned_while_another_is_played() -> None:
    """Nobody comes for the second for five times its patience, as the first is still being played; then nobody at
    all comes."""

    async def scene() -> None:
        registry = Registry(EpisodeRules("tiny"))
        first, second = (registry.open(None, Task(str(n), ())) for n in range(2))  # type: ignore[arg-type]
        waiting = [asyncio.create_task(registry.offer(episode, 0.1)) for episode in (first, second)]
        assert await registry.take(1.0) is first and await waiting[0]
        await asyncio.sleep(0.5)
        assert not waiting[1].done()
        registry.end(first)
        assert await waiting[1] is False

    asyncio.run(scene())
