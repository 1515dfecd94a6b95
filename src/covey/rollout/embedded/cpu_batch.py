"""Matrix products on a CPU with weights in the order in which they are multiplied.

With weights that oneDNN has laid out for itself a step of decoding takes a fifth less time at 64 rows, a third less at
16 (benchmarks/decode_cpu.py). Laying them out costs what about ten steps win, and memory for a second copy: it is done
when more steps than that are ahead, and where the copy is small beside the machine. New weights make it void.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from covey.memory import cache_tokens, grown, machine_memory
from covey.rollout.embedded.allocation import RowManager
from covey.rollout.embedded.cache import RowCache
from covey.rollout.embedded.runner import Drawn, Runner, draw_next
from covey.rollout.embedded.scheduler import Running, Scheduler, refuse

WORTH_PACKING = 16  # steps ahead
SHARE = 0.1  # of this machine's memory that the copy may take
ROWS = 64  # that the order is best for; it is good for others too


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
        self.forwards: list[Callable[[Tensor], Tensor]] = []  # of the layers, once they are packed

    def pack(self) -> None:
        """With the weights of this moment, unless it is done."""
        if not self.forwards:
            self.forwards = [_packed(layer.weight.detach(), layer.bias) for layer in self.layers]

    def drop(self) -> None:
        self.forwards = []

    @contextmanager
    def used(self) -> Iterator[None]:
        """While this lasts, the model's linear layers are the packed ones, if there are any."""
        layers = self.layers if self.forwards else []
        for layer, forward in zip(layers, self.forwards, strict=True):
            layer.__dict__["forward"] = forward  # past Module's own bookkeeping, which would cost more than it saves
        try:
            yield
        finally:
            for layer in layers:
                del layer.__dict__["forward"]


def _packed(weight: Tensor, bias: Tensor | None) -> Callable[[Tensor], Tensor]:
    laid_out = torch.ops.mkldnn._reorder_linear_weight(weight, ROWS)

    def forward(x: Tensor) -> Tensor:
        found: Tensor = torch.ops.mkldnn._linear_pointwise(x, laid_out, bias, "none", [], "")
        return found

    return forward


# -- The batch on a CPU: every sequence has a row of the cache to itself -----------------------------------------------

ROUND = 64  # tokens


class SlottedBatch:
    """The cache grows where it is, with whoever is in it: to as many rows as there are requests at a time (at most
    `max_rows`), each as long as the longest of them could become."""

    def __init__(self, model: Any, *, max_rows: int, longest: int | None, memory: float) -> None:
        self.max_rows = max_rows
        self.longest = longest
        self.room = cache_tokens(model, memory)
        self.rows = RowManager()
        self.scheduler = Scheduler(self.rows, max_rows)
        self.cache = RowCache()
        self.runner = Runner(model, self.cache)
        self.linears = PackedLinears(model)

    @property
    def busy(self) -> bool:
        return self.scheduler.busy

    def enter(self, queue: deque[Running]) -> list[Running]:
        """Everybody waits with the scheduler, and who can enter does. Who was refused."""
        refused = refuse(queue, self.room)
        while queue:
            self.scheduler.add(queue.popleft())
        self._grow()
        with self.linears.used():
            self.runner.prefill(self.scheduler.admit())
        return refused

    def _grow(self) -> None:
        waiting, running = self.scheduler.waiting, self.scheduler.running
        rows = grown(self.cache.rows, min(self.max_rows, len(waiting) + len(running)), self.max_rows)
        longest = max((request.longest for request in waiting), default=0)
        size = grown(self.cache.size, longest, self.longest, ROUND)
        if (rows, size) != (self.cache.rows, self.cache.size):
            self.rows.grow(rows)
            self.cache.grow(rows, size)

    def sample(self) -> Drawn:
        """One token for everybody."""
        self._compact()
        running = sorted(self.scheduler.running, key=lambda request: request.blocks[0])
        if not running:
            return []
        if max(request.left for request in running) >= WORTH_PACKING:
            self.linears.pack()
        with self.linears.used():
            logits_BV = self.runner.decode(running)
        return draw_next(running, logits_BV)

    def _compact(self) -> None:
        moved = self.rows.compact()
        for request in self.scheduler.running:
            request.blocks = [moved.get(row, row) for row in request.blocks]
        self.cache.copy(list(moved.items()), columns=self.cache.size)

    def finish(self, request: Running) -> None:
        (row,), sound = request.blocks, request.sound
        self.scheduler.finish(request)
        if not sound:
            self.cache.clear(row)  # decoding reads masked places too

    def forget(self) -> None:
        """Other weights: what the old ones computed is void, but for those whose answers it began."""
        self.rows.forget()
        self.linears.drop()
