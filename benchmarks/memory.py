"""Peak memory of a learner's update by tokens and vocabulary: it must not grow with their product.

    .venv/bin/python benchmarks/memory.py                    a small model on a CPU, float32
    python benchmarks/memory.py --device cuda                the shape of Qwen2.5-0.5B on a GPU, bfloat16

All tokens of an update are in one micro-batch, so that only the learner's chunking bounds its logits. "Working memory"
is the peak minus the persistent tensors: weights, gradients, moments, and float32 masters in bfloat16. On a CPU each
point has its own process, and the peak is that of the process, minus its memory before the update.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from kit.child import ChildFailed, Children, serve
from kit.measure import GIB, about, peak_memory, prepare, reset_peak
from kit.models import SHAPES, random_ids
from kit.report import Measure, Plot, Result, command_line, measured_on, number, options, publish


def covey_side(settings: dict[str, Any]) -> dict[str, Any]:
    """Measure the points in order, each with a model of its vocabulary."""
    prepare(settings)
    return {**about(settings["device"]), "points": [_point(settings, point) for point in settings["points"]]}


def _point(settings: dict[str, Any], point: dict[str, int]) -> dict[str, float]:
    from kit.pipeline import Spec, made_up

    from covey.app.models import make_learner
    from covey.config.schema import LearnerConfig
    from covey.training.samples import minibatches, to_samples

    # Prompts and answers of the update fit into one micro-batch.
    plan = LearnerConfig(lr=1e-6, micro_batch_tokens=2 * point["tokens"])
    spec = Spec.of(settings | {"changes": {"vocab_size": point["vocabulary"]}}, learner=plan)
    learner = make_learner(spec, None)
    model, algorithm = learner.model, spec.algorithm

    def update(answers: int) -> None:
        ids = random_ids(point["vocabulary"], answers + 1, settings["answer_tokens"], "memory")
        samples = to_samples(made_up([ids[0][: settings["prompt_tokens"]]], [ids[1:]]), {"checksum": 1.0})
        (batch,) = minibatches(samples, algorithm.advantages(samples), groups_per_batch=None, epochs=1)
        learner.update(batch, algorithm)

    update(2)  # the first update allocates the moments
    before = held(settings["device"])
    reset_peak()
    update(point["tokens"] // settings["answer_tokens"])
    peak = peak_memory(settings["device"])["peak"]
    trained = sum(p.numel() for p in model.parameters()) * model.dtype.itemsize / GIB
    return {"peak": peak, "working": peak - before - trained}  # gradients exist at the peak, but not before


def held(device: str) -> float:
    """GiB in use now."""
    import torch

    if device == "cuda":
        return torch.cuda.memory_allocated() / GIB
    with open("/proc/self/status") as status:
        (line,) = (line for line in status if line.startswith("VmRSS:"))
    return int(line.split()[1]) * 1024 / GIB


# -- what is measured, and the report ---------------------------------------------------------------------------------


def loads(chosen: Any) -> dict[str, Any]:
    if chosen.device == "cuda":
        found = {"model": chosen.shape, "dtype": "bfloat16", "prompt_tokens": 256, "answer_tokens": 256}
        vocabularies, tokens = (32768, SHAPES[chosen.shape]["vocab_size"]), (4096, 8192, 16384, 32768)
    else:
        found = {"model": "tiny", "dtype": "float32", "prompt_tokens": 64, "answer_tokens": 128}
        vocabularies, tokens = (16384, 65536), (4096, 8192, 16384)
    if chosen.tiny:
        found |= {"model": "tiny", "dtype": "float32", "prompt_tokens": 4, "answer_tokens": 8}
        vocabularies, tokens = (256, 1024), (16, 64)
    points = [
        {"vocabulary": v, "tokens": t} for v in chosen.vocabularies or vocabularies for t in chosen.tokens or tokens
    ]
    return found | {"device": measured_on(chosen), "points": points}


HEADER = (
    "vocabulary",
    "sampled tokens",
    "peak GiB",
    "working memory GiB",
    "all logits in float32, GiB",
    "working / logits",
)


def rows_of(settings: dict[str, Any], points: Sequence[dict[str, float]]) -> list[dict[str, Any]]:
    rows = []
    for point, figures in zip(settings["points"], points, strict=True):
        logits = point["vocabulary"] * point["tokens"] * 4 / GIB
        rows.append({**point, **figures, "logits": logits, "share": figures["working"] / logits})
    return rows


def growth(rows: Sequence[dict[str, Any]]) -> str:
    """Working memory per token, for the smallest and the largest vocabulary."""
    slopes = {}
    for vocabulary in (min(row["vocabulary"] for row in rows), max(row["vocabulary"] for row in rows)):
        of = sorted((row["tokens"], row["working"]) for row in rows if row["vocabulary"] == vocabulary)
        slopes[vocabulary] = (of[-1][1] - of[-2][1]) * GIB / 1024 / (of[-1][0] - of[-2][0])
    told = ", ".join(f"{slope:.0f} KiB with {vocabulary:,}" for vocabulary, slope in slopes.items())
    return f"A further token takes {told} words of vocabulary; its logits alone would take 4 bytes a word."


def cells(row: dict[str, Any]) -> list[str]:
    keys = ("peak", "working", "logits", "share")
    return [f"{row['vocabulary']:,}", f"{row['tokens']:,}", *(number(row[key]) for key in keys)]


def picture(rows: Sequence[dict[str, Any]]) -> Plot:
    tokens = sorted({row["tokens"] for row in rows})
    series: dict[str, list[float | None]] = {}
    for row in rows:
        line = series.setdefault(f"vocabulary {row['vocabulary']:,}", [None] * len(tokens))
        line[tokens.index(row["tokens"])] = row["working"]
    widest = max(row["vocabulary"] for row in rows)
    series[f"all logits of {widest:,}"] = [t * widest * 4 / GIB for t in tokens]
    return Plot("Working memory of an update", "GiB", series, x=tokens, x_label="sampled tokens")


def parse(argv: Sequence[str] | None) -> Any:
    parser = options(__doc__)
    parser.add_argument("--shape", default="qwen2.5-0.5b", choices=SHAPES, help="on a GPU")
    parser.add_argument("--tokens", type=int, nargs="+", help="sampled tokens of an update, at least two sizes")
    parser.add_argument("--vocabularies", type=int, nargs="+")
    return parser.parse_args(argv)


def main(argv: Sequence[str] | None = None) -> int:
    chosen = parse(argv)
    children = Children(__file__, chosen.limit)
    settings = loads(chosen)
    # A process remembers its peak: on a CPU every point needs a new one.
    parts = [settings["points"]] if settings["device"] == "cuda" else [[point] for point in settings["points"]]
    try:
        done = [children.run("covey", settings | {"points": part}) for part in parts]
    except ChildFailed as error:
        print(f"failed: {error}")
        return 1
    rows = rows_of(settings, [point for child in done for point in child["points"]])
    result = Result(
        name="memory",
        device=done[0]["device"],
        versions=done[0]["versions"],
        header=HEADER,
        cells=[cells(row) for row in rows],
        rows=rows,
        plot=picture(rows),
        notes=[
            f"The layers of {settings['model']}, {settings['dtype']}; answers of {settings['answer_tokens']} tokens to "
            "one prompt, one micro-batch.",
            growth(rows),
        ],
        settings=settings,
        command=command_line(),
        tiny=chosen.tiny,
        measures=[
            Measure(f"{row['tokens']} tokens, vocabulary {row['vocabulary']}: {kind}", row[kind], "GiB")
            for row in rows
            for kind in ("peak", "working")
        ],
        runs=done,
    )
    publish(result, chosen.out)
    return 0


if __name__ == "__main__":
    serve({"covey": covey_side})
    raise SystemExit(main())
