"""JSON with the deviations of models: what is accepted, what is refused and with which message."""

from __future__ import annotations

import json
import subprocess
import sys
from typing import Any

import pytest

from covey.agents.formats.json_repair import InvalidJson, parse_json, value_end
from covey.storage import MAX_DEPTH


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ('{"a": 1}', {"a": 1}),
        (' [1, 2.5, -3e2, true, false, null, "x"] ', [1, 2.5, -300.0, True, False, None, "x"]),
        ('{"code": "a = 1\n\tb = 2"}', {"code": "a = 1\n\tb = 2"}),
        ('{"a": [1, 2,], }', {"a": [1, 2]}),
        ("{'a': True, 'b': [None, False]}", {"a": True, "b": [None, False]}),
        ("{'a': 'she said \"no\"'}", {"a": 'she said "no"'}),
        (r"{'a': 'it\'s'}", {"a": "it's"}),
        (r"{'a': 'tab\tnew\nline \\ \" é'}", {"a": 'tab\tnew\nline \\ " é'}),
        ('{"a": "it\'s", \'b\': 2}', {"a": "it's", "b": 2}),
        ('{"a": "True, None,}"}', {"a": "True, None,}"}),
        ("{'a': 'x,}', 'b': ',]',}", {"a": "x,}", "b": ",]"}),
        ('"\\ud83d\\ude00"', "😀"),
        ("{}", {}),
    ],
)
def test_valid_and_repaired_json(text: str, value: Any) -> None:
    assert parse_json(text) == value


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", "it is empty"),
        ("  \n", "it is empty"),
        ('{"a": 1} {"b": 2}', 'something follows the JSON value: "{\\"b\\": 2}"'),
        ('{"a": 1}}', 'something follows the JSON value: "}"'),
        ('{"a": 1', "a closing bracket or quote is missing"),
        ('{"a": {"b": 1}', "a closing bracket or quote is missing"),
        (r'{"a": "\sqrt{2}"}', r"a backslash is written \\"),
        ('{"a": 1, "a": 2}', 'the key "a" is given twice'),
        ("{'a': 1, \"a\": 2,}", 'the key "a" is given twice'),
        ('{"\\ud800": 1, "\\ud800": 2}', 'the key "?" is given twice'),
        ('{"a": NaN}', "NaN is not a JSON value"),
        ('{"a": -Infinity}', "-Infinity is not a JSON value"),
        ('{"a": 1e999}', "a number is too large"),
        ('{"a": ' + "1" * 5000 + "}", "a number has too many digits"),
        ('{"a": "\\ud800"}', "half of a surrogate pair"),
        ('{"\\udc00": 1}', "half of a surrogate pair"),
        ("[" * (MAX_DEPTH + 1) + "]" * (MAX_DEPTH + 1), "nested more than 64 levels"),
        ("[" * 100_000 + "]" * 100_000, "nested more than 64 levels"),
        ("{'a': 'it's'}", "expecting property name"),
        ("{a: 1}", "expecting property name"),
        ('{"a": 1,, }', "expecting property name"),
        ("[,]", "expecting value"),
        ("{,}", "expecting property name"),
        ('{"a":,}', "expecting value"),
        ("hello", 'expecting value at "hello"'),
        ('{"a": 1 // one\n}', "expecting ',' delimiter"),
        ("{'a': (1, 2)}", "expecting property name"),
        ("{'a': b'x'}", "expecting property name"),
        ("__import__('os')", "expecting value"),
    ],
)
def test_invalid_json(text: str, words: str) -> None:
    with pytest.raises(InvalidJson) as raised:
        parse_json(text)
    assert words in str(raised.value)


def test_nesting_up_to_the_limit_is_parsed() -> None:
    text = "[" * MAX_DEPTH + "]" * MAX_DEPTH
    assert parse_json(text) == json.loads(text)


@pytest.mark.parametrize(
    ("text", "end"),
    [
        ('{"a": "}"} more', 10),
        (' \n[{"a": [1]}]x', 14),
        ('{"a": "\\"}"}', 12),
        ("{'a': '}'}]", 10),
        ('{"a": 1', None),
        ('{"a": "b}', None),
        ("]", None),
        ("x {}", None),
        ('"a" {}', None),
        ("", None),
        ("{<}", None),
    ],
)
def test_value_end(text: str, end: int | None) -> None:
    assert value_end(text, 0) == end


@pytest.mark.parametrize(
    "text",
    [
        '"' + "\\" * 200_000,
        '{"' + "a" * 200_000,
        "{" * 200_000,
        '{"a": ' * 50_000,
        "'" * 200_001,
        "\"'" * 100_000,
        "[" + "1," * 100_000 + "]",
        "{" + ",".join(f'"{n}": 1' for n in range(50_000)) + ', "49999": 2}',
    ],
    ids=range(8),
)
def test_long_texts_take_linear_time(text: str) -> None:
    """Linear time is fast enough here; quadratic time would take minutes."""
    value_end(text, 0)
    try:
        parse_json(text)
    except InvalidJson as problem:
        assert len(str(problem)) < 300


NEVER_ENDING = """
from covey.agents.formats.json_repair import InvalidJson, parse_json, value_end
for quote in ('"', "'"):
    for inside in ("a" * 5000, "a\\\\n" * 5000, "\\\\" * 5001):
        text = "{" + quote + inside
        assert value_end(text, 0) is None
        try:
            parse_json(text)
        except InvalidJson:
            continue
        raise AssertionError(text[:10])
print("done")
"""


def test_an_unclosed_string_is_scanned_once() -> None:
    """A pattern such as "(?:[^"]+|x)*" tries 2^5000 ways to split the text before the missing quote. It would block the
    interpreter forever, so this runs in a process that can be killed."""
    child = subprocess.run([sys.executable, "-c", NEVER_ENDING], capture_output=True, text=True, timeout=60)
    assert (child.stdout, child.stderr) == ("done\n", "")
