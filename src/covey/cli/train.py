"""covey train"""

from __future__ import annotations

import asyncio
import dataclasses
import gc
import itertools
import json
import sys
import textwrap
from collections.abc import Callable, Coroutine, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

from covey.cli.build import Note, build, continuing
from covey.cli.prepare import Prepared, prepare
from covey.cli.words import Words, compose_words, parse
from covey.config import Composed, WrongValues, expand_sweep, recipe_names
from covey.errors import InputError, RunFailed
from covey.redact import hide_settings

if TYPE_CHECKING:
    from covey.loop.run import Run
    from covey.loop.sft import SftRun

USAGE = """\
covey train [--config-name RECIPE | --config FILE] [flags] [key=value ...]

  --config-name RECIPE   a ready run inside the package, below (what each is for: docs/recipes.md)
  --config FILE          your YAML file: nested or dotted keys, or env: + python_args: sections
  --validate-only        check settings, files and model, then stop
  --dry-run              print what would run, then stop
  --multirun             every combination of comma-separated values:  learner.lr=1e-5,2e-5
  --launcher submitit    with --multirun: each combination is a job, on Slurm or as a process here (docs/slurm.md)
  --launcher-options A   of the launcher:  timeout_min=240,gpus_per_node=1,slurm_partition=gpu
  --strict               with --validate-only: what is missing on this machine is an error, not a warning
  --unfinished CODE      exit with this number where loop.max_minutes (otherwise 0) or SIGTERM (143) ended the run

Settings most people touch (all of them: covey config; one of them: covey config explain learner.lr)

  model=smollm2-135m           a folder, a Hugging Face id, or the built-in model
  data=sort                    a generated task (arithmetic, countdown, ...) or a prepared data set (gsm8k, ...)
  data.train_files=a.jsonl     or your own JSON / JSONL / Parquet / CSV with question and answer
  data.val_files=b.jsonl       what to evaluate on
  reward=exact                 a reward by name, or yours: reward=my_rewards.py:score
  algorithm=gvpo               one of {count}: covey algorithms lists them
  data.train_batch_size=8      tasks per step
  rollout.group_size=8         attempts per task
  rollout.max_tokens=256       longest answer
  learner.lr=1e-5              learning rate
  loop.total_steps=100         steps to train
  eval.every=10                evaluate every n steps
  loop.save_every=10           checkpoint every n steps; the same command then continues an interrupted run
  logging.to=[console,wandb]   where figures go besides the run's folder

verl's, AgentFly's, TorchRL's and TRL's names for these work too (algorithm.adv_estimator, actor_rollout_ref.*,
trainer.*, optimizer.lr, num_generations ...).
SIGTERM ends a run after its step or evaluation, with a checkpoint; Ctrl-C stops it. The same command goes on.

Recipes
{recipes}

Examples
  covey train --config-name demo
  covey train algorithm=grpo data=arithmetic loop.total_steps=50
  covey train data.train_files=train.jsonl data.val_files=test.jsonl reward=math_reward_string_equal
"""
SWITCHES = ("--validate-only", "--dry-run", "--multirun", "--strict", "-m")
VALUES = ("--config-name", "--config", "--unfinished", "--launcher", "--launcher-options")


def main(argv: list[str]) -> int:
    words = parse(argv, switches=SWITCHES, values=VALUES)
    if words.help:
        print(usage())
        return 0
    if words.places:
        raise InputError(f"what is {words.places[0]!r}?  settings are key=value; see covey train --help")
    if words.on("--multirun") or words.on("-m"):
        return _multirun(words)
    if words.text("--launcher"):
        raise InputError("--launcher is for sweeps: add --multirun\n  one run on several nodes: covey slurm")
    composed = compose_words(words, training=True)
    if words.on("--validate-only"):
        return _validate(composed, strict=words.on("--strict"))
    if words.on("--dry-run"):
        return _dry_run(composed)
    unfinished = _exit_code(words)
    return exit_code(run_to_end(prepare(composed)), unfinished)


def _exit_code(words: Words) -> int | None:
    text = words.text("--unfinished")
    if text is not None and (not text.isdecimal() or int(text) > 255):
        raise InputError(f"--unfinished wants an exit code between 0 and 255, got {text}")
    return None if text is None else int(text)


def exit_code(run: Run | SftRun, unfinished: int | None = None) -> int:
    """Of a run that ended by itself, by its minutes or by SIGTERM; Ctrl-C's is 130."""
    from covey.loop.limit import TERMINATED

    if is_finished(run.path):
        return 0
    return unfinished if unfinished is not None else TERMINATED if run.terminated else 0


def usage() -> str:
    from covey.algorithms import ALGORITHMS

    recipes = textwrap.fill("  ".join(recipe_names()), 118, initial_indent="  ", subsequent_indent="  ")
    return USAGE.format(recipes=recipes, count=len(ALGORITHMS))


def run_to_end(prepared: Prepared, drive: Callable[[Run], None] | None = None) -> Run:
    """Build a run, train it to its end and report. `drive` makes the steps; by default here, on an event loop of its
    own."""

    def to_its_end(run: Run) -> None:
        with telling_how_to_go_on(run.path, prepared.config.resume):
            complete(run.train())

    run = _trained(prepared, drive or to_its_end, note=print_note)
    report_end(run)
    return run


