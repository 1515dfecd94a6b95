"""Images for a vision-language model: which token ids stand for an image, its positions, and its pixels.

A chat template writes one placeholder per image. `VisionProcessor.expand` replaces it by the ids that the model was
trained with: as many image tokens as the vision tower yields features, and, for models that cut an image into tiles,
the marks between them. Pixels are made by transformers' image processor on PIL, without torchvision.

Positions (M-RoPE of the Qwen-VL models, https://arxiv.org/abs/2409.12191): a text token at p has position (p, p, p),
the token in row i and column j of an image that starts at p has (p, p + i, p + j), and the text after it continues at
p + max(height, width). So the next token's position is the number of tokens before it plus the sum of the images'
`ImageSpan.shift`.
"""

from __future__ import annotations

import math
import threading
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any, Generic, TypeVar

import numpy as np
import torch
from torch import Tensor

from covey.config.schema import ModelConfig
from covey.errors import InputError
from covey.images import ImageMistake, load, picture, picture_size
from covey.models.families import VisionFamily
from covey.models.folder import MAIN, explain_errors, read_object
from covey.types import Image, ImageFile, ImageSpan, Prompt

PIXEL_BYTES = 512 * 2**20  # of prepared images that are kept, and of the contents of files

T = TypeVar("T")
Pixels = dict[str, Tensor]  # arguments of the model's `get_image_features`


class _Recent(Generic[T]):
    """The values used last, up to PIXEL_BYTES in all, or one."""

    def __init__(self, size: Callable[[T], int]) -> None:
        self._size = size
        self._kept: OrderedDict[str, T] = OrderedDict()
        self._bytes = 0  # of all values that are kept

    def __iter__(self) -> Iterator[str]:
        return iter(self._kept)

    def get(self, key: str, make: Callable[[], T]) -> T:
        if key not in self._kept:
            self._kept[key] = make()
            self._bytes += self._size(self._kept[key])
        self._kept.move_to_end(key)
        while len(self._kept) > 1 and self._bytes > PIXEL_BYTES:
            self._bytes -= self._size(self._kept.popitem(last=False)[1])
        return self._kept[key]


