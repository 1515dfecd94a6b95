"""Run folders of any content, and requests of any content: what can be read is shown, the rest is told."""

from __future__ import annotations

import io
import json
import tempfile
from collections.abc import Sequence
from contextlib import redirect_stderr, redirect_stdout
from pathlib import Path
from typing import Any
from urllib.parse import quote, urlencode

import pytest
import yaml
from hypothesis import strategies as st

from covey.cli.main import main
from covey.cli.runs import watch
from covey.dashboard.api import Api, BadRequest
from covey.dashboard.runs import Library
from covey.dashboard.static_page import html_report, markdown_report, read_all
from covey.errors import InputError
from tests.dashboard.synthetic import INFO, episode, healthy, write_episodes, write_run
from tests.faults.fuzzing import Target, json_values, mixed, numbers, scalars, suite, texts

NAMES = ["reward/mean", "eval/accuracy", "timing/step", "policy/entropy", "grad/norm", "optim/skipped", "kl/reference"]
NAMES += ["groups/flat", "response/truncated", "episodes/failed", "episodes/total", "episodes/failed/x", "policy/ess"]
FIELDS = [*episode(0, 0), "role", "content", "mask", "error", "kind", "metrics", "rows"]


def _line(value: Any) -> bytes:
    return json.dumps(value).encode() + b"\n"


anything = json_values(FIELDS)
records = st.fixed_dictionaries(
    {
        "kind": st.sampled_from(["step", "eval"]) | scalars,
        "step": st.integers(0, 60) | numbers | scalars,
        "metrics": st.dictionaries(st.sampled_from(NAMES), st.floats(0, 1) | numbers | scalars, max_size=6) | anything,
    }
)
sound = st.builds(
    lambda kind, values: [{"kind": kind, "step": n, "metrics": value} for n, value in enumerate(values)],
    st.sampled_from(["step", "eval"]),
    st.lists(st.dictionaries(st.sampled_from(NAMES), numbers, min_size=1, max_size=6), min_size=8, max_size=14),
).map(lambda found: b"".join(map(_line, found)))
raw = st.one_of(st.binary(max_size=40), texts.map(lambda text: text.encode(errors="replace") + b"\n"))
lines = st.one_of(
    records.map(_line), sound, anything.map(_line), raw, st.just(b"[" * 9000 + b"\n"), st.just(b"9" * 5000 + b"\n")
)
metrics_files = st.lists(lines, max_size=6).map(b"".join)
episodes_files = st.lists(
    st.one_of(
        st.builds(
            lambda n, changes: _line(episode(n, 0) | changes),
            st.integers(0, 9),
            st.dictionaries(st.sampled_from(FIELDS), anything, max_size=2),
        ),
        st.builds(lambda n: _line(episode(n, 1)), st.integers(0, 9)),
        lines,
        st.just(b'{"a": 1, "rows": [{"mask": [1, 1'),
    ),
    max_size=6,
).map(b"".join)
infos = st.one_of(
    st.dictionaries(st.sampled_from(sorted(INFO)) | texts, scalars | anything, max_size=3).map(
        lambda changes: json.dumps(INFO | {"total_steps": 10} | changes).encode()
    ),
    st.builds(
        lambda title: json.dumps(INFO | {"total_steps": 10, "title": title}).encode(),
        mixed(["[/a]", "[red]", "\\[", "<b>"]),
    ),
    st.just(json.dumps(INFO | {"total_steps": 10}).encode()),
    raw,
)
configs = st.one_of(
    json_values(["data", "val_size", "learner"]).map(lambda tree: yaml.dump(tree).encode(errors="replace")),
    raw,
    st.sampled_from([b"data: {val_size: 200}", b"data: {val_size: x}", b"a: &a [*a]", b"{" * 3000, b"a: 2020-99-99"]),
)
results = st.one_of(
    json_values(["comparisons", "difference", "first"]).map(_line), raw, st.just(b'{"comparisons": [1]}')
)
folders = st.fixed_dictionaries(
    {"run.json": infos},
    optional={
        "metrics.jsonl": metrics_files,
        "episodes.jsonl": episodes_files,
        "config.yaml": configs,
        ".hydra/overrides.yaml": configs,
        "eval/results.json": results,
        "labels.json": json_values(["tags", "notes"]).map(_line) | raw,
        "summary.json": json_values(["key", "size", "steps", "seconds", "recent", "evaluations", "broken"]).map(_line)
        | raw,
    },
)


