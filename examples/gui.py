"""A small vision-language model learns to use web pages with the mouse: demonstrations, then reinforcement learning.

    python examples/gui.py pages              # writes pages/: a small model, and demonstrations with screenshots
    covey sft model=pages/model ...           # imitates the demonstrations
    covey train model=outputs/DATE/TIME agent=gui data=gui_pages ...    # learns on fresh pages from their reward

docs/gui.md has the whole commands and what was learned. The demonstrations are on pages of `data=gui_pages`, shown by
Chromium. The small model has Qwen3-VL's architecture, random weights, and a tokenizer of the words of these pages. With
a model of the hub only the last command is needed.
"""

import argparse
import json
import re
from pathlib import Path

from covey.agents.gui.actions import FORMATS
from covey.agents.gui.agent import find_chromium
from covey.config.schema import DataConfig
from covey.tasks import load_tasks

VIEWPORT = (112, 96)  # pixels of a page; the model sees 16 × 16 pixels as one token
PATCH = 8  # four of them are one token
MARKS = ("<|im_start|>", "<|im_end|>", "<|vision_start|>", "<|vision_end|>", "<|image_pad|>", "<|video_pad|>")
TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{% if m['content'] is string %}{{ m['content'] }}"
    "{% else %}{% for part in m['content'] %}{% if part['type'] == 'image' %}"
    "<|vision_start|><|image_pad|><|vision_end|>{% else %}{{ part['text'] }}{% endif %}{% endfor %}{% endif %}"
    "<|im_end|>\n{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
INSTRUCTIONS = FORMATS["thought_action"].instructions(VIEWPORT)  # the system message of agent=gui
CLICK, END = "Action: click(start_box='(", ")')"
OPTIONS = {"kinds": ["colour"], "buttons": 4, "varied": True, "viewport": list(VIEWPORT), "max_turns": 1}
BUTTONS = """all => all.map(button => { const r = button.getBoundingClientRect();
    return [button.ariaLabel, [r.left, r.top, r.right, r.bottom]] })"""


def write_data(folder, counts, seed):
    """Screenshots of pages: demos.jsonl and val-demos.jsonl with what a player says; train.jsonl and val.jsonl, tasks
    with the box that must be clicked. Both val files are of the same pages, of held-out layouts."""
    from playwright.sync_api import sync_playwright

    (folder / "screens").mkdir(parents=True, exist_ok=True)
    demos, train, val = counts
    tasks = load_tasks(DataConfig(name="gui_pages", options=OPTIONS, train_size=demos + train, val_size=val), seed)
    parts = {"demos": tasks.train[:demos], "train": tasks.train[demos:], "val": tasks.validation}
    files = {"demos": ("demos", None), "train": (None, "train"), "val": ("val-demos", "val")}
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=find_chromium(None), chromium_sandbox=False)
        page = browser.new_page(viewport={"width": VIEWPORT[0], "height": VIEWPORT[1]})
        for name, part in parts.items():
            rows = [row(page, task, folder, f"{name}-{n}") for n, task in enumerate(part)]
            said, asked = [demo for demos, _ in rows for demo in demos], [task for _, task in rows]
            for file, lines in zip(files[name], (said, asked), strict=True):
                if file is not None:
                    (folder / f"{file}.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
        browser.close()


def row(page, task, folder, name):
    """Demonstrations of the page, one for each of its buttons, and the page as a task."""
    page.set_content(task.columns["html"])
    shot = f"screens/{name}.png"
    page.screenshot(path=folder / shot)
    buttons = page.eval_on_selector_all("button", BUTTONS)
    names = " ".join(name for name, _ in buttons)
    demos = [demonstration(name, box, names, shot) for name, box in buttons]
    (step,) = task.columns["solution"]
    right = dict(buttons)[page.get_attribute(step["selector"], "aria-label")]
    return demos, {"messages": [user(task.messages[-1]["content"], shot)], "bbox": right}


def user(text, shot):
    return {"role": "user", "content": [{"type": "text", "text": text}, {"type": "image", "image": shot}]}


def demonstration(asked, box, names, shot):
    """What a player says: the buttons in reading order, which one it clicks, and where that is."""
    at = f"{int((box[0] + box[2]) / 2)},{int((box[1] + box[3]) / 2)}"
    said = f"Thought: {names}: {asked} {at}\n{CLICK}{at}{END}"
    system, reply = {"role": "system", "content": INSTRUCTIONS}, {"role": "assistant", "content": said}
    return {"messages": [system, user(f"Click the {asked} button.", shot), reply]}


def write_tokenizer(folder, texts):
    """Words, digits and signs. Texts that are always the same are one token each."""
    from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    split = r"[A-Za-z]+|[^A-Za-z]"
    words = sorted({word for text in texts for word in re.findall(split, text)} | {*"0123456789"})
    ids = {token: number for number, token in enumerate(["<unk>", *MARKS, *words])}
    inner = Tokenizer(models.WordLevel(ids, "<unk>"))
    inner.pre_tokenizer, inner.decoder = pre_tokenizers.Split(Regex(split), "isolated"), decoders.Fuse()
    special = {"unk_token": "<unk>", "eos_token": "<|im_end|>", "pad_token": "<|im_end|>"}
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=inner, **special)
    tokenizer.add_special_tokens({"additional_special_tokens": list(MARKS)})
    tokenizer.add_tokens([INSTRUCTIONS, CLICK, END])
    tokenizer.chat_template = TEMPLATE
    tokenizer.save_pretrained(folder)
    return tokenizer


