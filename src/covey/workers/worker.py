"""A worker: one process, one call at a time, until its socket closes.

It leads a process group, ends with the template process, prints into a pipe and has nothing on its standard input.
Coroutine functions run on one event loop, which goes on while the worker waits for the next call.

    state          a dict, empty at first, that lasts for a session; functions with a parameter `state` are given it
    left behind    child processes that a call, or a session, leaves running: the worker asks to be killed with them
"""

from __future__ import annotations

import asyncio
import ctypes
import faulthandler
import inspect
import io
import os
import pickle
import resource
import signal
import socket
import sys
import traceback
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import Any, NoReturn

from covey.errors import error_message, first_error, user_location
from covey.workers.link import CHUNK, DONE, LENGTH, RAISED, Inbox, framed

LONGEST = 20_000  # characters of a message or traceback
KEEP = LENGTH.size + 1  # where an answer says whether the worker may go on
PR_SET_PDEATHSIG, PR_SET_CHILD_SUBREAPER = 1, 36

Functions = Mapping[str, Callable[..., Any]]


def run_worker(connection: socket.socket, output: int, functions: Functions) -> NoReturn:
    _settle_in(output)
    connection.setblocking(False)
    Worker(connection, functions).serve()
    os._exit(0)


# --- the process ---------------------------------------------------------------------------------------------------


def _settle_in(output: int) -> None:
    with suppress(OSError):  # the template does the same: whoever comes first
        os.setpgid(0, 0)
    template = os.getppid()
    _prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != template:
        os._exit(1)
    adopt_orphans()
    faulthandler.disable()  # or it would take its own handlers, which are reset here, for being there
    reset_signals()
    outlast_sigterm()
    # A function may end processes of its own with it, also one that it has forked a moment ago.
    os.register_at_fork(before=_hold_sigterm, after_in_parent=_take_sigterm, after_in_child=_end_with_sigterm)
    os.dup2(output, 1)
    os.dup2(output, 2)
    os.close(output)
    sys.stdin = io.TextIOWrapper(io.FileIO(0, closefd=False))  # what was there may be a notebook's, or a test's
    sys.stdout = io.TextIOWrapper(io.FileIO(1, "w", closefd=False), errors="replace", line_buffering=True)
    sys.stderr = io.TextIOWrapper(io.FileIO(2, "w", closefd=False), errors="replace", line_buffering=True)
    faulthandler.enable(sys.stderr)  # a crash tells where
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    with suppress(OSError):  # a worker that eats all memory goes before the training process does
        Path("/proc/self/oom_score_adj").write_text("500")
    asyncio._set_running_loop(None)
    with suppress(AttributeError):  # something else may go by these names
        _part_ways()


def _part_ways() -> None:
    """Forks begin alike: random numbers must not be. Thread pools did not survive the fork: torch works with one."""
    if (numpy := sys.modules.get("numpy")) is not None:
        numpy.random.seed()
    if (torch := sys.modules.get("torch")) is not None:
        torch.set_num_threads(1)
        torch.seed()


def reset_signals() -> None:
    signal.set_wakeup_fd(-1)
    for number in signal.valid_signals() - {signal.SIGKILL, signal.SIGSTOP, signal.SIGPIPE, signal.SIGXFSZ}:
        with suppress(OSError, ValueError):  # the C library keeps some to itself
            signal.signal(number, signal.default_int_handler if number == signal.SIGINT else signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_SETMASK, ())


def outlast_sigterm() -> None:
    """Slurm and systemd send it to every process of a job. Whoever trains ends with a checkpoint, and needs its workers
    until then. A handler and not SIG_IGN: programs that a function starts do not inherit it."""
    signal.signal(signal.SIGTERM, lambda *_: None)


def _hold_sigterm() -> None:
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})


def _take_sigterm() -> None:
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGTERM})


def _end_with_sigterm() -> None:
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    _take_sigterm()


def adopt_orphans() -> None:
    """Processes further down whose parent has ended become children of this one. Linux only."""
    _prctl(PR_SET_CHILD_SUBREAPER, 1)


