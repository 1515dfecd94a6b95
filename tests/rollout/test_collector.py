"""Tasks → scored groups: what fails stays on its episode, what is left can be learned from."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest

from covey.agents import ChatAgent
from covey.agents.custom import FunctionAgent, resolve_agent
from covey.errors import InputError
from covey.rewards import resolve_rewards
from covey.rollout.collector import Collector, NothingCompleted, TrainingSource
from covey.types import Completion, Sampling, StopReason, Task
from tests.conftest import byte_tokenizer

TASKS = [Task(f"t{i}", ({"role": "user", "content": f"q{i}"},), answer="x") for i in range(3)]


class Scripted:
    """An engine that answers with the digits of its seed, and remembers what it was asked."""

    def __init__(self) -> None:
        self.seeds: list[int] = []
        self.tokenizer = byte_tokenizer()

    async def generate(self, token_ids: Sequence[int], sampling: Sampling) -> Completion:
        await asyncio.sleep(0)
        self.seeds.append(sampling.seed)
        ids = tuple(self.tokenizer(str(sampling.seed % 100))["input_ids"])
        return Completion(ids, (-0.5,) * len(ids), (0,) * len(ids), StopReason.EOS)

    async def publish(self, weights: Any, version: int) -> None: ...


def collector(reward: Any, agent: Any = None, max_seconds: float = 5.0) -> Collector:
    engine = Scripted()
    return Collector(engine, engine.tokenizer, agent or ChatAgent(), resolve_rewards(reward, None, {}), 7, max_seconds)


def source(made: Collector, attempts: int = 3) -> TrainingSource:
    return TrainingSource(made, lambda step: TASKS, attempts=attempts, sampling=Sampling(), min_group_size=2)


def parity(final_answer: str) -> float:
    return int(final_answer) % 2


def test_groups_come_in_task_order_each_attempt_with_its_own_stream() -> None:
    made = collector(parity)
    groups = asyncio.run(source(made).next()).groups
    assert [g.task.id for g in groups] == ["t0", "t1", "t2"]
    assert [len(g.episodes) for g in groups] == [3, 3, 3]
    assert len(set(made.engine.seeds)) == 9  # type: ignore[attr-defined]
    episode = groups[0].episodes[0]
    assert episode.rewards == {"parity": int(episode.final_answer) % 2}
    assert episode.messages[-1] == {"role": "assistant", "content": episode.final_answer}


def test_the_same_step_draws_the_same_and_another_step_does_not() -> None:
    def answers(step: int) -> list[str]:
        made = source(collector(parity))
        made.policy_updated(step)
        return [e.final_answer for g in asyncio.run(made.next()).groups for e in g.episodes]

    assert answers(4) == answers(4)
    assert answers(4) != answers(5)


def test_a_reward_that_raises_costs_one_episode() -> None:
    calls = 0

    def shaky(final_answer: str) -> float:
        nonlocal calls
        calls += 1
        if calls == 2:
            raise KeyError("oops")
        return 1.0

    made = source(collector(shaky))
    found = asyncio.run(made.next())
    groups = found.groups
    assert sum(len(g.episodes) for g in groups) == 8
    assert found.failures == {"reward": 1} and found.dropped == 0


def test_a_group_left_too_small_is_dropped_and_counted() -> None:
    async def fussy(policy: Any, task: Task) -> str:
        reply: str = await policy.chat(task.messages)
        if task.id == "t1" and len(policy.engine.seeds) > 0 and policy.stream[-1] > 0:
            raise RuntimeError("no")
        return reply

    made = source(collector(parity, FunctionAgent(fussy)))
    found = asyncio.run(made.next())
    groups = found.groups
    assert [g.task.id for g in groups] == ["t0", "t2"]
    assert found.failures == {"agent": 2} and found.dropped == 1


def test_an_episode_past_its_deadline_is_a_failure() -> None:
    async def slow(policy: Any, task: Task) -> str:
        reply: str = await policy.chat(task.messages)
        if task.id == "t0":
            await asyncio.sleep(30)
        return reply

    made = source(collector(parity, FunctionAgent(slow), max_seconds=0.2))
    found = asyncio.run(made.next())
    assert found.failures == {"timeout": 3}


def test_an_attempt_that_no_reward_scores_is_left_out_not_worth_zero() -> None:
    def sometimes(final_answer: str) -> float | None:
        return 1.0 if int(final_answer) % 3 else None

    made = source(collector(sometimes), attempts=6)
    found = asyncio.run(made.next())
    groups = found.groups
    kept = [e for g in groups for e in g.episodes]
    assert found.failures["unscored"] > 0
    assert len(kept) + found.failures["unscored"] + 6 * found.dropped >= 18
    assert all(e.rewards["sometimes"] == 1.0 for e in kept)


def test_waiting_for_the_model_does_not_count_towards_the_deadline() -> None:
    class Slow(Scripted):
        async def generate(self, token_ids: Sequence[int], sampling: Sampling) -> Completion:
            await asyncio.sleep(0.4)
            return await super().generate(token_ids, sampling)

    made = collector(parity, max_seconds=0.2)
    slow = replace(made, engine=Slow())
    training = source(slow)
    assert not asyncio.run(training.next()).failures


def test_when_everything_fails_the_cause_and_a_fix_are_named() -> None:
    def broken(final_answer: str) -> float:
        raise ZeroDivisionError("by zero")

    with pytest.raises(NothingCompleted, match=r"No training tasks completed(.|\n)*9 × reward(.|\n)*by zero"):
        asyncio.run(source(collector(broken)).next())


def test_rewards_that_compare_attempts_see_the_group() -> None:
    def rank(episodes: list[Any]) -> list[float]:
        order = sorted(e.final_answer for e in episodes)
        return [float(order.index(e.final_answer)) for e in episodes]

    groups = asyncio.run(source(collector(rank)).next()).groups
    for group in groups:
        assert min(e.rewards["rank"] or 0 for e in group.episodes) == 0


def test_every_turn_of_a_coroutine_is_kept() -> None:
    async def twice(policy: Any, task: Task) -> str:
        first = await policy.chat(task.messages)
        return str(await policy.chat([*task.messages, {"role": "assistant", "content": first}]))

    (group, *_) = asyncio.run(source(collector(parity, FunctionAgent(twice))).next()).groups
    assert all(len(e.turns) == 2 for e in group.episodes)


def test_agents_that_cannot_be() -> None:
    with pytest.raises(InputError, match="must be a coroutine"):
        FunctionAgent(lambda policy, task: "x")
    with pytest.raises(InputError, match="unknown agent  chatt"):
        resolve_agent("chatt")
    with pytest.raises(InputError, match="no such file"):
        resolve_agent("nowhere.py:agent")

    async def silent(policy: Any, task: Task) -> str:
        return "said without asking"

    with pytest.raises(NothingCompleted, match="without asking the policy"):
        asyncio.run(source(collector(parity, FunctionAgent(silent))).next())
