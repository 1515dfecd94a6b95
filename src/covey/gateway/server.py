"""The HTTP server of the gateway: FastAPI routes, and uvicorn on the event loop that it is started in.

It listens on 127.0.0.1 only. `LocalOnly` refuses requests under another host name and from web pages of other sites
before their body is read. The size of headers and bodies and the time to send them are limited. A request whose client
disconnects is cancelled. Errors have OpenAI's form.
"""

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
from covey.gateway.openai_api import ChatCompletion, Choice, RequestRefused, read_body, read_request, read_rewards
from covey.gateway.registry import Admin, Caller, OpenEpisode, Registry, public_task, read_task
from covey.imports import install_extra
from covey.redact import hide

HOST = "127.0.0.1"
MAX_BODY = 16 * 2**20  # bytes
MAX_HEADERS = 32 * 2**10  # bytes
MAX_WAIT = 300.0  # seconds that POST /episodes may wait for an attempt
BODY_SECONDS = 60.0  # to receive a whole body
EXTRA_SECONDS = 0.5  # see `_timeout`
SECURITY_HEADERS = (
    (b"x-content-type-options", b"nosniff"),
    (b"cache-control", b"no-store"),
    (b"cross-origin-resource-policy", b"same-origin"),
    (b"content-security-policy", b"default-src 'none'; frame-ancestors 'none'"),
)

Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]
Result = TypeVar("Result")


# -- Routes ------------------------------------------------------------------------------------------------------------


class LocalOnly:
    """Middleware that answers only programs on this machine. A browser page that reaches the server under another host
    name, or from another site, is refused before anything is read."""

    def __init__(self, app: Any, addresses: frozenset[str]) -> None:
        self.app = app
        self.addresses = addresses  # the server's own, as host:port

    async def __call__(self, scope: Message, receive: Receive, send: Send) -> None:
        if scope["type"] == "http":
            send = _with_security_headers(send)
            refusal = self._check(scope)
            if refusal is not None:
                return await _error(refusal)(scope, receive, send)
        await self.app(scope, receive, send)

    def _check(self, scope: Message) -> RequestRefused | None:
        if sum(len(name) + len(value) for name, value in scope["headers"]) > MAX_HEADERS:
            return RequestRefused(431, f"headers may have {MAX_HEADERS // 2**10} KiB")
        headers = {name.decode("latin-1"): value.decode("latin-1") for name, value in scope["headers"]}
        host, origin = headers.get("host", ""), headers.get("origin")
        if host not in self.addresses or (origin is not None and origin.removeprefix("http://") not in self.addresses):
            return RequestRefused(403, "requests from other hosts or pages are not answered")
        return None


def _with_security_headers(send: Send) -> Send:
    """Tell a browser not to render, embed or cache an answer."""

    async def send_with_headers(message: Message) -> None:
        if message["type"] == "http.response.start":
            message["headers"] = [*message.get("headers", ()), *SECURITY_HEADERS]
        await send(message)

    return send_with_headers


def make_app(registry: Registry, port: int) -> Any:
    app = FastAPI(docs_url=None, redoc_url=None, openapi_url=None)
    url = f"http://{HOST}:{port}"

    app.add_exception_handler(RequestRefused, _handle_refused)
    app.add_exception_handler(404, _handle_unknown_route)
    app.add_exception_handler(405, _handle_unknown_route)
    app.add_exception_handler(Exception, _handle_exception)

    @app.get("/v1/models")
    async def models(request: Request) -> Response:
        _caller(registry, request)
        model = {"id": registry.rules.model, "object": "model", "created": 0, "owned_by": "covey"}
        return JSONResponse({"object": "list", "data": [model]})

    @app.post("/v1/chat/completions")
    async def chat(request: Request) -> Response:
        episode = registry.episode_of(_caller(registry, request))
        chat_request = read_request(await _read_json(request))
        choices = await _sample(registry, episode, request, episode.start(chat_request))
        completion = ChatCompletion(
            f"chatcmpl-{secrets.token_hex(12)}", registry.rules.model, choices, chat_request.logprobs
        )
        headers = {"x-covey-episode": episode.id}
        if chat_request.stream:
            events = _as_async(completion.events(with_usage=chat_request.with_usage))
            return StreamingResponse(events, media_type="text/event-stream", headers=headers)
        return JSONResponse(completion.body(), headers=headers)

    @app.post("/episodes")
    async def open_episode(request: Request) -> Response:
        if not isinstance(_caller(registry, request), Admin):
            raise RequestRefused(403, "only the admin's token opens episodes")
        episode = await _open_or_take(registry, await _read_json(request), request)
        return Response(status_code=204) if episode is None else _describe(episode, url, 201)

    @app.get("/episodes/{ident}")
    async def show_episode(ident: str, request: Request) -> Response:
        return _describe(registry.find(_caller(registry, request), ident), url)

    @app.post("/episodes/{ident}/turn")
    async def turn(ident: str, request: Request) -> Response:
        body = await _read_json(request)
        episode = registry.find(_caller(registry, request), ident)
        episode.record_turn(body.get("reward"), body.get("state"))
        return JSONResponse({"id": episode.id, "turn": len(episode.policy.turns) - 1})

    @app.post("/episodes/{ident}/reward")
    async def reward(ident: str, request: Request) -> Response:
        episode = registry.find(_caller(registry, request), ident)
        rewards = read_rewards(await _read_json(request))
        registry.find(_caller(registry, request), ident)  # another request may have closed it in the meantime
        registry.end(episode, by_client=True, rewards=rewards)
        return JSONResponse({"id": episode.id, "closed": True, "rewards": dict(rewards)})

    @app.post("/episodes/{ident}/finish")
    async def finish(ident: str, request: Request) -> Response:
        episode = registry.find(_caller(registry, request), ident)
        registry.end(episode, by_client=True)
        return JSONResponse({"id": episode.id, "closed": True})

    return LocalOnly(app, frozenset(f"{name}:{port}" for name in (HOST, "localhost")))


