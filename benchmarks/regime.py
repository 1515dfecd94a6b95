"""A realistic workload: a 7B model, prompts of 1,024 tokens, answers of very different lengths up to 8,192.

    python benchmarks/regime.py --device cuda                Covey's engine against vLLM, bfloat16

Lengths are log-normal with a fixed seed and the same for both engines; max_tokens sets the length of each answer, and
no token ends it earlier. Groups of eight share their prompt. Each engine runs in its own process with random weights of
the same shape. The warm-up has other prompts, answers of 1/64 of the length, and one prompt as long as the longest row,
so that compilation, graph capture and allocation are done before the measurement. Both return the log-prob of every
token; --plain also measures vLLM without them.
"""

from __future__ import annotations

import math
import random
import statistics
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from kit.child import ChildFailed, Children, has_package, serve
from kit.floors import Load, Rates, Shape, decode_seconds, prefill_seconds
from kit.measure import about, machine, merged, now, peak_memory, prepare
from kit.models import load_config, load_model, random_ids
from kit.report import Plot, Result, command_line, measured_on, number, options, publish, ratio

WARM_UP = 64  # answers of the warm-up are this many times shorter
SIDES = {"covey": "Covey, with log-probs", "vllm-logprobs": "vLLM, with log-probs", "vllm": "vLLM, without"}


def answer_lengths(count: int, median: int, spread: float, longest: int, seed: int = 0) -> list[int]:
    """Log-normal lengths: half of them are above `median`, a few are cut at `longest`."""
    rng = random.Random(seed)
    return [max(1, min(longest, round(median * math.exp(spread * rng.gauss(0, 1))))) for _ in range(count)]


# -- the engines, each in its own process ----------------------------------------------------------------------------


def covey_side(settings: dict[str, Any]) -> dict[str, Any]:
    from kit.pipeline import Sampler

    prepare(settings)
    model = load_model(settings["model"], settings["device"], settings["dtype"])
    sampler = Sampler(model, len(settings["lengths"]))
    seconds = run_warm(sampler, settings)
    sampler.close()
    return {**about(settings["device"]), "covey": seconds | peak_memory(settings["device"])}


def vllm_side(settings: dict[str, Any]) -> dict[str, Any]:
    from kit.rivals import Vllm

    longest = settings["prompt_tokens"] * 2 + max(settings["lengths"])  # the warm-up's longest prompt and its answer
    engine = Vllm(settings["model"], max_tokens=longest, max_sequences=len(settings["lengths"]))
    kinds = [("vllm-logprobs", True), ("vllm", False)][: 1 + settings["plain"]]
    found = {
        name: run_warm(lambda prompts, lengths, wanted=wanted: engine(prompts, lengths, wanted), settings)
        for name, wanted in kinds
    }
    return {**about(settings["device"]), **found}


