"""A vision-language model learns to read pictures: questions about coloured shapes, on a CPU.

    python examples/vision.py shapes          # writes shapes/: pictures, questions, demonstrations, and a small model
    covey sft model=shapes/model data.train_files=shapes/demos.jsonl data.val_files=shapes/val.jsonl ...
    covey train model=outputs/DATE/TIME data.train_files=shapes/train.jsonl data.val_files=shapes/val.jsonl ...

docs/vision.md has the whole commands. The small model has 0.7 million random weights: Qwen2.5-VL's architecture, and a
tokenizer of single characters. With a model of the hub (model=Qwen/Qwen2.5-VL-3B-Instruct) only the data is needed.
"""

import argparse
import json
import random
from pathlib import Path

from PIL import Image, ImageDraw

COLOURS = {"red": "#d22", "green": "#2a2", "blue": "#22d", "yellow": "#dd2", "purple": "#a2a", "white": "#fff"}
SHAPES = ("circle", "square", "triangle")
SIDE = 48  # pixels of a picture, which has four cells


def draw(cells):
    """A picture of up to four shapes: {place: (colour, shape)}."""
    picture = Image.new("RGB", (SIDE, SIDE), "#000")
    pen, half = ImageDraw.Draw(picture), SIDE // 2
    for place, (colour, shape) in cells.items():
        left, top = place % 2 * half + 3, place // 2 * half + 3
        right, bottom = left + half - 7, top + half - 7
        if shape == "circle":
            pen.ellipse((left, top, right, bottom), fill=COLOURS[colour])
        elif shape == "square":
            pen.rectangle((left, top, right, bottom), fill=COLOURS[colour])
        else:
            pen.polygon(((left, bottom), (right, bottom), ((left + right) / 2, top)), fill=COLOURS[colour])
    return picture


def example(dice):
    """A picture with a question about it, and the answer."""
    cells = {
        place: (dice.choice([*COLOURS]), dice.choice(SHAPES)) for place in dice.sample(range(4), dice.randint(1, 3))
    }
    kind = dice.choice(("colour", "count"))
    shapes = [shape for _, shape in cells.values()]
    if kind == "colour":
        shape = dice.choice(shapes)
        colours = {colour for colour, other in cells.values() if other == shape}
        if len(colours) > 1:
            return example(dice)
        return draw(cells), f"What colour is the {shape}?", colours.pop()
    shape = dice.choice(SHAPES)
    return draw(cells), f"How many {shape}s?", str(shapes.count(shape))


def write_data(folder, split, count, seed):
    """Pictures, and a JSON line for each: question, image, answer."""
    dice, lines = random.Random(seed), []
    (folder / "pictures").mkdir(parents=True, exist_ok=True)
    for number in range(count):
        picture, question, answer = example(dice)
        name = f"pictures/{split}-{number:05d}.png"
        picture.save(folder / name)
        lines.append(json.dumps({"question": question, "image": name, "answer": answer}))
    (folder / f"{split}.jsonl").write_text("\n".join(lines) + "\n")


def write_model(folder, seed):
    """A small Qwen2.5-VL with random weights."""
    import torch
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast, Qwen2_5_VLConfig, Qwen2_5_VLForConditionalGeneration
    from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

    marks = ["<|im_start|>", "<|im_end|>", "<|vision_start|>", "<|vision_end|>", "<|image_pad|>", "<|video_pad|>"]
    letters = [*"\n abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789.,:;?!'-"]
    ids = {token: number for number, token in enumerate(["<unk>", *marks, *letters])}
    inner = Tokenizer(models.WordLevel(ids, "<unk>"))
    inner.pre_tokenizer, inner.decoder = pre_tokenizers.Split("", "isolated"), decoders.Fuse()
    special = {"unk_token": "<unk>", "eos_token": "<|im_end|>", "pad_token": "<|im_end|>"}
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=inner, **special)
    tokenizer.add_special_tokens({"additional_special_tokens": marks})
    tokenizer.chat_template = (
        "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{% if m['content'] is string %}{{ m['content'] }}"
        "{% else %}{% for part in m['content'] %}{% if part['type'] == 'image' %}"
        "<|vision_start|><|image_pad|><|vision_end|>{% else %}{{ part['text'] }}{% endif %}{% endfor %}{% endif %}"
        "<|im_end|>\n{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
    )
    rope = {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [4, 6, 6]}
    text = {"hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 3, "num_attention_heads": 4}
    text |= {
        "num_key_value_heads": 4,
        "vocab_size": len(tokenizer),
        "max_position_embeddings": 512,
        "rope_parameters": rope,
    }
    text |= {"bos_token_id": None, "eos_token_id": ids["<|im_end|>"], "pad_token_id": ids["<|im_end|>"]}
    vision = {"depth": 2, "hidden_size": 64, "num_heads": 4, "intermediate_size": 128, "out_hidden_size": 128}
    vision |= {"patch_size": 6, "window_size": 48, "fullatt_block_indexes": [1]}
    config = Qwen2_5_VLConfig(
        text_config=text,
        vision_config=vision,
        image_token_id=ids["<|image_pad|>"],
        video_token_id=ids["<|video_pad|>"],
        vision_start_token_id=ids["<|vision_start|>"],
        vision_end_token_id=ids["<|vision_end|>"],
    )
    torch.manual_seed(seed)
    model = Qwen2_5_VLForConditionalGeneration(config)
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    size = {"shortest_edge": SIDE * SIDE, "longest_edge": SIDE * SIDE}
    Qwen2VLImageProcessorPil(patch_size=6, size=size).save_pretrained(folder)
    return sum(weight.numel() for weight in model.parameters())


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, nargs="?", default=Path("shapes"))
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--demos", type=int, default=3000, help="demonstrations for covey sft")
    parser.add_argument("--train", type=int, default=2000, help="questions for covey train")
    parser.add_argument("--val", type=int, default=200, help="held-out questions")
    args = parser.parse_args()

    for number, split in enumerate(("demos", "train", "val")):
        write_data(args.folder, split, getattr(args, split), seed=1000 * args.seed + number)
    weights = write_model(args.folder / "model", args.seed)
    print(f"{args.folder}: {args.demos} demonstrations, {args.train} + {args.val} questions, {weights:,} weights")
