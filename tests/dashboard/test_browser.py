"""The page in a real browser, with recorded and synthetic runs: `make dash-test`."""

from __future__ import annotations

import json
import math
import struct
import zlib
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from covey.dashboard.runs import Library
from covey.dashboard.server import Dash
from covey.dashboard.static_page import html_report, read_all
from tests.dashboard.browsing import Page, painted, recorded
from tests.dashboard.synthetic import (
    FAULTS,
    MARKUP,
    MORE_FAULTS,
    episode,
    faulty,
    healthy,
    write_episodes,
    write_run,
)

TABS = ("runs", "overview", "compare", "episodes", "rewards")


# -- overview ----------------------------------------------------------------------------------------------------------


def test_the_overview(open_page: Page) -> None:
    page = open_page.page
    assert page.locator("h1").inner_text() == "covey/demo"
    assert page.locator(".pill").first.inner_text() == "finished"
    assert "step 20 of 20" in page.locator(".head").inner_text()
    assert "No findings" in page.locator(".fine").inner_text()
    last = [line["metrics"]["eval/accuracy"] for line in recorded() if line["kind"] == "eval"][-1]
    assert f"{last:.2f}" in page.locator(".tile", has_text="held-out, now").inner_text()
    titles = (
        "Reward",
        "Held-out accuracy",
        "KL",
        "Entropy",
        "Length",
        "Truncated answers, zero-variance groups",
        "Throughput",
        "Time per stage",
    )
    for title in titles:
        assert "no values" not in open_page.label(title)
        assert painted(open_page, title) > 200


def test_panels_for_agents_and_asynchronous_runs(open_page: Page) -> None:
    open_page.show("overview", "agent")
    for title in ("Policy age", "Failures by cause", "Tools"):
        assert painted(open_page, title) > 200
    assert "tool_timeout" in open_page.chart("Failures by cause").locator(".legend").inner_text()
    assert "Episodes are failing" in open_page.page.locator(".finding").inner_text()


def test_values_on_hover_and_with_the_arrows(open_page: Page) -> None:
    rewards = [line["metrics"]["reward/mean"] for line in recorded() if line["kind"] == "step"]
    canvas = open_page.chart("Reward").locator("canvas")
    box = canvas.bounding_box()
    open_page.page.mouse.move(box["x"] + box["width"] - 12, box["y"] + 50)
    said = open_page.page.locator("#tip").inner_text().splitlines()
    assert said[0] == "updates 19" and float(said[1].split()[-1]) == pytest.approx(rewards[19], abs=1e-3)
    open_page.page.mouse.move(0, 0)
    canvas.focus()
    open_page.page.keyboard.press("ArrowRight")
    open_page.page.keyboard.press("ArrowRight")
    said = open_page.page.locator("#tip").inner_text().splitlines()
    assert said[0] == "updates 1" and float(said[1].split()[-1]) == pytest.approx(rewards[1], abs=1e-3)


def test_smoothing_log_scale_and_axis(open_page: Page) -> None:
    page = open_page.page
    rewards = [line["metrics"]["reward/mean"] for line in recorded() if line["kind"] == "step"]
    page.locator("input[type=range]").fill("0.5")
    mean, part = 0.0, 1.0
    for value in rewards:
        mean, part = 0.5 * mean + 0.5 * value, part * 0.5
    assert float(open_page.label("Reward").split()[-1]) == pytest.approx(mean / (1 - part), abs=1e-3)
    before = page.locator("canvas").first.evaluate("c => c.toDataURL()")
    page.get_by_label("log scale").check()
    assert page.locator("canvas").first.evaluate("c => c.toDataURL()") != before
    for axis, word in (("time", "time"), ("tokens", "tokens")):
        page.get_by_label("Horizontal axis").select_option(axis)
        box = open_page.chart("Reward").locator("canvas").bounding_box()
        page.mouse.move(box["x"] + 200, box["y"] + 60)
        assert page.locator("#tip").inner_text().startswith(word)


