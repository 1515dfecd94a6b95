"""Laying out token rows for a forward pass: the prompt of a group is computed once.

A line holds a prompt and several answers to it, one after the other:

    prompt            answer 1        answer 2        padding
    0 1 2 3 4         5 6 7           5 6             ·           positions
    p p p p p         1 1 1           2 2             ·           segment

The last token of an answer predicts nothing and is left out. Every answer attends to the prompt and to itself, and its
positions go on from the prompt's, so each answer sees exactly what it would see alone. Answers to one prompt share a
line while the line is short; attention over a long line would cost more than the prompt saves.

Shapes: L lines, W width of the longest line, M sampled tokens.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from covey.types import Sample

LINE_TOKENS = 1024
_PROMPT, _PADDING = 0, -1


@dataclass(frozen=True, slots=True)
class Packed:
    """A forward pass: token lines, and where the log-prob of each sampled token is found."""

    ids_LW: Tensor
    position_LW: Tensor
    segment_LW: Tensor  # 0 prompt, 1.. the answers of the line, −1 padding
    source_M: Tensor  # flat place of the token before each sampled token
    target_M: Tensor  # the sampled token
    row_M: Tensor  # its row and column in the [R, T] layout
    column_M: Tensor

    def to(self, device: torch.device) -> Packed:
        return Packed(*(getattr(self, name).to(device) for name in self.__slots__))

    def allowed(self, window: int | None = None) -> Tensor:
        """Which token attends to which, [L, 1, W, W]; `window` for sliding attention."""
        order = torch.arange(self.ids_LW.shape[1], device=self.ids_LW.device)
        query, key = self.segment_LW[:, :, None], self.segment_LW[:, None, :]
        allowed = (order[:, None] >= order) & ((key == query) | (key == _PROMPT)) & (query != _PADDING)
        if window is not None:
            allowed = allowed & (self.position_LW[:, :, None] - self.position_LW[:, None, :] < window)
        # Padding attends to itself: a row with nothing to attend to would be NaN.
        return (allowed | torch.eye(len(order), dtype=torch.bool, device=order.device))[:, None]


def plan(rows: Sequence[Sample], token_budget: int, max_rows: int | None = None) -> list[list[list[int]]]:
    """Micro-batches of lines of row numbers. A micro-batch holds at most `token_budget` tokens, padding included, and
    at most `max_rows` rows, except where a single row is larger. Longest lines first, so memory peaks at once."""
    lines = _lines(rows, min(LINE_TOKENS, token_budget), max_rows or len(rows))
    lines.sort(key=lambda line: -_line_length(rows, line))
    micro_batches: list[list[list[int]]] = []
    width = count = 0
    for line in lines:
        fits = micro_batches and (len(micro_batches[-1]) + 1) * width <= token_budget
        if not fits or count + len(line) > (max_rows or len(rows)):
            micro_batches.append([])
            width, count = _line_length(rows, line), 0
        micro_batches[-1].append(line)
        count += len(line)
    return micro_batches


def _lines(rows: Sequence[Sample], limit: int, max_rows: int) -> list[list[int]]:
    """Rows with the same prompt side by side, as long as the line stays within the limit."""
    by_prompt: dict[tuple[int, ...], list[int]] = {}
    for index, row in enumerate(rows):
        by_prompt.setdefault(row.prompt_ids, []).append(index)
    lines: list[list[int]] = []
    for prompt, members in by_prompt.items():
        line: list[int] = []
        length = len(prompt)
        for index in members:
            answer = len(rows[index].response_ids) - 1
            if line and (length + answer > limit or len(line) >= max_rows):
                lines.append(line)
                line, length = [], len(prompt)
            line.append(index)
            length += answer
        lines.append(line)
    return lines


def _line_length(rows: Sequence[Sample], line: Sequence[int]) -> int:
    return len(rows[line[0]].prompt_ids) + sum(len(rows[index].response_ids) - 1 for index in line)


def pack(rows: Sequence[Sample], lines: Sequence[Sequence[int]]) -> Packed:
    """Token lines of one micro-batch. `row_M` counts the rows in the order of the lines."""
    width = max(_line_length(rows, line) for line in lines)
    ids = torch.zeros(len(lines), width, dtype=torch.int64)
    position = torch.zeros_like(ids)
    segment = torch.full_like(ids, _PADDING)
    source: list[int] = []
    target: list[int] = []
    place: list[tuple[int, int]] = []
    number = 0
    for at, line in enumerate(lines):
        prompt = rows[line[0]].prompt_ids
        start = len(prompt)
        ids[at, :start] = torch.tensor(prompt)
        position[at, :start] = torch.arange(start)
        segment[at, :start] = _PROMPT
        for part, index in enumerate(line, start=1):
            row = rows[index]
            end = start + len(row.response_ids) - 1
            ids[at, start:end] = torch.tensor(row.response_ids[:-1])
            position[at, start:end] = torch.arange(len(prompt), len(prompt) + end - start)
            segment[at, start:end] = part
            for column, sampled in enumerate(row.mask):
                if sampled:
                    before = len(prompt) - 1 if column == 0 else start + column - 1
                    source.append(at * width + before)
                    target.append(row.response_ids[column])
                    place.append((number, column))
            start, number = end, number + 1
    row_M, column_M = torch.tensor(place, dtype=torch.int64).reshape(-1, 2).unbind(1)
    return Packed(ids, position, segment, torch.tensor(source), torch.tensor(target), row_M, column_M)
