"""Resolving tools, and running the calls of a turn."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

import covey
from covey.agents.tools.python import without_fence
from covey.agents.tools.session import ToolResult
from covey.agents.tools.tool import ToolFailure, ToolMistake
from covey.agents.tools.toolset import ToolSet, resolve_tools
from covey.errors import InputError
from covey.tool_calls import Call
from tests.agents.inline_pool import InlinePool


@covey.tool
def add(a: int, b: int = 1) -> int:
    """Add two numbers."""
    return a + b


@covey.tool(timeout=0.05)
async def sleep(seconds: float) -> str:
    """Sleep."""
    await asyncio.sleep(seconds)
    return f"slept {seconds}"


@covey.tool
def fail(how: str) -> Any:
    """Fail in some way."""
    match how:
        case "raise":
            raise ValueError("no such thing")
        case "bare":
            raise KeyError
        case "unprintable":
            raise Unprintable
        case "exit":
            raise SystemExit(3)
        case "mistake":
            raise ToolMistake("bad_arguments", "error: how?")
        case "down":
            raise ToolFailure("weather", "the weather server is down")
        case "object":
            return object()
        case "tuple":
            return ("a",)
        case "objects":
            return [object()]
        case "circle":
            circle: list[Any] = []
            circle.append(circle)
            return circle
        case _:
            return {"none": None, "true": True, "half": 0.5, "list": [1, "é"], "dict": {"a": None}}[how]


class Unprintable(Exception):
    def __str__(self) -> str:
        raise RuntimeError


@covey.tool
def note(text: str, state: dict[str, Any]) -> str:
    """Remember a text; returns all of them."""
    return " ".join(state.setdefault("notes", Notes()).add(text))


@covey.tool
async def slow_note(text: str, state: dict[str, Any]) -> str:
    """Remember a text after a while."""
    await asyncio.sleep(0.02)
    return " ".join(state.setdefault("notes", Notes()).add(text))


@dataclass
class Notes:
    texts: list[str] = field(default_factory=list)
    closed: bool = False

    def add(self, text: str) -> list[str]:
        self.texts.append(text)
        return self.texts

    async def aclose(self) -> None:
        self.closed = True


def run(tools: ToolSet, *turns: Sequence[Call], **options: Any) -> list[list[ToolResult]]:
    async def go() -> list[list[ToolResult]]:
        async with tools.open(InlinePool(tools.functions), **options) as session:
            return [await session.call(turn) for turn in turns]

    return asyncio.run(go())


def one(tools: ToolSet, name: str, **arguments: Any) -> ToolResult:
    return run(tools, [Call(name, arguments)])[0][0]


# -- Resolving -------------------------------------------------------------------------------------------------------


def test_by_name_by_file_and_as_functions(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "mine.py").write_text(
        "import covey\n@covey.tool(name='lookup')\ndef find(key: str): return key\n"
        "def bare(key):\n    '''Plain.'''\n    return key\nnumber = 3\n"
    )
    monkeypatch.chdir(tmp_path)
    tools = resolve_tools(["calculator", "mine.py:find", "mine:bare", add, lambda_free])
    assert tools.names == ("calculator", "lookup", "bare", "add", "lambda_free")
    assert [schema["function"]["name"] for schema in tools.schemas()] == list(tools.names)
    assert list(tools.functions) == ["tool:lookup", "tool:bare", "tool:add", "tool:lambda_free"]  # ours runs inline
    assert one(tools, "bare", key="x").text == "x"


def lambda_free(x: str) -> str:
    return x


@pytest.mark.parametrize(
    ("names", "options", "message"),
    [
        (["calculater"], {}, "unknown tool  calculater\n  did you mean   calculator"),
        (["nothing.py"], {}, r"fix: nothing\.py:FUNCTION"),
        (["nothing.py:f"], {}, r"tool nothing\.py:f: no such file"),
        (["math:pi"], {}, "tool math:pi is not a function"),
        (["math:sqrrt"], {}, "did you mean   math:sqrt"),
        (["calculator", "calculator"], {}, "two tools are called calculator"),
        ([add, add], {}, "two tools are called add"),
        (["answer"], {"anser": {}}, "unknown tool in agent.tool_options  anser\n  did you mean   answer"),
        (["answer"], {"answer": 3}, "agent.tool_options.answer must be a mapping"),
        (["answer"], {"answer": {"timeout": 3}}, "unknown option in agent.tool_options.answer  timeout"),
        (["search"], {"search": {"corpsu": "x"}}, "did you mean   corpus"),
        (["search"], {"search": {"corpus": "x", "top_k": 0}}, "top_k must lie in 1..20"),
        (["search"], {"search": {"corpus": "x", "top_k": "many"}}, "agent.tool_options.search.top_k must be an int"),
        ([add], {"add": {"timeout": 0}}, "tool add: timeout must be more than 0"),
        ([add], {"add": {"a": 3}}, "unknown option in agent.tool_options.add  a\n  known: max_output_tokens, timeout"),
        (["python_executor"], {}, "needs a sandbox"),
    ],
)
def test_mistakes_stop_at_the_start(names: list[Any], options: dict[str, Any], message: str) -> None:
    with pytest.raises(InputError, match=message):
        resolve_tools(names, options)


def test_options_of_any_tool() -> None:
    (made,) = resolve_tools([add], {"add": {"timeout": 3, "max_output_tokens": 7}}).tools
    assert (made.timeout, made.max_output_tokens) == (3.0, 7)
    (made,) = resolve_tools(["calculator"], {"calculator": {"max_output_tokens": 5}}).tools
    assert (made.timeout, made.max_output_tokens, made.inline) == (None, 5, True)


def test_one_tool_under_two_names() -> None:
    with pytest.raises(InputError, match=r"two tools are called code_interpreter \(the same as python_executor\)"):
        resolve_tools(["python_executor", "code_interpreter"], sandbox=FakeSandbox())


# -- Calling ---------------------------------------------------------------------------------------------------------


def test_results_keep_the_order_of_the_calls() -> None:
    """Each call waits for the one after it, so they run together and end in the opposite order."""
    ended: list[int] = []
    gates = [asyncio.Event() for _ in range(5)]

    async def wait(n: int) -> str:
        if n < 4:
            await gates[n + 1].wait()
        ended.append(n)
        gates[n].set()
        return f"done {n}"

    (results,) = run(resolve_tools([wait]), [Call("wait", {"n": n}, id=f"c{n}") for n in range(5)])
    assert ended == [4, 3, 2, 1, 0]
    assert [result.text for result in results] == [f"done {n}" for n in range(5)]
    assert [result.call.id for result in results] == [f"c{n}" for n in range(5)]
    assert all(result.use.tool == "wait" and result.use.error is None for result in results)


def test_mistakes_of_the_model_are_texts() -> None:
    tools = resolve_tools([add, fail, "calculator"])
    calls = [
        Call("add", {"a": "2"}),
        Call("ad", {}),
        Call("add", {"a": "two"}),
        Call("", problem="no JSON after <tool_call>"),
        Call("fail", {"how": "raise"}),
        Call("fail", {"how": "bare"}),
        Call("fail", {"how": "unprintable"}),
        Call("fail", {"how": "mistake"}),
        Call("calculator", {"expression": "1/0"}),
    ]
    (results,) = run(tools, calls)
    assert [(result.use.error, result.text) for result in results] == [
        (None, "3"),
        ("unknown_tool", "error: there is no tool 'ad' (did you mean add?); the tools are: add, fail, calculator"),
        (
            "bad_arguments",
            "error: add: argument 'a' must be an integer, got \"two\"\nexpected: add(a: integer, b: integer = 1)",
        ),
        ("malformed", "error: no JSON after <tool_call>"),
        ("raised", "error: ValueError: no such thing"),
        ("raised", "error: KeyError"),
        ("raised", "error: Unprintable: (its message cannot be shown)"),
        ("bad_arguments", "error: how?"),
        ("raised", "error: division by zero"),
    ]


@pytest.mark.parametrize(
    ("call", "cause", "message"),
    [
        (Call("sleep", {"seconds": 60}), "tool_timeout", "tool sleep took longer than 0.05 seconds"),
        (Call("fail", {"how": "exit"}), "tool_crash", "exit code 3"),
        (Call("fail", {"how": "down"}), "weather", "the weather server is down"),
        (Call("fail", {"how": "object"}), "tool_result", "returned object; it may return a string"),
        (Call("fail", {"how": "tuple"}), "tool_result", "returned tuple"),
        (Call("fail", {"how": "objects"}), "tool_result", "returned a list that is not JSON"),
        (Call("fail", {"how": "circle"}), "tool_result", "returned a list that is not JSON"),
    ],
)
def test_faults_of_the_infrastructure_are_failures(call: Call, cause: str, message: str) -> None:
    with pytest.raises(ToolFailure, match=message) as caught:
        run(resolve_tools([add, sleep, fail]), [Call("add", {"a": 1}), call])
    assert caught.value.failure.cause == cause and message in caught.value.failure.message


@pytest.mark.parametrize(
    ("how", "text"),
    [("none", "(no output)"), ("true", "true"), ("half", "0.5"), ("list", '[1, "é"]'), ("dict", '{"a": null}')],
)
def test_values_as_text(how: str, text: str) -> None:
    assert one(resolve_tools([fail]), "fail", how=how).text == text


def test_limits_of_a_tool_override_those_of_the_run() -> None:
    quick = resolve_tools([sleep], {"sleep": {"timeout": 5}})
    assert one(quick, "sleep", seconds=0.1).text == "slept 0.1"
    with pytest.raises(ToolFailure, match=r"longer than 0\.01 seconds"):
        run(resolve_tools([covey.tool(sleep.function)]), [Call("sleep", {"seconds": 9})], seconds=0.01)


def test_an_episode_ends_with_the_argument_of_answer() -> None:
    tools = resolve_tools(["answer", add])
    (results,) = run(tools, [Call("add", {"a": 1}), Call("answer", {"answer": 42})])
    assert [(result.ended, result.answer) for result in results] == [(False, None), (True, "42")]
    wrong = one(tools, "answer", text="42")
    assert not wrong.ended and wrong.answer is None and wrong.use.error == "bad_arguments"


def test_a_users_tool_can_end_the_episode() -> None:
    @covey.tool(ends=True)
    def submit(solution: str) -> str:
        """Hand it in."""
        if not solution:
            raise ValueError("empty")
        return "thanks"

    tools = resolve_tools([submit])
    result = one(tools, "submit", solution="x" * 5000)
    assert (result.text, result.ended, result.answer) == ("thanks", True, "x" * 5000)
    assert not one(tools, "submit", solution="").ended  # it may try again


# -- Output limits ---------------------------------------------------------------------------------------------------


@covey.tool
def repeat(text: str, times: int, fails: bool = False) -> str:
    """Repeat a text."""
    if fails:
        raise ValueError(text * times)
    return text * times


def words(text: str, limit: int) -> str:
    """A tokenizer whose tokens are words."""
    kept = text.split(" ")[:limit]
    return " ".join(kept)


def test_output_is_cut_with_a_mark() -> None:
    tools = resolve_tools([repeat])
    calls = [
        Call("repeat", {"text": "a b c", "times": 1}),
        Call("repeat", {"text": "a b c d", "times": 1}),
        Call("repeat", {"text": "a b c d", "times": 1, "fails": True}),
        Call("repeat", {"text": "x", "times": 10_000_000}),
    ]
    (results,) = run(tools, calls, cut=words, max_tokens=3)
    assert [result.text for result in results] == [
        "a b c",
        "a b c\n[cut: 5 of 7 characters]",
        "error: ValueError: a\n[cut: 20 of 26 characters]",
        "x" * 96 + "\n[cut: 96 of 10000000 characters]",
    ]


def test_the_tokenizer_never_sees_a_gigabyte() -> None:
    seen = []

    def cut(text: str, limit: int) -> str:
        seen.append(len(text))
        return text[:limit]

    run(resolve_tools([repeat]), [Call("repeat", {"text": "x", "times": 10_000_000})], cut=cut, max_tokens=100)
    run(resolve_tools([repeat]), [Call("x", problem="x" * 10_000_000)], cut=cut, max_tokens=100)
    assert seen == [3200, 3200]


def test_lone_surrogates_do_not_reach_the_tokenizer() -> None:
    assert one(resolve_tools([repeat]), "repeat", text="a\ud800b", times=1).text == "a?b"


# -- State -----------------------------------------------------------------------------------------------------------


def test_state_belongs_to_one_episode_and_is_shared_by_its_tools() -> None:
    tools = resolve_tools([note, slow_note])

    async def go() -> tuple[list[str], InlinePool]:
        pool = InlinePool(tools.functions)
        async with tools.open(pool) as first, tools.open(pool) as second:
            texts = [result.text for result in await first.call([Call("slow_note", {"text": "a"}), note_("b")])]
            texts += [result.text for result in await second.call([note_("c")])]
            texts += [result.text for result in await first.call([note_("d")])]
            assert not pool.sessions[0].closed
        return texts, pool

    texts, pool = asyncio.run(go())
    assert texts == ["a", "a b", "c", "a b d"]  # one after another, in the order of the calls
    assert [session.closed and session.state["notes"].closed for session in pool.sessions] == [True, True]


def note_(text: str) -> Call:
    return Call("note", {"text": text})


def test_without_state_there_is_no_session() -> None:
    tools = resolve_tools([add])

    async def go() -> InlinePool:
        pool = InlinePool(tools.functions)
        async with tools.open(pool) as session:
            await session.call([Call("add", {"a": 1})])
        return pool

    assert asyncio.run(go()).sessions == []


def test_a_cancelled_episode_releases_everything() -> None:
    tools = resolve_tools([note, covey.tool(timeout=60)(sleep.function)])

    async def episode(pool: InlinePool, busy: asyncio.Event) -> None:
        async with tools.open(pool) as session:
            await session.call([note_("a")])
            busy.set()
            await session.call([Call("sleep", {"seconds": 50}), note_("b")])

    async def go() -> InlinePool:
        pool, busy = InlinePool(tools.functions), asyncio.Event()
        running = asyncio.ensure_future(episode(pool, busy))
        await busy.wait()
        running.cancel()
        with pytest.raises(asyncio.CancelledError):
            await running
        return pool

    (session,) = asyncio.run(go()).sessions
    assert session.closed and session.state["notes"].closed


# -- python_executor -------------------------------------------------------------------------------------------------


@dataclass
class FakeOutcome:
    stdout: str = ""
    stderr: str = ""
    exit_code: int | None = 0
    killed: str | None = None


@dataclass
class FakeInterpreter:
    cells: list[tuple[str, float | None]] = field(default_factory=list)
    closed: bool = False

    async def execute(self, code: str, seconds: float | None = None) -> FakeOutcome:
        self.cells.append((code, seconds))
        if code == "lost":
            raise OSError("the sandbox is gone")
        return OUTCOMES.get(code, FakeOutcome(f"ran {len(self.cells)}\n"))

    async def close(self) -> None:
        self.closed = True


OUTCOMES = {
    "silent": FakeOutcome(),
    "warns": FakeOutcome("out\n", "warning\n"),
    "raises": FakeOutcome("x" * 5000, "Traceback …\nValueError: no\n", 1),
    "exits": FakeOutcome("", "", 3),
    "loops": FakeOutcome("so far\n", "", None, "deadline"),
    "eats": FakeOutcome("", "", None, "memory"),
}


@dataclass
class FakeSandbox:
    sessions: list[FakeInterpreter] = field(default_factory=list)

    async def session(self) -> FakeInterpreter:
        self.sessions.append(FakeInterpreter())
        return self.sessions[-1]


def python(name: str, *codes: str) -> tuple[list[ToolResult], FakeSandbox]:
    sandbox = FakeSandbox()
    tools = resolve_tools([name], {name: {"timeout": 7}}, sandbox=sandbox)
    return run(tools, [Call(name, {"code": code}) for code in codes])[0], sandbox


@pytest.mark.parametrize("name", ["python_executor", "code_interpreter"])
def test_an_episode_has_one_interpreter(name: str) -> None:
    results, sandbox = python(name, "a", "```python\nb\n```")
    assert [result.text for result in results] == ["ran 1", "ran 2"]
    (session,) = sandbox.sessions
    assert session.cells == [("a", 7.0), ("b", 7.0)] and session.closed


def test_errors_of_the_code_are_shown_to_the_model() -> None:
    results, _ = python("python_executor", *OUTCOMES)
    assert [(result.use.error, result.text) for result in results] == [
        (None, "(no output)"),
        (None, "out\nwarning"),
        ("raised", "[…]" + "x" * 600 + "\nTraceback …\nValueError: no"),
        ("raised", "error: the code ended with exit code 3"),
        ("deadline", "so far\nerror: the code ran for too long and was stopped"),
        ("raised", "error: the code used too much memory and was stopped"),
    ]


def test_errors_of_the_sandbox_are_failures() -> None:
    with pytest.raises(ToolFailure, match="OSError: the sandbox is gone") as caught:
        python("python_executor", "lost")
    assert caught.value.cause == "sandbox"


def test_fences_around_code() -> None:
    assert without_fence("```py\na\nb\n```\n") == "a\nb"
    assert without_fence("```python3\r\na\r\nb\r\n```") == "a\nb"
    assert without_fence("````\na\n````") == "a"
    assert without_fence("```text\na\n```") == "```text\na\n```"
    assert without_fence("```\na\n```\n```\nb\n```") == "```\na\n```\n```\nb\n```"
    assert without_fence("```\na") == "```\na"
    assert without_fence("x = '''\n```\n'''") == "x = '''\n```\n'''"
