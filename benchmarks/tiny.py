"""Shared by the learning experiments: a tiny random model as a folder, and the tables of their page."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast
from transformers.utils.logging import disable_progress_bar

PAGE = Path(__file__).parent.parent / "docs" / "experiments.md"
END = "<end>"  # token 0; the symbols are 1, 2, ...


def make_model(
    folder: Path, symbols: str, *, seed: int, initializer_range: float, width: int = 32, context: int = 32
) -> Path:
    """A random Llama with two layers of this width. Its vocabulary is the symbols and an end token; a prompt is
    only the question."""
    disable_progress_bar()
    vocabulary = {token: number for number, token in enumerate([END, *symbols])}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token=END))
    tokenizer.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    tokenizer.decoder = decoders.Fuse()
    wrapped = PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token=END, pad_token=END)
    wrapped.chat_template = "{% for m in messages %}{{ m['content'] }}{% endfor %}"
    config = LlamaConfig(
        vocab_size=len(vocabulary),
        hidden_size=width,
        intermediate_size=2 * width,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=context,
        initializer_range=initializer_range,
        tie_word_embeddings=False,
        bos_token_id=None,
        eos_token_id=0,
        pad_token_id=0,
    )
    torch.manual_seed(seed)
    LlamaForCausalLM(config).save_pretrained(folder)
    wrapped.save_pretrained(folder)
    return folder


def table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    lines = [header, ["---"] * len(header), *rows]
    return "\n".join(f"| {' | '.join(cells)} |" for cells in lines)


def write_section(name: str, text: str, page: Path = PAGE) -> None:
    """Replace the text between the marks with this name on the page."""
    begin, end = f"<!-- {name}: begin -->", f"<!-- {name}: end -->"
    before = page.read_text(encoding="utf-8")
    after, found = re.subn(
        f"{re.escape(begin)}.*?{re.escape(end)}", lambda _: f"{begin}\n\n{text}\n\n{end}", before, flags=re.DOTALL
    )
    assert found == 1, f"{page} needs the marks {begin} and {end} once"
    page.write_text(after, encoding="utf-8")
