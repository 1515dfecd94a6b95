"""math-verify in separate processes, because sympy may never return.

    await verify(gold, reply, seconds)      True or False; None if it took longer and was killed

Each thread of a small pool owns one process, which imports math-verify once and then answers each line of JSON with
another. The process runs this file as a program, so it imports neither Covey nor torch. Time and memory are limited
twice: the owner kills the process group at the deadline, and the process sets itself a slightly later alarm in case its
owner is gone.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import json
import os
import re
import resource
import select
import signal
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from typing import Any

PROCESSES = max(1, min(8, os.cpu_count() or 1))
START_SECONDS = 120.0  # importing sympy on a busy machine
GRACE_SECONDS = 5.0  # between the deadline and the process's own alarm
MEMORY_BYTES = 4 * 2**30
MAX_LENGTH = 1000  # characters of a reply, plus four times the gold answer's; longer replies are not equal
MAX_DEPTH = 20  # nested brackets
WILD = re.compile(
    r"\^\{?\(?-?\d{5,}"  # an exponent of five digits
    r"|\^\{?[^{}^+-]{1,9}\^\{?[^{}^+-]{1,9}\^"  # a power of a power of a power
    r"|\d{4,}\)?!"  # the factorial of a four-digit number
    r"|!\)?!"
    r"|\d{400,}"
    r"|\^\{?10\^"  # a sum to a power of ten
)


class ProcessError(RuntimeError):
    """The process did not start. Never counted as a wrong answer."""


class _TimedOut(Exception):
    """Keeps a timeout out of the cache: the machine may be less busy next time."""


async def verify(gold: str, reply: str, seconds: float) -> bool | None:
    """Whether math-verify finds the two equal. Results are cached, because attempts at one task often agree."""
    if len(reply) > MAX_LENGTH + 4 * len(gold) or (wild(reply) and not wild(gold)):
        return False
    try:
        return await asyncio.get_running_loop().run_in_executor(_pool(), _verify, gold, reply, seconds)
    except _TimedOut:
        return None


def wild(text: str) -> bool:
    """Whether a computer algebra system would need very long for an expression, so that it would only be killed at the
    deadline and replaced. A wild reply is sent only if the gold answer is wild too."""
    depth = deepest = 0
    for bracket in re.finditer(r"[{(\[]|[])}]", text):
        depth += 1 if bracket[0] in "{([" else -1
        deepest = max(deepest, depth)
    return deepest > MAX_DEPTH or text.count("^") > 40 or WILD.search(text) is not None


@functools.cache
def _pool() -> ThreadPoolExecutor:
    return ThreadPoolExecutor(PROCESSES, thread_name_prefix="math-verify")


@functools.lru_cache(maxsize=10_000)
def _verify(gold: str, reply: str, seconds: float) -> bool:
    verdict = _own_process().ask({"gold": gold, "reply": reply, "seconds": seconds}, seconds)
    if verdict is None:
        raise _TimedOut
    return verdict


_THREAD = threading.local()


def _own_process() -> MathProcess:
    """This thread's process."""
    if not hasattr(_THREAD, "process"):
        _THREAD.process = MathProcess([sys.executable, "-P", os.path.abspath(__file__)])
    process: MathProcess = _THREAD.process
    return process


class MathProcess:
    """One process and its pipes. Used by one thread."""

    def __init__(self, command: list[str]) -> None:
        self.command = command
        self.running: subprocess.Popen[bytes] | None = None

    def ask(self, question: dict[str, Any], seconds: float) -> bool | None:
        """The verdict, or None if it took longer. A process that dies first, perhaps killed by the system, is replaced
        and the query repeated once; a second death is attributed to the expression."""
        for _ in range(2):
            if self.running is None or self.running.poll() is not None:
                self._start()
            assert self.running is not None and self.running.stdin is not None
            try:
                self.running.stdin.write(json.dumps(question).encode() + b"\n")
                self.running.stdin.flush()
                line = self._line(seconds)
            except (BrokenPipeError, EOFError):
                self.kill()
                continue
            if line is None:
                self.kill()
                return None
            return bool(json.loads(line)["equal"])
        return None  # died twice: caused by the expression, which the model wrote

    def kill(self) -> None:
        if self.running is not None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self.running.pid, signal.SIGKILL)
            self.running.wait()
            for pipe in (self.running.stdin, self.running.stdout):
                if pipe is not None:
                    pipe.close()
            self.running = None

    def _start(self) -> None:
        self.kill()
        self.running = subprocess.Popen(
            self.command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, start_new_session=True, bufsize=0
        )
        try:
            ready = self._line(START_SECONDS)
        except EOFError:
            ready = None
        if ready is None:
            self.kill()
            raise ProcessError("the process for math-verify did not start; its own message is above")

    def _line(self, seconds: float) -> bytes | None:
        """A line from the process; None if it took longer. Raises EOFError if the process has ended."""
        assert self.running is not None and self.running.stdout is not None
        pipe, end, line = self.running.stdout.fileno(), time.monotonic() + seconds, b""
        while not line.endswith(b"\n"):
            ready, _, _ = select.select([pipe], [], [], max(0.0, end - time.monotonic()))
            if not ready:
                return None
            part = os.read(pipe, 65536)
            if not part:
                raise EOFError
            line += part
        return line


def _serve() -> None:
    """The process's main loop: a line in, a line out, until the owner closes the pipe."""
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY_BYTES, MEMORY_BYTES))
    # Answers use the original standard output; anything that prints is redirected to standard error.
    answers = os.fdopen(os.dup(1), "wb", buffering=0)
    os.dup2(2, 1)
    import logging

    import math_verify

    logging.disable(logging.CRITICAL)
    answers.write(b"ready\n")
    for line in sys.stdin.buffer:
        question = json.loads(line)
        signal.setitimer(signal.ITIMER_REAL, question["seconds"] + GRACE_SECONDS)
        answers.write(json.dumps({"equal": _equal(math_verify, question["gold"], question["reply"])}).encode() + b"\n")
        signal.setitimer(signal.ITIMER_REAL, 0)


def _equal(math_verify: Any, gold: str, reply: str) -> bool:
    """math-verify's verdict. Its own time limits are off, because they do not interrupt everything; the owner's does.
    Each text is parsed whole or not at all: by default the package falls back to a part that it can parse, such as the
    fraction in `\\neq\\frac{1}{6}`."""
    whole: dict[str, Any] = {"extraction_config": [math_verify.LatexExtractionConfig(boxed_match_priority=0)]}
    whole |= {"extraction_mode": "first_match", "parsing_timeout": None, "raise_on_error": False}
    try:
        # A bare % would start a comment.
        boxes = ["\\boxed{" + re.sub(r"(?<!\\)%", r"\%", text) + "}" for text in (gold, reply)]
        parsed = [math_verify.parse(box, **whole) for box in boxes]
        return bool(math_verify.verify(*parsed, timeout_seconds=None, raise_on_error=False))
    except Exception:  # e.g. out of memory or recursion depth: not shown to be equal
        return False


if __name__ == "__main__":
    _serve()
