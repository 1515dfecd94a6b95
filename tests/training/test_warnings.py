"""Episodes that are cut off are reported as such, with the limit, the share and the setting to raise."""

from __future__ import annotations

import asyncio
import json
import string
import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from covey.agents.resolve import FunctionAgent, resolve_agent
from covey.cli.main import main
from covey.config.schema import AgentConfig
from covey.training.warnings import StepWarnings
from covey.types import Collected, Episode, Group, StopReason, Task, ToolUse, Turn
from tests.agents.scripted import Script, scored

TASK = Task("t", ({"role": "user", "content": "q"},), answer="x")
LIMITS = {"rollout.max_tokens": 8, "agent.max_turns": 3, "agent.max_response_tokens": None}


ENVIRONMENTS = """
import covey

class Guess:  # never done by itself
    def reset(self, task):
        return "guess"

    def step(self, reply):
        return "no, again"

class Scored(Guess):
    def end(self, reason):
        return covey.Done(reward=0.0)
"""


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", sys.path[:])
    (tmp_path / "env.py").write_text(ENVIRONMENTS)
    (tmp_path / "rows.jsonl").write_text('{"question": "q", "answer": "x"}\n')
    return tmp_path


def train(agent: str, model: Path, *settings: str) -> int:
    words = [f"model={model}", f"agent=env.py:{agent}", "data.train_files=rows.jsonl", "loop.total_steps=3"]
    small = ["rollout.group_size=4", "data.train_batch_size=1", "loop.save_final=false"]
    return main(["train", *words, *small, *settings])


# --- what an episode was cut off by ---------------------------------------------------------------------------------


async def talk(policy: Any, task: Task) -> str:
    reply = await policy.chat(task.messages)
    for _ in range(9):
        reply = await policy.chat([*task.messages, {"role": "assistant", "content": reply}, *task.messages])
    return str(reply)


async def brief(policy: Any, task: Task) -> str:
    return (await policy.ask(task.messages, max_tokens=2)).text


@pytest.mark.parametrize(
    ("agent", "limits", "expected"),
    [
        (talk, {"max_response_tokens": 7}, "agent.max_response_tokens"),
        (talk, {}, None),
        (brief, {}, "request"),
        ("Guess", {}, "agent.max_turns"),
    ],
)
def test_the_limit_that_ended_an_episode(here: Path, agent: Any, limits: dict[str, Any], expected: str | None) -> None:
    made = resolve_agent("env.py:Guess", AgentConfig(max_turns=2)) if agent == "Guess" else FunctionAgent(agent)
    episode = asyncio.run(scored(made, TASK, Script(*["abc"] * 12), reward="exact", **limits))
    assert episode.cut_by == expected


def test_the_context_that_ended_an_episode() -> None:
    from covey.protocols import NoRoom
    from covey.rollout.policy import EpisodePolicy
    from covey.rollout.rendering import Renderer
    from covey.types import Sampling

    engine = Script("abcdef", "abc")
    prompt = len(Renderer(engine.tokenizer).prompt(TASK.messages))

    def policy(context: int) -> EpisodePolicy:
        return EpisodePolicy(engine, Renderer(engine.tokenizer, context), Sampling(max_tokens=50), ("t",))  # type: ignore[arg-type]

    cut = policy(prompt + 3)
    assert asyncio.run(cut.ask(TASK.messages)).stop is StopReason.LENGTH
    assert cut.cut_by == "model.context_length"
    full = policy(prompt)
    with pytest.raises(NoRoom, match="the model's context"):
        asyncio.run(full.ask(TASK.messages))
    assert full.cut_by == "model.context_length"


# --- runs -----------------------------------------------------------------------------------------------------------


