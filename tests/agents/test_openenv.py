"""agent=openenv: episodes on a server made with the package itself. Needs the package."""

from __future__ import annotations

import asyncio
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("openenv.core.env_server", reason="needs the package openenv-core")

import httpx

from covey.agents.packages import PackageAgent
from covey.agents.packages.openenv import OpenEnvAdapter
from covey.errors import InputError
from covey.types import Episode
from tests.agents.scripted import Script, one_row, scored, with_braces

SERVER = """
import sys
import uvicorn
from openenv.core.env_server import Action, Environment, Observation, State, create_fastapi_app

class Guess(Action):
    message: str

class Hint(Observation):
    text: str

class Pair(Action):
    a: int
    b: int

class Game(Environment):
    SUPPORTS_CONCURRENT_SESSIONS = True

    def reset(self, seed=None, episode_id=None, offset=0, **more):
        self.secret = (seed or 0) + offset
        return Hint(text=f"guess a number over {self.secret - 3}")

    def step(self, action, **more):
        if isinstance(action, Pair):
            return Hint(text="sum", reward=action.a + action.b, done=True)
        right = action.message.strip() == str(self.secret)
        return Hint(text="yes" if right else "no", reward=1.0 if right else -0.25, done=right)

    @property
    def state(self):
        return State()

kind = Pair if sys.argv[2] == "pair" else Guess
uvicorn.run(create_fastapi_app(Game, kind, Hint, max_concurrent_envs=8), port=int(sys.argv[1]), log_level="warning")
"""


def serve(folder: Path, kind: str) -> Iterator[str]:
    (folder / "server.py").write_text(SERVER)
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    process = subprocess.Popen([sys.executable, "server.py", str(port), kind], cwd=folder)
    url = f"http://127.0.0.1:{port}"
    while True:
        assert process.poll() is None, "the server ended"
        try:
            httpx.get(f"{url}/health")
            break
        except httpx.TransportError:
            time.sleep(0.1)
    yield url
    process.terminate()
    process.wait()


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    yield from serve(tmp_path_factory.mktemp("guess"), "guess")


@pytest.fixture(scope="module")
def pairs(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    yield from serve(tmp_path_factory.mktemp("pair"), "pair")


def play(adapter: OpenEnvAdapter, *replies: str, seed: int = 4, max_turns: int = 8) -> Episode:
    agent = PackageAgent(adapter.make, max_turns, adapter=adapter)
    task = agent.tasks(seed + 1)[seed]
    return asyncio.run(scored(agent, task, Script(*replies, tokenizer=with_braces())))


def test_an_episode_on_a_server(server: str) -> None:
    episode = play(OpenEnvAdapter(server, {"prompt": "play", "reset": {"offset": 10}}), "12", "14")
    assert episode.failure is None and one_row(episode)
    assert episode.rewards == {"given": 0.75, "given/steps": 2.0}
    shown = [(message["role"], message["content"]) for message in episode.messages]
    opening = [("system", "play"), ("user", "guess a number over 11")]
    assert shown == [*opening, ("assistant", "12"), ("user", "no"), ("assistant", "14"), ("user", "yes")]


def test_episodes_have_environments_of_their_own(server: str) -> None:
    adapter = OpenEnvAdapter(server, {})
    agent = PackageAgent(adapter.make, 8, adapter=adapter)

    async def both() -> list[Episode]:
        jobs = [scored(agent, task, Script("0", "1")) for task in agent.tasks(2)]
        return await asyncio.gather(*jobs)

    first, second = asyncio.run(both())
    assert (first.rewards["given/steps"], second.rewards["given/steps"]) == (1.0, 2.0)


def test_an_episode_out_of_turns_keeps_its_rewards(server: str) -> None:
    assert play(OpenEnvAdapter(server, {}), "1", "2", max_turns=2).rewards["given"] == -0.5


def test_actions_of_several_fields_are_json(pairs: str) -> None:
    episode = play(OpenEnvAdapter(pairs, {}), "3", "oops", '{"a": 1}', '{"a": 1, "b": 2}')
    assert episode.failure is None and episode.rewards["given"] == 3.0
    answers = [str(message["content"]) for message in episode.messages if message["role"] == "user"]
    assert answers[2:5] == [
        "This reply is not a JSON object.",
        answers[3],
        answers[4],
    ]
    assert answers[3].startswith("This reply is not a JSON object (Expecting value")
    assert answers[4].startswith("This action is not valid")


def test_a_server_that_is_down_is_found_before_training(unused: Any = None) -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        url = f"http://127.0.0.1:{free.getsockname()[1]}"
    with pytest.raises(InputError, match="the server does not return the schema of its actions"):
        OpenEnvAdapter(url, {})
    episode = play(OpenEnvAdapter(url, {"action": "message"}), "1")
    assert episode.failure is not None and episode.failure.cause == "environment"


def test_mistakes_are_explained(server: str) -> None:
    with pytest.raises(InputError, match="not the address of a server"):
        OpenEnvAdapter("my_env", {})
    with pytest.raises(InputError, match="unknown option of agent=openenv  field\n"):
        OpenEnvAdapter(server, {"field": "x"})
    episode = play(OpenEnvAdapter(server, {"observation": "board"}), "1")
    assert episode.failure is not None and "has no field board; it has text" in episode.failure.message
