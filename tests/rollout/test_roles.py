"""Several roles in one episode: rewards, groups and rows of each."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from typing import Any

import pytest
import torch

import covey
from covey.agents.environment import EnvironmentAgent
from covey.algorithms import make
from covey.algorithms.functional import advantages
from covey.errors import InputError
from covey.protocols import Advantages, TokenTrace
from covey.rewards import resolve_rewards
from covey.rollout.collector import Refill
from covey.rollout.roles import names_roles, split_roles
from covey.training.metrics import engine_mismatch
from covey.training.record import step_episodes, step_view
from covey.training.samples import minibatches, to_samples
from covey.training.step import StepResult
from covey.types import Collected, Episode, Group, StopReason, Task, Turn
from tests.agents.scripted import Script, scored

TASK = Task("t", ({"role": "user", "content": "play"},))


def turn(role: str | None, prompt: list[int], completion: list[int], **columns: Any) -> Turn:
    n = len(completion)
    return Turn(tuple(prompt), tuple(completion), (-0.5,) * n, (0,) * n, StopReason.EOS, role=role, **columns)


def game(first: float, second: float, **columns: Any) -> Episode:
    """The players see one conversation: second's prompt contains first's move."""
    turns = (turn("first", [1], [5, 6], **columns), turn("second", [1, 5, 6, 9], [7]), turn("first", [2], [8]))
    return Episode(TASK, turns, (), given={"first": first, "second": second})


def with_scores(episode: Episode, names: Any = "given", **settings: Any) -> Episode:
    return replace(episode, rewards=asyncio.run(resolve_rewards(names, None, {}, **settings)(TASK, episode)))


def collected(*groups: list[Episode]) -> Collected:
    return Collected(tuple(Group(TASK, tuple(group)) for group in groups))


def test_an_episode_counts_once_for_each_role() -> None:
    results = [(1, -1), (-1, 1), (1, -1)]
    episodes = [with_scores(game(*result)) for result in results]
    assert episodes[0].rewards == {"given": 0, "given/first": 1, "given/second": -1}
    samples = to_samples(collected(episodes, episodes[:2]), {"given": 2.0})
    assert samples.roles == (
        *((0, "first"), (1, "first"), (2, "first"), (0, "second"), (1, "second"), (2, "second")),
        *((3, "first"), (4, "first"), (3, "second"), (4, "second")),
    )
    assert samples.group_N.tolist() == [0, 0, 0, 1, 1, 1, 2, 2, 3, 3]
    assert samples.total_reward().tolist() == [2, -2, 2, -2, 2, -2, 2, -2, -2, 2]
    # The first player's rows: its opening, and a fork; the second's: the opening is context.
    assert samples.episode_R[:6].tolist() == [0, 0, 1, 1, 2, 2] and samples.episode_R[6:9].tolist() == [3, 4, 5]
    rows = samples.rows
    assert (rows[0].prompt_ids, rows[0].response_ids, rows[0].mask) == ((1,), (5, 6), (True, True))
    assert (rows[6].prompt_ids, rows[6].response_ids) == ((1, 5, 6, 9), (7,))


def test_baselines_are_within_a_role() -> None:
    """Each role's advantages are those of GRPO on its rewards alone."""
    first, second = [3.0, 0.0, 1.0], [10.0, 30.0, 20.0]
    samples = to_samples(
        collected([with_scores(game(*both)) for both in zip(first, second, strict=True)]), {"given": 1}
    )
    found = make("grpo").advantages(samples).values
    torch.testing.assert_close(found[:3].double(), advantages("grpo", torch.tensor(first).double(), [0] * 3))
    torch.testing.assert_close(found[3:].double(), advantages("grpo", torch.tensor(second).double(), [0] * 3))


@pytest.mark.parametrize("name", ["gvpo", "rloo", "gdpo", "turn_returns", "gigpo", "reinforce_plus_plus", "opo"])
def test_every_algorithm_sees_roles_as_groups(name: str) -> None:
    """Swapping what the second players got changes nothing for the first ones."""
    one, other = (
        to_samples(
            collected([with_scores(game(n, second[n])) for n in range(3)]), {"given": 1}, turns=make(name).needs.turns
        )
        for second in ([0, 1, 2], [0, 2, 1])
    )
    found, swapped = (make(name).advantages(samples).values for samples in (one, other))
    firsts = 3 if found.dim() == 1 else 6  # three members, six rows
    torch.testing.assert_close(found[:firsts], swapped[:firsts])
    assert not torch.equal(found[firsts:], swapped[firsts:])


