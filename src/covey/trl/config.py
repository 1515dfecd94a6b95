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

_ALL_STEPS = "every step is logged, in the run's folder and on the console"
_EPISODES = "some episodes of every step are written to episodes.jsonl (covey dash shows them)"
_BATCHING = "Covey's engine uses continuous batching"
_ADAPTIVE = "it belongs to use_adaptive_entropy, which is not supported"
_SIZES = "Covey packs rows by tokens, without padding"
_KEEP_DEFAULT = "leave it at its default"
_ONE_DEVICE = "several GPUs: covey train cluster=ray (docs/cluster.md)"
_SERVER = "Covey starts vLLM itself: use_vllm=True"


def no_effect(default: Any, reason: str) -> Any:
    """An argument that is accepted, with a warning if it is set."""
    return dataclasses.field(default=default, metadata={"no_effect": reason})


def unsupported(default: Any, instead: str) -> Any:
    """An argument that is an error if it is set; `instead` is the fix."""
    return dataclasses.field(default=default, metadata={"unsupported": instead})


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

    # No effect
    logging_steps: float = no_effect(10, _ALL_STEPS)
    logging_strategy: str = no_effect("steps", _ALL_STEPS)
    logging_first_step: bool = no_effect(False, _ALL_STEPS)
    log_level: str = no_effect("passive", _ALL_STEPS)
    log_completions: bool = no_effect(False, _EPISODES)
    log_multimodal: bool = no_effect(True, _EPISODES)
    log_unique_prompts: bool = no_effect(False, _EPISODES)
    num_completions_to_print: int | None = no_effect(None, _EPISODES)
    per_device_eval_batch_size: int = no_effect(8, "all evaluation prompts are sampled together")
    max_prompt_length: int | None = no_effect(
        None, "prompts are never cut; one that is longer than the model's context stops the run"
    )
    disable_dropout: bool = no_effect(False, "Covey always trains without dropout")
    pad_to_multiple_of: int | str | None = no_effect("auto", _SIZES)
    ds3_gather_for_generation: bool = no_effect(True, "there is no DeepSpeed here")
    cache_implementation: str | None = no_effect(None, _BATCHING)
    vllm_mode: str = "colocate"
    vllm_model_impl: str = no_effect("vllm", "vLLM chooses it")
    vllm_server_timeout: float = no_effect(240.0, "there is no vLLM server")
    use_transformers_continuous_batching: bool = no_effect(False, _BATCHING)
    transformers_continuous_batching_config: dict[str, Any] | None = no_effect(None, _BATCHING)
    use_transformers_paged: bool = no_effect(False, _BATCHING)
    use_liger_kernel: bool = no_effect(False, "Covey has kernels of its own")
    use_liger_loss: bool = no_effect(False, "Covey computes log-probs in chunks")
    gradient_checkpointing_kwargs: dict[str, Any] | None = no_effect(None, "checkpointing is never reentrant")
    tf32: bool | None = no_effect(None, "the precision is model.dtype's")
    torch_compile: bool = no_effect(False, "on a GPU the layers are compiled by default")
    torch_empty_cache_steps: int | None = no_effect(None, "Covey manages its own memory")
    ddp_find_unused_parameters: bool | None = no_effect(None, "there is one process")
    dataloader_num_workers: int = no_effect(0, "the data is in memory")
    dataloader_pin_memory: bool = no_effect(True, "the data is in memory")
    dataloader_drop_last: bool = no_effect(False, "an incomplete last batch of an epoch is always dropped, as in TRL")
    save_only_model: bool = no_effect(False, "checkpoints can always be resumed")
    do_train: bool = no_effect(False, "call train()")
    do_eval: bool = no_effect(False, "call evaluate(), or give eval_strategy")
    disable_tqdm: bool | None = no_effect(None, "the console has a line per step")
    vllm_group_port: int = no_effect(51216, "there is no vLLM server")
    entropy_coef_min: float = no_effect(0.0, _ADAPTIVE)
    entropy_coef_max: float = no_effect(1.0, _ADAPTIVE)
    entropy_coef_delta: float = no_effect(0.005, _ADAPTIVE)
    entropy_target: float = no_effect(0.2, _ADAPTIVE)
    vespo_k_pos: float = 2.0
    vespo_lambda_pos: float = 3.0
    vespo_k_neg: float = 3.0
    vespo_lambda_neg: float = 2.0
    label_names: list[str] | None = no_effect(None, "there are no labels")
    full_determinism: bool = no_effect(
        False, "on a CPU a run is always the same; on a GPU kernels may differ in the last bits"
    )

    # Not supported
    vllm_structured_outputs_regex: str | None = unsupported(None, "check the form in a reward function")
    vllm_server_base_url: str | None = unsupported(None, _SERVER)
    vllm_server_host: str | None = unsupported(None, _SERVER)
    vllm_server_port: int = unsupported(8000, _SERVER)
    repetition_penalty: float = unsupported(1.0, "leave it at 1.0")
    chat_template_kwargs: dict[str, Any] | None = unsupported(
        None, "set processing_class.chat_template to a template that has them built in"
    )
    router_aux_loss_coef: float | None = unsupported(None, _KEEP_DEFAULT)
    cast_lm_head_to_fp32: bool = unsupported(
        False, "model_init_kwargs={'dtype': 'float32'} computes everything in float32"
    )
    top_entropy_quantile: float = unsupported(1.0, "leave it at 1.0")
    use_adaptive_entropy: bool = unsupported(False, "entropy_coef alone gives a fixed bonus")
    off_policy_mask_threshold: float | None = unsupported(
        None, "vllm_importance_sampling_mode='sequence_mask' masks answers that are far off-policy"
    )
    max_tool_calling_iterations: int | None = unsupported(
        None, "agents and tools: covey train agent=hf (docs/agents.md)"
    )
    log_completions_hub_repo: str | None = unsupported(None, _EPISODES)
    auto_find_batch_size: bool = unsupported(False, "not needed: micro-batches are sized automatically")
    load_best_model_at_end: bool = unsupported(False, "the best checkpoint is kept; export it: covey export RUN FOLDER")
    push_to_hub: bool = unsupported(False, "trainer.save_model(FOLDER), then upload the folder")
    hub_model_id: str | None = unsupported(None, "trainer.save_model(FOLDER), then upload the folder")
    data_seed: int | None = unsupported(None, "seed is the seed of everything")
    neftune_noise_alpha: float | None = unsupported(None, _KEEP_DEFAULT)
    label_smoothing_factor: float = unsupported(0.0, _KEEP_DEFAULT)
    deepspeed: Any = unsupported(None, _ONE_DEVICE)
    fsdp: Any = unsupported(None, _ONE_DEVICE)
    fsdp_config: Any = unsupported(None, _ONE_DEVICE)
    accelerator_config: Any = unsupported(None, _ONE_DEVICE)
    parallelism_config: Any = unsupported(None, _ONE_DEVICE)

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


def _reasons(kind: str) -> dict[str, str]:
    return {field.name: field.metadata[kind] for field in dataclasses.fields(GRPOConfig) if kind in field.metadata}


NO_EFFECT, UNSUPPORTED = _reasons("no_effect"), _reasons("unsupported")
