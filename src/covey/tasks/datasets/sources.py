"""Which raw file is which source of a set: among the files given, or else from its public home."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from fnmatch import fnmatch
from pathlib import Path

from covey.errors import InputError
from covey.tasks.datasets.dataset import Dataset, Source
from covey.tasks.datasets.fetch import fetch
from covey.tasks.files import find_files


@dataclass(frozen=True)
class Raw:
    source: Source
    path: Path
    origin: str  # what the manifest says of where it is from


def given_files(dataset: Dataset, words: Sequence[str]) -> list[Raw]:
    """Files, patterns or folders; `train=FILE` says what a file is where its name does not."""
    found: list[Raw] = []
    for word in words:
        split, named, place = word.partition("=")
        if named and not Path(word).exists():
            source = next((one for one in dataset.sources if one.split == split), None)
            if source is None:
                kinds = ", ".join(dict.fromkeys(one.split for one in dataset.sources))
                raise InputError(f"--from {word}: {dataset.name} has files for {kinds}, not for {split}")
            found += [Raw(source, path, path.name) for path in find_files("--from", place)]
        elif Path(word).expanduser().is_dir():
            found += _in_folder(dataset, Path(word).expanduser())
        else:
            found += [_named(dataset, path) for path in find_files("--from", word)]
    _check_complete(dataset, found)
    return found


def _in_folder(dataset: Dataset, folder: Path) -> list[Raw]:
    """Those of a folder that belong to the set; others may lie there too."""
    files = [path for path in sorted(folder.rglob("*")) if path.is_file()]
    matched = [Raw(source, path, path.name) for path in files if (source := _source_of(dataset, path)) is not None]
    if not matched:
        raise InputError(f"--from {folder}: no file of {dataset.name} in this folder\n{_wanted(dataset)}")
    return matched


def _named(dataset: Dataset, path: Path) -> Raw:
    needed = [source for source in dataset.sources if not source.optional]
    source = _source_of(dataset, path) or (needed[0] if len(needed) == 1 else None)
    if source is None:
        raise InputError(f"--from {path}: which file of {dataset.name} is this?\n{_wanted(dataset)}")
    return Raw(source, path, path.name)


def _source_of(dataset: Dataset, path: Path) -> Source | None:
    """Names with a folder in front (possible_answer/…) are looked for first: they say more."""
    ending = f"{path.parent.name}/{path.name}"
    patterns = [(pattern, source) for source in dataset.sources for pattern in source.local]
    patterns.sort(key=lambda one: "/" not in one[0])
    for pattern, source in patterns:
        if fnmatch(ending if "/" in pattern else path.name, pattern):
            return source
    return None


def _check_complete(dataset: Dataset, found: Sequence[Raw]) -> None:
    """At least one of the splits: someone may have a part of a set, and want no more."""
    if not any(raw.source.split in dataset.rows for raw in found):
        raise InputError(f"no questions of {dataset.name} among the files given\n{_wanted(dataset)}")


def _wanted(dataset: Dataset) -> str:
    lines = [f"  {source.split}: {' or '.join(source.local)}" for source in dataset.sources[:6]]
    if len(dataset.sources) > 6:
        lines.append(f"  and {len(dataset.sources) - 6} more")
    say = f"  or say what it is: --from {dataset.sources[-1].split}=FILE"
    return "\n".join(["  its files are called", *lines, say])


def home_files(dataset: Dataset, folder: Path, revision: str | None = None) -> list[Raw]:
    """All of the set from its public home; `folder` takes what is downloaded."""
    found: list[Raw] = []
    for source in dataset.sources:
        if source.home is not None:
            fetched = fetch(dataset.name, source, folder, revision)
            found += [Raw(source, one.path, one.origin) for one in fetched]
    return found
