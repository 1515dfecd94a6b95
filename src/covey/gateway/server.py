"""uvicorn on the event loop that it is started in, on this machine's own address only."""

from __future__ import annotations

import asyncio
import importlib.util
import socket
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any

from covey.errors import Absent
from covey.gateway.book import Book
from covey.install import install_extra

HOST = "127.0.0.1"
HEAD_SECONDS = 60.0  # for the first line and the headers of a request; after one or two of them, silence is the end
MAX_HEAD = 64 * 1024  # bytes of them
MAX_CONNECTIONS = 4096  # at once; who comes then is told to come again
# Seconds that a silent connection is kept. Clients give theirs up after 5: if we did so too, a request that goes out at
# that very moment would be lost.
KEEP_ALIVE = 120


def require_packages() -> None:
    missing = [name for name in ("fastapi", "uvicorn") if importlib.util.find_spec(name) is None]
    if missing:
        raise Absent(f"the gateway needs {' and '.join(missing)}\n  {install_extra('serve')}")


def bind(port: int) -> socket.socket:
    """A socket at the port; 0: any that is free."""
    found = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
    found.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        found.bind((HOST, port))
    except OSError as error:
        found.close()
        raise Absent(
            f"gateway.port={port} cannot be used ({error.strerror})\n  give another; gateway.port=0 takes a free one"
        ) from error
    return found


class Server:
    """The endpoint of a book, from `start` to `stop`. While the event loop is busy, requests wait."""

    def __init__(self, book: Book, port: int) -> None:
        self.book = book
        self.port = port
        self._server: Any = None
        self._serving: asyncio.Task[None] | None = None

    @property
    def url(self) -> str:
        return f"http://{HOST}:{self.port}"

    async def start(self) -> None:
        require_packages()
        import uvicorn
        from uvicorn.protocols.http.h11_impl import H11Protocol

        from covey.gateway.app import make_app

        class Prompt(H11Protocol):
            """Whoever connects says what he wants in time, or is cut off."""

            def connection_made(self, transport: Any) -> None:
                super().connection_made(transport)
                self.loop.call_later(HEAD_SECONDS, self.look, None)

            def look(self, before: Any) -> None:
                """Twice in a row without a request under way, and none in between: nobody is there."""
                idle = self.cycle is None or self.cycle.response_complete
                if idle and self.cycle is before:
                    self.transport.close()
                elif not self.transport.is_closing():
                    self.loop.call_later(HEAD_SECONDS, self.look, self.cycle)

        class Quiet(uvicorn.Server):
            @contextmanager
            def capture_signals(self) -> Iterator[None]:  # Ctrl-C belongs to the run
                yield

        listening = bind(self.port)
        self.port = listening.getsockname()[1]
        config = uvicorn.Config(
            make_app(self.book, self.port),
            log_config=None,
            log_level="error",
            access_log=False,
            lifespan="off",
            timeout_graceful_shutdown=2,
            timeout_keep_alive=KEEP_ALIVE,
            server_header=False,
            http=Prompt,
            h11_max_incomplete_event_size=MAX_HEAD,
            limit_concurrency=MAX_CONNECTIONS,
            ws="none",
        )
        self._server = Quiet(config)
        self._serving = asyncio.create_task(self._server.serve(sockets=[listening]))
        while not self._server.started and not self._serving.done():
            await asyncio.sleep(0.01)
        if self._serving.done():
            self._serving.result()

    async def stop(self) -> None:
        """End all episodes, let replies under way be refused, close the socket."""
        try:
            await self.book.close()
        finally:
            if self._serving is not None:
                self._server.should_exit = True
                with suppress(asyncio.CancelledError):
                    await self._serving
                self._serving = None
