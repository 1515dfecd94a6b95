"""google_search: Google's results through serper.dev, whose key is in SERPER_API_KEY.

A search that cannot be had (no answer, a refused key, too many requests for too long) is a failure of the
infrastructure: the episode is set aside. Results are kept for the whole run, and one question under way is asked once.
"""

from __future__ import annotations

import asyncio
import http.client
import json
import os
import socket
import time
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, field, replace
from typing import Any
from urllib.parse import urlsplit
from urllib.request import getproxies, proxy_bypass

from covey.agents.tools.tool import Tool, ToolFailure, ToolMistake, tool
from covey.errors import Absent, InputError

VARIABLE = "SERPER_API_KEY"
URL = "https://google.serper.dev/search"
MOST = 20  # results of one search
KEPT = 100_000  # searches remembered
TOGETHER = 16  # requests under way at once
LARGEST = 4 << 20  # bytes of an answer


@dataclass(frozen=True)
class GoogleOptions:
    top_k: int = 5  # results, unless the model asks for another number
    timeout: float = 20.0  # seconds: one search may take this long, further tries included
    tries: int = 3  # a server that is busy, broken or silent is asked again
    url: str = URL


def make_google_search(options: GoogleOptions) -> Tool:
    key = os.environ.get(VARIABLE, "").strip()
    if not key:
        raise Absent(f"tool google_search needs a key of serper.dev\n  fix: export {VARIABLE}=...")
    if not 1 <= options.top_k <= MOST:
        raise InputError(f"agent.tool_options.google_search.top_k must lie in 1..{MOST}, got {options.top_k}")
    if urlsplit(options.url).scheme not in ("http", "https"):
        raise InputError(f"agent.tool_options.google_search.url must begin with https://, got {options.url}")
    if not options.timeout > 0 or options.tries < 1:
        raise InputError("agent.tool_options.google_search: timeout must be more than 0, and tries at least 1")
    serper = Serper(options, key)

    async def google_search(query: str, top_k: int = options.top_k) -> str:
        """Search the web with Google and return titles, addresses and snippets.

        Args:
            query: What to look for.
            top_k: How many results to return.
        """
        if not query.strip():
            raise ToolMistake("bad_arguments", "error: google_search: the query is empty")
        if top_k < 1:
            raise ToolMistake("bad_arguments", f"error: google_search: top_k must be at least 1, got {top_k}")
        return shown(await serper.search(query.strip(), min(top_k, MOST)), min(top_k, MOST))

    return replace(tool(google_search), inline=True)


def shown(found: Mapping[str, Any], top_k: int) -> str:
    """What Serper found, for reading: the direct answer if there is one, then numbered results."""
    parts = []
    box = found.get("answerBox") or {}
    if answer := box.get("answer") or box.get("snippet"):
        parts.append(f"Answer: {answer}")
    graph = found.get("knowledgeGraph") or {}
    if graph.get("description"):
        parts.append(f"{graph.get('title', '')}: {graph['description']}")
    for number, result in enumerate((found.get("organic") or [])[:top_k], 1):
        lines = (f"[{number}] {result.get('title', '')}", result.get("link"), result.get("snippet"))
        parts.append("\n".join(filter(None, lines)))
    return "\n\n".join(parts) or "nothing found"


class Busy(Exception):
    """Worth another try, after `wait` seconds if the server says so."""

    def __init__(self, message: str, wait: float | None = None) -> None:
        super().__init__(message)
        self.wait = wait


