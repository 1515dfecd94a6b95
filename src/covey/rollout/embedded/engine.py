"""`EmbeddedEngine`: samples with the learner's own weights, in this process, so no weights are copied.

    await generate(ids, sampling)      any number at once; they are decoded together

Continuous batching: requests enter and leave between two steps. Equal prompts and common prefixes are computed once,
and the next turn of an episode continues from the cache. The event loop runs between two steps, so requests arrive in
the same order in every run.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch

from covey.models.families import fixed_rope_length
from covey.protocols import Metrics
from covey.rollout.embedded.cpu_batch import RowBatch
from covey.rollout.embedded.images import FeatureCache
from covey.rollout.embedded.runner import Drawn
from covey.rollout.embedded.scheduler import RequestState
from covey.types import Completion, ImageSpan, Sampling, StopReason
from covey.weights.transport import InProcessTransport

if TYPE_CHECKING:
    from covey.models.vision import VisionProcessor
    from covey.rollout.embedded.gpu_batch import PagedBatch

YIELDS = 8  # to the event loop between two steps: enough for an agent to read a reply and send its next request


class EmbeddedEngine:
    owns_weights = False  # the engine samples with the learner's module

    def __init__(
        self,
        model: Any,
        *,
        eos_ids: Sequence[int],
        decode: Callable[[Sequence[int]], str],
        max_sequences: int = 256,
        kept_sequences: int = 0,
        context_length: int | None = None,
        memory: float = 0.5,
        eager: bool = False,
        compiled: bool = True,
        paged: bool | None = None,
        drains: bool = False,
        vision: VisionProcessor | None = None,
        thread: ThreadPoolExecutor | None = None,
    ) -> None:
        """`kept_sequences`: episodes in progress, for whose tokens a GPU's cache has room, memory permitting.
        `context_length`: the most tokens of a prompt and its completion. `memory`: share of a GPU's free memory for
        the cache. `eager`: no captured graphs on a GPU. `compiled`: compile the layers in the graphs. `paged`: use the
        paged cache; None: on a GPU. `drains`: `pause` waits for the requests in progress, so that no completion
        continues with other weights. `vision`: prepares the images of a model that sees them. `thread`: of another
        engine, whose steps then alternate with this one's; that engine ends it."""
        self.model = model
        self.eos_ids = frozenset(eos_ids)
        self.decode = decode
        self.max_sequences = max_sequences
        self.kept_sequences = kept_sequences
        lengths = [length for length in (context_length, fixed_rope_length(model.config)) if length is not None]
        self.context_length = min(lengths, default=None)
        self.memory = memory
        self.eager = eager
        self.compiled = compiled
        self.paged = model.get_input_embeddings().weight.device.type == "cuda" if paged is None else paged
        self.version = 0
        self.generated_tokens = 0
        self._futures: dict[RequestState, asyncio.Future[Completion]] = {}
        self._arrived: deque[RequestState] = deque()  # after the last step began
        self._queue: deque[RequestState] = deque()  # not in the batch yet; used by the step's thread
        self._transport = InProcessTransport()
        self._features = None if vision is None else FeatureCache(model, vision)
        self._batch = self._empty_batch()
        self._loop: asyncio.Task[None] | None = None
        self._closing = False
        self.drains = drains
        self._awake = asyncio.Event()
        self._awake.set()
        # One thread: the event loop continues while torch computes, and torch keeps a single pool of workers.
        self.thread = thread or ThreadPoolExecutor(1, thread_name_prefix="covey-engine")
        self._owns_thread = thread is None

    def _empty_batch(self) -> PagedBatch | RowBatch:
        model, rows, longest = self.model, self.max_sequences, self.context_length
        if not self.paged:
            return RowBatch(model, max_rows=rows, longest=longest, memory=self.memory)
        from covey.rollout.embedded.gpu_batch import PagedBatch

        return PagedBatch(
            model,
            max_rows=rows,
            longest=longest,
            memory=self.memory,
            eos_ids=sorted(self.eos_ids),
            eager=self.eager,
            compiled=self.compiled,
            kept=self.kept_sequences,
        )

    async def generate(
        self, token_ids: Sequence[int], sampling: Sampling, images: Sequence[ImageSpan] = ()
    ) -> Completion:
        request = RequestState(tuple(token_ids), self._within_context(len(token_ids), sampling))
        if images:
            assert self._features is not None, "images, but the model sees none"
            request.images, request.features = tuple(images), self._features
            self._features.check(images)
        future = self._futures[request] = asyncio.get_running_loop().create_future()
        self._arrived.append(request)
        if self._loop is None or self._loop.done():
            self._loop = asyncio.get_running_loop().create_task(self._run())
        try:
            return await future
        finally:
            request.cancelled = True
            self._futures.pop(request, None)

    def _within_context(self, prompt: int, sampling: Sampling) -> Sampling:
        if not prompt:
            raise ValueError("cannot continue an empty prompt")
        if self.context_length is None or prompt + sampling.max_tokens <= self.context_length:
            return sampling
        if prompt >= self.context_length:
            raise ValueError(
                f"a prompt of {prompt} tokens leaves no room for an answer in a context of {self.context_length} "
                "(model.context_length, or what the model supports)"
            )
        return replace(sampling, max_tokens=self.context_length - prompt)

    def metrics(self) -> Metrics:
        return {}

    async def publish(self, weights: Any, version: int) -> None:
        """Set the version and flush the cache, between two steps. Requests in progress keep their keys and values; each
        token records the version that sampled it."""
        await self._transport.publish(weights, version, {0: self.model})

        def set_version() -> None:
            self.version = version
            self._batch.flush()
            if self._features is not None:
                self._features.flush()

        await asyncio.get_running_loop().run_in_executor(self.thread, set_version)

    async def pause(self) -> None:
        """Stop after the current step. Requests in progress continue after `resume`."""
        self._awake.clear()
        if self.drains and (in_progress := [f for r, f in self._futures.items() if r not in self._arrived]):
            await asyncio.wait(in_progress)
        # After the last step, so that the tokens it launched are read before weights change.
        for request in await asyncio.get_running_loop().run_in_executor(self.thread, self._drain):
            self._deliver(request)

    async def resume(self) -> None:
        self._awake.set()

    def close(self) -> None:
        """Stop at the next token. Requests in progress never finish."""
        self._closing = True
        if self._owns_thread:
            self.thread.shutdown(wait=True)

    async def _run(self) -> None:
        """Run steps until there is nothing to do. An exception in a step fails all requests."""
        loop = asyncio.get_running_loop()
        await self._yield_to_others()
        while (self._arrived or self._queue or self._batch.busy) and not self._closing:
            while not self._awake.is_set() and not (self.drains and (self._queue or self._batch.busy)):
                await self._awake.wait()  # in a loop: the engine may be paused again before this line is reached
            if self._awake.is_set():
                self._queue = deque(request for request in (*self._queue, *self._arrived) if not request.cancelled)
                self._arrived.clear()
            try:
                done = await loop.run_in_executor(self.thread, self._step)
            except Exception as error:
                self._fail(error)
                continue
            for request in done:
                self._deliver(request)
            await self._yield_to_others()

    async def _yield_to_others(self) -> None:
        for _ in range(YIELDS):
            await asyncio.sleep(0)

    def _deliver(self, request: RequestState) -> None:
        future = self._futures.get(request)
        if future is None or future.done():  # the caller cancelled it
            return
        if request.error is not None:
            future.set_exception(request.error)
            return
        assert request.stop is not None
        future.set_result(
            Completion(tuple(request.ids), tuple(request.logprobs), tuple(request.versions), request.stop)
        )

    def _fail(self, error: Exception) -> None:
        for future in list(self._futures.values()):
            if not future.done():
                future.set_exception(error)
        self._arrived.clear()
        self._queue.clear()
        self._batch = self._empty_batch()

    # -- on the engine's thread ----------------------------------------------------------------------------------

    @torch.no_grad()
    def _step(self) -> list[RequestState]:
        """Admit requests, then sample one or several tokens for all. Returns the requests that finished or failed."""
        was_training = self.model.training
        if was_training:
            self.model.eval()
        try:
            done = self._batch.enter(self._queue)
            for request in [r for r in self._batch.scheduler.running if r.cancelled]:
                self._batch.finish(request)
            done += self._accept(self._batch.sample())
            self._batch.enter_waiting()  # the GPU computes their prompts while results are delivered
            return done
        finally:
            if was_training:
                self.model.train()

    def _drain(self) -> list[RequestState]:
        """Read what is launched. Returns the requests that finished."""
        return self._accept(self._batch.drain())

    def _accept(self, drawn: Drawn) -> list[RequestState]:
        """Append sampled tokens to their requests. Returns the requests that finished."""
        done: list[RequestState] = []
        for request, ids, logprobs in drawn:
            self._append(request, ids, logprobs)
            if request.stop is not None:
                self._batch.finish(request)
                done.append(request)
        return done

    def _append(self, request: RequestState, tokens: Sequence[int], logprobs: Sequence[float]) -> None:
        """Append tokens up to the end of the completion."""
        tokens = tokens[: request.remaining]
        count = len(tokens)
        if not request.sampling.stop and self.eos_ids.isdisjoint(tokens):
            request.ids += tokens
        else:
            count = self._append_until_stop(request, tokens)
        request.logprobs += logprobs[:count]
        request.versions += [self.version] * count
        request.cached += count
        self.generated_tokens += count
        if request.stop is None and request.remaining == 0:
            request.stop = StopReason.LENGTH

    def _append_until_stop(self, request: RequestState, tokens: Sequence[int]) -> int:
        """Append tokens up to the one that ends the completion. Returns the number of appended tokens."""
        for count, token in enumerate(tokens, start=1):
            request.ids.append(token)
            if token in self.eos_ids:
                request.stop = StopReason.EOS
            elif request.sampling.stop and self._hits_stop_string(request):
                request.stop = StopReason.STOP
            if request.stop is not None:
                return count
        return len(tokens)

    def _hits_stop_string(self, request: RequestState) -> bool:
        # A stop string of n bytes spans at most n tokens: each token adds at least one byte.
        tail = max(len(text.encode()) for text in request.sampling.stop) + 4
        text = self.decode(request.ids[-tail:])
        return any(stop in text for stop in request.sampling.stop)
