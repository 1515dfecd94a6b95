"""Setting names of verl, AgentFly, TorchRL and TRL, and their native counterparts.

Keys are translated, so a sweep over a foreign key works. Values that another vocabulary writes differently are
converted after parsing (CONVERT). Settings that several foreign keys determine together are derived in `derive.py`.

`translate` maps a foreign key to one of four:
    a native setting               ALIASES
    a part of a native setting     PARTS (derive.py)
    a key without effect           NO_EFFECT
    an unsupported option          UNSUPPORTED (derive.py)
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from covey.config.derive import PARTS, UNSUPPORTED_KEYS, number, off, true
from covey.config.settings import Algorithms, algorithm_settings, find, owners, schema_settings, sections


def _family(prefixes: Iterable[str], table: Mapping[str, str]) -> dict[str, str]:
    return {prefix + key: target for prefix in prefixes for key, target in table.items()}


_VERL_ACTOR = {
    "optim.lr": "learner.lr",
    "optim.weight_decay": "learner.weight_decay",
    "optim.lr_warmup_steps": "learner.warmup_steps",
    "optim.warmup_style": "learner.schedule",
    "optim.lr_scheduler_type": "learner.schedule",
    "optim.min_lr_ratio": "learner.min_lr_ratio",
    "ppo_epochs": "learner.epochs",
    "ppo_mini_batch_size": "learner.mini_batch_size",  # both count prompts, that is groups
    "ppo_micro_batch_size": "learner.micro_batch_size",
    "ppo_micro_batch_size_per_gpu": "learner.micro_batch_size",
    "ppo_max_token_len_per_gpu": "learner.micro_batch_tokens",
    "grad_clip": "learner.grad_clip",
    "entropy_coeff": "learner.entropy_coef",
    "clip_ratio_low": "algorithm.clip_low",
    "clip_ratio_high": "algorithm.clip_high",
    "clip_ratio_c": "algorithm.dual_clip",
    "loss_agg_mode": "algorithm.aggregation",
    "loss_scale_factor": "algorithm.norm_length",
    "policy_loss.loss_mode": "algorithm.loss",
    "policy_loss.clip_cov_ratio": "algorithm.clip_cov_ratio",
    "policy_loss.clip_cov_lb": "algorithm.clip_cov_low",
    "policy_loss.clip_cov_ub": "algorithm.clip_cov_high",
    "policy_loss.kl_cov_ratio": "algorithm.kl_cov_ratio",
    "policy_loss.ppo_kl_coef": "algorithm.kl_cov_coef",
    "tau_pos": "algorithm.tau_pos",
    "tau_neg": "algorithm.tau_neg",
    **{key: f"actor.{key}" for key in ("clip_ratio", "use_kl_loss", "kl_loss_coef", "kl_loss_type")},
    **{key: f"actor.{key}" for key in ("use_dynamic_bsz", "strategy")},
    "fsdp_config.param_offload": "learner.offload_weights",
    "fsdp_config.optimizer_offload": "learner.offload_optimizer",
    "use_torch_compile": "learner.compile",
    "ulysses_sequence_parallel_size": "actor.ulysses_sequence_parallel_size",
}

_VERL_ROLLOUT = {
    "n": "rollout.group_size",
    "response_length": "rollout.response_length",
    "max_num_seqs": "rollout.max_sequences",
    "max_model_len": "model.context_length",
    "tensor_model_parallel_size": "rollout.tensor_parallel",
    "gpu_memory_utilization": "rollout.memory",
    "enforce_eager": "rollout.eager",
    "free_cache_engine": "rollout.sleep",
    **{key: f"rollout.{key}" for key in ("log_prob_micro_batch_size", "log_prob_micro_batch_size_per_gpu", "mode")},
    **{key: f"rollout.{key}" for key in ("prompt_length", "enable_chunked_prefill")},
    "multi_turn.format": "rollout.multi_turn.format",
}

_VERL_MODEL = {
    "path": "model.name",
    "enable_gradient_checkpointing": "model.gradient_checkpointing",
    "lora_rank": "model.lora.rank",
    "lora_alpha": "model.lora.alpha",
    "target_modules": "model.lora.target_modules",
    "trust_remote_code": "model.trust_remote_code",
    "use_remove_padding": "model.use_remove_padding",
}

_VERL_FILTER = {
    "filter_groups.enable": "algorithm.filter_groups",
    "filter_groups.metric": "algorithm.filter_metric",
    "filter_groups.max_num_gen_batches": "algorithm.max_refills",
}

_VERL_VALIDATION = {
    "n": "eval.n",
    "do_sample": "eval.modes",
    "max_tokens": "eval.max_tokens",
    "temperature": "eval.temperature",
    "top_p": "eval.top_p",
    "top_k": "eval.top_k",
}

_VERL = {
    "algorithm.adv_estimator": "algorithm.name",
    "algorithm.norm_adv_by_std_in_grpo": "algorithm.std_normalize",
    "algorithm.rollout_correction.rollout_is": "algorithm.correction",
    "algorithm.rollout_correction.rollout_is_threshold": "algorithm.correction_cap",
    "critic.model.path": "critic.model",
    "critic.optim.lr": "critic.lr",
    "critic.cliprange_value": "critic.clip",
    "trainer.critic_warmup": "critic.warmup_steps",
    "data.max_response_length": "rollout.response_length",
    "data.val_batch_size": "eval.batch_size",
    "data.seed": "seed",
    "data.trust_remote_code": "model.trust_remote_code",
    "trainer.project_name": "logging.project",
    "trainer.experiment_name": "logging.experiment",
    "trainer.logger": "logging.to",
    "trainer.default_local_dir": "logging.output_dir",
    "trainer.total_training_steps": "loop.total_steps",
    "trainer.total_epochs": "loop.total_epochs",
    "trainer.max_actor_ckpt_to_keep": "loop.keep_last",
    "trainer.val_before_train": "eval.before",
}

_VERL_OVERLONG = {
    "enable": "reward_model.overlong_buffer.enable",
    "len": "reward_model.overlong_buffer.len",
    "penalty_factor": "algorithm.overlong_penalty",
}

_AGENTFLY = {
    "agent_type": "agent.name",
    "model_name_or_path": "model.name",
    "template": "agent.template",
    "reward_name": "reward.name",
    "num_chains": "rollout.group_size",
    "max_tokens_per_turn": "agent.max_tokens_per_turn",
    **{key: f"agent.{key}" for key in ("tools", "max_turns", "use_agent", "backend")},
}

_TORCHRL = {
    "env.repeats": "rollout.group_size",
    "env.max_steps": "agent.max_turns",
    "policy.kl_coef": "algorithm.kl_coef",
    "train.kl_to_ref_coeff": "algorithm.kl_coef",
    "train.kl_to_inference_coeff": "algorithm.kl_old_coef",
    "train.entropy_coeff": "learner.entropy_coef",
    "train.epochs": "learner.epochs",
    "train.checkpoint_frequency": "loop.save_every",
    "train.exp_name": "logging.experiment",
    "train_model.gradient_checkpointing": "model.gradient_checkpointing",
    "train_model.torch_dtype": "model.dtype",
    "train_model.lora.alpha": "model.lora.alpha",
    "inference_model.backend": "rollout.name",
    "inference_model.temperature": "rollout.temperature",
    "inference_model.top_p": "rollout.top_p",
    "inference_model.max_tokens": "rollout.max_tokens",
    "inference_model.gpu_memory_utilization": "rollout.memory",
    "model.compile": "learner.compile",
    "optimizer.lr": "learner.lr",
    "optimizer.weight_decay": "learner.weight_decay",
    "optimizer.eps": "learner.eps",
    "optimizer.clip_grad_norm": "learner.grad_clip",
    "logging.experiment_name": "logging.experiment",
}

_TRL = {
    "model_name_or_path": "model.name",
    "num_generations": "rollout.group_size",
    "num_generations_eval": "eval.n",
    "max_completion_length": "rollout.max_tokens",
    "temperature": "rollout.temperature",
    "top_p": "rollout.top_p",
    "top_k": "rollout.top_k",
    "min_p": "rollout.min_p",
    "use_vllm": "rollout.name",
    "vllm_gpu_memory_utilization": "rollout.memory",
    "vllm_tensor_parallel_size": "rollout.tensor_parallel",
    "vllm_enable_sleep_mode": "rollout.sleep",
    "beta": "algorithm.kl_coef",
    **{key: key for key in ("sync_ref_model", "ref_model_sync_steps", "ref_model_mixup_alpha")},
    "epsilon": "actor.clip_ratio",
    "epsilon_high": "algorithm.clip_high",
    "delta": "algorithm.dual_clip",
    "loss_type": "algorithm.aggregation",
    "mask_truncated_completions": "algorithm.truncated",
    "use_bias_correction_kl": "algorithm.kl_unbiased",
    "num_iterations": "learner.epochs",
    "learning_rate": "learner.lr",
    "lr_scheduler_type": "learner.schedule",
    "warmup_steps": "learner.warmup_steps",
    "weight_decay": "learner.weight_decay",
    "adam_beta1": "learner.beta1",
    "adam_beta2": "learner.beta2",
    "adam_epsilon": "learner.eps",
    "max_grad_norm": "learner.grad_clip",
    "entropy_coef": "learner.entropy_coef",
    "max_steps": "loop.total_steps",
    "num_train_epochs": "loop.total_epochs",
    "save_steps": "loop.save_every",
    "save_total_limit": "loop.keep_last",
    "eval_steps": "eval.every",
    "eval_on_start": "eval.before",
    "gradient_checkpointing": "model.gradient_checkpointing",
    "bf16": "model.dtype",
    "shuffle_dataset": "data.shuffle",
    "output_dir": "logging.output_dir",
    "run_name": "logging.experiment",
    "report_to": "logging.to",
    "resume_from_checkpoint": "resume",
}

ALIASES: Mapping[str, str] = {
    **_family(("actor_rollout_ref.actor.", "actor."), _VERL_ACTOR),
    **_family(("", "algorithm."), {key: _VERL_ACTOR[key] for key in ("clip_ratio_low", "clip_ratio_high")}),
    **_family(("actor_rollout_ref.rollout.", "rollout."), _VERL_ROLLOUT),
    **_family(("actor_rollout_ref.rollout.",), {k: f"rollout.{k}" for k in ("name", "temperature", "top_p", "top_k")}),
    **_family(("actor_rollout_ref.model.", "model."), _VERL_MODEL),
    **_family(("actor_rollout_ref.", ""), {"ref.fsdp_config.param_offload": "learner.offload_reference"}),
    "actor_rollout_ref.ref.log_prob_micro_batch_size": "ref.log_prob_micro_batch_size",
    "actor_rollout_ref.ref.log_prob_micro_batch_size_per_gpu": "ref.log_prob_micro_batch_size",
    **_family(("actor_rollout_ref.rollout.val_kwargs.", "rollout.val_kwargs.", "val_kwargs."), _VERL_VALIDATION),
    **_family(("", "algorithm."), _VERL_FILTER),
    **_VERL,
    **_family(
        (
            "reward_model.overlong_buffer.",
            "reward_model.reward_kwargs.overlong_buffer_cfg.",
            "reward.reward_kwargs.overlong_buffer_cfg.",
        ),
        _VERL_OVERLONG,
    ),
    **_family(("agent.", "agent.init_args.", "agent.init_config."), _AGENTFLY),
    "agent.generation_config.max_tokens": "agent.max_tokens_per_turn",
    "agentflow.port": "gateway.port",
    **_TORCHRL,
    **_TRL,
    # Environment variables that are also settings; see `read.ENVIRONMENT_KEY`.
    "env.AGENT_MAX_TIMEOUT": "agent.max_seconds",
    "env.VERBOSITY": "logging.verbosity",
}


VERL_LOSS = tuple(key for key in ALIASES if key.endswith("policy_loss.loss_mode"))


def _zero_if_negative(value: Any) -> Any:
    return 0 if -math.inf < number(value) < 0 else value


def _limit(batches: Any) -> Any:
    """verl's 0 means no limit."""
    return 1000 if off(batches) or -math.inf < number(batches) < 0 else batches


