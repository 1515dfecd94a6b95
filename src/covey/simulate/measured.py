"""Speeds and lengths from measurements: a run's folder, or JSON files of the benchmarks.

A run records the length of its answers and the time of sampling and learning, but not how a decoding step depends on
the batch size. The assumed decode curve is scaled until a simulation of the run samples for as long as the run did.
"""

from __future__ import annotations

import json
import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from itertools import groupby
from pathlib import Path
from typing import Any

from covey.errors import InputError
from covey.simulate.hardware import DecodeCurve, Episodes, Figure, Speeds, Turn, fit_line
from covey.simulate.simulation import Deployment, Workload, simulate
from covey.telemetry.base import Metrics
from covey.telemetry.jsonl import EPISODES_FILE, METRICS_FILE, read_episodes, read_jsonl

# -- Runs --------------------------------------------------------------------------------------------------------------


def run_steps(folder: Path) -> list[Metrics]:
    records = read_jsonl(folder / METRICS_FILE) if (folder / METRICS_FILE).is_file() else ()
    steps = [record["metrics"] for record in records if record["kind"] == "step"]
    if len(steps) < 2:
        raise InputError(f"{folder} has {len(steps)} steps\n  figures are taken from a run of two or more")
    return steps


def run_episodes(folder: Path, steps: Sequence[Metrics]) -> Episodes:
    """The recorded episodes. Only the total seconds of tools are recorded, so every call gets the mean."""
    records = list(read_episodes(folder / EPISODES_FILE))
    recorded = [turns for record in records if (turns := _turns(record["rows"]))]
    if not recorded:
        raise InputError(f"{folder / EPISODES_FILE} has no episode\n  logging.episodes_per_step=4 writes some")
    prompts = [len(record["rows"][0]["prompt_ids"]) for record in records if record["rows"]]
    calls = sum(m["episodes/total"] * (m.get("agent/turns_mean", 1.0) - 1) for m in steps)
    wait = sum(m.get("timing/tools", 0.0) for m in steps) / calls if calls else 0.0
    return with_waits(Episodes(tuple(recorded), round(statistics.fmean(prompts))), lambda: wait)


def _turns(rows: Sequence[Mapping[str, Any]]) -> tuple[Turn, ...]:
    """Runs of sampled tokens with the tokens between them. A forked row has its whole prompt as an observation."""
    turns: list[Turn] = []
    for number, row in enumerate(rows):
        observation = len(row["prompt_ids"]) if number else 0
        for sampled, tokens in groupby(row["mask"]):
            count = len(list(tokens))
            if not sampled:
                observation += count
                continue
            if turns:
                turns[-1] = replace(turns[-1], observation=observation)
            turns.append(Turn(count))
            observation = 0
    return tuple(turns)


def with_waits(episodes: Episodes, draw: Callable[[], float]) -> Episodes:
    """The same episodes with other tool times."""
    examples = tuple(tuple(replace(t, wait=draw()) for t in turns[:-1]) + turns[-1:] for turns in episodes.examples)
    return replace(episodes, examples=examples)


def learn_speed(
    steps: Sequence[Metrics], episodes: Episodes, *, updates: int, epochs: int, fixed: float
) -> tuple[float, float]:
    """(seconds per update, seconds per token), without the first step, which includes warm-up.

    If the steps are too alike to separate the two, an update takes the assumed `fixed` seconds.
    """
    observations = episodes.length - episodes.tokens
    tokens = [
        m["episodes/total"] * (m["response/length_mean"] + observations) + m["groups/total"] * episodes.prompt
        for m in steps[1:]
    ]
    seconds = [m["timing/update"] + m.get("timing/annotate", 0.0) for m in steps[1:]]
    if (line := fit_line(tokens, seconds)) is not None:
        return line[0] / updates, line[1] / epochs
    fixed = min(fixed, 0.9 * min(seconds) / updates)
    return fixed, (sum(seconds) - fixed * updates * len(seconds)) / sum(tokens) / epochs


def fit_slowdown(workload: Workload, deployment: Deployment, seconds: float, steps: int) -> float:
    """The factor on decoding and prefill for which sampling in all steps but the first takes `seconds`."""

    def sampling(factor: float) -> float:
        slower = replace(deployment, decode=deployment.decode.scaled(factor), prefill=deployment.prefill * factor)
        result = simulate(workload, slower, steps, open_ended=False)
        return result[-1].ended - result[0].ended - sum(step.learning + deployment.publish for step in result[1:])

    low, high = 1e-3, 1e3
    for _ in range(40):
        middle = (low * high) ** 0.5
        low, high = (middle, high) if sampling(middle) < seconds else (low, middle)
    return (low * high) ** 0.5


