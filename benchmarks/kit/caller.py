"""A tiny random model that calls tools: some of its tokens are whole calls, with a given probability."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast
from transformers.utils.logging import disable_progress_bar

WIDTH, CONTEXT = 32, 512
LOUD = 40.0  # value of the one dimension that is equal for all tokens and carries the output biases
TEMPLATE = (
    "{% if tools %}<|im_start|>system\n{% for t in tools %}{{ t.function.name }} {% endfor %}<|im_end|>\n{% endif %}"
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}"
    "{% for c in m.get('tool_calls', []) %}<tool_call>{{ c.function | tojson }}</tool_call>{% endfor %}"
    "<|im_end|>\n{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
Call = tuple[str, Mapping[str, Any]]  # a tool's name, its arguments


def written(call: Call) -> str:
    return f"<tool_call>{json.dumps({'name': call[0], 'arguments': call[1]})}</tool_call>"


def make_tokenizer(calls: Sequence[Call] = ()) -> PreTrainedTokenizerFast:
    """One token per printable character, ChatML's marks, and one for each of the calls."""
    letters = ["\n", *map(chr, range(32, 127))]
    vocabulary = {token: number for number, token in enumerate(["<unk>", "<|im_start|>", "<|im_end|>", *letters])}
    made = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    made.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    made.decoder = decoders.Fuse()
    wrapped = PreTrainedTokenizerFast(
        tokenizer_object=made, unk_token="<unk>", eos_token="<|im_end|>", pad_token="<|im_end|>"
    )
    wrapped.add_special_tokens({"additional_special_tokens": ["<|im_start|>"]})
    wrapped.add_tokens([AddedToken(written(call), normalized=False) for call in calls])
    wrapped.chat_template = TEMPLATE
    return wrapped


def make_model(
    tokenizer: PreTrainedTokenizerFast, *, calls: int = 0, ends: float = 0.3, calling: float = 0.3, seed: int = 0
) -> LlamaForCausalLM:
    """A token is an end of turn with probability `ends`, one of the last `calls` tokens of the vocabulary with about
    probability `calling`, and otherwise any token."""
    config = LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=WIDTH,
        intermediate_size=2 * WIDTH,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=CONTEXT,
        initializer_range=0.2,
        tie_word_embeddings=False,
        bos_token_id=None,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    torch.manual_seed(seed)
    model = LlamaForCausalLM(config)
    size = len(tokenizer)
    chance = torch.full((size,), (1 - ends - calling * (calls > 0)) / (size - calls - 1))
    chance[size - calls :] = calling / max(1, calls)
    chance[tokenizer.eos_token_id] = ends
    with torch.no_grad():
        model.model.embed_tokens.weight[:, 0] = LOUD
        for layer in model.model.layers:
            layer.self_attn.o_proj.weight[0] = 0.0
            layer.mlp.down_proj.weight[0] = 0.0
        model.lm_head.weight[:, 0] = chance.log() / math.sqrt(WIDTH)
    return model


def save(folder: Path, calls: Sequence[Call], **chances: float) -> Path:
    """Save tokenizer and model to a folder."""
    disable_progress_bar()
    tokenizer = make_tokenizer(calls)
    make_model(tokenizer, calls=len(calls), **chances).save_pretrained(folder)  # type: ignore[arg-type]
    tokenizer.save_pretrained(folder)
    return folder