def test_unknown_keys_do_nothing(open_page: Page) -> None:
    for tab in TABS:
        open_page.show(tab)
        for key in ("q", "/", "ArrowDown"):
            open_page.page.keyboard.press(key)  # an error in the page fails the test as it ends
        open_page.page.keyboard.press("Escape")


def test_any_metric_can_be_added(open_page: Page) -> None:
    open_page.page.get_by_label("Any metric").select_option("advantage/std")
    open_page.settle()
    assert "no values" not in open_page.label("advantage/std")


def test_a_picture_and_the_numbers_are_saved(open_page: Page, tmp_path: Path) -> None:
    card = open_page.chart("Reward")
    with open_page.page.expect_download() as saved:
        card.get_by_role("button", name="Save as picture").click()
    saved.value.save_as(tmp_path / "reward.png")
    data = (tmp_path / "reward.png").read_bytes()
    assert data[:8] == b"\x89PNG\r\n\x1a\n" and struct.unpack(">II", data[16:24]) == (1600, 760)
    with open_page.page.expect_download() as saved:
        card.get_by_role("button", name="Save the numbers").click()
    saved.value.save_as(tmp_path / "reward.csv")
    rows = [line.split(",") for line in (tmp_path / "reward.csv").read_text().splitlines()]
    rewards = [line["metrics"]["reward/mean"] for line in recorded() if line["kind"] == "step"]
    assert rows[0][:3] == ["series", "updates", "value"]
    assert [float(row[2]) for row in rows[1:]] == pytest.approx(rewards, rel=1e-6)
    with open_page.page.expect_download() as saved:
        open_page.page.get_by_role("button", name="All numbers as CSV").click()
    saved.value.save_as(tmp_path / "all.csv")
    assert len((tmp_path / "all.csv").read_text().splitlines()) == 1 + len(recorded())


def test_the_page_of_a_live_run_updates_itself(browser: Any, tmp_path: Path) -> None:
    series, accuracy = healthy(30)
    folder = write_run(tmp_path / "a", {k: v[:20] for k, v in series.items()}, {0: 0.2}, status="running", total=30)
    write_episodes(folder, [episode(s, 0) for s in range(20)])
    with Dash(Library([folder])) as dash:
        page = Page(browser, dash.link)
        assert (
            "step 20 of 30" in page.page.locator(".head").inner_text()
            and "left" in page.page.locator(".head").inner_text()
        )
        before = page.label("Reward")
        write_run(folder, {k: v[:25] for k, v in series.items()}, {0: 0.2}, status="running", total=30)
        page.page.get_by_text("step 25 of 30").wait_for()
        page.page.wait_for_function(
            "old => document.querySelector('canvas').getAttribute('aria-label') !== old", arg=before
        )
        page.show("episodes")
        assert page.count().startswith("20 of 20")
        with (folder / "episodes.jsonl").open("a") as file:
            file.write(json.dumps(episode(20, 0)) + "\n")
        page.page.get_by_text("21 of 21 recorded episodes").wait_for()
        write_run(folder, series, accuracy, status="finished")
        page.show("overview")
        page.page.locator(".pill.finished").wait_for()
        page.close()


def test_a_run_of_a_few_steps_is_not_judged(browser: Any, tmp_path: Path) -> None:
    folder = write_run(tmp_path / "a", *faulty("kl_growth", 9), tags=["short"], notes="only a look")
    with Dash(Library([folder])) as dash:
        page = Page(browser, dash.link)
        page.settle()
        assert page.page.locator(".early").inner_text().startswith("Too early to tell")
        assert page.page.locator(".finding, .fine").count() == 0
        assert page.page.locator(".tag").inner_text() == "short" and page.page.get_by_text("only a look").is_visible()
        page.close()


