"""covey train and covey sft."""

from __future__ import annotations

import textwrap
from pathlib import Path
from typing import TYPE_CHECKING

from covey.algorithms import ALGORITHMS
from covey.app.compose import CommandLine, compose_command
from covey.app.train import exit_code, run_sft, run_to_end
from covey.cli.parse import parse
from covey.config import Composed, expand_sweep, recipe_names
from covey.errors import InputError
from covey.images import plain_text
from covey.redact import hide_settings

if TYPE_CHECKING:  # not needed for --help
    from covey.app.prepare import Prepared
    from covey.app.run_files import PreparedRun
    from covey.app.sft import PreparedSft
    from covey.config.schema import Config
    from covey.types import Episode

RECIPES = textwrap.fill("  ".join(recipe_names()), 118, initial_indent="  ", subsequent_indent="  ")
USAGE = f"""\
covey train [--config-name RECIPE | --config FILE] [flags] [key=value ...]

  --config-name RECIPE   a ready run inside the package, below (what each is for: docs/recipes.md)
  --config FILE          your YAML file: nested or dotted keys, or env: + python_args: sections
  --validate-only        check settings, files and model, then stop
  --dry-run              print settings and the first task, then stop
  --multirun             every combination of comma-separated values:  learner.lr=1e-5,2e-5
  --launcher submitit    with --multirun: each combination is a job, on Slurm or as a local process (docs/slurm.md)
  --launcher-options A   for the launcher:  timeout_min=240,gpus_per_node=1,slurm_partition=gpu
  --strict               with --validate-only: files and packages missing on this machine are errors, not warnings
  --unfinished CODE      exit code if loop.max_minutes (otherwise 0) or SIGTERM (143) ended the run

Common settings (all of them: covey config; one of them: covey config explain learner.lr)

  model=smollm2-135m           a folder, a Hugging Face id, the built-in model, or a run (its best checkpoint)
  data=sort                    a generated task (arithmetic, countdown, ...) or a prepared data set (gsm8k, ...)
  data.train_files=a.jsonl     or your own JSON / JSONL / Parquet / CSV with question and answer
  data.val_files=b.jsonl       data for evaluation
  reward=exact                 a reward by name, or yours: reward=my_rewards.py:score
  algorithm=gvpo               one of {len(ALGORITHMS)}: covey algorithms lists them
  data.train_batch_size=8      tasks per step
  rollout.group_size=8         attempts per task
  rollout.max_tokens=256       longest answer in tokens
  learner.lr=1e-5              learning rate
  loop.total_steps=100         steps to train
  eval.every=10                evaluate every n steps
  loop.save_every=10           checkpoint every n steps; the same command then continues an interrupted run
  logging.to=[console,wandb]   loggers besides the run's folder

The names of verl, AgentFly, TorchRL and TRL work too (algorithm.adv_estimator, actor_rollout_ref.*, trainer.*,
optimizer.lr, num_generations ...).
SIGTERM ends a run after its step or evaluation, with a checkpoint; Ctrl-C stops it. The same command continues the run.

Recipes
{RECIPES}

Examples
  covey train --config-name demo
  covey train resume=outputs/DATE/TIME loop.total_steps=200   # more steps; resume=RUN/checkpoints/step-20: a new run
  covey train data.train_files=train.jsonl data.val_files=test.jsonl reward=math_reward_string_equal
"""
SWITCHES = ("--validate-only", "--dry-run", "--multirun", "--strict", "-m")
VALUES = ("--config-name", "--config", "--unfinished", "--launcher", "--launcher-options")


