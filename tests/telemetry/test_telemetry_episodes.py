"""One recorded episode, field by field."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from covey.errors import InputError
from covey.telemetry import TokenRow, episode_record, read_episodes
from covey.telemetry.jsonl import JsonlFiles
from covey.types import Episode, Failure, Sample, StopReason, Task

# A vocabulary of bytes: "é" is two tokens, neither of which is a character.
E_ACUTE = tuple("é".encode())


def decode(ids: list[int]) -> str:
    return bytes(ids).decode("utf-8", errors="replace")


def sample() -> Sample:
    return Sample(
        prompt_ids=(ord("2"), ord("?")),
        response_ids=(ord("a"), *E_ACUTE),
        mask=(True, True, False),
        logprobs=(-0.5, -0.25, 0.0),
        versions=(3, 3, 3),
        episode=0,
    )


def episode(**changes: Any) -> Episode:
    question = {"role": "user", "content": "2?"}
    reply = {"role": "assistant", "content": "aé"}
    whole = Episode(Task("t1", (question,), answer=7), (), (question, reply), {"exact": 0.0}, StopReason.EOS)
    return replace(whole, **changes)


def record(**changes: Any) -> dict[str, Any]:
    row = TokenRow(sample(), advantage=[0.5, 0.5, 0.0], ratio=[1.0, 1.5, 0.0], entropy=[0.1, 0.2, 0.0])
    fields = {
        "step": 4,
        "task_id": "t1",
        "group": 1,
        "attempt": 2,
        "episode": episode(),
        "rewards": {"exact": 0.0, "style": None},
        "total_reward": 0.0,
        "advantage": 0.5,
        "tokens": [row],
        "decode": decode,
    }
    return episode_record(**(fields | changes))


def test_the_schema_field_by_field() -> None:
    assert record() == {
        "schema": 1,
        "step": 4,
        "task_id": "t1",
        "group": 1,
        "attempt": 2,
        "messages": [{"role": "user", "content": "2?"}, {"role": "assistant", "content": "aé"}],
        "answer": 7,
        "rewards": {"exact": 0.0, "style": None},
        "total_reward": 0.0,
        "advantage": 0.5,
        "stop": "eos",
        "failure": None,
        "tools": [],
        "rows": [
            {
                "prompt_ids": [50, 63],
                "response_ids": [97, 195, 169],
                "mask": [1, 1, 0],
                "text": ["a", "\ufffd", "\ufffd"],
                "prompt_text": "2?",
                "logprobs": [-0.5, -0.25, 0.0],
                "advantage": [0.5, 0.5, 0.0],
                "ratio": [1.0, 1.5, 0.0],
                "entropy": [0.1, 0.2, 0.0],
                "versions": [3, 3, 3],
            }
        ],
    }


def test_a_failure_keeps_cause_and_message() -> None:
    broken = episode(failure=Failure("timeout", "500 s"), stop=None)
    found = record(episode=broken, total_reward=None, advantage=None, tokens=[])
    assert found["failure"] == {"cause": "timeout", "message": "500 s"}
    assert (found["stop"], found["total_reward"], found["advantage"], found["rows"]) == (None, None, None, [])


@pytest.mark.parametrize("column", ["advantage", "ratio", "entropy"])
def test_lists_of_another_length_are_our_mistake(column: str) -> None:
    columns = {"advantage": [0.0] * 3, "ratio": [1.0] * 3, "entropy": [0.0] * 3} | {column: [0.0] * 4}
    with pytest.raises(AssertionError, match="3 response tokens"):
        TokenRow(sample(), **columns)


def test_written_and_read_back_unchanged(tmp_path: Path) -> None:
    files = JsonlFiles(tmp_path)
    files.step(4, {}, None, [record(), record(attempt=3)])
    files.close("finished")
    assert list(read_episodes(tmp_path / "episodes.jsonl")) == [record(), record(attempt=3)]


def test_answers_that_json_does_not_know_are_written_as_text(tmp_path: Path) -> None:
    files = JsonlFiles(tmp_path)
    files.step(0, {}, None, [record(episode=episode(task=Task("t1", (), answer=Path("x"))))])
    files.close("finished")
    [found] = read_episodes(tmp_path / "episodes.jsonl")
    assert found["answer"] == "x"


def test_another_schema_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "episodes.jsonl"
    path.write_text(json.dumps({"schema": 2}) + "\n")
    with pytest.raises(InputError, match="episode schema 2, but this version of covey reads 1"):
        list(read_episodes(path))
