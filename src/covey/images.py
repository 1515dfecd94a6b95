"""Images in messages: reading them from what users and data files give, and checking them.

The content of a message is a text, or a list of parts:

    {"type": "text", "text": "What colour is the circle?"}
    {"type": "image", "image": IMAGE}

IMAGE is a path, encoded bytes, base64 or a data URL, a PIL image, or {"bytes": ..., "path": ...} as in an image column
of Hugging Face datasets. `with_images` turns all of these into an `Image` or an `ImageFile`. A file is read when its
image is needed, and checked then: its format, that it is whole, and its size before it is decoded.
"""

from __future__ import annotations

import base64
import binascii
import hashlib
import io
import math
import warnings
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from covey.errors import InputError
from covey.imports import require
from covey.types import Image, ImageFile, Messages

FORMATS = ("PNG", "JPEG", "WEBP", "GIF", "BMP")  # others could start programs (EPS) or are rare
SUFFIXES = (".png", ".jpg", ".jpeg", ".webp", ".gif", ".bmp")
MAX_BYTES = 64 * 2**20  # of a file
MAX_DECODED = 80_000_000  # pixels of a picture; a small file may claim any size
MARKER = "<image>"  # where an image of the column `images` belongs in a text
DROPPED = "(an earlier image)"  # the text in place of an image that is no longer shown
IMAGE_FIX = 'an image is a part like {"type": "image", "image": "picture.png"}'
IMAGE_KEYS = ("image", "path", "bytes", "base64", "url", "image_url", "data")
SIZES = ("min_pixels", "max_pixels", "resized_height", "resized_width")


class ImageMistake(InputError):
    """An image that cannot be read."""


# -- From what users give ----------------------------------------------------------------------------------------------


def has_images(content: Any) -> bool:
    return isinstance(content, list | tuple) and any(map(is_image, content))


def is_image(part: Any) -> bool:
    """Whether a part of a message's content is an image."""
    if not isinstance(part, Mapping):
        return False
    kind = part.get("type")
    return kind in ("image", "image_url") or (kind is None and part.get("image") is not None)


def is_picture(value: Any) -> bool:
    """Whether a value of a tool is an image: a part of a message, or an image of PIL."""
    part = isinstance(value, Mapping) and value.get("type") in ("image", "image_url")
    return part or (hasattr(value, "save") and hasattr(value, "convert"))


def with_images(messages: Messages, place: str = "", folder: Path | None = None) -> tuple[Mapping[str, Any], ...]:
    """The messages with every image as an `Image` or `ImageFile`. Relative paths count from `folder`. Content that is a
    list without images becomes one text."""
    return tuple(
        {**message, "content": _parts(message["content"], place, folder)}
        if isinstance(message.get("content"), list | tuple)
        else message
        for message in messages
    )


def _parts(content: Sequence[Any], place: str, folder: Path | None) -> str | list[dict[str, Any]]:
    if not has_images(content):
        return "".join(_text(part, place) for part in content)
    return [
        {"type": "image", "image": _image_of_part(part, place, folder)}
        if is_image(part)
        else {"type": "text", "text": _text(part, place)}
        for part in content
    ]


def _text(part: Any, place: str) -> str:
    if isinstance(part, str):
        return part
    if not isinstance(part, Mapping) or not isinstance(part.get("text"), str):
        kind = part.get("type") if isinstance(part, Mapping) else type(part).__name__
        raise ImageMistake(f"{_at(place)}a part of the content is neither text nor an image: {kind}\n  {IMAGE_FIX}")
    return str(part["text"])


def _image_of_part(part: Mapping[str, Any], place: str, folder: Path | None) -> Image | ImageFile:
    if sizes := [key for key in SIZES if part.get(key) is not None]:
        raise ImageMistake(
            f"{_at(place)}{sizes[0]} of one image is not supported\n"
            "  fix: set model.min_pixels and model.max_pixels, for all images"
        )
    value = next((part[key] for key in IMAGE_KEYS if part.get(key) is not None), None)
    return image_of(value, place, folder)


