"""The description of a data set: source, licence, conversion of raw rows, prompt; and when two questions are equal.

A prepared file holds only facts. The prompt around a question is added on loading, so it can be changed without
preparing the set again.
"""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

SPACING = re.compile(r"\\(?:left|right|displaystyle|quad|qquad|[,;:! ])(?![a-z])|[\s$~]+")
FRACTIONS = re.compile(r"\\[dt]frac")
MARKS = re.compile(r"(?<!\d)[.,:]|[.,:](?!\d)|[;!?'\"`´‘’“”*_]")


def normalize_question(text: str) -> str:
    """Equal for questions that differ only in case, white space, dollar signs, LaTeX spacing and sizes, or punctuation.
    Marks between two digits count (1.5 is not 15), and so do signs and brackets (x+1 is not x-1)."""
    text = unicodedata.normalize("NFKC", text).casefold()
    return MARKS.sub("", SPACING.sub("", FRACTIONS.sub(r"\\frac", text)))


Values = Mapping[str, Any]
TRAIN, VALIDATION, TEST = SPLITS = ("train", "validation", "test")
ANSWERS, CORPUS = "answers", "corpus"  # other raw files: more columns for the rows of a split, and passages


class SkippedRow(Exception):
    """A raw row that does not belong to the set. Its text is the reason, which is counted."""


@dataclass(frozen=True)
class Url:
    address: str

    def __str__(self) -> str:
        return self.address


@dataclass(frozen=True)
class Hub:
    """Files of a data set on the Hugging Face hub. A pattern, because large files are split into numbered parts."""

    repo: str
    pattern: str

    def __str__(self) -> str:
        return f"huggingface.co/datasets/{self.repo}: {self.pattern}"


@dataclass(frozen=True)
class Source:
    """Raw files of one kind."""

    split: str  # of their rows, unless a row has its own; or ANSWERS, CORPUS
    home: Url | Hub | None  # None: only local files
    local: tuple[str, ...]  # file name patterns of local copies
    format: str | None = None  # the suffix of the real format, if the file's own is misleading
    optional: bool = False


@dataclass(frozen=True)
class Choice:
    """An option that keeps the rows whose `column` is one of its values."""

    column: str
    about: str
    default: tuple[Any, ...] | None = None  # None: all rows


def user_message(row: Values, prompt: str) -> list[dict[str, Any]]:
    """One user message: the prompt with columns in place of their names in braces. Other braces are LaTeX."""
    for name, value in row.items():
        if f"{{{name}}}" in prompt:
            text = "\n".join(map(str, value)) if isinstance(value, list) else str(value)
            prompt = prompt.replace(f"{{{name}}}", text)
    return [{"role": "user", "content": prompt}]


@dataclass(frozen=True)
class Dataset:
    name: str
    about: str
    home: str  # its web page, for documentation
    licence: str
    reward: str
    sources: tuple[Source, ...]
    columns: tuple[str, ...]  # required columns of a raw row; `a|b`: one of them
    row: Callable[[Values, str], tuple[str, dict[str, Any]]]  # a raw row and its file's split → its split and task row
    rows: Mapping[str, int]  # published number of rows per split, for documentation
    prompt: str = "{question}"
    messages: Callable[[Values, str], Sequence[Mapping[str, Any]]] = (
        user_message  # a prepared row and the prompt → messages
    )
    json_columns: tuple[str, ...] = ()  # free-form columns, stored as JSON text
    choices: Mapping[str, Choice] = field(default_factory=dict)
    corpus: Callable[[Sequence[Values], Sequence[Values]], list[dict[str, str]]] | None = None
    # the raw rows used and the passages of CORPUS files → the passages to search
    kinds: Callable[[Values], Collection[str]] | None = None  # of a row's columns; they can be held out
    evaluated_on: tuple[str, ...] = ()  # other sets for validation, which training rows must not overlap with

    @property
    def option_names(self) -> list[str]:
        held_out = [] if TRAIN in self.rows else ["held_out"]  # split a set without training rows
        return ["prompt", "split", *held_out, *self.choices]