def run_warm(call: Callable[[list[list[int]], list[int]], int], settings: dict[str, Any]) -> dict[str, float]:
    """Seconds of the warm-up and of the measurement."""
    lengths = settings["lengths"]
    short = [math.ceil(length / WARM_UP) for length in lengths]
    prompts = requests(settings, "warm-up")
    prompts[0] = prompts[0] * (1 + max(lengths) // len(prompts[0]))  # as long as the longest row will be
    taken = []
    for asked, answers in ((prompts, short), (requests(settings, "work"), lengths)):
        start = now()
        sampled = call(asked, answers)
        taken.append(now() - start)
        assert sampled == sum(answers)
    return {"warm_up_s": taken[0], "seconds": taken[1]}


def requests(settings: dict[str, Any], run: str) -> list[list[int]]:
    """The prompt of each answer; equal within a group."""
    groups = len(settings["lengths"]) // settings["group"]
    vocabulary = load_config(settings["model"]).vocab_size
    prompts = random_ids(vocabulary, groups, settings["prompt_tokens"], ("regime", run))
    return [prompt for prompt in prompts for _ in range(settings["group"])]


# -- the report ------------------------------------------------------------------------------------------------------

HEADER = ("side", "wall s", "tokens/s", "× vLLM with log-probs", "× floor", "warm-up s")


def rows_of(found: dict[str, Any], settings: dict[str, Any], rates: Rates) -> list[dict[str, Any]]:
    tokens = sum(settings["lengths"])
    shape = Shape.of(load_config(settings["model"]))
    load = Load(len(settings["lengths"]) // settings["group"], settings["group"], settings["prompt_tokens"], 1)
    itemsize = {"float32": 4, "bfloat16": 2}[settings["dtype"]]
    least = prefill_seconds(shape, rates, load)
    least += decode_seconds(shape, rates, itemsize, settings["prompt_tokens"], settings["lengths"])
    other = found.get("vllm-logprobs", {}).get("seconds")
    rows = []
    for side, figures in found.items():
        ratios = {"speed_up": ratio(other, figures["seconds"]), "over_floor": figures["seconds"] / least}
        rows.append({"side": side, **figures, "tokens_per_s": tokens / figures["seconds"], **ratios})
    return [*rows, {"side": "floor", "seconds": least, "tokens_per_s": tokens / least}]


def cells(row: dict[str, Any]) -> list[str]:
    keys = ("seconds", "tokens_per_s", "speed_up", "over_floor", "warm_up_s")
    return [SIDES.get(row["side"], row["side"]), *(number(row.get(key)) for key in keys)]


def loads(chosen: Any) -> dict[str, Any]:
    lengths = answer_lengths(chosen.answers, 1000, 0.9, 8192)
    found = {"model": chosen.model, "dtype": "bfloat16", "prompt_tokens": 1024, "group": 8, "lengths": lengths}
    if chosen.tiny:
        lengths = answer_lengths(8, 4, 0.9, 12)
        found |= {"model": "tiny", "dtype": "float32", "prompt_tokens": 8, "group": 4, "lengths": lengths}
    return found | {"device": measured_on(chosen), "plain": chosen.plain}


def parse(argv: Sequence[str] | None) -> Any:
    parser = options(__doc__)
    parser.add_argument("--model", default="qwen2.5-7b", help="a shape")
    parser.add_argument("--answers", type=int, default=128, help="in groups of 8")
    parser.add_argument("--sides", nargs="+", choices=("covey", "vllm"), help="default: all there are")
    parser.add_argument("--plain", action="store_true", help="vLLM without log-probs too")
    parser.add_argument("--vllm-python", type=Path, default=Path(sys.executable), help="a Python with vLLM")
    found = parser.parse_args(argv)
    if found.sides is None:
        there = found.device == "cuda" and has_package(found.vllm_python, "vllm")
        found.sides = ["covey", *(["vllm"] if there else [])]
    return found


def main(argv: Sequence[str] | None = None) -> int:
    chosen = parse(argv)
    children = Children(__file__, chosen.limit)
    settings = loads(chosen)
    here = children.run("machine", settings | {"quick": chosen.tiny})
    found: dict[str, Any] = {}
    versions: dict[str, Any] = {"covey": here["versions"]}
    failures: list[str] = []
    for side in chosen.sides:
        try:
            done = children.run(side, settings, chosen.vllm_python if side == "vllm" else sys.executable)
        except ChildFailed as error:
            failures.append(str(error))
            continue
        versions[side] = done["versions"]
        found |= {name: done[name] for name in SIDES if name in done}
    if found:
        rows = rows_of(found, settings, Rates(**here["rates"]))
        publish(report(chosen, settings, here, versions, rows), chosen.out)
    for failure in failures:
        print(f"failed: {failure}")
    return 1 if failures else 0


def report(chosen: Any, settings: dict[str, Any], here: Any, versions: Any, rows: list[dict[str, Any]]) -> Result:
    lengths = settings["lengths"]
    notes = [
        f"{settings['model']}, {settings['dtype']}: {len(lengths)} answers in groups of {settings['group']}, prompts "
        f"of {settings['prompt_tokens']} tokens; answers of {min(lengths)} to {max(lengths)} tokens, median "
        f"{statistics.median(lengths):.0f}, {sum(lengths)} in all.",
        *([] if any(row["side"].startswith("vllm") for row in rows) else ["vLLM was not measured."]),
    ]
    labels = [SIDES.get(row["side"], row["side"]) for row in rows]
    return Result(
        name="regime",
        device=here["device"],
        versions=merged(versions),
        header=HEADER,
        cells=[cells(row) for row in rows],
        rows=rows,
        plot=Plot(
            "Answers of very different lengths", "tokens/s", {"tokens/s": [r["tokens_per_s"] for r in rows]}, labels
        ),
        notes=notes,
        rates=here["rates"],
        settings=settings,
        command=command_line(),
        tiny=chosen.tiny,
    )


if __name__ == "__main__":
    serve({"covey": covey_side, "vllm": vllm_side, "machine": machine})
    raise SystemExit(main())
