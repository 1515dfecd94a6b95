"""Shells of one episode, for tasks in containers: in Covey's sandbox, or in a docker container.

The sandbox has this machine's programs and no network. Folders of the task at the root (/app, /tests) are links into
its private /tmp. Every block of commands is a cell of a session, so processes that it leaves are killed. For the tests,
the files move to a new sandbox, so that no program of the episode can interfere with them.
"""

from __future__ import annotations

import asyncio
import base64
import io
import json
import shutil
import tarfile
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Protocol

from covey.errors import EpisodeError, InputError
from covey.sandbox import Sandbox
from covey.sandbox.sandbox import Session

TMP = "/tmp"  # noqa: S108 - inside the sandbox
CHARACTERS = 4000  # of an output: the first and the last half
SLACK_SECONDS = 5.0  # of a cell, besides the commands in it

RUN = """
import json, os, subprocess
with open("/tmp/.output", "wb") as file:
    try:
        code = subprocess.run(["bash", "-c", {command!r}], cwd={workdir!r},
            env={{**os.environ, "PWD": {workdir!r}, **{env!r}}}, stdin=subprocess.DEVNULL,
            stdout=file, stderr=file, timeout={seconds}).returncode
    except subprocess.TimeoutExpired:
        code = None
with open("/tmp/.output", "rb") as file:
    size = os.fstat(file.fileno()).st_size
    head = file.read({half})
    file.seek(max(len(head), size - {half}))
    tail = file.read()
left = size - len(head) - len(tail)
gap = b"\\n[%d bytes left out]\\n" % left if left else b""
print(json.dumps([code, (head + gap + tail).decode(errors="replace")]))
"""
UNPACK = """
import base64, io, os, tarfile
os.makedirs({target!r}, exist_ok=True)
tarfile.open(fileobj=io.BytesIO(base64.b64decode({data!r}))).extractall({target!r}, filter="tar")
"""
PACK = """
import base64, io, tarfile
packed = io.BytesIO()
with tarfile.open(fileobj=packed, mode="w:gz") as tar:
    tar.add("/tmp", ".", filter=lambda one: None if one.name in ("./tests", "./logs", "./.output") else one)
print(base64.b64encode(packed.getvalue()).decode())
"""


class Shell(Protocol):
    lost: bool  # the episode's files are gone

    async def start(self) -> None: ...

    async def run(self, command: str, seconds: float) -> tuple[int | None, str]:
        """The exit code, None if the commands took too long, and the output, shortened."""
        ...

    async def add(self, folder: Path, target: str) -> None: ...

    async def prepare_verification(self) -> None: ...

    async def close(self) -> None: ...


class ShellError(EpisodeError):
    """A shell could not be started, or files not be copied."""

    cause = "sandbox"