class VisionProcessor:
    """Turns images into ids and pixels, for one model."""

    def __init__(self, family: VisionFamily, image_processor: Any, tokenizer: Any, config: Any) -> None:
        self.family = family
        self.image_processor = image_processor
        self.tokenizer = tokenizer
        self.config = config
        self.token_id = int(config.image_token_id)
        self.placeholder = str(tokenizer.convert_ids_to_tokens(self.token_id))
        self._pixels: _Recent[Pixels] = _Recent(lambda pixels: sum(tensor.nbytes for tensor in pixels.values()))
        self._files: _Recent[Image] = _Recent(lambda image: len(image.data))
        self._lock = threading.Lock()  # the engine prepares images on its own thread

    @cached_property
    def max_pixels(self) -> int:
        """The most pixels that the model sees: a larger picture need not be decoded in full."""
        edge = int(self.image_processor.size["longest_edge"])
        return edge if self.family.grid else edge * edge

    # -- ids -----------------------------------------------------------------------------------------------------

    def expand(self, ids: Sequence[int], images: Sequence[Image | ImageFile], before: int = 0) -> Prompt:
        """`ids` with one placeholder per image → the ids that the model sees. `before`: ids that precede these."""
        expanded: list[int] = []
        spans: list[ImageSpan] = []
        remaining = iter(images)
        for token in ids:
            if token != self.token_id:
                expanded.append(token)
                continue
            image = self._loaded(next(remaining))
            tokens, grid = self._tokens_of(image)
            spans.append(ImageSpan(image, before + len(expanded), len(tokens), grid))
            expanded += tokens
        return Prompt(tuple(expanded), tuple(spans))

    def _loaded(self, image: Image | ImageFile) -> Image:
        """The content of a file, read once while it is in use."""
        if isinstance(image, Image):
            return image
        with self._lock:
            return self._files.get(image.path, lambda: load(image))

    def _tokens_of(self, image: Image) -> tuple[list[int], tuple[int, int] | None]:
        """The ids that stand for an image, and its grid of tokens."""
        width, height = picture_size(image, self.max_pixels)
        if self.family.grid:
            rows, columns = self._grid(image, height, width)
            return [self.token_id] * (rows * columns), (rows, columns)
        return list(self._tile_tokens(*self._tiles(height, width))), None

    def _grid(self, image: Image, height: int, width: int) -> tuple[int, int]:
        """Tokens in a column and in a row of the resized image."""
        from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import smart_resize

        processor = self.image_processor
        factor = processor.patch_size * processor.merge_size
        least, most = processor.size["shortest_edge"], processor.size["longest_edge"]
        try:
            resized = smart_resize(height, width, factor, min_pixels=least, max_pixels=most)
        except ValueError as error:  # longer than 200 times its width
            raise ImageMistake(f"{image.place or 'an image'}: {error}\n  fix: cut the picture") from error
        return resized[0] // factor, resized[1] // factor

    def shown_size(self, width: int, height: int) -> tuple[int, int]:
        """Width and height of a picture as the model sees it, for coordinates in pixels. A model of tiles has no such
        size: that of the picture."""
        if not self.family.grid:
            return width, height
        rows, columns = self._grid(Image("", b""), height, width)
        factor = self.image_processor.patch_size * self.image_processor.merge_size
        return columns * factor, rows * factor

    def _tiles(self, height: int, width: int) -> tuple[int, int]:
        """Rows and columns of tiles that the image processor cuts; (0, 0) if it shows the whole image only."""
        from transformers.models.idefics3.image_processing_pil_idefics3 import get_resize_output_image_size

        processor = self.image_processor
        if not processor.do_image_splitting:
            return 0, 0
        tile = int(processor.max_image_size["longest_edge"])
        if processor.do_resize:
            shape = np.empty((0, height, width))
            height, width = get_resize_output_image_size(shape, int(processor.size["longest_edge"]))
        ratio = width / height
        if width >= height:
            width = math.ceil(width / tile) * tile
            height = math.ceil(int(width / ratio) / tile) * tile
        else:
            height = math.ceil(height / tile) * tile
            width = math.ceil(int(height * ratio) / tile) * tile
        return (0, 0) if max(height, width) <= tile else (height // tile, width // tile)

    def _tile_tokens(self, rows: int, columns: int) -> tuple[int, ...]:
        """The ids of an image in tiles: every tile by its place, and the whole image last."""
        mark, image = "<fake_token_around_image>", self.placeholder * self.tile_tokens
        text = "".join(
            "".join(f"{mark}<row_{row + 1}_col_{column + 1}>{image}" for column in range(columns)) + "\n"
            for row in range(rows)
        )
        text += ("\n" if rows else "") + f"{mark}<global-img>{image}{mark}"
        return tuple(self.tokenizer(text, add_special_tokens=False)["input_ids"])

    @property
    def tile_tokens(self) -> int:
        vision = self.config.vision_config
        return int((vision.image_size // vision.patch_size) ** 2 / self.config.scale_factor**2)

    # -- pixels --------------------------------------------------------------------------------------------------

    def pixels(self, image: Image) -> Pixels:
        """One image as the vision tower takes it. The most recent ones are kept."""
        with self._lock:
            return self._pixels.get(image.digest, lambda: self._prepared(image))

    def _prepared(self, image: Image) -> Pixels:
        decoded = picture(image, self.max_pixels)
        prepared = self.image_processor(images=[decoded], return_tensors="pt")
        return {name: prepared[name] for name in self.image_processor.model_input_names if name in prepared}

    def stacked(self, images: Sequence[Image]) -> Pixels:
        """Several images as one input of the vision tower."""
        dim = 0 if self.family.grid else 1  # patches and grids in one column; or the tiles of one conversation
        parts = [self.pixels(image) for image in images]
        return {name: torch.cat([part[name] for part in parts], dim) for name in parts[0]}

    def save_pretrained(self, folder: str | Path) -> None:
        """Write the image processor's settings next to a model."""
        self.image_processor.save_pretrained(str(folder))


def rope_positions(length: int, images: Sequence[ImageSpan]) -> np.ndarray[Any, np.dtype[np.int64]]:
    """The position of each of `length` tokens in time, height and width, [3, length]."""
    position = np.broadcast_to(np.arange(length), (3, length)).copy()
    for span in images:
        assert span.grid is not None
        rows, columns = span.grid
        start = position[0, span.start]
        position[0, span.start : span.end] = start
        position[1, span.start : span.end] = start + np.repeat(np.arange(rows), columns)
        position[2, span.start : span.end] = start + np.tile(np.arange(columns), rows)
        position[:, span.end :] += span.shift
    return position


# -- Reading -----------------------------------------------------------------------------------------------------------


def open_vision(
    config: ModelConfig, family: VisionFamily, path: str, model_config: Any, tokenizer: Any, revision: str | None
) -> VisionProcessor:
    """The image processor of a folder or hub id, with the size limits of the settings."""
    from transformers import AutoImageProcessor

    with explain_errors(config.name):
        try:
            processor = AutoImageProcessor.from_pretrained(
                path, backend="pil", trust_remote_code=False, revision=revision or MAIN
            )
        except OSError as error:
            if not Path(path).is_dir():
                raise
            raise InputError(
                f"{path} has no image processor: preprocessor_config.json is missing\n"
                "  fix: copy it from the model that these weights come from"
            ) from error
    _limit_sizes(processor, config, family)
    if tokenizer.convert_ids_to_tokens(int(model_config.image_token_id)) is None:
        raise InputError(
            f"{config.name}: its tokenizer lacks the image token {model_config.image_token_id} of config.json\n"
            "  fix: copy the tokenizer's files that belong to these weights"
        )
    _use_processor_template(path, tokenizer, revision)
    return VisionProcessor(family, processor, tokenizer, model_config)


def _limit_sizes(processor: Any, config: ModelConfig, family: VisionFamily) -> None:
    least, most = config.min_pixels, config.max_pixels
    size = dict(processor.size)
    if family.grid:
        unit = (processor.patch_size * processor.merge_size) ** 2
        if most is not None and most < unit:
            raise InputError(f"model.max_pixels={most} is less than one image token of this model, {unit} pixels")
        size |= {"shortest_edge": least or size["shortest_edge"], "longest_edge": most or size["longest_edge"]}
        size["shortest_edge"] = min(size["shortest_edge"], size["longest_edge"]) if least is None else least
    else:
        if least is not None:
            raise InputError("model.min_pixels: this model resizes every image\n  use model.max_pixels alone")
        if most is not None:  # whole tiles, in a square of at most this many pixels
            tile = int(processor.max_image_size["longest_edge"])
            size["longest_edge"] = max(1, math.isqrt(most) // tile) * tile
    processor.size = type(processor.size)(**size) if not isinstance(processor.size, dict) else size


def _use_processor_template(path: str, tokenizer: Any, revision: str | None) -> None:
    """Older models keep the chat template for images in a file beside the tokenizer's."""
    from transformers.utils import cached_file

    options = {"revision": revision or MAIN, "_raise_exceptions_for_missing_entries": False}
    newer, older = (cached_file(path, f"chat_template.{kind}", **options) for kind in ("jinja", "json"))
    if newer is None and older is not None:
        tokenizer.chat_template = read_object(Path(older))["chat_template"]
