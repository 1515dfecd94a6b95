"""TRL's arguments → settings: counts by hand, and loss and advantages by TRL's formulas."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import pytest
import torch
from torch import Tensor

from covey.algorithms.functional import advantages, policy_loss
from covey.config.schema import EvalConfig
from covey.errors import InputError
from covey.training.evaluate import eval_sampling
from covey.trl import GRPOConfig
from covey.trl.config import NO_EFFECT, UNSUPPORTED
from covey.trl.translate import Translated, translate
from covey.types import Sampling

LONGEST = 5  # tokens


def translated(rows: int = 64, held_out: int = 0, **arguments: Any) -> Translated:
    return translate(GRPOConfig(**arguments), rows, held_out)


# Counts.


def test_the_defaults_are_trls() -> None:
    """8 completions of one prompt are an optimiser step; 64 prompts three times over are 192."""
    found = translated()
    settings = found.settings
    assert (settings["data"]["train_batch_size"], settings["rollout"]["group_size"]) == (1, 8)
    assert settings["loop"]["total_steps"] == 192
    learner = settings["learner"]
    assert (learner["lr"], learner["schedule"], learner["warmup_steps"]) == (1e-6, "linear", 0)
    assert (learner["beta2"], learner["grad_clip"], learner["mini_batch_size"]) == (0.999, 1.0, None)
    assert settings["rollout"]["max_tokens"] == 512
    assert (settings["seed"], settings["model"]["dtype"], settings["model"]["gradient_checkpointing"]) == (
        42,
        "auto",
        True,
    )
    assert settings["logging"] == {"to": ["console"], "output_dir": "trainer_output"}
    assert found.remarks == []


def test_8_bit_optimisers() -> None:
    assert translated().settings["learner"]["optimizer"] == "adamw"
    for name in ("adamw_8bit", "adamw_bnb_8bit"):
        assert translated(optim=name).settings["learner"]["optimizer"] == "adamw8bit"


def test_completions_become_prompts() -> None:
    """16 × 4 = 64 completions, 8 for each prompt, are an optimiser step of 8 prompts."""
    found = translated(per_device_train_batch_size=16, gradient_accumulation_steps=4, num_generations=8, max_steps=100)
    assert found.settings["data"]["train_batch_size"] == 8
    assert found.settings["learner"]["mini_batch_size"] is None
    assert (found.settings["loop"]["total_steps"], found.updates) == (100, 1)


def test_several_optimiser_steps_from_a_generation() -> None:
    """8 × 4 completions are sampled at once and learned from 8 × 2 at a time, 3 times over: 6 optimiser steps."""
    found = translated(
        per_device_train_batch_size=8,
        gradient_accumulation_steps=2,
        steps_per_generation=4,
        num_generations=4,
        num_iterations=3,
        max_steps=60,
        warmup_ratio=0.1,
        save_steps=12,
        eval_strategy="steps",
        eval_steps=0.5,
        held_out=4,
    )
    settings = found.settings
    assert (settings["data"]["train_batch_size"], settings["learner"]["mini_batch_size"]) == (8, 4)
    assert (settings["learner"]["epochs"], found.updates, settings["loop"]["total_steps"]) == (3, 6, 10)
    assert settings["learner"]["warmup_steps"] == 6  # a tenth of 60 optimiser steps
    assert settings["loop"]["save_every"] == 2  # 12 optimiser steps
    assert settings["eval"]["every"] == 5  # 30 optimiser steps
    assert any("mean over those of a generation" in remark for remark in found.remarks)


def test_the_reference_follows_the_policy_in_whole_generations() -> None:
    """TRL counts optimiser steps, of which two follow a generation here."""
    common: dict[str, Any] = {"beta": 0.1, "sync_ref_model": True, "ref_model_mixup_alpha": 1.0, "num_iterations": 2}
    assert translated(**common, ref_model_sync_steps=64).settings["algorithm"]["reference_every"] == 32
    with pytest.raises(InputError, match="a multiple of 2"):
        translated(**common, ref_model_sync_steps=63)
    assert "reference_every" not in translated(beta=0.1).settings["algorithm"]
    assert "sync_ref_model has no effect without beta" in translated(sync_ref_model=True).remarks


def test_epochs_count_whole_batches() -> None:
    """10 prompts in batches of 4 are 2 steps an epoch; one and a half epochs are 3."""
    found = translated(rows=10, per_device_train_batch_size=8, num_generations=2, num_train_epochs=1.5)
    assert found.settings["loop"]["total_steps"] == 3


def test_several_generations_in_an_optimiser_step() -> None:
    found = translated(
        per_device_train_batch_size=4, gradient_accumulation_steps=4, steps_per_generation=2, num_generations=4
    )
    assert (found.settings["data"]["train_batch_size"], found.updates) == (4, 1)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"per_device_train_batch_size": 6, "num_generations": 4}, "not a multiple of num_generations=4"),
        ({"per_device_train_batch_size": 4, "num_generations": 8, "steps_per_generation": 2}, "optimiser step: 4"),
        (
            {"per_device_train_batch_size": 8, "gradient_accumulation_steps": 2, "steps_per_generation": 3},
            "multiple of the other",
        ),
        ({"num_generations": 1}, "at least 2"),
        ({"max_completion_length": None}, "longest completion"),
        ({"loss_type": "cispo"}, "epsilon_high=5.0"),
        ({"delta": 1.1}, "greater than 1"),
        ({"importance_sampling_level": "sequence", "beta": 0.1}, "use_bias_correction_kl=False"),
        ({"beta": 0.1, "sync_ref_model": True}, "ref_model_mixup_alpha=0.6.*\n.*ref_model_mixup_alpha=1.0"),
        ({"report_to": "comet_ml"}, "wandb"),
        ({"generation_kwargs": {"num_beams": 2}}, "num_beams"),
        ({"model_init_kwargs": {"load_in_4bit": True}}, "load_in_4bit"),
        ({"lr_scheduler_kwargs": {"num_cycles": 2}}, "num_cycles"),
        ({"eval_strategy": "steps"}, "eval_dataset"),
    ],
)
def test_what_cannot_be_translated_is_named(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(InputError, match=message):
        translated(**arguments)


def test_vllm_has_trls_importance_weights() -> None:
    settings = translated(use_vllm=True, vllm_gpu_memory_utilization=0.4).settings
    assert (settings["rollout"]["name"], settings["rollout"]["memory"]) == ("vllm", 0.4)
    chosen = {key: settings["algorithm"][key] for key in ("correction", "reject_above", "reject_below")}
    assert chosen == {"correction": "sequence", "reject_above": 3.0, "reject_below": None}
    capped = translated(use_vllm=True, vllm_importance_sampling_mode="token_truncate").settings["algorithm"]
    assert (capped["correction"], capped["correction_cap"], "reject_above" in capped) == ("token", 3.0, False)
    off = translated(use_vllm=True, vllm_importance_sampling_correction=False).settings["algorithm"]
    assert off["correction"] == "recompute"


def test_the_weight_of_vespo_has_the_ratio_to_vllm_itself() -> None:
    with pytest.raises(InputError, match="clip_max=None"):
        translated(use_vllm=True, loss_type="vespo")
    free = {"use_vllm": True, "loss_type": "vespo", "vllm_importance_sampling_clip_max": None}
    assert translated(**free).settings["algorithm"]["correction"] == "none"
    off = translated(**free, vllm_importance_sampling_correction=False).settings["algorithm"]
    assert off["correction"] == "recompute"
    with pytest.raises(InputError, match="importance_sampling_level='sequence' is supported with"):
        translated(loss_type="vespo", importance_sampling_level="sequence")


def test_a_cut_distribution_is_not_corrected_for_as_in_trl() -> None:
    assert translated().settings["algorithm"]["correction"] == "none"
    assert translated(top_p=0.9).settings["algorithm"]["correction"] == "recompute"
    assert translated(generation_kwargs={"top_k": 20}).settings["algorithm"]["correction"] == "recompute"


def test_evaluations_sample_as_training_does() -> None:
    cut = {"temperature": 0.7, "top_p": 0.9, "top_k": 20, "min_p": 0.1}
    for arguments in (cut, {"generation_kwargs": cut}):
        settings = translated(**arguments).settings
        assert {name: settings["rollout"][name] for name in cut} == cut
        sampled = eval_sampling(EvalConfig(**settings["eval"]), "sampled", 5, ())
        assert sampled == Sampling(**cut, max_tokens=5)


def test_precision_and_revision_of_the_model() -> None:
    assert translated(bf16=False).settings["model"]["dtype"] == "float32"
    assert translated(fp16=True).settings["model"]["dtype"] == "float16"
    assert translated(model_init_kwargs={"dtype": torch.bfloat16}).settings["model"]["dtype"] == "bfloat16"


OTHER_VALUES: dict[str, Any] = {  # than the defaults, of arguments that are translated
    "per_device_train_batch_size": 16,
    "gradient_accumulation_steps": 2,
    "num_generations": 4,
    "generation_batch_size": 16,
    "steps_per_generation": 2,
    "num_iterations": 2,
    "num_train_epochs": 1.0,
    "max_steps": 5,
    "max_completion_length": 64,
    "generation_kwargs": {"top_k": 3},
    "vllm_max_model_length": 2048,
    "vllm_importance_sampling_mode": "token_mask",
    "vllm_importance_sampling_clip_min": 0.5,
    "vllm_importance_sampling_cap": 2.0,
    "loss_type": "grpo",
    "importance_sampling_level": "sequence",
    "delta": 2.0,
    "scale_rewards": "batch",
    "multi_objective_aggregation": "normalize_then_sum",
    "lr_scheduler_type": "cosine",
    "lr_scheduler_kwargs": {"min_lr_rate": 0.1},
    "warmup_ratio": 0.1,
    "model_init_kwargs": {"dtype": "float32"},
    "bf16": False,
    "eval_strategy": "steps",
    "eval_steps": 7,
    "ref_model_sync_steps": 7,
    "num_generations_eval": 2,
    "save_strategy": "no",
    "save_steps": 50,
    "save_total_limit": 3,
    "output_dir": "elsewhere",
    "report_to": "wandb",
    "run_name": "first",
    "project": "sums",
    "vllm_tensor_parallel_size": 2,
    "vllm_importance_sampling_clip_max": 2.0,
}
BESIDE: dict[str, dict[str, Any]] = {  # what an argument needs to have an effect
    "use_bias_correction_kl": {"beta": 0.1},
    "sync_ref_model": {"beta": 0.1, "ref_model_mixup_alpha": 1.0},
    "ref_model_sync_steps": {"beta": 0.1, "sync_ref_model": True, "ref_model_mixup_alpha": 1.0},
    "eval_steps": {"eval_strategy": "steps"},
    "sapo_temperature_pos": {"loss_type": "sapo"},
    "sapo_temperature_neg": {"loss_type": "sapo"},
    **{f"vespo_{name}": {"loss_type": "vespo"} for name in ("k_pos", "lambda_pos", "k_neg", "lambda_neg")},
}
ELSEWHERE = (
    "reward_weights",
    "remove_unused_columns",
    "resume_from_checkpoint",
    "optim",
    "vllm_mode",
)  # the trainer's, or checked


def test_no_argument_is_dropped_silently() -> None:
    """Another value than the default changes the settings, or says that it does not."""
    silent = []
    for field in dataclasses.fields(GRPOConfig):
        name, default = field.name, field.default
        if name in (*NO_EFFECT, *UNSUPPORTED, *ELSEWHERE):
            continue
        value: Any = not default if isinstance(default, bool) else OTHER_VALUES.get(name)
        value = (default or 0) + 0.25 if value is None else value  # type: ignore[operator]
        beside = BESIDE.get(name, {"use_vllm": True} if name.startswith("vllm_") else {})
        found = [translated(held_out=2, **(beside | given)) for given in ({}, {name: value})]
        if found[0] == found[1]:
            silent.append(name)
    assert silent == []


# Mathematics.


class Step:
    """Six completions of two prompts, in float64."""

    def __init__(self) -> None:
        random = torch.Generator().manual_seed(0)

        def normal() -> Tensor:
            return torch.randn(6, LONGEST, generator=random, dtype=torch.float64)

        self.logprobs = -normal().abs()
        self.old = self.logprobs + 0.4 * normal()
        self.ref = self.logprobs + 0.4 * normal()
        self.advantages = normal()[:, 0]
        self.mask = torch.arange(LONGEST) < torch.tensor([5, 3, 1, 4, 2, 5])[:, None]


def their_loss(step: Step, logprobs: Tensor, args: GRPOConfig) -> Tensor:
    """TRL's formulas, for one process and no accumulation."""
    mask, adv = step.mask.double(), step.advantages[:, None]
    log_ratio = logprobs - step.old
    if args.importance_sampling_level == "sequence":
        log_ratio = ((log_ratio * mask).sum(-1) / mask.sum(-1))[:, None]
    ratio = log_ratio.exp()
    high = args.epsilon if args.epsilon_high is None else args.epsilon_high
    if args.loss_type == "cispo":
        loss = -ratio.clamp(max=high).detach() * adv * logprobs
    elif args.loss_type == "vespo":
        weight = (log_ratio * mask).sum(-1, keepdim=True).exp().detach()
        k = torch.where(adv >= 0, args.vespo_k_pos, args.vespo_k_neg)
        decay = torch.where(adv >= 0, args.vespo_lambda_pos, args.vespo_lambda_neg)
        loss = -(weight**k * torch.exp(decay * (1 - weight))) * adv * logprobs
    elif args.loss_type == "sapo":
        positive, negative = adv.new_tensor([args.sapo_temperature_pos, args.sapo_temperature_neg])
        tau = torch.where(adv > 0, positive, negative)
        loss = -torch.sigmoid(tau * (ratio - 1)) * 4 / tau * adv
    else:
        bounded = ratio if args.delta is None else ratio.clamp(max=args.delta)
        loss = -torch.min(bounded * adv, ratio.clamp(1 - args.epsilon, 1 + high) * adv)
    if args.beta:
        d = step.ref - logprobs
        kl = d.exp() - d - 1
        loss = loss + args.beta * (kl * ratio if args.use_bias_correction_kl else kl)
    loss = loss * mask
    match args.loss_type:
        case "grpo" | "sapo":
            return (loss.sum(-1) / mask.sum(-1)).mean()
        case "dr_grpo":
            return loss.sum() / (len(loss) * LONGEST)
        case "luspo":
            return loss.sum(-1).mean()
        case _:
            return loss.sum() / mask.sum()


