"""`VllmEngine`: vLLM in a process of its own (worker.py), with a copy of the learner's weights.

    await generate(ids, sampling, images)      any number at once; cancelling one aborts it in vLLM
    await publish(weights, version)            waits for the requests in progress, so a completion has one version
    await pause(), resume()                    vLLM may sleep in between; later requests wait until `resume`

Weights are sent over CUDA IPC if vLLM has the learner's GPU to itself, otherwise in a safetensors file
(`covey.weights`). vLLM starts with empty weights: it samples only after the first publish. An image goes to vLLM as the
file it came in and the size at which the model sees it; vLLM prepares and encodes it by itself.
"""

from __future__ import annotations

import asyncio
import base64
import itertools
import os
import sys
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

import covey
from covey.errors import RunFailed
from covey.images import picture_size
from covey.protocols import Metrics
from covey.rollout.vllm.process import Message, WorkerProcess
from covey.types import Completion, ImageSpan, Sampling, StopReason
from covey.weights.transport import WeightTransport
from covey.weights.vllm import CudaIpcTransport, VllmFileTransport

if TYPE_CHECKING:
    from covey.models.vision import VisionProcessor

SLEEP = -1  # in place of the number of a message
WORKER = (sys.executable, "-m", "covey.rollout.vllm.worker")


@dataclass(frozen=True)
class VisionSettings:
    """How images are shown to the model."""

    token_id: int  # stands for an image in the prompts that vLLM takes
    max_pixels: int
    resample: int  # PIL's filter for resizing
    min_pixels: int  # smaller and larger pictures are resized
    trained: bool  # features of images change with the weights

    @classmethod
    def of(cls, vision: VisionProcessor, *, trained: bool) -> VisionSettings:
        processor = vision.image_processor
        least = int(processor.size["shortest_edge"])
        return cls(vision.token_id, vision.max_pixels, int(processor.resample), least, trained)


@dataclass(frozen=True)
class VllmSettings:
    """The first message to the worker."""

    model: str  # a folder or a hub id, for configuration and tokenizer; its weights are not read
    eos_ids: tuple[int, ...]
    dtype: str = "float32"
    devices: tuple[int, ...] = ()  # GPUs as this process numbers them; empty: the CPU
    tensor_parallel: int = 1
    context_length: int | None = None
    max_sequences: int = 256
    memory: float = 0.5  # share of a GPU's total memory
    eager: bool = False
    sleeps: bool = False  # releases its GPU memory between `pause` and `resume`
    trust_remote_code: bool = False
    revision: str | None = None  # of a hub id
    vision: VisionSettings | None = None  # of a model that sees images


