"""Loads a model or a run's weights for sampling. Shared by covey eval, covey sample and covey serve."""

from __future__ import annotations

import dataclasses
from collections.abc import AsyncIterator
from contextlib import ExitStack, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import yaml

from covey.app.build import make_collector
from covey.app.compose import CommandLine, compose_command
from covey.app.models import make_engine
from covey.app.parts import open_rewards, open_workers, service_of, with_workers
from covey.app.prepare import Prepared, prepare
from covey.app.resume import is_run, model_of, run_of
from covey.config import Composed
from covey.errors import InputError
from covey.tasks import TaskSet
from covey.telemetry.history import read_run

if TYPE_CHECKING:
    from covey.protocols import RolloutEngine
    from covey.rollout.collector import Collector


TASK_KEYS = ("data=", "data.name=", "data.train_files=", "data.val_files=")


@dataclass(frozen=True)
class LoadedModel:
    """A model with its engine, agent and rewards."""

    prepared: Prepared
    collector: Collector
    engine: RolloutEngine
    policy: Any
    resources: ExitStack  # to close when the model is no longer needed


@asynccontextmanager
async def sampling(model: LoadedModel) -> AsyncIterator[None]:
    """Publishes the weights to the engine and opens the agent's service; closes everything at the end."""
    try:
        await model.engine.publish(model.policy, version=0)
        async with service_of(model.prepared.agent):
            yield
    finally:
        model.engine.close()
        model.resources.close()


def prepare_model(args: CommandLine, usage: str, *, needs_tasks: bool) -> Prepared:
    """Check everything that can be checked before the weights are loaded."""
    composed = compose_for(args.one("model or run", usage), args)
    tasks = None if needs_tasks else TaskSet(train=(), validation=(), reward=None, description="a question")
    prepared = prepare(composed, tasks=tasks, training=False)
    if needs_tasks and not (prepared.tasks.validation or prepared.tasks.train):
        raise InputError("no tasks to sample: give data=NAME or data.train_files=FILE")
    return prepared


def load_model(prepared: Prepared) -> LoadedModel:
    import torch

    from covey.models.loading import load_policy

    source = prepared.model
    assert source is not None
    if prepared.config.loop.threads is not None:
        torch.set_num_threads(prepared.config.loop.threads)
    with ExitStack() as resources:
        workers = open_workers(prepared.agent, prepared.rewards, resources)
        prepared = dataclasses.replace(prepared, agent=with_workers(prepared.agent, workers))
        rewards = open_rewards(prepared.config, prepared.rewards, workers, resources)
        policy = load_policy(source, prepared.config.model)
        engine = make_engine(prepared, policy)
        return LoadedModel(prepared, make_collector(prepared, engine, rewards), engine, policy, resources.pop_all())


def compose_for(name: str, args: CommandLine, compared_run: str | None = None) -> Composed:
    """For a run, its own settings with its weights; for a model, those of the run it is compared with, or else the
    defaults. The user's settings override both."""
    settings_of = name if is_run(name) else compared_run
    if settings_of is None:
        return compose_command(args, settings=[f"model.name={name}", *args.settings])
    run = run_of(Path(settings_of).expanduser())
    model = model_of(name) if is_run(name) else name
    settings = [f"model.name={model}", *_tasks_of(run, args), *args.settings]
    return compose_command(args, settings=settings, config_path=run / "config.yaml")


def has_tasks(args: CommandLine) -> bool:
    """Whether a run or the command line names tasks. For a model alone, those of the default settings do not count."""
    if args.value("--config") or args.value("--config-name") or any(w.startswith(TASK_KEYS) for w in args.settings):
        return True
    (name,) = args.positional
    return is_run(name) and not _tasks_of(run_of(Path(name).expanduser()), args)


def _tasks_of(run: Path, args: CommandLine) -> list[str]:
    """Settings that clear the run's data files: those of an SFT run, which hold demonstrations, so that tasks must be
    named; and those of any run if the user names a data set or a generated task instead."""
    config = run / "config.yaml"
    try:
        data = yaml.safe_load(config.read_text())["data"]
        files = data["train_files"]
    except (OSError, ValueError, TypeError, KeyError, yaml.YAMLError) as error:
        raise InputError(f"{config} is damaged or missing: {' '.join(str(error).split())}") from error
    cleared = ["data.train_files=null", "data.val_files=null"] if files is not None else []
    if files is None or read_run(run).get("kind") != "sft":
        return cleared if any(word.startswith(("data=", "data.name=")) for word in args.settings) else []
    named = [word for word in args.settings if word.startswith(TASK_KEYS)]
    if not named and args.value("--question") is None:
        raise InputError(
            f"{run} was trained on demonstrations: name the tasks to ask\n"
            "  data=calculator, or data.val_files=tasks.jsonl with question and answer"
        )
    return cleared
