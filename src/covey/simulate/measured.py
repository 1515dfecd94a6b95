"""Figures from what was measured: a run's folder, or benchmarks' JSON files.

A run says how long its answers were, token by token, and how long sampling and learning took. How a decoding step grows
with its batch it does not say: the assumed curve is kept and stretched, until a simulation of that run samples for as
long as the run did.
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
from covey.simulate.hardware import Decode, Episodes, Figure, Speeds, Turn, decode_text, fit_line, learn_text
from covey.simulate.simulation import Place, Work, simulate
from covey.telemetry.jsonl import EPISODES_FILE, METRICS_FILE, read_episodes, read_jsonl

Metrics = Mapping[str, float]


# -- a run's folder --------------------------------------------------------------------------------------------------


def run_steps(folder: Path) -> list[Metrics]:
    records = read_jsonl(folder / METRICS_FILE) if (folder / METRICS_FILE).is_file() else ()
    steps = [record["metrics"] for record in records if record["kind"] == "step"]
    if len(steps) < 2:
        raise InputError(f"{folder} has {len(steps)} steps\n  figures are taken from a run of two or more")
    return steps


def run_episodes(folder: Path, steps: Sequence[Metrics]) -> Episodes:
    """The answers that the run wrote down. A tool's seconds are known in all only: each call gets the mean."""
    records = list(read_episodes(folder / EPISODES_FILE))
    played = [turns for record in records if (turns := _turns(record["rows"]))]
    if not played:
        raise InputError(f"{folder / EPISODES_FILE} has no episode\n  logging.episodes_per_step=4 writes some")
    prompts = [len(record["rows"][0]["prompt_ids"]) for record in records if record["rows"]]
    between = sum(m["episodes/total"] * (m.get("agent/turns_mean", 1.0) - 1) for m in steps)
    wait = sum(m.get("timing/tools", 0.0) for m in steps) / between if between else 0.0
    seen = tuple(tuple(replace(t, wait=wait) for t in turns[:-1]) + turns[-1:] for turns in played)
    return Episodes(seen, round(statistics.fmean(prompts)))


def _turns(rows: Sequence[Mapping[str, Any]]) -> tuple[Turn, ...]:
    """Stretches of sampled tokens, and what stands between them. A rewritten history is read anew."""
    found: list[Turn] = []
    for number, row in enumerate(rows):
        given = len(row["prompt_ids"]) if number else 0
        for sampled, stretch in groupby(row["mask"]):
            count = len(list(stretch))
            if not sampled:
                given += count
                continue
            if found:
                found[-1] = replace(found[-1], given=given)
            found.append(Turn(count))
            given = 0
    return tuple(found)


def with_waits(episodes: Episodes, draw: Callable[[], float]) -> Episodes:
    """Other waits between the turns."""
    seen = tuple(tuple(replace(t, wait=draw()) for t in turns[:-1]) + turns[-1:] for turns in episodes.seen)
    return replace(episodes, seen=seen)


def learn_speed(
    steps: Sequence[Metrics], episodes: Episodes, *, updates: int, epochs: int, fixed: float
) -> tuple[float, float]:
    """(seconds of an update, seconds of a token). The first step, which also warms up, does not count. Where the steps
    are too alike to tell both, an update takes `fixed`, which was assumed."""
    given = episodes.length - episodes.tokens
    tokens = [
        m["episodes/total"] * (m["response/length_mean"] + given) + m["groups/total"] * episodes.prompt
        for m in steps[1:]
    ]
    seconds = [m["timing/update"] + m.get("timing/annotate", 0.0) for m in steps[1:]]
    if (line := fit_line(tokens, seconds)) is not None:
        return line[0] / updates, line[1] / epochs
    fixed = min(fixed, 0.9 * min(seconds) / updates)
    return fixed, (sum(seconds) - fixed * updates * len(seconds)) / sum(tokens) / epochs


def stretch(work: Work, place: Place, seconds: float, steps: int) -> float:
    """How many times slower than `place` the engine is, so that sampling in the steps after the first takes
    `seconds`."""

    def sampling(factor: float) -> float:
        slower = replace(place, decode=place.decode.scaled(factor), prefill=place.prefill * factor)
        found = simulate(work, slower, steps, endless=False)
        return found[-1].ended - found[0].ended - sum(step.learning + place.publish for step in found[1:])

    low, high = 1e-3, 1e3
    for _ in range(40):
        middle = (low * high) ** 0.5
        low, high = (middle, high) if sampling(middle) < seconds else (low, middle)
    return (low * high) ** 0.5


