"""Routing replay: the experts of a step's first pass are those of all later ones, whatever the routers become."""

from __future__ import annotations

import copy
from dataclasses import replace
from typing import Any

import pytest
import torch

from covey.algorithms import make
from covey.algorithms.distill import Teacher
from covey.config.schema import LearnerConfig
from covey.errors import InputError
from covey.learner.learner import Learner
from covey.models.loading import Reference
from covey.protocols import Needs
from tests.conftest import tiny_llama
from tests.learner.helpers import batch_of, rows_of
from tests.learner.test_forward import family
from tests.learner.test_teacher import hinted, samples_of

NAMES = ["mixtral", "qwen2_moe", "qwen3_moe", "olmoe", "granitemoe"]


def routers_of(model: Any) -> list[Any]:
    return [module for module in model.modules() if type(module).__name__.endswith("TopKRouter")]


def experts_used(model: Any, learner: Learner, rows: Any) -> list[torch.Tensor]:
    """The experts that each mixture really runs in a pass over the rows, per layer."""
    used: list[torch.Tensor] = []
    experts = [module for module in model.modules() if type(module).__name__.endswith("Experts")]
    hooks = [e.register_forward_pre_hook(lambda _, args: used.append(args[1].sort(-1).values)) for e in experts]
    learner.logprobs(rows, 1.0)
    for hook in hooks:
        hook.remove()
    return used


@pytest.mark.parametrize("name", NAMES)
def test_perturbed_routers_change_the_experts_only_without_replay(name: str) -> None:
    model, rows = family(name), rows_of(3, 4, gaps=True)
    plain = Learner(model, LearnerConfig(), total_updates=1)
    learner = Learner(model, LearnerConfig(replay_routing=True), total_updates=1)
    samples = learner.annotate(samples_of(batch_of(rows, 4, dtype=torch.float32), 1.0), Needs(proximal=True))
    torch.testing.assert_close(samples.old_logprobs_RT, plain.logprobs(rows, 1.0), atol=1e-6, rtol=0)
    before = experts_used(model, plain, rows)
    with torch.no_grad():
        for router in routers_of(model):
            weight = next(router.parameters())
            weight.add_(0.3 * torch.randn_like(weight))
    replayed, own = experts_used(model, learner, rows), experts_used(model, plain, rows)
    assert all(torch.equal(a, b) for a, b in zip(replayed, before, strict=True))
    assert not all(torch.equal(a, b) for a, b in zip(own, before, strict=True))
    # The weights of the same experts are those of the new routers.
    assert not torch.allclose(learner.logprobs(rows, 1.0), samples.old_logprobs_RT, atol=1e-3)


@pytest.mark.parametrize("checkpointing", [False, True])
@pytest.mark.parametrize("size", [None, 3])
def test_updates_replay_whatever_the_split(size: int | None, checkpointing: bool) -> None:
    """Routes recorded in one split into micro-batches are replayed in another, also when layers are recomputed."""
    rows = rows_of(2, 4)
    batch = batch_of(rows, 4, dtype=torch.float32)
    results = []
    for recorded_in, updated_in, recompute in ((None, None, False), (3 if size is None else None, size, checkpointing)):
        model = family("qwen3_moe")
        if recompute:
            model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
            model.train()
        learner = Learner(model, LearnerConfig(lr=1e-2, eps=0.1, replay_routing=True), total_updates=2)
        learner.config = LearnerConfig(lr=1e-2, eps=0.1, micro_batch_size=recorded_in)
        learner.annotate(samples_of(batch, 1.0), Needs())
        with torch.no_grad():
            torch.manual_seed(3)
            for router in routers_of(model):
                router.weight.add_(0.3 * torch.randn_like(router.weight))
        learner.config = LearnerConfig(lr=1e-2, eps=0.1, micro_batch_size=updated_in)
        metrics, _ = learner.update(batch, make("grpo"))
        results.append((metrics["grad/norm"], learner.logprobs(rows, 1.0)))
        assert "forward" not in routers_of(model)[0].__dict__
    assert results[1][0] == pytest.approx(results[0][0], rel=1e-4)
    torch.testing.assert_close(results[1][1], results[0][1], atol=1e-4, rtol=0)


