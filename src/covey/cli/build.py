"""The one place where parts are wired together.

prepare(composed)   everything that can be known and checked before weights are loaded
build(prepared)     the run: model, engine, learner, loop
"""

from __future__ import annotations

import dataclasses
import os
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

from covey.agents import resolve_agent
from covey.cli.checks import check_algorithm, check_prompts, check_sizes
from covey.config import Composed, fingerprint
from covey.config.schema import Config
from covey.errors import Absent, InputError
from covey.protocols import Agent
from covey.rewards import RewardSet, resolve_rewards
from covey.tasks import TaskSet, batch_for_step, load_tasks, steps_per_epoch
from covey.types import Sampling, Task

if TYPE_CHECKING:  # torch and transformers take seconds to import: only where a model is at hand
    from covey.algorithms import Algorithm
    from covey.learner.learner import Learner
    from covey.learner.models import ModelSource
    from covey.loop.checkpoint import Checkpoint
    from covey.loop.evaluate import Evaluator
    from covey.loop.folder import RunFolder
    from covey.loop.run import Run
    from covey.rollout.collector import Collector, TrainingSource
    from covey.rollout.embedded import EmbeddedEngine
    from covey.telemetry import Telemetry

Note = Callable[[str], None]


def algorithm_schemas() -> dict[str, type]:
    from covey.algorithms import ALGORITHMS, schema

    return {name: schema(name) for name in ALGORITHMS}


@dataclass(frozen=True)
class Prepared:
    """A run that could start: checked, nothing loaded."""

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

    @property
    def trained_reward(self) -> str:
        """The reward that eval/accuracy stands for: the heaviest, the first among equals."""
        return max(self.rewards.names, key=lambda name: self.rewards.weights[name])

    @property
    def task_name(self) -> str:
        """Short, for titles: the counts behind the colon are left out."""
        return self.tasks.description.split(":")[0]


def prepare(
    composed: Composed, *, tasks: TaskSet | None = None, reward: Any = None, tolerate_absent: bool = False
) -> Prepared:
    """Check all that configuration and files can tell. With `tolerate_absent`, what only another machine has (files, a
    model from the hub) becomes a warning."""
    from covey.algorithms import make
    from covey.learner.models import open_source

    config, warnings = composed.config, list(composed.warnings)
    options = dataclasses.asdict(config.algorithm)
    algorithm = make(options.pop("name"), **options)
    agent = resolve_agent(config.agent.name)
    source = found = None
    try:
        found = tasks or load_tasks(config.data, config.seed)
        source = open_source(config.model)
    except Absent as error:
        if not tolerate_absent:
            raise
        warnings.append(f"not here: {error}")
    found = found or TaskSet(train=(), validation=(), reward=None, description="(files not here)")
    warnings += found.warnings
    rewards = resolve_rewards(reward or config.reward.name, found.reward, config.reward.weights)
    warnings += check_algorithm(config, algorithm) + check_sizes(config, found)
    for task in (*found.train, *found.validation):
        rewards.check(task)
    if source is not None:
        _use_template(source.tokenizer, config.agent.template)
        warnings += check_prompts(config, found, source)
    return Prepared(
        config=config,
        tree=composed.tree,
        overrides=composed.overrides,
        fingerprint=fingerprint(composed.tree | ({"tasks": _digest(tasks)} if tasks else {})),
        tasks=found,
        rewards=rewards,
        agent=agent,
        algorithm=algorithm,
        model=source,
        total_steps=_total_steps(config, len(found.train)),
        warnings=tuple(warnings),
    )


def _digest(tasks: TaskSet) -> str:
    import hashlib

    text = repr([(t.id, list(t.messages), t.answer) for t in (*tasks.train, *tasks.validation)])
    return hashlib.sha256(text.encode()).hexdigest()


def _total_steps(config: Config, tasks: int) -> int:
    if config.loop.total_steps is not None:
        return config.loop.total_steps
    return (config.loop.total_epochs or 1) * steps_per_epoch(max(tasks, 1), config.data.train_batch_size)


def _use_template(tokenizer: Any, template: str | None) -> None:
    """A chat template file replaces the model's own; without either there is no way to ask a question."""
    if template is not None:
        if not Path(template).is_file():
            raise InputError(f"agent.template={template}: no such file\n  leave it out to use the model's own template")
        tokenizer.chat_template = Path(template).read_text()
    if tokenizer.chat_template is None:
        raise InputError(
            "this model has no chat template\n  give one as a Jinja file: agent.template=chat.jinja\n"
            "  or use an instruction-tuned model"
        )


