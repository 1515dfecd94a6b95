"""Memory of a trained vision tower in a training pass, by the same formulas as a language model's (pass_memory.py).

A pass encodes each of its images once, with all activations kept for the backward pass. Several patches of an image
become one image token, so a token of the pass brings up to that many patches, in proportion to the share of image
tokens in the longest row. A frozen tower keeps nothing.
"""

from __future__ import annotations

from typing import Any

from covey.learner.pass_memory import Demand, PassShapes
from covey.models.families import causal_lm, vision_family
from covey.models.image_features import trains_vision


def tower_shapes(model: Any, demand: Demand) -> PassShapes | None:
    """The sizes of a model's vision tower; None if it has none, or a frozen one."""
    lm = causal_lm(model)
    family = vision_family(lm.config)
    if family is None or not trains_vision(lm):
        return None
    vision = lm.config.vision_config
    hidden = int(getattr(vision, "embed_dim", None) or vision.hidden_size)  # Qwen2-VL's hidden_size is of its output
    if (depth := getattr(vision, "depth", None)) is None:
        depth = vision.num_hidden_layers
    heads = int(getattr(vision, "num_heads", None) or vision.num_attention_heads)
    inner = getattr(vision, "intermediate_size", None) or hidden * vision.mlp_ratio
    merged = vision.spatial_merge_size if family.grid else lm.config.scale_factor
    mergers = 1 + len(getattr(vision, "deepstack_visual_indexes", None) or ())
    return PassShapes(
        layers=int(depth) + mergers,
        hidden=hidden,
        queries=hidden,
        keys=hidden,
        heads=heads,
        inner=int(inner),
        vocabulary=0,
        itemsize=lm.get_input_embeddings().weight.dtype.itemsize,
        trained_output=False,
        flash=True,  # each image by itself, without a mask
        per_token=merged**2 * image_share(demand),
    )


def image_share(demand: Demand) -> float:
    """The share of image tokens in the longest row, at most."""
    if not demand.longest:
        return 1.0
    return min(1.0, (demand.prompt if demand.images is None else demand.images) / demand.longest)