def test_each_step_has_its_own_routes() -> None:
    learner = Learner(family("mixtral"), LearnerConfig(replay_routing=True), total_updates=1)
    first, second = (batch_of(rows_of(2, 2, seed=seed), 2, dtype=torch.float32) for seed in (0, 1))
    learner.annotate(samples_of(first, 1.0), Needs())
    assert learner.routing is not None
    known = set(learner.routing.routes)
    assert {row.response_ids for row in first.rows} <= {answer for _, answer in known}
    learner.annotate(samples_of(second, 1.0), Needs())
    assert not known & {key for key in learner.routing.routes if key[1] is not None}


def adapted() -> Any:
    """A mixture with an adapter that changes its outputs, and so its later routers' choices."""
    peft = pytest.importorskip("peft")
    model = family("qwen3_moe")
    torch.manual_seed(1)
    return peft.get_peft_model(model, peft.LoraConfig(r=4, target_modules=["q_proj"], init_lora_weights=False))


def test_a_reference_and_a_teacher_choose_their_own_experts() -> None:
    """Those that share the policy's routers score as in a learner without replay, in every step."""
    model = adapted()
    plain, learner = (
        Learner(model, LearnerConfig(replay_routing=replay), total_updates=1, reference=Reference.of(model))
        for replay in (False, True)
    )
    needs = Needs(reference=True, teacher=True)
    for seed in (0, 1, 1):
        samples = samples_of(batch_of(hinted(rows_of(2, 2, seed=seed)), 2, dtype=torch.float32), 1.0)
        expected, found = (one.annotate(samples, needs) for one in (plain, learner))
        for name in ("ref_logprobs_RT", "teacher_logprobs_RT"):
            torch.testing.assert_close(getattr(found, name), getattr(expected, name), atol=1e-5, rtol=0)
        with torch.no_grad():
            for router in routers_of(model):
                router.weight.add_(0.3 * torch.randn_like(router.weight))


@pytest.mark.parametrize("compared", ["reference", "initial", "current"])
def test_a_full_kl_is_to_another_model_with_its_own_experts(compared: str) -> None:
    """With shared routers as with those of a copy."""
    found = []
    for shared in (True, False):
        model = adapted()
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
        model.train()
        other = model if shared else copy.deepcopy(model)
        other = other if shared or compared != "current" else other.merge_and_unload()
        role = "reference" if compared == "reference" else "teacher"
        given: dict[str, Any] = {} if shared and compared == "current" else {role: Reference(other)}
        config = LearnerConfig(replay_routing=True, micro_batch_size=3)
        learner = Learner(model, config, total_updates=1, **given)
        batch = batch_of(hinted(rows_of(2, 3)), 3, dtype=torch.float32)
        annotated = learner.annotate(samples_of(batch, 1.0), Needs(sample_full_kl=role == "reference"))
        for one in (model,) if shared else (model, other):
            torch.manual_seed(3)
            with torch.no_grad():
                for router in routers_of(one):
                    router.weight.add_(0.3 * torch.randn_like(router.weight))
        algorithm = replace(make("grpo"), teacher=Teacher("full"))
        if compared == "reference":
            algorithm = make("grpo", kl_coef=0.1, kl_estimator="full")
        found.append((learner.update(batch, algorithm)[0], annotated.full_kl_RT))
    assert found[0][0] == pytest.approx(found[1][0], rel=1e-4)
    if compared == "reference":
        torch.testing.assert_close(found[0][1], found[1][1], atol=1e-5, rtol=0)


def test_models_without_such_routers_are_refused() -> None:
    for model in (tiny_llama(), family("glm4_moe")):
        with pytest.raises(InputError, match="no routers whose choices Covey can replay"):
            Learner(model, LearnerConfig(replay_routing=True), total_updates=1)
    with pytest.raises(InputError, match="cannot compile routers"):
        LearnerConfig(replay_routing=True, compile=True)
