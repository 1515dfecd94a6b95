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
import sys
import threading
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from importlib.resources import files
from typing import Any
from urllib.parse import parse_qsl, urlsplit

from covey.dash.api import Api, BadRequest
from covey.dash.runs import Library

HOST = "127.0.0.1"
COOKIE = "covey_dash"
LONGEST = 4096  # characters of a request's address
SCRIPTS = (
    "core.js",
    "source.js",
    "chart.js",
    "overview.js",
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
    text = (files("covey.dash") / "page" / name).read_text(encoding="utf-8")
    if linked:
        text = text.replace(MARK, "\n".join(f'<script src="{script}"></script>' for script in SCRIPTS))
    return text


class Server(ThreadingHTTPServer):
    daemon_threads = True

    def handle_error(self, request: Any, client_address: Any) -> None:
        if not isinstance(sys.exception(), ConnectionError):  # a browser that leaves in the middle is no error
            super().handle_error(request, client_address)


class Dash:
    """The server and its follower, each on a thread of its own. Use it as a context."""

    def __init__(self, library: Library, port: int = 0, token: str | None = None) -> None:
        self.library, self.token = library, token or secrets.token_urlsafe(24)
        self._server = Server((HOST, port), handler(Api(library), self.token))
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
        while not self._ended.is_set():
            behind = self.library.poll()  # more may lie in a long file: go on at once
            self._ended.wait(0.002 if behind else FOLLOW)


def handler(api: Api, token: str) -> type[BaseHTTPRequestHandler]:
    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"
        timeout = 30  # seconds that a silent connection is kept

        def do_GET(self) -> None:
            host = self.headers.get("Host", "")
            if len(self.path) > LONGEST or host.rsplit(":", 1)[0] not in (HOST, "localhost"):
                return self._refuse(403, "this page is for this machine alone")
            address = urlsplit(self.path)
            asked = dict(parse_qsl(address.query))
            if address.path == "/" and "token" in asked:
                return self._enter(asked["token"])
            if not _same(self._cookie(), token):
                return self._refuse(403, "open the link that covey dash printed: it carries the token")
            if address.path in PAGE:
                name, kind = PAGE[address.path]
                return self._send(page_file(name).encode(), kind)
            if address.path == "/api/csv":
                return self._answer(lambda: self._send(api.csv(asked).encode(errors="replace"), "text/csv"))
            if address.path.startswith("/api/"):
                name = address.path.removeprefix("/api/")
                return self._answer(lambda: self._send(_json(api.answer(name, asked)), "application/json"))
            self._refuse(404, "nothing here")

        def _enter(self, given: str) -> None:
            if not _same(given, token):
                return self._refuse(403, "wrong token: open the link that covey dash printed")
            self.send_response(303)
            self.send_header("Location", "/")
            self.send_header("Set-Cookie", f"{self._cookie_name}={token}; HttpOnly; SameSite=Strict; Path=/")
            self._finish(b"")

        def _cookie(self) -> str:
            pairs = [pair.strip().partition("=") for pair in self.headers.get("Cookie", "").split(";")]
            return next((value for name, _, value in pairs if name == self._cookie_name), "")

        @property
        def _cookie_name(self) -> str:
            """A machine's cookies are those of all its ports: each page has its own."""
            return f"{COOKIE}_{self.server.server_port}"  # type: ignore[attr-defined]

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

    return Handler


HEADERS = {
    "Content-Security-Policy": POLICY,
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cache-Control": "no-store",
    "Cross-Origin-Resource-Policy": "same-origin",
}


def _same(given: str, token: str) -> bool:
    return hmac.compare_digest(given.encode(errors="replace"), token.encode())


def _json(data: Any) -> bytes:
    return json.dumps(data, separators=(",", ":"), default=str).encode()
