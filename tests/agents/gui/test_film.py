"""Film strips of episodes, with screenshots that are drawn here."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from PIL import Image

from covey.agents.gui.film import CAPTION, FRAME, GAP, RED, film_strip, write_film_strip
from covey.images import image_of
from covey.types import Episode, Task


def shown(colour: str) -> dict[str, Any]:
    return {"role": "user", "content": [{"type": "image", "image": image_of(Image.new("RGB", (640, 320), colour))}]}


def acted(at: Any = None, to: Any = None) -> dict[str, Any]:
    action = {"kind": "click", "at": at, "to": to, "size": (640, 320), "label": "click “it”"}
    return {"role": "assistant", "content": "x", "action": action}


def test_frames_stand_side_by_side_with_the_click_that_followed() -> None:
    wrong = {"role": "assistant", "content": "no action"}
    messages = (shown("blue"), acted((320, 160)), shown("green"), wrong, shown("black"))
    strip = film_strip(Episode(Task("1", ()), (), messages))
    assert strip.size == (3 * (FRAME + GAP) + GAP, 160 + CAPTION + 2 * GAP)
    x, y = GAP + 160, GAP + 80  # the middle of the first frame: half of (320, 160)
    assert strip.getpixel((x, y)) == (0, 0, 255) and strip.getpixel((x + 7, y)) == RED
    second = GAP + FRAME + GAP
    box = strip.crop((second, GAP, second + FRAME, GAP + 160))
    assert box.getcolors() == [(FRAME * 160, (0, 128, 0))]


def test_a_drag_is_a_line_and_an_episode_without_screenshots_has_no_strip(tmp_path: Path) -> None:
    strip = film_strip(Episode(Task("1", ()), (), (shown("white"), acted((64, 64), (576, 64)))))
    assert strip.getpixel((GAP + 160, GAP + 32)) == RED  # between the two
    empty = Episode(Task("1", ()), (), ({"role": "user", "content": "?"},))
    assert film_strip(empty) is None and not write_film_strip(empty, tmp_path / "x.png")
    assert write_film_strip(Episode(Task("1", ()), (), (shown("white"),)), tmp_path / "a" / "x.png")
    assert Image.open(tmp_path / "a" / "x.png").size[0] == FRAME + 2 * GAP
