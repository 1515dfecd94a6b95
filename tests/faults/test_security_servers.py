"""Unauthorised access to both servers, over real sockets."""

from __future__ import annotations

import inspect
import json
import shutil
import socket
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from covey.dashboard import server as dash_server
from covey.dashboard.runs import Library
from covey.dashboard.server import Dash
from covey.dashboard.static_page import html_report, markdown_report, read_all
from covey.gateway import server as gateway_server
from tests.conftest import ROOT
from tests.dashboard.synthetic import episode, healthy, write_episodes, write_run
from tests.gateway.running_gateway import USER, RunningGateway, ScriptedEngine, serve_engine


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("runs") / "a"
    write_run(folder, *healthy(3), started="2026-01-01")
    write_episodes(folder, [episode(0, 0, reward=1.0)])
    return folder


@pytest.fixture(scope="module")
def dash(run: Path) -> Iterator[Dash]:
    library = Library([run])
    read_all(library)
    with Dash(library) as found:
        yield found


@pytest.fixture(scope="module")
def gateway() -> Iterator[RunningGateway]:
    with serve_engine(ScriptedEngine(lambda prompt, _: "hello")) as made:
        yield made


def raw(port: int, content: bytes, *, seconds: float = 20.0) -> bytes:
    """The response to these bytes, until the server closes the connection or nothing arrives for a while."""
    with socket.create_connection(("127.0.0.1", port), 10) as line:
        line.settimeout(seconds)
        found = b""
        try:
            line.sendall(content)
            while part := line.recv(65536):
                found += part
        except (ConnectionError, TimeoutError):
            pass
        return found


def status(answer: bytes) -> int:
    return int(answer.split(b" ", 2)[1]) if answer.startswith(b"HTTP/1.1 ") else 0


def ask_dash(dash: Dash, path: str, *headers: str, host: str | None = None, verb: str = "GET") -> bytes:
    lines = [f"{verb} {path} HTTP/1.1", f"Host: {host or f'127.0.0.1:{dash.port}'}", "Connection: close"]
    lines += [f"Cookie: covey_dash_{dash.port}={dash.token}", *headers]
    return raw(dash.port, "\r\n".join([*lines, "", ""]).encode())


def ask_gateway(
    gateway: RunningGateway, *headers: str, body: bytes = b"", path: str = "/v1/models", verb: str = "GET"
) -> bytes:
    lines = [f"{verb} {path} HTTP/1.1", f"Host: 127.0.0.1:{gateway.server.port}", "Connection: close"]
    lines += [f"Authorization: Bearer {gateway.registry.token}", *headers]
    return raw(gateway.server.port, "\r\n".join([*lines, "", ""]).encode() + body)


def test_both_listen_on_the_loopback_alone(dash: Dash, gateway: RunningGateway) -> None:
    rows = Path("/proc/net/tcp").read_text().splitlines()[1:]
    listening = {row.split()[1] for row in rows if row.split()[3] == "0A"}
    for port in (dash.port, gateway.server.port):
        assert [place for place in listening if place.endswith(f":{port:04X}")] == [f"0100007F:{port:04X}"]
    rows = Path("/proc/net/tcp6").read_text().splitlines()[1:] if Path("/proc/net/tcp6").exists() else []
    assert not [row for row in rows if row.split()[1].endswith(f":{dash.port:04X}") and row.split()[3] == "0A"]


def test_tokens_are_long_random_and_compared_in_constant_time(dash: Dash, gateway: RunningGateway) -> None:
    assert len(dash.token) >= 32 and len(gateway.registry.token) >= 32 and dash.token != gateway.registry.token
    from covey.gateway import registry

    for module in (dash_server, registry):
        text = inspect.getsource(module)
        assert "compare_digest" in text
        for sign in ("== token", "== self.token", "token ==", "self.token =="):
            output = [line for line in text.splitlines() if sign in line and "environ" not in line]
            assert not output, output


def test_no_server_prints_a_token_or_an_address(
    dash: Dash, gateway: RunningGateway, capfd: pytest.CaptureFixture[str]
) -> None:
    assert status(ask_dash(dash, f"/?token={dash.token}")) == 303
    assert status(ask_dash(dash, f"/nowhere?token={dash.token}")) == 404
    assert status(ask_gateway(gateway, path=f"/v1/nowhere?key={gateway.registry.token}")) == 404
    fragments = "".join(capfd.readouterr())
    assert dash.token not in fragments and gateway.registry.token not in fragments and "nowhere" not in fragments


