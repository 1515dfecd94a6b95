"""Decoding speed by batch size and answer length: Covey's engine, transformers' generate, and vLLM if installed.

    .venv/bin/python benchmarks/decode.py                    SmolLM2-135M's shape on a CPU, float32
    python benchmarks/decode.py --device cuda                Qwen2.5 shapes on a GPU, bfloat16

Each library runs in its own process, with random weights of the same shape. All prompts are distinct and new in every
call, and all answers have full length. A call for one token measures the prefill; decode tokens/s exclude it. Covey
returns the log-prob of every token; transformers' generate does not (it could only return all logits); vLLM is measured
with and without.
"""

from __future__ import annotations

import statistics
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from kit.child import ChildFailed, Children, has_package, serve
from kit.floors import Rates, Shape, decode_seconds
from kit.measure import about, machine, merged, now, prepare
from kit.models import load_config, load_model, random_ids
from kit.report import Measure, Plot, Result, command_line, measured_on, number, options, publish, ratio

Call = Callable[[list[list[int]], int], int]  # prompts, tokens of each answer → tokens sampled
SIDES = {
    "covey": "Covey, with log-probs",
    "transformers": "transformers generate, without",
    "vllm-logprobs": "vLLM, with log-probs",
    "vllm": "vLLM, without",
}


# -- the libraries, each in its own process --------------------------------------------------------------------------


def covey_side(settings: dict[str, Any]) -> dict[str, Any]:
    from kit.pipeline import Sampler

    prepare(settings)
    sampler = Sampler(settings, max(settings["batches"]))
    found = figures(sampler, settings)
    sampler.close()
    return {**about(settings["device"]), "points": found}


def transformers_side(settings: dict[str, Any]) -> dict[str, Any]:
    from kit.rivals import Generate

    prepare(settings)
    generate = Generate(load_model(settings["model"], settings["device"], settings["dtype"]))
    return {**about(settings["device"]), "points": figures(generate, settings)}


def vllm_side(settings: dict[str, Any]) -> dict[str, Any]:
    from kit.rivals import Vllm

    longest = settings["prompt_tokens"] + max(settings["lengths"])
    engine = Vllm(settings["model"], max_tokens=longest, max_sequences=max(settings["batches"]))
    found = {
        name: figures(lambda prompts, tokens, wanted=wanted: engine(prompts, tokens, wanted), settings)
        for name, wanted in (("vllm", False), ("vllm-logprobs", True))
    }
    return {**about(settings["device"]), **found}


def figures(call: Call, settings: dict[str, Any]) -> list[dict[str, Any]]:
    return [_figures(call, settings, *point) for point in points(settings)]


def points(settings: dict[str, Any]) -> list[tuple[int, int]]:
    return [(batch, length) for batch in settings["batches"] for length in settings["lengths"]]


def _figures(call: Call, settings: dict[str, Any], batch: int, length: int) -> dict[str, Any]:
    """Median seconds after one warm-up call: for whole answers, and for their first token."""
    vocabulary = load_config(settings["model"]).vocab_size
    seconds: dict[int, float] = {}
    repeats: dict[int, list[float]] = {}
    for tokens in (1, length):
        taken = []
        for repeat in range(1 + settings["repeats"]):
            prompts = random_ids(vocabulary, batch, settings["prompt_tokens"], (batch, length, tokens, repeat))
            start = now()
            sampled = call(prompts, tokens)
            taken.append(now() - start)
            assert sampled == batch * tokens
        repeats[tokens] = taken[1:]
        seconds[tokens] = statistics.median(taken[1:])
    decoding = seconds[length] - seconds[1]
    return {
        "batch": batch,
        "length": length,
        "seconds": seconds[length],
        "prefill_s": seconds[1],
        "decode_tokens_per_s": batch * (length - 1) / decoding if decoding > 0 else None,
        "tokens_per_s": batch * length / seconds[length],
        "repeats_s": repeats,
    }


# -- the report ------------------------------------------------------------------------------------------------------

HEADER = (
    "model",
    "batch",
    "tokens",
    "side",
    "decode tokens/s",
    "tokens/s with prefill",
    "× transformers",
    "of the floor",
)


def rows_of(model: str, found: dict[str, Any], settings: dict[str, Any], rates: Rates) -> list[dict[str, Any]]:
    shape = Shape.of(load_config(settings["model"]))
    itemsize = {"float32": 4, "bfloat16": 2}[settings["dtype"]]
    rows = []
    for at, (batch, length) in enumerate(points(settings)):
        least = decode_seconds(shape, rates, itemsize, settings["prompt_tokens"], [length] * batch)
        best = batch * (length - 1) / least
        usual = found["transformers"][at]["decode_tokens_per_s"] if "transformers" in found else None
        for side, measured in found.items():
            speed = measured[at]["decode_tokens_per_s"]
            rows.append(
                {"model": model, "side": side, **measured[at]}
                | {"speed_up": ratio(speed, usual), "of_floor": ratio(speed, best), "floor_tokens_per_s": best}
            )
    return rows


def measures(row: dict[str, Any]) -> list[Measure]:
    """Covey's figures at one batch and length, for compare.py."""
    name, sampled = f"{row['model']}, {row['batch']} × {row['length']}", row["batch"] * row["length"]
    whole = [sampled / seconds for seconds in row["repeats_s"][str(row["length"])]]
    first = row["repeats_s"]["1"]
    return [
        Measure(f"{name}: answers", row["tokens_per_s"], "tokens/s", whole),
        Measure(f"{name}: first token", row["prefill_s"], "s", first),
    ]


