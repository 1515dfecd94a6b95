"""The turn loop: from a task to an episode, with a scripted engine and real tools."""

from __future__ import annotations

import asyncio
import json
import os
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

import pytest

import covey
from covey.agents.resolve import make_agent
from covey.agents.tools.toolset import resolve_tools
from covey.agents.turns import ToolAgent, Toolbox
from covey.config.schema import AgentConfig
from covey.errors import InputError
from covey.rewards import resolve_rewards
from covey.rollout.collector import Collector, NothingCompleted, TrainingSource
from covey.rollout.rendering import Renderer
from covey.training.metrics import turn_metrics
from covey.training.samples import episode_rows, to_samples
from covey.types import Completion, Episode, Sampling, StopReason, Task
from covey.workers import WorkerPool
from tests.conftest import byte_tokenizer
from tests.vision.tiny import drawn


def braces() -> Any:
    tokenizer = byte_tokenizer()
    tokenizer.add_tokens(["{", "}", "[", "]", "`", "%", "^", "\\", "&", "$", "@", "~"])
    return tokenizer


TOKENIZER = braces()


class Actor:
    """An engine that follows a script: what to say at each turn of each task, by the words of the question."""

    def __init__(self, lines: dict[str, list[str]]) -> None:
        self.lines = lines
        self.version = 0

    async def generate(self, token_ids: Sequence[int], sampling: Sampling) -> Completion:
        await asyncio.sleep(0)
        text = TOKENIZER.decode(list(token_ids))
        first_user = text.split("<|im_start|>user\n")[1].split("<|im_end|>")[0]
        said = self.lines[first_user][text.count("<|im_start|>assistant\n") - 1]
        ids = list(TOKENIZER(said, add_special_tokens=False)["input_ids"])
        stop = StopReason.EOS
        if len(ids) >= sampling.max_tokens:
            ids, stop = ids[: sampling.max_tokens], StopReason.LENGTH
        else:
            ids.append(TOKENIZER.eos_token_id)
        return Completion(tuple(ids), (-0.5,) * len(ids), (0,) * len(ids), stop)


def call(name: str, **arguments: Any) -> str:
    return f"<tool_call>\n{json.dumps({'name': name, 'arguments': arguments})}\n</tool_call>"


def play(lines: list[str], tools: Sequence[Any] = ("calculator", "answer"), kind: str = "hf", **limits: Any) -> Episode:
    """One episode of an agent with these tools that says these lines."""
    settings = AgentConfig(name=kind, max_turns=limits.pop("max_turns", 4))
    agent = make_agent(settings, Toolbox(resolve_tools(tools)), TOKENIZER, "llama")
    task = Task("t", ({"role": "user", "content": "go"},), answer="5")
    sampling = Sampling(max_tokens=limits.pop("max_tokens", 200))
    made = collector(agent, {"go": lines}, **limits)
    (group,) = asyncio.run(made.groups([task], 1, sampling, ("test",)))
    return group.episodes[0]


def collector(agent: Any, lines: dict[str, list[str]], reward: Any = "number", **limits: Any) -> Collector:
    engine: Any = Actor(lines)
    return Collector(engine, Renderer(TOKENIZER), agent, resolve_rewards(reward, None, {}), 0, 30.0, **limits)


def roles(episode: Episode) -> list[str]:
    return [message["role"] for message in episode.messages]


def test_a_call_its_result_and_the_answer() -> None:
    episode = play([call("calculator", expression="2+3"), "5"])
    assert (episode.final_answer, episode.stop, episode.rewards["number"]) == ("5", StopReason.EOS, 1.0)
    assert roles(episode) == ["user", "assistant", "user", "assistant"]  # this template knows no tools
    assert "5" in episode.messages[2]["content"]
    assert [(use.tool, use.error) for use in episode.tools] == [("calculator", None)]
    (row,) = episode_rows(episode, 0)
    sampled = TOKENIZER.decode([i for i, on in zip(row.response_ids, row.mask, strict=True) if on])
    assert sampled == f"{call('calculator', expression='2+3')}<|im_end|>5<|im_end|>"
    assert "calculator" in TOKENIZER.decode(list(row.prompt_ids))  # the tools are explained in the system message


def test_an_answer_by_tool_ends_the_episode() -> None:
    episode = play([f"I think so. {call('answer', answer='5')}"])
    assert (episode.final_answer, episode.stop) == ("5", StopReason.ANSWER)
    assert len(episode.turns) == 1 and roles(episode) == ["user", "assistant"]