def _any_reward(metric: Any) -> Any:
    """verl's names for the sum of all rewards; here null means any reward."""
    return None if metric in ("acc", "score", "reward", "seq_reward", "seq_final_reward") else metric


def _loss_name(mode: Any) -> Any:
    return {"vanilla": "ppo_clip", "gpg": "policy_gradient", "geo_mean": "gmpo"}.get(mode, mode)


def _modes(do_sample: Any) -> list[str]:
    return ["sampled"] if true(do_sample) else ["greedy"]


def _loggers(report_to: Any) -> list[str]:
    names = report_to if isinstance(report_to, (list, tuple)) else [report_to]
    return ["console", *(str(name) for name in names if not off(name))]


# TRL's loss types that are the clipped loss with another aggregation.
_LOSS_TYPES = {
    "grpo": "seq-mean-token-mean",
    "bnpo": "token-mean",
    "dapo": "token-mean",
    "dr_grpo": "seq-mean-token-sum-norm",
    "luspo": "seq-mean-token-sum",
}
_SCHEDULES = {"constant_with_warmup": "constant"}

# Foreign key → the function that converts its value.
CONVERT: Mapping[str, Callable[[Any], Any]] = {
    "env.VERBOSITY": lambda value: str(value).lower(),
    "use_vllm": lambda value: "vllm" if true(value) else "embedded",
    "loss_type": lambda value: _LOSS_TYPES.get(value, value),
    "mask_truncated_completions": lambda value: "mask" if true(value) else "keep",
    "bf16": lambda value: "auto" if true(value) else "float32",
    "lr_scheduler_type": lambda value: _SCHEDULES.get(value, value),
    "report_to": _loggers,
    "resume_from_checkpoint": lambda value: "auto" if true(value) else "disable" if off(value) else value,
    **{key: _modes for key in ALIASES if key.endswith("val_kwargs.do_sample")},
    **{key: _any_reward for key in ALIASES if key.endswith("filter_groups.metric")},
    **{key: _limit for key in ALIASES if key.endswith("filter_groups.max_num_gen_batches")},
    **dict.fromkeys(VERL_LOSS, _loss_name),
    "algorithm.rollout_correction.rollout_is": lambda value: "none" if off(value) else value,
    **{
        key: _zero_if_negative  # verl's −1 means never, or no limit
        for key in (*ALIASES, *PARTS)
        if key.rpartition(".")[2] in ("save_freq", "test_freq", "top_k", "lr_warmup_steps")
    },
}


