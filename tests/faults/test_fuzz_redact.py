"""Whatever stands around a secret, it is hidden, and in time that grows with the length of the text only."""

from __future__ import annotations

from hypothesis import strategies as st

from covey.redact import MASK, hide
from tests.faults.fuzzing import Target, mixed, repeated, suite, texts

PIECES = [
    *("a.", "a-", "x://", "://", "@", "user:word@", "https://", "git+ssh://", "?key=", "&token=", "Bearer ", "Basic "),
    *("Authorization: ", 'authorization": "', "api-key: ", "x_api_key=", "sk-", "hf_", "ghp_", "AKIA", "ck-", "xoxb-"),
    *("'", '"', " ", "\n", "\t", "\\", "{", "}", ",", "é", "\ud800", "0", "-----BEGIN"),
]
KEY = "hf_" + "A1b2C3d4" * 3
surroundings = st.one_of(texts, mixed(PIECES), repeated(PIECES))


def no_secret_left(value: tuple[str, str]) -> None:
    before, after = value
    for shape in (" {} ", " https://me:{}@host/", " ?token={} "):
        shown = hide(before + shape.format(KEY) + after)
        assert KEY not in shown and MASK in shown


TARGETS = [Target("redact: texts around a key", st.tuples(surroundings, surroundings), no_secret_left)]
test_fuzz = suite(TARGETS)
