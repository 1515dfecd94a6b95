"""Groups as JSON and back, for checkpoints. Without the task: who stores a group knows which one it belongs to."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

from covey.types import Episode, Failure, Group, StopReason, Task, ToolUse, Turn


def group_to_json(group: Group) -> dict[str, Any]:
    baseline = None if group.baseline is None else _to_json(group.baseline)
    return {"episodes": [_to_json(episode) for episode in group.episodes], "baseline": baseline}


def group_from_json(task: Task, stored: dict[str, Any]) -> Group:
    baseline = None if stored["baseline"] is None else _from_json(task, stored["baseline"])
    return Group(task, tuple(_from_json(task, episode) for episode in stored["episodes"]), baseline)


def _to_json(episode: Episode) -> dict[str, Any]:
    found = asdict(episode)
    del found["task"]
    return found


def _from_json(task: Task, stored: dict[str, Any]) -> Episode:
    return Episode(
        task=task,
        turns=tuple(map(_turn, stored["turns"])),
        messages=tuple(stored["messages"]),
        rewards=stored["rewards"],
        stop=None if stored["stop"] is None else StopReason(stored["stop"]),
        failure=None if stored["failure"] is None else Failure(**stored["failure"]),
        answer=stored["answer"],
        given=stored["given"],
        tools=tuple(ToolUse(**use) for use in stored["tools"]),
        seconds=stored["seconds"],
        cut_by=stored.get("cut_by"),
    )


def _turn(stored: dict[str, Any]) -> Turn:
    columns = {name: tuple(stored[name]) for name in ("prompt_ids", "completion_ids", "logprobs", "versions")}
    return Turn(**columns, stop=StopReason(stored["stop"]), trained=stored["trained"])
