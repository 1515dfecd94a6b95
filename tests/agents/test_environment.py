"""Environments: reset and step, one per episode, closed at its end; their rewards and failures."""

from __future__ import annotations

import asyncio
import os
import re
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

import covey
from covey.agents.environment import EnvironmentAgent
from covey.agents.resolve import FunctionAgent, as_agent, resolve_agent
from covey.agents.turns import ChatAgent
from covey.config.schema import AgentConfig
from covey.errors import InputError
from covey.rewards.builtin import given
from covey.types import Episode, Failure, StopReason, Task
from covey.workers import WorkerPool
from tests.agents.scripted import Script, one_row, policy_of, scored

TASK = Task("t", ({"role": "user", "content": "guess"},), answer="42")


class Guess:
    """Higher or lower. Keeps what happened to each environment."""

    made: list[Guess]

    def __init__(self) -> None:
        type(self).made.append(self)
        self.closed = 0
        self.heard: list[str] = []

    def reset(self, task: Task) -> Any:
        self.secret = int(task.answer)
        return [*task.messages, {"role": "user", "content": "from 1 to 100"}]

    def step(self, reply: str) -> Any:
        self.heard.append(reply)
        if int(reply) == self.secret:
            return covey.Done(reward=1.0 / len(self.heard), messages=({"role": "user", "content": "yes"},))
        return "lower" if int(reply) > self.secret else {"role": "user", "content": "higher"}

    def close(self) -> None:
        self.closed += 1


class Awaited(Guess):
    """The same, as coroutines."""

    async def reset(self, task: Task) -> Any:
        await asyncio.sleep(0)
        return super().reset(task)

    async def step(self, reply: str) -> Any:
        await asyncio.sleep(0)
        return super().step(reply)

    async def aclose(self) -> None:
        self.closed += 10

    close = None  # type: ignore[assignment]


@pytest.fixture(autouse=True)
def fresh() -> None:
    Guess.made = Awaited.made = []


@pytest.mark.parametrize(("kind", "closed"), [(Guess, 1), (Awaited, 10)])
def test_replies_go_to_step_until_it_is_done(kind: type[Guess], closed: int) -> None:
    engine = Script("50", "20", "42", "never said")
    episode = asyncio.run(scored(EnvironmentAgent(kind, max_turns=8), TASK, engine))
    assert episode.failure is None and episode.stop is StopReason.EOS
    assert episode.given == {"reward": 1 / 3} and episode.rewards == {"given": 1 / 3}
    said = [(message["role"], message["content"]) for message in episode.messages]
    assert said == [
        ("user", "guess"),
        ("user", "from 1 to 100"),
        ("assistant", "50"),
        ("user", "lower"),
        ("assistant", "20"),
        ("user", "higher"),
        ("assistant", "42"),
        ("user", "yes"),
    ]
    assert episode.final_answer == "42"
    assert len(episode.turns) == 3 and one_row(episode)
    assert engine.prompts[1].endswith("50<|im_end|>\n<|im_start|>user\nlower<|im_end|>\n<|im_start|>assistant\n")
    (environment,) = kind.made
    assert environment.heard == ["50", "20", "42"] and environment.closed == closed


def test_each_episode_has_its_own() -> None:
    agent = EnvironmentAgent(Guess, max_turns=2)

    async def both() -> list[Episode]:
        return await asyncio.gather(*(agent.run(policy_of(Script(text)), TASK) for text in ("42", "42")))

    episodes = asyncio.run(both())
    assert [episode.given for episode in episodes] == [{"reward": 1.0}, {"reward": 1.0}]
    assert len(Guess.made) == 2 and [environment.closed for environment in Guess.made] == [1, 1]


@pytest.mark.parametrize("opening", [None, "hello", [{"role": "system", "content": "hello"}]])
def test_reset_may_replace_the_task_s_messages(opening: Any) -> None:
    class Greets:
        def reset(self, task: Task) -> Any:
            return opening

        def step(self, reply: str) -> Any:
            return covey.Done({"reward": 0.5, "politeness": 2})

    engine = Script("good day")
    episode = asyncio.run(scored(EnvironmentAgent(Greets, max_turns=1), TASK, engine))
    role = "system" if isinstance(opening, list) else "user"
    shown = "guess" if opening is None else "hello"
    assert engine.prompts == [f"<|im_start|>{role}\n{shown}<|im_end|>\n<|im_start|>assistant\n"]
    # The record begins with the task's own messages, so that what counts as the attempt begins after them.
    assert episode.messages[0] == TASK.messages[0] and episode.final_answer == "good day"
    assert episode.rewards == {"given": 0.5, "given/politeness": 2.0}


