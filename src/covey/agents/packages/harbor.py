"""agent=harbor: tasks in containers, in the layout of Harbor and Terminal-Bench 2.

    FOLDER/TASK/instruction.md     the question
                task.toml          time limits
                environment/       a Dockerfile and its files
                tests/test.sh      writes /logs/verifier/reward.txt (a number) or reward.json (numbers by name)
                solution/          not used

`agent.environment` is FOLDER, or one TASK. The model works in a shell: each reply has one block of commands,
whose output it sees, and a reply without a block ends the task. Then the tests are copied in and run. Options:

    backend    local: Covey's sandbox with this machine's programs, without network (`shells.py`); docker: a container
"""

from __future__ import annotations

import json
import math
import re
import tomllib
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from covey.agents.packages import take_options
from covey.agents.packages.shells import TMP, DockerShell, LocalShell, Shell, check_docker
from covey.config.schema import SandboxConfig
from covey.errors import InputError, unknown
from covey.protocols import Done
from covey.sandbox import Sandbox
from covey.types import Task

VERIFIER_SECONDS = 600.0  # of a task.toml without a limit
MARGIN_SECONDS = 60.0  # to copy files, besides the tests' own limit
BUILD_SECONDS = 600.0  # of a docker image
BLOCK = re.compile(r"```(?:bash|sh|shell)[ \t]*\n(.*?)```", re.DOTALL)
WRITTEN = ("reward.txt", "reward.json")
NETWORK = re.compile(r"\b(apt-get|apt|curl|wget|uvx|uv|pip3?\s+install|npm|git clone)\b")
IGNORED = ("FROM", "LABEL", "CMD", "EXPOSE")
HOW = """You have a shell in {workdir}. To run commands, reply with one block:
```bash
ls
```
You will see its output. When the task is done, reply without a block."""


@dataclass(frozen=True)
class HarborTask:
    folder: Path
    instruction: str
    verifier_seconds: float
    workdir: str = "/app"
    env: dict[str, str] = field(default_factory=dict)
    copies: tuple[tuple[Path, str], ...] = ()  # files or folders, and their targets, for the local backend

    @property
    def question(self) -> str:
        return f"{self.instruction.strip()}\n\n{HOW.format(workdir=self.workdir)}"


class HarborAdapter:
    in_process = True  # everything that takes time is in the sandbox or in docker

    def __init__(self, name: str, options: dict[str, Any], sandbox: SandboxConfig, seconds: float) -> None:
        """`seconds`: the limit of one block of commands."""
        (backend,) = take_options("harbor", options, "backend")
        self.local = (backend or "local") == "local"
        if not self.local and backend != "docker":
            raise unknown("backend of agent=harbor", str(backend), ("local", "docker"))
        self.command_seconds = seconds
        self.by_id = {folder.name: read_task(folder, local=self.local) for folder in _task_folders(Path(name))}
        longest = max(task.verifier_seconds for task in self.by_id.values())
        self.seconds: float | None = longest + seconds + MARGIN_SECONDS + (0.0 if self.local else BUILD_SECONDS)
        if self.local:
            self.sandbox = Sandbox.of(sandbox)
            if self.sandbox.tier.weak:
                raise InputError(
                    f"agent=harbor needs folders such as /app, and sandbox.tier={self.sandbox.tier.name} has none\n"
                    "  fix: a stronger tier (covey doctor), or agent.environment_options.backend=docker"
                )
        else:
            check_docker()

    def tasks(self, size: int | None) -> tuple[Task, ...]:
        return tuple(
            Task(id, ({"role": "user", "content": task.question},), place=str(task.folder))
            for id, task in list(self.by_id.items())[:size]
        )

    def make(self) -> HarborEpisode:
        return HarborEpisode(self)

    def shell(self, task: HarborTask) -> Shell:
        if not self.local:
            return DockerShell(task.folder / "environment", f"covey-harbor-{task.folder.name}".lower())
        return LocalShell(self.sandbox, task.copies, task.workdir, task.env, links(task))


class HarborEpisode:
    def __init__(self, adapter: HarborAdapter) -> None:
        self.adapter = adapter
        self.shell: Shell | None = None

    async def reset(self, task: Task) -> None:
        self.task = self.adapter.by_id[task.id]
        self.shell = self.adapter.shell(self.task)
        await self.shell.start()

    async def step(self, reply: str) -> str | Done:
        assert self.shell is not None
        if (block := BLOCK.search(reply)) is None:
            return await self._verify()
        code, output = await self.shell.run(block[1], self.adapter.command_seconds)
        if code is None and self.shell.lost:
            return Done({"reward": 0.0, "lost": 1.0}, ({"role": "user", "content": output},))
        return output + (f"\n[exit code {code}]" if code else "") or "[no output]"

    async def end(self, reason: str) -> Done:
        return await self._verify()

    async def _verify(self) -> Done:
        """Run the tests. Tests that write no reward count as not passed, so that no command can prevent a verdict."""
        assert self.shell is not None
        await self.shell.prepare_verification()
        await self.shell.add(self.task.folder / "tests", "/tests")
        await self.shell.run("rm -rf /logs/*; mkdir -p /logs/verifier", self.adapter.command_seconds)
        await self.shell.run("bash /tests/test.sh", self.task.verifier_seconds)
        table: dict[str, float | None] = {"reward": 0.0, "no_reward": 1.0}
        for name in WRITTEN:
            code, text = await self.shell.run(f"cat /logs/verifier/{name}", self.adapter.command_seconds)
            if code == 0 and (found := read_reward(text)) is not None:
                table = {**found, "no_reward": 0.0}
        return Done(table)

    async def aclose(self) -> None:
        if self.shell is not None:
            await self.shell.close()


