"""covey eval, covey sample: a model, or a run's weights, on tasks or on a question of yours."""

from __future__ import annotations

import asyncio
import dataclasses
import json
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import AsyncExitStack, ExitStack, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import yaml
from rich.console import Console

from covey.cli.agents import open_rewards, open_workers, with_workers
from covey.cli.build import (
    Prepared,
    make_collector,
    make_engine,
    make_evaluator,
    prepare,
    training_sampling,
)
from covey.cli.folder import run_of
from covey.cli.gateway import services
from covey.cli.words import Words, compose_words, parse
from covey.config import Composed
from covey.errors import InputError
from covey.tasks import TaskSet
from covey.types import Group, Sampling, Task, ToolUse

if TYPE_CHECKING:
    from covey.protocols import RolloutEngine
    from covey.rollout.collector import Collector

EVAL_USAGE = """\
covey eval MODEL_OR_RUN [key=value ...]

  Answers the validation tasks and averages each reward.
  MODEL_OR_RUN   a model (folder, Hugging Face id, smollm2-135m), a run (outputs/DATE/TIME) or a checkpoint of one;
                 a run brings its own tasks and rewards, and its best checkpoint
  --json FILE    write the figures there too

  covey eval smollm2-135m data=sort eval.modes=[greedy,sampled] eval.n=4
"""
SAMPLE_USAGE = """\
covey sample MODEL_OR_RUN [--question TEXT] [-n 4] [--tasks 2] [key=value ...]

  Prints answers, with their rewards where a task is known; episodes of several turns token by token, with what the
  model sampled (and learns from) in colour.
  --question TEXT   ask this instead of the validation tasks
  -n 4              answers to each
  --tasks 2         how many validation tasks

  covey sample smollm2-135m --question "What is the capital of France?" rollout.max_tokens=40
"""


@dataclass(frozen=True)
class Bench:
    """A model and what to ask it."""

    prepared: Prepared
    collector: Collector
    engine: RolloutEngine
    policy: Any
    resources: ExitStack  # what ends with it


def main_eval(argv: list[str]) -> int:
    words = parse(argv, values=("--json", "--config-name", "--config"))
    if words.help:
        print(EVAL_USAGE)
        return 0
    bench = open_bench(words, EVAL_USAGE)
    metrics = asyncio.run(_evaluate(bench))
    for name, value in metrics.items():
        print(f"{name:40} {value:.4f}")
    if path := words.text("--json"):
        Path(path).write_text(json.dumps(metrics, indent=1))
    return 0


async def _evaluate(bench: Bench) -> dict[str, float]:
    async with sampling(bench):
        found = await make_evaluator(bench.prepared, bench.collector, print).run()
    return dict(found.metrics)


def main_sample(argv: list[str]) -> int:
    values = ("--question", "-n", "--tasks", "--config-name", "--config")
    words = parse(argv, values=values)
    if words.help:
        print(SAMPLE_USAGE)
        return 0
    count, many = _count(words, "-n", 4), _count(words, "--tasks", 2)
    question = words.text("--question")
    bench = open_bench(words, SAMPLE_USAGE, asks_tasks=question is None)
    tasks: Sequence[Task]
    if question is not None:
        tasks = [Task("question", ({"role": "user", "content": question},))]
        bench = dataclasses.replace(bench, collector=dataclasses.replace(bench.collector, reward=_NoReward()))
    else:
        tasks = bench.prepared.tasks.validation[:many]
    drawn = training_sampling(bench.prepared.config)
    console = Console(highlight=False)
    for group in asyncio.run(_answers(bench, tasks, count, drawn)):
        _print_group(group, console, bench.collector.renderer.tokenizer.decode)
    return 0


async def _answers(bench: Bench, tasks: Sequence[Task], count: int, drawn: Sampling) -> list[Group]:
    async with sampling(bench):
        return await bench.collector.groups(tasks, count, drawn, ("sample",))


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


