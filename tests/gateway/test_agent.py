"""agent=gateway with the collector: clients that take attempts, and programs that are started for them."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import sys
import textwrap
import time
from collections.abc import Awaitable, Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from covey.errors import Absent, InputError, RunFailed
from covey.gateway.agent import GatewayAgent, require_program, run_program
from covey.gateway.registry import EpisodeRules
from covey.rewards import resolve_rewards
from covey.rollout.collector import Collector, NothingCompleted, TrainingSource
from covey.rollout.rendering import Renderer
from covey.types import Collected, Episode, Sampling, StopReason, Task
from tests.gateway.running_gateway import ScriptedEngine

TASKS = [Task(f"t{n}", ({"role": "user", "content": f"q{n}"},), answer="secret", columns={"k": n}) for n in range(2)]
SAMPLING = Sampling(temperature=0.8, max_tokens=40)


class Ground:
    """A collector with a gateway, two tasks and two attempts at each."""

    def __init__(self, reward: Any = "given", seconds: float = 20.0, **options: Any) -> None:
        self.engine = ScriptedEngine(lambda prompt, sampling: f"reply {sampling.seed % 1000}")
        rules = EpisodeRules("tiny", sampling=SAMPLING, max_turns=options.pop("max_turns", None))
        self.said: list[str] = []
        self.agent = GatewayAgent(rules, port=0, patience=options.pop("patience", 5.0), **options)
        self.agent.announce = self.said.append
        self.collector = Collector(
            self.engine,  # type: ignore[arg-type]
            Renderer(self.engine.tokenizer),
            self.agent,
            resolve_rewards(reward, None, {}),
            7,
            seconds,
        )

    def source(self) -> TrainingSource:
        return TrainingSource(self.collector, lambda step: TASKS, attempts=2, sampling=SAMPLING, min_group_size=1)

    @property
    def token(self) -> str:
        assert self.agent._registry is not None
        return self.agent._registry.token

    def client(self) -> Any:
        import httpx

        assert self.agent._server is not None
        headers = {"authorization": f"Bearer {self.token}"}
        return httpx.AsyncClient(base_url=self.agent._server.url, headers=headers, timeout=30, trust_env=False)


def step(ground: Ground, *players: Callable[[Ground], Awaitable[None]]) -> Collected:
    async def scene() -> Collected:
        async with ground.agent:
            playing = [asyncio.ensure_future(player(ground)) for player in players]
            collected = await ground.source().next()
            await asyncio.gather(*playing)
            return collected

    return asyncio.run(scene())


def episodes(collected: Collected) -> list[Episode]:
    return [episode for group in collected.groups for episode in group.episodes]


async def ask(client: Any, opened: dict[str, Any], **more: Any) -> Any:
    headers = {"authorization": f"Bearer {opened['key']}"}
    body = {"model": "tiny", "messages": opened["task"]["messages"]} | more
    return await client.post("/v1/chat/completions", headers=headers, json=body)


def test_a_client_takes_attempts_and_posts_rewards() -> None:
    seen = []

    async def player(ground: Ground) -> None:
        async with ground.client() as client:
            for number in range(4):
                opened = (await client.post("/episodes", json={"wait": 10})).json()
                seen.append(opened["task"])
                assert (await ask(client, opened, temperature=0.8)).status_code == 200
                posted = await client.post(f"/episodes/{opened['id']}/reward", json={"rewards": {"a": number, "b": 1}})
                assert posted.status_code == 200
            assert (await client.post("/episodes", json={"wait": 0})).status_code == 204

    ground = Ground()
    found = episodes(step(ground, player))
    assert [task["id"] for task in seen] == ["t0", "t0", "t1", "t1"] and "secret" not in json.dumps(seen)
    assert seen[3]["columns"] == {"k": 1}
    assert [e.rewards for e in found] == [{"given": n + 1.0, "given/a": float(n), "given/b": 1.0} for n in range(4)]
    assert len({e.final_answer for e in found}) == 4 and all(len(e.turns) == 1 for e in found)
    assert ground.said[0].startswith("gateway: http://127.0.0.1:") and ground.token in ground.said[0]


def test_a_temperature_other_than_the_runs_is_refused() -> None:
    async def player(ground: Ground) -> None:
        async with ground.client() as client:
            for _ in range(4):
                opened = (await client.post("/episodes")).json()
                for field, value in (("temperature", 0.0), ("top_p", 0.9)):
                    refused = await ask(client, opened, **{field: value})
                    assert refused.status_code == 400
                    assert f"set rollout.{field}" in refused.json()["error"]["message"]
                assert (await ask(client, opened)).status_code == 200
                await client.post(f"/episodes/{opened['id']}/reward", json={"reward": 1})

    ground = Ground()
    assert [len(e.turns) for e in episodes(step(ground, player))] == [1, 1, 1, 1]
    assert {s.temperature for s in ground.engine.requests} == {0.8}


def test_the_runs_reward_scores_finished_episodes() -> None:
    async def player(ground: Ground) -> None:
        async with ground.client() as client:
            for _ in range(4):
                opened = (await client.post("/episodes")).json()
                await ask(client, opened)
                await client.post(f"/episodes/{opened['id']}/finish")

    def length(final_answer: str) -> float:
        return len(final_answer)

    found = episodes(step(Ground(length), player))
    assert [e.rewards for e in found] == [{"length": len(e.final_answer)} for e in found]


def test_attempts_not_taken_or_not_closed_fail_and_late_posts_change_nothing() -> None:
    statuses = []

    async def player(ground: Ground) -> None:
        async with ground.client() as client:
            good, empty, left = [(await client.post("/episodes")).json() for _ in range(3)]
            await ask(client, good)
            await client.post(f"/episodes/{good['id']}/reward", json={"reward": 2})
            await client.post(f"/episodes/{empty['id']}/reward", json={"reward": 3})
            await ask(client, left)
            await asyncio.sleep(2.6)
            late = await client.post(f"/episodes/{left['id']}/reward", json={"reward": 4})
            statuses.extend([late.status_code, (await ask(client, left)).status_code])

    found = step(Ground(seconds=2.0, patience=2.0), player)
    assert found.failures == {"program": 1, "timeout": 1, "abandoned": 1}
    assert [e.rewards["given"] for e in episodes(found)] == [2.0]
    assert statuses == [410, 410]


def test_waiting_does_not_count_as_the_episodes_time() -> None:
    """Four attempts of half a second one after the other, each with 1.5 s of its own."""

    async def player(ground: Ground) -> None:
        async with ground.client() as client:
            for _ in range(4):
                opened = (await client.post("/episodes")).json()
                await asyncio.sleep(0.5)
                await ask(client, opened)
                await client.post(f"/episodes/{opened['id']}/reward", json={"reward": 1})

    assert step(Ground(seconds=1.5, patience=5.0), player).failures == {}


def test_turns_are_limited() -> None:
    async def player(ground: Ground) -> None:
        async with ground.client() as client:
            for _ in range(4):
                opened = (await client.post("/episodes")).json()
                assert (await ask(client, opened, n=2)).status_code == 200
                refused = await ask(client, opened)
                assert refused.json()["error"]["code"] == "too_many_turns"
                await client.post(f"/episodes/{opened['id']}/reward", json={"reward": 1})

    found = episodes(step(Ground(max_turns=2), player))
    assert {(len(e.turns), e.stop) for e in found} == {(2, StopReason.TURNS)}


def test_a_refused_request_leaves_the_episode_as_it_was() -> None:
    """The client corrects the request and goes on."""

    async def player(ground: Ground) -> None:
        async with ground.client() as client:
            for _ in range(4):
                opened = (await client.post("/episodes")).json()
                for body, code in (
                    ({"n": 3}, "too_many_turns"),
                    ({"messages": [{"role": "user", "content": "x" * 500}]}, "context_length_exceeded"),
                ):
                    refused = await ask(client, opened, **body)
                    assert refused.json()["error"]["code"] == code
                answered = await ask(client, opened, n=2)
                assert answered.status_code == 200, answered.text
                await client.post(f"/episodes/{opened['id']}/reward", json={"reward": 1})

    ground = Ground(max_turns=2)
    ground.collector.renderer = Renderer(ground.engine.tokenizer, context_length=300)
    found = episodes(step(ground, player))
    assert {(len(e.turns), e.stop, e.cut_by) for e in found} == {(2, StopReason.EOS, None)}


def test_an_engine_that_fails_costs_the_attempt() -> None:
    async def player(ground: Ground) -> None:
        def broken(prompt: str, sampling: Sampling) -> str:
            raise OSError("out of feathers")

        async with ground.client() as client:
            said, ground.engine.reply = ground.engine.reply, broken
            opened = (await client.post("/episodes")).json()
            assert (await ask(client, opened)).status_code == 500
            ground.engine.reply = said
            for _ in range(3):
                opened = (await client.post("/episodes")).json()
                await ask(client, opened)
                await client.post(f"/episodes/{opened['id']}/reward", json={"reward": 1})

    found = step(Ground(), player)
    assert found.failures == {"agent": 1} and found.examples["agent"].startswith("OSError: out of feathers")


# -- Programs started by Covey ---------------------------------------------------------------------------------------

PLAYER = """
import json, os, sys, time, urllib.request
opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
def post(url, body):
    headers = {"Authorization": "Bearer " + os.environ["OPENAI_API_KEY"], "Content-Type": "application/json"}
    return json.load(opener.open(urllib.request.Request(url, json.dumps(body).encode(), headers)))