def build(prepared: Prepared, *, note: Note) -> Run:
    """Load the model and join the parts; on resume, from the checkpoint."""
    import torch

    from covey.loop.checkpoint import CheckpointStore
    from covey.loop.run import Run
    from covey.loop.step import Road

    config = prepared.config
    threads = config.loop.threads or os.cpu_count() or 1
    torch.set_num_threads(threads)
    folder, resumed = _open_run(prepared, note)
    store = CheckpointStore(
        folder.path / "checkpoints", keep_last=config.loop.keep_last, keep_best=config.loop.keep_best
    )
    checkpoint = store.latest(note) if resumed else None
    learner = _make_learner(prepared, checkpoint)
    _write_run_files(prepared, folder, threads)
    telemetry = _open_telemetry(prepared, folder.path, checkpoint)
    engine = make_engine(prepared, learner.model)
    collector = make_collector(prepared, engine)
    source = _make_source(prepared, collector)
    first_step = checkpoint.step if checkpoint is not None else 0
    engine.version = first_step
    source.policy_updated(first_step)
    return Run(
        config=config,
        folder=folder,
        road=Road(source, learner, prepared.algorithm, engine, _schedule(prepared), telemetry),
        learner=learner,
        engine=engine,
        source=source,
        evaluator=make_evaluator(prepared, collector) if prepared.tasks.validation else None,
        telemetry=telemetry,
        checkpoints=store,
        tokenizer=collector.tokenizer,
        total_steps=prepared.total_steps,
        first_step=first_step,
        best=checkpoint.state["best"] if checkpoint is not None else None,
    )


def make_engine(prepared: Prepared, policy: Any) -> EmbeddedEngine:
    from covey.rollout.embedded import EmbeddedEngine

    source = prepared.model
    assert source is not None
    return EmbeddedEngine(
        policy,
        eos_ids=source.eos_ids(),
        decode=source.tokenizer.decode,
        max_sequences=prepared.config.rollout.max_sequences,
    )


def make_collector(prepared: Prepared, engine: EmbeddedEngine) -> Collector:
    from covey.rollout.collector import Collector

    source, config = prepared.model, prepared.config
    assert source is not None
    return Collector(engine, source.tokenizer, prepared.agent, prepared.rewards, config.seed, config.agent.max_seconds)


def make_evaluator(prepared: Prepared, collector: Collector) -> Evaluator:
    from covey.loop.evaluate import Evaluator

    config = prepared.config
    return Evaluator(
        collector,
        prepared.tasks.validation,
        config.eval,
        max_tokens=config.eval.max_tokens or config.rollout.max_tokens,
        stop=tuple(config.rollout.stop),
        trained_reward=prepared.trained_reward,
    )


def _make_source(prepared: Prepared, collector: Collector) -> TrainingSource:
    from covey.rollout.collector import TrainingSource

    config = prepared.config

    def batch(step: int) -> Sequence[Task]:
        data = config.data
        return batch_for_step(
            prepared.tasks.train, step, data.train_batch_size, seed=config.seed, shuffle=data.shuffle
        )[1]

    return TrainingSource(
        collector,
        batch,
        attempts=config.rollout.group_size,
        sampling=training_sampling(config),
        min_group_size=prepared.algorithm.needs.min_group_size,
    )


def _make_learner(prepared: Prepared, checkpoint: Checkpoint | None) -> Learner:
    from covey.learner.learner import Learner
    from covey.loop.checkpoint import restore_learner

    policy, reference = _load_models(prepared, checkpoint)
    learner = Learner(policy, prepared.config.learner, total_updates=_total_updates(prepared), reference=reference)
    if checkpoint is not None:
        restore_learner(learner, checkpoint)
        prepared.algorithm.load_state_dict(checkpoint.state["algorithm"])
    return learner


def _open_telemetry(prepared: Prepared, path: Path, checkpoint: Checkpoint | None) -> Telemetry:
    from covey.telemetry import Telemetry

    state = checkpoint.state if checkpoint is not None else {}
    first_step = state.get("step", 0)
    telemetry = Telemetry.open(
        _run_info(prepared, path, first_step),
        prepared.config.logging,
        metrics_offset=state.get("metrics_offset"),
        episodes_offset=state.get("episodes_offset"),
    )
    for text in prepared.warnings:
        telemetry.warn(text)
    if first_step:
        telemetry.note(f"resumed at step {first_step} of {prepared.total_steps} in {path}")
    return telemetry


