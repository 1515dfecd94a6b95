"""Calls in workers: results, exceptions, hangs, crashes, output, child processes, and the end of the pool."""

from __future__ import annotations

import asyncio
import ctypes
import multiprocessing
import os
import pickle
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from covey.errors import InputError, RunFailed
from covey.workers import RemoteError, WorkerDied, WorkerPool, WorkersGone, WorkerTimeout
from covey.workers.template import TAIL
from tests.workers.processes import gone, reaped, resident

linux = pytest.mark.skipif(sys.platform != "linux", reason="of Linux")
MakePool = Callable[..., WorkerPool]


@pytest.fixture
def make() -> Iterator[MakePool]:
    """Make pools of functions by their own names; closed afterwards."""
    pools: list[WorkerPool] = []

    def make(*functions: Callable[..., Any], **settings: Any) -> WorkerPool:
        pools.append(WorkerPool({function.__name__: function for function in functions}, **settings))
        return pools[-1]

    yield make
    for pool in pools:
        pool.close()


def call(pool: WorkerPool, function: str, *args: Any, seconds: float = 20.0, **kwargs: Any) -> Any:
    return asyncio.run(pool.call(function, *args, seconds=seconds, **kwargs))


def add(left: Any, right: Any = 1) -> Any:
    return left + right


def me() -> int:
    return os.getpid()


# -- Results


def test_values_and_functions_of_any_kind(make: MakePool) -> None:
    secret = ["of", "a", "closure"]

    def inner(more: str) -> list[str]:
        return [*secret, more]

    async def later(value: int) -> int:
        await asyncio.sleep(0.01)
        return value

    pool = make(add, inner, later)
    secret.append("changed too late")
    assert call(pool, "add", 1, right=2) == 3
    assert call(pool, "inner", "x") == ["of", "a", "closure", "x"]
    assert call(pool, "later", 7) == 7
    assert call(WorkerPool({"len": len}), "len", "four") == 4  # an unclosed pool ends with its last reference


def test_a_large_value_both_ways(make: MakePool) -> None:
    pool = make(add)
    left, right = os.urandom(1 << 22), os.urandom(1 << 22)
    assert call(pool, "add", left, right) == left + right


def test_functions_can_use_torch_while_its_threads_run(make: MakePool) -> None:
    def product(side: int) -> float:
        return float((torch.ones(side, side) @ torch.ones(side, side)).mean())

    assert product(400) == 400  # on two threads
    beside = threading.Thread(target=time.sleep, args=(1,))
    beside.start()
    assert call(make(product), "product", 400) == 400
    beside.join()


def test_coroutines_share_an_event_loop_and_functions_may_start_their_own(make: MakePool) -> None:
    async def which() -> int:
        return id(asyncio.get_running_loop())

    def own() -> int:
        return asyncio.run(which())

    pool = make(which, own, max_workers=1)
    loops = [call(pool, name) for name in ("which", "own", "which")]
    assert loops[0] == loops[2] != loops[1]


def test_tasks_that_a_call_leaves_behind_are_cancelled(make: MakePool, tmp_path: Path) -> None:
    tasks = []

    async def leave() -> int:
        async def tick() -> None:
            try:
                await asyncio.sleep(60)
            finally:
                (tmp_path / "cancelled").touch()

        tasks.append(asyncio.create_task(tick()))
        await asyncio.sleep(0)
        return os.getpid()

    pool = make(leave, me, max_workers=1)
    assert call(pool, "leave") == call(pool, "me")
    assert (tmp_path / "cancelled").exists()


def test_random_numbers_differ_between_workers(make: MakePool) -> None:
    import random

    import numpy

    def draw() -> tuple[float, float, float]:
        time.sleep(0.1)
        return random.random(), float(numpy.random.rand()), float(torch.rand(()))

    async def twice(pool: WorkerPool) -> list[Any]:
        return await asyncio.gather(pool.call("draw", seconds=20), pool.call("draw", seconds=20))

    first, second = asyncio.run(twice(make(draw)))
    assert all(a != b for a, b in zip(first, second, strict=True))


