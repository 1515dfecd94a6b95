"""The documentation against the code: pages, options and their defaults, metrics, links, the example.

Command lines and Python blocks: tests/docs."""

from __future__ import annotations

import dataclasses
import importlib
import json
import re
import tomllib
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import covey
from covey.algorithms import ALGORITHMS, LOSSES, catalogue, make, settings
from covey.algorithms.aggregation import Aggregation
from covey.algorithms.correction import Correction
from covey.algorithms.kl import Kl
from covey.algorithms.shaping import GroupFilter, Shaping
from covey.cli.main import main
from covey.cluster.engines import RayEngine
from covey.config.schema import Config, CriticConfig
from tests.algorithms.helpers import EXCHANGEABLE, samples_of
from tests.cli.test_algorithms import REWARDS, SMALL
from tests.docs import pages
from tests.rollout.no_vllm import without_vllm

ROOT = Path(__file__).parent.parent
DOCS = ROOT / "docs"
README = DOCS / "algorithms" / "README.md"
PAGES = {path.stem: path for path in sorted((DOCS / "algorithms").glob("*.md")) if path != README}
SHARED = (Aggregation, Kl, Correction, Shaping, GroupFilter)


# -- reading Markdown ------------------------------------------------------------------------------------------------


def tables(path: Path, first: str) -> list[list[str]]:
    """The rows of all tables whose first column is headed `first`, as cells."""
    rows, wanted = [], False
    for line in path.read_text().splitlines():
        if not line.startswith("|"):
            wanted = False
            continue
        cells = [cell.strip() for cell in re.split(r"(?<!\\)\|", line)[1:-1]]
        if wanted and not set(cells[0]) <= {"-"}:
            rows.append(cells)
        wanted = wanted or cells[0] == first
    return rows


def quoted(text: str) -> list[str]:
    return re.findall(r"`([^`]+)`", text)


def value(text: str) -> Any:
    """A default as a page writes it."""
    constants = {"true": True, "false": False, "null": None}
    if text in constants:
        return constants[text]
    try:
        return float(text)
    except ValueError:
        return text


def blocks(path: Path) -> list[tuple[str, str]]:
    """Fenced blocks: language and text."""
    return re.findall(r"^```(\w*)\n(.*?)^```$", path.read_text(), re.DOTALL | re.MULTILINE)


# -- pages and options -----------------------------------------------------------------------------------------------


def test_every_algorithm_has_a_page_and_every_page_an_algorithm() -> None:
    assert set(PAGES) == set(ALGORITHMS)


def field_defaults(*parts: type) -> dict[str, Any]:
    return {f.name: f.default for part in parts for f in dataclasses.fields(part) if f.init}


@pytest.mark.parametrize("name", ALGORITHMS)
def test_a_page_has_every_option_of_its_own_with_its_default(name: str) -> None:
    defaults = {key: default for key, (_, default) in settings(name).items()}
    own = field_defaults(ALGORITHMS[name].estimator, LOSSES[ALGORITHMS[name].loss].objective)
    changed = {key for key, usual in field_defaults(*SHARED).items() if defaults.get(key, usual) != usual}
    written = {quoted(row[0])[0]: value(row[1]) for row in tables(PAGES[name], "option")}
    assert {"loss", *own, *changed} <= set(written)
    assert written == {key: defaults[key] for key in written}


def test_shared_settings_are_explained_with_their_defaults() -> None:
    written = {quoted(row[0])[0]: value(row[1]) for row in tables(README, "setting")}
    shared = field_defaults(*SHARED)
    sections = {section.name: getattr(Config(), section.name) for section in dataclasses.fields(Config)}
    for key, default in written.items():
        section, _, name = key.rpartition(".")
        assert default == (getattr(sections[section], name) if section else shared[key]), key
    assert {*shared, *(f"critic.{f.name}" for f in dataclasses.fields(CriticConfig))} <= set(written)


def test_the_table_of_algorithms_is_the_catalogue() -> None:
    rows = {quoted(row[0])[0]: row[1:] for row in tables(README, "name")}
    assert list(rows) == list(ALGORITHMS)
    for name, (also, _, paper, loss, size, more) in rows.items():
        entry, needs = ALGORITHMS[name], make(name).needs
        assert quoted(also) == list(entry.also), name
        assert quoted(loss) == [entry.loss], name
        assert paper == (f"[{entry.paper}](https://arxiv.org/abs/{entry.paper})" if entry.paper else ""), name
        least, _, better = size.partition(", better ")
        assert (int(least), int(better or 1)) == (needs.min_group_size, needs.advised_group_size), name
        wanted = {"reference": needs.reference, "critic": needs.values, "greedy answer": needs.greedy_baseline}
        always = more.partition(";")[0]  # what follows is needed with certain settings only
        assert {word: word in always for word in wanted} == wanted, name


