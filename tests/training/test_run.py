"""A whole run: what a step sees must not depend on evaluations."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

import covey
from covey.rollout.embedded import EmbeddedEngine
from covey.rollout.embedded.cpu_batch import RowBatch


def test_a_step_reuses_no_cache_of_an_evaluation(
    tiny_model_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As after a resume, when the cache is empty: the same prompts are computed in the same passes."""
    monkeypatch.chdir(tmp_path)
    first_lengths: list[list[int]] = []
    empty = EmbeddedEngine._empty_batch

    def watched(engine: EmbeddedEngine) -> Any:
        batch = empty(engine)
        assert isinstance(batch, RowBatch)
        match = batch.rows.match

        def noted(tokens: Any) -> Any:
            if not batch.rows._held:  # the first of a step, or of an evaluation
                first_lengths.append([len(known) for known in batch.rows._tokens.values()])
            return match(tokens)

        batch.rows.match = noted  # type: ignore[method-assign]
        return batch

    monkeypatch.setattr(EmbeddedEngine, "_empty_batch", watched)
    tasks = [{"question": f"say it, {i}", "answer": "x"} for i in range(4)]
    run = covey.train(
        model=str(tiny_model_folder),
        tasks=tasks,
        reward="exact",
        validation=tasks[:2],
        **{"data.train_batch_size": 2, "rollout.group_size": 4, "rollout.max_tokens": 5, "eval.every": 1},
        **{"loop.total_steps": 2, "loop.save_final": False},
    )
    assert [step for step, _ in run.evaluations] == [0, 1, 2]
    assert first_lengths == [[]] * 5  # three evaluations and two steps
