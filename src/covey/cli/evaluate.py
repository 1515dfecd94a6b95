"""covey eval: models, runs or checkpoints on held-out tasks, with figures, intervals and comparisons."""

from __future__ import annotations

import asyncio
import gc
import json
import shlex
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AsyncExitStack, ExitStack, contextmanager
from datetime import datetime
from pathlib import Path
from typing import Any

from rich.console import Console

from covey.app.build import make_collector
from covey.app.evaluation import Candidate, Request, find_candidates
from covey.app.models import make_engine
from covey.app.parts import open_rewards, services
from covey.cli.words import parse
from covey.errors import InputError, RunFailed
from covey.evaluation.answers import EvalFolder, EvalJob, Key
from covey.evaluation.report import Report, flat_metrics
from covey.evaluation.scores import Answer, Scores, compare_all, compute_scores
from covey.protocols import RolloutEngine
from covey.storage import write_atomically
from covey.telemetry.jsonl import finite
from covey.telemetry.progress import ProgressLine

USAGE = """\
covey eval MODEL_OR_RUN... [--tasks gsm8k,math500] [--n 16] [--limit 100] [--out DIR] [key=value ...]

  Answers held-out tasks: pass@1, pass@k, maj@n, mean reward and lengths, with 95 % confidence intervals over tasks.
  MODEL_OR_RUN   a model (folder, Hugging Face id, smollm2-135m), a run (outputs/DATE/TIME) or a checkpoint of one;
                 a run brings its own tasks and rewards, and its best checkpoint. Several are compared with the first
  --tasks A,B    data sets, generated tasks or files (test.jsonl); without it the validation tasks of the settings
  --n 16         answers to each task: 1 (default) is greedy, more are sampled (eval.temperature, top_p, top_k)
  --limit 100    only the first tasks of each set
  --k 1,8        the k of pass@k; without it 1, 2, 4, ... n
  --solved 1     an answer is right if its reward is at least this
  --out DIR      where answers.jsonl, results.json and results.md go; without it outputs/eval/DATE_TIME. The same
                 command with the same folder goes on where it was interrupted
  --json FILE    one model on its own tasks: write the figures there too, under the names that a run logs

  covey eval smollm2-135m data=sort eval.modes=[greedy,sampled] eval.n=4
  covey eval outputs/A outputs/B --tasks arithmetic,countdown --n 8 --out outputs/eval/a-or-b
"""
FLAGS = ("--tasks", "--n", "--k", "--limit", "--solved", "--out", "--json", "--config-name", "--config")
WIDE = 160  # columns, where no screen says otherwise


def main(argv: list[str]) -> int:
    words = parse(argv, values=FLAGS)
    if words.help:
        print(USAGE)
        return 0
    if not words.places:
        raise InputError(f"name a model or a run\n\n{USAGE.rstrip()}")
    request = Request.read(words)
    candidates = find_candidates(words, request)
    command = shlex.join(["covey", "eval", *argv])
    with ExitStack() as resources:
        candidates = [candidate.with_workers(resources) for candidate in candidates]
        folder = EvalFolder(_place(request, candidates), _settings(candidates), command)
        resources.callback(folder.close)
        _say(f"writing to {folder.path}")
        with _telling_how_to_go_on(command, request, folder):
            _ask_all(candidates, folder)
        report = _report(candidates, folder, command)
    _tell(report, folder.path)
    if not request.tasks and len(words.places) == 1:
        _tell_as_logged(report.scores, request.json)
    _refuse_nothing(report.scores)
    return 0


def _place(request: Request, candidates: Sequence[Candidate]) -> Path:
    if request.out is not None:
        return request.out
    output = Path(candidates[0].prepared.config.logging.output_dir)
    base = output / "eval" / datetime.now().strftime("%Y-%m-%d_%H-%M-%S")
    numbered = (base.with_name(f"{base.name}-{number}") for number in range(1, 1000))
    return next(path for path in (base, *numbered) if not path.exists())


def _settings(candidates: Sequence[Candidate]) -> dict[str, Any]:
    return {f"{candidate.model} on {candidate.task}": candidate.identity() for candidate in candidates}