def test_a_run_whose_episodes_are_all_cut_off_and_not_scored(
    here: Path, tiny_model_folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert train("Guess", tiny_model_folder, "rollout.max_tokens=4") == 1
    text = capsys.readouterr().err
    assert "4 × truncated: cut off by rollout.max_tokens, and not scored" in text
    assert "likely fix: raise that limit" in text and "end(reason)" in text and "unscored" not in text


def test_a_run_whose_unfinished_episodes_all_score_alike(
    here: Path, tiny_model_folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Not `no signal`: all attempts score alike because they are all cut off."""
    letters = f"rollout.stop=[{','.join(string.ascii_letters)}]"  # so replies end by themselves
    assert train("Scored", tiny_model_folder, letters, "rollout.max_tokens=64", "agent.max_turns=2") == 0
    out = capsys.readouterr().out
    (warning,) = [line for line in out.splitlines() if line.startswith("warning")]
    assert "episodes are cut off: 100% by agent.max_turns=2; they are scored unfinished" in warning
    assert "in each of the first 3 steps, all attempts at a task got the same reward (given, mean 0)" in warning
    assert "raise agent.max_turns" in warning and "no signal" not in out
    (path,) = here.glob("outputs/*/*/metrics.jsonl")
    steps = [json.loads(line)["metrics"] for line in path.read_text().splitlines()]
    assert [(step["episodes/cut"], step["episodes/cut/max_turns"]) for step in steps] == [(1.0, 1.0)] * 3


def test_an_evaluation_names_its_own_limit(
    here: Path, tiny_model_folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert train("Guess", tiny_model_folder, "data.val_files=rows.jsonl", "eval.max_tokens=4") == 1
    assert "no evaluation task completed: truncated: cut off by eval.max_tokens" in capsys.readouterr().err


# --- warnings, step by step -----------------------------------------------------------------------------------------


class Steps:
    """Steps of ten attempts, of which so many were cut off, by each limit."""

    def __init__(self, total: int = 100, **settings: Any) -> None:
        self.output: list[str] = []
        self.warnings = StepWarnings(
            self.output.append, rewards=["exact"], total_steps=total, limits=LIMITS, **settings
        )
        self.index = 0

    def step(
        self,
        cut: dict[str, int],
        lost: int = 0,
        flat: float = 0.0,
        tools: tuple[ToolUse, ...] = (),
        turns: tuple[Turn, ...] = (),
    ) -> list[str]:
        failures = {"truncated": lost} if lost else {}
        group = Group(TASK, (Episode(TASK, turns, TASK.messages, tools=tools),))
        collected = Collected((group,), failures=failures, examples={"truncated": "cut"}, attempts=10, cut=cut)
        metrics = {"groups/flat": flat, "reward/std": 0.1, "reward/mean": 0.0}
        self.output.clear()
        self.warnings.after_step(self.index, SimpleNamespace(collected=collected), metrics)  # type: ignore[arg-type]
        self.index += 1
        return list(self.output)


def test_many_cut_episodes_are_warned_of_when_they_last() -> None:
    steps = Steps()
    assert steps.step({"agent.max_turns": 4}) == []
    assert steps.step({"agent.max_turns": 2}) == []  # fewer than three in ten
    assert steps.step({"agent.max_turns": 3}) == []
    assert steps.step({"agent.max_turns": 3, "rollout.max_tokens": 1}) == []
    (text,) = steps.step({"agent.max_turns": 3, "request": 2})
    assert text == (
        "episodes are cut off: 30% by agent.max_turns=3, 7% by the max_tokens of the agent's own request, "
        "3% by rollout.max_tokens=8; they are scored unfinished; raise agent.max_turns; "
        "or raise the max_tokens that your agent asks for; or raise rollout.max_tokens"
    )
    assert steps.step({"agent.max_turns": 9}) == []  # once


def test_an_episode_that_is_lost_by_a_limit_is_warned_of_at_once() -> None:
    (text,) = Steps().step({"agent.max_response_tokens": 1}, lost=1)
    assert text == (
        "episodes are cut off: 10% by agent.max_response_tokens; 1 of 10 are not scored and dropped; "
        "raise agent.max_response_tokens; or let the environment score unfinished episodes (end, docs/environments.md)"
    )


def test_few_cut_episodes_do_not_explain_rewards_that_do_not_differ() -> None:
    steps = Steps()
    for _ in range(2):
        assert steps.step({"agent.max_turns": 4}, flat=1.0) == []
    no_signal, cut = steps.step({"agent.max_turns": 4}, flat=1.0)
    assert no_signal.startswith("no signal to learn from: in each of the first 3 steps")
    assert cut.startswith("episodes are cut off: 40% by agent.max_turns=3")


def test_a_tool_that_raises_is_warned_of_once() -> None:
    steps = Steps()
    raised = ToolUse("lookup", 0.1, "raised", "KeyError: 'x' at mine.py, line 3: return table[key]")
    others = (ToolUse("lookup", 0.1), ToolUse("sums", 0.1, "raised"))  # `sums` chose its words for the model itself
    (text,) = steps.step({}, tools=(raised, raised, *others))
    assert text.startswith("tool lookup raised in 2 of 3 calls, the first: KeyError: 'x' at mine.py, line 3")
    assert steps.step({}, tools=(raised,)) == []
    (text,) = steps.step({}, tools=(ToolUse("look", 0.1, "image", "it returned an image"), ToolUse("look", 0.1)))
    assert text.startswith("tool look in 1 of 2 calls: it returned an image\n")


def test_a_teacher_alone_needs_no_rewards_that_differ() -> None:
    steps = Steps(rewards_trained=False)
    assert [steps.step({}, flat=1.0) for _ in range(4)] == [[]] * 4


def test_a_step_without_a_trained_token_is_warned_of_once() -> None:
    """Also before the step in which rewards that do not differ are reported."""
    turn = Turn((1,), (2,), (-0.5,), (0,), StopReason.EOS, trained=False, role="a")
    steps = Steps(roles={"agent.train_roles": (), "agent.opponents": ("a",)})
    assert steps.step({}, turns=(turn,)) == [
        "step 1: no token can be trained on: no turn is trained; check agent.opponents=[a]"
    ]
    assert steps.step({}, turns=(turn,)) == [] == Steps().step({}, turns=(turn, replace(turn, trained=True)))
    assert Steps().step({}, turns=(turn,))[0].endswith("the agent asks for every turn with trained=False")
