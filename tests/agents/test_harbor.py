"""agent=harbor: task folders in Harbor's layout, played in the sandbox, and with docker's commands recorded."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest

from covey.agents.packages import PackageAgent
from covey.agents.packages.harbor import HarborAdapter, read_reward, read_task
from covey.config.schema import SandboxConfig
from covey.errors import InputError
from covey.sandbox.tiers import describe
from covey.types import Episode
from tests.agents.scripted import Script, one_row, scored

ISOLATED = [finding.tier.name for finding in describe() if finding.works and not finding.tier.weak]
needs_isolation = pytest.mark.skipif(not ISOLATED, reason="no sandbox with folders of its own works here")
TEST = """
mkdir -p /logs/verifier
cd /app
if [ "$(cat sorted.txt)" = "$(sort data/numbers.txt)" ] && [ "$GREETING" = hello ]; then echo 1; else echo 0; fi \\
    > /logs/verifier/reward.txt
"""
DOCKERFILE = """# numbers to sort
FROM ubuntu:24.04
WORKDIR /app
ENV GREETING=hello
COPY data/ \\
    /app/data/
COPY hint.txt ./
"""


def write_task(folder: Path, *, test: str = TEST, dockerfile: str = DOCKERFILE) -> Path:
    files = {
        "task.toml": 'version = "1.0"\n[verifier]\ntimeout_sec = 20.0\n',
        "instruction.md": "Sort data/numbers.txt into sorted.txt.\n",
        "environment/Dockerfile": dockerfile,
        "environment/data/numbers.txt": "3\n1\n2\n",
        "environment/hint.txt": "sort",
        "tests/test.sh": test,
        "solution/solve.sh": "sort data/numbers.txt > sorted.txt",
    }
    for name, text in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text)
    return folder


def adapter(folder: Path, **options: Any) -> HarborAdapter:
    return HarborAdapter(str(folder), options, SandboxConfig(), 5.0)


def play(made: HarborAdapter, *replies: str, max_turns: int = 8) -> Episode:
    agent = PackageAgent(made.make, max_turns, made.seconds or 10.0, adapter=made)
    (task,) = agent.tasks()
    assert agent.functions == {} and agent.in_workers(None) is agent  # type: ignore[arg-type]
    return asyncio.run(scored(agent, task, Script(*replies, tokenizer=with_backticks())))


def with_backticks() -> Any:
    from tests.agents.scripted import with_braces

    tokenizer = with_braces()
    tokenizer.add_tokens([*"`$&@"])
    return tokenizer


def block(commands: str) -> str:
    return f"```bash\n{commands}\n```"


@needs_isolation
def test_a_task_is_solved_and_its_tests_run(tmp_path: Path) -> None:
    write_task(tmp_path / "sort")
    episode = play(adapter(tmp_path), f"Look first.\n{block('pwd; cat hint.txt; ls /tests; cat nothing')}",
                   block("sort data/numbers.txt > sorted.txt"), "Done.")  # fmt: skip
    assert episode.failure is None and one_row(episode)
    assert episode.rewards == {"given": 1.0, "given/no_reward": 0.0}
    assert episode.task.id == "sort" and "You have a shell in /app." in str(episode.task.messages[0]["content"])
    seen = [str(message["content"]) for message in episode.messages if message["role"] == "user"]
    assert seen[1] == "/app\nsortcat: nothing: No such file or directory\n\n[exit code 1]", "tests are not there yet"
    assert seen[2] == "[no output]"


@needs_isolation
def test_a_reward_that_the_model_writes_does_not_count(tmp_path: Path) -> None:
    write_task(tmp_path / "sort")
    cheat = "echo 1 > /logs/verifier/reward.txt; mkdir -p /logs/verifier; echo 1 > /logs/verifier/reward.txt"
    assert play(adapter(tmp_path), block(cheat), max_turns=1).rewards["given"] == 0.0, "out of turns is verified too"


@needs_isolation
def test_limits_of_commands_and_a_lost_shell(tmp_path: Path) -> None:
    write_task(tmp_path / "sort", test="true")
    made = HarborAdapter(str(tmp_path / "sort"), {}, SandboxConfig(), 0.5)
    slow = play(made, block("echo on; sleep 60"), block("seq 100000"), "Done.")
    seen = [str(message["content"]) for message in slow.messages if message["role"] == "user"]
    assert seen[1] == "on\n\n[stopped after 0.5 seconds]"
    assert "bytes left out]" in seen[2] and len(seen[2]) < 4100
    assert slow.rewards == {"given": 0.0, "given/no_reward": 1.0}, "the tests wrote none"
    lost = play(made, block("kill -9 $PPID"))
    assert lost.rewards == {"given": 0.0, "given/lost": 1.0}


def test_rewards_are_numbers_or_tables() -> None:
    assert read_reward("0.5\n") == {"reward": 0.5}
    assert read_reward('{"a": 1, "b": 0}') == {"reward": 0.5, "a": 1.0, "b": 0.0}
    assert read_reward('{"reward": 0.2, "b": 1}') == {"reward": 0.2, "b": 1.0}
    assert [read_reward(text) for text in ("", "passed", "NaN", "{}", '{"a": "x"}', "[1]")] == [None] * 6


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"dockerfile": "FROM x\nRUN apt-get install -y gcc\n"}, "Dockerfile, line 2: RUN needs a container"),
        ({"dockerfile": "FROM x\nCOPY --chown=1 hint.txt .\n"}, "COPY with flags"),
        ({"dockerfile": "FROM x\nCOPY ../task.toml .\n"}, "is not in"),
        ({"dockerfile": "FROM x\nWORKDIR /etc/app\n"}, "/etc is a system folder"),
        ({"test": "cd /app\npip install pytest\n"}, "test.sh, line 2: pip install needs the network"),
    ],
)
def test_what_needs_a_container_is_refused_by_name(tmp_path: Path, changes: dict[str, str], said: str) -> None:
    with pytest.raises(InputError, match=said):
        read_task(write_task(tmp_path / "task", **changes), local=True)


def test_folders_without_tasks_and_docker_without_docker(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(InputError, match=r"no task\.toml in it or in its folders"):
        adapter(tmp_path)
    write_task(tmp_path / "sort")
    with pytest.raises(InputError, match="unknown backend of agent=harbor  podman"):
        adapter(tmp_path, backend="podman")
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(InputError, match="backend=docker: no program docker on this machine\n  fix: start docker"):
        adapter(tmp_path, backend="docker")


# Records its words. `exec` runs the command here, with the container's folders below the working folder.
DOCKER = """#!/bin/bash
echo "$@" >> docker.log
here=$PWD
case $1 in
    info) exit ${DOCKER_INFO:-0};;
    run) mkdir -p root/app; echo 0123abcd;;
    cp) mkdir -p root$(echo $3 | cut -d: -f2); cp -r $2 root$(echo $3 | cut -d: -f2);;
    exec) shift 2; cd root/app; words=()
        for word in "$@"; do words+=("$(echo "$word" | sed "s# /\\(tests\\|logs\\)# $here/root/\\1#g")"); done
        "${words[@]}";;
esac
"""


def test_docker_builds_runs_verifies_and_removes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With a program that stands in for docker."""
    write_task(
        tmp_path / "tasks/Sort", test="cat answer.txt > ../logs/verifier/reward.txt", dockerfile="FROM x\nRUN y\n"
    )
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin/docker").write_text(DOCKER)
    (tmp_path / "bin/docker").chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path / 'bin'}:/usr/bin:/bin")
    monkeypatch.chdir(tmp_path)
    episode = play(adapter(tmp_path / "tasks", backend="docker"), block("echo 0.25 > answer.txt"), "Done.")
    assert episode.failure is None, episode.failure
    assert episode.rewards == {"given": 0.25, "given/no_reward": 0.0}
    log = (tmp_path / "docker.log").read_text().splitlines()
    context = tmp_path / "tasks/Sort/environment"
    assert log[:3] == [
        "info",
        f"build --quiet --tag covey-harbor-sort {context}",
        "run --detach --rm covey-harbor-sort sleep infinity",
    ]
    assert log[3] == "exec 0123abcd timeout --signal=KILL 5 bash -c echo 0.25 > answer.txt"
    assert f"cp {tmp_path / 'tasks/Sort/tests'}/. 0123abcd:/tests" in log
    assert "exec 0123abcd timeout --signal=KILL 20 bash -c bash /tests/test.sh" in log
    assert log[-1] == "rm --force 0123abcd"
    monkeypatch.setenv("DOCKER_INFO", "1")
    with pytest.raises(InputError, match="backend=docker: docker does not work here"):
        adapter(tmp_path / "tasks", backend="docker")
