"""An engine that samples with the learner's own weights, in this process: no weight sync.

    await generate(ids, sampling)      any number at once; they are decoded together

Continuous batching: who has finished leaves, who waits enters. Prompts that are alike, or begin alike, are computed
once; an episode's next turn goes on from what is still in the cache. Between two steps the event loop gets its turn, so
that the same requests come in the same order in every run.

    engine.py       callers on the event loop, steps on a thread of their own; where an answer ends
    slotted.py      the batch on a CPU            paged.py      the batch on a GPU
    scheduler.py    who is in it                  runner.py     forward passes
    rows.py         which tokens lie where        blocks.py     the same for a GPU
    linear.py       faster products on a CPU      graphs.py     captured steps on a GPU, kernels.py their kernels
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any

import torch

from covey.protocols import Metrics
from covey.rollout.embedded.cpu_batch import SlottedBatch
from covey.rollout.embedded.gpu_batch import PagedBatch
from covey.rollout.embedded.scheduler import Running
from covey.types import Completion, Sampling, StopReason

TURNS = 8  # of the event loop between two steps: enough for an agent to read an answer and ask again


class EmbeddedEngine:
    owns_weights = False  # it samples with the learner's own module

    def __init__(
        self,
        model: Any,
        *,
        eos_ids: Sequence[int],
        decode: Callable[[Sequence[int]], str],
        max_sequences: int = 256,
        context_length: int | None = None,
        memory: float = 0.5,
        eager: bool = False,
        compiled: bool = True,
        paged: bool | None = None,
        drains: bool = False,
    ) -> None:
        """`context_length`: where an answer ends at the latest, prompt included. `memory`: the share of a GPU's free
        memory that the cache may take. `eager`: no captured graphs there; `compiled`: nor compiled layers in them.
        `paged`: a GPU's way of keeping the cache; None: on a GPU. `drains`: answers that are under way are finished
        before a pause, instead of going on after it with other weights."""
        self.model = model
        self.eos_ids = frozenset(eos_ids)
        self.decode = decode
        self.max_sequences = max_sequences
        self.context_length = context_length
        self.memory = memory
        self.eager = eager
        self.compiled = compiled
        self.paged = model.get_input_embeddings().weight.device.type == "cuda" if paged is None else paged
        self.on_finished: Callable[[], None] = lambda: None  # called for every answer, on the engine's thread
        self.version = 0
        self.generated_tokens = 0
        self._futures: dict[Running, asyncio.Future[Completion]] = {}
        self._arrived: deque[Running] = deque()  # since the last step began
        self._queue: deque[Running] = deque()  # not yet in the batch's hands; a step's own
        self._batch = self._empty_batch()
        self._loop: asyncio.Task[None] | None = None
        self._closing = False
        self.drains = drains
        self._awake = asyncio.Event()
        self._awake.set()
        # One thread of its own: the event loop goes on while torch computes, and torch keeps one pool of workers.
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="covey-engine")

    def _empty_batch(self) -> PagedBatch | SlottedBatch:
        model, rows, longest = self.model, self.max_sequences, self.context_length
        if not self.paged:
            return SlottedBatch(model, max_rows=rows, longest=longest, memory=self.memory)
        return PagedBatch(
            model, max_rows=rows, longest=longest, memory=self.memory, eager=self.eager, compiled=self.compiled
        )

    async def generate(self, token_ids: Sequence[int], sampling: Sampling) -> Completion:
        request = Running(tuple(token_ids), self._within_context(len(token_ids), sampling))
        future = self._futures[request] = asyncio.get_running_loop().create_future()
        self._arrived.append(request)
        if self._loop is None or self._loop.done():
            self._loop = asyncio.get_running_loop().create_task(self._run())
        try:
            return await future
        finally:
            request.abandoned = True
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
        """The weights are the learner's own, so only their number changes, and what the old ones computed is void.
        Answers that are under way go on from it; each of their tokens has the version that drew it."""
        assert weights is self.model, "the embedded engine shares the learner's module"

        def between_steps() -> None:
            self.version = version
            self._batch.forget()

        await asyncio.get_running_loop().run_in_executor(self._thread, between_steps)

    async def pause(self) -> None:
        """The learner has the weights for itself. Who is in the midst of an answer goes on after it."""
        self._awake.clear()
        if self.drains and (under_way := [f for r, f in self._futures.items() if r not in self._arrived]):
            await asyncio.wait(under_way)
        await asyncio.get_running_loop().run_in_executor(self._thread, lambda: None)  # the last step is over

    async def resume(self) -> None:
        self._awake.set()

    def close(self) -> None:
        """Stops at the next token; answers that are not finished never come."""
        self._closing = True
        self._thread.shutdown(wait=True)

    async def _run(self) -> None:
        """Steps until nothing is left to do. What fails, fails for everybody in it."""
        loop = asyncio.get_running_loop()
        await self._others_turn()
        while (self._arrived or self._queue or self._batch.busy) and not self._closing:
            while not self._awake.is_set() and not (self.drains and (self._queue or self._batch.busy)):
                await self._awake.wait()  # it may have been paused again before this is reached
            if self._awake.is_set():
                self._queue = deque(request for request in (*self._queue, *self._arrived) if not request.abandoned)
                self._arrived.clear()
            try:
                done = await loop.run_in_executor(self._thread, self._step)
            except Exception as error:
                self._fail(error)
                continue
            for request in done:
                self._answer(request)
            await self._others_turn()

    async def _others_turn(self) -> None:
        for _ in range(TURNS):
            await asyncio.sleep(0)

    def _answer(self, request: Running) -> None:
        future = self._futures.get(request)
        if future is None or future.done():  # a caller that gave up has cancelled it
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
    def _step(self) -> list[Running]:
        """Let in who can enter, then one token for everybody, or several; who has an answer, or will get none."""
        was_training = self.model.training
        if was_training:
            self.model.eval()
        try:
            done = self._batch.enter(self._queue)
            for request in [r for r in self._batch.scheduler.running if r.abandoned]:
                self._batch.finish(request)
            for request, ids, logprobs in self._batch.sample():
                self._take(request, ids, logprobs)
                if request.stop is not None:
                    self._batch.finish(request)
                    done.append(request)
            return done
        finally:
            if was_training:
                self.model.train()

    def _take(self, request: Running, tokens: Sequence[int], logprobs: Sequence[float]) -> None:
        """Tokens up to the end of the answer."""
        tokens = tokens[: request.left]
        count = len(tokens)
        if not request.sampling.stop and self.eos_ids.isdisjoint(tokens):
            request.ids += tokens
        else:
            count = self._until_stop(request, tokens)
        request.logprobs += logprobs[:count]
        request.versions += [self.version] * count
        request.cached += count
        self.generated_tokens += count
        if request.stop is None and request.left == 0:
            request.stop = StopReason.LENGTH
        if request.stop is not None:
            self.on_finished()

    def _until_stop(self, request: Running, tokens: Sequence[int]) -> int:
        """Token by token, since one of them may end the answer; how many there are."""
        for count, token in enumerate(tokens, start=1):
            request.ids.append(token)
            if token in self.eos_ids:
                request.stop = StopReason.EOS
            elif request.sampling.stop and self._hits_stop_string(request):
                request.stop = StopReason.STOP
            if request.stop is not None:
                return count
        return len(tokens)

    def _hits_stop_string(self, request: Running) -> bool:
        # A stop string of n characters spans at most n tokens: each token adds at least one byte.
        tail = max(len(text.encode()) for text in request.sampling.stop) + 4
        text = self.decode(request.ids[-tail:])
        return any(stop in text for stop in request.sampling.stop)
