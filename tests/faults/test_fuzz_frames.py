"""Other ends that send anything: workers, and servers of tools. Memory is bounded, one call is lost, and it is told."""

from __future__ import annotations

import asyncio
import base64
import json
import pickle
import shlex
import socket
import sys
import tempfile
import threading
import tracemalloc
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any, ClassVar

import pytest
from hypothesis import strategies as st

from covey.agents.tools.mcp import mcp_tools
from covey.agents.tools.tool import ToolFailure, ToolMistake
from covey.errors import InputError
from covey.workers import WorkerError, WorkerPool, handle
from covey.workers.handle import LENGTH, MAX_FRAME, FrameReader, InvalidFrame, WorkerHandle, encode_frame
from tests.faults.fuzzing import Target, json_values, scalars, suite, texts

SMALL = 1 << 20


# -- frames ----------------------------------------------------------------------------------------------------------

lengths = st.one_of(st.integers(0, 40), st.sampled_from([MAX_FRAME, MAX_FRAME + 1, 2**63, 2**64 - 1, 2**40]))
frames = st.one_of(
    st.binary(max_size=60),
    st.builds(lambda length, body: LENGTH.pack(length) + body, lengths, st.binary(max_size=60)),
    st.builds(lambda value, prefix: bytes(encode_frame(prefix, value)), scalars, st.binary(min_size=2, max_size=2)),
    st.builds(lambda value, end: bytes(encode_frame(b"\x00\x01", value))[:end], scalars, st.integers(0, 60)),
)
sent = st.lists(frames, max_size=3).map(b"".join)


def fills(given: tuple[bytes, int]) -> None:
    data, piece = given
    reader = FrameReader()
    tracemalloc.start()
    try:
        for at in range(0, len(data), piece):
            found = reader.feed(data[at : at + piece])
            if found is not None:
                assert len(found) == LENGTH.unpack(data[: LENGTH.size])[0]
                break
    except InvalidFrame as error:
        assert "bytes" in str(error)
    finally:
        assert tracemalloc.get_traced_memory()[1] < SMALL, "memory for what has not come"
        tracemalloc.stop()


values = json_values(["a"], st.none() | st.booleans() | st.integers() | st.text() | st.binary(max_size=3000))


def arrives(given: tuple[Any, list[int]]) -> None:
    """Cut anywhere, a frame arrives whole."""
    value, cuts = given
    data, reader, found, at = bytes(encode_frame(b"\x00\x01", value)), FrameReader(), None, 0
    for size in [*cuts, len(data)]:
        assert found is None
        found, at = reader.feed(data[at : at + size]), at + size
        if at >= len(data):
            break
    assert found is not None and bytes(found[:2]) == b"\x00\x01" and pickle.loads(found[2:]) == value


def asks(given: tuple[bytes, bool]) -> None:
    """A worker that answers with anything, and ends or does not: a value or a WorkerError, soon."""
    data, ends = given

    async def ask() -> Any:
        ours, theirs = socket.socketpair()
        made = WorkerHandle(1, ours)
        try:
            theirs.sendall(data)
            if ends:
                theirs.close()
            return await WorkerPool._request(None, made, "f", memoryview(b""), 0.05)  # type: ignore[arg-type]
        finally:
            made.close()
            theirs.close()

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(handle, "GRACE", 0.01)
        try:
            asyncio.run(ask())
        except WorkerError as error:
            assert str(error)


# -- servers of tools ------------------------------------------------------------------------------------------------

# Answers request after request with the lines of a file; ID in a line is that of the request.
SERVER = """
import base64, json, sys
lines = [base64.b64decode(line) for line in open(sys.argv[1])]
for request in sys.stdin.buffer:
    asked = json.loads(request)
    if "id" not in asked:
        continue
    if asked["method"] == "initialize":
        about = {"protocolVersion": asked["params"]["protocolVersion"], "capabilities": {"tools": {}},
                 "serverInfo": {"name": "s", "version": "1"}}
        answer = json.dumps({"jsonrpc": "2.0", "id": asked["id"], "result": about}).encode()
    elif lines:
        answer = lines.pop(0).replace(b'"ID"', json.dumps(asked["id"]).encode())
    else:
        break
    sys.stdout.buffer.write(answer + b"\\n")
    sys.stdout.buffer.flush()
"""
KEYS = ["jsonrpc", "id", "result", "error", "tools", "name", "inputSchema", "content", "type", "text", "nextCursor"]
schemas = json_values(["type", "properties", "required", "items", "x", "enum", "$ref"])
tool = st.fixed_dictionaries(
    {"name": st.just("t") | texts, "inputSchema": schemas | st.just({"type": "object", "properties": {"x": {}}})}
)


def _answer(result: Any) -> bytes:
    return json.dumps({"jsonrpc": "2.0", "id": "ID", "result": result}).encode()


