"""The model families that Covey treats specially, in one table.

Any causal model of transformers with full or sliding-window attention can be trained, and tool calls follow its chat
template. This table holds what its configuration and its template do not specify.

`docs/models.md` is made from this table (`python tools/models_table.py`).

To add a family: add a row to `FAMILIES`. `fused` needs layers with `q_proj`, `k_proj`, `v_proj`, `gate_proj` and
`up_proj` as in Llama. A family that changes its logits needs a line in `LOGIT_TRANSFORMS`. Then add a small
configuration of the family to `CONFIGS` in tests/learner/test_forward.py: its log-probs, gradients and decoding are
then compared with transformers'.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Family:
    model_types: tuple[str, ...]  # `model_type` of their config.json
    fused: str = ""  # prefix of the layer classes that decoding fuses (LlamaAttention, LlamaMLP)
    tool_calls: str | None = None  # tool-call format of a tokenizer without a chat template; None: hermes
    experts: bool = False  # mixture of experts, whose weights are stored together as tensors of three dimensions
    router: str = ""  # class of its routers, if they choose experts by one torch.topk
    compared: bool = True  # its log-probs and decoding are compared with transformers' (tests/learner/test_forward.py)


FAMILIES = (
    Family(("llama",), fused="Llama"),
    Family(("mllama",), tool_calls="llama", compared=False),
    Family(("qwen2",), fused="Qwen2"),
    Family(("qwen2_moe",), experts=True, router="Qwen2MoeTopKRouter"),
    Family(("qwen3",), fused="Qwen3"),
    Family(("qwen3_moe",), experts=True, router="Qwen3MoeTopKRouter"),
    Family(("mistral",), fused="Mistral", tool_calls="mistral"),
    Family(("mixtral",), tool_calls="mistral", experts=True, router="MixtralTopKRouter"),
    Family(("ministral",), tool_calls="mistral"),
    Family(("ministral3",)),
    Family(("mistral3",), tool_calls="mistral", compared=False),
    Family(("gemma",)),
    Family(("gemma3_text",)),
    Family(("phi3",)),  # Phi-3 and Phi-4
    Family(("granite",)),
    Family(("granitemoe",), experts=True, router="GraniteMoeTopKRouter"),
    Family(("smollm3",)),
    Family(("olmo2",)),
    Family(("olmo3",)),
    Family(("olmoe",), experts=True, router="OlmoeTopKRouter"),
    Family(("glm4",)),
    Family(("glm4_moe",), experts=True),
    Family(("cohere2",)),
    Family(("exaone4",)),
    Family(("seed_oss",)),
)


@dataclass(frozen=True)
class VisionFamily:
    """A vision-language model of transformers: how its parts are called, within the model without the output matrix."""

    model_types: tuple[str, ...]
    language: str  # the language model
    tower: tuple[str, ...]  # what turns pixels into embeddings
    grid: bool  # positions of image tokens have a height and a width (M-RoPE), and an image is one grid; else tiles


VISION_FAMILIES = (
    VisionFamily(("qwen2_vl", "qwen2_5_vl", "qwen3_vl"), "language_model", ("visual",), grid=True),
    VisionFamily(("idefics3", "smolvlm"), "text_model", ("vision_model", "connector"), grid=False),
)


def vision_family(config: Any) -> VisionFamily | None:
    """The family of a model that sees images; None for other models."""
    return next((family for family in VISION_FAMILIES if config.model_type in family.model_types), None)


def auto_model(config: Any) -> Any:
    """The class of transformers that loads a model with this configuration."""
    from transformers import AutoModelForCausalLM, AutoModelForImageTextToText

    return AutoModelForCausalLM if vision_family(config) is None else AutoModelForImageTextToText


def causal_lm(model: Any) -> Any:
    """The transformers model; where peft wraps it, its layers carry the adapters."""
    return model.get_base_model() if hasattr(model, "get_base_model") else model


def decoder(lm: Any) -> Any:
    """The language model, without the output matrix and the vision tower."""
    return lm.get_decoder()


def layers_of(stack: Any) -> list[Any]:
    """The layers of a model without the output matrix. Most families call them `layers`; GPT-2 has `h`, OPT nests
    them."""
    from torch.nn import ModuleList

    found = getattr(stack, "layers", None)
    return list(next(m for m in stack.modules() if isinstance(m, ModuleList)) if found is None else found)


_RECURRENT = (
    "its recurrent layers carry a state from token to token, which packed rows would share and the engine's cache of "
    "keys and values does not hold"
)
_LATENT = "its keys and values have different sizes (latent attention), and the engine's cache has one"
_SINKS = "its attention has sinks, a term of the softmax that Covey's attention does not compute"
_DIFFERENCE = "each layer computes attention twice with other values, and the engine's cache has one set of values"
_ENCODER = "it is an encoder, whose tokens attend to later ones"
_POSITIONS = "it counts positions by itself, which gives packed rows wrong ones"
_HEAD_SIZES = "the heads of its layers have different sizes, and the engine's cache has one"
_CROSS = "some of its layers attend to images, which Covey does not pass to them"
_LOOPS = "each token passes the same layers several times, and the engine's cache has one entry of a token per layer"
_COMPUTED_MASK = "its attention has a mask that is computed from its values, which Covey's attention does not do"
_HEAD = "more layers follow its last hidden states before the output matrix, and Covey's log-probs skip them"

# Model types that cannot be trained, with the reason.
REFUSED: Mapping[str, str] = {
    **dict.fromkeys(("mamba", "mamba2", "falcon_mamba", "rwkv", "xlstm", "recurrent_gemma"), _RECURRENT),
    **dict.fromkeys(("jamba", "bamba", "zamba", "zamba2", "falcon_h1", "granitemoehybrid", "nemotron_h"), _RECURRENT),
    **dict.fromkeys(("deepseek_v2", "deepseek_v3", "minicpm3", "longcat_flash"), _LATENT),
    **dict.fromkeys(("axk1", "glm4_moe_lite", "youtu"), _LATENT),
    **dict.fromkeys(("bert", "bert-generation", "camembert", "data2vec-text", "electra", "ernie", "roberta"), _ENCODER),
    **dict.fromkeys(("roberta-prelayernorm", "roc_bert", "xlm-roberta", "xlm-roberta-xl", "xmod"), _ENCODER),
    **dict.fromkeys(("bart", "blenderbot", "blenderbot-small", "marian", "mbart", "pegasus", "plbart"), _POSITIONS),
    **dict.fromkeys(("gemma4", "gemma4_text", "gemma4_unified", "gemma4_unified_text"), _HEAD_SIZES),
    **dict.fromkeys(("mllama", "mllama_text_model"), _CROSS),
    "diffllama": _DIFFERENCE,
    "doge": _COMPUTED_MASK,
    "hrm_text": _LOOPS,
    "modernbert-decoder": _HEAD,
    "gpt_oss": _SINKS,
}

# Attention types of layers (`layer_types`) that cannot be trained, with the reason.
REFUSED_LAYERS: Mapping[str, str] = {
    **dict.fromkeys(("linear_attention", "mamba", "conv", "recurrent", "hybrid"), _RECURRENT),  # Qwen3-Next, LFM2
    "chunked_attention": "its attention is local to chunks of the sequence, which packed rows shift",  # Llama 4
}

FUSED_ATTENTION = tuple(f"{family.fused}Attention" for family in FAMILIES if family.fused)
FUSED_MLP = tuple(f"{family.fused}MLP" for family in FAMILIES if family.fused)
ROUTERS = tuple(family.router for family in FAMILIES if family.router)
TOOL_CALLS = {name: family.tool_calls for family in FAMILIES if family.tool_calls for name in family.model_types}

# `layer_types` of a configuration that packed training supports.
TRAINABLE_LAYERS = frozenset({"full_attention", "sliding_attention"})


def window_of(layer: Any, given: int | None) -> int | None:
    """The sliding window of an attention layer. Two families mask by it, but do not pass it to their attention."""
    match type(layer).__name__:
        case "Qwen2MoeAttention":
            return getattr(layer, "sliding_window", None)
        case "PhimoeAttention":
            return layer.config.sliding_window
    return given


def fixed_rope_length(config: Any) -> int | None:
    """The longest row that a model with longrope or dynamic rotary frequencies reads with those of short rows. A longer
    one has others for all of its tokens, which rows of one pass cannot have, nor tokens that the cache holds already.
    None: the frequencies do not depend on the length."""
    text_config = config.get_text_config(decoder=True)
    rope = getattr(text_config, "rope_parameters", None) or {}
    limits = []
    for one in [rope] if "rope_type" in rope else rope.values():  # of all layers, or by their type
        kind = one.get("rope_type", "") if isinstance(one, Mapping) else ""
        if kind == "longrope":
            limits.append(one["original_max_position_embeddings"])
        elif "dynamic" in kind:
            limits.append(text_config.max_position_embeddings)
    return min(limits, default=None)


# Transforms of the logits, by the setting of a configuration that turns them on. Applied in this order.
LOGIT_TRANSFORMS: Mapping[str, Callable[[Any, float], Any]] = {
    "logits_scaling": lambda logits, scale: logits / scale,  # Granite
    "logit_scale": lambda logits, scale: logits * scale,  # Cohere
    "final_logit_softcapping": lambda logits, cap: (logits / cap).tanh() * cap,  # Gemma 2 and 3n
}

# Styles of transformers' tensor-parallel plan (`base_model_tp_plan`) that Covey supports.
COLWISE, ROWWISE, REPLICATED = "colwise", "rowwise", "replicated_with_grad_allreduce"
TENSOR_PARALLEL_STYLES = frozenset({COLWISE, ROWWISE, REPLICATED})
