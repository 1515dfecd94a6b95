"""Packed sequences: the layout by hand, and the limits that a plan of micro-batches keeps."""

from __future__ import annotations

import pytest
import torch

from covey.learner.attention import Chunk, Layout
from covey.learner.packing import pack, passes_of_rank, plan_micro_batches, row_indices
from covey.types import Sample
from tests.learner.helpers import rows_of


def row(prompt: tuple[int, ...], answer: tuple[int, ...], episode: int = 0) -> Sample:
    n = len(answer)
    return Sample(prompt, answer, (True,) * n, (0.0,) * n, (0,) * n, episode)


def test_layout_of_two_answers_to_one_prompt() -> None:
    rows = [row((7, 8), (1, 2, 3, 6)), row((7, 8), (4, 6)), row((9,), (5,))]
    packed = pack(rows, [[0, 1], [2]])
    assert packed.ids_T.tolist() == [7, 8, 9, 1, 2, 3, 4]
    assert packed.position_T.tolist() == [0, 1, 0, 2, 3, 4, 2]
    assert packed.layout == Layout((2, 1), ((3, 1), (0,)))
    assert packed.source_M.tolist() == [1, 3, 4, 5, 1, 6, 2]  # the first token of an answer follows the prompt's last
    assert packed.target_M.tolist() == [1, 2, 3, 6, 4, 6, 5]
    assert packed.row_M.tolist() == [0, 0, 0, 0, 1, 1, 2]
    assert packed.column_M.tolist() == [0, 1, 2, 3, 0, 1, 0]


def test_the_attention_mask_of_a_chunk() -> None:
    layout = Layout((2, 1), ((3, 1), (0,)))
    chunks = layout.chunks
    assert chunks == [Chunk((2,)), Chunk((1,)), Chunk((3, 1), 0)]
    scores = torch.zeros(1)
    mask = layout.mask(2, chunks[2], None, scores)
    assert mask.exp().int().tolist() == [
        [1, 1, 1, 0, 0, 0],
        [1, 1, 1, 1, 0, 0],
        [1, 1, 1, 1, 1, 0],
        [1, 1, 0, 0, 0, 1],
    ]
    assert layout.mask(2, chunks[2], 2, scores).exp().int().tolist()[2] == [0, 0, 0, 1, 1, 0]
    assert layout.mask(2, chunks[2], None, scores) is mask
    assert layout.mask(2, chunks[2], None, scores.bfloat16()).dtype == torch.bfloat16


@pytest.mark.parametrize("budget", [1, 20, 64, 10_000])
@pytest.mark.parametrize("most", [None, 1, 3])
def test_every_row_is_planned_once_within_the_budget(budget: int, most: int | None) -> None:
    rows = rows_of(6, 4)
    (micro_batches,) = plan_micro_batches(rows, budget, most)
    assert sorted(i for micro_batch in micro_batches for i in row_indices(micro_batch)) == list(range(len(rows)))
    for groups in micro_batches:
        count = sum(map(len, groups))
        assert most is None or count <= most
        if count > 1:
            lengths = [len(rows[g[0]].prompt_ids) + sum(len(rows[i].response_ids) - 1 for i in g) for g in groups]
            assert sum(lengths) <= budget
        for group in groups:
            assert len({rows[i].prompt_ids for i in group}) == 1


def test_small_prompt_groups_share_a_micro_batch_up_to_the_target() -> None:
    """Groups of 13, 7 and 7 tokens: beyond the target none is split, and none joins another."""

    def row(prompt: int) -> Sample:
        return Sample((prompt,) * 4, (5,) * 4, (True,) * 4, (0.0,) * 4, (0,) * 4, 0)

    rows = [row(1), row(1), row(1), row(2), row(3)]
    plans = {target: plan_micro_batches(rows, 100, target=target) for target in (None, 5, 14)}
    assert plans[None] == [[[[0, 1, 2], [3], [4]]]]
    assert plans[5] == [[[[0, 1, 2]], [[3]], [[4]]]]
    assert plans[14] == [[[[0, 1, 2]], [[3], [4]]]]
    assert plan_micro_batches(rows, 10, target=50) == [[[[0, 1]], [[2]], [[3]], [[4]]]]


def test_the_prompt_of_a_group_is_laid_out_once_and_nothing_is_padded() -> None:
    rows = rows_of(3, 6)
    ((groups,),) = plan_micro_batches(rows, 10_000)
    packed = pack(rows, groups)
    prompts = sum(len(rows[group[0]].prompt_ids) for group in groups)
    assert len(groups) == 3
    assert len(packed.ids_T) == prompts + sum(len(r.response_ids) - 1 for r in rows)


def test_tokens_outside_the_mask_are_no_targets() -> None:
    sample = Sample((1,), (5, 6, 7, 8), (True, False, False, True), (0.0,) * 4, (0,) * 4, 0)
    packed = pack([sample], [[0]])
    assert packed.target_M.tolist() == [5, 8]
    assert packed.source_M.tolist() == [0, 3]
    assert torch.equal(packed.column_M, torch.tensor([0, 3]))


def test_ranks_get_about_as_many_tokens_each() -> None:
    """Prompts of 4 tokens. Prompt groups of 13, 7 and 7 tokens stay whole, as 13 and 14; a single group of 24 tokens is
    split, each part with its prompt; and the rank with fewer passes repeats a short row."""

    def row(prompt: int, answer: int) -> Sample:
        return Sample((prompt,) * 4, (5,) * answer, (True,) * answer, (0.0,) * answer, (0,) * answer, 0)

    three = [row(1, 4), row(1, 4), row(1, 4), row(2, 4), row(3, 4)]
    assert plan_micro_batches(three, 100, None, 2) == [[[[0, 1, 2]]], [[[3], [4]]]]
    one = [row(1, 5) for _ in range(5)]
    assert plan_micro_batches(one, 100, None, 2) == [[[[0, 1, 2]]], [[[3, 4]]]]
    plans = plan_micro_batches(three, 100, 1, 2)
    assert [len(plan) for plan in plans] == [3, 2]
    assert passes_of_rank(plans, 1, three, same_count=True)[-1] == ([[0]], False)
    assert all(counts for _, counts in passes_of_rank(plans, 1, three, same_count=False))
    assert passes_of_rank([[[[0]]], []], 1, one[:1], same_count=False) == [([[0]], False)]
