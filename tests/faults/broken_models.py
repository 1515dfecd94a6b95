"""Broken model folders: how each is damaged, and the message that Covey must show."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

from tests.conftest import byte_tokenizer

WEIGHTS, INDEX = "model.safetensors", "model.safetensors.index.json"
Tensors = dict[str, torch.Tensor]
Damage = Callable[[Path], Any]


def config(**changes: Any) -> Damage:
    """Change values of config.json; None removes a key."""

    def damage(folder: Path) -> None:
        file = folder / "config.json"
        found = json.loads(file.read_text()) | changes
        file.write_text(json.dumps({key: value for key, value in found.items() if value is not None}))

    return damage


def tensors(change: Callable[[Tensors], Tensors]) -> Damage:
    def damage(folder: Path) -> None:
        save_file(change(load_file(folder / WEIGHTS)), folder / WEIGHTS, {"format": "pt"})

    return damage


def without(part: str) -> Damage:
    return tensors(lambda found: {name: tensor for name, tensor in found.items() if part not in name})


def with_also(**more: torch.Tensor) -> Damage:
    return tensors(lambda found: found | {name.replace("__", "."): tensor for name, tensor in more.items()})


def text(name: str, content: str) -> Damage:
    return lambda folder: (folder / name).write_text(content)


def cut(name: str, keep: Callable[[bytes], bytes]) -> Damage:
    return lambda folder: (folder / name).write_bytes(keep((folder / name).read_bytes()))


def gone(*parts: str) -> Damage:
    return lambda folder: [file.unlink() for file in folder.iterdir() if any(part in file.name for part in parts)]


def sharded(names: dict[str, str], content: str | None = None) -> Damage:
    """One of two shards exists; the index names both."""

    def damage(folder: Path) -> None:
        (folder / WEIGHTS).rename(folder / "model-00001-of-00002.safetensors")
        (folder / INDEX).write_text(json.dumps({"metadata": {}, "weight_map": names}) if content is None else content)

    return damage


def small_embedding(folder: Path) -> None:
    """The model has 40 embeddings, its tokenizer 87 tokens."""
    config(vocab_size=40)(folder)
    rows = ("model.embed_tokens.weight", "lm_head.weight")
    tensors(lambda found: found | {name: found[name][:40].contiguous() for name in rows})(folder)


def added_tokens(*tokens: str, special: bool = False) -> Damage:
    """Tokens without an embedding."""

    def damage(folder: Path) -> None:
        tokenizer = byte_tokenizer()
        tokenizer.add_tokens(list(tokens), special_tokens=special)
        tokenizer.save_pretrained(folder)

    return damage


def qwen2(folder: Path) -> None:
    """Without files, transformers makes a Qwen2 tokenizer with an empty vocabulary."""
    config(model_type="qwen2", architectures=["Qwen2ForCausalLM"])(folder)
    biases = {"q_proj": 32, "k_proj": 16, "v_proj": 16}
    names = [(layer, name, size) for layer in (0, 1) for name, size in biases.items()]
    more = {f"model.layers.{layer}.self_attn.{name}.bias": torch.zeros(size) for layer, name, size in names}
    tensors(lambda found: found | more)(folder)


def template(content: str) -> Damage:
    return text("chat_template.jinja", content)


MISFIT = "its weights do not fit its config.json, a "
SHARDS = {"lm_head.weight": "model-00002-of-00002.safetensors", "model.norm.weight": "model-00001-of-00002.safetensors"}
TOKENIZER_FIX = "fix: copy the tokenizer's files"

# What is done to the folder, and what is said of it: all of these parts.
DAMAGES: dict[str, tuple[Damage, tuple[str, ...]]] = {
    # tensors
    "a tensor missing": (without("model.norm"), (MISFIT + "LlamaForCausalLM", "missing", "model.norm.weight")),
    "a layer missing": (without("layers.1."), (MISFIT, "missing from the weights: model.layers.1.input_layernorm")),
    "the head missing": (without("lm_head"), (MISFIT, "missing from the weights: lm_head.weight")),
    "all tensors renamed": (
        tensors(lambda found: {f"x.{name}": tensor for name, tensor in found.items()}),
        (MISFIT, "missing from the weights: lm_head.weight", "not in the model: x.lm_head.weight"),
    ),
    "no tensors": (lambda folder: save_file({}, folder / WEIGHTS), (MISFIT, "missing", "and 17 more")),
    "another shape": (
        config(intermediate_size=128),
        (MISFIT, "of another shape in the weights: model.layers.0.mlp.down_proj.weight [32, 64], not [32, 128]"),
    ),
    "another width": (config(hidden_size=64), (MISFIT, "of another shape in the weights: lm_head.weight [87, 32]")),
    "another vocabulary": (config(vocab_size=90), (MISFIT, "lm_head.weight [87, 32], not [90, 32]")),
    # a configuration of another architecture
    "a Qwen3 configuration": (
        config(model_type="qwen3", architectures=["Qwen3ForCausalLM"]),
        (MISFIT + "Qwen3ForCausalLM", "missing from the weights: model.layers.0.self_attn.k_norm.weight"),
    ),
    "a GPT-2 configuration": (
        config(model_type="gpt2"),
        (MISFIT + "GPT2LMHeadModel", "missing", "transformer.h.0.attn", "not in the model: model.embed_tokens.weight"),
    ),
    "biases of Qwen2 under Llama": (
        with_also(model__layers__0__self_attn__q_proj__bias=torch.zeros(32)),
        (MISFIT, "in the weights, but not in the model: model.layers.0.self_attn.q_proj.bias"),
    ),
    "norms of Qwen3 under Llama": (
        with_also(model__layers__0__self_attn__q_norm__weight=torch.ones(8)),
        (MISFIT, "in the weights, but not in the model: model.layers.0.self_attn.q_norm.weight"),
    ),
    "a bias of the last norm": (
        with_also(model__norm__bias=torch.zeros(32)),
        (MISFIT, "in the weights, but not in the model: model.norm.bias"),
    ),
    "fewer layers": (config(num_hidden_layers=1), (MISFIT, "not in the model: model.layers.1.input_layernorm.weight")),
    "more layers": (config(num_hidden_layers=3), (MISFIT, "missing from the weights: model.layers.2.")),
    # files of weights
    "weights cut in half": (
        cut(WEIGHTS, lambda data: data[: len(data) // 2]),
        ("model.safetensors is damaged: 49,", "not fully covered"),
    ),
    "weights cut in the header": (
        cut(WEIGHTS, lambda data: data[:100]),
        ("model.safetensors is damaged: 100 bytes, invalid header length",),
    ),
    "weights empty": (cut(WEIGHTS, lambda data: b""), ("model.safetensors is damaged: 0 bytes, header too small",)),
    "weights too long": (cut(WEIGHTS, lambda data: data + bytes(8)), ("model.safetensors is damaged", "not fully")),
    "weights a web page": (text(WEIGHTS, "<html>404</html>"), ("model.safetensors is damaged: 16 bytes",)),
    "weights a pointer of Git LFS": (
        text(WEIGHTS, "version https://git-lfs.github.com/spec/v1\noid sha256:abc\nsize 123\n"),
        ("model.safetensors is a Git LFS pointer, not the weights\n  fix: git lfs pull",),
    ),
    "no weights": (gone(WEIGHTS), ("has no weights: model.safetensors is missing",)),
    "weights a folder": (
        lambda folder: ((folder / WEIGHTS).unlink(), (folder / WEIGHTS).mkdir()),
        ("has no weights: model.safetensors is missing",),
    ),
    "a shard missing": (sharded(SHARDS), ("model-00002-of-00002.safetensors is missing",)),
    "an index that is no JSON": (sharded({}, '{"weight_map'), (f"{INDEX}: not an index of weight files",)),
    "an index of nothing": (sharded({}), (f"{INDEX}: it names no files",)),
    # configuration
    "a negative number of heads": (
        config(num_attention_heads=-4),
        ("config.json: num_attention_heads is -4; it must be from 1 to",),
    ),
    "negative heads that fit": (
        config(num_attention_heads=-4, num_key_value_heads=-2, head_dim=-8),
        ("config.json: num_attention_heads is -4",),
    ),
    "no heads": (config(num_attention_heads=0), ("config.json: num_attention_heads is 0",)),
    "heads in words": (
        config(num_attention_heads="four"),
        ("not a valid configuration of llama", "got str (value: 'four')"),
    ),
    "heads that are no multiple": (
        config(num_key_value_heads=3),
        ("config.json: num_attention_heads=4 is not a multiple of num_key_value_heads=3",),
    ),
    "no layers": (config(num_hidden_layers=0), ("config.json: num_hidden_layers is 0; it must be from 1 to 10,000",)),
    "a billion layers": (config(num_hidden_layers=10**9), ("config.json: num_hidden_layers is 1000000000",)),
    "a trillion wide": (config(hidden_size=10**12), ("config.json: hidden_size is 1000000000000",)),
    "no context": (config(max_position_embeddings=0), ("config.json: max_position_embeddings is 0",)),
    "an unknown activation": (
        config(hidden_act="sillu"),
        ("config.json: a llama model cannot be built from it (KeyError: 'sillu')",),
    ),
    "an unknown architecture": (
        config(model_type="llamma"),
        ("config.json: transformers ", "has no model_type llamma\n  did you mean   llama?"),
    ),
    "no model_type": (config(model_type=None), ("config.json has no model_type",)),
    "a model of pictures": (text("config.json", '{"model_type": "vit"}'), ("has no vit model for CausalLM",)),
    "config.json cut": (text("config.json", '{"model_type": '), ("config.json: not JSON (Expecting value: line 1",)),
    "config.json empty": (text("config.json", ""), ("config.json: not JSON",)),
    "config.json a list": (text("config.json", "[]"), ("config.json: expected an object, got []",)),
    "config.json not text": (cut("config.json", lambda data: b"\xff\xfe\x00"), ("config.json: not JSON",)),
    "config.json missing": (gone("config.json"), ("config.json is missing",)),
    "generation_config.json cut": (text("generation_config.json", "{"), ("generation_config.json: not JSON",)),
    # tokenizer
    "no tokenizer": (
        gone("token", "chat"),
        ("has no tokenizer that can be read: tokenizer.json is missing", TOKENIZER_FIX),
    ),
    "no vocabulary": (
        lambda folder: (gone("tokenizer.json")(folder), qwen2(folder)),
        ("has no tokenizer that can be read: tokenizer.json is missing", TOKENIZER_FIX),
    ),
    "no tokenizer.json": (gone("tokenizer.json"), ("tokenizer.json is missing", TOKENIZER_FIX)),
    "tokenizer.json cut": (
        text("tokenizer.json", '{"version": "1.0", "model": {'),
        ("the tokenizer of", "cannot be read\n  Expecting property name", TOKENIZER_FIX),
    ),
    "tokenizer.json empty": (text("tokenizer.json", ""), ("the tokenizer of", "cannot be read", TOKENIZER_FIX)),
    "tokenizer.json without a model": (text("tokenizer.json", "{}"), ("the tokenizer of", "cannot be read")),
    "tokenizer_config.json cut": (text("tokenizer_config.json", "{"), ("the tokenizer of", "cannot be read")),
    "a tokenizer larger than the embedding": (
        small_embedding,
        ("its tokenizer has token 86 ('\\n'), but the model's embedding has 40 rows", TOKENIZER_FIX),
    ),
    "tokens added without rows": (
        added_tokens("hello", "world"),
        ("its tokenizer has token 88 ('world'), but the model's embedding has 87 rows", TOKENIZER_FIX),
    ),
}
# One of each part, for what is slow.
SOME = (
    "a tensor missing",
    "another shape",
    "norms of Qwen3 under Llama",
    "weights cut in half",
    "an unknown architecture",
    "no tokenizer",
    "a tokenizer larger than the embedding",
)
# Damages that show only where prompts are rendered.
OF_PROMPTS: dict[str, tuple[Damage, tuple[str, ...]]] = {
    "no chat template": (gone("chat_template"), ("this model has no chat template",)),
    "a chat template cut": (template("{% for m in messages %}"), ("this model's chat template cannot show messages",)),
    "a special token without a row in every prompt": (
        lambda folder: (
            added_tokens("<turn>", special=True)(folder),
            template("<turn>{{ messages[-1]['content'] }}")(folder),
        ),
        ("its tokenizer has token 87 ('<turn>'), but the model's embedding has 87 rows",),
    ),
}