def run_speeds(
    folder: Path, workload: Workload, base: Speeds, *, updates: int, epochs: int, lead: int, capacity: int
) -> tuple[Speeds, list[Figure]]:
    """The speeds of a run whose learner and engine shared one device. `base`: the assumed speeds to scale."""
    steps = run_steps(folder)
    fixed, token = learn_speed(steps, workload.episodes, updates=updates, epochs=epochs, fixed=base.learn_fixed)
    publish = statistics.median(m.get("timing/publish", 0.0) for m in steps[1:])

    def learn(tokens: float, longest: float) -> float:
        return updates * fixed + epochs * token * tokens

    deployment = Deployment(1, True, lead, base.decode, base.prefill, capacity, learn, publish)
    factor = fit_slowdown(workload, deployment, sum(m["timing/rollout"] for m in steps[1:]), len(steps))
    speeds = Speeds(base.decode.scaled(factor), base.prefill * factor, token, fixed, publish)
    source = f"{folder}, {len(steps)} steps"
    return speeds, [
        Figure("decoding", speeds.decode.text, True, f"{source}; the curve's form is assumed, × {factor:.2f}"),
        Figure("learning", speeds.learn_text, True, source),
        Figure("publishing in one process", f"{publish:.3g} s", True, source),
    ]


# -- Benchmarks --------------------------------------------------------------------------------------------------------


def read_benchmarks(paths: Iterable[Path]) -> list[dict[str, Any]]:
    results = []
    for path in paths:
        try:
            results.append(json.loads(path.read_text()) | {"file": path.name})
        except (OSError, ValueError) as error:
            raise InputError(f"{path} cannot be read as a benchmark's JSON: {error}") from error
        if not isinstance(results[-1].get("rows"), list):
            raise InputError(f"{path} is not a benchmark's result: it has no rows")
    return results


def benchmark_speeds(results: Sequence[Mapping[str, Any]], model: str, base: Speeds) -> tuple[Speeds, list[Figure]]:
    """The speeds of this model in decode-*.json and scaling-*.json. A single decoding point scales the curve."""
    speeds, figures = base, []
    for result in results:
        source = f"{result['file']}, {result['device']}"
        points = _decode_points(result, model)
        if points:
            sequences, seconds = points[0]
            one_point = base.decode.scaled(seconds / base.decode.seconds(sequences))
            decode = DecodeCurve(points) if len(points) > 1 else one_point
            speeds = replace(speeds, decode=decode)
            figures.append(Figure("decoding", decode.text, True, source))
        if result["name"] == "scaling" and (line := _learn_line(result, model)) is not None:
            speeds = replace(speeds, learn_fixed=line[0], learn_token=line[1])
            figures.append(Figure("learning", speeds.learn_text, True, source))
    if not figures:
        names = ", ".join(str(result["file"]) for result in results)
        raise InputError(f"{names}: no measurements of {model}\n  decode and scaling are read, of the same model")
    return speeds, figures


def _same(model: str, other: str) -> bool:
    return other.lower() in model.lower()


def _decode_points(result: Mapping[str, Any], model: str) -> tuple[tuple[float, float], ...]:
    """(sequences, seconds per step) of Covey's engine."""
    points: dict[float, float] = {}
    if result["name"] == "decode":
        for row in result["rows"]:
            if row["side"] == "covey" and _same(model, row["model"]) and row["decode_tokens_per_s"]:
                points[row["batch"]] = row["batch"] / row["decode_tokens_per_s"]
    if result["name"] == "scaling" and _same(model, result["settings"]["model"]):
        for row in result["rows"]:
            load = row["load"]
            points[load["prompts"] * load["group"]] = row["sampling_s"] / load["answer_tokens"]
    return tuple(sorted(points.items()))


def _learn_line(result: Mapping[str, Any], model: str) -> tuple[float, float] | None:
    if not _same(model, result["settings"]["model"]):
        return None
    loads = [row["load"] for row in result["rows"]]
    tokens = [x["prompts"] * (x["prompt_tokens"] + x["group"] * x["answer_tokens"]) for x in loads]
    return fit_line(tokens, [row["learning_s"] for row in result["rows"]])