def test_a_tools_output_is_never_the_answer() -> None:
    episode = play([call("calculator", expression="2+3")] * 4, max_turns=2)
    assert episode.stop is StopReason.TURNS and len(episode.turns) == 2
    assert "<tool_call>" in episode.final_answer or episode.final_answer == ""
    assert episode.rewards["number"] == 0.0
    (row,) = episode_rows(episode, 0)
    assert row.mask[-1]  # what came after the last reply is not in the row


@pytest.mark.parametrize(
    ("line", "error", "told"),
    [
        ('<tool_call>\n{"name": "calculator", "arguments": {oops\n</tool_call>', "malformed", "not valid JSON"),
        (call("calculater", expression="1"), "unknown_tool", "calculator"),
        (call("calculator", formula="1"), "bad_arguments", "expression"),
        (call("calculator", expression="1/0"), "raised", "zero"),
    ],
)
def test_mistakes_are_observations(line: str, error: str, told: str) -> None:
    episode = play([line, "5"])
    assert episode.failure is None and episode.final_answer == "5"
    assert [use.error for use in episode.tools] == [error]
    assert told in episode.messages[2]["content"]


def test_a_truncated_reply_is_not_parsed() -> None:
    whole = call("answer", answer="5")
    length = len(TOKENIZER(whole, add_special_tokens=False)["input_ids"])
    episode = play([whole], max_tokens=length)  # all of the call, but not its end of turn
    assert episode.stop is StopReason.LENGTH and episode.answer is None and episode.tools == ()


def test_the_token_limit_of_an_episode() -> None:
    first = call("calculator", expression="2+3")
    used = len(TOKENIZER(first, add_special_tokens=False)["input_ids"]) + 1
    episode = play([first, "5"], max_response_tokens=used)
    assert episode.stop is StopReason.LENGTH and len(episode.turns) == 1 and episode.failure is None


def test_several_calls_of_a_turn_keep_their_order() -> None:
    episode = play([call("calculator", expression="1+1") + call("calculator", expression="2+2"), "5"])
    shown = episode.messages[2]["content"]
    assert shown.index("2") < shown.index("4") and len(episode.tools) == 2


def test_react_with_an_action_and_a_final_answer() -> None:
    lines = ["Thought: sum\nAction: calculator\nAction Input: 2+3\n", "Thought: done\nFinal Answer: 5"]
    episode = play(lines, kind="react")
    assert (episode.final_answer, episode.rewards["number"]) == ("5", 1.0)
    assert episode.messages[2]["content"].startswith("Observation:")


@pytest.mark.parametrize(
    ("kind", "line", "name", "arguments"),
    [
        ("hf", call("calculator", expression="2+3"), "calculator", {"expression": "2+3"}),
        ("react", "Action: calculator\nAction Input: 2+3\n", "calculator", {"expression": "2+3"}),
        ("hf", call("search", query="x"), "search", {"query": "x"}),  # there is no such tool
    ],
)
def test_rewards_see_the_calls_of_every_format(kind: str, line: str, name: str, arguments: dict[str, str]) -> None:
    episode = play([line, "Final Answer: 5"], ("calculator",), kind)
    assert [(use.tool, use.arguments) for use in episode.tools] == [(name, arguments)]
    columns = {
        "function": {"name": name, "parameters": {"properties": {key: {"type": "string"} for key in arguments}}},
        "ground_truth": [{name: {key: [value] for key, value in arguments.items()}}],
        "category": "simple",
        "tool_calls": [{"name": name, "arguments": arguments}],
    }
    for reward in ("tool_call", "bfcl") if name == "calculator" else ("bfcl",):
        for changes, paid in (({}, 1.0), ({"tool_calls": [], "category": "irrelevance"}, 0.0)):
            task = replace(episode.task, columns=columns | changes)
            rewards = asyncio.run(resolve_rewards(reward, None, {})(task, replace(episode, task=task)))
            assert rewards[reward] == paid, (reward, changes, rewards)


@pytest.mark.parametrize(("texts", "error"), [((), "image"), (("a plan of ", "the house"), None)])
def test_a_tools_picture_is_announced_to_a_model_that_reads_text_only(texts: tuple[str, ...], error: str) -> None:
    picture = {"type": "image", "image": drawn(8, 8)}

    def look() -> Any:
        """Look."""
        return [*texts, picture]

    episode = play([call("look"), "5"], [replace(covey.tool(look), inline=True)])
    assert episode.failure is None and episode.rewards["number"] == 1.0
    (use,) = episode.tools
    assert use.error == error and use.detail == "it returned an image, and this model reads text only"
    shown = episode.messages[2]["content"]
    assert "".join(texts) in shown and "this model cannot see" in shown


