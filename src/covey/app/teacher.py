"""The teacher of a run: checks before weights are loaded, its model, and its prompts or endpoint."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

from covey.config.schema import Config, LoraConfig, ModelConfig, TeacherConfig
from covey.errors import Absent, InputError
from covey.protocols import Agent
from covey.rollout.rendering import Renderer
from covey.storage import text_or_file
from covey.types import Task

if TYPE_CHECKING:
    import torch

    from covey.algorithms import Algorithm
    from covey.app.models import BuildSpec
    from covey.learner.parallel import Ranks
    from covey.models.loading import ModelSource, Reference
    from covey.training.teacher import TeacherInputs

SELF = ("initial", "current")  # the policy itself as its teacher


def with_teacher(algorithm: Algorithm, config: Config) -> Algorithm:
    """The algorithm that also learns from the teacher of the settings."""
    from covey.algorithms.catalogue import unsupported
    from covey.algorithms.distill import NoRewards, Teacher

    teacher = config.teacher
    if teacher.name is None:
        if teacher != TeacherConfig():
            raise InputError("settings of a teacher, and no teacher\n  name it: teacher=MODEL")
        return algorithm
    for part in (algorithm.estimator, algorithm.objective):
        if reason := unsupported(type(part)).get("teacher"):
            raise InputError(f"teacher={teacher.name} does not go with algorithm={algorithm.name}\n  {reason}")
    if teacher.name == "initial" and algorithm.needs.reference_every:
        raise InputError(
            "teacher=initial is the start model, which is the reference too, and algorithm.reference_every moves it\n"
            "  use teacher=current or a model folder, or remove algorithm.reference_every"
        )
    if teacher.alone:
        algorithm = dataclasses.replace(algorithm, estimator=NoRewards())
    return dataclasses.replace(algorithm, teacher=Teacher(teacher.kl, teacher.coef, teacher.discount))


def check_teacher(config: Config, policy: ModelSource | None, tasks: Sequence[Task], agent: Agent) -> None:
    """Check what can be checked before weights are loaded."""
    teacher = config.teacher
    if teacher.name in SELF:
        if teacher.prompt_template is None:
            raise InputError(
                f"teacher={teacher.name} is the policy itself: it gives no signal unless its prompt contains more than "
                "the policy's\n"
                "  show it more: 'teacher.prompt_template=\"{question} ... {answer}\"'\n"
                "  or for a KL to the start model: algorithm.kl_coef"
            )
        if teacher.url is not None:
            raise InputError(f"teacher={teacher.name} is in this process\n  remove teacher.url, or name its model")
        if policy is not None and policy.adapter is not None and teacher.name == "initial":
            raise InputError(
                f"model={policy.name} is an adapter: with the adapter off it is the base model, not the start policy\n"
                "  merge it into its base model first, or use teacher=current"
            )
    elif teacher.url is not None:
        _check_endpoint(config)
    elif policy is not None:
        _check_model(config, policy)
    if teacher.prompt_template is not None and policy is not None:
        _check_prompts(config, policy, tasks, agent)


def _check_endpoint(config: Config) -> None:
    teacher = config.teacher
    if urlsplit(teacher.url or "").scheme not in ("http", "https"):
        raise InputError(f"teacher.url={teacher.url}: write the full address, http://HOST:PORT/v1")
    if teacher.api_key_env is not None and not os.environ.get(teacher.api_key_env):
        raise Absent(f"teacher.api_key_env={teacher.api_key_env}: no such variable in the environment")
    if config.rollout.temperature != 1:
        raise InputError(
            f"rollout.temperature={config.rollout.temperature:g}, but an endpoint's log-probs are those of temperature "
            "1\n  use rollout.temperature=1, or load the teacher in this process"
        )


def _check_model(config: Config, policy: ModelSource) -> None:
    """The teacher's tokenizer must be the policy's, and its context and output layer at least as large."""
    from covey.learner.forward import check_layers
    from covey.models.loading import open_source

    name = config.teacher.name
    try:
        teacher = open_source(_model_config(config))
    except InputError as error:  # its message does not say which of the two models
        raise type(error)(f"teacher={name}: {str(error).replace('model=/path', 'teacher=/path')}") from error
    check_layers(teacher.config)
    check_same_tokenizer(str(name), teacher.tokenizer, policy.tokenizer)
    sizes = [source.config.get_text_config(decoder=True).vocab_size for source in (teacher, policy)]
    if sizes[0] < sizes[1]:
        raise InputError(
            f"teacher={name} has {sizes[0]} outputs and the policy {sizes[1]}, so it gives some tokens no probability\n"
            "  distillation needs a teacher with at least the policy's outputs"
        )
    limit = config.model.context_length or policy.context_length
    if teacher.context_length is not None and (limit is None or limit > teacher.context_length):
        raise InputError(
            f"teacher={name} reads {teacher.context_length} tokens, and the policy {limit or 'any number'}\n"
            f"  use model.context_length={teacher.context_length}"
        )


def check_same_tokenizer(name: str, teacher: Any, policy: Any) -> None:
    """Raise an error with the first difference between two tokenizers' vocabularies or special tokens."""
    ours, theirs = ({index: token for token, index in one.get_vocab().items()} for one in (policy, teacher))
    for index in sorted(ours.keys() | theirs.keys()):
        if ours.get(index) != theirs.get(index):
            raise _other_tokenizer(name, f"id {index} is {ours.get(index)!r} here and {theirs.get(index)!r} there")
    for role, token in sorted(policy.special_tokens_map.items()):
        other = teacher.special_tokens_map.get(role)
        if role in ("bos_token", "eos_token") and other != token:
            raise _other_tokenizer(name, f"{role} is {token!r} here and {other!r} there")


