"""The critic: values where tokens are sampled, its own optimiser, and what reaches the policy."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from covey.algorithms import algorithm_schemas, make
from covey.app.models import make_learner as learner_of_run
from covey.app.prepare import prepare
from covey.config import compose
from covey.config.schema import CriticConfig, LearnerConfig
from covey.learner.learner import Learner
from covey.learner.token_scores import TokenQuery
from covey.types import Batch
from tests.conftest import tiny_llama
from tests.learner.helpers import batch_of, rows_of


def valued_batch(seed: int = 0) -> Batch:
    batch = batch_of(rows_of(3, 4, gaps=True), 4)
    torch.manual_seed(seed)
    returns = torch.where(batch.mask_RT, torch.randn(batch.mask_RT.shape, dtype=torch.float64), 0.0)
    return replace(batch, returns_RT=returns, values_RT=torch.zeros_like(returns))


def make_learner(
    shared: bool = False, learner: LearnerConfig | None = None, dtype: torch.dtype = torch.float64, **critic: Any
) -> Learner:
    model = tiny_llama(dtype=dtype, initializer_range=0.08)
    backbone = None if shared else tiny_llama(dtype=dtype, initializer_range=0.08, seed=1)
    made = Learner(
        model,
        learner or LearnerConfig(),
        total_updates=1,
        critic=CriticConfig(shared=shared, **critic),
        critic_backbone=backbone,
    )
    assert made.critic is not None
    made.critic.steps = 1  # the first training step has started: no warm-up
    torch.manual_seed(3)
    torch.nn.init.normal_(made.critic.head.weight, std=0.3)
    return made


def frozen(learner: Learner, monkeypatch: pytest.MonkeyPatch) -> Learner:
    """Gradients stay where they are."""
    assert learner.critic is not None
    for optimizer in (learner.optimizer, *learner.critic.optimizers.values()):
        monkeypatch.setattr(optimizer, "step", lambda: (0.0, 0.0, True))
    return learner


def grads(module: Any) -> dict[str, torch.Tensor]:
    return {name: p.grad.clone() for name, p in module.named_parameters() if p.grad is not None}


def test_values_start_at_zero_and_depend_only_on_earlier_tokens() -> None:
    model = tiny_llama(dtype=torch.float64)
    learner = Learner(model, LearnerConfig(), total_updates=1, critic=CriticConfig(shared=True))
    assert learner.critic is not None
    rows = rows_of(2, 3, gaps=True)
    assert float(learner.outputs(rows, 1.0, TokenQuery(values=True)).values.abs().max()) == 0  # type: ignore[union-attr]
    torch.nn.init.normal_(learner.critic.head.weight)
    found = learner.outputs(rows, 1.0, TokenQuery(logprobs=False, values=True)).values
    assert found is not None
    for index, row in enumerate(rows):
        with torch.no_grad():
            hidden = model.model(torch.tensor([row.prompt_ids + row.response_ids])).last_hidden_state[0]
            expected = learner.critic.head(hidden[len(row.prompt_ids) - 1 : -1])[:, 0] * torch.tensor(row.mask)
        torch.testing.assert_close(found[index, : len(row.mask)], expected, atol=1e-7, rtol=0)


def test_a_separate_backbone_learns_independently_of_the_policy(monkeypatch: pytest.MonkeyPatch) -> None:
    batch = valued_batch()
    learner = frozen(make_learner(), monkeypatch)
    learner.update(batch, make("ppo"))
    alone = Learner(tiny_llama(dtype=torch.float64, initializer_range=0.08), LearnerConfig(), total_updates=1)
    monkeypatch.setattr(alone.optimizer, "step", lambda: (0.0, 0.0, True))
    alone.update(batch, make("ppo"))
    for name, gradient in grads(learner.model).items():
        torch.testing.assert_close(gradient, grads(alone.model)[name], atol=1e-12, rtol=0)
    assert learner.critic is not None and learner.critic.backbone is not None
    assert max(float(g.abs().max()) for g in grads(learner.critic.backbone).values()) > 1e-4


def test_the_value_gradient_is_that_of_the_formula(monkeypatch: pytest.MonkeyPatch) -> None:
    batch = valued_batch()
    learner = frozen(make_learner(clip=None), monkeypatch)
    metrics, _ = learner.update(batch, make("ppo"))
    assert learner.critic is not None and batch.returns_RT is not None
    values = learner.outputs(batch.rows, 1.0, TokenQuery(logprobs=False, values=True)).values
    assert values is not None
    error = (values - batch.returns_RT)[batch.mask_RT]
    assert metrics["value/loss"] == pytest.approx(float((error**2).mean() / 2), rel=1e-6)
    # L = mean ½ (w·h + b − G)², so ∂L/∂b is the mean error
    assert float(learner.critic.head.bias.grad[0]) == pytest.approx(float(error.mean()), rel=1e-6)


@pytest.mark.parametrize("shared", [False, True])
def test_gradients_do_not_depend_on_the_split(shared: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    found = []
    for size in (None, 1, 3):
        learner = frozen(make_learner(shared, LearnerConfig(micro_batch_size=size)), monkeypatch)
        learner.update(valued_batch(), make("ppo"))
        assert learner.critic is not None
        parts = [learner.model, learner.critic.head, *([learner.critic.backbone] if learner.critic.backbone else [])]
        found.append({(i, name): g for i, part in enumerate(parts) for name, g in grads(part).items()})
    for split in found[1:]:
        assert split.keys() == found[0].keys()
        for name, expected in found[0].items():
            torch.testing.assert_close(split[name], expected, atol=1e-6, rtol=0, msg=str(name))


def test_a_shared_backbone_gets_its_share_of_the_value_gradient_and_the_head_all(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    batch = valued_batch()
    batch = replace(batch, advantages_RT=torch.zeros_like(batch.advantages_RT))  # the policy's own gradient is zero
    backbone, head = [], []
    for share in (0.0, 0.1, 0.2):
        learner = frozen(make_learner(shared=True, shared_coef=share), monkeypatch)
        learner.update(batch, make("ppo"))
        assert learner.critic is not None
        backbone.append(grads(learner.model)["model.layers.0.mlp.up_proj.weight"])
        head.append(learner.critic.head.weight.grad.clone())
    assert float(backbone[0].abs().max()) == 0 < float(backbone[1].abs().max())
    torch.testing.assert_close(backbone[2], 2 * backbone[1])
    torch.testing.assert_close(head[0], head[2])


@pytest.mark.parametrize("shared", [False, True])
def test_during_warm_up_the_policy_is_not_updated(shared: bool) -> None:
    learner = make_learner(shared, LearnerConfig(lr=1e-2), warmup_steps=1)
    assert learner.critic is not None
    before = {name: p.detach().clone() for name, p in learner.model.named_parameters()}
    head = learner.critic.head.weight.detach().clone()
    metrics, _ = learner.update(valued_batch(), make("ppo"))
    assert all(torch.equal(p, before[name]) for name, p in learner.model.named_parameters())
    assert not torch.equal(head, learner.critic.head.weight)
    assert metrics["optim/skipped"] == 0
    learner.critic.steps = 2
    learner.update(valued_batch(), make("ppo"))
    assert any(not torch.equal(p, before[name]) for name, p in learner.model.named_parameters())


@pytest.mark.parametrize(("tasks", "updates"), [(40, 2 * 4), (5, 2 * 3)])
def test_schedules_end_with_the_last_update(tiny_model_folder: Path, tmp_path: Path, tasks: int, updates: int) -> None:
    """Six steps with two epochs over eight tasks in batches of two, or over all tasks if there are fewer. The critic
    learns in each step, the policy in the four that follow the warm-up."""
    rows = [{"question": f"1 + {number}", "answer": f"{1 + number}"} for number in range(tasks)]
    (tmp_path / "train.jsonl").write_text("\n".join(map(json.dumps, rows)))
    words = [f"model={tiny_model_folder}", f"data.train_files={tmp_path}/train.jsonl", "algorithm=ppo", "reward=exact"]
    words += ["loop.total_steps=6", "critic.warmup_steps=2", "critic.shared=true", "model.device=cpu"]
    words += ["data.train_batch_size=8", "learner.mini_batch_size=2", "learner.epochs=2"]
    learner = learner_of_run(prepare(compose(words, algorithms=algorithm_schemas())), None)
    assert learner.critic is not None
    assert learner.optimizer.total_steps == 4 * updates
    assert learner.critic.optimizers["head"].total_steps == 6 * updates


def test_it_learns_the_returns() -> None:
    learner = make_learner(dtype=torch.float32, lr=1e-2, clip=None)
    batch = valued_batch()
    losses = [learner.update(batch, make("ppo"))[0]["value/loss"] for _ in range(40)]
    assert losses[-1] < 0.2 * losses[0]


def test_a_checkpoint_has_the_whole_critic() -> None:
    learner, other = make_learner(), make_learner()
    assert learner.critic is not None and other.critic is not None
    learner.update(valued_batch(), make("ppo"))
    learner.critic.steps = 7
    other.critic.load({k: v.clone() for k, v in learner.critic.tensors().items()}, learner.critic.counters())
    assert other.critic.steps == 7
    for _ in range(2):
        for made in (learner, other):
            assert made.critic is not None
            made.model.load_state_dict(tiny_llama(dtype=torch.float64).state_dict())
            made.update(valued_batch(1), make("ppo"))
    for name, tensor in learner.critic.tensors().items():
        assert torch.equal(tensor, other.critic.tensors()[name]), name
