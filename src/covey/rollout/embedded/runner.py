"""Forward passes of the engine: tokens into the cache, and one new token of every sequence.

Shapes: B sequences, Q new tokens of a sequence, N blocks of a sequence, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from covey.rollout.embedded.attention import Step, engine_attention
from covey.rollout.embedded.cache import Decode, KvCache, PagedDecode, Prefill
from covey.rollout.embedded.scheduler import Entry, Running

PREFILL_TOKENS = 8192  # of one forward pass, padding included
WORTH_SHARING = 8  # tokens that prompts must have in common for a pass of their own


class Runner:
    """`paged`: sequences lie in many small blocks; otherwise each is one block, and its row in the batch."""

    def __init__(self, model: Any, cache: KvCache, *, paged: bool) -> None:
        self.model = model
        self.cache = cache
        self.paged = paged

    @property
    def device(self) -> torch.device:
        found: torch.device = self.model.get_input_embeddings().weight.device
        return found

    # -- prompts -------------------------------------------------------------------------------------------------

    def prefill(self, entries: Sequence[Entry]) -> None:
        """All tokens but the last of every entry, and copies of what its followers do not share."""
        for batch in _in_order(entries, self.cache.size):
            starts = [entry.shared for entry in batch]
            if not self.paged:
                starts = self._common_beginning(batch)
            self._fill([entry.leader for entry in batch], starts)
        for entry in entries:
            full = entry.leader.cached // self.cache.size
            pairs = [
                (source, target)
                for follower in entry.members[1:]
                for source, target in zip(entry.leader.blocks[full:], follower.blocks[full:], strict=True)
            ]
            self.cache.copy(pairs, columns=None if self.paged else entry.leader.cached)

    def _common_beginning(self, batch: Sequence[Entry]) -> list[int]:
        """What all prompts begin with is computed once and copied; where to go on."""
        first, *others = (entry.leader for entry in batch)
        same = 0
        if others:
            prompts = [entry.leader.tokens[:-1] for entry in batch]
            low, high = min(prompts), max(prompts)
            while same < min(map(len, prompts)) and low[same] == high[same]:
                same += 1
        if same < WORTH_SHARING:
            return [0] * len(batch)
        self._fill([first], [0], same)
        self.cache.copy([(first.blocks[0], other.blocks[0]) for other in others], columns=same)
        return [same] * len(batch)

    def _fill(self, rows: Sequence[Running], starts: Sequence[int], until: int | None = None) -> None:
        """Tokens from `starts` on (up to `until`) in chunks that keep within the budget."""
        todo = [(row, start) for row, start in zip(rows, starts, strict=True) if start < (until or row.cached)]
        while todo:
            todo.sort(key=lambda item: (until or item[0].cached) - item[1], reverse=True)
            width = min((until or todo[0][0].cached) - todo[0][1], PREFILL_TOKENS)
            now, later = todo[: max(1, PREFILL_TOKENS // width)], todo[max(1, PREFILL_TOKENS // width) :]
            lengths = [min(width, (until or row.cached) - start) for row, start in now]
            self._prefill([row for row, _ in now], [start for _, start in now], lengths)
            moved = [(row, start + length) for (row, start), length in zip(now, lengths, strict=True)]
            todo = [(row, start) for row, start in moved if start < (until or row.cached)] + later

    def _prefill(self, rows: Sequence[Running], starts: Sequence[int], lengths: Sequence[int]) -> None:
        width = max(lengths)
        ids_BQ = torch.zeros(len(rows), width, dtype=torch.int64)
        for index, (row, start, length) in enumerate(zip(rows, starts, lengths, strict=True)):
            ids_BQ[index, :length] = torch.tensor(row.tokens[start : start + length])
        device = self.device
        step = Prefill(
            self.cache,
            self.table(rows).to(device),
            torch.tensor(starts, device=device),
            torch.tensor(lengths, device=device),
            width,
        )
        lm = self.model.get_base_model() if hasattr(self.model, "get_base_model") else self.model
        with engine_attention(self.model, step):
            lm.base_model(input_ids=ids_BQ.to(device), position_ids=step.position_BQ, use_cache=False)

    # -- one token -----------------------------------------------------------------------------------------------

    def decode(self, rows: Sequence[Running | None]) -> Tensor:
        """Logits of the next token of every row, [B, V]. None: a hole in the batch, whose row means nothing."""
        ids = [0 if row is None else row.next for row in rows]
        position_B = torch.tensor([0 if row is None else row.cached for row in rows], device=self.device)
        step: Step
        if self.paged:
            assert all(row is not None for row in rows)
            step = PagedDecode(self.cache, self.table([row for row in rows if row]).to(self.device), position_B)
        else:
            step = Decode(self.cache, position_B)
        with engine_attention(self.model, step):
            out = self.model(
                input_ids=torch.tensor(ids, device=self.device)[:, None],
                position_ids=position_B[:, None],
                use_cache=False,
            )
        logits: Tensor = out.logits[:, -1]
        return logits

    def table(self, rows: Sequence[Running]) -> Tensor:
        """The blocks of each sequence, [B, N]; the scratch block where it has fewer, which no position reaches."""
        width, scratch = max(len(row.blocks) for row in rows), self.cache.scratch
        return torch.tensor([row.blocks + [scratch] * (width - len(row.blocks)) for row in rows], dtype=torch.int64)


def _in_order(entries: Sequence[Entry], size: int) -> Iterator[list[Entry]]:
    """Batches in which nobody needs a block that another member is only about to fill."""
    batch: list[Entry] = []
    filling: set[int] = set()
    for entry in entries:
        if filling & set(entry.leader.blocks[: entry.shared // size]):
            yield batch
            batch, filling = [], set()
        batch.append(entry)
        filling |= set(entry.leader.blocks[entry.shared // size :])
    if batch:
        yield batch
