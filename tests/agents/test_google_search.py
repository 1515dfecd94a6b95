"""google_search, against a local server that fails on request."""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import Iterator
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest

from covey.agents.tools.tool import ToolFailure
from covey.agents.tools.toolset import ToolSet, resolve_tools
from covey.errors import InputError
from covey.tool_calls import Call

KEY = "a-planted-secret"


@dataclass
class Server:
    url: str = ""
    answers: list[Any] = field(default_factory=list)  # for one request after another: a status, "hang", "drop", a body
    seen: list[tuple[str | None, Any]] = field(default_factory=list)
    over: threading.Event = field(default_factory=threading.Event)


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch) -> Iterator[Server]:
    monkeypatch.setenv("SERPER_API_KEY", KEY)
    monkeypatch.setenv("no_proxy", "127.0.0.1")
    ours = Server()

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            question = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            ours.seen.append((self.headers["X-API-KEY"], question))
            answer = ours.answers.pop(0) if ours.answers else 200
            if answer == "hang":
                ours.over.wait(20)
            if answer in ("hang", "drop"):
                self.close_connection = True
                return
            body = answer if isinstance(answer, bytes) else json.dumps(found(question["q"], question["num"])).encode()
            self.send_response(answer if isinstance(answer, int) else 200)
            if answer == 429:
                self.send_header("Retry-After", "0")
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *_: Any) -> None:
            pass

    httpd = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    httpd.daemon_threads = True
    thread = threading.Thread(target=httpd.serve_forever, args=(0.01,))
    thread.start()
    ours.url = f"http://127.0.0.1:{httpd.server_port}/search"
    yield ours
    ours.over.set()
    httpd.shutdown()
    thread.join()
    httpd.server_close()


def found(query: str, number: int) -> dict[str, Any]:
    results = [{"title": f"T{n}", "link": f"https://x/{n}", "snippet": f"{query} {n}"} for n in range(1, number + 3)]
    return {"organic": results, "answerBox": {"answer": "42"} if query == "box" else None}


def tools(server: Server, **options: Any) -> ToolSet:
    return resolve_tools(["google_search"], {"google_search": {"url": server.url, **options}})


def ask(made: ToolSet, *queries: Any) -> list[str]:
    async def go() -> list[str]:
        async with made.open() as session:
            calls = [Call("google_search", query if isinstance(query, dict) else {"query": query}) for query in queries]
            return [result.text for result in await session.call(calls)]

    return asyncio.run(go())


def test_without_a_key_nothing_starts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("SERPER_API_KEY", raising=False)
    with pytest.raises(InputError, match=r"export SERPER_API_KEY=\.\.\."):
        resolve_tools(["google_search"])


def test_results_are_numbered(server: Server) -> None:
    made = tools(server, top_k=2)
    assert ask(made, "cats", {"query": "box", "top_k": 1}) == [
        "[1] T1\nhttps://x/1\ncats 1\n\n[2] T2\nhttps://x/2\ncats 2",
        "Answer: 42\n\n[1] T1\nhttps://x/1\nbox 1",
    ]
    assert sorted(server.seen, key=str) == [(KEY, {"q": "box", "num": 1}), (KEY, {"q": "cats", "num": 2})]
    assert ask(made, {"query": " "}) == ["error: google_search: the query is empty"]
    assert made.schemas()[0]["function"]["parameters"]["properties"]["top_k"]["default"] == 2


def test_concurrent_searches_share_one_request(server: Server) -> None:
    made = tools(server)
    first = ask(made, "a", "a", "b", "a")  # at the same time
    assert ask(made, "a") == first[:1]  # and later, in another episode
    assert sorted(question["q"] for _, question in server.seen) == ["a", "b"]


@pytest.mark.parametrize("trouble", [500, 503, 429, "drop"])
def test_temporary_errors_are_retried(server: Server, trouble: Any) -> None:
    server.answers = [trouble]
    assert ask(tools(server), "a")[0].startswith("[1] T1")
    assert len(server.seen) == 2


@pytest.mark.parametrize(
    ("answers", "options", "message", "requests"),
    [
        ([429] * 9, {}, "the server answered 429", 3),
        ([503] * 9, {"tries": 1}, "the server answered 503", 1),
        ([403], {}, "refused the key", 1),
        ([400], {}, "answered 400", 1),
        ([b"<html>"], {}, "answered 200, b'<html>'", 1),
        (["hang"], {"timeout": 0.3}, "no answer within 0.3 seconds|timed out", 1),
    ],
)
def test_lasting_errors_are_failures(
    server: Server, answers: list[Any], options: dict[str, Any], message: str, requests: int
) -> None:
    server.answers = answers
    made = tools(server, **options)
    with pytest.raises(ToolFailure, match=message) as caught:
        ask(made, "a")
    assert caught.value.cause == "search" and KEY not in str(caught.value)
    assert len(server.seen) == requests
    server.answers = []
    assert ask(made, "a")[0].startswith("[1] T1")  # a failure is not remembered


def test_a_server_that_is_down(server: Server) -> None:
    made = resolve_tools(["google_search"], {"google_search": {"url": "http://127.0.0.1:9/search", "tries": 1}})
    with pytest.raises(ToolFailure, match="ConnectionRefusedError"):
        ask(made, "a")


def test_after_a_failed_search_a_waiting_caller_retries(server: Server) -> None:
    server.answers = [403]
    made = tools(server)

    async def go() -> list[Any]:
        async with made.open() as one, made.open() as two:
            calls = [Call("google_search", {"query": "a"})]
            return await asyncio.gather(one.call(calls), two.call(calls), return_exceptions=True)

    failed, fine = asyncio.run(go())
    assert isinstance(failed, ToolFailure) and fine[0].text.startswith("[1] T1")


def test_the_key_is_not_shown() -> None:
    from covey.agents.tools.google import GoogleOptions, Serper

    assert KEY not in repr(Serper(GoogleOptions(), KEY))
