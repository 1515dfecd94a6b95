"""Episodes of agent=gui."""

from __future__ import annotations

import asyncio
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from covey.agents.gui.agent import make_gui, page_task, require_browser
from covey.agents.gui.pool import BrowserFailed
from covey.config.schema import AgentConfig
from covey.errors import Absent, InputError
from covey.images import image_of, images_of, load, picture
from covey.types import Episode, StopReason, Task
from tests.agents.gui.browsing import ScriptedPolicy, call, chromium_processes, gui, needs_browser, page, play

BUTTON = (
    "<button onclick='document.title = \"done\"' style='position: absolute; left: 100px; top: 100px; width: 80px;"
    " height: 40px'>Press</button>"
)
PRESSED = "document.title === 'done'"


# -- Tasks, without a browser ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("columns", "part"),
    [
        ({"html": "<p>", "url": "http://a/", "success": "true"}, "not by both"),
        ({"url": "file:///etc/passwd", "success": "true"}, "is not an address"),
        ({"url": "javascript:alert(1)", "success": "true"}, "is not an address"),
        ({"html": "<p>"}, "no `success`"),
        ({"html": "<p>", "success": "true", "allow": ["ftp://a/"]}, "is not an address"),
        ({"html": "<p>", "success": "true", "viewport": [10, 10]}, "viewport"),
        ({"html": "<p>", "success": "true", "max_turns": 0}, "max_turns"),
        ({"html": "<p>", "success": "true", "values": ["x"]}, "values"),
        ({"html": "<p>", "success": "no_such.py:good"}, "no such file"),
    ],
)
def test_a_wrong_task_is_refused_with_its_place(columns: dict[str, object], part: str) -> None:
    task = Task("1", ({"role": "user", "content": "?"},), columns=columns, place="tasks.jsonl, line 1")
    with pytest.raises(InputError, match=part) as error:
        page_task(task)
    assert "tasks.jsonl, line 1" in str(error.value) or part == "no such file"


def test_a_task_without_page_and_image_is_refused() -> None:
    agent = make_gui(AgentConfig(name="gui"), None)
    with pytest.raises(InputError, match="needs a page"):
        agent.opening(Task("1", ({"role": "user", "content": "?"},)))


def test_tools_are_refused_except_that_of_agentfly_which_selects_its_format() -> None:
    assert make_gui(AgentConfig(name="gui"), None).format.name == "computer_use"
    agentfly = AgentConfig(name="gui", tools=["pyautogui_code_generator"])
    assert make_gui(agentfly, None).format.name == "thought_action"
    with pytest.raises(InputError, match="has no tools"):
        make_gui(AgentConfig(name="gui", tools=["calculator"]), None)


def test_an_image_without_a_page_is_a_task_of_one_action() -> None:
    from PIL import Image

    shot = image_of(Image.new("RGB", (200, 100)))
    question = {"role": "user", "content": [{"type": "image", "image": shot}, {"type": "text", "text": "Open it."}]}
    task = Task("1", (question,), columns={"gt_action": "click"})
    agent = replace(make_gui(AgentConfig(name="gui"), None), resize=lambda width, height: (2 * width, 2 * height))
    policy = ScriptedPolicy([call("left_click", coordinate=[100, 50])])
    episode = asyncio.run(agent.run(policy, task))  # type: ignore[arg-type]
    assert "400x200" in policy.asked[0][0]["content"]
    assert episode.messages[-1]["action"]["at"] == (50, 25) and episode.messages[-1]["action"]["size"] == (200, 100)
    assert [use.tool for use in episode.tools] == ["click"] and len(episode.turns) == 1


# -- Pages, in a browser -----------------------------------------------------------------------------------------------


def texts(episode: Episode) -> str:
    """What the page showed besides screenshots."""
    parts = [m["content"] for m in episode.messages if m["role"] == "user"]
    return "\n".join(one if isinstance(one, str) else " ".join(p.get("text", "") for p in one) for one in parts)


@needs_browser
def test_a_click_at_the_right_place_solves_the_page() -> None:
    episode, policy = play(
        page(BUTTON, PRESSED), [call("left_click", coordinate=[140, 120]), call("answer", text="pressed")]
    )
    assert episode.given == {"reward": 1.0} and episode.stop is StopReason.ANSWER
    assert episode.final_answer == "pressed" and [use.tool for use in episode.tools] == ["click", "finish"]
    shots = [picture(load(image)) for image in images_of(policy.asked[-1])]
    assert [shot.size for shot in shots] == [(320, 240)] * 2
    assert "320x240" in policy.asked[0][0]["content"] and policy.asked[1][:2] == policy.asked[0]
    assert chromium_processes() == []


