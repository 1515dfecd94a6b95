"""Turns paid by environments, tools and coroutines."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import pytest
import torch

import covey
from covey.agents.environment import EnvironmentAgent
from covey.agents.formats.hermes import HermesFormat
from covey.agents.resolve import FunctionAgent
from covey.agents.tools.toolset import resolve_tools
from covey.agents.turns import ToolAgent, Toolbox
from covey.rollout.policy import LONGEST_STATE, state_key
from covey.types import Episode, Task
from covey.workers import WorkerPool
from tests.agents.inline_pool import InlinePool
from tests.agents.scripted import Script, policy_of, scored, with_braces

TASK = Task("t", ({"role": "user", "content": "walk"},), answer="3")


class Walk:
    """Pays ½ for each step ahead; a step that says nothing new is not paid."""

    def reset(self, task: Task) -> Any:
        self.at, self.end_at = 0, int(task.answer)
        return covey.Observation([*task.messages, {"role": "user", "content": "at 0"}], state={"at": 0})

    def step(self, reply: str) -> Any:
        if reply == "wait":
            return f"at {self.at}"
        self.at += 1
        if self.at == self.end_at:
            return covey.Done(reward={"reward": 2.0, "arrived": 1.0})
        return covey.Observation(f"at {self.at}", reward=0.5, state={"at": self.at})


def played(environment: Any, *replies: str, max_turns: int = 8) -> Episode:
    return asyncio.run(scored(EnvironmentAgent(environment, max_turns=max_turns), TASK, Script(*replies)))


def test_an_environment_pays_turns_and_names_states() -> None:
    episode = played(Walk, "go", "wait", "go", "go")
    assert episode.failure is None
    assert [turn.reward for turn in episode.turns] == [0.5, None, 0.5, None]
    # The state of a turn is the one it was sampled in; a plain text names none.
    assert [turn.state for turn in episode.turns] == ['{"at": 0}', '{"at": 1}', None, '{"at": 2}']
    assert episode.rewards == {"given": 3.0, "given/turns": 1.0, "given/arrived": 1.0}
    assert [m["content"] for m in episode.messages] == [
        "walk",
        "at 0",
        "go",
        "at 1",
        "wait",
        "at 1",
        "go",
        "at 2",
        "go",
    ]


def test_what_was_paid_stays_if_the_episode_ends_early() -> None:
    episode = played(Walk, "go", "wait", max_turns=2)
    assert episode.given is None and episode.rewards == {"given": 0.5, "given/turns": 0.5}


def test_in_a_worker() -> None:
    agent = EnvironmentAgent(Walk, max_turns=8)
    pool = WorkerPool(agent.functions, max_workers=1)
    try:
        episode = asyncio.run(scored(agent.in_workers(pool), TASK, Script("go", "go", "go")))
    finally:
        pool.close()
    assert [turn.reward for turn in episode.turns] == [0.5, 0.5, None] and episode.rewards["given"] == 3.0


@pytest.mark.parametrize("reward", [float("nan"), float("inf"), "much", 1e16, 10**400])
def test_an_invalid_reward_fails_the_episode(reward: Any) -> None:
    class Bad(Walk):
        def step(self, reply: str) -> Any:
            return covey.Observation("at 1", reward=reward)

    failure = played(Bad, "go").failure
    assert failure is not None and failure.cause == "environment"
    assert "the reward of a turn must be None or a number" in failure.message


def test_reset_pays_nothing() -> None:
    class Bad(Walk):
        def reset(self, task: Task) -> Any:
            return covey.Observation("at 0", reward=1.0)

    failure = played(Bad, "go").failure
    assert failure is not None and "no turn has been played yet" in failure.message


def call(name: str, **arguments: Any) -> str:
    return f"<tool_call>{json.dumps({'name': name, 'arguments': arguments})}</tool_call>"


def with_tool(function: Any, *replies: str) -> Episode:
    tools = resolve_tools([covey.tool(function)])
    agent = ToolAgent(Toolbox(tools, pool=InlinePool(tools.functions)), HermesFormat(), 8)  # type: ignore[arg-type]
    return asyncio.run(scored(agent, TASK, Script(*replies, tokenizer=with_braces())))


def test_tools_pay_for_the_turn_that_called_them() -> None:
    def guess(number: int) -> Any:
        """Guess."""
        return covey.Observation({"right": number == 7}, reward=1.0 if number == 7 else None)

    two = f"{call('guess', number=7)}\n{call('guess', number=7)}"
    episode = with_tool(guess, call("guess", number=1), two, "7")
    assert episode.failure is None
    assert [turn.reward for turn in episode.turns] == [None, 2.0, None]
    assert any('{"right": true}' in str(message["content"]) for message in episode.messages)
    assert episode.rewards == {"given": 2.0, "given/turns": 2.0}


@pytest.mark.parametrize(("reward", "state"), [(float("nan"), None), (1.0, "here")])
def test_an_invalid_payment_of_a_tool_is_a_failure_of_the_tool(reward: float, state: Any) -> None:
    def pay() -> Any:
        """Pay."""
        return covey.Observation("done", reward=reward, state=state)

    failure = with_tool(pay, call("pay")).failure
    assert failure is not None and failure.cause == "tool_result" and "tool pay" in failure.message


def test_a_coroutine_pays_its_last_turn() -> None:
    async def agent(policy: Any, task: Task) -> str:
        await policy.chat(task.messages)
        policy.record_turn(state=["start", 1])
        policy.record_turn(reward=1)
        return str(await policy.chat([{"role": "user", "content": "again"}]))

    episode = asyncio.run(scored(FunctionAgent(agent), TASK, Script("a", "b")))
    assert [(turn.reward, turn.state) for turn in episode.turns] == [(1.0, '["start", 1]'), (None, None)]


def test_a_turn_is_not_paid_with_nan() -> None:
    async def run() -> None:
        policy = policy_of(Script("a"))
        await policy.chat(TASK.messages)
        policy.record_turn(reward=float("nan"))

    with pytest.raises(ValueError, match="the reward of a turn must be None or a number"):
        asyncio.run(run())


def test_states_as_keys() -> None:
    assert state_key({"b": 1, "a": [2]}) == state_key({"a": [2], "b": 1}) == '{"a": [2], "b": 1}'
    assert state_key("hall") == "hall" != state_key(["hall"])
    long, other = "x" * 1000, "x" * 999 + "y"
    assert state_key(long) != state_key(other) and state_key(long).startswith("x" * LONGEST_STATE)
    assert len(state_key(long)) < 2 * LONGEST_STATE
    assert state_key({"at": torch.tensor([1, 2])}) == '{"at": [1, 2]}'


@pytest.mark.parametrize("state", [object(), {1, 2}, {1: "a", "b": 2}])
def test_a_state_that_is_not_json_is_refused(state: Any) -> None:
    class Walks:
        def reset(self, task: Task) -> Any:
            return covey.Observation("begin", state=state)

        def step(self, reply: str) -> Any:
            return covey.Done(reward=1.0)

    episode = asyncio.run(scored(EnvironmentAgent(Walks, max_turns=1), TASK, Script("x")))
    assert episode.failure is not None and episode.failure.cause == "environment"
    assert "the state of a turn must be a text or JSON" in episode.failure.message
