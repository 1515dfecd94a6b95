"""Rewards in workers: a hang or a crash costs what it was to score. And rewards with options."""

from __future__ import annotations

import asyncio
import os
import signal
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from covey.app.checks import digest_rewards
from covey.errors import InputError, RunFailed
from covey.rewards import RewardError, RewardSet, only_if, resolve_rewards
from covey.rollout.collector import NothingCompleted, TrainingSource
from covey.types import Episode, Sampling, Task
from covey.workers import WorkerPool
from tests.rollout.test_collector import TASKS, collector

TASK = Task("t1", ({"role": "user", "content": "2+2"},), "4", {"level": 3})
In = Callable[..., RewardSet]


@pytest.fixture
def in_workers() -> Iterator[In]:
    """Rewards with a pool of their own, closed afterwards."""
    pools: list[WorkerPool] = []

    def make(*names: Any, seconds: float = 20.0, options: Any = None) -> RewardSet:
        rewards = resolve_rewards(names, None, {}, options=options)
        pools.append(WorkerPool(rewards.worker_functions(), max_workers=4))
        return rewards.in_workers(pools[-1], seconds)

    yield make
    for pool in pools:
        pool.close()


def attempt(reply: str = "4") -> Episode:
    return Episode(TASK, (), (*TASK.messages, {"role": "assistant", "content": reply}))


def score(rewards: RewardSet, task: Task = TASK) -> Any:
    return asyncio.run(rewards(task, attempt()))


def failure(rewards: RewardSet) -> RewardError:
    with pytest.raises(RewardError) as caught:
        score(rewards)
    return caught.value


def test_user_rewards_run_in_workers_and_built_in_ones_inline(in_workers: In) -> None:
    def where(final_answer: str) -> dict[str, float]:
        return {"reward": len(final_answer), "pid": os.getpid()}

    async def later(answer: str, episode: Episode, task: Task) -> float:
        await asyncio.sleep(0.01)
        return float(episode.final_answer == answer == task.answer)

    rewards = in_workers("exact", where, later, only_if(resolve_rewards("format", None, {}).functions[0].call, "exact"))
    assert set(rewards.worker_functions()) == {"reward:where", "reward:later"}
    result = score(rewards)
    assert {name: result[name] for name in rewards.names} == {"exact": 1.0, "where": 1.0, "later": 1.0, "format": 0.0}
    assert result["where/pid"] != os.getpid()


def test_columns_of_any_name_reach_it(in_workers: In) -> None:
    def odd(function: int, seconds: int, state: int, key: int, arguments: int) -> float:
        return function + seconds + state + key + arguments

    columns = {"function": 1, "seconds": 2, "state": 3, "key": 4, "arguments": 5}
    assert score(in_workers(odd), Task("t", TASK.messages, None, columns)) == {"odd": 15.0}


def test_failures_have_causes(in_workers: In) -> None:
    def hang() -> float:
        time.sleep(60)
        return 1.0

    def crash() -> float:
        print("these were my last words")
        os.kill(os.getpid(), signal.SIGSEGV)
        return 1.0

    def broken() -> float:
        return 1 / 0

    def text() -> str:
        return "1.0"

    def lazy() -> Any:
        return (i for i in range(3))

    error = failure(in_workers(hang, seconds=0.3))
    assert error.cause == "reward_timeout"
    assert str(error) == "reward hang on task t1: it took longer than reward.seconds=0.3"
    error = failure(in_workers(crash))
    assert error.cause == "reward_crash"
    assert "ended: SIGSEGV" in error.why and "Fatal Python error" in error.why
    error = failure(in_workers(broken))
    assert error.cause == "reward" and error.why.startswith("ZeroDivisionError: division by zero at ")
    error = failure(in_workers(text))
    assert (error.cause, error.why) == ("reward", "text must be a number or None, got '1.0'")
    error = failure(in_workers(lazy))
    assert error.cause == "reward" and "its result, a generator, cannot be sent back" in error.why
    error = failure(in_workers(hang, text, seconds=0.3))
    assert error.cause == "reward_timeout"  # in the order of the rewards, not of time


def test_a_reward_that_fails_does_not_end_the_workers_of_others(in_workers: In) -> None:
    def broken() -> float:
        raise ValueError

    def slow() -> float:
        time.sleep(0.2)
        return 1.0

    rewards = in_workers(broken, slow)
    for _ in range(3):
        assert failure(rewards).name == "broken"
    pool = rewards.functions[0].pool
    assert pool is not None and pool._made == 2


# Through the collector


def source(rewards: RewardSet) -> TrainingSource:
    made = collector("exact")
    object.__setattr__(made, "reward", rewards)
    return TrainingSource(made, lambda step: TASKS, attempts=3, sampling=Sampling(), min_group_size=2)