def _prctl(option: int, value: int) -> None:
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(option, value, 0, 0, 0)


# --- its work ------------------------------------------------------------------------------------------------------


class Worker:
    def __init__(self, connection: socket.socket, functions: Functions) -> None:
        self.connection = connection
        self.functions = functions
        self.state: dict[str, Any] = {}
        self.loop = asyncio.new_event_loop()
        self.pid = os.getpid()

    def serve(self) -> None:
        answer = framed(bytes([DONE, True]), None)  # ready
        while True:
            self.run(self.loop.sock_sendall(self.connection, answer))
            order = self.run(self.receive())
            if order is None:
                return
            answer = self.answer(order)

    def run(self, coroutine: Any) -> Any:
        return self.loop.run_until_complete(coroutine)

    async def receive(self) -> memoryview | None:
        inbox = Inbox()
        while data := await self.loop.sock_recv(self.connection, CHUNK):
            if (body := inbox.feed(data)) is not None:
                return body
        return None

    def answer(self, order: memoryview) -> memoryview:
        """Whatever goes wrong is an answer too."""
        try:
            what, *rest = pickle.loads(order[1:])  # noqa: S301 - of the process that this one is a fork of
            answer = _framed(getattr(self, what)(*rest))
        except BaseException as error:
            answer = framed(bytes([RAISED, True]), _told(error))
        if os.getpid() != self.pid:  # a fork of the function's own that came back from it
            os._exit(0)
        if order[0] and not self.tidy():
            answer[KEEP] = False
        return answer

    def call(self, name: str, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
        function = self.functions[name]
        if _takes_state(function):
            kwargs.setdefault("state", self.state)
        return self.perform(function, args, kwargs)

    def make(self, key: str, name: str, args: Sequence[Any], kwargs: dict[str, Any]) -> None:
        self.state[key] = self.call(name, args, kwargs)

    def method(self, key: str, name: str, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
        return self.perform(getattr(self.state[key], name), args, kwargs)

    def nothing(self) -> None:
        """For the sake of tidying up."""

    def perform(self, function: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        value = function(*args, **kwargs)
        return self.run(_awaited(value)) if inspect.isawaitable(value) else value

    def tidy(self) -> bool:
        """Close and forget what a session, or a call, left. Whether the worker is as good as new."""
        values = [self.state.popitem()[1] for _ in range(len(self.state))]
        try:
            for value in values:
                if (close := getattr(value, "aclose", None) or getattr(value, "close", None)) is not None:
                    self.perform(close, (), {})
            if tasks := asyncio.all_tasks(self.loop):
                for task in tasks:
                    task.cancel()
                self.run(asyncio.wait(tasks))
        except BaseException:
            return False
        return not _has_children()


async def _awaited(value: Awaitable[Any]) -> Any:
    return await value


def _takes_state(function: Callable[..., Any]) -> bool:
    try:
        return "state" in inspect.signature(function).parameters
    except (TypeError, ValueError):
        return False


def _has_children() -> bool:
    try:
        while os.waitpid(-1, os.WNOHANG)[0]:
            pass
    except ChildProcessError:
        return False
    return True


def _framed(value: Any) -> memoryview:
    try:
        return framed(bytes([DONE, True]), value)
    except Exception as error:
        raise TypeError(f"its result, a {type(value).__name__}, cannot be sent back: {error}") from error


def _told(error: BaseException) -> tuple[str, str, str, str]:
    """Type, message, traceback and place, each of a length that can be sent."""
    error = first_error(error)
    try:
        lines = "".join(traceback.format_exception(type(error), error, _below(error.__traceback__)))
    except Exception:  # of the user's class, which may refuse to be printed
        lines = ""
    return type(error).__name__, error_message(error)[:LONGEST], lines[-LONGEST:], user_location(error)[:LONGEST]


def _below(trace: TracebackType | None) -> TracebackType | None:
    """Without the frames of this file."""
    while trace is not None and trace.tb_frame.f_code.co_filename == __file__:
        trace = trace.tb_next
    return trace
