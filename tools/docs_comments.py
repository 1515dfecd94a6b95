"""A griffe extension for the API pages (mkdocs.yml): the comment beside a field is its description."""

from __future__ import annotations

import re
from functools import cache
from pathlib import Path
from typing import Any

import griffe

COMMENT = re.compile(r"  # (.+)$")


@cache
def source_lines(path: Path) -> list[str]:
    return path.read_text().splitlines()


class FieldComments(griffe.Extension):
    def on_attribute_instance(self, *, attr: griffe.Attribute, **_: Any) -> None:
        if attr.docstring or not attr.lineno or not attr.parent or not attr.parent.is_class:
            return
        assert isinstance(attr.filepath, Path)
        lines = source_lines(attr.filepath)[attr.lineno - 1 : attr.endlineno]
        comments = [match[1] for line in lines if (match := COMMENT.search(line))]
        if comments:
            attr.docstring = griffe.Docstring(" ".join(comments), lineno=attr.lineno, parent=attr)
