"""Prepares a run: resolves and checks everything that can be checked before weights are loaded."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from covey.app.checks import (
    check_algorithm,
    check_engine,
    check_opponents,
    check_prompts,
    check_reference,
    check_roles,
    check_sizes,
    check_training,
    check_vision,
    digest_objects,
    digest_rewards,
    digest_tasks,
    pick_engine,
    resolve_offload,
    sampling_is_cut,
    unused_settings,
)
from covey.app.cluster import check_cluster, resolve_cluster
from covey.app.models import LongestRow
from covey.app.parts import (
    check_browser,
    check_gateway,
    find_agent,
    find_environment,
    find_rewards,
    find_tasks,
    hide_reward_columns,
    is_environment_missing,
    lazy_sandbox,
    make_toolbox,
)
from covey.app.resume import with_model_folder
from covey.app.run_files import PreparedRun
from covey.app.teacher import check_teacher, with_teacher
from covey.config import Composed, fingerprint
from covey.config.schema import Config
from covey.errors import Absent, InputError
from covey.protocols import Agent
from covey.redact import hide_settings
from covey.rewards import RewardSet
from covey.rollout.asynchronous import fresh_groups
from covey.rollout.templates import use_template
from covey.tasks import TaskSet, default_reward, nothing_to_train_on, steps_per_epoch
from covey.tasks.curriculum import Curriculum, sampler_options, task_buckets, unused_levels
from covey.telemetry import RunInfo, check_logging
from covey.types import Sampling, Task

if TYPE_CHECKING:  # torch and transformers take seconds to import
    from covey.algorithms import Algorithm
    from covey.models.loading import ModelSource

T = TypeVar("T")


@dataclass(frozen=True, kw_only=True)
class Prepared(PreparedRun):
    """A run of covey train. config.rollout.name is the chosen engine."""

    command = "train"

    tasks: TaskSet
    rewards: RewardSet
    agent: Agent
    algorithm: Algorithm
    longest_prompt: int = 0  # tokens, of the training tasks

    @property
    def trained_reward(self) -> str:
        """The reward that eval/accuracy measures: the first one with the largest weight."""
        return max(self.rewards.names, key=lambda name: self.rewards.weights[name])

    @property
    def task_count(self) -> int:
        return len(self.tasks.train)

    @property
    def longest_row(self) -> LongestRow:
        agent, rollout = self.config.agent, self.config.rollout
        if agent.max_response_tokens is not None:
            return LongestRow(self.longest_prompt, agent.max_response_tokens, "agent.max_response_tokens")
        return LongestRow(self.longest_prompt, rollout.max_tokens)

    @property
    def task_name(self) -> str:
        """A short name for titles: the description without the counts after the colon."""
        return self.tasks.description.split(":")[0]

    def info(self, path: Path, first_step: int) -> RunInfo:
        config = self.config
        return RunInfo(
            folder=path,
            title=f"{config.logging.project}/{config.logging.experiment}",
            algorithm=config.algorithm.name,
            model=config.model.name,
            task=self.task_name,
            total_steps=self.total_steps,
            first_step=first_step,
            reward_names=self.rewards.names,
            trained_reward=self.trained_reward,
            config=hide_settings(self.tree),
            held_out=len(self.tasks.validation),
        )


class MissingResources:
    """Collects errors about missing files, GPUs and models of the hub, so that they are reported together."""

    def __init__(self) -> None:
        self.messages: dict[str, None] = {}  # ordered, without duplicates

    def collect(self, step: Callable[[], T]) -> T | None:
        """The result of a step; None if it raised Absent."""
        try:
            return step()
        except Absent as error:
            self.messages[str(error)] = None
            return None

    def warnings(self, *, tolerate: bool) -> list[str]:
        """Warnings for a check (another machine may have the resources); an error for a run."""
        if self.messages and not tolerate:
            raise Absent("\n".join(self.messages))
        return [f"not on this machine: {text}" for text in self.messages]


def prepare(
    composed: Composed,
    *,
    tasks: TaskSet | None = None,
    reward: Any = None,
    agent: Any = None,
    tools: Sequence[Any] = (),
    tokenizer: Any = None,
    folder: Path | None = None,
    training: bool = True,
    tolerate_absent: bool = False,
) -> Prepared:
    """Check everything that can be checked from the configuration and the files.

    Missing files, packages and devices are reported together at the end: as an error, or with `tolerate_absent` as
    warnings. Tasks, reward, agent, tools and tokenizer may be objects, in place of what the settings name.
    """
    composed = with_model_folder(composed)
    config, missing = composed.config, MissingResources()
    make_algorithm(config)  # first: raises if settings contradict each other
    sandbox = lazy_sandbox(config)
    toolbox = missing.collect(lambda: make_toolbox(config, sandbox, tools))
    missing.collect(lambda: check_logging(config.logging))
    environment = missing.collect(lambda: find_environment(config))
    task_set = _open_tasks(config, environment, tasks, missing, training=training)
    source = missing.collect(lambda: open_model(config, tokenizer))
    config, reason, warnings = _resolve_devices(config, source, missing, training=training)
    algorithm = make_algorithm(config)
    _check_models(config, source, algorithm, missing, training=training)
    check_vision(config, source, [(task.where, task.messages) for task in (*task_set.train, *task_set.validation)])
    player = find_agent(config, toolbox, source, environment, agent)
    if training:
        check_opponents(config, source, custom=agent is not None)
        if not is_environment_missing(config, environment):
            check_roles(config, player)
        warnings += unused_settings(config, source, composed.overrides)
    task_reward = getattr(player, "reward", None) or task_set.reward  # environments have a reward of their own
    rewards = find_rewards(config, reward, task_reward, sandbox)
    hide_reward_columns(player, rewards)
    missing.collect(rewards.verify)
    warnings += [*task_set.warnings, *check_algorithm(config, algorithm, rewards)]
    warnings += check_sizes(config, task_set.train, task_set.validation, "training tasks")
    warnings += _check_sampler(config, task_set.train if training else ())
    missing.collect(lambda: rewards.check_all((*task_set.train, *task_set.validation)))
    longest = missing.collect(lambda: check_prompts(config, task_set, source, player)) or 0
    if training and config.teacher.name is not None:
        missing.collect(lambda: check_teacher(config, source, task_set.train, player))
    warnings += missing.warnings(tolerate=tolerate_absent)
    objects = {"agent": agent, "tools": tools, "tokenizer": tokenizer}
    contents = _digests(task_set, rewards, **objects, algorithm=user_algorithm_class(config.algorithm.name))
    return Prepared(
        config=config,
        tree=composed.tree,
        overrides=composed.overrides,
        fingerprint=fingerprint(composed.tree | contents),
        contents=contents,
        tasks=task_set,
        rewards=rewards,
        agent=player,
        algorithm=algorithm,
        model=source,
        total_steps=total_steps(config, len(task_set.train)),
        warnings=(*composed.warnings, *warnings),
        folder=folder,
        engine_reason=reason,
        absent=tuple(missing.messages),
        rejected=composed.rejected,
        longest_prompt=longest,
    )


def _open_tasks(
    config: Config, environment: Any, tasks: TaskSet | None, missing: MissingResources, *, training: bool
) -> TaskSet:
    """The tasks that were given, or those of the settings; none if their files are missing."""
    if tasks is None and is_environment_missing(config, environment):
        return TaskSet((), (), reward="given", description="(the environment is not here)")
    found = tasks or missing.collect(lambda: find_tasks(config, environment))
    if found is None:
        found = TaskSet((), (), reward=default_reward(config.data), description="(files not here)")
    elif training and not found.train:
        raise nothing_to_train_on(config.data)
    missing.collect(lambda: check_browser(config, found))
    return found


def _check_models(
    config: Config, source: ModelSource | None, algorithm: Algorithm, missing: MissingResources, *, training: bool
) -> None:
    """Check the policy and the critic, and give the policy's tokenizer the chat template of the settings."""
    if training and algorithm.needs.values and config.critic.model is not None:
        missing.collect(lambda: check_critic(config, source))
    if source is None:
        return
    if training:
        check_reference(source, algorithm)
        missing.collect(lambda: check_training(config, adapter=source.adapter is not None))
    use_template(source.tokenizer, config.agent.template)


