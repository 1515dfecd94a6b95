"""Many concurrent clients of a gateway, some misbehaving, and a check that their replies were recorded correctly.

Every session writes its own marks into its messages and keeps the log-probs of its replies. The recorded episodes must
contain each session once, with exactly these replies and without marks of other sessions.
"""

from __future__ import annotations

import asyncio
import json
import re
import time
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import httpx

MARK = re.compile(r"session-\d+-turn")
TOO_MUCH = 17 * 2**20  # bytes of a body
Reply = tuple[float, ...]  # its log-probs: no two replies have the same


@dataclass
class Session:
    """The requests and replies of one client."""

    number: int
    kind: str
    id: str = ""
    key: str = ""
    replies: list[Reply] = field(default_factory=list)
    texts: list[list[str]] = field(default_factory=list)  # of the replies, token by token
    seconds: list[float] = field(default_factory=list)  # of each answered request
    refused: list[int] = field(default_factory=list)
    lost: int = 0  # requests that it did not wait for
    error: str = ""

    def mark(self, turn: int) -> str:
        return f"session-{self.number}-turn {turn}"


def kind_of(number: int) -> str:
    """Of twenty clients, one disconnects, one reads slowly, one has a wrong key, one sends too much, and two stream."""
    return {3: "vanish", 7: "slow", 11: "wrong key", 15: "oversized", 17: "stream", 18: "stream"}.get(
        number % 20, "plain"
    )


class Crowd:
    """Clients of one server."""

    def __init__(self, url: str, token: str, *, turns: int, replies: int = 1) -> None:
        self.url, self.token, self.turns, self.many = url, token, turns, replies
        none = httpx.Limits(max_connections=None, max_keepalive_connections=None)
        self.http = httpx.AsyncClient(base_url=url, timeout=300, limits=none, trust_env=False)
        self._numbers = 0

    async def play(self, clients: int) -> list[Session]:
        """Run this number of concurrent clients until all have finished."""
        first, self._numbers = self._numbers, self._numbers + clients
        sessions = [Session(number, kind_of(number)) for number in range(first, first + clients)]
        await asyncio.gather(*map(self._client, sessions))
        return sessions

    async def _client(self, session: Session) -> None:
        try:
            opened = await self.http.post("/episodes", headers=_key(self.token), json={"metadata": session.number})
            assert opened.status_code == 201, opened.text
            session.id, session.key = opened.json()["id"], opened.json()["key"]
            await self._converse(session)
            done = await self.http.post(
                f"/episodes/{session.id}/reward", headers=_key(session.key), json={"reward": session.number}
            )
            assert done.status_code == 200, done.text
        except Exception as error:  # an error of one client is a finding and must not stop the others
            session.error = repr(error)

    async def _converse(self, session: Session) -> None:
        talk: list[Mapping[str, Any]] = []
        for turn in range(self.turns):
            talk.append({"role": "user", "content": session.mark(turn)})
            if session.kind == "wrong key":
                await self._refused(session, "0" * 32, {"messages": talk})
            if session.kind == "oversized" and turn == 1:
                await self._refused(session, session.key, {"messages": talk, "user": "x" * TOO_MUCH})
            if session.kind == "vanish" and turn == 1:
                await self._vanish(session, {"messages": talk})
                return
            body = {"messages": talk, "logprobs": True, "stream": session.kind in ("stream", "slow")}
            body["n"] = self.many if session.kind == "plain" and session.number % 5 == 0 else 1
            begin = time.perf_counter()
            messages = await (self._slowly(session, body) if session.kind == "slow" else self._ask(session, body))
            session.seconds.append(time.perf_counter() - begin)
            talk.append(messages)

    async def _refused(self, session: Session, key: str, body: Mapping[str, Any]) -> None:
        try:
            answer = await self.http.post("/v1/chat/completions", headers=_key(key), json=body)
        except httpx.TransportError:  # the server may close the connection if it refuses the body
            session.refused.append(0)
            return
        session.refused.append(answer.status_code)

    async def _ask(self, session: Session, body: Mapping[str, Any]) -> Mapping[str, Any]:
        answer = await self.http.post("/v1/chat/completions", headers=_key(session.key), json=body)
        assert answer.status_code == 200, answer.text
        assert answer.headers["x-covey-episode"] == session.id
        if body["stream"]:
            return _heard(session, answer.text)
        for choice in answer.json()["choices"]:
            _keep(session, choice["logprobs"]["content"])
        message: Mapping[str, Any] = answer.json()["choices"][0]["message"]
        return message

    # -- over sockets of their own ------------------------------------------------------------------------------

    async def _connected(
        self, session: Session, body: Mapping[str, Any]
    ) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        host, port = self.url.removeprefix("http://").split(":")
        reader, writer = await asyncio.open_connection(host, int(port), limit=1024)
        content = json.dumps(body).encode()
        head = (
            f"POST /v1/chat/completions HTTP/1.1\r\nHost: {host}:{port}\r\nAuthorization: Bearer {session.key}\r\n"
            f"Content-Type: application/json\r\nConnection: close\r\nContent-Length: {len(content)}\r\n\r\n"
        )
        writer.write(head.encode() + content)
        await writer.drain()
        return reader, writer

    async def _vanish(self, session: Session, body: Mapping[str, Any]) -> None:
        """Send a request and disconnect before the reply: half of the clients close the connection, others reset it."""
        _, writer = await self._connected(session, body)
        await asyncio.sleep(0.05)
        session.lost += 1
        if session.number % 40 < 20:
            writer.close()
        else:
            writer.transport.abort()

    async def _slowly(self, session: Session, body: Mapping[str, Any]) -> Mapping[str, Any]:
        reader, writer = await self._connected(session, body)
        heard = bytearray()
        while piece := await reader.read(512):
            heard += piece
            await asyncio.sleep(0.01)
        writer.close()
        head, _, rest = bytes(heard).partition(b"\r\n\r\n")
        assert b" 200 " in head.split(b"\r\n")[0], head
        return _heard(session, _unchunked(rest).decode())


