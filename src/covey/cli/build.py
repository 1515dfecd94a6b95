"""The one place where parts are wired together.

prepare(composed)   everything that can be known and checked before weights are loaded
build(prepared)     the run: model, engine, learner, loop
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Collection, Sequence
from concurrent.futures import Executor, ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from covey.cli.agents import (
    find_agent,
    find_rewards,
    find_tasks,
    find_world,
    make_toolbox,
    open_rewards,
    open_workers,
    sandbox_of,
    with_workers,
)
from covey.cli.checks import (
    check_algorithm,
    check_engine,
    check_prompts,
    check_reference,
    check_sizes,
    digest_rewards,
    digest_tasks,
    engine_gpus,
    pick_engine,
    sampling_is_cut,
    shares_gpu,
)
from covey.cli.cluster import check_cluster, settle_cluster, start_remote
from covey.cli.engine import make_engine
from covey.cli.folder import Startable, as_it_began, open_run, store, threads_for, write_run_files
from covey.cli.gateway import check_gateway, hide_columns, services
from covey.cli.learner import make_learner
from covey.config import Composed, fingerprint
from covey.config.schema import Config
from covey.errors import Absent, InputError
from covey.gateway import GatewayAgent
from covey.protocols import Agent, Learner, RolloutEngine
from covey.redact import hide_settings
from covey.rewards import RewardSet
from covey.rollout.reuse import fresh_groups
from covey.rollout.templates import use_template
from covey.tasks import (
    TaskSet,
    batch_for_step,
    default_reward,
    fresh_tasks,
    nothing_to_train_on,
    steps_per_epoch,
)
from covey.telemetry import RunInfo, check_logging
from covey.types import Sampling, Task
from covey.workers import WorkerPool

if TYPE_CHECKING:  # torch and transformers take seconds to import: only where a model is at hand
    from covey.algorithms import Algorithm
    from covey.learner.models import ModelSource
    from covey.loop.checkpoint import Checkpoint
    from covey.loop.evaluate import Evaluator
    from covey.loop.folder import RunFolder
    from covey.loop.run import Run
    from covey.rollout.collector import Collector, Refill, TrainingSource
    from covey.telemetry import Telemetry

Note = Callable[[str], None]
Found = TypeVar("Found")


def algorithm_schemas() -> dict[str, type]:
    from covey.algorithms import ALGORITHMS, schema

    return {name: schema(name) for name in ALGORITHMS}


@dataclass(frozen=True)
class Prepared:
    """A run that could start: checked, nothing loaded. In `config`, rollout.name is the engine that was chosen."""

    config: Config
    tree: dict[str, Any]
    overrides: tuple[str, ...]
    fingerprint: str
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


def prepare(
    composed: Composed,
    *,
    tasks: TaskSet | None = None,
    reward: Any = None,
    folder: Path | None = None,
    training: bool = True,
    tolerate_absent: bool = False,
) -> Prepared:
    """Check all that configuration and files can tell. With `tolerate_absent`, what only another machine has (files, a
    GPU, a model of the hub) becomes a warning."""
    config, warnings = composed.config, list(composed.warnings)

    def unless_absent(step: Callable[[], Found]) -> Found | None:
        try:
            return step()
        except Absent as error:
            if not tolerate_absent:
                raise
            warnings.append(f"not here: {error}")
            return None

    algorithm = make_algorithm(config)
    training_sampling(config)  # refuses impossible settings
    sandbox = sandbox_of(config)
    toolbox = unless_absent(lambda: make_toolbox(config, sandbox))
    unless_absent(lambda: check_logging(config.logging))
    world = unless_absent(lambda: find_world(config))
    found = tasks or unless_absent(lambda: find_tasks(config, world))
    if training and found is not None and not found.train:
        raise nothing_to_train_on(config.data)
    found = found or TaskSet((), (), reward=default_reward(config.data), description="(files not here)")
    source = unless_absent(lambda: open_model(config))
    engine, reason = pick_engine(config, source)
    config = dataclasses.replace(config, rollout=dataclasses.replace(config.rollout, name=engine))
    config, said = settle_cluster(config)
    warnings += [*said, *(unless_absent(lambda: check_engine(config)) or [])]
    if training:
        unless_absent(lambda: check_cluster(config))
    algorithm = make_algorithm(config)
    if training and algorithm.needs.values and config.critic.model is not None:
        unless_absent(lambda: check_critic(config, source))
    if training and source is not None:
        check_reference(source, algorithm)
    if source is not None:
        use_template(source.tokenizer, config.agent.template)
    agent = find_agent(config, toolbox, source, world)
    if config.agent.name == "gateway" and training:
        unless_absent(lambda: check_gateway(config))
    own = getattr(agent, "reward", None) or found.reward  # an environment says itself what an episode is worth
    rewards = find_rewards(config, reward, own, sandbox)
    hide_columns(agent, rewards)
    unless_absent(rewards.verify)
    warnings += [*found.warnings, *check_algorithm(config, algorithm, rewards), *check_sizes(config, found)]
    unless_absent(lambda: rewards.check_all((*found.train, *found.validation)))
    if source is not None:
        check_prompts(config, found, source, agent)
    return Prepared(
        config=config,
        tree=composed.tree,
        overrides=composed.overrides,
        fingerprint=fingerprint(composed.tree | {"tasks": digest_tasks(found), "rewards": digest_rewards(rewards)}),
        tasks=found,
        rewards=rewards,
        agent=agent,
        algorithm=algorithm,
        model=source,
        total_steps=total_steps(config, len(found.train)),
        warnings=tuple(warnings),
        folder=folder,
        engine_reason=reason,
    )


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


def open_model(config: Config) -> ModelSource:
    """Tokenizer and configuration of the model, and whether it can run here as asked."""
    from covey.learner.forward import check_layers
    from covey.learner.models import open_source, pick_device, require_peft

    pick_device(config.model.device)
    if config.model.lora.rank > 0:
        require_peft()
    source = open_source(config.model)
    check_layers(source.config)
    return source


def check_critic(config: Config, policy: ModelSource | None) -> None:
    """critic.model must read the policy's tokens."""
    from covey.learner.models import open_source

    critic = open_source(dataclasses.replace(config.model, name=config.critic.model or config.model.name))
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


