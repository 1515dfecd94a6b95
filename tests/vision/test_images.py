"""Images from everything that users and data files give, and what is refused."""

from __future__ import annotations

import base64
import hashlib
import io
import json
import struct
import zlib
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow
import pyarrow.parquet
import pytest
from PIL import Image as Pillow
from PIL import ImageOps

from covey.errors import InputError
from covey.images import (
    DROPPED,
    ImageMistake,
    image_of,
    image_of_bytes,
    images_of,
    keep_last,
    load,
    picture,
    picture_size,
    place_images,
    plain_text,
    with_images,
)
from covey.tasks.demonstrations import read_demonstrations
from covey.tasks.files import read_tasks, tasks_of_rows
from covey.types import Image, ImageFile
from tests.vision.tiny import an_image, asking, drawn

PNG = drawn()
SAME = hashlib.sha256(PNG).hexdigest()


@pytest.mark.parametrize(
    "value",
    [
        PNG,
        bytearray(PNG),
        base64.b64encode(PNG).decode(),
        "data:image/png;base64," + base64.b64encode(PNG).decode(),
        {"bytes": PNG, "path": None},
        {"bytes": PNG, "path": "lost.png"},
        image_of_bytes(PNG),
    ],
)
def test_the_same_bytes_in_any_form_are_the_same_image(value: Any) -> None:
    assert load(image_of(value)).digest == SAME


def test_a_path_is_read_when_it_is_needed(tmp_path: Path) -> None:
    file = tmp_path / "a.png"
    for value in (file, str(file), f"file://{file}", {"path": str(file), "bytes": None}):
        assert image_of(value) == ImageFile(str(file))
    assert image_of("a.png", folder=tmp_path) == ImageFile(str(file))
    file.write_bytes(PNG)
    assert load(image_of(file)).digest == SAME


def test_a_pil_image_keeps_its_pixels() -> None:
    pixels = np.random.default_rng(0).integers(0, 256, (5, 7, 3), dtype=np.uint8)
    image = image_of(Pillow.fromarray(pixels))
    assert isinstance(image, Image)
    assert (np.asarray(picture(image)) == pixels).all() and picture_size(image) == (7, 5)


@pytest.mark.parametrize(
    "part",
    [
        {"type": "image", "image": PNG},
        {"type": "image", "bytes": PNG},
        {"type": "image", "base64": base64.b64encode(PNG).decode()},
        {"type": "image_url", "image_url": {"url": "data:image/png;base64," + base64.b64encode(PNG).decode()}},
        {"type": "image", "image": PNG, "text": None},  # as Parquet fills missing fields
    ],
)
def test_parts_of_openai_trl_and_qwen(part: dict[str, Any]) -> None:
    (message,) = with_images([{"role": "user", "content": [{"type": "text", "text": "a"}, part]}])
    assert message["content"] == [{"type": "text", "text": "a"}, {"type": "image", "image": image_of_bytes(PNG)}]


def test_content_without_images_becomes_text() -> None:
    (message,) = with_images([{"role": "user", "content": [{"type": "text", "text": "a"}, {"text": "b"}]}])
    assert message["content"] == "ab"


@pytest.mark.parametrize(
    ("value", "says"),
    [
        ("https://example.org/a.png", "not downloaded"),
        ("data:image/png,abc", ";base64,"),
        ("no such thing!", "neither an image file nor base64"),
        (12, "not an image: int"),
        (PNG[:-20], "cut off after"),
        (drawn(format="JPEG")[:-300], "cut off after"),
        (drawn(format="WEBP")[:-10], "cut off after"),
        (b"", "cut off after 0 bytes"),
    ],
)
def test_what_is_not_an_image_is_refused(value: Any, says: str) -> None:
    with pytest.raises(ImageMistake, match=says):
        image_of(value, "train.jsonl, line 3")


