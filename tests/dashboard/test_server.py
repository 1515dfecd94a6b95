"""Access to the server and its answers, over a real socket."""

from __future__ import annotations

import csv
import http.client
import io
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.parse import urlencode

import pytest

from covey.dashboard.api import Api, unpaired
from covey.dashboard.runs import Library
from covey.dashboard.server import PAGE, Dash
from covey.dashboard.static_page import html_report, markdown_report, read_all
from tests.dashboard.synthetic import episode, faulty, healthy, write_episodes, write_run


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("runs")
    config = {"data": {"val_size": 200}, "learner": {"lr": 1e-5}}
    write_run(folder / "a", *healthy(40), started="2026-01-01")
    write_run(folder / "b", *faulty("reward_hacking", 40), started="2026-01-02", config=config)
    write_episodes(folder / "a", [episode(s, a, reward=float(a), tokens=12 + 6 * a) for s in range(10) for a in (0, 1)])
    compared = {
        "task": "sort", "mode": "greedy", "metric": "pass@1", "first": "outputs/a", "second": "outputs/b", "tasks": 50,
        "first_value": 0.5, "second_value": 0.7, "difference": {"value": 0.2, "low": 0.05, "high": 0.35},
        "first_only": 3, "second_only": 13, "test": "McNemar's exact test", "p": 0.021,
    }  # fmt: skip
    (folder / "eval" / "one").mkdir(parents=True)
    (folder / "eval" / "one" / "results.json").write_text(json.dumps({"comparisons": [compared]}))
    return folder


@pytest.fixture(scope="module")
def dash(runs: Path) -> Iterator[Dash]:
    library = Library([runs])
    read_all(library)
    with Dash(library) as dash:
        yield dash


def get(dash: Dash, path: str, *, method: str = "GET", cookie: str | None = "right", **headers: str) -> Any:
    connection = http.client.HTTPConnection("127.0.0.1", dash.port, timeout=10)
    if cookie is not None:
        headers["Cookie"] = f'a="x; covey_dash_{dash.port}={dash.token if cookie == "right" else cookie}; b=1'
    connection.request(method, path, headers=headers)
    reply = connection.getresponse()
    body = reply.read()
    connection.close()
    return reply.status, dict(reply.getheaders()), body


def ask(dash: Dash, name: str, **asked: object) -> Any:
    status, _, body = get(dash, f"/api/{name}?{urlencode(asked)}")
    assert status == 200, body
    return json.loads(body)


# -- who may look ------------------------------------------------------------------------------------------------------


def test_the_link_gives_a_cookie_that_scripts_cannot_read(dash: Dash) -> None:
    status, headers, _ = get(dash, dash.link.removeprefix(f"http://127.0.0.1:{dash.port}"), cookie=None)
    assert (status, headers["Location"]) == (303, "/")
    assert headers["Set-Cookie"] == f"covey_dash_{dash.port}={dash.token}; HttpOnly; SameSite=Strict; Path=/"


@pytest.mark.parametrize("path", ["/", "/api/runs", "/app.js", "/api/csv?run=0", "/?token=wrong", "/?token="])
@pytest.mark.parametrize("cookie", [None, "wrong", ""])
def test_without_the_token_nothing_is_shown(dash: Dash, path: str, cookie: str | None) -> None:
    status, headers, body = get(dash, path, cookie=cookie)
    assert status == 403 and "Set-Cookie" not in headers and len(body) < 100


def test_another_host_name_is_refused(dash: Dash) -> None:
    assert get(dash, "/api/runs", Host="evil.example")[0] == 403
    assert get(dash, "/api/runs", Host=f"localhost:{dash.port}")[0] == 200


@pytest.mark.parametrize(
    "path",
    ["/../run.json", "/..%2f..%2fetc/passwd", "/page/style.css", "//etc/passwd", "/style.css/../app.js", "/a/run.json"],
)
def test_path_traversal_is_refused(dash: Dash, path: str) -> None:
    assert get(dash, path)[0] == 404


@pytest.mark.parametrize("asked", ["run=../a", "run=-1", "run=99", "run=0&id=99999", "run=0&id=1.5", "run=9e9"])
def test_runs_and_episodes_are_numbers(dash: Dash, asked: str) -> None:
    assert get(dash, f"/api/episode?{asked}")[0] == 400


def test_only_get_and_only_short_requests(dash: Dash) -> None:
    for method in ("POST", "PUT", "DELETE"):
        assert get(dash, "/api/runs", method=method)[0] == 501
    assert get(dash, "/api/runs?x=" + "y" * 5000)[0] == 403


def test_the_page_loads_nothing_from_other_servers(dash: Dash) -> None:
    for path, (name, kind) in PAGE.items():
        status, headers, body = get(dash, path)
        assert status == 200 and headers["Content-Type"].startswith(kind)
        assert "default-src 'none'" in headers["Content-Security-Policy"]
        assert "unsafe" not in headers["Content-Security-Policy"] and "Access-Control-Allow-Origin" not in headers
        assert b"http://" not in body and b"https://" not in body, name