def _open_run(prepared: Prepared, note: Note) -> tuple[RunFolder, bool]:
    """The folder to write to, and whether it is an earlier run's."""
    from covey.loop.folder import find_unfinished, new_folder, open_folder

    config = prepared.config
    output = Path(config.logging.output_dir)
    if config.resume == "disable":
        return new_folder(output), False
    if config.resume == "auto":
        found = find_unfinished(output, config.logging.project, config.logging.experiment, prepared.fingerprint, note)
        return (found, True) if found is not None else (new_folder(output), False)
    folder = open_folder(_run_of(Path(config.resume).expanduser()))
    if folder.info()["fingerprint"] != prepared.fingerprint:
        raise InputError(
            f"resume={config.resume}: that run had other settings\n"
            f"  its settings: {folder.path / 'config.yaml'}\n"
            "  repeat its command, or start from its weights:  model=" + str(folder.path / "checkpoints/STEP/model")
        )
    return folder, True


def _run_of(path: Path) -> Path:
    """A run's folder, also when one of its checkpoints was named."""
    return path.parent.parent if path.parent.name == "checkpoints" else path


def _load_models(prepared: Prepared, checkpoint: Checkpoint | None) -> tuple[Any, Any]:
    """The policy, from the checkpoint if there is one, and its reference, always from the start model."""
    from covey.learner.models import Reference, load_policy

    config, source = prepared.config, prepared.model
    assert source is not None
    seed = config.seed
    if checkpoint is None:
        policy = load_policy(source, config.model, seed=seed)
        return policy, Reference(policy) if prepared.algorithm.needs.reference else None
    if config.model.lora.rank > 0 or source.adapter is not None:
        policy = load_policy(dataclasses.replace(source, adapter=checkpoint.model), config.model, seed=seed)
        return policy, Reference(policy) if prepared.algorithm.needs.reference else None
    policy = load_policy(dataclasses.replace(source, path=str(checkpoint.model)), config.model, seed=seed)
    needs = prepared.algorithm.needs.reference
    return policy, Reference(load_policy(source, config.model, seed=seed)) if needs else None


def _total_updates(prepared: Prepared) -> int:
    config = prepared.config
    per_epoch = -(-config.data.train_batch_size // (config.learner.mini_batch_size or config.data.train_batch_size))
    return prepared.total_steps * per_epoch * config.learner.epochs


def training_sampling(config: Config) -> Sampling:
    r = config.rollout
    return Sampling(
        temperature=r.temperature,
        top_p=r.top_p,
        top_k=r.top_k,
        min_p=r.min_p,
        max_tokens=r.max_tokens,
        stop=tuple(r.stop),
    )


def _schedule(prepared: Prepared) -> Any:
    from covey.loop.step import Schedule

    config = prepared.config
    return Schedule(
        groups_per_batch=config.learner.mini_batch_size,
        epochs=config.learner.epochs,
        weights=dict(prepared.rewards.weights),
        temperature=config.rollout.temperature,
    )


def _run_info(prepared: Prepared, path: Path, first_step: int) -> Any:
    from covey.telemetry import RunInfo

    config = prepared.config
    return RunInfo(
        folder=path,
        title=f"{config.logging.project}/{config.logging.experiment}",
        algorithm=config.algorithm.name,
        model=config.model.name,
        task=prepared.task_name,
        total_steps=prepared.total_steps,
        first_step=first_step,
        reward_names=prepared.rewards.names,
        trained_reward=prepared.trained_reward,
        config=prepared.tree,
    )


def _write_run_files(prepared: Prepared, folder: RunFolder, threads: int) -> None:
    """run.json, config.yaml and .hydra/: what was run, so that it can be run again."""
    import torch
    import transformers
    import yaml

    import covey

    config = prepared.config
    hydra = folder.path / ".hydra"
    hydra.mkdir(exist_ok=True)
    for path in (folder.path / "config.yaml", hydra / "config.yaml"):
        path.write_text(yaml.safe_dump(prepared.tree, sort_keys=False, allow_unicode=True))
    (hydra / "overrides.yaml").write_text(yaml.safe_dump(list(prepared.overrides)))
    info = _run_info(prepared, folder.path, 0)
    folder.write_info(
        {
            "project": config.logging.project,
            "experiment": config.logging.experiment,
            "fingerprint": prepared.fingerprint,
            "status": "running",
            "title": info.title,
            "algorithm": info.algorithm,
            "model": info.model,
            "task": info.task,
            "total_steps": info.total_steps,
            "reward_names": list(info.reward_names),
            "trained_reward": info.trained_reward,
            "started": datetime.now().isoformat(timespec="seconds"),
            "command": ["covey", *sys.argv[1:]],
            "versions": {
                "covey": covey.__version__,
                "torch": torch.__version__,
                "transformers": transformers.__version__,
            },
            "threads": threads,
        }
    )
