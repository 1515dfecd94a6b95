"""Everything about a run that can be known and checked before weights are loaded."""

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
    check_prompts,
    check_reference,
    check_sizes,
    digest_objects,
    digest_rewards,
    digest_tasks,
    pick_engine,
    sampling_is_cut,
)
from covey.app.cluster import check_cluster, settle_cluster
from covey.app.parts import (
    check_gateway,
    find_agent,
    find_rewards,
    find_tasks,
    find_world,
    hide_columns,
    make_toolbox,
    sandbox_of,
)
from covey.app.resume import with_model_folder
from covey.config import Composed, fingerprint
from covey.config.schema import Config
from covey.errors import Absent, InputError
from covey.protocols import Agent
from covey.redact import hide_settings
from covey.rewards import RewardSet
from covey.rollout.asynchronous import fresh_groups
from covey.rollout.templates import use_template
from covey.tasks import TaskSet, default_reward, nothing_to_train_on, steps_per_epoch
from covey.telemetry import RunInfo, check_logging
from covey.types import Sampling

if TYPE_CHECKING:  # torch and transformers take seconds to import: only where a model is at hand
    from covey.algorithms import Algorithm
    from covey.models.loading import ModelSource

Found = TypeVar("Found")


@dataclass(frozen=True)
class Prepared:
    """A run that could start: checked, nothing loaded. In `config`, rollout.name is the engine that was chosen."""

    config: Config
    tree: dict[str, Any]
    overrides: tuple[str, ...]
    fingerprint: str
    contents: dict[str, str]  # hashes of what settings only name: tasks and rewards
    tasks: TaskSet
    rewards: RewardSet
    agent: Agent
    algorithm: Algorithm
    model: ModelSource | None  # None where validation goes on without it
    total_steps: int
    warnings: tuple[str, ...]
    folder: Path | None = None  # where to write; None: output_dir/DATE/TIME
    engine_reason: str = ""  # why rollout=auto chose its engine
    command: str = "train"
    absent: tuple[str, ...] = ()  # what is not on this machine, where a check goes on without it
    refused: int = 0  # of the warnings, those for which a run would be refused

    @property
    def trained_reward(self) -> str:
        """The reward that eval/accuracy stands for: the heaviest, the first among equals."""
        return max(self.rewards.names, key=lambda name: self.rewards.weights[name])

    @property
    def task_name(self) -> str:
        """Short, for titles: the counts behind the colon are left out."""
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


class Missing:
    """What is not on this machine (files, a GPU, a model of the hub), collected so that it is reported together."""

    def __init__(self) -> None:
        self.texts: dict[str, None] = {}  # in order, each once

    def unless_absent(self, step: Callable[[], Found]) -> Found | None:
        try:
            return step()
        except Absent as error:
            self.texts[str(error)] = None
            return None

    def warnings(self, *, tolerate: bool) -> list[str]:
        """A run cannot start without it; a check goes on, as another machine may have it."""
        if self.texts and not tolerate:
            raise Absent("\n".join(self.texts))
        return [f"not here: {text}" for text in self.texts]


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
    """Check all that configuration and files can tell. What is not on this machine is reported together at the end;
    with `tolerate_absent`, as warnings: another machine may have it. Tasks, reward, agent, tools and tokenizer may be
    given as objects, in place of what the settings name."""
    composed = with_model_folder(composed)
    config, missing = composed.config, Missing()
    make_algorithm(config)  # refuses settings that contradict each other before anything is looked for
    sandbox = sandbox_of(config)
    toolbox = missing.unless_absent(lambda: make_toolbox(config, sandbox, tools))
    missing.unless_absent(lambda: check_logging(config.logging))
    world = missing.unless_absent(lambda: find_world(config))
    found = _tasks(config, tasks or missing.unless_absent(lambda: find_tasks(config, world)), training=training)
    source = missing.unless_absent(lambda: open_model(config, tokenizer))
    placed, reason, remarks = _place(config, source, missing, training=training)
    algorithm = make_algorithm(placed)
    _check_models(placed, algorithm, source, missing, training=training)
    player = find_agent(placed, toolbox, source, world, agent)
    own = getattr(player, "reward", None) or found.reward  # an environment says itself what an episode is worth
    rewards = find_rewards(placed, reward, own, sandbox)
    hide_columns(player, rewards)
    missing.unless_absent(rewards.verify)
    remarks += [*found.warnings, *check_algorithm(placed, algorithm, rewards), *check_sizes(placed, found)]
    missing.unless_absent(lambda: rewards.check_all((*found.train, *found.validation)))
    if source is not None:
        check_prompts(placed, found, source, player)
    lacking = missing.warnings(tolerate=tolerate_absent)
    contents = {
        "training tasks": digest_tasks(found.train),
        "validation tasks": digest_tasks(found.validation),
        "rewards": digest_rewards(rewards),
    }
    contents |= digest_objects(
        agent=agent, tools=tools, tokenizer=tokenizer, algorithm=own_class(config.algorithm.name)
    )
    return Prepared(
        config=placed,
        tree=composed.tree,
        overrides=composed.overrides,
        fingerprint=fingerprint(composed.tree | contents),
        contents=contents,
        tasks=found,
        rewards=rewards,
        agent=player,
        algorithm=algorithm,
        model=source,
        total_steps=total_steps(placed, len(found.train)),
        warnings=(*composed.warnings, *remarks, *lacking),
        folder=folder,
        engine_reason=reason,
        absent=tuple(missing.texts),
        refused=composed.refused,
    )