def test_every_chart_names_its_axes(open_page: Page) -> None:
    expected = {"Reward": "reward", "Held-out accuracy": "accuracy", "Entropy": "nats per token", "Length": "tokens"}
    for title, unit in expected.items():
        assert {unit, "updates"} <= open_page.drawn(title), title
        assert f"{unit} over updates" in open_page.label(title)
    open_page.page.get_by_label("Horizontal axis").select_option("time")
    open_page.page.get_by_label("log scale").check()
    assert {"reward (log scale)", "time"} <= open_page.drawn("Reward")
    open_page.page.get_by_role("checkbox", name="log scale").uncheck()
    open_page.show("rewards", "agent")
    assert {"reward"} <= open_page.drawn("Rewards") and {"weight"} <= open_page.drawn("Weights")
    assert {"total reward", "length"} <= open_page.drawn("Episodes")
    open_page.show("compare")
    assert {"accuracy", "time"} <= open_page.drawn("Held-out accuracy")
    titles = open_page.page.locator(".card h2").all_inner_texts()
    assert all(len(open_page.label(title).split(". ")[1].split(" over ")[0]) > 2 for title in titles)


def test_round_off_is_drawn_as_a_level(browser: Any, tmp_path: Path) -> None:
    series, accuracy = healthy(20)
    noise = np.random.default_rng(0).uniform(-1, 1, 20)
    series |= {"policy/ess": 1 + 1e-8 * noise, "gvpo/mean_weight": 2e-9 * noise, "grad/norm": 1 + 0.1 * noise}
    folder = write_run(tmp_path / "a", series, accuracy)
    with Dash(Library([folder])) as dash:
        page = Page(browser, dash.link)
        for name in ("policy/ess", "gvpo/mean_weight", "grad/norm"):
            page.page.get_by_label("Any metric").select_option(name)
            page.settle()
        ink = "c => { const g = c.getContext('2d'), rows = new Set(), d = g.getImageData(0, 0, c.width, c.height).data;"
        ink += " for (let y = 0; y < c.height - 40; y++) for (let x = 70; x < c.width - 12; x++) {"
        ink += " const i = 4 * (y * c.width + x); if (d[i + 2] > 150 && d[i] < 90) rows.add(y); } return rows.size; }"
        heights = {name: page.chart(name).locator("canvas").evaluate(ink) for name in ("policy/ess", "grad/norm")}
        assert heights["policy/ess"] < 10 < 60 < heights["grad/norm"]
        assert page.label("policy/ess").endswith(" 1") and page.label("gvpo/mean_weight").endswith(" 0")
        with page.page.expect_download() as saved:
            page.chart("gvpo/mean_weight").get_by_role("button", name="Save the numbers").click()
        saved.value.save_as(tmp_path / "weight.csv")
        rows = [line.split(",") for line in (tmp_path / "weight.csv").read_text().splitlines()[1:]]
        assert [float(row[2]) for row in rows] == pytest.approx(list(2e-9 * noise), rel=1e-5), "saved as they are"
        page.close()


# -- episodes ----------------------------------------------------------------------------------------------------------


def test_each_filter_of_the_list(open_page: Page) -> None:
    page = open_page.page
    open_page.show("episodes", "agent")
    assert open_page.count().startswith("5,000 of 5,000")

    def filtered(label: str, value: str) -> str:
        page.get_by_label(label, exact=True).fill(value)
        found = open_page.count().split(" of ")[0]
        page.get_by_label(label, exact=True).fill("")
        return found

    assert filtered("task or question /", "tools") == "1"
    assert filtered("text of the episode", "onerror=") == "1"
    assert filtered("reward from", "0.5") == "2,500" and filtered("reward to", "0.5") == "2,500"
    assert filtered("length from", "20") == "1,249"  # 24 tokens, of which 20 are sampled; the last episode has fewer
    assert filtered("step from", "1249") == "4" and filtered("step to", "0") == "4"
    open_page.count()
    page.get_by_label("tool errors").check()
    assert open_page.count().startswith("1 of")
    page.get_by_label("tool errors").uncheck()
    page.get_by_label("Stop reason").select_option("length")
    assert open_page.count().startswith("1 of")


def test_the_list_is_virtualised_and_scrolls_to_the_end(open_page: Page) -> None:
    page = open_page.page
    open_page.show("episodes", "agent")
    assert page.locator(".row").count() < 60
    page.locator(".list").evaluate("list => { list.scrollTop = list.scrollHeight; }")
    open_page.settle()
    assert page.locator(".row").count() < 60
    assert page.locator(".row").last.locator("span").first.inner_text() == "0", "the first step is at the end"
    page.get_by_role("button", name="Sort by length").click()
    open_page.settle()
    assert page.locator(".row").first.locator("span").nth(4).inner_text() == "20"