def test_an_agent_without_tools_refuses_them() -> None:
    with pytest.raises(InputError, match=r"agent=chat uses no tools.*\n  use agent=hf"):
        make_agent(AgentConfig(name="chat"), Toolbox(resolve_tools(["calculator"])))
    with pytest.raises(InputError, match="agent=code runs Python blocks"):
        make_agent(AgentConfig(name="code"), Toolbox(resolve_tools(["calculator"])))


# -- a step with tools that misbehave ------------------------------------------------------------------------------


@covey.tool(timeout=6.0)  # long enough for the others on a busy machine
def wobble(how: str, number: int) -> Any:
    """Doubles a number, unless told otherwise."""
    if how == "hang":
        time.sleep(600)
    if how == "crash":
        os._exit(3)
    if how == "flood":
        for _ in range(16):
            print("x" * 2**20)
    if how == "fork" and os.fork() == 0:
        time.sleep(600)
    if how == "raise":
        raise ValueError("no such thing")
    if how == "wrong":
        return {1, 2}
    return 2 * number


KINDS = ("fine", "fine", "hang", "crash", "flood", "fork", "raise", "wrong")


@pytest.fixture
def pool() -> Iterator[WorkerPool]:
    made = WorkerPool(resolve_tools([wobble]).functions, max_workers=16)
    yield made
    made.close()


def test_a_step_of_64_episodes_with_tools_that_misbehave(pool: WorkerPool) -> None:
    tools = Toolbox(resolve_tools([wobble]), pool=pool)
    agent = make_agent(AgentConfig(name="hf", max_turns=3), tools, TOKENIZER, "llama")
    assert isinstance(agent, ToolAgent)
    names = [f"{how} {number}" for number in range(8) for how in KINDS]
    lines = {
        name: [call("wobble", how=name.split()[0], number=int(name.split()[1])), str(2 * int(name.split()[1]))]
        for name in names
    }
    tasks = [Task(name, ({"role": "user", "content": name},), answer=str(2 * int(name.split()[1]))) for name in names]
    made = collector(agent, lines, reward="number")
    source = TrainingSource(made, lambda step: tasks, attempts=1, sampling=Sampling(max_tokens=200), min_group_size=1)
    collected = asyncio.run(source.next())
    assert collected.failures == {"tool_timeout": 8, "tool_crash": 8, "tool_result": 8}
    assert collected.dropped == 24
    left = [group.episodes[0] for group in collected.groups]
    assert [e.task.id for e in left] == [n for n in names if n.split()[0] not in ("hang", "crash", "wrong")]
    for episode in left:
        how, number = episode.task.id.split()
        assert episode.rewards["number"] == 1.0
        result = episode.messages[2]["content"]
        assert ("no such thing" in result) if how == "raise" else (str(2 * int(number)) in result)
    errors = Counter(use.error for episode in left for use in episode.tools)
    assert errors == {None: 32, "raised": 8}
    samples = to_samples(collected, {"number": 1.0})
    assert len(samples.rows) == 40 and all(sum(row.mask) for row in samples.rows)
    found = turn_metrics(left)
    assert (found["agent/turns_mean"], found["agent/tool_calls"], found["agent/error/raised"]) == (2.0, 1.0, 8.0)
    assert found["agent/tool/wobble"] == 40.0 and found["agent/stop/eos"] == 1.0


def test_a_step_in_which_every_tool_hangs_says_why(pool: WorkerPool) -> None:
    tools = Toolbox(resolve_tools([wobble]), pool=pool)
    agent = make_agent(AgentConfig(name="hf"), tools, TOKENIZER, "llama")
    tasks = [Task(f"t{i}", ({"role": "user", "content": f"t{i}"},), answer="1") for i in range(2)]
    lines = {f"t{i}": [call("wobble", how="hang", number=1)] for i in range(2)}
    made = collector(agent, lines)
    source = TrainingSource(made, lambda step: tasks, attempts=2, sampling=Sampling(max_tokens=200), min_group_size=2)
    with pytest.raises(NothingCompleted) as error:
        asyncio.run(source.next())
    assert "No training tasks completed" in str(error.value)
    assert "4 × tool_timeout" in str(error.value)
