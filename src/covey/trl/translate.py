"""Translates TRL's arguments to Covey's settings, with the same mathematics.

    completions of one optimiser step   per_device_train_batch_size × gradient_accumulation_steps
    completions of one generation       generation_batch_size = per_device_train_batch_size × steps_per_generation

Covey counts prompts, each with `num_generations` completions: a Covey step is one generation and its optimiser steps.
TRL's steps (max_steps, save_steps, warm-up) are optimiser steps.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from covey.errors import InputError
from covey.trl.config import GRPOConfig

EPSILON = 1e-4  # added to the standard deviation, as in TRL
NO_CAP = 1e30
KEEP_ALL = 1_000_000
LOGGERS = ("wandb", "tensorboard", "mlflow", "trackio")
AGGREGATION = {
    "grpo": "seq-mean-token-mean",
    "sapo": "seq-mean-token-mean",
    "bnpo": "token-mean",
    "dapo": "token-mean",
    "cispo": "token-mean",
    "vespo": "token-mean",
    "dr_grpo": "seq-mean-token-sum-norm",
    "luspo": "seq-mean-token-sum",
}
SCHEDULE = {"constant_with_warmup": "constant", "cosine_with_min_lr": "cosine"}
GENERATION_KWARGS = ("temperature", "top_p", "top_k", "min_p", "max_new_tokens", "stop", "stop_strings")
IGNORED = ("attn_implementation", "device_map", "use_cache")  # of model_init_kwargs
DTYPES = ("auto", "float32", "bfloat16", "float16")


@dataclass(frozen=True)
class Sizes:
    """Sizes of a Covey step: prompts sampled, prompts per optimiser step, optimiser steps."""

    prompts: int
    per_update: int
    updates: int

    @classmethod
    def of(cls, args: GRPOConfig) -> Sizes:
        group, generated = args.num_generations, args.generation_batch_size
        learned = args.per_device_train_batch_size * args.gradient_accumulation_steps
        assert generated is not None
        if group < 2:
            raise InputError(f"num_generations={group}: GRPO compares completions of a prompt, it needs at least 2")
        for name, count in (("generation_batch_size", generated), ("completions of an optimiser step", learned)):
            if count % group:
                raise InputError(
                    f"{name}: {count} is not a multiple of num_generations={group}\n"
                    "  fix: per_device_train_batch_size × gradient_accumulation_steps must be one, as Covey keeps the "
                    "completions of a prompt together"
                )
        if max(generated, learned) % min(generated, learned):
            raise InputError(
                f"steps_per_generation={args.steps_per_generation} and gradient_accumulation_steps="
                f"{args.gradient_accumulation_steps}\n  fix: one must be a multiple of the other"
            )
        if generated < learned and args.num_iterations > 1:
            raise InputError(
                f"steps_per_generation={args.steps_per_generation} with num_iterations={args.num_iterations}\n"
                "  fix: steps_per_generation must be a multiple of gradient_accumulation_steps"
            )
        return cls(
            prompts=max(generated, learned) // group,
            per_update=learned // group,
            updates=max(1, generated // learned) * args.num_iterations,
        )


@dataclass
class Translated:
    algorithm: str
    settings: dict[str, Any]
    total_steps: int  # Covey steps
    updates: int  # optimiser steps per Covey step
    remarks: list[str] = field(default_factory=list)


def translate(args: GRPOConfig, rows: int, held_out: int = 0) -> Translated:
    """The settings for training on `rows` prompts and evaluating on `held_out` prompts."""
    sizes, sampling = Sizes.of(args), _sampling(args)
    per_epoch = max(1, rows // sizes.prompts)
    if args.max_steps > 0:
        steps = math.ceil(args.max_steps / sizes.updates)
    else:
        steps = math.ceil(args.num_train_epochs * per_epoch)
    algorithm = "gdpo" if args.multi_objective_aggregation == "normalize_then_sum" else "grpo"
    settings = {
        "algorithm": _algorithm(args, sampling) | _reference(args, sizes),
        "data": {"train_batch_size": sizes.prompts, "shuffle": args.shuffle_dataset},
        "rollout": sampling | {"group_size": args.num_generations} | _engine(args),
        "learner": _learner(args, sizes, steps * sizes.updates),
        "loop": {"total_steps": steps} | _checkpoints(args, sizes, steps, per_epoch),
        "eval": _evaluation(args, sizes, steps, per_epoch, sampling, held_out),
        "model": _model(args),
        "logging": _logging(args),
        "seed": args.seed,
    }
    return Translated(algorithm, settings, steps, sizes.updates, [*args.remarks(), *_remarks(args, sizes)])


def _remarks(args: GRPOConfig, sizes: Sizes) -> list[str]:
    ignored = [name for name in args.model_init_kwargs or {} if name in IGNORED]
    remarks = [f"model_init_kwargs[{name!r}] has no effect: Covey decides it" for name in ignored]
    assert args.steps_per_generation is not None
    if args.max_steps > 0 and args.max_steps % sizes.updates:
        remarks.append(
            f"max_steps={args.max_steps}: {sizes.updates} optimiser steps follow each generation, so "
            f"{math.ceil(args.max_steps / sizes.updates) * sizes.updates} are made"
        )
    synced, needed = (args.sync_ref_model, "sync_ref_model") if args.beta else (False, "beta")
    if not synced:
        names = ("sync_ref_model", "ref_model_sync_steps", "ref_model_mixup_alpha")
        remarks += [f"{name} has no effect without {needed}" for name in names if args.is_set(name)]
    if args.loss_type == "bnpo" and args.gradient_accumulation_steps > 1:
        remarks.append("loss_type='bnpo' is 'dapo' here: the mean is over the tokens of the whole optimiser step")
    if args.loss_type in ("dapo", "cispo", "vespo") and args.steps_per_generation > args.gradient_accumulation_steps:
        remarks.append(
            f"loss_type={args.loss_type!r}: each optimiser step divides by its own tokens, where TRL divides by the "
            "mean over those of a generation"
        )
    if args.mask_truncated_completions and AGGREGATION[args.loss_type].startswith("seq-mean"):
        remarks.append(
            f"mask_truncated_completions with loss_type={args.loss_type!r}: the mean is over the other completions, "
            "where TRL divides by the number of all"
        )
    if args.multi_objective_aggregation == "normalize_then_sum" and args.scale_rewards != "group":
        remarks.append(f"scale_rewards={args.scale_rewards!r} has no effect with normalize_then_sum, as in TRL")
    return remarks


def _sampling(args: GRPOConfig) -> dict[str, Any]:
    extra = dict(args.generation_kwargs or {})
    for name in extra:
        if name not in GENERATION_KWARGS:
            raise InputError(
                f"generation_kwargs[{name!r}] is not supported by covey.trl\n"
                f"  supported: {', '.join(GENERATION_KWARGS)}"
            )
    longest = extra.get("max_new_tokens", args.max_completion_length)
    if longest is None:
        raise InputError("max_completion_length=None is not supported by covey.trl\n  give the longest completion")
    stop = extra.get("stop_strings", extra.get("stop")) or []
    top_k = extra.get("top_k", args.top_k)
    return {
        "max_tokens": longest,
        "temperature": extra.get("temperature", args.temperature),
        "top_p": extra.get("top_p", args.top_p),
        "top_k": max(0, top_k or 0),  # vLLM's −1 means all tokens
        "min_p": extra.get("min_p", args.min_p) or 0.0,
        "stop": [stop] if isinstance(stop, str) else list(stop),
    }


def _engine(args: GRPOConfig) -> dict[str, Any]:
    if not args.use_vllm:
        return {}
    return {
        "name": "vllm",
        "memory": args.vllm_gpu_memory_utilization,
        "tensor_parallel": args.vllm_tensor_parallel_size,
        "sleep": args.vllm_enable_sleep_mode,
    }


def _algorithm(args: GRPOConfig, sampling: Mapping[str, Any]) -> dict[str, Any]:
    values: dict[str, Any] = {"epsilon": EPSILON, "aggregation": AGGREGATION[args.loss_type]} | _loss(args)
    if args.loss_type == "dr_grpo":
        values["norm_length"] = args.max_completion_length
    if args.multi_objective_aggregation == "sum_then_normalize":
        values["std_normalize"] = args.scale_rewards != "none"
        values["std_over"] = "batch" if args.scale_rewards == "batch" else "group"
    if args.beta:
        values |= {"kl_coef": args.beta, "kl_estimator": "k3", "kl_unbiased": args.use_bias_correction_kl}
    if args.mask_truncated_completions:
        values["truncated"] = "mask"
    return values | _correction(args, sampling)


def _reference(args: GRPOConfig, sizes: Sizes) -> dict[str, Any]:
    """TRL counts optimiser steps, and mixes the policy into the reference."""
    if not args.beta or not args.sync_ref_model:
        return {}
    if args.ref_model_mixup_alpha != 1:
        raise InputError(
            f"sync_ref_model with ref_model_mixup_alpha={args.ref_model_mixup_alpha}: the policy replaces the "
            "reference, without mixing\n  fix: ref_model_mixup_alpha=1.0"
        )
    steps = args.ref_model_sync_steps
    if steps < 1 or steps % sizes.updates:
        raise InputError(
            f"ref_model_sync_steps={steps}: {sizes.updates} optimiser steps follow each generation\n"
            f"  fix: a multiple of {sizes.updates}"
        )
    return {"reference_every": steps // sizes.updates}


def _loss(args: GRPOConfig) -> dict[str, Any]:
    high = args.epsilon if args.epsilon_high is None else args.epsilon_high
    if args.importance_sampling_level == "sequence":
        return _sequence_loss(args, high)
    if args.delta is not None and args.loss_type in ("cispo", "sapo", "vespo"):
        raise InputError(f"delta has no place in loss_type={args.loss_type!r}\n  leave it out")
    if args.loss_type == "sapo":
        return {"loss": "sapo", "tau_pos": args.sapo_temperature_pos, "tau_neg": args.sapo_temperature_neg}
    if args.loss_type == "vespo":
        names = ("k_pos", "lambda_pos", "k_neg", "lambda_neg")
        return {"loss": "vespo"} | {name: getattr(args, f"vespo_{name}") for name in names}
    if args.loss_type == "cispo":
        if high < 1:
            raise InputError(
                f"loss_type='cispo' with epsilon_high={high}: it is the largest weight of a token\n"
                "  fix: epsilon_high=5.0, as the ScaleRL paper recommends"
            )
        return {"loss": "cispo", "clip_low": 1.0, "clip_high": high - 1}
    if args.delta is not None and args.delta <= 1 + high:
        raise InputError(f"delta={args.delta} must be greater than 1 + epsilon_high = {1 + high:g}")
    return {"loss": "ppo_clip", "clip_low": args.epsilon, "clip_high": high, "dual_clip": args.delta}


def _sequence_loss(args: GRPOConfig, high: float) -> dict[str, Any]:
    if args.loss_type in ("cispo", "sapo", "vespo") or args.delta is not None:
        raise InputError(
            "importance_sampling_level='sequence' is supported with loss_type grpo, bnpo, dapo, dr_grpo and luspo, "
            "without delta"
        )
    if args.beta and args.use_bias_correction_kl:
        raise InputError(
            "importance_sampling_level='sequence' with beta: the KL is not multiplied by the sequence ratio here\n"
            "  fix: use_bias_correction_kl=False"
        )
    return {"loss": "gspo", "clip_low": args.epsilon, "clip_high": high}


def _correction(args: GRPOConfig, sampling: Mapping[str, Any]) -> dict[str, Any]:
    """Without vLLM, TRL's old policy is the learner before the update. The embedded engine samples from that policy,
    unless the distribution is truncated."""
    if not args.use_vllm:
        cut = sampling["top_p"] < 1 or sampling["top_k"] > 0 or sampling["min_p"] > 0
        return {"correction": "recompute" if cut else "none"}
    if not args.vllm_importance_sampling_correction:
        return {"correction": "recompute"}
    level, _, way = args.vllm_importance_sampling_mode.partition("_")
    low, high = args.vllm_importance_sampling_clip_min, args.vllm_importance_sampling_clip_max
    if args.loss_type == "vespo":
        if low is not None or high is not None:
            raise InputError(
                "loss_type='vespo' with vLLM: its weight has the ratio to vLLM's own log-probs, without bounds\n"
                "  fix: vllm_importance_sampling_clip_max=None, as its kernel bounds the weight"
            )
        return {"correction": "none"}
    values: dict[str, Any] = {"correction": level, "correction_cap": high or NO_CAP}
    if way == "mask":
        return values | {"reject_below": low, "reject_above": high}
    if low is not None:
        raise InputError("vllm_importance_sampling_clip_min is supported with the modes token_mask and sequence_mask")
    return values


def _learner(args: GRPOConfig, sizes: Sizes, total_updates: int) -> dict[str, Any]:
    kwargs = dict(args.lr_scheduler_kwargs or {})
    ratio = kwargs.pop("min_lr_rate", 0.0)
    if "min_lr" in kwargs:
        ratio = kwargs.pop("min_lr") / args.learning_rate
    if kwargs:
        raise InputError(f"lr_scheduler_kwargs: {', '.join(kwargs)} is not supported\n  supported: min_lr_rate, min_lr")
    warmup = _count(args.warmup_steps or args.warmup_ratio or 0, total_updates)
    return {
        "optimizer": "adamw8bit" if args.optim in ("adamw_8bit", "adamw_bnb_8bit") else "adamw",
        "lr": args.learning_rate,
        "schedule": SCHEDULE.get(args.lr_scheduler_type, args.lr_scheduler_type),
        "warmup_steps": 0 if args.lr_scheduler_type == "constant" else warmup,
        "min_lr_ratio": ratio,
        "weight_decay": args.weight_decay,
        "beta1": args.adam_beta1,
        "beta2": args.adam_beta2,
        "eps": args.adam_epsilon,
        "grad_clip": args.max_grad_norm or 0,
        "epochs": args.num_iterations,
        "mini_batch_size": sizes.per_update if sizes.per_update < sizes.prompts else None,
        "entropy_coef": args.entropy_coef,
    }


def _count(number: float, total: int) -> int:
    """A number of optimiser steps; below 1, a share of all of them."""
    return math.ceil(number * total) if 0 < number < 1 else int(number)


def _every(strategy: str, number: float | None, sizes: Sizes, steps: int, per_epoch: int) -> int:
    """The interval in Covey steps; 0: never."""
    if strategy == "no" or not number:
        return 0
    if strategy == "epoch":
        return per_epoch
    return max(1, math.ceil(_count(number, steps * sizes.updates) / sizes.updates))


def _checkpoints(args: GRPOConfig, sizes: Sizes, steps: int, per_epoch: int) -> dict[str, Any]:
    return {
        "save_every": _every(args.save_strategy, args.save_steps, sizes, steps, per_epoch),
        "save_final": args.save_strategy != "no",
        "keep_last": args.save_total_limit or KEEP_ALL,
    }


def _evaluation(
    args: GRPOConfig, sizes: Sizes, steps: int, per_epoch: int, sampling: Mapping[str, Any], held_out: int
) -> dict[str, Any]:
    """Evaluation settings. TRL samples as in training, and does not evaluate after the last step by default."""
    number = args.eval_steps or args.logging_steps
    if held_out == 0 and args.eval_strategy != "no":
        raise InputError(f"eval_strategy={args.eval_strategy!r} needs an eval_dataset")
    return {
        "every": _every(args.eval_strategy, number, sizes, steps, per_epoch),
        "before": args.eval_on_start,
        "after": False,
        "modes": ["sampled"],
        "n": args.num_generations_eval or args.num_generations,
        **{name: sampling[name] for name in ("temperature", "top_p", "top_k", "min_p")},
    }


def _model(args: GRPOConfig) -> dict[str, Any]:
    kwargs = dict(args.model_init_kwargs or {})
    precision = "float16" if args.fp16 else "float32" if args.bf16 is False else "auto"
    dtype = kwargs.pop("dtype", kwargs.pop("torch_dtype", None))
    values = {
        "dtype": precision if dtype is None else str(dtype).removeprefix("torch."),
        "gradient_checkpointing": args.gradient_checkpointing,
        "trust_remote_code": args.trust_remote_code or bool(kwargs.pop("trust_remote_code", False)),
    }
    if values["dtype"] not in DTYPES:
        raise InputError(f"model_init_kwargs: dtype={dtype} is not supported; supported: {', '.join(DTYPES)}")
    if args.use_cpu:
        values["device"] = "cpu"
    if args.use_vllm and args.vllm_max_model_length is not None:
        values["context_length"] = args.vllm_max_model_length
    rest = [name for name in kwargs if name not in ("revision", *IGNORED)]
    if rest:
        raise InputError(f"model_init_kwargs[{rest[0]!r}] is not supported by covey.trl\n  supported: dtype, revision")
    return values


def _logging(args: GRPOConfig) -> dict[str, Any]:
    places = [args.report_to] if isinstance(args.report_to, str) else list(args.report_to or [])
    places = [place for place in places if place != "none"]
    for place in places:
        if place not in LOGGERS:
            raise InputError(f"report_to={place!r} is not supported; supported: {', '.join(LOGGERS)}, none")
    values: dict[str, Any] = {"to": ["console", *places], "output_dir": args.output_dir or "trainer_output"}
    if args.project != "huggingface":
        values["project"] = args.project
    if args.run_name is not None:
        values["experiment"] = args.run_name
    return values
