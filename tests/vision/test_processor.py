"""Placeholders, positions and pixels against transformers' own processors and models."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import Idefics3Processor

from covey.config.schema import ModelConfig
from covey.errors import InputError
from covey.images import ImageMistake, image_of_bytes, picture
from covey.models.families import vision_family
from covey.models.loading import load_policy, open_source
from covey.models.vision import VisionProcessor, rope_positions
from covey.rollout.rendering import Renderer, TemplateError
from covey.types import Image, ImageFile
from tests.vision.tiny import FAMILIES, GRIDS, an_image, asking, drawn, tiny_vlm, vlm_folder

SIZES = [(24, 16), (16, 40), (90, 30), (31, 33), (7, 7), (200, 3)]


def processor_of(family: str) -> VisionProcessor:
    return tiny_vlm(family)[1]


@pytest.mark.parametrize("family", GRIDS)
def test_positions_are_those_of_get_rope_index(family: str) -> None:
    model, vision = tiny_vlm(family)
    for seed in range(5):
        draw = random.Random(seed)
        images = [an_image(draw.randint(8, 90), draw.randint(8, 90), seed=n) for n in range(draw.randint(1, 4))]
        parts = [part for image in images for part in ("a" * draw.randint(0, 5) + " ", image)]
        prompt = Renderer(vision.tokenizer, vision=vision).render(asking(*parts, "b"))
        ids = torch.tensor(prompt.ids)[None]
        expected, shift = model.model.get_rope_index(
            ids,
            mm_token_type_ids=(ids == vision.token_id).int(),
            image_grid_thw=vision.stacked(images)["image_grid_thw"],
        )
        assert (expected[:, 0].numpy() == rope_positions(len(prompt.ids), prompt.images)).all()
        assert int(shift[0]) == sum(span.shift for span in prompt.images) < 0


@pytest.mark.parametrize("splitting", [True, False])
def test_tiles_are_marked_as_idefics_does(splitting: bool) -> None:
    """All ids against transformers' processor, for wide, high and small images."""
    _, vision = tiny_vlm("idefics3")
    vision.image_processor.do_image_splitting = splitting
    theirs = Idefics3Processor(vision.image_processor, vision.tokenizer, image_seq_len=vision.tile_tokens)
    renderer = Renderer(vision.tokenizer, vision=vision)
    for width, height in SIZES:
        image = an_image(width, height)
        prompt = renderer.render(asking("a ", image, " b"))
        text = renderer._text(asking("a ", image, " b"), None, reply_next=True)
        expected = theirs(text=[text], images=[[picture(image)]], add_special_tokens=False)
        assert list(prompt.ids) == expected["input_ids"][0], (width, height)


@pytest.mark.parametrize("family", FAMILIES)
def test_as_many_image_tokens_as_features(family: str) -> None:
    model, vision = tiny_vlm(family)
    for width, height in SIZES:
        image = an_image(width, height)
        prompt = Renderer(vision.tokenizer, vision=vision).render(asking(image))
        with torch.no_grad():
            features = model.model.get_image_features(**vision.pixels(image), return_dict=True).pooler_output
        assert prompt.ids.count(vision.token_id) == sum(len(part) for part in features), (width, height)


def test_a_long_strip_is_refused_with_its_place() -> None:
    vision = processor_of("qwen2_vl")
    image = image_of_bytes(drawn(900, 4), "train.jsonl, line 7")
    with pytest.raises(ImageMistake, match=r"train.jsonl, line 7: absolute aspect ratio"):
        Renderer(vision.tokenizer, vision=vision).render(asking(image))


def test_a_placeholder_in_a_text_is_not_an_image() -> None:
    vision = processor_of("qwen2_vl")
    prompt = Renderer(vision.tokenizer, vision=vision).render(asking("<|image_pad|> and ", an_image()))
    assert prompt.ids.count(vision.token_id) == prompt.images[0].length


def test_a_template_that_drops_images_is_refused() -> None:
    vision = processor_of("qwen2_vl")
    vision.tokenizer.chat_template = "{% for m in messages %}{{ m['content'] }}{% endfor %}"
    with pytest.raises(TemplateError, match="does not show all images"):
        Renderer(vision.tokenizer, vision=vision).render(asking("a", an_image()))


def test_a_template_for_parts_only_gets_parts() -> None:
    """As those of SmolVLM."""
    vision = processor_of("smolvlm")
    parts = "{% for p in m['content'] %}{{ '<image>' if p['type'] == 'image' else p['text'] }}{% endfor %}"
    vision.tokenizer.chat_template = "{% for m in messages %}" + parts + ";{% endfor %}"
    renderer = Renderer(vision.tokenizer, vision=vision)
    ids = renderer.prompt([{"role": "system", "content": "be brief"}, *asking("a", an_image())])
    assert vision.tokenizer.decode(ids).startswith("be brief;a<fake_token")


# -- Model folders -----------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    base = tmp_path_factory.mktemp("vlm")
    return {family: vlm_folder(base / family, family) for family in ("qwen2_5_vl", "idefics3")}


def opened(folder: Path, **settings: Any) -> VisionProcessor:
    vision = open_source(ModelConfig(name=str(folder), device="cpu", **settings)).vision
    assert vision is not None
    return vision


