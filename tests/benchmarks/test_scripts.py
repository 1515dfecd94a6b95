"""Every script of benchmarks/ is run: as the pages print it, with less to do, on a tiny model and on a CPU.

What a script starts as `covey ...` or as a side of a comparison runs in this process, scaled down as tests/docs does.
Whole processes, clusters and browsers are for `make test-slow`.
"""

from __future__ import annotations

import importlib
import json
import os
import re
import sys
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

from covey.cli.main import main
from covey.telemetry import read_episodes
from tests.benchmarks.conftest import BENCHMARKS
from tests.benchmarks.test_studies import made_up, start_here
from tests.conftest import shared_folder
from tests.docs.pages import COMMANDS, Command
from tests.docs.scaled import scaled

SCRIPTS = sorted(path.stem for path in BENCHMARKS.glob("*.py") if "__main__" in path.read_text())
PRINTED = [c for c in COMMANDS if c.program == "python" and c.excuse is None]

# What is added to a command line so that it has little to do.
LESS = {
    "agent_seeds": ["--seeds", "0", "1"],
    "async_learning": ["--seeds", "0", "--steps", "1"],
    "async_tools": ["--steps", "1", "--staleness", "1"],
    "curriculum": ["--seeds", "0", "--steps", "10", "--pretraining", "2"],
    "compare": [],
    "compare_study": [],
    "decode": ["--tiny", "--out", "results"],
    "decode_cpu": ["--threads", "1", "--rows", "4"],
    "demo_seeds": ["--seeds", "0", "1"],
    "distill": ["--seeds", "0", "--steps", "1"],
    "distill_gsm8k": ["--tiny", "--parts", "1", "--methods", "grpo", "teacher", "both", "--write"],
    "faults": ["--runs", "1", "--modes", "sync", "--signals", "KILL", "--kills", "1", "--jobs", "1", "--out", "found"],
    "fuzz": ["--minutes", "0.002", "--targets", "data"],
    "gateway_load": ["--clients", "20", "--rounds", "1", "--turns", "1"],
    "gpu": [],
    "gsm8k": ["--minutes", "1"],
    "gvpo_anchor": [*["--seeds", "0", "--steps", "2", "--pretraining", "2", "--arms"], "grpo", "moving, 5, β 0.1"],
    "gvpo_optimum": ["--seeds", "0"],
    "kills": ["--runs", "1", "--roles", "engine"],
    "lora": ["--tiny", "--out", "results"],
    "malloc": ["keep"],  # one of the two processes that it compares
    "memory": ["--tiny", "--out", "results"],
    "modes": ["--tiny", "--out", "results"],
    "pack": [],
    "pack_model": [],
    "publish": [],
    "publish_studies": [],
    "regime": ["--tiny", "--out", "results"],
    "roles": ["--seeds", "0", "1"],
    "scaling": ["--tiny", "--out", "results"],
    "scoring": ["--only", "gsm8k", "--sample", "3"],
    "self_play": ["--seeds", "0", "1"],
    "simulate": [],
    "soak": ["--steps", "150", "--every", "0.1"],
    "study": ["--tiny", "--seeds", "0", "--only", "grpo"],
    "step": ["--tiny", "--out", "results", "--sides", "covey"],
    "turn_credit": ["--seeds", "0"],
    "two_rewards": ["--seeds", "0"],
    "vision": ["--tiny", "--out", "results"],
}
STUDIES = re.findall(r"<!-- study-(\S+): begin -->", (BENCHMARKS.parent / "docs/results.md").read_text())
NOT_RUN = {
    "dash": "needs playwright and chromium (make dash-test)",
    "gui_seeds": "needs playwright and chromium",
    "mutants": "needs a process that has not imported Covey: test_mutants.py",
}
# Start processes of their own, or train many times.
SLOW = ("curriculum", "faults", "gateway_load", "kills", "soak", "turn_credit", "two_rewards")


def test_every_script_is_run_or_says_why_not() -> None:
    assert sorted({*LESS, *NOT_RUN}) == SCRIPTS
    for command in PRINTED:
        assert re.fullmatch(r"benchmarks/\w+\.py", command.words[1]), command.place


def lines() -> list[Any]:
    """All that are printed, and those that no page prints as they are."""
    found = [(script_of(command), command.words[2:], command.place) for command in PRINTED]
    named = {script for script, _, _ in found}
    found += [(script, [], script) for script in LESS if script not in named]
    marks = {script: [pytest.mark.slow] for script in SLOW}
    return [pytest.param(script, words, id=place, marks=marks.get(script, ())) for script, words, place in found]


def script_of(command: Command) -> str:
    return Path(command.words[1]).stem