@dataclass
class Serper:
    options: GoogleOptions
    key: str = field(repr=False)
    found: dict[tuple[str, int], asyncio.Future[Any] | Mapping[str, Any]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.threads = ThreadPoolExecutor(TOGETHER, thread_name_prefix="google_search")

    async def search(self, query: str, top_k: int) -> Mapping[str, Any]:
        """From memory, with whoever asks the same at this moment, or from the server."""
        at = (query, top_k)
        while isinstance(known := self.found.get(at), asyncio.Future):
            await asyncio.wait([known])  # if it fails, the next in line asks again
        if known is not None:
            return known
        under_way = self.found[at] = asyncio.get_running_loop().create_future()
        try:
            answer = await self._ask(query, top_k)
        except BaseException:
            del self.found[at]
            raise
        finally:
            under_way.set_result(None)
        while len(self.found) > KEPT:
            del self.found[next(iter(self.found))]
        self.found[at] = answer
        return answer

    async def _ask(self, query: str, top_k: int) -> Mapping[str, Any]:
        until = time.monotonic() + self.options.timeout
        tries, pause = 1, 0.5
        while True:
            try:
                return await self._once(query, top_k, until - time.monotonic())
            except Busy as busy:
                wait = pause if busy.wait is None else busy.wait
                if tries == self.options.tries or time.monotonic() + wait >= until:
                    raise ToolFailure("search", f"google_search: {busy} (tries: {tries})") from busy
            await asyncio.sleep(wait)
            tries, pause = tries + 1, 2 * pause

    async def _once(self, query: str, top_k: int, seconds: float) -> Mapping[str, Any]:
        request = Request(self.options.url, self.key, {"q": query, "num": top_k}, seconds)
        running = asyncio.get_running_loop().run_in_executor(self.threads, request.send)
        try:
            async with asyncio.timeout(seconds):
                status, wait, body = await running
        except TimeoutError:
            raise Busy(f"no answer within {seconds:.1f} seconds") from None
        except (OSError, http.client.HTTPException) as error:
            raise Busy(f"{type(error).__name__}: {error}") from None
        finally:
            request.abort()  # a thread that still waits for an answer is woken up
        return _read(status, wait, body)


def _read(status: int, wait: float | None, body: bytes) -> Mapping[str, Any]:
    if status == 429 or status >= 500:
        raise Busy(f"the server answered {status}", wait)
    if status in (401, 403):
        raise ToolFailure("search", f"google_search: the server refused the key ({status}): see {VARIABLE}")
    try:
        found = json.loads(body)
    except ValueError:
        found = None
    if status != 200 or not isinstance(found, dict):
        raise ToolFailure("search", f"google_search: the server answered {status}, {body[:200]!r}")
    return found


class Request:
    """One POST in a thread, which `abort` ends from outside."""

    def __init__(self, url: str, key: str, question: Mapping[str, Any], seconds: float) -> None:
        self.url = urlsplit(url)
        self.headers = {"X-API-KEY": key, "Content-Type": "application/json", "Accept": "application/json"}
        self.body = json.dumps(question).encode()
        self.connection = _connect(url, seconds)

    def send(self) -> tuple[int, float | None, bytes]:
        try:
            self.connection.request("POST", self.url.path or "/", self.body, self.headers)
            answer = self.connection.getresponse()
            after = answer.getheader("Retry-After") or ""
            return answer.status, float(after) if after.isdigit() else None, answer.read(LARGEST)
        finally:
            self.connection.close()

    def abort(self) -> None:
        if (open_socket := self.connection.sock) is not None:
            with suppress(OSError):  # it has just been closed
                open_socket.shutdown(socket.SHUT_RDWR)


def _connect(url: str, seconds: float) -> http.client.HTTPConnection:
    parts = urlsplit(url)
    kind = http.client.HTTPSConnection if parts.scheme == "https" else http.client.HTTPConnection
    host = parts.hostname or ""
    proxy = None if proxy_bypass(host) else getproxies().get(parts.scheme)
    if proxy is None:
        return kind(host, parts.port, timeout=seconds)
    through = urlsplit(proxy if "//" in proxy else f"//{proxy}")
    connection = kind(through.hostname or "", through.port, timeout=seconds)
    connection.set_tunnel(host, parts.port or (443 if parts.scheme == "https" else 80))
    return connection
