"""The learner with a teacher: its scores, gradients of the KL to it, prompts of its own."""

from __future__ import annotations

import math
from dataclasses import replace
from itertools import pairwise
from typing import Any

import pytest
import torch

from covey.algorithms import make
from covey.algorithms.distill import Teacher
from covey.config.schema import LearnerConfig
from covey.learner import logprobs
from covey.learner.learner import Learner
from covey.models.loading import Reference
from covey.protocols import Needs
from covey.types import Batch, Sample, Samples, TeacherTop
from tests.conftest import tiny_llama
from tests.learner.helpers import batch_of, rows_of

HINT = (5, 9, 4, 7)


def hinted(rows: list[Sample]) -> list[Sample]:
    """The teacher reads a hint before every prompt, except for one row that it does not score."""
    return [
        replace(row, teacher_prompt_ids=() if i == 1 else HINT + row.prompt_ids) for i, row in enumerate(rows)
    ]  # fmt: skip


def logits_before(model: Any, prompt: tuple[int, ...], row: Sample, temperature: float) -> torch.Tensor:
    """Log-probs over the vocabulary before each token of the response, from one plain forward pass."""
    logits = model(torch.tensor([prompt + row.response_ids])).logits[0, len(prompt) - 1 : -1] / temperature
    return torch.log_softmax(logits, -1)


def samples_of(batch: Batch, temperature: float) -> Samples:
    return Samples(
        rows=batch.rows,
        group_N=batch.group_N,
        rewards={},
        weights={},
        longest_N=batch.length_N,
        truncated_N=torch.zeros(len(batch.group_N), dtype=torch.bool),
        episode_R=batch.episode_R,
        mask_RT=batch.mask_RT,
        old_logprobs_RT=batch.old_logprobs_RT,
        temperature=temperature,
    )


def test_the_teacher_scores_the_same_tokens_after_its_own_prompt() -> None:
    model, teacher = (tiny_llama(dtype=torch.float64, seed=seed) for seed in (0, 1))
    batch = batch_of(hinted(rows_of(2, 3, gaps=True)), 3)
    learner = Learner(model, LearnerConfig(micro_batch_tokens=40), total_updates=1, teacher=Reference(teacher))
    found = learner.annotate(samples_of(batch, 0.7), Needs(teacher=True)).teacher_logprobs_RT
    assert found is not None
    for row, line in zip(batch.rows, found, strict=True):
        prompt = row.teacher_prompt_ids or row.prompt_ids
        expected = logits_before(teacher, prompt, row, 0.7).gather(-1, torch.tensor(row.response_ids)[:, None])[:, 0]
        torch.testing.assert_close(line[: len(row.mask)], expected * torch.tensor(row.mask), atol=1e-9, rtol=0)


def test_without_a_teacher_it_is_the_current_policy() -> None:
    model = tiny_llama(dtype=torch.float64)
    batch = batch_of(rows_of(2, 3), 3)
    learner = Learner(model, LearnerConfig(), total_updates=1)
    found = learner.annotate(samples_of(batch, 1.0), Needs(teacher=True)).teacher_logprobs_RT
    assert torch.equal(found, learner.logprobs(batch.rows, 1.0))