@pytest.mark.usefixtures("in_process")
@pytest.mark.parametrize(("script", "words"), lines())
def test_a_script_runs(
    script: str,
    words: list[str],
    place: Path,
    tiny_model_folder: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    module = importlib.import_module(script)
    words = [word for word in without_options(words) if not word.startswith("benchmarks/results")]
    words = [{"MODEL_FOLDER": str(tiny_model_folder), "GSM8K_FOLDER": "raw/gsm8k"}.get(word, word) for word in words]
    for folder in ("docs/images", "results"):
        Path(folder).mkdir(parents=True, exist_ok=True)
    if hasattr(module, "run_covey"):
        keep = ("loop.total_steps", "rollout.max_tokens") if script == "simulate" else ()
        monkeypatch.setattr(module, "run_covey", in_this_process(keep))
    if hasattr(module, "write_section"):  # the pages of this checkout stay as they are
        monkeypatch.setattr(module, "write_section", lambda name, text, page=None: Path(f"{name}.md").write_text(text))
    SMALLER.get(script, lambda *_: None)(module, monkeypatch)
    given = [*words, *LESS[script], *MORE.get(script, list)()]
    monkeypatch.setattr(sys, "argv", [f"{script}.py", *given])
    assert module.main() in (None, 0, *([1] if script == "soak" else []))  # so few steps can look like growth
    CHECKS.get(script, lambda: None)()


def without_options(words: Sequence[str]) -> list[str]:
    """[--flag VALUE] of a page may be left out."""
    return re.sub(r" ?\[[^]]*\]", "", " ".join(words)).split()


def in_this_process(keep: Sequence[str]) -> Callable[..., None]:
    """`covey ...` here, one at a time."""
    alone = threading.Lock()

    def run(words: Sequence[str], cwd: Any = None, **_: Any) -> None:
        command, *rest = words
        given = {"train": lambda: scaled(rest, whole=True, keep=keep), "sft": lambda: scaled(rest, whole=True)}
        less = given.get(command, lambda: [*rest, "--limit", "2"])()
        with alone:
            before = Path.cwd()
            os.chdir(cwd or before)
            try:  # clusters: tests/cluster
                assert main([command, *(word for word in less if not word.startswith("cluster"))]) == 0
            finally:
                os.chdir(before)

    return run


# -- what else makes a script small -----------------------------------------------------------------------------------


def quick_tools(module: Any, patch: pytest.MonkeyPatch) -> None:
    patch.setattr(module, "LOW", 0.0)
    patch.setattr(module, "HIGH", 0.02)
    if hasattr(module, "OTHERS"):
        patch.setattr(module, "OTHERS", module.OTHERS[:1])


def short_tools(module: Any, patch: pytest.MonkeyPatch) -> None:
    patch.setattr(module, "TOOL_S", 0.01)


def few_steps(module: Any, patch: pytest.MonkeyPatch) -> None:
    train = module.train
    patch.setattr(module, "train", lambda *words: train(*words, steps=4))
    for name, value in (("ANSWERS", 2), ("BETAS", (0.2,))):
        if hasattr(module, name):
            patch.setattr(module, name, value)
    if hasattr(module, "ALGORITHMS"):
        patch.setitem(module.ALGORITHMS, "dgdo", {"warmup_steps": 2, "beta_warmup_steps": 2})


def few_games(module: Any, patch: pytest.MonkeyPatch) -> None:
    few_steps(module, patch)
    patch.setattr(module, "EVERY", 1)


def short_answers(module: Any, patch: pytest.MonkeyPatch) -> None:
    patch.setattr(module, "REPEATS", 1)
    patch.setattr(module, "TOKENS", 6)


def parts_here(module: Any, patch: pytest.MonkeyPatch) -> None:
    def run(command: list[str], limit: float) -> int:
        name = Path(command[1]).stem
        words = ["--tiny", "--sides", "covey"] if name == "step" else ["--tiny"]
        code: int = importlib.import_module(name).main([*command[2:], *words])
        return code

    patch.setattr(module, "run_limited", run)


def nothing_installed(module: Any, patch: pytest.MonkeyPatch) -> None:
    def install(version: str, folder: Path, wheels: Path) -> None:
        (folder / "trl").mkdir(parents=True)
        (folder / "trl/__init__.py").write_text("")

    patch.setattr(module, "install", install)


def a_page_of_its_own(module: Any, patch: pytest.MonkeyPatch) -> None:
    from kit.report import write_page

    page = Path("page.md")
    page.write_text("<!-- lora-tiny-cpu: begin --><!-- lora-tiny-cpu: end -->")
    Path("records").mkdir()
    patch.setattr(module, "RECORDS", Path("records"))
    patch.setattr(module, "write_page", lambda result: write_page(result, page, Path("docs/images")))


def result_of_lora() -> list[str]:
    import lora

    assert lora.main(["--tiny", "--out", "results"]) == 0
    return ["results/lora-tiny-cpu.json"]


def beside_itself() -> list[str]:
    (path,) = result_of_lora()
    return [path, "--baseline", path]


def records_here(module: Any, patch: pytest.MonkeyPatch) -> None:
    patch.setattr(module, "RECORDS", Path("records"))


def results_here(module: Any, patch: pytest.MonkeyPatch) -> None:
    patch.setattr(module, "RESULTS", Path("results"))


def study_records_here(module: Any, patch: pytest.MonkeyPatch) -> None:
    """Records and the page of this checkout stay as they are."""
    page = Path("results.md")
    page.write_text("".join(f"<!-- study-{name}: begin --><!-- study-{name}: end -->\n" for name in STUDIES))
    patch.setattr(module, "RECORDS", Path("records"))
    patch.setattr(module, "PAGE", page)
    patch.setattr(module, "IMAGES", Path("docs/images"))
    patch.setattr(module, "write_section", importlib.import_module("tiny").write_section)


def jobs_here(module: Any, patch: pytest.MonkeyPatch) -> None:
    patch.setattr(module, "start_process", lambda environment: start_here)


def archive_of_a_run() -> list[str]:
    """As if it were of a real model, and at the place that pages name."""
    from studies.record import pack, write_record

    write_record(made_up("grpo", 0, [1.0, 0.0]), Path("records/gsm8k"))
    Path("EXPORT").mkdir(exist_ok=True)
    pack(Path("records/gsm8k"), Path("EXPORT/gsm8k.tar"))
    return ["--archive", "EXPORT/gsm8k.tar", "--baseline", "records"]


def a_folder() -> list[str]:
    Path("a-model").mkdir()
    Path("a-model/config.json").write_text("{}")
    return ["split", "a-model"]


def public_data() -> list[str]:
    if not shared_folder().is_dir():
        pytest.skip("the folder of public data is not here")
    return ["--data", str(shared_folder() / "data")]


SMALLER: dict[str, Callable[[Any, pytest.MonkeyPatch], None]] = {
    "async_tools": quick_tools,
    "decode_cpu": short_answers,
    "distill_gsm8k": records_here,
    "gateway_load": results_here,
    "gpu": parts_here,
    "gvpo_optimum": few_steps,
    "pack": nothing_installed,
    "publish": a_page_of_its_own,
    "publish_studies": study_records_here,
    "regime": short_tools,
    "simulate": quick_tools,
    "roles": few_steps,
    "self_play": few_games,
    "soak": results_here,
    "study": jobs_here,
    "turn_credit": few_steps,
    "two_rewards": few_steps,
}
MORE: dict[str, Callable[[], list[str]]] = {
    "compare": beside_itself,
    "compare_study": archive_of_a_run,
    "pack_model": a_folder,
    "publish": result_of_lora,
    "scoring": public_data,
}


# -- what must have come out -----------------------------------------------------------------------------------------


def one_backslash() -> None:
    """Of the prompt that GSM8K's model is given."""
    for algorithm in ("grpo", "gvpo"):
        (path,) = Path("outputs/benchmark-gsm8k", algorithm).glob("*/*/episodes.jsonl")
        for episode in read_episodes(path):
            system = episode["messages"][0]
            assert system["role"] == "system" and r"in \boxed{}." in system["content"]
            assert r"\\boxed" not in system["content"]


def every_section() -> None:
    assert Path("results.md").read_text().count("Not run yet.") == len(STUDIES)


def one_archive() -> None:
    (archive,) = Path("EXPORT").glob("*.tar")
    assert archive.stat().st_size > 0


def three_methods() -> None:
    record = json.loads(Path("outputs/benchmark-distill-gsm8k/record.json").read_text())
    assert record == json.loads(next(Path("records").glob("distill-gsm8k-*.json")).read_text())
    assert [course["steps"] for course in record["methods"].values()] == [1, 1, 1]
    assert record["methods"]["grpo"]["kl"] is None and record["methods"]["teacher"]["kl"][0] > 0
    shown = Path("distill_gsm8k.md").read_text()
    assert "| the teacher | " in shown and "of the 5 test problems" in shown


CHECKS: dict[str, Callable[[], None]] = {
    "distill_gsm8k": three_methods,
    "gsm8k": one_backslash,
    "publish_studies": every_section,
    "study": one_archive,
}
