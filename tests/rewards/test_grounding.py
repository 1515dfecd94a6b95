"""Clicks and boxes against values computed by hand."""

from __future__ import annotations

from typing import Any

import pytest

from covey.errors import InputError
from covey.rewards.builtin import REWARDS
from covey.rewards.grounding import box_of, iou, place_in
from covey.types import Task

BOX = [10, 20, 30, 60]


def score(name: str, reply: str, answer: Any = None, **columns: Any) -> float:
    task = Task("t", ({"role": "user", "content": "where?"},), answer, columns)
    value: Any = REWARDS[name](final_answer=reply, task=task)
    return float(value)


@pytest.mark.parametrize(
    ("reply", "numbers"),
    [
        ("click(12, 40)", [12, 40]),
        ("first (1, 2), then [12.5,40]", [12.5, 40]),
        ("<|box_start|>(10,20),(30,60)<|box_end|>", [10, 20, 30, 60]),
        ('{"bbox_2d": [10, 20, 30, 60]}', [10, 20, 30, 60]),
        ('{"x": 12, "y": 40}', [12, 40]),
        ("12, 40", [12, 40]),
        ("-3 4", [-3, 4]),
        ("the 2 of 3 buttons", []),
        ("(1, 2, 3)", []),
        ("", []),
    ],
)
def test_points_and_boxes_are_read_as_models_write_them(reply: str, numbers: list[float]) -> None:
    assert place_in(reply) == numbers


@pytest.mark.parametrize(
    ("reply", "expected"),
    [("(10, 60)", 1), ("(9.9, 40)", 0), ("(20, 61)", 0), ("[0, 0, 40, 80]", 1), ("[0, 0, 10, 10]", 0), ("there", 0)],
)
def test_a_click_counts_inside_of_the_box(reply: str, expected: float) -> None:
    assert score("click_in_box", reply, BOX) == score("click_in_box", reply, bbox="[10, 20, 30, 60]") == expected


def test_iou_by_hand() -> None:
    # 10 × 40 of the union 20 × 40 + 10 × 40.
    assert score("box_iou", "[20, 20, 40, 60]", BOX) == pytest.approx(400 / 1200)
    assert score("box_iou", "[10, 20, 30, 60]", BOX) == 1.0
    assert score("box_iou", "(20, 40)", BOX) == score("box_iou", "[31, 20, 40, 60]", BOX) == 0.0
    assert iou((3, 3, 3, 3), (3, 3, 3, 3)) == 0.0


@pytest.mark.parametrize("answer", [None, "left", [1, 2, 3], [30, 20, 10, 60], [1, 2, 3, True]])
def test_a_box_that_is_none_is_the_data_s_mistake(answer: Any) -> None:
    with pytest.raises(InputError, match=r"train.jsonl, line 2: bbox \(or answer\) must be"):
        box_of(Task("t", (), answer, {}, "train.jsonl, line 2"))
