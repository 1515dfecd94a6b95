"""An engine that samples with the learner's own weights, in this process: no copy, no weight sync.

    await generate(ids, sampling)      any number at once; they are decoded together

Continuous batching: who has finished leaves, who waits enters. Prompts that are alike, or begin alike, are computed
once; an episode's next turn goes on from what is still in the cache. Between two steps the event loop gets its turn, so
that the same requests come in the same order in every run.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from covey.rollout.embedded.blocks import BlockManager
from covey.rollout.embedded.cache import KvCache
from covey.rollout.embedded.runner import Runner
from covey.rollout.embedded.sampling import draw, truncates
from covey.rollout.embedded.scheduler import Running, Scheduler
from covey.types import Completion, Sampling, StopReason

if TYPE_CHECKING:
    from covey.rollout.embedded.graphs import GraphDecoder

BLOCK = 64  # tokens of a block of the cache on a GPU
TURNS = 8  # of the event loop between two steps: enough for an agent to read an answer and ask again


class EmbeddedEngine:
    apart = False  # it samples with the learner's own module

    def __init__(
        self,
        model: Any,
        *,
        eos_ids: Sequence[int],
        decode: Callable[[Sequence[int]], str],
        max_sequences: int = 256,
        memory: float = 0.5,
        eager: bool = False,
    ) -> None:
        """`memory`: the share of a GPU's free memory that the cache may take; `eager`: no captured graphs there."""
        self.model = model
        self.eos_ids = frozenset(eos_ids)
        self.decode = decode
        self.max_sequences = max_sequences
        self.memory = memory
        self.eager = eager
        self.on_finished: Callable[[], None] = lambda: None  # called for every answer, on the engine's thread
        self.version = 0
        self.generated_tokens = 0
        self._futures: dict[Running, asyncio.Future[Completion]] = {}
        self._arrived: deque[Running] = deque()  # since the last step began
        self._queue: deque[Running] = deque()  # not yet with the scheduler; a step's own
        self._scheduler: Scheduler | None = None
        self._runner: Runner | None = None
        self._decoder: GraphDecoder | None = None
        self._loop: asyncio.Task[None] | None = None
        self._longest = 0  # tokens of a sequence that the cache is made for
        self.compiled = True
        self._closing = False
        # One thread of its own: the event loop goes on while torch computes, and torch keeps one pool of workers.
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="covey-engine")

    async def generate(self, token_ids: Sequence[int], sampling: Sampling) -> Completion:
        if not token_ids:
            raise ValueError("cannot continue an empty prompt")
        request = Running(tuple(token_ids), sampling)
        future = self._futures[request] = asyncio.get_running_loop().create_future()
        self._arrived.append(request)
        if self._loop is None or self._loop.done():
            self._loop = asyncio.get_running_loop().create_task(self._run())
        try:
            return await future
        finally:
            request.abandoned = True
            self._futures.pop(request, None)

    async def publish(self, weights: Any, version: int) -> None:
        """The weights are the learner's own, so only their number changes, and what the old ones computed is void."""
        assert weights is self.model, "the embedded engine shares the learner's module"
        self.version = version
        if self._scheduler is not None:
            self._scheduler.blocks.forget()

    async def pause(self) -> None:
        """Its memory is the learner's: there is none to give back."""

    async def resume(self) -> None:
        """It never left."""

    def close(self) -> None:
        """Stops at the next token; answers that are not finished never come."""
        self._closing = True
        self._thread.shutdown(wait=True)

    async def _run(self) -> None:
        """Steps until nothing is left to do. What fails, fails for everybody in it."""
        loop = asyncio.get_running_loop()
        await self._others_turn()
        while (self._arrived or self._queue or self._busy) and not self._closing:
            self._queue = deque(request for request in (*self._queue, *self._arrived) if not request.abandoned)
            self._arrived.clear()
            try:
                finished = await loop.run_in_executor(self._thread, self._step)
            except Exception as error:
                self._fail(error)
                continue
            for request in finished:
                future = self._futures.get(request)
                if future is not None and not future.done():  # a caller that gave up has cancelled it
                    assert request.stop is not None
                    versions = (self.version,) * len(request.ids)
                    future.set_result(Completion(tuple(request.ids), tuple(request.logprobs), versions, request.stop))
            await self._others_turn()

    async def _others_turn(self) -> None:
        for _ in range(TURNS):
            await asyncio.sleep(0)

    @property
    def _busy(self) -> bool:
        return self._scheduler is not None and bool(self._scheduler.running or self._scheduler.waiting)

    def _fail(self, error: Exception) -> None:
        for future in list(self._futures.values()):
            if not future.done():
                future.set_exception(error)
        self._arrived.clear()
        self._queue.clear()
        self._scheduler = self._runner = self._decoder = None

    # -- on the engine's thread ----------------------------------------------------------------------------------

    @torch.no_grad()
    def _step(self) -> list[Running]:
        """Let in who can enter, then one token for everybody; who has finished."""
        was_training = self.model.training
        if was_training:
            self.model.eval()
        try:
            scheduler, runner = self._room()
            runner.prefill(scheduler.admit())
            for request in [r for r in scheduler.running if r.abandoned]:
                scheduler.finish(request)
            if not scheduler.running:
                return []
            if runner.paged and not self.eager and runner.cache.keys is not None:  # a graph needs to know its address
                return self._sample_ahead(scheduler, runner)
            scheduler.reserve(1)
            return self._sample(scheduler, self._rows(scheduler, runner), runner.decode)
        finally:
            if was_training:
                self.model.train()

    def _sample_ahead(self, scheduler: Scheduler, runner: Runner) -> list[Running]:
        """Several tokens before the host looks; what was drawn beyond an answer's end is thrown away."""
        from covey.rollout.embedded.graphs import STEPS, GraphDecoder

        steps = min(STEPS, max(r.left for r in scheduler.running))
        if any(truncates(r.sampling) for r in scheduler.running):
            steps = 1
        scheduler.reserve(steps)
        rows = scheduler.running
        if self._decoder is None:
            blocks = scheduler.blocks.count(self._longest + STEPS)  # steps beyond an answer's end have a place as well
            self._decoder = GraphDecoder(
                self.model, runner.cache, rows=scheduler.max_rows, blocks=blocks, compiled=self.compiled
            )
        if steps == 1:
            decoder = self._decoder
            found = self._sample(scheduler, list(rows), lambda _: decoder.logits(rows))
            return found
        ids, logprobs = self._decoder.run(rows, steps)
        finished = []
        for request, tokens, scores in zip(list(rows), ids, logprobs, strict=True):
            self._take(request, tokens, scores)
            if request.stop is not None:
                scheduler.finish(request)
                finished.append(request)
        return finished

    def _sample(
        self, scheduler: Scheduler, rows: Sequence[Running | None], logits: Callable[[Any], Tensor]
    ) -> list[Running]:
        logits_BV = logits(rows)
        alive = [row for row in rows if row is not None]
        if len(alive) < len(rows):
            logits_BV = logits_BV[torch.tensor([i for i, row in enumerate(rows) if row is not None])]
        id_B, logprob_B = draw(logits_BV, [r.sampling for r in alive], [len(r.ids) for r in alive])
        finished = []
        for request, token, logprob in zip(alive, id_B.tolist(), logprob_B.tolist(), strict=True):
            self._take(request, [token], [logprob])
            if request.stop is not None:
                scheduler.finish(request)
                finished.append(request)
        return finished

    def _rows(self, scheduler: Scheduler, runner: Runner) -> list[Running | None]:
        """The batch in the order of its rows. On a CPU a sequence's block is its row: when a quarter of the rows are
        holes, the last ones move into them."""
        running = scheduler.running
        if runner.paged:
            return list(running)
        if max(r.blocks[0] for r in running) + 1 > len(running) / 0.75:
            for request in sorted(running, key=lambda r: r.blocks[0], reverse=True):
                if request.blocks[0] >= len(running):
                    place = scheduler.blocks.allocate(1)
                    assert place is not None and place[0] < len(running)
                    runner.cache.copy([(request.blocks[0], place[0])], columns=request.cached)
                    scheduler.blocks.release(request.blocks)
                    request.blocks = place
        by_block = {request.blocks[0]: request for request in running}
        return [by_block.get(block) for block in range(max(by_block) + 1)]

    def _room(self) -> tuple[Scheduler, Runner]:
        """A cache large enough for what is asked. A larger one is made when nobody is in the old one; until then, who
        came waits."""
        longest = max((len(r.prompt) + r.sampling.max_tokens for r in self._queue), default=0)
        rows = min(self.max_sequences, len(self._queue))
        scheduler = self._scheduler
        if scheduler is None:
            scheduler = self._build(longest, rows)
        elif (longest > self._longest or rows > scheduler.max_rows) and not self._busy:
            scheduler = self._build(max(longest, self._longest), max(rows, scheduler.max_rows))
        if longest <= self._longest and rows <= scheduler.max_rows:
            self._hand_over(scheduler)
        assert self._runner is not None
        return scheduler, self._runner

    def _hand_over(self, scheduler: Scheduler) -> None:
        """Who came goes to the scheduler. Where there could be more rows, only as many as there are: the rest show how
        many are missing."""
        final = scheduler.max_rows == self.max_sequences
        while self._queue and (final or len(scheduler.running) + len(scheduler.waiting) < scheduler.max_rows):
            scheduler.add(self._queue.popleft())

    def _build(self, longest: int, rows: int) -> Scheduler:
        self._scheduler = self._runner = self._decoder = None  # the old cache goes before the new one comes
        paged = self._device.type == "cuda"
        self._longest = -(-longest // BLOCK) * BLOCK
        size = BLOCK if paged else self._longest
        blocks = rows * (self._longest // size)
        layers = int(self.model.config.get_text_config(decoder=True).num_hidden_layers)
        if paged:
            blocks = min(blocks, self._affordable_blocks(size))
        self._scheduler = Scheduler(BlockManager(blocks, size), rows)
        self._runner = Runner(self.model, KvCache(blocks, size, layers), paged=paged)
        return self._scheduler

    @property
    def _device(self) -> torch.device:
        found: torch.device = self.model.get_input_embeddings().weight.device
        return found

    def _affordable_blocks(self, size: int) -> int:
        config = self.model.config.get_text_config(decoder=True)
        heads = getattr(config, "num_key_value_heads", None) or config.num_attention_heads
        dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
        itemsize = self.model.get_input_embeddings().weight.element_size()
        each = 2 * config.num_hidden_layers * heads * dim * size * itemsize
        torch.cuda.empty_cache()
        free, _ = torch.cuda.mem_get_info(self._device)
        return max(1, int(free * self.memory) // each)

    def _take(self, request: Running, tokens: Sequence[int], logprobs: Sequence[float]) -> None:
        """Tokens up to the end of the answer."""
        tokens = tokens[: request.left]
        count = len(tokens)
        if not request.sampling.stop and self.eos_ids.isdisjoint(tokens):
            request.ids += tokens
        else:
            count = self._until_stop(request, tokens)
        request.logprobs += logprobs[:count]
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
