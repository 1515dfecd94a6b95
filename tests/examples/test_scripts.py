"""The files in examples/ run as they say they are run, with a tiny model and two steps."""

from __future__ import annotations

import json
import re
import runpy
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

import covey
from covey.agents.formats.hermes import HermesFormat
from covey.cli.main import main
from covey.models import loading
from covey.protocols import TokenOutputs
from covey.types import Task
from tests.algorithms.helpers import random_batch
from tests.examples.conftest import EXAMPLES


def run_script(name: str, monkeypatch: pytest.MonkeyPatch, *words: str) -> None:
    monkeypatch.setattr(sys, "argv", [name, *words])
    runpy.run_path(str(EXAMPLES / name), run_name="__main__")


def module(name: str) -> dict[str, Any]:
    """What a script defines, without running its training."""
    return runpy.run_path(str(EXAMPLES / name))


def recorded(kind: str) -> list[dict[str, float]]:
    (path,) = Path("outputs").glob("*/*/metrics.jsonl")
    records = [json.loads(line) for line in path.read_text().splitlines()]
    return [record["metrics"] for record in records if record["kind"] == kind]


# -- the index --------------------------------------------------------------------------------------------------------


def test_the_index_has_one_line_for_every_example() -> None:
    lines = re.findall(r"^- \[(.+?)\]\((.+?)\)", (EXAMPLES / "README.md").read_text(), re.MULTILINE)
    there = {path.name + "/" * path.is_dir() for path in EXAMPLES.iterdir()} - {"README.md", "__pycache__/"}
    assert sorted(name for name, _ in lines) == sorted(there)
    assert all(name == target for name, target in lines)


# -- training ---------------------------------------------------------------------------------------------------------

TRAINING = {  # script → what its steps and evaluations record because of what it shows
    "train.py": ("reward/exact/mean", "eval/greedy/exact"),
    "own_reward.py": ("reward/brief/words/mean", "eval/greedy/right"),
    "tool_agent.py": ("reward/number/mean", "eval/greedy/number"),
    "environment.py": ("reward/given/found/mean", "eval/sampled/given"),
    "two_players.py": ("role/first/reward", "eval/sampled/given/first"),
    "own_algorithm.py": ("policy/log_ratio_max", "eval/greedy/number"),
}