@pytest.mark.parametrize(
    "arguments",
    [
        {},
        {"loss_type": "grpo"},
        {"loss_type": "bnpo", "epsilon": 0.1, "epsilon_high": 0.3},
        {"loss_type": "dr_grpo"},
        {"loss_type": "luspo", "delta": 1.5},
        {"loss_type": "sapo", "sapo_temperature_neg": 1.2},
        {"loss_type": "cispo", "epsilon_high": 1.5},
        {"loss_type": "vespo"},
        {"loss_type": "vespo", "vespo_k_neg": 1.5, "vespo_lambda_pos": 0.5, "beta": 0.3},
        {"beta": 0.3},
        {"loss_type": "grpo", "beta": 0.3, "use_bias_correction_kl": False},
        {"loss_type": "grpo", "importance_sampling_level": "sequence", "epsilon": 0.03, "epsilon_high": 0.04},
        {"importance_sampling_level": "sequence"},
    ],
    ids=str,
)
def test_the_loss_is_trls(arguments: dict[str, Any]) -> None:
    step, args = Step(), GRPOConfig(max_completion_length=LONGEST, **arguments)
    settings = dict(translate(args, 64).settings["algorithm"])
    logprobs = step.logprobs.clone().requires_grad_()
    found, _ = policy_loss(
        settings.pop("loss"), logprobs, step.old, step.advantages, step.mask, ref_logprobs=step.ref, **settings
    )
    expected = their_loss(step, logprobs, args)
    assert found.item() == pytest.approx(expected.item(), rel=1e-12)
    slopes = [torch.autograd.grad(loss, logprobs, retain_graph=True)[0] for loss in (found, expected)]
    torch.testing.assert_close(slopes[0], slopes[1], rtol=1e-10, atol=1e-12)


