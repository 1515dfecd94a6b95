"""An episode on the screen, token by token: what the model sampled stands out from what it was given."""

from __future__ import annotations

import asyncio
import dataclasses
import sys
from collections.abc import Callable, Iterator, Sequence
from itertools import groupby
from typing import Any

from rich.console import Console
from rich.text import Text

from covey.app.compose import Words
from covey.app.loaded_model import Bench, has_tasks, load_bench, prepare_bench, sampling
from covey.app.prepare import training_sampling
from covey.cli.words import parse
from covey.config.schema import Config, EvalConfig
from covey.errors import Absent, InputError
from covey.ranges import ranges_of, refusal
from covey.tasks import ask_like_tasks, plain_question
from covey.types import Episode, Group, Sample, Sampling, Task, ToolUse

SAMPLED, GIVEN = "bold green", "dim"
Decode = Callable[[list[int]], str]


def show_tokens(episode: Episode, decode: Decode, console: Console) -> None:
    """The rows that are trained on. Sampled text is coloured, or between ⟦ ⟧ where there are no colours."""
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
    """Neighbouring tokens of one kind."""
    for sampled, pairs in groupby(zip(row.mask, row.response_ids, strict=True), key=lambda pair: pair[0]):
        yield sampled, [token for _, token in pairs]


# -- covey sample: what a model, or a run's weights, answers to tasks or to a question of yours ------------------------

USAGE = """\
covey sample MODEL_OR_RUN [--question TEXT] [--plain] [-n 4] [--tasks 2] [key=value ...]

  Prints answers, with their rewards where a task is known; episodes of several turns token by token, with what the
  model sampled (and learns from) in colour.
  --question TEXT   ask this instead of tasks. A run's model is asked as it was trained: with the system prompt, the
                    worked examples and the prompt of its tasks; so is a model with data=NAME
  --plain           the question alone
  -n 4              answers to each
  --tasks 2         how many tasks: of validation, or of data.train_files where that is given alone

  covey sample smollm2-135m --question "What is the capital of France?" rollout.max_tokens=40
  covey sample outputs/DATE/TIME --question "Which is the largest: 23, 81, 45 or 60?"
  covey sample outputs/DATE/TIME data.train_files=mine.jsonl --tasks 10
"""


def main(argv: list[str]) -> int:
    values = ("--question", "-n", "--tasks", "--config-name", "--config")
    words = parse(argv, switches=("--plain",), values=values)
    if words.help:
        print(USAGE)
        return 0
    count, many = _count(words, "-n", 4), _count(words, "--tasks", 2)
    question = words.text("--question")
    prepared = prepare_bench(_with_own_files(words), USAGE, asks_tasks=question is None)
    tasks: Sequence[Task] = (prepared.tasks.validation or prepared.tasks.train)[:many]
    if question is not None:
        tasks = [_own_task(question, words, prepared.config)]
    bench = load_bench(prepared)
    if question is not None:
        bench = dataclasses.replace(bench, collector=dataclasses.replace(bench.collector, reward=_NoReward()))
    drawn = training_sampling(prepared.config)
    console = Console(highlight=False)
    for group in asyncio.run(_answers(bench, tasks, count, drawn)):
        _print_group(group, console, bench.collector.renderer.tokenizer.decode)
    return 0


def _with_own_files(words: Words) -> Words:
    """data.train_files alone: its tasks are asked, not those that the run was evaluated on."""
    given = {word.partition("=")[0] for word in words.settings}
    if "data.train_files" not in given or "data.val_files" in given:
        return words
    return dataclasses.replace(words, settings=["data.val_files=null", *words.settings])


def _own_task(question: str, words: Words, config: Config) -> Task:
    """The user's question as the model was trained to be asked, where that is known."""
    if words.on("--plain") or not has_tasks(words) or config.agent.name == "verifiers":
        return plain_question(question, config.data)
    try:
        task = ask_like_tasks(question, config.data, config.seed)
    except Absent as error:
        print(f"the question is asked alone, as the tasks are not here: {error}", file=sys.stderr)
        return plain_question(question, config.data)
    if before := len(task.messages) - 1:
        known = f"{before} message{'s' if before > 1 else ''}"
        print(f"asked after the {known} that every task begins with (--plain: the question alone)", file=sys.stderr)
    return task


async def _answers(bench: Bench, tasks: Sequence[Task], count: int, drawn: Sampling) -> list[Group]:
    async with sampling(bench):
        return await bench.collector.groups(tasks, count, drawn, ("sample",))


def _print_group(group: Group, console: Console, decode: Callable[[list[int]], str]) -> None:
    """An answer of one turn as text; an episode of several with every token and who wrote it."""

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
    what = ranges_of(EvalConfig)["n"]
    count = int(text) if text.isdecimal() and len(text) < 20 else text
    if count not in what:
        raise InputError(refusal(flag, count, what))
    return int(count)
