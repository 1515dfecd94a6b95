"""vLLM as the engine. It lives in a process of its own (worker.py), with a copy of the learner's weights.

    await generate(ids, sampling)      any number at once; one that is given up is aborted in vLLM
    await publish(weights, version)    waits for the answers under way, so an answer is of one version

Weights travel over CUDA IPC where vLLM is on the learner's GPU alone, and in a safetensors file elsewhere. vLLM starts
with empty weights: it samples only after the first publish.
"""

from __future__ import annotations

import asyncio
import itertools
import os
import shutil
import sys
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

import covey
from covey.errors import RunFailed
from covey.protocols import Metrics
from covey.rollout.vllm.process import Message, WorkerProcess
from covey.types import Completion, Sampling, StopReason
from covey.weights.names import BUCKET, buckets, cuda_handle, named_weights, weights_folder, write_weights

WORKER = (sys.executable, "-m", "covey.rollout.vllm.worker")


@dataclass(frozen=True)
class VllmSettings:
    """What the worker is told when it starts."""

    model: str  # a folder or a hub id: configuration and tokenizer are read there, weights are not
    eos_ids: tuple[int, ...]
    dtype: str = "float32"
    devices: tuple[int, ...] = ()  # GPUs as this process numbers them; none: the CPU
    tensor_parallel: int = 1
    context_length: int | None = None
    max_sequences: int = 256
    memory: float = 0.5  # of a GPU's whole memory
    eager: bool = False
    sleeps: bool = False  # gives its GPU memory back between `pause` and `resume`
    trust_remote_code: bool = False
    revision: str | None = None  # of a hub id


