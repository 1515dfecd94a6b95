"""The vLLM engine without vLLM: messages, publishing, sleep, and failures of the worker."""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from covey.errors import RunFailed
from covey.rollout.vllm import VllmEngine, VllmSettings, process
from covey.rollout.vllm.engine import environment
from covey.rollout.vllm.process import frame, receive
from covey.types import Sampling, StopReason
from tests.conftest import tiny_llama
from tests.rollout.no_vllm import FAKE
from tests.rollout.plain import alone, assert_as_alone

PROMPT = [5, 6, 7]
Make = Callable[..., VllmEngine]


@pytest.fixture
def make(tmp_path: Path) -> Iterator[Make]:
    folder = tmp_path / "model"
    tiny_llama().save_pretrained(folder)
    made: list[VllmEngine] = []

    def make(mode: str = "", **settings: Any) -> VllmEngine:
        command = (sys.executable, FAKE, *([mode] if mode else []))
        made.append(VllmEngine(VllmSettings(str(folder), (2,), **settings), log=tmp_path / "log", command=command))
        return made[-1]

    yield make
    for engine in made:
        engine.close()


def log_of(engine: VllmEngine) -> str:
    return engine._worker.log.read_text()


def alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


def test_frames_come_back_as_they_were() -> None:
    ours, theirs = socket.socketpair()
    message = {"id": 1, "logprobs": [-0.1, -1e-17, 0.1 + 0.2], "ids": list(range(400_000)), "text": "µ\n"}
    sender = threading.Thread(target=lambda: (ours.sendall(frame(message) + frame({"id": 2})), ours.close()))
    sender.start()
    assert receive(theirs) == message
    assert receive(theirs) == {"id": 2}
    assert receive(theirs) is None
    sender.join()
    theirs.close()


def test_answers_are_those_of_the_published_weights(make: Make) -> None:
    engine, model = make(), tiny_llama(seed=3)
    requests = [([i, i + 1], Sampling(0.8, max_tokens=6, seed=i)) for i in range(3, 8)]

    async def run() -> list[Any]:
        await engine.publish(model, version=4)
        return await asyncio.gather(*(engine.generate(*request) for request in requests))

    done = asyncio.run(run())
    assert_as_alone(model, requests, done)
    assert all(one.versions == (4,) * len(one.token_ids) for one in done)
    assert engine.generated_tokens == sum(len(one.token_ids) for one in done)
    assert all((one.stop is StopReason.EOS) == (one.token_ids[-1] == 2) for one in done)


def test_new_weights_wait_for_requests_in_progress(make: Make) -> None:
    """A completion has one version, and the next one the new weights. A file is deleted once it is loaded."""
    engine, old, new = make("slow"), tiny_llama(seed=3), tiny_llama(seed=4)
    sampling = Sampling(1.0, max_tokens=6)

    async def run() -> tuple[Any, Any]:
        await engine.publish(old, version=0)
        first = asyncio.create_task(engine.generate(PROMPT, sampling))
        await asyncio.sleep(0)
        publishing = asyncio.create_task(engine.publish(new, version=1))
        await asyncio.sleep(0)
        second = await engine.generate(PROMPT, sampling)
        assert first.done() and publishing.done()
        return first.result(), second

    for model, version, done in zip((old, new), (0, 1), asyncio.run(run()), strict=True):
        expected = alone(model, PROMPT, done.token_ids)
        torch.testing.assert_close(torch.tensor(done.logprobs), expected, atol=1e-4, rtol=0)
        assert set(done.versions) == {version}
    folder = engine.transport.folder
    assert folder is not None and not [*folder.glob("*.safetensors")]


@pytest.mark.slow
def test_a_cancelled_request_is_aborted(make: Make) -> None:
    engine = make("slow")

    async def run() -> None:
        await engine.publish(tiny_llama(eos_token_id=None), version=0)
        task = asyncio.create_task(engine.generate(PROMPT, Sampling(max_tokens=10_000)))
        await asyncio.sleep(0.2)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        await engine.publish(tiny_llama(), version=1)  # would wait for it otherwise

    asyncio.run(run())
    assert "aborted\nload_file version-1" in log_of(engine)


def test_a_paused_engine_sleeps_and_loads_new_weights_before_it_wakes(make: Make) -> None:
    engine, model = make(sleeps=True), tiny_llama()

    async def run() -> Any:
        await engine.publish(model, version=0)
        await engine.resume()  # it does not sleep: nothing to do
        await engine.pause()
        await engine.publish(model, version=1)
        await engine.resume()
        return await engine.generate(PROMPT, Sampling(max_tokens=4))

    done = asyncio.run(run())
    assert_as_alone(model, [(PROMPT, Sampling())], [done])
    said = [line for line in log_of(engine).splitlines() if not line.startswith("settings")]
    assert said == [
        "load_file version-0.safetensors",
        "sleep",
        "wake weights",
        "load_file version-1.safetensors",
        "wake kv_cache",
    ]


def test_a_request_waits_while_the_engine_sleeps(make: Make) -> None:
    """As in mode=async, where the next turn of an episode may be requested at any time."""
    engine, old, new = make(sleeps=True), tiny_llama(seed=3), tiny_llama(seed=4)

    async def run() -> Any:
        await engine.publish(old, version=0)
        await engine.pause()
        requests = [asyncio.create_task(engine.generate(PROMPT, Sampling(max_tokens=4))) for _ in range(2)]
        await asyncio.sleep(0)
        requests[1].cancel()  # takes nothing from the other one
        await engine.publish(new, version=1)
        assert not requests[0].done()
        await engine.resume()
        return await requests[0]

    done = asyncio.run(run())
    assert_as_alone(new, [(PROMPT, Sampling())], [done])
    assert set(done.versions) == {1}


