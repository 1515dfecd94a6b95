"""Models by name: random weights in the shape of a known model, created on their device, or a model folder."""

from __future__ import annotations

import atexit
import random
import shutil
import tempfile
from functools import cache
from pathlib import Path
from typing import Any

import torch
from transformers.utils.logging import disable_progress_bar

from covey.models.families import auto_model

# As published; rope, norms and biases are Qwen2's.
SHAPES: dict[str, dict[str, Any]] = {
    "tiny": {
        "hidden_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "intermediate_size": 128,
        "vocab_size": 512,
        "tie_word_embeddings": True,
    },
    "qwen2.5-0.5b": {
        "hidden_size": 896,
        "num_hidden_layers": 24,
        "num_attention_heads": 14,
        "num_key_value_heads": 2,
        "intermediate_size": 4864,
        "vocab_size": 151936,
        "tie_word_embeddings": True,
    },
    "qwen2.5-1.5b": {
        "hidden_size": 1536,
        "num_hidden_layers": 28,
        "num_attention_heads": 12,
        "num_key_value_heads": 2,
        "intermediate_size": 8960,
        "vocab_size": 151936,
        "tie_word_embeddings": True,
    },
    "qwen2.5-7b": {
        "hidden_size": 3584,
        "num_hidden_layers": 28,
        "num_attention_heads": 28,
        "num_key_value_heads": 4,
        "intermediate_size": 18944,
        "vocab_size": 152064,
        "tie_word_embeddings": False,
    },
}
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


def model_config(name: str, *, family: str = "Qwen2", **changes: Any) -> Any:
    """The transformers configuration of a shape; its last token is the end and padding token."""
    import transformers

    settings = SHAPES[name] | changes
    end = settings["vocab_size"] - 1
    return getattr(transformers, f"{family}Config")(
        **settings,
        rope_parameters={"rope_type": "default", "rope_theta": 1e6},
        max_position_embeddings=32768,
        bos_token_id=None,
        eos_token_id=end,
        pad_token_id=end,
        architectures=[f"{family}ForCausalLM"],
    )


def load_config(name: str) -> Any:
    from transformers import AutoConfig

    return model_config(name) if name in SHAPES else AutoConfig.from_pretrained(name)


def random_model(config: Any, device: str, dtype: str, seed: int = 0) -> Any:
    """Create the model on the device in its final precision, without copies. A seed determines the weights."""
    torch.manual_seed(seed)
    with torch.device(device):
        model = auto_model(config).from_config(config, dtype=DTYPES[dtype], attn_implementation="sdpa")
    return model.eval()


@cache
def model_folder(name: str, device: str, dtype: str, **changes: Any) -> str:
    """A model folder with random weights in this shape, deleted at exit. transformers reads its tokenizer if the family
    is Llama; for Qwen2 it would take a tokenizer of that family."""
    folder = tempfile.mkdtemp(prefix="covey-shape-")
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    config = model_config(name, **changes)
    disable_progress_bar()
    random_model(config, device, dtype).save_pretrained(folder)
    word_tokenizer(config.vocab_size).save_pretrained(folder)
    if device == "cuda":
        torch.cuda.empty_cache()
    return folder


def load_model(name: str, device: str, dtype: str) -> Any:
    """For other libraries: a shape's random model, or that of a folder."""
    from transformers import AutoModelForCausalLM

    disable_progress_bar()
    if name in SHAPES:
        return random_model(model_config(name), device, dtype)
    model = AutoModelForCausalLM.from_pretrained(name, dtype=DTYPES[dtype], attn_implementation="sdpa")
    return model.to(device).eval()


def load_tokenizer(name: str) -> Any:
    from transformers import AutoTokenizer

    return word_tokenizer(SHAPES[name]["vocab_size"]) if name in SHAPES else AutoTokenizer.from_pretrained(name)


def word_tokenizer(vocabulary: int) -> Any:
    """Token i is the word wi, and the last but one "The": Covey refuses a tokenizer that knows no English word.
    A prompt is only the user's words."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    end = "<end>"
    words = {f"w{number}": number for number in range(vocabulary - 2)} | {"The": vocabulary - 2, end: vocabulary - 1}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token=end))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    wrapped = PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token=end, pad_token=end, padding_side="left")
    wrapped.chat_template = "{% for m in messages %}{{ m['content'] }}{% endfor %}"
    return wrapped


def random_ids(vocabulary: int, count: int, tokens: int, seed: object) -> list[list[int]]:
    """Random prompts, distinct if the vocabulary is large enough: the first token is a counter."""
    rng = random.Random(str(seed))
    return [
        [number % (vocabulary - 2), *(rng.randrange(vocabulary - 2) for _ in range(tokens - 1))]
        for number in range(count)
    ]


def as_text(ids: list[int]) -> str:
    """Ids as words of `word_tokenizer`."""
    return " ".join(f"w{i}" for i in ids)


def write_config(name: str, folder: Path) -> Path:
    """A model folder without weights, for engines that initialise random ones."""
    model_config(name).save_pretrained(folder)
    return folder
