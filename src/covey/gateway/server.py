"""The routes. What is refused is answered in OpenAI's form of an error."""

from __future__ import annotations

import asyncio
import importlib.util
import json
import secrets
import socket
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, MutableMapping
from contextlib import asynccontextmanager, contextmanager, suppress
from typing import Any, TypeVar

from fastapi import FastAPI, Request, Response
from fastapi.responses import JSONResponse, StreamingResponse

from covey.errors import Absent, RunFailed
from covey.gateway.openai_api import Choice, Completed, Refused, read_body, read_request, read_rewards
from covey.gateway.registry import Admin, Book, Caller, Live, read_task, shown_task
from covey.imports import install_extra
from covey.redact import hide

MAX_BODY = 16 * 2**20  # bytes
MAX_HEADERS = 32 * 2**10  # bytes
MAX_WAIT = 300.0  # seconds that POST /episodes may wait for an attempt

GONE = "the client has gone"
MOMENT = 0.5  # seconds
BODY_SECONDS = 60.0  # for a whole body to come in
HEADERS = (
    (b"x-content-type-options", b"nosniff"),
    (b"cache-control", b"no-store"),
    (b"cross-origin-resource-policy", b"same-origin"),
    (b"content-security-policy", b"default-src 'none'; frame-ancestors 'none'"),
)

Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]
Found = TypeVar("Found")


class Guard:
    """Only programs of this machine: a page in a browser that was led here by another name, or from another site,
    is turned away before anything is read."""

    def __init__(self, app: Any, places: frozenset[str]) -> None:
        self.app = app
        self.places = places  # host:port under which we are

    async def __call__(self, scope: Message, receive: Receive, send: Send) -> None:
        if scope["type"] == "http":
            send = _with_headers(send)
            if sum(len(name) + len(value) for name, value in scope["headers"]) > MAX_HEADERS:
                return await _answer(Refused(431, f"headers may have {MAX_HEADERS // 2**10} KiB"), scope, receive, send)
            headers = {name.decode("latin-1"): value.decode("latin-1") for name, value in scope["headers"]}
            host, origin = headers.get("host", ""), headers.get("origin")
            if host not in self.places or (origin is not None and origin.removeprefix("http://") not in self.places):
                refusal = Refused(403, "requests from other hosts or pages are not answered")
                return await _answer(refusal, scope, receive, send)
        await self.app(scope, receive, send)


async def _answer(refusal: Refused, scope: Message, receive: Receive, send: Send) -> None:
    await JSONResponse(refusal.body(), refusal.status)(scope, receive, send)


def _with_headers(send: Send) -> Send:
    """What a browser that got here all the same should know: this is no page, and not to be kept."""

    async def sent(message: Message) -> None:
        if message["type"] == "http.response.start":
            message["headers"] = [*message.get("headers", ()), *HEADERS]
        await send(message)

    return sent


def make_app(book: Book, port: int) -> Any:
    app = FastAPI(docs_url=None, redoc_url=None, openapi_url=None)
    url = f"http://127.0.0.1:{port}"

    app.add_exception_handler(Refused, _refused)
    app.add_exception_handler(404, _nowhere)
    app.add_exception_handler(405, _nowhere)
    app.add_exception_handler(Exception, _broken)

    @app.get("/v1/models")
    async def models(request: Request) -> Response:
        _caller(book, request)
        model = {"id": book.rules.model, "object": "model", "created": 0, "owned_by": "covey"}
        return JSONResponse({"object": "list", "data": [model]})

    @app.post("/v1/chat/completions")
    async def chat(request: Request) -> Response:
        live = book.playing(_caller(book, request))
        asked = read_request(await _body(request))
        choices = await _sampled(book, live, request, live.start(asked))
        done = Completed(f"chatcmpl-{secrets.token_hex(12)}", book.rules.model, choices, asked.logprobs)
        headers = {"x-covey-episode": live.id}
        if asked.stream:
            events = _one_by_one(done.events(with_usage=asked.with_usage))
            return StreamingResponse(events, media_type="text/event-stream", headers=headers)
        return JSONResponse(done.whole(), headers=headers)

    @app.post("/episodes")
    async def open_episode(request: Request) -> Response:
        if not isinstance(_caller(book, request), Admin):
            raise Refused(403, "only the admin's token opens episodes")
        body = await _body(request)
        live = await _opened(book, body, request)
        return Response(status_code=204) if live is None else described(live, url, 201)

    @app.get("/episodes/{ident}")
    async def look(ident: str, request: Request) -> Response:
        return described(book.episode(_caller(book, request), ident), url)

    @app.post("/episodes/{ident}/reward")
    async def reward(ident: str, request: Request) -> Response:
        live = book.episode(_caller(book, request), ident)
        given = read_rewards(await _body(request))
        book.episode(_caller(book, request), ident)  # another post may have come first while the body was read
        book.end(live, by_client=True, given=given)
        return JSONResponse({"id": live.id, "closed": True, "rewards": dict(given)})

    @app.post("/episodes/{ident}/finish")
    async def finish(ident: str, request: Request) -> Response:
        live = book.episode(_caller(book, request), ident)
        book.end(live, by_client=True)
        return JSONResponse({"id": live.id, "closed": True})

    return Guard(app, frozenset(f"{name}:{port}" for name in ("127.0.0.1", "localhost")))


