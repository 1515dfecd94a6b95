"""docs/tools.md, docs/environments.md and docs/formats.md against the code: examples, tables and limits."""

from __future__ import annotations

import asyncio
import re
from dataclasses import fields
from pathlib import Path

import pytest

from covey.agents.formats.base import MAX_CALLS
from covey.agents.formats.detect import FORMATS, make_format
from covey.agents.resolve import resolve_agent
from covey.agents.tools.calculator import CONSTANTS, FUNCTIONS
from covey.agents.tools.mcp_connection import Server
from covey.agents.tools.toolset import BUILTIN, SYNONYMS
from covey.storage import MAX_DEPTH
from covey.types import Task
from tests.agents.formats.test_react import SCHEMAS
from tests.agents.scripted import Script, scored

DOCS = Path(__file__).parents[2] / "docs"
TOOLS = dict(re.findall(r"### (\w+)\n(.*?)(?=\n##|\Z)", (DOCS / "tools.md").read_text(), re.DOTALL))
ENVIRONMENTS = (DOCS / "environments.md").read_text()
FORMATS_PAGE = (DOCS / "formats.md").read_text()
EXAMPLES = re.findall(r"^(`{4,})(\w+)\n(.*?)\n\1$", FORMATS_PAGE, re.DOTALL | re.MULTILINE)


@pytest.mark.parametrize("name", BUILTIN)
def test_every_tool_is_described_with_its_options(name: str) -> None:
    section = TOOLS[SYNONYMS.get(name, name)]
    assert name in section or name in TOOLS
    kind = BUILTIN[name]().options
    expected = {field.name: str(field.default).replace("None", "null") for field in fields(kind)} if kind else {}
    assert dict(re.findall(r"^\| `(\w+)` \| (\S+) \|", section, re.MULTILINE)) == expected


def test_the_page_names_every_function_of_the_calculator() -> None:
    words = set(re.findall(r"\w+", TOOLS["calculator"]))
    assert words >= {*FUNCTIONS, *CONSTANTS}


def test_the_example_environment_plays(tmp_path: Path) -> None:
    (source,) = re.findall(r"```python\n# guess.py\n(.*?)```", ENVIRONMENTS, re.DOTALL)
    (tmp_path / "guess.py").write_text(source)
    agent = resolve_agent(f"{tmp_path}/guess.py:Guess")
    task = Task("t", ({"role": "user", "content": "Play."},), answer="42")
    assert asyncio.run(scored(agent, task, Script("7", "42"))).rewards == {"given": 1.0}
    assert asyncio.run(scored(agent, task, Script(*"12345"))).rewards == {"given": 0.0}


def test_every_setting_of_a_tool_server_is_in_the_table() -> None:
    _, section = ENVIRONMENTS.split("## Tool servers (MCP)")
    named = re.findall(r"^\| `(\w+)` \|", section, re.MULTILINE)
    assert sorted(named) == sorted(field.name for field in fields(Server) if field.name != "name")


@pytest.mark.parametrize(("name", "text"), [(name, text) for _, name, text in EXAMPLES])
def test_an_example_of_a_format_is_parsed(name: str, text: str) -> None:
    parsed = make_format(name, SCHEMAS).parse(text)
    assert [call.problem for call in parsed.calls] == [None] * len(parsed.calls)
    assert parsed.calls or parsed.answer == "a group of quails"


def test_every_format_is_in_the_table_and_has_an_example() -> None:
    assert re.findall(r"^\| `(\w+)` \| .* \| .* \| .* \|$", FORMATS_PAGE, re.MULTILINE) == list(FORMATS)
    assert {name for _, name, _ in EXAMPLES} == set(FORMATS)


def test_limits_of_formats() -> None:
    assert f"nesting deeper than {MAX_DEPTH} and more than {MAX_CALLS} calls" in FORMATS_PAGE
