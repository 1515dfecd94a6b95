"""The mismatch of engine and learner log-probs, computed by hand."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch

from covey.training.metrics import engine_mismatch
from covey.training.step import empty_trace
from covey.types import Samples
from tests.algorithms.helpers import samples_of


def three_tokens() -> Samples:
    """Two groups of one answer; the second has one token."""
    samples = samples_of([1.0, 0.0], [0, 1])
    mask = torch.tensor([[True, True], [True, False]])
    return replace(samples, mask_RT=mask, old_logprobs_RT=torch.tensor([[-1.0, -2.0], [-0.5, 0.0]]))


def kl(*log_ratios: float) -> float:
    return sum(math.exp(x) - 1 - x for x in log_ratios) / len(log_ratios)


def test_over_all_tokens_if_the_learner_recomputed_log_probs() -> None:
    sampled = torch.tensor([[-1.1, -1.8], [-0.5, 9.0]])  # the last is masked
    found = engine_mismatch(replace(three_tokens(), sampling_logprobs_RT=sampled), empty_trace(three_tokens()), None)
    assert found["rollout/mismatch"] == pytest.approx((0.1 + 0.2 + 0.0) / 3)
    assert found["rollout/kl"] == pytest.approx(kl(0.1, -0.2, 0.0), rel=1e-4)


def test_over_the_first_mini_batch_otherwise() -> None:
    """Later mini-batches follow an update, which also changes their ratio."""
    samples, trace = three_tokens(), empty_trace(three_tokens())
    trace.ratio[:] = torch.tensor([[math.exp(0.1), math.exp(-0.3)], [5.0, 0.0]])
    found = engine_mismatch(samples, trace, 1)
    assert found["rollout/mismatch"] == pytest.approx(0.2, rel=1e-5)
    assert found["rollout/kl"] == pytest.approx(kl(0.1, -0.3), rel=1e-4)
    expected = (0.1 + 0.3 + math.log(5)) / 3
    assert engine_mismatch(samples, trace, None)["rollout/mismatch"] == pytest.approx(expected, rel=1e-5)


def test_without_sampled_tokens_there_is_no_metric() -> None:
    samples = three_tokens()
    nothing = replace(samples, mask_RT=torch.zeros(2, 2, dtype=torch.bool))
    assert engine_mismatch(nothing, empty_trace(samples), None) == {}