def ask(messages, **more):
    reply = post(os.environ["OPENAI_BASE_URL"] + "/chat/completions", {"messages": messages, **more})
    return reply["choices"][0]["message"]
def reward(value):
    return post(os.environ["COVEY_EPISODE_URL"] + "/reward", {"reward": value})
task = json.loads(os.environ["COVEY_TASK"])
"""


def command(folder: Path, body: str) -> str:
    (folder / "player.py").write_text(PLAYER + textwrap.dedent(body))
    return f"{sys.executable} -S {folder / 'player.py'}"


def test_a_program_is_started_for_each_attempt_and_no_more_than_allowed_at_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COVEY_TOKEN", "the-token-of-the-admin")
    monkeypatch.setenv("RAY_AUTH_TOKEN", "the-token-of-the-cluster")
    line = command(
        tmp_path,
        f"""
        assert "COVEY_TOKEN" not in os.environ and "secret" not in os.environ["COVEY_TASK"]
        assert "RAY_AUTH_TOKEN" not in os.environ
        log = open({str(tmp_path / "log")!r}, "a")
        print("+", file=log, flush=True)
        first = ask(task["messages"])
        again = [*task["messages"], first, {{"role": "user", "content": "sure?"}}]
        second = ask(again)
        reward(len(second["content"]) + task["columns"]["k"] * 100)
        print("-", file=log, flush=True)
        """,
    )
    found = episodes(step(Ground(command=line, programs=2)))
    assert [len(e.turns) for e in found] == [2, 2, 2, 2]
    assert [e.rewards["given"] for e in found] == [len(e.final_answer) + 100 * (n // 2) for n, e in enumerate(found)]
    one, two = found[0].turns
    assert two.prompt_ids[: len(one.prompt_ids + one.completion_ids)] == one.prompt_ids + one.completion_ids
    marks = (tmp_path / "log").read_text().split()
    running = [marks[: n + 1].count("+") - marks[: n + 1].count("-") for n in range(len(marks))]
    assert len(marks) == 8 and max(running) <= 2


def test_an_exit_code_is_a_failure_with_the_end_of_the_output(tmp_path: Path) -> None:
    line = command(
        tmp_path,
        """
        if task["id"] == "t0":
            sys.exit("no idea")
        if task["columns"]["k"] == 1:
            ask(task["messages"])
        """,
    )
    found = step(Ground(lambda final_answer: 1.0, command=line))
    assert found.failures == {"program": 2}
    assert found.examples["program"].endswith("exit code 1: no idea")
    assert [e.task.id for e in episodes(found)] == ["t1", "t1"]


def test_a_program_without_room_has_not_failed(tmp_path: Path) -> None:
    """The second request is refused, the program does not catch it: the episode counts as it is."""
    line = command(tmp_path, "ask(task['messages']); ask(task['messages'])")
    found = step(Ground(lambda final_answer: 1.0, command=line, max_turns=1))
    assert {(len(e.turns), e.stop) for e in episodes(found)} == {(1, StopReason.TURNS)}


def test_a_program_that_goes_on_after_a_refusal_can_fail(tmp_path: Path) -> None:
    line = command(
        tmp_path,
        """
        try:
            ask(task["messages"], n=2)
        except Exception:
            ask(task["messages"])
        sys.exit("no idea")
        """,
    )
    with pytest.raises(NothingCompleted, match=r"4 × program: .* ended with exit code 1: no idea"):
        step(Ground(lambda final_answer: 1.0, command=line, max_turns=1))


def test_a_program_and_all_it_started_are_killed_at_the_deadline(tmp_path: Path) -> None:
    line = command(
        tmp_path,
        f"""
        ask(task["messages"])
        if task["id"] == "t0":
            import subprocess
            child = subprocess.Popen(["sleep", "300"])
            open({str(tmp_path)!r} + f"/pid-{{os.getpid()}}", "w").write(f"{{os.getpid()}} {{child.pid}}")
            time.sleep(300)
        reward(1)
        """,
    )
    found = step(Ground(seconds=3.0, command=line))
    assert found.failures == {"timeout": 2} and len(episodes(found)) == 2
    pids = [int(pid) for file in tmp_path.glob("pid-*") for pid in file.read_text().split()]
    assert len(pids) == 4 and not [pid for pid in pids if alive(pid)]


def test_processes_that_left_the_group_are_killed_without_delay(tmp_path: Path) -> None:
    """Three sleepers with sessions of their own that hold the pipe: one whose parent lives, one whose parent is gone,
    and one without the program's environment, which nobody finds."""
    script = """
        setsid sleep 300 & echo $! > child
        (setsid sleep 300 & echo $! > orphan)
        env -i setsid sleep 300 & echo $! > stranger
        touch ready; sleep 300
    """
    names = ("child", "orphan", "stranger")

    async def scene() -> bool:
        playing = asyncio.create_task(run_program(["sh", "-c", f"cd {tmp_path}; {script}"], os.environ))
        while not (tmp_path / "ready").exists():
            await asyncio.sleep(0.02)
        await asyncio.sleep(0.2)  # until they have sessions of their own
        playing.cancel()
        return bool((await asyncio.wait([playing], timeout=10))[0])

    def pids() -> list[int]:
        return [int((tmp_path / name).read_text()) for name in names]

    loop = asyncio.new_event_loop()
    try:
        returned = loop.run_until_complete(scene())
        deadline = time.monotonic() + 10
        while any(map(alive, pids()[:2])) and time.monotonic() < deadline:
            time.sleep(0.02)
        living = [alive(pid) for pid in pids()]
    finally:
        for pid in pids():
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        loop.run_until_complete(asyncio.sleep(0.1))
        loop.close()
    assert returned and living == [False, False, True]


