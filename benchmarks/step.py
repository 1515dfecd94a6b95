"""One training step (sampling and learning) of Covey and TRL's GRPOTrainer: same weights, prompts, lengths, dtype.

    .venv/bin/python benchmarks/step.py                      SmolLM2-135M on a CPU, float32, 8 prompts × 8 answers
    python benchmarks/step.py --device cuda                  Qwen2.5 shapes on a GPU, bfloat16, 32 prompts × 8 answers
    python benchmarks/step.py --device cuda --folder MODEL --questions train.jsonl
                                                             real weights, 64 questions × 8 answers of natural length

Every run has its own process, which warms up and then times its steps; on a CPU, runs of both libraries alternate. TRL
runs in the Python of --trl-python. "fixed" suppresses the end token, "natural" does not; then the libraries sample
different numbers of tokens, so compare tokens/s.
"""

from __future__ import annotations

import json
import statistics
import sys
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from kit.child import ROOT, ChildFailed, Children, has_package, serve
from kit.floors import Load, Rates, Shape, learning_seconds, sampling_seconds
from kit.measure import about, machine, merged, peak_memory, prepare
from kit.report import Measure, Plot, Result, command_line, measured_on, number, options, percent, publish, ratio

TRL_MICRO_BATCH = {"qwen2.5-0.5b": 64, "qwen2.5-1.5b": 32}  # the largest that fit on an H200
KINDS = ("fixed", "natural")
NOTES = {
    "threads": "One thread; seconds are CPU time.",
    "bfloat16": "Precision: Covey's optimiser keeps float32 masters and moments; TRL's fastest setting, used here, has "
    "bfloat16 weights and moments.",
    "natural": "With natural stopping the sides sample different answers: compare tokens/s.",
    "cpu": "On a CPU Covey tells the allocator to keep freed memory, as it does in every run; TRL has the system's "
    "default.",
}


# -- the two libraries, each in its own process ----------------------------------------------------------------------


def covey_side(settings: dict[str, Any]) -> dict[str, Any]:
    from kit.pipeline import Spec, Trainer

    from covey.config.schema import LearnerConfig

    prepare(settings)
    trainer = Trainer(Spec.of(settings, learner=LearnerConfig(lr=settings["lr"])), fixed=settings["fixed"])
    work = (settings["prompts"], settings["group"], settings["max_tokens"])
    done = trainer.run(*work, warmup=settings["warmup"], steps=settings["steps"])
    prompts = {row.prompt_ids for _, result in done for row in result.samples.rows}
    return {
        **about(settings["device"]),
        **peak_memory(settings["device"]),
        "steps": [asdict(timed) for timed, _ in done],
        "prompts": sorted(map(list, prompts)),
    }


def trl_side(settings: dict[str, Any]) -> dict[str, Any]:
    from kit.models import load_model, load_tokenizer
    from kit.rivals import trl_steps

    prepare(settings)
    model, tokenizer = (
        load_model(settings["model"], settings["device"], settings["dtype"]),
        load_tokenizer(settings["model"]),
    )
    steps, prompts = trl_steps(model, tokenizer, settings)
    return {
        **about(settings["device"]),
        **peak_memory(settings["device"]),
        "steps": [asdict(step) for step in steps],
        "prompts": sorted(map(list, prompts)),
    }


# -- what is measured -----------------------------------------------------------------------------------------------


def cases(options: Any) -> list[dict[str, Any]]:
    """Settings of every comparison; `name` is its row in the table."""
    common = {
        "device": options.device,
        "threads": options.threads,
        "lr": 1e-6,
        "warmup": options.warmup,
        "steps": options.steps,
    }
    found = [common | case for case in (gpu_cases(options) if options.device == "cuda" else cpu_cases(options))]
    return [case | tiny(case, options) for case in found] if options.tiny else found


def tiny(case: dict[str, Any], options: Any) -> dict[str, Any]:
    """The case with tiny sizes, for a quick try."""
    load = {"model": "tiny", "dtype": "float32", "group": 2, "max_tokens": 4, "micro_batch": 4}
    name = f"tiny, {case['name'].rpartition(', ')[2]}"
    return load | {"name": name, "device": measured_on(options), "prompts": words("tiny", 2, 8)}