def image_of(value: Any, place: str = "", folder: Path | None = None) -> Image | ImageFile:
    """The image that a value stands for."""
    if isinstance(value, Image | ImageFile):
        return value
    if isinstance(value, Mapping):  # of an image column, or OpenAI's {"url": ...}
        inner = next((value[key] for key in ("bytes", "path", "url", "image") if value.get(key) is not None), None)
        if inner is not None:
            return image_of(inner, place, folder)
    if isinstance(value, bytes | bytearray | memoryview):
        return image_of_bytes(bytes(value), place)
    if isinstance(value, Path):
        return ImageFile(str(_located(value, folder)), place)
    if isinstance(value, str):
        return _image_of_text(value, place, folder)
    if is_picture(value):
        encoded = io.BytesIO()
        value.save(encoded, format="PNG")
        return image_of_bytes(encoded.getvalue(), place)
    raise ImageMistake(f"{_at(place)}not an image: {type(value).__name__}\n  {IMAGE_FIX}")


def _image_of_text(value: str, place: str, folder: Path | None) -> Image | ImageFile:
    if value.startswith(("http://", "https://")):
        raise ImageMistake(f"{_at(place)}{value:.80}: images are not downloaded\n  fix: name a file on this machine")
    if value.startswith("data:"):
        head, _, encoded = value.partition(",")
        if head.endswith(";base64"):
            return image_of_bytes(_decoded(encoded, place), place)
        raise ImageMistake(f"{_at(place)}{head:.60}: a data URL of an image ends in ;base64,")
    path = value.removeprefix("file://")
    if len(path) < 1024 and (located := _located(Path(path).expanduser(), folder)).suffix:
        return ImageFile(str(located), place)
    return image_of_bytes(_decoded(value, place), place)


def _located(path: Path, folder: Path | None) -> Path:
    return path if folder is None or path.is_absolute() else folder / path


def _decoded(text: str, place: str) -> bytes:
    try:
        return base64.b64decode(text, validate=True)
    except (binascii.Error, ValueError) as error:
        raise ImageMistake(f"{_at(place)}{text[:40]!r}: neither an image file nor base64\n  {IMAGE_FIX}") from error


def image_of_bytes(data: bytes, place: str = "") -> Image:
    """An image of encoded bytes, checked to be whole."""
    if len(data) > MAX_BYTES:
        raise ImageMistake(f"{_at(place)}an image of {len(data):,} bytes; at most {MAX_BYTES:,} are read")
    _check_whole(data, place)
    return Image(hashlib.sha256(data).hexdigest(), data, place)


def _at(place: str) -> str:
    return f"{place}: " if place else ""


# -- Columns of data files ---------------------------------------------------------------------------------------------


def place_images(messages: Messages, images: Sequence[Any], place: str = "") -> list[dict[str, Any]]:
    """The images of a column in the messages: at the markers `<image>`, or, without any, before the first text of the
    user. A part {"type": "image"} without an image of its own counts as a marker."""
    markers = sum(map(_count_markers, messages))
    placed = [dict(message) for message in messages]
    if not markers and images:
        first = next((message for message in placed if message["role"] == "user"), placed[0])
        content = first["content"]
        parts = [{"type": "text", "text": content}] if isinstance(content, str) else list(content)
        first["content"] = [*({"type": "image", "image": image} for image in images), *parts]
        return placed
    if markers != len(images):
        raise ImageMistake(
            f"{_at(place)}{len(images)} images, but {markers} markers {MARKER} in the messages\n"
            "  fix: one marker per image, in order; or none: then the images come first"
        )
    remaining = iter(images)
    for message in placed:
        if has_marker(message):
            message["content"] = _filled(message["content"], remaining)
    return placed


def has_marker(message: Mapping[str, Any]) -> bool:
    return _count_markers(message) > 0


