"""Builds a prepared run: loads the model and connects engine, learner, collector, evaluator and telemetry."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Collection, Sequence
from concurrent.futures import Executor, ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Any

from covey.app.checks import engine_gpus, shares_gpu
from covey.app.cluster import start_remote
from covey.app.models import PLANNING, copy_policy, make_embedded, make_engine, make_learner, plan_memory
from covey.app.parts import Announces, open_rewards, open_workers, service_of, with_workers
from covey.app.prepare import (
    Prepared,
    is_async,
    make_algorithm,
    make_curriculum,
    new_tasks_per_step,
    training_sampling,
)
from covey.app.resume import open_run
from covey.app.run_files import PreparedRun, at_original_revision, store, threads_for, write_run_files
from covey.app.teacher import open_teacher_inputs
from covey.config.schema import Config
from covey.protocols import Learner, RolloutEngine
from covey.rewards import RewardSet
from covey.tasks import batch_for_step, fresh_tasks
from covey.types import Task
from covey.workers import WorkerPool

if TYPE_CHECKING:  # torch and transformers take seconds to import
    from covey.rollout.collector import Collector, Refill, TrainingSource
    from covey.rollout.opponents import Opponents
    from covey.tasks.curriculum import Curriculum
    from covey.telemetry import Telemetry
    from covey.training.checkpoint import Checkpoint
    from covey.training.evaluate import Evaluator
    from covey.training.folder import RunFolder
    from covey.training.run import Run
    from covey.training.step import Pipeline

Note = Callable[[str], None]


def build(prepared: Prepared, *, note: Note) -> Run:
    """Load the model, from the checkpoint on resume, and assemble the run. Closing the run releases its resources."""
    with ExitStack() as resources:
        workers = open_workers(prepared.agent, prepared.rewards, resources)
        prepared = dataclasses.replace(prepared, agent=with_workers(prepared.agent, workers))
        folder, checkpoint = open_run(prepared, note)
        try:
            return _assemble(prepared, folder, checkpoint, workers, resources)
        except BaseException as error:
            folder.abandon(error)  # the lock is released, so a retry can acquire it
            raise


def prepare_restart(prepared: Prepared, folder: Path) -> Prepared:
    """Prepare the run again, in its folder: from the last checkpoint, or from the beginning if there is none."""
    prepared = dataclasses.replace(prepared, algorithm=make_algorithm(prepared.config))  # the old one has state
    if not list((folder / "checkpoints").glob("step-*")):
        return dataclasses.replace(prepared, folder=folder)
    config = dataclasses.replace(prepared.config, resume=str(folder))
    return dataclasses.replace(prepared, folder=None, config=config)


def _assemble(
    prepared: Prepared,
    folder: RunFolder,
    checkpoint: Checkpoint | None,
    workers: WorkerPool | None,
    resources: ExitStack,
) -> Run:
    import torch

    from covey.telemetry import report_activity
    from covey.training.run import Run

    config = prepared.config
    if checkpoint is not None:
        prepared = dataclasses.replace(prepared, model=at_original_revision(prepared.model, config, folder))
    threads = threads_for(config, folder if checkpoint is not None else None)
    torch.set_num_threads(threads)
    checkpoints = store(config, folder.path)
    rewards = open_rewards(config, prepared.rewards, workers, resources)
    loading = f"loading {config.model.name}"
    if config.cluster.name == "ray":
        loading = f"starting the processes of the Ray cluster, and {loading}"
    with report_activity(loading, config.logging):
        learner, open_engine = _learner_and_engine(prepared, checkpoint, folder.path, threads, resources)
    opponent = copy_policy(learner.weights()) if config.agent.opponents else None  # before memory is planned
    if config.cluster.name != "ray":  # else in the learners' processes
        with report_activity(PLANNING, config.logging):
            plan_memory(prepared, learner)
    write_run_files(prepared, folder, learner, threads, checkpoint)
    telemetry = open_telemetry(prepared, folder.path, checkpoint)
    telemetry.note(learner.memory_note())
    engine = open_engine(telemetry)
    opponents = None
    if opponent is not None:
        opponents = _open_opponents(prepared, engine, learner.weights(), opponent, folder.path, checkpoint)
        telemetry.note(opponents.memory_note())
    collector = make_collector(prepared, engine, rewards, opponents)
    source = _make_source(prepared, collector)
    first_step = checkpoint.step if checkpoint is not None else 0
    if checkpoint is not None:
        source.restore(checkpoint.state["source"], first_step)
    has_console = "console" in config.logging.to  # without a console, the gateway prints its address
    if isinstance(prepared.agent, Announces) and (has_console or config.agent.name != "gateway"):
        prepared.agent.announce_to(telemetry.note)
    return Run(
        config=config,
        folder=folder,
        pipeline=_make_pipeline(prepared, source, learner, engine, telemetry, resources),
        learner=learner,
        engine=engine,
        source=source,
        evaluator=make_evaluator(prepared, collector, telemetry.warn) if prepared.tasks.validation else None,
        telemetry=telemetry,
        checkpoints=checkpoints,
        tokenizer=collector.renderer.tokenizer,
        total_steps=prepared.total_steps,
        first_step=first_step,
        resumed=checkpoint is not None,
        best=checkpoint.state["best"] if checkpoint is not None else None,
        service=service_of(prepared.agent),
        resources=resources.pop_all(),
    )


def _make_pipeline(
    prepared: Prepared,
    source: TrainingSource,
    learner: Learner,
    engine: RolloutEngine,
    telemetry: Telemetry,
    resources: ExitStack,
) -> Pipeline:
    from covey.training.step import Pipeline

    config = prepared.config
    return Pipeline(
        source,
        learner,
        prepared.algorithm,
        engine,
        _schedule(prepared),
        telemetry,
        _learner_thread(learner, resources) if is_async(config) else None,
        publish_every(config),
        open_teacher_inputs(config, source.collector.renderer, prepared.agent, resources, telemetry.warn),
    )


def _learner_thread(learner: Learner, resources: ExitStack) -> Executor:
    """One thread for all updates, because every computing thread keeps its own OpenMP workers and buffers."""
    thread = ThreadPoolExecutor(1, thread_name_prefix="covey-learner")
    resources.callback(thread.shutdown)
    if (close := getattr(learner, "close", None)) is not None:  # a remote learner: closing it ends the thread's wait
        resources.callback(close)
    return thread


def _learner_and_engine(
    prepared: Prepared, checkpoint: Checkpoint | None, path: Path, threads: int, resources: ExitStack
) -> tuple[Learner, Callable[[Telemetry], RolloutEngine]]:
    """The learner, and a function that makes the engine once telemetry can report its warnings."""
    if prepared.config.cluster.name != "ray":
        learner = make_learner(prepared, checkpoint)
        return learner, lambda telemetry: make_engine(prepared, learner.model, log=path / "vllm.log")
    remote = start_remote(prepared, checkpoint, path, threads, resources)

    def connect(telemetry: Telemetry) -> RolloutEngine:
        remote.engine.set_warn(telemetry.warn)
        for text in remote.notes:
            telemetry.note(text)
        return remote.engine

    return remote.learner, connect


def _open_opponents(
    prepared: Prepared, engine: Any, policy: Any, opponent: Any, path: Path, checkpoint: Checkpoint | None
) -> Opponents:
    """`opponent`: a copy of the policy's module."""
    from covey.rollout.opponents import FOLDER, Opponents, opponent_options

    config, own = prepared.config, make_embedded(prepared, opponent, beside=engine)
    options = opponent_options(config.agent)
    opponents = Opponents(config.agent.opponents, options, own, policy, path / FOLDER, seed=config.seed)
    opponents.restore(None if checkpoint is None else checkpoint.folder)
    return opponents


