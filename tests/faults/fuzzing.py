"""Fuzz targets: a strategy that makes inputs, and a check that must hold for every one of them.

A few fixed examples of each run in the suite; `benchmarks/fuzz.py` runs the same targets with fresh ones for as long as
it is told to. A check that uses up its seconds of CPU time counts as one that hangs.
"""

from __future__ import annotations

import re
import signal
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import pytest
from hypothesis import HealthCheck, Phase, given, seed, settings
from hypothesis import strategies as st
from hypothesis.errors import HypothesisWarning
from hypothesis.strategies import SearchStrategy

CPU_SECONDS = 10.0  # of one example: all of them take milliseconds, unless something is quadratic or worse


class Hangs(AssertionError):
    """An example that takes longer than any should."""


@dataclass(frozen=True)
class Target:
    name: str
    inputs: SearchStrategy[Any]
    check: Callable[[Any], None]
    examples: int = 60  # in the suite
    seconds: float = CPU_SECONDS


@dataclass
class Outcome:
    examples: int = 0
    error: BaseException | None = None
    smallest: Any = None  # input that fails


def attempt(target: Target, examples: int, random: int | None = None) -> Outcome:
    """Run a target on so many examples: the same each time, or drawn from a seed. What fails is made small."""
    outcome = Outcome()

    def body(value: Any) -> None:
        outcome.examples += 1
        try:
            with bounded(target.seconds):
                target.check(value)
        except BaseException:
            outcome.smallest = value
            raise

    body.__name__ = body.__qualname__ = re.sub(r"\W", "_", target.name)
    phases = [Phase.generate, Phase.shrink]
    checks = settings(
        max_examples=examples,
        derandomize=random is None,
        database=None,
        deadline=None,
        phases=phases,
        suppress_health_check=list(HealthCheck),
        report_multiple_bugs=False,
    )
    run = checks(given(target.inputs)(body))
    try:
        warnings.simplefilter("ignore", HypothesisWarning)  # long inputs are meant
        (run if random is None else seed(random)(run))()
    except (KeyboardInterrupt, SystemExit):
        raise
    except BaseException as error:  # schemathesis raises groups that are no Exception
        outcome.error = error
    return outcome


@contextmanager
def bounded(seconds: float) -> Iterator[None]:
    """CPU time, so that a busy machine makes no difference."""

    def late(*_: object) -> None:
        raise Hangs(f"more than {seconds:g} s of CPU time")

    before = signal.signal(signal.SIGVTALRM, late)
    signal.setitimer(signal.ITIMER_VIRTUAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_VIRTUAL, 0)
        signal.signal(signal.SIGVTALRM, before)


def suite(targets: Sequence[Target]) -> Callable[..., None]:
    """A test of every target, with the same few examples each time."""

    @pytest.mark.parametrize("target", targets, ids=[target.name for target in targets])
    def test_fuzz(target: Target) -> None:
        outcome = attempt(target, target.examples)
        if outcome.error is not None:
            raise outcome.error
        assert outcome.examples > 0

    return test_fuzz


# -- inputs that several targets share -------------------------------------------------------------------------------

WORDS = ["", "0", "-1", "1e999", "nan", "true", "null", "None", "\x00", "\ud800", "é", "日本", "‮", "\ufeff", "a" * 300]
texts = st.one_of(
    st.text(max_size=40),
    st.sampled_from(WORDS),
    st.text(alphabet=st.characters(categories=("Cs", "Cc", "Nd", "Zs", "Sm", "Lu")), max_size=12),
)
numbers = st.one_of(
    st.integers(),
    st.floats(),
    st.sampled_from([10**400, -(10**30), 2**63, 1e308, float("inf"), float("-inf"), float("nan"), -0.0]),
)
scalars = st.one_of(st.none(), st.booleans(), numbers, texts)


def json_values(keys: Sequence[str], leaves: SearchStrategy[Any] = scalars, most: int = 12) -> SearchStrategy[Any]:
    """Anything that JSON can say, with the words that the reader looks for among its keys."""
    names = st.one_of(st.sampled_from(list(keys)), texts)
    return st.recursive(
        leaves, lambda inner: st.lists(inner, max_size=4) | st.dictionaries(names, inner, max_size=4), max_leaves=most
    )


def repeated(pieces: Sequence[str], longest: int = 100_000) -> SearchStrategy[str]:
    """A few pieces over and over, up to `longest` characters: what catches a pattern that tries everything twice."""

    def build(unit: list[str], head: str, tail: str, size: int) -> str:
        text = "".join(unit) or "x"
        return head + text * max(1, size // len(text)) + tail

    piece = st.sampled_from([*pieces, " ", "\n", "\t", "x", "1", '"', "\\", "{", "}"])
    sizes = st.sampled_from([10, 1000, 20_000, longest])
    return st.builds(build, st.lists(piece, min_size=1, max_size=4), piece, piece, sizes)


def mixed(pieces: Sequence[str], most: int = 12) -> SearchStrategy[str]:
    """Pieces of a format in any order, with any text between them."""
    return st.lists(st.one_of(st.sampled_from(list(pieces)), texts), max_size=most).map("".join)