# -- what it answers ---------------------------------------------------------------------------------------------------


def test_runs_and_one_of_them(dash: Dash) -> None:
    found = ask(dash, "runs")["runs"]
    assert [(run["name"], run["label"]) for run in found] == [("a", "grpo lr=1e-6"), ("b", "grpo lr=1e-5")]
    whole = ask(dash, "run", run=1)
    assert ask(dash, "run", run=0)["findings"] == [] and whole["early"] is None
    assert [finding["name"] for finding in whole["findings"]] == ["reward_hacking"]
    assert whole["config"]["learner.lr"] == 1e-5 and "reward/mean" in whole["names"]["step"]


def test_series_with_their_axes_and_intervals(dash: Dash, runs: Path) -> None:
    found = ask(dash, "series", run=0, names="reward/mean,unheard/of")
    assert list(found["series"]) == ["reward/mean"] and found["axes"]["step"] == list(range(40))
    first = json.loads((runs / "a" / "metrics.jsonl").read_text().splitlines()[1])["metrics"]["reward/mean"]
    assert found["series"]["reward/mean"]["y"][0] == pytest.approx(first, rel=1e-6)
    held = ask(dash, "series", run=0, kind="eval", names="eval/accuracy")["series"]["eval/accuracy"]
    assert all(low <= y <= high for low, y, high in zip(held["lo"], held["y"], held["hi"], strict=True))


def test_episodes_by_pages_and_one_of_them(dash: Dash) -> None:
    found = ask(dash, "episodes", run=0, min_reward=1, limit=3, sort="step", order="up")
    assert (found["total"], found["recorded"], [row["step"] for row in found["rows"]]) == (10, 20, [0, 1, 2])
    row = ask(dash, "episodes", run=0, min_reward=1, limit=3, offset=9, order="up")["rows"][0]
    whole = ask(dash, "episode", run=0, id=row["id"])
    assert (whole["step"], whole["total_reward"]) == (9, 1.0) and row["reply"] in whole["messages"][1]["content"]
    assert [r["attempt"] for r in ask(dash, "related", run=0, id=row["id"], kind="group")["rows"]] == [0, 1]
    assert [r["step"] for r in ask(dash, "related", run=0, id=row["id"], kind="task")["rows"]] == [2, 2, 9, 9]


def test_reward_against_length(dash: Dash) -> None:
    """Attempt 1 has 18 tokens, 15 of them sampled, and reward 1; attempt 0 has 10 and reward 0: they correlate."""
    found = ask(dash, "scatter", run=0, x="length", y="reward")
    assert found["correlation"] == pytest.approx(1.0) and sorted(set(found["x"])) == [10.0, 15.0]
    assert "reward:exact" in found["names"]
    assert get(dash, "/api/scatter?run=0&x=nonsense")[0] == 400


def test_runs_beside_each_other(dash: Dash) -> None:
    found = ask(dash, "compare", runs="0,1")
    assert found["settings"] == [["learner.lr", 1e-6, 1e-5]]
    (unpaired,) = found["unpaired"]
    assert unpaired["steps"] == [40, 40] and unpaired["b"] < unpaired["a"] and unpaired["high"] < 0
    (paired,) = found["paired"]
    assert (paired["first"], paired["second"]) == ("a", "b") and "b is 20 points above a" in paired["sentence"]


def test_every_number_as_csv(dash: Dash) -> None:
    status, headers, body = get(dash, "/api/csv?run=0")
    rows = list(csv.DictReader(io.StringIO(body.decode())))
    assert status == 200 and headers["Content-Type"].startswith("text/csv")
    assert [row["kind"] for row in rows].count("step") == 40
    assert rows[0]["policy/entropy"] != "" and rows[0]["eval/accuracy"] == ""


def test_new_records_arrive(dash: Dash, runs: Path) -> None:
    before = ask(dash, "runs")["runs"][0]
    with (runs / "a" / "metrics.jsonl").open("a") as file:
        file.write(json.dumps({"kind": "step", "step": 40, "metrics": {"reward/mean": 0.5}}) + "\n")
    dash.library.poll()
    after = ask(dash, "runs")["runs"][0]
    assert (before["done"], after["done"]) == (40, 41) and before["version"] != after["version"]


def test_newcombes_interval(tmp_path: Path) -> None:
    """Newcombe 1998, method 10: 56 of 70 against 48 of 80 is a difference of 0.2, from 0.0524 to 0.3339."""
    series, _ = healthy(20)
    write_run(tmp_path / "a", series, {0: 0.1, 10: 48 / 80}, started="1", held_out=80)
    write_run(tmp_path / "b", series, {0: 0.2, 20: 56 / 70}, started="2", held_out=70)
    library = Library([tmp_path])
    library.poll()
    found = unpaired(*library.runs)
    assert found is not None and found["steps"] == [10, 20], "none but the one before training is after as many updates"
    assert found["low"] == pytest.approx(0.0524, abs=1e-4) and found["high"] == pytest.approx(0.3339, abs=1e-4)


