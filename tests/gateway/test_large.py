"""Requests that are larger than they should be, or never whole: they cost little, and others are served meanwhile."""

from __future__ import annotations

import logging
import socket
import threading
import time
from collections.abc import Iterator
from typing import Any

import pytest

from tests.gateway.house import USER, House, Scripted, serving

CONTEXT = 2000  # tokens; the tokenizer has one for each character
LONG = 400_000  # characters


class Watched:
    """A tokenizer that notes how long each text is that it is given, and in which thread."""

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer
        self.seen: list[tuple[int, str]] = []

    def __call__(self, text: str, **options: Any) -> Any:
        self.seen.append((len(text), threading.current_thread().name))
        return self._tokenizer(text, **options)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._tokenizer, name)


@pytest.fixture
def house() -> Iterator[House]:
    engine = Scripted(lambda prompt, _: "hello")
    engine.tokenizer = Watched(engine.tokenizer)
    with serving(engine, context_length=CONTEXT) as made:
        yield made


def ask(house: House, key: str, content: str, **more: Any) -> Any:
    body = {"model": "tiny", "messages": [{"role": "user", "content": content}], **more}
    return house.post("/v1/chat/completions", key=key, json=body)


@pytest.mark.parametrize("earlier", [False, True])
def test_a_text_that_cannot_fit_is_not_tokenised_whole(house: House, earlier: bool) -> None:
    """Alone, and as what follows an earlier reply; for several choices."""
    key = house.open()["key"]
    before = [USER, {"role": "assistant", "content": "hello"}] if earlier else []
    if earlier:
        assert ask(house, key, USER["content"]).status_code == 200
    house.engine.tokenizer.seen.clear()
    messages = [*before, {"role": "user", "content": "x" * LONG}]
    body = {"model": "tiny", "messages": messages, "n": 8}
    answer = house.post("/v1/chat/completions", key=key, json=body)
    assert (answer.status_code, answer.json()["error"]["code"]) == (400, "context_length_exceeded")
    assert "the model's context" in answer.json()["error"]["message"]
    assert 0 < sum(length for length, _ in house.engine.tokenizer.seen) <= LONG / 2


def test_a_long_text_is_not_tokenised_on_the_event_loop(house: House) -> None:
    """There other clients would wait."""
    key = house.open()["key"]
    ask(house, key, "short")
    (_, loop), *_ = house.engine.tokenizer.seen
    house.engine.tokenizer.seen.clear()
    ask(house, key, "x" * LONG)
    assert house.engine.tokenizer.seen and all(thread != loop for _, thread in house.engine.tokenizer.seen)


def test_a_hang_up_in_mid_body_is_no_error_of_ours(house: House, caplog: pytest.LogCaptureFixture) -> None:
    key = house.open()["key"]
    head = f"POST /v1/chat/completions HTTP/1.1\r\nhost: 127.0.0.1:{house.server.port}\r\n"
    head += f"authorization: Bearer {key}\r\ncontent-length: 1000\r\n\r\n"
    with caplog.at_level(logging.DEBUG, logger="uvicorn.error"):
        with socket.create_connection(("127.0.0.1", house.server.port)) as client:
            client.sendall(head.encode() + b'{"messages": [')
            time.sleep(0.2)  # until its headers are read
        assert ask(house, key, "hello").status_code == 200
        time.sleep(0.2)
    assert [record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING] == []


def test_rewards_have_few_and_short_names(house: House) -> None:
    key = house.open()["key"]
    many = {str(number): 1.0 for number in range(65)}
    for rewards in (many, {"x" * 101: 1.0}, {"": 1.0}):
        answer = house.post("/episodes/current/reward", key=key, json={"rewards": rewards})
        assert (answer.status_code, answer.json()["error"]["param"]) == (400, "rewards")
    many.popitem()
    answer = house.post("/episodes/current/reward", key=key, json={"rewards": many})
    assert answer.status_code == 200 and len(answer.json()["rewards"]) == 64


@pytest.mark.parametrize("stop", [["x"] * 65, ["x" * 1001]])
def test_stop_strings_are_few_and_short(house: House, stop: list[str]) -> None:
    """Each is looked for after every token."""
    answer = ask(house, house.open()["key"], "hello", stop=stop)
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, "stop")
