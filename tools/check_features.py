"""Checks docs/features.md against the sources of the compared projects, which are not part of this repository.

    python tools/check_features.py verl=WHEEL verl=CHECKOUT trl=WHEEL prime-rl=CHECKOUT skyrl=WHEEL skyrl=CHECKOUT ...

A project may have several folders: an unpacked wheel, a checkout at the commit that the page names. Of every cell
of a compared project it checks that

- each linked file, and each path in code type, exists in a folder of that project (or of a package that is given
  under another name, such as verifiers=FOLDER)
- each other word in code type occurs in one of the files that the cell names: in every copy of a linked one, in the
  first copy of one in code type
- the words after "not found:" occur in no file of the folders that are searched (SEARCHED)

It prints each violation and exits with 1 if there are any."""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator
from pathlib import Path

PAGE = Path(__file__).parents[1] / "docs" / "features.md"
COLUMNS = ("verl", "trl", "prime-rl", "skyrl")
SEARCHED = {  # in whichever of its folders they are
    "verl": ("verl", "docs", "examples"),
    "trl": ("trl",),
    "prime-rl": ("src", "packages", "docs", "configs", "examples"),
    "skyrl": ("skyrl", "skyrl-gym", "skyrl-agent", "docs", "examples"),
}
FROM_THE_WHEEL = {"trl": ("trl",)}  # parts that are searched in the first folder only: a checkout of it is older
TEXT = {".py", ".md", ".mdx", ".rst", ".yaml", ".yml", ".toml", ".sh"}
DEFINITION = re.compile(r"^\[([^]]+)]: https://github\.com/([^/]+/[^/]+)/blob/[0-9a-f]{40}/(\S+)$", re.MULTILINE)
PATH = re.compile(r"^[\w.-]+(/[\w.-]+)+\.\w+$")  # with a folder: `.py` names a file


def rows(text: str) -> Iterator[list[str]]:
    """The cells of all rows of tables whose first column is headed "feature"."""
    inside = False
    for line in text.splitlines():
        if not line.startswith("|"):
            inside = False
            continue
        cells = [cell.strip() for cell in re.split(r"(?<!\\)\|", line)[1:-1]]
        if inside and not set(cells[0]) <= {"-"}:
            yield cells
        inside = inside or cells[0] == "feature"


def links_of(cell: str, labels: dict[str, tuple[str, str]]) -> list[tuple[str, str]]:
    """(repository, path) of its links."""
    return [labels[label] for label in re.findall(r"\[([^]]+)](?![(:])", cell) if label in labels]


def code_of(cell: str) -> list[str]:
    return re.findall(r"`([^`]+)`", cell)


class Project:
    def __init__(self, name: str, folders: list[Path]) -> None:
        self.name, self.folders = name, folders
        self._searched: list[tuple[Path, str]] | None = None

    def copies(self, path: str) -> list[str]:
        """The text of the file in each folder that has it."""
        return [(f / path).read_text(errors="replace") for f in self.folders if (f / path).is_file()]

    def places(self, word: str) -> list[Path]:
        if self._searched is None:
            self._searched = [
                (file, file.read_text(errors="replace").lower())
                for folder in self.folders
                for part in SEARCHED[self.name]
                if folder == self.folders[0] or part not in FROM_THE_WHEEL.get(self.name, ())
                for file in (folder / part).rglob("*")
                if file.is_file() and file.suffix in TEXT
            ]
        pattern = re.compile(rf"(?<!\w){re.escape(word.lower())}(?!\w)")
        return [file for file, text in self._searched if pattern.search(text)]


def violations(cell: str, project: Project, labels: dict[str, tuple[str, str]], others: list[Project]) -> Iterator[str]:
    stated, _, absent = cell.partition("not found: ")
    absent, _, after = absent.partition("; ")
    for word in code_of(absent):
        if found := project.places(word):
            yield f"{word} is found: {', '.join(map(str, found[:3]))}"
    said = f"{stated} {after}"
    code = code_of(said)
    linked, named = [path for _, path in links_of(said, labels)], [path for path in code if PATH.match(path)]
    wanted = linked + named
    files: list[list[str]] = []
    for path in wanted:
        copies = project.copies(path) or [text for other in others for text in other.copies(path)]
        files.append(copies if path in linked else copies[:1])
        if not copies:
            yield f"no file {path}"
    for word in code:
        if not PATH.match(word) and not any(copies and all(word in text for text in copies) for copies in files):
            yield f"{word} is in none of {', '.join(wanted) or 'no files'}"


def main(arguments: list[str]) -> int:
    folders: dict[str, list[Path]] = {}
    for argument in arguments:
        name, _, folder = argument.partition("=")
        folders.setdefault(name, []).append(Path(folder))
    if missing := [name for name in COLUMNS if name not in folders]:
        print(f"{__doc__}\nno folder for: {', '.join(missing)}")
        return 2
    projects = {name: Project(name, found) for name, found in folders.items()}
    others = [project for name, project in projects.items() if name not in COLUMNS]
    text = PAGE.read_text()
    labels = {label: (repository, path) for label, repository, path in DEFINITION.findall(text)}
    count = failures = 0
    for feature, _, *cells in rows(text):
        for name, cell in zip(COLUMNS, cells, strict=True):
            count += 1
            for message in violations(cell, projects[name], labels, others):
                failures += 1
                print(f"{feature} · {name}: {message}")
    print(f"{count} cells, {failures} violations")
    return 1 if failures else 0


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
