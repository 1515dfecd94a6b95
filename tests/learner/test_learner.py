"""The learner: micro-batches do not matter, half precision has masters, non-finite values are skipped."""

from __future__ import annotations

import asyncio
import gc
import math
from dataclasses import replace
from typing import Any
from unittest.mock import AsyncMock, MagicMock, Mock

import pytest
import torch

from covey.algorithms import ALGORITHMS, LOSSES, make
from covey.algorithms.ops import make_batch
from covey.config.schema import LearnerConfig
from covey.learner.learner import Learner, NonFiniteError
from covey.learner.optimizer import learning_rate
from covey.models.loading import Reference
from covey.protocols import LossTerm, Needs
from covey.training.step import Pipeline, Schedule, publish
from covey.types import Batch, Samples
from tests.algorithms.helpers import WITHOUT_CRITIC
from tests.conftest import tiny_llama
from tests.learner.helpers import batch_of, rows_of
from tests.learner.test_teacher import samples_of

# One algorithm of the catalogue for each loss, without a critic; and variants.
CASES: dict[str, dict[str, Any]] = {
    **{name: {} for loss in LOSSES for name in [n for n in WITHOUT_CRITIC if ALGORITHMS[n].loss == loss][:1]},
    "gvpo-clipped": {"clip_weight": 0.7},
    "grpo": {"kl_coef": 0.1},
    "grpo-token-mean": {"aggregation": "token-mean"},
    "grpo-full-kl": {"kl_coef": 0.5, "kl_estimator": "full", "kl_old_coef": 0.1},
    "gspo": {"clip_low": 0.5, "clip_high": 0.5},
    "luspo": {"clip_low": 0.5, "clip_high": 0.5},
    "grpo-dppo-kl": {"loss": "dppo_kl"},
    "clip_cov": {"clip_cov_ratio": 0.1, "clip_cov_low": 0.1},
    "kl_cov": {"kl_cov_ratio": 0.1},
}


