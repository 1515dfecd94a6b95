"""Laying out token rows for a forward pass: no padding, and the prompt of a group is computed once.

All prompts come first, then the answers to each, in one long line:

    prompt 1      prompt 2   │ answer 1.1   answer 1.2   answer 2.1
    0 1 2 3 4     0 1 2      │ 5 6 7        5 6          3 4 5 6         positions

The last token of an answer predicts nothing and is left out. Every answer attends to its prompt and to itself
(`attention.py`), and its positions go on from the prompt's, so each answer sees exactly what it would see alone.

Shapes: T tokens of the line, M sampled tokens.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from itertools import accumulate, chain

import torch
from torch import Tensor

from covey.learner.attention import Layout
from covey.types import Sample

Bunch = list[int]  # the numbers of rows with one prompt


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
    limit = max_rows or len(rows)
    bunches = sorted(_bunches(rows, token_budget, limit), key=lambda bunch: -_length(rows, bunch))
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
            answer = len(rows[index].response_ids) - 1
            if bunch and (length + answer > limit or len(bunch) >= max_rows):
                bunches.append(bunch)
                bunch, length = [], len(prompt)
            bunch.append(index)
            length += answer
        bunches.append(bunch)
    return bunches


def _length(rows: Sequence[Sample], bunch: Bunch) -> int:
    return len(rows[bunch[0]].prompt_ids) + sum(len(rows[index].response_ids) - 1 for index in bunch)


def pack(rows: Sequence[Sample], bunches: Sequence[Bunch]) -> Packed:
    """The line of one micro-batch. `row_M` counts the rows in the order of the bunches."""
    prompts = [rows[bunch[0]].prompt_ids for bunch in bunches]
    flat = [rows[index] for bunch in bunches for index in bunch]
    prompt_ends = list(accumulate(map(len, prompts)))
    before = [(end - 1, len(p)) for end, p, bunch in zip(prompt_ends, prompts, bunches, strict=True) for _ in bunch]
    lengths = [len(row.response_ids) - 1 for row in flat]
    starts = list(accumulate(lengths, initial=prompt_ends[-1]))
    position = [torch.arange(len(prompt)) for prompt in prompts]
    position += [torch.arange(first, first + length) for (_, first), length in zip(before, lengths, strict=True)]
    source, column, number = [], [], []
    for index, (row, start, (last_of_prompt, _)) in enumerate(zip(flat, starts, before, strict=False)):
        sampled = torch.tensor(row.mask).nonzero()[:, 0]
        source.append(torch.where(sampled == 0, last_of_prompt, start + sampled - 1))
        column.append(sampled)
        number.append(torch.full_like(sampled, index))
    answers = [torch.tensor(row.response_ids) for row in flat]
    return Packed(
        layout=Layout.of(
            [len(prompt) for prompt in prompts],
            [[len(rows[index].response_ids) - 1 for index in bunch] for bunch in bunches],
        ),
        ids_T=torch.cat([torch.tensor(list(chain(*prompts))), *(answer[:-1] for answer in answers)]),
        position_T=torch.cat(position),
        source_M=torch.cat(source),
        target_M=torch.cat([answer[at] for answer, at in zip(answers, column, strict=True)]),
        row_M=torch.cat(number),
        column_M=torch.cat(column),
    )