def cells(row: dict[str, Any]) -> list[str]:
    share = None if row["of_floor"] is None else f"{100 * row['of_floor']:.0f} %"
    head = [row["model"], str(row["batch"]), str(row["length"]), SIDES[row["side"]]]
    return [*head, *(number(row[k]) for k in ("decode_tokens_per_s", "tokens_per_s", "speed_up")), share or "–"]


def picture(rows: Sequence[dict[str, Any]]) -> Plot:
    """Throughput of the first model with its longest answers."""
    model, length = rows[0]["model"], max(row["length"] for row in rows)
    shown = [row for row in rows if row["model"] == model and row["length"] == length]
    batches = sorted({row["batch"] for row in shown})
    series: dict[str, list[float | None]] = {}
    for row in shown:
        line = series.setdefault(SIDES[row["side"]], [None] * len(batches))
        line[batches.index(row["batch"])] = row["decode_tokens_per_s"]
    floors = {row["batch"]: row["floor_tokens_per_s"] for row in shown}
    series["floor"] = [floors[batch] for batch in batches]
    title = f"Decoding {model}, answers of {length} tokens"
    return Plot(title, "tokens/s", series, x=batches, x_label="answers decoded together", logarithmic=True)


def loads(chosen: Any) -> dict[str, dict[str, Any]]:
    """Settings by model."""
    if chosen.device == "cuda":
        batches = chosen.batches or [1, 8, 32, 64, 256]
        common = {"dtype": "bfloat16", "prompt_tokens": 256, "batches": batches, "lengths": chosen.lengths or [256]}
        common |= {"repeats": chosen.repeats}
        models = {name: name for name in chosen.models or ["qwen2.5-0.5b", "qwen2.5-1.5b"]}
    else:
        from covey.models.loading import locate

        common = {"dtype": "float32", "prompt_tokens": 64, "batches": chosen.batches or [1, 8, 32, 64]}
        common |= {"lengths": chosen.lengths or [64], "repeats": chosen.repeats}
        models = {"smollm2-135m": locate("smollm2-135m").path}
    if chosen.tiny:
        common |= {"dtype": "float32", "prompt_tokens": 8, "batches": [1, 2], "lengths": [4], "repeats": 1}
        models = {"tiny": "tiny"}
    return {name: {**common, "model": model, "device": measured_on(chosen)} for name, model in models.items()}


def measure(
    children: Children, settings: dict[str, Any], chosen: Any, failures: list[str]
) -> tuple[dict[str, Any], dict[str, Any]]:
    """Points and versions of each library."""
    found: dict[str, Any] = {}
    versions: dict[str, Any] = {}
    for side in chosen.sides:
        try:
            done = children.run(side, settings, chosen.vllm_python if side == "vllm" else sys.executable)
        except ChildFailed as error:
            failures.append(f"{settings['model']}: {error}")
            continue
        versions[side] = done["versions"]
        found |= {side: done["points"]} if "points" in done else {n: done[n] for n in ("vllm-logprobs", "vllm")}
    return found, versions


def parse(argv: Sequence[str] | None) -> Any:
    parser = options(__doc__)
    parser.add_argument("--models", nargs="+", help="shapes, on a GPU")
    parser.add_argument("--batches", type=int, nargs="+")
    parser.add_argument("--lengths", type=int, nargs="+", help="tokens of an answer")
    parser.add_argument("--repeats", type=int, help="timed calls of each point; default 3, on a GPU 2")
    parser.add_argument("--sides", nargs="+", choices=("covey", "transformers", "vllm"), help="default: all there are")
    parser.add_argument("--vllm-python", type=Path, default=Path(sys.executable), help="a Python with vLLM")
    found = parser.parse_args(argv)
    found.repeats = found.repeats or (2 if found.device == "cuda" else 3)
    if found.sides is None:  # vLLM's CPU build is for tests only: measured if named
        wanted = found.device == "cuda" and has_package(found.vllm_python, "vllm")
        found.sides = ["covey", "transformers", *(["vllm"] if wanted else [])]
    return found


def main(argv: Sequence[str] | None = None) -> int:
    chosen = parse(argv)
    children = Children(__file__, chosen.limit)
    todo = loads(chosen)
    first = next(iter(todo.values()))
    here = children.run("machine", first | {"quick": chosen.tiny})
    failures: list[str] = []
    rows: list[dict[str, Any]] = []
    versions: dict[str, Any] = {"covey": here["versions"]}
    for model, settings in todo.items():
        found, theirs = measure(children, settings, chosen, failures)
        rows += rows_of(model, found, settings, Rates(**here["rates"])) if found else []
        versions |= theirs
    missing = [] if "vllm" in chosen.sides else ["vLLM was not measured."]
    if rows:
        notes = [f"Prompts of {first['prompt_tokens']} tokens, all different; {first['dtype']}.", *missing]
        result = Result(
            name="decode",
            device=here["device"],
            versions=merged(versions),
            header=HEADER,
            cells=[cells(row) for row in rows],
            rows=rows,
            plot=picture(rows),
            notes=notes,
            rates=here["rates"],
            settings=todo,
            command=command_line(),
            tiny=chosen.tiny,
            measures=[measure for row in rows if row["side"] == "covey" for measure in measures(row)],
            runs=rows,
        )
        publish(result, chosen.out)
    for failure in failures:
        print(f"failed: {failure}")
    return 1 if failures else 0


if __name__ == "__main__":
    serve({"covey": covey_side, "transformers": transformers_side, "vllm": vllm_side, "machine": machine})
    raise SystemExit(main())