def test_the_list_with_the_keyboard(open_page: Page) -> None:
    page = open_page.page
    page.keyboard.press("4")
    open_page.settle()
    first = page.locator("h1").inner_text()
    for _ in range(4):
        page.keyboard.press("j")
        open_page.settle()
    assert page.locator(".row[aria-selected=true]").count() == 1
    assert page.locator(".right h1").inner_text() != first, "four attempts further begins the next group"
    page.keyboard.press("k")
    open_page.settle()
    assert page.locator(".right h1").inner_text() == first
    page.keyboard.press("/")
    assert page.evaluate("document.activeElement.name") == "task"
    page.keyboard.press("Escape")
    page.keyboard.press("2")
    page.wait_for_selector("nav button[data-tab=overview][aria-selected=true]")


def test_tokens_are_coloured_by_the_values_of_the_learner(open_page: Page) -> None:
    page = open_page.page
    open_page.show("episodes", "agent")
    page.get_by_label("length from").fill("20")
    open_page.count()
    page.locator(".row").nth(1).click()
    open_page.settle()
    shown = page.locator(".tokens[role=group]")
    whole = episode(1248, 3, tokens=24, reward=1.0)["rows"][0]

    def colours(mode: str) -> list[str]:
        page.get_by_label("Colour tokens by").select_option(mode)
        return [
            str(c)
            for c in shown.locator("span").evaluate_all("all => all.map(n => getComputedStyle(n).backgroundColor)")
        ]

    none = "rgba(0, 0, 0, 0)"
    advantage = colours("advantage")
    assert len(advantage) == 24
    assert all((c == "rgba(34, 150, 94, 0.75)") == bool(m) for c, m in zip(advantage, whole["mask"], strict=True))
    assert advantage[5] == none, "given, not sampled"
    mask = colours("mask")
    assert mask[0].startswith("rgba(62, 126, 204") and mask[5].startswith("rgba(128, 136, 150")
    ratio = colours("ratio")  # 0.5, 1, 1.5: red, none, green
    assert (
        ratio[0] == "rgba(214, 69, 56, 0.75)"
        and ratio[1].endswith(", 0)")
        and ratio[2].startswith("rgba(34, 150, 94, 0.4")
    )
    logprobs = colours("logprobs")
    assert logprobs[10] == f"rgba(214, 69, 56, {round(0.75 * 1.0 / 6, 3):g})"
    assert len(set(colours("entropy"))) > 3
    shown.locator("span").nth(10).hover()
    said = page.locator("#tip").inner_text()
    assert "token 110" in said and f"log-prob {whole['logprobs'][10]:g}" in said
    assert f"(p {math.exp(whole['logprobs'][10]):.3g})" in said and "entropy 0" in said
    shown.focus()
    page.keyboard.press("ArrowRight")
    page.keyboard.press("ArrowRight")
    assert "token 101" in page.locator(".say").inner_text()


def test_model_output_is_shown_as_text_with_tool_calls(open_page: Page) -> None:
    page = open_page.page
    open_page.show("episodes", "agent")
    page.get_by_label("tool errors").check()
    open_page.count()
    page.locator(".row").first.click()
    open_page.settle()
    assert page.locator(".turn.assistant pre").last.inner_text() == MARKUP
    assert page.locator("main img").count() == 0 and page.title() == "covey"
    assert page.locator(".call").inner_text() == "calculator(2*3)"
    assert page.locator(".turn.tool").inner_text().splitlines() == ["tool calculator returned", "6"]
    assert "calculator (malformed)" in page.locator(".facts").inner_text()


