"""Who is let in, what a post may change, and how much may be sent."""

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
from covey.gateway import Book, GatewayAgent, Rules
from covey.gateway.agent import environment
from covey.gateway.openai_api import Refused
from covey.gateway.registry import Over, shown_task
from covey.gateway.server import bind
from covey.rewards import resolve_rewards
from covey.types import Task
from tests.gateway.house import USER, House, Scripted, serving


@pytest.fixture(scope="module")
def house() -> Iterator[House]:
    with serving(Scripted(lambda prompt, _: "hello")) as made:
        yield made


def chat(house: House, key: str, **more: Any) -> Any:
    return house.post("/v1/chat/completions", key=key, json={"model": "tiny", "messages": [USER]}, **more)


def test_models_and_a_reply_with_the_episodes_name(house: House) -> None:
    opened = house.open()
    assert [model.id for model in house.client(opened["key"]).models.list()] == ["tiny"]
    assert chat(house, opened["key"]).headers["x-covey-episode"] == opened["id"]


def test_wrong_keys_open_nothing(house: House) -> None:
    from openai import AuthenticationError

    known = len(house.book._live)
    for key in ("wrong", f"{house.book.token[:-1]}:x", house.book.token + "x", f"{house.book.token}:"):
        assert chat(house, key).status_code == 401
        assert house.post("/episodes", key=key).status_code == 401
    with pytest.raises(AuthenticationError):
        house.client("wrong").models.list()
    assert house.post("/v1/chat/completions", headers={"authorization": "Basic eA=="}, json={}).status_code == 401
    assert len(house.book._live) == known


def test_each_key_that_begins_with_the_token_is_an_episode(house: House) -> None:
    token = house.book.token
    idents = [chat(house, key).headers["x-covey-episode"] for key in (f"{token}:a", f"{token}:b", f"{token}:a", token)]
    assert idents[0] == idents[2] and len(set(idents)) == 3
    assert chat(house, token).headers["x-covey-episode"] == idents[3]
    assert house.book._live[idents[1]].metadata == {"name": "b"}


def test_an_episode_is_closed_once_by_its_own_key_or_the_token(house: House) -> None:
    mine, other = house.open(), house.open()
    chat(house, mine["key"])
    path = f"/episodes/{mine['id']}/reward"
    assert house.post(path, key=other["key"], json={"reward": 1}).status_code == 403
    assert house.post("/episodes/nowhere/reward", key=other["key"], json={"reward": 1}).status_code == 403
    assert house.post("/episodes/nowhere/reward", json={"reward": 1}).status_code == 404
    for body in ({}, {"reward": "high"}, {"rewards": [1]}, {"reward": None}):
        assert house.post(path, key=mine["key"], json=body).status_code == 400
    nan = house.post(path, key=mine["key"], content=b'{"reward": NaN}')
    assert nan.status_code == 400 and "finite" in nan.json()["error"]["message"]
    first = house.post(path, key=mine["key"], json={"reward": 1, "rewards": {"style": 0.25}})
    assert first.status_code == 200 and first.json()["rewards"] == {"reward": 1.0, "style": 0.25}
    for again in (path, "/episodes/current/reward", f"/episodes/{mine['id']}/finish"):
        assert house.post(again, key=mine["key"], json={"reward": 0}).status_code == 409
    late = chat(house, mine["key"])
    assert late.status_code == 410 and late.json()["error"]["code"] == "episode_over"
    episode = house.episode(mine["id"])
    assert episode.given == {"reward": 1.0, "style": 0.25} and len(episode.turns) == 1


def test_an_episode_whose_time_is_over_says_so(house: House) -> None:
    opened = house.open()
    live = house.book._live[opened["id"]]
    house.book.end(live)
    assert house.post("/episodes/current/reward", key=opened["key"], json={"reward": 1}).status_code == 410
    assert live.given is None


def test_only_the_token_opens_episodes(house: House) -> None:
    assert house.post("/episodes", key=house.open()["key"]).status_code == 403


def test_other_hosts_and_pages_are_turned_away(house: House) -> None:
    key = house.open()["key"]
    assert chat(house, key, headers={"host": "evil.example"}).status_code == 403
    assert chat(house, key, headers={"host": f"127.0.0.1.evil.example:{house.server.port}"}).status_code == 403
    assert chat(house, key, headers={"origin": "http://evil.example"}).status_code == 403
    assert chat(house, key, headers={"origin": "null"}).status_code == 403
    assert chat(house, key, headers={"origin": house.url, "host": f"localhost:{house.server.port}"}).status_code == 200


def test_bodies_are_bounded_and_must_be_json(house: House) -> None:
    from covey.gateway.server import MAX_BODY

    key = house.open()["key"]
    big = house.post("/v1/chat/completions", key=key, content=b'"' + b"x" * MAX_BODY + b'"')
    assert big.status_code == 413
    for content in (b"{", b"[1]", b"[" * 100_000):
        answer = house.post("/v1/chat/completions", key=key, content=content)
        assert answer.status_code == 400 and "error" in answer.json()


