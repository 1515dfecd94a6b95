"""An episode on the screen, token by token: what the model sampled stands out from what it was given."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import groupby

from rich.console import Console
from rich.text import Text

from covey.loop.samples import episode_rows
from covey.types import Episode, Sample

SAMPLED, GIVEN = "bold green", "dim"
Decode = Callable[[list[int]], str]


def show_tokens(episode: Episode, decode: Decode, console: Console) -> None:
    """The rows that are trained on. Sampled text is coloured, or between ⟦ ⟧ where there are no colours."""
    rows = episode_rows(episode, 0)
    for number, row in enumerate(rows, 1):
        if len(rows) > 1:
            console.print(f"  row {number} of {len(rows)}: the conversation was rewritten", style=GIVEN)
        console.print(_row(row, decode, marks=not console.is_terminal), soft_wrap=True)
    sampled = sum(sum(row.mask) for row in rows)
    console.print(f"  {sampled} of {sum(len(row.response_ids) for row in rows)} response tokens sampled", style=GIVEN)


def _row(row: Sample, decode: Decode, *, marks: bool) -> Text:
    text = Text(decode(list(row.prompt_ids)), style=GIVEN)
    for sampled, ids in _runs(row):
        piece = decode(ids)
        text.append(f"⟦{piece}⟧" if sampled and marks else piece, style=SAMPLED if sampled else GIVEN)
    return text


def _runs(row: Sample) -> Iterator[tuple[bool, list[int]]]:
    """Neighbouring tokens of one kind."""
    for sampled, pairs in groupby(zip(row.mask, row.response_ids, strict=True), key=lambda pair: pair[0]):
        yield sampled, [token for _, token in pairs]
