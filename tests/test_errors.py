"""Errors of the user's own code name the file, the line and the source line where they were raised."""

from __future__ import annotations

import asyncio
import json
import string
import sys
import sysconfig
import traceback
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import covey
from covey import errors
from covey.agents.resolve import resolve_agent
from covey.agents.tools.toolset import ToolSet, resolve_tools
from covey.errors import describe_error, traceback_location
from covey.imports import load_function
from covey.rewards import RewardError, resolve_rewards
from covey.tool_calls import Call
from covey.types import Episode, Task
from covey.workers import WorkerPool
from tests.agents.scripted import Script, scored

TASK = Task("t", ({"role": "user", "content": "q"},), answer="4")
MINE = '''\
import asyncio
import json


def number(text):
    return int(text)


def score(final_answer):
    return float(number(final_answer))


def compare(episodes):
    return [json.loads("{") for _ in episodes]


async def play(policy, task):
    await policy.chat(task.messages)
    async with asyncio.TaskGroup() as group:
        group.create_task(asyncio.to_thread(number, "many"))


class World:
    def reset(self, task):
        return "go"

    def step(self, reply):
        return {}[reply]


def lookup(key: str) -> str:
    """Look something up."""
    return {"a": "b"}[key]
'''


@pytest.fixture
def mine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """A file of the user's in the folder that the command is started in: it is named without the folder."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", sys.path[:])
    (tmp_path / "mine.py").write_text(MINE)
    return "mine.py"


@pytest.fixture
def pools() -> Iterator[list[WorkerPool]]:
    made: list[WorkerPool] = []
    yield made
    for pool in made:
        pool.close()


NUMBER = "at mine.py, line 6: return int(text)"


@pytest.mark.parametrize("in_worker", [False, True])
@pytest.mark.parametrize(
    ("reward", "expected"),
    [
        ("score", f"ValueError: invalid literal for int() with base 10: 'four' {NUMBER}"),
        # Raised in the standard library: the line that called it is the user's.
        ("compare", 'column 2 (char 1) at mine.py, line 14: return [json.loads("{") for _ in episodes]'),
    ],
)
def test_a_reward_that_raises(mine: str, pools: list[WorkerPool], in_worker: bool, reward: str, expected: str) -> None:
    rewards = resolve_rewards(f"{mine}:{reward}", None, {})
    if in_worker:
        pools.append(WorkerPool(rewards.worker_functions(), max_workers=1))
        rewards = rewards.in_workers(pools[-1], 20.0)
    episode = Episode(TASK, (), (*TASK.messages, {"role": "assistant", "content": "four"}))
    with pytest.raises(RewardError) as caught:
        asyncio.run(rewards(TASK, episode))
    assert expected in str(caught.value)
    assert str(caught.value).startswith(f"reward {reward} on task t: ")


@pytest.mark.parametrize("in_worker", [False, True])
def test_an_environment_that_raises(mine: str, pools: list[WorkerPool], in_worker: bool) -> None:
    agent: Any = resolve_agent(f"{mine}:World")
    if in_worker:
        pools.append(WorkerPool(agent.functions, max_workers=2))
        agent = agent.in_workers(pools[-1])
    episode = asyncio.run(scored(agent, TASK, Script("hi")))
    assert episode.failure is not None and episode.failure.cause == "environment"
    assert episode.failure.message == "World.step: KeyError: 'hi' at mine.py, line 28: return {}[reply]"


def test_an_agent_that_raises_in_a_task_group(mine: str) -> None:
    """The error that counts is the one inside the group."""
    episode = asyncio.run(scored(resolve_agent(f"{mine}:play"), TASK, Script("hi"), reward="exact"))
    assert episode.failure is not None and episode.failure.cause == "agent"
    assert episode.failure.message == f"ValueError: invalid literal for int() with base 10: 'many' {NUMBER}"


def test_a_tool_that_raises(mine: str, pools: list[WorkerPool]) -> None:
    """The model reads what a tool says. Where it was raised is for the user."""
    tools: ToolSet = resolve_tools([f"{mine}:lookup"])
    pools.append(WorkerPool(tools.functions, max_workers=1))

    async def call() -> Any:
        async with tools.open(pools[-1]) as bench:
            return (await bench.call([Call("lookup", {"key": "x"})]))[0]

    result = asyncio.run(call())
    assert result.text == "error: KeyError: 'x'"
    assert (result.use.error, result.use.detail) == (
        "raised",
        'KeyError: \'x\' at mine.py, line 33: return {"a": "b"}[key]',
    )


def test_a_run_reports_where_a_tool_raised(
    mine: str, tiny_model_folder: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    from covey.agents.formats.hermes import HermesFormat
    from covey.tool_calls import Parsed

    def always(self: Any, text: str) -> Parsed:
        return Parsed({"role": "assistant", "content": text}, (Call("lookup", {"key": "x"}),))

    monkeypatch.setattr(HermesFormat, "parse", always)
    monkeypatch.setattr(HermesFormat, "instructions", lambda self, schemas: None)  # longer than the tiny context
    covey.train(
        model=str(tiny_model_folder),
        tasks=[{"question": "q", "answer": "x"}],
        reward="exact",
        agent={"name": "hf", "tools": [f"{mine}:lookup"], "format": "hermes", "max_turns": 2},
        rollout={"max_tokens": 8, "group_size": 4, "stop": [*string.ascii_letters]},  # most replies end by themselves
        data={"train_batch_size": 1},
        loop={"total_steps": 2, "save_final": False},
        eval={"before": False, "after": False},
    )
    out = capsys.readouterr().out
    (warning,) = [line for line in out.splitlines() if "tool lookup" in line]
    assert "KeyError: 'x' at mine.py, line 33: return" in warning


def test_code_outside_the_folder_is_named_in_full(tmp_path: Path) -> None:
    path = tmp_path / "far.py"
    path.write_text("def fail():\n    raise RuntimeError('first\\nsecond')\n")
    with pytest.raises(RuntimeError) as caught:
        load_function("reward", f"{path}:fail")()
    text = describe_error(caught.value.with_traceback(caught.tb.tb_next))
    assert text == f"RuntimeError: first\nsecond\n  at {path}, line 2: raise RuntimeError('first\\nsecond')"


def test_an_error_without_code_of_the_users_names_no_place() -> None:
    """A syntax error says itself where it is; a line of Covey's or of a library's would mislead."""
    assert describe_error(ValueError("x")) == "ValueError: x"
    try:
        asyncio.run(asyncio.wait_for(asyncio.sleep(1), 0))
    except TimeoutError as error:
        text = describe_error(error.with_traceback(error.__traceback__.tb_next if error.__traceback__ else None))
    assert text == "TimeoutError"


def test_the_place_in_the_text_of_a_traceback(mine: str, tmp_path: Path) -> None:
    """Others hand over the text alone. What wraps an error comes after the error itself."""
    try:
        try:
            load_function("reward", f"{mine}:score")("four")
        except ValueError:
            json.loads("{")
    except ValueError as error:
        text = "".join(traceback.format_exception(error))
    own = "".join(line for line in text.splitlines(keepends=True) if "test_errors" not in line)
    assert traceback_location(own) == "mine.py, line 6: return int(text)"
    assert traceback_location("no traceback") == ""


def test_an_installed_package_counts_as_the_users_once_it_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(errors, "_user_code", set())
    monkeypatch.setattr(sysconfig, "get_path", lambda name: str(tmp_path))  # where packages are installed
    for name in ("scores_a", "helps_a"):
        (tmp_path / name).mkdir()
    (tmp_path / "helps_a" / "__init__.py").write_text("def number(text):\n    return int(text)\n")
    (tmp_path / "scores_a" / "__init__.py").write_text(
        "import helps_a\n\ndef score(t):\n    return helps_a.number(t)\n"
    )
    import scores_a  # type: ignore[import-not-found]

    def place(call: Any) -> str:
        errors._is_user_code.cache_clear()
        with pytest.raises(ValueError, match="invalid literal") as caught:
            call("four")
        return errors.user_location(caught.value.with_traceback(caught.tb.tb_next))

    assert place(scores_a.score) == ""  # a library of Covey's own would look like this
    assert place(load_function("reward", "scores_a:score")) == (
        "scores_a/__init__.py, line 4: return helps_a.number(t)"
    )
