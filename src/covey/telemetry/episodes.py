"""episodes.jsonl: one JSON object per recorded episode, with what happened at every token.

The schema is described in docs/metrics.md. A change that an old reader would misread raises SCHEMA.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from covey.errors import InputError
from covey.telemetry.jsonl import read_jsonl
from covey.telemetry.parts import parts_of
from covey.types import Episode, RewardTable, Sample

SCHEMA = 1

Decode = Callable[[list[int]], str]


@dataclass(frozen=True)
class TokenRow:
    """A token row and what the learner saw at each of its response tokens (no padding)."""

    sample: Sample
    advantage: Sequence[float]
    ratio: Sequence[float]
    entropy: Sequence[float]

    def __post_init__(self) -> None:
        row = self.sample
        columns = (row.mask, row.logprobs, row.versions, self.advantage, self.ratio, self.entropy)
        lengths = [len(column) for column in columns]
        assert all(length == len(row.response_ids) for length in lengths), (
            f"{len(row.response_ids)} response tokens, but mask, logprobs, versions, advantage, ratio, entropy "
            f"have {lengths}"
        )


def episode_record(
    *,
    step: int,
    task_id: str,
    group: int,
    attempt: int,
    episode: Episode,
    rewards: RewardTable,
    total_reward: float | None,
    advantage: float | None,
    tokens: Sequence[TokenRow],
    decode: Decode,
) -> dict[str, Any]:
    """One line of the file. `group` and `attempt` count from 0 within the step and the group."""
    failure = episode.failure
    return {
        "schema": SCHEMA,
        "step": step,
        "task_id": task_id,
        "group": group,
        "attempt": attempt,
        "messages": [dict(message) for message in episode.messages],
        "answer": episode.task.answer,
        "rewards": dict(rewards),
        "total_reward": total_reward,
        "advantage": advantage,
        "stop": str(episode.stop) if episode.stop is not None else None,
        "failure": {"cause": failure.cause, "message": failure.message} if failure is not None else None,
        "tools": [{"tool": use.tool, "error": use.error} for use in episode.tools],
        "rows": [_row(row, decode) for row in tokens],
    }


def _row(row: TokenRow, decode: Decode) -> dict[str, Any]:
    sample = row.sample
    return {
        "prompt_ids": list(sample.prompt_ids),
        "response_ids": list(sample.response_ids),
        "mask": [int(sampled) for sampled in sample.mask],
        # Token by token: part of a UTF-8 character has no text of its own and stays U+FFFD.
        "text": [decode([token]) for token in sample.response_ids],
        "prompt_text": decode(list(sample.prompt_ids)),
        "logprobs": list(sample.logprobs),
        "advantage": list(row.advantage),
        "ratio": list(row.ratio),
        "entropy": list(row.entropy),
        "versions": list(sample.versions),
    }


def read_episodes(path: Path) -> Iterator[dict[str, Any]]:
    """The episodes of a record, in the order they were written; `path` is its first part, the others follow.

    Numbers that were not finite are None.
    """
    for part in parts_of(path) or [path]:  # where there is none, opening it says so
        for record in read_jsonl(part):
            if record.get("schema") != SCHEMA:
                raise InputError(
                    f"{part}: episode schema {record.get('schema')}, but this version of covey reads {SCHEMA}"
                )
            yield record
