"""covey simulate"""

from __future__ import annotations

import dataclasses
import json
import math
import random
from pathlib import Path

from covey.app.compose import Words, compose_words
from covey.app.prepare import make_algorithm
from covey.app.resume import is_run, run_of
from covey.cli.words import parse
from covey.config.schema import Config
from covey.errors import Absent, InputError
from covey.simulate.hardware import (
    DEVICES,
    FORWARD_PASS,
    Device,
    Episodes,
    Figure,
    Shape,
    Speeds,
    assumed_episodes,
    assumed_figures,
    assumed_speeds,
    device,
    shape_from_name,
)
from covey.simulate.measured import benchmark_speeds, read_benchmarks, run_episodes, run_speeds, run_steps, with_waits
from covey.simulate.simulation import Workload
from covey.simulate.splits import Job, Training, all_splits, predict, report_json, report_text

USAGE = f"""\
covey simulate RECIPE_OR_RUN --gpus 512 [--gpu h200] [flags] [key=value ...]

  Step time, utilisation, staleness and memory for several splits of the devices into learner and rollout, before
  machines are rented. Figures of one device are measured where you bring some, else assumed; the report says which.

  RECIPE_OR_RUN            a recipe, a YAML file, or the folder of a run on one device, whose figures are then used
  --gpus 512               devices in all
  --gpu h200               {" | ".join(DEVICES)}; of a run: its own kind
  --figures A.json,B.json  benchmarks' results of one device (decode-*.json, scaling-*.json)
  --answer-tokens 700      median of an answer; without a run a third of rollout.max_tokens
  --prompt-tokens 256      of a prompt
  --turns 3                replies in an episode, where an agent has tools
  --tool-seconds 1:20      what a tool takes, one number or a range
  --json FILE              the same figures as JSON

  covey simulate gvpo_math --gpus 64 --gpu h100
  covey simulate outputs/2026-07-01/10-00-00 --gpus 16 --tool-seconds 1:20 mode.max_staleness=3
"""
VALUES = (
    *("--gpus", "--gpu", "--figures", "--answer-tokens", "--prompt-tokens", "--turns", "--tool-seconds", "--json"),
)
LORA_SHARE = 0.0053 / 16  # of the parameters that adapters on every linear layer have, per rank


def main(argv: list[str]) -> int:
    words = parse(argv, values=VALUES)
    if words.help:
        print(USAGE)
        return 0
    if len(words.places) != 1:
        raise InputError(f"name one recipe or run\n\n{USAGE.rstrip()}")
    name, devices = words.places[0], _count(words, "--gpus", None)
    config, run = _settings(name, words)
    kind = _device(words, run)
    job, figures = _job(config, words, kind, run)
    leads = (0, max(1, config.mode.max_staleness))
    splits = all_splits(devices, job.engine_devices)
    predictions = [predict(_in_mode(job, config, lead), split, lead) for lead in leads for split in splits]
    work = job.work
    title = (
        f"{name} on {devices} × {kind.name}: {config.model.name}, {work.groups} tasks × {work.attempts} attempts, "
        f"{work.episodes.tokens:,.0f} sampled tokens an episode"
    )
    print(report_text(title, figures, predictions))
    if written := words.text("--json"):
        settings = {"gpus": devices, "gpu": kind.name, "model": config.model.name}
        text = json.dumps(report_json(title, figures, predictions, settings), indent=1)
        Path(written).write_text(text + "\n")
    return 0


def _settings(name: str, words: Words) -> tuple[Config, Path | None]:
    """What would be trained, and the run whose figures count."""
    tolerant = dataclasses.replace(words, flags=words.flags | {"--validate-only": True})
    if is_run(name):
        run = run_of(Path(name).expanduser())
        return compose_words(tolerant, config_path=run / "config.yaml").config, run
    if name.endswith((".yaml", ".yml")):
        return compose_words(tolerant, config_path=Path(name)).config, None
    tolerant.flags["--config-name"] = name
    return compose_words(tolerant).config, None


def _device(words: Words, run: Path | None) -> Device:
    on_cpu = run is not None and json.loads((run / "run.json").read_text())["device"] == "cpu"
    return device(words.text("--gpu") or ("cpu" if on_cpu else "h200"))