def test_shared_rewards_do_not_split() -> None:
    """Roles without rewards of their own are one member of the group, as without roles."""
    episode = with_scores(replace(game(0, 0), given={"reward": 1.0, "moves": 3.0}))
    plain = replace(episode, turns=tuple(replace(turn, role=None) for turn in episode.turns))
    found, expected = (to_samples(collected([e]), {"given": 1.0}) for e in (episode, plain))
    assert found.roles == () and found.rows == expected.rows
    assert not names_roles([Group(TASK, (episode,))], {"given": 1.0})


def test_roles_that_are_not_trained_are_left_out() -> None:
    episode = with_scores(game(1, -1))
    frozen = [replace(t, trained=t.role == "first") for t in episode.turns]
    samples = to_samples(collected([replace(episode, turns=tuple(frozen))]), {"given": 1.0})
    assert samples.roles == ((0, "first"),) and samples.mask_RT.sum() == 3


def test_a_step_in_which_no_trained_role_spoke_has_nothing_to_learn_from() -> None:
    episode = with_scores(game(1, -1, trained=False))
    frozen = replace(episode, turns=tuple(replace(t, trained=False) for t in episode.turns))
    samples = to_samples(collected([frozen, frozen]), {"given": 1.0}, turns=True)
    assert samples.roles == () and samples.episodes == 2 and not samples.mask_RT.any()
    assert not make("gigpo").advantages(samples).values.any()


def test_a_measurement_that_names_roles_changes_nothing() -> None:
    """A reward of weight 0 does not split the episodes, and a role that only it scores is not trained on."""

    @covey.reward
    def measured(episode: Episode) -> dict[str, float]:
        return {"first": 1.0, "second": 0.5}

    shared = replace(game(0, 0), given={"reward": 1.0})
    with_it, without = (
        to_samples(collected([with_scores(shared, names)]), weights)
        for names, weights in (([measured, "given"], {"measured": 0.0, "given": 1.0}), ("given", {"given": 1.0}))
    )
    assert with_it.roles == () and with_it.rows == without.rows
    assert with_it.total_reward().tolist() == without.total_reward().tolist() == [1.0]
    unscored = with_scores(replace(game(0, 0), given={"first": 1.0, "second": None}), [measured, "given"])
    assert to_samples(collected([unscored]), {"measured": 0.0, "given": 1.0}).roles == ((0, "first"),)


def test_a_turn_without_a_role_is_refused() -> None:
    episode = with_scores(game(1, -1))
    unnamed = replace(episode, turns=(*episode.turns, turn(None, [4], [4])))
    with pytest.raises(InputError, match="some trained turns have none"):
        to_samples(collected([unnamed]), {"given": 1.0})
    masked = replace(episode, turns=(*episode.turns, turn(None, [4], [4], trained=False)))
    assert to_samples(collected([masked]), {"given": 1.0}).mask_RT.sum() == 4


def test_a_role_is_compared_with_the_attempts_that_have_it() -> None:
    """None is not 0: a role that was not scored is left out as well."""
    alone = with_scores(Episode(TASK, (turn("first", [1], [5]),), (), given={"first": 1.0}))
    unscored = with_scores(replace(game(1, 0), given={"first": 0.0, "second": None}))
    samples = to_samples(collected([alone, unscored, with_scores(game(1, 2))]), {"given": 1.0})
    assert samples.roles == ((0, "first"), (1, "first"), (2, "first"), (2, "second"))
    assert samples.rewards["given"].tolist() == [1, 0, 1, 2]