def main(argv: list[str]) -> int:
    args = parse(argv, switches=SWITCHES, values=VALUES)
    if args.positional:
        raise InputError(f"unexpected argument {args.positional[0]!r}: settings are key=value; see covey train --help")
    if args.has("--multirun") or args.has("-m"):
        return _multirun(args)
    if args.value("--launcher"):
        raise InputError("--launcher is for sweeps: add --multirun\n  one run on several nodes: covey slurm")
    from covey.app.prepare import prepare

    composed = compose_command(args, training=True)
    if args.has("--validate-only"):
        return _validate(composed, strict=args.has("--strict"))
    if args.has("--dry-run"):
        return _dry_run(composed)
    text = args.value("--unfinished")
    if text is not None and (not text.isdecimal() or int(text) > 255):
        raise InputError(f"--unfinished wants an exit code between 0 and 255, got {text}")
    return exit_code(run_to_end(prepare(composed)), None if text is None else int(text))


def _validate(composed: Composed, *, strict: bool) -> int:
    from covey.app.prepare import prepare
    from covey.app.resume import check_resume

    prepared = prepare(composed, tolerate_absent=not strict)
    check_resume(prepared, print)
    for line in describe(prepared):
        print(line)
    for text in prepared.warnings:
        print(f"warning: {text}")
    print(verdict(prepared))
    return 2 if prepared.rejected else 0


def verdict(prepared: PreparedRun) -> str:
    """`valid` only if the run would also start on this machine."""
    if prepared.rejected:
        return "not valid: a run would be refused, see above; nothing was started"
    if count := len(prepared.absent):
        things = "1 thing is" if count == 1 else f"{count} things are"
        return f"the settings are valid, but {things} not on this machine, see above; nothing was started"
    return "valid: nothing was started"


def _dry_run(composed: Composed) -> int:
    import yaml

    from covey.app.prepare import prepare
    from covey.app.resume import check_resume

    prepared = prepare(composed, tolerate_absent=True)
    check_resume(prepared, print)
    print(yaml.safe_dump(hide_settings(prepared.tree), sort_keys=False, allow_unicode=True))
    for line in describe(prepared):
        print(line)
    if prepared.tasks.train:
        print("first task, as the model sees it:")
        for message in prepared.tasks.train[0].messages:
            print(f"  {message['role']:>9} | {plain_text(message['content'])}")
    for text in prepared.warnings:
        print(f"warning: {text}")
    print("dry run: nothing was started")
    return 0


def describe(prepared: Prepared) -> list[str]:
    """A summary of the run."""
    config = prepared.config
    known = config.loop.total_steps is not None or prepared.tasks.train
    length = f"{prepared.total_steps} steps" if known else _unknown_length(config, "tasks")
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
        f"training   {length} of {config.data.train_batch_size} tasks × "
        f"{config.rollout.group_size} attempts = {per_step} episodes a step",
    ]


def _unknown_length(config: Config, of: str) -> str:
    """The length of a run in epochs if its data are not on this machine."""
    epochs = config.loop.total_epochs or 1
    return f"{epochs} epoch{'s' if epochs > 1 else ''} (an unknown number of steps: the {of} are not here)"


def _multirun(args: CommandLine) -> int:
    from covey.app.prepare import prepare
    from covey.app.sweep import compose_all, new_base, read_options, run_here, submit
    from covey.training.interrupts import TERMINATED

    combinations = expand_sweep(args.settings)
    jobs = compose_all(args, combinations)
    if args.has("--dry-run"):
        return max(map(_dry_run, jobs))
    if args.has("--validate-only"):
        return max(_validate(job, strict=args.has("--strict")) for job in jobs)
    titles = [f"[{number}/{len(jobs)}]" for number in range(1, len(jobs) + 1)]
    launcher = args.value("--launcher")
    if not launcher:
        done = run_here(jobs, lambda number: print(titles[number], " ".join(combinations[number])))
        return 0 if done else TERMINATED
    options = read_options(args.value("--launcher-options"))
    for job in jobs:
        prepare(job, tolerate_absent=True)  # jobs may run on another machine
    base = new_base(Path("multirun"))
    source = {flag: value for flag, value in args.flags.items() if flag in ("--config", "--config-name")}
    ids = submit(launcher, combinations, base, source, options)
    for number, (settings, job_id) in enumerate(zip(combinations, ids, strict=True)):
        print(f"{titles[number]} job {job_id}: {base / str(number)}  {' '.join(settings)}")
    return 0