def test_the_advantages_are_trls() -> None:
    """Rewards 1, 0, 0, 1 | 2, 2, 2, 0 by hand, with TRL's 1e-4 beside the standard deviation."""
    rewards, groups = torch.tensor([1.0, 0, 0, 1, 2, 2, 2, 0], dtype=torch.float64), [0] * 4 + [1] * 4
    centred = [0.5, -0.5, -0.5, 0.5, 0.5, 0.5, 0.5, -1.5]
    whole = math.sqrt(sum((float(r) - 1.0) ** 2 for r in rewards) / 7)
    spread = {"group": [math.sqrt(1 / 3)] * 4 + [1.0] * 4, "batch": [whole] * 8}
    for scale in ("group", "batch", "none", True, False):
        args = GRPOConfig(scale_rewards=scale)
        settings = translate(args, 64).settings["algorithm"]
        chosen = {name: settings[name] for name in ("epsilon", "std_normalize", "std_over")}
        found = advantages("grpo", rewards, groups, **chosen)
        sigma = spread.get(str(args.scale_rewards))
        expected = centred if sigma is None else [c / (s + 1e-4) for c, s in zip(centred, sigma, strict=True)]
        assert found.tolist() == pytest.approx(expected, rel=1e-12), scale


def test_rewards_normalised_before_they_are_added_are_gdpo() -> None:
    found = translated(multi_objective_aggregation="normalize_then_sum")
    assert found.algorithm == "gdpo"
    assert found.settings["algorithm"]["epsilon"] == 1e-4
    assert not {"std_normalize", "std_over"} & set(found.settings["algorithm"])
