"""Oversized and incomplete requests cost little, and other clients are served in the meantime."""

from __future__ import annotations

import logging
import socket
import threading
import time
from collections.abc import Iterator
from typing import Any

import pytest

from tests.gateway.running_gateway import USER, RunningGateway, ScriptedEngine, serve_engine

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
def gateway() -> Iterator[RunningGateway]:
    engine = ScriptedEngine(lambda prompt, _: "hello")
    engine.tokenizer = Watched(engine.tokenizer)
    with serve_engine(engine, context_length=CONTEXT) as made:
        yield made


def ask(gateway: RunningGateway, key: str, content: str, **more: Any) -> Any:
    body = {"model": "tiny", "messages": [{"role": "user", "content": content}], **more}
    return gateway.post("/v1/chat/completions", key=key, json=body)


@pytest.mark.parametrize("earlier", [False, True])
def test_a_text_that_cannot_fit_is_not_tokenised_whole(gateway: RunningGateway, earlier: bool) -> None:
    """Alone, and as what follows an earlier reply; for several choices."""
    key = gateway.open()["key"]
    before = [USER, {"role": "assistant", "content": "hello"}] if earlier else []
    if earlier:
        assert ask(gateway, key, USER["content"]).status_code == 200
    gateway.engine.tokenizer.seen.clear()
    messages = [*before, {"role": "user", "content": "x" * LONG}]
    body = {"model": "tiny", "messages": messages, "n": 8}
    answer = gateway.post("/v1/chat/completions", key=key, json=body)
    assert (answer.status_code, answer.json()["error"]["code"]) == (400, "context_length_exceeded")
    assert "the model's context" in answer.json()["error"]["message"]
    assert 0 < sum(length for length, _ in gateway.engine.tokenizer.seen) <= LONG / 2


def test_a_long_text_is_not_tokenised_on_the_event_loop(gateway: RunningGateway) -> None:
    """There other clients would wait."""
    key = gateway.open()["key"]
    ask(gateway, key, "short")
    (_, loop), *_ = gateway.engine.tokenizer.seen
    gateway.engine.tokenizer.seen.clear()
    ask(gateway, key, "x" * LONG)
    assert gateway.engine.tokenizer.seen and all(thread != loop for _, thread in gateway.engine.tokenizer.seen)


def test_disconnecting_while_sending_a_body_is_not_an_error(
    gateway: RunningGateway, caplog: pytest.LogCaptureFixture
) -> None:
    key = gateway.open()["key"]
    head = f"POST /v1/chat/completions HTTP/1.1\r\nhost: 127.0.0.1:{gateway.server.port}\r\n"
    head += f"authorization: Bearer {key}\r\ncontent-length: 1000\r\n\r\n"
    with caplog.at_level(logging.DEBUG, logger="uvicorn.error"):
        with socket.create_connection(("127.0.0.1", gateway.server.port)) as client:
            client.sendall(head.encode() + b'{"messages": [')
            time.sleep(0.2)  # until its headers are read
        assert ask(gateway, key, "hello").status_code == 200
        time.sleep(0.2)
    assert [record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING] == []


def test_rewards_have_few_and_short_names(gateway: RunningGateway) -> None:
    key = gateway.open()["key"]
    many = {str(number): 1.0 for number in range(65)}
    for rewards in (many, {"x" * 101: 1.0}, {"": 1.0}):
        answer = gateway.post("/episodes/current/reward", key=key, json={"rewards": rewards})
        assert (answer.status_code, answer.json()["error"]["param"]) == (400, "rewards")
    many.popitem()
    answer = gateway.post("/episodes/current/reward", key=key, json={"rewards": many})
    assert answer.status_code == 200 and len(answer.json()["rewards"]) == 64


@pytest.mark.parametrize("stop", [["x"] * 65, ["x" * 1001]])
def test_stop_strings_are_few_and_short(gateway: RunningGateway, stop: list[str]) -> None:
    """Each is looked for after every token."""
    answer = ask(gateway, gateway.open()["key"], "hello", stop=stop)
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, "stop")
