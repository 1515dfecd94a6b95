"""From turns that were paid to the columns of a step, its metrics and records."""

from __future__ import annotations

import asyncio
import math
from dataclasses import replace
from typing import Any

import pytest
import torch

from covey.algorithms import make
from covey.algorithms.ops import turn_rewards
from covey.rewards import resolve_rewards
from covey.rollout.asynchronous import group_from_json, group_to_json
from covey.telemetry.jsonl import episode_record
from covey.training.metrics import turn_metrics
from covey.training.samples import to_samples
from covey.types import Collected, Episode, Group, Image, ImageSpan, StopReason, Task, Turn, Turns

TASK = Task("t", ())


def turn(prompt: list[int], completion: list[int], reward: float | None = None, **columns: Any) -> Turn:
    n = len(completion)
    return Turn(tuple(prompt), tuple(completion), (-0.5,) * n, (0,) * n, StopReason.EOS, reward=reward, **columns)


def scored(*turns: Turn, reward: float | None = None, names: Any = "given", **settings: Any) -> Episode:
    episode = Episode(TASK, turns, (), given=None if reward is None else {"reward": reward})
    scores = asyncio.run(resolve_rewards(names, None, {}, **settings)(TASK, episode))
    return replace(episode, rewards=scores)


def step(*groups: list[Episode], weight: float = 1.0) -> tuple[Turns, Any]:
    samples = to_samples(Collected(tuple(Group(TASK, tuple(g)) for g in groups)), {"given": weight}, turns=True)
    assert samples.turns is not None
    return samples.turns, samples


def test_given_is_the_outcome_and_the_rewards_of_the_turns() -> None:
    assert scored(turn([1], [2], 0.5), turn([9], [3]), turn([8], [4], -1.5)).rewards == {
        "given": -1.0,
        "given/turns": -1.0,
    }
    assert scored(turn([1], [2], 0.5), reward=2.0).rewards == {"given": 2.5, "given/turns": 0.5}
    assert scored(turn([1], [2], 0.0)).rewards == {"given": 0.0, "given/turns": 0.0}
    assert scored(turn([1], [2]), reward=2.0).rewards == {"given": 2.0}
    assert scored(turn([1], [2])).rewards == {"given": None}  # not paid is not 0


def test_columns_of_the_turns() -> None:
    """Two groups. The second episode forks and has a turn that is not trained on; the rows know their turns."""
    first = scored(turn([1], [5, 6], 1.0), turn([1, 5, 6, 9], [7]), reward=2.0)
    forked = scored(turn([1], [5], None), turn([2], [6], 3.0, trained=False), turn([3], [7, 7], 0.0))
    other = scored(turn([1], [4]), reward=1.0)
    turns, samples = step([first, forked], [other], weight=2.0)
    assert turns.episode_K.tolist() == [0, 0, 1, 1, 1, 2]
    assert turns.number_K.tolist() == [0, 1, 0, 1, 2, 0]
    assert [None if math.isnan(r) else r for r in turns.reward_K.tolist()] == [2, None, None, 6, 0, None]
    assert turns.turn_RT.tolist() == [[0, 0, -1, 1], [2, -1, -1, -1], [4, 4, -1, -1], [5, -1, -1, -1]]
    assert samples.episode_R.tolist() == [0, 1, 1, 2]
    assert turn_rewards(samples, turns).tolist() == [2, 4, 0, 6, 0, 2]
    assert samples.total_reward().tolist() == [6, 6, 2]


def test_states_are_shared_within_a_group() -> None:
    """By name, or without one by the prompt; never across groups."""
    one = scored(turn([1], [5], 1.0, state="hall"), turn([2], [5], state="room"))
    two = scored(turn([7], [5], 1.0, state="room"), turn([1], [5]), turn([1], [6]))
    turns, _ = step([one, two], [one])
    hall, room, room_too, prompt, prompt_too, *others = turns.state_K.tolist()
    assert room == room_too and prompt == prompt_too
    assert len({hall, room, prompt, *others}) == 5


def test_prompts_with_different_images_are_different_states() -> None:
    screens = [ImageSpan(Image(f"digest {n}", b""), 0, 1) for n in (0, 1, 0)]
    turns, _ = step([scored(turn([9], [5], 1.0, images=(screen,))) for screen in screens])
    assert turns.state_K.tolist() == [0, 1, 0]


