"""A gateway with a real engine under a crowd of clients, some of them rude. The large version is
benchmarks/gateway_load.py."""

from __future__ import annotations

import asyncio
import gc
import json
import os
import socket
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import count
from pathlib import Path
from typing import Any

import pytest
import torch

from covey.app.serving import Recorder
from covey.gateway.registry import EpisodeRules, Registry
from covey.rollout.embedded.engine import EmbeddedEngine
from covey.rollout.policy import EpisodePolicy
from covey.rollout.rendering import Renderer
from covey.types import Sampling
from tests.gateway.running_gateway import RunningGateway, running

BENCHMARKS = Path(__file__).parent.parent.parent / "benchmarks"
CLIENTS = 40  # two of each rude kind


@pytest.fixture(autouse=True)
def importable(monkeypatch: pytest.MonkeyPatch) -> None:
    """The clients are those of the benchmark."""
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    torch.set_num_threads(1)


@contextmanager
def crowded_gateway(record: Any, *, ends: float, max_tokens: int) -> Iterator[RunningGateway]:
    """covey serve without a command line, with a tiny model in the embedded engine."""
    from kit.caller import CONTEXT, make_model, make_tokenizer

    from covey.gateway.server import Server

    tokenizer = make_tokenizer()
    renderer, numbers = Renderer(tokenizer, CONTEXT), count()
    engine = EmbeddedEngine(
        make_model(tokenizer, ends=ends),
        eos_ids=[tokenizer.eos_token_id],
        decode=tokenizer.decode,
        context_length=CONTEXT,
    )

    def new_policy() -> EpisodePolicy:
        sampling = Sampling(max_tokens=max_tokens)
        return EpisodePolicy(engine, renderer, sampling, (0, "load", next(numbers)))

    closed: list[Any] = []
    registry = Registry(
        EpisodeRules("tiny"), new_policy=new_policy, on_closed=record(renderer) if record else closed.append
    )
    server = Server(registry, 0)
    try:
        with running(server):
            yield RunningGateway(registry, server, engine, closed)
    finally:
        engine.close()


def idle(engine: Any) -> bool:
    """Nobody waits for the engine, and nothing in its cache is held for anybody."""
    scheduler = engine._batch.scheduler
    return not engine._futures and not scheduler.busy and not scheduler.blocks._held


def until(true: Callable[[], bool]) -> None:
    """Wait for what must come, however crowded the machine is; in vain only where it never does."""
    end = time.monotonic() + 120
    while not true():
        assert time.monotonic() < end, "waited in vain"
        time.sleep(0.01)


def test_a_crowd_is_recorded_once_each_with_the_tokens_it_was_given(tmp_path: Path) -> None:
    from kit.load import Crowd, Session, wrongs

    async def rounds(url: str, token: str) -> tuple[list[Session], list[int]]:
        sessions, files = [], []
        crowd = Crowd(url, token, turns=2, replies=2)
        for _ in range(2):
            sessions += await crowd.play(CLIENTS)
            await crowd.http.aclose()
            crowd.http = Crowd(url, token, turns=2).http
            until(lambda: idle(gateway.engine) and not gateway.registry._open)
            gc.collect()
            files.append(len(os.listdir("/proc/self/fd")) if sys.platform == "linux" else 0)
        await crowd.http.aclose()
        return sessions, files

    with crowded_gateway(lambda renderer: Recorder(tmp_path, renderer.decode), ends=0.1, max_tokens=16) as gateway:
        sessions, files = asyncio.run(rounds(gateway.url, gateway.registry.token))
    lines = [json.loads(line) for line in (tmp_path / "episodes.jsonl").read_text().splitlines()]
    assert wrongs(sessions, lines) == []
    assert len(lines) == 2 * CLIENTS == len({line["id"] for line in lines})
    answered = [session for session in sessions if session.kind != "vanish"]
    assert all(len(session.seconds) == 2 for session in answered) and len(answered) == 2 * CLIENTS - 4
    assert sum(session.lost for session in sessions) == 4
    assert files[1] <= files[0] + 2  # sockets of those who vanished are closed, too


@pytest.mark.parametrize("politely", [True, False])
def test_the_sequences_of_who_has_gone_are_given_up(politely: bool) -> None:
    """The reply would be as long as the context; whoever asked for it hangs up, or its machine is gone."""
    with crowded_gateway(None, ends=1e-9, max_tokens=400) as gateway:
        opened = gateway.open()
        body = json.dumps({"messages": [{"role": "user", "content": "?"}], "n": 3}).encode()
        head = f"POST /v1/chat/completions HTTP/1.1\r\nHost: 127.0.0.1:{gateway.server.port}\r\nAuthorization: Bearer "
        line = socket.create_connection(("127.0.0.1", gateway.server.port))
        line.sendall(f"{head}{opened['key']}\r\nContent-Length: {len(body)}\r\n\r\n".encode() + body)
        until(lambda: gateway.engine.generated_tokens > 0)
        if not politely:
            line.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\1\0\0\0\0\0\0\0")  # a reset, not a good-bye
        line.close()
        until(lambda: idle(gateway.engine))
        assert gateway.engine.generated_tokens < 3 * 400
        episode = gateway.registry._open[opened["id"]]
        assert episode.policy.turns == [] and not episode._running


def test_clients_give_up_silent_connections_before_the_server_does() -> None:
    """Where both wait for the same time, a request may be sent into a connection that is just being closed."""
    import httpx

    with crowded_gateway(None, ends=0.5, max_tokens=4) as gateway:
        expiry = httpx.Limits().keepalive_expiry
        assert expiry is not None and gateway.server._server.config.timeout_keep_alive > 2 * expiry