def run_speeds(
    folder: Path, work: Work, base: Speeds, *, updates: int, epochs: int, lead: int, capacity: int
) -> tuple[Speeds, list[Figure]]:
    """Of a run on one device, which learner and engine shared. `base` is assumed, and gives the curve its form."""
    steps = run_steps(folder)
    fixed, token = learn_speed(steps, work.episodes, updates=updates, epochs=epochs, fixed=base.learn_fixed)
    publish = statistics.median(m.get("timing/publish", 0.0) for m in steps[1:])

    def learn(tokens: float, longest: float) -> float:
        return updates * fixed + epochs * token * tokens

    place = Place(1, True, lead, base.decode, base.prefill, capacity, learn, publish)
    factor = stretch(work, place, sum(m["timing/rollout"] for m in steps[1:]), len(steps))
    found = Speeds(base.decode.scaled(factor), base.prefill * factor, token, fixed, publish)
    source = f"{folder}, {len(steps)} steps"
    return found, [
        Figure("decoding", decode_text(found.decode), True, f"{source}; the curve's form is assumed, × {factor:.2f}"),
        Figure("learning", learn_text(found), True, source),
        Figure("publishing in one process", f"{publish:.3g} s", True, source),
    ]


# -- benchmarks' files ----------------------------------------------------------------------------------------------


def read_benchmarks(paths: Iterable[Path]) -> list[dict[str, Any]]:
    found = []
    for path in paths:
        try:
            found.append(json.loads(path.read_text()) | {"file": path.name})
        except (OSError, ValueError) as error:
            raise InputError(f"{path} cannot be read as a benchmark's JSON: {error}") from error
        if not isinstance(found[-1].get("rows"), list):
            raise InputError(f"{path} is no benchmark's result: it has no rows")
    return found


def benchmark_speeds(results: Sequence[Mapping[str, Any]], model: str, base: Speeds) -> tuple[Speeds, list[Figure]]:
    """What decode-*.json and scaling-*.json say of this model. One point of the decoding curve stretches it."""
    speeds, figures = base, []
    for result in results:
        source = f"{result['file']}, {result['device']}"
        points = _points(result, model)
        if points:
            decode = Decode(points) if len(points) > 1 else _through(base.decode, *points[0])
            speeds = replace(speeds, decode=decode)
            figures.append(Figure("decoding", decode_text(decode), True, source))
        if result["name"] == "scaling" and (line := _learning(result, model)) is not None:
            speeds = replace(speeds, learn_fixed=line[0], learn_token=line[1])
            figures.append(Figure("learning", learn_text(speeds), True, source))
    if not figures:
        named = ", ".join(str(result["file"]) for result in results)
        raise InputError(f"{named}: nothing measured of {model}\n  decode and scaling are read, of the same model")
    return speeds, figures


def _through(curve: Decode, sequences: float, seconds: float) -> Decode:
    """The same form, through this point."""
    return curve.scaled(seconds / curve.seconds(sequences))


def _same(model: str, other: str) -> bool:
    return other.lower() in model.lower()


def _points(result: Mapping[str, Any], model: str) -> tuple[tuple[float, float], ...]:
    """(sequences, seconds of a step), of Covey's engine."""
    found: dict[float, float] = {}
    if result["name"] == "decode":
        for row in result["rows"]:
            if row["side"] == "covey" and _same(model, row["model"]) and row["decode_tokens_per_s"]:
                found[row["batch"]] = row["batch"] / row["decode_tokens_per_s"]
    if result["name"] == "scaling" and _same(model, result["settings"]["model"]):
        for row in result["rows"]:
            load = row["load"]
            found[load["prompts"] * load["group"]] = row["sampling_s"] / load["answer_tokens"]
    return tuple(sorted(found.items()))


def _learning(result: Mapping[str, Any], model: str) -> tuple[float, float] | None:
    if not _same(model, result["settings"]["model"]):
        return None
    loads = [row["load"] for row in result["rows"]]
    tokens = [x["prompts"] * (x["prompt_tokens"] + x["group"] * x["answer_tokens"]) for x in loads]
    return fit_line(tokens, [row["learning_s"] for row in result["rows"]])