def make_collector(
    prepared: Prepared, engine: RolloutEngine, rewards: RewardSet, opponents: Opponents | None = None
) -> Collector:
    from covey.rollout.collector import Collector
    from covey.rollout.rendering import Renderer

    source, config = prepared.model, prepared.config
    assert source is not None
    return Collector(
        engine,
        Renderer(source.tokenizer, config.model.context_length or source.context_length, source.vision),
        prepared.agent,
        rewards,
        config.seed,
        config.agent.max_seconds,
        max_response_tokens=config.agent.max_response_tokens,
        keep_images=config.agent.keep_images,
        opponents=opponents,
    )


def make_evaluator(prepared: Prepared, collector: Collector, warn: Note) -> Evaluator:
    from covey.training.evaluate import Evaluator

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

    config, curriculum = prepared.config, make_curriculum(prepared)

    def in_order(step: int) -> Sequence[Task]:
        shuffle = config.data.shuffle
        return batch_for_step(
            prepared.tasks.train, step, new_tasks_per_step(config), seed=config.seed, shuffle=shuffle
        )[1]

    batch = curriculum.batch if curriculum else in_order
    needs = prepared.algorithm.needs
    parts: dict[str, Any] = {
        "attempts": config.rollout.group_size,
        "sampling": training_sampling(config),
        "min_group_size": needs.min_group_size,
        "greedy_baseline": needs.greedy_baseline,
        "refill": _make_refill(prepared, curriculum),
        "curriculum": curriculum,
    }
    if not is_async(config):
        return TrainingSource(collector, batch, **parts)
    from covey.rollout.asynchronous import BackgroundSource, ReplayBuffer

    lead, uses = config.mode.max_staleness, config.mode.max_uses
    replay = ReplayBuffer(config.data.train_batch_size, uses, lead, config.seed) if uses > 1 else None
    return BackgroundSource(collector, batch, lead=lead, steps=prepared.total_steps, replay=replay, **parts)