def report_end(run: Run) -> None:
    tell_of_the_limit(run, run.config.resume)
    if "console" in run.config.logging.to:
        from covey.telemetry import print_summary

        print_summary(run.path)


def print_note(text: str) -> None:
    print(text, file=sys.stderr)


def _trained(prepared: Prepared, drive: Callable[[Run], None], note: Note) -> Run:
    """A run that has ended. In a cluster, one that lost a learner begins again from its last checkpoint."""
    if prepared.config.cluster.name != "ray":
        run = build(prepared, note=note)
        drive(run)
        return run
    return _trained_in_cluster(prepared, drive, note)


def _trained_in_cluster(prepared: Prepared, to_its_end: Callable[[Run], None], note: Note) -> Run:
    from covey.cluster.learner import with_restarts
    from covey.cluster.start import opening

    last: Path | None = None  # the folder of the attempt before

    def make(folder: Path | None) -> Run:
        nonlocal last
        last = folder
        if folder is not None:
            note(f"the run goes on {_where_from(folder)}")
        note(opening(prepared.config.cluster))
        if folder is None:
            return build(prepared, note=note)
        with telling_how_to_go_on(folder, prepared.config.resume):
            return build(continuing(prepared, folder), note=note)

    try:
        run: Run = with_restarts(make, to_its_end, limit=prepared.config.cluster.max_restarts, note=note)
        return run
    except BaseException as error:
        if last is not None:
            _end_if_running(last, "interrupted" if isinstance(error, KeyboardInterrupt) else "failed")
        raise


def _where_from(path: Path) -> str:
    from covey.loop.checkpoint import step_folders, step_of

    if not (steps := step_folders(path / "checkpoints")):
        return "from the start: there is no checkpoint yet (loop.save_every)"
    return f"from its last checkpoint, after step {step_of(steps[-1])}"


def _end_if_running(folder: Path, status: str) -> None:
    """A run that is about to be started again says `running`. If it could not be built, that is no longer true."""
    from covey.loop.folder import open_folder
    from covey.storage import StorageFailed

    with suppress(InputError, StorageFailed):  # the error that ended the run must not be hidden by this one
        found = open_folder(folder)
        try:
            if found.info()["status"] == "running":
                found.set_status(status)
        finally:
            found.release()


@contextmanager
def telling_how_to_go_on(path: Path, resume: str = "auto", *, interrupted: bool = True) -> Iterator[None]:
    """Say, of a run that failed or (`interrupted`) was interrupted, whether it can be continued and from where."""
    from covey.storage import StorageFailed, explain, refusal

    try:
        yield
    except KeyboardInterrupt:
        if interrupted:
            print(f"\n{how_to_go_on(path, resume)}", file=sys.stderr)
        raise
    except RunFailed as error:
        error.add_note(f"  {how_to_go_on(path, resume)}")
        raise
    except Exception as error:
        if (number := refusal(error)) is None:
            raise
        failed = StorageFailed(explain(path, number))
        failed.add_note(f"  {how_to_go_on(path, resume)}")
        raise failed from error


def how_to_go_on(path: Path, resume: str = "auto") -> str:
    from covey.loop.checkpoint import step_folders, step_of

    if is_finished(path):
        return f"all steps are made, and all is saved: {path}"
    if not (steps := step_folders(path / "checkpoints")):
        return "there is no checkpoint to go on from (loop.save_every writes some)"
    command = f"the same command with resume={path}" if resume == "disable" else "the same command"
    return f"{command} goes on from the last checkpoint, after step {step_of(steps[-1])}"


def tell_of_the_limit(run: Run | SftRun, resume: str = "auto") -> None:
    """Of a run that loop.max_minutes or SIGTERM has ended."""
    if not is_finished(run.path):
        what = "SIGTERM came" if run.terminated else "the time is over (loop.max_minutes)"
        print(f"{what}; all is saved, and {how_to_go_on(run.path, resume)}", file=sys.stderr)


def is_finished(path: Path) -> bool:
    """What run.json says. Asked while something else is being told of, it must not be in the way."""
    try:
        return bool(json.loads((path / "run.json").read_text())["status"] == "finished")
    except (OSError, ValueError, LookupError, TypeError):
        return False


def complete(training: Coroutine[Any, Any, Any]) -> None:
    """Run to the end, also where an event loop runs already, as in a notebook."""
    from covey.loop.limit import own_interrupts

    try:
        asyncio.get_running_loop()
    except RuntimeError:
        with own_interrupts():
            asyncio.run(training)
        return
    with ThreadPoolExecutor(1) as thread:
        thread.submit(asyncio.run, training).result()


def _validate(composed: Composed, *, strict: bool) -> int:
    prepared = prepare(composed, tolerate_absent=not strict)
    for line in describe(prepared):
        print(line)
    for text in prepared.warnings:
        print(f"warning: {text}")
    print(verdict(prepared))
    return 2 if prepared.refused else 0