def test_the_end_of_a_programs_output_is_kept() -> None:
    code = "import sys; sys.stdout.write('x' * 300_000); sys.stderr.write('the end'); sys.exit(3)"
    status, words = asyncio.run(run_program([sys.executable, "-S", "-c", code], os.environ))
    assert status == 3 and words.endswith("xthe end") and len(words) == 2000


def alive(pid: int) -> bool:
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except FileNotFoundError:
        return False
    return state != "Z"


def test_a_run_without_any_attempt_names_the_likely_fix(tmp_path: Path) -> None:
    with pytest.raises(NothingCompleted, match=r"4 × program: .*exit code 3[\s\S]*run agent\.command by hand"):
        step(Ground(command=f"{sys.executable} -S -c 'raise SystemExit(3)'"))


def test_a_command_that_cannot_be_run_is_reported_at_once() -> None:
    for line in ("", "python 'unclosed"):
        with pytest.raises(InputError, match=r"agent\.command"):
            Ground(command=line)
    with pytest.raises(Absent, match="no program nowhere-to-be-found here"):
        require_program("nowhere-to-be-found x")


def test_a_dead_engine_ends_the_run_whatever_the_program_says(tmp_path: Path) -> None:
    def dead(prompt: str, sampling: Sampling) -> str:
        raise RunFailed("the engine is gone")

    ground = Ground(command=command(tmp_path, "ask(task['messages'])"))
    ground.engine.reply = dead
    with pytest.raises(RunFailed, match="the engine is gone"):
        step(ground)


