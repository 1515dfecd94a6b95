"""The page, served to this machine alone.

Who may look: a random token, once in the printed link and then in a cookie that scripts cannot read and other sites do
not send. The Host header must name this machine, so that a foreign page cannot reach us by renaming itself. Only GET;
nothing is written. Files are a fixed list, runs are numbers: no path ever comes from a request.
"""

from __future__ import annotations

import gzip
import hmac
import json
import secrets
import socket
import sys
import threading
from collections.abc import Callable
from contextlib import suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from importlib.resources import files
from typing import Any
from urllib.parse import parse_qsl, urlsplit

from covey.dashboard.api import Api, BadRequest
from covey.dashboard.runs import Library
from covey.redact import hide_known

HOST = "127.0.0.1"
COOKIE = "covey_dash"
MOST_CONNECTIONS = 64
LONGEST = 4096  # characters of a request's address
SCRIPTS = (
    "core.js",
    "source.js",
    "chart.js",
    "overview.js",
    "runs.js",
    "compare.js",
    "reader.js",
    "episodes.js",
    "rewards.js",
    "app.js",
)
PAGE = {"/": ("index.html", "text/html"), "/style.css": ("style.css", "text/css")} | {
    f"/{name}": (name, "text/javascript") for name in SCRIPTS
}
POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' blob: data:; connect-src 'self'; "
    "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)
MARK = "<!-- scripts -->"
FOLLOW = 1.0  # seconds between two looks at the files


def page_file(name: str, *, linked: bool = True) -> str:
    """A file of the page; index.html with links to its scripts, or the mark where they belong."""
    text = (files("covey.dashboard") / "page" / name).read_text(encoding="utf-8")
    if linked:
        text = text.replace(MARK, "\n".join(f'<script src="{script}"></script>' for script in SCRIPTS))
    return text


class Server(ThreadingHTTPServer):
    """At most so many connections at once: where one more comes, the oldest is cut off. A browser opens it again."""

    daemon_threads = True
    request_queue_size = MOST_CONNECTIONS

    def __init__(self, port: int, api: Api, token: str) -> None:
        super().__init__((HOST, port), Handler)
        self.api, self.token = api, token
        self._open: dict[int, Any] = {}  # the oldest first
        self._guard = threading.Lock()

    def process_request(self, request: Any, client_address: Any) -> None:
        with self._guard:
            self._open[id(request)] = request
            oldest = self._open.pop(next(iter(self._open))) if len(self._open) > MOST_CONNECTIONS else None
        if oldest is not None:
            with suppress(OSError):
                oldest.shutdown(socket.SHUT_RDWR)  # its thread sees the end, and closes it
        super().process_request(request, client_address)

    def shutdown_request(self, request: Any) -> None:
        with self._guard:
            self._open.pop(id(request), None)
        super().shutdown_request(request)

    def handle_error(self, request: Any, client_address: Any) -> None:
        if not isinstance(sys.exception(), ConnectionError):  # a browser that leaves in the middle is no error
            super().handle_error(request, client_address)


class Dash:
    """The server and its follower, each on a thread of its own. Use it as a context."""

    def __init__(self, library: Library, port: int = 0, token: str | None = None) -> None:
        self.library, self.token = library, token or secrets.token_urlsafe(24)
        self._server = Server(port, Api(library), self.token)
        self._ended = threading.Event()
        self._threads = [
            threading.Thread(target=run, daemon=True) for run in (self._server.serve_forever, self._follow)
        ]

    @property
    def port(self) -> int:
        return int(self._server.server_address[1])

    @property
    def link(self) -> str:
        return f"http://{HOST}:{self.port}/?token={self.token}"

    def __enter__(self) -> Dash:
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._ended.set()
        self._server.shutdown()
        self._server.server_close()
        for thread in self._threads:
            thread.join()

    def wait(self) -> None:
        """Until somebody interrupts."""
        self._ended.wait()

    def _follow(self) -> None:
        told = set()
        while not self._ended.is_set():
            behind = False
            try:
                behind = self.library.poll()  # more may lie in a long file: go on at once
            except Exception as error:  # a folder that was deleted meanwhile, a line that is none: the others go on
                if str(error) not in told:
                    told.add(str(error))
                    print(f"covey dash: {type(error).__name__}: {error}", file=sys.stderr)
            self._ended.wait(0.002 if behind else FOLLOW)