def gpu_cases(options: Any) -> list[dict[str, Any]]:
    if options.folder is not None:
        lines = options.questions.read_text().splitlines()[:64]
        case = {"name": f"{options.folder.name}, natural", "model": str(options.folder), "dtype": "bfloat16"}
        case |= {"prompts": [str(json.loads(line)["question"]) for line in lines], "fixed": False}
        return [case | {"group": 8, "max_tokens": 400, "micro_batch": 64}]
    return [
        {"name": model, "model": model, "dtype": "bfloat16", "fixed": True}
        | {"prompts": words(model, 32, 256), "group": 8, "max_tokens": 256, "micro_batch": TRL_MICRO_BATCH[model]}
        for model in options.models or TRL_MICRO_BATCH
    ]


def cpu_cases(options: Any) -> list[dict[str, Any]]:
    from covey.models.loading import locate

    folder = locate("smollm2-135m").path
    load = {"model": folder, "dtype": "float32", "group": 8, "max_tokens": 64, "prompts": questions(options.prompts)}
    load |= {"micro_batch": 64}
    return [load | {"name": f"smollm2-135m, {kind}", "fixed": kind == "fixed"} for kind in options.kinds]


def words(model: str, count: int, tokens: int) -> list[str]:
    from kit.models import SHAPES, as_text, random_ids

    return [as_text(ids) for ids in random_ids(SHAPES[model]["vocab_size"], count, tokens, "step")]


def questions(count: int) -> list[str]:
    """Questions of the demo's task."""
    from covey.config.schema import DataConfig
    from covey.tasks import load_tasks

    tasks = load_tasks(DataConfig(name="sort", train_size=count, val_size=1), seed=0).train
    return [str(task.messages[-1]["content"]) for task in tasks]


def measure(
    children: Children, case: dict[str, Any], sides: dict[str, Path], repeats: int, failures: list[str]
) -> dict[str, list[dict[str, Any]]]:
    """Alternate runs of each library. One that fails is reported and not run again."""
    runs: dict[str, list[dict[str, Any]]] = {}
    failed: set[str] = set()
    for _ in range(repeats):
        for side in [side for side in sides if side not in failed]:
            try:
                runs.setdefault(side, []).append(children.run(side.split("/")[0], case | changes(side), sides[side]))
            except ChildFailed as error:
                failures.append(f"{case['name']}: {error}")
                failed.add(side)
    found = {side: done for side, done in runs.items() if done}
    prompts = [run["prompts"] for done in found.values() for run in done]
    assert all(given == prompts[0] for given in prompts), "the sides were given different prompts"
    return found


def names(side: str, micro_batches: Sequence[int]) -> list[str]:
    return [f"trl/{size}" for size in micro_batches] if side == "trl" and micro_batches else [side]


def changes(side: str) -> dict[str, int]:
    """The settings that a name implies: `trl/16` is TRL with micro-batches of 16."""
    _, _, micro_batch = side.partition("/")
    return {"micro_batch": int(micro_batch)} if micro_batch else {}


