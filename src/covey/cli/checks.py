"""Settings that cannot work together, found before the model loads. Each returns warnings and raises on mistakes."""

from __future__ import annotations

from typing import TYPE_CHECKING

from covey.config.schema import Config
from covey.errors import InputError
from covey.rollout.policy import render
from covey.tasks import TaskSet

if TYPE_CHECKING:
    from covey.algorithms import Algorithm
    from covey.learner.models import ModelSource


def check_algorithm(config: Config, algorithm: Algorithm) -> list[str]:
    size, least = config.rollout.group_size, algorithm.needs.min_group_size
    if size < least:
        raise InputError(
            f"rollout.group_size={size}, but {algorithm.name} compares the attempts at a task with each other\n"
            f"  it needs at least {least}; 8 is a good start"
        )
    warnings = []
    if algorithm.name == "gvpo" and size < 4:
        warnings.append(f"rollout.group_size={size}: GVPO's group statistics are noisy below 4 attempts per task")
    if (config.rollout.top_p < 1 or config.rollout.top_k or config.rollout.min_p) and algorithm.name == "grpo":
        warnings.append("top_p, top_k or min_p truncate the sampling distribution: ratios start below 1")
    return warnings


def check_sizes(config: Config, tasks: TaskSet) -> list[str]:
    loop, learner = config.loop, config.learner
    if loop.total_steps is not None and loop.total_epochs is not None:
        raise InputError(
            f"loop.total_steps={loop.total_steps} and loop.total_epochs={loop.total_epochs} contradict each other\n"
            "  give one of them"
        )
    warnings = []
    if tasks.train and len(tasks.train) < config.data.train_batch_size:
        warnings.append(
            f"data.train_batch_size={config.data.train_batch_size}, but there are {len(tasks.train)} training tasks: "
            "every step takes all of them"
        )
    if learner.mini_batch_size is not None and learner.mini_batch_size > config.data.train_batch_size:
        warnings.append(
            f"learner.mini_batch_size={learner.mini_batch_size} is more than data.train_batch_size="
            f"{config.data.train_batch_size}: one optimiser step per batch"
        )
    if config.eval.every and tasks.train and not tasks.validation:
        raise InputError(
            f"eval.every={config.eval.every}, but there is nothing to evaluate on\n"
            "  give data.val_files, or eval.every=0"
        )
    return warnings


def check_prompts(config: Config, tasks: TaskSet, source: ModelSource) -> list[str]:
    """The longest prompt and the longest answer must fit into the model's context."""
    limit = config.model.context_length or source.context_length
    if limit is None:
        return []
    answer = max(config.rollout.max_tokens, config.eval.max_tokens or 0)
    for task in (*tasks.train, *tasks.validation):
        prompt = len(render(source.tokenizer, task.messages))
        if prompt + answer > limit:
            raise InputError(
                f"task {task.id}: prompt of {prompt} tokens + rollout.max_tokens={answer} is longer than the context "
                f"of {limit}\n  shorten the prompt, lower rollout.max_tokens, or take that task out"
            )
    return []