def test_records_of_episodes_without_a_trained_role() -> None:
    """The trained player never spoke in the attempts 0 and 2: they have their own scores and no advantage."""
    moves = turn("first", [1], [5], trained=False), turn("second", [1, 5], [7])
    both = Episode(TASK, moves, (), given={"first": 1.0, "second": 3.0})
    quit_early = Episode(TASK, moves[:1], (), given={"first": -1.0})
    episodes = [with_scores(episode) for episode in (quit_early, both, quit_early)]
    step = collected(episodes)
    samples = to_samples(step, {"given": 2.0})
    assert samples.roles == ((1, "second"),)
    trace = TokenTrace(*(torch.zeros(samples.mask_RT.shape) for _ in range(3)))
    for values in (torch.tensor([0.5]), torch.full(samples.mask_RT.shape, 0.5)):
        result = StepResult(step, samples, Advantages(values), {}, trace)
        records = step_episodes(result, 0, 3, str)
        assert [record["total_reward"] for record in records] == [-2.0, 6.0, -2.0]
        assert [record["advantage"] for record in records] == [None, 0.5, None]
        assert [len(record["rows"]) for record in records] == [0, 1, 0]
        view = step_view(result, 0)
        assert (view.reward, view.advantage) == (-2.0, None)


def test_a_role_has_its_own_turn_rewards() -> None:
    """1 for the first player's opening, on top of its outcome; nothing of it for the second."""
    episode = with_scores(game(-1, 1, reward=1.0))
    assert episode.rewards == {"given": 1.0, "given/turns": 1.0, "given/first": -1, "given/second": 1}
    samples = to_samples(collected([episode]), {"given": 1.0}, turns=True)
    assert samples.total_reward().tolist() == [0, 1]
    assert samples.turns is not None
    assert samples.turns.reward_K.nan_to_num(nan=0.0).tolist() == [1, 0, 0]


def test_a_condition_holds_for_every_role() -> None:
    settings: dict[str, Any] = {"names": ["given", "length"], "only_if": {"given": "length>=1e9"}}
    episode = with_scores(game(3, 4, reward=1.0), **settings)
    assert (episode.rewards["given"], episode.rewards["given/first"], episode.rewards["given/second"]) == (0, 0, 0)
    samples = to_samples(collected([episode]), {"given": 1.0}, turns=True)
    assert samples.total_reward().tolist() == [0, 0]
    assert samples.turns is not None and not samples.turns.reward_K.nan_to_num(nan=0.0).any()


def test_a_failed_condition_takes_the_rewards_of_a_zero_sum_game() -> None:
    """The sum of the rewards is 0 with and without the condition."""
    settings: dict[str, Any] = {"names": ["given", "length"], "only_if": {"given": "length>=1e9"}}
    episode = with_scores(game(1, -1), **settings)
    assert (episode.rewards["given/first"], episode.rewards["given/second"]) == (0, 0)
    moves = with_scores(game(1, -2, reward=1.0), **settings)
    samples = to_samples(collected([episode, moves]), {"given": 1.0}, turns=True)
    assert not samples.total_reward().any()
    assert samples.turns is not None and not samples.turns.reward_K.nan_to_num(nan=0.0).any()


def test_without_roles_a_failed_condition_takes_turn_rewards_that_cancel_the_outcome() -> None:
    turns = turn(None, [1], [5], reward=1.0), turn(None, [2], [6], reward=None)
    played = Episode(TASK, turns, (), given={"reward": -1.0})
    for least, expected in (("1e9", [0, 0]), ("0", [1, 0])):
        episode = with_scores(played, ["given", "length"], only_if={"given": f"length>={least}"})
        assert episode.rewards["given"] == 0
        samples = to_samples(collected([episode]), {"given": 1.0}, turns=True)
        assert samples.turns is not None and samples.turns.reward_K.nan_to_num(nan=0.0).tolist() == expected


def test_a_role_is_not_truncated_because_another_was_cut_off() -> None:
    cut = replace(with_scores(game(1, -1)), stop=StopReason.LENGTH)
    second = replace(cut, turns=(cut.turns[0], replace(cut.turns[1], stop=StopReason.LENGTH)))
    samples = to_samples(collected([second, cut]), {"given": 1.0})
    assert samples.roles == ((0, "first"), (1, "first"), (0, "second"), (1, "second"))
    # In the second attempt no turn was cut off: there was no room for a further one, and its role is unknown.
    assert samples.truncated_N.tolist() == [False, True, True, True]


def test_a_reward_function_names_roles() -> None:
    @covey.reward
    def mine(episode: Episode) -> dict[str, float]:
        return {"first": 1.0, "second": 0.5, "moves": 3.0}

    assert with_scores(game(0, 0), mine).rewards == {
        "mine": 1.5,
        "mine/first": 1.0,
        "mine/second": 0.5,
        "mine/moves": 3.0,
    }
    nobody = Episode(TASK, (turn(None, [1], [5]),), ())
    with pytest.raises(Exception, match="has no 'reward'"):
        with_scores(nobody, mine)


