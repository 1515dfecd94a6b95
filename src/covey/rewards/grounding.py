"""Rewards for grounding: a click or a box that the model writes, against the box of the data.

    click_in_box    1 if the point is in the box (ScreenSpot, Cheng et al. 2024, https://arxiv.org/abs/2401.10935)
    box_iou         area of the intersection over area of the union of the two boxes

The box of the data is the column `bbox`, or else `answer`: [left, top, right, bottom]. A reply is read as models write
it: (x, y), [x1, y1, x2, y2], (x1,y1),(x2,y2) as Qwen2-VL does, {"x": …, "y": …}, or bare numbers; the last one counts.
Both must be in the same coordinates; nothing is scaled.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Sequence
from typing import Any

from covey.errors import InputError
from covey.rewards.function import inline, reward
from covey.types import Task

NUMBER = r"-?\d+(?:\.\d+)?"
PAIR = rf"{NUMBER}\s*,\s*{NUMBER}"
BRACKETS = (
    rf"\(\s*{PAIR}\s*\)\s*,?\s*\(\s*{PAIR}\s*\)",  # two corners
    rf"[(\[]\s*{PAIR}(?:\s*,\s*{PAIR})?\s*[)\]]",
    rf'"x"\s*:\s*{NUMBER}\s*,\s*"y"\s*:\s*{NUMBER}',
)
PLACE = re.compile("|".join(BRACKETS))
BARE = re.compile(rf"\s*{NUMBER}(?:[\s,]+{NUMBER}){{1,3}}\s*")
Box = tuple[float, float, float, float]


def iou(one: Box, other: Box) -> float:
    width = min(one[2], other[2]) - max(one[0], other[0])
    height = min(one[3], other[3]) - max(one[1], other[1])
    shared = max(width, 0.0) * max(height, 0.0)
    total = area(one) + area(other) - shared
    return shared / total if total > 0 else 0.0


def area(box: Box) -> float:
    return max(box[2] - box[0], 0.0) * max(box[3] - box[1], 0.0)


def place_in(reply: str) -> list[float]:
    """The numbers of the last point or box in a reply: two, four, or none."""
    found = PLACE.findall(reply) or ([reply] if BARE.fullmatch(reply) else [])
    numbers = [float(number) for number in re.findall(NUMBER, found[-1])] if found else []
    return numbers if len(numbers) in (2, 4) else []


def box_of(task: Task) -> Box:
    """The box of the data."""
    given: Any = task.columns.get("bbox", task.answer)
    value = given
    try:
        value = json.loads(value) if isinstance(value, str) else value
    except json.JSONDecodeError:
        value = None
    numbers = [float(one) for one in value if _is_number(one)] if isinstance(value, Sequence) else []
    if len(numbers) != 4 or numbers[0] > numbers[2] or numbers[1] > numbers[3]:
        raise InputError(f"{task.where}: bbox (or answer) must be [left, top, right, bottom], got {given!r:.60}")
    return numbers[0], numbers[1], numbers[2], numbers[3]


def _check_box(task: Task) -> None:
    box_of(task)


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)


@inline
@reward(check=_check_box)
def click_in_box(final_answer: str, task: Task) -> float:
    """1 if the point of the reply is in the data's box. Of a box, its centre counts."""
    left, top, right, bottom = box_of(task)
    numbers = place_in(final_answer)
    if len(numbers) == 4:
        numbers = [(numbers[0] + numbers[2]) / 2, (numbers[1] + numbers[3]) / 2]
    return float(len(numbers) == 2 and left <= numbers[0] <= right and top <= numbers[1] <= bottom)


@inline
@reward(check=_check_box)
def box_iou(final_answer: str, task: Task) -> float:
    """Intersection over union of the reply's box and the data's; 0 without a box."""
    gold, numbers = box_of(task), place_in(final_answer)
    return 0.0 if len(numbers) != 4 else iou((numbers[0], numbers[1], numbers[2], numbers[3]), gold)
