"""Decoding on a GPU: one step is captured as a CUDA graph and replayed; the host looks at the tokens only now and then.

Everything a step changes lies in buffers on the GPU: the tokens to feed, their positions, the blocks of each sequence,
the uniform numbers, what was drawn. A graph is captured for each size of the batch (rounded up); rows without a
sequence write to the cache's scratch block. The decoder layers are compiled once for all layers and sizes (their small
operations become few kernels), attention is `kernels.paged_attention`.

Shapes: B rows of the batch, N blocks of a sequence, T steps between two looks.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from covey.rollout.embedded import attention
from covey.rollout.embedded.cache import KvCache
from covey.rollout.embedded.kernels import draw_and_advance, paged_attention, splits_for
from covey.rollout.embedded.scheduler import Running
from covey.rollout.streams import uniform

STEPS = 8  # between two looks of the host


class GraphStep:
    """What the attention of a captured step reads and writes."""

    def __init__(self, cache: KvCache, table_BN: Tensor, position_B: Tensor, splits: int) -> None:
        assert cache.keys is not None and cache.values is not None
        self.keys, self.values = cache.keys, cache.values
        self.table_BN = table_BN
        self.position_B = position_B
        self.splits = splits

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor, scale: float, window: int | None) -> Tensor:
        found: Tensor = paged_attention(
            q, k, v, self.keys, self.values, layer, self.table_BN, self.position_B, scale, window or 0, self.splits
        )
        return found


class GraphDecoder:
    def __init__(self, model: Any, cache: KvCache, *, rows: int, blocks: int, compiled: bool) -> None:
        device = model.get_input_embeddings().weight.device
        self.model = model
        self.cache = cache
        self.compiled = compiled
        self.ids_B = torch.zeros(rows, dtype=torch.int64, device=device)
        self.position_B = torch.zeros(rows, dtype=torch.int64, device=device)
        self.step_B = torch.zeros(rows, dtype=torch.int32, device=device)
        self.table_BN = torch.full((rows, blocks), cache.scratch, dtype=torch.int32, device=device)
        self.temperature_B = torch.ones(rows, dtype=torch.float32, device=device)
        self.uniform_BT = torch.zeros(rows, STEPS, dtype=torch.float32, device=device)
        self.out_ids_BT = torch.zeros(rows, STEPS, dtype=torch.int64, device=device)
        self.out_logprobs_BT = torch.zeros(rows, STEPS, dtype=torch.float32, device=device)
        self.graphs: dict[tuple[int, bool], tuple[torch.cuda.CUDAGraph, Tensor]] = {}
        self.pool: Any = None
        self.loaded: list[tuple[Running, int]] = []  # the sequences in the buffers, and how many blocks they had
        self.numbers: dict[Running, list[float]] = {}  # uniform numbers of the next steps, by sequence
        self.processors = torch.cuda.get_device_properties(device).multi_processor_count

    def run(self, rows: Sequence[Running], steps: int) -> tuple[list[list[int]], list[list[float]]]:
        """The next `steps` tokens of every sequence and their log-probs."""
        graph, _ = self._graph(self._size(len(rows)), draws=True)
        self._load(rows, steps)
        for _ in range(steps):
            graph.replay()
        # While the GPU works: the numbers of the next steps, which most rows will want.
        self.numbers = {row: self._uniform(row, len(row.ids) + steps, steps) for row in rows if row.left > steps}
        ids, logprobs = self.out_ids_BT[: len(rows), :steps], self.out_logprobs_BT[: len(rows), :steps]
        return ids.tolist(), logprobs.tolist()

    def logits(self, rows: Sequence[Running]) -> Tensor:
        """Of the next token, for who draws in another way."""
        graph, logits_BV = self._graph(self._size(len(rows)), draws=False)
        self._load(rows, 1)
        self.loaded, self.numbers = [], {}
        graph.replay()
        return logits_BV[: len(rows)]

    def _size(self, rows: int) -> int:
        """The batch that is captured for so many rows: powers of two, and halves between them."""
        size = 1
        while size < rows:
            size = (
                size * 3 // 2
                if size & (size - 1) == 0 and size >= 8 and size * 3 // 2 >= rows
                else 1 << size.bit_length()
            )
        return min(size, len(self.ids_B))

    def _load(self, rows: Sequence[Running], steps: int) -> None:
        """Fill the buffers. Rows that are where they were have their next token and position there already."""
        size, width = self._size(len(rows)), self.table_BN.shape[1]
        spare, scratch = size - len(rows), self.cache.scratch
        now = [(row, len(row.blocks)) for row in rows]
        if now != self.loaded:
            table = [row.blocks + [scratch] * (width - len(row.blocks)) for row in rows] + [[scratch] * width] * spare
            self.table_BN[:size] = torch.tensor(table, dtype=torch.int32)
        if [row for row, _ in now] != [row for row, _ in self.loaded] or spare:
            self.ids_B[:size] = torch.tensor([row.next for row in rows] + [0] * spare)
            self.position_B[:size] = torch.tensor([row.cached for row in rows] + [0] * spare)
            self.temperature_B[:size] = torch.tensor([row.sampling.temperature for row in rows] + [0.0] * spare)
        self.loaded = now
        numbers = [self.numbers.get(row) or self._uniform(row, len(row.ids), steps) for row in rows]
        self.uniform_BT[: len(rows), :steps] = torch.tensor([n[:steps] for n in numbers], dtype=torch.float32)
        self.step_B.zero_()

    def _uniform(self, row: Running, first: int, steps: int) -> list[float]:
        return [uniform(row.sampling.seed, first + t) for t in range(steps)]

    def _forward(self, size: int) -> Tensor:
        out = self.model(input_ids=self.ids_B[:size, None], position_ids=self.position_B[:size, None], use_cache=False)
        logits: Tensor = out.logits[:, -1]
        return logits

    def _step(self, size: int, draws: bool) -> Tensor:
        logits_BV = self._forward(size)
        if draws:
            draw_and_advance(
                logits_BV,
                self.temperature_B[:size],
                self.uniform_BT[:size],
                self.ids_B[:size],
                self.position_B[:size],
                self.step_B[:size],
                self.out_ids_BT[:size],
                self.out_logprobs_BT[:size],
            )
        return logits_BV

    def _graph(self, size: int, draws: bool) -> tuple[torch.cuda.CUDAGraph, Tensor]:
        if (size, draws) not in self.graphs:
            self.graphs[size, draws] = self._capture(size, draws)
        return self.graphs[size, draws]

    def _capture(self, size: int, draws: bool) -> tuple[torch.cuda.CUDAGraph, Tensor]:
        """Runs the step a few times on the scratch block first: kernels are compiled, and nothing of value is hurt."""
        kept = [buffer.clone() for buffer in self._buffers()]
        self.table_BN.fill_(self.cache.scratch)
        self.position_B.zero_()
        assert self.cache.keys is not None
        heads = self.cache.keys.shape[2]
        step = GraphStep(
            self.cache, self.table_BN[:size], self.position_B[:size], splits_for(size, heads, self.processors)
        )
        graph = torch.cuda.CUDAGraph()
        with attention.engine_attention(self.model, step), layers_compiled(self.model, self.compiled):
            stream = torch.cuda.Stream()
            stream.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(stream):
                for _ in range(2):
                    self._step(size, draws)
                    self.step_B.zero_()
            torch.cuda.current_stream().wait_stream(stream)
            with torch.cuda.graph(graph, pool=self.pool):
                logits_BV = self._step(size, draws)
        self.pool = self.pool or graph.pool()
        for buffer, before in zip(self._buffers(), kept, strict=True):
            buffer.copy_(before)
        return graph, logits_BV

    def _buffers(self) -> tuple[Tensor, ...]:
        return self.ids_B, self.position_B, self.step_B, self.table_BN


class layers_compiled:
    """While this lasts, the decoder layers run compiled, all by the same code."""

    def __init__(self, model: Any, on: bool) -> None:
        lm = model.get_base_model() if hasattr(model, "get_base_model") else model
        self.layers = list(lm.base_model.layers) if on else []

    def __enter__(self) -> None:
        if not self.layers:
            return
        torch._dynamo.config.allow_unspec_int_on_nn_module = True
        torch._dynamo.config.recompile_limit = max(torch._dynamo.config.recompile_limit, 64)
        for layer in self.layers:
            layer.forward = torch.compile(layer.forward)

    def __exit__(self, *error: object) -> None:
        for layer in self.layers:
            del layer.forward