def _count_markers(message: Mapping[str, Any]) -> int:
    content = message.get("content")
    if isinstance(content, str):
        return content.count(MARKER)
    parts = content if isinstance(content, list) else ()
    return sum(
        _is_empty(part) or (str(part.get("text") or "").count(MARKER) if isinstance(part, Mapping) else 0)
        for part in parts
    )


def _is_empty(part: Any) -> bool:
    return is_image(part) and all(part.get(key) is None for key in IMAGE_KEYS)


def _filled(content: Any, images: Any) -> list[dict[str, Any]]:
    parts = [{"type": "text", "text": content}] if isinstance(content, str) else content
    filled: list[dict[str, Any]] = []
    for part in parts:
        if _is_empty(part):
            filled.append({"type": "image", "image": next(images)})
        elif is_image(part):
            filled.append(part)
        else:
            first, *others = part["text"].split(MARKER)
            filled += [{"type": "text", "text": first}] if first else []
            for text in others:
                filled.append({"type": "image", "image": next(images)})
                filled += [{"type": "text", "text": text}] if text else []
    return filled


# -- In a conversation -------------------------------------------------------------------------------------------------


def images_of(messages: Messages) -> list[Image | ImageFile]:
    """The images of messages as `with_images` returns them, in order."""
    contents = (message.get("content") for message in messages)
    parts = (part for content in contents if isinstance(content, list) for part in content)
    return [part["image"] for part in parts if is_image(part)]


def keep_last(messages: Messages, count: int) -> Messages:
    """The messages with a note in place of all images but the last `count`."""
    drop = len(images_of(messages)) - count
    if drop <= 0:
        return messages
    kept: list[Mapping[str, Any]] = []
    for message in messages:
        if isinstance(message.get("content"), list):
            parts = []
            for part in message["content"]:
                drop -= (image := part["type"] == "image")
                parts.append({"type": "text", "text": DROPPED} if image and drop >= 0 else part)
            message = {**message, "content": parts}
        kept.append(message)
    return kept


def plain_text(content: Any) -> str:
    """The content of a message as one text, with `[image]` for an image."""
    return text_of(content, image="[image] ")


def text_of(content: Any, image: str = "") -> str:
    """The texts in the content of a message, with another in place of images."""
    if not has_images(content):
        return str(content)
    return "".join(image if is_image(part) else _text(part, "") for part in content)


# -- Reading pictures --------------------------------------------------------------------------------------------------


def load(image: Image | ImageFile) -> Image:
    """The image with its bytes."""
    if isinstance(image, Image):
        return image
    place = f"{image.place}: {image.path}" if image.place else image.path
    try:
        size = Path(image.path).stat().st_size
        data = Path(image.path).read_bytes() if size <= MAX_BYTES else b""
    except OSError as error:
        raise ImageMistake(f"{place}: cannot be read ({error.strerror})") from error
    if size > MAX_BYTES:
        raise ImageMistake(f"{place}: {size:,} bytes; images of at most {MAX_BYTES:,} are read")
    return image_of_bytes(data, place)


def data_url(image: Image | ImageFile) -> str:
    """The image as text: data:image/png;base64,..."""
    data = load(image).data
    kind = suffix_of(data).removeprefix(".").replace("jpg", "jpeg") or "png"
    return f"data:image/{kind};base64,{base64.b64encode(data).decode()}"


def suffix_of(data: bytes) -> str:
    """The usual suffix of a file with these contents."""
    heads = {b"\x89PNG": ".png", b"\xff\xd8\xff": ".jpg", b"RIFF": ".webp", b"GIF8": ".gif", b"BM": ".bmp"}
    return next((suffix for head, suffix in heads.items() if data.startswith(head)), "")


