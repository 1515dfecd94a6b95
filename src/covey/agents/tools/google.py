"""google_search: Google's results through serper.dev, whose key is in SERPER_API_KEY.

A search without an answer (timeout, refused key, rate limit) is a failure of the episode, after some retries. Results
are cached for the run, and concurrent searches for the same query share one request.
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
MAX_RESULTS = 20  # of one search
MAX_CACHED = 100_000  # searches
MAX_REQUESTS = 16  # at once
MAX_RESPONSE = 4 << 20  # bytes


@dataclass(frozen=True)
class GoogleOptions:
    top_k: int = 5  # results, unless the model requests another number
    timeout: float = 20.0  # seconds of one search, retries included
    tries: int = 3  # how often a search is tried if the server is busy or fails
    url: str = URL


def make_google_search(options: GoogleOptions) -> Tool:
    key = os.environ.get(VARIABLE, "").strip()
    if not key:
        raise Absent(f"tool google_search needs a key of serper.dev\n  fix: export {VARIABLE}=...")
    if not 1 <= options.top_k <= MAX_RESULTS:
        raise InputError(f"agent.tool_options.google_search.top_k must lie in 1..{MAX_RESULTS}, got {options.top_k}")
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
        count = min(top_k, MAX_RESULTS)
        return format_results(await serper.search(query.strip(), count), count)

    return replace(tool(google_search), inline=True)


def format_results(response: Mapping[str, Any], top_k: int) -> str:
    """Serper's response as text: the direct answer if there is one, then numbered results."""
    parts = []
    box = response.get("answerBox") or {}
    if answer := box.get("answer") or box.get("snippet"):
        parts.append(f"Answer: {answer}")
    graph = response.get("knowledgeGraph") or {}
    if graph.get("description"):
        parts.append(f"{graph.get('title', '')}: {graph['description']}")
    for number, result in enumerate((response.get("organic") or [])[:top_k], 1):
        lines = (f"[{number}] {result.get('title', '')}", result.get("link"), result.get("snippet"))
        parts.append("\n".join(filter(None, lines)))
    return "\n\n".join(parts) or "nothing found"


class Retry(Exception):
    """A failure worth another try, after `wait` seconds if the server says so."""

    def __init__(self, message: str, wait: float | None = None) -> None:
        super().__init__(message)
        self.wait = wait


@dataclass
class Serper:
    options: GoogleOptions
    key: str = field(repr=False)
    cache: dict[tuple[str, int], asyncio.Future[Any] | Mapping[str, Any]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.threads = ThreadPoolExecutor(MAX_REQUESTS, thread_name_prefix="google_search")

    async def search(self, query: str, top_k: int) -> Mapping[str, Any]:
        """From the cache, from a request in progress for the same query, or from the server."""
        key = (query, top_k)
        while isinstance(cached := self.cache.get(key), asyncio.Future):
            await asyncio.wait([cached])  # if it fails, the next caller sends the request again
        if cached is not None:
            return cached
        pending = self.cache[key] = asyncio.get_running_loop().create_future()
        try:
            response = await self._request(query, top_k)
        except BaseException:
            del self.cache[key]
            raise
        finally:
            pending.set_result(None)
        while len(self.cache) > MAX_CACHED:
            del self.cache[next(iter(self.cache))]
        self.cache[key] = response
        return response

    async def _request(self, query: str, top_k: int) -> Mapping[str, Any]:
        until = time.monotonic() + self.options.timeout
        tries, pause = 1, 0.5
        while True:
            try:
                return await self._request_once(query, top_k, until - time.monotonic())
            except Retry as failure:
                wait = pause if failure.wait is None else failure.wait
                if tries == self.options.tries or time.monotonic() + wait >= until:
                    raise ToolFailure("search", f"google_search: {failure} (tries: {tries})") from failure
            await asyncio.sleep(wait)
            tries, pause = tries + 1, 2 * pause

    async def _request_once(self, query: str, top_k: int, seconds: float) -> Mapping[str, Any]:
        request = Request(self.options.url, self.key, {"q": query, "num": top_k}, seconds)
        running = asyncio.get_running_loop().run_in_executor(self.threads, request.send)
        try:
            async with asyncio.timeout(seconds):
                status, wait, body = await running
        except TimeoutError:
            raise Retry(f"no answer within {seconds:.1f} seconds") from None
        except (OSError, http.client.HTTPException) as error:
            raise Retry(f"{type(error).__name__}: {error}") from None
        finally:
            request.abort()  # wakes a thread that still waits for the response
        return _parse_response(status, wait, body)


def _parse_response(status: int, wait: float | None, body: bytes) -> Mapping[str, Any]:
    if status == 429 or status >= 500:
        raise Retry(f"the server answered {status}", wait)
    if status in (401, 403):
        raise ToolFailure("search", f"google_search: the server refused the key ({status}): see {VARIABLE}")
    try:
        response = json.loads(body)
    except ValueError:
        response = None
    if status != 200 or not isinstance(response, dict):
        raise ToolFailure("search", f"google_search: the server answered {status}, {body[:200]!r}")
    return response


class Request:
    """One POST request, sent from a thread. `abort` ends it from another thread."""

    def __init__(self, url: str, key: str, query: Mapping[str, Any], seconds: float) -> None:
        self.url = urlsplit(url)
        self.headers = {"X-API-KEY": key, "Content-Type": "application/json", "Accept": "application/json"}
        self.body = json.dumps(query).encode()
        self.connection = _connect(url, seconds)

    def send(self) -> tuple[int, float | None, bytes]:
        try:
            self.connection.request("POST", self.url.path or "/", self.body, self.headers)
            response = self.connection.getresponse()
            after = response.getheader("Retry-After") or ""
            return response.status, float(after) if after.isdigit() else None, response.read(MAX_RESPONSE)
        finally:
            self.connection.close()

    def abort(self) -> None:
        if (open_socket := self.connection.sock) is not None:
            with suppress(OSError):  # already closed
                open_socket.shutdown(socket.SHUT_RDWR)


def _connect(url: str, seconds: float) -> http.client.HTTPConnection:
    parts = urlsplit(url)
    kind = http.client.HTTPSConnection if parts.scheme == "https" else http.client.HTTPConnection
    host = parts.hostname or ""
    proxy = None if proxy_bypass(host) else getproxies().get(parts.scheme)
    if proxy is None:
        return kind(host, parts.port, timeout=seconds)
    proxy_parts = urlsplit(proxy if "//" in proxy else f"//{proxy}")
    connection = kind(proxy_parts.hostname or "", proxy_parts.port, timeout=seconds)
    connection.set_tunnel(host, parts.port or (443 if parts.scheme == "https" else 80))
    return connection
