"""A page in a real browser, for the tests: `make dash-test`."""

from __future__ import annotations

import json
import shutil
from typing import Any

import pytest

from tests.dashboard.synthetic import RECORDED

CHROMIUM = shutil.which("chromium")
if CHROMIUM is None:
    pytest.skip("chromium is not installed: apt-get install chromium", allow_module_level=True)
playwright = pytest.importorskip("playwright.sync_api", reason="playwright is not installed: make dash-test")


class Page:
    """A browser page that fails the test on any error, and on any request to another server."""

    def __init__(self, browser: Any, link: str, width: int = 1280, height: int = 900, scheme: str = "light") -> None:
        self.context = browser.new_context(viewport={"width": width, "height": height}, color_scheme=scheme)
        self.page = self.context.new_page()
        self.wrong: list[str] = []
        self.page.on("pageerror", lambda error: self.wrong.append(str(error)))
        self.page.on("console", lambda said: self.wrong.append(said.text) if said.type == "error" else None)
        self.page.on("request", lambda asked: self.asked(asked.url))
        self.page.goto(link)
        self.page.wait_for_selector("html[data-ready]")

    def asked(self, url: str) -> None:
        if not url.startswith(("http://127.0.0.1:", "blob:", "data:", "file:")):
            self.wrong.append(f"asked {url}")

    def show(self, tab: str, run: str | None = None) -> None:
        if run is not None:
            value = self.page.locator("#run option", has_text=run).get_attribute("value")
            self.page.select_option("#run", value)
        self.page.click(f"nav button[data-tab={tab}]")
        self.page.wait_for_selector(f"nav button[data-tab={tab}][aria-selected=true]")
        self.settle()

    def settle(self) -> None:
        self.page.wait_for_load_state("networkidle")
        self.page.wait_for_timeout(250)

    def chart(self, title: str) -> Any:
        return self.page.locator(".card", has=self.page.get_by_role("heading", name=title, exact=True))

    def legend(self, title: str) -> list[str]:
        return list(self.chart(title).locator(".legend span").all_inner_texts())

    def drawn(self, title: str) -> set[str]:
        """The words that are painted into a chart."""
        self.chart(title).locator("canvas").scroll_into_view_if_needed()
        words = self.page.evaluate(
            "canvas => { const said = [], g = CanvasRenderingContext2D.prototype, real = g.fillText;"
            " g.fillText = function (text, ...more) { if (this.canvas === canvas) said.push(text);"
            " real.call(this, text, ...more); }; canvas.dispatchEvent(new Event('blur'));"
            " g.fillText = real; return said; }",
            self.chart(title).locator("canvas").element_handle(),
        )
        return set(words)

    def label(self, title: str) -> str:
        return str(self.chart(title).locator("canvas").get_attribute("aria-label"))

    def count(self) -> str:
        self.settle()
        return str(self.page.locator(".count").inner_text())

    def close(self) -> None:
        self.context.close()
        assert self.wrong == []


def recorded() -> list[dict[str, Any]]:
    return [json.loads(line) for line in (RECORDED / "demo" / "metrics.jsonl").read_text().splitlines()]


def painted(page: Page, title: str) -> int:
    """Pixels of a chart that are not empty."""
    count = (
        page.chart(title)
        .locator("canvas")
        .evaluate(
            "c => { const d = c.getContext('2d').getImageData(0, 0, c.width, c.height).data;"
            " let n = 0; for (let i = 3; i < d.length; i += 4) n += d[i] > 0; return n; }"
        )
    )
    return int(count)