# -- Exceptions


class Odd(Exception):
    def __init__(self, one: int, *, two: int) -> None:
        super().__init__("odd")


class Mute(Exception):
    def __str__(self) -> str:
        raise RuntimeError


def test_a_functions_exception_arrives_as_text(make: MakePool) -> None:
    def odd() -> None:
        raise Odd(1, two=2)

    def mute() -> None:
        raise Mute

    def leave() -> None:
        sys.exit(3)

    pool = make(odd, mute, leave, me, max_workers=1)
    with pytest.raises(RemoteError) as caught:
        call(pool, "odd")
    error = caught.value
    assert (error.type_name, error.message) == ("Odd", "odd")
    assert str(error) == f"Odd: odd at {error.place}" and error.place.endswith(": raise Odd(1, two=2)")
    assert "raise Odd(1, two=2)" in error.traceback and "worker.py" not in error.traceback
    assert str(pickle.loads(pickle.dumps(error))) == str(error)
    with pytest.raises(RemoteError, match=r"Mute: \(its message cannot be shown\)"):
        call(pool, "mute")
    with pytest.raises(RemoteError, match=r"SystemExit: sys\.exit\(3\) was called at .*test_pool\.py, line 163"):
        call(pool, "leave")
    assert pool._made == 1  # an exception costs no process


def test_what_cannot_be_sent(make: MakePool) -> None:
    def generator() -> Any:
        return (i for i in range(3))

    def local() -> Any:
        class Here: ...

        return Here()

    def endless() -> Any:
        nested: list[Any] = []
        for _ in range(100_000):
            nested = [nested]
        return nested

    pool = make(generator, local, endless, add)
    with pytest.raises(RemoteError, match="its result, a generator, cannot be sent back: cannot pickle"):
        call(pool, "generator")
    with pytest.raises(RemoteError, match="its result, a Here, cannot be sent back"):
        call(pool, "local")
    with pytest.raises(RemoteError, match="its result, a list, cannot be sent back: maximum recursion depth"):
        call(pool, "endless")
    with pytest.raises(TypeError, match="the arguments of add cannot be sent to a worker"):
        call(pool, "add", lambda: 0)
    with pytest.raises(InputError, match=r"unknown function of the workers  ad\n  did you mean   add\?"):
        call(pool, "ad")


class Unreadable:
    def __reduce__(self) -> Any:
        return int, ("no number",)


def test_a_result_that_cannot_be_read_here(make: MakePool) -> None:
    def odd() -> Any:
        return Unreadable()

    pool = make(odd, add, max_workers=1)
    with pytest.raises(RemoteError, match="the result of odd cannot be read here: invalid literal"):
        call(pool, "odd")
    with pytest.raises(RemoteError, match="invalid literal"):
        call(pool, "add", Unreadable())
    assert call(pool, "add", 1) == 2 and pool._made == 1


# -- Functions that hang


def busy() -> None:
    while True:
        pass


def asleep() -> None:
    time.sleep(3600)


def deaf() -> None:
    signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    while True:
        time.sleep(3600)


async def waiting() -> None:
    await asyncio.sleep(3600)


@pytest.mark.parametrize("function", [busy, asleep, deaf, waiting])
def test_a_function_that_hangs_is_killed_and_its_worker_replaced(make: MakePool, function: Any) -> None:
    pool = make(function, me, max_workers=1)
    first = call(pool, "me")
    with pytest.raises(WorkerTimeout) as caught:
        call(pool, function.__name__, seconds=0.3)
    assert (caught.value.function, caught.value.seconds) == (function.__name__, 0.3)
    assert str(caught.value) == f"{function.__name__} took longer than 0.3 s"
    assert gone(first)
    assert call(pool, "me") != first


