"""covey sample: prints what a model or a run's weights answer to tasks or to a question."""

from __future__ import annotations

import asyncio
import dataclasses
import re
import sys
from collections.abc import Callable, Iterator, Sequence
from itertools import groupby
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.text import Text

from covey.app.compose import CommandLine
from covey.app.loaded_model import has_tasks, load_model, prepare_model, sampling
from covey.app.prepare import training_sampling
from covey.cli.parse import parse
from covey.config.schema import OWN_TASKS, Config, EvalConfig
from covey.errors import Absent, InputError
from covey.images import plain_text
from covey.ranges import range_error, ranges_of
from covey.tasks import ask_like_tasks, plain_question
from covey.types import Episode, Group, Sample, Task, ToolUse

SAMPLED, GIVEN = "bold green", "dim"
Decode = Callable[[list[int]], str]


def show_tokens(episode: Episode, decode: Decode, console: Console) -> None:
    """Print the rows that are trained on. Sampled text is coloured, or between ⟦ ⟧ without a terminal."""
    from covey.training.samples import episode_rows

    rows = episode_rows(episode, 0)
    for number, row in enumerate(rows, 1):
        if len(rows) > 1:
            console.print(f"  row {number} of {len(rows)}: the conversation was rewritten", style=GIVEN)
        console.print(_row(row, decode, marks=not console.is_terminal), soft_wrap=True)
    sampled = sum(sum(row.mask) for row in rows)
    console.print(f"  {sampled} of {sum(len(row.response_ids) for row in rows)} response tokens sampled", style=GIVEN)


def _row(row: Sample, decode: Decode, *, marks: bool) -> Text:
    text = Text(decode(list(row.prompt_ids)), style=GIVEN)
    for sampled, ids in _runs(row):
        piece = decode(ids)
        text.append(f"⟦{piece}⟧" if sampled and marks else piece, style=SAMPLED if sampled else GIVEN)
    return text


def _runs(row: Sample) -> Iterator[tuple[bool, list[int]]]:
    """Runs of tokens that are all sampled or all not."""
    for sampled, pairs in groupby(zip(row.mask, row.response_ids, strict=True), key=lambda pair: pair[0]):
        yield sampled, [token for _, token in pairs]


USAGE = """\
covey sample MODEL_OR_RUN [--question TEXT] [--plain] [-n 4] [--tasks 2] [key=value ...]

  Prints answers, with their rewards for tasks; episodes of several turns token by token, with the sampled tokens (which
  training learns from) in colour. With agent=gui, each episode's screenshots are written as one PNG with the clicks.
  --question TEXT   ask this instead of tasks. For a run, or with data=NAME, it gets the system prompt, worked examples
                    and prompt of the tasks
  --plain           the question alone
  -n 4              answers to each
  --tasks 2         the number of tasks: of validation, or of data.train_files if only that is given

  covey sample smollm2-135m --question "What is the capital of France?" rollout.max_tokens=40
  covey sample outputs/DATE/TIME --question "Which is the largest: 23, 81, 45 or 60?"
  covey sample outputs/DATE/TIME data.train_files=mine.jsonl --tasks 10
"""


def main(argv: list[str]) -> int:
    values = ("--question", "-n", "--tasks", "--config-name", "--config")
    args = parse(argv, switches=("--plain",), values=values)
    count, task_count = _count(args, "-n", 4), _count(args, "--tasks", 2)
    question = args.value("--question")
    prepared = prepare_model(_with_own_files(args), USAGE, needs_tasks=question is None)
    tasks: Sequence[Task] = (prepared.tasks.validation or prepared.tasks.train)[:task_count]
    if question is not None:
        tasks = [_task_of_question(question, args, prepared.config)]
    model = load_model(prepared)
    collector = model.collector
    if question is not None:
        collector = dataclasses.replace(collector, reward=_NoReward())

    async def sample() -> list[Group]:
        async with sampling(model):
            return await collector.groups(tasks, count, training_sampling(prepared.config), ("sample",))

    console = Console(highlight=False)
    for group in asyncio.run(sample()):
        _print_group(group, console, collector.renderer.tokenizer.decode)
        if prepared.config.agent.name == "gui":
            _write_film_strips(group, Path(prepared.config.logging.output_dir) / "films")
    return 0


def _write_film_strips(group: Group, folder: Path) -> None:
    from covey.agents.gui.film import write_film_strip

    name = re.sub(r"[^\w.-]+", "-", group.task.id)
    for attempt, episode in enumerate(group.episodes, 1):
        path = folder / f"{name}-{attempt}.png"
        if write_film_strip(episode, path):
            print(f"  screenshots of attempt {attempt}: {path}")


def _with_own_files(args: CommandLine) -> CommandLine:
    """If the user sets only data.train_files, sample on its tasks instead of the run's validation tasks."""
    keys = {word.partition("=")[0] for word in args.settings}
    if "data.train_files" not in keys or "data.val_files" in keys:
        return args
    return dataclasses.replace(args, settings=["data.val_files=null", *args.settings])


def _task_of_question(question: str, args: CommandLine, config: Config) -> Task:
    """The question in the form of the training tasks, if it is known."""
    if args.has("--plain") or not has_tasks(args) or config.agent.name in OWN_TASKS:
        return plain_question(question, config.data)
    try:
        task = ask_like_tasks(question, config.data, config.seed)
    except Absent as error:
        print(f"asking the question alone, since the tasks are not on this machine: {error}", file=sys.stderr)
        return plain_question(question, config.data)
    if before := len(task.messages) - 1:
        known = f"{before} message{'s' if before > 1 else ''}"
        print(f"asked after the {known} that every task begins with (--plain: the question alone)", file=sys.stderr)
    return task


def _print_group(group: Group, console: Console, decode: Decode) -> None:
    """Answers of one turn as text; episodes of several turns token by token."""
    question = next((m["content"] for m in reversed(group.task.messages) if m["role"] == "user"), group.task.id)
    gold = "" if group.task.answer is None else f"   (answer: {group.task.answer})"
    print(f"\n{plain_text(question)}{gold}")
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
    """The reward of a user's question, which has no score."""

    names: tuple[str, ...] = ()
    trained: tuple[str, ...] = ()
    groupwise = False

    async def __call__(self, task: Task, episode: Any) -> dict[str, float | None]:
        return {}

    async def group(self, task: Task, episodes: Sequence[Any]) -> list[dict[str, float | None]]:
        return [{} for _ in episodes]


def _count(args: CommandLine, flag: str, default: int) -> int:
    text = args.value(flag)
    if text is None:
        return default
    allowed = ranges_of(EvalConfig)["n"]
    count = int(text) if text.isdecimal() and len(text) < 20 else text
    if count not in allowed:
        raise InputError(range_error(flag, count, allowed))
    return int(count)
