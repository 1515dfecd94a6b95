"""A page reaches the addresses of its task and nothing else."""

from __future__ import annotations

import asyncio
import http.server
import json
import threading
from collections.abc import Iterator, Sequence
from typing import Any

import pytest

from covey.agents.gui import browser
from covey.agents.gui.agent import GuiAgent
from covey.agents.gui.network import PAGE_URL, Proxy, address_of
from covey.agents.gui.pool import BrowserFailed
from covey.types import Task
from tests.agents.gui.browsing import Listener, ScriptedPolicy, call, gui, needs_browser, page, play

DONE = call("terminate", status="success")


@pytest.fixture
def listener() -> Iterator[Listener]:
    one = Listener()
    yield one
    one.close()


class Site(http.server.BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def do_GET(self) -> None:
        self.server.seen.append(f"GET {self.path}")  # type: ignore[attr-defined]
        if self.path.startswith("/go?"):
            self.send_response(302)
            self.send_header("Location", self.path[4:])
            self.send_header("Content-Length", "0")
            self.end_headers()
            return
        pages = {"/": self.server.page, "/b": "<title>second</title>", "/data": "17"}  # type: ignore[attr-defined]
        self.reply(200 if self.path in pages else 404, pages.get(self.path, ""))

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers["Content-Length"])).decode()
        self.server.seen.append(f"POST {self.path} {body}")  # type: ignore[attr-defined]
        self.reply(200, f"<title>{body}</title>")

    def reply(self, status: int, text: str) -> None:
        self.send_response(status)
        self.send_header("Content-Type", "text/html")
        self.send_header("Content-Length", str(len(text)))
        self.end_headers()
        self.wfile.write(text.encode())

    def log_message(self, *_: Any) -> None:
        pass


@pytest.fixture
def site() -> Iterator[Any]:
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Site)
    server.seen, server.page = [], ""  # type: ignore[attr-defined]
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield server
    server.shutdown()
    server.server_close()


# -- The proxy alone ---------------------------------------------------------------------------------------------------


def ask(proxy: Proxy, *requests: bytes) -> list[bytes]:
    async def run() -> list[bytes]:
        host, port = (await proxy.start()).removeprefix("http://").split(":")
        answers = []
        for request in requests:
            reader, writer = await asyncio.open_connection(host, int(port))
            writer.write(request)
            answers.append(await reader.read())
            writer.close()
        proxy.close()
        return answers

    return asyncio.run(run())


def get(url: str, method: str = "GET") -> bytes:
    return f"{method} {url} HTTP/1.1\r\nHost: x\r\nProxy-Connection: keep-alive\r\n\r\n".encode()


def status(answer: bytes) -> int:
    return int(answer.split(b" ", 2)[1])


def test_addresses() -> None:
    assert address_of("https://A.example/x") == ("a.example", 443) and address_of("ws://h:81") == ("h", 81)
    for other in ("file:///etc/passwd", "about:blank", "chrome://version", "http://", "http://a:no", "x", "data:,x"):
        assert address_of(other) is None


def test_the_page_of_a_task_is_served_and_everything_else_is_refused(listener: Listener) -> None:
    proxy = Proxy("<h1>Hi</h1>", frozenset())
    here = f"127.0.0.1:{listener.port}"
    answers = ask(
        proxy,
        get(PAGE_URL),
        get(f"{PAGE_URL}?q=1"),
        get(f"{PAGE_URL}image.png"),
        get(f"http://{here}/"),
        get(here, "CONNECT"),
        get(f"http://localhost:{listener.port}/"),
        get("http://169.254.169.254/latest/meta-data"),
        b"nonsense\r\n\r\n",
    )
    assert [status(answer) for answer in answers[:-1]] == [200, 200, 404, 403, 403, 403, 403] and answers[-1] == b""
    assert answers[0].endswith(b"<h1>Hi</h1>") and listener.received == []
    assert proxy.refused == {here: 2, f"localhost:{listener.port}": 1, "169.254.169.254:80": 1}


def test_an_allowed_address_is_reached_on_its_own_port_only(site: Any, listener: Listener) -> None:
    site.page = "the page"
    port = site.server_address[1]
    proxy = Proxy(None, frozenset({("127.0.0.1", port)}))
    body = f"POST http://127.0.0.1:{port}/b HTTP/1.1\r\nHost: x\r\nContent-Length: 3\r\n\r\na=1".encode()
    smuggled = get(f"http://127.0.0.1:{port}/") + get(f"http://127.0.0.1:{listener.port}/")
    answers = ask(proxy, get(f"http://127.0.0.1:{port}/"), body, get(f"http://127.0.0.1:{listener.port}/"), smuggled)
    assert [status(answer) for answer in answers] == [200, 200, 403, 200]
    assert site.seen == ["GET /", "POST /b a=1", "GET /"] and listener.received == []