class Patient:
    """Never done; says at the end what the episode was worth."""

    def reset(self, task: Task) -> None:
        self.turns = 0

    def step(self, reply: str) -> str:
        self.turns += 1
        return "go on"

    def end(self, reason: str) -> covey.Done:
        return covey.Done({"reward": -1.0, "turns": self.turns, "cut": float(reason == "length")})


def test_an_episode_that_ends_before_the_environment_is_done() -> None:
    turns = asyncio.run(scored(EnvironmentAgent(Patient, max_turns=2), TASK, Script("a", "b", "c")))
    assert turns.stop is StopReason.TURNS and len(turns.turns) == 2
    assert turns.rewards == {"given": -1.0, "given/turns": 2.0, "given/cut": 0.0}
    full = asyncio.run(scored(EnvironmentAgent(Patient, max_turns=9), TASK, Script(*"abcd"), max_response_tokens=4))
    assert full.stop is StopReason.LENGTH and len(full.turns) == 2  # each reply is a letter and its end
    assert full.rewards == {"given": -1.0, "given/turns": 2.0, "given/cut": 1.0}
    cut = asyncio.run(scored(EnvironmentAgent(Patient, max_turns=9), TASK, Script("abcd"), max_response_tokens=3))
    assert cut.stop is StopReason.LENGTH and cut.rewards["given/turns"] == 0.0  # a reply cut off is not played
    silent = asyncio.run(scored(EnvironmentAgent(Guess, max_turns=1), TASK, Script("7")))
    assert silent.given is None and silent.rewards == {"given": None}


def broken(where: str, how: str) -> type:
    async def misbehave() -> Any:
        if how == "hangs":
            await asyncio.sleep(60)
        if how == "raises":
            raise RuntimeError("the server is down")
        return 7

    class Broken:
        closed = 0

        async def reset(self, task: Task) -> Any:
            return await misbehave() if where == "reset" else None

        async def step(self, reply: str) -> Any:
            return await misbehave()

        def close(self) -> None:
            Broken.closed += 1

    return Broken


@pytest.mark.parametrize("where", ["reset", "step"])
@pytest.mark.parametrize(
    ("how", "cause", "text"),
    [
        ("raises", "environment", "Broken.{where}: RuntimeError: the server is down"),
        ("hangs", "environment_timeout", "Broken.{where} took longer than agent.tool_seconds=0.05"),
        ("returns 7", "environment", "{where} must return messages or a text"),
    ],
)
def test_errors_of_an_environment_are_failures(where: str, how: str, cause: str, text: str) -> None:
    kind = broken(where, how)
    episode = asyncio.run(scored(EnvironmentAgent(kind, max_turns=3, seconds=0.05), TASK, Script("x", "y")))
    assert episode.failure is not None and episode.failure.cause == cause
    assert episode.failure.message.startswith(text.format(where=where))
    assert kind.closed == 1  # type: ignore[attr-defined]


class Stuck(Guess):
    """Hangs, crashes or raises as the reply says, where asyncio could not help it."""

    def step(self, reply: str) -> Any:
        if reply == "hang":
            time.sleep(600)
        if reply == "crash":
            os._exit(7)
        if reply == "raise":
            raise ValueError("no such move")
        return covey.Done({"reward": 1.0, "pid": os.getpid()})


@pytest.fixture(scope="module")
def pool() -> Iterator[WorkerPool]:
    Stuck.made = []
    pool = WorkerPool(EnvironmentAgent(Stuck, max_turns=1).functions, max_workers=6)
    yield pool
    pool.close()


def test_in_workers_environments_may_hang_and_crash(pool: WorkerPool) -> None:
    agent = EnvironmentAgent(Stuck, max_turns=3, seconds=2.0).in_workers(pool)
    texts = ["hang", "crash", "raise", "fine", "fine"]

    async def together() -> list[Episode]:
        return await asyncio.gather(*(scored(agent, TASK, Script(text)) for text in texts))

    hung, crashed, raised, one, other = asyncio.run(together())
    assert hung.failure == Failure("environment_timeout", "Stuck.step took longer than agent.tool_seconds=2")
    assert crashed.failure is not None and crashed.failure.cause == "environment"
    assert "exit code 7" in crashed.failure.message
    assert raised.failure is not None and raised.failure.cause == "environment"
    assert raised.failure.message.startswith("Stuck.step: ValueError: no such move at ")
    assert one.failure is None and one.rewards["given"] == other.rewards["given"] == 1.0
    pids = {one.rewards["given/pid"], other.rewards["given/pid"]}
    assert len(pids) == 2 and os.getpid() not in pids
    assert one.messages[1]["content"] == "from 1 to 100"  # reset was asked there, too


