"""Packing: micro-batches without padding, in which the prompt of a group is computed once.

All prompts come first, then the answers to each, in one sequence:

    prompt 1      prompt 2   │ answer 1.1   answer 1.2   answer 2.1
    0 1 2 3 4     0 1 2      │ 5 6 7        5 6          3 4 5 6         positions

The last token of an answer predicts nothing and is dropped. Each answer attends to its prompt and to itself
(`attention.py`), and its positions continue the prompt's, so it sees exactly what it would see alone.

Shapes: T tokens of the packed sequence, M sampled tokens, R rows, P prompt groups, A tokens of all answers.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from itertools import chain
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from covey.learner.attention import Layout
from covey.protocols import Couples
from covey.types import Batch, ImageSpan, Sample

if TYPE_CHECKING:
    from covey.models.image_features import PlacedImages
    from covey.models.vision import Pixels, VisionProcessor

Array = np.ndarray[Any, Any]
PromptKey = tuple[tuple[int, ...], tuple[ImageSpan, ...], tuple[int, ...] | None]
PromptGroup = list[int]  # indices of rows that share a prompt
MicroBatch = list[PromptGroup]  # one forward pass
Pass = tuple[MicroBatch, bool]  # a forward pass, and whether it counts (`passes_of_rank`)
MAX_IMBALANCE = 1.25  # a prompt group above this multiple of a rank's average token count is split over ranks


@dataclass(frozen=True, slots=True)
class Packed:
    """A packed sequence, and the positions in it that predict the sampled tokens."""

    layout: Layout
    ids_T: Tensor
    position_T: Tensor  # [3, T] if images have positions in time, height and width
    source_M: Tensor  # index in the sequence of the token before each sampled token
    target_M: Tensor  # the sampled token
    row_M: Tensor  # its row and column in the [R, T] layout
    column_M: Tensor
    images: PlacedImages | None = None
    pixels: Pixels | None = None  # of the images, as the vision tower takes them

    def to(self, device: torch.device) -> Packed:
        columns = {f.name: getattr(self, f.name) for f in fields(self) if f.name != "pixels"}
        moved = {name: x.to(device, non_blocking=True) for name, x in columns.items() if x is not None}
        return replace(self, **moved)


def plan_micro_batches(
    rows: Sequence[Sample],
    token_budget: int,
    max_rows: int | None = None,
    ranks: int = 1,
    target: int | None = None,
) -> list[list[MicroBatch]]:
    """The micro-batches of each rank, balanced by tokens.

    A micro-batch holds at most `token_budget` tokens and `max_rows` rows, unless a single row is larger. Rows with the
    same prompt stay together, unless that would leave the ranks too unequal. Large prompt groups are placed first, so
    that memory peaks early, each in the first micro-batch with room: up to `target` tokens, if that is given.
    """
    max_rows = max_rows or len(rows)
    groups = _prompt_groups(rows, token_budget, max_rows)
    if ranks > 1:
        lengths = [_tokens(rows, group) for group in groups]
        average = -(-sum(lengths) // ranks)
        if max(lengths) > MAX_IMBALANCE * average:
            limit = average + max(len(row.prompt_ids) for row in rows)  # both halves of a split group have the prompt
            groups = _prompt_groups(rows, min(token_budget, limit), max_rows)
    by_rank: list[list[PromptGroup]] = [[] for _ in range(ranks)]
    load = [0] * ranks
    for group in sorted(groups, key=lambda group: -_tokens(rows, group)):
        lightest = load.index(min(load))
        by_rank[lightest].append(group)
        load[lightest] += _tokens(rows, group)
    size = min(token_budget, target or token_budget)
    return [_first_fit(rows, groups, size, max_rows) for groups in by_rank]


def passes_of_rank(plans: list[list[MicroBatch]], rank: int, rows: Sequence[Sample], *, same_count: bool) -> list[Pass]:
    """The forward passes of a rank, and whether each counts.

    A rank makes at least one pass. With `same_count` all ranks make equally many. The extra passes are over the
    shortest row and do not count.
    """
    passes = [(micro_batch, True) for micro_batch in plans[rank]]
    least = max(map(len, plans)) if same_count else 1
    shortest = min(range(len(rows)), key=lambda index: rows[index].length)
    return passes + [([[shortest]], False)] * (least - len(passes))


def _first_fit(
    rows: Sequence[Sample], groups: Sequence[PromptGroup], token_budget: int, max_rows: int
) -> list[MicroBatch]:
    micro_batches: list[MicroBatch] = []
    room: list[tuple[int, int]] = []  # tokens and rows that each micro-batch can still take
    for group in groups:
        tokens = _tokens(rows, group)
        index = next((i for i, (t, r) in enumerate(room) if tokens <= t and len(group) <= r), None)
        if index is None:
            index = len(room)
            micro_batches.append([])
            room.append((token_budget, max_rows))
        micro_batches[index].append(group)
        room[index] = (room[index][0] - tokens, room[index][1] - len(group))
    return micro_batches


def _prompt_groups(rows: Sequence[Sample], max_tokens: int, max_rows: int) -> list[PromptGroup]:
    """Group rows by prompt, that of the policy and that of the teacher. A group that exceeds the limits is split."""
    by_prompt: dict[PromptKey, list[int]] = {}
    for index, row in enumerate(rows):
        images = row.prompt_images if row.images else ()
        by_prompt.setdefault((row.prompt_ids, images, row.teacher_prompt_ids), []).append(index)
    groups: list[PromptGroup] = []
    for (prompt, _, _), members in by_prompt.items():
        group: PromptGroup = []
        length = len(prompt)
        for index in members:
            answer = _packed_length(rows[index])
            if group and (length + answer > max_tokens or len(group) >= max_rows):
                groups.append(group)
                group, length = [], len(prompt)
            group.append(index)
            length += answer
        groups.append(group)
    return groups


def _tokens(rows: Sequence[Sample], group: PromptGroup) -> int:
    return len(rows[group[0]].prompt_ids) + sum(_packed_length(rows[index]) for index in group)


def _packed_length(row: Sample) -> int:
    """The number of tokens of an answer in the packed sequence: all but the last. An answer may be empty."""
    return max(len(row.response_ids) - 1, 0)


def row_indices(micro_batch: MicroBatch) -> list[int]:
    return [index for group in micro_batch for index in group]


def splits_coupled(batch: Batch, micro_batches: list[MicroBatch], couples: Couples) -> bool:
    """Whether episodes, groups or the mini-batch, that the loss couples, are split over micro-batches."""
    if couples in ("nothing", "batch"):
        return couples == "batch" and len(micro_batches) > 1
    unit_R = batch.episode_R if couples == "episodes" else batch.group_N[batch.episode_R]
    place: dict[int, int] = {}  # unit → its micro-batch
    return any(
        place.setdefault(int(unit_R[index]), number) != number
        for number, micro_batch in enumerate(micro_batches)
        for index in row_indices(micro_batch)
    )


def pack(rows: Sequence[Sample], micro_batch: MicroBatch, vision: VisionProcessor | None = None) -> Packed:
    """The packed sequence of one micro-batch. `row_M` counts its rows in the order of `row_indices`. `vision` prepares
    the images of the rows."""
    answers = [rows[index] for index in row_indices(micro_batch)]
    prompts = [rows[group[0]].prompt_ids for group in micro_batch]
    prompt_P = np.array([len(prompt) for prompt in prompts])
    group_R = np.repeat(np.arange(len(micro_batch)), [len(group) for group in micro_batch])
    length_R = np.array([len(row.response_ids) for row in answers])
    packed_R = np.array([_packed_length(row) for row in answers])
    start_R = prompt_P.sum() + packed_R.cumsum() - packed_R  # of each answer in the sequence
    # All answers one after the other, with their last tokens.
    row_A = np.repeat(np.arange(len(answers)), length_R)
    column_A = np.arange(length_R.sum()) - np.repeat(length_R.cumsum() - length_R, length_R)
    ids_A = np.fromiter(chain.from_iterable(row.response_ids for row in answers), np.int64, length_R.sum())
    sampled_A = np.fromiter(chain.from_iterable(row.mask for row in answers), bool, length_R.sum())
    packed_A = column_A < packed_R[row_A]
    source_A = np.where(column_A == 0, prompt_P.cumsum()[group_R[row_A]] - 1, start_R[row_A] + column_A - 1)
    prompt_ids = np.fromiter(chain.from_iterable(prompts), np.int64, prompt_P.sum())
    prompt_position = np.arange(prompt_P.sum()) - np.repeat(prompt_P.cumsum() - prompt_P, prompt_P)
    position_A = prompt_P[group_R[row_A]] + column_A
    packed = Packed(
        layout=Layout.of(prompt_P.tolist(), [[_packed_length(rows[i]) for i in group] for group in micro_batch]),
        ids_T=torch.from_numpy(np.concatenate([prompt_ids, ids_A[packed_A]])),
        position_T=torch.from_numpy(np.concatenate([prompt_position, position_A[packed_A]])),
        source_M=torch.from_numpy(source_A[sampled_A]),
        target_M=torch.from_numpy(ids_A[sampled_A]),
        row_M=torch.from_numpy(row_A[sampled_A]),
        column_M=torch.from_numpy(column_A[sampled_A]),
    )
    if not any(row.images for row in answers):
        return packed
    assert vision is not None, "images, but the model sees none"
    return _with_images(packed, [rows[group[0]] for group in micro_batch], answers, prompt_P, start_R, vision)


def _with_images(
    packed: Packed,
    firsts: Sequence[Sample],
    answers: Sequence[Sample],
    prompt_P: Array,
    start_R: Array,
    vision: VisionProcessor,
) -> Packed:
    """Add the images of a packed sequence: first those of the prompts, then those of the answers. `firsts`: one row of
    each prompt group."""
    from covey.models.image_features import place
    from covey.models.vision import rope_positions

    begins = [*(prompt_P.cumsum() - prompt_P).tolist(), *start_R.tolist()]
    parts = [(row, 0, len(row.prompt_ids)) for row in firsts]
    parts += [(row, len(row.prompt_ids), len(row.prompt_ids) + _packed_length(row)) for row in answers]
    pieces = [
        ((*row.prompt_ids, *row.response_ids), row.images, (low, high), begin)
        for (row, low, high), begin in zip(parts, begins, strict=True)
    ]
    placed = place(pieces, vision.token_id)
    if vision.family.grid:
        position = [rope_positions(row.length, row.images)[:, low:high] for row, low, high in parts]
        packed = replace(packed, position_T=torch.from_numpy(np.concatenate(position, 1)))
    return replace(packed, images=placed, pixels=vision.stacked(placed.images))
