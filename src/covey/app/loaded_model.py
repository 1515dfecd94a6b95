"""A model, or a run's weights, loaded and ready to be asked: what covey eval, covey sample and covey serve share."""

from __future__ import annotations

import dataclasses
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, ExitStack, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import yaml

from covey.app.build import make_collector
from covey.app.compose import Words, compose_words
from covey.app.models import make_engine
from covey.app.parts import open_rewards, open_workers, services, with_workers
from covey.app.prepare import Prepared, prepare
from covey.app.resume import is_run, model_of, run_of
from covey.config import Composed
from covey.errors import InputError
from covey.tasks import TaskSet
from covey.telemetry.history import read_run

if TYPE_CHECKING:
    from covey.protocols import RolloutEngine
    from covey.rollout.collector import Collector


NAMES_TASKS = ("data=", "data.name=", "data.train_files=", "data.val_files=")


@dataclass(frozen=True)
class Bench:
    """A model and what to ask it."""

    prepared: Prepared
    collector: Collector
    engine: RolloutEngine
    policy: Any
    resources: ExitStack  # what ends with it


@asynccontextmanager
async def sampling(bench: Bench) -> AsyncIterator[None]:
    """The engine with the model's weights, and whatever the agent needs besides."""
    try:
        await bench.engine.publish(bench.policy, version=0)
        async with AsyncExitStack() as open_services:
            for service in services(bench.prepared.agent):
                await open_services.enter_async_context(service)
            yield
    finally:
        bench.engine.close()
        bench.resources.close()


def open_bench(words: Words, usage: str, *, asks_tasks: bool = True) -> Bench:
    """Load the model, and its tasks if they are asked."""
    return load_bench(prepare_bench(words, usage, asks_tasks=asks_tasks))


def prepare_bench(words: Words, usage: str, *, asks_tasks: bool) -> Prepared:
    """Everything but the weights, checked."""
    if len(words.places) != 1:
        raise InputError(f"name one model or run\n\n{usage.rstrip()}")
    composed = compose_for(words.places[0], words)
    tasks = None if asks_tasks else TaskSet(train=(), validation=(), reward=None, description="a question")
    prepared = prepare(composed, tasks=tasks, training=False)
    if asks_tasks and not (prepared.tasks.validation or prepared.tasks.train):
        raise InputError("there is nothing to ask: give data=NAME or data.train_files=FILE")
    return prepared


def load_bench(prepared: Prepared) -> Bench:
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
        return Bench(prepared, make_collector(prepared, engine, rewards), engine, policy, resources.pop_all())


def compose_for(name: str, words: Words) -> Composed:
    """A run's own settings with its weights, or the defaults with the named model; then the user's settings."""
    if not is_run(name):
        return compose_words(words, settings=[f"model.name={name}", *words.settings])
    run = run_of(Path(name).expanduser())
    settings = [f"model.name={model_of(name)}", *_tasks_of(run, words), *words.settings]
    return compose_words(words, settings=settings, config_path=run / "config.yaml")


def has_tasks(words: Words) -> bool:
    """Whether the run or the command line says which tasks there are. A model alone has none: those of the default
    settings were not meant."""
    if words.text("--config") or words.text("--config-name") or any(w.startswith(NAMES_TASKS) for w in words.settings):
        return True
    (name,) = words.places
    return is_run(name) and not _tasks_of(run_of(Path(name).expanduser()), words)


def _tasks_of(run: Path, words: Words) -> list[str]:
    """A run of covey sft knows demonstrations: from files they are no tasks, and others must be named."""
    config = run / "config.yaml"
    try:
        data = yaml.safe_load(config.read_text())["data"]
        files = data["train_files"]
    except (OSError, ValueError, TypeError, KeyError, yaml.YAMLError) as error:
        raise InputError(f"{config} is damaged or missing: {' '.join(str(error).split())}") from error
    if read_run(run).get("kind") != "sft" or files is None:
        return []
    named = [word for word in words.settings if word.startswith(NAMES_TASKS)]
    if not named and words.text("--question") is None:
        raise InputError(
            f"{run} was trained on demonstrations: name the tasks to ask\n"
            "  data=calculator, or data.val_files=tasks.jsonl with question and answer"
        )
    return ["data.train_files=null", "data.val_files=null"]
