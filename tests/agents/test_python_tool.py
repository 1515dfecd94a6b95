"""python_executor in a real sandbox: one interpreter for an episode."""

from __future__ import annotations

import asyncio

import pytest

from covey.agents.tools.session import ToolResult
from covey.agents.tools.toolset import ToolSet, resolve_tools
from covey.config.schema import SandboxConfig
from covey.errors import InputError
from covey.sandbox import Sandbox
from covey.tool_calls import Call


@pytest.fixture(scope="module")
def tools() -> ToolSet:
    try:
        return resolve_tools(["python_executor"], sandbox=Sandbox.of(SandboxConfig(seconds=1)))
    except InputError as error:
        pytest.skip(f"no sandbox can be had here: {error}")


def run(tools: ToolSet, *episodes: list[str]) -> list[list[ToolResult]]:
    async def episode(cells: list[str]) -> list[ToolResult]:
        async with tools.open() as session:
            return [(await session.call([Call("python_executor", {"code": code})]))[0] for code in cells]

    async def go() -> list[list[ToolResult]]:
        return await asyncio.gather(*map(episode, episodes))

    return asyncio.run(go())


def test_variables_stay_within_an_episode(tools: ToolSet) -> None:
    one, two = run(tools, ["x = 3", "print(x)", "x * 2"], ["x"])
    assert [result.text for result in one] == ["(no output)", "3", "6"]
    assert two[0].use.error == "raised" and "NameError: name 'x' is not defined" in two[0].text


def test_errors_of_the_code_are_shown_to_the_model(tools: ToolSet) -> None:
    ((loop, after, exit_, error),) = run(
        tools, ["while True: pass", "print('again')", "import sys; sys.exit(3)", "print('a' * 5000); 1 / 0"]
    )
    assert (loop.use.error, loop.text) == ("deadline", "error: the code ran for too long and was stopped")
    assert after.use.error is None and "again" in after.text and "started afresh" in after.text
    assert (exit_.use.error, exit_.text) == ("raised", "error: the code ended with exit code 3")
    assert error.use.error == "raised" and error.text.endswith("ZeroDivisionError: division by zero")