def _describe(episode: OpenEpisode, url: str, status: int = 200) -> Response:
    body = {
        "id": episode.id,
        "key": episode.key,
        "base_url": f"{url}/v1",
        "url": f"{url}/episodes/{episode.id}",
        "task": public_task(episode.task, episode.rules.hidden),
        "turns": len(episode.policy.turns),
    }
    # Columns of a data set may have any type (dates, decimals): types that JSON lacks are written as text.
    return Response(json.dumps(body, default=str), status, media_type="application/json")


async def _open_or_take(registry: Registry, body: dict[str, Any], request: Request) -> OpenEpisode | None:
    if registry.new_policy is not None:
        return registry.open_new(read_task(body), metadata=body.get("metadata"))
    if not registry.offers:
        raise RequestRefused(409, "this run starts its own programs (agent.command)")
    wait = body.get("wait", 30.0)
    if isinstance(wait, bool) or not isinstance(wait, int | float) or not 0 <= wait <= MAX_WAIT:
        raise RequestRefused(400, f"wait: must be a number of seconds up to {MAX_WAIT:g}", param="wait")
    return await _unless_disconnected(request, asyncio.create_task(registry.take(wait)))


def _error(refusal: RequestRefused) -> JSONResponse:
    return JSONResponse(refusal.body(), refusal.status)


async def _handle_refused(request: Request, error: Exception) -> Response:
    assert isinstance(error, RequestRefused)
    return _error(error)


async def _handle_unknown_route(request: Request, error: Exception) -> Response:
    return _error(RequestRefused(404, f"there is no {request.method} {request.url.path[:200]} here"))


async def _handle_exception(request: Request, error: Exception) -> Response:
    return _error(RequestRefused(500, hide(f"{type(error).__name__}: {error}")))


async def _as_async(events: Iterator[str]) -> AsyncIterator[str]:
    for event in events:
        yield event


def _caller(registry: Registry, request: Request) -> Caller:
    scheme, _, key = request.headers.get("authorization", "").partition(" ")
    if scheme.lower() != "bearer" or not key.strip():
        raise RequestRefused(401, "a key is needed: Authorization: Bearer KEY")
    return registry.caller(key.strip())


@asynccontextmanager
async def _timeout(seconds: float) -> AsyncIterator[None]:
    """Raise TimeoutError after `seconds`. The learner may block the event loop for longer than that while the awaited
    data has already arrived, so the deadline is EXTRA_SECONDS after the loop first notices that time is up."""
    loop = asyncio.get_running_loop()
    async with asyncio.timeout(None) as limit:
        timer = loop.call_later(seconds, lambda: limit.reschedule(loop.time() + EXTRA_SECONDS))
        try:
            yield
        finally:
            timer.cancel()


async def _read_json(request: Request) -> dict[str, Any]:
    """The JSON body, of limited size."""
    raw, complete = bytearray(), False
    try:
        async with _timeout(BODY_SECONDS):
            while not complete:
                message = await request.receive()
                if message["type"] == "http.disconnect":
                    raise _disconnected()
                raw += message.get("body", b"")
                if len(raw) > MAX_BODY:
                    raise RequestRefused(413, f"a request may have {MAX_BODY // 2**20} MiB")
                complete = not message.get("more_body", False)
    except TimeoutError:
        raise RequestRefused(408, f"the request was not complete after {BODY_SECONDS:g} s") from None
    return read_body(raw)


