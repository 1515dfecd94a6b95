"""Inputs of covey simulate: the job, and the speeds of one device, measured in a run or by benchmarks, else assumed."""

from __future__ import annotations

import dataclasses
import json
import math
import random
from dataclasses import dataclass
from pathlib import Path

from covey.app.compose import CommandLine, compose_command
from covey.app.prepare import make_algorithm
from covey.app.resume import is_run, run_of
from covey.config.schema import Config
from covey.errors import Absent, InputError
from covey.simulate.hardware import (
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
from covey.simulate.splits import Job, Prediction, Training, all_splits, predict

LORA_SHARE = 0.0053 / 16  # share of the parameters in adapters on every linear layer, per rank


@dataclass(frozen=True)
class Simulation:
    title: str
    figures: list[Figure]
    predictions: list[Prediction]
    settings: dict[str, object]


def simulate(args: CommandLine) -> Simulation:
    """Every split of the devices, synchronous and asynchronous, for the named recipe or run."""
    name, devices = args.positional[0], args.integer("--gpus", 0)
    config, run = _compose(name, args)
    kind = device(args.value("--gpu") or ("cpu" if run is not None and _ran_on_cpu(run) else "h200"))
    job, figures = _job(config, args, kind, run)
    leads = (0, max(1, config.mode.max_staleness))
    splits = all_splits(devices, job.engine_devices)
    predictions = [predict(_in_mode(job, config, lead), split, lead) for lead in leads for split in splits]
    work = job.work
    title = (
        f"{name} on {devices} × {kind.name}: {config.model.name}, {work.groups} tasks × {work.attempts} attempts, "
        f"{work.episodes.tokens:,.0f} sampled tokens an episode"
    )
    settings = {"gpus": devices, "gpu": kind.name, "model": config.model.name}
    return Simulation(title, figures, predictions, settings)


def _compose(name: str, args: CommandLine) -> tuple[Config, Path | None]:
    """The configuration, and the run whose measurements are used."""
    tolerant = dataclasses.replace(args, flags=args.flags | {"--validate-only": True})
    if is_run(name):
        run = run_of(Path(name).expanduser())
        return compose_command(tolerant, config_path=run / "config.yaml").config, run
    if name.endswith((".yaml", ".yml")):
        return compose_command(tolerant, config_path=Path(name)).config, None
    tolerant.flags["--config-name"] = name
    return compose_command(tolerant).config, None


def _job(config: Config, args: CommandLine, kind: Device, run: Path | None) -> tuple[Job, list[Figure]]:
    if config.mode.max_uses > 1 or config.mode.publish_every > 1:
        raise InputError("covey simulate does not support mode.max_uses and mode.publish_every\n  leave them at 1")
    if config.learner.tensor_parallel > 1:
        raise InputError(
            "covey simulate does not support learner.tensor_parallel\n  leave it at 1: shards are simulated"
        )
    shape = model_shape(config)
    episodes, figures = _episodes(config, args, run)
    work = Workload(config.data.train_batch_size, config.rollout.group_size, episodes)
    training = Training(
        reference=make_algorithm(config).needs.reference,
        checkpointing=bool(config.model.gradient_checkpointing),
        trained=min(1.0, LORA_SHARE * config.model.lora.rank) if config.model.lora.rank else 1.0,
        offload_optimizer=config.learner.offload_optimizer,
        offload_reference=config.learner.offload_reference,
        micro_batch_tokens=config.learner.micro_batch_tokens,
    )
    speeds = assumed_speeds(
        shape,
        kind,
        episodes.prompt + episodes.length / 2,
        passes=passes(config, 0),
        checkpointing=training.checkpointing,
        split=config.rollout.tensor_parallel,
    )
    job = Job(
        work,
        speeds,
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
    speeds, measured = _speeds(config, args, job, run)
    text = f"{kind.memory / 2**30:.0f} GiB, {kind.link / 1e9:.0f} GB/s in a machine, {kind.network / 1e9:.0f} between"
    sheet = Figure("device", text, False, f"data sheet of {kind.name}")
    return dataclasses.replace(job, speeds=speeds), [*figures, *measured, sheet]


def _updates(config: Config) -> int:
    """Optimiser steps per training step."""
    size = config.learner.mini_batch_size or config.data.train_batch_size
    return config.learner.epochs * math.ceil(config.data.train_batch_size / size)


def passes(config: Config, lead: int) -> float:
    """Forward-and-backward passes per token and step, counting the extra forward passes for reference and proximal
    log-probs."""
    mode = dataclasses.replace(config.mode, name="async" if lead else "sync", max_staleness=lead)
    needs = make_algorithm(dataclasses.replace(config, mode=mode)).needs
    return 1 + FORWARD_PASS * (needs.reference + needs.proximal)


def _in_mode(job: Job, config: Config, lead: int) -> Job:
    """The job with its learning speed, which is that of synchronous training, converted to this staleness."""
    token = job.speeds.learn_token * passes(config, lead) / passes(config, 0)
    return dataclasses.replace(job, speeds=dataclasses.replace(job.speeds, learn_token=token))


def _speeds(config: Config, args: CommandLine, job: Job, run: Path | None) -> tuple[Speeds, list[Figure]]:
    """Speeds measured by benchmarks or in a run on the same kind of device; otherwise assumed."""
    speeds, found = job.speeds, {f.name: f for f in assumed_figures(job.shape, job.device, job.speeds)}
    # A GPU run is assumed to be on this kind of GPU.
    if run is not None and _ran_on_cpu(run) == (job.device.name == "cpu"):
        as_run = compose_command(CommandLine(), config_path=run / "config.yaml").config
        if as_run.cluster.name != "local":
            raise InputError(f"{run} ran on several devices\n  figures are taken from a run of one: cluster=local")
        episodes = run_episodes(run, run_steps(run))
        if args.value("--tool-seconds"):
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
        synchronous = speeds.learn_token * passes(config, 0) / passes(as_run, lead)
        speeds = dataclasses.replace(speeds, learn_token=synchronous)
        found |= {figure.name: figure for figure in measured}
    if files := args.value("--figures"):
        results = read_benchmarks(Path(file).expanduser() for file in files.split(","))
        speeds, measured = benchmark_speeds(results, config.model.name, speeds)
        found |= {figure.name: figure for figure in measured}
    return speeds, list(found.values())


def _ran_on_cpu(run: Path) -> bool:
    return bool(json.loads((run / "run.json").read_text())["device"] == "cpu")


def _episodes(config: Config, args: CommandLine, run: Path | None) -> tuple[Episodes, list[Figure]]:
    low, high = _range(args)
    if run is None:
        turns = args.integer("--turns", 1 if config.agent.name == "chat" else min(3, config.agent.max_turns))
        answer = args.integer("--answer-tokens", max(1, config.rollout.max_tokens // 3))
        prompt = args.integer("--prompt-tokens", 256)
        longest = config.rollout.max_tokens
        found = assumed_episodes(answer=answer, longest=longest, prompt=prompt, turns=turns, wait=(low, high))
        why = f"log-normal, median {answer}, at most {longest}; {turns} turns; prompts of {prompt}"
        source, waits = Figure("answers", f"{found.tokens:,.0f} tokens an episode", False, why), False
    else:
        for flag in ("--turns", "--answer-tokens", "--prompt-tokens"):
            if args.value(flag):
                raise InputError(
                    f"{flag}: the run's recorded answer lengths are used ({run})\n  leave it out, or name a recipe"
                )
        found, waits = run_episodes(run, run_steps(run)), True
        if args.value("--tool-seconds"):
            draw = random.Random("waits")
            found, waits = with_waits(found, lambda: draw.uniform(low, high)), False
        why = f"{len(found.examples)} episodes of {run}; prompts of {found.prompt}"
        source = Figure("answers", f"{found.tokens:,.0f} tokens an episode", True, why)
    wait = Figure("tools", f"{found.waits:.3g} s an episode", waits, "the run's mean" if waits else "--tool-seconds")
    return found, [source, wait] if any(len(turns) > 1 for turns in found.examples) else [source]


def model_shape(config: Config) -> Shape:
    """From the model's configuration if it is on this machine; otherwise from the size in its name."""
    from transformers import AutoConfig

    from covey.models.loading import MAIN, locate

    place = locate(config.model.name)
    options = {"local_files_only": True, "revision": place.revision or MAIN}
    try:
        found = AutoConfig.from_pretrained(place.path, trust_remote_code=False, **options)
        return Shape.from_config(found, "its config.json")
    except (OSError, ValueError):  # not on this machine, or it needs trust_remote_code
        guess = shape_from_name(config.model.name)
        if guess is None:
            raise Absent(
                f"the size of {config.model.name} is unknown: the model is not on this machine, nor is it in its name\n"
                "  model=FOLDER, or a name such as Qwen/Qwen2.5-7B"
            ) from None
        return guess


def _range(args: CommandLine) -> tuple[float, float]:
    text = args.value("--tool-seconds") or "1"
    low, _, high = text.partition(":")
    try:
        found = float(low), float(high or low)
    except ValueError:
        raise InputError(f"--tool-seconds wants seconds, one number or LOW:HIGH, got {text}") from None
    if not 0 <= found[0] <= found[1]:
        raise InputError(f"--tool-seconds wants LOW:HIGH with 0 ≤ LOW ≤ HIGH, got {text}")
    return found