def test_the_group_side_by_side_and_the_task_across_steps(open_page: Page) -> None:
    page = open_page.page
    open_page.show("episodes")
    page.keyboard.press("g")
    page.locator(".side").wait_for()
    assert page.locator(".side > div").count() == 4
    attempts = page.locator(".side .facts").all_inner_texts()
    assert [f"attempt {n}" in text for n, text in enumerate(attempts)] == [True] * 4
    open_page.show("episodes", "agent")
    page.locator(".row").nth(8).click()
    open_page.settle()
    page.keyboard.press("s")
    page.locator(".side").wait_for()
    assert "recorded attempts at this task, by step" in page.locator(".right").inner_text()
    assert painted(open_page, "Reward at this task") > 200


# -- rewards and warnings ----------------------------------------------------------------------------------------------


def test_rewards_their_weights_and_the_scatter(open_page: Page) -> None:
    page = open_page.page
    open_page.show("rewards", "agent")
    assert open_page.chart("Rewards").locator(".legend span").all_inner_texts() == ["exact", "total", "style"]
    assert open_page.chart("Weights").locator(".legend span").all_inner_texts() == ["exact", "style"]
    assert (
        painted(open_page, "Episodes") > 200
        and "correlation" in page.locator(".card", has_text="Episodes").inner_text()
    )
    page.get_by_label("Across").select_option("reward:exact")
    open_page.settle()
    assert "correlation 1" in page.locator(".card", has_text="Episodes").inner_text()
    box = open_page.chart("Episodes").locator("canvas").bounding_box()
    place = open_page.chart("Episodes").locator("canvas")
    for at in range(int(box["width"]) - 60, int(box["width"]), 4):
        place.hover(position={"x": at, "y": 16})
        if page.locator("#tip").is_visible():
            break
    page.mouse.down()
    page.mouse.up()
    page.wait_for_selector("nav button[data-tab=episodes][aria-selected=true]")
    open_page.settle()
    assert "reward 1" in page.locator(".right .facts").inner_text()


def test_a_finding_links_to_its_evidence(open_page: Page) -> None:
    page = open_page.page
    open_page.show("rewards", "faulty")
    card = page.locator(".finding[data-finding=reward_hacking]")
    assert "reward.weights" in card.inner_text() and "held-out" in card.inner_text()
    card.get_by_role("button", name="see eval/accuracy").click()
    page.locator(".card.marked").wait_for()
    assert page.locator(".card.marked h2").inner_text() == "eval/accuracy"


@pytest.mark.parametrize("name", (*FAULTS, *MORE_FAULTS, None), ids=str)
def test_each_fault_has_its_finding(browser: Any, tmp_path: Path, name: str | None) -> None:
    folder = write_run(tmp_path / "a", *(faulty(name) if name else healthy()))
    with Dash(Library([folder])) as dash:
        page = Page(browser, dash.link)
        page.settle()
        page.page.wait_for_selector(".finding" if name else ".fine")
        found = page.page.locator(".finding").evaluate_all("all => all.map(n => n.dataset.finding)")
        assert found == ([name] if name else [])
        page.close()


# -- who may look ------------------------------------------------------------------------------------------------------


def test_a_wrong_token_and_path_traversal_are_refused(browser: Any, dash: Dash) -> None:
    context = browser.new_context()
    page = context.new_page()
    address = f"http://127.0.0.1:{dash.port}"
    reply = page.goto(f"{address}/?token=wrong")
    assert reply.status == 403 and "wrong token" in page.inner_text("body")
    assert page.goto(f"{address}/").status == 403
    page.goto(dash.link)
    page.wait_for_selector("html[data-ready]")
    assert "token" not in page.url and page.evaluate("document.cookie") == ""
    for path in ("/../run.json", "/%2e%2e/%2e%2e/etc/passwd", "/api/../../etc/passwd", "/demo/metrics.jsonl"):
        assert page.evaluate("async p => (await fetch(p)).status", path) == 404
    context.close()


