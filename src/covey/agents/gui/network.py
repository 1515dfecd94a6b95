"""The only way from a page to the network: an HTTP proxy per episode that knows the addresses of its task.

A browser's context sends every request to its own proxy, redirects, websockets, preconnections and requests of workers
included. The proxy answers for the page of a task with `html`, passes requests to allowed addresses on, and refuses and
counts all others. Host names are resolved here and only if they are allowed: the browser itself can resolve none.

HTTPS and websockets are tunnels (CONNECT), so an address is a host with a port, not a path.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass, field
from urllib.parse import urlsplit

PAGE_HOST = "page.test"  # where the page of a task with `html` is; the domain `test` exists nowhere (RFC 2606)
PAGE_URL = f"http://{PAGE_HOST}/"
PROXY_HOST = "127.83.71.1"  # loopback, but not the address of any server: browsers may connect to nothing else
MAX_HEAD = 1 << 16  # bytes of a request's head
MAX_BODY = 1 << 24
IDLE_SECONDS = 30.0  # until a silent connection is closed

Address = tuple[str, int]


def address_of(url: str) -> Address | None:
    """Host and port of an http(s) or ws(s) URL; None for any other URL."""
    try:
        parts = urlsplit(url)
        port = parts.port
    except ValueError:
        return None
    ports = {"http": 80, "ws": 80, "https": 443, "wss": 443}
    if parts.scheme not in ports or not parts.hostname:
        return None
    return parts.hostname.lower(), port or ports[parts.scheme]


@dataclass
class Proxy:
    """Serves one episode. `html`: the page at PAGE_URL; `allowed`: the addresses that requests are passed to."""

    html: str | None
    allowed: frozenset[Address]
    refused: dict[str, int] = field(default_factory=dict)  # requests that were refused, by address
    _server: asyncio.Server | None = None
    _open: set[asyncio.StreamWriter] = field(default_factory=set)

    async def start(self) -> str:
        """Listen; returns the proxy's URL."""
        self._server = await asyncio.start_server(self._serve, PROXY_HOST, 0, limit=MAX_HEAD)
        return f"http://{PROXY_HOST}:{self._server.sockets[0].getsockname()[1]}"

    def close(self) -> None:
        if self._server is not None:
            self._server.close()
        for writer in [*self._open]:
            writer.close()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._open.add(writer)
        try:
            async with asyncio.timeout(IDLE_SECONDS):
                head = await reader.readuntil(b"\r\n\r\n")
            await self._answer(head, reader, writer)
        except (OSError, EOFError, TimeoutError, ValueError, asyncio.LimitOverrunError):
            pass  # a broken request or connection: the page sees a network error
        finally:
            self._open.discard(writer)
            writer.close()

    async def _answer(self, head: bytes, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        request, *lines = head.decode("latin-1").split("\r\n")
        method, target, _ = request.split(" ", 2)
        url = f"https://{target}" if method == "CONNECT" else target
        address = address_of(url)
        if address == (PAGE_HOST, 80) and self.html is not None and method != "CONNECT":
            await _read_body(lines, reader)
            found = urlsplit(target).path in ("", "/")
            await _reply(writer, 200 if found else 404, self.html if found else "not found")
        elif address is None or address not in self.allowed:
            name = f"{address[0]}:{address[1]}" if address else target[:100]
            self.refused[name] = self.refused.get(name, 0) + 1
            await _reply(writer, 403, f"{name} does not belong to this task")
        elif method == "CONNECT":
            await self._tunnel(address, reader, writer)
        else:
            await self._forward(address, method, target, lines, reader, writer)

    async def _tunnel(self, address: Address, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        server_reader, server_writer = await self._connect(address)
        writer.write(b"HTTP/1.1 200 Connection established\r\n\r\n")
        try:
            await asyncio.gather(_copy(reader, server_writer), _copy(server_reader, writer))
        finally:
            self._open.discard(server_writer)
            server_writer.close()

    async def _forward(
        self,
        address: Address,
        method: str,
        target: str,
        lines: Iterable[str],
        reader: asyncio.StreamReader,
        writer: asyncio.StreamWriter,
    ) -> None:
        """One request and its response. The connection is then closed, so that no other request follows on it."""
        body = await _read_body(lines, reader)
        parts = urlsplit(target)
        path = (parts.path or "/") + (f"?{parts.query}" if parts.query else "")
        kept = [
            line for line in lines if line and not line.lower().startswith(("proxy-", "connection:", "keep-alive:"))
        ]
        head = "\r\n".join([f"{method} {path} HTTP/1.1", *kept, "Connection: close", "", ""])
        server_reader, server_writer = await self._connect(address)
        try:
            server_writer.write(head.encode("latin-1") + body)
            await _copy(server_reader, writer)
        finally:
            self._open.discard(server_writer)
            server_writer.close()

    async def _connect(self, address: Address) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        async with asyncio.timeout(IDLE_SECONDS):
            reader, writer = await asyncio.open_connection(*address)
        self._open.add(writer)  # closed with the episode
        return reader, writer


async def _read_body(lines: Iterable[str], reader: asyncio.StreamReader) -> bytes:
    headers = {name.strip().lower(): value.strip() for name, _, value in (line.partition(":") for line in lines)}
    length = int(headers.get("content-length", 0))
    if "transfer-encoding" in headers or not 0 <= length <= MAX_BODY:
        raise ValueError("a body without a length, or a very long one")
    return await reader.readexactly(length)


async def _reply(writer: asyncio.StreamWriter, status: int, text: str) -> None:
    body = text.encode(errors="replace")
    head = (
        f"HTTP/1.1 {status} {'OK' if status == 200 else 'refused'}\r\nContent-Type: text/html; charset=utf-8\r\n"
        f"Content-Length: {len(body)}\r\nCache-Control: no-store\r\nConnection: close\r\n\r\n"
    )
    writer.write(head.encode() + body)
    await writer.drain()


async def _copy(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    while data := await reader.read(MAX_HEAD):
        writer.write(data)
        await writer.drain()
    with suppress(OSError, RuntimeError):
        if writer.can_write_eof():
            writer.write_eof()
