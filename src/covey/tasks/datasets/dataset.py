"""When two questions are the same: their text without what does not change a question.

Case, white space, dollar signs, LaTeX's spacing and sizes, and punctuation do not count, but for a mark between two
digits: 1.5 is not 15. Signs and brackets do: x+1 is not x-1.
"""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

SPACING = re.compile(r"\\(?:left|right|displaystyle|quad|qquad|[,;:! ])(?![a-z])|[\s$~]+")
FRACTIONS = re.compile(r"\\[dt]frac")
MARKS = re.compile(r"(?<!\d)[.,:]|[.,:](?!\d)|[;!?'\"`´‘’“”*_]")


def normal(text: str) -> str:
    text = unicodedata.normalize("NFKC", text).casefold()
    return MARKS.sub("", SPACING.sub("", FRACTIONS.sub(r"\\frac", text)))


# -- What is said of a data set: its home, its licence, how a raw row becomes a row of tasks, and what is asked --------
# A prepared file holds facts; words around a question are put there when it is loaded (`prompt`), so that they can be
# changed without preparing anything again.

Values = Mapping[str, Any]
TRAIN, VALIDATION, TEST = SPLITS = ("train", "validation", "test")
ANSWERS, CORPUS = "answers", "corpus"  # what else a raw file may hold: columns of other files' rows, and passages


class LeftOut(Exception):
    """A raw row that does not belong into the set; its text says why, and is counted."""


@dataclass(frozen=True)
class Url:
    address: str

    def __str__(self) -> str:
        return self.address


@dataclass(frozen=True)
class Hub:
    """Files of a data set on the hub. A pattern, because large ones are cut into numbered pieces."""

    repo: str
    pattern: str

    def __str__(self) -> str:
        return f"huggingface.co/datasets/{self.repo}: {self.pattern}"


@dataclass(frozen=True)
class Source:
    """Raw files of one kind."""

    split: str  # of their rows, unless a row says otherwise; or ANSWERS, CORPUS
    home: Url | Hub | None  # None: only from local files
    local: tuple[str, ...]  # patterns of the names that a copy has
    format: str | None = None  # where the suffix is misleading
    optional: bool = False


@dataclass(frozen=True)
class Choice:
    """An option that keeps the rows whose `column` is one of its values."""

    column: str
    about: str
    default: tuple[Any, ...] | None = None  # None: all rows


def asked(row: Values, prompt: str) -> list[dict[str, Any]]:
    """One message of the user's: the prompt with the columns it names in braces."""
    return [{"role": "user", "content": filled(prompt, row)}]


def filled(prompt: str, row: Values) -> str:
    """Only names of columns are filled in: other braces are LaTeX's."""
    for name, value in row.items():
        if f"{{{name}}}" in prompt:
            text = "\n".join(map(str, value)) if isinstance(value, list) else str(value)
            prompt = prompt.replace(f"{{{name}}}", text)
    return prompt


@dataclass(frozen=True)
class Dataset:
    name: str
    about: str
    home: str  # of people: a page
    licence: str
    reward: str
    sources: tuple[Source, ...]
    columns: tuple[str, ...]  # what a raw row must have; `a|b`: one of them
    row: Callable[[Values, str], tuple[str, dict[str, Any]]]  # a raw row and its file's split → its split and task row
    rows: Mapping[str, int]  # how many there are at its home, for reading
    prompt: str = "{question}"
    messages: Callable[[Values, str], Sequence[Mapping[str, Any]]] = asked  # a prepared row and the prompt → messages
    packed: tuple[str, ...] = ()  # columns of free form, stored as JSON text
    choices: Mapping[str, Choice] = field(default_factory=dict)
    corpus: Callable[[Sequence[Values], Sequence[Values]], list[dict[str, str]]] | None = None
    # raw rows that were used, and passages that were given → passages to search in
    evaluated_on: tuple[str, ...] = ()  # other sets that it is tested on, and must not overlap with

    @property
    def option_names(self) -> list[str]:
        apart = [] if TRAIN in self.rows else ["held_out"]  # of a set that is one list: so many tasks to test on
        return ["prompt", "split", *apart, *self.choices]
