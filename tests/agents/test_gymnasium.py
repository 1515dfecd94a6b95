"""agent=gymnasium: Gymnasium's own text environments, played in words. Needs the package."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("gymnasium", reason="needs the package gymnasium")

from covey.agents.packages import PackageAgent
from covey.agents.packages.gymnasium import GymnasiumAdapter, plain_text
from covey.cli.main import main
from covey.errors import InputError
from covey.types import Episode
from tests.agents.scripted import Script, one_row, scored, with_braces


def play(adapter: GymnasiumAdapter, *replies: str, max_turns: int = 8, seed: int = 0) -> Episode:
    agent = PackageAgent(adapter.make, max_turns, adapter=adapter)
    task = agent.tasks(seed + 1)[seed]
    return asyncio.run(scored(agent, task, Script(*replies, tokenizer=with_braces())))


def test_a_frozen_lake_is_crossed_in_words() -> None:
    """The map is Gymnasium's 4 x 4: down, down, right, right, down, right reaches the goal without a hole."""
    lake = GymnasiumAdapter("FrozenLake-v1", {"is_slippery": False})
    way = ("down", "I go Down.", "left or right? right", "RIGHT", "down", "right")
    episode = play(lake, *way)
    assert episode.failure is None and one_row(episode)
    assert episode.rewards == {"given": 1.0, "given/steps": 6.0, "given/invalid": 0.0}
    first = episode.task.messages[0]["content"]
    assert first.endswith("[S]FFF\nFHFH\nFFFH\nHFFG") and "left, down, right, up" in first
    assert episode.messages[-1]["content"].endswith("SFFF\nFHFH\nFFFH\nHFF[G]")


def test_a_reply_without_an_action_costs_a_turn() -> None:
    lake = GymnasiumAdapter("FrozenLake-v1", {"is_slippery": False})
    episode = play(lake, "hm", "rightly", max_turns=2)
    assert episode.rewards == {"given": 0.0, "given/steps": 0.0, "given/invalid": 2.0}
    assert "one of left, down, right, up" in episode.messages[2]["content"]


def test_observations_without_a_picture_are_told() -> None:
    blackjack = GymnasiumAdapter("Blackjack-v1", {})
    episode = play(blackjack, "stick")
    environment = blackjack._open()
    (own, dealer, ace), _ = environment.reset(seed=0)
    reward = environment.step(0)[1]
    assert f"Your sum: {own}. The dealer shows: {dealer}. Usable ace: {ace}." in episode.task.messages[0]["content"]
    assert episode.rewards["given"] == reward


def test_tasks_are_seeds_and_the_same_seed_starts_the_same() -> None:
    taxi = GymnasiumAdapter("Taxi-v4", {"prompt": "Drive."})
    tasks, again = taxi.tasks(4), taxi.tasks(4)
    assert [task.id for task in tasks] == [f"Taxi-v4/{n}" for n in range(4)]
    assert tasks == again and len({task.messages[0]["content"] for task in tasks}) > 1
    assert tasks[0].messages[0]["content"].startswith("Drive.\n\n+---------+")


def test_text_actions_are_the_reply_itself() -> None:
    import gymnasium

    class Echo(gymnasium.Env[str, str]):
        action_space = gymnasium.spaces.Text(8, charset="abc")
        observation_space = gymnasium.spaces.Text(20, charset="abcdefghijklmnopqrstuvwxyz ")

        def reset(self, *, seed: int | None = None, options: Any = None) -> tuple[str, dict[str, Any]]:
            return f"say {'abc'[(seed or 0) % 3]}", {}

        def step(self, action: str) -> tuple[str, float, bool, bool, dict[str, Any]]:
            return "thanks", float(action == "a"), True, False, {}

    gymnasium.register("covey/Echo-v0", entry_point=Echo)
    echo = GymnasiumAdapter("covey/Echo-v0", {})
    episode = play(echo, "xyz", " a ")
    assert episode.task.messages[0]["content"].endswith("\n\nsay a")
    assert episode.rewards == {"given": 1.0, "given/steps": 1.0, "given/invalid": 1.0}


def test_colours_become_brackets() -> None:
    assert plain_text("\n|\x1b[43m \x1b[0m|\x1b[35mY\x1b[0m|\x1b[34;1mB\x1b[0m|\n") == "|[ ]|<Y>|(B)|"


@pytest.mark.parametrize(
    ("name", "options", "said"),
    [
        ("FrozenLike-v1", {}, "agent.environment=FrozenLike-v1: Environment `FrozenLike` doesn't exist"),
        ("FrozenLake-v1", {"slippery": 1}, "agent.environment=FrozenLake-v1: .*slippery"),
        ("FrozenLake-v1", {"actions": ["a", "b"]}, "actions has 2 names, and FrozenLake-v1 has 4 actions"),
        ("Pendulum-v1", {}, "has actions of Box: only Discrete and Text"),
    ],
)
def test_what_cannot_be_played_is_refused(name: str, options: dict[str, Any], said: str) -> None:
    with pytest.raises(InputError, match=said):
        GymnasiumAdapter(name, options)


@pytest.mark.parametrize("text", ["sum {0}, dealer {7}", "{a}", "sum {", "{0.x}"])
def test_a_text_that_the_observation_does_not_fill_is_refused(text: str) -> None:
    with pytest.raises(InputError, match=r"cannot be filled in (.|\n)*of Blackjack-v1 has the items \{0\} to \{2\}"):
        GymnasiumAdapter("Blackjack-v1", {"observation": text}).tasks(1)


@pytest.mark.slow
def test_a_run_trains_in_an_environment(
    tmp_path: Path, tiny_model_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    words = [f"model={tiny_model_folder}", "agent=gymnasium", "agent.environment=Blackjack-v1", "agent.max_turns=2"]
    words += ["agent.environment_options.prompt=play", "data.train_size=8", "data.val_size=2", "loop.total_steps=1"]
    words += ["data.train_batch_size=2", "rollout.group_size=2", "rollout.max_tokens=4", "algorithm=grpo"]
    assert main(["train", *words]) == 0
    (path,) = tmp_path.glob("outputs/*/*/metrics.jsonl")
    records = [json.loads(line) for line in path.read_text().splitlines()]
    (step,) = [record["metrics"] for record in records if record["kind"] == "step"]
    assert step["reward/given/steps/mean"] + step["reward/given/invalid/mean"] <= 2
