"""covey train agent=gateway and covey serve, as people use them, on a tiny model."""

from __future__ import annotations

import json
import math
import os
import re
import signal
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import pytest

from covey.cli.main import main
from covey.gateway.agent import GatewayAgent
from covey.imports import install_extra
from covey.telemetry.jsonl import read_episodes
from tests.gateway.running_gateway import USER

SMALL = [
    *("data=sort", "data.val_size=2", "rollout.group_size=2", "rollout.max_tokens=6"),
    *("loop.total_steps=2", "gateway.port=0", "resume=disable", "eval.before=false", "eval.after=false"),
]
PLAYER = """
import json, os, httpx
from openai import OpenAI

client, task = OpenAI(), json.loads(os.environ["COVEY_TASK"])
first = client.chat.completions.create(model="any", messages=task["messages"]).choices[0].message
talk = [*task["messages"], first, {"role": "user", "content": "Are you sure?"}]
second = client.chat.completions.create(model="any", messages=talk).choices[0].message
headers = {"authorization": "Bearer " + os.environ["OPENAI_API_KEY"]}
worth = {"reward": (first.content + second.content).count("a") / 4, "rewards": {"talk": len(second.content)}}
httpx.post(os.environ["COVEY_EPISODE_URL"] + "/reward", headers=headers, json=worth).raise_for_status()
"""


@pytest.fixture(autouse=True)
def in_a_folder_of_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def steps() -> list[dict[str, float]]:
    (run,) = Path("outputs").glob("*/*")
    records = map(json.loads, (run / "metrics.jsonl").read_text().splitlines())
    return [record["metrics"] for record in records if record["kind"] == "step"]


def test_two_steps_played_by_a_program_with_openais_client(tiny_model_folder: Path) -> None:
    Path("player.py").write_text(PLAYER)
    small = [*SMALL, "data.train_batch_size=1"]  # a program takes a second to start
    words = ["agent=gateway", f"agent.command='{sys.executable} player.py'", "reward=given", "algorithm=grpo"]
    assert main(["train", f"model={tiny_model_folder}", *words, *small]) == 0
    both = steps()
    assert len(both) == 2
    for metrics in both:
        assert metrics["episodes/total"] == 2 and metrics["episodes/failed"] == 0
        assert 0 <= metrics["reward/given/min"] <= metrics["reward/given/max"] <= 3
        assert 0 <= metrics["reward/given/talk/mean"] <= 6
        assert metrics["response/length_mean"] <= 12
        assert all(math.isfinite(value) for value in metrics.values())
    (run,) = Path("outputs").glob("*/*")
    for record in read_episodes(run / "episodes.jsonl"):
        sampled = sum(sum(row["mask"]) for row in record["rows"])
        assert len(record["rows"]) == 1, "both turns are one row, token for token"
        assert sampled <= 12 and [m["role"] for m in record["messages"]][-3:] == ["assistant", "user", "assistant"]
        ratios = [r for row in record["rows"] for r, mine in zip(row["ratio"], row["mask"], strict=True) if mine]
        assert ratios == pytest.approx([1.0] * sampled, abs=1e-3), "what is learned from is what was sampled"