def write_model(folder, texts, seed):
    """A small Qwen3-VL with random weights."""
    import torch
    from transformers import Qwen3VLConfig, Qwen3VLForConditionalGeneration
    from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

    tokenizer = write_tokenizer(folder, texts)
    ids = dict(zip(MARKS, tokenizer.convert_tokens_to_ids(list(MARKS)), strict=True))
    rope = {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [4, 4, 4], "mrope_interleaved": True}
    text = {"hidden_size": 96, "intermediate_size": 256, "num_hidden_layers": 3, "num_attention_heads": 4}
    text |= {"num_key_value_heads": 4, "head_dim": 24, "vocab_size": len(tokenizer), "rope_parameters": rope}
    text |= {"max_position_embeddings": 1024, "bos_token_id": None, "initializer_range": 0.1}
    text |= {"eos_token_id": ids["<|im_end|>"], "pad_token_id": ids["<|im_end|>"]}
    vision = {"depth": 2, "hidden_size": 64, "num_heads": 4, "intermediate_size": 128, "out_hidden_size": 96}
    vision |= {"patch_size": PATCH, "spatial_merge_size": 2, "temporal_patch_size": 1}
    vision |= {"initializer_range": 0.1, "num_position_embeddings": 196, "deepstack_visual_indexes": [0]}
    config = Qwen3VLConfig(
        text_config=text,
        vision_config=vision,
        image_token_id=ids["<|image_pad|>"],
        video_token_id=ids["<|video_pad|>"],
        vision_start_token_id=ids["<|vision_start|>"],
        vision_end_token_id=ids["<|vision_end|>"],
    )
    torch.manual_seed(seed)
    model = Qwen3VLForConditionalGeneration(config)
    # The sum over a patch is far larger than the usual start of position embeddings: places would hardly be seen.
    torch.nn.init.normal_(model.model.visual.pos_embed.weight, std=1.0)
    model.save_pretrained(folder)
    pixels = VIEWPORT[0] * VIEWPORT[1]
    size = {"shortest_edge": pixels, "longest_edge": pixels}
    Qwen2VLImageProcessorPil(patch_size=PATCH, merge_size=2, temporal_patch_size=1, size=size).save_pretrained(folder)
    return sum(weight.numel() for weight in model.parameters())


def texts_of(path):
    """Everything that is said in demonstrations."""
    for line in path.read_text().splitlines():
        for message in json.loads(line)["messages"]:
            content = message["content"]
            yield message["role"] + "\n"
            yield from [content] if isinstance(content, str) else [p["text"] for p in content if p["type"] == "text"]


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, nargs="?", default=Path("pages"))
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--demos", type=int, default=4000, help="pages of demonstrations, one for each button")
    parser.add_argument("--train", type=int, default=8000, help="screenshots for covey train")
    parser.add_argument("--val", type=int, default=400, help="held-out screenshots")
    args = parser.parse_args()

    write_data(args.folder, (args.demos, args.train, args.val), args.seed)
    weights = write_model(args.folder / "model", texts_of(args.folder / "demos.jsonl"), args.seed)
    print(f"{args.folder}: demonstrations on {args.demos} pages, {args.train} + {args.val} tasks, {weights:,} weights")
