"""What is taken out of a set before it is written, and why.

Training rows go when they have no question or no answer, when they repeat an earlier one, and when their question is
asked in evaluation. Evaluation rows stay, so that results can be compared with others'; what repeats among them is
counted.
"""

from __future__ import annotations

import json
import os
import shutil
import tempfile
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from covey.errors import InputError
from covey.storage import sha256, sync_tree, writing
from covey.tasks.datasets.dataset import (
    ANSWERS,
    CORPUS,
    SPLITS,
    TEST,
    TRAIN,
    VALIDATION,
    Dataset,
    LeftOut,
    Values,
    normal,
)
from covey.tasks.datasets.fetch import Raw, given_files, home_files
from covey.tasks.datasets.load import DATASETS, MANIFEST, data_folder, is_prepared, read_manifest, read_rows
from covey.tasks.reading import Row as RawRow
from covey.tasks.reading import Table, kind, names, read_table

Row = dict[str, Any]
SHOWN = 3  # places that are named for each reason


@dataclass
class Tally:
    """How many rows went or were remarked upon, by split and reason, with the first few by name."""

    counts: dict[str, Counter[str]] = field(default_factory=dict)
    examples: dict[str, dict[str, list[str]]] = field(default_factory=dict)

    def add(self, split: str, reason: str, example: str) -> None:
        self.counts.setdefault(split, Counter())[reason] += 1
        shown = self.examples.setdefault(split, {}).setdefault(reason, [])
        if len(shown) < SHOWN:
            shown.append(example)

    def as_json(self) -> dict[str, Any]:
        return {
            split: {
                reason: {"rows": count, "first": self.examples[split][reason]}
                for reason, count in sorted(found.items())
            }
            for split, found in self.counts.items()
        }


def without_empty(rows: Mapping[str, list[Row]], dropped: Tally) -> dict[str, list[Row]]:
    kept: dict[str, list[Row]] = {}
    for split, found in rows.items():
        kept[split] = []
        for row in found:
            missing = next((column for column in ("question", "answer") if column in row and _empty(row[column])), None)
            if missing is None:
                kept[split].append(row)
            else:
                dropped.add(split, f"no {missing}", row["data_id"])
    return kept


def _empty(value: Any) -> bool:
    return value is None or (isinstance(value, str) and not value.strip()) or value == []


def without_repeats(rows: Mapping[str, list[Row]], dropped: Tally, remarked: Tally) -> dict[str, list[Row]]:
    kept: dict[str, list[Row]] = {}
    for split, found in rows.items():
        seen: dict[str, Row] = {}
        kept[split] = []
        for row in found:
            first = seen.setdefault(normal(row["question"]), row)
            if first is row:
                kept[split].append(row)
                continue
            reason = "repeats a row" if _content(first) == _content(row) else "repeats a question"
            (dropped if split == TRAIN else remarked).add(split, reason, f"{row['data_id']} = {first['data_id']}")
            if split != TRAIN:
                kept[split].append(row)
    return kept


def _content(row: Row) -> str:
    return json.dumps({k: v for k, v in row.items() if k != "data_id"}, sort_keys=True)


def without_overlap(rows: dict[str, list[Row]], evaluation: Mapping[str, list[Row]], dropped: Tally) -> None:
    """Take out of training what any of the evaluation sets, by their names, asks."""
    asked = {normal(row["question"]): (name, row) for name, found in evaluation.items() for row in found}
    kept = []
    for row in rows.get(TRAIN, []):
        if (met := asked.get(normal(row["question"]))) is None:
            kept.append(row)
        else:
            dropped.add(TRAIN, f"asked in {met[0]}", f"{row['data_id']} = {met[1]['data_id']}")
    if TRAIN in rows:
        rows[TRAIN] = kept


# -- A prepared set on disk, whole or absent: written beside, synced, renamed ------------------------------------------


