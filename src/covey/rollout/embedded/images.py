"""Images in the embedded engine: their features, computed once per image, and prompts that contain them.

Shapes: B sequences, Q new tokens of a sequence.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from covey.models.families import causal_lm
from covey.rollout.embedded.scheduler import RequestState
from covey.types import Image, ImageSpan

if TYPE_CHECKING:
    from covey.models.image_features import ImageFeatures
    from covey.models.vision import VisionProcessor

FEATURE_BYTES = 2**30  # of features that are kept


class FeatureCache:
    """The features of images under the current weights. The least recently used ones are dropped."""

    def __init__(self, model: Any, vision: VisionProcessor) -> None:
        self.lm = causal_lm(model)
        self.vision = vision
        self.encoded = 0  # images that went through the vision tower
        self._features: OrderedDict[str, ImageFeatures] = OrderedDict()

    def check(self, images: Sequence[ImageSpan]) -> None:
        """Decode the images before their request enters the batch, where an error would end all requests."""
        for span in images:
            if span.image.digest not in self._features:
                self.vision.pixels(span.image)

    def of(self, images: Sequence[Image]) -> ImageFeatures:
        """The features of all images, one after the other. Each is encoded by itself: batching would change the last
        bits."""
        from covey.models.image_features import ImageFeatures, encode

        found = []
        for image in images:
            if image.digest not in self._features:
                self._features[image.digest] = encode(self.lm, self.vision.pixels(image))
                self.encoded += 1
            self._features.move_to_end(image.digest)
            found.append(self._features[image.digest])
        while len(self._features) > 1 and sum(f.nbytes for f in self._features.values()) > FEATURE_BYTES:
            self._features.popitem(last=False)
        return ImageFeatures.joined(found)

    def flush(self) -> None:
        """Drop all features if the weights that computed them are trained."""
        from covey.models.image_features import trains_vision

        if trains_vision(self.lm):
            self._features.clear()


def prefill_with_images(
    model: Any, rows: Sequence[RequestState], starts: Sequence[int], lengths: Sequence[int], ids_BQ: Tensor
) -> None:
    """Compute the tokens of each row from its start on, some of which may be those of images."""
    from covey.models.image_features import language_forward, place
    from covey.models.vision import rope_positions

    cache: FeatureCache = next(row.features for row in rows if row.images)
    width, grid = ids_BQ.shape[1], cache.vision.family.grid
    windows = [(start, start + length) for start, length in zip(starts, lengths, strict=True)]
    pieces = [
        (row.tokens, row.images, window, number * width)
        for number, (row, window) in enumerate(zip(rows, windows, strict=True))
    ]
    placed = place(pieces, cache.vision.token_id).to(ids_BQ.device)
    position = torch.arange(width) + torch.tensor(starts)[:, None]
    if grid:
        position = position.expand(3, *position.shape).clone()
        for number, (row, (start, end)) in enumerate(zip(rows, windows, strict=True)):
            place_of_tokens = rope_positions(len(row.tokens), row.images)[:, start:end]
            position[:, number, : end - start] = torch.from_numpy(place_of_tokens)
    features = cache.of(placed.images) if placed.images else None
    language_forward(cache.lm, ids_BQ, position.to(ids_BQ.device), placed, features)