@dataclass(frozen=True)
class NoEffect:
    """A foreign key without effect. Its remark is a warning, unless the value is in `off`."""

    remark: str = ""  # empty: no warning; {algorithm} is the chosen algorithm
    off: tuple[Any, ...] = ()


_MICRO_BATCH = NoEffect("no effect: learner.micro_batch_tokens bounds every forward pass")
_PROMPTS = NoEffect("no effect: prompts are never truncated; model.context_length bounds prompt and answer together")
_CRITIC = NoEffect("no effect: the critic is trained on the policy's mini-batches, with the learner's settings")
_SILENT = NoEffect()

_VERL_CRITIC = (
    *("enable", "strategy", "rollout_n", "ppo_epochs", "shuffle", "data_loader_seed", "use_dynamic_bsz"),
    *("ppo_mini_batch_size", "ppo_micro_batch_size", "ppo_micro_batch_size_per_gpu", "ppo_max_token_len_per_gpu"),
    *("ppo_infer_micro_batch_size_per_gpu", "ppo_infer_max_token_len_per_gpu", "forward_max_token_len_per_gpu"),
    *("forward_micro_batch_size", "forward_micro_batch_size_per_gpu", "loss_agg_mode", "loss_scale_factor"),
    *("ulysses_sequence_parallel_size", "nccl_timeout"),
)
_VERL_CRITIC_SECTIONS = (
    *("model", "optim", "checkpoint", "profiler", "engine"),
    *("fsdp", "fsdp_config", "megatron", "torchtitan", "veomni"),
)

