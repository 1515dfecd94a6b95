"""docs/tools.md against the code."""

from __future__ import annotations

import re
from dataclasses import fields
from pathlib import Path

import pytest

from covey.agents.tools.calculator import CONSTANTS, FUNCTIONS
from covey.agents.tools.toolset import BUILTIN, SYNONYMS

PAGE = (Path(__file__).parents[2] / "docs/tools.md").read_text()
SECTIONS = dict(re.findall(r"### (\w+)\n(.*?)(?=\n##|\Z)", PAGE, re.DOTALL))


@pytest.mark.parametrize("name", BUILTIN)
def test_every_tool_is_described_with_its_options(name: str) -> None:
    section = SECTIONS[SYNONYMS.get(name, name)]
    assert name in section or name in SECTIONS
    kind = BUILTIN[name].options
    expected = {field.name: str(field.default).replace("None", "null") for field in fields(kind)} if kind else {}
    assert dict(re.findall(r"^\| `(\w+)` \| (\S+) \|", section, re.MULTILINE)) == expected


def test_the_page_names_every_function_of_the_calculator() -> None:
    words = set(re.findall(r"\w+", SECTIONS["calculator"]))
    assert words >= {*FUNCTIONS, *CONSTANTS}