def _other_tokenizer(name: str, difference: str) -> InputError:
    return InputError(
        f"teacher={name} has another tokenizer than the policy\n  first difference: {difference}\n"
        "  distillation compares log-probs of the same tokens: take a teacher of the policy's family"
    )


def template_text(config: TeacherConfig) -> str:
    """The prompt template, or the text of the file that it names."""
    return text_or_file(config.prompt_template or "")


def _check_prompts(config: Config, policy: ModelSource, tasks: Sequence[Task], agent: Agent) -> None:
    """Every training task must have what the template shows, and room for it in the context."""
    from covey.training.teacher import FIELD, TeacherPrompts

    template = template_text(config.teacher)
    if not FIELD.search(template):
        raise InputError(
            "teacher.prompt_template shows the teacher the same text for every task\n"
            "  name what it may read: {question}, {answer} or a column of the data"
        )
    prompts = TeacherPrompts(template, Renderer(policy.tokenizer), agent)
    limit, answer = config.model.context_length or policy.context_length, config.rollout.max_tokens
    for task in tasks:
        length = len(prompts.prompt(task))
        if limit is not None and length + answer > limit:
            raise InputError(
                f"{task.where}: the teacher's prompt of {length} tokens + rollout.max_tokens={answer} is longer than "
                f"the context of {limit}\n  shorten teacher.prompt_template, or what it shows"
            )


def _model_config(config: Config) -> ModelConfig:
    assert config.teacher.name is not None
    return dataclasses.replace(
        config.model, name=config.teacher.name, dtype=config.teacher.dtype, quantization=None, lora=LoraConfig(),
        gradient_checkpointing=False,
    )  # fmt: skip


def load_teacher(prepared: BuildSpec, start: Reference | None, ranks: Ranks, *, sharded: bool) -> Reference | None:
    """The frozen teacher, in its own precision. `start` is the start policy, if it was loaded. None: none is needed, or
    it is the current policy or behind an endpoint."""
    from covey.models.loading import Reference, load_policy, open_source

    config = prepared.config
    if config.teacher.name == "current" and config.teacher.kl == "full" and sharded:
        raise InputError(
            "teacher=current with teacher.kl=full runs the policy twice in one pass, which sharded weights do not "
            "support\n  use teacher.kl=sampled, or learner.parallel=ddp"
        )
    if config.teacher.name == "initial":
        return start
    if not _is_loaded(config.teacher):
        return None
    source, plan = open_source(_model_config(config)), _model_config(config)
    if ranks.device is not None:
        plan = dataclasses.replace(plan, device="cpu" if sharded else str(ranks.device))
    model = load_policy(source, plan)
    if source.adapter is not None:
        model = model.merge_and_unload()
    return Reference(model, offload=config.learner.offload_reference)


def _is_loaded(teacher: TeacherConfig) -> bool:
    """Whether it is a model of its own in this process."""
    return teacher.name not in (None, *SELF) and teacher.url is None


def teacher_bytes(config: Config, device: torch.device) -> int:
    """Of a teacher that is a model of its own in this process, from its configuration alone; otherwise 0."""
    from covey.models.loading import open_source, parameter_count, pick_dtype

    if not _is_loaded(config.teacher):
        return 0
    model = _model_config(config)
    return parameter_count(open_source(model)) * pick_dtype(model.dtype, device).itemsize


def open_teacher_inputs(
    config: Config, renderer: Renderer, agent: Agent, resources: ExitStack, warn: Callable[[str], None]
) -> TeacherInputs | None:
    """The teacher's own prompts and its endpoint, whose tokenizer is compared with the policy's."""
    teacher = config.teacher
    if teacher.prompt_template is None and teacher.url is None:
        return None
    from covey.training.teacher import TeacherEndpoint, TeacherInputs, TeacherPrompts

    endpoint = None
    if teacher.url is not None:
        endpoint = TeacherEndpoint(teacher, warn)
        resources.callback(endpoint.close)
        endpoint.check_tokenizer(renderer.tokenizer)
    prompts = None
    if teacher.prompt_template is not None:
        prompts = TeacherPrompts(template_text(teacher), renderer, agent)
    return TeacherInputs(prompts, endpoint)
