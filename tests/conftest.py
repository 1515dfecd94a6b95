"""Shared by all tests: tiny random models, and the folder of public data where it is present."""

from __future__ import annotations

import gc
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.hygiene import (  # noqa: F401  (hooks and fixtures of every test)
    _seen_processes,
    no_process_is_left,
    pytest_collection_modifyitems,
    pytest_timeout_cancel_timer,
    pytest_timeout_set_timer,
)

ROOT = Path(__file__).parent.parent


def pytest_collection_finish() -> None:
    """Modules are not searched for garbage again: every run begins with a collection, which takes 0.2 s here."""
    gc.collect()
    gc.freeze()


@pytest.fixture
def nothing_is_frozen() -> Iterator[None]:
    gc.unfreeze()
    yield
    gc.freeze()


def shared_folder() -> Path:
    return Path(os.environ.get("COVEY_SHARED") or ROOT.parent / "shared")


@pytest.fixture
def shared() -> Path:
    if not shared_folder().is_dir():
        pytest.skip(f"the folder of public data is not here ({shared_folder()}; set COVEY_SHARED)")
    return shared_folder()


@pytest.fixture(autouse=True)
def one_thread_count() -> None:
    torch.set_num_threads(1)  # two test processes on two cores: threads of a model this small wait for each other


def tiny_llama(vocabulary: int = 64, seed: int = 0, dtype: torch.dtype = torch.float32, **changes: Any) -> Any:
    """A random Llama with large enough weights to have opinions."""
    from transformers import LlamaConfig, LlamaForCausalLM

    settings = {
        "vocab_size": vocabulary,
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 512,
        "initializer_range": 0.3,
        "tie_word_embeddings": False,
        "bos_token_id": 1,
        "eos_token_id": 2,
        "pad_token_id": 2,
    }
    torch.manual_seed(seed)
    return LlamaForCausalLM(LlamaConfig(**(settings | changes))).to(dtype).eval()


@pytest.fixture(scope="session")
def tiny_model_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model folder as people have them: weights, configuration, tokenizer with a chat template."""
    folder = tmp_path_factory.mktemp("tiny") / "model"
    tokenizer = byte_tokenizer()
    tiny_llama(vocabulary=len(tokenizer), eos_token_id=tokenizer.eos_token_id).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


def byte_tokenizer() -> Any:
    """One token per character of a small alphabet, with ChatML's two marks."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    alphabet = [*"0123456789abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ ,.:;?!+-*/=()<>|_'\"#\n"]
    vocabulary = {token: i for i, token in enumerate(["<unk>", "<|im_start|>", "<|im_end|>", *alphabet])}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    tokenizer.decoder = decoders.Fuse()
    wrapped = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, unk_token="<unk>", eos_token="<|im_end|>", pad_token="<|im_end|>"
    )
    wrapped.add_special_tokens({"additional_special_tokens": ["<|im_start|>"]})
    wrapped.chat_template = (
        "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n{% endfor %}"
        "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
    )
    return wrapped