def verdict(prepared: Prepared) -> str:
    """`valid` only of what would also start here."""
    if prepared.refused:
        return "not valid: a run would be refused, see above; nothing was started"
    if count := len(prepared.absent):
        things = "1 thing is" if count == 1 else f"{count} things are"
        return f"the settings are valid, but {things} not on this machine, see above; nothing was started"
    return "valid: nothing was started"


def _dry_run(composed: Composed) -> int:
    import yaml

    prepared = prepare(composed, tolerate_absent=True)
    print(yaml.safe_dump(hide_settings(prepared.tree), sort_keys=False, allow_unicode=True))
    for line in describe(prepared):
        print(line)
    if prepared.tasks.train:
        print("first task, as the model sees it:")
        for message in prepared.tasks.train[0].messages:
            print(f"  {message['role']:>9} | {message['content']}")
    for text in prepared.warnings:
        print(f"warning: {text}")
    print("dry run: nothing was started")
    return 0


def describe(prepared: Prepared) -> list[str]:
    """What would run, in a few lines."""
    config = prepared.config
    per_step = config.data.train_batch_size * config.rollout.group_size
    conditions = {c.reward: f" if {c.needed}" for c in prepared.rewards.conditions}
    weighed = [
        f"{name} × {prepared.rewards.weights[name]:g}{conditions.get(name, '')}" for name in prepared.rewards.names
    ]
    return [
        f"model      {config.model.name}",
        f"tasks      {prepared.tasks.description}",
        f"reward     {', '.join(weighed)}",
        f"algorithm  {config.algorithm.name}, loss {config.algorithm.loss}",
        f"engine     {config.rollout.name}" + (f": {prepared.engine_reason}" if prepared.engine_reason else ""),
        f"training   {_length(prepared)} of {config.data.train_batch_size} tasks × "
        f"{config.rollout.group_size} attempts = {per_step} episodes a step",
    ]


def _length(prepared: Prepared) -> str:
    """Epochs of tasks that are not here are an unknown number of steps."""
    loop = prepared.config.loop
    if loop.total_steps is None and not prepared.tasks.train:
        epochs = loop.total_epochs or 1
        return f"{epochs} epoch{'s' if epochs > 1 else ''} (an unknown number of steps: the tasks are not here)"
    return f"{prepared.total_steps} steps"


def _multirun(words: Words) -> int:
    """Every combination in turn, in multirun/DATE/TIME/NUMBER. All are checked before the first one starts."""
    from covey.loop.limit import TERMINATED

    combinations = expand_sweep(words.settings)
    jobs = _compose_all(words, combinations)
    if words.on("--validate-only") or words.on("--dry-run"):
        codes = [0]
        for composed in jobs:
            check = _dry_run if words.on("--dry-run") else lambda c: _validate(c, strict=words.on("--strict"))
            codes.append(check(composed))
        return max(codes)
    if launcher := words.text("--launcher"):
        return _launch(words, launcher, combinations, jobs)
    prepared = [prepare(job) for job in jobs]
    base = _new_base(Path("multirun"))
    for number, (settings, job) in enumerate(zip(combinations, prepared, strict=True)):
        print(f"[{number + 1}/{len(jobs)}] {' '.join(settings)}")
        if run_to_end(dataclasses.replace(job, folder=base / str(number))).terminated:  # SIGTERM is for the whole sweep
            return TERMINATED
        gc.collect()  # the models of the last job
    return 0


def _compose_all(words: Words, combinations: list[list[str]]) -> list[Composed]:
    """The configuration of every run of a sweep. Wrong values of all runs are reported together."""
    found: list[Composed] = []
    wrong: list[str] = []
    for settings in combinations:
        try:
            found.append(compose_words(words, settings=settings, training=True))
        except WrongValues as error:
            wrong += error.problems
    if wrong:
        raise WrongValues(wrong)
    return found


def _new_base(folder: Path) -> Path:
    """folder/DATE/TIME, and no other sweep's: two may begin in one second, or the clock was set back."""
    base = folder / datetime.now().strftime("%Y-%m-%d/%H-%M-%S")
    for attempt in itertools.count():
        path = base if attempt == 0 else base.with_name(f"{base.name}-{attempt}")
        try:
            path.mkdir(parents=True)
            return path
        except FileExistsError:
            continue
    raise AssertionError("not reached")


def _launch(words: Words, launcher: str, combinations: list[list[str]], jobs: list[Composed]) -> int:
    """Checked here as far as this machine can tell, and run elsewhere."""
    from covey.cli.launch import read_options, submit

    options = read_options(words.text("--launcher-options"))
    for job in jobs:
        prepare(job, tolerate_absent=True)
    base = _new_base(Path("multirun"))
    source = {flag: value for flag, value in words.flags.items() if flag in ("--config", "--config-name")}
    ids = submit(launcher, combinations, base, source, options)
    for number, (settings, job_id) in enumerate(zip(combinations, ids, strict=True)):
        print(f"[{number + 1}/{len(jobs)}] job {job_id}: {base / str(number)}  {' '.join(settings)}")
    return 0
