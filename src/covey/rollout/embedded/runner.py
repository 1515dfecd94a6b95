"""Sampling and forward passes of the engine: prompts into the cache (`prefill`), logits of the next token (`decode`),
and one sampled token per row (`draw`).

A token is sampled by inverting the cumulative distribution at one uniform number of the request's own stream, so it
does not depend on the rest of the batch. The log-prob is that of the distribution sampled from: after temperature,
top-k, top-p and min-p.

Shapes: B sequences, Q new tokens of a sequence, N blocks of a sequence or of the vocabulary, V vocabulary.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from itertools import groupby
from typing import Any

import torch
from torch import Tensor

from covey.rollout.embedded.attention import Step, backbone, engine_attention
from covey.rollout.embedded.cache import Cache, Decode, KvCache, PagedDecode, Prefill
from covey.rollout.embedded.images import prefill_with_images
from covey.rollout.embedded.scheduler import PrefillGroup, RequestState
from covey.streams import uniform
from covey.types import Sampling

BLOCK_LOGITS = 16_000_000  # logits that are processed at once
BLOCK_TOKENS = 256  # tokens of a block of the vocabulary: probabilities are summed by block first
PREFILL_TOKENS = 8192  # of one forward pass, padding included

Drawn = list[tuple[RequestState, Sequence[int], Sequence[float]]]  # next tokens of a sequence, with log-probs


def draw_next(rows: Sequence[RequestState], logits_BV: Tensor) -> Drawn:
    """One token for each row."""
    id_B, logprob_B = draw(logits_BV, [row.sampling for row in rows], [len(row.ids) for row in rows])
    return [
        (row, [token], [logprob]) for row, token, logprob in zip(rows, id_B.tolist(), logprob_B.tolist(), strict=True)
    ]


def draw(logits_BV: Tensor, settings: Sequence[Sampling], positions: Sequence[int]) -> tuple[Tensor, Tensor]:
    """Token ids [B] and log-probs [B] (float32). Greedy rows have log-prob 0: all probability is on one token. If
    logits are not finite, the log-prob is not finite either and the token is meaningless. Works on a few rows at a
    time, so the memory beside the logits does not grow with the batch."""
    size = max(1, BLOCK_LOGITS // logits_BV.shape[-1])
    drawn = [
        _draw(logits_BV[start : start + size], settings[start : start + size], positions[start : start + size])
        for start in range(0, len(settings), size)
    ]
    id_B, logprob_B = (torch.cat(column) for column in zip(*drawn, strict=True))
    return id_B, logprob_B


def _draw(logits_BV: Tensor, settings: Sequence[Sampling], positions: Sequence[int]) -> tuple[Tensor, Tensor]:
    device = logits_BV.device
    greedy_B = torch.tensor([s.temperature == 0 for s in settings], device=device)
    if bool(greedy_B.all()):
        return _likeliest(logits_BV)
    cooled_BV = logits_BV.float()
    if any(s.temperature not in (0, 1) for s in settings):
        cooled_BV = cooled_BV / torch.tensor([s.temperature or 1.0 for s in settings], device=device)[:, None]
    if any(truncates(s) for s in settings):
        probs_BV = truncate(cooled_BV.log_softmax(-1), settings).exp()
    else:
        probs_BV = cooled_BV.softmax(-1)
    u_B = torch.tensor(
        [uniform(s.seed, t) for s, t in zip(settings, positions, strict=True)], dtype=torch.float64, device=device
    )
    id_B = invert(probs_BV, u_B)
    logprob_B = probs_BV.gather(-1, id_B[:, None])[:, 0].log()
    if bool(greedy_B.any()):
        likeliest_B, certain_B = _likeliest(logits_BV)
        return torch.where(greedy_B, likeliest_B, id_B), torch.where(greedy_B, certain_B, logprob_B)
    return id_B, logprob_B


def _likeliest(logits_BV: Tensor) -> tuple[Tensor, Tensor]:
    """The most likely token of each row, and log-prob 0, or NaN if a logit is NaN or infinite."""
    highest_B, id_B = logits_BV.max(-1)
    return id_B, (highest_B - highest_B).float()


def invert(probs_BV: Tensor, u_B: Tensor) -> Tensor:
    """The first token of each row whose cumulative probability is above u, [B]. First the block, then the token in it,
    so that only sums of blocks are accumulated over the vocabulary."""
    rows, vocabulary = probs_BV.shape
    size = math.gcd(vocabulary, BLOCK_TOKENS)
    block_BNS = probs_BV.view(rows, -1, size)
    sum_BN = block_BNS.sum(-1).double()
    cumulative_BN = sum_BN.cumsum(-1)
    target_B = u_B * cumulative_BN[:, -1]
    row_B, block_B = torch.arange(rows, device=probs_BV.device), _first_above(cumulative_BN, target_B)
    before_B = cumulative_BN[row_B, block_B] - sum_BN[row_B, block_B]
    inside_BS = block_BNS[row_B, block_B].cumsum(-1, dtype=torch.float64)
    return block_B * size + _first_above(inside_BS, (target_B - before_B).clamp_min(0))


def _first_above(cumulative_BN: Tensor, target_B: Tensor) -> Tensor:
    """The first entry above the target. If rounding puts the target at the total, the last entry with any
    probability."""
    last_B = (cumulative_BN < cumulative_BN[:, -1:]).sum(-1)
    return torch.minimum(torch.searchsorted(cumulative_BN, target_B[:, None], right=True)[:, 0], last_B)


def truncates(s: Sampling) -> bool:
    return s.temperature > 0 and (s.top_k > 0 or s.top_p < 1 or s.min_p > 0)


def truncate(logprobs_BV: Tensor, settings: Sequence[Sampling]) -> Tensor:
    """Keep the top_k most likely tokens; of those, renormalised, the fewest whose probability reaches top_p; of those,
    the ones at least min_p times as likely as the most likely one. Renormalised, −inf elsewhere."""
    device, vocabulary = logprobs_BV.device, logprobs_BV.shape[-1]
    top_k_B = torch.tensor([s.top_k or vocabulary for s in settings], device=device)
    top_p_B = torch.tensor([s.top_p for s in settings], device=device)
    min_p_B = torch.tensor([s.min_p for s in settings], device=device)
    sorted_BV, order_BV = logprobs_BV.sort(dim=-1, descending=True, stable=True)
    keep_BV = torch.arange(vocabulary, device=device) < top_k_B[:, None]
    probs_BV = torch.where(keep_BV, sorted_BV.exp(), torch.zeros_like(sorted_BV))
    probs_BV = probs_BV / probs_BV.sum(-1, keepdim=True)
    before_BV = probs_BV.cumsum(-1) - probs_BV
    keep_BV &= (before_BV < top_p_B[:, None]) | (top_p_B[:, None] >= 1)
    keep_BV &= probs_BV >= min_p_B[:, None] * probs_BV[:, :1]
    kept_BV = sorted_BV.masked_fill(~keep_BV, float("-inf"))
    kept_BV = kept_BV - kept_BV.logsumexp(-1, keepdim=True)
    return torch.full_like(kept_BV, float("-inf")).scatter(-1, order_BV, kept_BV)


# -- Forward passes --------------------------------------------------------------------------------------------------


class Runner:
    def __init__(self, model: Any, cache: Cache) -> None:
        self.model = model
        self.cache = cache

    @property
    def device(self) -> torch.device:
        device: torch.device = self.model.get_input_embeddings().weight.device
        return device

    # -- prompts -------------------------------------------------------------------------------------------------

    def prefill(self, groups: Sequence[PrefillGroup]) -> None:
        """Compute all tokens but the last of every group once, and copy what its followers do not share."""
        for batch in _dependency_order(groups, self.cache.size):
            for shared, same in groupby(batch, key=lambda group: group.shared):
                pairs = [(group.source, group.leader.blocks[0]) for group in same if group.source is not None]
                self.cache.copy(pairs, columns=shared)
            self._fill([group.leader for group in batch], [group.shared for group in batch])
        for group in groups:
            leader, *followers = group.members
            pairs = [
                (source, target)
                for follower in followers
                for source, target in zip(leader.blocks, follower.blocks, strict=True)
                if source != target
            ]
            self.cache.copy(pairs, columns=min(leader.cached, self.cache.size))

    def _fill(self, rows: Sequence[RequestState], starts: Sequence[int]) -> None:
        """Compute tokens from `starts` on, in passes of at most PREFILL_TOKENS, the longest first."""
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

    def _prefill(self, rows: Sequence[RequestState], starts: Sequence[int], lengths: Sequence[int]) -> None:
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
            if any(row.images for row in rows):
                prefill_with_images(self.model, rows, starts, lengths, ids_BQ.to(device))
            else:
                # Positions of padding must not be beyond the longest row.
                position_BQ = torch.minimum(step.position_BQ, step.end_B[:, None] - 1)
                backbone(self.model)(input_ids=ids_BQ.to(device), position_ids=position_BQ, use_cache=False)

    # -- one token -----------------------------------------------------------------------------------------------

    def decode(self, rows: Sequence[RequestState]) -> Tensor:
        """Logits of the next token of every sequence, [B, V]. In a RowCache, sequences must be ordered by row."""
        position_B = torch.tensor([row.cached for row in rows], device=self.device)
        shifts = [row.position_shift for row in rows]
        position_ids_B = position_B + torch.tensor(shifts, device=self.device) if any(shifts) else position_B
        step: Step
        if isinstance(self.cache, KvCache):
            step = PagedDecode(self.cache, self._table(rows).to(self.device), position_B)
        else:
            step = Decode(self.cache, self._table(rows)[:, 0], position_B)
        with engine_attention(self.model, step):
            out = self.model(
                input_ids=torch.tensor([row.next_token for row in rows], device=self.device)[:, None],
                position_ids=position_ids_B[:, None],
                use_cache=False,
            )
        logits: Tensor = out.logits[:, -1]
        return logits

    def _table(self, rows: Sequence[RequestState]) -> Tensor:
        """The blocks of each sequence, [B, N], padded with any block: positions never reach the padding."""
        width = max(len(row.blocks) for row in rows)
        return torch.tensor([row.blocks + row.blocks[:1] * (width - len(row.blocks)) for row in rows])


def _dependency_order(groups: Sequence[PrefillGroup], size: int) -> Iterator[list[PrefillGroup]]:
    """Batches in which no group needs a block that another group of the same batch fills."""
    filled_by: dict[int, int] = {}  # block → number of the batch that fills it
    batches: list[list[PrefillGroup]] = []
    for group in groups:
        blocks, full = group.leader.blocks, group.shared // size
        needed = blocks[:full] if group.source is None else [group.source]
        number = max((filled_by[block] + 1 for block in needed if block in filled_by), default=0)
        filled_by.update(dict.fromkeys(blocks[full:], number))
        batches += [[]] if number == len(batches) else []
        batches[number].append(group)
    yield from batches
