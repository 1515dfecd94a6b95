"""The worker process: runs one call at a time until its socket closes.

It leads a process group, ends with the template process, prints into a pipe and has an empty standard input. Coroutine
functions run on one event loop, which also runs while the worker waits for the next call.

`state` is a dict that lasts for a session; functions with a parameter `state` receive it. If a call or session leaves
child processes running, the worker asks to be killed together with them.
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
from covey.workers.handle import CHUNK, DONE, LENGTH, RAISED, FrameReader, encode_frame

MAX_TEXT = 20_000  # characters of a message or traceback
KEEP = LENGTH.size + 1  # index of the byte of an answer that tells whether to keep the worker
PR_SET_PDEATHSIG, PR_SET_CHILD_SUBREAPER = 1, 36

Functions = Mapping[str, Callable[..., Any]]


def run_worker(connection: socket.socket, output: int, functions: Functions) -> NoReturn:
    _prepare_process(output)
    connection.setblocking(False)
    Worker(connection, functions).serve()
    os._exit(0)


# -- The process -----------------------------------------------------------------------------------------------------


def _prepare_process(output: int) -> None:
    with suppress(OSError):  # the template does the same: the first one succeeds
        os.setpgid(0, 0)
    template = os.getppid()
    _prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != template:
        os._exit(1)
    adopt_orphans()
    faulthandler.disable()  # or it would rely on its signal handlers, which are reset here
    reset_signals()
    ignore_sigterm()
    # A function may send SIGTERM to its own processes, also to one that it has just forked.
    os.register_at_fork(before=_block_sigterm, after_in_parent=_unblock_sigterm, after_in_child=_restore_sigterm)
    os.dup2(output, 1)
    os.dup2(output, 2)
    os.close(output)
    sys.stdin = io.TextIOWrapper(io.FileIO(0, closefd=False))  # the old object may belong to a notebook or a test
    sys.stdout = io.TextIOWrapper(io.FileIO(1, "w", closefd=False), errors="replace", line_buffering=True)
    sys.stderr = io.TextIOWrapper(io.FileIO(2, "w", closefd=False), errors="replace", line_buffering=True)
    faulthandler.enable(sys.stderr)  # prints the stack of a crash
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    with suppress(OSError):  # if memory runs out, a worker is killed before the training process
        Path("/proc/self/oom_score_adj").write_text("500")
    asyncio._set_running_loop(None)
    with suppress(AttributeError):  # modules of these names may be something else
        _reseed()


def _reseed() -> None:
    """Forks start with equal random generators: reseed them. Thread pools do not survive a fork: torch gets one
    thread."""
    if (numpy := sys.modules.get("numpy")) is not None:
        numpy.random.seed()
    if (torch := sys.modules.get("torch")) is not None:
        torch.set_num_threads(1)
        torch.seed()


def reset_signals() -> None:
    signal.set_wakeup_fd(-1)
    for number in signal.valid_signals() - {signal.SIGKILL, signal.SIGSTOP, signal.SIGPIPE, signal.SIGXFSZ}:
        with suppress(OSError, ValueError):  # the C library reserves some
            signal.signal(number, signal.default_int_handler if number == signal.SIGINT else signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_SETMASK, ())


def ignore_sigterm() -> None:
    """Slurm and systemd send SIGTERM to every process of a job. Training then writes a last checkpoint and needs its
    workers until that is done. A handler instead of SIG_IGN, because started programs do not inherit it."""
    signal.signal(signal.SIGTERM, lambda *_: None)


def _block_sigterm() -> None:
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})


def _unblock_sigterm() -> None:
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGTERM})


def _restore_sigterm() -> None:
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    _unblock_sigterm()


def adopt_orphans() -> None:
    """Descendants whose parent has ended become children of this process. Linux only."""
    _prctl(PR_SET_CHILD_SUBREAPER, 1)


def _prctl(option: int, value: int) -> None:
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(option, value, 0, 0, 0)


# -- Calls -----------------------------------------------------------------------------------------------------------


class Worker:
    def __init__(self, connection: socket.socket, functions: Functions) -> None:
        self.connection = connection
        self.functions = functions
        self.state: dict[str, Any] = {}
        self.loop = asyncio.new_event_loop()
        self.pid = os.getpid()

    def serve(self) -> None:
        answer = encode_frame(bytes([DONE, True]), None)  # ready
        while True:
            self.run(self.loop.sock_sendall(self.connection, answer))
            order = self.run(self.receive())
            if order is None:
                return
            answer = self.answer(order)

    def run(self, coroutine: Any) -> Any:
        return self.loop.run_until_complete(coroutine)

    async def receive(self) -> memoryview | None:
        reader = FrameReader()
        while data := await self.loop.sock_recv(self.connection, CHUNK):
            if (body := reader.feed(data)) is not None:
                return body
        return None

    def answer(self, order: memoryview) -> memoryview:
        """Make the call; an exception of any kind becomes an answer too."""
        try:
            what, *rest = pickle.loads(order[1:])  # noqa: S301 - sent by the process that this one is a fork of
            answer = _encode_result(getattr(self, what)(*rest))
        except BaseException as error:
            answer = encode_frame(bytes([RAISED, True]), _error_fields(error))
        if os.getpid() != self.pid:  # a fork made by the function returned here
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

    def finish(self) -> None:
        """The end of a session: only `tidy` remains."""

    def perform(self, function: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        value = function(*args, **kwargs)
        return self.run(_awaited(value)) if inspect.isawaitable(value) else value

    def tidy(self) -> bool:
        """Close and drop everything that a call or session left. True if the worker can be used again."""
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


def _encode_result(value: Any) -> memoryview:
    try:
        return encode_frame(bytes([DONE, True]), value)
    except Exception as error:
        raise TypeError(f"its result, a {type(value).__name__}, cannot be sent back: {error}") from error


def _error_fields(error: BaseException) -> tuple[str, str, str, str]:
    """Type, message, traceback and place, each shortened to MAX_TEXT."""
    error = first_error(error)
    try:
        lines = "".join(traceback.format_exception(type(error), error, _skip_own_frames(error.__traceback__)))
    except Exception:  # the user's exception class may fail to print
        lines = ""
    return type(error).__name__, error_message(error)[:MAX_TEXT], lines[-MAX_TEXT:], user_location(error)[:MAX_TEXT]


def _skip_own_frames(trace: TracebackType | None) -> TracebackType | None:
    """Drop the outer frames, which are of this file."""
    while trace is not None and trace.tb_frame.f_code.co_filename == __file__:
        trace = trace.tb_next
    return trace