def build(prepared: Prepared, *, note: Note) -> Run:
    """Load the model and join the parts; on resume, from the checkpoint. What lasts is closed with the run."""
    with ExitStack() as resources:
        workers = open_workers(prepared.agent, prepared.rewards, resources)
        prepared = dataclasses.replace(prepared, agent=with_workers(prepared.agent, workers))
        return _build(prepared, workers, resources, note)


def continuing(prepared: Prepared, folder: Path) -> Prepared:
    """The same run once more: from the last checkpoint in its folder, or anew where there is none."""
    prepared = dataclasses.replace(prepared, algorithm=make_algorithm(prepared.config))  # it remembers the run so far
    if not list((folder / "checkpoints").glob("step-*")):
        return prepared
    config = dataclasses.replace(prepared.config, resume=str(folder))
    return dataclasses.replace(prepared, folder=None, config=config)


def _build(prepared: Prepared, workers: WorkerPool | None, resources: ExitStack, note: Note) -> Run:
    folder, checkpoint = open_run(prepared, note)
    try:
        return _joined(prepared, folder, checkpoint, workers, resources)
    except BaseException:
        folder.release()  # who tries again finds it free
        raise


def _joined(
    prepared: Prepared,
    folder: RunFolder,
    checkpoint: Checkpoint | None,
    workers: WorkerPool | None,
    resources: ExitStack,
) -> Run:
    import torch

    from covey.loop.run import Run
    from covey.loop.step import Road

    config = prepared.config
    if checkpoint is not None:
        prepared = dataclasses.replace(prepared, model=as_it_began(prepared.model, config, folder))
    threads = threads_for(config, folder if checkpoint is not None else None)
    torch.set_num_threads(threads)
    checkpoints = store(config, folder.path)
    rewards = open_rewards(config, prepared.rewards, workers, resources)
    learner, open_engine = _learner_and_engine(prepared, checkpoint, folder.path, threads, resources)
    write_run_files(prepared, folder, learner, threads, resumed=checkpoint is not None)
    telemetry = open_telemetry(prepared, folder.path, checkpoint)
    engine = open_engine(telemetry)
    collector = make_collector(prepared, engine, rewards)
    source = _make_source(prepared, collector)
    first_step = checkpoint.step if checkpoint is not None else 0
    if checkpoint is not None:
        source.restore(checkpoint.state["source"], first_step)
    if isinstance(prepared.agent, GatewayAgent) and "console" in config.logging.to:
        prepared.agent.announce = telemetry.note
    return Run(
        config=config,
        folder=folder,
        road=Road(
            source,
            learner,
            prepared.algorithm,
            engine,
            _schedule(prepared),
            telemetry,
            _own_thread(resources) if ahead(config) else None,
            publish_every(config),
        ),
        learner=learner,
        engine=engine,
        source=source,
        evaluator=make_evaluator(prepared, collector, telemetry.warn) if prepared.tasks.validation else None,
        telemetry=telemetry,
        checkpoints=checkpoints,
        tokenizer=collector.renderer.tokenizer,
        total_steps=prepared.total_steps,
        first_step=first_step,
        best=checkpoint.state["best"] if checkpoint is not None else None,
        services=services(prepared.agent),
        resources=resources.pop_all(),
    )


def _own_thread(resources: ExitStack) -> Executor:
    """Always the same one: every thread that computes brings its own workers and buffers, and keeps them."""
    thread = ThreadPoolExecutor(1, thread_name_prefix="covey-learner")
    resources.callback(thread.shutdown)
    return thread


def _learner_and_engine(
    prepared: Prepared, checkpoint: Checkpoint | None, path: Path, threads: int, resources: ExitStack
) -> tuple[Learner, Callable[[Telemetry], RolloutEngine]]:
    """The learner; and the engine, as soon as somebody can be told of its troubles. In this process, or in others."""
    if prepared.config.cluster.name != "ray":
        learner = make_learner(prepared, checkpoint)
        return learner, lambda telemetry: make_engine(prepared, learner.model, log=path / "vllm.log")
    remote = start_remote(prepared, checkpoint, path, threads, resources)

    def told(telemetry: Telemetry) -> RolloutEngine:
        remote.engine.tell(telemetry.warn)
        for text in remote.notes:
            telemetry.note(text)
        return remote.engine

    return remote.learner, told