# -- who asks ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("host", ["evil.example", "evil.example:{port}", "127.0.0.1.evil.example:{port}", "", "[::1]"])
def test_dns_rebinding(dash: Dash, gateway: RunningGateway, host: str) -> None:
    assert status(ask_dash(dash, "/api/runs", host=host.format(port=dash.port) or " ")) == 403
    lines = f"GET /v1/models HTTP/1.1\r\nHost: {host.format(port=gateway.server.port)}\r\nConnection: close\r\n"
    assert (
        status(raw(gateway.server.port, f"{lines}Authorization: Bearer {gateway.registry.token}\r\n\r\n".encode()))
        == 403
    )


@pytest.mark.parametrize(
    "headers",
    [
        ("Origin: https://evil.example",), ("Origin: null",), ("Origin: http://127.0.0.1:1",),
        ("Sec-Fetch-Site: cross-site", "Sec-Fetch-Mode: cors"),
        ("Sec-Fetch-Site: same-site", "Sec-Fetch-Mode: no-cors"),
    ],
)  # fmt: skip
def test_other_origins_get_nothing_from_the_dashboard(dash: Dash, headers: tuple[str, ...]) -> None:
    assert status(ask_dash(dash, "/api/runs", *headers)) == 403


def test_its_own_page_and_links_are_answered(dash: Dash) -> None:
    own = f"Origin: http://127.0.0.1:{dash.port}"
    assert status(ask_dash(dash, "/api/runs", own, "Sec-Fetch-Site: same-origin", "Sec-Fetch-Mode: cors")) == 200
    assert status(ask_dash(dash, "/", "Sec-Fetch-Site: cross-site", "Sec-Fetch-Mode: navigate")) == 200
    assert status(ask_dash(dash, "/api/runs")) == 200


@pytest.mark.parametrize("origin", ["https://evil.example", "null", "http://localhost:1", "https://127.0.0.1:{port}"])
def test_other_origins_get_nothing_from_the_gateway(gateway: RunningGateway, origin: str) -> None:
    """A preflight request (OPTIONS) does not allow them either."""
    origin = f"Origin: {origin.format(port=gateway.server.port)}"
    for verb in ("GET", "OPTIONS"):
        answer = ask_gateway(gateway, origin, "Access-Control-Request-Method: POST", verb=verb)
        assert status(answer) == 403 and b"access-control-allow" not in answer.lower()


def test_responses_have_security_headers(dash: Dash, gateway: RunningGateway) -> None:
    wanted = {"x-content-type-options": "nosniff", "cache-control": "no-store"}
    for answer in (ask_gateway(gateway), ask_gateway(gateway, path="/x"), ask_dash(dash, "/"), ask_dash(dash, "/x")):
        head = answer.partition(b"\r\n\r\n")[0].decode().lower()
        found = dict(line.split(": ", 1) for line in head.split("\r\n")[1:])
        assert wanted.items() <= found.items() and "default-src 'none'" in found["content-security-policy"]
        assert found["cross-origin-resource-policy"] == "same-origin" and "uvicorn" not in head


# -- where to ----------------------------------------------------------------------------------------------------------

WAYS = [
    "/../../../../etc/passwd", "/..%2f..%2f..%2fetc%2fpasswd", "/%2e%2e/%2e%2e/etc/passwd", "/..%252f..%252fetc/passwd",
    "/....//....//etc/passwd", "/..\\..\\etc\\passwd", "//127.0.0.1/etc/passwd", "/style.css%00.html", "/a/run.json",
    "/style.css/../../runs.py", "/.%2e/server.py", "/api/../style.css", "/%5c..%5cetc", "file:///etc/passwd",
    "/api/run?run=../../etc/passwd", "/api/episode?run=0&id=..%2f..%2f1", "/api/csv?run=/etc/passwd",
]  # fmt: skip


@pytest.mark.parametrize("way", WAYS)
def test_no_path_leads_out_of_the_folder(dash: Dash, gateway: RunningGateway, way: str) -> None:
    for answer in (ask_dash(dash, way), ask_gateway(gateway, path=way)):
        assert 400 <= status(answer) < 500 and b"root:" not in answer, answer[:200]
    for ident in ("..", "%2e%2e", "..%2f..%2fetc%2fpasswd", "a/../../b"):
        assert status(ask_gateway(gateway, path=f"/episodes/{ident}")) in (403, 404)