def write_set(
    dataset: Dataset,
    rows: Mapping[str, Sequence[Mapping[str, Any]]],
    passages: Sequence[Mapping[str, str]],
    manifest: Mapping[str, Any],
    folder: Path,
) -> dict[str, Any]:
    _check_place(folder)
    _check_splits(dataset, rows, folder)
    with writing(folder):
        return _write_beside(dataset, rows, passages, manifest, folder)


def _write_beside(
    dataset: Dataset,
    rows: Mapping[str, Sequence[Mapping[str, Any]]],
    passages: Sequence[Mapping[str, str]],
    manifest: Mapping[str, Any],
    folder: Path,
) -> dict[str, Any]:
    folder.parent.mkdir(parents=True, exist_ok=True)
    beside = Path(tempfile.mkdtemp(prefix=f".{folder.name}-", dir=folder.parent))
    try:
        for split, found in rows.items():
            _write_parquet(beside / f"{split}.parquet", dataset, found)
        if passages:
            lines = "".join(json.dumps(one, ensure_ascii=False) + "\n" for one in passages)
            (beside / "corpus.jsonl").write_text(lines)
        counts = {f"{split}.parquet": len(found) for split, found in rows.items()} | {"corpus.jsonl": len(passages)}
        outputs = {path.name: {"rows": counts[path.name], "sha256": sha256(path)} for path in sorted(beside.iterdir())}
        complete = {**manifest, "outputs": outputs}
        (beside / MANIFEST).write_text(json.dumps(complete, indent=2, ensure_ascii=False) + "\n")
        sync_tree(beside)
        _swap(beside, folder)
    finally:
        shutil.rmtree(beside, ignore_errors=True)
    return complete


def _check_place(folder: Path) -> None:
    """Only what an earlier preparation wrote is replaced."""
    if folder.is_dir() and any(folder.iterdir()) and not (folder / MANIFEST).is_file():
        raise InputError(f"{folder} holds other files, which would be lost\n  fix: give another folder with --out")
    if folder.exists() and not folder.is_dir():
        raise InputError(f"{folder} is a file\n  fix: give a folder with --out")


def _check_splits(dataset: Dataset, rows: Mapping[str, object], folder: Path) -> None:
    """Files for one split do not replace a set that has others too."""
    try:
        before = read_manifest(dataset.name, folder)["rows"]
    except InputError:  # nothing is there, or it is damaged, and preparing it again is the way to mend it
        return
    if lost := {split: count for split, count in before.items() if split not in rows}:
        what = " and ".join(f"{split} rows of an earlier preparation ({count})" for split, count in lost.items())
        raise InputError(
            f"{folder} holds {what}, which the files given have none of: they would be lost\n"
            "  fix: give their files too, or another folder with --out, or delete that one"
        )


def _write_parquet(path: Path, dataset: Dataset, rows: Sequence[Mapping[str, Any]]) -> None:
    import pyarrow
    import pyarrow.parquet

    packed = [{**row, **{name: json.dumps(row[name], ensure_ascii=False) for name in dataset.packed}} for row in rows]
    columns = dict.fromkeys(name for row in packed for name in row)
    table = {}
    for name in columns:
        try:
            table[name] = pyarrow.array([row.get(name) for row in packed])
            pyarrow.parquet.write_table(pyarrow.table({name: table[name][:0]}), pyarrow.BufferOutputStream())
        except (pyarrow.ArrowException, OverflowError, ValueError) as error:
            reason = str(error).splitlines()[0]
            raise InputError(
                f"{dataset.name}: the values of {name} cannot be written into one column ({reason:.200})\n"
                "  fix: its rows must all have values of one kind there"
            ) from error
    pyarrow.parquet.write_table(pyarrow.table(table), path, compression="zstd")


def _swap(new: Path, folder: Path) -> None:
    os.chmod(new, 0o755)  # noqa: S103 - a temporary folder is private
    if not folder.exists():
        new.rename(folder)
        return
    old = Path(tempfile.mkdtemp(prefix=f".{folder.name}-old-", dir=folder.parent))
    folder.rename(old / folder.name)
    new.rename(folder)
    shutil.rmtree(old)


# -- covey data prepare: raw files → checked rows → Parquet with a manifest --------------------------------------------

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