def test_other_places_and_verbs_are_refused_in_the_same_form(house: House) -> None:
    import httpx

    for answer in (house.post("/v1/embeddings", json={}), httpx.get(house.url + "/v1/chat/completions")):
        assert answer.status_code == 404 and answer.json()["error"]["type"] == "not_found_error"


def test_columns_of_any_type_are_shown(house: House) -> None:
    import httpx

    live = house.book.open_new(Task("t", (USER,), columns={"when": datetime.date(2026, 1, 2)}))
    shown = httpx.get(f"{house.url}/episodes/current", headers={"authorization": f"Bearer {live.key}"})
    assert shown.json()["task"]["columns"] == {"when": "2026-01-02"} and shown.json()["turns"] == 0


def test_it_listens_on_this_machine_only(house: House) -> None:
    with socket.socket() as other, pytest.raises(OSError):
        other.settimeout(2)
        other.connect(("127.0.0.2", house.server.port))


def test_a_port_in_use_is_told() -> None:
    with bind(0) as taken, pytest.raises(Absent, match=r"gateway\.port=0 takes a free one"):
        taken.listen()
        bind(taken.getsockname()[1])


def test_what_a_program_sees_of_a_task_never_has_the_answer() -> None:
    columns = {
        "hint": "h",
        "level": 3,
        "solution": "because",
        "reward_model": {"ground_truth": "42"},
        "gold": "42",
        "deep": {"a": [{"b": "42"}]},
    }
    shown = shown_task(Task("t", (USER,), answer="42", columns=columns))
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
def test_gold_goes_by_many_names(answer: Any, columns: dict[str, Any]) -> None:
    assert shown_task(Task("t", (USER,), answer, {**columns, "level": 3}))["columns"] == {"level": 3}


def test_what_the_rewards_ask_for_is_not_shown(house: House) -> None:
    import httpx

    def close(final_answer: str, expected: str, question: str, tolerance: float = 0.1) -> float:
        return 1.0

    hidden = resolve_rewards(close, None, {}).columns
    assert hidden == {"expected", "tolerance"}
    agent = GatewayAgent(Rules("tiny"), port=0, patience=1.0)
    hide_reward_columns(agent, resolve_rewards(close, None, {}))
    assert agent.rules.hidden == hidden
    task = Task("t", (USER,), columns={"expected": "about 7", "tolerance": 0.5, "level": 3})
    live = Book(agent.rules).open(None, task)  # type: ignore[arg-type]
    assert json.loads(environment(live, "", {})["COVEY_TASK"])["columns"] == {"level": 3}
    served = house.book.open_new(task)
    served.rules = agent.rules
    shown = httpx.get(f"{house.url}/episodes/current", headers={"authorization": f"Bearer {served.key}"})
    assert shown.json()["task"]["columns"] == {"level": 3}


def test_old_episodes_are_forgotten_in_order(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("covey.gateway.registry.REMEMBERED", 2)
    book = Book(Rules("tiny"))
    lives = [book.open(None, Task(str(n), ())) for n in range(3)]  # type: ignore[arg-type]
    for live in lives:
        book.end(live)
    with pytest.raises(Refused, match="401"):
        book.caller(lives[0].key)
    assert all(isinstance(book.caller(live.key), Over) for live in lives[1:])


def test_a_token_from_the_environment_must_be_long(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COVEY_TOKEN", "a-long-enough-token")
    assert Book(Rules("tiny")).token == "a-long-enough-token"
    monkeypatch.setenv("COVEY_TOKEN", "short")
    with pytest.raises(InputError, match="16 characters"):
        Book(Rules("tiny"))


def test_attempts_are_taken_in_the_order_they_were_offered() -> None:
    async def scene() -> None:
        book = Book(Rules("tiny"))
        lives = [book.open(None, Task(str(n), ())) for n in range(2)]  # type: ignore[arg-type]
        assert await book.take(0.01) is None
        waiting = asyncio.create_task(book.take(5))
        await asyncio.sleep(0)
        offers = [asyncio.create_task(book.offer(live, 5)) for live in lives]
        assert await waiting is lives[0]
        assert await book.take(1) is lives[1]
        assert await asyncio.gather(*offers) == [True, True]
        for live in lives:
            book.end(live)
        last = book.open(None, Task("2", ()))  # type: ignore[arg-type]
        assert await book.offer(last, 0.05) is False  # nobody comes
        assert await book.take(0.01) is None  # and it waits no longer

    asyncio.run(scene())


def test_while_somebody_plays_no_attempt_is_given_up() -> None:
    """Nobody comes for the second for five times its patience, as the first is still being played; then nobody at
    all comes."""

    async def scene() -> None:
        book = Book(Rules("tiny"))
        first, second = (book.open(None, Task(str(n), ())) for n in range(2))  # type: ignore[arg-type]
        waiting = [asyncio.create_task(book.offer(live, 0.1)) for live in (first, second)]
        assert await book.take(1.0) is first and await waiting[0]
        await asyncio.sleep(0.5)
        assert not waiting[1].done()
        book.end(first)
        assert await waiting[1] is False

    asyncio.run(scene())