def _write(folder: Path, files: dict[str, bytes]) -> Path:
    for name, data in files.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(data)
    return folder


def shows(files: dict[str, bytes]) -> None:
    """Every answer of the page can be made; a sound run beside the damaged one stays there."""
    with tempfile.TemporaryDirectory() as where:
        _write(Path(where, "bad"), files)
        write_run(Path(where, "good"), *healthy(12))
        library = Library([Path(where)])
        read_all(library)
        assert any(run.name == "good" for run in library.runs)
        api = Api(library)
        for run in library.runs:
            asked = {"run": str(run.number)}
            names = ",".join(api.answer("run", asked)["names"]["step"])
            for name in ("runs", "episodes", "compare", "scatter"):
                json.dumps(api.answer(name, asked))
            for kind in ("step", "eval"):
                json.dumps(api.answer("series", asked | {"kind": kind, "names": names}), allow_nan=False)
            for place in range(len(run.episodes)):
                json.dumps(api.answer("episode", asked | {"id": str(place)}))
                json.dumps(api.answer("related", asked | {"id": str(place), "kind": "task"}))
            api.csv(asked)
        assert "<html" in html_report([Path(where)])


def tells(files: dict[str, bytes]) -> None:
    """covey runs, watch and report over the folder: an exit code and words, never a traceback."""
    with tempfile.TemporaryDirectory() as where:
        folder = _write(Path(where, "run"), files)
        for words in (["runs", where], ["report", str(folder)], ["report", "--markdown", str(folder)]):
            assert _run(words) in (0, 2)
        try:
            with redirect_stdout(io.StringIO()), redirect_stderr(io.StringIO()):
                watch(folder, _enough)
        except (InputError, KeyboardInterrupt):
            pass
        try:
            markdown_report(folder)
        except InputError as error:
            assert "run" in str(error)


def _enough() -> None:
    raise KeyboardInterrupt


def _run(words: Sequence[str]) -> int:
    out = io.TextIOWrapper(io.BytesIO(), encoding="utf-8", errors="backslashreplace")
    with redirect_stdout(out), redirect_stderr(out):
        return main(words)


# -- requests --------------------------------------------------------------------------------------------------------

PATHS = ["runs", "run", "series", "episodes", "episode", "related", "scatter", "compare", "csv", "nothing", ""]
ASKED = ["run", "runs", "kind", "names", "offset", "limit", "id", "x", "y", "task", "text", "stop", "sort", "order"]
ASKED += ["min_reward", "max_length", "first_step", "tool_errors", "failed"]
VALUES = [
    "0",
    "1",
    "-1",
    "99999999999",
    "1e999",
    "nan",
    "eval",
    "step",
    "group",
    "length",
    "reward:exact",
    "0,1",
    "٣",
    "a,b",
]
queries = st.tuples(
    st.sampled_from(PATHS), st.dictionaries(st.sampled_from(ASKED) | texts, st.sampled_from(VALUES) | texts, max_size=4)
)


class Served:
    """One server for all requests of this file, started when it is first asked."""

    api: Api | None = None

    @classmethod
    def get(cls) -> Api:
        if cls.api is None:
            folder = Path(tempfile.mkdtemp())
            write_run(folder / "a", *healthy(12))
            write_episodes(folder / "a", [episode(step, attempt) for step in range(3) for attempt in (0, 1)])
            library = Library([folder])
            read_all(library)
            cls.api = Api(library)
        return cls.api


