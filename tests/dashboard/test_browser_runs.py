"""The table of runs and their comparison, in a real browser: `make dash-test`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from covey.dashboard.runs import Library
from covey.dashboard.server import Dash
from covey.dashboard.static_page import html_report
from covey.telemetry.history import write_labels
from tests.dashboard.browsing import Page, recorded
from tests.dashboard.synthetic import healthy, write_run

# -- the table of runs -------------------------------------------------------------------------------------------------


def column(page: Page, number: int) -> list[str]:
    return [str(text) for text in page.page.locator(f"table.runs tbody td:nth-child({number})").all_inner_texts()]


def shown_runs(page: Page) -> list[str]:
    return [str(text) for text in page.page.locator("table.runs tbody small").all_inner_texts()]


def test_the_table_of_runs_is_the_first_page(landing: Page) -> None:
    assert shown_runs(landing) == ["demo", "agent", "faulty"], "the newest first"
    row = landing.page.locator("table.runs tbody tr", has_text="demo")
    last = max(line["metrics"]["eval/accuracy"] for line in recorded() if line["kind"] == "eval")
    cells = row.locator("td").all_inner_texts()
    assert cells[1:5] == ["finished", "demo gvpo lr=3e-5\ndemo", "gvpo", "smollm2-135m"]
    assert cells[6] == "20/20" and float(cells[7]) == pytest.approx(last, abs=1e-3)
    assert cells[8] == "2026-11-16 01:36"
    row.get_by_role("link").click()
    landing.page.locator("h1", has_text="covey/demo").wait_for()
    landing.page.go_back()
    landing.page.locator("table.runs").wait_for()


def test_runs_are_sorted_and_filtered(browser: Any, tmp_path: Path) -> None:
    series, _ = healthy(10)
    made = [("a", 0.5, 3, ["baseline"], "", "2026-01-01"), ("b", 0.7, 1, [], "uses the long prompt", "2026-01-02")]
    made += [("c", 0.6, 2, ["baseline", "long"], "", "2026-01-03")]
    for name, value, seed, tags, notes, started in made:
        config = {"seed": seed, "data": {"val_size": 200}}
        write_run(tmp_path / name, series, {10: value}, config=config, tags=tags, notes=notes, started=started)
    write_run(tmp_path / "d", series, {}, status="failed", started="2026-01-04", config={"seed": 11})
    with Dash(Library([tmp_path])) as dash:
        page = Page(browser, dash.link)
        page.settle()
        assert shown_runs(page) == ["d", "c", "b", "a"]
        best = page.page.get_by_role("columnheader", name="best score")
        best.get_by_role("button").click()
        assert shown_runs(page) == ["b", "c", "a", "d"] and best.get_attribute("aria-sort") == "descending"
        best.get_by_role("button").click()
        assert shown_runs(page) == ["a", "c", "b", "d"], "a run without a score is the last in either order"
        page.page.get_by_role("columnheader", name="run", exact=True).get_by_role("button").click()
        assert column(page, 3)[0].startswith("grpo seed=1\n") and shown_runs(page) == ["b", "c", "a", "d"]
        for words, found in (("LONG", ["b", "c"]), ("baseline long", ["c"]), ("failed", ["d"]), ("seed=3", ["a"])):
            page.page.get_by_label("Filter runs").fill(words)
            page.settle()
            assert shown_runs(page) == found, words
        assert "filter=seed" in page.page.url, "the address can be kept"
        page.page.reload()
        page.page.wait_for_selector("html[data-ready]")
        assert shown_runs(page) == ["a"]
        page.close()


def test_selected_runs_are_compared_in_their_colours(landing: Page) -> None:
    page = landing.page
    for name in ("agent", "faulty"):
        page.locator("table.runs tbody tr", has_text=name).get_by_role("checkbox").check()
    marks = page.locator("table.runs .mark").evaluate_all("all => all.map(n => getComputedStyle(n).backgroundColor)")
    page.get_by_role("button", name="Compare 2 selected").click()
    landing.settle()
    assert landing.legend("Reward") == ["made grpo lr=1e-6", "made grpo lr=1e-5"]
    colour = "all => all.map(n => getComputedStyle(n).backgroundColor)"
    drawn = landing.chart("Reward").locator(".legend i").evaluate_all(colour)
    listed = page.locator(".picker label:has(:checked) .mark").evaluate_all(colour)
    results = page.locator("section", has_text="Results").locator(".mark").evaluate_all(colour)
    assert marks == drawn == listed == results and len(set(drawn)) == 2
    page.get_by_role("checkbox", name="made grpo lr=1e-6").uncheck()
    landing.settle()
    kept = landing.chart("Reward").locator(".legend i").evaluate_all(colour)
    assert kept == drawn[1:], "a run keeps its colour while others come and go"


def test_the_table_with_the_keyboard(landing: Page) -> None:
    page = landing.page
    for key in ("j", "j", "x"):
        page.keyboard.press(key)
    assert page.evaluate("document.activeElement.textContent") == "made grpo lr=1e-6", "the focus stays at its row"
    assert page.locator("table.runs tbody input:checked").count() == 1
    page.keyboard.press("k")
    page.keyboard.press("Enter")
    page.locator("h1", has_text="covey/demo").wait_for()
    page.keyboard.press("1")
    page.locator("table.runs").wait_for()
    page.keyboard.press("/")
    assert page.evaluate("document.activeElement.type") == "search"
    page.keyboard.type("agent")
    landing.settle()
    assert shown_runs(landing) == ["agent"]
    page.keyboard.press("Escape")
    assert page.get_by_label("Select all shown runs").is_checked(), "the only one that is shown"
    page.keyboard.press("c")
    landing.settle()
    assert landing.legend("Reward") == ["made grpo lr=1e-6"]


def test_labels_that_change_appear_in_the_table_and_the_focus_stays(browser: Any, tmp_path: Path) -> None:
    for name in ("a", "b"):
        write_run(tmp_path / name, *healthy(10), started=name)
    with Dash(Library([tmp_path])) as dash:
        page = Page(browser, dash.link)
        page.page.keyboard.press("j")
        write_labels(tmp_path / "b", ["fresh"], "written later")
        page.page.locator("table.runs .tag", has_text="fresh").wait_for()
        assert page.page.get_by_text("written later").is_visible()
        assert page.page.evaluate("document.activeElement.closest('tr').dataset.run") == "1"
        page.close()


def test_more_runs_than_colours_have_dashed_lines(browser: Any, tmp_path: Path) -> None:
    series, accuracy = healthy(10)
    for number in range(30):
        config = {"seed": number, "data": {"val_size": 200}}
        write_run(tmp_path / f"{number:02}", series, accuracy, started=f"{number:02}", config=config)
    with Dash(Library([tmp_path])) as dash:
        page = Page(browser, dash.link)
        page.page.get_by_label("Filter runs").fill("seed=1")
        page.settle()
        page.page.get_by_label("Select all shown runs").check()  # 1 and 10 to 19
        page.show("compare")
        page.chart("Reward").locator(".legend span").nth(10).wait_for()
        assert len(page.legend("Reward")) == 11
        assert page.chart("Reward").locator(".legend i.dashed").count() == 3, "the ninth, tenth and eleventh"
        assert page.page.locator(".picker label").count() == 24
        assert page.page.get_by_text("6 more in the table of runs").is_visible()
        page.close()


# -- comparison --------------------------------------------------------------------------------------------------------


def test_runs_in_one_chart(open_page: Page) -> None:
    page = open_page.page
    open_page.show("compare")
    assert page.locator(".picker input:checked").count() == 3
    labels = ["demo gvpo lr=3e-5", "made grpo lr=1e-6", "made grpo lr=1e-5"]
    assert open_page.legend("Reward") == labels
    page.get_by_role("checkbox", name="demo").uncheck()
    open_page.settle()
    assert open_page.legend("Reward") == labels[1:]
    table = page.locator("section", has_text="Differing settings").locator("tbody tr")
    cells = {row.locator("td").first.inner_text(): row.locator("td").all_inner_texts()[1:] for row in table.all()}
    assert [float(text) for text in cells["learner.lr"]] == [1e-6, 1e-5]
    page.get_by_label("Metric to compare").select_option("grad/norm")
    open_page.settle()
    assert "no values" not in open_page.label("grad/norm")


def test_a_report_of_several_runs_compares_any_of_them(browser: Any, runs: Path, tmp_path: Path) -> None:
    file = tmp_path / "report.html"
    file.write_text(html_report([runs / "faulty", runs / "agent", runs / "demo"], episodes=4), encoding="utf-8")
    page = Page(browser, file.as_uri())
    assert len(shown_runs(page)) == 3
    page.show("compare")
    page.page.get_by_role("checkbox", name="demo").uncheck()
    page.settle()
    rows = page.page.locator("section", has_text="Differing settings").locator("tbody tr")
    assert rows.all_inner_texts() == ["learner.lr\t1e-6\t1e-5", "data.val_size\t200\tnull"]
    page.page.get_by_role("checkbox", name="lr=1e-5").uncheck()
    page.settle()
    assert page.legend("Reward") == ["made grpo lr=1e-6"]
    page.close()
