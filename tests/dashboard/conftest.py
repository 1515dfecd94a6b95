"""Run folders and a browser for the tests of the page."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from covey.dashboard.runs import Library
from covey.dashboard.server import Dash
from covey.dashboard.static_page import read_all
from tests.dashboard.synthetic import MARKUP, RECORDED, episode, faulty, write_episodes, write_run

if TYPE_CHECKING:
    from tests.dashboard.browsing import Page


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    from tests.dashboard.browsing import CHROMIUM, playwright

    with playwright.sync_playwright() as play:
        found = play.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        yield found
        found.close()


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A recorded run last, which is shown first; one with many episodes; two that are faulty."""
    folder = tmp_path_factory.mktemp("runs")
    shutil.copytree(RECORDED / "demo", folder / "demo")
    write_run(folder / "faulty", *faulty("reward_hacking"), started="2026-01-02", config={"learner": {"lr": 1e-5}})
    series, accuracy = faulty("failures")
    series |= {
        "policy/age": series["policy/ess"],
        "policy/age_max": series["policy/ess"],
        "agent/tool_calls": series["policy/ess"],
    }
    series |= {"dgdo/exact/weight": series["policy/ess"], "dgdo/style/weight": 1 - series["policy/ess"]}
    series |= {"reward/style/mean": series["reward/mean"]}
    write_run(folder / "agent", series, accuracy, started="2026-01-03")
    said = [
        {"role": "user", "content": MARKUP},
        {"role": "assistant", "content": "", "tool_calls": [{"function": {"name": "calculator", "arguments": "2*3"}}]},
        {"role": "tool", "name": "calculator", "content": "6"},
        {"role": "assistant", "content": MARKUP},
    ]
    used = [{"tool": "calculator", "error": "malformed"}]
    many = [episode(s, a, reward=float(a % 2), tokens=6 + 6 * a) for s in range(1250) for a in range(4)]
    many[-1] = episode(
        1249, 3, messages=said, task_id="tools", tools=used, stop="length", rewards={"exact": 1.0, "style": 0.5}
    )
    write_episodes(folder / "agent", many)
    return folder


@pytest.fixture(scope="module")
def dash(runs: Path) -> Iterator[Dash]:
    library = Library([runs])
    read_all(library)
    with Dash(library) as dash:
        yield dash


@pytest.fixture
def landing(browser: Any, dash: Dash) -> Iterator[Page]:
    """The page behind the printed link."""
    from tests.dashboard.browsing import Page

    page = Page(browser, dash.link)
    yield page
    page.close()


@pytest.fixture
def open_page(landing: Page) -> Page:
    """The overview of the newest run."""
    landing.show("overview")
    return landing