@pytest.mark.parametrize("size", [None, 1, 2])
@pytest.mark.parametrize("own", [False, True], ids=["another model", "the current policy"])
def test_gradient_of_the_full_kl(own: bool, size: int | None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Against the KL over the vocabulary of plain forward passes, for every split into micro-batches. The teacher has
    more outputs than the policy, as larger models of a family."""
    model = tiny_llama(dtype=torch.float64, initializer_range=0.1)
    teacher = model if own else tiny_llama(vocabulary=70, dtype=torch.float64, initializer_range=0.1, seed=1)
    batch = replace(batch_of(hinted(rows_of(2, 3, gaps=True)), 3), temperature=0.7)
    batch = replace(batch, advantages_RT=torch.zeros_like(batch.advantages_RT))
    learner = Learner(
        model, LearnerConfig(micro_batch_size=size), total_updates=1, teacher=None if own else Reference(teacher)
    )
    monkeypatch.setattr(learner.optimizer, "step", lambda: (0.0, 0.0, True))
    metrics, _ = learner.update(batch, replace(make("grpo", aggregation="token-mean"), teacher=Teacher("full", 0.3)))
    found = model.lm_head.weight.grad.clone()
    model.zero_grad()
    total, tokens = torch.zeros((), dtype=torch.float64), 0
    for row in batch.rows:
        if row.teacher_prompt_ids:
            p = logits_before(model, row.prompt_ids, row, 0.7)
            with torch.no_grad():
                q = logits_before(teacher, row.teacher_prompt_ids, row, 0.7)[:, :64]
            total = total + ((p.exp() * (p - q)).sum(-1) * torch.tensor(row.mask)).sum()
            tokens += sum(row.mask)
    (0.3 * total / int(batch.mask_RT.sum())).backward()
    assert metrics["distill/kl"] == pytest.approx(float(total.detach()) / tokens, rel=1e-6)
    assert metrics["distill/share"] == pytest.approx(tokens / int(batch.mask_RT.sum()))
    torch.testing.assert_close(found, model.lm_head.weight.grad, atol=1e-7, rtol=0)


def test_one_prompt_of_the_policy_and_two_of_the_teacher() -> None:
    """Two tasks with the same question and different answers, in one micro-batch or in several."""
    rows = [
        replace(row, teacher_prompt_ids=(HINT if i < 3 else HINT[::-1]) + row.prompt_ids)
        for i, row in enumerate(rows_of(1, 6))
    ]  # fmt: skip
    found = []
    for size in (None, 1):
        model, teacher = (tiny_llama(dtype=torch.float64, initializer_range=0.1, seed=seed) for seed in (0, 1))
        config = LearnerConfig(micro_batch_size=size)
        learner = Learner(model, config, total_updates=1, teacher=Reference(teacher))
        metrics, _ = learner.update(batch_of(rows, 3), replace(make("grpo"), teacher=Teacher("full")))
        found.append([metrics["distill/kl"], metrics["grad/norm"]])
    assert found[0] == pytest.approx(found[1], rel=1e-6)


@pytest.mark.parametrize("size", [None, 2])
def test_gradient_of_the_kl_over_the_most_likely_tokens(size: int | None, monkeypatch: pytest.MonkeyPatch) -> None:
    """K log-probs per token, as an endpoint sends them."""
    model, teacher = (tiny_llama(dtype=torch.float64, initializer_range=0.1, seed=seed) for seed in (0, 1))
    batch = batch_of(rows_of(2, 3), 3)
    shape = (*batch.mask_RT.shape, 5)
    top = TeacherTop(torch.zeros(shape, dtype=torch.long), torch.zeros(shape, dtype=torch.float64))
    expected = torch.zeros((), dtype=torch.float64)
    for i, row in enumerate(batch.rows):
        with torch.no_grad():
            q = logits_before(teacher, row.prompt_ids, row, 1.0).topk(5)
        top.ids[i, : len(row.mask)], top.logprobs[i, : len(row.mask)] = q.indices, q.values
        p = logits_before(model, row.prompt_ids, row, 1.0).gather(-1, q.indices)
        rest_p, rest_q = (1 - x.exp().sum(-1) for x in (p, q.values))
        each = (p.exp() * (p - q.values)).sum(-1) + rest_p * (rest_p / rest_q).log()
        expected = expected + (each * torch.tensor(row.mask)).sum()
    batch = replace(batch, teacher_top=top, advantages_RT=torch.zeros_like(batch.advantages_RT))
    (expected / int(batch.mask_RT.sum())).backward()
    by_hand = model.lm_head.weight.grad.clone()
    model.zero_grad()
    learner = Learner(model, LearnerConfig(micro_batch_size=size), total_updates=1)
    monkeypatch.setattr(learner.optimizer, "step", lambda: (0.0, 0.0, True))
    metrics, _ = learner.update(batch, replace(make("grpo", aggregation="token-mean"), teacher=Teacher("top_k")))
    assert metrics["distill/kl"] == pytest.approx(float(expected.detach()) / int(batch.mask_RT.sum()), rel=1e-6)
    torch.testing.assert_close(model.lm_head.weight.grad, by_hand, atol=1e-7, rtol=0)


def test_the_kl_over_some_tokens_is_a_lower_bound() -> None:
    """Merging the other tokens to one class loses information; with all but one token it loses none."""
    torch.manual_seed(0)
    logits, other = torch.randn(6, 9, dtype=torch.float64), torch.randn(6, 9, dtype=torch.float64).log_softmax(-1)
    full = logprobs.FullKl.apply(logits, other)
    tops = [other.topk(k) for k in (1, 3, 6, 8)]
    bounds = [logprobs.top_kl(logits, top.indices, top.values) for top in tops]
    assert all(bool((low < high).all()) for low, high in pairwise(bounds))
    torch.testing.assert_close(bounds[-1], full)
    larger = torch.cat([other + torch.tensor(0.7).log(), torch.full((6, 1), 0.3, dtype=torch.float64).log()], -1)
    top = larger.topk(4)  # one of them is a token that the policy does not have
    p, q = logits.log_softmax(-1), larger
    expected = []
    for row, ids in enumerate(top.indices.tolist()):
        shared = [i for i in ids if i < 9]
        rest = [1 - float(x[row, chosen].exp().sum()) for x, chosen in ((p, shared), (q, ids))]
        expected.append(
            float((p[row, shared].exp() * (p - q[:, :9])[row, shared]).sum()) + rest[0] * math.log(rest[0] / rest[1])
        )
    found = logprobs.top_kl(logits, top.indices, top.values)
    assert found.tolist() == pytest.approx(expected) and any(9 in ids for ids in top.indices.tolist())