def test_an_external_program_plays_a_whole_run_on_one_server(
    tiny_model_folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """It keeps one connection over steps and evaluations: the server is started once."""
    import httpx

    from covey.gateway.server import bind

    with bind(0) as free:
        port = free.getsockname()[1]
    monkeypatch.setenv("COVEY_TOKEN", "a-token-for-this-test")
    over, tasks, faults = threading.Event(), [], []

    def player() -> None:
        headers = {"authorization": "Bearer a-token-for-this-test"}
        with httpx.Client(base_url=f"http://127.0.0.1:{port}", headers=headers, timeout=60, trust_env=False) as client:
            while not over.is_set():
                try:
                    answer = client.post("/episodes", json={"wait": 1})
                except httpx.HTTPError:
                    over.wait(0.1)
                    continue
                if answer.status_code != 201:
                    faults.extend([answer.text] if answer.status_code != 204 else [])
                    continue
                opened = answer.json()
                tasks.append(opened["task"]["id"])
                key = {"authorization": f"Bearer {opened['key']}"}
                body = {"messages": opened["task"]["messages"], "temperature": 1.0}
                reply = client.post("/v1/chat/completions", headers=key, json=body).json()
                worth = reply["choices"][0]["message"]["content"].count("a")
                client.post(f"/episodes/{opened['id']}/reward", json={"reward": worth})

    thread = threading.Thread(target=player, daemon=True)
    thread.start()
    words = ["agent=gateway", "reward=given", f"agentflow.port={port}", "data.train_batch_size=2"]
    small = [word for word in SMALL if not word.startswith(("gateway.port", "eval."))]
    try:
        assert main(["train", f"model={tiny_model_folder}", *words, *small]) == 0
    finally:
        over.set()
        thread.join(70)
    assert not thread.is_alive() and not faults
    assert len(tasks) == 2 * 4 + 2 * 2  # two steps, two greedy evaluations
    assert [metrics["episodes/failed"] for metrics in steps()] == [0, 0]
    said = capsys.readouterr().out
    assert "token: $COVEY_TOKEN" in said and "a-token-for-this-test" not in said


def test_missing_requirements_are_reported_before_the_model_loads(
    tiny_model_folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from covey.gateway.server import bind

    with bind(0) as taken:
        taken.listen()
        port = taken.getsockname()[1]
        assert main(["train", f"model={tiny_model_folder}", "agent=gateway", f"gateway.port={port}"]) == 2
        assert "gateway.port=0 takes a free one" in capsys.readouterr().err
    find = __import__("importlib.util", fromlist=["find_spec"]).find_spec
    monkeypatch.setattr("importlib.util.find_spec", lambda name, *a: None if name == "uvicorn" else find(name, *a))
    for words in (["train", f"model={tiny_model_folder}", "agent=gateway"], ["serve", str(tiny_model_folder)]):
        assert main(words) == 2
        assert install_extra("serve") in capsys.readouterr().err


def test_a_run_hides_columns_that_its_rewards_use(tiny_model_folder: Path) -> None:
    from covey.algorithms import algorithm_schemas
    from covey.app.prepare import prepare
    from covey.config import compose

    def close(final_answer: str, expected: str = "") -> float:
        return 1.0

    words = [f"model={tiny_model_folder}", "agent=gateway", *SMALL]
    agent = prepare(compose(words, algorithms=algorithm_schemas()), reward=close).agent
    assert isinstance(agent, GatewayAgent) and agent.rules.hidden == {"expected"}


def test_serve_records_what_was_played(tiny_model_folder: Path) -> None:
    from openai import OpenAI

    words = ["serve", str(tiny_model_folder), "--folder", "played", "gateway.port=0", "rollout.max_tokens=8"]
    process = subprocess.Popen(
        [sys.executable, "-m", "covey.cli.main", *words],
        env=os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    assert process.stdout is not None
    try:
        printed = ""
        while "Ctrl-C ends it" not in printed:
            line = process.stdout.readline()
            assert line, printed
            printed += line
        url, token = _found(r"at (http\S+)/v1", printed), _found(r"token +(\S+)", printed)
        client = OpenAI(base_url=f"{url}/v1", api_key=f"{token}:mine", timeout=60)
        reply: Any = client.chat.completions.create(model="x", messages=[USER], logprobs=True).choices[0]
        client.with_options(api_key=f"{token}:left-open").chat.completions.create(model="x", messages=[USER])
        closed = client.post("/../episodes/current/reward", body={"reward": 0.5}, cast_to=object)
        assert closed == {"id": closed["id"], "closed": True, "rewards": {"reward": 0.5}}  # type: ignore[index]
        process.send_signal(signal.SIGINT)
        rest, _ = process.communicate(timeout=60)
    finally:
        process.kill()
    assert process.returncode == 0 and "2 episodes in played/episodes.jsonl" in rest
    scored, unscored = read_episodes(Path("played/episodes.jsonl"))
    (row,) = scored["rows"]
    assert row["logprobs"] == [entry.logprob for entry in reply.logprobs.content]
    assert scored["total_reward"] == 0.5 and scored["rewards"] == {"reward": 0.5}
    assert scored["messages"] == [USER, {"role": "assistant", "content": reply.message.content}]
    assert set(row["advantage"]) == {None} and scored["metadata"] == {"name": "mine"}
    assert unscored["total_reward"] is None and unscored["metadata"] == {"name": "left-open"}


def _found(pattern: str, text: str) -> str:
    match = re.search(pattern, text)
    assert match is not None, text
    return match[1]
