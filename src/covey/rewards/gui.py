"""gui_reward: one action on a screenshot, compared with the right one. AgentFly's reward of the same name.

    reward = 0.8 · accuracy + 0.2 · format
    accuracy = 0.5 for the kind of the action + 0.5 for its argument
    format = 1 for a reply with a usable action

The right action is in the columns `gt_action` (click, type, scroll), `gt_bbox` (a point or a box, as shares of the
image) and `gt_input_text` (the text, or the direction of scrolling). A click is right within 5 % of the diagonal of the
unit square from the centre of the box, a text with a token F1 of 0.5. Without an argument in the data, any is right.

Deviations: points are divided by the size of the image instead of 1920×1080; a `gt_bbox` over 1 is in pixels; a task
without a right action is refused instead of scored 0.
"""

from __future__ import annotations

import math
import string
from collections.abc import Mapping, Sequence
from typing import Any

from covey.errors import InputError
from covey.rewards.function import inline, reward
from covey.types import Episode, Task

CLICKS = ("click", "double_click", "right_click", "left_single", "left_double", "right_single")
CLOSE = 0.05 * math.sqrt(2)
NO_TEXT = "no input text"  # in the data sets: there is none


def _check(task: Task) -> None:
    if not task.columns.get("gt_action"):
        raise InputError(f"{task.where}: no `gt_action`, the right action: click, type or scroll")


@inline
@reward(check=_check)
def gui_reward(
    episode: Episode, gt_action: str, gt_bbox: Sequence[float] | None = None, gt_input_text: str | None = None
) -> dict[str, float]:
    action = next((m["action"] for m in reversed(episode.messages) if "action" in m), None)
    if action is None:
        return {"reward": 0.0, "format": 0.0, "accuracy": 0.0}
    bbox = [] if gt_bbox is None else [float(number) for number in gt_bbox]
    text = "" if gt_input_text in (None, NO_TEXT) else str(gt_input_text)
    accuracy = _accuracy(action, gt_action.lower(), bbox, text)
    return {"reward": 0.8 * accuracy + 0.2, "format": 1.0, "accuracy": accuracy}


def _accuracy(action: Mapping[str, Any], kind: str, bbox: Sequence[float], text: str) -> float:
    kind, done = ("click" if name in CLICKS else name for name in (kind, action["kind"]))
    score = 0.5 * (done == kind)
    match kind:
        case "click":
            right = not bbox or (action["at"] is not None and _near(action, bbox))
        case "type":
            right = not text or _f1(action["text"] if done == "type" else "", text) >= 0.5
        case "scroll":
            right = not text or _direction(action["scroll"]) == text.lower()
        case _:
            right = False
    return score + 0.5 * right


def _near(action: Mapping[str, Any], bbox: Sequence[float]) -> bool:
    """Whether the click is close to the centre of a point or box."""
    if len(bbox) not in (2, 4):
        return False
    width, height = action["size"]
    pixels = max(map(abs, bbox)) > 1
    x, y = sum(bbox[0::2]) / len(bbox[0::2]), sum(bbox[1::2]) / len(bbox[1::2])
    if pixels:
        x, y = x / width, y / height
    return math.dist((action["at"][0] / width, action["at"][1] / height), (x, y)) < CLOSE


def _f1(text: str, gold: str) -> float:
    """F1 of the sets of words, without case and punctuation."""
    unmarked = str.maketrans("", "", string.punctuation)
    ours, theirs = ({*one.translate(unmarked).lower().split()} for one in (text, gold))
    common = len(ours & theirs)
    return 2 * common / (len(ours) + len(theirs)) if common else float(not ours and not theirs)


def _direction(scroll: Sequence[float]) -> str:
    x, y = scroll
    if x:
        return "right" if x > 0 else "left"
    return "down" if y > 0 else "up" if y < 0 else ""
