"""The features of images, and the forward pass of a language model with features in place of image tokens.

The model's own forward pass finds image tokens by their id. Here their places are given, since a model may also sample
an image token: that is a token like any other.

Shapes: B rows, T tokens, F image tokens of all rows, D hidden size.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from covey.models.families import decoder, vision_family
from covey.models.vision import Pixels
from covey.types import Image, ImageSpan


@dataclass(frozen=True, slots=True)
class ImageFeatures:
    """What the vision tower yields for images: an embedding per image token, and for some models (Qwen3-VL) additions
    to the hidden states after the first layers."""

    embeds_FD: Tensor
    deepstack: tuple[Tensor, ...] = ()  # [F, D] each

    @property
    def nbytes(self) -> int:
        return sum(tensor.nbytes for tensor in (self.embeds_FD, *self.deepstack))

    @classmethod
    def joined(cls, parts: Sequence[ImageFeatures]) -> ImageFeatures:
        layers = zip(*(part.deepstack for part in parts), strict=True)
        return cls(torch.cat([part.embeds_FD for part in parts]), tuple(torch.cat(layer) for layer in layers))


@dataclass(frozen=True, slots=True)
class PlacedImages:
    """Where the features of images belong in a batch of token rows."""

    images: tuple[Image, ...]  # each once
    at_F: Tensor  # index of the image token in the flattened rows, in ascending order
    source_F: Tensor  # its row among the features of all images

    def to(self, device: torch.device, non_blocking: bool = False) -> PlacedImages:
        at_F, source_F = (x.to(device, non_blocking=non_blocking) for x in (self.at_F, self.source_F))
        return PlacedImages(self.images, at_F, source_F)


# The ids of a row and the images among them; the first and last + 1 of its ids that are in the batch; and the index of
# the first of these in the flattened batch.
Piece = tuple[Sequence[int], Sequence[ImageSpan], tuple[int, int], int]


def place(pieces: Sequence[Piece], token_id: int) -> PlacedImages:
    """The places of all images in pieces of rows."""
    images: dict[Image, int] = {}  # → the row of its first feature
    count, at, source = 0, [], []
    for ids, spans, (low, high), start in pieces:
        for span in spans:
            places = [index for index in range(span.start, span.end) if ids[index] == token_id]
            inside = [(index, feature) for feature, index in enumerate(places) if low <= index < high]
            if not inside:
                continue
            if span.image not in images:
                images[span.image] = count
                count += len(places)
            at += [start + index - low for index, _ in inside]
            source += [images[span.image] + feature for _, feature in inside]
    return PlacedImages(tuple(images), torch.tensor(at, dtype=torch.int64), torch.tensor(source, dtype=torch.int64))


def encode(lm: Any, pixels: Pixels) -> ImageFeatures:
    """The features of all images of `pixels`. With gradient only if the vision tower has trained weights."""
    device = lm.get_input_embeddings().weight.device
    inputs = {name: tensor.to(device) for name, tensor in pixels.items()}
    with nullcontext() if trains_vision(lm) else torch.no_grad():
        out = lm.base_model.get_image_features(**inputs, return_dict=True)
    deepstack = getattr(out, "deepstack_features", None) or ()
    return ImageFeatures(torch.cat(list(out.pooler_output)), tuple(torch.cat(list(layer)) for layer in deepstack))


def language_forward(
    lm: Any, ids_BT: Tensor, position_ids: Tensor, placed: PlacedImages, features: ImageFeatures | None
) -> Tensor:
    """The last hidden states, with `features` (if there are any) in the places of the images, [B, T, D]. `position_ids`
    are [B, T], or [3, B, T] for time, height and width."""
    embeds_BTD = lm.get_input_embeddings()(ids_BT)
    extra: dict[str, Any] = {}
    if features is not None:
        image_FD = features.embeds_FD[placed.source_F].to(embeds_BTD.dtype)
        embeds_BTD = embeds_BTD.flatten(0, 1).index_copy(0, placed.at_F, image_FD).view(embeds_BTD.shape)
    if features is not None and features.deepstack:
        mask = torch.zeros(ids_BT.numel(), dtype=torch.bool, device=ids_BT.device).index_fill(0, placed.at_F, True)
        extra["visual_pos_masks"] = mask.view(ids_BT.shape)
        extra["deepstack_visual_embeds"] = [layer[placed.source_F] for layer in features.deepstack]
    hidden: Tensor = (
        decoder(lm)(inputs_embeds=embeds_BTD, position_ids=position_ids, use_cache=False, **extra)
    ).last_hidden_state
    return hidden


def trains_vision(lm: Any) -> bool:
    return any(weight.requires_grad for weight in vision_weights(lm).values())


def vision_weights(lm: Any) -> Mapping[str, torch.nn.Parameter]:
    """The weights of the vision tower, by name; empty for a model without one."""
    family = vision_family(lm.config)
    if family is None:
        return {}
    modules = {name: getattr(lm.base_model, name) for name in family.tower}
    return {
        f"{tower}.{name}": weight for tower, module in modules.items() for name, weight in module.named_parameters()
    }