def test_waiting_for_a_worker_does_not_count_as_call_time(make: MakePool) -> None:
    def nap() -> float:
        time.sleep(0.15)
        return time.monotonic()

    async def many(pool: WorkerPool) -> list[float]:
        return await asyncio.gather(*(pool.call("nap", seconds=1.0) for _ in range(10)))

    assert len(asyncio.run(many(make(nap, max_workers=1)))) == 10


def test_an_answer_in_time_counts_even_if_this_process_was_busy(make: MakePool) -> None:
    async def distracted(pool: WorkerPool) -> Any:
        await pool.call("add", 0, seconds=20)
        asked = asyncio.create_task(pool.call("add", b"x", b"y", seconds=0.3))
        await asyncio.sleep(0.1)
        time.sleep(0.6)  # the event loop stands still
        return await asked

    assert asyncio.run(distracted(make(add))) == b"xy"


def test_a_cancelled_call_ends_its_worker(make: MakePool) -> None:
    async def cancel(pool: WorkerPool) -> int:
        pid: int = await pool.call("me", seconds=20)
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.1):
                await pool.call("busy", seconds=60)
        return pid

    pool = make(busy, me, max_workers=1)
    assert gone(asyncio.run(cancel(pool)))
    assert call(pool, "me")


# -- Functions that crash


def test_a_crash_reports_the_signal_and_the_last_output(make: MakePool) -> None:
    def leave() -> None:
        print("out")
        print("err", file=sys.stderr)
        os._exit(3)

    def crash() -> None:
        ctypes.string_at(0)

    pool = make(leave, crash, add)
    with pytest.raises(WorkerDied) as caught:
        call(pool, "leave")
    assert (caught.value.how, caught.value.tail) == ("exit code 3", "out\nerr\n")
    assert str(caught.value) == "the process of leave ended: exit code 3\n  | out\n  | err"
    with pytest.raises(WorkerDied) as caught:
        call(pool, "crash")
    assert caught.value.how == "SIGSEGV"
    assert "Fatal Python error: Segmentation fault" in str(caught.value)
    assert ", line " in str(caught.value) and "in crash" in str(caught.value)
    assert call(pool, "add", 1) == 2


def test_no_core_files(make: MakePool) -> None:
    import resource

    def limit() -> tuple[int, int]:
        return resource.getrlimit(resource.RLIMIT_CORE)

    assert call(make(limit), "limit") == (0, 0)


def test_a_function_that_closes_the_workers_socket(make: MakePool) -> None:
    def close(then: float) -> None:
        os.closerange(3, 256)
        time.sleep(then)

    pool = make(close, add)
    for then in (0, 60):
        with pytest.raises(WorkerDied):
            call(pool, "close", then)
    assert call(pool, "add", 1) == 2


def test_a_worker_that_dies_in_the_middle_of_its_answer(make: MakePool) -> None:
    def large() -> bytes:
        def kill() -> None:
            time.sleep(0.2)
            os.kill(os.getpid(), signal.SIGKILL)

        threading.Thread(target=kill).start()
        return b"x" * (1 << 24)

    async def distracted(pool: WorkerPool) -> None:
        await pool.call("add", 0, seconds=20)
        asked = asyncio.create_task(pool.call("large", seconds=20))
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        time.sleep(0.6)  # the answer stays in the socket's buffer
        with pytest.raises(WorkerDied, match="SIGKILL"):
            await asked

    pool = make(large, add, max_workers=1)
    asyncio.run(distracted(pool))
    assert call(pool, "add", 1) == 2


def test_nothing_is_called_twice(make: MakePool, tmp_path: Path) -> None:
    log = tmp_path / "calls"

    def once() -> None:
        with log.open("a") as file:
            file.write("x")
        os.kill(os.getpid(), signal.SIGKILL)

    pool = make(once)
    with pytest.raises(WorkerDied, match="SIGKILL"):
        call(pool, "once")
    assert log.read_text() == "x"