def test_size_limits_of_the_settings(folders: dict[str, Path]) -> None:
    image = an_image(96, 64)

    def tokens(family: str, **settings: Any) -> int:
        vision = opened(folders[family], **settings)
        return Renderer(vision.tokenizer, vision=vision).prompt(asking(image)).count(vision.token_id)

    # 8 × 8 pixels per token: 96 × 64 is reduced to at most 1024 pixels (1.5 : 1), then to 512.
    assert tokens("qwen2_5_vl") == 4 * 3 and tokens("qwen2_5_vl", max_pixels=512) == 3 * 2
    assert tokens("qwen2_5_vl", max_pixels=100_000) == 12 * 8
    assert tokens("qwen2_5_vl", max_pixels=200_000, min_pixels=4 * 96 * 64) == 24 * 16
    # Tiles of 16 × 16 pixels, 4 tokens each: 32 × 32 pixels are 2 × 2 tiles and the whole image.
    assert tokens("idefics3") == 4 * (2 * 2 + 1) and tokens("idefics3", max_pixels=16 * 16) == 4


@pytest.mark.parametrize(
    ("family", "settings", "says"),
    [
        ("qwen2_5_vl", {"max_pixels": 60}, "less than one image token"),
        ("idefics3", {"min_pixels": 60}, "model.min_pixels: this model resizes every image"),
    ],
)
def test_limits_that_cannot_hold(folders: dict[str, Path], family: str, settings: dict[str, int], says: str) -> None:
    with pytest.raises(InputError, match=says):
        opened(folders[family], **settings)


def test_limits_that_contradict_each_other() -> None:
    with pytest.raises(InputError, match=r"model.min_pixels=9 is over model.max_pixels=8"):
        ModelConfig(min_pixels=9, max_pixels=8)


def test_a_folder_without_an_image_processor(tmp_path: Path) -> None:
    folder = vlm_folder(tmp_path / "model", "qwen2_vl")
    (folder / "preprocessor_config.json").unlink()
    with pytest.raises(InputError, match=r"preprocessor_config.json is missing"):
        opened(folder)


def test_an_older_model_keeps_its_template_beside_the_tokenizer(tmp_path: Path) -> None:
    folder = vlm_folder(tmp_path / "model", "qwen2_vl")
    template = (folder / "chat_template.jinja").read_text()
    (folder / "chat_template.json").write_text(json.dumps({"chat_template": "unused"}))
    assert opened(folder).tokenizer.chat_template == template  # the newer file counts
    (folder / "chat_template.jinja").unlink()
    assert opened(folder).tokenizer.chat_template == "unused"


@pytest.mark.parametrize("part", ["language", "vision", "both"])
@pytest.mark.parametrize("family", ["qwen2_5_vl", "idefics3"])
def test_adapters_on_the_chosen_part(folders: dict[str, Path], family: str, part: str) -> None:
    pytest.importorskip("peft")
    from covey.config.schema import LoraConfig

    config = ModelConfig(name=str(folders[family]), device="cpu", lora=LoraConfig(rank=2, part=part))
    source = open_source(config)
    model = load_policy(source, config)
    trained = [name for name, weight in model.named_parameters() if weight.requires_grad]
    found = vision_family(source.config)
    assert found is not None and all("lora_" in name for name in trained)
    in_tower = {any(f".{name}." in trained_name for name in found.tower) for trained_name in trained}
    assert in_tower == {"language": {False}, "vision": {True}, "both": {True, False}}[part]


@pytest.mark.parametrize("frozen", [True, False])
def test_the_vision_tower_is_frozen_by_default(folders: dict[str, Path], frozen: bool) -> None:
    config = ModelConfig(name=str(folders["qwen2_5_vl"]), device="cpu", freeze_vision=frozen)
    model = load_policy(open_source(config), config)
    states = {("visual" in name): weight.requires_grad for name, weight in model.named_parameters()}
    assert states == {True: not frozen, False: True}


def test_a_large_cache_of_pixels_forgets_the_oldest(monkeypatch: pytest.MonkeyPatch) -> None:
    from covey.models import vision as module

    vision = processor_of("qwen2_vl")
    one = vision.pixels(an_image(seed=1))
    size = sum(tensor.nbytes for tensor in one.values())
    monkeypatch.setattr(module, "PIXEL_BYTES", 2 * size)
    for seed in (2, 1, 3):  # 1 is used again, so 2 is dropped
        vision.pixels(an_image(seed=seed))
    assert list(vision._pixels) == [an_image(seed=1).digest, an_image(seed=3).digest]
    np.testing.assert_array_equal(vision.pixels(an_image(seed=1))["pixel_values"], one["pixel_values"])


def test_contents_of_files_are_kept_up_to_a_limit_and_not_counted_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from covey.models import vision as module

    vision = processor_of("qwen2_vl")
    files = [ImageFile(str(tmp_path / f"{n}.png")) for n in range(5)]
    for n, file in enumerate(files):
        Path(file.path).write_bytes(drawn(seed=n))
    counted: list[Image] = []
    monkeypatch.setattr(module, "PIXEL_BYTES", sum(Path(file.path).stat().st_size for file in files[2:]))
    monkeypatch.setattr(vision._files, "_size", lambda image: counted.append(image) or len(image.data))
    for file in files * 2:
        assert vision._loaded(file).data == Path(file.path).read_bytes()
    assert list(vision._files) == [file.path for file in files[2:]]
    assert len(counted) <= 2 * 2 * len(files)  # each when it comes and when it goes


@pytest.mark.parametrize(("width", "height"), [(100, 50), (24, 16), (8, 64), (640, 480)])
def test_the_shown_size_is_that_of_the_grid_of_image_tokens(width: int, height: int) -> None:
    """For coordinates in pixels of the image that the model sees: each of its tokens covers 8x8 of them here."""
    _, vision = tiny_vlm("qwen2_5_vl")
    _, grid = vision._tokens_of(an_image(width, height))
    assert grid is not None and vision.shown_size(width, height) == (8 * grid[1], 8 * grid[0])
    _, tiles = tiny_vlm("smolvlm")
    assert tiles.shown_size(width, height) == (width, height)