@needs_browser
def test_a_click_elsewhere_does_not_and_the_turns_end() -> None:
    clicks = [call("left_click", coordinate=[10, 10])] * 3
    episode, _ = play(page(BUTTON, PRESSED, max_turns=3), clicks)
    assert episode.given == {"reward": 0.0} and episode.stop is StopReason.TURNS and len(episode.turns) == 3


@needs_browser
def test_the_screen_of_the_model_is_scaled_to_the_page() -> None:
    script = [call("left_click", coordinate=[280, 240]), call("terminate", status="success")]
    episode, _ = play(page(BUTTON, PRESSED), script, resize=lambda width, height: (2 * width, 2 * height))
    assert episode.given == {"reward": 1.0} and episode.messages[1]["action"]["at"] == (140, 120)


@needs_browser
def test_a_malformed_action_is_an_observation() -> None:
    script = ["Click it!", call("left_click", coordinate=[999, 0]), call("terminate", status="failure")]
    episode, _ = play(page(BUTTON, PRESSED), script)
    assert [use.error for use in episode.tools] == ["malformed", "bad_arguments", None]
    assert "no action" in texts(episode) and "outside the screen" in texts(episode)
    assert episode.failure is None and episode.given == {"reward": 0.0}


@needs_browser
def test_every_action_has_its_effect() -> None:
    body = """<input id=a style="position:absolute;left:10px;top:10px;width:100px;height:20px">
    <div id=b style="position:absolute;left:10px;top:50px;width:60px;height:40px;background:red"></div>
    <div style="position:absolute;top:2000px;height:10px">end</div><script>
    window.seen = []; b.ondblclick = () => seen.push('double');
    b.oncontextmenu = e => { seen.push('right'); return false };
    b.onmousedown = e => { if (e.button === 1) seen.push('middle') }; document.onmousemove = e => { last = [e.x, e.y] };
    document.onmouseup = e => { up = [e.x, e.y] }; last = up = null</script>"""
    script = [
        call("left_click", coordinate=[50, 20]),
        call("type", text="Gruß €"),
        call("key", keys=["ctrl", "a"]),
        call("key", keys=["é"]),
        call("double_click", coordinate=[30, 70]),
        call("right_click", coordinate=[30, 70]),
        call("middle_click", coordinate=[30, 70]),
        call("mouse_move", coordinate=[200, 100]),
        call("left_click_drag", coordinate=[250, 150]),
        call("scroll", pixels=-300),
        call("wait", time=0.1),
        call("terminate", status="success"),
    ]
    values = "[a.value, ...seen, last.join(), up.join(), String(scrollY)]"
    wanted = "JSON.stringify(['é', 'double', 'right', 'middle', '250,150', '250,150', '300'])"
    episode, _ = play(page(body, f"JSON.stringify({values}) === {wanted}"), script, max_turns=20)
    assert episode.given == {"reward": 1.0}, episode.messages


@needs_browser
def test_back_goes_back_and_a_new_window_is_shown_until_back_closes_it() -> None:
    body = "<a href='/?second' style='position:absolute;left:0;top:0'>a link of the page</a>"
    body += (
        "<button style='position:absolute;left:0;top:50px' onclick='window.open(\"/?third\")'>open a window</button>"
    )
    link, opener = call("left_click", coordinate=[20, 10]), call("left_click", coordinate=[20, 60])
    cases = [
        ([link], "?second"),
        ([link, call("back")], ""),
        ([opener], "?third"),
        ([opener, call("back")], ""),
        ([call("back")], ""),
    ]

    async def run(agent: Any) -> list[Episode]:
        async with agent:
            tasks = [page(body, f"location.search === '{url}'") for _, url in cases]
            scripts = [ScriptedPolicy([*script, call("terminate", status="success")]) for script, _ in cases]
            return await asyncio.gather(*map(agent.run, scripts, tasks))

    with gui(browsers=1) as agent:
        episodes = asyncio.run(run(agent))
    assert [episode.given for episode in episodes] == [{"reward": 1.0}] * 5, list(map(texts, episodes))
    assert "no previous page" in texts(episodes[-1])


@needs_browser
def test_dialogs_are_answered_and_shown() -> None:
    calls = "alert('one'); window.yes = confirm('two?'); window.said = prompt('three', 'x')"
    body = f"<script>setTimeout(() => {{ {calls} }})</script>"
    episode, _ = play(page(body, "yes === true && said === 'x'"), [call("wait", time=0.1), call("terminate")])
    assert episode.given == {"reward": 1.0}
    for part in (
        'the alert "one"',
        'the confirm "two?"',
        "the prompt \"three\", which was answered OK with 'x'",
    ):
        assert part in texts(episode)