@pytest.mark.parametrize("name", ["config.yaml", "metrics.jsonl", "episodes.jsonl", ".hydra/overrides.yaml"])
def test_links_in_a_run_are_not_followed(run: Path, tmp_path: Path, name: str) -> None:
    """The files of a run from someone else may be links to private files, which must not get into a report."""
    copy = Path(shutil.copytree(run, tmp_path / "sent"))
    secret = tmp_path / "secret"
    record = json.loads((run / "episodes.jsonl").read_text().splitlines()[0])
    secret.write_text(
        {
            "config.yaml": "apiVersion: quail-secret-1\nquail-secret: quail-secret-2\n",
            "metrics.jsonl": json.dumps({"kind": "step", "step": 0, "metrics": {"quail-secret": 1.0}}) + "\n",
            "episodes.jsonl": json.dumps(record | {"task_id": "quail-secret"}) + "\n",
            ".hydra/overrides.yaml": "- quail-secret\n",
        }[name]
    )
    (copy / name).parent.mkdir(exist_ok=True)
    (copy / name).unlink(missing_ok=True)
    shutil.copy(secret, copy / name)
    assert b"quail-secret" in everything(copy), "as a file of the run it is shown"
    (copy / name).unlink()
    (copy / name).symlink_to(secret)
    assert b"quail-secret" not in everything(copy)


def everything(folder: Path) -> bytes:
    library = Library([folder])
    read_all(library)
    from covey.dashboard.api import Api

    api = Api(library)
    asked = [("run", {"run": "0"}), ("episodes", {"run": "0"}), ("compare", {"runs": "0"})]
    shown = json.dumps([api.answer(name, query) for name, query in asked]) + api.csv({"run": "0"})
    return (shown + html_report([folder], episodes=4) + markdown_report(folder)).encode()


def test_a_run_json_that_is_a_link_is_ignored(run: Path, tmp_path: Path) -> None:
    for name in ("good", "bad"):
        shutil.copytree(run, tmp_path / "sent" / name)
    shutil.move(tmp_path / "sent" / "bad" / "run.json", tmp_path / "run.json")
    (tmp_path / "sent" / "bad" / "run.json").symlink_to(tmp_path / "run.json")
    assert [found.name for found in Library([tmp_path / "sent"]).runs] == ["good"]


def test_huge_settings_are_not_read(run: Path, tmp_path: Path) -> None:
    copy = Path(shutil.copytree(run, tmp_path / "sent"))
    lines = ["a0: &a0 [x, x, x, x, x, x, x, x, x, x]"]
    lines += [f"a{n}: &a{n} [{', '.join([f'*a{n - 1}'] * 10)}]" for n in range(1, 12)]
    (copy / "config.yaml").write_text("\n".join(lines) + "\n")
    assert Library([copy]).runs[0].config == {}


# -- how much, how slow, how many --------------------------------------------------------------------------------------


def test_bodies_without_a_length_are_bounded_too(gateway: RunningGateway, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gateway_server, "MAX_BODY", 1000)
    chunks = b"".join(b"190\r\n" + b"x" * 400 + b"\r\n" for _ in range(5)) + b"0\r\n\r\n"
    chunked = ("Transfer-Encoding: chunked",)
    answer = ask_gateway(gateway, *chunked, body=chunks, path="/v1/chat/completions", verb="POST")
    assert status(answer) == 413
    fragments = ask_gateway(gateway, "Content-Length: 999999999", body=b"x" * 2000, path="/episodes", verb="POST")
    assert status(fragments) == 413


def test_without_a_key_no_body_is_read(gateway: RunningGateway) -> None:
    started = time.monotonic()
    lines = f"POST /v1/chat/completions HTTP/1.1\r\nHost: 127.0.0.1:{gateway.server.port}\r\n"
    answer = raw(gateway.server.port, f"{lines}Content-Length: 1000000\r\nConnection: close\r\n\r\n".encode())
    assert status(answer) == 401 and time.monotonic() - started < 15


@pytest.mark.parametrize("size", [70_000, 2_000_000])
def test_headers_are_bounded(dash: Dash, gateway: RunningGateway, size: int) -> None:
    big = "X-Big: " + "y" * size
    assert status(ask_gateway(gateway, big)) in (0, 400, 431)
    assert status(ask_dash(dash, "/api/runs", big)) in (0, 400, 431)
    many = [f"X-{n}: y" for n in range(5000)]
    assert status(ask_dash(dash, "/api/runs", *many)) in (0, 400, 431)
    assert status(ask_dash(dash, "/api/runs?x=" + "y" * size)) in (0, 403, 414)
    assert status(ask_dash(dash, "/api/runs")) == 200 and status(ask_gateway(gateway)) == 200, "others are served"


def test_the_dashboard_accepts_no_bodies(dash: Dash) -> None:
    second = f"GET /api/runs HTTP/1.1\r\nHost: 127.0.0.1:{dash.port}\r\n\r\n".encode()
    for header in (f"Content-Length: {len(second)}", "Transfer-Encoding: chunked"):
        first = f"GET / HTTP/1.1\r\nHost: 127.0.0.1:{dash.port}\r\n{header}\r\n\r\n".encode()
        answer = raw(dash.port, first + second)
        assert status(answer) == 403 and answer.count(b"HTTP/1.1") == 1, "what was smuggled in is not answered"