def test_a_game_whose_rewards_cancel_has_a_signal() -> None:
    refill = Refill({"given": 1.0}, per_reward=False, rounds=1, fresh=lambda *_: ())
    games = [with_scores(game(1, -1)), with_scores(game(-1, 1))]
    assert refill.has_signal(Group(TASK, tuple(games))) and not refill.has_signal(Group(TASK, (games[0],) * 2))


def test_the_greedy_attempt_is_split_too() -> None:
    group = Group(TASK, (with_scores(game(1, 2)), with_scores(game(3, 4))), with_scores(game(5, 7)))
    samples = to_samples(Collected((group,)), {"given": 1.0})
    assert samples.baseline_rewards_G is not None and samples.baseline_rewards_G.tolist() == [5, 7]
    assert make("remax").advantages(samples).values.tolist() == [-4, -2, -5, -3]


def test_a_mini_batch_has_the_groups_of_all_roles_of_its_tasks() -> None:
    """So the number of optimiser steps, which the learning rate follows, does not depend on the roles."""
    alone = with_scores(Episode(TASK, (turn("second", [1], [5]),), (), given={"second": 1.0}))
    games = [[with_scores(game(1, 2)), with_scores(game(3, 4))] for _ in range(3)]
    samples = to_samples(collected(games[0], [alone], *games[1:]), {"given": 1.0})
    advantages = Advantages(torch.arange(13.0))
    batches = list(minibatches(samples, advantages, groups_per_batch=2, epochs=2))
    assert [batch.group_N.tolist() for batch in batches] == 2 * [[0, 0, 1, 1, 2], [0, 0, 1, 1, 2, 2, 3, 3]]
    assert [batch.epoch for batch in batches] == [0, 0, 1, 1]
    (whole,) = minibatches(samples, advantages, groups_per_batch=None, epochs=1)
    assert whole.groups == 7
    trace = TokenTrace(*(torch.ones(samples.mask_RT.shape) for _ in range(3)))
    trace.ratio[batches[1].row_R] = 100.0  # not of the first mini-batch, so no difference between engine and learner
    assert engine_mismatch(samples, trace, 2)["rollout/mismatch"] == 0


def test_split_keeps_the_order_of_tasks() -> None:
    groups, owners = split_roles([Group(TASK, (with_scores(game(1, 2)),)) for _ in range(2)], {"given": 1.0})
    assert owners == [(0, "first"), (0, "second"), (1, "first"), (1, "second")]
    assert [group.episodes[0].rewards["given"] for group in groups] == [1, 2, 1, 2]


class Duel:
    """Two players, each with a conversation of its own."""

    def reset(self, task: Task) -> Any:
        self.said: list[str] = []
        return covey.Observation("you begin", role="first")

    def step(self, reply: str) -> Any:
        self.said.append(reply)
        if len(self.said) == 3:
            return covey.Done(reward={"first": 1.0, "second": -1.0})
        role = ("first", "second")[len(self.said) % 2]
        return covey.Observation(f"heard {reply}", reward=0.25, role=role)


@pytest.mark.parametrize("trained", [(), ("second",)])
def test_an_environment_with_two_roles(trained: tuple[str, ...]) -> None:
    engine = Script("a", "b", "c")
    agent = EnvironmentAgent(Duel, max_turns=8, train_roles=trained)
    episode = asyncio.run(scored(agent, TASK, engine))
    assert [turn.role for turn in episode.turns] == ["first", "second", "first"]
    assert [turn.trained for turn in episode.turns] == [not trained, True, not trained]
    # The second player does not see what was said to the first; the first continues its own conversation.
    assert "you begin" not in engine.prompts[1] and "heard a" in engine.prompts[1]
    assert "you begin" in engine.prompts[2] and "heard b" in engine.prompts[2] and "heard a" not in engine.prompts[2]
    names = [(m.get("name"), m["content"]) for m in episode.messages if m["role"] == "assistant"]
    assert names == [("first", "a"), ("second", "b"), ("first", "c")]
    samples = to_samples(collected([episode]), {"given": 1.0})
    assert samples.total_reward().tolist() == ([1.25, -0.75] if not trained else [-0.75])
