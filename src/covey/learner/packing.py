"""Laying out token rows for a forward pass: no padding, and the prompt of a group is computed once.

All prompts come first, then the answers to each, in one long line:

    prompt 1      prompt 2   │ answer 1.1   answer 1.2   answer 2.1
    0 1 2 3 4     0 1 2      │ 5 6 7        5 6          3 4 5 6         positions

The last token of an answer predicts nothing and is left out. Every answer attends to its prompt and to itself
(`attention.py`), and its positions go on from the prompt's, so each answer sees exactly what it would see alone.

Shapes: T tokens of the line, M sampled tokens, R rows, B bunches.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from itertools import chain

import numpy as np
import torch
from torch import Tensor

from covey.learner.attention import Layout
from covey.types import Sample

Bunch = list[int]  # the numbers of rows with one prompt
UNFAIR = 1.25  # times a rank's fair share of tokens: a longer bunch is cut


@dataclass(frozen=True, slots=True)
class Packed:
    """A forward pass: one line of tokens, and where the log-prob of each sampled token is found."""

    layout: Layout
    ids_T: Tensor
    position_T: Tensor
    source_M: Tensor  # place of the token before each sampled token
    target_M: Tensor  # the sampled token
    row_M: Tensor  # its row and column in the [R, T] layout
    column_M: Tensor

    def to(self, device: torch.device) -> Packed:
        moved = {f.name: getattr(self, f.name).to(device, non_blocking=True) for f in fields(self)}
        return replace(self, **moved)


def plan(rows: Sequence[Sample], token_budget: int, max_rows: int | None = None) -> list[list[Bunch]]:
    """Micro-batches of bunches of row numbers. A micro-batch holds at most `token_budget` tokens and at most `max_rows`
    rows, except where a single row is larger. Large bunches first, so memory peaks at once; each goes where it fits."""
    return share_out(rows, token_budget, max_rows, 1)[0]


def share_out(rows: Sequence[Sample], token_budget: int, max_rows: int | None, world: int) -> list[list[list[Bunch]]]:
    """The micro-batches of each of so many ranks, which get about as many tokens each. Rows with one prompt stay
    together, except where a rank would have far more to do than the others."""
    limit = max_rows or len(rows)
    bunches = _bunches(rows, token_budget, limit)
    if world > 1:
        lengths = [_length(rows, bunch) for bunch in bunches]
        fair = -(-sum(lengths) // world)
        if max(lengths) > UNFAIR * fair:
            most = fair + max(len(row.prompt_ids) for row in rows)  # a prompt that is cut in two is read twice
            bunches = _bunches(rows, min(token_budget, most), limit)
    hands: list[list[Bunch]] = [[] for _ in range(world)]
    load = [0] * world
    for bunch in sorted(bunches, key=lambda bunch: -_length(rows, bunch)):
        lightest = load.index(min(load))
        hands[lightest].append(bunch)
        load[lightest] += _length(rows, bunch)
    return [_fill(rows, hand, token_budget, limit) for hand in hands]


def in_step(
    shares: list[list[list[Bunch]]], rank: int, rows: Sequence[Sample], *, alike: bool
) -> list[tuple[list[Bunch], bool]]:
    """The passes of a rank, and whether they count: its micro-batches, and then a short row again and again, for
    nothing, until all have made the same number of passes (`alike`), or at least one."""
    passes = [(bunches, True) for bunches in shares[rank]]
    least = max(map(len, shares)) if alike else 1
    short = min(range(len(rows)), key=lambda index: rows[index].length)
    return passes + [([[short]], False)] * (least - len(passes))


def _fill(rows: Sequence[Sample], bunches: Sequence[Bunch], token_budget: int, limit: int) -> list[list[Bunch]]:
    """Bunches in the order given, each in the first micro-batch with room."""
    micro_batches: list[list[Bunch]] = []
    room: list[tuple[int, int]] = []  # tokens and rows that a micro-batch has left
    for bunch in bunches:
        tokens = _length(rows, bunch)
        home = next((i for i, (t, r) in enumerate(room) if tokens <= t and len(bunch) <= r), None)
        if home is None:
            home = len(room)
            micro_batches.append([])
            room.append((token_budget, limit))
        micro_batches[home].append(bunch)
        room[home] = (room[home][0] - tokens, room[home][1] - len(bunch))
    return micro_batches


def _bunches(rows: Sequence[Sample], limit: int, max_rows: int) -> list[Bunch]:
    """Rows with the same prompt side by side, as long as they stay within the limit."""
    by_prompt: dict[tuple[int, ...], list[int]] = {}
    for index, row in enumerate(rows):
        by_prompt.setdefault(row.prompt_ids, []).append(index)
    bunches: list[Bunch] = []
    for prompt, members in by_prompt.items():
        bunch: Bunch = []
        length = len(prompt)
        for index in members:
            answer = _fed(rows[index])
            if bunch and (length + answer > limit or len(bunch) >= max_rows):
                bunches.append(bunch)
                bunch, length = [], len(prompt)
            bunch.append(index)
            length += answer
        bunches.append(bunch)
    return bunches


def _length(rows: Sequence[Sample], bunch: Bunch) -> int:
    return len(rows[bunch[0]].prompt_ids) + sum(_fed(rows[index]) for index in bunch)


def _fed(row: Sample) -> int:
    """Tokens of an answer that stand in the line: all but the last. An answer may have none at all."""
    return max(len(row.response_ids) - 1, 0)


def pack(rows: Sequence[Sample], bunches: Sequence[Bunch]) -> Packed:
    """The line of one micro-batch. `row_M` counts the rows in the order of the bunches."""
    flat = [rows[index] for bunch in bunches for index in bunch]
    prompts = [rows[bunch[0]].prompt_ids for bunch in bunches]
    prompt_B = np.array([len(prompt) for prompt in prompts])
    bunch_R = np.repeat(np.arange(len(bunches)), [len(bunch) for bunch in bunches])
    count_R = np.array([len(row.response_ids) for row in flat])
    fed_R = np.array([_fed(row) for row in flat])
    start_R = prompt_B.sum() + fed_R.cumsum() - fed_R  # of each answer in the line
    # All answers one after the other, with their last tokens: N tokens.
    row_N = np.repeat(np.arange(len(flat)), count_R)
    column_N = np.arange(count_R.sum()) - np.repeat(count_R.cumsum() - count_R, count_R)
    answer_N = np.fromiter(chain.from_iterable(row.response_ids for row in flat), np.int64, count_R.sum())
    sampled_N = np.fromiter(chain.from_iterable(row.mask for row in flat), bool, count_R.sum())
    fed_N = column_N < fed_R[row_N]
    before_N = np.where(column_N == 0, prompt_B.cumsum()[bunch_R[row_N]] - 1, start_R[row_N] + column_N - 1)
    prompt_ids = np.fromiter(chain.from_iterable(prompts), np.int64, prompt_B.sum())
    prompt_position = np.arange(prompt_B.sum()) - np.repeat(prompt_B.cumsum() - prompt_B, prompt_B)
    position_N = prompt_B[bunch_R[row_N]] + column_N
    return Packed(
        layout=Layout.of(prompt_B.tolist(), [[_fed(rows[i]) for i in bunch] for bunch in bunches]),
        ids_T=torch.from_numpy(np.concatenate([prompt_ids, answer_N[fed_N]])),
        position_T=torch.from_numpy(np.concatenate([prompt_position, position_N[fed_N]])),
        source_M=torch.from_numpy(before_N[sampled_N]),
        target_M=torch.from_numpy(answer_N[sampled_N]),
        row_M=torch.from_numpy(row_N[sampled_N]),
        column_M=torch.from_numpy(column_N[sampled_N]),
    )
