"""Drawing tokens: distributions computed by hand, frequencies against them."""

from __future__ import annotations

import math
import random
from fractions import Fraction

import pytest
import torch

from covey.rollout.embedded import runner
from covey.rollout.embedded.runner import draw, truncate
from covey.streams import stream_seed, uniform
from covey.types import Sampling

PROBS = [0.4, 0.3, 0.2, 0.1]
LOGITS = torch.tensor(PROBS).log()


def kept(**settings: float) -> list[float]:
    logprobs = truncate(LOGITS[None], [Sampling(**settings)])[0]  # type: ignore[arg-type]
    return logprobs.exp().tolist()


def test_top_k_keeps_the_likeliest_and_renormalises() -> None:
    assert kept(top_k=2) == pytest.approx([4 / 7, 3 / 7, 0, 0])


def test_top_p_keeps_the_fewest_that_reach_it() -> None:
    assert kept(top_p=0.65) == pytest.approx([4 / 7, 3 / 7, 0, 0])
    assert kept(top_p=0.75) == pytest.approx([4 / 9, 3 / 9, 2 / 9, 0])
    assert kept(top_p=0.01) == pytest.approx([1, 0, 0, 0])


def test_min_p_is_relative_to_the_likeliest() -> None:
    assert kept(min_p=0.6) == pytest.approx([4 / 7, 3 / 7, 0, 0])


def test_top_k_comes_before_top_p() -> None:
    # Of 4/7 and 3/7, the first alone reaches 0.55; of all four it would take two.
    assert kept(top_k=2, top_p=0.55) == pytest.approx([1, 0, 0, 0])


@pytest.mark.parametrize("settings", [{}, {"temperature": 0.5}, {"top_k": 3}, {"top_p": 0.75, "temperature": 2.0}])
def test_frequencies_and_logprobs_are_those_of_the_distribution(settings: dict[str, float]) -> None:
    n = 20_000
    rows = [Sampling(seed=s, **settings) for s in range(n)]  # type: ignore[arg-type]
    ids, logprobs = draw(LOGITS.expand(n, 4), rows, [0] * n)
    tempered = torch.log_softmax(LOGITS / settings.get("temperature", 1.0), -1)[None]
    expected = truncate(tempered, rows[:1])[0].exp()
    frequency = torch.bincount(ids, minlength=4) / n
    deviation = (expected * (1 - expected) / n).sqrt()
    assert bool(((frequency - expected).abs() <= 4 * deviation + 1e-9).all()), (frequency, expected)
    torch.testing.assert_close(logprobs.exp(), expected[ids], atol=1e-6, rtol=0)


@pytest.mark.parametrize("vocabulary", [1, 7, 256, 257, 1024, 1000])
def test_the_token_is_where_the_cumulative_distribution_passes_the_number(vocabulary: int) -> None:
    """Against the definition, summed up in exact fractions; blocks of 256, of 8, and of one."""
    rng = random.Random(vocabulary)
    for _ in range(20):
        weights = [rng.choice((0, 0, 1, 3, 8)) for _ in range(vocabulary - 1)] + [1]
        total = sum(weights)
        u = rng.choice((0.0, rng.random(), 1 - 2**-53))
        below, expected = 0, 0
        for expected, weight in enumerate(weights):  # noqa: B007
            below += weight
            if below > Fraction(u) * total:
                break
        probs = torch.tensor([weights], dtype=torch.float32) / 2**13  # exact, and so are their sums
        assert int(runner.invert(probs, torch.tensor([u], dtype=torch.float64))) == expected


def test_a_number_that_rounds_up_to_the_total_means_the_last_token_that_has_any_probability() -> None:
    probs = torch.zeros(2, 1024)
    probs[0, 3] = probs[0, 700] = 0.5
    probs[1, 1023] = 1.0
    assert runner.invert(probs, torch.ones(2, dtype=torch.float64)).tolist() == [700, 1023]


def test_a_token_without_probability_is_never_drawn() -> None:
    logits = torch.tensor([[-math.inf, 0.0, -math.inf, 0.0, -math.inf]]).expand(5000, 5)
    ids, _ = draw(logits, [Sampling(seed=s) for s in range(5000)], [0] * 5000)
    assert set(ids.tolist()) == {1, 3}


def test_greedy_and_sampled_rows_share_a_batch() -> None:
    ids, logprobs = draw(LOGITS.expand(2, 4), [Sampling(temperature=0.0), Sampling(seed=5)], [0, 0])
    assert ids[0] == 0
    assert logprobs[0] == 0.0
    assert logprobs[1] == pytest.approx(math.log(PROBS[int(ids[1])]), abs=1e-6)


@pytest.mark.parametrize("rows", [1, 2, 7])
def test_rows_drawn_some_after_the_other_are_the_same_to_the_last_bit(
    rows: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    torch.manual_seed(0)
    logits = torch.randn(7, 500) * 4
    settings = [Sampling(seed=s, temperature=s % 3 / 2, top_p=1 - s % 2 / 5) for s in range(7)]
    whole = draw(logits, settings, range(7))
    monkeypatch.setattr(runner, "BLOCK_LOGITS", rows * 500 + 499)
    worked_on: list[int] = []
    one_block = runner._draw
    monkeypatch.setattr(runner, "_draw", lambda x, *rest: (worked_on.append(len(x)), one_block(x, *rest))[1])
    parts = draw(logits, settings, range(7))
    assert worked_on == [rows] * (7 // rows) + [7 % rows] * (7 % rows > 0)
    for a, b in zip(whole, parts, strict=True):
        assert torch.equal(a, b)


def test_streams_are_uniform_and_named() -> None:
    draws = [uniform(stream_seed("run", 0, "task", i), t) for i in range(200) for t in range(50)]
    assert sum(draws) / len(draws) == pytest.approx(0.5, abs=4 / math.sqrt(12 * len(draws)))
    assert min(draws) >= 0 and max(draws) < 1
    assert len(set(draws)) == len(draws)
    assert stream_seed(1, "2") != stream_seed("1", "23")


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"temperature": -1.0}, "temperature"),
        ({"top_p": 0.0}, "top_p"),
        ({"min_p": 1.0}, "min_p"),
        ({"top_k": -1}, "top_k"),
        ({"max_tokens": 0}, "max_tokens"),
    ],
)
def test_invalid_settings_are_rejected(settings: dict[str, float], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Sampling(**settings)  # type: ignore[arg-type]