class VllmEngine:
    owns_weights = True  # its weights and kernels are not the learner's

    def __init__(
        self, settings: VllmSettings, *, log: Path, same_gpu: bool = False, command: Sequence[str] | None = None
    ) -> None:
        """`same_gpu`: the learner works on the one GPU that vLLM has, so weights need not leave it. `command` starts
        another worker than vLLM's."""
        self.settings = settings
        self.same_gpu = same_gpu
        self.on_finished: Callable[[], None] = lambda: None  # called for every answer, on the engine's thread
        self.version = 0
        self.generated_tokens = 0
        self._numbers = itertools.count(1)
        self._asked: dict[int, asyncio.Future[Message]] = {}
        self._answers: set[asyncio.Future[Message]] = set()  # of those, the ones that sample
        self._changing: asyncio.Future[None] | None = None  # done when weights or sleep have changed
        self._started: Message | None = None  # the worker's first answer
        self._ended = False
        self._asleep = self._empty = False  # without memory; without weights
        self._published: int | None = None  # the version that vLLM has
        self._folder: Path | None = None  # for files of weights
        if self.settings.devices:
            torch.cuda.empty_cache()  # what this process keeps in reserve, vLLM may need
        self._worker = WorkerProcess(
            command or WORKER,
            environment=environment(settings, os.environ),
            log=log,
            on_message=self._heard,
            on_end=self._gone,
        )
        self._worker.send(asdict(settings))

    async def generate(self, token_ids: Sequence[int], sampling: Sampling) -> Completion:
        if not token_ids:
            raise ValueError("cannot continue an empty prompt")
        while self._changing is not None:
            await asyncio.shield(self._changing)
        assert not self._asleep, "sampling before resume()"
        number, future = self._send("generate", prompt=list(token_ids), sampling=asdict(sampling))
        self._answers.add(future)
        try:
            found = await future
        except asyncio.CancelledError:
            self._worker.send({"do": "abort", "id": number})
            raise
        finally:
            self._answers.discard(future)
            self._asked.pop(number, None)
        done = _result(found)
        ids, version = tuple(done["ids"]), self.version
        return Completion(ids, tuple(done["logprobs"]), (version,) * len(ids), StopReason(done["stop"]))

    def metrics(self) -> Metrics:
        return {}

    async def publish(self, weights: Any, version: int) -> None:
        """`weights` is the learner's module. Adapters are merged into copies on the way. A version that is there is not
        sent again."""
        if version == self._published and not self._asleep:
            return
        async with self._alone():
            if self._asleep:
                torch.cuda.empty_cache()
                await self._ask("wake", what=["weights"])
            if self.same_gpu:
                await self._publish_on_gpu(weights)
            else:
                await self._publish_by_file(weights, version)
            self._empty = False
            self.version = self._published = version

    async def pause(self) -> None:
        """Sampling is over until new weights are published: vLLM gives its memory back."""
        if self.settings.sleeps and not self._asleep:
            async with self._alone():
                await self._ask("sleep")
            self._asleep = self._empty = True

    async def resume(self) -> None:
        if self._asleep:
            assert not self._empty, "after pause() weights must be published before resume()"
            torch.cuda.empty_cache()
            async with self._alone():
                await self._ask("wake", what=["kv_cache"])
            self._asleep = False

    def close(self) -> None:
        """Ends the worker and all that it started; answers that are not finished never come."""
        self._worker.end()
        if self._folder is not None:
            shutil.rmtree(self._folder, ignore_errors=True)

    # -- weights -------------------------------------------------------------------------------------------------

    async def _publish_by_file(self, weights: Any, version: int) -> None:
        if self._folder is None:
            self._folder = weights_folder(sum(p.numel() * p.element_size() for p in weights.parameters()))
        path, digest = await asyncio.to_thread(write_weights, named_weights(weights), self._folder, version)
        await self._ask("load_file", path=str(path), digest=digest)
        path.unlink()

    async def _publish_on_gpu(self, weights: Any) -> None:
        largest = max(p.numel() * p.element_size() for p in weights.parameters())
        some = next(iter(weights.parameters()))
        buffer = torch.empty(max(BUCKET, largest), dtype=torch.uint8, device=some.device)
        await self._ask("load_begin")
        for layout in buckets(named_weights(weights), buffer):
            torch.cuda.synchronize(some.device)
            # A handle is good for one reader: torch counts them.
            await self._ask("load_bucket", handle=cuda_handle(buffer), layout=layout)
        await self._ask("load_end")
        del buffer
        torch.cuda.ipc_collect()

    # -- talking to the worker -----------------------------------------------------------------------------------

    @asynccontextmanager
    async def _alone(self) -> AsyncIterator[None]:
        """While nobody samples: who does finishes first, who comes waits."""
        while self._changing is not None:
            await asyncio.shield(self._changing)
        self._changing = asyncio.get_running_loop().create_future()
        try:
            while self._answers:
                await asyncio.wait(list(self._answers))
                await asyncio.sleep(0)  # let those who waited for them leave
            yield
        finally:
            self._changing.set_result(None)
            self._changing = None

    async def _ask(self, do: str, **what: Any) -> Message:
        number, future = self._send(do, **what)
        try:
            return _result(await future, otherwise=RunFailed)
        finally:
            self._asked.pop(number, None)

    def _send(self, do: str, **what: Any) -> tuple[int, asyncio.Future[Message]]:
        number = next(self._numbers)
        future: asyncio.Future[Message] = asyncio.get_running_loop().create_future()
        self._asked[number] = future
        if self._ended:
            future.set_result(self._obituary())
        self._worker.send({"do": do, "id": number, **what})
        return number, future

    # -- on the thread that listens ------------------------------------------------------------------------------

    def _heard(self, message: Message) -> None:
        if message["id"] == 0:
            self._started = message
            return
        future = self._asked.get(message["id"])
        if future is None:  # given up in the meantime
            return
        if (done := message.get("done")) is not None and "ids" in done:
            self.generated_tokens += len(done["ids"])
            self.on_finished()
        _settle(future, message)

    def _gone(self) -> None:
        self._ended = True
        for future in list(self._asked.values()):
            _settle(future, self._obituary())

    def _obituary(self) -> Message:
        why = (self._started or {}).get("error")
        what = f"vLLM could not start: {why}" if why else "vLLM's process has ended"
        if self._started is None:
            what = "vLLM could not start"
        return {"dead": f"{what}\n{self._worker.tail()}\n  the whole log: {self._worker.log}"}


def _settle(future: asyncio.Future[Message], message: Message) -> None:
    def settle() -> None:
        if not future.done():
            future.set_result(message)

    loop = future.get_loop()
    if not loop.is_closed():
        loop.call_soon_threadsafe(settle)


def _result(message: Message, otherwise: type[Exception] = RuntimeError) -> Message:
    """An answer that did not come is one episode's bad luck; weights that did not arrive end the run."""
    if "dead" in message:
        raise RunFailed(message["dead"])
    if "error" in message:
        raise otherwise(f"vLLM: {message['error']}")
    done: Message = message["done"]
    return done


def environment(settings: VllmSettings, inherited: Mapping[str, str]) -> dict[str, str]:
    """The worker's environment: its GPUs, this very Covey, one machine, and nobody told of it."""
    found = dict(inherited)
    package = str(Path(covey.__file__).parent.parent)
    found["PYTHONPATH"] = os.pathsep.join([package, *filter(None, [inherited.get("PYTHONPATH")])])
    found |= {"VLLM_NO_USAGE_STATS": "1", "VLLM_HOST_IP": "127.0.0.1", "TOKENIZERS_PARALLELISM": "false"}
    if settings.devices:
        visible = inherited.get("CUDA_VISIBLE_DEVICES")
        names = visible.split(",") if visible else [str(i) for i in range(max(settings.devices) + 1)]
        found["CUDA_VISIBLE_DEVICES"] = ",".join(names[i] for i in settings.devices)
    else:
        found["CUDA_VISIBLE_DEVICES"] = ""
        found.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")  # GiB
    return found
