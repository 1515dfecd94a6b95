"""The cost of a step by group size, prompt and answer length, and the saving from the shared prompt of a group.

    .venv/bin/python benchmarks/scaling.py                   SmolLM2-135M on a CPU
    python benchmarks/scaling.py --device cuda               the shape of Qwen2.5-0.5B on a GPU, bfloat16

One parameter varies at a time. The last rows compare groups of 16 with a long prompt to the same answers with a prompt
of one token: the prompt is computed once per group, in sampling and in learning, so it costs little compared with the
answers. Without sharing, the learner alone would take 1 + prompt/answer times as long.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import asdict, replace
from typing import Any

from kit.child import ChildFailed, Children, serve
from kit.floors import Load, Rates, Shape, learning_seconds, sampling_seconds
from kit.measure import about, machine, prepare
from kit.models import load_config, random_ids, word_tokenizer
from kit.report import Measure, Plot, Result, command_line, measured_on, number, options, publish, ratio

SHARED = "prompt shared"  # the rows that are plotted
KINDS = ("group", "prompt", "answer", SHARED)


def covey_side(settings: dict[str, Any]) -> dict[str, Any]:
    from kit.models import as_text
    from kit.pipeline import Spec, Trainer

    from covey.config.schema import LearnerConfig

    prepare(settings)
    spec = Spec.of(settings, learner=LearnerConfig(lr=1e-6))
    vocabulary = spec.model.config.vocab_size
    tokenizer = word_tokenizer(vocabulary)  # a real one may not give prompts of exactly these lengths
    trainer = Trainer(replace(spec, model=replace(spec.model, tokenizer=tokenizer)))
    found = []
    for point in settings["points"]:
        load = Load(**point["load"])
        prompts = [as_text(ids) for ids in random_ids(vocabulary, load.prompts, load.prompt_tokens, "scaling")]
        count = {"warmup": settings["warmup"], "steps": settings["steps"]}
        timed = [step for step, _ in trainer.run(prompts, load.group, load.answer_tokens, **count)]
        assert all(step.tokens == load.sampled for step in timed)
        found.append(
            {
                "sampling_s": statistics.median(step.sampling for step in timed),
                "learning_s": statistics.median(step.learning for step in timed),
                "step_s": statistics.median(step.total for step in timed),
                "repeats": [asdict(step) for step in timed],
            }
        )
    return {**about(settings["device"]), "points": found}


# -- what is measured ------------------------------------------------------------------------------------------------


def grid(base: Load, *, groups: Sequence[int], prompts: Sequence[int], answers: Sequence[int]) -> list[dict[str, Any]]:
    """The base load with one parameter changed at a time."""
    found = [("group", {"group": size}) for size in groups]
    found += [("prompt", {"prompt_tokens": tokens}) for tokens in prompts]
    found += [("answer", {"answer_tokens": tokens}) for tokens in answers]
    return [{"varies": name, "load": asdict(base) | change} for name, change in found]


def sharing(prompts: int, group: int, prompt_tokens: int, answers: Sequence[int]) -> list[dict[str, Any]]:
    """Pairs of loads: the same answers after a prompt of one token, and after a long one."""
    return [
        {"varies": SHARED, "load": asdict(Load(prompts, group, tokens, answer))}
        for answer in answers
        for tokens in (1, prompt_tokens)
    ]


def loads(chosen: Any) -> dict[str, Any]:
    common = {"device": measured_on(chosen), "warmup": chosen.warmup, "steps": chosen.steps}
    found = common | (gpu_load(chosen.model) if chosen.device == "cuda" else cpu_load())
    if chosen.tiny:
        points = grid(Load(2, 2, 4, 4), groups=(2, 4), prompts=(1, 8), answers=(2, 4)) + sharing(1, 4, 32, (8,))
        found |= {"name": "tiny", "model": "tiny", "dtype": "float32", "points": points}
    return found


def gpu_load(model: str) -> dict[str, Any]:
    points = grid(Load(32, 8, 256, 256), groups=(2, 4, 8, 16), prompts=(1, 256, 1024), answers=(64, 256, 512))
    points += sharing(8, 16, 1024, (256, 1024))
    return {"name": model, "model": model, "dtype": "bfloat16", "points": points}


def cpu_load() -> dict[str, Any]:
    from covey.models.loading import locate

    points = grid(Load(2, 4, 64, 32), groups=(2, 4, 8), prompts=(1, 64, 256), answers=(16, 32, 64))
    points += sharing(1, 16, 1024, (256,))
    model = locate("smollm2-135m").path
    return {"name": "smollm2-135m", "model": model, "dtype": "float32", "points": points}


# -- the report ------------------------------------------------------------------------------------------------------

HEADER = ("varies", "prompts × group", "prompt", "answer", "sampling s", "learning s", "s/step", "× floor", "sampling")
HEADER += ("learning", "step")


def rows_of(settings: dict[str, Any], points: Sequence[dict[str, Any]], rates: Rates) -> list[dict[str, Any]]:
    """Ratios are relative to the first row of each parameter; for shared prompts, to the answers without the prompt."""
    shape = Shape.of(load_config(settings["model"]))
    itemsize = {"float32": 4, "bfloat16": 2}[settings["dtype"]]
    rows: list[dict[str, Any]] = []
    first: dict[Any, dict[str, Any]] = {}
    for point, figures in zip(settings["points"], points, strict=True):
        load = Load(**point["load"])
        least = sampling_seconds(shape, rates, itemsize, load) + learning_seconds(shape, rates, load)
        base = first.setdefault((point["varies"], load.answer_tokens if point["varies"] == SHARED else None), figures)
        ratios = {key.removesuffix("_s"): figures[key] / base[key] for key in ("sampling_s", "learning_s", "step_s")}
        over = ratio(figures["step_s"], least)
        rows.append({**point, **figures, "floor_s": least, "over_floor": over, "ratios": ratios})
    return rows


def cells(row: dict[str, Any]) -> list[str]:
    load = Load(**row["load"])
    head = [row["varies"], f"{load.prompts} × {load.group}", str(load.prompt_tokens), str(load.answer_tokens)]
    figures = [number(row[key]) for key in ("sampling_s", "learning_s", "step_s", "over_floor")]
    return [*head, *figures, *(f"{row['ratios'][part]:.2f} ×" for part in ("sampling", "learning", "step"))]


def measures(row: dict[str, Any]) -> list[Measure]:
    load = Load(**row["load"])
    name = f"{load.prompts} × {load.group}, {load.prompt_tokens} + {load.answer_tokens} tokens"
    return [
        Measure(f"{name}: {part}", row[f"{part}_s"], "s", [step[part] for step in row["repeats"]])
        for part in ("sampling", "learning")
    ]


def sharing_note(row: dict[str, Any]) -> str:
    load, ratios = Load(**row["load"]), row["ratios"]
    return (
        f"A prompt of {load.prompt_tokens} tokens shared by {load.group} answers of {load.answer_tokens}: a step costs "
        f"{ratios['step']:.2f} × that of the answers alone, learning {ratios['learning']:.2f} ×, sampling "
        f"{ratios['sampling']:.2f} ×; computed for every answer, learning would cost about "
        f"{1 + load.prompt_tokens / load.answer_tokens:.1f} ×."
    )


def picture(rows: Sequence[dict[str, Any]]) -> Plot:
    labels = [
        f"{row['load']['group']}×{row['load']['answer_tokens']}\nprompt {row['load']['prompt_tokens']}" for row in rows
    ]
    series = {part: [row[f"{part}_s"] for row in rows] for part in ("sampling", "learning")}
    return Plot("A step as groups, prompts and answers grow", "seconds", series, labels)


def parse(argv: Sequence[str] | None) -> Any:
    parser = options(__doc__)
    parser.add_argument("--model", default="qwen2.5-0.5b", help="a shape, on a GPU")
    parser.add_argument("--warmup", type=int, default=1)
    parser.add_argument("--kinds", nargs="+", choices=KINDS, default=KINDS, help="what varies")
    parser.add_argument("--steps", type=int, default=None, help="timed steps of each point; default 2, on a GPU 3")
    found = parser.parse_args(argv)
    found.steps = found.steps or (1 if found.tiny else 3 if found.device == "cuda" else 2)
    return found


def main(argv: Sequence[str] | None = None) -> int:
    chosen = parse(argv)
    children = Children(__file__, chosen.limit)
    settings = loads(chosen)
    here = children.run("machine", settings | {"quick": chosen.tiny})
    failures: list[str] = []
    rows: list[dict[str, Any]] = []
    for varies in chosen.kinds:
        part = settings | {"points": [point for point in settings["points"] if point["varies"] == varies]}
        try:
            rows += rows_of(part, children.run("covey", part)["points"], Rates(**here["rates"]))
        except ChildFailed as error:
            failures.append(f"{varies}: {error}")
    if rows:
        publish(report(chosen, settings, here, rows), chosen.out)
    for failure in failures:
        print(f"failed: {failure}")
    return 1 if failures else 0


def report(chosen: Any, settings: dict[str, Any], here: dict[str, Any], rows: list[dict[str, Any]]) -> Result:
    shared = [row for row in rows if row["varies"] == SHARED and row["load"]["prompt_tokens"] > 1]
    missing = [kind for kind in KINDS if kind not in {row["varies"] for row in rows}]
    return Result(
        name="scaling",
        device=here["device"],
        versions=here["versions"],
        header=HEADER,
        cells=[cells(row) for row in rows],
        rows=rows,
        plot=picture([row for row in rows if row["varies"] == SHARED] or rows),
        notes=[
            f"{settings['name']}, {settings['dtype']}, fixed lengths.",
            *map(sharing_note, shared),
            *([f"Not measured: {', '.join(missing)}."] if missing else []),
        ],
        rates=here["rates"],
        settings={key: settings[key] for key in ("model", "dtype", "warmup", "steps")},
        command=command_line(),
        tiny=chosen.tiny,
        measures=[measure for row in rows for measure in measures(row)],
        runs=rows,
    )


if __name__ == "__main__":
    serve({"covey": covey_side, "machine": machine})
    raise SystemExit(main())