class Handler(BaseHTTPRequestHandler):
    """One request: whether it may ask, and what it gets."""

    server: Server
    protocol_version = "HTTP/1.1"
    timeout = 30  # seconds that a silent connection is kept

    def do_GET(self) -> None:
        host = self.headers.get("Host", "")
        if len(self.path) > LONGEST or host.rsplit(":", 1)[0] not in (HOST, "localhost"):
            return self._refuse(403, "this page is for this machine alone")
        if self._from_another_page() or "Transfer-Encoding" in self.headers or self.headers.get("Content-Length"):
            self.close_connection = True  # what may follow is no request of ours
            return self._refuse(403, "this is asked by its own page alone, and without a body")
        address = urlsplit(self.path)
        asked = dict(parse_qsl(address.query))
        if address.path == "/" and "token" in asked:
            return self._enter(asked["token"])
        if not _same(self._cookie(), self.server.token):
            return self._refuse(403, "open the link that covey dash printed: it carries the token")
        if address.path in PAGE:
            name, kind = PAGE[address.path]
            return self._send(page_file(name).encode(), kind)
        if address.path == "/api/csv":
            return self._answer(lambda: self._send(self.server.api.csv(asked).encode(errors="replace"), "text/csv"))
        if address.path.startswith("/api/"):
            name = address.path.removeprefix("/api/")
            return self._answer(lambda: self._send(_json(self.server.api.answer(name, asked)), "application/json"))
        self._refuse(404, "nothing here")

    def _from_another_page(self) -> bool:
        """Another page of this machine counts as the same site, and is sent the cookie: it is turned away. A link
        in it may be followed."""
        own = {f"http://{name}:{self.server.server_port}" for name in (HOST, "localhost")}
        if self.headers.get("Origin", next(iter(own))) not in own:
            return True
        far = self.headers.get("Sec-Fetch-Site", "same-origin") in ("cross-site", "same-site")
        return far and self.headers.get("Sec-Fetch-Mode") != "navigate"

    def _enter(self, given: str) -> None:
        if not _same(given, self.server.token):
            return self._refuse(403, "wrong token: open the link that covey dash printed")
        self.send_response(303)
        self.send_header("Location", "/")
        self.send_header("Set-Cookie", f"{self._cookie_name}={self.server.token}; HttpOnly; SameSite=Strict; Path=/")
        self._finish(b"")

    def _cookie(self) -> str:
        pairs = [pair.strip().partition("=") for pair in self.headers.get("Cookie", "").split(";")]
        return next((value for name, _, value in pairs if name == self._cookie_name), "")

    @property
    def _cookie_name(self) -> str:
        """A machine's cookies are those of all its ports: each page has its own."""
        return f"{COOKIE}_{self.server.server_port}"

    def _answer(self, work: Callable[[], None]) -> None:
        try:
            work()
        except BadRequest as error:
            self._refuse(400, str(error))
        except Exception as error:  # told in the page, which asks again; the connection lives on
            if isinstance(error, ConnectionError):
                raise
            self._refuse(500, f"{type(error).__name__}: {error}")

    def _send(self, body: bytes, kind: str) -> None:
        self.send_response(200)
        self.send_header("Content-Type", f"{kind}; charset=utf-8")
        if len(body) > 100_000 and "gzip" in self.headers.get("Accept-Encoding", ""):
            body = gzip.compress(body, 1)
            self.send_header("Content-Encoding", "gzip")
        self._finish(body)

    def _refuse(self, status: int, why: str) -> None:
        self.send_response(status)
        self.send_header("Content-Type", "text/plain; charset=utf-8")
        self._finish(why.encode(errors="replace"))

    def _finish(self, body: bytes) -> None:
        for name, value in HEADERS.items():
            self.send_header(name, value)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *args: Any) -> None:
        """Requests are not printed: their addresses may carry the token."""


HEADERS = {
    "Content-Security-Policy": POLICY,
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cache-Control": "no-store",
    "Cross-Origin-Resource-Policy": "same-origin",
    "X-Frame-Options": "DENY",
}


def _same(given: str, token: str) -> bool:
    return hmac.compare_digest(given.encode(errors="replace"), token.encode())


def _json(data: Any) -> bytes:
    return hide_known(json.dumps(data, separators=(",", ":"), default=str)).encode()
