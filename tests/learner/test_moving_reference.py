"""The reference that follows the policy, every so many steps."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from covey.algorithms import make
from covey.algorithms.ops import make_batch
from covey.config.schema import LearnerConfig
from covey.learner.learner import Learner
from covey.learner.parallel import SINGLE_PROCESS
from covey.models.loading import Reference
from covey.protocols import Needs
from covey.types import Sample, Samples
from tests.conftest import tiny_llama
from tests.learner.helpers import batch_of, rows_of
from tests.learner.jobs import Case, reference_course, resume_moving

EVERY_TWO = Needs(reference=True, reference_every=2)


def to_samples(batch: Any) -> Samples:
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
    )


def adapted() -> Any:
    return Case(lora=3).policy()


@pytest.mark.parametrize("lora", [False, True], ids=["full", "lora"])
def test_every_two_steps_the_policy_becomes_the_reference(lora: bool) -> None:
    if lora:
        pytest.importorskip("peft")
    model = adapted() if lora else tiny_llama(dtype=torch.float64)
    learner = Learner(model, LearnerConfig(lr=1e-2), total_updates=9, reference=Reference.of(model))
    samples = to_samples(batch_of(rows_of(2, 3), 3))
    start = learner.annotate(samples, Needs(reference=True)).ref_logprobs_RT  # does not count as a step
    own, found = [], []
    for step in range(5):
        own.append(learner.logprobs(samples.rows, 1.0))
        found.append(learner.annotate(samples, EVERY_TWO).ref_logprobs_RT)
        torch.testing.assert_close(learner.logprobs(samples.rows, 1.0), own[-1], atol=0, rtol=0)
        learner.update(batch_of(rows_of(2, 3, seed=step), 3, seed=step), make("grpo"))
    for step, expected in enumerate([start, start, own[2], own[2], own[4]]):
        torch.testing.assert_close(found[step], expected, atol=1e-12, rtol=0)
    assert not torch.allclose(own[2], own[4], atol=1e-3)
    if not lora:
        torch.testing.assert_close(found[0], own[0])


def test_with_the_full_kl_a_moved_adapter_gives_the_gradient_of_a_copy() -> None:
    """The exchange of adapters between forward and backward pass leaves nothing behind."""
    pytest.importorskip("peft")
    algorithm = make("grpo", kl_coef=0.5, kl_estimator="full", reference_every=2)
    updated = []
    for copied in (False, True):
        model = adapted()
        learner = Learner(model, LearnerConfig(lr=1e-2), total_updates=9, reference=Reference.of(model))
        for step in range(4):
            batch = batch_of(rows_of(2, 3, seed=step), 3, seed=step)
            learner.annotate(to_samples(batch), Needs(reference=True) if copied else algorithm.needs)
            if copied and step == 2:
                merged = adapted()
                merged.load_state_dict(model.state_dict())
                learner.reference = Reference(merged.merge_and_unload())
            learner.update(batch, algorithm)
        updated.append({name: weight.clone() for name, weight in model.named_parameters()})
    for name, weight in updated[0].items():
        torch.testing.assert_close(weight, updated[1][name], atol=1e-9, rtol=0)


def test_gvpo_with_a_moving_anchor_reaches_the_n_th_power_of_the_tilt() -> None:
    """A softmax policy over four one-token answers, the output matrix of a model: after n anchors π ∝ π_0 e^{nR/β}."""
    beta, reward = 0.5, torch.tensor([1.0, 0.2, -0.5, 0.0], dtype=torch.float64)
    model = tiny_llama(vocabulary=4, dtype=torch.float64)
    model.requires_grad_(False).lm_head.weight.requires_grad_(True)
    config = LearnerConfig(lr=0.03, schedule="constant", weight_decay=0.0, grad_clip=0.0)
    learner = Learner(model, config, total_updates=1, reference=Reference.of(model))
    rows = [Sample((1, 3), (token,), (True,), (0.0,), (0,), token) for token in range(4)]
    algorithm = make("gvpo", beta=beta, reference="moving", reference_every=400)
    zeros = torch.zeros(4, 1, dtype=torch.float64)
    common = {"rows": tuple(rows), "group_N": torch.zeros(4, dtype=torch.int64), "rewards_N": reward}
    common |= {"episode_R": torch.arange(4), "mask_RT": zeros == 0, "old_logprobs_RT": zeros, "advantages_RT": zeros}
    start = learner.logprobs(rows, 1.0)[:, 0]
    for n in (1, 2):
        for step in range(400):
            rate = 0.03 * 0.985**step  # AdamW alone would keep oscillating by its rate
            learner.optimizer.config = LearnerConfig(lr=rate, weight_decay=0.0, grad_clip=0.0)
            samples = learner.annotate(to_samples(make_batch(**common, ref_logprobs_RT=None)), algorithm.needs)
            learner.update(make_batch(**common, ref_logprobs_RT=samples.ref_logprobs_RT), algorithm)
        expected = torch.softmax(start + n * reward / beta, 0)
        torch.testing.assert_close(learner.logprobs(rows, 1.0)[:, 0].exp(), expected, atol=1e-3, rtol=0)


@pytest.mark.parametrize("lora", [0, 3], ids=["full", "lora"])
def test_a_restored_learner_continues_with_the_same_reference(tmp_path: Path, lora: int) -> None:
    if lora:
        pytest.importorskip("peft")
    case = Case(reference=True, lora=lora)
    whole = reference_course(SINGLE_PROCESS, case, range(6), tmp_path / "unused", 9)
    first = reference_course(SINGLE_PROCESS, case, range(3), tmp_path, 3)
    rest = resume_moving(SINGLE_PROCESS, case, range(3, 6), tmp_path)
    for found, expected in zip([*first, *rest], whole, strict=True):
        torch.testing.assert_close(found, expected, atol=0, rtol=0)


def test_a_reference_that_no_longer_moves_is_the_start_model(tmp_path: Path) -> None:
    case = Case(reference=True)
    start = reference_course(SINGLE_PROCESS, case, range(3), tmp_path, 3)[0]
    found = resume_moving(SINGLE_PROCESS, case, range(3, 4), tmp_path, moving=False)
    torch.testing.assert_close(found[0], start, atol=0, rtol=0)


@pytest.mark.parametrize("algorithm", ["grpo", "gspo"])
def test_a_kl_to_a_moving_reference(algorithm: str) -> None:
    assert make(algorithm, kl_coef=0.1, reference_every=5).needs.reference_every == 5
    with pytest.raises(ValueError, match="reference_every moves the reference of the KL"):
        make(algorithm, reference_every=5)
