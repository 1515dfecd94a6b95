"""The batch on a CPU: every sequence has a row of the cache to itself, and decoding uses repacked linear layers.

With weights repacked into oneDNN's layout a decode step takes a fifth less time at 64 rows and a third less at 16
(benchmarks/decode_cpu.py). Repacking costs about as much time as ten steps save, and memory for a second copy. So
weights are repacked only if more steps than that follow and the copy is small compared with the machine's memory; an
update of the weights makes the copy invalid.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from covey.memory import cache_tokens, grown_size, machine_memory
from covey.models.products import fast_linears
from covey.rollout.embedded.allocation import RowManager
from covey.rollout.embedded.cache import RowCache
from covey.rollout.embedded.runner import Drawn, Runner, draw_next
from covey.rollout.embedded.scheduler import RequestState, Scheduler, reject_too_long

MIN_STEPS = 16  # decode steps ahead that are worth repacking
SHARE = 0.1  # of the machine's memory that the copy may take
ROWS = 64  # batch size that the layout is optimised for; others profit too
ROUND = 64  # tokens: the length of rows is rounded up to a multiple


class PackedLinears:
    def __init__(self, model: Any) -> None:
        self.layers = [
            module
            for module in model.modules()
            if type(module) is torch.nn.Linear
            and module.weight.device.type == "cpu"
            and module.weight.dtype == torch.float32
        ]
        size = sum(layer.weight.nbytes for layer in self.layers)
        if size > SHARE * machine_memory() or not torch.backends.mkldnn.is_available():
            self.layers = []
        self.forwards: list[Callable[[Tensor], Tensor]] = []  # of the layers; empty: not packed

    def pack(self) -> None:
        """Pack the current weights, unless they are packed."""
        if not self.forwards:
            self.forwards = [_packed(layer.weight.detach(), layer.bias) for layer in self.layers]

    def drop(self) -> None:
        self.forwards = []

    @contextmanager
    def used(self) -> Iterator[None]:
        """Use the packed layers in this context, if there are any."""
        layers = self.layers if self.forwards else []
        for layer, forward in zip(layers, self.forwards, strict=True):
            layer.__dict__["forward"] = forward  # bypasses Module.__setattr__, which would cost more than this saves
        try:
            yield
        finally:
            for layer in layers:
                del layer.__dict__["forward"]


def _packed(weight: Tensor, bias: Tensor | None) -> Callable[[Tensor], Tensor]:
    packed = torch.ops.mkldnn._reorder_linear_weight(weight, ROWS)

    def forward(x: Tensor) -> Tensor:
        out: Tensor = torch.ops.mkldnn._linear_pointwise(x, packed, bias, "none", [], "")
        return out

    return forward


class RowBatch:
    """The batch on a CPU. Its cache grows in place: one row for each concurrent request (at most `max_rows`), each with
    room for the longest of them."""

    def __init__(self, model: Any, *, max_rows: int, longest: int | None, memory: float) -> None:
        self.max_rows = max_rows
        self.longest = longest
        self.capacity = cache_tokens(model, memory)
        self.rows = RowManager()
        self.scheduler = Scheduler(self.rows, max_rows)
        self.cache = RowCache()
        self.runner = Runner(model, self.cache)
        self.linears = PackedLinears(model)

    @property
    def busy(self) -> bool:
        return self.scheduler.busy

    def enter(self, queue: deque[RequestState]) -> list[RequestState]:
        """Pass the queue to the scheduler and admit the requests that fit. Returns the rejected ones."""
        rejected = reject_too_long(queue, self.capacity)
        while queue:
            self.scheduler.add(queue.popleft())
        self._grow()
        with fast_linears(), self.linears.used():
            self.runner.prefill(self.scheduler.admit())
        return rejected

    def enter_waiting(self) -> None:
        """Nothing: requests enter at the next step, together with those that arrive until then."""

    def _grow(self) -> None:
        waiting, running = self.scheduler.waiting, self.scheduler.running
        rows = grown_size(self.cache.rows, min(self.max_rows, len(waiting) + len(running)), self.max_rows)
        longest = max((request.max_length for request in waiting), default=0)
        size = grown_size(self.cache.size, longest, self.longest, ROUND)
        if (rows, size) != (self.cache.rows, self.cache.size):
            self.rows.grow(rows)
            self.cache.grow(rows, size)

    def sample(self) -> Drawn:
        """One token for every running request."""
        self._compact()
        running = sorted(self.scheduler.running, key=lambda request: request.blocks[0])
        if not running:
            return []
        if max(request.remaining for request in running) >= MIN_STEPS:
            self.linears.pack()
        with fast_linears(), self.linears.used():
            logits_BV = self.runner.decode(running)
        return draw_next(running, logits_BV)

    def _compact(self) -> None:
        moved = self.rows.compact()
        for request in self.scheduler.running:
            request.blocks = [moved.get(row, row) for row in request.blocks]
        self.cache.copy(list(moved.items()), columns=self.cache.size)

    def drain(self) -> Drawn:
        """Nothing: every step is read at once."""
        return []

    def finish(self, request: RequestState) -> None:
        (row,), sound = request.blocks, request.is_finite
        self.scheduler.finish(request)
        if not sound:
            self.cache.clear(row)  # decoding reads masked positions too

    def flush(self) -> None:
        """Drop cached prefixes and packed layers: the weights have changed. Requests in progress keep their rows."""
        self.rows.flush()
        self.linears.drop()
