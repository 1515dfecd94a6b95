"""docs/environments.md against the code."""

from __future__ import annotations

import asyncio
import re
from dataclasses import fields
from pathlib import Path

from covey.agents import resolve_agent
from covey.agents.tools.mcp_connection import Server
from covey.types import Task
from tests.agents.scripted import Script, scored

PAGE = (Path(__file__).parents[2] / "docs/environments.md").read_text()


def test_the_example_plays(tmp_path: Path) -> None:
    (source,) = re.findall(r"```python\n# guess.py\n(.*?)```", PAGE, re.DOTALL)
    (tmp_path / "guess.py").write_text(source)
    agent = resolve_agent(f"{tmp_path}/guess.py:Guess")
    task = Task("t", ({"role": "user", "content": "Play."},), answer="42")
    assert asyncio.run(scored(agent, task, Script("7", "42"))).rewards == {"given": 1.0}
    assert asyncio.run(scored(agent, task, Script(*"12345"))).rewards == {"given": 0.0}


def test_every_setting_of_a_server_is_in_the_table() -> None:
    named = re.findall(r"^\| `(\w+)` \|", PAGE, re.MULTILINE)
    assert sorted(named) == sorted(field.name for field in fields(Server) if field.name != "name")