class LocalShell:
    def __init__(
        self,
        sandbox: Sandbox,
        copies: Sequence[tuple[Path, str]],
        workdir: str,
        env: Mapping[str, str],
        links: Sequence[str],
    ) -> None:
        limits = replace(sandbox.limits, output_bytes=2 * sandbox.limits.disk_mb * 2**20)  # room for PACK
        self.sandbox = replace(sandbox, limits=limits, links=tuple(links))
        self.copies, self.workdir, self.env, self.links = copies, workdir, dict(env), links
        self.session: Session | None = None
        self.lost = False

    async def start(self) -> None:
        self.session = await self.sandbox.session()
        folders = [f"{TMP}{link}" for link in self.links]
        await self._cell(f"import os\nfor path in {[*folders, self.workdir]!r}: os.makedirs(path, exist_ok=True)")
        for path, target in self.copies:
            await self.add(path, target)

    async def run(self, command: str, seconds: float) -> tuple[int | None, str]:
        assert self.session is not None
        half = CHARACTERS // 2
        cell = RUN.format(command=command, workdir=self.workdir, env=self.env, seconds=seconds, half=half)
        outcome = await self.session.execute(cell, seconds + SLACK_SECONDS)
        if outcome.killed or outcome.restarted or outcome.exit_code != 0:
            self.lost = True
            return None, f"[the shell was ended: {outcome.killed or 'its process died'}]"
        code, text = json.loads(outcome.stdout.splitlines()[-1])
        return code, text if code is not None else f"{text}\n[stopped after {seconds:g} seconds]"

    async def add(self, path: Path, target: str) -> None:
        """Copy a folder to `target`, or a file."""
        packed = io.BytesIO()
        with tarfile.open(fileobj=packed, mode="w:gz") as tar:
            tar.add(path, "." if path.is_dir() else Path(target).name)
        await self._unpack(base64.b64encode(packed.getvalue()).decode(), target if path.is_dir() else _parent(target))

    async def prepare_verification(self) -> None:
        assert self.session is not None
        if self.lost:
            return
        outcome = await self.session.execute(PACK)
        await self.session.close()
        self.session, self.copies = None, ()
        await self.start()
        if outcome.ok:  # otherwise the model made its files unreadable, and the tests see none
            await self._unpack(outcome.stdout.strip(), TMP)

    async def _unpack(self, data: str, target: str) -> None:
        await self._cell(UNPACK.format(data=data, target=target))

    async def _cell(self, code: str) -> None:
        assert self.session is not None
        outcome = await self.session.execute(code)
        if not outcome.ok:
            raise ShellError(
                f"files cannot be copied to the sandbox: {outcome.killed or outcome.stderr.strip()[-300:]}"
            )

    async def close(self) -> None:
        if self.session is not None:
            await self.session.close()


def _parent(target: str) -> str:
    return str(Path(target).parent)


# -- Docker ------------------------------------------------------------------------------------------------------------


def check_docker() -> None:
    """An InputError if docker is not usable."""
    import subprocess

    fix = "fix: start docker, or agent.environment_options.backend=local"
    if shutil.which("docker") is None:
        raise InputError(f"backend=docker: no program docker on this machine\n  {fix}")
    done = subprocess.run(["docker", "info"], capture_output=True, text=True, timeout=30, check=False)
    if done.returncode != 0:
        raise InputError(f"backend=docker: docker does not work here ({done.stderr.strip()[-200:]})\n  {fix}")


class DockerShell:
    def __init__(self, context: Path, image: str) -> None:
        self.context, self.image = context, image
        self.container = ""
        self.lost = False

    async def start(self) -> None:
        await self._docker("build", "--quiet", "--tag", self.image, str(self.context))
        self.container = await self._docker("run", "--detach", "--rm", self.image, "sleep", "infinity")

    async def run(self, command: str, seconds: float) -> tuple[int | None, str]:
        limited = ("timeout", "--signal=KILL", f"{seconds:g}", "bash", "-c", command)
        code, text = await _output("docker", "exec", self.container, *limited)
        if code == 137:
            return None, f"{_short(text)}\n[stopped after {seconds:g} seconds]"
        return code, _short(text)

    async def add(self, path: Path, target: str) -> None:
        await self._docker("cp", f"{path}/." if path.is_dir() else str(path), f"{self.container}:{target}")

    async def prepare_verification(self) -> None:
        """The tests run in the same container, as in Harbor."""
        await self._docker("exec", self.container, "mkdir", "-p", "/tests", "/logs")

    async def close(self) -> None:
        if self.container:
            await self._docker("rm", "--force", self.container)

    async def _docker(self, *words: str) -> str:
        code, text = await _output("docker", *words)
        if code != 0:
            raise ShellError(f"docker {words[0]} failed: {text.strip()[-300:]}")
        return text.strip()


async def _output(*words: str) -> tuple[int, str]:
    process = await asyncio.create_subprocess_exec(
        *words, stdin=asyncio.subprocess.DEVNULL, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.STDOUT
    )
    try:
        out, _ = await process.communicate()
    except BaseException:
        process.kill()
        raise
    assert process.returncode is not None
    return process.returncode, out.decode(errors="replace")


def _short(text: str) -> str:
    half = CHARACTERS // 2
    left = len(text) - CHARACTERS
    return text if left <= 0 else f"{text[:half]}\n[{left} characters left out]\n{text[-half:]}"