# -- covey sft ---------------------------------------------------------------------------------------------------------

SFT_USAGE = """\
covey sft [--config-name RECIPE | --config FILE] [flags] [key=value ...]

  Supervised fine-tuning on demonstrations: the loss is on the assistant's tokens only. Afterwards:
  covey train model=RUN ...

  --validate-only   check settings, files and model, then stop
  --dry-run         the same, and show the first demonstration with its trained tokens in «»
  --strict          with --validate-only: files and packages missing on this machine are errors, not warnings

SIGTERM ends a run after its step or evaluation, with a checkpoint (exit code 143); Ctrl-C stops it at once, never in
the middle of a write (130). After both, and after a kill, the same command continues from the last checkpoint.

A row of a file is a conversation in OpenAI's format, {"messages": [...], "tools": [...]}, with tool calls; or it has
question (or prompt) and answer (or response, completion).

Common settings (all of them: covey config)

  model=smollm2-135m             a folder, a Hugging Face id, the built-in model, or a run (its best checkpoint)
  data.train_files=demos.jsonl   JSON, JSONL, Parquet or CSV
  data.val_files=held_out.jsonl  the loss on these picks the best checkpoint
  data=calculator                or generated demonstrations of a tool in use
  agent.tools=[calculator]       tools of demonstrations without schemas of their own
  data.train_batch_size=8        demonstrations per step
  learner.lr=5e-5                learning rate; learner.schedule=cosine
  loop.total_epochs=3            passes over the demonstrations
  eval.every=20                  validate every n steps
  loop.save_every=50             checkpoint every n steps; the same command then continues an interrupted run

Examples
  covey sft data=calculator learner.lr=1e-4
  covey sft data.train_files=demos.jsonl data.val_files=held_out.jsonl loop.total_epochs=3 learner.lr=2e-5
"""


def main_sft(argv: list[str]) -> int:
    from covey.app.resume import check_resume
    from covey.app.sft import prepare_sft

    args = parse(argv, switches=("--validate-only", "--dry-run", "--strict"), values=("--config-name", "--config"))
    if args.positional:
        raise InputError(f"unexpected argument {args.positional[0]!r}: settings are key=value; see covey sft --help")
    composed = compose_command(args)
    dry = args.has("--dry-run")
    if args.has("--validate-only") or dry:
        prepared = prepare_sft(composed, tolerate_absent=not args.has("--strict"))
        check_resume(prepared, print)
        _print_sft(prepared, shown=prepared.train[:1] if dry else ())
        print(verdict(prepared))
        return 2 if prepared.rejected else 0
    return exit_code(run_sft(prepare_sft(composed)))


def _print_sft(prepared: PreparedSft, shown: tuple[Episode, ...]) -> None:
    config = prepared.config
    print(f"model      {config.model.name}")
    print(f"data       {prepared.description}")
    steps = f"{prepared.total_steps} steps" if prepared.steps_known else _unknown_length(config, "demonstrations")
    print(f"training   {steps} of {config.data.train_batch_size} demonstrations")
    for episode in shown:
        print(f"first demonstration, as the model sees it:\n{_marked(prepared, episode)}")
    for text in prepared.warnings:
        print(f"warning: {text}")


def _marked(prepared: PreparedSft, episode: Episode) -> str:
    """The rows of an episode as text, with trained tokens in «»."""
    from covey.training.samples import episode_rows

    assert prepared.model is not None
    decode = prepared.model.tokenizer.decode
    lines = []
    for row in episode_rows(episode, 0):
        text, start = decode(list(row.prompt_ids)), 0
        for at in range(1, len(row.mask) + 1):
            if at == len(row.mask) or row.mask[at] != row.mask[start]:
                part = decode(list(row.response_ids[start:at]))
                text += f"«{part}»" if row.mask[start] else part
                start = at
        lines.append(text)
    return "\n---\n".join(lines)
