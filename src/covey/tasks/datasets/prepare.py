"""covey data prepare: raw files → checked rows → Parquet with a manifest."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from covey.errors import InputError
from covey.storage import sha256
from covey.tasks.datasets.clean import Row, Tally, without_empty, without_overlap, without_repeats
from covey.tasks.datasets.dataset import ANSWERS, CORPUS, SPLITS, TEST, VALIDATION, Dataset, LeftOut, Values
from covey.tasks.datasets.load import data_folder, is_prepared, read_manifest, read_rows
from covey.tasks.datasets.registry import DATASETS
from covey.tasks.datasets.sources import Raw, given_files, home_files
from covey.tasks.datasets.write import write_set
from covey.tasks.reading import Row as RawRow
from covey.tasks.reading import Table, kind, names, read_table

# What a row of another shape raises on its way to a task.
WRONG = (ValueError, TypeError, LookupError, AttributeError, RecursionError, OverflowError)


@dataclass(frozen=True)
class Prepared:
    folder: Path
    manifest: dict[str, Any]


@dataclass
class Contents:
    """What the raw files hold: rows by split, and passages to search in."""

    rows: dict[str, list[Row]]
    passages: list[dict[str, str]]


def prepare(dataset: Dataset, files: Sequence[str], folder: Path, revision: str | None = None) -> Prepared:
    """Write the set into `folder`, from the files given or else from its home, there at a revision if one is named."""
    with tempfile.TemporaryDirectory(prefix="covey-data-") as downloads:
        raw = given_files(dataset, files) if files else home_files(dataset, Path(downloads), revision)
        raw.sort(key=lambda one: dataset.sources.index(one.source))  # however they were named
        dropped, remarked = Tally(), Tally()
        contents, sources = _read(dataset, raw, dropped)
    rows = without_repeats(without_empty(contents.rows, dropped), dropped, remarked)
    others, absent = _other_sets(dataset, folder)
    without_overlap(rows, {split: rows.get(split, []) for split in (TEST, VALIDATION)} | others, dropped)
    rows = {split: rows[split] for split in SPLITS if rows.get(split)}
    if not rows:
        raise InputError(f"no row of {dataset.name} is left\n  {_why(dropped)}")
    manifest: dict[str, Any] = {
        "name": dataset.name,
        "licence": dataset.licence,
        "home": dataset.home,
        "rows": {split: len(found) for split, found in rows.items()},
        "sources": sources,
        "dropped": dropped.as_json(),
        "repeated_in_evaluation": remarked.as_json(),
        "overlap_checked_with": [split for split in (TEST, VALIDATION) if split in rows] + list(others),
        "overlap_not_checked_with": absent,
    }
    return Prepared(folder, write_set(dataset, rows, contents.passages, manifest, folder))


def _read(dataset: Dataset, raw: Sequence[Raw], dropped: Tally) -> tuple[Contents, list[dict[str, Any]]]:
    tables = [(one, read_table(one.path, one.source.format)) for one in raw]
    answers = {
        _id(table, row): row.values for one, table in tables if one.source.split == ANSWERS for row in table.rows
    }
    passages = [row.values for one, table in tables if one.source.split == CORPUS for row in table.rows]
    contents = Contents({}, [])
    used: list[Values] = []
    seen: dict[str, str] = {}
    for one, table in tables:
        if one.source.split in SPLITS:
            for row, split, found in _task_rows(dataset, one, table, answers, dropped):
                _name(dataset, table, row, split, found, seen, len(contents.rows.get(split, [])))
                contents.rows.setdefault(split, []).append(found)
                used.append(row.values)
    if dataset.corpus is not None:
        try:
            contents.passages = dataset.corpus(used, passages)
        except WRONG as error:
            what = f"{type(error).__name__}: {error!s:.200}"
            raise InputError(f"the passages of {dataset.name} cannot be read ({what})\n  see {dataset.home}") from error
    return contents, [_origin(one, table) for one, table in tables]


def _id(table: Table, row: RawRow) -> str:
    found = row.values.get("id")
    if not isinstance(found, str):
        raise table.mistake(row, f"id must be a string, got {kind(found)}")
    return found


def _task_rows(
    dataset: Dataset, raw: Raw, table: Table, answers: Mapping[Any, Values], dropped: Tally
) -> Iterator[tuple[RawRow, str, Row]]:
    for row in table.rows:
        values = row.values
        for column in dataset.columns:
            if not any(name in values for name in column.split("|")):
                wanted = column.replace("|", " or ")
                raise table.mistake(row, f"no column {wanted} (columns here: {names(values)})", f"see {dataset.home}")
        if answers:
            values = {**values, **answers.get(_id(table, row), {})}
        try:
            split, found = dataset.row(values, raw.source.split)
            for name in ("question", "data_id"):
                if not isinstance(found.get(name, ""), str):
                    raise ValueError(f"{name} must be a string, got {kind(found[name])}")
        except LeftOut as reason:
            dropped.add(raw.source.split, str(reason), f"{table.path.name}, {table.unit} {row.number}")
        except WRONG as error:
            what = f"{type(error).__name__}: {error!s:.200}" if type(error) is not ValueError else str(error)
            raise table.mistake(row, f"not a row of {dataset.name} ({what})") from error
        else:
            yield row, split, found


def _name(
    dataset: Dataset, table: Table, row: RawRow, split: str, found: Row, seen: dict[str, str], place: int
) -> None:
    """An id of its own, which begins with the set's name: tasks of several sets may meet."""
    given = found.get("data_id") or f"{split}/{place}"
    name = given if given.startswith(dataset.name) else f"{dataset.name}/{given}"
    here = f"{table.path}, {table.unit} {row.number}"
    if name in seen:
        raise table.mistake(row, f"the id {given!r} is also in {seen[name]}", "leave one of the two out")
    seen[name] = here
    found["data_id"] = name


def _origin(raw: Raw, table: Table) -> dict[str, Any]:
    return {
        "split": raw.source.split,
        "file": raw.path.name,
        "from": raw.origin,
        "rows": len(table.rows),
        "sha256": sha256(raw.path),
    }


def _other_sets(dataset: Dataset, folder: Path) -> tuple[dict[str, list[Row]], list[str]]:
    """The rows of sets that this one is tested on, beside it or in DATA_DIR; and those that are not here."""
    found: dict[str, list[Row]] = {}
    absent = []
    for name in dataset.evaluated_on:
        places = [place for place in (folder.parent / name, data_folder(name)) if is_prepared(place)]
        if places:
            found[name] = read_rows(DATASETS[name], read_manifest(name, places[0]), TEST, places[0])
        else:
            absent.append(name)
    return found, absent


def _why(dropped: Tally) -> str:
    reasons = [f"{count} {reason}" for found in dropped.counts.values() for reason, count in found.items()]
    return "; ".join(reasons) or "the files hold none"
