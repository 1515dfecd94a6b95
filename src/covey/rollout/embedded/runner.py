"""Forward passes of the engine: tokens into the cache, and one new token of every sequence.

Shapes: B sequences, Q new tokens of a sequence, N blocks of a sequence, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import groupby
from typing import Any

import torch
from torch import Tensor

from covey.rollout.embedded.attention import Step, backbone, engine_attention
from covey.rollout.embedded.cache import Cache, Decode, KvCache, PagedDecode, Prefill
from covey.rollout.embedded.scheduler import Entry, Running

PREFILL_TOKENS = 8192  # of one forward pass, padding included


class Runner:
    def __init__(self, model: Any, cache: Cache) -> None:
        self.model = model
        self.cache = cache

    @property
    def device(self) -> torch.device:
        found: torch.device = self.model.get_input_embeddings().weight.device
        return found

    # -- prompts -------------------------------------------------------------------------------------------------

    def prefill(self, entries: Sequence[Entry]) -> None:
        """All tokens but the last of every entry, and copies of what its followers do not share."""
        for batch in _in_order(entries, self.cache.size):
            for shared, same in groupby(batch, key=lambda entry: entry.shared):
                pairs = [(entry.source, entry.leader.blocks[0]) for entry in same if entry.source is not None]
                self.cache.copy(pairs, columns=shared)
            self._fill([entry.leader for entry in batch], [entry.shared for entry in batch])
        for entry in entries:
            leader, *followers = entry.members
            pairs = [
                (source, target)
                for follower in followers
                for source, target in zip(leader.blocks, follower.blocks, strict=True)
                if source != target
            ]
            self.cache.copy(pairs, columns=min(leader.cached, self.cache.size))

    def _fill(self, rows: Sequence[Running], starts: Sequence[int]) -> None:
        """Tokens from `starts` on in chunks that keep within the budget, the longest first."""
        todo = [(row, start) for row, start in zip(rows, starts, strict=True) if start < row.cached]
        while todo:
            todo.sort(key=lambda item: item[0].cached - item[1], reverse=True)
            width = min(todo[0][0].cached - todo[0][1], PREFILL_TOKENS)
            count = max(1, PREFILL_TOKENS // width)
            now, later = todo[:count], todo[count:]
            lengths = [min(width, row.cached - start) for row, start in now]
            self._prefill([row for row, _ in now], [start for _, start in now], lengths)
            moved = [(row, start + length) for (row, start), length in zip(now, lengths, strict=True)]
            todo = [(row, start) for row, start in moved if start < row.cached] + later

    def _prefill(self, rows: Sequence[Running], starts: Sequence[int], lengths: Sequence[int]) -> None:
        width = max(lengths)
        ids_BQ = torch.zeros(len(rows), width, dtype=torch.int64)
        for index, (row, start, length) in enumerate(zip(rows, starts, lengths, strict=True)):
            ids_BQ[index, :length] = torch.tensor(row.tokens[start : start + length])
        device = self.device
        step = Prefill(
            self.cache,
            self._table(rows).to(device),
            torch.tensor(starts, device=device),
            torch.tensor(lengths, device=device),
            width,
        )
        with engine_attention(self.model, step):
            backbone(self.model)(input_ids=ids_BQ.to(device), position_ids=step.position_BQ, use_cache=False)

    # -- one token -----------------------------------------------------------------------------------------------

    def decode(self, rows: Sequence[Running]) -> Tensor:
        """Logits of the next token of every sequence, [B, V]; in a RowCache these stand in the order of their rows."""
        position_B = torch.tensor([row.cached for row in rows], device=self.device)
        step: Step
        if isinstance(self.cache, KvCache):
            step = PagedDecode(self.cache, self._table(rows).to(self.device), position_B)
        else:
            step = Decode(self.cache, self._table(rows)[:, 0], position_B)
        with engine_attention(self.model, step):
            out = self.model(
                input_ids=torch.tensor([row.next for row in rows], device=self.device)[:, None],
                position_ids=position_B[:, None],
                use_cache=False,
            )
        logits: Tensor = out.logits[:, -1]
        return logits

    def _table(self, rows: Sequence[Running]) -> Tensor:
        """The blocks of each sequence, [B, N]; where it has fewer, any: no position reaches them."""
        width = max(len(row.blocks) for row in rows)
        return torch.tensor([row.blocks + row.blocks[:1] * (width - len(row.blocks)) for row in rows])


def _in_order(entries: Sequence[Entry], size: int) -> Iterator[list[Entry]]:
    """Batches in which nobody needs a block that another member is only about to fill."""
    when: dict[int, int] = {}  # block → number of the batch that fills it
    batches: list[list[Entry]] = []
    for entry in entries:
        blocks, full = entry.leader.blocks, entry.shared // size
        needed = blocks[:full] if entry.source is None else [entry.source]
        number = max((when[block] + 1 for block in needed if block in when), default=0)
        when.update(dict.fromkeys(blocks[full:], number))
        batches += [[]] if number == len(batches) else []
        batches[number].append(entry)
    yield from batches
