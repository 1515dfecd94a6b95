"""Every line `covey train ...` of the pages: as it is printed it is valid, and scaled down to a tiny model it runs.

All of them are checked with --validate-only. Then those that have something no line before them had (an algorithm, an
agent, a mode, ...) really run; the others do in `make test-slow`, and recipes in tests/cli/test_recipes.py.
"""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from covey.app.compose import implied_recipe
from covey.cli.main import main
from tests.docs.pages import COMMANDS, Command
from tests.docs.scaled import scaled
from tests.docs.workplace import fill_batches, put_models

TRAIN = [c for c in COMMANDS if c.words[:2] == ["covey", "train"] and c.excuse is None and not c.shown]
NEW = ("algorithm", "algorithm.loss", "algorithm.adv_estimator", "agent", "agent.agent_type", "mode", "data", "reward")
NEW += ("rollout", "critic.shared", "--multirun", "--dry-run", "--validate-only", "--config")
# Warnings that a page's line is meant to have.
MEANT = re.compile(  # warnings that are right: of the line itself, or of the machine that checks it
    r"not on this machine: |rollout\.group_size=2: gvpo is noisy below 4 attempts per task$"
    r"|\d+ processes share \d+ cores: "
    r"|settings of TorchRL's GRPO scripts: |no task is named: "
)


def only_checked(words: list[str]) -> str | None:
    """Why a line is not run beyond --validate-only."""
    if "--config-name" in words:
        return "recipes run in tests/cli/test_recipes.py"
    if implied_recipe(words, None).recipe:
        return "lines that start from a recipe by their words run in tests/docs/test_source_documents.py"
    if any(word.startswith("cluster") for word in words):
        return "clusters run in tests/cluster"
    if "agent=gateway" in words and not any(word.startswith("agent.command=") for word in words):
        return "it waits for programs of others: tests/gateway/test_agent.py"
    if "rollout=vllm" in words or "actor_rollout_ref.rollout.name=vllm" in words:
        return "needs vLLM: tests/integration/test_vllm.py; a stand-in: tests/rollout/test_vllm_engine.py"
    if any(word.startswith("resume=") for word in words):
        return "runs are resumed in tests/app/test_resume_run.py"
    if "--launcher" in words:
        return "jobs are started in tests/app/test_sweep.py"
    if any(word.startswith("reward.options.judge.url=") for word in words):
        return "needs a server that judges: tests/rewards/test_judge.py"
    return None


def listed() -> list[Any]:
    known: set[str] = set()
    found = []
    for command in TRAIN:
        words = command.words[2:]
        if only_checked(words):
            continue
        parts = {word for word in words if word.partition("=")[0] in NEW}
        marks = [] if parts - known else [pytest.mark.slow]
        known |= parts
        found.append(pytest.param(command, id=command.place, marks=marks))
    return found


@pytest.mark.parametrize("command", [pytest.param(c, id=c.place) for c in TRAIN])
def test_a_line_is_valid(
    command: Command, place: Path, tiny_model_folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = command.words[2:]
    put_models(words, tiny_model_folder)
    fill_batches(words)
    room = [] if any(word.startswith("model.context_length=") for word in words) else ["model.context_length=65536"]
    code = main(["train", *words, *room, "--validate-only"])
    told = capsys.readouterr()
    assert code == 0, told.err
    warnings = re.findall(r"^warning: (.*)", told.out, re.MULTILINE)
    assert [text for text in warnings if not MEANT.match(text)] == []
    assert not Path("multirun").exists()


@pytest.mark.parametrize("command", listed())
def test_a_line_runs(
    command: Command, place: Path, tiny_model_folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = command.words[2:]
    put_models(words, tiny_model_folder)
    known = set(Path().rglob("metrics.jsonl"))
    code = main(["train", *scaled(words)])
    told = capsys.readouterr()
    if "needs the package" in told.err:
        pytest.skip(told.err.splitlines()[0])
    assert code == 0, told.err
    runs = set(Path().rglob("metrics.jsonl")) - known
    assert bool(runs) != ("--dry-run" in words or "--validate-only" in words)
    for path in runs:
        assert "step" in {json.loads(line)["kind"] for line in path.read_text().splitlines()}
