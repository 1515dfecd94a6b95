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
KEYS = {" {} ": "hf_" + "A1b2C3d4" * 3, " https://me:{}@host/": "W0rd" * 4, " ?token={} ": "T0ken" * 4}
surroundings = st.one_of(texts, mixed(PIECES), repeated(PIECES))


def no_secret_left(value: tuple[str, str]) -> None:
    before, after = value
    for shape, key in KEYS.items():  # those of no known form are known by what stands around them
        shown = hide(before + shape.format(key) + after)
        assert key not in shown and MASK in shown


TARGETS = [Target("redact: texts around a key", st.tuples(surroundings, surroundings), no_secret_left)]
test_fuzz = suite(TARGETS)
