"""A warm parent process: it has imported everything and forks for each command, so that runs start quickly.

    with Nest() as nest:
        child = nest.start(folder, ["train", ...], plan)
        child.signal(signal.SIGTERM)
        child.wait(60)

It starts no thread and computes nothing before it forks, so a fork behaves like a new process. A command runs in its
own process group, in `folder`; its output is appended to `folder/log.txt`. The plan defines its faults (`injure.py`).
"""

from __future__ import annotations

import json
import os
import select
import signal
import subprocess
import sys
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from types import TracebackType
from typing import Any

from kit.injure import Plan, injure

ROOT = Path(__file__).parent.parent.parent
WARM = (
    "covey.trainer",
    "covey.cli.train",
    "covey.app.sft",
    "covey.training.run",
    "covey.training.sft",
    "covey.rollout.embedded",
)
WARM += ("covey.rollout.asynchronous", "covey.learner.critic", "safetensors.torch", "transformers", "matplotlib.pyplot")
WARM += ("transformers.models.llama.modeling_llama", "transformers.models.auto.modeling_auto", "peft")


class Child:
    """A running command."""

    def __init__(self, nest: Nest, pid: int, folder: Path) -> None:
        self.nest, self.pid, self.folder = nest, pid, folder
        self._handle = os.pidfd_open(pid)
        self._code: int | None = None

    def running(self, seconds: float = 0.0) -> bool:
        """Whether it still runs after `seconds`."""
        return self._code is None and not select.select([self._handle], [], [], seconds)[0]

    def signal(self, number: int) -> bool:
        """Send a signal. False if the process has ended."""
        if not self.running():
            return False
        signal.pidfd_send_signal(self._handle, number)
        return True

    def wait(self, seconds: float = 120.0) -> int:
        """Its exit code; negative: the signal that ended it."""
        if self._code is None:
            if self.running(seconds):
                with suppress(ProcessLookupError):
                    os.killpg(self.pid, signal.SIGKILL)
                raise TimeoutError(f"still running after {seconds:g} s: {self.log()[-3000:]}")
            self._code = self.nest.ask({"reap": self.pid})["code"]
            os.close(self._handle)
        return self._code

    def log(self) -> str:
        return (self.folder / "log.txt").read_text(errors="replace")


class Nest:
    def __init__(self) -> None:
        paths = [str(ROOT / "src"), str(ROOT / "benchmarks"), *filter(None, [os.environ.get("PYTHONPATH")])]
        environment = os.environ | {"PYTHONPATH": os.pathsep.join(paths), "TOKENIZERS_PARALLELISM": "false"}
        self._process = subprocess.Popen(
            [sys.executable, "-m", "kit.nest"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env=environment,
            text=True,
        )
        self.ask({"ready": True})

    def start(self, folder: Path, words: Sequence[str], plan: Plan | None = None) -> Child:
        request = {"folder": str(folder), "words": list(words), "plan": asdict(plan or Plan())}
        return Child(self, self.ask(request)["pid"], folder)

    def run(self, folder: Path, words: Sequence[str], plan: Plan | None = None) -> int:
        return self.start(folder, words, plan).wait()

    def ask(self, request: dict[str, Any]) -> dict[str, Any]:
        assert self._process.stdin is not None and self._process.stdout is not None
        print(json.dumps(request), file=self._process.stdin, flush=True)
        answer: dict[str, Any] = json.loads(self._process.stdout.readline())
        return answer

    def close(self) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait(30)

    def __enter__(self) -> Nest:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, t: TracebackType | None) -> None:
        self.close()


# --- the other side ------------------------------------------------------------------------------------------------


def serve() -> None:
    import importlib

    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # output of libraries must not mix with answers
    for name in WARM:
        importlib.import_module(name)
    _compose()
    for line in sys.stdin:
        request = json.loads(line)
        if "reap" in request:
            answer = {"code": os.waitstatus_to_exitcode(os.waitpid(request["reap"], 0)[1])}
        elif "words" in request:
            answer = {"pid": _fork(request)}
        else:
            answer = {}
        print(json.dumps(answer), file=answers, flush=True)


def _compose() -> None:
    """Compose a configuration once, to fill the caches that every fork inherits."""
    from covey.app.compose import compose_command
    from covey.cli.parse import parse

    compose_command(parse(["algorithm=grpo", "loop.total_steps=1"], switches=(), values=()))


def _fork(request: dict[str, Any]) -> int:
    pid = os.fork()
    if pid:
        return pid
    code = 70
    try:
        os.setpgid(0, 0)
        os.chdir(request["folder"])
        log = os.open("log.txt", os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o666)
        null = os.open(os.devnull, os.O_RDONLY | os.O_CLOEXEC)
        for source, target in ((null, 0), (log, 1), (log, 2)):
            os.dup2(source, target)
        os.closerange(3, 64)  # the nest's own
        code = _command(request)
    except SystemExit as error:
        code = int(error.code or 0)
    except BaseException:
        import traceback

        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


def _command(request: dict[str, Any]) -> int:
    from covey.cli.main import main

    injure(Plan(**request["plan"]))
    return main(request["words"])


if __name__ == "__main__":
    serve()