def test_a_request_fails_if_the_worker_ends_while_it_sleeps(make: Make) -> None:
    engine = make(sleeps=True)

    async def run() -> None:
        await engine.publish(tiny_llama(), version=0)
        await engine.pause()
        request = asyncio.create_task(engine.generate(PROMPT, Sampling(max_tokens=4)))
        await asyncio.sleep(0)
        engine.close()
        with pytest.raises(RunFailed, match="vLLM's process has ended"):
            await request

    asyncio.run(run())


@pytest.mark.slow
def test_an_engine_that_does_not_sleep_is_not_asked_to(make: Make) -> None:
    engine = make()

    async def run() -> None:
        await engine.publish(tiny_llama(), version=0)
        await engine.pause()
        await engine.resume()
        await engine.generate(PROMPT, Sampling(max_tokens=2))

    asyncio.run(run())
    assert "sleep" not in log_of(engine).replace("'sleeps'", "")


@pytest.mark.slow
def test_a_worker_that_cannot_start_says_why(make: Make) -> None:
    engine = make("refuses")
    with pytest.raises(RunFailed, match=r"vLLM could not start: ValueError: no room for the cache(.|\n)*the whole log"):
        asyncio.run(engine.publish(tiny_llama(), version=0))


def test_a_worker_that_dies_fails_all_requests_with_its_last_output(make: Make) -> None:
    engine = make("dies")

    async def run() -> list[Any]:
        await engine.publish(tiny_llama(), version=0)
        calls = (engine.generate(PROMPT, Sampling()) for _ in range(3))
        return await asyncio.gather(*calls, return_exceptions=True)

    for error in asyncio.run(run()):
        assert isinstance(error, RunFailed)
        assert "vLLM's process has ended" in str(error) and "| the last words" in str(error)
    with pytest.raises(RunFailed, match="has ended"):  # later requests too
        asyncio.run(engine.generate(PROMPT, Sampling()))


@pytest.mark.slow
def test_weights_of_another_shape_end_the_run(make: Make) -> None:
    with pytest.raises(RunFailed, match="size mismatch"):
        asyncio.run(make().publish(tiny_llama(vocabulary=80), version=0))


@pytest.mark.slow
def test_a_rejected_request_fails_alone(make: Make) -> None:
    engine = make()

    async def run() -> Any:
        await engine.publish(tiny_llama(), version=0)
        bad, good = engine.generate([10_000], Sampling()), engine.generate(PROMPT, Sampling(max_tokens=2))
        return await asyncio.gather(bad, good, return_exceptions=True)

    bad, good = asyncio.run(run())
    assert isinstance(bad, RuntimeError) and "IndexError" in str(bad)
    assert len(good.token_ids) <= 2


@pytest.mark.parametrize("mode", ["", "stays"])
@pytest.mark.slow
def test_closing_ends_the_process_whether_it_wants_to_or_not(
    make: Make, monkeypatch: pytest.MonkeyPatch, mode: str
) -> None:
    monkeypatch.setattr(process, "PATIENCE", 3.0 if mode == "" else 0.3)
    engine = make(mode)
    asyncio.run(engine.publish(tiny_llama(), version=0))
    pid, folder = engine._worker.pid, engine.transport.folder
    assert alive(pid) and folder is not None and folder.is_dir()
    engine.close()
    assert not alive(pid) and not folder.exists()


@pytest.mark.slow
def test_the_worker_ends_with_the_process_that_started_it(make: Make, tmp_path: Path) -> None:
    """Killed without a chance to close anything: no process is left."""
    script = tmp_path / "killed.py"
    script.write_text(
        "import sys, os, signal\nfrom pathlib import Path\nfrom covey.rollout.vllm import VllmEngine, VllmSettings\n"
        f"engine = VllmEngine(VllmSettings({str(tmp_path / 'model')!r}, (2,)), log=Path({str(tmp_path / 'log')!r}),\n"
        f"    command=({sys.executable!r}, {FAKE!r}))\n"
        "print(engine._worker.pid, flush=True)\nos.kill(os.getpid(), signal.SIGKILL)\n"
    )
    import subprocess

    done = subprocess.run([sys.executable, str(script)], capture_output=True, text=True, timeout=60)
    assert done.returncode == -signal.SIGKILL, done.stderr
    pid = int(done.stdout)
    deadline = time.monotonic() + 30
    while alive(pid) and time.monotonic() < deadline:
        time.sleep(0.1)
    assert not alive(pid)


@pytest.mark.parametrize(
    ("visible", "devices", "expected"),
    [(None, (1,), "1"), ("", (0, 1), "0,1"), ("4,5,7", (0, 2), "4,7"), ("GPU-a,GPU-b", (1,), "GPU-b"), ("3", (), "")],
)
def test_the_worker_sees_its_own_gpus(visible: str | None, devices: tuple[int, ...], expected: str) -> None:
    inherited = {} if visible is None else {"CUDA_VISIBLE_DEVICES": visible}
    assert environment(VllmSettings("m", (), devices=devices), inherited)["CUDA_VISIBLE_DEVICES"] == expected