# -- In a browser ------------------------------------------------------------------------------------------------------

CALLS = {
    "fetch": "fetch('http://HERE/').catch(() => {})",
    "fetch without cors": "fetch('http://HERE/', {mode: 'no-cors', method: 'POST', body: 'x'}).catch(() => {})",
    "fetch of a name": "fetch('http://localhost:PORT/').catch(() => {})",
    "https": "fetch('https://HERE/').catch(() => {})",
    "xhr": "{ const x = new XMLHttpRequest(); x.open('GET', 'http://HERE/'); x.onerror = () => {}; x.send() }",
    "image": "{ new Image().src = 'http://HERE/x.png' }",
    "websocket": "new WebSocket('ws://HERE/')",
    "event source": "new EventSource('http://HERE/')",
    "beacon": "navigator.sendBeacon('http://HERE/', 'x')",
    "form": "{ const f = document.createElement('form'); f.method = 'post'; f.action = 'http://HERE/';"
    " document.body.append(f); f.submit() }",
    "location": "location = 'http://HERE/'",
    "meta refresh": "document.head.innerHTML += '<meta http-equiv=refresh content=\"0;url=http://HERE/\">'",
    "window": "window.open('http://HERE/')",
    "frame": "document.body.innerHTML += '<iframe src=\"http://HERE/\"></iframe>'",
    "preconnect": 'document.head.innerHTML += \'<link rel=preconnect href="http://HERE/"><link rel=dns-prefetch'
    ' href="http://HERE/"><link rel=prefetch href="http://HERE/">\'',
    "speculation": "{ const s = document.createElement('script'); s.type = 'speculationrules'; s.textContent ="
    " JSON.stringify({prerender: [{urls: ['http://HERE/']}]}); document.head.append(s) }",
    "worker": "new Worker(URL.createObjectURL(new Blob([\"fetch('http://HERE/').catch(() => {})\"])))",
    "service worker": "navigator.serviceWorker.register('http://HERE/sw.js').catch(() => {})",
    "webrtc": "{ const c = new RTCPeerConnection({iceServers: [{urls: 'stun:HERE'}, {urls: 'turn:HERE?transport=tcp',"
    " username: 'a', credential: 'b'}]}); c.createDataChannel('x');"
    " c.createOffer().then(o => c.setLocalDescription(o)) }",
    "webtransport": "window.WebTransport && new WebTransport('https://HERE/').ready.catch(() => {})",
    "download": "{ const a = document.createElement('a'); a.href = 'http://HERE/x'; a.download = 'x';"
    " document.body.append(a); a.click() }",
    "ping": "{ const a = document.createElement('a'); a.href = '#'; a.ping = 'http://HERE/'; document.body.append(a);"
    " a.click() }",
    "style": "document.head.innerHTML += '<style>@import \"http://HERE/x.css\"; p { background: url(http://HERE/y) }'",
    "file": "{ location = 'file:///etc/passwd' }",
}


FRAMES = {
    "in a frame": "{ const f = document.createElement('iframe'); document.body.append(f);"
    " const RTCPeerConnection = f.contentWindow.RTCPeerConnection; CODE }",
    "in a frame of text": "{ const f = document.createElement('iframe'); f.srcdoc = SCRIPT; document.body.append(f) }",
    "in a sandbox": "{ const f = document.createElement('iframe'); f.sandbox = 'allow-scripts'; f.srcdoc = SCRIPT;"
    " document.body.append(f) }",
    "in a data frame": "{ const f = document.createElement('iframe'); document.body.append(f);"
    " f.src = 'data:text/html,' + encodeURIComponent(SCRIPT) }",
    "in a window": "{ const w = window.open('about:blank'); const RTCPeerConnection = w.RTCPeerConnection; CODE }",
}
SCRIPTED = "'<script>' + TEXT + '<' + '/script>'"
CALLS |= {
    f"webrtc {name}": code.replace("SCRIPT", SCRIPTED)
    .replace("TEXT", json.dumps(CALLS["webrtc"]))
    .replace("CODE", CALLS["webrtc"])
    for name, code in FRAMES.items()
}
for name in ("websocket", "webtransport", "xhr"):
    inside = json.dumps(CALLS[name].replace("window", "self"))
    CALLS[f"{name} in a worker"] = f"new Worker(URL.createObjectURL(new Blob([{inside}])))"


def calling(name: str, listener: Listener, allowed: bool) -> Task:
    code = CALLS[name].replace("HERE", f"127.0.0.1:{listener.port}").replace("PORT", str(listener.port))
    return page(
        f"<body><script>setTimeout(() => {{ try {{ {code} }} catch (e) {{}} }})</script>",
        "true",
        allow=[f"http://127.0.0.1:{listener.port}/"] if allowed else [],
    )


