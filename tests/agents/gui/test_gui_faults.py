"""Browsers and pages that crash, hang or misbehave: the other episodes go on, and no process is left."""

from __future__ import annotations

import asyncio
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

from covey.agents.gui.actions import FORMATS
from covey.agents.gui.agent import GuiAgent
from covey.agents.gui.pool import BrowserFailed
from covey.rewards import resolve_rewards
from covey.rollout.collector import Collector, TrainingSource
from covey.rollout.rendering import Renderer
from covey.types import Completion, Sampling, StopReason, Task
from tests.agents.gui.browsing import Listener, ScriptedPolicy, call, chromium_processes, gui, needs_browser, page, play
from tests.vision.tiny import tiny_vlm
from tests.workers.processes import gone

pytestmark = needs_browser
DONE = call("terminate", status="success")
LOOP = "<button style='position:absolute;left:0;top:0;width:100px;height:50px' onclick='while (true) {}'>loop</button>"
CLICK = call("left_click", coordinate=[50, 20])


def chromium(kind: str) -> list[int]:
    """Chromium's processes of a kind (renderer, …); the browser itself has none."""
    found = []
    for pid in chromium_processes():
        words = Path(f"/proc/{pid}/cmdline").read_bytes()
        types = re.findall(rb"--type=([\w-]+)", words)
        if types == [kind.encode()] or (kind == "browser" and not types and b"--remote-debugging-pipe" in words):
            found.append(pid)
    return found


def killing(kind: str) -> Any:
    """A script that kills Chromium's processes of that kind before its first action."""

    async def script(messages: Sequence[Mapping[str, Any]]) -> str:
        for pid in chromium(kind):
            os.kill(pid, signal.SIGKILL)
        await asyncio.sleep(0.2)
        return CLICK

    return script


@pytest.mark.parametrize("kind", ["browser", "renderer"])
def test_a_killed_process_fails_the_episode_and_the_next_one_plays(kind: str) -> None:
    async def run(agent: GuiAgent) -> tuple[str, Any]:
        async with agent:
            with pytest.raises(BrowserFailed) as error:
                await agent.run(ScriptedPolicy(killing(kind)), page("<p>one"))  # type: ignore[arg-type]
            after = await agent.run(ScriptedPolicy([DONE]), page("<p>two"))  # type: ignore[arg-type]
            return error.value.cause, after.given

    with gui(browsers=1) as agent:
        assert asyncio.run(run(agent)) == ("browser", {"reward": 1.0})
    assert chromium_processes() == []


def test_a_page_that_hangs_is_closed_and_its_browser_goes_on() -> None:
    async def run(agent: GuiAgent) -> list[Any]:
        async with agent:
            tasks = [page(LOOP), *(page("<p>fine") for _ in range(3))]
            jobs = [agent.run(ScriptedPolicy([CLICK, DONE]), task) for task in tasks]  # type: ignore[arg-type]
            results = await asyncio.gather(*jobs, return_exceptions=True)
            again = await agent.run(ScriptedPolicy([DONE]), page("<p>fine"))  # type: ignore[arg-type]
            assert agent.pool is not None and agent.pool.replaced == 0
            assert len(chromium("browser")) == 1
            return [*results, again]

    with gui(browsers=1, seconds=2.0) as agent:
        hung, *others = asyncio.run(run(agent))
    assert isinstance(hung, BrowserFailed) and hung.cause == "browser_timeout"
    assert [episode.given for episode in others] == [{"reward": 1.0}] * 4
    assert chromium_processes() == []


@pytest.mark.slow
def test_a_browser_that_is_stopped_is_killed_and_replaced() -> None:
    async def freeze(messages: Sequence[Mapping[str, Any]]) -> str:
        for pid in chromium("browser"):
            os.kill(pid, signal.SIGSTOP)
        return CLICK

    async def run(agent: GuiAgent) -> tuple[str, Any, int]:
        async with agent:
            with pytest.raises(BrowserFailed) as error:
                await agent.run(ScriptedPolicy(freeze), page("<p>one"))  # type: ignore[arg-type]
            await asyncio.sleep(6)  # the host gives up closing the page, and exits
            after = await agent.run(ScriptedPolicy([DONE]), page("<p>two"))  # type: ignore[arg-type]
            assert agent.pool is not None
            return error.value.cause, after.given, agent.pool.replaced

    with gui(browsers=1, seconds=1.0) as agent:
        cause, given, _ = asyncio.run(run(agent))
    assert cause == "browser_timeout" and given == {"reward": 1.0} and chromium_processes() == []


@pytest.mark.parametrize(
    ("body", "part"),
    [
        ("<script>setTimeout(() => { for (let i = 0; i < 30; i++) alert(i) })</script>", "the alert"),
        pytest.param("<script>location.reload()</script>", "", marks=pytest.mark.slow),
        pytest.param("<meta http-equiv=refresh content=0>", "", marks=pytest.mark.slow),
        ("<script>for (let i = 0; i < 20; i++) window.open('/?' + i)</script>", ""),
        ("<script>setTimeout(() => window.close())</script>", ""),
        (
            "<a id=a href='data:application/zip,x' download=x></a><script>setTimeout(() => a.click())</script>",
            "download",
        ),
        pytest.param(
            "<script>for (let i = 0; i < 100000; i++) document.body.append(document.createElement('p'))</script>",
            "",
            marks=pytest.mark.slow,
        ),
        ("<script>navigator.geolocation.getCurrentPosition(() => {}); Notification.requestPermission()</script>", ""),
        ("<script>window.onbeforeunload = () => 'stay'; setTimeout(() => location = '/?2', 50)</script>", ""),
    ],
    ids=["alerts", "reload", "refresh", "windows", "close", "download", "huge", "permissions", "leaving"],
)
def test_an_unruly_page_ends_its_episode_or_is_played(body: str, part: str) -> None:
    """Whatever the page does, the episode ends with a score or with a failure of its own."""
    try:
        episode, policy = play(page(f"<body>{body}"), [call("wait", time=0.5), CLICK, DONE], seconds=15.0)
    except BrowserFailed as error:
        assert error.cause in ("browser", "browser_timeout") and not part
    else:
        assert episode.given == {"reward": 1.0} and part in str(policy.asked[-1])
    assert chromium_processes() == []


