"""Lines of rows: the layout by hand, and what a plan must keep."""

from __future__ import annotations

import pytest
import torch

from covey.learner.packing import LINE_TOKENS, pack, plan
from covey.types import Sample
from tests.learner.helpers import rows_of


def row(prompt: tuple[int, ...], answer: tuple[int, ...], episode: int = 0) -> Sample:
    n = len(answer)
    return Sample(prompt, answer, (True,) * n, (0.0,) * n, (0,) * n, episode)


def test_layout_of_two_answers_to_one_prompt() -> None:
    rows = [row((7, 8), (1, 2, 3, 6)), row((7, 8), (4, 6)), row((9,), (5,))]
    packed = pack(rows, [[0, 1], [2]])
    assert packed.ids_LW.tolist() == [[7, 8, 1, 2, 3, 4], [9, 0, 0, 0, 0, 0]]
    assert packed.position_LW.tolist() == [[0, 1, 2, 3, 4, 2], [0, 0, 0, 0, 0, 0]]
    assert packed.segment_LW.tolist() == [[0, 0, 1, 1, 1, 2], [0, -1, -1, -1, -1, -1]]
    assert packed.source_M.tolist() == [1, 2, 3, 4, 1, 5, 6]  # the first token of an answer follows the prompt's last
    assert packed.target_M.tolist() == [1, 2, 3, 6, 4, 6, 5]
    assert packed.allowed()[0, 0].int().tolist() == [
        [1, 0, 0, 0, 0, 0],
        [1, 1, 0, 0, 0, 0],
        [1, 1, 1, 0, 0, 0],
        [1, 1, 1, 1, 0, 0],
        [1, 1, 1, 1, 1, 0],
        [1, 1, 0, 0, 0, 1],
    ]
    assert packed.allowed(window=2)[0, 0, 4].int().tolist() == [0, 0, 0, 1, 1, 0]


@pytest.mark.parametrize("budget", [1, 20, 64, 10_000])
@pytest.mark.parametrize("most", [None, 1, 3])
def test_every_row_is_planned_once_within_the_budget(budget: int, most: int | None) -> None:
    rows = rows_of(6, 4)
    micro_batches = plan(rows, budget, most)
    assert sorted(i for lines in micro_batches for line in lines for i in line) == list(range(len(rows)))
    for lines in micro_batches:
        count = sum(map(len, lines))
        assert most is None or count <= most
        if count > 1:
            width = max(len(rows[ln[0]].prompt_ids) + sum(len(rows[i].response_ids) - 1 for i in ln) for ln in lines)
            assert width * len(lines) <= budget
        for line in lines:
            assert len({rows[i].prompt_ids for i in line}) == 1


def test_the_prompt_of_a_group_is_laid_out_once() -> None:
    rows = rows_of(1, 6)
    ((line,),) = plan(rows, 10_000)
    packed = pack(rows, [line])
    assert packed.ids_LW.numel() == len(rows[0].prompt_ids) + sum(len(r.response_ids) - 1 for r in rows)


def test_long_answers_get_lines_of_their_own() -> None:
    long = tuple(range(LINE_TOKENS - 10))
    ((first, second),) = [sorted(lines) for lines in plan([row((1, 2), long), row((1, 2), long)], 10 * LINE_TOKENS)]
    assert (first, second) == ([0], [1])


def test_tokens_that_were_not_sampled_are_no_targets() -> None:
    sample = Sample((1,), (5, 6, 7, 8), (True, False, False, True), (0.0,) * 4, (0,) * 4, 0)
    packed = pack([sample], [[0]])
    assert packed.target_M.tolist() == [5, 8]
    assert packed.source_M.tolist() == [0, 3]
    assert torch.equal(packed.column_M, torch.tensor([0, 3]))