def _disconnected() -> RequestRefused:
    return RequestRefused(499, "the client has disconnected")


async def _sample(
    registry: Registry, episode: OpenEpisode, request: Request, sampling: asyncio.Task[list[Choice]]
) -> list[Choice]:
    try:
        return await _unless_disconnected(request, sampling)
    except RequestRefused:
        raise
    except asyncio.CancelledError:
        if episode.closed.is_set():
            raise RequestRefused(410, "the episode ended before the reply", code="episode_over") from None
        raise
    except Exception as error:
        if registry.new_policy is None or isinstance(
            error, RunFailed
        ):  # the engine's fault: the attempt does not count
            episode.error = error
            registry.end(episode)
        raise RequestRefused(500, hide(f"the engine failed: {type(error).__name__}: {error}")) from error


async def _unless_disconnected(request: Request, work: asyncio.Task[Result]) -> Result:
    """The result of a task, which is cancelled if the client disconnects."""
    disconnect = asyncio.create_task(_wait_for_disconnect(request))
    try:
        await asyncio.wait((work, disconnect), return_when=asyncio.FIRST_COMPLETED)
        if not work.done():
            raise _disconnected()
        return work.result()
    finally:
        work.cancel()
        disconnect.cancel()


async def _wait_for_disconnect(request: Request) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        pass


# -- uvicorn -----------------------------------------------------------------------------------------------------------

HEAD_SECONDS = 60.0  # to send a request; a connection that is idle at two checks in a row is closed
MAX_HEAD = 64 * 1024  # bytes of the request line and the headers
MAX_CONNECTIONS = 4096  # at once; further ones are answered with 503
# Seconds that an idle connection is kept. Clients drop theirs after 5: dropping ours at the same time could lose a
# request that is being sent at that moment.
KEEP_ALIVE = 120


def require_packages() -> None:
    missing = [name for name in ("fastapi", "uvicorn") if importlib.util.find_spec(name) is None]
    if missing:
        raise Absent(f"the gateway needs {' and '.join(missing)}\n  {install_extra('serve')}")


def bind(port: int) -> socket.socket:
    """A socket at the port; 0: any free port."""
    listener = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind((HOST, port))
    except OSError as error:
        listener.close()
        raise Absent(
            f"gateway.port={port} cannot be used ({error.strerror})\n  give another; gateway.port=0 takes a free one"
        ) from error
    return listener


class Server:
    """Serves a registry from `start` to `stop`. While the event loop is busy, requests wait."""

    def __init__(self, registry: Registry, port: int) -> None:
        self.registry = registry
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

        class TimedProtocol(H11Protocol):
            """Closes connections that send no request in time."""

            def connection_made(self, transport: Any) -> None:
                super().connection_made(transport)
                self.loop.call_later(HEAD_SECONDS, self.check_idle, None)

            def check_idle(self, last_cycle: Any) -> None:
                """Close if no request is in progress and none has started since the last check."""
                idle = self.cycle is None or self.cycle.response_complete
                if idle and self.cycle is last_cycle:
                    self.transport.close()
                elif not self.transport.is_closing():
                    self.loop.call_later(HEAD_SECONDS, self.check_idle, self.cycle)

        class UvicornServer(uvicorn.Server):
            @contextmanager
            def capture_signals(self) -> Iterator[None]:  # Ctrl-C belongs to the run
                yield

        listener = bind(self.port)
        self.port = listener.getsockname()[1]
        config = uvicorn.Config(
            make_app(self.registry, self.port),
            log_config=None,
            log_level="error",
            access_log=False,
            lifespan="off",
            timeout_graceful_shutdown=2,
            timeout_keep_alive=KEEP_ALIVE,
            server_header=False,
            http=TimedProtocol,
            h11_max_incomplete_event_size=MAX_HEAD,
            limit_concurrency=MAX_CONNECTIONS,
            ws="none",
        )
        self._server = UvicornServer(config)
        self._serving = asyncio.create_task(self._server.serve(sockets=[listener]))
        while not self._server.started and not self._serving.done():
            await asyncio.sleep(0.01)
        if self._serving.done():
            self._serving.result()

    async def stop(self) -> None:
        """Close all episodes, let pending requests be refused, close the socket."""
        try:
            await self.registry.close()
        finally:
            if self._serving is not None:
                self._server.should_exit = True
                with suppress(asyncio.CancelledError):
                    await self._serving
                self._serving = None
