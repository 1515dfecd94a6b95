"""An episode as one picture: its screenshots side by side, each with the action that followed it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from covey.images import images_of, load, picture
from covey.types import Episode

FRAME = 320  # width of a frame in pixels
COLUMNS = 5
GAP, CAPTION = 8, 22
RED, WHITE, GREY = (224, 36, 94), (255, 255, 255), (60, 60, 60)


def frames(episode: Episode) -> list[tuple[Any, dict[str, Any] | None]]:
    """The screenshots, each with the action that followed; None if there was none."""
    found = []
    for message, after in zip(episode.messages, [*episode.messages[1:], None], strict=True):
        for image in images_of([message])[-1:]:
            found.append((picture(load(image)), None if after is None else after.get("action")))
    return found


def film_strip(episode: Episode) -> Any:
    """A PIL image; None for an episode without screenshots."""
    from PIL import Image, ImageDraw

    shown = frames(episode)
    if not shown:
        return None
    small = [(shot.resize((FRAME, round(shot.height * FRAME / shot.width))), shot, action) for shot, action in shown]
    columns = min(COLUMNS, len(small))
    rows = -(-len(small) // columns)
    height = max(frame.height for frame, _, _ in small) + CAPTION
    strip = Image.new("RGB", (columns * (FRAME + GAP) + GAP, rows * (height + GAP) + GAP), WHITE)
    draw = ImageDraw.Draw(strip)
    for number, (frame, shot, action) in enumerate(small):
        left = GAP + number % columns * (FRAME + GAP)
        top = GAP + number // columns * (height + GAP)
        strip.paste(frame, (left, top))
        draw.rectangle((left - 1, top - 1, left + frame.width, top + frame.height), outline=GREY)
        label = f"{number + 1}. {action['label'] if action else ''}"
        latin = label.encode("latin-1", "replace").decode("latin-1")  # what Pillow's built-in font has
        draw.text((left, top + frame.height + 4), latin[:52], fill=GREY)
        scale = FRAME / shot.width
        points = [
            (left + at[0] * scale, top + at[1] * scale)
            for at in ((action["at"], action["to"]) if action else ())
            if at is not None
        ]
        if len(points) == 2:
            draw.line(points, fill=RED, width=3)
        for x, y in points:
            draw.ellipse((x - 9, y - 9, x + 9, y + 9), outline=WHITE, width=5)
            draw.ellipse((x - 8, y - 8, x + 8, y + 8), outline=RED, width=3)
    return strip


def write_film_strip(episode: Episode, path: Path) -> bool:
    """Write it as a PNG. False for an episode without screenshots."""
    strip = film_strip(episode)
    if strip is None:
        return False
    path.parent.mkdir(parents=True, exist_ok=True)
    strip.save(path, "PNG")
    return True
