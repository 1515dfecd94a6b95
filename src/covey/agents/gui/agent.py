"""The episode of agent=gui: a screenshot in, one action out, until the model finishes the task or has no turns left.

A task has a page (`url` or `html`) and a condition (`success`) that is evaluated on the page's final state: JavaScript,
or `file.py:function`, which runs in a worker process. Its value is the built-in reward `given`.

A task without a page is one of a data set of screenshots: its reply is one action, which a reward such as `gui_reward`
compares with the right one. It needs no browser.
"""

from __future__ import annotations

import base64
import importlib.util
import inspect
import math
import shutil
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, replace
from functools import partial
from typing import Any, ClassVar

from covey.agents.gui.actions import FORMATS, Action, ActionFormat, Mistake, Screen, Step
from covey.agents.gui.network import address_of
from covey.agents.gui.pool import BROWSER, BrowserFailed, BrowserPool, Page, start_in_worker
from covey.config.schema import AgentConfig
from covey.errors import Absent, InputError
from covey.images import images_of, load, picture_size, with_images
from covey.imports import install_extra, load_function
from covey.protocols import NoRoom, Policy
from covey.replies import with_system
from covey.types import Episode, Messages, StopReason, Task, ToolUse
from covey.workers import WorkerError, WorkerPool, WorkerTimeout

SUCCESS = "success"  # the name of `run_success` in the worker pool
OPEN_SECONDS = 60.0  # for the first page of an episode
VIEWPORT = (1024, 768)
MOST_PIXELS = 4096

Resize = Callable[[int, int], tuple[int, int]]


async def start_browser(executable: str, folder: str) -> Any:
    """In a worker: Playwright is imported there only."""
    from covey.agents.gui import browser

    return await browser.start_browser(executable, folder)


async def run_success(name: str, final: Mapping[str, Any]) -> Any:
    """In a worker: call the function of a task's `success` with the final state."""
    value = load_function("success", name)(dict(final))
    return await value if inspect.isawaitable(value) else value


@dataclass(frozen=True)
class PageTask:
    """The columns of a task that has a page."""

    url: str | None
    html: str | None
    success: str
    values: Mapping[str, str]
    allow: tuple[str, ...]
    viewport: tuple[int, int]
    max_turns: int | None

    @property
    def function(self) -> bool:
        """Whether `success` is a function of the user instead of JavaScript."""
        place, _, name = self.success.rpartition(":")
        return place.endswith(".py") and name.isidentifier()


def page_task(task: Task) -> PageTask | None:
    """The page of a task, checked; None if it has none."""
    columns = {name: value for name, value in task.columns.items() if value is not None}
    url, html = columns.get("url"), columns.get("html")
    if url is None and html is None:
        return None

    def refuse(problem: str) -> InputError:
        return InputError(f"{task.where}: {problem}")

    if (url is None) == (html is None):
        raise refuse("a page is given by `url` or by `html`, not by both")
    allow = columns.get("allow", ())
    addresses = [allow] if isinstance(allow, str) else list(allow)
    for one in ([] if url is None else [url]) + addresses:
        if not isinstance(one, str) or address_of(one) is None:
            raise refuse(f"{one!r:.80} is not an address like https://host/path")
    success = columns.get("success")
    if not isinstance(success, str) or not success.strip():
        raise refuse("no `success`: a JavaScript expression, or file.py:function, that is true on the solved page")
    values = columns.get("values", {})
    if not isinstance(values, Mapping) or not all(isinstance(code, str) for code in values.values()):
        raise refuse("`values` is an object of JavaScript expressions, by name")
    viewport = tuple(columns.get("viewport", VIEWPORT))
    if len(viewport) != 2 or not all(isinstance(side, int) and 64 <= side <= MOST_PIXELS for side in viewport):
        raise refuse(f"`viewport` is [width, height], each from 64 to {MOST_PIXELS} pixels")
    turns = columns.get("max_turns")
    if turns is not None and (isinstance(turns, bool) or not isinstance(turns, int) or turns < 1):
        raise refuse("`max_turns` must be a whole number of at least 1")
    width, height = viewport
    page = PageTask(url, html, success.strip(), dict(values), tuple(addresses), (width, height), turns)
    if page.function:
        load_function("success", page.success)  # raises if it does not exist
    return page