def _check_sampler(config: Config, tasks: Sequence[Task]) -> list[str]:
    """Check the options of the task sampler, and that `tasks`, if there are any, have its column. Returns warnings."""
    options = sampler_options(config.data)
    if config.data.sampler != "buckets" or not tasks:
        return []
    task_buckets(tasks, options, total_steps(config, len(tasks)))
    return unused_levels(tasks, options)


def _digests(tasks: TaskSet, rewards: RewardSet, **objects: Any) -> dict[str, str]:
    """Hashes of what settings refer to by name."""
    found = {
        "training tasks": digest_tasks(tasks.train),
        "validation tasks": digest_tasks(tasks.validation),
        "rewards": digest_rewards(rewards),
    }
    return found | digest_objects(**objects)


def _resolve_devices(
    config: Config, source: ModelSource | None, missing: MissingResources, *, training: bool
) -> tuple[Config, str, list[str]]:
    """The configuration with the chosen engine and the resolved cluster, the reason for the engine, and warnings."""
    engine, reason = pick_engine(config, source)
    config = dataclasses.replace(config, rollout=dataclasses.replace(config.rollout, name=engine))
    config, warnings = resolve_cluster(config)
    warnings = [*warnings, *(missing.collect(lambda: check_engine(config)) or [])]
    config, idle = missing.collect(lambda: resolve_offload(config)) or (config, [])
    warnings += idle
    if training:
        missing.collect(lambda: check_cluster(config))
    if training and config.agent.name == "gateway":
        missing.collect(lambda: check_gateway(config))
    return config, reason, warnings