def _job(config: Config, words: Words, kind: Device, run: Path | None) -> tuple[Job, list[Figure]]:
    if config.mode.max_uses > 1 or config.mode.publish_every > 1:
        raise InputError("covey simulate does not know mode.max_uses and mode.publish_every\n  leave them at 1")
    if config.learner.tensor_parallel > 1:
        raise InputError("covey simulate does not know learner.tensor_parallel\n  leave it at 1: shards are simulated")
    shape = model_shape(config)
    episodes, figures = _episodes(config, words, run)
    work = Workload(config.data.train_batch_size, config.rollout.group_size, episodes)
    training = Training(
        reference=make_algorithm(config).needs.reference,
        checkpointing=config.model.gradient_checkpointing,
        trained=min(1.0, LORA_SHARE * config.model.lora.rank) if config.model.lora.rank else 1.0,
        offload_optimizer=config.learner.offload_optimizer,
        offload_reference=config.learner.offload_reference,
        micro_batch_tokens=config.learner.micro_batch_tokens,
    )
    job = Job(
        work,
        _assumed(config, shape, kind, episodes, training),
        shape,
        kind,
        training,
        updates=_updates(config),
        epochs=config.learner.epochs,
        parallel=config.learner.parallel,
        engine_devices=config.rollout.tensor_parallel,
        max_sequences=config.rollout.max_sequences,
        cache_share=config.rollout.memory,
        drain=config.mode.update == "drain",
    )
    speeds, found = _speeds(config, words, job, run)
    return dataclasses.replace(job, speeds=speeds), [*figures, *found, *_sheet(kind)]


def _updates(config: Config) -> int:
    """Optimiser steps of one training step."""
    size = config.learner.mini_batch_size or config.data.train_batch_size
    return config.learner.epochs * math.ceil(config.data.train_batch_size / size)


def passes(config: Config, lead: int) -> float:
    """Forward-and-backward passes over a token in a step. What an older policy drew is looked at once more before, as
    is what the reference thinks of it."""
    mode = dataclasses.replace(config.mode, name="async" if lead else "sync", max_staleness=lead)
    needs = make_algorithm(dataclasses.replace(config, mode=mode)).needs
    return 1 + FORWARD_PASS * (needs.reference + needs.proximal)


def _in_mode(job: Job, config: Config, lead: int) -> Job:
    """The job's speeds are those of training by turns."""
    token = job.speeds.learn_token * passes(config, lead) / passes(config, 0)
    return dataclasses.replace(job, speeds=dataclasses.replace(job.speeds, learn_token=token))


def _assumed(config: Config, shape: Shape, kind: Device, episodes: Episodes, training: Training) -> Speeds:
    return assumed_speeds(
        shape,
        kind,
        episodes.prompt + episodes.length / 2,
        passes=passes(config, 0),
        checkpointing=training.checkpointing,
        split=config.rollout.tensor_parallel,
    )


def _speeds(config: Config, words: Words, job: Job, run: Path | None) -> tuple[Speeds, list[Figure]]:
    """Measured by benchmarks, or in a run on the same kind of device; else assumed."""
    speeds, found = job.speeds, {f.name: f for f in assumed_figures(job.shape, job.device, job.speeds)}
    if run is not None and _same_kind(run, job.device):
        as_run = compose_words(Words(), config_path=run / "config.yaml").config
        if as_run.cluster.name != "local":
            raise InputError(f"{run} ran on several devices\n  figures are taken from a run of one: cluster=local")
        episodes = run_episodes(run, run_steps(run))
        if words.text("--tool-seconds"):
            episodes = job.work.episodes
        lead = as_run.mode.max_staleness if as_run.mode.name == "async" else 0
        speeds, measured = run_speeds(
            run,
            Workload(as_run.data.train_batch_size, as_run.rollout.group_size, episodes),
            speeds,
            updates=_updates(as_run),
            epochs=as_run.learner.epochs,
            lead=lead,
            capacity=as_run.rollout.max_sequences,
        )
        by_turns = speeds.learn_token * passes(config, 0) / passes(as_run, lead)
        speeds = dataclasses.replace(speeds, learn_token=by_turns)
        found |= {figure.name: figure for figure in measured}
    if files := words.text("--figures"):
        results = read_benchmarks(Path(file).expanduser() for file in files.split(","))
        speeds, measured = benchmark_speeds(results, config.model.name, speeds)
        found |= {figure.name: figure for figure in measured}
    return speeds, list(found.values())