def test_an_idle_worker_that_was_killed_is_replaced(make: MakePool) -> None:
    pool = make(me)
    first = call(pool, "me")
    os.kill(first, signal.SIGKILL)
    assert reaped(first)
    assert call(pool, "me") != first


# -- Output


def test_output_of_workers_is_captured(make: MakePool, capfd: pytest.CaptureFixture[str]) -> None:
    def chatty() -> str:
        print("noise")
        os.write(1, b"noise")
        subprocess.run(["echo", "noise"], check=True)
        return sys.stdin.read()

    assert call(make(chatty), "chatty") == ""  # stdin is empty
    assert capfd.readouterr() == ("", "")


@linux
def test_a_gigabyte_of_output_costs_nothing(make: MakePool) -> None:
    def shout() -> None:
        block = b"x" * (1 << 20)
        for _ in range(1 << 10):
            os.write(1, block)
        os.write(2, b"\nend")
        os._exit(1)

    pool = make(shout, add)
    assert call(pool, "add", 1) == 2
    template = pool._template._pid
    assert template is not None
    before = [resident(pid) for pid in (os.getpid(), template)]
    with pytest.raises(WorkerDied) as caught:
        call(pool, "shout", seconds=60)
    assert len(caught.value.tail) == TAIL and caught.value.tail.endswith("x\nend")
    after = [resident(pid) for pid in (os.getpid(), template)]
    assert all(then - now < 16 << 20 for now, then in zip(before, after, strict=True))


# -- Child processes


def fork_and(how: str) -> tuple[int, int]:
    """The function's process, and one that outlives the call."""
    reader, writer = os.pipe()
    if how == "return" and os.fork() == 0:
        os.write(writer, b"%d" % os.getpid())
        return 0, 0  # the same answer once more, from a fork
    if how != "return" and os.fork() == 0:
        if how == "session":
            os.setsid()
        if how in ("session", "orphan") and os.fork() != 0:
            os._exit(0)
        os.write(writer, b"%d" % os.getpid())
        time.sleep(60)
        os._exit(0)
    return os.getpid(), int(os.read(reader, 20))


@pytest.mark.parametrize("how", ["child", "orphan", pytest.param("session", marks=linux), "return"])
def test_processes_that_outlive_the_call_are_killed(make: MakePool, how: str) -> None:
    pool = make(fork_and, me, max_workers=1)
    worker, child = call(pool, "fork_and", how)
    assert worker != 0
    assert gone(child)
    assert call(pool, "me") != 0


def test_killing_a_worker_kills_its_processes(make: MakePool, tmp_path: Path) -> None:
    def start() -> None:
        inner = f"echo $$ >> {tmp_path}/pids; sleep 60"
        subprocess.Popen(["sh", "-c", inner], start_new_session=sys.platform == "linux")
        subprocess.run(["sh", "-c", inner], check=True)

    with pytest.raises(WorkerTimeout):
        call(make(start), "start", seconds=0.4)
    pids = [int(line) for line in (tmp_path / "pids").read_text().split()]
    assert len(pids) == 2 and gone(*pids)


def test_a_child_that_was_waited_for_costs_no_worker(make: MakePool) -> None:
    def echo() -> str:
        return subprocess.run(["echo", "hi"], capture_output=True, text=True, check=True).stdout

    pool = make(echo)
    assert [call(pool, "echo") for _ in range(3)] == ["hi\n"] * 3
    assert pool._made == 1


# -- Many calls at once


