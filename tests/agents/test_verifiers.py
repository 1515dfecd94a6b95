"""Environments of the real package: single turns, turns with a user, tools; their rewards, limits and failures."""

from __future__ import annotations

import asyncio
import importlib
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("verifiers.v1", reason="needs the extra covey[verifiers], version 0.4")

from covey.agents.formats.detect import make_format
from covey.agents.resolve import resolve_agent
from covey.agents.verifiers import VerifiersAgent
from covey.config.schema import AgentConfig
from covey.errors import InputError
from covey.types import Episode, StopReason
from tests.agents.scripted import Script, one_row, policy_of, scored, with_braces

SOURCE = """
import verifiers.v1 as vf


class SumData(vf.TaskData):
    answer: str


class SumTask(vf.Task[SumData]):
    @vf.reward(weight=2.0)
    async def right(self, task, trace) -> float:
        if task.answer == "broken":
            raise RuntimeError("the judge is down")
        return float(trace.last_reply == task.answer)

    @vf.reward(weight=0.5)
    async def short(self, trace) -> float:
        return float(len(trace.last_reply) < 3)

    @vf.metric
    async def letters(self, trace) -> float:
        return float(len(trace.last_reply))

    @vf.stop
    async def enough(self, trace: vf.Trace) -> bool:
        return trace.num_turns > 0 and trace.last_reply == "stop"


class SumTaskset(vf.Taskset[SumTask]):
    def load(self):
        for prompt, answer in (("1+1", "2"), ("2+2", "4"), ("3+3", "broken")):
            yield SumTask(SumData(prompt=prompt, system_prompt="Add.", answer=answer))


__all__ = ["SumTaskset"]
"""

TALK = SOURCE.replace('"SumTaskset"]', '"SumTaskset", "TalkEnv"]').replace(
    "__all__",
    """
class TalkConfig(vf.EnvConfig):
    solver: vf.AgentConfig = vf.AgentConfig()
    critic: vf.AgentConfig = vf.AgentConfig(harness={"id": "null"})


class TalkEnv(vf.Env[TalkConfig]):
    async def setup(self, agents):
        agents.critic.trainable = False

    async def run(self, task, agents):
        asked = vf.Task(vf.TaskData(prompt=None, system_prompt="Criticise."))
        async with agents.solver.interaction(task) as solver, agents.critic.interaction(asked) as critic:
            said = await solver.turn()
            while not said.terminated and said.last_reply != task.data.answer:
                word = await critic.turn(said.last_reply)
                said = await solver.turn(word.last_reply)


__all__""",
)

TOOLS = (
    SOURCE.replace(
        "class SumTaskset",
        '''
class Numbers(vf.Toolset[vf.ToolsetConfig]):
    @vf.tool
    def add(self, a: int, b: int) -> str:
        """Add two numbers."""
        return str(a + b)


class ToolTask(SumTask):
    @classmethod
    def toolsets(cls, config):
        return [Numbers(vf.ToolsetConfig())]


class SumTaskset''',
    )
    .replace("vf.Taskset[SumTask]", "vf.Taskset[ToolTask]")
    .replace("yield SumTask(", "yield ToolTask(")
)
TOOLS += """
if __name__ == "__main__":
    Numbers.run()
"""


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """The working folder. That it is on nobody's import path is the ordinary case."""
    before = set(sys.modules)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [entry for entry in sys.path if entry])
    yield tmp_path
    for name in set(sys.modules) - before:
        if name.startswith("sums_"):
            del sys.modules[name]


def made(home: Path, name: str, source: str, **config: Any) -> VerifiersAgent:
    (home / f"{name}.py").write_text(source)
    importlib.invalidate_caches()
    agent = resolve_agent("verifiers", AgentConfig(name="verifiers", environment=name, **config))
    assert isinstance(agent, VerifiersAgent)
    return agent


def play(agent: VerifiersAgent, engine: Script, task: int = 0, **limits: Any) -> Episode:
    async def whole() -> Episode:
        try:
            return await scored(agent, agent.tasks()[task], engine, "given", **limits)
        finally:
            await agent.aclose()

    return asyncio.run(whole())


def test_its_tasks(home: Path) -> None:
    first, second, _ = made(home, "sums_tasks", SOURCE).tasks()
    assert first.id == "sums_tasks/0" and second.id == "sums_tasks/1" and first.answer == "2"
    assert first.messages == ({"role": "system", "content": "Add."}, {"role": "user", "content": "1+1"})
    assert len(made(home, "sums_tasks", SOURCE).tasks(2)) == 2