def publish_every(config: Config) -> int:
    """Updates between two publications of weights. A sleeping engine loses its weights, so it gets them each time."""
    local = config.cluster.name == "local"
    shared = shares_gpu(config, engine_gpus(config)) if local else config.cluster.rollout_devices is None
    asleep = config.rollout.name == "vllm" and config.rollout.sleep and shared
    return config.mode.publish_every if is_async(config) and not asleep else 1


def _make_refill(prepared: Prepared, curriculum: Curriculum | None) -> Refill | None:
    from covey.rollout.collector import Refill

    group_filter = prepared.algorithm.filter
    if not group_filter.filter_groups:
        return None
    trained = {name: weight for name, weight in prepared.rewards.weights.items() if weight != 0}
    counted = {group_filter.filter_metric: 1.0} if group_filter.filter_metric else trained

    def fresh(step: int, round: int, count: int, tried: Collection[str]) -> Sequence[Task]:
        return fresh_tasks(prepared.tasks.train, step, round, count, seed=prepared.config.seed, tried=tried)

    replacements = curriculum.fresh if curriculum else fresh
    return Refill(counted, prepared.algorithm.uses_named_rewards, group_filter.max_refills, replacements)


def open_telemetry(prepared: PreparedRun, path: Path, checkpoint: Checkpoint | None) -> Telemetry:
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
    if checkpoint is not None:
        telemetry.note(f"resumed at step {first_step} of {prepared.total_steps} in {path}")
    return telemetry


def _schedule(prepared: Prepared) -> Any:
    from covey.training.step import Schedule

    config = prepared.config
    return Schedule(
        groups_per_batch=config.learner.mini_batch_size,
        epochs=config.learner.epochs,
        weights=dict(prepared.rewards.weights),
        temperature=config.rollout.temperature,
        max_tokens=config.rollout.max_tokens,
    )