@pytest.mark.parametrize("name", TRAINING)
def test_a_training_script_runs(
    name: str, model_folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    run_script(name, monkeypatch, "--steps", "2", "--model", str(model_folder))
    of_a_step, of_an_evaluation = TRAINING[name]
    steps, evaluations = recorded("step"), recorded("eval")
    assert len(steps) == 2 and of_a_step in steps[-1]
    assert len(evaluations) == 2 and of_an_evaluation in evaluations[-1]
    assert re.findall(r"^after (\d+) steps: ", capsys.readouterr().out, re.MULTILINE) == ["0", "2"]


def test_the_second_player_may_be_a_past_policy(model_folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run_script("two_players.py", monkeypatch, "--steps", "2", "--model", str(model_folder), "--past")
    assert [step["opponent/version"] for step in recorded("step")] == [0, 0]
    assert all("role/second/reward" not in step for step in recorded("step"))


def play_piles(pile: int, *replies: str) -> tuple[list[tuple[str, str]], dict[str, float]]:
    """Role and last message of each observation, and the rewards."""
    game = module("two_players.py")["TakeAway"]()
    seen = [game.reset(Task("t", (), answer=str(pile)))]
    seen += [game.step(reply) for reply in replies]
    return [(o.role, o.content[-1]["content"]) for o in seen[:-1]], seen[-1].reward


def test_the_game_of_two_players() -> None:
    first, second = {"first": 1.0, "second": -1.0}, {"first": -1.0, "second": 1.0}
    seen, rewards = play_piles(4, "1", "2", "1")
    assert seen == [("first", "Pile: 4"), ("second", "Pile: 3"), ("first", "Pile: 1")] and rewards == first
    assert play_piles(3, "2", "1")[1] == second
    assert play_piles(3, "take 1")[1] == second  # not a legal move
    assert play_piles(3, "2", "2")[1] == first  # more than there is


def test_the_rewards_of_the_example() -> None:
    found = module("own_reward.py")
    assert [found["right"](text, "52") for text in ("52", "Between 17 and 52.", "52, not 17", "")] == [1, 1, 0, 0]
    assert found["brief"]("52", 15) == {"reward": 1.0, "words": 1}
    assert found["brief"]("It is 52 .", 15)["reward"] == pytest.approx(1 - 3 / 15)
    assert found["brief"]("so " * 40, 15)["reward"] == 0


def test_the_worked_examples_of_the_tool_agent_are_calls_of_its_tool() -> None:
    found = module("tool_agent.py")
    calls = [HermesFormat().parse(message["content"]).calls for message in found["EXAMPLES"][1::4]]
    assert [(call.name, call.arguments) for (call,) in calls] == [("price", {"item": i}) for i in ("bikes", "roses")]
    assert found["price"](" Tea ") == found["PRICES"]["tea"]
    assert not {"bikes", "roses"} & set(found["PRICES"])  # whose prices the examples tell


def test_tools_with_settings_of_an_agent_are_called_in_the_models_own_format(model_folder: Path) -> None:
    found = module("tool_agent.py")
    given: dict[str, Any] = {"model": str(model_folder), "tasks": found["rows"](["tea"]), "tools": [found["price"]]}
    for agent in (None, {"max_turns": 3}):  # a section of settings names no agent
        assert covey.Trainer(**given, agent=agent).config.agent.name == "hf"
    assert covey.Trainer(**given, agent={"name": "react", "max_turns": 3}).config.agent.name == "react"


def test_the_game_of_the_environment() -> None:
    game = module("environment.py")["Guess"]()
    assert game.reset(Task("0", (), answer="3"))[-1]["content"].endswith("guess.")
    assert [game.step("5"), game.step(" 2 ")] == ["Lower.", "Higher."]
    assert game.step("3") == covey.Done(reward={"reward": pytest.approx(0.6), "found": 1.0})
    for reply in ("", "10", "three"):  # not a guess: lost
        game.reset(Task("0", (), answer="3"))
        assert game.step(reply).reward == {"reward": 0.0, "found": 0.0}
    game.reset(Task("0", (), answer="3"))
    assert [game.step("9"), game.step("8"), game.step("7")] == ["Lower."] * 3
    assert game.step("6").reward == {"reward": 0.0, "found": 0.0}


# -- an algorithm of one's own ----------------------------------------------------------------------------------------


def test_the_advantage_of_the_own_algorithm_is_wins_minus_losses() -> None:
    name = f"{EXAMPLES / 'own_algorithm.py'}:Wins"
    rewards = [0.0, 1.0, 100.0, 1.0, 5.0, 5.0]
    # Of four: beaten by all; beats one, beaten by one, one equal; beats all. Of two: equal.
    assert covey.advantages(name, rewards, [0, 0, 0, 0, 1, 1]).tolist() == [-1, 0, 1, 0, 0, 0]


def test_the_loss_of_the_own_algorithm_is_its_equation() -> None:
    wins = module("own_algorithm.py")["Wins"](penalty=0.5)
    now, batch = random_batch()
    found = wins.loss(TokenOutputs(now, torch.zeros_like(now)), batch)
    ratio = now.exp() / batch.old_logprobs_RT.exp()
    torch.testing.assert_close(found, -ratio * batch.advantages_RT + 0.25 * ratio.log() ** 2)


def test_the_own_algorithm_works_on_the_command_line(model_folder: Path) -> None:
    words = [
        "data=largest",
        "data.val_size=2",
        "data.train_batch_size=2",
        "rollout.group_size=4",
        "rollout.max_tokens=4",
    ]
    words += ["loop.total_steps=1", "loop.save_final=false", "algorithm.penalty=0.2", f"model={model_folder}"]
    assert main(["train", f"algorithm={EXAMPLES / 'own_algorithm.py'}:Wins", *words]) == 0
    assert "policy/log_ratio_max" in recorded("step")[0]


# -- GVPO on answers that are there; job scripts ----------------------------------------------------------------------


@pytest.mark.parametrize("named", [False, True])
def test_gvpo_minimal_learns_from_the_answers_it_has(
    named: bool, model_folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(loading, "builtin_folder", lambda name: model_folder)
    run_script("gvpo_minimal.py", monkeypatch, *([str(model_folder)] if named else []))
    figures = [dict(re.findall(r"(\S+)=(-?[\d.]+)", line)) for line in capsys.readouterr().out.splitlines()]
    spread = [float(figure["gvpo/std_weight"]) for figure in figures if figure]
    # One reward of 1 among four: R − R̄ is ¾ and three times −¼ at first. What is learned is taken off.
    assert len(spread) == 5 and spread[0] == pytest.approx(0.1875**0.5, abs=1e-3)
    assert spread == sorted(spread, reverse=True) and spread[-1] < spread[0]


@pytest.mark.parametrize("path", sorted(EXAMPLES.glob("slurm/*.sh")), ids=lambda path: path.name)
def test_a_job_script_is_valid_shell(path: Path) -> None:
    """What is in them runs in tests/app/test_slurm.py."""
    subprocess.run(["bash", "-n", str(path)], check=True)


# -- pictures ---------------------------------------------------------------------------------------------------------


def test_the_pictures_and_the_model_of_vision_train(monkeypatch: pytest.MonkeyPatch) -> None:
    run_script("vision.py", monkeypatch, "shapes", "--demos", "4", "--train", "4", "--val", "2")
    common = ["model=shapes/model", "data.val_files=shapes/val.jsonl", "data.train_batch_size=2", "resume=disable"]
    common += ["loop.total_steps=2", "logging.verbosity=warning"]
    assert main(["sft", *common, "data.train_files=shapes/demos.jsonl", "logging.output_dir=sft"]) == 0
    train = ["data.train_files=shapes/train.jsonl", "reward=exact", "rollout.group_size=2", "rollout.max_tokens=4"]
    assert main(["train", *common, *train, "algorithm=grpo"]) == 0
    assert len(recorded("step")) == 2


def test_the_pictures_of_vision_show_what_is_asked_for() -> None:
    """Counted in the pixels: every colour that a question is about is in its picture."""
    import random

    vision = module("vision.py")
    rgb = {"red": (221, 34, 34), "green": (34, 170, 34), "blue": (34, 34, 221)}
    rgb |= {"yellow": (221, 221, 34), "purple": (170, 34, 170), "white": (255, 255, 255)}
    dice = random.Random(0)
    for _ in range(50):
        picture, question, answer = vision["example"](dice)
        colours = {colour for _, colour in picture.getcolors()} - {(0, 0, 0)}
        assert rgb[answer] in colours if "colour" in question else 0 <= int(answer) <= 3