contents = st.lists(
    st.fixed_dictionaries({"type": st.sampled_from(["text", "image", "resource", "x"])}, optional={"text": texts}),
    max_size=2,
)
answers = st.one_of(
    st.lists(tool, max_size=2).map(lambda tools: _answer({"tools": tools})),
    st.builds(lambda found, error: _answer({"content": found, "isError": error}), contents, st.booleans()),
    json_values(KEYS).map(_answer),
    json_values(KEYS).map(lambda value: json.dumps(value).encode()),
    st.binary(max_size=60).map(lambda data: data.replace(b"\n", b"")),
    st.sampled_from([b"[" * 50_000, b"x" * 3_000_000, b'{"jsonrpc": "2.0", "id": "ID", "result": ' + b"[" * 900, b""]),
)
good = _answer({"tools": [{"name": "t", "inputSchema": {"type": "object", "properties": {"x": {"type": "string"}}}}]})
talks = st.one_of(st.lists(answers, max_size=3), st.lists(answers, max_size=2).map(lambda found: [good, *found]))


def serves(lines: list[bytes]) -> None:
    """Tools are listed, or it is told why not; a call brings text, or is the model's or the server's mistake."""
    with tempfile.TemporaryDirectory() as folder:
        script, fragments = Path(folder, "server.py"), Path(folder, "lines")
        script.write_text(SERVER)
        fragments.write_bytes(b"".join(base64.b64encode(line) + b"\n" for line in lines))
        command = shlex.join([sys.executable, "-S", "-E", str(script), str(fragments)])
        _use_tools({"command": command})


def _use_tools(place: dict[str, str]) -> None:
    options = {"s": {**place, "start_seconds": 2.0, "seconds": 1.0}}
    try:
        tools = mcp_tools("mcp:s", options, 1.0)
    except InputError as error:
        assert "s" in str(error) and len(str(error)) < 5000
        return
    for found in tools:
        try:
            checked = found.check({"x": "1"})
            assert isinstance(asyncio.run(_called(found, checked)), str)
        except (ToolMistake, ToolFailure) as error:
            assert str(error)


async def _called(found: Any, checked: Any) -> Any:
    return await found.function(**checked)


class Quiet(ThreadingHTTPServer):
    def handle_error(self, *_: Any) -> None: ...  # a client that leaves in the midst of a reply


class HttpServer(BaseHTTPRequestHandler):
    """Answers request after request with what `said` holds: status, kind, body. ID in a body is that of the request."""

    fragments: ClassVar[list[tuple[int, str, bytes]]]

    def do_POST(self) -> None:
        asked = json.loads(self.rfile.read(int(self.headers["content-length"])))
        if "id" not in asked:
            return self._send(202, "application/json", b"")
        if asked["method"] == "initialize":
            about = {"protocolVersion": asked["params"]["protocolVersion"], "capabilities": {"tools": {}}}
            answer = _answer(about | {"serverInfo": {"name": "s", "version": "1"}})
            status, kind = 200, "application/json"
        else:
            status, kind, answer = self.fragments.pop(0) if self.fragments else (404, "text/plain", b"")
        return self._send(status, kind, answer.replace(b'"ID"', json.dumps(asked["id"]).encode()))

    def do_GET(self) -> None:
        self._send(405, "text/plain", b"")

    do_DELETE = do_GET

    def _send(self, status: int, kind: str, body: bytes) -> None:
        self.send_response(status)
        self.send_header("content-type", kind)
        self.send_header("content-length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_: Any) -> None: ...


statuses = st.sampled_from([200, 200, 200, 202, 204, 400, 401, 404, 500])
kinds = st.sampled_from(["application/json", "text/event-stream", "text/html", "application/json; charset=utf-16", ""])
events = answers.map(lambda body: b"event: message\ndata: " + body + b"\n\n")
replies = st.one_of(
    st.tuples(st.just(200), st.just("application/json"), answers),
    st.tuples(st.just(200), st.just("text/event-stream"), events),
    st.tuples(statuses, kinds, st.one_of(answers, events)),
)
listing = (200, "application/json", good)
http_talks = st.one_of(st.lists(replies, max_size=3), st.lists(replies, max_size=2).map(lambda all: [listing, *all]))


def serves_http(fragments: list[tuple[int, str, bytes]]) -> None:
    handler = type("Handler", (HttpServer,), {"fragments": list(fragments)})
    with Quiet(("127.0.0.1", 0), handler) as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True)
        thread.start()
        try:
            _use_tools({"url": f"http://127.0.0.1:{server.server_port}/mcp"})
        finally:
            server.shutdown()
            thread.join()


TARGETS = [
    Target("frames/inbox", st.tuples(sent, st.integers(1, 70)), fills, 150),
    Target("frames/round-trip", st.tuples(values, st.lists(st.integers(0, 200), max_size=6)), arrives, 80),
    Target("workers/answers", st.tuples(sent, st.booleans()), asks, 60),
    Target("mcp/stdio", talks, serves, 3),
    Target("mcp/http", http_talks, serves_http, 5),
]
test_fuzz = suite(TARGETS)