def summary(runs: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Medians over the timed steps of all runs; the largest peak."""
    steps = [step for run in runs for step in run["steps"]]

    def median(of: Any) -> float:
        return statistics.median(map(of, steps))

    found = {
        "step_s": median(lambda s: s["sampling"] + s["learning"]),
        "sampling_s": median(lambda s: s["sampling"]),
        "learning_s": median(lambda s: s["learning"]),
        "tokens": median(lambda s: s["tokens"]),
        "tokens_per_s": median(lambda s: s["tokens"] / (s["sampling"] + s["learning"])),
        "timed_steps": len(steps),
        "spread_s": [
            min(s["sampling"] + s["learning"] for s in steps),
            max(s["sampling"] + s["learning"] for s in steps),
        ],
    }
    return found | {name: max(run[name] for run in runs) for name in ("peak", "reserved") if name in runs[0]}


def floor(case: dict[str, Any], shape: Shape, rates: Rates, prompts: Sequence[Sequence[int]]) -> dict[str, float]:
    """The lower bound for answers of full length and prompts of mean length."""
    length = round(statistics.mean(map(len, prompts)))
    load = Load(len(prompts), case["group"], length, case["max_tokens"])
    itemsize = {"float32": 4, "bfloat16": 2}[case["dtype"]]
    sampling, learning = sampling_seconds(shape, rates, itemsize, load), learning_seconds(shape, rates, load)
    return {"step_s": sampling + learning, "sampling_s": sampling, "learning_s": learning}


# -- the report --------------------------------------------------------------------------------------------------------

HEADER = ("model", "side", "s/step", "sampling s", "learning s", "tokens/s", "learning MFU", "peak GiB")
HEADER += ("speed-up over TRL", "× floor")


def rows_of(case: dict[str, Any], runs: dict[str, Any], rates: Rates) -> list[dict[str, Any]]:
    from kit.models import load_config

    found = {side: summary(done) for side, done in runs.items()}
    rows = []
    shape = Shape.of(load_config(case["model"]))
    prompts = next(iter(runs.values()))[0]["prompts"]
    least = floor(case, shape, rates, prompts) if case["fixed"] else None
    trl = max((figures["tokens_per_s"] for side, figures in found.items() if side.startswith("trl")), default=None)
    for side, figures in found.items():
        speed_up = ratio(figures["tokens_per_s"], trl)
        over = ratio(figures["step_s"], least["step_s"]) if least else None
        mfu = least["learning_s"] / figures["learning_s"] if least else None
        rows.append(
            {"case": case["name"], "side": side, **figures, "speed_up": speed_up, "over_floor": over, "mfu": mfu}
        )
    if least:
        rows.append({"case": case["name"], "side": "floor", **least})
    return rows


def cells(row: dict[str, Any]) -> list[str]:
    figures = [number(row.get(key)) for key in ("step_s", "sampling_s", "learning_s", "tokens_per_s")]
    figures.append(percent(row.get("mfu")))
    peak = number(row.get("peak")) + (f" ({number(row['reserved'])} reserved)" if "reserved" in row else "")
    return [row["case"], row["side"], *figures, peak, number(row.get("speed_up")), number(row.get("over_floor"))]


def picture(rows: Sequence[dict[str, Any]]) -> Plot:
    labels = [f"{row['case']}\n{row['side']}" for row in rows]
    series = {part: [row[f"{part}_s"] for row in rows] for part in ("sampling", "learning")}
    return Plot("One training step", "seconds", series, labels)


def parse(argv: Sequence[str] | None) -> Any:
    parser = options(__doc__)
    parser.add_argument("--trl-python", type=Path, help="a Python with TRL; default .venv-oracles, on a GPU this one")
    parser.add_argument(
        "--trl-micro-batch", type=int, nargs="+", default=[], help="answers per forward pass of TRL's, each a side"
    )
    parser.add_argument("--models", nargs="+", choices=TRL_MICRO_BATCH, help="on a GPU")
    parser.add_argument("--folder", type=Path, help="on a GPU: a model folder with real weights, and --questions")
    parser.add_argument("--questions", type=Path, help="JSON lines with a column question")
    parser.add_argument("--kinds", nargs="+", choices=KINDS, default=KINDS, help="on a CPU")
    parser.add_argument("--threads", type=int, help="on a CPU; with 1, seconds are CPU time")
    parser.add_argument("--prompts", type=int, default=8, help="on a CPU, each with 8 answers")
    parser.add_argument("--sides", nargs="+", choices=("covey", "trl"), default=["covey", "trl"])
    parser.add_argument("--repeats", type=int, help="processes of each side; default 3, on a GPU 1")
    parser.add_argument("--warmup", type=int, help="steps that are not timed; default 1, on a GPU 2")
    parser.add_argument("--steps", type=int, help="timed steps of a process; default 1, on a GPU 3")
    found = parser.parse_args(argv)
    if found.folder is not None and (found.device != "cuda" or found.questions is None):
        parser.error("--folder needs --device cuda and --questions")
    defaults = (
        {"repeats": 1, "warmup": 2, "steps": 3} if found.device == "cuda" else {"repeats": 3, "warmup": 1, "steps": 1}
    )
    if found.tiny:
        defaults = {"repeats": 1, "warmup": 1, "steps": 1}
    for name, value in defaults.items():
        setattr(found, name, value if getattr(found, name) is None else getattr(found, name))
    usual = Path(sys.executable) if found.device == "cuda" else ROOT / ".venv-oracles/bin/python"
    found.trl_python = found.trl_python or usual
    return found


def main(argv: Sequence[str] | None = None) -> int:
    chosen = parse(argv)
    children = Children(__file__, chosen.limit)
    pythons = {"covey": Path(sys.executable), "trl": chosen.trl_python}
    if "trl" in chosen.sides and not (pythons["trl"].is_file() and has_package(pythons["trl"], "trl")):
        print(f"{pythons['trl']} has no TRL\n  fix: make .venv-oracles/stamp, or --trl-python PATH, or --sides covey")
        return 2
    sides = {name: pythons[side] for side in chosen.sides for name in names(side, chosen.trl_micro_batch)}
    todo = cases(chosen)
    failures: list[str] = []
    ask = {key: todo[0][key] for key in ("device", "dtype", "threads")} | {"quick": chosen.tiny}
    here = children.run("machine", ask)
    rates = Rates(**here["rates"])
    rows: list[dict[str, Any]] = []
    versions = {"covey": here["versions"]}
    raw: dict[str, Any] = {}
    for case in todo:
        if runs := measure(children, case, sides, chosen.repeats, failures):
            rows += rows_of(case, runs, rates)
            versions |= {side: done[0]["versions"] for side, done in runs.items()}
            raw[case["name"]] = {side: [without_prompts(run) for run in done] for side, done in runs.items()}
    if rows:
        publish(report(chosen, here, versions, rows, todo, raw), chosen.out)
    for failure in failures:
        print(f"failed: {failure}")
    return 1 if failures else 0


def without_prompts(run: dict[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in run.items() if key != "prompts"}


def measures(case: str, runs: Sequence[dict[str, Any]]) -> list[Measure]:
    """Covey's figures in this case, for compare.py."""
    if not runs:
        return []
    steps, found = [step for run in runs for step in run["steps"]], summary(runs)
    speeds = [s["tokens"] / (s["sampling"] + s["learning"]) for s in steps]
    return [
        Measure(f"{case}: sampling", found["sampling_s"], "s", [s["sampling"] for s in steps]),
        Measure(f"{case}: learning", found["learning_s"], "s", [s["learning"] for s in steps]),
        Measure(f"{case}: whole step", found["tokens_per_s"], "tokens/s", speeds),
        Measure(f"{case}: peak memory", found["peak"], "GiB", [run["peak"] for run in runs]),
    ]


def trl_note(chosen: Any, case: dict[str, Any]) -> str:
    if "trl" not in chosen.sides:
        return ""
    return f"; TRL in micro-batches of {' or '.join(map(str, chosen.trl_micro_batch)) or case['micro_batch']}"


def record_name(chosen: Any) -> str:
    parts = ["step"]
    parts += ["real"] if chosen.folder else []
    parts += ["threads", str(chosen.threads)] if chosen.threads else []
    parts += ["covey"] if "trl" not in chosen.sides else []
    return "-".join(parts)


def report(
    chosen: Any, here: Any, versions: Any, rows: list[dict[str, Any]], todo: list[dict[str, Any]], raw: dict[str, Any]
) -> Result:
    loads = dict.fromkeys(
        f"{c['name'].split(',')[0]}: {len(c['prompts'])} prompts × {c['group']} answers of up to {c['max_tokens']} "
        f"tokens, {c['dtype']}{trl_note(chosen, c)}"
        for c in todo
    )
    told = [NOTES["bfloat16"]] if todo[0]["dtype"] == "bfloat16" and "trl" in chosen.sides else []
    told += [NOTES["natural"]] if any(not case["fixed"] for case in todo) else []
    told += [NOTES["threads"]] if chosen.threads == 1 else []
    told += [NOTES["cpu"]] if chosen.device == "cpu" else []
    return Result(
        name=record_name(chosen),
        device=here["device"],
        versions=merged(versions),
        header=HEADER,
        cells=[cells(row) for row in rows],
        rows=rows,
        plot=picture(rows),
        notes=[*loads, *told],
        rates=here["rates"],
        settings={case["name"]: {k: v for k, v in case.items() if k not in ("prompts", "name")} for case in todo},
        command=command_line(),
        tiny=chosen.tiny,
        measures=[measure for case, sides in raw.items() for measure in measures(case, sides.get("covey", []))],
        runs=raw,
    )


if __name__ == "__main__":
    serve({"covey": covey_side, "trl": trl_side, "machine": machine})
    raise SystemExit(main())