def reached(names: Sequence[str], allowed: bool = False) -> dict[str, list[str]]:
    """What arrived at a server of their own when pages called it in these ways."""
    listeners = {name: Listener() for name in names}

    async def run(agent: GuiAgent) -> None:
        async with agent:
            jobs = [
                agent.run(ScriptedPolicy([call("wait", time=1.5), DONE]), calling(name, listener, allowed))  # type: ignore[arg-type]
                for name, listener in listeners.items()
            ]
            for episode in await asyncio.gather(*jobs):
                assert episode.given == {"reward": 1.0}

    with gui(browsers=2, seconds=30.0) as agent:
        asyncio.run(run(agent))
    for listener in listeners.values():
        listener.close()
    return {name: listener.received for name, listener in listeners.items() if listener.received}


@needs_browser
def test_a_page_that_calls_out_reaches_nothing() -> None:
    assert reached([*CALLS]) == {}


@needs_browser
def test_a_browser_that_lets_webrtc_out_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without the check, the tests above do see packets."""
    monkeypatch.setattr(browser, "ARGUMENTS", tuple(word for word in browser.ARGUMENTS if "webrtc" not in word))
    with pytest.raises(BrowserFailed, match="sends WebRTC packets past the proxy"):
        play(page("<p>"), [DONE])

    async def no_check(_: object) -> None:
        pass

    monkeypatch.setattr(browser, "check_webrtc", no_check)
    names = [name for name in CALLS if name.startswith("webrtc")]
    assert [*reached(names)] == names


@needs_browser
def test_the_same_calls_do_reach_a_server_that_is_allowed() -> None:
    """Otherwise the test above would prove nothing."""
    names = ["fetch without cors", "image", "websocket", "frame", "form", "beacon"]
    assert [*reached(names, allowed=True)] == names


@needs_browser
def test_a_site_is_used_with_its_links_forms_redirects_and_data(site: Any) -> None:
    site.page = (
        "<body><script>fetch('/data').then(r => r.text()).then(t => window.data = t)</script>"
        "<a href='/go?/b' style='position:absolute;left:0;top:0'>a link to the second page</a>"
        "<form method=post action='/form' style='position:absolute;left:0;top:50px'>"
        "<button name=x value=1>Send</button>"
    )
    url = f"http://127.0.0.1:{site.server_address[1]}/"

    played = {
        "data === '17'": call("wait", time=0.3),
        "document.title === 'second'": call("left_click", coordinate=[20, 10]),
        "document.title === 'x=1'": call("left_click", coordinate=[20, 62]),
    }

    async def run(agent: GuiAgent) -> list[Any]:
        async with agent:
            jobs = [
                agent.run(ScriptedPolicy([action, DONE]), page("", success, url=url))  # type: ignore[arg-type]
                for success, action in played.items()
            ]
            return await asyncio.gather(*jobs)

    with gui(browsers=1) as agent:
        assert [episode.given for episode in asyncio.run(run(agent))] == [{"reward": 1.0}] * 3


@needs_browser
def test_a_redirect_to_another_server_is_refused_and_the_refusal_is_shown(site: Any, listener: Listener) -> None:
    site.page = f"<a href='/go?http://127.0.0.1:{listener.port}/'>a link out of the site</a>"
    task = page("", "document.body.textContent.includes('does not belong to this task')")
    task.columns["url"] = f"http://127.0.0.1:{site.server_address[1]}/"  # type: ignore[index]
    task.columns.pop("html", None)  # type: ignore[attr-defined]
    episode, _ = play(task, [call("left_click", coordinate=[20, 15]), DONE])
    assert episode.given == {"reward": 1.0} and listener.received == []


@needs_browser
def test_a_page_cannot_open_files_or_pages_of_the_browser_and_neither_can_keys() -> None:
    links = (
        "file:///etc/passwd",
        "chrome://version",
        "view-source:http://page.test/",
        "data:text/html,x",
        "about:blank",
    )
    body = "".join(
        f"<a href='{url}' style='position:absolute;left:0;top:{30 * n}px'>a link to somewhere</a>"
        for n, url in enumerate((*links, "about:blank"))
    )
    clicks = [call("left_click", coordinate=[20, 30 * n + 8]) for n in range(4)]
    keys = [["ctrl", "o"], ["ctrl", "t"], ["ctrl", "n"], ["ctrl", "u"], ["ctrl", "p"], ["ctrl", "s"], ["ctrl", "w"]]
    pressed = [call("key", keys=one) for one in [*keys, ["f12"], ["alt", "f4"], ["ctrl", "l"]]]
    episode, _ = play(page(body, "location.href === 'http://page.test/'"), [*clicks, *pressed, DONE], max_turns=20)
    assert episode.given == {"reward": 1.0}
    # about:blank may be opened: it is empty.
    blank = page(body, "location.href === 'about:blank' && document.body.innerHTML === ''")
    assert play(blank, [call("left_click", coordinate=[20, 128]), DONE])[0].given == {"reward": 1.0}