def _check_whole(data: bytes, place: str) -> None:
    """Refuse files that were cut off, by the mark at their end or the length in their header: decoding all images of a
    data set before a run would take too long. `picture` finds other damage."""
    heads = {b"\x89PNG\r\n\x1a\n": b"IEND\xaeB`\x82", b"\xff\xd8\xff": b"\xff\xd9"}
    tail = data[-4096:]
    cut = any(data.startswith(head) and end not in tail for head, end in heads.items())
    if data.startswith(b"RIFF"):
        cut = len(data) < int.from_bytes(data[4:8], "little") + 8
    if cut or not data:
        raise ImageMistake(f"{_at(place)}the image is cut off after {len(data):,} bytes\n  fix: write or copy it again")


def _opened(image: Image, max_pixels: int | None) -> Any:
    """The picture, not decoded yet. A JPEG is to be decoded at 1/2, 1/4 or 1/8 of its size if `max_pixels` allow."""
    pil = require_pillow()
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", pil.DecompressionBombWarning)
            picture = pil.open(io.BytesIO(image.data), formats=FORMATS)
    except pil.DecompressionBombError as error:
        raise _too_large(image, str(error)) from error
    except Exception as error:  # decoders raise various errors for broken files
        raise _unreadable(image, error) from error
    width, height = picture.size
    if width * height > MAX_DECODED:
        raise _too_large(image, f"{width} × {height} pixels")
    if max_pixels is not None and picture.format == "JPEG" and width * height > 4 * max_pixels:
        scale = math.sqrt(max_pixels / (width * height))
        picture.draft("RGB", (math.ceil(width * scale), math.ceil(height * scale)))
    return picture


def _too_large(image: Image, what: str) -> ImageMistake:
    return ImageMistake(
        f"{_at(image.place)}the image is too large to decode ({what}; at most {MAX_DECODED:,} pixels)\n"
        "  fix: write it smaller"
    )


def _unreadable(image: Image, error: Exception) -> ImageMistake:
    first = next(iter(str(error).splitlines()), type(error).__name__)
    return ImageMistake(
        f"{_at(image.place)}not a readable image ({first:.120})\n"
        f"  formats: {', '.join(FORMATS)}; write or copy it again"
    )


def picture_size(image: Image, max_pixels: int | None = None) -> tuple[int, int]:
    """Width and height of `picture`, from the file's header alone."""
    opened = _opened(image, max_pixels)
    width, height = opened.size
    return (height, width) if _orientation(opened, image) in SWAPPED else (width, height)


ORIENTATION = 0x0112  # EXIF
SWAPPED = (5, 6, 7, 8)  # orientations that swap width and height


def _orientation(opened: Any, image: Image) -> int:
    """How the camera was held, 1 to 8, as the file's header says. Nothing is decoded; other values count as 1."""
    header = opened.info.get("exif")
    if not isinstance(header, bytes):  # also a text of that name
        return 1
    exif = require_pillow().Exif()
    try:
        exif.load(header)
        value = exif.get(ORIENTATION)
    except Exception as error:  # of various types
        raise _unreadable(image, error) from error
    return value if isinstance(value, int) and 1 <= value <= 8 else 1


def picture(image: Image, max_pixels: int | None = None) -> Any:
    """The decoded picture, a PIL image in RGB, turned as its camera says."""
    opened = _opened(image, max_pixels)
    turn = require_pillow().Transpose
    turns = {
        **{2: turn.FLIP_LEFT_RIGHT, 3: turn.ROTATE_180, 4: turn.FLIP_TOP_BOTTOM, 5: turn.TRANSPOSE},
        **{6: turn.ROTATE_270, 7: turn.TRANSVERSE, 8: turn.ROTATE_90},
    }
    orientation = _orientation(opened, image)
    try:
        return (opened.transpose(turns[orientation]) if orientation > 1 else opened).convert("RGB")
    except Exception as error:  # decoders raise various errors for broken files
        raise _unreadable(image, error) from error


def require_pillow() -> Any:
    return require("PIL.Image", "vision", "images need Pillow")
