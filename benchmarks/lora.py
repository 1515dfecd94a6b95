"""One LoRA step of a 7B model within 24 GiB of GPU memory: sampling and learning, and the peak they reach.

    python benchmarks/lora.py --device cuda

Eight answers of 1,024 tokens to one prompt of 512, gradient checkpointing, adapters of rank 16 on every linear layer,
bfloat16 weights. torch refuses allocations beyond the cap.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from kit.child import ChildFailed, Children, serve
from kit.measure import GIB, about, peak_memory, prepare
from kit.models import SHAPES, as_text, random_ids
from kit.report import Measure, Plot, Result, command_line, measured_on, number, options, publish


def covey_side(settings: dict[str, Any]) -> dict[str, Any]:
    import torch
    from kit.pipeline import Spec, Trainer

    from covey.config.schema import LearnerConfig, LoraConfig, ModelConfig

    prepare(settings)
    if settings["device"] == "cuda":
        whole = torch.cuda.get_device_properties(0).total_memory
        torch.cuda.set_per_process_memory_fraction(min(1.0, settings["cap"] * GIB / whole))
    model = ModelConfig(lora=LoraConfig(rank=settings["rank"]), gradient_checkpointing=True)
    trainer = Trainer(Spec.of(settings, model=model, learner=LearnerConfig(lr=1e-5)))
    vocabulary = SHAPES[settings["model"]]["vocab_size"]
    prompts = [as_text(ids) for ids in random_ids(vocabulary, 1, settings["prompt_tokens"], "lora")]
    done = trainer.run(
        prompts, settings["group"], settings["answer_tokens"], warmup=settings["warmup"], steps=settings["steps"]
    )
    return {
        **about(settings["device"]),
        **peak_memory(settings["device"]),
        "steps": [asdict(timed) for timed, _ in done],
        "trained": sum(p.numel() for p in trainer.learner.model.parameters() if p.requires_grad),
    }


HEADER = ("model", "cap GiB", "peak GiB", "reserved GiB", "sampling s", "learning s", "s/step")


def loads(chosen: Any) -> dict[str, Any]:
    found = {"device": measured_on(chosen), "cap": chosen.cap, "rank": 16, "group": 8, "warmup": 1, "steps": 2}
    found |= {"model": chosen.model, "dtype": "bfloat16", "prompt_tokens": 512, "answer_tokens": 1024}
    if chosen.tiny:
        found |= {"model": "tiny", "dtype": "float32", "prompt_tokens": 8, "answer_tokens": 8, "steps": 1}
    return found


def parse(argv: Sequence[str] | None) -> Any:
    parser = options(__doc__)
    parser.add_argument("--model", default="qwen2.5-7b", choices=SHAPES)
    parser.add_argument("--cap", type=float, default=24.0, help="GiB of GPU memory that may be taken")
    return parser.parse_args(argv)


def main(argv: Sequence[str] | None = None) -> int:
    chosen = parse(argv)
    children = Children(__file__, chosen.limit)
    settings = loads(chosen)
    try:
        done = children.run("covey", settings)
    except ChildFailed as error:
        print(f"failed: {error}")
        return 1
    last = done["steps"][-1]
    row = {
        "model": settings["model"],
        "cap": chosen.cap,
        "peak": done["peak"],
        "reserved": done.get("reserved"),
        **last,
    }
    row |= {"step": last["sampling"] + last["learning"], "trained": done["trained"]}
    result = Result(
        name="lora",
        device=done["device"],
        versions=done["versions"],
        header=HEADER,
        cells=[[row["model"], *(number(row[k]) for k in ("cap", "peak", "reserved", "sampling", "learning", "step"))]],
        rows=[row],
        plot=Plot("One LoRA step", "GiB", {"peak": [row["peak"]], "cap": [chosen.cap]}, [row["model"]]),
        notes=[
            f"{settings['group']} answers of {settings['answer_tokens']} tokens to a prompt of "
            f"{settings['prompt_tokens']}; adapters of rank {settings['rank']}: {row['trained']:,} trained weights; "
            f"{settings['dtype']}, gradient checkpointing.",
            *([] if settings["device"] == "cuda" else ["On a CPU nothing is capped; the peak is that of the process."]),
        ],
        settings=settings,
        command=command_line(),
        tiny=chosen.tiny,
        measures=[
            Measure("peak memory", row["peak"], "GiB"),
            *(Measure(part, row[part], "s", [s[part] for s in done["steps"]]) for part in ("sampling", "learning")),
        ],
        runs=done,
    )
    publish(result, chosen.out)
    return 0


if __name__ == "__main__":
    serve({"covey": covey_side})
    raise SystemExit(main())