def test_broken_and_foreign_files_are_refused_with_their_row() -> None:
    middle = bytearray(PNG)
    middle[len(PNG) // 2] ^= 0xFF
    for data in (bytes(middle), b"%!PS-Adobe-3.0 EPSF-3.0\n", b"GIF89a nothing"):
        with pytest.raises(ImageMistake, match=r"train.jsonl, line 3: not a readable image"):
            picture(image_of_bytes(data, "train.jsonl, line 3"))


def chunk(kind: bytes, body: bytes) -> bytes:
    """A part of a PNG file."""
    return struct.pack(">I", len(body)) + kind + body + struct.pack(">I", zlib.crc32(kind + body))


def test_a_decompression_bomb_is_refused_before_it_is_decoded() -> None:
    for side in (30_000, 12_000):  # the second is below the limit of PIL, and above ours
        header = struct.pack(">IIBBBBB", side, side, 8, 2, 0, 0, 0)
        data = b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", header) + chunk(b"IDAT", zlib.compress(b"")) + chunk(b"IEND", b"")
        with pytest.raises(ImageMistake, match="too large to decode"):
            picture_size(image_of_bytes(data))


def test_a_large_jpeg_is_decoded_at_a_fraction_of_its_size() -> None:
    image = image_of_bytes(drawn(800, 400, format="JPEG"))
    assert picture_size(image) == (800, 400)
    assert picture_size(image, 100 * 50) == picture(image, 100 * 50).size == (100, 50)
    assert picture_size(image, 150 * 50) == picture(image, 150 * 50).size == (200, 100)  # at least as many pixels


def test_a_picture_is_turned_as_its_camera_says() -> None:
    plain = Pillow.open(io.BytesIO(drawn(24, 16)))
    exif = Pillow.Exif()
    exif[0x0112] = 6
    encoded = io.BytesIO()
    plain.save(encoded, "JPEG", exif=exif)
    image = image_of_bytes(encoded.getvalue())
    assert picture_size(image) == picture(image).size == (16, 24)


@pytest.mark.parametrize("orientation", [*range(10), "text"])
@pytest.mark.parametrize("format", ["JPEG", "PNG", "WEBP"])
def test_any_orientation_gives_the_same_size_before_and_after_decoding(format: str, orientation: Any) -> None:
    number = isinstance(orientation, int)
    field = struct.pack("<HHI", 0x0112, 3 if number else 2, 1 if number else 4)
    field += struct.pack("<I", orientation) if number else b"six\0"
    exif = b"Exif\0\0II*\0" + struct.pack("<IH", 8, 1) + field + bytes(4)
    encoded = io.BytesIO()
    Pillow.open(io.BytesIO(drawn(24, 16))).save(encoded, format, exif=exif)
    image = image_of_bytes(encoded.getvalue())
    turned = picture(image)
    assert picture_size(image) == turned.size == ((16, 24) if orientation in (5, 6, 7, 8) else (24, 16))
    if orientation in range(1, 9):
        expected = ImageOps.exif_transpose(Pillow.open(io.BytesIO(image.data))).convert("RGB")
        assert (np.asarray(turned) == np.asarray(expected)).all()


def test_damage_is_reported_as_an_image_that_cannot_be_read() -> None:
    """The size needs the header only; damaged pixels are found when they are decoded."""
    with_exif = PNG[:33] + chunk(b"eXIf", b"no such header") + PNG[33:]
    for read in (picture_size, picture):
        with pytest.raises(ImageMistake, match="not a readable image"):
            read(image_of_bytes(with_exif))
    damaged = PNG[:33] + chunk(b"IDAT", b"no pixels") + chunk(b"IEND", b"")
    assert picture_size(image_of_bytes(damaged)) == picture(image_of_bytes(PNG)).size
    with pytest.raises(ImageMistake, match="not a readable image"):
        picture(image_of_bytes(damaged))


def test_only_the_last_images_are_kept() -> None:
    messages = [*asking("a", an_image(seed=1)), *asking(an_image(seed=2), "b", an_image(seed=3))]
    assert images_of(keep_last(messages, 2)) == [an_image(seed=2), an_image(seed=3)]
    assert plain_text(keep_last(messages, 1)[1]["content"]) == f"{DROPPED}b[image] "
    assert images_of(keep_last(messages, 0)) == []
    assert keep_last(messages, 3) is messages


# -- Data files --------------------------------------------------------------------------------------------------------


def test_images_go_to_the_markers_of_verl(tmp_path: Path) -> None:
    row = {"prompt": [{"role": "user", "content": "<image>left, right<image>"}], "answer": "4"}
    rows = [row | {"images": [{"bytes": drawn(seed=1), "path": None}, {"bytes": drawn(seed=2), "path": None}]}]
    file = tmp_path / "train.parquet"
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), file)
    (task,) = read_tasks("data.train_files", str(file))
    assert plain_text(task.messages[0]["content"]) == "[image] left, right[image] "
    assert images_of(task.messages) == [an_image(seed=1), an_image(seed=2)]
    assert not task.columns  # rewards find the images in the messages