NO_EFFECT: Mapping[str, NoEffect] = {
    "rollout.enable_chunked_prefill": _SILENT,
    "rollout.mode": _SILENT,
    "rollout.multi_turn.format": _SILENT,
    "rollout.log_prob_micro_batch_size": _MICRO_BATCH,
    "rollout.log_prob_micro_batch_size_per_gpu": _MICRO_BATCH,
    "ref.log_prob_micro_batch_size": _MICRO_BATCH,
    "rollout.prompt_length": _PROMPTS,
    "data.max_prompt_length": _PROMPTS,
    "data.truncation": NoEffect("no effect: a prompt longer than the context stops the run"),
    "data.filter_overlong_prompts": NoEffect("no effect: a prompt longer than the context stops the run", off=(False,)),
    "data.return_raw_chat": _SILENT,
    "model.use_remove_padding": _SILENT,  # rows are always packed; so below
    "actor.use_dynamic_bsz": _SILENT,
    "train.packing": _SILENT,
    "trainer.balance_batch": _SILENT,
    "actor.strategy": NoEffect(
        "no effect: training has one backend, and learner.parallel chooses how it is sharded", off=("fsdp", "fsdp2")
    ),
    "agent.backend": NoEffect("no effect: rollout= chooses the engine"),
    "algorithm.gamma": NoEffect("no effect: {algorithm} does not discount", off=(1,)),
    "algorithm.lam": NoEffect("no effect: {algorithm} has no λ", off=(1,)),
    "ref_model.num_devices": NoEffect("no effect: the reference is on the learners' devices", off=(1,)),
    "env.num_envs": NoEffect("no effect on the result: rollout.max_sequences bounds concurrent sequences"),
    "train.buffer_size": NoEffect("no effect: mode=async with mode.max_uses reuses earlier groups"),
    "train.empty_replay_buffer": NoEffect("no effect: there is no replay buffer", off=(True,)),
    "train.mixed_precision": NoEffect("no effect: model.dtype chooses the precision"),
    "train.logging_frequency": NoEffect("no effect: every step is logged"),
    "train_model.lora.dropout": NoEffect("no effect: adapters are trained without dropout", off=(0,)),
    **{f"critic.{key}": _CRITIC for key in _VERL_CRITIC},
    "logging_steps": NoEffect("no effect: every step is logged"),
    "log_completions": NoEffect("no effect: logging.episodes_per_step sets how many are written"),
    "max_prompt_length": _PROMPTS,
    "per_device_eval_batch_size": NoEffect("no effect: eval.batch_size counts tasks"),
}

