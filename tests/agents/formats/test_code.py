from __future__ import annotations

import pytest

from covey.agents.formats.code import CodeFormat
from covey.tool_calls import Call, Parsed
from tests.agents.formats.test_hermes import called

FORMAT = CodeFormat()


DOCUMENTED = 'def f():\n    """\n    ```\n    f()\n    ```\n    """'


@pytest.mark.parametrize(
    ("text", "code"),
    [
        ("```python\nprint(1)\n```", "print(1)"),
        ("I compute.\n```python\na = 1\n\nprint(a)\n```\nThen I see.", "a = 1\n\nprint(a)"),
        ("```py\nprint(1)\n```", "print(1)"),
        ("```Python3 \nprint(1)\n``` ", "print(1)"),
        ("```python\r\nprint(1)\n```\r\n", "print(1)"),
        ("1. First\n   ```python\n   if x:\n       y()\n   ```", "if x:\n    y()"),
        ("````python\ns = '''\n```\n'''\n````", "s = '''\n```\n'''"),
        ("```\nnot this\n```\n```python\nprint(1)\n```", "print(1)"),
        ("```json\n{}\n```\n```python\nprint(1)\n```", "print(1)"),
        ("<think>\n```python\nno\n```\n</think>\n```python\nprint(1)\n```", "print(1)"),
        ("```python\nprint('```')\n```", "print('```')"),
        ("```python\n    indented\n```", "    indented"),
        ("<think>I add.</think>```python\nprint(1)\n```", "print(1)"),
        ('```python\ndef f():\n    """\n    ```\n    f()\n    ```\n    """\n```', DOCUMENTED),
        ("~~~python\nprint(1)\n~~~", "print(1)"),
    ],
)
def test_a_block_is_run(text: str, code: str) -> None:
    parsed = FORMAT.parse(text)
    assert called(parsed) == [("python_executor", {"code": code})]
    assert parsed.message == {"role": "assistant", "content": text}


@pytest.mark.parametrize(
    "text",
    [
        "",
        "The answer is 4.",
        "```\nprint(1)\n```",
        "```output\n4\n```",
        "```pythonic\nx\n```",
        "Use ```python inline``` so.",
        "<think>\n```python\nprint(1)\n```\n</think>\n4",
        "<think>\nHm.",
    ],
)
def test_no_block_is_the_answer(text: str) -> None:
    assert FORMAT.parse(text) == Parsed({"role": "assistant", "content": text})


def test_only_the_first_block_is_run_and_an_observation_says_so() -> None:
    block = "```python\nprint(1)\n```\n"
    for more, words in ((1, "1 more block of your reply was not run"), (3, "3 more blocks of your reply were not run")):
        first, note = FORMAT.parse(block * (1 + more)).calls
        assert first.problem is None
        assert note.problem is not None
        assert words in note.problem


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("```python\nprint(1)", "not closed"),
        ("```python", "not closed"),
        ("```python\nprint(1) ```", "not closed"),
        ("```python\n```", "empty"),
        ("```python\n\n  \n```", "empty"),
        ("<think>\n```python\nprint(1)\n```", "thinking is not closed"),
    ],
)
def test_malformed(text: str, words: str) -> None:
    (call,) = FORMAT.parse(text).calls
    assert call.problem is not None
    assert words in call.problem


def test_results_cannot_close_their_fence() -> None:
    call, note = Call("python_executor", {"code": ""}), Call("python_executor", problem="…")
    assert FORMAT.observe([(call, "4")]) == [{"role": "user", "content": "```output\n4\n```"}]
    assert FORMAT.observe([(call, "a\n```\nb"), (note, "Not run.")]) == [
        {"role": "user", "content": "````output\na\n```\nb\n````\nNot run."}
    ]
    assert FORMAT.observe([]) == []


def test_the_stop_string_ends_a_reply_after_the_block() -> None:
    text = "```python\nprint(1)\n```\n```output\n2\n```"
    (stop,) = FORMAT.stop
    assert called(FORMAT.parse(text[: text.index(stop)])) == [("python_executor", {"code": "print(1)"})]


def test_the_tool_may_have_another_name() -> None:
    first, second = CodeFormat("code_interpreter").parse("```py\n1\n```\n```py\n2\n```").calls
    assert (first.name, second.name) == ("code_interpreter", "code_interpreter")


def test_the_block_of_the_instructions_is_read() -> None:
    text = FORMAT.instructions([])
    assert text is not None
    assert called(FORMAT.parse(text)) == [("python_executor", {"code": "print(1 + 1)"})]