# -- shapes and one file -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("size", [(1360, 900), (820, 1100), (390, 844)], ids=["desk", "tablet", "phone"])
def test_every_page_fits_and_keeps_its_colours(browser: Any, dash: Dash, size: tuple[int, int], scheme: str) -> None:
    page = Page(browser, dash.link, *size, scheme=scheme)
    for tab in TABS:
        page.show(tab)
        wide, inside = page.page.evaluate(
            "[document.scrollingElement.scrollWidth, document.getElementById('view').scrollWidth]"
        )
        assert wide <= size[0] and inside <= size[0], tab
    ground = "getComputedStyle(document.body).backgroundColor"
    assert page.page.evaluate(ground) == ("rgb(18, 21, 27)" if scheme == "dark" else "rgb(246, 247, 249)")
    page.page.keyboard.press("t")
    assert page.page.evaluate(ground) == ("rgb(246, 247, 249)" if scheme == "dark" else "rgb(18, 21, 27)")
    page.close()


def test_a_phone_shows_the_list_and_then_the_episode(browser: Any, dash: Dash) -> None:
    page = Page(browser, dash.link, 390, 844)
    page.show("episodes")
    assert page.page.locator(".list").is_visible() and not page.page.locator(".right").is_visible()
    page.page.locator(".row").first.click()
    page.page.locator(".right h1").wait_for()
    assert not page.page.locator(".list").is_visible()
    page.page.get_by_role("button", name="← list").click()
    assert page.page.locator(".list").is_visible()
    page.close()


def test_the_report_is_the_same_page_from_a_file(browser: Any, runs: Path, tmp_path: Path) -> None:
    file = tmp_path / "report.html"
    file.write_text(html_report([runs / "demo"], episodes=40), encoding="utf-8")
    page = Page(browser, file.as_uri())
    page.page.context.set_offline(True)
    assert page.page.locator("h1").inner_text() == "covey/demo" and painted(page, "Reward") > 200
    page.show("episodes")
    assert page.count().startswith("40 of 80 recorded episodes; this file contains 40 of them")
    page.page.get_by_label("reward to").fill("0")
    few = int(page.count().split(" of ")[0])
    assert 0 < few < 40
    page.page.locator(".row").first.click()
    page.settle()
    page.page.keyboard.press("g")
    page.page.locator(".side").wait_for()
    assert page.page.locator(".side > div").count() == 4
    page.show("rewards")
    assert painted(page, "Episodes") > 100
    page.show("compare")
    assert "Results" in page.page.locator("main").inner_text()
    page.close()


def test_the_reader_shows_screenshots_with_the_action_that_followed(browser: Any, tmp_path: Path) -> None:
    name = f"images/{'a' * 64}.png"
    action = {"kind": "click", "at": [30, 10], "to": None, "size": [40, 20], "label": "click (30, 10)"}
    shot = [{"type": "text", "text": "Press it."}, {"type": "image", "image": name}]
    messages = [{"role": "user", "content": shot}, {"role": "assistant", "content": "I press.", "action": action}]
    run = tmp_path / "run"
    write_run(run, *healthy(5))
    write_episodes(run, [episode(1, 0, messages=messages)])
    (run / "images").mkdir()
    (run / name).write_bytes(png(40, 20))
    library = Library([tmp_path])
    read_all(library)
    with Dash(library) as dash:
        page = Page(browser, dash.link)
        page.show("episodes")
        page.page.locator(".row").first.click()
        image = page.page.locator(".shot img")
        image.wait_for()
        assert image.evaluate("i => [i.naturalWidth, i.naturalHeight]") == [40, 20]
        dot = page.page.locator(".shot i")
        assert dot.evaluate("i => [i.style.left, i.style.top]") == ["75%", "50%"]
        assert "click (30, 10)" in page.page.locator(".turn.assistant").inner_text()
        page.close()


def png(width: int, height: int) -> bytes:
    """A white picture, written by hand."""
    rows = zlib.compress((b"\0" + b"\xff" * width) * height)
    chunks = [(b"IHDR", struct.pack("!IIBBBBB", width, height, 8, 0, 0, 0, 0)), (b"IDAT", rows), (b"IEND", b"")]
    written = b"\x89PNG\r\n\x1a\n"
    for kind, data in chunks:
        written += struct.pack("!I", len(data)) + kind + data + struct.pack("!I", zlib.crc32(kind + data))
    return written