def test_an_endless_redirect_cannot_be_opened() -> None:
    import http.server
    import threading

    class Loop(http.server.BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(302)
            self.send_header("Location", "/" + "x" * (len(self.path) % 50))
            self.end_headers()

        def log_message(self, *_: Any) -> None:
            pass

    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Loop) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        with pytest.raises(BrowserFailed, match="REDIRECTS") as error:
            play(page("", url=f"http://127.0.0.1:{server.server_address[1]}/"), [DONE])
        server.shutdown()
    assert error.value.cause == "page"


def test_a_browser_that_cannot_start_is_a_failure_with_its_message(tmp_path: Path) -> None:
    fake = tmp_path / "chromium"
    fake.write_text("#!/bin/sh\necho no display here >&2\nexit 3\n")
    fake.chmod(0o755)
    with pytest.raises(BrowserFailed, match="does not start") as error:
        play(page("<p>"), [DONE], executable=str(fake))
    assert error.value.cause == "browser"


# -- A step of training ------------------------------------------------------------------------------------------------


class Replies:
    """An engine that always gives the same reply."""

    def __init__(self, tokenizer: Any, text: str) -> None:
        self.ids = (*tokenizer(text, add_special_tokens=False)["input_ids"], tokenizer.eos_token_id)

    async def generate(self, token_ids: Sequence[int], sampling: Sampling, *_: Any) -> Completion:
        await asyncio.sleep(0)
        return Completion(self.ids, (-0.5,) * len(self.ids), (0,) * len(self.ids), StopReason.EOS)


@pytest.mark.slow
def test_64_episodes_with_crashes_and_hangs_are_counted_right(listener: Listener) -> None:
    """16 tasks of 4 attempts: 2 tasks hang, 2 crash their page, 12 are played; no page reaches the network."""
    crash = "<button style='position:absolute;left:0;top:0;width:100px;height:50px' onclick='CRASH'>x</button>"
    call_out = f"<script>fetch('http://127.0.0.1:{listener.port}/').catch(() => {{}})</script>"
    bodies = [LOOP] * 2 + [crash.replace("CRASH", 'location = "chrome://crash"')] * 2 + ["<p>fine"] * 12
    tasks = [
        Task(str(n), page("").messages, columns={"html": call_out + body, "success": "true", "viewport": [128, 96]})
        for n, body in enumerate(bodies)
    ]
    _, vision = tiny_vlm("qwen2_5_vl")
    text = "Action: click(start_box='(10,10)')"
    assert vision.tokenizer.decode(vision.tokenizer(text, add_special_tokens=False)["input_ids"]) == text

    async def run(agent: GuiAgent) -> Any:
        async with agent:
            collector = Collector(
                Replies(vision.tokenizer, text),  # type: ignore[arg-type]
                Renderer(vision.tokenizer, vision=vision),
                agent,
                resolve_rewards("given", None, {}),
                seed=1,
                max_seconds=100.0,
            )
            source = TrainingSource(
                collector, lambda step: tasks, attempts=4, sampling=Sampling(max_tokens=100), min_group_size=2
            )
            return await source.next()

    with gui(browsers=2, pages=8, seconds=3.0, max_turns=2, format=FORMATS["thought_action"]) as agent:
        collected = asyncio.run(run(agent))
    assert collected.attempts == 64
    assert collected.failures == {"browser_timeout": 8} and len(collected.groups) == 14
    assert {episode.rewards["given"] for group in collected.groups for episode in group.episodes} == {1.0}
    assert listener.received == [] and chromium_processes() == []


@pytest.fixture
def listener() -> Any:
    one = Listener()
    yield one
    one.close()


PROGRAM = """
import asyncio, sys
from tests.agents.gui.browsing import ScriptedPolicy, gui, page

async def script(messages):
    print("ready", flush=True)
    await asyncio.sleep(100)

async def run(agent):
    async with agent:
        await agent.run(ScriptedPolicy(script), page("<p>"))

with gui() as agent:
    asyncio.run(run(agent))
"""


@pytest.mark.parametrize("how", [signal.SIGINT, signal.SIGKILL])
def test_no_process_is_left_after_ctrl_c_or_a_kill(how: signal.Signals) -> None:
    root = Path(__file__).parents[3]
    started = subprocess.Popen(
        [sys.executable, "-c", PROGRAM],
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        cwd=root,
        env={
            **os.environ,
            "TMPDIR": tempfile.gettempdir(),
            "PYTHONPATH": f"{root / 'src'}:{root}:{os.environ.get('PYTHONPATH', '')}",
        },
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.default_int_handler),
    )
    assert started.stdout is not None and started.stdout.readline() == b"ready\n"
    browsers = chromium_processes()
    assert browsers
    os.kill(started.pid, how)
    started.wait(timeout=30)
    assert gone(*browsers, seconds=10)
    time.sleep(0.1)
    assert chromium_processes() == []
