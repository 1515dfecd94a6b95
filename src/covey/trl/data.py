"""TRL's data → tasks: rows with a `prompt`, which is a text or a list of messages; the other columns go to the rewards.

Rows come from a list of dicts, a Hugging Face `Dataset`, or anything else that yields dicts.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from covey.errors import InputError, nearest
from covey.tasks import list_rows
from covey.types import Task


@dataclass(frozen=True)
class Rows:
    tasks: tuple[Task, ...]
    conversational: bool  # prompts are messages: completions are too, and the chat template is applied


def read_rows(dataset: Any, name: str, *, only_prompts: bool = False) -> Rows:
    """`only_prompts`: TRL's remove_unused_columns."""
    rows = list_rows(dataset, name)
    tasks = tuple(_task(row, number, name, only_prompts) for number, row in enumerate(rows))
    kinds = {isinstance(row["prompt"], str) for row in rows}
    if len(kinds) > 1:
        raise InputError(f"{name} has prompts that are texts and prompts that are messages\n  use one form")
    return Rows(tasks, conversational=kinds == {False})


def _task(row: Any, number: int, name: str, only_prompts: bool) -> Task:
    place = f"{name}[{number}]"
    if not isinstance(row, Mapping):
        raise InputError(f"{place} must be a dict, got {type(row).__name__}")
    if "prompt" not in row:
        guess = nearest("prompt", map(str, row))
        hint = f"\n  did you mean   {guess}?" if guess else ""
        raise InputError(f"{place} has no prompt; its columns: {', '.join(map(str, row)) or 'none'}{hint}")
    for column in ("image", "images"):
        if row.get(column) is not None:
            raise InputError(f"{place} has {column}: models that read images are not supported")
    prompt = row["prompt"]
    messages = ({"role": "user", "content": prompt},) if isinstance(prompt, str) else _messages(prompt, place)
    columns = {} if only_prompts else {str(key): value for key, value in row.items() if key != "prompt"}
    return Task(str(number), messages, columns.get("answer"), columns, place)


def _messages(prompt: Any, place: str) -> tuple[dict[str, Any], ...]:
    if not isinstance(prompt, Iterable):
        raise InputError(f"{place}: prompt must be a text or a list of messages, got {type(prompt).__name__}")
    found = list(prompt)
    for message in found:
        if not isinstance(message, Mapping) or not isinstance(message.get("role"), str):
            raise InputError(f"{place}: a message of its prompt has no role: {message!r:.80}")
        if not isinstance(message.get("content"), str):
            raise InputError(f"{place}: the content of a message must be text, got {message.get('content')!r:.80}")
    if not found:
        raise InputError(f"{place}: its prompt has no messages")
    return tuple({key: value for key, value in message.items() if value is not None} for message in found)
