"""Tools of real MCP servers, over stdio and streamable HTTP; servers that refuse, crash and hang."""

from __future__ import annotations

import asyncio
import os
import shlex
import socket
import subprocess
import sys
import time
from collections.abc import Awaitable, Callable, Iterator
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from covey.agents.tools.mcp import McpTool, find_server, mcp_tools
from covey.agents.tools.mcp_connection import Server, without_secrets
from covey.agents.tools.tool import ToolFailure, ToolMistake
from covey.agents.tools.toolset import resolve_tools
from covey.errors import Absent, InputError
from covey.tool_calls import Call

pytest.importorskip("mcp", reason="needs the extra covey[mcp]")

SCRIPT = Path(__file__).parent / "mcp_server.py"
COMMAND = (sys.executable, str(SCRIPT))
NAMES = ["add", "fail", "crash", "hang", "tick", "odd_name_x"]


@cache
def tools(seconds: float = 20.0, **options: Any) -> dict[str, Any]:
    found = mcp_tools("mcp:test", {"test": {"command": shlex.join(COMMAND), **options}}, seconds)
    return {tool.name: tool for tool in found}


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    process = subprocess.Popen([*COMMAND, str(port)], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        for _ in range(200):
            with socket.socket() as client:
                if client.connect_ex(("127.0.0.1", port)) == 0:
                    break
            time.sleep(0.1)
        yield f"http://127.0.0.1:{port}/mcp"
    finally:
        process.kill()
        process.wait()


def alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return "Z" not in Path(f"/proc/{pid}/stat").read_text().split()[2]


def run(play: Callable[[dict[str, Any]], Awaitable[Any]], found: dict[str, Any]) -> Any:
    return asyncio.run(play(found))  # type: ignore[arg-type]


def test_tools_are_offered_as_the_server_describes_them() -> None:
    found = tools()
    assert list(found) == NAMES
    assert isinstance(found["add"], McpTool) and not found["add"].stateful
    about = found["add"].schema()["function"]
    assert about["name"] == "add" and about["description"] == "Add two numbers."
    assert about["parameters"]["required"] == ["a", "b"]
    assert about["parameters"]["properties"]["a"] == {"title": "A", "type": "integer"}
    assert found["add"].usage() == "expected: add(a: integer, b: integer)"


def test_calls_over_stdio() -> None:
    async def play(found: dict[str, Any]) -> int:
        answers = await asyncio.gather(*(found["add"].function(a=n, b=1) for n in range(5)))
        assert answers == ["1", "2", "3", "4", "5"]
        assert await found["odd_name_x"].function() == "a\nb"
        (pid, one), (same, two) = [(await found["tick"].function()).split() for _ in range(2)]
        assert pid == same and (one, two) == ("1", "2")  # one process for the run
        assert alive(int(pid))
        return int(pid)

    pid = run(play, tools())
    assert not alive(pid)  # it ends with the run


def test_calls_over_http(url: str) -> None:
    async def play(found: dict[str, Any]) -> None:
        answers = await asyncio.gather(*(found["add"].function(a=n, b=1) for n in range(5)))
        assert answers == ["1", "2", "3", "4", "5"]
        with pytest.raises(ToolMistake, match=r"(?i)error.*no such thing"):
            await found["fail"].function(text="no such thing")

    found = {tool.name: tool for tool in mcp_tools(f"mcp:{url}", {}, 20.0)}
    assert list(found) == NAMES
    run(play, found)
    run(play, found)  # another event loop: it connects anew


def test_mistakes_of_the_model_are_shown_to_it() -> None:
    async def play(found: dict[str, Any]) -> None:
        with pytest.raises(ToolMistake) as raised:
            await found["fail"].function(text="the file is not there")
        assert raised.value.kind == "raised" and "the file is not there" in raised.value.text
        assert await found["add"].function(a=1, b=1) == "2"  # nothing was broken by it

    found = tools()
    run(play, found)
    with pytest.raises(ToolMistake) as mistake:
        found["add"].check({"a": "one", "c": 1})
    assert mistake.value.kind == "bad_arguments"
    assert "a: 'one' is not of type 'integer'" in mistake.value.text
    assert "'b' is a required property" in mistake.value.text
    assert mistake.value.text.endswith("expected: add(a: integer, b: integer)")
    assert found["add"].check({"a": 1, "b": 2}) == {"a": 1, "b": 2}


def test_a_server_that_crashes_fails_the_call_and_is_restarted() -> None:
    async def play(found: dict[str, Any]) -> None:
        first = await found["tick"].function()
        with pytest.raises(ToolFailure, match=r"(?s)tool server test .*: crash: .*; it wrote: .*going down") as raised:
            await found["crash"].function()
        assert raised.value.cause == "mcp"
        second = await found["tick"].function()
        assert second.split()[0] != first.split()[0] and second.split()[1] == "1"

    run(play, tools())


def test_a_server_that_hangs_is_abandoned_and_restarted() -> None:
    async def play(found: dict[str, Any]) -> list[int]:
        pids = [int((await found["tick"].function()).split()[0])]
        with pytest.raises(ToolFailure, match=r"hang took longer than 0\.5 s") as raised:
            await found["hang"].function()
        assert raised.value.cause == "mcp"
        return [*pids, int((await found["tick"].function()).split()[0])]

    first, second = run(play, tools(0.5))
    assert first != second and not alive(first) and not alive(second)


def test_a_server_that_stops() -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    process = subprocess.Popen([*COMMAND, str(port)], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    place = f"mcp:http://127.0.0.1:{port}/mcp"
    try:
        deadline = time.monotonic() + 20
        while True:
            try:
                found = {tool.name: tool for tool in mcp_tools(place, {}, 5.0)}
                break
            except Absent:
                assert time.monotonic() < deadline
                time.sleep(0.2)

        async def play(found: dict[str, Any]) -> None:
            assert await found["add"].function(a=1, b=2) == "3"
            process.kill()
            process.wait()
            for _ in range(2):
                with pytest.raises(ToolFailure, match=f"127.0.0.1:{port}"):
                    await found["add"].function(a=1, b=2)

        run(play, found)
    finally:
        process.kill()
        process.wait()


def test_a_connection_for_each_episode() -> None:
    async def episode(found: dict[str, Any]) -> tuple[str, str]:
        state: dict[str, Any] = {}
        answers = [await found["tick"].function(state=state) for _ in range(2)]
        for kept in state.values():
            await kept.aclose()
        pid = answers[0].split()[0]
        assert not alive(int(pid))
        return pid, answers[1].split()[1]

    async def play(found: dict[str, Any]) -> list[tuple[str, str]]:
        return await asyncio.gather(episode(found), episode(found))

    found = tools(per_episode=True)
    assert found["tick"].stateful
    (one, first), (two, second) = run(play, found)
    assert one != two and first == second == "2"


def test_the_model_cannot_set_state() -> None:
    tool = McpTool("f", "", print, (), stateful=True, input_schema={"type": "object"})  # it allows any name
    with pytest.raises(ToolMistake, match="error: f: state: there is no such argument") as mistake:
        tool.check({"state": 1})
    assert mistake.value.kind == "bad_arguments"
    assert replace(tool, stateful=False).check({"state": 1}) == {"state": 1}


def test_messages_contain_no_secrets() -> None:
    secret = "https://me:hush@host.test:81/a/b?key=hush#hush"
    for server in (Server("x", url=secret), find_server(f"mcp:{secret}", {})):
        assert server.url == secret and server.place == "https://host.test:81/a/b" and "hush" not in server.name
    for server in (Server("x", command=("run", "--key", "hush")), find_server("mcp:stdio:run --key hush", {})):
        assert server.place == "run" and "hush" not in server.name
    assert (
        without_secrets(f"404 for url '{secret}', see http://h")
        == "404 for url 'https://host.test:81/a/b', see http://h"
    )
    with pytest.raises(Absent, match=r"tool server http://127\.0\.0\.1:1/mcp: ") as absent:
        mcp_tools("mcp:http://me:hush@127.0.0.1:1/mcp?key=hush", {}, 1.0)
    assert "hush" not in str(absent.value)
    with pytest.raises(Absent, match=r"tool server nowhere-to-be-found: ") as absent:
        mcp_tools("mcp:stdio:nowhere-to-be-found --key hush", {}, 1.0)
    assert "hush" not in str(absent.value)


def test_only_and_prefix(url: str) -> None:
    def named(*only: str) -> list[str]:
        return [tool.name for tool in mcp_tools("mcp:x", {"x": {"url": url, "only": only, "prefix": "x_"}}, 1.0)]

    assert named("add", "odd.name/x") == ["x_add", "x_odd_name_x"]
    with pytest.raises(InputError, match="unknown tool of x  addd\n  did you mean   add"):
        named("addd")


def test_mcp_tools_beside_other_tools(url: str) -> None:
    server = {"url": url, "only": ["add", "fail"], "max_output_tokens": 4}
    found = resolve_tools(["calculator", "mcp:test"], {"test": server}, seconds=20.0)
    assert found.names == ("calculator", "add", "fail") and not found.functions  # nothing that needs a worker
    calls = [
        Call("add", {"a": 20, "b": 22}),
        Call("calculator", {"expression": "6*7"}),
        Call("add", {"a": "x"}),
        Call("fail", {"text": "no"}),
    ]

    async def play() -> list[Any]:
        async with found.open() as session:
            return await session.call(calls)

    results = asyncio.run(play())
    assert [result.text for result in results[:2]] == ["42", "42"]
    assert [result.use.error for result in results] == [None, None, "bad_arguments", "raised"]
    assert results[3].text.lower().startswith("error") and "[cut: 16 of " in results[3].text
    with pytest.raises(InputError, match=r"unknown tool in agent.tool_options  tset\n  did you mean   test"):
        resolve_tools(["mcp:test"], {"test": server, "tset": {}})
    with pytest.raises(InputError, match="two tools are called add"):
        resolve_tools(["mcp:test", "mcp:again"], {"test": server, "again": server})


def test_a_missing_server() -> None:
    with pytest.raises(Absent, match="tool server nowhere-to-be-found"):
        mcp_tools("mcp:stdio:nowhere-to-be-found", {}, 1.0)
    with pytest.raises(Absent, match="start it first"):
        mcp_tools("mcp:http://127.0.0.1:1/mcp", {}, 1.0)
    with pytest.raises(Absent, match=r"it wrote: .*no server today"):
        code = "import sys; sys.exit('no server today')"
        mcp_tools("mcp:x", {"x": {"command": [sys.executable, "-c", code]}}, 1.0)
    with pytest.raises(Absent, match="NO_SUCH_TOKEN is not set"):
        mcp_tools("mcp:x", {"x": {"url": "http://127.0.0.1:1", "headers_from_env": {"A": "NO_SUCH_TOKEN"}}}, 1.0)


def test_how_servers_are_named() -> None:
    assert find_server("mcp:https://h/p", {}) == Server("https://h/p", url="https://h/p")
    assert find_server("mcp:stdio:python 'my server.py' -x", {}).command == ("python", "my server.py", "-x")
    named = find_server("mcp:files", {"files": {"command": ["a", "b c"], "per_episode": True, "seconds": 3}})
    assert (named.name, named.command, named.per_episode, named.seconds) == ("files", ("a", "b c"), True, 3)
    with pytest.raises(InputError, match="where is that server"):
        find_server("mcp:files", {})
    with pytest.raises(InputError, match="unknown setting of mcp:files  comand\n  did you mean   command"):
        find_server("mcp:files", {"files": {"comand": "x"}})
    with pytest.raises(InputError, match="and not both"):
        find_server("mcp:files", {"files": {"command": "x", "url": "https://h"}})
