"""Tiny random vision-language models of every supported family, with their processors, and pictures."""

from __future__ import annotations

import io
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image as Pillow

from covey.images import image_of_bytes
from covey.models.families import vision_family
from covey.models.vision import VisionProcessor
from covey.types import Image
from tests.conftest import byte_tokenizer

FAMILIES = ("qwen2_vl", "qwen2_5_vl", "qwen3_vl", "idefics3", "smolvlm")
GRIDS = FAMILIES[:3]
MARKS = {
    True: ("<|vision_start|>", "<|vision_end|>", "<|image_pad|>", "<|video_pad|>"),
    False: (
        *("<image>", "<fake_token_around_image>", "<global-img>", "<end_of_utterance>"),
        *(f"<row_{row}_col_{column}>" for row in range(1, 5) for column in range(1, 5)),
    ),
}
TWIN = "<twin>"  # a token with the embedding of the image token
TEMPLATE = (
    "{{% for m in messages %}}<|im_start|>{{{{ m['role'] }}}}\n"
    "{{% if m['content'] is string %}}{{{{ m['content'] }}}}{{% else %}}"
    "{{% for part in m['content'] %}}{{% if part['type'] == 'image' %}}{image}{{% else %}}{{{{ part['text'] }}}}"
    "{{% endif %}}{{% endfor %}}{{% endif %}}<|im_end|>\n{{% endfor %}}"
    "{{% if add_generation_prompt %}}<|im_start|>assistant\n{{% endif %}}"
)


def tokenizer_of(family: str) -> Any:
    tokenizer = byte_tokenizer()
    tokenizer.add_tokens(["{", "}"])
    marks = MARKS[family in GRIDS]
    tokenizer.add_special_tokens({"additional_special_tokens": ["<|im_start|>", *marks, TWIN]})
    image = "<|vision_start|><|image_pad|><|vision_end|>" if family in GRIDS else "<image>"
    tokenizer.chat_template = TEMPLATE.format(image=image)
    return tokenizer


def config_of(family: str, tokenizer: Any, width: int = 32) -> Any:
    import transformers

    ids = {mark: tokenizer.convert_tokens_to_ids(mark) for mark in MARKS[family in GRIDS]}
    text: dict[str, Any] = {
        "vocab_size": len(tokenizer),
        "hidden_size": width,
        "intermediate_size": 48,
        "num_hidden_layers": 3,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 1024,
        "initializer_range": 0.3,
        "bos_token_id": None,
        "eos_token_id": tokenizer.eos_token_id,
        "pad_token_id": tokenizer.eos_token_id,
    }
    rope = {"rope_type": "default", "rope_theta": 1000.0, "mrope_section": [width // 16, width // 32, width // 32]}
    common = {"depth": 2, "num_heads": 2, "patch_size": 4, "spatial_merge_size": 2, "initializer_range": 0.3}
    if family == "qwen2_vl":
        vision = {**common, "embed_dim": 16, "hidden_size": width, "mlp_ratio": 2}
        return transformers.Qwen2VLConfig(
            text_config=text | {"rope_parameters": rope}, vision_config=vision, **_grid_ids(ids)
        )
    if family == "qwen2_5_vl":
        vision = {
            **common,
            **{"hidden_size": 16, "out_hidden_size": width, "intermediate_size": 32},
            **{"window_size": 16, "fullatt_block_indexes": [1]},
        }
        return transformers.Qwen2_5_VLConfig(
            text_config=text | {"rope_parameters": rope}, vision_config=vision, **_grid_ids(ids)
        )
    if family == "qwen3_vl":
        vision = {
            **common,
            **{"hidden_size": 16, "out_hidden_size": width, "intermediate_size": 32},
            **{"num_position_embeddings": 16, "deepstack_visual_indexes": [0, 1]},
        }
        return transformers.Qwen3VLConfig(
            text_config=text | {"rope_parameters": rope | {"mrope_interleaved": True}, "head_dim": width // 4},
            vision_config=vision,
            **_grid_ids(ids),
        )
    vision = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2}
    vision |= {"image_size": 16, "patch_size": 4, "initializer_range": 0.3}
    kind = transformers.Idefics3Config if family == "idefics3" else transformers.SmolVLMConfig
    return kind(
        text_config={"model_type": "llama", **text},
        vision_config=vision,
        scale_factor=2,
        image_token_id=ids["<image>"],
        pad_token_id=tokenizer.eos_token_id,
        tie_word_embeddings=False,
    )


def _grid_ids(ids: dict[str, int]) -> dict[str, int]:
    return {
        "vision_start_token_id": ids["<|vision_start|>"],
        "vision_end_token_id": ids["<|vision_end|>"],
        "image_token_id": ids["<|image_pad|>"],
        "video_token_id": ids["<|video_pad|>"],
    }


def image_processor_of(family: str) -> Any:
    from transformers.models.idefics3.image_processing_pil_idefics3 import Idefics3ImageProcessorPil
    from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil
    from transformers.models.smolvlm.image_processing_pil_smolvlm import SmolVLMImageProcessorPil

    if family in GRIDS:
        size = {"shortest_edge": 64, "longest_edge": 1024}
        return Qwen2VLImageProcessorPil(patch_size=4, merge_size=2, temporal_patch_size=2, size=size)
    kind = Idefics3ImageProcessorPil if family == "idefics3" else SmolVLMImageProcessorPil
    return kind(size={"longest_edge": 32}, max_image_size={"longest_edge": 16})


def tiny_vlm(
    family: str, seed: int = 0, dtype: torch.dtype = torch.float32, width: int = 32
) -> tuple[Any, VisionProcessor]:
    """A random model with large enough weights to have opinions, and its processor. `width`: the hidden size."""
    from transformers import AutoModelForImageTextToText

    tokenizer = tokenizer_of(family)
    config = config_of(family, tokenizer, width)
    torch.manual_seed(seed)
    model = AutoModelForImageTextToText.from_config(config, attn_implementation="sdpa").to(dtype).eval()
    with torch.no_grad():
        weight = model.get_input_embeddings().weight
        weight[tokenizer.convert_tokens_to_ids(TWIN)] = weight[config.image_token_id]
    found = vision_family(config)
    assert found is not None
    return model, VisionProcessor(found, image_processor_of(family), tokenizer, config)


def vlm_folder(folder: Path, family: str, seed: int = 0) -> Path:
    """The same as a model folder."""
    model, vision = tiny_vlm(family, seed)
    model.save_pretrained(folder)
    vision.tokenizer.save_pretrained(folder)
    vision.save_pretrained(folder)
    return folder


def drawn(width: int = 24, height: int = 16, seed: int = 0, format: str = "PNG") -> bytes:
    """An encoded picture of random blocks."""
    blocks = np.random.default_rng(seed).integers(0, 256, (4, 4, 3), dtype=np.uint8)
    encoded = io.BytesIO()
    Pillow.fromarray(blocks).resize((width, height), Pillow.Resampling.NEAREST).save(encoded, format)
    return encoded.getvalue()


def an_image(width: int = 24, height: int = 16, seed: int = 0) -> Image:
    return image_of_bytes(drawn(width, height, seed))


def asking(*parts: str | Image) -> list[dict[str, Any]]:
    """A user's message of texts and images."""
    content = [
        {"type": "image", "image": part} if isinstance(part, Image) else {"type": "text", "text": part}
        for part in parts
    ]
    return [{"role": "user", "content": content}]