def test_an_image_without_a_marker_comes_first_and_paths_count_from_the_file(tmp_path: Path) -> None:
    (tmp_path / "a.png").write_bytes(PNG)
    file = tmp_path / "train.jsonl"
    file.write_text(json.dumps({"question": "what is it?", "image": "a.png", "answer": "x"}) + "\n")
    (task,) = read_tasks("data.train_files", str(file))
    image, text = task.messages[0]["content"]
    assert image == {"type": "image", "image": ImageFile(str(tmp_path / "a.png"))} and text["text"] == "what is it?"
    assert load(image["image"]).digest == SAME


def test_empty_parts_of_trl_are_filled_from_the_column() -> None:
    content = [{"type": "image"}, {"type": "text", "text": "what?"}]
    (task,) = tasks_of_rows([{"prompt": [{"role": "user", "content": content}], "images": [PNG]}], "tasks")
    assert images_of(task.messages) == [image_of_bytes(PNG)]


def test_a_column_named_image_without_images_stays_a_column() -> None:
    rows = [{"question": "what?", "image": "a nice one"}, {"question": "<image> is a tag", "images": []}]
    described, tag = tasks_of_rows(rows, "tasks")
    assert described.messages[0]["content"] == "what?" and described.columns == {"image": "a nice one"}
    assert tag.messages[0]["content"] == "<image> is a tag"


def test_demonstrations_have_images_too(tmp_path: Path) -> None:
    file = tmp_path / "demos.jsonl"
    file.write_text(json.dumps({"question": "what?", "image": "a.png", "answer": "a cat"}) + "\n")
    (tmp_path / "a.png").write_bytes(PNG)
    (one,) = read_demonstrations("data.train_files", str(file))
    assert images_of(one.messages) == [ImageFile(str(tmp_path / "a.png"))]
    assert one.messages[-1] == {"role": "assistant", "content": "a cat"}


@pytest.mark.parametrize(
    ("row", "says"),
    [
        ({"question": "<image> and <image>", "images": ["a.png"]}, "1 images, but 2 markers"),
        ({"question": "<image>", "images": ["a.tiff"]}, "a column of images without any"),
        ({"question": "a", "images": ["https://example.org/a.png"]}, "not downloaded"),
        (
            {"messages": [{"role": "user", "content": [{"type": "video"}, {"type": "image", "image": "a.png"}]}]},
            "video",
        ),
        (
            {"messages": [{"role": "user", "content": [{"type": "image", "image": "a.png", "max_pixels": 9}]}]},
            "set model.min_pixels and model.max_pixels",
        ),
    ],
)
def test_mistakes_name_the_row(tmp_path: Path, row: dict[str, Any], says: str) -> None:
    file = tmp_path / "train.jsonl"
    file.write_text(json.dumps(row) + "\n")
    with pytest.raises(InputError, match=says) as raised:
        read_tasks("data.train_files", str(file))
    assert f"{file}, line 1: " in str(raised.value)


def test_a_missing_file_is_reported_with_its_row(tmp_path: Path) -> None:
    file = tmp_path / "train.jsonl"
    file.write_text(json.dumps({"question": "a", "image": "lost.png"}) + "\n")
    (task,) = read_tasks("data.train_files", str(file))
    with pytest.raises(ImageMistake, match=r"train.jsonl, line 1: .*lost.png: cannot be read"):
        load(images_of(task.messages)[0])


def test_markers_are_filled_in_order_over_several_messages() -> None:
    messages = [{"role": "user", "content": "a<image>"}, {"role": "user", "content": "<image>b"}]
    placed = place_images(messages, ["1.png", "2.png"])
    assert [part.get("image", part.get("text")) for m in placed for part in m["content"]] == [
        "a",
        "1.png",
        "2.png",
        "b",
    ]
