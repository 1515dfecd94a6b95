"""The four modules with a scripted engine: their prompts, which turns are trained on, how an episode ends."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace
from typing import Any, cast

import pytest

import covey
from covey.agents.flow import FlowAgent, Memory, Step
from covey.errors import InputError
from covey.protocols import NoRoom, Policy, Reply
from covey.rewards import resolve_rewards
from covey.tool_calls import Call
from covey.training.samples import to_samples
from covey.types import Collected, Episode, Group, Messages, StopReason, Task, ToolUse, Turn
from tests.agents.formats.test_react import TEXT, schema

SCHEMAS = [schema("search", ("query",), query=TEXT), schema("answer", ("answer",), answer=TEXT)]
TASK = Task("t", ({"role": "user", "content": "What is a covey?"},))

PLAN = "I must look it up.\nSub-goal: find out what a covey is\nTool: search"
CALL = '<tool_call>\n{"name": "search", "arguments": {"query": "covey"}}\n</tool_call>'
STOP, CONTINUE = "It is known.\nConclusion: STOP", "Not yet.\nConclusion: CONTINUE"


@dataclass
class Scripted:
    """A policy that replies with its lines in order and records its prompts."""

    lines: list[str | Reply | Exception]
    asked: list[str] = field(default_factory=list)
    turns: list[Turn] = field(default_factory=list)

    async def ask(
        self,
        messages: Messages,
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        stop: Sequence[str] = (),
        max_tokens: int | None = None,
        trained: bool = True,
        role: str | None = None,
    ) -> Reply:
        await asyncio.sleep(0)
        (message,) = messages
        assert (message["role"], tools) == ("user", None)
        line = self.lines[len(self.asked)]
        self.asked.append(message["content"])
        if isinstance(line, Exception):
            raise line
        reply = line if isinstance(line, Reply) else Reply(line, StopReason.EOS)
        self.turns.append(Turn((len(self.turns),), (1,), (0.0,), (0,), reply.stop, trained, role=role))
        return reply

    def record_turn(self, *, reward: float | None = None, state: Any = None) -> None:
        self.turns[-1] = replace(self.turns[-1], reward=reward)

    def cut(self, text: str, tokens: int) -> str:
        return text


@dataclass(frozen=True)
class Result:
    call: Call
    text: str
    use: ToolUse
    ended: bool = False
    answer: str | None = None
    images: tuple[Any, ...] = ()
    reward: float | None = None


@dataclass
class FakeTools:
    """Returns `finds(call)` as results; counts open sessions."""

    finds: Callable[[Call], str] = lambda call: f"found {call.arguments['query']}"
    called: list[Call] = field(default_factory=list)
    open_now: int = 0

    def schemas(self) -> list[dict[str, Any]]:
        return SCHEMAS

    @asynccontextmanager
    async def open(self, policy: Any) -> AsyncIterator[FakeTools]:
        self.open_now += 1
        try:
            yield self
        finally:
            self.open_now -= 1

    async def call(self, calls: Sequence[Call]) -> list[Result]:
        await asyncio.sleep(0)
        self.called += calls
        return [self._one(call) for call in calls]

    def _one(self, call: Call) -> Result:
        if call.problem is not None:
            return Result(call, call.problem, ToolUse(call.name, 0.0, "malformed"))
        if call.name == "answer":
            return Result(call, "", ToolUse("answer", 0.0), True, call.arguments["answer"])
        if call.name != "search":
            return Result(call, f"unknown tool {call.name}", ToolUse(call.name, 0.0, "unknown_tool"))
        return Result(call, self.finds(call), ToolUse("search", 0.0))


def play(agent: FlowAgent, policy: Scripted, task: Task = TASK) -> Episode:
    return asyncio.run(agent.run(cast(Policy, policy), task))


def said(episode: Episode) -> list[tuple[str, str]]:
    return [(m["name"], m["content"]) for m in episode.messages[len(episode.task.messages) :]]


def test_one_round() -> None:
    tools, policy = FakeTools(), Scripted([PLAN, CALL, STOP, "A group of birds."])
    episode = play(FlowAgent(tools), policy)
    assert said(episode) == [
        ("planner", PLAN),
        ("executor", CALL),
        ("verifier", STOP),
        ("generator", "A group of birds."),
    ]
    assert episode.final_answer == "A group of birds."
    assert episode.stop is StopReason.EOS
    assert episode.tools == (ToolUse("search", 0.0),)
    assert [(call.name, call.arguments) for call in tools.called] == [("search", {"query": "covey"})]
    assert tools.open_now == 0
    assert episode.turns == tuple(policy.turns)


def test_what_each_module_is_shown() -> None:
    policy = Scripted([PLAN, CALL, CONTINUE, PLAN.replace("what a covey is", "more"), CALL, STOP, "Birds."])
    play(FlowAgent(FakeTools()), policy)
    planner, executor, verifier, again, _, _, generator = policy.asked
    step = 'Step 1\nSub-goal: find out what a covey is\nCall: search({"query": "covey"})\nResult: found covey'
    assert all("Query:\nWhat is a covey?\n" in prompt for prompt in policy.asked)
    assert "Steps so far:\n(none)\n" in planner
    assert "- search(query: string): Does search." in planner
    assert "- answer(answer: string)" in planner
    assert "Sub-goal:\nfind out what a covey is\n" in executor
    assert "- search(query: string)" in executor
    assert "- answer(" not in executor
    assert step not in planner + executor
    assert f"Steps so far:\n{step}\n" in verifier
    assert f"Steps so far:\n{step}\n" in again
    assert f"Steps taken:\n{step}\n\nStep 2\nSub-goal: find out more\n" in generator


@pytest.mark.parametrize(
    ("modules", "trained"),
    [
        (("planner",), [True, False, False, False]),
        (("planner", "generator"), [True, False, False, True]),
        (("all",), [True, True, True, True]),
        ((), [False, False, False, False]),
    ],
)
def test_turns_of_the_chosen_modules_are_trained_on(modules: Sequence[str], trained: list[bool]) -> None:
    episode = play(FlowAgent(FakeTools(), modules), Scripted([PLAN, CALL, STOP, "Birds."]))
    assert [turn.trained for turn in episode.turns] == trained
    assert [turn.role for turn in episode.turns] == ["planner", "executor", "verifier", "generator"]


class PayingTools(FakeTools):
    async def call(self, calls: Sequence[Call]) -> list[Any]:
        return [replace(result, reward=0.5) for result in await super().call(calls)]


def test_a_tool_pays_the_executor() -> None:
    policy = Scripted([PLAN, CALL + CALL, STOP, "Birds."])
    episode = play(FlowAgent(PayingTools()), policy)
    assert [turn.reward for turn in episode.turns] == [None, 1.0, None, None]


def test_modules_have_rewards_of_their_own() -> None:
    @covey.reward
    def shares(episode: Episode) -> dict[str, float]:
        return {"planner": 1.0, "executor": float(len(episode.tools)), "verifier": -1.0, "generator": 0.0}

    episode = play(FlowAgent(FakeTools(), ("planner", "executor")), Scripted([PLAN, CALL, STOP, "Birds."]))
    scores = asyncio.run(resolve_rewards(shares, None, {})(episode.task, episode))
    samples = to_samples(Collected((Group(episode.task, (replace(episode, rewards=scores),)),)), {"shares": 1.0})
    assert samples.roles == ((0, "planner"), (0, "executor"))
    assert samples.total_reward().tolist() == [1, 1] and scores["shares"] == 1.0


def test_an_unknown_module() -> None:
    with pytest.raises(InputError, match="did you mean   planner"):
        FlowAgent(FakeTools(), ("planer",))


def test_after_the_last_plan_the_generator_still_answers() -> None:
    episode = play(FlowAgent(FakeTools(), max_turns=2), Scripted([PLAN, CALL, CONTINUE] * 2 + ["Birds, I guess."]))
    assert (episode.final_answer, episode.stop) == ("Birds, I guess.", StopReason.TURNS)
    assert len(episode.tools) == 2


@pytest.mark.parametrize("before", range(4))
def test_a_truncated_reply_ends_the_episode_and_is_not_run(before: int) -> None:
    lines: list[str | Reply | Exception] = [PLAN, CALL, STOP, "Birds."]
    lines[before] = Reply(str(lines[before]), StopReason.LENGTH)
    tools, policy = FakeTools(), Scripted(lines)
    episode = play(FlowAgent(tools), policy)
    assert episode.stop is StopReason.LENGTH
    assert len(policy.asked) == before + 1
    assert len(tools.called) == (before > 1)
    assert len(episode.turns) == before + 1
    assert tools.open_now == 0


def test_no_room_for_another_reply() -> None:
    episode = play(FlowAgent(FakeTools()), Scripted([PLAN, NoRoom("used up")]))
    assert (episode.stop, episode.final_answer, len(episode.turns)) == (StopReason.LENGTH, PLAN, 1)


def test_a_tool_ends_the_episode() -> None:
    plan, call = PLAN.replace("Tool: search", "Tool: answer"), '{"name": "answer", "arguments": {"answer": "birds"}}'
    policy = Scripted([plan, call])
    episode = play(FlowAgent(FakeTools()), policy)
    assert (episode.final_answer, episode.stop) == ("birds", StopReason.ANSWER)
    assert len(policy.asked) == 2


@pytest.mark.parametrize(
    ("plan", "executor", "error", "words"),
    [
        ("I do not know.", None, "malformed", "The plan must end with the lines"),
        ("Tool: search", None, "malformed", "The plan must end with the lines"),
        ("Sub-goal: look", None, "malformed", "The plan must end with the lines"),
        ("<think>\nSub-goal: look\nTool: search", None, "malformed", "The plan must end with the lines"),
        ("Sub-goal: look\nTool: telescope", None, "unknown_tool", "unknown tool telescope"),
        (PLAN, "I cannot.", "malformed", "The executor wrote no tool call."),
        (PLAN, "<tool_call>{broken</tool_call>", "malformed", "not valid JSON"),
        (PLAN, '{"name": "search", "arguments": {', "malformed", "not valid JSON"),
        (PLAN, CALL.replace("search", "answer"), "malformed", "called answer, but the plan says search"),
    ],
)
def test_mistakes_go_into_the_memory(plan: str, executor: str | None, error: str, words: str) -> None:
    first = [plan] if executor is None else [plan, executor]
    policy = Scripted([*first, CONTINUE, PLAN, CALL, STOP, "Birds."])
    episode = play(FlowAgent(FakeTools()), policy)
    assert [use.error for use in episode.tools] == [error, None]
    assert words in policy.asked[len(first) + 1]
    assert episode.final_answer == "Birds."
    assert episode.failure is None


@pytest.mark.parametrize(
    ("plan", "goal"),
    [
        ("Sub-goal: look\nTool: search", "look"),
        ("**Sub-Goal:** look\n**Tool Name:** `search`", "look"),
        ("subgoal : look\nthere\ntool : search\nbecause", "look\nthere"),
        ("Sub-goal: no\nTool: answer\nOr rather\nSub-goal: look\nTool: search", "look"),
        ("<think>\nSub-goal: no\nTool: answer\n</think>\nSub-goal: look\nTool: search", "look"),
    ],
)
def test_plans_that_are_understood(plan: str, goal: str) -> None:
    policy = Scripted([plan, CALL, STOP, "Birds."])
    play(FlowAgent(FakeTools()), policy)
    assert f"Sub-goal:\n{goal}\n" in policy.asked[1]
    assert "Tool:\n- search(" in policy.asked[1]


@pytest.mark.parametrize(
    "reply",
    [
        CALL,
        f"So:\n{CALL}",
        f"<think>\n{CALL}{CALL}</think>\n{CALL}",
        '{"name": "search", "arguments": {"query": "covey"}}',
        '{"name": "search", "parameters": {"query": "covey"}}',
    ],
)
def test_calls_that_are_understood(reply: str) -> None:
    tools = FakeTools()
    play(FlowAgent(tools), Scripted([PLAN, reply, STOP, "Birds."]))
    assert [(call.name, call.arguments, call.problem) for call in tools.called] == [
        ("search", {"query": "covey"}, None)
    ]


def test_several_calls_for_one_sub_goal() -> None:
    policy = Scripted([PLAN, CALL + CALL.replace("covey", "quail"), STOP, "Birds."])
    episode = play(FlowAgent(FakeTools()), policy)
    assert len(episode.tools) == 2
    assert "Result: found covey\nfound quail\n" in policy.asked[2]


@pytest.mark.parametrize(
    ("verdict", "stops"),
    [
        ("Conclusion: STOP", True),
        ("**Conclusion:** stop.", True),
        ("conclusion - STOP", True),
        ("STOP", True),
        ("It is all there.\n**STOP**", True),
        ("Conclusion: CONTINUE", False),
        ("Conclusion: STOP\nNo, wait.\nConclusion: CONTINUE", False),
        ("We should not stop here.", False),
        ("Stop searching and continue", False),
        ("Conclusion: stopping", False),
        ("", False),
        ("<think>\nConclusion: STOP\n</think>\nConclusion: CONTINUE", False),
        ("<think>\nConclusion: STOP", False),
    ],
)
def test_verdicts(verdict: str, stops: bool) -> None:
    policy = Scripted([PLAN, CALL, verdict, "Birds."])
    episode = play(FlowAgent(FakeTools(), max_turns=1), policy)
    assert episode.stop is (StopReason.EOS if stops else StopReason.TURNS)


def test_a_tool_failure_is_raised_and_the_session_closed() -> None:
    def broken(call: Call) -> str:
        raise RuntimeError("the search server is down")

    tools = FakeTools(broken)
    with pytest.raises(RuntimeError, match="the search server is down"):
        play(FlowAgent(tools), Scripted([PLAN, CALL]))
    assert tools.open_now == 0


def test_the_query_is_the_whole_task() -> None:
    system = {"role": "system", "content": "Answer in one word."}
    policy = Scripted([PLAN, CALL, STOP, "Birds."] * 2)
    agent = FlowAgent(FakeTools())
    play(agent, policy, Task("a", (system, *TASK.messages)))
    assert "Query:\nAnswer in one word.\n\nWhat is a covey?\n" in policy.asked[0]
    talk = ({"role": "user", "content": "Hi {x}"}, {"role": "assistant", "content": "Hello"}, *TASK.messages)
    messages, tools = agent.opening(Task("b", talk))
    assert "Query:\nuser: Hi {x}\n\nassistant: Hello\n\nuser: What is a covey?\n" in messages[0]["content"]
    assert tools is None


def test_the_opening_is_the_first_prompt() -> None:
    agent, policy = FlowAgent(FakeTools()), Scripted([PLAN, CALL, STOP, "Birds."])
    play(agent, policy)
    assert agent.opening(TASK)[0][0]["content"] == policy.asked[0]


def test_concurrent_episodes_have_separate_memories() -> None:
    agent = FlowAgent(FakeTools(), max_turns=3)
    words = [f"word{n}" for n in range(8)]
    policies = [
        Scripted([PLAN.replace("covey", word), CALL.replace("covey", word), CONTINUE] * 3 + [f"{word}!"])
        for word in words
    ]
    tasks = [Task(word, ({"role": "user", "content": f"What is {word}?"},)) for word in words]

    async def all_at_once() -> list[Episode]:
        return await asyncio.gather(
            *(agent.run(cast(Policy, policy), task) for policy, task in zip(policies, tasks, strict=True))
        )

    episodes = asyncio.run(all_at_once())
    for word, policy, episode in zip(words, policies, episodes, strict=True):
        assert episode.final_answer == f"{word}!"
        assert len(episode.tools) == 3
        everything = "\n".join(policy.asked)
        # The planner sees 0 + 1 + 2 results, the verifier 1 + 2 + 3, the generator 3.
        assert everything.count(f"found {word}") == 12
        assert not any(other in everything for other in words if other != word)


def test_memory_as_text() -> None:
    assert str(Memory()) == "(none)"
    assert str(Memory([Step("g", "f({})", "r")])) == "Step 1\nSub-goal: g\nCall: f({})\nResult: r"
