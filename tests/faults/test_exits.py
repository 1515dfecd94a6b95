"""User code that calls sys.exit is reported as an error with file and line, and never ends covey silently."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from covey.agents.resolve import resolve_agent
from covey.cli.main import main
from covey.errors import InputError
from covey.rewards import resolve_rewards
from covey.types import Task
from covey.workers import RemoteError, WorkerPool
from tests.agents.scripted import Script, scored

TASK = Task("t", ({"role": "user", "content": "q"},), answer="a")
FILE = """import sys
from covey.rewards import reward

def score(final_answer):
    sys.exit(0)

def look(task):
    sys.exit(0)

@reward(check=look)
def checked(final_answer):
    return 1.0

class Scorer:
    def __init__(self):
        sys.exit(0)

class Agent(Scorer):
    def opening(self, task): ...
    async def run(self, policy, task): ...

async def play(policy, task):
    await policy.chat(task.messages)
    sys.exit(0)

async def divided(policy, task):
    import asyncio
    async def part():
        sys.exit(0)
    await policy.chat(task.messages)
    await asyncio.create_task(part())

class World:
    def reset(self, task):
        return "hello"

    def step(self, reply):
        sys.exit(0)
"""


@pytest.fixture
def mine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", sys.path[:])
    path = tmp_path / "mine.py"
    path.write_text(FILE)
    return path


@pytest.mark.parametrize(
    ("setting", "code"),
    [
        *(("reward={}:score", code) for code in ("0", "None", "1", "'enough'")),
        *((setting, "0") for setting in ("agent={}:play", "agent.tools=[{}:score]", "reward=whole:score")),
    ],
)
def test_a_file_that_exits_when_it_is_imported(
    tmp_path: Path,
    tiny_model_folder: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    setting: str,
    code: str,
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", sys.path[:])
    (tmp_path / "whole.py").write_text(f"import sys\ndef score(x): ...\n\nsys.exit({code})\n")
    assert main(["train", f"model={tiny_model_folder}", "data=sort", setting.format("whole.py")]) == 2
    output = capsys.readouterr().err
    assert (
        f"sys.exit({code})" in output and "at whole.py, line 4: sys.exit(" in output and "nothing was started" in output
    )


@pytest.mark.parametrize(
    ("make", "line"),
    [
        (lambda path: resolve_rewards(f"{path}:Scorer", None, {}), 16),
        (lambda path: resolve_rewards(f"{path}:checked", None, {}).check(TASK), 8),
        (lambda path: resolve_agent(f"{path}:Agent"), 16),
    ],
)
def test_exits_before_training(mine: Path, make: Callable[[Path], Any], line: int) -> None:
    with pytest.raises(InputError, match=rf"sys\.exit\(0\) was called at {mine.name}, line {line}"):
        make(mine)


@pytest.mark.parametrize(
    ("agent", "reward", "cause", "line"),
    [
        ("chat", "score", "reward", 5),
        ("play", None, "agent", 24),
        ("World", None, "environment", 38),
    ],
)
def test_an_exit_in_an_episode_fails_that_episode(
    mine: Path, agent: str, reward: str | None, cause: str, line: int
) -> None:
    """Like any exception there."""
    player = resolve_agent(agent if agent == "chat" else f"{mine}:{agent}")
    episode = asyncio.run(scored(player, TASK, Script("hi"), reward=f"{mine}:{reward}" if reward else "given"))
    assert episode.failure is not None and episode.failure.cause == cause
    assert f"sys.exit(0) was called at {mine.name}, line {line}" in episode.failure.message


def test_an_exit_in_a_worker(mine: Path) -> None:
    from covey.imports import load_function

    pool = WorkerPool({"score": load_function("reward", f"{mine}:score")})
    try:
        with pytest.raises(RemoteError, match=rf"SystemExit: sys\.exit\(0\) was called at {mine.name}, line 5"):
            asyncio.run(pool.call("score", "x", seconds=20.0))
    finally:
        pool.close()


def test_an_exit_in_an_asyncio_task_of_an_agent(
    mine: Path, tiny_model_folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """asyncio then ends the event loop at once, past every handler, so the command line must report it."""
    small = ["data.val_size=2", "data.train_batch_size=2", "rollout.group_size=2", "rollout.max_tokens=2"]
    words = [f"model={tiny_model_folder}", "data=sort", f"agent={mine}:divided", "eval.before=false", *small]
    assert main(["train", *words, "loop.total_steps=1"]) == 1
    assert f"sys.exit(0) was called at {mine.name}, line 29" in capsys.readouterr().err


def test_an_error_that_only_shows_in_a_step_does_not_claim_that_nothing_started(
    tmp_path: Path, tiny_model_folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """For example a model that ignores the attention interface, which shows in its first forward pass."""
    monkeypatch.chdir(tmp_path)

    def refuse(*_: Any, **__: Any) -> Any:
        raise InputError("this model cannot be trained")

    monkeypatch.setattr("covey.training.run.update", refuse)
    words = [f"model={tiny_model_folder}", "data=sort", "loop.total_steps=1", "eval.before=false"]
    assert main(["train", *words]) == 1
    output = capsys.readouterr().err
    assert "this model cannot be trained" in output and "nothing was started" not in output
    (info,) = tmp_path.glob("outputs/*/*/run.json")
    assert '"failed"' in info.read_text()
