"""docs/formats.md against the code: its examples are read, its table and its numbers are true."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from covey.agents.formats import FORMATS, make_format
from covey.agents.formats.base import MAX_CALLS
from covey.storage import MAX_DEPTH
from tests.agents.formats.test_react import SCHEMAS

PAGE = (Path(__file__).parents[3] / "docs" / "formats.md").read_text()
EXAMPLES = re.findall(r"^(`{4,})(\w+)\n(.*?)\n\1$", PAGE, re.DOTALL | re.MULTILINE)


@pytest.mark.parametrize(("name", "text"), [(name, text) for _, name, text in EXAMPLES])
def test_an_example_is_read(name: str, text: str) -> None:
    parsed = make_format(name, SCHEMAS).parse(text)
    assert [call.problem for call in parsed.calls] == [None] * len(parsed.calls)
    assert parsed.calls or parsed.answer == "a group of quails"


def test_every_format_is_in_the_table_and_has_an_example() -> None:
    assert re.findall(r"^\| `(\w+)` \| .* \| .* \| .* \|$", PAGE, re.MULTILINE) == list(FORMATS)
    assert {name for _, name, _ in EXAMPLES} == set(FORMATS)


def test_limits() -> None:
    assert f"nesting deeper than {MAX_DEPTH} and more than {MAX_CALLS} calls" in PAGE
