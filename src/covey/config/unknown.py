"""Errors about unknown settings, with suggestions.

Suggestions come from a table of common words, from other vocabularies, and from the help texts:

    batch_size        → data.train_batch_size, learner.mini_batch_size
    rollout.n_samples → rollout.group_size
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from functools import cache

from covey.config.aliases import ALIASES, NO_EFFECT, Target, spellings, translate
from covey.config.derive import PARTS, UNSUPPORTED_KEYS
from covey.config.read import Override, literal
from covey.config.settings import Algorithms, Setting, algorithm_settings, all_keys, schema_settings, sections
from covey.errors import NEAR, TYPO, InputError, closest, normalize, split_words

SHOWN = 3  # suggestions at most
LEAD = 6  # the first words of a help text name the setting
FILLERS = ("num", "n", "nb", "number", "no", "count", "the", "of", "per", "my", "use", "set", "total", "training")


def _by_word(table: Mapping[str, str]) -> dict[str, tuple[str, ...]]:
    """Invert settings → words into word → settings, the most likely first."""
    by_word: dict[str, tuple[str, ...]] = {}
    for settings, words in table.items():
        by_word |= dict.fromkeys(words.split(), tuple(settings.split()))
    return by_word


# Settings that the chosen algorithm lacks are skipped: KL is algorithm.kl_coef for GRPO, algorithm.beta for GVPO.
MEANINGS = _by_word(
    {
        "model.name": "base_model model_path model_id checkpoint_path pretrained pretrained_model llm policy weights",
        "model.context_length": "ctx context max_seq_length max_seq_len seq_len seq_length max_model_length window",
        "model.dtype": "precision fp16 fp32 half mixed_precision torch_dtype amp",
        "model.device": "cuda gpu_id accelerator use_cpu no_cuda",
        "model.quantization": "load_in_4bit load_in_8bit quantization_config qlora bnb quantize bits",
        "model.lora.rank": "lora lora_r lora_rank r rank peft adapter use_lora use_peft",
        "model.lora.alpha": "lora_alpha lora_scale",
        "data.sampler": "curriculum curriculum_learning task_sampler class_path class_name online_difficulty_filtering",
        "data.name": "dataset dataset_name task task_name env_name benchmark",
        "data.train_files": "train_file train_data train_dataset train_path data_path file files input prompts jsonl",
        "data.val_files": "test_file test_data val_data val_file eval_data eval_file eval_dataset validation "
        "test_files",
        "data.train_batch_size learner.mini_batch_size": "batch_size batch bs global_batch_size rollout_batch_size",
        "data.train_size": "max_samples max_train_samples limit subset num_train num_examples",
        "data.val_size": "max_eval_samples num_eval eval_samples test_size eval_size",
        "data.system_prompt": "system system_message instruction prompt_template prefix",
        "agent.max_turns": "turns max_iterations rounds max_rounds max_interactions",
        "agent.max_seconds agent.tool_seconds reward.seconds loop.max_minutes": "timeout seconds deadline",
        "agent.tools": "functions tool",
        "agent.environment agent.name": "environment env_id gym env_class",
        "agent.max_response_tokens": "max_episode_tokens episode_length max_total_tokens",
        "reward.name": "rewards reward_fn reward_function reward_func reward_funcs scorer verifier grader metric",
        "reward.weights": "reward_weights weights_of_rewards reward_weight",
        "rollout.name": "engine backend vllm inference_engine sampler vllm_mode",
        "rollout.group_size": "samples rollouts generations group attempts completions n_samples num_samples k g n "
        "samples_per_prompt n_samples_per_prompt num_return_sequences trajectories num_rollouts completions_per_prompt",
        "rollout.max_tokens": "max_length max_len max_new_tokens max_gen_len generation_length response_length "
        "max_response_length max_completion_tokens completion_length answer_length max_output_tokens output_length",
        "rollout.max_tokens eval.max_tokens": "max_tokens tokens",
        "rollout.temperature": "temp sampling_temperature",
        "rollout.max_sequences": "max_num_seqs concurrency max_batch max_concurrency",
        "rollout.memory": "gpu_memory gpu_memory_fraction kv_cache mem_fraction",
        "rollout.stop": "stop_token stop_words stop_strings eos stop_sequences",
        "learner.lr": "lr learning_rate step_size alpha_lr actor_lr policy_lr",
        "learner.optimizer learner.lr learner.weight_decay": "optim optimiser optimizer_name optimizer_type adam adamw",
        "learner.schedule": "scheduler lr_scheduler lr_schedule lr_decay decay",
        "learner.warmup_steps": "warmup warmup_ratio lr_warmup warmup_iters warmup_epochs",
        "learner.weight_decay": "wd l2 regularization",
        "learner.grad_clip": "max_grad_norm clip_grad clip_grad_norm gradient_clipping grad_norm gradient_clip",
        "learner.epochs": "ppo_epochs inner_epochs update_epochs num_iterations mu",
        "learner.micro_batch_size": "micro_batch gradient_accumulation grad_accum accumulation grad_accum_steps "
        "accumulate_grad_batches microbatch",
        "learner.entropy_coef": "entropy entropy_bonus ent_coef entropy_beta entropy_weight",
        "learner.compile": "torch_compile jit",
        "learner.replay_routing": "router_replay routing_replay enable_router_replay moe_enable_routing_replay",
        "learner.parallel": "fsdp ddp zero deepspeed sharding strategy",
        "loop.total_epochs learner.epochs": "epochs num_epochs n_epochs max_epochs epoch train_epochs",
        "loop.total_steps": "steps num_steps iterations iters max_iters max_steps n_steps train_steps updates episodes",
        "loop.max_minutes": "time_limit max_time max_hours minutes hours walltime duration",
        "loop.save_every": "save_interval save_freq save_steps checkpoint_every checkpoint_interval ckpt_every "
        "checkpointing save checkpoint_freq ckpt_freq",
        "loop.keep_last": "keep keep_checkpoints max_checkpoints save_total_limit",
        "loop.threads": "cpu_threads num_threads cpus cores",
        "eval.every": "eval_interval eval_freq eval_steps eval_every evaluation_steps test_freq val_interval "
        "validation_interval evaluate_every val_every eval_interval_steps",
        "eval.n": "eval_n pass_at_k val_n eval_rollouts",
        "cluster.learner_devices cluster.rollout_devices": "gpus n_gpus ngpu devices world_size nproc nproc_per_node "
        "gpus_per_node n_gpus_per_node tp_size",
        "cluster.nodes": "nnodes num_machines machines hosts",
        "cluster.address": "ray_address head",
        "algorithm.kl_coef algorithm.beta": "kl kl_coeff kl_weight kl_penalty kl_beta kl_loss_coef "
        "init_kl_coef kl_ctrl",
        "algorithm.clip_high algorithm.clip_low": "clip clip_range cliprange eps_clip clip_eps clip_ratio clip_epsilon",
        "algorithm.lam": "gae_lambda lambda lmbda lam_actor gae",
        "algorithm.gamma": "discount discount_factor",
        "algorithm.name": "algo adv_estimator estimator method trainer rl_algorithm",
        "algorithm.loss": "loss_fn policy_loss loss_name objective importance_sampling_level",
        "algorithm.correction": "importance_sampling importance_correction tis vllm_importance_sampling_correction "
        "vllm_importance_sampling_mode",
        "algorithm.correction_cap": "vllm_importance_sampling_clip_max vllm_importance_sampling_cap",
        "algorithm.filter_groups": "dynamic_sampling filter",
        "logging.output_dir": "out output output_path save_dir save_path log_dir dir logdir out_dir run_dir ckpt_dir "
        "checkpoint_dir results workdir",
        "logging.to": "wandb tensorboard logger loggers log_to report log_with tracker trackers mlflow use_wandb",
        "logging.project": "project_name wandb_project",
        "logging.experiment": "experiment_name exp_name run run_name name wandb_name exp",
        "logging.verbosity": "verbose debug log_level quiet loglevel",
        "resume": "restore continue resume_from load_checkpoint checkpoint ckpt load",
        "seed": "random_seed rng random_state manual_seed",
        "mode.name": "async_mode asynchronous is_async",
        "mode.max_staleness": "staleness off_policy max_lag lag",
        "mode.update": "partial_rollout partial_rollouts",
        "teacher.name": "teacher_model teacher_path teacher_model_name_or_path distillation",
    }
)


def by_meaning(key: str, settings: Mapping[str, Setting]) -> list[str]:
    """The settings that an unknown key probably means, the most likely first. `settings` are all known settings, with
    those of the chosen algorithm."""
    section, _, last = key.rpartition(".")
    section = section.partition(".")[0] if section.partition(".")[0] in sections() else ""
    for word in _forms(key, last):
        names = [name for name in MEANINGS.get(word) or _aliased().get(word, ()) if name in settings]
        if names:
            return sorted(names, key=lambda name: not _in(name, section))[:SHOWN]
    return _by_help(split_words(last), section, settings)


def _forms(key: str, last: str) -> Iterable[str]:
    """The whole key as words (`eval.steps` → eval_steps), its last part, and that without filler words."""
    yield normalize(key)
    yield normalize(last)
    dropped = [word for word in split_words(last) if word not in FILLERS]
    yield "_".join(dropped)
    yield "_".join(dropped).removesuffix("s")


def _in(name: str, section: str) -> bool:
    return bool(section) and name.startswith(f"{section}.")


@cache
def _aliased() -> Mapping[str, tuple[str, ...]]:
    """The last part of each alias → its targets."""
    targets: dict[str, list[str]] = {}
    for key, target in ALIASES.items():
        targets.setdefault(key.rpartition(".")[2], []).append(target)
    return {word: tuple(dict.fromkeys(names)) for word, names in targets.items()}


def _by_help(words: list[str], section: str, settings: Mapping[str, Setting]) -> list[str]:
    """Settings whose name or help text has all words of a key. A single word must be in the name, or be one of the
    first words of the text."""
    query = [word for word in words if word not in FILLERS and len(word) > 2]
    if not query:
        return []
    scores: dict[str, float] = {}
    for name, setting in settings.items():
        own = {_stem(word) for word in split_words(name)}
        text = [_stem(word) for word in re.findall(r"[a-z]+", setting.explanation.lower())]
        points = [2.0 if _stem(word) in own else 1.0 if _stem(word) in text else 0.0 for word in query]
        specific = len(query) > 1 or points[0] == 2.0 or (len(query[0]) > 4 and _stem(query[0]) in text[:LEAD])
        if all(points) and specific:
            whole = normalize(name.rpartition(".")[2]) == "_".join(words)
            scores[name] = sum(points) + whole + _in(name, section) - len(text) / 100
    return sorted(scores, key=lambda name: -scores[name])[:SHOWN]


def _stem(word: str) -> str:
    for ending in ("ing", "ed", "es", "s"):
        if word.endswith(ending) and len(word) - len(ending) >= 3:
            return word.removesuffix(ending)
    return word


# -- The error message -------------------------------------------------------------------------------------------------


def unknown_setting(override: Override, algorithm: str, algorithms: Algorithms) -> InputError:
    key = override.key
    algorithm = algorithm if algorithm in algorithms else next(iter(algorithms))
    if key in sections():
        return InputError(f"{override.label} is a section, not a setting\n  {listing_of(key, algorithm)}")
    lines = [f"{override.prefix}unknown setting  {key}"]
    section = key.partition(".")[0]
    guesses = _guesses(key, algorithm, algorithms)
    for number, guess in enumerate(guesses):
        target = translate(guess, algorithms) or Target(guess)  # a section without a name
        owner = target.algorithm or algorithm
        if not number:
            section, algorithm = target.key.partition(".")[0], owner
        head = "or            " if number else "did you mean  "
        end = "?" if number == len(guesses) - 1 else ""
        lines.append(f"  {head} {guess}{_meaning(guess, target, owner, algorithms, len(guesses) > 1)}{end}")
    lines.append(f"  {listing_of(section, algorithm)}")
    return InputError("\n".join(lines))


def _guesses(key: str, algorithm: str, algorithms: Algorithms) -> list[str]:
    """Suggestions: a typo, unless its words have another meaning; then by meaning; then by similar spelling."""
    native = {**schema_settings(), **algorithm_settings(algorithm, algorithms)}
    head, _, last = key.rpartition(".")
    if table := closest(head, [name for name, setting in native.items() if setting.free], TYPO):
        return [f"{table}.{last}"]  # data.option.count
    typo = _by_spelling(key, algorithm, algorithms, TYPO)
    suggestions = by_meaning(key, native)
    if typo is not None and (not suggestions or _same(typo, suggestions[0], head, algorithms)):
        return [typo]
    near = _by_spelling(key, algorithm, algorithms, NEAR)
    return suggestions or ([near] if near is not None else [])


def _same(typo: str, setting: str, head: str, algorithms: Algorithms) -> bool:
    """Whether a spelling of the user's vocabulary (by the head of the key) means that setting."""
    target, theirs = translate(typo, algorithms), typo.rpartition(".")[0]
    return target is not None and target.key == setting and (theirs == head or bool(closest(head, [theirs], TYPO)))