@dataclass(frozen=True)
class GuiAgent:
    """Plays web pages. As a context manager it ends its browsers."""

    format: ActionFormat
    executable: str
    max_turns: int
    seconds: float = 10.0  # for one action, or for `success`
    browsers: int = 2
    pages: int = 16
    resize: Resize = lambda width, height: (width, height)  # of the model's image processor
    workers: WorkerPool | None = None
    pool: BrowserPool | None = None

    reward: ClassVar[str] = "given"  # the reward if the user names none

    @property
    def functions(self) -> dict[str, Callable[..., Any]]:
        """The functions that the pool for `in_workers` must have."""
        return {BROWSER: start_browser, SUCCESS: run_success}

    def in_workers(self, workers: WorkerPool) -> GuiAgent:
        """A copy whose browsers run in these workers."""
        pool = BrowserPool(partial(start_in_worker, workers, self.executable), self.browsers, self.pages)
        return replace(self, workers=workers, pool=pool)

    async def __aenter__(self) -> GuiAgent:
        return self

    async def __aexit__(self, *_: object) -> None:
        if self.pool is not None:
            await self.pool.close()

    def opening(self, task: Task) -> tuple[Messages, None]:
        """The task's messages with the instructions; without the first screenshot, which the page shows later."""
        return with_system(task.messages, self.format.instructions(self.screen(task).shown)), None

    def screen(self, task: Task) -> Screen:
        """The size of the task's page, or of its image, and as the model sees it."""
        page = page_task(task)
        if page is not None:
            return Screen(page.viewport, self.resize(*page.viewport))
        images = images_of(task.messages)
        if not images:
            raise InputError(f"{task.where}: agent=gui needs a page (`url` or `html`), or an image\n  see docs/gui.md")
        size = picture_size(load(images[-1]))
        return Screen(size, self.resize(*size))

    async def run(self, policy: Policy, task: Task) -> Episode:
        play = _Play(self, policy, task)
        page_columns = page_task(task)
        if page_columns is None:
            await play.on_image()
        else:
            assert self.pool is not None
            async with self.pool.page(policy.waiting) as page:
                await play.on_page(page, page_columns)
        return play.episode()


CHROMIUM = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable", "chrome")
AGENTFLY_TOOL = "pyautogui_code_generator"  # of AgentFly's gui agent; it stands for the actions of thought_action


def make_gui(config: AgentConfig, vision: Any) -> GuiAgent:
    """The agent of the settings. `vision`: the model's VisionProcessor; None without a model."""
    if others := [name for name in config.tools if name != AGENTFLY_TOOL]:
        raise InputError(f"agent=gui acts with mouse and keyboard and has no tools\n  leave out agent.tools={others}")
    auto = "thought_action" if config.tools else "computer_use"
    return GuiAgent(
        FORMATS[auto if config.format == "auto" else config.format],
        find_chromium(config.chromium) or CHROMIUM[0],
        config.max_turns,
        config.tool_seconds,
        config.browsers,
        config.pages_per_browser,
        **({} if vision is None else {"resize": vision.shown_size}),
    )


def find_chromium(setting: str | None) -> str | None:
    """The browser's program: that of the setting, or the first on the PATH."""
    return next((path for name in ([setting] if setting else CHROMIUM) if (path := shutil.which(name))), None)


def require_browser(setting: str | None) -> None:
    if importlib.util.find_spec("playwright") is None:
        raise Absent(f"agent=gui needs the package playwright\n  fix: {install_extra('gui')}")
    if find_chromium(setting) is None:
        searched = setting or f"on the PATH: {', '.join(CHROMIUM)}"
        raise Absent(
            f"agent=gui needs Chromium, which was not found ({searched})\n"
            "  fix: apt-get install chromium, or agent.chromium=/path/to/chrome"
        )