def test_a_single_turn_and_its_rewards(home: Path) -> None:
    agent = made(home, "sums_one", SOURCE)
    engine = Script("2")
    episode = play(agent, engine)
    assert episode.failure is None and episode.stop is StopReason.EOS
    assert engine.prompts == [
        "<|im_start|>system\nAdd.<|im_end|>\n<|im_start|>user\n1+1<|im_end|>\n<|im_start|>assistant\n"
    ]
    assert episode.rewards == {
        "given": 2.5,  # 2 · right + 0.5 · short
        "given/right": 1.0,
        "given/short": 1.0,
        "given/letters": 1.0,
    }
    assert episode.final_answer == "2" and episode.turns[0].completion_ids[-1] == engine.tokenizer.eos_token_id
    wrong = play(agent, Script("12345"), task=1)  # on another event loop
    assert wrong.rewards == {"given": 0.0, "given/right": 0.0, "given/short": 0.0, "given/letters": 5.0}


def test_episodes_at_the_same_time_do_not_mix(home: Path) -> None:
    agent = made(home, "sums_many", SOURCE)
    task = agent.tasks()[0]

    async def all_at_once() -> list[Episode]:
        try:
            return await asyncio.gather(*(scored(agent, task, Script(str(n))) for n in range(6)))
        finally:
            await agent.aclose()

    episodes = asyncio.run(all_at_once())
    assert [episode.final_answer for episode in episodes] == list("012345")
    assert [episode.rewards["given/right"] for episode in episodes] == [0, 0, 1, 0, 0, 0]


def test_several_turns_with_another_role(home: Path) -> None:
    """The solver's turns are one row and are learned from; the critic is played by the same model, and is not."""
    engine = Script("3", "too high", "2")
    episode = play(made(home, "sums_talk", TALK), engine)
    assert episode.failure is None
    assert [turn.trained for turn in episode.turns] == [True, False, True]
    solver = [turn for turn in episode.turns if turn.trained]
    assert one_row(replace(episode, turns=tuple(solver)))
    assert [(m["role"], m["content"]) for m in episode.messages] == [
        ("system", "Add."),
        ("user", "1+1"),
        ("assistant", "3"),
        ("user", "too high"),
        ("assistant", "2"),
    ]
    assert engine.prompts[1].startswith("<|im_start|>system\nCriticise.<|im_end|>\n<|im_start|>user\n3")
    assert episode.rewards["given"] == 2.5 and episode.rewards["given/right"] == 1.0


def test_tools(home: Path) -> None:
    call = '<tool_call>\n{"name": "numbers_add", "arguments": {"a": 1, "b": 1}}\n</tool_call>'
    agent = with_tools(home, "sums_tools", TOOLS)
    engine = Script(f"Let me see. {call}", "2", tokenizer=with_braces())
    episode = play(agent, engine)
    assert episode.failure is None and episode.rewards["given"] == 2.5
    assert len(episode.turns) == 2 and one_row(episode)
    assert "numbers_add" in engine.prompts[0] and "Add two numbers." in engine.prompts[0]
    shown = "<tool_response>\n2\n</tool_response>"
    assert engine.prompts[1].endswith(f"<|im_start|>user\n{shown}<|im_end|>\n<|im_start|>assistant\n")
    assert episode.messages[-2]["content"] == shown


def with_tools(home: Path, name: str, source: str) -> VerifiersAgent:
    return replace(made(home, name, source), format=make_format("hermes", native_tools=False))


def test_tools_of_a_file(home: Path) -> None:
    """Only this process knows the name of a module that was loaded from a path."""
    (home / "elsewhere").mkdir()
    file = home / "elsewhere" / "sums_file.py"
    make = "def make(): return vf.resolve_env_config({'taskset': {'id': __name__}})\n\n\nif __name__"
    file.write_text(TOOLS.replace("if __name__", make))
    found = resolve_agent("verifiers", AgentConfig(name="verifiers", environment=f"{file}:make"))
    assert isinstance(found, VerifiersAgent)
    call = '<tool_call>\n{"name": "numbers_add", "arguments": {"a": 1, "b": 1}}\n</tool_call>'
    agent = replace(found, format=make_format("hermes", native_tools=False))
    episode = play(agent, Script(call, "2", tokenizer=with_braces()))
    assert episode.failure is None and episode.rewards["given"] == 2.5
    assert episode.messages[-2]["content"] == "<tool_response>\n2\n</tool_response>"


SHARED = TOOLS.replace(
    "class SumTaskset(vf.Taskset[ToolTask]):",
    "class SumTaskset(vf.Taskset[ToolTask]):\n"
    "    @classmethod\n    def toolsets(cls, config): return [Numbers(vf.SharedToolsetConfig())]\n",
).replace("[Numbers(vf.ToolsetConfig())]", "[]")