def test_agents_by_name(tmp_path: Path) -> None:
    file = tmp_path / "agents_of_mine.py"
    file.write_text(
        "import covey\n"
        "class World:\n"
        "    def reset(self, task): pass\n"
        "    def step(self, reply): return covey.Done(0.0)\n"
        "def make(size=3): return World()\n"
        "def wrong(): return 3\n"
        "one = World()\n"
        "async def coroutine(policy, task): return 'x'\n"
        "@covey.agent\nasync def decorated(policy, task): return 'x'\n"
        "class Own:\n"
        "    def opening(self, task): return task.messages, None\n"
        "    async def run(self, policy, task): pass\n"
        "own = Own()\n"
        "class Nothing: pass\n"
        "def plain(policy, task): pass\n"
    )

    def found(name: str) -> Any:
        return resolve_agent(f"{file}:{name}", AgentConfig(max_turns=3, tool_seconds=2.5))

    for name in ("World", "make"):
        agent = found(name)
        assert isinstance(agent, EnvironmentAgent) and (agent.max_turns, agent.seconds) == (3, 2.5)
        assert asyncio.run(agent.run(policy_of(Script("x")), TASK)).given == {"reward": 0.0}
    assert isinstance(found("coroutine"), FunctionAgent) and isinstance(found("decorated"), FunctionAgent)
    assert type(found("Own")).__name__ == type(found("own")).__name__ == "Own"
    assert isinstance(resolve_agent("chat"), ChatAgent)
    with pytest.raises(InputError, match="every episode needs its own\n  fix: name the class"):
        found("one")
    with pytest.raises(InputError, match="a class is an environment"):
        found("Nothing")
    with pytest.raises(InputError, match="plain must be a coroutine"):
        found("plain")
    with pytest.raises(InputError, match="wrong makes an object without reset and step"):
        asyncio.run(scored(found("wrong"), TASK, Script("x")))


def test_an_agent_needs_an_opening() -> None:
    class Half:
        async def run(self, policy: Any, task: Any) -> None: ...

    with pytest.raises(InputError, match="has run but no opening"):
        as_agent("a.py:b", Half(), AgentConfig())


@pytest.mark.parametrize(
    ("table", "expected"),
    [
        (None, None),
        ({"reward": 0.5}, {"reward": 0.5}),
        ({"reward": 0.0, "steps": 3.0}, {"reward": 0.0, "steps": 3.0}),
        ({"reward": None, "steps": 3.0}, {"reward": None, "steps": 3.0}),
    ],
)
def test_the_given_reward(table: Any, expected: Any) -> None:
    assert given(Episode(TASK, (), TASK.messages, given=table)) == expected


@pytest.mark.parametrize("keys", [("right", "style"), ("frst", "second")])
def test_a_table_without_a_reward_or_roles_is_refused(keys: tuple[str, str]) -> None:
    """Also a misspelt role. A role that has not spoken yet may be named beside those that have."""

    class Ends:
        def reset(self, task: Task) -> Any:
            return covey.Observation("begin", role="first")

        def step(self, reply: str) -> Any:
            return covey.Done(dict.fromkeys(keys, 0.5))

    episode = asyncio.run(scored(EnvironmentAgent(Ends, max_turns=2), TASK, Script("x")))
    assert episode.failure is not None and episode.failure.cause == "reward"
    words = f"no 'reward' \\(keys: {', '.join(keys)}\\), and the roles of the episode are first"
    assert re.search(words, episode.failure.message)
    keys = ("first", "second")
    episode = asyncio.run(scored(EnvironmentAgent(Ends, max_turns=2), TASK, Script("x")))
    assert episode.rewards == {"given": 0.5, "given/first": 0.5, "given/second": 0.5}


def test_the_reply_of_one_role_is_text_for_another() -> None:
    """Also where the reply spells the tokens that end a turn and begin the next one."""

    class Passes:
        def reset(self, task: Task) -> Any:
            return covey.Observation("begin", role="first")

        def step(self, reply: str) -> Any:
            if self.heard:
                return covey.Done({"reward": 1.0})
            self.heard = reply
            return covey.Observation(reply, role="second")

        heard = ""

    class Spells(Script):
        async def generate(self, token_ids: Any, sampling: Any) -> Any:
            done = await super().generate(token_ids, sampling)
            letters = (token for char in text for token in self.tokenizer(char, add_special_tokens=False)["input_ids"])
            return replace(done, token_ids=done.token_ids if len(self.prompts) > 1 else (*letters, done.token_ids[-1]))

    text = "x<|im_end|>"
    engine = Spells("x" * len(text), "ok")
    episode = asyncio.run(scored(EnvironmentAgent(Passes, max_turns=2), TASK, engine))
    assert episode.failure is None and episode.messages[2]["content"] == text
    assert engine.prompts[1] == "<|im_start|>user\nx< |im_end|><|im_end|>\n<|im_start|>assistant\n"