def described(live: Live, url: str, status: int = 200) -> Response:
    found = {
        "id": live.id,
        "key": live.key,
        "base_url": f"{url}/v1",
        "url": f"{url}/episodes/{live.id}",
        "task": shown_task(live.task, live.rules.hidden),
        "turns": len(live.policy.turns),
    }
    # Data sets bring columns of any type (dates, decimals): what JSON does not know is written as text.
    return Response(json.dumps(found, default=str), status, media_type="application/json")


async def _opened(book: Book, body: dict[str, Any], request: Request) -> Live | None:
    if book.new_policy is not None:
        return book.open_new(read_task(body), metadata=body.get("metadata"))
    if not book.offers:
        raise Refused(409, "this run starts its own programs (agent.command)")
    wait = body.get("wait", 30.0)
    if isinstance(wait, bool) or not isinstance(wait, int | float) or not 0 <= wait <= MAX_WAIT:
        raise Refused(400, f"wait: must be a number of seconds up to {MAX_WAIT:g}", param="wait")
    taking = asyncio.create_task(book.take(wait))
    return await _unless_gone(request, taking)


async def _refused(request: Request, error: Exception) -> Response:
    assert isinstance(error, Refused)
    return JSONResponse(error.body(), error.status)


async def _nowhere(request: Request, error: Exception) -> Response:
    refusal = Refused(404, f"there is no {request.method} {request.url.path[:200]} here")
    return JSONResponse(refusal.body(), refusal.status)


async def _broken(request: Request, error: Exception) -> Response:
    refusal = Refused(500, hide(f"{type(error).__name__}: {error}"))
    return JSONResponse(refusal.body(), refusal.status)


async def _one_by_one(events: Iterator[str]) -> AsyncIterator[str]:
    for event in events:
        yield event


def _caller(book: Book, request: Request) -> Caller:
    scheme, _, key = request.headers.get("authorization", "").partition(" ")
    if scheme.lower() != "bearer" or not key.strip():
        raise Refused(401, "a key is needed: Authorization: Bearer KEY")
    return book.caller(key.strip())


@asynccontextmanager
async def _patience(seconds: float) -> AsyncIterator[None]:
    """TimeoutError after so long. The learner may keep the event loop busy for minutes, while what we wait for is here
    already: then it gets a moment more."""
    loop = asyncio.get_running_loop()
    async with asyncio.timeout(None) as limit:
        timer = loop.call_later(seconds, lambda: limit.reschedule(loop.time() + MOMENT))
        try:
            yield
        finally:
            timer.cancel()


async def _body(request: Request) -> dict[str, Any]:
    """JSON of a bounded size."""
    raw, whole = bytearray(), False
    try:
        async with _patience(BODY_SECONDS):
            while not whole:
                message = await request.receive()
                if message["type"] == "http.disconnect":
                    raise Refused(499, GONE)
                raw += message.get("body", b"")
                if len(raw) > MAX_BODY:
                    raise Refused(413, f"a request may have {MAX_BODY // 2**20} MiB")
                whole = not message.get("more_body", False)
    except TimeoutError:
        raise Refused(408, f"the request was not whole after {BODY_SECONDS:g} s") from None
    return read_body(raw)


async def _sampled(book: Book, live: Live, request: Request, work: asyncio.Task[list[Choice]]) -> list[Choice]:
    try:
        return await _unless_gone(request, work)
    except Refused:
        raise
    except asyncio.CancelledError:
        if live.closed.is_set():
            raise Refused(410, "the episode ended before the reply", code="episode_over") from None
        raise
    except Exception as error:
        if book.new_policy is None or isinstance(error, RunFailed):  # the engine's fault: the attempt does not count
            live.error = error
            book.end(live)
        raise Refused(500, hide(f"the engine failed: {type(error).__name__}: {error}")) from error


async def _unless_gone(request: Request, work: asyncio.Task[Found]) -> Found:
    """The result of some work, which is given up when the client has gone."""
    gone = asyncio.create_task(_gone(request))
    try:
        await asyncio.wait((work, gone), return_when=asyncio.FIRST_COMPLETED)
        if not work.done():
            raise Refused(499, GONE)
        return work.result()
    finally:
        work.cancel()
        gone.cancel()


async def _gone(request: Request) -> None:
    """Until the client hangs up; its request has been read."""
    while (await request.receive())["type"] != "http.disconnect":
        pass


# -- uvicorn on the event loop that it is started in, on this machine's own address only -------------------------------

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