class VllmEngine:
    owns_weights = True  # its weights and kernels are not the learner's

    def __init__(
        self,
        settings: VllmSettings,
        *,
        log: Path,
        same_gpu: bool = False,
        vision: VisionProcessor | None = None,
        command: Sequence[str] | None = None,
    ) -> None:
        """`same_gpu`: the learner works on vLLM's only GPU, so weights need not leave it. `vision`: prepares the images
        of a model that sees them. `command` replaces the worker, for tests."""
        self.settings = settings
        self.vision = vision
        self.transport: WeightTransport = CudaIpcTransport() if same_gpu else VllmFileTransport()
        self.version = 0
        self.generated_tokens = 0
        self._numbers = itertools.count(1)
        self._pending: dict[int, asyncio.Future[Message]] = {}  # by the number of the message
        self._sampling: set[asyncio.Future[Message]] = set()  # the pending ones that are requests
        self._exclusive: asyncio.Future[None] | None = None  # pending while weights or memory change
        self._started: Message | None = None  # the worker's first message
        self._ended = False
        self._sleep: asyncio.Future[Message] | None = None  # pending while vLLM is without memory
        self._empty = False  # without weights
        self._published: int | None = None  # the version that vLLM has
        if self.settings.devices:
            torch.cuda.empty_cache()  # vLLM may need the memory that this process holds in reserve
        self._worker = WorkerProcess(
            command or WORKER,
            environment=environment(settings, os.environ),
            log=log,
            on_message=self._on_message,
            on_end=self._on_end,
        )
        self._worker.send(asdict(settings))

    async def generate(
        self, token_ids: Sequence[int], sampling: Sampling, images: Sequence[ImageSpan] = ()
    ) -> Completion:
        if not token_ids:
            raise ValueError("cannot continue an empty prompt")
        while (change := self._exclusive or self._sleep) is not None and not self._ended:
            await asyncio.shield(change)
        number, future = self._send(
            "generate",
            prompt=list(token_ids),
            sampling=asdict(sampling),
            images=[shown(span, self.vision) for span in images],
        )
        self._sampling.add(future)
        try:
            message = await future
        except asyncio.CancelledError:
            self._worker.send({"do": "abort", "id": number})
            raise
        finally:
            self._sampling.discard(future)
            self._pending.pop(number, None)
        done = _result(message)
        ids, version = tuple(done["ids"]), self.version
        return Completion(ids, tuple(done["logprobs"]), (version,) * len(ids), StopReason(done["stop"]))

    def metrics(self) -> Metrics:
        return {}

    async def publish(self, weights: Any, version: int) -> None:
        """`weights` is the learner's module. A version that vLLM has already is not sent again."""
        if version == self._published and self._sleep is None:
            return
        async with self._exclusively():
            if self._sleep is not None:
                torch.cuda.empty_cache()
                await self._call("wake", what=["weights"])
            await self.transport.publish(weights, version, {0: self._call})
            self._empty = False
            self.version = self._published = version

    async def pause(self) -> None:
        """vLLM may release its memory. Then it samples again after new weights are published, and `resume`."""
        if self.settings.sleeps and self._sleep is None:
            async with self._exclusively():
                await self._call("sleep")
            self._sleep, self._empty = asyncio.get_running_loop().create_future(), True
            self._pending[SLEEP] = self._sleep  # resolved if the worker ends

    async def resume(self) -> None:
        if self._sleep is not None:
            assert not self._empty, "after pause() weights must be published before resume()"
            torch.cuda.empty_cache()
            async with self._exclusively():
                await self._call("wake", what=["kv_cache"])
            _resolve(self._pending.pop(SLEEP), {})
            self._sleep = None

    def close(self) -> None:
        """End the worker and all of its child processes. Requests in progress fail."""
        self._worker.end()
        self.transport.close()

    # -- messages to the worker ----------------------------------------------------------------------------------

    @asynccontextmanager
    async def _exclusively(self) -> AsyncIterator[None]:
        """Requests in progress finish first; later ones wait."""
        while self._exclusive is not None:
            await asyncio.shield(self._exclusive)
        self._exclusive = asyncio.get_running_loop().create_future()
        try:
            while self._sampling:
                await asyncio.wait(list(self._sampling))
                await asyncio.sleep(0)  # lets their callers take the results
            yield
        finally:
            self._exclusive.set_result(None)
            self._exclusive = None

    async def _call(self, do: str, **arguments: Any) -> Message:
        number, future = self._send(do, **arguments)
        try:
            return _result(await future, failure=RunFailed)
        finally:
            self._pending.pop(number, None)

    def _send(self, do: str, **arguments: Any) -> tuple[int, asyncio.Future[Message]]:
        number = next(self._numbers)
        future: asyncio.Future[Message] = asyncio.get_running_loop().create_future()
        self._pending[number] = future
        if self._ended:
            future.set_result(self._death())
        self._worker.send({"do": do, "id": number, **arguments})
        return number, future

    # -- on the reader's thread ------------------------------------------------------------------------------------

    def _on_message(self, message: Message) -> None:
        if message["id"] == 0:
            self._started = message
            return
        future = self._pending.get(message["id"])
        if future is None:  # cancelled meanwhile
            return
        if (done := message.get("done")) is not None and "ids" in done:
            self.generated_tokens += len(done["ids"])
        _resolve(future, message)

    def _on_end(self) -> None:
        self._ended = True
        for future in list(self._pending.values()):
            _resolve(future, self._death())

    def _death(self) -> Message:
        why = (self._started or {}).get("error")
        cause = f"vLLM could not start: {why}" if why else "vLLM's process has ended"
        if self._started is None:
            cause = "vLLM could not start"
        return {"dead": f"{cause}\n{self._worker.tail()}\n  the whole log: {self._worker.log}"}


def shown(span: ImageSpan, vision: VisionProcessor | None) -> Message:
    """An image for the worker, and its size as the model sees it."""
    assert vision is not None, "images, but the model sees none"
    size = vision.shown_size(*picture_size(span.image, vision.max_pixels))
    content = base64.b64encode(span.image.data).decode()
    return {"start": span.start, "length": span.length, "content": content, "size": size}


def _resolve(future: asyncio.Future[Message], message: Message) -> None:
    """Set the result of a future from another thread."""

    def resolve() -> None:
        if not future.done():
            future.set_result(message)

    loop = future.get_loop()
    if not loop.is_closed():
        loop.call_soon_threadsafe(resolve)


def _result(message: Message, failure: type[Exception] = RuntimeError) -> Message:
    """A request that fails costs one episode (RuntimeError). A dead worker, or weights it could not load, end the
    run."""
    if "dead" in message:
        raise RunFailed(message["dead"])
    if "error" in message:
        raise failure(f"vLLM: {message['error']}")
    done: Message = message["done"]
    return done


def environment(settings: VllmSettings, inherited: Mapping[str, str]) -> dict[str, str]:
    """The worker's environment: its GPUs, the Covey of this process, one machine, no usage statistics."""
    variables = dict(inherited)
    package = str(Path(covey.__file__).parent.parent)
    variables["PYTHONPATH"] = os.pathsep.join([package, *filter(None, [inherited.get("PYTHONPATH")])])
    variables |= {"VLLM_NO_USAGE_STATS": "1", "VLLM_HOST_IP": "127.0.0.1", "TOKENIZERS_PARALLELISM": "false"}
    if settings.devices:
        visible = inherited.get("CUDA_VISIBLE_DEVICES")
        names = visible.split(",") if visible else [str(i) for i in range(max(settings.devices) + 1)]
        variables["CUDA_VISIBLE_DEVICES"] = ",".join(names[i] for i in settings.devices)
    else:
        variables["CUDA_VISIBLE_DEVICES"] = ""
        variables.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")  # GiB
    return variables