def _key(key: str) -> dict[str, str]:
    return {"authorization": f"Bearer {key}"}


def _unchunked(raw: bytes) -> bytes:
    found = bytearray()
    while raw:
        size, _, raw = raw.partition(b"\r\n")
        found += raw[: int(size, 16)]
        raw = raw[int(size, 16) + 2 :]
    return bytes(found)


def _heard(session: Session, text: str) -> Mapping[str, Any]:
    """The message that a stream adds up to."""
    events = [line.removeprefix("data: ") for line in text.splitlines() if line.startswith("data: ")]
    assert events[-1] == "[DONE]"
    parts = [json.loads(event)["choices"][0] for event in events[:-1]]
    shown = [part["logprobs"]["content"] for part in parts if part["logprobs"]]
    _keep(session, shown[0] if shown else [])
    return {"role": "assistant", "content": "".join(part["delta"].get("content") or "" for part in parts)}


def _keep(session: Session, content: Sequence[Mapping[str, Any]]) -> None:
    session.replies.append(tuple(entry["logprob"] for entry in content))
    session.texts.append([entry["token"] for entry in content])


# -- what was recorded --------------------------------------------------------------------------------------------


def recorded(line: Mapping[str, Any]) -> tuple[list[Reply], list[list[str]]]:
    """The replies in an episode's record: its runs of sampled tokens."""
    replies: list[Reply] = []
    texts: list[list[str]] = []
    for row in line["rows"]:
        before = 0
        for sampled, logprob, text in zip(row["mask"], row["logprobs"], row["text"], strict=True):
            if sampled and not before:
                replies.append(())
                texts.append([])
            if sampled:
                replies[-1] += (logprob,)
                texts[-1].append(text)
            before = sampled
    return replies, texts


def wrongs(sessions: Iterable[Session], lines: Sequence[Mapping[str, Any]]) -> list[str]:
    """Differences between the record and the sessions; empty if there are none."""
    found: list[str] = []
    times = Counter(line["id"] for line in lines)
    by_id = {line["id"]: line for line in lines}
    for session in sessions:
        name = f"session {session.number} ({session.kind})"
        if session.error:
            found.append(f"{name}: {session.error}")
            continue
        if times[session.id] != (1 if session.replies else 0):
            found.append(f"{name}: recorded {times[session.id]} times")
            continue
        found += [f"{name}: {wrong}" for wrong in _wrongs(session, by_id[session.id])]
    return found


def _wrongs(session: Session, line: Mapping[str, Any]) -> list[str]:
    found = []
    replies, texts = recorded(line)
    missing, more = Counter(session.replies) - Counter(replies), Counter(replies) - Counter(session.replies)
    if missing:
        found.append(f"{sum(missing.values())} of {len(session.replies)} replies are not in the record")
    if sum(more.values()) > session.lost:
        found.append(f"{sum(more.values())} replies in the record that it did not hear")
    for reply, said in zip(session.replies, session.texts, strict=True):
        kept = texts[replies.index(reply)] if reply in replies else said
        if any(mine and mine != theirs for mine, theirs in zip(said, kept, strict=True)):  # a mark of control has none
            found.append(f"other tokens than it heard: {said} and {kept}")
    marks = {mark for row in line["rows"] for mark in MARK.findall(row["prompt_text"] + "".join(row["text"]))}
    if marks != {f"session-{session.number}-turn"}:
        found.append(f"marks {marks}")
    if line["rewards"].get("reward") != session.number:
        found.append(f"rewards {line['rewards']}")
    expected = {"wrong key": {401}, "oversized": {413, 0}}.get(session.kind, set())
    if not set(session.refused) <= expected:
        found.append(f"refused with {session.refused}")
    return found
