"""Demonstrations with tool calls have the same tokens as a sampled episode with the same calls."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

import pytest

from covey.agents.formats.detect import choose_format, make_format
from covey.agents.render_demonstrations import WRITERS, call_text, render_messages
from covey.agents.turns import with_system
from covey.errors import InputError
from covey.rollout.policy import EpisodePolicy
from covey.rollout.rendering import Renderer, render_demonstration
from covey.rollout.templates import use_template
from covey.tool_calls import Call
from covey.types import Completion, Sampling, StopReason
from tests.conftest import byte_tokenizer

EOS = 2
SCHEMA = {
    "type": "function",
    "function": {
        "name": "add",
        "description": "Add.",
        "parameters": {"type": "object", "properties": {}, "required": []},
    },
}


def call(a: int, b: int, **more: Any) -> dict[str, Any]:
    return {**more, "type": "function", "function": {"name": "add", "arguments": {"a": a, "b": b}}}


QUESTION = {"role": "user", "content": "1+2 and 3+4?"}
TALK = [
    QUESTION,
    {"role": "assistant", "content": "", "tool_calls": [call(1, 2, id="x"), call(3, 4, id="y")]},
    {"role": "tool", "tool_call_id": "y", "content": "7"},
    {"role": "tool", "tool_call_id": "x", "content": "3"},
    {"role": "assistant", "content": "Once more.", "tool_calls": [call(3, 7)]},
    {"role": "tool", "content": "10"},
    {"role": "assistant", "content": "3 and 7, in all 10."},
]


def tokenizer_with(template: str | None) -> Any:
    tokenizer = byte_tokenizer()
    tokenizer.add_tokens([*"{}[]\\&@^~`$%"])
    use_template(tokenizer, template)
    return tokenizer


def test_without_native_tools_calls_and_results_are_text() -> None:
    format = make_format("hermes", native_tools=False)
    messages, tools = render_messages(TALK, [SCHEMA], format)
    assert tools is None
    assert [m["role"] for m in messages] == ["system", "user", "assistant", "user", "assistant", "user", "assistant"]
    assert messages[0]["content"] == format.instructions([SCHEMA])
    assert messages[2]["content"] == (
        '<tool_call>\n{"name": "add", "arguments": {"a": 1, "b": 2}}\n</tool_call>\n'
        '<tool_call>\n{"name": "add", "arguments": {"a": 3, "b": 4}}\n</tool_call>'
    )
    assert messages[3]["content"] == "<tool_response>\n7\n</tool_response>\n<tool_response>\n3\n</tool_response>"
    assert messages[4]["content"].startswith("Once more.\n<tool_call>\n")
    (_, _, reply, *_), _ = render_messages([m | {"weight": 0} for m in TALK], [SCHEMA], format)
    assert reply == messages[2] | {"weight": 0}


def test_with_native_tools_they_are_left_to_the_template() -> None:
    messages, tools = render_messages(TALK, [SCHEMA], make_format("hermes", native_tools=True))
    assert tools == [SCHEMA]
    assert [m["role"] for m in messages] == [m["role"] for m in TALK]
    first, second = messages[1]["tool_calls"]
    assert (first["function"], second["function"]) == (call(1, 2)["function"], call(3, 4)["function"])
    assert (messages[2]["tool_call_id"], messages[3]["tool_call_id"]) == (second["id"], first["id"])
    assert len(first["id"]) == 9 and first["id"] != second["id"]


def test_results_of_calls_in_the_text_are_rendered_too() -> None:
    format = make_format("hermes", native_tools=False)
    text = call_text(format, [Call("add", {"a": 1, "b": 2})])
    talk = [QUESTION, {"role": "assistant", "content": text}, {"role": "tool", "content": "3"}]
    assert render_messages(talk, [], format) == (
        (QUESTION, talk[1], {"role": "user", "content": "<tool_response>\n3\n</tool_response>"}),
        None,
    )


def test_two_results_of_one_call_are_refused() -> None:
    calls = [{"id": id, "function": {"name": "add", "arguments": {"a": 1, "b": 2}}} for id in "xy"]
    reply = {"role": "assistant", "content": "", "tool_calls": calls}
    results = [{"role": "tool", "tool_call_id": "x", "content": "3"}] * 2
    with pytest.raises(InputError, match=r"two results of the call 'x'"):
        render_messages([*TALK[:1], reply, *results], [SCHEMA], make_format("hermes", native_tools=False))


@pytest.mark.parametrize("name", WRITERS)
def test_written_calls_are_parsed_as_the_same_calls(name: str) -> None:
    format = make_format(name, native_tools=False)
    calls = [Call("add", {"text": 'a "quoted"\n</tool_call> line', "n": [1, {"x": None}]})]
    found = format.parse(call_text(format, calls)).calls
    assert [(c.name, c.arguments, c.problem) for c in found] == [("add", calls[0].arguments, None)]


def test_calls_that_would_not_be_parsed_are_refused() -> None:
    with pytest.raises(InputError, match="cannot be written in the format llama"):
        render_messages(TALK, [SCHEMA], make_format("llama", native_tools=False))  # text before a call
    with pytest.raises(InputError, match="cannot be written in the format code"):
        render_messages(TALK, [SCHEMA], make_format("code"))


class Scripted:
    def __init__(self, replies: Sequence[tuple[int, ...]]) -> None:
        self.replies = list(replies)

    async def generate(self, token_ids: Sequence[int], sampling: Sampling) -> Completion:
        reply = self.replies.pop(0)
        return Completion(reply, (0.0,) * len(reply), (0,) * len(reply), StopReason.EOS)


@pytest.mark.parametrize("template", [None, "qwen2.5"], ids=["no tools", "native"])
def test_the_tokens_are_those_of_an_episode_with_the_same_calls(template: str | None) -> None:
    tokenizer = tokenizer_with(template)
    format = choose_format("auto", tokenizer, "llama", [SCHEMA])
    assert format.native_tools == (template is not None)
    renderer = Renderer(tokenizer)
    turns = render_demonstration(renderer, *render_messages(TALK, [SCHEMA], format), (EOS,))
    policy = EpisodePolicy(Scripted([turn.completion_ids for turn in turns]), renderer, Sampling(), ("s",))  # type: ignore[arg-type]

    async def play() -> list[list[Call]]:
        """As the turn loop of an agent does."""
        opening = [QUESTION] if format.native_tools else with_system([QUESTION], format.instructions([SCHEMA]))
        said: list[Any] = []
        asked = []
        for results in (["7", "3"], ["10"], []):
            reply = await policy.ask([*opening, *said], tools=[SCHEMA] if format.native_tools else None)
            parsed = format.parse(reply.text)
            policy.remember(parsed.message)
            said.append(parsed.message)
            asked.append(list(parsed.calls))
            # The first demonstration's results stand in the other order.
            calls = parsed.calls[::-1] if len(results) == 2 else parsed.calls
            said += format.observe(list(zip(calls, results, strict=True)))
        return asked

    asked = asyncio.run(play())
    assert [[dict(c.arguments) for c in calls] for calls in asked] == [
        [{"a": 1, "b": 2}, {"a": 3, "b": 4}],
        [{"a": 3, "b": 7}],
        [],
    ]
    assert tuple(policy.turns) == turns
