"""One step of a vision-language model: sampling and learning, memory, and the mismatch of engine and learner.

    python benchmarks/vision.py --device cuda [--model qwen2.5-vl-3b]

Eight tasks with one picture each, of 500 image tokens, and eight answers of 128 tokens per task. The models have the
shapes of Qwen2.5-VL with random weights; their vision tower is frozen, as `covey train` has it by default. All weights
of the language part are trained, or adapters with `--lora-rank` (16 by default for the 7B model).
"""

from __future__ import annotations

import atexit
import shutil
import statistics
import tempfile
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from kit.child import ChildFailed, Children, serve
from kit.measure import about, now, peak_memory, prepare
from kit.models import as_text, random_ids, random_model, word_tokenizer
from kit.report import Measure, Plot, Result, command_line, measured_on, number, options, publish

# As published: the language part, and the vision tower.
SHAPES: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "tiny": (
        {
            "hidden_size": 32,
            "num_hidden_layers": 2,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "intermediate_size": 48,
            "vocab_size": 512,
            "tie_word_embeddings": True,
        },
        {"depth": 2, "hidden_size": 16, "num_heads": 2, "intermediate_size": 32, "window_size": 56},
    ),
    "qwen2.5-vl-3b": (
        {
            "hidden_size": 2048,
            "num_hidden_layers": 36,
            "num_attention_heads": 16,
            "num_key_value_heads": 2,
            "intermediate_size": 11008,
            "vocab_size": 151936,
            "tie_word_embeddings": True,
        },
        {"depth": 32, "hidden_size": 1280, "num_heads": 16, "intermediate_size": 3420, "window_size": 112},
    ),
    "qwen2.5-vl-7b": (
        {
            "hidden_size": 3584,
            "num_hidden_layers": 28,
            "num_attention_heads": 28,
            "num_key_value_heads": 4,
            "intermediate_size": 18944,
            "vocab_size": 152064,
            "tie_word_embeddings": False,
        },
        {"depth": 32, "hidden_size": 1280, "num_heads": 16, "intermediate_size": 3420, "window_size": 112},
    ),
}
PATCH, MERGED = 14, 28  # pixels: of a patch, and of an image token, in each direction
# Where a template has no marks of its own, words stand for them: an image is between two of the last words.
VIDEO, START, END, IMAGE = (-3, -4, -5, -6)  # ids, from the end of the vocabulary