NO_EFFECT_PREFIXES: Mapping[str, NoEffect] = {
    **{f"critic.{section}.": _CRITIC for section in _VERL_CRITIC_SECTIONS},
    "algorithm.rollout_correction.": NoEffect(
        "no effect: algorithm.reject_below, reject_above and reject_level set what is rejected", off=(None, False)
    ),
    "ray.": NoEffect("no effect: Ray is configured by the settings of cluster"),
    "hydra.": NoEffect("no effect: logging.output_dir sets where runs go"),
}

# Aliased settings that an algorithm may lack without harm. Others are an error if the algorithm lacks them.
HARMLESS = tuple(
    f"algorithm.{name}"
    for name in (
        *("clip_low", "clip_high", "dual_clip", "aggregation", "norm_length", "correction_cap", "kl_in"),
        *("kl_estimator", "kl_target", "kl_horizon", "std_normalize", "std_over", "tau_pos", "tau_neg"),
        *("clip_cov_ratio", "clip_cov_low", "clip_cov_high", "kl_cov_ratio", "kl_cov_coef"),
    )
)


@dataclass(frozen=True)
class Target:
    """The native key of a spelling, and the algorithm if the spelling names one (`gvpo_beta`)."""

    key: str
    algorithm: str | None = None

    def convert(self, spelling: str, value: Any) -> Any:
        return CONVERT[spelling](value) if spelling in CONVERT else value


def no_effect(key: str) -> NoEffect | None:
    """The entry of a key without effect."""
    for prefix, remark in NO_EFFECT_PREFIXES.items():
        if key.startswith(prefix):
            return remark
    return NO_EFFECT.get(key)


def translate(key: str, algorithms: Algorithms) -> Target | None:
    """The target of a key of any vocabulary; None if no vocabulary has it."""
    if sections().get(key):
        return Target(f"{key}.name")
    for name in algorithms:
        for native, setting in algorithm_settings(name, algorithms).items():
            field = native.removeprefix("algorithm.")
            for own in (f"algorithm.{name}_{field}", f"{name}_{field}") if field != "name" else ():
                if key == own:
                    return Target(native, name)
                if setting.free and key.startswith(f"{own}."):  # dgdo_importance_priors={exact: 2}, or one of them
                    return Target(native + key.removeprefix(own), name)
    if key in ALIASES:
        return Target(ALIASES[key])
    is_foreign = key in PARTS or key in UNSUPPORTED_KEYS or no_effect(key) is not None
    is_native = find(key, schema_settings()) is not None or bool(owners(key, algorithms))
    return Target(key) if is_foreign or is_native else None


def spellings(native: str, algorithms: Algorithms) -> list[str]:
    """All other spellings of a native setting."""
    parts = [key for key, (targets, _) in PARTS.items() if native in targets]
    found = [key for key, target in ALIASES.items() if target in (native, *parts) and key != native]
    found += [key for key in parts if key not in ALIASES]
    for name in algorithms:
        if native in algorithm_settings(name, algorithms) and native != "algorithm.name":
            found.append(f"algorithm.{name}_{native.removeprefix('algorithm.')}")
    section, _, field = native.partition(".")
    return ([section] if field == "name" else []) + found
