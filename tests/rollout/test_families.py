"""Every family of models, in rows (a CPU's cache) and in blocks (a GPU's, by plain torch), against plain passes.

Prompts are ragged, some are alike or begin alike, and prompts and answers are longer than the sliding windows.
"""

from __future__ import annotations

import pytest

from covey.rollout.embedded import cpu_batch, gpu_batch
from covey.types import Sampling
from tests.learner.test_forward import FAMILIES, family
from tests.rollout.plain import Request, answers, assert_as_alone, engine_for, greedy

BEGINNING = [*range(20, 32)]
PROMPTS = [
    [*BEGINNING, 5],
    [*BEGINNING, 6, 7, 8],
    [3],
    [*range(3, 33)],
    [*BEGINNING, 5],
    [9, 10],
    BEGINNING,
    [*range(33, 38)],
]


@pytest.fixture(autouse=True)
def everything_is_used(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpu_batch, "BLOCK", 4)
    monkeypatch.setattr(cpu_batch, "MIN_STEPS", 1)


@pytest.mark.parametrize("paged", [False, True], ids=["rows", "blocks"])
@pytest.mark.parametrize("name", FAMILIES)
def test_log_probs_and_greedy_tokens_are_those_of_a_plain_forward_pass(name: str, paged: bool) -> None:
    model = family(name)
    drawn: list[Request] = [(p, Sampling(max_tokens=5 + 2 * n, seed=n)) for n, p in enumerate(PROMPTS)]
    likeliest: list[Request] = [(p, Sampling(temperature=0.0, max_tokens=12)) for p in PROMPTS]
    engine = engine_for(model, eos_ids=[], paged=paged, eager=True, max_sequences=6)
    done = answers(engine, [*drawn, *likeliest])
    assert_as_alone(model, drawn, done[: len(drawn)])
    for (prompt, _), one in zip(likeliest, done[len(drawn) :], strict=True):
        assert one.token_ids == greedy(model, prompt, 12)
