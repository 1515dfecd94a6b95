"""Lines of rows: the layout by hand, and what a plan must keep."""

from __future__ import annotations

import pytest
import torch

from covey.learner.attention import Layout, Piece
from covey.learner.packing import in_step, pack, plan, share_out
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


def test_what_a_piece_of_the_line_sees() -> None:
    layout = Layout((2, 1), ((3, 1), (0,)))
    pieces = layout.pieces
    assert pieces == [Piece((2,)), Piece((1,)), Piece((3, 1), 0)]
    cpu = torch.device("cpu")
    assert layout.mask(2, pieces[2], None, cpu).int().tolist() == [
        [1, 1, 1, 0, 0, 0],
        [1, 1, 1, 1, 0, 0],
        [1, 1, 1, 1, 1, 0],
        [1, 1, 0, 0, 0, 1],
    ]
    assert layout.mask(2, pieces[2], 2, cpu).int().tolist()[2] == [0, 0, 0, 1, 1, 0]


@pytest.mark.parametrize("budget", [1, 20, 64, 10_000])
@pytest.mark.parametrize("most", [None, 1, 3])
def test_every_row_is_planned_once_within_the_budget(budget: int, most: int | None) -> None:
    rows = rows_of(6, 4)
    micro_batches = plan(rows, budget, most)
    assert sorted(i for bunches in micro_batches for bunch in bunches for i in bunch) == list(range(len(rows)))
    for bunches in micro_batches:
        count = sum(map(len, bunches))
        assert most is None or count <= most
        if count > 1:
            lengths = [len(rows[b[0]].prompt_ids) + sum(len(rows[i].response_ids) - 1 for i in b) for b in bunches]
            assert sum(lengths) <= budget
        for bunch in bunches:
            assert len({rows[i].prompt_ids for i in bunch}) == 1


def test_the_prompt_of_a_group_is_laid_out_once_and_nothing_is_padded() -> None:
    rows = rows_of(3, 6)
    (bunches,) = plan(rows, 10_000)
    packed = pack(rows, bunches)
    prompts = sum(len(rows[bunch[0]].prompt_ids) for bunch in bunches)
    assert len(bunches) == 3
    assert len(packed.ids_T) == prompts + sum(len(r.response_ids) - 1 for r in rows)


def test_tokens_that_were_not_sampled_are_no_targets() -> None:
    sample = Sample((1,), (5, 6, 7, 8), (True, False, False, True), (0.0,) * 4, (0,) * 4, 0)
    packed = pack([sample], [[0]])
    assert packed.target_M.tolist() == [5, 8]
    assert packed.source_M.tolist() == [0, 3]
    assert torch.equal(packed.column_M, torch.tensor([0, 3]))


def test_ranks_get_about_as_many_tokens_each() -> None:
    """Prompts of 4 tokens. Bunches of 13, 7 and 7 tokens are shared out whole, as 13 and 14; of one bunch of 24 tokens
    each rank gets a part with its prompt, and the one with fewer passes is given a short row to keep in step."""

    def row(prompt: int, answer: int) -> Sample:
        return Sample((prompt,) * 4, (5,) * answer, (True,) * answer, (0.0,) * answer, (0,) * answer, 0)

    three = [row(1, 4), row(1, 4), row(1, 4), row(2, 4), row(3, 4)]
    assert share_out(three, 100, None, 2) == [[[[0, 1, 2]]], [[[3], [4]]]]
    one = [row(1, 5) for _ in range(5)]
    assert share_out(one, 100, None, 2) == [[[[0, 1, 2]]], [[[3, 4]]]]
    shares = share_out(three, 100, 1, 2)
    assert [len(share) for share in shares] == [3, 2]
    assert in_step(shares, 1, three, alike=True)[-1] == ([[0]], False)
    assert all(counts for _, counts in in_step(shares, 1, three, alike=False))
    assert in_step([[[[0]]], []], 1, one[:1], alike=False) == [([[0]], False)]