def test_the_table_of_losses_is_the_catalogue() -> None:
    rows = {quoted(row[0])[0]: row[2:] for row in tables(README, "loss")}
    assert set(rows) == set(EXCHANGEABLE)
    for name, (own, aggregation) in rows.items():
        defaults = {key: default for key, (_, default) in settings("grpo", name).items()}
        written = {key: value(text) for key, text in re.findall(r"`(\w+)` ([-\w.]+)", own)}
        assert written == {key: defaults[key] for key in field_defaults(LOSSES[name].objective)}, name
        assert aggregation == defaults["aggregation"], name


REPOSITORY = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["urls"]["Source"]
RAW = REPOSITORY.replace("https://github.com/", "https://raw.githubusercontent.com/")
HERE = re.compile(rf"(?:{re.escape(REPOSITORY)}/(?:blob|tree)|{re.escape(RAW)})/main/")  # addresses of this checkout


def links(page: Path) -> list[str]:
    """Targets of links and pictures, except those of other sites."""
    targets = re.findall(r"\]\(([^)\s]+)\)", page.read_text())
    return [target for target in targets if HERE.match(target) or not re.match(r"https?:|mailto:", target)]


@pytest.mark.parametrize(
    "page", [*pages.PAGES, ROOT / "examples/README.md"], ids=lambda page: str(page.relative_to(ROOT))
)
def test_links_lead_somewhere(page: Path) -> None:
    for target in links(page):
        file, _, anchor = target.partition("#")
        start = HERE.match(file)
        path = (ROOT / file[start.end() :] if start else page.parent / file).resolve() if file else page
        assert path.is_dir() if file.endswith("/") else path.is_file(), target
        headings = re.findall(r"^#+ (.*)$", path.read_text(), re.MULTILINE) if path.suffix == ".md" else []
        assert not anchor or anchor in {re.sub(r"[^\w -]", "", h).lower().replace(" ", "-") for h in headings}, target


def test_links_of_the_readme_work_on_the_package_index() -> None:
    """It is the page of the package there, where relative links lead nowhere."""
    assert [target for target in links(ROOT / "README.md") if not HERE.match(target)] == []


# -- metrics ---------------------------------------------------------------------------------------------------------

BRITTLE = """
def brittle(final_answer):
    if len(set(final_answer)) % 2:
        raise ValueError("odd")
    return len(final_answer) / 10
"""
AGENT = """
import covey
from covey.types import Episode, ToolUse

class Plays:
    def opening(self, task):
        return task.messages, None

    async def run(self, policy, task):
        text = await policy.chat(task.messages)
        reply = {"role": "assistant", "content": text}
        last = await policy.chat([*task.messages, reply, {"role": "user", "content": "sure?"}])
        uses = (ToolUse("calculator", 0.1), ToolUse("calculator", 0.1, "malformed"))
        said = (reply, {"role": "assistant", "content": last})
        return Episode(task, tuple(policy.turns), (*task.messages, *said), stop=policy.turns[-1].stop, tools=uses)

class Pays:
    def reset(self, task):
        return covey.Observation([*task.messages], role="one")

    def step(self, reply):
        return covey.Observation("and you?", reward=0.5, role="two")

    def end(self, reason):
        return covey.Done(reward={"one": 1.0, "two": 0.0})
"""
RUNS = {
    "gvpo, evaluated, saved": "algorithm=gvpo eval.before=true eval.modes=[greedy,sampled] loop.save_every=1",
    "dapo, KL, correction, several updates": (
        "algorithm=dapo reward=[rewards.py:variety] rollout.max_tokens=2 rollout.top_p=0.7 learner.mini_batch_size=1 "
        "algorithm.kl_coef=0.1 algorithm.kl_target=0.1 algorithm.kl_old_coef=0.1 learner.entropy_coef=0.01"
    ),
    "ppo, KL in the reward": "algorithm=ppo algorithm.kl_in=reward algorithm.kl_coef=0.1 critic.warmup_steps=1",
    "remax": "algorithm=remax",
    "maxrl with clip_cov": "algorithm=maxrl algorithm.loss=clip_cov",
    "raft with vespo": "algorithm=raft algorithm.loss=vespo",
    "otb with dppo": "algorithm=otb algorithm.loss=dppo_kl",
    "online_dpo": "algorithm=online_dpo",
    "gpg, while sampling goes on": "algorithm=gpg mode=async mode.max_uses=2",
    "dgdo with sapo": "algorithm=dgdo algorithm.loss=sapo algorithm.truncated=penalise",
    "grpo, sampled by vllm": "algorithm=grpo rollout=vllm",
    "grpo, with a teacher": (
        "algorithm=grpo teacher=current teacher.kl=full teacher.prompt_template='{question}{answer}'"
    ),
    "a curriculum": "algorithm=grpo data.sampler=band",
    "an agent with tools": "algorithm=grpo agent=agent.py:Plays",
    "an environment with roles that pays turns": "algorithm=gigpo agent=agent.py:Pays reward=given",
    "self-play against past policies": "algorithm=grpo agent=agent.py:Pays reward=given agent.opponents=[two]",
    "a reward that breaks": "algorithm=grpo reward=rewards.py:brittle eval.before=true eval.modes=[sampled] eval.n=8",
}