class _Play:
    """One episode in progress."""

    def __init__(self, agent: GuiAgent, policy: Policy, task: Task) -> None:
        self.agent, self.policy, self.task = agent, policy, task
        self.screen = agent.screen(task)
        self.opening: Messages = agent.opening(task)[0]
        self.messages: list[Mapping[str, Any]] = []
        self.actions: dict[int, dict[str, Any]] = {}  # by the index of the reply in `messages`, for viewers
        self.uses: list[ToolUse] = []
        self.stop: StopReason | None = None
        self.answer: str | None = None
        self.given: dict[str, float | None] | None = None

    async def on_page(self, page: Page, columns: PageTask) -> None:
        opened = await page.request(
            "open",
            OPEN_SECONDS,
            url=columns.url,
            html=columns.html,
            allow=columns.allow,
            viewport=columns.viewport,
        )
        first = self.opening[-1]
        asked = first["content"]
        parts = [{"type": "text", "text": asked}] if isinstance(asked, str) else list(asked)
        self.opening = [*self.opening[:-1], *with_images([{**first, "content": [*parts, *self.observation(opened)]}])]
        self.stop = StopReason.TURNS
        for _ in range(columns.max_turns or self.agent.max_turns):
            step = await self.reply()
            if step is None or await self.act(page, step):
                break
        await self.score(page, columns)

    async def reply(self) -> Step | None:
        """The model's next action, in pixels of the page; None if its reply was cut off."""
        try:
            reply = await self.policy.ask([*self.opening, *self.messages])
        except NoRoom:
            self.stop = StopReason.LENGTH
            return None
        self.messages.append({"role": "assistant", "content": reply.text})
        self.stop = reply.stop
        if reply.stop is StopReason.LENGTH:
            return None
        step = self.agent.format.parse(reply.text)
        if isinstance(step, Action):
            step = self.screen.to_page(step)
        if isinstance(step, Action):
            record = {"kind": step.kind, "at": step.at, "to": step.to, "scroll": step.scroll, "text": step.text}
            self.actions[len(self.messages) - 1] = {**record, "size": self.screen.page, "label": step.describe()}
        return step

    async def on_image(self) -> None:
        """A task without a page: one action, which its reward judges."""
        step = await self.reply()
        if isinstance(step, Mistake):
            self.uses.append(ToolUse("none", 0.0, step.kind))
        elif step is not None:
            self.uses.append(ToolUse(step.kind, 0.0))

    async def act(self, page: Page, step: Step) -> bool:
        """Perform an action and show its result. True if it ends the episode."""
        started = time.monotonic()
        if isinstance(step, Mistake):
            self.uses.append(ToolUse("none", 0.0, step.kind))
            text = f"{step.text}\nThe page is unchanged."
            self.messages.append({"role": "user", "content": text})
            self.stop = StopReason.TURNS
            return False
        if step.kind == "finish":
            self.answer = step.text
            self.stop = StopReason.ANSWER
            self.uses.append(ToolUse(step.kind, time.monotonic() - started))
            return True
        seconds = self.agent.seconds + (step.seconds if step.kind == "wait" else 0.0)
        observed = await page.request("act", seconds, action=asdict(step))
        self.uses.append(ToolUse(step.kind, time.monotonic() - started))
        self.messages += with_images([{"role": "user", "content": self.observation(observed)}])
        self.stop = StopReason.TURNS
        return False

    def observation(self, observed: Mapping[str, Any]) -> list[dict[str, Any]]:
        """A screenshot, after what the page did besides, as parts of a message."""
        text = "\n".join(observed["notes"])
        image = {"type": "image", "image": base64.b64decode(observed["png"])}
        return [*([{"type": "text", "text": text}] if text else []), image]

    async def score(self, page: Page, columns: PageTask) -> None:
        """Evaluate `success` on the final state, however the episode ended."""
        values = dict(columns.values) if columns.function else {**columns.values, SUCCESS: columns.success}
        state = await page.request(
            "finish", self.agent.seconds, values=values, answer=self.answer or "", html=columns.function
        )
        value = state["values"].get(SUCCESS)
        if columns.function:
            value = await self.call_success(columns.success, state)
        self.given = _rewards(columns.success, value)

    async def call_success(self, name: str, state: Mapping[str, Any]) -> Any:
        assert self.agent.workers is not None
        state = {**state, "answer": self.answer or "", "columns": dict(self.task.columns)}
        try:
            return await self.agent.workers.call(SUCCESS, name, state, seconds=self.agent.seconds)
        except WorkerTimeout:
            text = f"{name} took longer than agent.tool_seconds={self.agent.seconds:g}"
            raise BrowserFailed("success", text) from None
        except WorkerError as error:
            raise BrowserFailed("success", f"{name}: {error}") from error

    def episode(self) -> Episode:
        recorded = [
            {**message, "action": self.actions[index]} if index in self.actions else message
            for index, message in enumerate(self.messages)
        ]
        return Episode(
            self.task,
            tuple(self.policy.turns),
            (*self.task.messages[:-1], self.opening[-1], *recorded),
            stop=self.stop,
            answer=self.answer,
            given=self.given,
            tools=tuple(self.uses),
        )


def _rewards(success: str, value: Any) -> dict[str, float | None]:
    """The reward of what `success` returned: a boolean, a number, or a dict with `reward`."""
    table = dict(value) if isinstance(value, Mapping) else {"reward": value}
    good = all(one is None or (isinstance(one, int | float) and math.isfinite(one)) for one in table.values())
    if table.get("reward") is None or not good:
        raise BrowserFailed("success", f"{success:.80} must be true or false, or a number; got {value!r:.80}")
    return {name: None if one is None else float(one) for name, one in table.items()}