def test_many_calls_over_few_workers(make: MakePool) -> None:
    def square(number: int) -> tuple[int, int]:
        time.sleep(0.001)
        return os.getpid(), number**2

    async def many(pool: WorkerPool) -> list[Any]:
        return await asyncio.gather(*(pool.call("square", i, seconds=20) for i in range(200)))

    pool = make(square, max_workers=4)
    threads = threading.active_count()
    found = asyncio.run(many(pool))
    assert threading.active_count() == threads
    assert [value for _, value in found] == [i**2 for i in range(200)]
    assert len({pid for pid, _ in found}) == pool._made == 4


def test_first_come_first_served(make: MakePool) -> None:
    async def many(pool: WorkerPool) -> list[float]:
        return await asyncio.gather(*(pool.call("monotonic", seconds=20) for _ in range(50)))

    times = asyncio.run(many(make(time.monotonic, max_workers=1)))
    assert times == sorted(times)


def test_hangs_and_crashes_cost_only_themselves(make: MakePool) -> None:
    def mixed(number: int) -> int:
        if number % 10 == 3:
            time.sleep(60)
        if number % 10 == 7:
            os._exit(1)
        return number

    async def many(pool: WorkerPool) -> list[Any]:
        calls = (pool.call("mixed", i, seconds=0.3 if i % 10 == 3 else 20) for i in range(60))
        return await asyncio.gather(*calls, return_exceptions=True)

    for number, found in enumerate(asyncio.run(many(make(mixed, max_workers=6)))):
        wanted = {3: WorkerTimeout, 7: WorkerDied}.get(number % 10)
        assert found == number if wanted is None else isinstance(found, wanted)


def test_one_event_loop_after_another(make: MakePool) -> None:
    pool = make(me, asleep, max_workers=1)
    assert call(pool, "me") == call(pool, "me")

    async def again() -> int:
        return int(await pool.call("me", seconds=20))

    loop = asyncio.new_event_loop()
    before = loop.run_until_complete(again())
    left = loop.create_task(pool.call("asleep", seconds=60))
    loop.run_until_complete(asyncio.sleep(0.05))
    assert call(pool, "me") != before  # the other loop's unfinished call was killed
    assert gone(before)
    with pytest.raises(WorkerTimeout):
        call(pool, "asleep", seconds=0.1)
    left.cancel()
    loop.run_until_complete(asyncio.wait([left]))
    assert loop.run_until_complete(again())
    loop.close()


def test_two_event_loops_at_once_are_refused(make: MakePool) -> None:
    pool = make(me)

    async def outer() -> None:
        await pool.call("me", seconds=20)
        thread = asyncio.to_thread(lambda: asyncio.run(pool.call("me", seconds=20)))
        with pytest.raises(RuntimeError, match="two event loops"):
            await thread

    asyncio.run(outer())


# -- The end of the pool


def test_close_leaves_no_process(make: MakePool) -> None:
    pool = make(me, fork_and, asleep)

    async def start() -> list[int]:
        pids: list[int] = [await pool.call("me", seconds=20)]
        asked = asyncio.create_task(pool.call("asleep", seconds=60))
        session = await pool.session()
        pids += await session.call("fork_and", "child", seconds=20)
        await asyncio.sleep(0.1)
        template = pool._template._pid
        assert template is not None
        pool.close()
        with pytest.raises(WorkersGone, match="the workers were closed"):
            await asked
        await session.close()
        return [*pids, template]

    assert gone(*asyncio.run(start()), seconds=0)
    pool.close()
    with pytest.raises(WorkersGone):
        call(pool, "me")


def test_a_template_that_was_killed_ends_the_run(make: MakePool) -> None:
    pool = make(me, asleep)
    assert issubclass(WorkersGone, RunFailed)

    async def start() -> int:
        pid: int = await pool.call("me", seconds=20)
        asked = asyncio.create_task(pool.call("asleep", seconds=60))
        await asyncio.sleep(0.1)
        assert pool._template._pid is not None
        os.kill(pool._template._pid, signal.SIGKILL)
        with pytest.raises(WorkersGone, match="has ended"):
            await asked
        return pid

    pid = asyncio.run(start())
    if sys.platform == "linux":
        assert gone(pid)
    with pytest.raises(WorkersGone):
        call(pool, "me")


