"""The format of a chat template, and whether the template can show the messages that formats make."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from covey.agents.formats.code import CodeFormat
from covey.agents.formats.detect import choose_format, detect, make_format, shows_tools, template_of
from covey.agents.formats.react import ReactFormat
from covey.errors import InputError
from covey.rollout.rendering import PastReply, Renderer
from covey.tool_calls import Call
from covey.types import StopReason
from tests.agents.formats import templates
from tests.agents.formats.test_hermes import SCHEMA
from tests.agents.formats.test_react import schema
from tests.conftest import byte_tokenizer

QUESTION = {"role": "user", "content": "What is a covey?"}
ARGUMENTS = '{"query": "cové \\"y\\"\\n", "n": [1, {"a": null}]}'
VALUE = {"query": 'cové "y"\n', "n": [1, {"a": None}]}

WRITTEN = {
    "hermes": ('<tool_call>\n{{"name": "search", "arguments": {}}}\n</tool_call>', "\n", templates.HERMES),
    "llama": ('{{"name": "search", "parameters": {}}}', "; ", templates.LLAMA),
    "mistral": ("[TOOL_CALLS]search{}", "", templates.MISTRAL),
    "mistral-args": ("[TOOL_CALLS]search[ARGS]{}", "", templates.MISTRAL_ARGS),
}


def tokenizer_with(template: str | None) -> Any:
    tokenizer = byte_tokenizer()
    tokenizer.chat_template = template
    return tokenizer


def render(tokenizer: Any, messages: list[dict[str, Any]], tools: Any = None) -> str:
    return str(tokenizer.apply_chat_template(messages, tools=tools, add_generation_prompt=True, tokenize=False))


def qwen(shared: Path) -> Any:
    from transformers import AutoTokenizer

    folder = shared / "data" / "tokenizer-qwen2_5"
    if not folder.is_dir():
        pytest.skip(f"the tokenizer of Qwen2.5 is not here ({folder})")
    return AutoTokenizer.from_pretrained(folder)


# -- which format ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("template", "model_type", "name"),
    [
        (templates.HERMES, "qwen2", "hermes"),
        (templates.LLAMA, "llama", "llama"),
        (templates.MISTRAL, "mistral", "mistral"),
        (templates.MISTRAL_ARGS, "mistral", "mistral"),
        (templates.PLAIN, "llama", "hermes"),
        (templates.PLAIN, "mistral", "hermes"),
        ("{{ '<|python_tag|>' }}", "llama", "llama"),
        ("{{ '\"parameters\": ' }}<|eom_id|>", "llama", "llama"),
        ("{{ '\"parameters\": ' }}<|eot_id|>", "phi", "hermes"),
        ("<tool_call>[TOOL_CALLS]", "mistral", "hermes"),
        ("<tool_call>\n<function=f>\n<parameter=x>", "qwen3_moe", "hermes"),
        (None, "mistral3", "mistral"),
        (None, "mllama", "llama"),
        (None, "llama", "hermes"),
        ("", "mistral", "hermes"),
    ],
)
def test_detect(template: str | None, model_type: str, name: str) -> None:
    assert detect(template, model_type) == name


@pytest.mark.parametrize("template", [templates.HERMES, templates.LLAMA, templates.MISTRAL, templates.MISTRAL_ARGS])
def test_templates_that_show_tools(template: str) -> None:
    assert shows_tools(tokenizer_with(template))


@pytest.mark.parametrize(
    "template",
    [
        templates.PLAIN,
        "{{ raise_exception('no') }}",
        "{% if tools %}{{ 'Tools: ' + tools|length|string }}{% endif %}",
        None,
    ],
)
def test_templates_that_do_not_show_tools(template: str | None) -> None:
    assert not shows_tools(tokenizer_with(template))


@pytest.mark.parametrize(
    ("setting", "template", "name", "native"),
    [
        ("auto", templates.HERMES, "hermes", True),
        ("auto", templates.LLAMA, "llama", True),
        ("auto", templates.MISTRAL, "mistral", True),
        ("auto", templates.PLAIN, "hermes", False),
        ("hermes", templates.HERMES, "hermes", True),
        ("hermes", templates.LLAMA, "hermes", False),
        ("llama", templates.PLAIN, "llama", False),
        # The template shows tools, but asks for calls in XML: our own words explain them instead.
        ("auto", templates.HERMES + "{#- <function=f> -#}", "hermes", False),
    ],
)
def test_native_tools_only_in_the_templates_own_format(setting: str, template: str, name: str, native: bool) -> None:
    format = choose_format(setting, tokenizer_with(template), "llama")
    assert (format.name, format.native_tools) == (name, native)


def test_formats_by_name() -> None:
    assert make_format("react", [SCHEMA]) == ReactFormat([SCHEMA])
    assert make_format("code", [SCHEMA]) == CodeFormat("python_executor")
    assert make_format("code", [SCHEMA, schema("code_interpreter")]) == CodeFormat("code_interpreter")
    with pytest.raises(InputError, match="unknown format  hermse\n  did you mean   hermes"):
        make_format("hermse")


def test_a_template_for_tools_among_several() -> None:
    tokenizer = byte_tokenizer()
    tokenizer.chat_template = {"default": templates.PLAIN, "tool_use": templates.HERMES}
    assert template_of(tokenizer) == templates.HERMES
    assert choose_format("auto", tokenizer, "qwen2").native_tools


# -- conversations -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("style", WRITTEN)
@pytest.mark.parametrize("replies", ["one", "two", "text and one", "malformed", "one and malformed", "three replies"])
def test_conversations_can_be_shown(style: str, replies: str) -> None:
    call, between, template = WRITTEN[style]
    tokenizer = tokenizer_with(template)
    format = choose_format("auto", tokenizer, "")
    good, bad = call.format(ARGUMENTS), call.format('{"query": }')
    texts = {
        "one": [good],
        "two": [good + between + good],
        "text and one": ["I look. " + ("<|python_tag|>" if style == "llama" else "") + good],
        "malformed": [bad],
        "one and malformed": [good + between + bad],
        "three replies": [good, bad, good],
    }[replies]
    messages: list[dict[str, Any]] = [QUESTION]
    shown = []
    for turn, text in enumerate(texts):
        parsed = format.parse(text)
        assert parsed.calls
        results = [(one, f"result {turn} {place}") for place, one in enumerate(parsed.calls)]
        shown += [result for _, result in results]
        messages += [parsed.message, *format.observe(results)]
    messages.append(format.parse("Birds.").message)
    rendered = render(tokenizer, messages, [SCHEMA])
    places = [rendered.index(result) for result in shown]
    assert places == sorted(places)
    assert rendered.index("Birds.") > places[-1]


@pytest.mark.parametrize("style", WRITTEN)
def test_a_call_as_the_template_writes_it_is_read_back(style: str) -> None:
    call, between, template = WRITTEN[style]
    tokenizer = tokenizer_with(template)
    format = choose_format("auto", tokenizer, "")
    count = 1 if style == "llama" else 2
    first = format.parse(between.join([call.format(ARGUMENTS)] * count))
    assert [dict(one.arguments) for one in first.calls] == [VALUE] * count
    before = render(tokenizer, [QUESTION]).removesuffix("<|im_start|>assistant\n")
    after = tokenizer.apply_chat_template([QUESTION, first.message], tokenize=False)
    written = after[len(before) :] if style != "llama" else after.rpartition("<|end_header_id|>")[2]
    for end in ("<|im_end|>\n", "<|eot_id|>", "</s>"):
        written = written.removesuffix(end)
    again = format.parse(written.removeprefix("<|im_start|>assistant\n"))
    assert [(one.name, one.arguments) for one in again.calls] == [("search", VALUE)] * count
    if style.startswith("mistral"):
        assert [one.id for one in again.calls] == [one.id for one in first.calls]


@pytest.mark.parametrize("name", ["hermes", "llama", "mistral", "react", "code"])
@pytest.mark.parametrize("template", [templates.PLAIN, templates.MISTRAL], ids=["plain", "alternating"])
def test_without_tools_in_the_template_roles_alternate_and_nothing_is_lost(name: str, template: str) -> None:
    tokenizer = tokenizer_with(template)
    format = make_format(name, [SCHEMA], native_tools=False)
    call = {
        "hermes": WRITTEN["hermes"][0].format(ARGUMENTS) * 2,
        "llama": WRITTEN["llama"][0].format(ARGUMENTS),
        "mistral": WRITTEN["mistral"][0].format(ARGUMENTS) * 2,
        "react": "Thought: hm\nAction: search\nAction Input: covey",
        "code": "```python\nprint('covey')\n```\n```python\nprint(2)\n```",
    }[name]
    messages: list[dict[str, Any]] = [QUESTION]
    for text in (call, "<think>\n</think>" + call):
        parsed = format.parse(text)
        assert parsed.calls[0].problem is None
        messages += [parsed.message, *format.observe([(one, "found") for one in parsed.calls])]
    assert [message["role"] for message in messages] == ["user", "assistant"] * 2 + ["user"]
    rendered = render(tokenizer, messages)
    assert rendered.count(call) == 2
    assert rendered.count("found") >= 2


def test_qwen3_keeps_its_thinking_after_a_malformed_call() -> None:
    """Its template drops thinking from before the last question: what was sampled would be rewritten."""
    tokenizer = tokenizer_with(templates.FORGETFUL)
    format = make_format("hermes")
    parsed = format.parse("<think>\nI wonder.\n</think>\n\n<tool_call>\n{broken}\n</tool_call>")
    (call,) = parsed.calls
    assert call.problem is not None
    rendered = render(tokenizer, [QUESTION, parsed.message, *format.observe([(call, call.problem)])])
    assert "I wonder." in rendered
    asked = render(tokenizer, [QUESTION, parsed.message, {"role": "user", "content": call.problem}])
    assert "I wonder." not in asked


# -- a real tokenizer --------------------------------------------------------------------------------------------------


class TestQwen:
    def test_its_format_is_hermes_and_it_shows_the_tools(self, shared: Path) -> None:
        tokenizer = qwen(shared)
        format = choose_format("auto", tokenizer, "qwen2")
        assert (format.name, format.native_tools) == ("hermes", True)
        assert detect(tokenizer.chat_template, "qwen2") == "hermes"
        assert shows_tools(tokenizer)

    def test_a_conversation(self, shared: Path) -> None:
        tokenizer, format = qwen(shared), make_format("hermes")
        reply = format.parse('I look.\n<tool_call>\n{"name": "search", "arguments": {"query": "covey"}}\n</tool_call>')
        results = format.observe([(call, "a group of birds") for call in reply.calls])
        rendered = render(tokenizer, [QUESTION, reply.message, *results], [SCHEMA])
        assert rendered.endswith(
            "<|im_start|>user\nWhat is a covey?<|im_end|>\n"
            "<|im_start|>assistant\nI look.\n"
            '<tool_call>\n{"name": "search", "arguments": {"query": "covey"}}\n</tool_call>'
            "<|im_end|>\n<|im_start|>user\n<tool_response>\na group of birds\n</tool_response><|im_end|>\n"
            "<|im_start|>assistant\n"
        )
        assert '<tools>\n{"type": "function", "function": {"name": "search"' in rendered

    @pytest.mark.parametrize(
        "text",
        [
            'I look. <tool_call>{"name":"search","arguments":{"query":"covey"}}</tool_call>',
            '<tool_call>\n{"name": "search"}\n</tool_call>\n<tool_call>\n{"name": "search"}\n</tool_call>',
            '<tool_call>\n{"name": "search", \n</tool_call>',
            '<tool_call>\n{"name": "search"}\n</tool_call>\n<tool_call>\n{broken\n</tool_call>',
        ],
        ids=["one", "two", "malformed", "both"],
    )
    def test_the_next_prompt_continues_from_the_sampled_tokens(self, shared: Path, text: str) -> None:
        tokenizer, format = qwen(shared), make_format("hermes")
        renderer = Renderer(tokenizer)
        prompt = renderer.prompt([QUESTION], [SCHEMA])
        sampled = (*tokenizer(text)["input_ids"], tokenizer.eos_token_id)
        parsed = format.parse(tokenizer.decode(sampled, skip_special_tokens=True))
        said = PastReply((QUESTION,), [SCHEMA], prompt, sampled, StopReason.EOS, parsed.message)
        results: list[tuple[Call, str]] = [(call, "some text") for call in parsed.calls]
        following = renderer.next_prompt(said, format.observe(results))
        assert following is not None
        assert following.ids[: len(said.ids)] == said.ids
        added = tokenizer.decode(following.ids[len(said.ids) :])
        shown = "\n".join(["<tool_response>\nsome text\n</tool_response>"] * len(results))
        assert added == f"\n<|im_start|>user\n{shown}<|im_end|>\n<|im_start|>assistant\n"