@pytest.fixture(scope="module")
def logged(tiny_model_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, set[str]]:
    """The names of all metrics that each of the runs wrote."""
    found = {}
    for name, line in RUNS.items():
        folder = tmp_path_factory.mktemp("run")
        (folder / "rewards.py").write_text(REWARDS + BRITTLE)
        (folder / "agent.py").write_text(AGENT)
        with pytest.MonkeyPatch.context() as patch:
            patch.chdir(folder)
            without_vllm(patch)
            assert main(["train", f"model={tiny_model_folder}", *SMALL, *line.split()]) == 0
        (path,) = folder.glob("outputs/*/*/metrics.jsonl")
        found[name] = {metric for record in path.read_text().splitlines() for metric in json.loads(record)["metrics"]}
    return found


def documented() -> dict[str, re.Pattern[str]]:
    names = [name for row in tables(DOCS / "metrics.md", "metric") for name in quoted(row[0])]
    return {name: re.compile(re.sub(r"\\\{\w+\\\}", ".+", re.escape(name))) for name in names}


@pytest.mark.parametrize("run", RUNS)
def test_every_metric_that_is_written_is_documented(run: str, logged: dict[str, set[str]]) -> None:
    patterns = documented().values()
    assert [name for name in sorted(logged[run]) if not any(p.fullmatch(name) for p in patterns)] == []


ON_A_GPU = {"perf/gpu_memory_gib", "perf/gpu_reserved_gib"}


def cluster_metrics() -> set[str]:
    """Asked of the engine itself: a run on a cluster takes long to start."""
    counts: Any = SimpleNamespace(reissued=0, replaced=0)
    return set(RayEngine.metrics(counts))


def test_the_metrics_of_a_cluster_are_documented() -> None:
    assert cluster_metrics() <= documented().keys()


def test_every_metric_that_is_documented_is_written_by_some_run(logged: dict[str, set[str]]) -> None:
    names = set().union(*logged.values(), cluster_metrics(), ON_A_GPU)
    assert [text for text, pattern in documented().items() if not any(map(pattern.fullmatch, names))] == []


@pytest.mark.parametrize("name", PAGES)
def test_the_metrics_of_a_page_are_documented(name: str) -> None:
    patterns = documented().values()
    shown = [metric for row in tables(PAGES[name], "metric") for metric in quoted(row[0])]
    assert shown
    assert [metric for metric in shown if not any(p.fullmatch(metric) for p in patterns)] == []


# -- the example ------------------------------------------------------------------------------------------------------


def test_the_example_of_a_new_algorithm_works(
    tmp_path: Path, tiny_model_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    module_text, entry_text, test_text, _ = (text for language, text in blocks(README) if language == "python")
    (tmp_path / "median.py").write_text(module_text)
    (tmp_path / "rewards.py").write_text(REWARDS)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.chdir(tmp_path)
    module = importlib.import_module("median")
    for name, entry in eval(f"{{{entry_text}}}", {**vars(catalogue), **vars(module)}).items():
        monkeypatch.setitem(ALGORITHMS, name, entry)
    space: dict[str, Any] = {"torch": torch, "covey": covey}
    exec(test_text, space)
    (check,) = (thing for name, thing in space.items() if name.startswith("test_"))
    check()
    assert main(["train", f"model={tiny_model_folder}", *SMALL, "algorithm=median", "algorithm.scale=2"]) == 0


def test_the_example_of_an_algorithm_outside_of_the_package_works(
    tmp_path: Path, tiny_model_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    *_, text = (text for language, text in blocks(README) if language == "python")
    (tmp_path / "my_algo.py").write_text(text)
    (tmp_path / "rewards.py").write_text(REWARDS)
    monkeypatch.chdir(tmp_path)
    found = make("my_algo.py:Clipped", most=0.25).advantages(samples_of([1.0, 0.0, 0.5, 0.75], [0, 0, 1, 1]))
    assert found.values.tolist() == [0.25, -0.25, -0.125, 0.125]
    chosen = ["algorithm=my_algo.py:Clipped", "algorithm.most=0.5", "algorithm.loss=gspo"]
    assert main(["train", f"model={tiny_model_folder}", *SMALL, *chosen]) == 0
    assert main(["config", "explain", chosen[0]]) == 0