def vision_config(name: str) -> Any:
    """The transformers configuration of a shape."""
    import transformers

    language, tower = SHAPES[name]
    size = language["vocab_size"]
    head = language["hidden_size"] // language["num_attention_heads"]
    sections = [head // 8, head // 16 * 3, head // 16 * 3]  # of the half of a head: time, height and width
    ends = {"bos_token_id": None, "eos_token_id": size - 1, "pad_token_id": size - 1}
    rope = {"rope_type": "default", "rope_theta": 1e6, "mrope_section": sections if head >= 16 else [2, 1, 1]}
    full = [at for at in (7, 15, 23, 31) if at < tower["depth"]] or [tower["depth"] - 1]
    return transformers.Qwen2_5_VLConfig(
        text_config={**language, **ends, "rope_parameters": rope, "max_position_embeddings": 32768},
        vision_config={
            **tower,
            "out_hidden_size": language["hidden_size"],
            "patch_size": PATCH,
            "fullatt_block_indexes": full,
        },
        tie_word_embeddings=language["tie_word_embeddings"],
        image_token_id=size + IMAGE,
        video_token_id=size + VIDEO,
        vision_start_token_id=size + START,
        vision_end_token_id=size + END,
        architectures=["Qwen2_5_VLForConditionalGeneration"],
    )


def image_tokenizer(vocabulary: int) -> Any:
    """`word_tokenizer` with a template that writes images."""
    tokenizer = word_tokenizer(vocabulary)
    image = " ".join(f"w{vocabulary + at}" for at in (START, IMAGE, END))
    tokenizer.chat_template = (
        "{% for m in messages %}{% if m['content'] is string %}{{ m['content'] }}{% else %}"
        "{% for part in m['content'] %}"
        f"{{% if part['type'] == 'image' %}} {image} {{% else %}}{{{{ part['text'] }}}}{{% endif %}}"
        "{% endfor %}{% endif %}{% endfor %}"
    )
    return tokenizer


def vision_source(settings: dict[str, Any]) -> Any:
    """A folder with random weights in the model's shape, deleted at exit, with its tokenizer and image processor."""
    import torch
    from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

    from covey.models.families import vision_family
    from covey.models.folder import read_config
    from covey.models.loading import ModelSource
    from covey.models.vision import VisionProcessor

    folder = tempfile.mkdtemp(prefix="covey-vision-")
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    config = vision_config(settings["model"])
    tokenizer = image_tokenizer(config.text_config.vocab_size)
    random_model(config, settings["device"], settings["dtype"]).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    pixels = Qwen2VLImageProcessorPil(patch_size=PATCH, size={"shortest_edge": 1, "longest_edge": 2**30})
    pixels.save_pretrained(folder)
    if settings["device"] == "cuda":
        torch.cuda.empty_cache()
    found = read_config(folder, folder, revision=None, trusted=False)
    family = vision_family(found)
    assert family is not None
    vision = VisionProcessor(family, pixels, tokenizer, found)
    return ModelSource(folder, folder, tokenizer, found, vision=vision)


def questions(settings: dict[str, Any]) -> list[list[dict[str, Any]]]:
    """One picture with random words for each task."""
    import io

    import numpy as np
    from PIL import Image

    from covey.images import image_of_bytes

    rows, columns = settings["grid"]
    vocabulary = SHAPES[settings["model"]][0]["vocab_size"]
    found = []
    for seed, ids in enumerate(random_ids(vocabulary - 8, settings["tasks"], settings["prompt_tokens"], "vision")):
        blocks = np.random.default_rng(seed).integers(0, 256, (rows, columns, 3), dtype=np.uint8)
        picture = Image.fromarray(blocks).resize((columns * MERGED, rows * MERGED), Image.Resampling.BICUBIC)
        encoded = io.BytesIO()
        picture.save(encoded, "PNG")
        image = {"type": "image", "image": image_of_bytes(encoded.getvalue())}
        found.append([{"role": "user", "content": [image, {"type": "text", "text": as_text(ids)}]}])
    return found


def covey_side(settings: dict[str, Any]) -> dict[str, Any]:
    from kit.pipeline import Spec, Trainer

    from covey.algorithms import make
    from covey.config.schema import Config, LearnerConfig, LoraConfig, ModelConfig, RolloutConfig
    from covey.models.families import causal_lm
    from covey.models.image_features import vision_weights
    from covey.training.metrics import engine_mismatch

    prepare(settings)
    start = now()
    source = vision_source(settings)
    config = Config(
        model=ModelConfig(
            name=source.name,
            device=settings["device"],
            dtype=settings["dtype"],
            lora=LoraConfig(rank=settings["lora_rank"]),
        ),
        rollout=RolloutConfig(group_size=settings["group"]),
        learner=LearnerConfig(lr=1e-6),
    )
    trainer = Trainer(Spec(config, source, make("grpo")))
    loaded = now() - start
    done = trainer.run(
        questions(settings),
        settings["group"],
        settings["answer_tokens"],
        warmup=settings["warmup"],
        steps=settings["steps"],
    )
    tower = vision_weights(causal_lm(trainer.learner.model)).values()
    return {
        **about(settings["device"]),
        **peak_memory(settings["device"]),
        "load_s": loaded,
        "whole_s": now() - start,
        "steps": [asdict(timed) for timed, _ in done],
        "mismatch": [engine_mismatch(found.samples, found.trace, None)["rollout/mismatch"] for _, found in done],
        "prompt_tokens": len(done[-1][1].collected.groups[0].episodes[0].turns[0].prompt_ids),
        "weights": sum(p.numel() for p in trainer.learner.model.parameters()),
        "tower": sum(p.numel() for p in tower),
        "trained": sum(p.numel() for p in trainer.learner.model.parameters() if p.requires_grad),
    }


HEADER = ("model", "trained weights", "sampling s", "learning s", "s/step", "tokens/s", "peak GiB", "mismatch")


def loads(chosen: Any) -> dict[str, Any]:
    rank = chosen.lora_rank if chosen.lora_rank is not None else 16 * (chosen.model == "qwen2.5-vl-7b")
    found = {"device": measured_on(chosen), "model": chosen.model, "dtype": "bfloat16", "lora_rank": rank}
    found |= {"tasks": 8, "group": 8, "grid": (20, 25), "prompt_tokens": 64, "answer_tokens": 128}
    found |= {"warmup": 1, "steps": 2}
    if chosen.tiny:
        found |= {"model": "tiny", "dtype": "float32", "tasks": 2, "group": 2, "grid": (2, 3)}
        found |= {"prompt_tokens": 8, "answer_tokens": 8, "steps": 1}
    return found


def row_of(settings: dict[str, Any], done: dict[str, Any]) -> dict[str, Any]:
    parts = {part: statistics.median(s[part] for s in done["steps"]) for part in ("sampling", "learning")}
    seconds = sum(parts.values())
    return {
        "model": settings["model"],
        "trained": done["trained"],
        **parts,
        "step": seconds,
        "rate": done["steps"][-1]["tokens"] / seconds,
        "peak": done["peak"],
        "mismatch": statistics.median(done["mismatch"]),
    }


def parse(argv: Sequence[str] | None) -> Any:
    parser = options(__doc__)
    parser.add_argument("--model", default="qwen2.5-vl-3b", choices=SHAPES)
    parser.add_argument("--lora-rank", type=int, help="adapters of this rank; 0: all weights of the language part")
    return parser.parse_args(argv)


def main(argv: Sequence[str] | None = None) -> int:
    chosen = parse(argv)
    settings = loads(chosen)
    try:
        done = Children(__file__, chosen.limit).run("covey", settings)
    except ChildFailed as error:
        print(f"failed: {error}")
        return 1
    row = row_of(settings, done)
    rows, columns = settings["grid"]
    parts = ("sampling", "learning")
    result = Result(
        name="vision" if settings["model"] in ("tiny", "qwen2.5-vl-3b") else f"vision-{settings['model']}",
        device=done["device"],
        versions=done["versions"],
        header=HEADER,
        cells=[
            [row["model"], f"{row['trained']:,}"]
            + [number(row[key]) for key in ("sampling", "learning", "step", "rate", "peak")]
            + [f"{row['mismatch']:.2g}"]
        ],
        rows=[row],
        plot=Plot("One step with pictures", "seconds", {part: [row[part]] for part in parts}, [row["model"]]),
        notes=[
            f"{settings['tasks']} tasks × {settings['group']} answers of {settings['answer_tokens']} tokens; prompts "
            f"of {done['prompt_tokens']} tokens, with one picture of {rows * columns}; {settings['dtype']}; "
            f"{done['weights']:,} weights, {done['tower']:,} of them in the vision tower, which is frozen"
            + (f"; adapters of rank {settings['lora_rank']}." if settings["lora_rank"] else "."),
            "mismatch: mean absolute difference of the log-probs of engine and learner, per sampled token.",
            f"{done['load_s']:.0f} s to write and load the model, {done['whole_s']:.0f} s in all.",
        ],
        settings=settings,
        command=command_line(),
        tiny=chosen.tiny,
        measures=[
            Measure("peak memory", row["peak"], "GiB"),
            *(Measure(part, row[part], "s", [s[part] for s in done["steps"]]) for part in parts),
        ],
        runs=done,
    )
    publish(result, chosen.out)
    return 0


if __name__ == "__main__":
    serve({"covey": covey_side})
    raise SystemExit(main())