def test_a_failed_condition_takes_the_rewards_of_the_turns_away() -> None:
    settings: dict[str, Any] = {"names": ["given", "length"], "only_if": {"given": "length>=1e9"}}
    episode = scored(turn([1], [5], 1.0), turn([2], [5], 2.0), **settings)
    assert episode.rewards["given"] == 0.0
    turns, samples = step([episode, scored(turn([1], [5], 1.0), turn([2], [5], 2.0))])
    assert turn_rewards(samples, turns).tolist() == [0, 0, 1, 2]


def test_turns_count_only_through_the_reward_given() -> None:
    episode = replace(scored(turn([1], [5], 1.0), turn([2], [5], 2.0)), rewards={"other": 4.0, "given": 3.0})
    samples = to_samples(Collected((Group(TASK, (episode,)),)), {"other": 1.0}, turns=True)
    assert samples.turns is not None
    assert turn_rewards(samples, samples.turns).tolist() == [0, 4]


def test_they_are_only_made_for_algorithms_that_read_them() -> None:
    collected = Collected((Group(TASK, (scored(turn([1], [5], 1.0)),)),))
    assert to_samples(collected, {"given": 1.0}).turns is None
    assert make("turn_returns").needs.turns and make("ppo").needs.turns and not make("grpo").needs.turns


def test_a_turn_in_another_row_has_its_own_advantage() -> None:
    """turn_returns through the columns: episodes of a group that is paid at turn 0, and at turn 1 in another row."""
    early = scored(turn([1], [5, 5], 1.0), turn([2], [6], 0.0))
    late = scored(turn([1], [5], 0.0), turn([2], [6, 6], 1.0))
    _, samples = step([early, late])
    found = make("turn_returns", std_normalize=False).advantages(samples).values
    # Returns: 1, 0 and 1, 1.
    torch.testing.assert_close(found, torch.tensor([[0.0, 0.0], [-0.5, 0.0], [0.0, 0.0], [0.5, 0.5]]))


def test_a_group_in_a_checkpoint_keeps_its_turns() -> None:
    group = Group(TASK, (scored(turn([1], [5], 1.0, state="hall"), turn([2], [6])),))
    stored = group_to_json(group)
    assert group_from_json(TASK, stored).episodes[0].turns == group.episodes[0].turns
    for key in ("reward", "state"):  # of a version without them
        for one in stored["episodes"][0]["turns"]:
            del one[key]
    assert [t.reward for t in group_from_json(TASK, stored).episodes[0].turns] == [None, None]


def test_metrics_and_records() -> None:
    paid = scored(turn([1], [5], 1.0, state="hall"), turn([2], [6], 0.0), turn([3], [6]))
    unpaid = scored(turn([1], [5]), reward=1.0)
    metrics = turn_metrics([paid, unpaid])
    assert {name: metrics[f"reward/turn/{name}"] for name in ("mean", "min", "max", "paid")} == {
        "mean": 0.5,
        "min": 0.0,
        "max": 1.0,
        "paid": 0.5,
    }
    assert "reward/turn/mean" not in turn_metrics([unpaid])
    settings: dict[str, Any] = {"step": 0, "task_id": "t", "group": 0, "attempt": 0, "tokens": (), "decode": str}
    settings |= {"total_reward": 1.0, "advantage": 0.0, "rewards": {}}
    assert episode_record(episode=paid, **settings)["turns"] == [
        {"reward": 1.0, "state": "hall", "role": None},
        {"reward": 0.0, "state": None, "role": None},
        {"reward": None, "state": None, "role": None},
    ]
    assert "turns" not in episode_record(episode=unpaid, **settings)


@pytest.mark.parametrize("name", ["turn_returns", "gigpo", "reinforce_plus_plus"])
def test_an_unpaid_step_trains_too(name: str) -> None:
    """Without rewards of turns the outcome is that of the last turn."""
    _, samples = step([scored(turn([1], [5]), reward=float(n)) for n in range(3)])
    found = make(name).advantages(samples).values[:, 0]
    assert found[0] < 0 and abs(float(found[1])) < 1e-6 and found[2] > 0
