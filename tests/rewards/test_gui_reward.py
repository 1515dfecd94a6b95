"""gui_reward: one action against the right one."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from covey.errors import InputError
from covey.rewards import resolve_rewards
from covey.types import Episode, StopReason, Task, Turn

TURN = Turn((1,), (2,), (0.0,), (0,), StopReason.EOS)


def score(action: dict[str, Any] | None, **columns: Any) -> dict[str, float | None]:
    question = {"role": "user", "content": "?"}
    task = Task("1", (question,), columns=columns)
    reply = {"role": "assistant", "content": "x"} | ({} if action is None else {"action": action})
    table = asyncio.run(resolve_rewards("gui_reward", None, {})(task, Episode(task, (TURN,), (question, reply))))
    return {name.removeprefix("gui_reward/"): value for name, value in table.items()}


def did(kind: str, at: Any = None, text: str = "", scroll: Any = (0, 0)) -> dict[str, Any]:
    return {"kind": kind, "at": at, "text": text, "scroll": scroll, "size": (1000, 500)}


# 5 % of the diagonal of the unit square is 0.0707: 70 pixels of 1000 are close enough, 71 are not.
@pytest.mark.parametrize(
    ("action", "columns", "accuracy"),
    [
        (did("click", (500, 250)), {"gt_action": "click", "gt_bbox": [0.5, 0.5]}, 1.0),
        (did("click", (570, 250)), {"gt_action": "click", "gt_bbox": [0.4, 0.4, 0.6, 0.6]}, 1.0),
        (did("click", (571, 250)), {"gt_action": "click", "gt_bbox": [0.5, 0.5]}, 0.5),
        (did("click", (500, 286)), {"gt_action": "click", "gt_bbox": [0.5, 0.5]}, 0.5),
        (did("click", (500, 250)), {"gt_action": "click", "gt_bbox": [500, 250]}, 1.0),  # in pixels
        (did("right_click", (500, 250)), {"gt_action": "click", "gt_bbox": [0.5, 0.5]}, 1.0),
        (did("type", text="Hello, world"), {"gt_action": "type", "gt_input_text": "hello world"}, 1.0),
        (did("type", text="hello"), {"gt_action": "type", "gt_input_text": "hello big blue world"}, 0.5),  # F1 0.4
        (did("type", text="x"), {"gt_action": "type", "gt_input_text": "no input text"}, 1.0),
        (did("scroll", scroll=(0, 400)), {"gt_action": "scroll", "gt_input_text": "DOWN"}, 1.0),
        (did("scroll", scroll=(0, -400)), {"gt_action": "scroll", "gt_input_text": "down"}, 0.5),
        (did("wait"), {"gt_action": "click", "gt_bbox": [0.5, 0.5]}, 0.0),
        (did("click", (1, 1)), {"gt_action": "type", "gt_input_text": "a"}, 0.0),
    ],
)
def test_half_for_the_kind_and_half_for_its_argument(action: Any, columns: Any, accuracy: float) -> None:
    table = score(action, **columns)
    assert table == {"gui_reward": pytest.approx(0.8 * accuracy + 0.2), "format": 1.0, "accuracy": accuracy}


def test_a_reply_without_an_action_earns_nothing() -> None:
    assert score(None, gt_action="click") == {"gui_reward": 0.0, "format": 0.0, "accuracy": 0.0}


def test_a_task_without_the_right_action_is_refused() -> None:
    task = Task("1", ({"role": "user", "content": "?"},), columns={"gt_action": None}, place="t.jsonl, line 1")
    with pytest.raises(InputError, match=r"t\.jsonl, line 1: no `gt_action`"):
        resolve_rewards("gui_reward", None, {}).check_all([task])