@pytest.mark.parametrize(
    ("name", "source", "words"),
    [
        ("raises", TOOLS.replace("    Numbers.run()", "    raise OSError('no such index')"), "OSError: no such index"),
        ("silent", TOOLS[: TOOLS.index("if __name__")], 'if __name__ == "__main__": ITS_TOOLSET.run()'),
        ("shared", SHARED.replace("    Numbers.run()", "    raise OSError('no such index')"), "no such index"),
    ],
)
def test_a_tool_server_that_ends_is_reported_with_its_cause(home: Path, name: str, source: str, words: str) -> None:
    episode = play(with_tools(home, f"sums_{name}", source), Script("2", tokenizer=with_braces()))
    assert episode.failure is not None and episode.failure.cause == "environment"
    assert words in episode.failure.message and f"tool server of sums_{name} ended" in episode.failure.message


def test_a_tool_server_that_is_never_ready(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from covey.agents import verifiers_runtime

    monkeypatch.setattr(verifiers_runtime, "READY_SECONDS", 6)
    monkeypatch.setattr(verifiers_runtime, "WAIT_SECONDS", 2)
    monkeypatch.setattr(
        verifiers_runtime.HostRuntime, "report", verifiers_runtime.HostRuntime.report
    )  # put back afterwards
    # Printed before the imports, which take seconds on a busy machine.
    source = (
        "print('reading the index', flush=True)\nif __name__ == '__main__':\n    import time; time.sleep(99)\n" + TOOLS
    )
    agent, told = with_tools(home, "sums_never", source), []
    agent.announce_to(told.append)
    episode = play(agent, Script("2", tokenizer=with_braces()))
    assert episode.failure is not None
    assert "the tool server of sums_never is not ready after 6 s" in episode.failure.message
    assert "reading the index" in episode.failure.message
    assert told and told[0].startswith("waiting for the tool server of sums_never: ")
    assert told[0].endswith(" s of at most 6, its last output: reading the index")


def test_tools_need_a_format() -> None:
    from covey.agents.verifiers_runtime import PolicyClient

    with pytest.raises(InputError, match="has tools, and the model's tool-call format is not known"):
        PolicyClient(policy_of(Script()), None)._format([{}])


def test_limits_end_an_episode_and_it_is_scored(home: Path) -> None:
    talk = made(home, "sums_limits", TALK, max_turns=1)
    turns = play(talk, Script("3", "no", "2"))
    assert turns.failure is None and turns.stop is StopReason.TURNS
    assert turns.rewards["given/right"] == 0.0 and [turn.trained for turn in turns.turns] == [True, False]
    full = play(made(home, "sums_limits", TALK), Script("3", "no", "2"), max_response_tokens=4)
    assert full.failure is None and full.stop is StopReason.LENGTH and full.rewards["given"] == 0.5
    cut = play(made(home, "sums_limits", TALK), Script("345678"), max_response_tokens=3)
    assert cut.stop is StopReason.LENGTH and cut.final_answer == "345"


def test_its_errors_are_failures(home: Path) -> None:
    episode = play(made(home, "sums_wrong", SOURCE), Script("2"), task=2)
    assert episode.failure is not None and episode.failure.cause == "environment"
    assert "the judge is down" in episode.failure.message
    assert episode.failure.message.endswith('sums_wrong.py, line 13: raise RuntimeError("the judge is down")')


def test_a_broken_engine_ends_the_run(home: Path) -> None:
    from covey.errors import RunFailed

    class Broken(Script):
        async def generate(self, token_ids: Any, sampling: Any) -> Any:
            raise RunFailed("the engine is gone")

    with pytest.raises(RunFailed, match="the engine is gone"):
        play(made(home, "sums_broken", SOURCE), Broken())


def test_how_environments_are_named(home: Path) -> None:
    file = home / "sums_of_mine.py"
    (home / "sums_named.py").write_text(SOURCE)
    file.write_text(
        "import verifiers.v1 as vf\n"
        "def make(**options): return vf.resolve_env_config({'taskset': {'id': 'sums_named'}, **options})\n"
        "def wrong(): return 3\n"
    )

    def named(name: str | None, **options: Any) -> Any:
        config = AgentConfig(name="verifiers", environment=name, environment_options=options, max_turns=3)
        return resolve_agent("verifiers", config)

    agent = named(f"{file}:make", agent={"max_turns": 2})
    assert agent.environment.config.agent.max_turns == 2
    assert agent.environment.config.agent.harness.id == "covey_chat"  # and not a shell on this machine
    assert named("sums_named").environment.config.agent.max_turns == 3
    with pytest.raises(InputError, match=r"agent\.environment=NAME"):
        named(None)
    with pytest.raises(InputError, match="neither an Env nor an EnvConfig, but int"):
        named(f"{file}:wrong")
    with pytest.raises(InputError, match=r"environment nowhere: .*not found"):
        named("nowhere")