def _same_kind(run: Path, kind: Device) -> bool:
    """Whether the run's seconds are those of this device: a GPU is taken to be the one that was named."""
    on_cpu = json.loads((run / "run.json").read_text())["device"] == "cpu"
    return on_cpu == (kind.name == "cpu")


def _episodes(config: Config, words: Words, run: Path | None) -> tuple[Episodes, list[Figure]]:
    low, high = _range(words)
    if run is None:
        turns = _count(words, "--turns", 1 if config.agent.name == "chat" else min(3, config.agent.max_turns))
        answer = _count(words, "--answer-tokens", max(1, config.rollout.max_tokens // 3))
        prompt = _count(words, "--prompt-tokens", 256)
        longest = config.rollout.max_tokens
        found = assumed_episodes(answer=answer, longest=longest, prompt=prompt, turns=turns, wait=(low, high))
        why = f"log-normal, median {answer}, at most {longest}; {turns} turns; prompts of {prompt}"
        source, waits = Figure("answers", f"{found.tokens:,.0f} tokens an episode", False, why), False
    else:
        for flag in ("--turns", "--answer-tokens", "--prompt-tokens"):
            if words.text(flag):
                raise InputError(f"{flag}: {run} says how long its answers are\n  leave it out, or name a recipe")
        found, waits = run_episodes(run, run_steps(run)), True
        if words.text("--tool-seconds"):
            draw = random.Random("waits")
            found, waits = with_waits(found, lambda: draw.uniform(low, high)), False
        why = f"{len(found.examples)} episodes of {run}; prompts of {found.prompt}"
        source = Figure("answers", f"{found.tokens:,.0f} tokens an episode", True, why)
    wait = Figure("tools", f"{found.waits:.3g} s an episode", waits, "the run's mean" if waits else "--tool-seconds")
    return found, [source, wait] if any(len(turns) > 1 for turns in found.examples) else [source]


def _sheet(kind: Device) -> list[Figure]:
    text = f"{kind.memory / 2**30:.0f} GiB, {kind.link / 1e9:.0f} GB/s in a machine, {kind.network / 1e9:.0f} between"
    return [Figure("device", text, False, f"data sheet of {kind.name}")]


def model_shape(config: Config) -> Shape:
    """From the model's configuration where it is on this machine; else by the size in its name."""
    from transformers import AutoConfig

    from covey.models.loading import MAIN, locate

    place = locate(config.model.name)
    options = {"local_files_only": True, "revision": place.revision or MAIN}
    try:
        found = AutoConfig.from_pretrained(place.path, trust_remote_code=False, **options)
        return Shape.from_config(found, "its config.json")
    except (OSError, ValueError):  # not here, or of a kind that only the model's own code knows
        guess = shape_from_name(config.model.name)
        if guess is None:
            raise Absent(
                f"the size of {config.model.name} is not known: it is not here, and its name has none\n"
                "  model=FOLDER, or a name such as Qwen/Qwen2.5-7B"
            ) from None
        return guess


def _count(words: Words, flag: str, default: int | None) -> int:
    text = words.text(flag)
    if text is None and default is not None:
        return default
    if text is None or not text.isdecimal() or int(text) < 1:
        raise InputError(f"{flag} wants a whole number from 1 on" + (f", got {text}" if text else f"\n\n{USAGE}"))
    return int(text)


def _range(words: Words) -> tuple[float, float]:
    text = words.text("--tool-seconds") or "1"
    low, _, high = text.partition(":")
    try:
        found = float(low), float(high or low)
    except ValueError:
        raise InputError(f"--tool-seconds wants seconds, one number or LOW:HIGH, got {text}") from None
    if not 0 <= found[0] <= found[1]:
        raise InputError(f"--tool-seconds wants LOW:HIGH with 0 ≤ LOW ≤ HIGH, got {text}")
    return found