def _by_spelling(key: str, algorithm: str, algorithms: Algorithms, cutoff: float) -> str | None:
    """The most similar key whose last part is similar too, since long common prefixes make any two keys similar."""
    last = key.rpartition(".")[2]
    native = {**schema_settings(), **algorithm_settings(algorithm, algorithms)}
    known = [*native, *ALIASES, *PARTS, *NO_EFFECT, *sorted(UNSUPPORTED_KEYS)]
    for name in algorithms:
        for setting in algorithm_settings(name, algorithms):
            known += [s for s in spellings(setting, algorithms) if s.startswith(f"algorithm.{name}_")]
    near = [k for k in dict.fromkeys(known) if closest(last, [k.rpartition(".")[2]], cutoff)]
    if "." in key:
        return closest(key, near, cutoff)
    if section := closest(key, sections(), cutoff):  # data=x is short for data.name=x
        return section
    return next((k for k in near if k.rpartition(".")[2] == key), closest(key, near, cutoff))


def _meaning(guess: str, target: Target, owner: str, algorithms: Algorithms, explained: bool) -> str:
    """A note on a suggestion. `explained`: with the help text, to distinguish several suggestions."""
    settings = all_keys(algorithms) | algorithm_settings(owner, algorithms)
    words = []
    if guess != target.key:
        words.append(f"= {target.key}" + (f" for {target.algorithm}" if target.algorithm else ""))
    if target.key in settings:
        words.append(f"default {literal(settings[target.key].default)}")
        if explained:
            words.append(settings[target.key].explanation)
    return f"  ({'; '.join(words)})" if words else ""


def listing_of(section: str, algorithm: str) -> str:
    if section == "algorithm":
        return f"all settings of {algorithm}: covey config explain algorithm={algorithm}"
    if section in sections():
        return f"all settings of {section}: covey config explain {section}"
    return "all settings: covey config explain"
