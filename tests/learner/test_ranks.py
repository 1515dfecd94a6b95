"""Several processes learn what one would: each with all weights (ddp), or with a share of them (fsdp)."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.learner.jobs import Case, alone, go_on, train, train_and_save
from tests.local_ranks import LocalRanks


@pytest.fixture(scope="module")
def two(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LocalRanks]:
    ranks = LocalRanks(2, tmp_path_factory.mktemp("ranks"))
    yield ranks
    ranks.close()


PLAIN: dict[str, Any] = {"algorithm": "grpo"}
COUPLED: dict[str, Any] = {"algorithm": "gvpo"}
WITH_REFERENCE: dict[str, Any] = {
    "algorithm": "grpo",
    "options": {"kl_coef": 0.5, "kl_estimator": "full"},
    "reference": True,
}


def same_as_one_process(two: LocalRanks, case: Case, tolerance: float) -> None:
    expected, told, said = alone(case)
    answers = two.run(train, case)
    for weights, metrics, logprobs in answers:
        assert weights.keys() == expected.keys()
        for name, weight in expected.items():
            torch.testing.assert_close(weights[name], weight, atol=tolerance, rtol=0, msg=lambda m, n=name: f"{n}: {m}")
        for step, numbers in enumerate(told):
            assert metrics[step] == pytest.approx(numbers, rel=1e-4, abs=1e-6, nan_ok=True)
        torch.testing.assert_close(logprobs, said, atol=10 * tolerance, rtol=0)
    assert answers[0][1] == answers[1][1]  # the ranks told the same, bit for bit
    start = case.policy().state_dict()
    assert any(float((weight - start[name]).abs().max()) > 1e-3 for name, weight in expected.items())


@pytest.mark.parametrize("parallel", ["ddp", "fsdp"])
@pytest.mark.parametrize("kind", [PLAIN, COUPLED, WITH_REFERENCE], ids=["grpo", "gvpo", "full-kl"])
def test_two_ranks_learn_what_one_process_does(two: LocalRanks, parallel: str, kind: dict[str, Any]) -> None:
    for size in (None, 3):
        same_as_one_process(two, Case(parallel=parallel, settings={"micro_batch_size": size}, **kind), 1e-6)