def test_clients_that_wait_when_the_run_ends_get_no_attempt() -> None:
    async def scene() -> int:
        ground = Ground()
        await ground.agent.__aenter__()
        async with ground.client() as client:
            waiting = asyncio.ensure_future(client.post("/episodes", json={"wait": 60}))
            await asyncio.sleep(0.3)
            await ground.agent.__aexit__()
            return int((await waiting).status_code)

    assert asyncio.run(scene()) == 204


def test_with_a_command_clients_cannot_take_attempts(tmp_path: Path) -> None:
    async def player(ground: Ground) -> None:
        async with ground.client() as client:
            assert (await client.post("/episodes")).status_code == 409

    step(Ground(command=command(tmp_path, "ask(task['messages']); reward(1)")), player)


def test_a_task_too_long_for_an_environment_can_be_fetched(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    line = command(tmp_path, "")
    body = (
        (tmp_path / "player.py")
        .read_text()
        .replace(
            'task = json.loads(os.environ["COVEY_TASK"])',
            "headers = {'Authorization': 'Bearer ' + os.environ['OPENAI_API_KEY']}\n"
            "assert 'COVEY_TASK' not in os.environ\n"
            "request = urllib.request.Request(os.environ['COVEY_EPISODE_URL'], headers=headers)\n"
            "ask(json.load(opener.open(request))['task']['messages'])\nreward(1)\n",
        )
    )
    (tmp_path / "player.py").write_text(body)
    long = [Task("long", ({"role": "user", "content": "x" * 200_000},))]
    monkeypatch.setitem(globals(), "TASKS", long)
    found = episodes(step(Ground(command=line)))
    assert [len(e.turns[0].prompt_ids) > 200_000 for e in found] == [True, True]


def test_nothing_is_left_open(tmp_path: Path) -> None:
    """The port is free again, and no child of ours is left."""
    before = children()
    ground = Ground(command=command(tmp_path, "ask(task['messages']); reward(1)"))
    step(ground)
    import httpx

    assert ground.agent._server is not None
    with pytest.raises(httpx.ConnectError):
        httpx.get(ground.agent._server.url, trust_env=False)
    assert children() <= before  # other tests may keep processes for later, math-verify's for example


def children() -> set[str]:
    """Of this process, ended ones that nobody waited for among them."""
    return {pid for path in Path("/proc/self/task").glob("*/children") for pid in path.read_text().split()}