def user_algorithm_class(name: str) -> type | None:
    """The class of `algorithm=file.py:Class`; None for the algorithms of the catalogue."""
    from covey.algorithms.assemble import is_custom, load_custom

    return load_custom(name) if is_custom(name) else None


def make_algorithm(config: Config) -> Algorithm:
    from covey.algorithms import find_losses, make

    options = dataclasses.asdict(config.algorithm)
    if options.get("correction") == "auto":
        stale = is_async(config) and config.mode.max_staleness > 0
        off_policy = stale or sampling_is_cut(config) or config.rollout.name == "vllm"
        weighs = getattr(find_losses(options["name"])[options["loss"]].objective, "weighs_sampler", False)
        options["correction"] = "token" if off_policy and not weighs else "none"
    try:
        return with_teacher(make(options.pop("name"), **options), config)
    except InputError:
        raise
    except ValueError as error:  # raised by the algorithm itself
        raise InputError(str(error)) from error


def open_model(config: Config, tokenizer: Any = None) -> ModelSource:
    """The model's tokenizer and configuration, after checking that it can run on this machine. `tokenizer` replaces the
    model's own, for example for another chat template."""
    from covey.models.adapters import require_peft
    from covey.models.loading import open_source, pick_device

    pick_device(config.model.device)
    if config.model.lora.rank > 0:
        require_peft()
    source = open_source(config.model)
    from covey.learner.forward import check_layers  # only now: importing it takes seconds

    check_layers(source.config)
    if tokenizer is None:
        return source
    if tokenizer.get_vocab() != source.tokenizer.get_vocab():
        raise InputError(
            f"tokenizer= has another vocabulary than that of the model {config.model.name}\n"
            "  fix: AutoTokenizer.from_pretrained(MODEL), or pass a loaded model whose embeddings fit"
        )
    return dataclasses.replace(source, tokenizer=copy.deepcopy(tokenizer))  # agent.template may change it


def check_critic(config: Config, policy: ModelSource | None) -> None:
    """Check that critic.model has the policy's vocabulary size and is not an adapter."""
    from covey.models.loading import open_source

    named = dataclasses.replace(config.model, name=config.critic.model or config.model.name)
    critic = open_source(named, headless=True)
    if critic.adapter is not None:
        raise InputError(f"critic.model={config.critic.model} is an adapter\n  give a full model")
    sizes = [len(source.tokenizer) for source in (critic, policy or critic)]
    if sizes[0] != sizes[1]:
        raise InputError(
            f"critic.model={config.critic.model} has {sizes[0]} tokens and the policy {sizes[1]}\n"
            "  the critic reads the policy's tokens: give a model with the same tokenizer"
        )


def total_steps(config: Config, tasks: int) -> int:
    if config.loop.total_steps is not None:
        return config.loop.total_steps
    return (config.loop.total_epochs or 1) * steps_per_epoch(max(tasks, 1), new_tasks_per_step(config))


def new_tasks_per_step(config: Config) -> int:
    """With mode.max_uses, the other groups of a step are reused from former steps."""
    return fresh_groups(config.data.train_batch_size, config.mode.max_uses if is_async(config) else 1)


def make_curriculum(prepared: Prepared) -> Curriculum | None:
    config = prepared.config
    if config.data.sampler == "uniform":
        return None
    return Curriculum(
        prepared.tasks.train,
        config.data,
        new_tasks_per_step(config),
        seed=config.seed,
        steps=prepared.total_steps,
        reward=prepared.trained_reward,
    )


def is_async(config: Config) -> bool:
    return config.mode.name == "async"


def training_sampling(config: Config) -> Sampling:
    r = config.rollout
    return Sampling(r.temperature, r.top_p, r.top_k, r.min_p, r.max_tokens, tuple(r.stop))
