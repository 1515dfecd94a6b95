"""The command `covey train` itself: its first step with empty caches, a second run, and asynchronous training.

    python benchmarks/modes.py --device cuda [--model qwen2.5-0.5b]

Three runs for each repeat, one after another: synchronous with empty compilation caches, the same again with the
caches of the first, and asynchronous. Prompts and answers have 256 tokens, and almost no answer ends earlier, since the
weights are random. "start" is the time of the command without its steps; "s/step" the median after the first two.
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import tempfile
import time
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from kit.child import Children, serve
from kit.command import run_covey
from kit.floors import Load, Rates, Request, Shape, learning_seconds, sampling_flops, sampling_seconds, training_flops
from kit.measure import machine
from kit.models import SHAPES, as_text, load_config, model_folder, random_ids
from kit.report import Measure, Plot, Result, command_line, measured_on, number, options, percent, publish, ratio

RUNS = {
    "synchronous, empty caches": ["mode=sync"],
    "synchronous, second run": ["mode=sync"],
    "asynchronous": ["mode=async", "mode.max_staleness=1"],
}
CACHES = {"TORCHINDUCTOR_CACHE_DIR": "inductor", "TRITON_CACHE_DIR": "triton"}
REWARD = "import zlib\ndef checksum(final_answer):\n    return zlib.crc32(final_answer.encode()) / 2**32\n"
COMMON = ["algorithm=grpo", "reward=reward.py:checksum", "learner.lr=1e-6", "resume=disable", "logging.to=[]"]
COMMON += ["eval.before=false", "eval.after=false", "loop.save_final=false"]


def run(settings: dict[str, Any], words: Sequence[str], folder: Path) -> dict[str, Any]:
    """One command: its seconds of each step, and of everything else."""
    load, before = Load(**settings["load"]), set(folder.glob("outputs/*/*"))
    line = [
        "train",
        f"model={settings['folder']}",
        f"model.device={settings['device']}",
        "data.train_files=train.jsonl",
    ]
    line += [f"model.dtype={settings['dtype']}", f"data.train_batch_size={load.prompts}", *COMMON, *words]
    line += [f"rollout.group_size={load.group}", f"rollout.max_tokens={load.answer_tokens}"]
    line += [f"loop.total_steps={settings['steps']}"]
    start = time.perf_counter()
    run_covey(line, cwd=folder, stdout=subprocess.DEVNULL)
    whole = time.perf_counter() - start
    (made,) = set(folder.glob("outputs/*/*")) - before
    records = [json.loads(record) for record in (made / "metrics.jsonl").read_text().splitlines()]
    steps = [record["metrics"]["timing/step"] for record in records if record["kind"] == "step"]
    return {"start_s": whole - sum(steps), "first_s": steps[0], "step_s": statistics.median(steps[2:] or steps)}


def repeat(settings: dict[str, Any]) -> dict[str, dict[str, Any]]:
    """Every run once, with caches of their own."""
    load = Load(**settings["load"])
    vocabulary = load_config(settings["folder"]).vocab_size
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        prompts = random_ids(vocabulary, load.prompts * settings["steps"], load.prompt_tokens, "modes")
        tasks = [json.dumps({"question": as_text(ids), "answer": ""}) for ids in prompts]
        (folder / "train.jsonl").write_text("\n".join(tasks) + "\n")
        (folder / "reward.py").write_text(REWARD)
        usual = {key: os.environ.get(key) for key in CACHES}
        os.environ.update({key: str(folder / place) for key, place in CACHES.items()})
        try:
            return {side: run(settings, words, folder) for side, words in RUNS.items()}
        finally:
            for key, value in usual.items():
                os.environ.pop(key) if value is None else os.environ.update({key: value})


# -- what is measured, and the report ---------------------------------------------------------------------------------

HEADER = ("run", "start s", "first step s", "s/step", "× synchronous", "× floor", "MFU")


def loads(chosen: Any) -> dict[str, Any]:
    found = {"device": measured_on(chosen), "model": chosen.model, "dtype": "bfloat16", "steps": 8}
    found |= {"load": asdict(Load(32, 8, 256, 256))}
    if chosen.tiny:
        found |= {"model": "tiny", "dtype": "float32", "steps": 3, "load": asdict(Load(2, 2, 8, 8))}
    return found | {"folder": model_folder(found["model"], "cpu", found["dtype"], family="Llama")}


def rows_of(settings: dict[str, Any], repeats: Sequence[dict[str, Any]], rates: Rates) -> list[dict[str, Any]]:
    shape, load = Shape.of(load_config(settings["model"])), Load(**settings["load"])
    itemsize = {"float32": 4, "bfloat16": 2}[settings["dtype"]]
    least = sampling_seconds(shape, rates, itemsize, load) + learning_seconds(shape, rates, load)
    answers = [load.answer_tokens] * load.group
    flops = training_flops(shape, load) + load.prompts * sampling_flops(
        shape, [Request(0, load.prompt_tokens, answers)]
    )
    medians = {
        side: {key: statistics.median(done[side][key] for done in repeats) for key in repeats[0][side]} for side in RUNS
    }
    usual = medians["synchronous, second run"]["step_s"]
    return [
        {"side": side, **figures, "speed_up": ratio(usual, figures["step_s"]), "over_floor": figures["step_s"] / least}
        | {"mfu": flops / rates.flops / figures["step_s"]}
        for side, figures in medians.items()
    ]


def cells(row: dict[str, Any]) -> list[str]:
    figures = [number(row[key]) for key in ("start_s", "first_s", "step_s", "speed_up", "over_floor")]
    return [row["side"], *figures, percent(row["mfu"])]


def parse(argv: Sequence[str] | None) -> Any:
    parser = options(__doc__)
    parser.add_argument("--model", default="qwen2.5-0.5b", choices=SHAPES)
    parser.add_argument("--repeats", type=int, help="of all three runs; default 3")
    found = parser.parse_args(argv)
    found.repeats = found.repeats or (1 if found.tiny else 3)
    return found


def main(argv: Sequence[str] | None = None) -> int:
    chosen = parse(argv)
    settings = loads(chosen)
    here = Children(__file__, chosen.limit).run("machine", settings | {"quick": chosen.tiny})
    repeats = [repeat(settings) for _ in range(chosen.repeats)]
    rows = rows_of(settings, repeats, Rates(**here["rates"]))
    load = Load(**settings["load"])
    parts = {"start": "start_s", "first step": "first_s", "a later step": "step_s"}
    result = Result(
        name="modes",
        device=here["device"],
        versions=here["versions"],
        header=HEADER,
        cells=[cells(row) for row in rows],
        rows=rows,
        plot=Plot(
            "covey train", "seconds", {part: [row[key] for row in rows] for part, key in parts.items()}, list(RUNS)
        ),
        notes=[
            f"{settings['model']}, {settings['dtype']}: {load.prompts} prompts × {load.group} answers, "
            f"{load.prompt_tokens} + {load.answer_tokens} tokens; medians of {chosen.repeats} repeats."
        ],
        rates=here["rates"],
        settings={key: value for key, value in settings.items() if key != "folder"},
        command=command_line(),
        tiny=chosen.tiny,
        measures=[
            Measure(f"{side}: {part}", row[key], "s", [done[side][key] for done in repeats])
            for side, row in zip(RUNS, rows, strict=True)
            for part, key in parts.items()
        ],
        runs=repeats,
    )
    publish(result, chosen.out)
    return 0


if __name__ == "__main__":
    serve({"machine": machine})
    raise SystemExit(main())
