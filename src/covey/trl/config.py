"""TRL's `GRPOConfig`: its argument names and its defaults (TRL 1.16, transformers 5).

An argument is translated (`translate.py`), has no effect (NO_EFFECT), or is not supported (UNSUPPORTED): then any value
other than the default is an error.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from covey.errors import InputError, nearest


@dataclass
class GRPOConfig:
    output_dir: str | None = None  # None: trainer_output

    # Batches. Sizes count completions; Covey counts prompts.
    per_device_train_batch_size: int = 8
    gradient_accumulation_steps: int = 1
    num_generations: int = 8
    generation_batch_size: int | None = None
    steps_per_generation: int | None = None  # None: gradient_accumulation_steps
    num_iterations: int = 1
    num_train_epochs: float = 3.0
    max_steps: int = -1

    # Sampling
    max_completion_length: int | None = 512
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float | None = None
    generation_kwargs: dict[str, Any] | None = None
    shuffle_dataset: bool = True
    remove_unused_columns: bool | None = False
    use_vllm: bool = False
    vllm_gpu_memory_utilization: float = 0.3
    vllm_max_model_length: int | None = None
    vllm_tensor_parallel_size: int = 1
    vllm_enable_sleep_mode: bool = False
    vllm_importance_sampling_correction: bool = True
    vllm_importance_sampling_mode: str = "sequence_mask"
    vllm_importance_sampling_clip_max: float | None = 3.0
    vllm_importance_sampling_clip_min: float | None = None
    vllm_importance_sampling_cap: float | None = None  # older name of ..._clip_max

    # Loss
    beta: float = 0.0
    use_bias_correction_kl: bool = True
    epsilon: float = 0.2
    epsilon_high: float | None = None
    delta: float | None = None
    loss_type: str = "dapo"
    importance_sampling_level: str = "token"
    sapo_temperature_neg: float = 1.05
    sapo_temperature_pos: float = 1.0
    scale_rewards: str | bool = "group"
    reward_weights: list[float] | None = None
    multi_objective_aggregation: str = "sum_then_normalize"
    mask_truncated_completions: bool = False
    entropy_coef: float = 0.0

    # Optimiser
    learning_rate: float = 1e-6
    lr_scheduler_type: str = "linear"
    lr_scheduler_kwargs: dict[str, Any] | None = None
    warmup_steps: float = 0
    warmup_ratio: float | None = None
    weight_decay: float = 0.0
    adam_beta1: float = 0.9
    adam_beta2: float = 0.999
    adam_epsilon: float = 1e-8
    max_grad_norm: float = 1.0
    optim: str = "adamw_torch_fused"
    sync_ref_model: bool = False
    ref_model_mixup_alpha: float = 0.6
    ref_model_sync_steps: int = 512

    # Model and machine
    model_init_kwargs: dict[str, Any] | None = None
    trust_remote_code: bool = False
    bf16: bool | None = None
    fp16: bool = False
    gradient_checkpointing: bool = True
    use_cpu: bool = False
    seed: int = 42

    # Evaluation, checkpoints, logs
    eval_strategy: str = "no"
    eval_steps: float | None = None
    eval_on_start: bool = False
    num_generations_eval: int | None = None
    save_strategy: str = "steps"
    save_steps: float = 500
    save_total_limit: int | None = None
    report_to: str | list[str] | None = "none"
    run_name: str | None = None
    project: str = "huggingface"
    resume_from_checkpoint: str | bool | None = None

    # No effect: see NO_EFFECT
    logging_steps: float = 10
    logging_strategy: str = "steps"
    logging_first_step: bool = False
    log_level: str = "passive"
    log_completions: bool = False
    log_multimodal: bool = True
    log_unique_prompts: bool = False
    num_completions_to_print: int | None = None
    per_device_eval_batch_size: int = 8
    max_prompt_length: int | None = None
    disable_dropout: bool = False
    pad_to_multiple_of: int | str | None = "auto"
    ds3_gather_for_generation: bool = True
    cache_implementation: str | None = None
    vllm_mode: str = "colocate"
    vllm_model_impl: str = "vllm"
    vllm_server_timeout: float = 240.0
    use_transformers_continuous_batching: bool = False
    transformers_continuous_batching_config: dict[str, Any] | None = None
    use_transformers_paged: bool = False
    use_liger_kernel: bool = False
    use_liger_loss: bool = False
    gradient_checkpointing_kwargs: dict[str, Any] | None = None
    tf32: bool | None = None
    torch_compile: bool = False
    torch_empty_cache_steps: int | None = None
    ddp_find_unused_parameters: bool | None = None
    dataloader_num_workers: int = 0
    dataloader_pin_memory: bool = True
    dataloader_drop_last: bool = False
    save_only_model: bool = False
    do_train: bool = False
    do_eval: bool = False
    disable_tqdm: bool | None = None
    vllm_group_port: int = 51216
    entropy_coef_min: float = 0.0
    entropy_coef_max: float = 1.0
    entropy_coef_delta: float = 0.005
    entropy_target: float = 0.2
    vespo_k_pos: float = 2.0
    vespo_lambda_pos: float = 3.0
    vespo_k_neg: float = 3.0
    vespo_lambda_neg: float = 2.0
    label_names: list[str] | None = None
    full_determinism: bool = False

    # Not supported: see UNSUPPORTED
    vllm_structured_outputs_regex: str | None = None
    vllm_server_base_url: str | None = None
    vllm_server_host: str | None = None
    vllm_server_port: int = 8000
    repetition_penalty: float = 1.0
    chat_template_kwargs: dict[str, Any] | None = None
    router_aux_loss_coef: float | None = None
    cast_lm_head_to_fp32: bool = False
    top_entropy_quantile: float = 1.0
    use_adaptive_entropy: bool = False
    off_policy_mask_threshold: float | None = None
    max_tool_calling_iterations: int | None = None
    log_completions_hub_repo: str | None = None
    auto_find_batch_size: bool = False
    load_best_model_at_end: bool = False
    push_to_hub: bool = False
    hub_model_id: str | None = None
    data_seed: int | None = None
    neftune_noise_alpha: float | None = None
    label_smoothing_factor: float = 0.0
    deepspeed: Any = None
    fsdp: Any = None
    fsdp_config: Any = None
    accelerator_config: Any = None
    parallelism_config: Any = None

    def __new__(cls, *args: Any, **arguments: Any) -> GRPOConfig:
        """Suggest a name for a misspelt argument, which Python's own message does not."""
        known = [field.name for field in dataclasses.fields(cls)]
        for name in arguments:
            if name not in known:
                raise _unknown(name, known)
        return super().__new__(cls)

    def __post_init__(self) -> None:
        if isinstance(self.scale_rewards, bool):
            self.scale_rewards = "group" if self.scale_rewards else "none"
        if self.vllm_importance_sampling_cap is not None:
            self.vllm_importance_sampling_clip_max = self.vllm_importance_sampling_cap
        self._check_choices()
        self._check_unsupported()
        self._resolve_generation_batch()

    def _resolve_generation_batch(self) -> None:
        """Compute steps_per_generation and generation_batch_size from each other."""
        per_device, whole = self.per_device_train_batch_size, self.generation_batch_size
        for name in ("per_device_train_batch_size", "gradient_accumulation_steps", "num_generations", "num_iterations"):
            if getattr(self, name) < 1:
                raise InputError(f"{name} must be at least 1, got {getattr(self, name)}")
        if whole is None:
            self.steps_per_generation = self.steps_per_generation or self.gradient_accumulation_steps
            self.generation_batch_size = per_device * self.steps_per_generation
            return
        if whole % per_device:
            raise InputError(
                f"generation_batch_size={whole} must be a multiple of per_device_train_batch_size={per_device}"
            )
        if self.steps_per_generation not in (None, whole // per_device):
            raise InputError("generation_batch_size and steps_per_generation contradict each other\n  give one of them")
        self.steps_per_generation = whole // per_device

    def _check_choices(self) -> None:
        for name, allowed in CHOICES.items():
            value = getattr(self, name)
            setattr(self, name, getattr(value, "value", value))  # an enum of transformers, such as SchedulerType
            if getattr(self, name) not in allowed:
                note = "\n  Covey starts vLLM itself: vllm_mode='colocate'" if value == "server" else ""
                raise InputError(f"{name}={value} is not supported; supported: {', '.join(allowed)}{note}")

    def _check_unsupported(self) -> None:
        for name, instead in UNSUPPORTED.items():
            if self.is_set(name):
                raise InputError(f"{name}={getattr(self, name)!r} is not supported by covey.trl\n  {instead}")

    def is_set(self, name: str) -> bool:
        """Whether an argument differs from its default."""
        default = next(field.default for field in dataclasses.fields(self) if field.name == name)
        return bool(getattr(self, name) != default)

    def remarks(self) -> Iterator[str]:
        """A warning for each argument that is set and has no effect."""
        for name, reason in NO_EFFECT.items():
            if self.is_set(name):
                yield f"{name}={getattr(self, name)!r} has no effect: {reason}"


def _unknown(name: str, known: list[str]) -> InputError:
    from transformers import TrainingArguments

    if name in {field.name for field in dataclasses.fields(TrainingArguments)}:
        return InputError(f"{name} is not supported by covey.trl\n  leave it out (docs/guides/from-trl.md)")
    guess = nearest(name, known)
    hint = f"\n  did you mean   {guess}?" if guess else ""
    return InputError(f"unknown argument of GRPOConfig  {name}{hint}\n  all of them: docs/guides/from-trl.md")


LOSS_TYPES = ("grpo", "bnpo", "dr_grpo", "dapo", "luspo", "cispo", "sapo", "vespo")
CHOICES: dict[str, tuple[str, ...]] = {
    "loss_type": LOSS_TYPES,
    "importance_sampling_level": ("token", "sequence"),
    "scale_rewards": ("group", "batch", "none"),
    "multi_objective_aggregation": ("sum_then_normalize", "normalize_then_sum"),
    "lr_scheduler_type": ("linear", "cosine", "constant", "constant_with_warmup", "cosine_with_min_lr"),
    "eval_strategy": ("no", "steps", "epoch"),
    "save_strategy": ("no", "steps", "epoch"),
    "vllm_mode": ("colocate",),
    "vllm_importance_sampling_mode": ("token_truncate", "token_mask", "sequence_truncate", "sequence_mask"),
    "optim": ("adamw_torch_fused", "adamw_torch", "adamw_hf", "adamw_8bit", "adamw_bnb_8bit"),
}

_ALL_STEPS = "every step is logged, in the run's folder and on the console"
_EPISODES = "some episodes of every step are written to episodes.jsonl (covey dash shows them)"
_BATCHING = "Covey's engine uses continuous batching"
_ADAPTIVE = "it belongs to use_adaptive_entropy, which is not supported"
_SIZES = "Covey packs rows by tokens, without padding"
NO_EFFECT: dict[str, str] = {
    "logging_steps": _ALL_STEPS,
    "logging_strategy": _ALL_STEPS,
    "logging_first_step": _ALL_STEPS,
    "log_level": _ALL_STEPS,
    "log_completions": _EPISODES,
    "log_multimodal": _EPISODES,
    "log_unique_prompts": _EPISODES,
    "num_completions_to_print": _EPISODES,
    "per_device_eval_batch_size": "all evaluation prompts are sampled together",
    "max_prompt_length": "prompts are never cut; one that is longer than the model's context stops the run",
    "disable_dropout": "Covey always trains without dropout",
    "pad_to_multiple_of": _SIZES,
    "ds3_gather_for_generation": "there is no DeepSpeed here",
    "cache_implementation": _BATCHING,
    "vllm_model_impl": "vLLM chooses it",
    "vllm_server_timeout": "there is no vLLM server",
    "use_transformers_continuous_batching": _BATCHING,
    "transformers_continuous_batching_config": _BATCHING,
    "use_transformers_paged": _BATCHING,
    "use_liger_kernel": "Covey has kernels of its own",
    "use_liger_loss": "Covey computes log-probs in chunks",
    "gradient_checkpointing_kwargs": "checkpointing is never reentrant",
    "tf32": "the precision is model.dtype's",
    "torch_compile": "on a GPU the layers are compiled by default",
    "torch_empty_cache_steps": "Covey manages its own memory",
    "ddp_find_unused_parameters": "there is one process",
    "dataloader_num_workers": "the data is in memory",
    "dataloader_pin_memory": "the data is in memory",
    "dataloader_drop_last": "an incomplete last batch of an epoch is always dropped, as in TRL",
    "save_only_model": "checkpoints can always be resumed",
    "do_train": "call train()",
    "do_eval": "call evaluate(), or give eval_strategy",
    "disable_tqdm": "the console has a line per step",
    "vllm_group_port": "there is no vLLM server",
    **dict.fromkeys(("entropy_coef_min", "entropy_coef_max", "entropy_coef_delta", "entropy_target"), _ADAPTIVE),
    "label_names": "there are no labels",
    "full_determinism": "on a CPU a run is always the same; on a GPU kernels may differ in the last bits",
}

_SAME_PROMPT = "leave it at its default"
_ONE_DEVICE = "several GPUs: covey train cluster=ray (docs/cluster.md)"
_SERVER = "Covey starts vLLM itself: use_vllm=True"
UNSUPPORTED: dict[str, str] = {
    "vllm_structured_outputs_regex": "check the form in a reward function",
    "vllm_server_base_url": _SERVER,
    "vllm_server_host": _SERVER,
    "vllm_server_port": _SERVER,
    "repetition_penalty": "leave it at 1.0",
    "chat_template_kwargs": "set processing_class.chat_template to a template that has them built in",
    "router_aux_loss_coef": _SAME_PROMPT,
    "cast_lm_head_to_fp32": "model_init_kwargs={'dtype': 'float32'} computes everything in float32",
    "top_entropy_quantile": "leave it at 1.0",
    "use_adaptive_entropy": "entropy_coef alone gives a fixed bonus",
    "off_policy_mask_threshold": "vllm_importance_sampling_mode='sequence_mask' masks answers that are far off-policy",
    "max_tool_calling_iterations": "agents and tools: covey train agent=hf (docs/agents.md)",
    "log_completions_hub_repo": _EPISODES,
    "auto_find_batch_size": "not needed: micro-batches are sized automatically",
    "load_best_model_at_end": "the best checkpoint is kept; export it: covey export RUN FOLDER",
    "push_to_hub": "trainer.save_model(FOLDER), then upload the folder",
    "hub_model_id": "trainer.save_model(FOLDER), then upload the folder",
    "data_seed": "seed is the seed of everything",
    "neftune_noise_alpha": _SAME_PROMPT,
    "label_smoothing_factor": _SAME_PROMPT,
    "deepspeed": _ONE_DEVICE,
    "fsdp": _ONE_DEVICE,
    "fsdp_config": _ONE_DEVICE,
    "accelerator_config": _ONE_DEVICE,
    "parallelism_config": _ONE_DEVICE,
}
