"""Tasks → scored groups: what fails stays on its episode, what is left can be learned from."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest

from covey.agents.resolve import FunctionAgent, resolve_agent
from covey.agents.turns import ChatAgent
from covey.errors import InputError
from covey.rewards import resolve_rewards
from covey.rollout.collector import Collector, NothingCompleted, Refill, TrainingSource
from covey.rollout.rendering import Renderer
from covey.tasks import fresh_tasks
from covey.training.samples import to_samples
from covey.types import Completion, Episode, Sampling, StopReason, Task
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
    return Collector(
        engine, Renderer(engine.tokenizer), agent or ChatAgent(), resolve_rewards(reward, None, {}), 7, max_seconds
    )


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


async def asks_twice(policy: Any, task: Task) -> str:
    reply = {"role": "assistant", "content": await policy.chat(task.messages)}
    if policy.turns[0].completion_ids[0] % 2:
        raise KeyError("a fault of the agent")
    return str(await policy.chat([*task.messages, reply, {"role": "user", "content": "sure?"}]))


def test_episodes_are_counted_as_they_end_and_not_their_turns() -> None:
    made = collector(parity, FunctionAgent(asks_twice))
    ended: list[int] = []
    made.on_episode = lambda: ended.append(len(made.engine.seeds))  # type: ignore[attr-defined]
    groups = asyncio.run(made.groups(TASKS, 3, Sampling(), ("test",)))
    failed = sum(episode.failure is not None for group in groups for episode in group.episodes)
    assert len(ended) == 9 and 0 < failed < 9
    assert ended[-1] == 9 + (9 - failed)  # replies


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


def test_a_measurement_does_not_score_an_attempt() -> None:
    """A reward of weight 0 is not trained on; without any weight, all rewards count."""

    def sometimes(final_answer: str) -> float | None:
        return 1.0 if int(final_answer) % 3 else None

    def measured(final_answer: str) -> float:
        return 1.0

    for weight, unscored in ((1.0, True), (0.0, False)):
        made = collector(sometimes)
        made.reward = resolve_rewards([sometimes, measured], None, {"sometimes": weight, "measured": 0.0})
        found = asyncio.run(source(made, attempts=6).next())
        assert ("unscored" in found.failures) == unscored


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


# --- a greedy attempt beside the group -----------------------------------------------------------------------------


class Warm(Scripted):
    """Answers 7 when asked greedily."""

    async def generate(self, token_ids: Sequence[int], sampling: Sampling) -> Completion:
        if sampling.temperature == 0:
            assert (sampling.top_p, sampling.top_k) == (1.0, 0)
            ids = tuple(self.tokenizer("7")["input_ids"])
            return Completion(ids, (0.0,), (0,), StopReason.EOS)
        return await super().generate(token_ids, sampling)


def baseline_source(reward: Any, agent: Any = None, **changes: Any) -> TrainingSource:
    made = replace(collector(reward, agent), engine=Warm())
    settings: dict[str, Any] = {"attempts": 2, "sampling": Sampling(top_p=0.5, top_k=3), "min_group_size": 1}
    return TrainingSource(made, lambda step: TASKS, **(settings | {"greedy_baseline": True} | changes))


def test_a_greedy_attempt_is_scored_and_kept_apart() -> None:
    found = asyncio.run(baseline_source(parity).next())
    for group in found.groups:
        assert len(group.episodes) == 2
        assert group.baseline is not None and group.baseline.final_answer == "7"
        assert group.baseline.rewards == {"parity": 1}
    samples = to_samples(found, {"parity": 2.0})
    assert samples.episodes == 6
    assert samples.baseline_rewards_G is not None and samples.baseline_rewards_G.tolist() == [2.0] * 3


def test_without_its_greedy_attempt_a_group_is_dropped() -> None:
    async def fussy(policy: Any, task: Task) -> str:
        if task.id == "t1" and policy.stream[-1] == "greedy":
            raise RuntimeError("no")
        return str(await policy.chat(task.messages))

    found = asyncio.run(baseline_source(parity, FunctionAgent(fussy)).next())
    assert [g.task.id for g in found.groups] == ["t0", "t2"]
    assert found.dropped == 1 and found.failures == {"agent": 1}


def test_rewards_that_compare_attempts_see_the_greedy_one_alone() -> None:
    def rank(episodes: Sequence[Any]) -> list[float]:
        return [float(len(episodes))] * len(episodes)

    found = asyncio.run(baseline_source(rank).next())
    assert all(e.rewards == {"rank": 2.0} for g in found.groups for e in g.episodes)
    assert all(g.baseline is not None and g.baseline.rewards == {"rank": 1.0} for g in found.groups)


# --- groups without signal -----------------------------------------------------------------------------------------

MANY = [Task(f"m{i}", ({"role": "user", "content": f"q{i}"},), answer="x") for i in range(20)]


def refilling(
    reward: Any, *, rounds: int = 3, rewards: tuple[str, ...], tasks: Sequence[Task] = MANY, apart: bool = False
) -> TrainingSource:
    def fresh(step: int, round: int, count: int, tried: Any) -> list[Task]:
        return fresh_tasks(tasks, step, round, count, seed=1, tried=tried)

    return TrainingSource(
        collector(reward),
        lambda step: tasks[:4],
        attempts=2,
        sampling=Sampling(),
        min_group_size=2,
        refill=Refill(dict.fromkeys(rewards, 1.0), apart, rounds, fresh),
    )


def test_groups_without_signal_are_replaced_by_fresh_tasks() -> None:
    found = asyncio.run(refilling(parity, rewards=("parity",)).next())
    assert all(len({e.rewards["parity"] for e in g.episodes}) == 2 for g in found.groups)
    assert all(len({e.rewards["parity"] for e in g.episodes}) == 1 for g in found.zero_variance)
    assert found.zero_variance and found.refills >= 1 and len(found.groups) <= 4
    ids = [g.task.id for g in (*found.groups, *found.zero_variance)]
    assert len(set(ids)) == len(ids), "no task is tried twice in a step"
    again = asyncio.run(refilling(parity, rewards=("parity",)).next())
    assert [g.task.id for g in again.groups] == [g.task.id for g in found.groups], "a resumed run asks the same"


def test_the_rounds_are_bounded_and_what_there_is_is_used() -> None:
    def same(final_answer: str) -> float:
        return 1.0

    found = asyncio.run(refilling(same, rounds=2, rewards=("same",)).next())
    assert found.refills == 2
    assert (len(found.groups), len(found.zero_variance)) == (4, 8)
    few = asyncio.run(refilling(same, rounds=5, rewards=("same",), tasks=MANY[:6]).next())
    assert (few.refills, len(few.groups), len(few.zero_variance)) == (1, 4, 2), "there were two fresh tasks only"


def test_only_the_named_rewards_count_as_signal() -> None:
    def same(final_answer: str) -> float:
        return 1.0

    both = [parity, same]
    assert asyncio.run(refilling(both, rounds=1, rewards=("same",)).next()).refills == 1
    any_of_them = asyncio.run(refilling(both, rewards=("parity", "same")).next())
    assert all(len({e.rewards["parity"] for e in g.episodes}) == 2 for g in any_of_them.groups)


def test_rewards_that_cancel_out_have_a_signal_only_per_reward() -> None:
    def even(final_answer: str) -> float:
        return 1.0 - parity(final_answer)

    both = {"rewards": ("parity", "even"), "rounds": 1}
    assert asyncio.run(refilling([parity, even], **both).next()).zero_variance
    summed, apart = (asyncio.run(refilling([parity, even], apart=a, **both).next()) for a in (False, True))
    assert all(len({e.rewards["parity"] for e in g.episodes}) == 2 for g in apart.groups)
    assert len(summed.groups) == 4 and len(summed.zero_variance) == 4, (
        "no group has a signal, so zero-variance groups are used"
    )


def test_a_group_teaches_if_it_differs_from_its_greedy_attempt() -> None:
    refill = Refill({"parity": 1.0}, False, 1, lambda *_: [])
    (group, *_) = asyncio.run(baseline_source(parity).next()).groups
    equal = tuple(replace(e, rewards={"parity": 0.0}) for e in group.episodes)
    assert refill.has_signal(replace(group, episodes=equal)), "the greedy attempt earned 1"
    assert not refill.has_signal(replace(group, episodes=equal, baseline=None))


def test_statistics_of_all_groups_reach_the_samples() -> None:
    found = asyncio.run(refilling(parity, rewards=("parity",)).next())
    samples = to_samples(found, {"parity": 1.0})
    column, group = samples.unfiltered_reward("parity")
    assert len(column) == 2 * (len(found.groups) + len(found.zero_variance)) == len(group)
    assert int(group.max()) == len(found.groups) + len(found.zero_variance) - 1
    assert samples.episodes == 2 * len(found.groups)


def test_an_episode_without_a_reply_is_a_failure() -> None:
    class Silent:
        def opening(self, task: Task) -> Any:
            return task.messages, None

        async def run(self, policy: Any, task: Task) -> Any:
            return Episode(task, (), task.messages, stop=StopReason.LENGTH)

    with pytest.raises(NothingCompleted, match=r"9 × no_room: no reply could be sampled"):
        asyncio.run(source(collector(parity, Silent())).next())


def test_a_time_out_of_the_agents_own_is_not_the_episodes() -> None:
    async def hurried(policy: Any, task: Task) -> str:
        await policy.chat(task.messages)
        async with asyncio.timeout(0.001):
            await asyncio.sleep(5)
        return ""

    with pytest.raises(NothingCompleted, match="9 × agent: TimeoutError"):
        asyncio.run(source(collector(parity, FunctionAgent(hurried))).next())


def test_messages_that_an_agent_returns_hold_its_answer() -> None:
    async def brief(policy: Any, task: Task) -> Any:
        return [{"role": "assistant", "content": await policy.chat(task.messages)}]

    (group, *_) = asyncio.run(source(collector(parity, FunctionAgent(brief))).next()).groups
    assert all(episode.final_answer.isdigit() for episode in group.episodes)


def test_a_reward_that_fails_on_one_attempt_costs_that_one_also_beside_a_reward_of_groups() -> None:
    def rank(episodes: Any) -> list[float]:
        return [float(place) for place, _ in enumerate(episodes)]

    def picky(episode: Any) -> float:
        if int(episode.final_answer) % 2:
            raise ValueError("odd")
        return 1.0

    made = collector([rank, picky])
    collected = asyncio.run(source(made, attempts=8).next())
    odd = sum(seed % 100 % 2 for seed in made.engine.seeds)
    assert 0 < odd < 24 and collected.failures == {"reward": odd}
    for group in collected.groups:
        assert [e.rewards["rank"] for e in group.episodes] == [float(i) for i in range(len(group.episodes))]


def test_an_evaluation_counts_what_no_reward_scored() -> None:
    from covey.config.schema import EvalConfig
    from covey.training.evaluate import Evaluator

    def even_only(final_answer: str) -> float | None:
        return None if int(final_answer) % 2 else 1.0

    made, warnings = collector(even_only), []
    config = EvalConfig(modes=["sampled"], n=8)
    evaluator = Evaluator(made, TASKS, config, max_tokens=8, stop=(), trained_reward="even_only", warn=warnings.append)
    metrics = asyncio.run(evaluator.run()).metrics
    odd = sum(seed % 100 % 2 for seed in made.engine.seeds)
    assert metrics["eval/sampled/failed"] == odd > 0
    assert f"{odd} of 24 sampled answers were not scored" in warnings[0]