def gradients(algorithm: str, monkeypatch: pytest.MonkeyPatch, **changes: Any) -> dict[str, torch.Tensor]:
    """Gradients of one mini-batch, in float64, taken just before the optimiser would use them."""
    # Small weights: the norms of transformers compute in float32, so a gradient is only as exact as it is small.
    model = tiny_llama(dtype=torch.float64, initializer_range=0.08)
    reference = Reference(tiny_llama(dtype=torch.float64, initializer_range=0.08, seed=1))
    learner = Learner(model, LearnerConfig(entropy_coef=0.01, **changes), total_updates=1, reference=reference)
    monkeypatch.setattr(learner.optimizer, "step", lambda: (0.0, 0.0, True))
    learner.update(forked_batch(), make(algorithm.split("-")[0], **CASES[algorithm]))
    return {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


def forked_batch() -> Batch:
    """Four groups of four episodes; every fifth episode has two rows."""
    rows, episodes = rows_of(4, 5, gaps=True), [4 * (i // 5) + i % 5 - (i % 5 == 4) for i in range(20)]
    rows = [replace(row, episode=episode) for row, episode in zip(rows, episodes, strict=True)]
    flat = batch_of(rows, 5)
    owner = torch.tensor(episodes)
    return make_batch(
        rows=tuple(rows),
        group_N=torch.arange(16) // 4,
        rewards_N=flat.rewards_N[:16],
        episode_R=owner,
        mask_RT=flat.mask_RT,
        old_logprobs_RT=flat.old_logprobs_RT,
        ref_logprobs_RT=flat.ref_logprobs_RT,
        advantages_RT=flat.rewards_N[:16][owner][:, None].expand(flat.mask_RT.shape).clone(),
        max_tokens=9,
    )


@pytest.mark.parametrize("algorithm", CASES)
def test_gradients_do_not_depend_on_the_split(algorithm: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whole batch, 2 and 4 groups' worth of episodes, and splits inside a group (1, 2, 3 episodes)."""
    whole = gradients(algorithm, monkeypatch)
    assert max(float(g.abs().max()) for g in whole.values()) > 1e-3
    for size in (1, 2, 3, 4, 8):
        split = gradients(algorithm, monkeypatch, micro_batch_size=size)
        for name, expected in whole.items():
            torch.testing.assert_close(split[name], expected, atol=1e-6, rtol=0, msg=f"{name} in splits of {size}")
    by_tokens = gradients(algorithm, monkeypatch, micro_batch_tokens=25)
    for name, expected in whole.items():
        torch.testing.assert_close(by_tokens[name], expected, atol=1e-6, rtol=0)


def test_gradient_is_that_of_the_formula(monkeypatch: pytest.MonkeyPatch) -> None:
    """The learner's GVPO gradient against the loss written out on one plain padded forward pass."""
    model = tiny_llama(dtype=torch.float64)
    batch = batch_of(rows_of(2, 3), 3)
    learner = Learner(model, LearnerConfig(), total_updates=1)
    monkeypatch.setattr(learner.optimizer, "step", lambda: (0.0, 0.0, True))
    learner.update(batch, make("gvpo", beta=0.3, reference="initial"))
    found = model.lm_head.weight.grad.clone()
    model.zero_grad()
    sums = []
    for row in batch.rows:
        logits = model(torch.tensor([row.prompt_ids + row.response_ids])).logits[0]
        logprobs = torch.log_softmax(logits, -1)[len(row.prompt_ids) - 1 : -1]
        sums.append(logprobs.gather(-1, torch.tensor(row.response_ids)[:, None]).sum())
    s = torch.stack(sums).view(2, 3)
    assert batch.ref_sum_N is not None
    rho, reward = s.detach() - batch.ref_sum_N.view(2, 3), batch.rewards_N.view(2, 3)
    weight = reward - reward.mean(1, keepdim=True) - 0.3 * (rho - rho.mean(1, keepdim=True))
    (-0.3 / 2 * (weight * s).sum() / 2).backward()
    torch.testing.assert_close(found, model.lm_head.weight.grad, atol=1e-9, rtol=0)


def test_statistics_do_not_depend_on_the_split() -> None:
    """Means over tokens are weighed by tokens, whatever the micro-batches; so is the effective sample size."""
    found = []
    for size in (None, 1, 3):
        model = tiny_llama(dtype=torch.float64)
        learner = Learner(model, LearnerConfig(micro_batch_size=size), total_updates=1)
        found.append(learner.update(forked_batch(), make("grpo", kl_coef=0.1))[0])
    for name in ("kl/reference", "policy/clip_high", "policy/clip_low", "policy/ess", "policy/entropy", "loss/total"):
        assert found[1][name] == pytest.approx(found[0][name], rel=1e-4), name
        assert found[2][name] == pytest.approx(found[0][name], rel=1e-4), name
    assert 0 < found[0]["policy/clip_high"] < 1


def test_the_full_kl_is_the_sum_over_the_vocabulary(monkeypatch: pytest.MonkeyPatch) -> None:
    """Value and gradient, against plain forward passes of policy and reference, at a temperature."""
    model, other = (tiny_llama(dtype=torch.float64, seed=seed) for seed in (0, 1))
    batch = replace(batch_of(rows_of(2, 3, gaps=True), 3), temperature=0.7)
    batch = replace(batch, advantages_RT=torch.zeros_like(batch.advantages_RT))
    learner = Learner(model, LearnerConfig(), total_updates=1, reference=Reference(other))
    monkeypatch.setattr(learner.optimizer, "step", lambda: (0.0, 0.0, True))
    metrics, _ = learner.update(batch, make("rloo", kl_coef=0.3, kl_estimator="full"))
    found = model.lm_head.weight.grad.clone()
    model.zero_grad()
    total = torch.zeros((), dtype=torch.float64)
    for row in batch.rows:
        ids = torch.tensor([row.prompt_ids + row.response_ids])
        p, q = (torch.log_softmax(m(ids).logits[0, len(row.prompt_ids) - 1 : -1] / 0.7, -1) for m in (model, other))
        total = total + ((p.exp() * (p - q)).sum(-1) * torch.tensor(row.mask)).sum()
    mean = total / int(batch.mask_RT.sum())
    (0.3 * mean).backward()
    assert metrics["kl/reference"] == pytest.approx(float(mean), rel=1e-6)
    torch.testing.assert_close(found, model.lm_head.weight.grad, atol=1e-7, rtol=0)


def test_annotate_computes_only_what_is_needed() -> None:
    model, other = (tiny_llama(dtype=torch.float64, seed=seed) for seed in (0, 1))
    learner = Learner(model, LearnerConfig(), total_updates=1, reference=Reference(other))
    batch = batch_of(rows_of(2, 3), 3)
    samples = Samples(
        rows=batch.rows,
        group_N=batch.group_N,
        rewards={},
        weights={},
        longest_N=batch.length_N,
        truncated_N=torch.zeros(6, dtype=torch.bool),
        episode_R=batch.episode_R,
        mask_RT=batch.mask_RT,
        old_logprobs_RT=batch.old_logprobs_RT,
    )
    assert learner.annotate(samples, Needs()) is samples
    norms = learner.annotate(samples, Needs(score_norms=True))
    assert norms.sampling_logprobs_RT is None and norms.old_logprobs_RT is samples.old_logprobs_RT
    for row, found_T in zip(batch.rows, norms.score_norms_RT, strict=True):  # type: ignore[arg-type]
        logits = model(torch.tensor([row.prompt_ids + row.response_ids])).logits[0, len(row.prompt_ids) - 1 : -1]
        score = torch.nn.functional.one_hot(torch.tensor(row.response_ids), logits.shape[-1]) - logits.softmax(-1)
        expected = (score**2).sum(-1)[torch.tensor(row.mask)]
        torch.testing.assert_close(found_T[: len(row.mask)][torch.tensor(row.mask)], expected)
    found = learner.annotate(samples, Needs(reference=True, proximal=True, sample_full_kl=True))
    torch.testing.assert_close(found.old_logprobs_RT, learner.logprobs(batch.rows, 1.0))
    torch.testing.assert_close(found.ref_logprobs_RT, learner.logprobs(batch.rows, 1.0, other))
    assert found.sampling_logprobs_RT is samples.old_logprobs_RT
    assert found.full_kl_RT is not None and bool((found.full_kl_RT[batch.mask_RT] > 0).all())


def test_an_update_moves_towards_the_better_answers() -> None:
    model = tiny_llama()
    learner = Learner(model, LearnerConfig(lr=1e-3, weight_decay=0.0), total_updates=1)
    rows = rows_of(2, 4)
    batch = batch_of(rows, 4, dtype=torch.float32)
    before = learner.logprobs(rows, 1.0).sum(-1)
    metrics, trace = learner.update(batch, make("grpo"))
    moved = learner.logprobs(rows, 1.0).sum(-1) - before
    assert float((moved * batch.rewards_N).sum()) > 0
    assert metrics["grad/norm"] > 0 and metrics["optim/lr"] == 1e-3
    torch.testing.assert_close(trace.advantage, batch.advantages_RT * batch.mask_RT)


def test_an_offloaded_reference_is_moved_once_for_all_chunks_of_the_full_kl(monkeypatch: pytest.MonkeyPatch) -> None:
    model = tiny_llama()
    reference = Reference.of(model)
    reference.offload = True
    learner = Learner(model, LearnerConfig(micro_batch_tokens=16), total_updates=1, reference=reference)
    moves: list[str] = []
    monkeypatch.setattr(reference.model, "to", lambda where: moves.append(str(where)))
    rows = rows_of(4, 2)
    samples = samples_of(batch_of(rows, 2, dtype=torch.float32), 1.0)
    learner.annotate(samples, Needs(sample_full_kl=True))
    assert len(moves) == 2  # to the device, and back


@pytest.mark.parametrize("embedding", [torch.bfloat16, torch.float32])
def test_bfloat16_weights_follow_float32_masters(embedding: torch.dtype) -> None:
    """A thousand steps of 1e-6 move a weight near 0.3 by 1e-3, up to float32's own rounding of 1000 additions; in pure
    bfloat16 each step would round to nothing. The embedding is the first weight, and may be more precise."""
    model = tiny_llama(dtype=torch.bfloat16)
    model.model.embed_tokens.to(embedding)
    learner = Learner(model, LearnerConfig(lr=1e-6, grad_clip=0.0, beta2=0.9), total_updates=1)
    weight = model.lm_head.weight
    start = weight.detach().float().clone()
    for _ in range(1000):
        for master in learner.optimizer.masters.values():
            master.grad = torch.ones_like(master)
        learner.optimizer.step()
    moved = start - learner.optimizer.masters["lm_head.weight"]
    torch.testing.assert_close(moved, torch.full_like(moved, 1e-3), atol=6e-5, rtol=0)
    torch.testing.assert_close(weight.detach(), learner.optimizer.masters["lm_head.weight"].bfloat16())
    assert bool((weight.detach().float() != start).any())


def test_gradients_of_half_precision_add_up_in_float32() -> None:
    """One large gradient and many small ones, each of which would round to nothing in bfloat16."""
    model = tiny_llama(dtype=torch.bfloat16)
    optimizer = Learner(model, LearnerConfig(), total_updates=1).optimizer
    weight, master = model.lm_head.weight, optimizer.masters["lm_head.weight"]
    for scale in (1.0, *[1e-3] * 100):
        (weight * scale).sum().backward()
        assert weight.grad is None
    torch.testing.assert_close(master.grad, torch.full_like(master, 1 + 0.1), atol=1e-3, rtol=0)


def test_a_model_that_outlives_its_learner_has_no_hooks_left() -> None:
    model = tiny_llama(dtype=torch.bfloat16)
    learner = Learner(model, LearnerConfig(), total_updates=1)
    del learner
    gc.collect()
    second = Learner(model, LearnerConfig(), total_updates=1)
    model.lm_head.weight.sum().backward()
    master = second.optimizer.masters["lm_head.weight"]
    assert master.grad is not None and float(master.grad.min()) == 1.0


def test_offloading_the_optimiser_changes_no_result() -> None:
    """On a CPU the setting has no effect."""
    batch = batch_of(rows_of(2, 4), 4, dtype=torch.float32)
    found = []
    for offload in (False, True):
        model = tiny_llama(dtype=torch.bfloat16)
        learner = Learner(model, LearnerConfig(lr=1e-3, offload_optimizer=offload), total_updates=1)
        learner.update(batch, make("grpo"))
        found.append(model.lm_head.weight.detach().clone())
    assert torch.equal(*found)


def test_float16_scales_the_loss_and_survives_an_overflow() -> None:
    model = tiny_llama(dtype=torch.float16)
    learner = Learner(model, LearnerConfig(lr=1e-4), total_updates=1)
    batch = batch_of(rows_of(2, 4), 4, dtype=torch.float32)
    assert learner.scaler.is_enabled()
    outcomes = [learner.update(batch, make("grpo"))[0]["optim/skipped"] for _ in range(4)]
    scale = learner.scaler.get_scale()
    assert outcomes[-1] < 4, "the scale falls until gradients fit"
    assert scale <= 65536.0
    assert all(bool(p.isfinite().all()) for p in model.parameters())


class Broken:
    """An algorithm whose loss is NaN, `times` times."""

    couples = "nothing"

    def __init__(self, times: int) -> None:
        self.left = times
        self.sound = make("grpo")
        self.needs = self.sound.needs

    def loss(self, out: Any, batch: Any) -> dict[str, LossTerm]:
        self.left -= 1
        terms = self.sound.loss(out, batch)
        return {"policy": LossTerm(terms["policy"].sum * math.nan, "episodes")} if self.left >= 0 else terms

    def metrics(self, out: Any, batch: Any) -> dict[str, float]:
        return {}


def test_a_non_finite_loss_changes_nothing_and_is_counted() -> None:
    model = tiny_llama()
    learner = Learner(model, LearnerConfig(lr=1e-2, max_skipped=3), total_updates=10)
    batch = batch_of(rows_of(2, 4), 4, dtype=torch.float32)
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    algorithm: Any = Broken(times=2)
    assert learner.update(batch, algorithm)[0]["optim/skipped"] == 1
    assert learner.update(batch, algorithm)[0]["optim/skipped"] == 2
    assert all(torch.equal(p, before[name]) for name, p in model.named_parameters())
    metrics, _ = learner.update(batch, algorithm)
    assert metrics["optim/skipped"] == 2 and learner.skipped_in_a_row == 0
    assert any(not torch.equal(p, before[name]) for name, p in model.named_parameters())


def test_too_many_skipped_updates_in_a_row_stop_the_run() -> None:
    learner = Learner(tiny_llama(), LearnerConfig(max_skipped=2), total_updates=10)
    batch = batch_of(rows_of(2, 4), 4, dtype=torch.float32)
    algorithm: Any = Broken(times=5)
    learner.update(batch, algorithm)
    with pytest.raises(NonFiniteError, match="2 updates in a row"):
        learner.update(batch, algorithm)


def test_gradient_checkpointing_gives_the_same_gradients(monkeypatch: pytest.MonkeyPatch) -> None:
    plain, recomputed = tiny_llama(), tiny_llama()
    recomputed.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    recomputed.train()
    batch = batch_of(rows_of(2, 4), 4, dtype=torch.float32)
    for model in (plain, recomputed):
        learner = Learner(model, LearnerConfig(), total_updates=1)
        monkeypatch.setattr(learner.optimizer, "step", lambda: (0.0, 0.0, True))
        learner.update(batch, make("gvpo"))
    torch.testing.assert_close(recomputed.lm_head.weight.grad, plain.lm_head.weight.grad)
    torch.testing.assert_close(
        recomputed.model.layers[0].mlp.up_proj.weight.grad, plain.model.layers[0].mlp.up_proj.weight.grad
    )


@pytest.mark.parametrize(
    ("schedule", "step", "expected"),
    [
        ("constant", 0, 0.25),  # warm-up of four steps
        ("constant", 3, 1.0),
        ("constant", 50, 1.0),
        ("cosine", 4, 1.0),
        ("cosine", 12, 0.1 + 0.9 * 0.5),
        ("cosine", 20, 0.1),
        ("linear", 8, 0.1 + 0.9 * 0.75),
        ("linear", 99, 0.1),
    ],
)
def test_schedules_by_hand(schedule: str, step: int, expected: float) -> None:
    config = LearnerConfig(lr=1.0, schedule=schedule, warmup_steps=4, min_lr_ratio=0.1)
    assert learning_rate(step, 20, config) == pytest.approx(expected)


@pytest.mark.parametrize("offloads", [True, False])
def test_offload_weights_moves_them_to_cpu_memory_while_the_engine_samples(
    monkeypatch: pytest.MonkeyPatch, offloads: bool
) -> None:
    learner = Learner(tiny_llama(), LearnerConfig(offload_weights=offloads), total_updates=1)
    moves: list[str] = []
    monkeypatch.setattr(learner, "_move", lambda device: moves.append(str(device)))
    for device in ("cpu", "cuda:1"):
        monkeypatch.setattr(Learner, "device", torch.device(device))
        learner.offload()
        learner.reload()
        learner.reload()  # no effect: already loaded
    assert moves == (["cpu", "cuda:1"] if offloads else [])


@pytest.mark.parametrize("owns_weights", [True, False])
def test_weights_that_the_engine_samples_with_are_never_offloaded(owns_weights: bool) -> None:
    engine = Mock(owns_weights=owns_weights, publish=AsyncMock(), resume=AsyncMock())
    learner, schedule = Mock(), Schedule(None, 1, {}, 1.0, 8)
    asyncio.run(publish(Pipeline(Mock(), learner, Mock(), engine, schedule, MagicMock()), 1))
    assert learner.offload.called == owns_weights


@pytest.mark.skipif(not torch.cuda.is_available(), reason="weights leave a GPU, and there is none")
def test_reloaded_weights_are_unchanged() -> None:
    model = tiny_llama().cuda()
    learner = Learner(model, LearnerConfig(offload_weights=True), total_updates=1)
    before = {name: weight.clone() for name, weight in model.named_parameters()}
    learner.offload()
    assert all(weight.device.type == "cpu" for weight in model.parameters())
    learner.reload()
    assert all(torch.equal(weight, before[name]) for name, weight in model.named_parameters())