PARENT = """
import asyncio, os, signal, subprocess, sys, time
from covey.workers import WorkerPool

def hang():
    for new in (False, True):
        child = subprocess.Popen(["sleep", "60"], start_new_session=new and sys.platform == "linux")
        os.write(int(sys.argv[2]), b"%d\\n" % child.pid)
    os.write(int(sys.argv[2]), b"%d\\n" % os.getpid())
    while True:
        pass

async def main():
    other = WorkerPool({"f": print})
    pool = WorkerPool({"hang": hang})
    later = WorkerPool({"f": print})
    for each in (other, pool, later):
        os.write(int(sys.argv[2]), b"%d\\n" % each._template._pid)
    if os.fork() == 0:  # as multiprocessing does: a fork that outlives us
        time.sleep(20)
        os._exit(0)
    asked = asyncio.create_task(pool.call("hang", seconds=60))
    await asyncio.sleep(0.5)
    if sys.argv[1] == "killed":
        os.kill(os.getpid(), signal.SIGKILL)
    if sys.argv[1] == "error":
        raise ValueError("end")
    os._exit(0)

asyncio.run(main())
"""


@pytest.mark.parametrize("how", ["killed", "error", "exit"])
def test_everything_ends_with_the_process_of_the_pool(how: str) -> None:
    reader, writer = os.pipe()
    started = time.monotonic()
    words = [sys.executable, "-c", PARENT, how, str(writer)]
    parent = subprocess.Popen(
        words, pass_fds=[writer], stdin=subprocess.DEVNULL, stderr=subprocess.DEVNULL, start_new_session=True
    )
    try:
        parent.wait(60)
        pids = [int(line) for line in os.read(reader, 1000).split()]
        assert len(pids) == 6 and gone(*pids)
        assert time.monotonic() - started < 20
    finally:
        os.killpg(parent.pid, signal.SIGKILL)  # the fork that outlives it
        os.close(reader)
        os.close(writer)


def test_without_standard_streams() -> None:
    """Some supervisors start processes like this."""
    text = "import asyncio, os; [os.close(i) for i in range(3)]; from covey.workers import WorkerPool\n"
    text += "assert asyncio.run(WorkerPool({'len': len}).call('len', 'abc', seconds=20)) == 3"
    assert subprocess.run([sys.executable, "-c", text]).returncode == 0


def test_workers_ignore_sigterm_but_their_processes_do_not(make: MakePool) -> None:
    """The end of a job is signalled to all of its processes; only the run itself may react."""

    def outlast() -> list[int]:
        os.kill(os.getpid(), signal.SIGTERM)
        os.kill(os.getppid(), signal.SIGTERM)  # the template
        program = subprocess.Popen(["sleep", "60"])
        program.terminate()
        fork = multiprocessing.get_context("fork").Process(target=time.sleep, args=(60,))
        fork.start()
        fork.terminate()
        fork.join()
        return [program.wait(), fork.exitcode or 0]

    pool = make(outlast, add)
    assert call(pool, "outlast") == [-signal.SIGTERM, -signal.SIGTERM]
    assert call(pool, "add", 1) == 2


def test_ctrl_c_during_a_fork_is_delivered_and_leaves_no_lock() -> None:
    """Python swallows exceptions in fork hooks: here Ctrl-C arrives in one, before logging releases its lock."""
    program = """
import os, signal
os.register_at_fork(after_in_parent=lambda: signal.raise_signal(signal.SIGINT))
import logging
from covey.workers import WorkerPool
try:
    WorkerPool({"f": len})
except KeyboardInterrupt:
    logging.getLogger("still").warning("here")
    print("told")
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=120)
    assert done.stdout == "told\n" and "here" in done.stderr and "ignored" not in done.stderr, done.stderr