@needs_browser
def test_options_of_a_list_are_visible_in_the_screenshot() -> None:
    body = "<select id=s style='position:absolute;left:10px;top:10px'><option>one<option id=t>two</select>"
    closed, policy = play(
        page(body, "s.value === 'two'"),
        [call("left_click", coordinate=[25, 22]), call("left_click", coordinate=[45, 76]), call("terminate")],
    )
    first, second, *_ = (picture(load(image)) for image in images_of(policy.asked[-1]))
    box = (0, 40, 320, 240)  # below the closed list
    assert len(first.crop(box).getcolors()) == 1 < len(second.crop(box).getcolors())
    assert closed.given == {"reward": 1.0}


@needs_browser
def test_success_is_a_function_of_a_file_with_the_final_state(tmp_path: Path) -> None:
    (tmp_path / "checks.py").write_text(
        "def good(state):\n"
        "    assert state['url'] == 'http://page.test/' and '<h1>Hi' in state['html']\n"
        "    assert state['values']['when'].startswith('1970-01-01')\n"
        "    right = state['answer'] == state['columns']['gold']\n"
        "    return {'reward': 0.5, 'seven': state['values']['seven'], 'right': right}\n"
    )
    task = page(
        "<h1>Hi</h1>", f"{tmp_path}/checks.py:good", values={"seven": "3 + 4", "when": "new Date(0)"}, gold="blue"
    )
    episode, _ = play(task, [call("answer", text="blue")])
    assert episode.given == {"reward": 0.5, "seven": 7.0, "right": 1.0}


@needs_browser
@pytest.mark.parametrize(
    ("success", "part"),
    [
        ("missing.checked", "missing is not defined"),
        ("'yes'", "must be true or false"),
        ("NaN", "must be true or false"),
    ],
)
def test_a_success_that_does_not_work_is_a_failure_and_not_a_zero(success: str, part: str) -> None:
    with pytest.raises(BrowserFailed, match=part) as error:
        play(page(BUTTON, success), [call("terminate")])
    assert error.value.cause == "success"


@needs_browser
def test_success_may_use_the_answer() -> None:
    task = page("<p id=p>The code is 731.</p>", "answer => answer === p.textContent.match(/\\d+/)[0]")
    assert play(task, [call("answer", text="731")])[0].given == {"reward": 1.0}
    assert play(task, [call("answer", text="137")])[0].given == {"reward": 0.0}


@needs_browser
def test_episodes_share_no_cookies_and_no_storage() -> None:
    body = "<script>window.before = localStorage.x; localStorage.x = 1; document.cookie = 'a=1'</script>"

    async def run(agent: object) -> list[Episode]:
        async with agent:  # type: ignore[attr-defined]
            task = page(body, "before === undefined && document.cookie === 'a=1'")
            return [await agent.run(ScriptedPolicy([call("terminate")]), task) for _ in range(2)]  # type: ignore[attr-defined]

    with gui(browsers=1) as agent:
        assert [episode.given for episode in asyncio.run(run(agent))] == [{"reward": 1.0}] * 2


# -- Setting up --------------------------------------------------------------------------------------------------------


def test_a_missing_browser_is_reported_with_the_fix(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setattr("importlib.util.find_spec", lambda name: object())
    with pytest.raises(Absent, match=r"apt-get install chromium, or agent\.chromium="):
        require_browser(None)
    with pytest.raises(Absent, match="was not found \\(/no/chrome\\)"):
        require_browser("/no/chrome")
    program = tmp_path / "google-chrome"
    program.write_text("#!/bin/sh\n")
    program.chmod(0o755)
    require_browser(None)
    assert make_gui(AgentConfig(name="gui"), None).executable == str(program)
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(Absent, match="needs the package playwright"):
        require_browser(None)


def test_formats_of_other_agents_are_refused() -> None:
    with pytest.raises(InputError, match=r"agent\.format"):
        AgentConfig(name="gui", format="hermes")
    with pytest.raises(InputError, match=r"agent\.format"):
        AgentConfig(name="hf", format="computer_use")


def test_text_agents_import_nothing_of_it() -> None:
    code = "import sys, covey.app.parts, covey.agents.turns, covey.rewards, covey.tasks; print([name for name in"
    code += " sys.modules if name.startswith(('covey.agents.gui', 'playwright', 'PIL'))])"
    shown = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert shown.stdout.strip() == "[]"