def _ask_all(candidates: Sequence[Candidate], folder: EvalFolder) -> None:
    """One model after the other; one that has answered everything is not loaded."""
    measures = _measures(candidates)
    done = folder.done([measure.spec for measure in measures])
    total = sum(len(measure.tasks) * measure.spec.n for measure in measures)
    before = sum(len(done[measure.spec.key]) * measure.spec.n for measure in measures)
    if before:
        _say(f"{before} of {total} answers are there already")
    with ProgressLine(total, before, unit="answers") as line:
        for model in dict.fromkeys(candidate.model for candidate in candidates):
            rest = [c for c in candidates if c.model == model and any(_missing(m, done) for m in c.measures)]
            if rest:
                asyncio.run(_ask(rest, done, folder, line))
                gc.collect()  # its weights, before the next one's


def _measures(candidates: Sequence[Candidate]) -> list[EvalJob]:
    return [measure for candidate in candidates for measure in candidate.measures]


def _missing(measure: EvalJob, done: Mapping[Key, set[int]]) -> bool:
    return len(done[measure.spec.key]) < len(measure.tasks)


async def _ask(
    candidates: Sequence[Candidate], done: Mapping[Key, set[int]], folder: EvalFolder, line: ProgressLine
) -> None:
    """All sets of tasks, of one model."""
    from covey.models.loading import load_policy

    first = candidates[0].prepared
    assert first.model is not None
    policy = load_policy(first.model, first.config.model)
    engine = make_engine(first, policy)
    try:
        await engine.publish(policy, version=0)
        line.start_clock()
        for candidate in candidates:
            await _ask_tasks(candidate, engine, done, folder, line)
    finally:
        engine.close()


async def _ask_tasks(
    candidate: Candidate,
    engine: RolloutEngine,
    done: Mapping[Key, set[int]],
    folder: EvalFolder,
    line: ProgressLine,
) -> None:
    prepared, what = candidate.prepared, f"{candidate.model} on {candidate.task}"

    def hand_over(answers: list[Answer]) -> None:
        folder.append(answers)
        line.advance(len(answers), sum(answer.tokens for answer in answers), what)

    with ExitStack() as held:
        rewards = open_rewards(prepared.config, prepared.rewards, candidate.workers, held)
        collector = make_collector(prepared, engine, rewards)
        async with AsyncExitStack() as open_services:
            for service in services(prepared.agent):
                await open_services.enter_async_context(service)
            for measure in candidate.measures:
                await measure.run(collector, done[measure.spec.key], hand_over)


def _report(candidates: Sequence[Candidate], folder: EvalFolder, command: str) -> Report:
    """Everything is computed from the file of answers, so that a restart makes no difference."""
    specs = [measure.spec for measure in _measures(candidates)]
    places = list(dict.fromkeys((spec.task, spec.mode) for spec in specs))
    specs.sort(key=lambda spec: places.index((spec.task, spec.mode)))  # models stand below each other
    answers = folder.answers(specs)
    found = [compute_scores(spec, answers[spec.key]) for spec in specs]
    return Report(found, compare_all(specs, answers), command)


def _tell(report: Report, path: Path) -> None:
    write_atomically(path / "results.json", json.dumps(finite(report.as_data()), indent=1))
    write_atomically(path / "results.md", report.as_markdown())
    report.show(Console(width=None if sys.stdout.isatty() else WIDE, highlight=False))
    _say(f"{path / 'results.md'}  results.json  answers.jsonl")


def _tell_as_logged(found: Sequence[Scores], file: Path | None) -> None:
    metrics = flat_metrics(found)
    for name, value in metrics.items():
        print(f"{name:40} {value:.4f}")
    if file is not None:
        write_atomically(file, json.dumps(metrics, indent=1))


def _refuse_nothing(found: Sequence[Scores]) -> None:
    for one in found:
        if not one.answers:
            cause = next(iter(one.failures))
            raise RunFailed(f"No answer of {one.spec.model} to {one.spec.task} was scored: {cause}: {one.example}")


@contextmanager
def _telling_how_to_go_on(command: str, request: Request, folder: EvalFolder) -> Iterator[None]:
    named = command if request.out is not None else f"{command} --out {shlex.quote(str(folder.path))}"
    try:
        yield
    except InputError:
        folder.abandon()
        raise
    except KeyboardInterrupt:
        _say(f"\nto go on from here:  {named}")
        raise
    except RunFailed as error:
        error.add_note(f"  to go on from here:  {named}")
        raise


def _say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)