def test_a_hang_and_a_crash_cost_one_episode_each(in_workers: In) -> None:
    groups = asyncio.run(source(resolve_rewards(lambda final_answer: 1.0, None, {})).next()).groups
    answers = [episode.final_answer for group in groups for episode in group.episodes]
    hanging, crashing, raising = answers[0], answers[4], answers[8]
    assert [answers.count(answer) for answer in (hanging, crashing, raising)] == [1, 1, 1]

    def shaky(final_answer: str) -> float:
        if final_answer == hanging:
            time.sleep(60)
        if final_answer == crashing:
            os._exit(1)
        if final_answer == raising:
            raise ValueError("no")
        return 1.0

    result = asyncio.run(source(in_workers(shaky, seconds=0.5)).next())
    assert result.failures == {"reward_timeout": 1, "reward_crash": 1, "reward": 1}
    message = "reward shaky on task t1: the process of reward:shaky ended: exit code 1"
    assert result.examples["reward_crash"] == message
    assert [len(group.episodes) for group in result.groups] == [2, 2, 2]


def test_a_group_reward_that_hangs_costs_its_group(in_workers: In) -> None:
    def ranks(episodes: list[Episode], task: Task) -> list[float]:
        if task.id == "t1":
            time.sleep(60)
        return [float(place) for place in range(len(episodes))]

    result = asyncio.run(source(in_workers(ranks, seconds=0.5)).next())
    assert [group.task.id for group in result.groups] == ["t0", "t2"]
    assert [[e.rewards["ranks"] for e in group.episodes] for group in result.groups] == [[0.0, 1.0, 2.0]] * 2
    assert result.failures == {"reward_timeout": 3} and result.dropped == 1


def test_if_every_call_hangs_the_fix_is_named(in_workers: In) -> None:
    def hang() -> float:
        time.sleep(60)
        return 1.0

    with pytest.raises(NothingCompleted, match=r"9 × reward_timeout: .*\n +likely fix: raise reward.seconds"):
        asyncio.run(source(in_workers(hang, seconds=0.2)).next())


@pytest.mark.parametrize("group", [False, True])
def test_workers_that_are_gone_end_the_run(in_workers: In, group: bool) -> None:
    def single() -> float:
        return 1.0

    def several(episodes: list[Episode]) -> list[float]:
        return [1.0 for _ in episodes]

    rewards = in_workers(several if group else single)
    pool = rewards.functions[0].pool
    assert pool is not None
    pool.close()
    with pytest.raises(RunFailed, match="the workers were closed"):
        asyncio.run(source(rewards).next())


def test_extras_alone_are_no_score(in_workers: In) -> None:
    def undecided() -> Any:
        return {"reward": None, "unparsed": 1.0}

    with pytest.raises(NothingCompleted, match="9 × unscored"):
        asyncio.run(source(in_workers(undecided)).next())


# Options


def scaled(final_answer: str, level: int, factor: float = 1.0, *, offset: float) -> float:
    return len(final_answer) * level * factor + offset


def ranked(episodes: list[Episode], best: float = 1.0) -> list[float]:
    return [best for _ in episodes]


def all_of(**given: Any) -> float:
    return float(given["level"])


def test_options_are_arguments(in_workers: In) -> None:
    options = {"scaled": {"factor": 2, "offset": 0.5, "level": 10}, "ranked": {"best": 7}, "all_of": {"level": 4}}
    expected = {"scaled": 20.5, "ranked": 7.0, "all_of": 4.0}  # the settings win over the data
    rewards = resolve_rewards([scaled, ranked, all_of], None, {}, options=options)
    rewards.check(Task("t", TASK.messages))  # nothing of the data is needed
    assert score(rewards) == expected
    assert score(in_workers(scaled, ranked, all_of, options=options)) == expected


class Threshold:
    def __init__(self, at: float, high: float = 1.0) -> None:
        self.at, self.high = at, high

    def __call__(self, level: int) -> float:
        return self.high if level >= self.at else 0.0


def test_a_class_is_made_with_its_options(in_workers: In) -> None:
    assert score(in_workers(Threshold, options={"Threshold": {"at": 2, "high": 5}})) == {"Threshold": 5.0}
    assert score(in_workers(Threshold(4))) == {"Threshold": 0.0}
    with pytest.raises(InputError, match=r"reward Threshold needs its option at\n  fix: reward.options.Threshold.at="):
        resolve_rewards(Threshold, None, {})


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            {"scaled": {"facto": 2}},
            "unknown option of reward scaled  facto\n  did you mean   factor?\n  known: factor,",
        ),
        (
            {"scald": {"factor": 2}},
            "unknown reward in reward.options  scald\n  did you mean   scaled?\n  known: exact,",
        ),
        ({"exact": {"strict": True}}, "reward.options.exact.strict: the reward exact has no options"),
        ({"exact": {"final_answer": "4"}}, "reward.options.exact.final_answer: the reward exact has no options"),
        ({"scaled": 5}, "reward.options.scaled=5: write reward.options.scaled.OPTION=VALUE"),
    ],
)
def test_mistakes_in_options(options: dict[str, Any], message: str) -> None:
    with pytest.raises(InputError) as caught:
        resolve_rewards([scaled, "exact"], None, {}, options=options)
    assert str(caught.value).startswith(message)


def test_the_digest_knows_options_and_source() -> None:
    def digest(factor: float, *names: Any) -> str:
        given = {"scaled": {"factor": factor, "offset": 0}}
        return digest_rewards(resolve_rewards([scaled, *names], None, {}, options=given))

    assert digest(1.0) == digest(1.0) != digest(2.0)
    assert digest(1.0, Threshold(1)) != digest(1.0, ranked)