def _print_group(group: Group, console: Console, decode: Callable[[list[int]], str]) -> None:
    """An answer of one turn as text; an episode of several with every token and who wrote it."""
    from covey.cli.show import show_tokens

    asked = next((m["content"] for m in reversed(group.task.messages) if m["role"] == "user"), group.task.id)
    gold = "" if group.task.answer is None else f"   (answer: {group.task.answer})"
    print(f"\n{asked}{gold}")
    for episode in group.episodes:
        if episode.failure is not None:
            print(f"  failed: {episode.failure.cause}: {episode.failure.message}")
            continue
        logprob = sum(p for turn in episode.turns for p in turn.logprobs)
        scores = "  ".join(f"{k}={v:g}" for k, v in episode.rewards.items() if v is not None)
        if len(episode.turns) > 1 or episode.tools:
            show_tokens(episode, decode, console)
        print(f"  {episode.final_answer!r}")
        print(f"      {episode.response_tokens} tokens, log-prob {logprob:.2f}, ended by {episode.stop}   {scores}")
        if episode.tools:
            print(f"      {len(episode.turns)} turns, tools: {', '.join(map(_use, episode.tools))}")


def _use(use: ToolUse) -> str:
    return f"{use.tool} {use.seconds:.2f} s" + (f" ({use.error})" if use.error else "")


class _NoReward:
    """A question of the user's own has no score."""

    names: tuple[str, ...] = ()
    groupwise = False

    async def __call__(self, task: Task, episode: Any) -> dict[str, float | None]:
        return {}

    async def group(self, task: Task, episodes: Sequence[Any]) -> list[dict[str, float | None]]:
        return [{} for _ in episodes]


def _count(words: Words, flag: str, default: int) -> int:
    text = words.text(flag)
    if text is None:
        return default
    if not text.isdigit() or int(text) < 1:
        raise InputError(f"{flag} wants a number from 1, got {text!r}")
    return int(text)


def open_bench(words: Words, usage: str, *, asks_tasks: bool = True) -> Bench:
    """Load the model, and its tasks if they are asked."""
    if len(words.places) != 1:
        raise InputError(f"name one model or run\n\n{usage.rstrip()}")
    from covey.learner.models import load_policy

    composed = _compose_for(words.places[0], words)
    tasks = None if asks_tasks else TaskSet(train=(), validation=(), reward=None, description="a question")
    prepared = prepare(composed, tasks=tasks, training=False)
    if asks_tasks and not prepared.tasks.validation:
        raise InputError("there is nothing to ask: give data=NAME or data.val_files=FILE")
    source = prepared.model
    assert source is not None
    with ExitStack() as resources:
        workers = open_workers(prepared.agent, prepared.rewards, resources)
        prepared = dataclasses.replace(prepared, agent=with_workers(prepared.agent, workers))
        rewards = open_rewards(prepared.config, prepared.rewards, workers, resources)
        policy = load_policy(source, prepared.config.model)
        engine = make_engine(prepared, policy)
        return Bench(prepared, make_collector(prepared, engine, rewards), engine, policy, resources.pop_all())


def _compose_for(name: str, words: Words) -> Composed:
    """A run's own settings with its weights, or the defaults with the named model; then the user's settings."""
    path = Path(name).expanduser()
    run = run_of(path)
    if not (run / "run.json").is_file():
        return compose_words(words, settings=[f"model.name={name}", *words.settings])
    model = path / "model" if path != run else _best_model(run)
    settings = [f"model.name={model}", *_tasks_of(run, words), *words.settings]
    return compose_words(words, settings=settings, config_path=run / "config.yaml")


def _tasks_of(run: Path, words: Words) -> list[str]:
    """A run of covey sft knows demonstrations: from files they are no tasks, and others must be named."""
    data = yaml.safe_load((run / "config.yaml").read_text())["data"]
    if json.loads((run / "run.json").read_text()).get("kind") != "sft" or data["train_files"] is None:
        return []
    named = [word for word in words.settings if word.startswith(("data=", "data.name=", "data.val_files="))]
    if not named and words.text("--question") is None:
        raise InputError(
            f"{run} was trained on demonstrations: name the tasks to ask\n"
            "  data=calculator, or data.val_files=tasks.jsonl with question and answer"
        )
    return ["data.train_files=null", "data.val_files=null"]


def _best_model(run: Path) -> Path:
    """The checkpoint with the best evaluation, or else the last."""
    folders = sorted((run / "checkpoints").glob("step-*"))
    if not folders:
        raise InputError(f"{run} has no checkpoint yet\n  runs write one at the end, or every loop.save_every steps")
    best = json.loads((folders[-1] / "state.json").read_text()).get("best")
    named = run / "checkpoints" / f"step-{best['step']:06d}" if best else folders[-1]
    return (named if named.is_dir() else folders[-1]) / "model"
