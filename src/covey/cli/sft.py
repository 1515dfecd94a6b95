"""covey sft"""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

from covey.cli.build_sft import PreparedSft, build_sft, prepare_sft
from covey.cli.resume import check_resume
from covey.cli.train import exit_code, tell_of_the_limit, telling_how_to_go_on, unknown_length, verdict
from covey.cli.words import compose_words, parse
from covey.errors import InputError

if TYPE_CHECKING:
    from covey.loop.sft import SftRun
    from covey.types import Episode

USAGE = """\
covey sft [--config-name RECIPE | --config FILE] [flags] [key=value ...]

  Imitates demonstrations: loss on what the assistant says, and on nothing else. Afterwards:
  covey train model=RUN ...

  --validate-only   check settings, files and model, then stop
  --dry-run         the same, and show the first demonstration with what is learned of it in «»
  --strict          with --validate-only: what is missing on this machine is an error, not a warning

SIGTERM ends a run after its step or evaluation, with a checkpoint (exit code 143); Ctrl-C stops it at once, never in
the middle of a write (130). After both, and after a kill, the same command goes on from the last checkpoint.

A row of a file is a conversation, {"messages": [...], "tools": [...]}, in OpenAI's form, tool calls included; or it has
question (or prompt) and answer (or response, completion).

Settings most people touch (all of them: covey config)

  model=smollm2-135m             a folder, a Hugging Face id, the built-in model, or a run (its best checkpoint)
  data.train_files=demos.jsonl   JSON, JSONL, Parquet or CSV
  data.val_files=held_out.jsonl  the loss on these picks the best checkpoint
  data=calculator                or generated demonstrations of a tool in use
  agent.tools=[calculator]       tools of demonstrations that bring no schemas of their own
  data.train_batch_size=8        demonstrations per step
  learner.lr=5e-5                learning rate; learner.schedule=cosine
  loop.total_epochs=3            passes over the demonstrations
  eval.every=20                  validate every n steps
  loop.save_every=50             checkpoint every n steps; the same command then continues an interrupted run

Examples
  covey sft data=calculator learner.lr=1e-4
  covey sft data.train_files=demos.jsonl data.val_files=held_out.jsonl loop.total_epochs=3 learner.lr=2e-5
"""


def main(argv: list[str]) -> int:
    words = parse(argv, switches=("--validate-only", "--dry-run", "--strict"), values=("--config-name", "--config"))
    if words.help:
        print(USAGE)
        return 0
    if words.places:
        raise InputError(f"what is {words.places[0]!r}?  settings are key=value; see covey sft --help")
    composed = compose_words(words)
    dry = words.on("--dry-run")
    if words.on("--validate-only") or dry:
        prepared = prepare_sft(composed, tolerate_absent=not words.on("--strict"))
        check_resume(prepared, print)
        _print(prepared, shown=prepared.train[:1] if dry else ())
        print(verdict(prepared))
        return 2 if prepared.refused else 0
    return exit_code(run_to_end(prepare_sft(composed)))


def run_to_end(prepared: PreparedSft) -> SftRun:
    from covey.loop.limit import own_interrupts
    from covey.telemetry import print_summary

    run = build_sft(prepared, note=lambda text: print(text, file=sys.stderr))
    with telling_how_to_go_on(run.path, prepared.config.resume), own_interrupts():
        run.train()
    tell_of_the_limit(run, prepared.config.resume)
    if "console" in prepared.config.logging.to:
        print_summary(run.path)
    return run


def _print(prepared: PreparedSft, shown: tuple[Episode, ...]) -> None:
    config = prepared.config
    print(f"model      {config.model.name}")
    print(f"data       {prepared.description}")
    steps = f"{prepared.total_steps} steps" if prepared.steps_known else unknown_length(config, "demonstrations")
    print(f"training   {steps} of {config.data.train_batch_size} demonstrations")
    for episode in shown:
        print(f"first demonstration, as the model sees it:\n{marked(prepared, episode)}")
    for text in prepared.warnings:
        print(f"warning: {text}")


def marked(prepared: PreparedSft, episode: Episode) -> str:
    """Its rows as text, with « before what is learned and » behind it."""
    from covey.loop.samples import episode_rows

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