def make_collector(prepared: Prepared, engine: RolloutEngine, rewards: RewardSet) -> Collector:
    from covey.rollout.collector import Collector
    from covey.rollout.rendering import Renderer

    source, config = prepared.model, prepared.config
    assert source is not None
    return Collector(
        engine,
        Renderer(source.tokenizer),
        prepared.agent,
        rewards,
        config.seed,
        config.agent.max_seconds,
        max_response_tokens=config.agent.max_response_tokens,
        context_length=config.model.context_length or source.context_length,
    )


def make_evaluator(prepared: Prepared, collector: Collector, warn: Note) -> Evaluator:
    from covey.loop.evaluate import Evaluator

    config = prepared.config
    return Evaluator(
        collector,
        prepared.tasks.validation,
        config.eval,
        max_tokens=config.eval.max_tokens or config.rollout.max_tokens,
        stop=tuple(config.rollout.stop),
        trained_reward=prepared.trained_reward,
        warn=warn,
    )


def _make_source(prepared: Prepared, collector: Collector) -> TrainingSource:
    from covey.rollout.collector import TrainingSource

    config = prepared.config

    def batch(step: int) -> Sequence[Task]:
        shuffle = config.data.shuffle
        return batch_for_step(prepared.tasks.train, step, new_tasks(config), seed=config.seed, shuffle=shuffle)[1]

    needs = prepared.algorithm.needs
    parts: dict[str, Any] = {
        "attempts": config.rollout.group_size,
        "sampling": training_sampling(config),
        "min_group_size": needs.min_group_size,
        "greedy_baseline": needs.greedy_baseline,
        "refill": _make_refill(prepared),
    }
    if not ahead(config):
        return TrainingSource(collector, batch, **parts)
    from covey.rollout.background import BackgroundSource
    from covey.rollout.reuse import Reuse

    lead, uses = config.mode.max_staleness, config.mode.max_uses
    reuse = Reuse(config.data.train_batch_size, uses, lead, config.seed) if uses > 1 else None
    return BackgroundSource(collector, batch, lead=lead, steps=prepared.total_steps, reuse=reuse, **parts)


def publish_every(config: Config) -> int:
    """Weights of an engine that shares the learner's GPU leave it with every sleep: it needs them each time."""
    local = config.cluster.name == "local"
    shared = shares_gpu(config, engine_gpus(config)) if local else config.cluster.rollout_devices is None
    asleep = config.rollout.name == "vllm" and config.rollout.sleep and shared
    return config.mode.publish_every if ahead(config) and not asleep else 1


def ahead(config: Config) -> bool:
    """Whether sampling goes on while the learner learns."""
    return config.mode.name == "async"


def _make_refill(prepared: Prepared) -> Refill | None:
    from covey.rollout.collector import Refill

    wanted = prepared.algorithm.filter
    if not wanted.filter_groups:
        return None
    trained = {name: weight for name, weight in prepared.rewards.weights.items() if weight != 0}
    counted = {wanted.filter_metric: 1.0} if wanted.filter_metric else trained

    def fresh(step: int, round: int, count: int, tried: Collection[str]) -> Sequence[Task]:
        return fresh_tasks(prepared.tasks.train, step, round, count, seed=prepared.config.seed, tried=tried)

    return Refill(counted, prepared.algorithm.sees_rewards_apart, wanted.max_refills, fresh)


def open_telemetry(prepared: Startable, path: Path, checkpoint: Checkpoint | None) -> Telemetry:
    from covey.telemetry import Telemetry

    state = checkpoint.state if checkpoint is not None else {}
    first_step = state.get("step", 0)
    telemetry = Telemetry.open(
        prepared.info(path, first_step),
        prepared.config.logging,
        metrics_offset=state.get("metrics_offset"),
        episodes_offset=state.get("episodes_offset"),
    )
    for text in prepared.warnings:
        telemetry.warn(text)
    if prepared.engine_reason:
        telemetry.note(f"rollout={prepared.config.rollout.name}: {prepared.engine_reason}")
    if first_step:
        telemetry.note(f"resumed at step {first_step} of {prepared.total_steps} in {path}")
    return telemetry


def training_sampling(config: Config) -> Sampling:
    r = config.rollout
    try:
        return Sampling(r.temperature, r.top_p, r.top_k, r.min_p, r.max_tokens, tuple(r.stop))
    except ValueError as error:
        raise InputError(f"rollout: {error}") from error


def _schedule(prepared: Prepared) -> Any:
    from covey.loop.step import Schedule

    config = prepared.config
    return Schedule(
        groups_per_batch=config.learner.mini_batch_size,
        epochs=config.learner.epochs,
        weights=dict(prepared.rewards.weights),
        temperature=config.rollout.temperature,
        max_tokens=config.rollout.max_tokens,
    )
