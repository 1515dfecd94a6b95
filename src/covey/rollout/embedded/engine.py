"""An engine that samples with the learner's own weights, in this process: no copy, no weight sync.

    await generate(ids, sampling)      any number at once; waiting requests are decoded together

Requests with the same prompt share its prefill. Rows are left-padded and masked by length, never by the pad id (some
models use their end token to pad). Finished rows leave the batch when they are a quarter of it.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from covey.rollout.embedded.cache import cache_layers, indices, new_cache, take_rows
from covey.rollout.embedded.sampling import draw
from covey.types import Completion, Sampling, StopReason


@dataclass
class Request:
    prompt: tuple[int, ...]
    sampling: Sampling
    future: asyncio.Future[Completion]
    ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    stop: StopReason | None = None


class EmbeddedEngine:
    def __init__(
        self,
        model: Any,
        *,
        eos_ids: Sequence[int],
        decode: Callable[[Sequence[int]], str],
        max_sequences: int = 256,
    ) -> None:
        self.model = model
        self.eos_ids = frozenset(eos_ids)
        self.decode = decode
        self.max_sequences = max_sequences
        self.on_finished: Callable[[], None] = lambda: None  # called for every answer, on the engine's thread
        self.version = 0
        self.generated_tokens = 0
        self._waiting: list[Request] = []
        self._runner: asyncio.Task[None] | None = None
        self._closing = False
        # One thread of its own: the event loop goes on while torch computes, and torch keeps one pool of workers.
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="covey-engine")

    async def generate(self, token_ids: Sequence[int], sampling: Sampling) -> Completion:
        if not token_ids:
            raise ValueError("cannot continue an empty prompt")
        request = Request(tuple(token_ids), sampling, asyncio.get_running_loop().create_future())
        self._waiting.append(request)
        if self._runner is None or self._runner.done():
            self._runner = asyncio.get_running_loop().create_task(self._run())
        return await request.future

    async def publish(self, weights: Any, version: int) -> None:
        """The weights are the learner's own, so only their number changes."""
        assert weights is self.model, "the embedded engine shares the learner's module"
        self.version = version

    def close(self) -> None:
        """Stops at the next token; answers that are not finished never come."""
        self._closing = True
        self._thread.shutdown(wait=True)

    async def _run(self) -> None:
        """Takes what waits, decodes it to the end, repeats. Ends when nothing waits."""
        await asyncio.sleep(0)  # let every request of this moment arrive first
        while self._waiting:
            waiting = [request for request in self._waiting if not request.future.done()]  # nobody waits for the others
            batch, self._waiting = waiting[: self.max_sequences], waiting[self.max_sequences :]
            try:
                await asyncio.get_running_loop().run_in_executor(self._thread, self._decode_batch, batch)
            except Exception as error:
                for request in batch:
                    if not request.future.done():
                        request.future.set_exception(error)
                continue
            for request in batch:
                if request.stop is not None and not request.future.done():  # a caller that gave up has cancelled it
                    versions = (self.version,) * len(request.ids)
                    done = Completion(tuple(request.ids), tuple(request.logprobs), versions, request.stop)
                    request.future.set_result(done)

    @torch.no_grad()
    def _decode_batch(self, batch: list[Request]) -> None:
        was_training = self.model.training
        self.model.eval()
        try:
            self._decode(batch)
        finally:
            self.model.train(was_training)

    def _decode(self, batch: list[Request]) -> None:
        logits_BV, cache, mask_BL, width = self._prefill(batch)
        active, step = batch, 0
        while True:
            id_B, logprob_B = draw(logits_BV, [r.sampling for r in active], [step] * len(active))
            for request, token, logprob in zip(active, id_B.tolist(), logprob_B.tolist(), strict=True):
                if request.stop is None:
                    self._append(request, token, logprob)
            step += 1
            running = [request.stop is None for request in active]
            if not any(running) or self._closing:
                return
            if sum(running) <= 0.75 * len(active):
                rows = indices(running).to(mask_BL.device)
                active = [request for request, on in zip(active, running, strict=True) if on]
                room = max(r.sampling.max_tokens for r in active)
                cache, mask_BL, id_B = take_rows(cache, rows, width + room), mask_BL[rows], id_B[rows]
            mask_BL = torch.cat([mask_BL, mask_BL.new_ones(len(active), 1)], 1)
            logits_BV = self._forward(id_B[:, None], mask_BL, cache)

    def _append(self, request: Request, token: int, logprob: float) -> None:
        request.ids.append(token)
        request.logprobs.append(logprob)
        self.generated_tokens += 1
        if token in self.eos_ids:
            request.stop = StopReason.EOS
        elif request.sampling.stop and self._hits_stop_string(request):
            request.stop = StopReason.STOP
        elif len(request.ids) >= request.sampling.max_tokens:
            request.stop = StopReason.LENGTH
        if request.stop is not None:
            self.on_finished()

    def _hits_stop_string(self, request: Request) -> bool:
        # A stop string of n characters spans at most n tokens: each token adds at least one byte.
        tail = max(len(text.encode()) for text in request.sampling.stop) + 4
        text = self.decode(request.ids[-tail:])
        return any(stop in text for stop in request.sampling.stop)

    def _prefill(self, batch: list[Request]) -> tuple[Tensor, Any, Tensor, int]:
        """What all prompts begin with once, the rest of each distinct prompt once; then its cache row is given to every
        request that has it."""
        device = self.model.get_input_embeddings().weight.device
        prompts = list(dict.fromkeys(request.prompt for request in batch))
        shared = self._shared_prefix(prompts)
        width = max(map(len, prompts))  # columns: the shared beginning, padding, the rest
        ids_PL = torch.zeros(len(prompts), width, dtype=torch.int64)
        mask_PL = torch.zeros_like(ids_PL)
        mask_PL[:, :shared] = 1
        for row, prompt in enumerate(prompts):
            start = width - len(prompt) + shared
            ids_PL[row, start:] = torch.tensor(prompt[shared:])
            mask_PL[row, start:] = 1
        ids_PL, mask_PL = ids_PL.to(device), mask_PL.to(device)
        cache = new_cache(cache_layers(self.model.config), width)
        if shared:
            beginning = torch.tensor([prompts[0][:shared]], device=device)
            self._forward(beginning, torch.ones_like(beginning), cache)
            cache = take_rows(cache, torch.zeros(len(prompts), dtype=torch.int64, device=device), width)
        logits_PV = self._forward(ids_PL[:, shared:], mask_PL, cache)
        place = {prompt: row for row, prompt in enumerate(prompts)}
        rows = torch.tensor([place[request.prompt] for request in batch], device=device)
        cache = take_rows(cache, rows, width + max(r.sampling.max_tokens for r in batch))
        return logits_PV[rows], cache, mask_PL[rows], width

    def _shared_prefix(self, prompts: list[tuple[int, ...]]) -> int:
        """How many tokens all prompts begin with, short of the whole of any. With sliding windows none: padding behind
        the beginning would move it out of the window, which counts columns."""
        if len(prompts) < 2 or getattr(self.model.config.get_text_config(decoder=True), "sliding_window", None):
            return 0
        low, high = min(prompts), max(prompts)
        same = 0
        while same < min(map(len, prompts)) - 1 and low[same] == high[same]:
            same += 1
        return same

    def _forward(self, ids_BQ: Tensor, mask_BL: Tensor, cache: Any) -> Tensor:
        """Logits of the last column, [B, V]."""
        position_BL = (mask_BL.cumsum(-1) - 1).clamp(min=0)
        out = self.model(
            input_ids=ids_BQ,
            attention_mask=mask_BL,
            position_ids=position_BL[:, -ids_BQ.shape[1] :],
            past_key_values=cache,
            use_cache=True,
            logits_to_keep=1,
        )
        return out.logits[:, -1]