def answers(given: tuple[str, dict[str, str]]) -> None:
    name, asked = given
    api = Served.get()
    try:
        found = api.csv(asked) if name == "csv" else api.answer(name, asked)
    except BadRequest as error:
        assert str(error)
    else:
        json.dumps(found, default=str)


def requests(given: tuple[str, str, dict[str, str]]) -> None:
    """The same through the server: no 5xx, and no connection that ends without an answer."""
    kind, text, headers = given
    status, body = _asked(kind, text, headers)
    assert 200 <= status < 500, (status, body[:300])


def _asked(path: str, query: str, headers: dict[str, str]) -> tuple[int, bytes]:
    """One request to a handler without a socket."""
    from covey.dashboard.server import Handler

    class Wire:
        def __init__(self, sent: bytes) -> None:
            self.sent, self.got = io.BytesIO(sent), io.BytesIO()

        def makefile(self, mode: str, *_: Any) -> io.BytesIO:
            return self.sent

        def sendall(self, data: bytes) -> None:
            self.got.write(data)

        def settimeout(self, seconds: float) -> None: ...

    class Place:
        server_port, api, token = 1, Served.get(), "token"

    fragments = {"Host": "127.0.0.1:1", "Cookie": "covey_dash_1=token", "Connection": "close"} | headers
    head = "".join(f"{name}: {value}\r\n" for name, value in fragments.items())
    wire = Wire(f"GET {path}?{query} HTTP/1.1\r\n{head}\r\n".encode("latin-1", errors="replace"))
    Handler(wire, ("127.0.0.1", 1), Place())  # type: ignore[arg-type]
    answer = wire.got.getvalue()
    return int(answer.split(b" ", 2)[1]), answer


ways = st.one_of(
    queries.map(lambda q: (f"/api/{q[0]}", urlencode(q[1], errors="replace"))),
    st.tuples(
        texts.map(lambda t: "/" + quote(t, errors="replace")),
        texts.map(lambda t: quote(t, safe="=&;%", errors="replace")),
    ),
    st.tuples(
        st.sampled_from(["/", "/app.js", "/api/", "//x", "/api/../x", "/%2e%2e", "/api/runs/x"]),
        st.sampled_from(["", "token=x", "%ff=%00", "&&&=", "a" * 5000]),
    ),
)
plain = st.text(st.characters(min_codepoint=33, max_codepoint=255, exclude_characters=":\x85\xa0"), max_size=20)
headers = st.dictionaries(st.sampled_from(["Accept-Encoding", "X-A", "Origin"]), plain, max_size=2)
TARGETS = [
    Target("dash/folders", folders, shows, 60, seconds=30),
    Target("dash/commands", folders, tells, 40, seconds=30),
    Target("dash/queries", queries, answers, 150),
    Target("dash/requests", st.tuples(ways, headers).map(lambda w: (*w[0], w[1])), requests, 150),
]
test_fuzz = suite(TARGETS)


@pytest.mark.parametrize("title", ["[/a]", "a [red] b"])
def test_a_title_is_not_taken_for_markup(tmp_path: Path, title: str) -> None:
    write_run(tmp_path / "a", *healthy(12), title=title)
    assert _run(["runs", str(tmp_path)]) == 0


def test_a_damaged_run_does_not_hide_the_others(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_run(tmp_path / "good", *healthy(12))
    (tmp_path / "bad").mkdir()
    (tmp_path / "bad" / "run.json").write_text("{")
    with (tmp_path / "good" / "metrics.jsonl").open("a") as file:
        file.write('not JSON\n{"kind": "step", "step": 12, "metrics": {"reward/mean": 0.5}}\n')
    assert main(["runs", str(tmp_path)]) == 0
    out, err = capsys.readouterr()
    assert "13/12" in out  # the line after the broken one counts
    assert "bad/run.json: not a run.json of covey" in err and "metrics.jsonl: 1 lines cannot be read" in err