# -- as one file -------------------------------------------------------------------------------------------------------


def test_the_report_is_one_self_contained_file(runs: Path) -> None:
    page = html_report([runs / "a"], episodes=8)
    assert '<link rel="stylesheet"' not in page and "src=" not in page.replace("img-src", "")
    assert "connect-src" not in page and "default-src 'none'" in page
    data = page.split('id="inline">', 1)[1].split("</script>", 1)[0]
    assert "<" not in data, "text of a model cannot end the script"
    run = json.loads(data)["runs"][0]
    assert len(run["rows"]) == 8 and run["recorded"] == 20
    assert {(row["step"], row["attempt"]) for row in run["rows"]} >= {(0, 0), (0, 1)}, "groups are whole"


NASTY = (
    "<img src=x onerror=alert(1)> [a](javascript:b) `x` ![p](http://evil.example/p) | <b>\n\n# big\n<script>1</script>"
)


def test_markdown_escapes_user_text(tmp_path: Path) -> None:
    """Another Markdown implementation finds no HTML, links or images in it, and all of the text."""
    from markdown_it import MarkdownIt

    from covey.telemetry.report import write_report

    run = tmp_path / "run"
    write_run(run, *healthy(12))
    told: dict[str, Any] = dict.fromkeys(("title", "algorithm", "model", "task", "command", "trained_reward"), NASTY)
    info = {**json.loads((run / "run.json").read_text()), **told, "reward_names": [NASTY, "other " + NASTY]}
    (run / "run.json").write_text(json.dumps(info))
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    for line in lines:
        if line["kind"] == "eval":
            line["metrics"][f"eval/greedy/{NASTY}"] = 0.5
    (run / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    (run / ".hydra").mkdir()
    (run / ".hydra" / "overrides.yaml").write_text(json.dumps([NASTY, "learner.lr=1"]))
    reader = MarkdownIt("commonmark").enable("table")
    for page, pictures in ((markdown_report(run), 0), (write_report(run).read_text(), 1)):
        tokens = [inner for token in reader.parse(page) for inner in (token, *(token.children or ()))]
        kinds = [token.type for token in tokens]
        assert not {"html_inline", "html_block", "link_open"} & set(kinds)
        assert kinds.count("image") == pictures  # our own curve
        assert sum(token.type == "heading_open" and token.tag == "h1" for token in tokens) == pictures
        shown = "".join(token.content for token in tokens if token.type in ("text", "code_inline", "fence"))
        assert shown.count("<img src=x onerror=alert(1)> [a](javascript:b) `x` ![p](http://evil.example/p)") >= 5


def test_markdown_has_results_and_findings(runs: Path) -> None:
    text = markdown_report(runs / "b")
    assert "| `eval/accuracy` |" in text and "**Reward up, held-out accuracy down.**" in text
    assert "`reward.weights`" in text
    assert "No findings." in markdown_report(runs / "a")
    assert str(runs) not in text


def test_a_run_of_a_few_steps_is_not_judged(tmp_path: Path) -> None:
    folder = write_run(tmp_path / "a", *faulty("reward_hacking", 9))
    assert "Too early to tell: a run is judged from its 10th step on, and this one has 9." in markdown_report(folder)
    library = Library([folder])
    library.poll()
    assert Api(library).answer("run", {})["early"].startswith("Too early to tell")
    write_run(tmp_path / "a", *healthy(10))
    library.poll()
    assert Api(library).answer("run", {})["early"] is None


def test_an_image_of_an_episode_is_sent_and_no_other_file(tmp_path: Path) -> None:
    name = f"images/{'a' * 64}.png"
    run = tmp_path / "run"
    write_run(run, *healthy(5))
    (run / "images").mkdir()
    (run / name).write_bytes(b"\x89PNG picture")
    (run / "secret.png").write_text("secret")
    (run / f"images/{'b' * 64}.png").symlink_to(run / "secret.png")
    library = Library([tmp_path])
    read_all(library)
    with Dash(library) as dash:
        status, headers, body = get(dash, f"/api/image?{urlencode({'run': 0, 'name': name})}")
        assert (status, headers["Content-Type"], body) == (200, "image/png", b"\x89PNG picture")
        assert get(dash, f"/api/image?{urlencode({'run': 0, 'name': name})}", cookie=None)[0] == 403
        others = (f"images/{'b' * 64}.png", f"images/{'c' * 64}.png", "images/../secret.png", "secret.png", "")
        for other in others:
            assert get(dash, f"/api/image?{urlencode({'run': 0, 'name': other})}")[0] == 400