def read_reward(text: str) -> dict[str, float] | None:
    """The table of a reward file. Without the name `reward`, the mean of the numbers is trained on."""
    try:
        value = json.loads(text)
    except ValueError:
        return None
    numbers = value if isinstance(value, dict) else {"reward": value}
    if not numbers or not all(isinstance(n, (int, float)) and math.isfinite(n) for n in numbers.values()):
        return None
    return {"reward": sum(numbers.values()) / len(numbers), **{key: float(n) for key, n in numbers.items()}}


# -- Reading a task ----------------------------------------------------------------------------------------------------


def _task_folders(path: Path) -> list[Path]:
    path = path.expanduser()
    folders = [path] if (path / "task.toml").is_file() else sorted(file.parent for file in path.glob("*/task.toml"))
    if not folders:
        raise InputError(
            f"agent.environment={path}: no task.toml in it or in its folders\n  fix: name a folder of tasks"
        )
    return [folder.resolve() for folder in folders]


def read_task(folder: Path, *, local: bool) -> HarborTask:
    for name in ("instruction.md", "tests/test.sh", "environment/Dockerfile"):
        if not (folder / name).is_file():
            raise InputError(f"{folder}: no {name}")
    try:
        settings = tomllib.loads((folder / "task.toml").read_text())
    except tomllib.TOMLDecodeError as error:
        raise InputError(f"{folder / 'task.toml'}: not TOML ({error})") from error
    seconds = float(settings.get("verifier", {}).get("timeout_sec", VERIFIER_SECONDS))
    instruction = (folder / "instruction.md").read_text()
    if not local:
        return HarborTask(folder, instruction, seconds, workdir=_workdir(folder))
    for number, line in enumerate((folder / "tests/test.sh").read_text().splitlines(), start=1):
        if (found := NETWORK.search(line.partition("#")[0])) is not None:
            raise _needs_container(f"{folder / 'tests/test.sh'}, line {number}: {found[1]} needs the network")
    workdir, env, copies = "/app", dict[str, str](), list[tuple[Path, str]]()
    for place, name, rest in _instructions(folder / "environment/Dockerfile"):
        match name:
            case "WORKDIR":
                workdir = rest
            case "ENV":
                env |= _env(place, rest)
            case "COPY":
                copies += _copies(place, folder / "environment", rest, workdir)
            case _ if name not in IGNORED:
                raise _needs_container(f"{place}: {name} needs a container")
    task = HarborTask(folder, instruction, seconds, workdir, env, tuple(copies))
    for link in links(task):
        if Path(link).exists() and link not in ("/home", "/root", "/app", "/workspace", "/tests", "/logs"):
            raise _needs_container(f"{folder}: {link} is a system folder")
    return task


def links(task: HarborTask) -> tuple[str, ...]:
    """The folders at the root that the sandbox needs."""
    targets = (task.workdir, "/tests", "/logs", *(target for _, target in task.copies))
    tops = {"/" + target.strip("/").split("/")[0] for target in targets}
    return tuple(sorted(tops - {TMP}))


def _needs_container(text: str) -> InputError:
    return InputError(f"{text}\n  fix: agent.environment_options.backend=docker")


def _instructions(path: Path) -> Iterator[tuple[str, str, str]]:
    """The place, the name and the arguments of each instruction of a Dockerfile."""
    joined, start = "", 0
    for number, line in enumerate(path.read_text().splitlines(), start=1):
        if not joined:
            start = number
        if line.lstrip().startswith("#"):
            continue
        joined += line.strip()
        if joined.endswith("\\"):
            joined = joined[:-1] + " "
        elif joined:
            name, _, rest = joined.partition(" ")
            yield f"{path}, line {start}", name.upper(), rest.strip()
            joined = ""


def _workdir(folder: Path) -> str:
    found = [rest for _, name, rest in _instructions(folder / "environment/Dockerfile") if name == "WORKDIR"]
    return found[-1] if found else "/"


def _env(place: str, rest: str) -> dict[str, str]:
    pairs = [word.partition("=") for word in rest.split()]
    if not all(equals for _, equals, _ in pairs) or '"' in rest or "$" in rest:
        raise _needs_container(f"{place}: ENV with quotes, variables or spaces needs a container")
    return {name: value for name, _, value in pairs}


def _copies(place: str, context: Path, rest: str, workdir: str) -> list[tuple[Path, str]]:
    *sources, target = rest.split()
    if not sources or rest.startswith(("[", "--")) or any(char in rest for char in "*?$"):
        raise _needs_container(f"{place}: COPY with flags, patterns or variables needs a container")
    into = target if target.startswith("/") else f"{workdir}/{target}"
    found = []
    for source in sources:
        path = (context / source).resolve()
        if not path.is_relative_to(context.resolve()) or not path.exists():
            raise InputError(f"{place}: {source} is not in {context}")
        keep_name = path.is_file() and (target.endswith(("/", ".")) or len(sources) > 1)
        found.append((path, f"{into.rstrip('/.')}/{path.name}" if keep_name else into.removesuffix("/.")))
    return found
