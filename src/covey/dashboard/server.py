"""The HTTP server of the dashboard, for this machine only.

Access needs a random token: it is part of the printed link, and then a cookie that is HttpOnly and SameSite=Strict. The
Host header must name this machine, which prevents DNS rebinding. Only GET requests are served, and nothing is written.
Files come from a fixed list and runs are numbers, so no path ever comes from a request.
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
MAX_CONNECTIONS = 64
MAX_URL = 4096  # characters
_PARTS = ("core", "source", "chart", "overview", "runs", "compare", "reader", "episodes", "rewards", "app")
SCRIPTS = tuple(f"{part}.js" for part in _PARTS)  # in the order of their dependencies
PAGE = {"/": ("index.html", "text/html"), "/style.css": ("style.css", "text/css")} | {
    f"/{name}": (name, "text/javascript") for name in SCRIPTS
}
POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' blob: data:; connect-src 'self'; "
    "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)
HEADERS = {
    "Content-Security-Policy": POLICY,
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cache-Control": "no-store",
    "Cross-Origin-Resource-Policy": "same-origin",
    "X-Frame-Options": "DENY",
}
SCRIPTS_MARK = "<!-- scripts -->"
FOLLOW_SECONDS = 1.0  # between two polls of the files


def page_file(name: str, *, linked: bool = True) -> str:
    """A file of the page. In index.html, links to the scripts replace SCRIPTS_MARK if `linked`."""
    text = (files("covey.dashboard") / "page" / name).read_text(encoding="utf-8")
    if linked:
        text = text.replace(SCRIPTS_MARK, "\n".join(f'<script src="{script}"></script>' for script in SCRIPTS))
    return text


class Server(ThreadingHTTPServer):
    """Serves at most MAX_CONNECTIONS at once. One more closes the oldest, which a browser opens again."""

    daemon_threads = True
    request_queue_size = MAX_CONNECTIONS

    def __init__(self, port: int, api: Api, token: str) -> None:
        super().__init__((HOST, port), Handler)
        self.api, self.token = api, token
        self._open: dict[int, Any] = {}  # oldest first
        self._lock = threading.Lock()

    def process_request(self, request: Any, client_address: Any) -> None:
        with self._lock:
            self._open[id(request)] = request
            oldest = self._open.pop(next(iter(self._open))) if len(self._open) > MAX_CONNECTIONS else None
        if oldest is not None:
            with suppress(OSError):
                oldest.shutdown(socket.SHUT_RDWR)  # the thread that serves it then closes it
        super().process_request(request, client_address)

    def shutdown_request(self, request: Any) -> None:
        with self._lock:
            self._open.pop(id(request), None)
        super().shutdown_request(request)

    def handle_error(self, request: Any, client_address: Any) -> None:
        if not isinstance(sys.exception(), ConnectionError):  # a browser may close the connection at any time
            super().handle_error(request, client_address)


class Dash:
    """The server and the follower of the files, each on its own thread. A context manager."""

    def __init__(self, library: Library, port: int = 0, token: str | None = None) -> None:
        self.library, self.token = library, token or secrets.token_urlsafe(24)
        self._server = Server(port, Api(library), self.token)
        self._stopped = threading.Event()
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
        self._stopped.set()
        self._server.shutdown()
        self._server.server_close()
        for thread in self._threads:
            thread.join()

    def wait(self) -> None:
        """Wait for Ctrl-C."""
        self._stopped.wait()

    def _follow(self) -> None:
        reported = set()
        while not self._stopped.is_set():
            behind = False
            try:
                behind = self.library.poll()  # a long file is read in chunks: continue at once
            except Exception as error:  # such as a deleted folder or a damaged line: continue with the others
                if str(error) not in reported:
                    reported.add(str(error))
                    print(f"covey dash: {type(error).__name__}: {error}", file=sys.stderr)
            self._stopped.wait(0.002 if behind else FOLLOW_SECONDS)


class Handler(BaseHTTPRequestHandler):
    """Checks that a request is allowed, and answers it."""

    server: Server
    protocol_version = "HTTP/1.1"
    timeout = 30  # seconds until an idle connection is closed

    def do_GET(self) -> None:
        host = self.headers.get("Host", "")
        if len(self.path) > MAX_URL or host.rsplit(":", 1)[0] not in (HOST, "localhost"):
            return self._refuse(403, "this page can only be opened on this machine")
        if self._from_another_page() or "Transfer-Encoding" in self.headers or self.headers.get("Content-Length"):
            self.close_connection = True  # a body may follow
            return self._refuse(403, "only the dashboard's own page may request this, without a body")
        url = urlsplit(self.path)
        params = dict(parse_qsl(url.query))
        if url.path == "/" and "token" in params:
            return self._log_in(params["token"])
        if not _same(self._cookie(), self.server.token):
            return self._refuse(403, "open the link that covey dash printed: it contains the token")
        if url.path in PAGE:
            name, kind = PAGE[url.path]
            return self._send(page_file(name).encode(), kind)
        if url.path == "/api/csv":
            return self._answer(lambda: self._send(self.server.api.csv(params).encode(errors="replace"), "text/csv"))
        if url.path == "/api/image":
            return self._answer(lambda: self._send(*self.server.api.image(params)))
        if url.path.startswith("/api/"):
            name = url.path.removeprefix("/api/")
            return self._answer(lambda: self._send(_json(self.server.api.answer(name, params)), "application/json"))
        self._refuse(404, "not found")

    def _from_another_page(self) -> bool:
        """Whether another page makes the request.

        Browsers send the cookie to other ports of this machine, which count as the same site. Following a link is fine.
        """
        own = {f"http://{name}:{self.server.server_port}" for name in (HOST, "localhost")}
        if self.headers.get("Origin", next(iter(own))) not in own:
            return True
        foreign = self.headers.get("Sec-Fetch-Site", "same-origin") in ("cross-site", "same-site")
        return foreign and self.headers.get("Sec-Fetch-Mode") != "navigate"

    def _log_in(self, token: str) -> None:
        if not _same(token, self.server.token):
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
        """Cookies are shared by all ports of a machine, so each server has its own name."""
        return f"{COOKIE}_{self.server.server_port}"

    def _answer(self, work: Callable[[], None]) -> None:
        try:
            work()
        except BadRequest as error:
            self._refuse(400, str(error))
        except Exception as error:  # the page shows it and retries
            if isinstance(error, ConnectionError):
                raise
            self._refuse(500, f"{type(error).__name__}: {error}")

    def _send(self, body: bytes, kind: str) -> None:
        self.send_response(200)
        self.send_header("Content-Type", kind if kind.startswith("image/") else f"{kind}; charset=utf-8")
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
        """Do not print requests: their URLs may contain the token."""


def _same(value: str, token: str) -> bool:
    return hmac.compare_digest(value.encode(errors="replace"), token.encode())


def _json(data: Any) -> bytes:
    return hide_known(json.dumps(data, separators=(",", ":"), default=str)).encode()