@pytest.mark.parametrize("begun", [b"", b"GET /v1/models HTTP/1.1\r\nHost: 12", b"GET / HTTP/1.1\r\n"])
def test_silent_clients_are_disconnected(monkeypatch: pytest.MonkeyPatch, begun: bytes) -> None:
    monkeypatch.setattr(gateway_server, "HEAD_SECONDS", 0.2)
    with serve_engine(ScriptedEngine(lambda prompt, _: "hello")) as gateway:
        started = time.monotonic()
        raw(gateway.server.port, begun, seconds=20)
        assert time.monotonic() - started < 15, "the server hung up, not we"
        reply = gateway.post("/v1/chat/completions", json={"model": "tiny", "messages": [USER]})
        assert reply.status_code == 200, "who asks is answered"


def test_an_idle_keep_alive_connection_is_closed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gateway_server, "HEAD_SECONDS", 0.2)
    with serve_engine(ScriptedEngine(lambda prompt, _: "hello")) as gateway:
        whole = f"GET /v1/models HTTP/1.1\r\nHost: 127.0.0.1:{gateway.server.port}\r\n\r\n".encode()
        started = time.monotonic()
        answer = raw(gateway.server.port, whole + whole[:20])
        assert status(answer) == 401 and time.monotonic() - started < 15


def test_a_missing_body_times_out(gateway: RunningGateway, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gateway_server, "BODY_SECONDS", 0.2)
    answer = ask_gateway(gateway, "Content-Length: 100", body=b"{", path="/episodes", verb="POST")
    assert status(answer) == 408


def test_a_busy_event_loop_does_not_time_out_clients(monkeypatch: pytest.MonkeyPatch) -> None:
    """The learner blocks the loop for longer than a client's time limit, while the body waits to be read."""
    monkeypatch.setattr(gateway_server, "BODY_SECONDS", 0.3)
    monkeypatch.setattr(gateway_server, "HEAD_SECONDS", 0.3)
    with serve_engine(ScriptedEngine(lambda prompt, _: "hello")) as gateway:
        head = f"POST /episodes HTTP/1.1\r\nHost: 127.0.0.1:{gateway.server.port}\r\nConnection: close\r\n"
        head += f"Authorization: Bearer {gateway.registry.token}\r\nContent-Length: 2\r\n\r\n"
        assert gateway.server._serving is not None
        loop = gateway.server._serving.get_loop()
        for first, rest in ((head, "{}"), (head[:30], head[30:] + "{}")):
            with socket.create_connection(("127.0.0.1", gateway.server.port), 10) as line:
                line.sendall(first.encode())
                time.sleep(0.1)
                loop.call_soon_threadsafe(time.sleep, 1.0)
                line.sendall(rest.encode())
                line.settimeout(20)
                assert line.recv(12) == b"HTTP/1.1 201"


def test_silent_connections_do_not_block_the_dashboard(dash: Dash) -> None:
    lines = [socket.create_connection(("127.0.0.1", dash.port), 10) for _ in range(dash_server.MAX_CONNECTIONS + 20)]
    try:
        assert status(ask_dash(dash, "/api/runs")) == 200
        lines[0].settimeout(10)
        assert lines[0].recv(1) == b"", "the oldest was cut off"
        assert len(dash._server._open) <= dash_server.MAX_CONNECTIONS
    finally:
        for line in lines:
            line.close()
    handler: Any = dash._server.RequestHandlerClass
    assert 0 < handler.timeout <= 60


def test_too_many_connections_to_the_gateway_are_told_to_retry(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gateway_server, "MAX_CONNECTIONS", 10)
    with serve_engine(ScriptedEngine(lambda prompt, _: "hello")) as gateway:
        lines = [socket.create_connection(("127.0.0.1", gateway.server.port), 10) for _ in range(12)]
        time.sleep(0.3)
        assert status(ask_gateway(gateway)) == 503
        for line in lines:
            line.close()
        for _ in range(100):
            if status(answer := ask_gateway(gateway)) == 200:
                break
            time.sleep(0.05)
        assert status(answer) == 200


def test_no_server_in_the_source_listens_on_all_interfaces() -> None:
    for path in (ROOT / "src" / "covey").rglob("*.py"):
        text = path.read_text()
        assert "0.0.0.0" not in text and 'host="::"' not in text and "bind(('', " not in text, path


def test_model_output_cannot_inject_html(run: Path) -> None:
    copy = run.parent / "words"
    write_run(copy, *healthy(2), started="2026-01-02")
    evil = "</script><script>alert(1)</script><img src=x onerror=alert(1)>"
    write_episodes(copy, [episode(0, 0, reward=1.0) | {"messages": [{"role": "user", "content": evil}]}])
    page = html_report([copy], episodes=2)
    assert "<script>alert(1)" not in page and "<img src=x" not in page