def _tasks(config: Config, found: TaskSet | None, *, training: bool) -> TaskSet:
    """The tasks; none where their files are not here."""
    if found is None:
        return TaskSet((), (), reward=default_reward(config.data), description="(files not here)")
    if training and not found.train:
        raise nothing_to_train_on(config.data)
    return found


def _place(
    config: Config, source: ModelSource | None, missing: Missing, *, training: bool
) -> tuple[Config, str, list[str]]:
    """The configuration with the engine and the cluster that are used, why that engine, and remarks about both."""
    engine, reason = pick_engine(config, source)
    config = dataclasses.replace(config, rollout=dataclasses.replace(config.rollout, name=engine))
    placed, remarks = settle_cluster(config)
    remarks = [*remarks, *(missing.unless_absent(lambda: check_engine(placed)) or [])]
    if training:
        missing.unless_absent(lambda: check_cluster(placed))
    if training and placed.agent.name == "gateway":
        missing.unless_absent(lambda: check_gateway(placed))
    return placed, reason, remarks


def _check_models(
    config: Config, algorithm: Algorithm, source: ModelSource | None, missing: Missing, *, training: bool
) -> None:
    """The chat template that is asked for, and what training needs besides the policy: a critic, a reference."""
    if training and algorithm.needs.values and config.critic.model is not None:
        missing.unless_absent(lambda: check_critic(config, source))
    if training and source is not None:
        check_reference(source, algorithm)
    if source is not None:
        use_template(source.tokenizer, config.agent.template)


def own_class(name: str) -> type | None:
    """The class behind `algorithm=file.py:Class`; None for the algorithms of the catalogue."""
    from covey.algorithms.assemble import is_custom, load_custom

    return load_custom(name) if is_custom(name) else None


def make_algorithm(config: Config) -> Algorithm:
    from covey.algorithms import make

    options = dataclasses.asdict(config.algorithm)
    if options.get("correction") == "auto":
        older = ahead(config) and config.mode.max_staleness > 0
        differs = older or sampling_is_cut(config) or config.rollout.name == "vllm"
        options["correction"] = "token" if differs else "none"
    try:
        return make(options.pop("name"), **options)
    except InputError:
        raise
    except ValueError as error:  # a value that the algorithm itself refuses
        raise InputError(str(error)) from error


def open_model(config: Config, tokenizer: Any = None) -> ModelSource:
    """Tokenizer and configuration of the model, and whether it can run here as asked. A tokenizer that is given takes
    the place of the model's own, with another chat template for example."""
    from covey.models.adapters import require_peft
    from covey.models.loading import open_source, pick_device

    pick_device(config.model.device)
    if config.model.lora.rank > 0:
        require_peft()
    source = open_source(config.model)
    from covey.learner.forward import check_layers  # not before: its imports take seconds, and there may be no model

    check_layers(source.config)
    if tokenizer is None:
        return source
    if tokenizer.get_vocab() != source.tokenizer.get_vocab():
        raise InputError(
            f"tokenizer= has another vocabulary than that of the model {config.model.name}\n"
            "  fix: AutoTokenizer.from_pretrained(MODEL), or give a loaded model whose embeddings fit"
        )
    return dataclasses.replace(source, tokenizer=copy.deepcopy(tokenizer))  # agent.template may change it


def check_critic(config: Config, policy: ModelSource | None) -> None:
    """critic.model must read the policy's tokens."""
    from covey.models.loading import open_source

    named = dataclasses.replace(config.model, name=config.critic.model or config.model.name)
    critic = open_source(named, headless=True)
    if critic.adapter is not None:
        raise InputError(f"critic.model={config.critic.model} is an adapter\n  give a whole model")
    sizes = [len(source.tokenizer) for source in (critic, policy or critic)]
    if sizes[0] != sizes[1]:
        raise InputError(
            f"critic.model={config.critic.model} has {sizes[0]} tokens and the policy {sizes[1]}\n"
            "  the critic reads the policy's tokens: give a model with the same tokenizer"
        )


def total_steps(config: Config, tasks: int) -> int:
    if config.loop.total_steps is not None:
        return config.loop.total_steps
    return (config.loop.total_epochs or 1) * steps_per_epoch(max(tasks, 1), new_tasks(config))


def new_tasks(config: Config) -> int:
    """Of a step; the rest of its groups, in mode=async with mode.max_uses, are of former steps."""
    return fresh_groups(config.data.train_batch_size, config.mode.max_uses if ahead(config) else 1)


def ahead(config: Config) -> bool:
    """Whether sampling goes on while the learner learns."""
    return config.mode.name == "async"


def training_sampling(config: Config) -> Sampling:
    r = config.rollout
    return Sampling(r.temperature, r.top_p, r.top_k, r.min_p, r.max_tokens, tuple(r.stop))
