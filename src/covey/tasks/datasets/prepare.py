"""Prepare a data set: raw files → checked rows → Parquet files with a manifest.

Training rows are dropped if they have no question or answer, repeat an earlier question, or ask a question of the
evaluation rows. Evaluation rows are kept as published, so that results stay comparable; their repeats are only counted.
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
    SkippedRow,
    Values,
    normalize_question,
)
from covey.tasks.datasets.fetch import RawFile, download_files, local_files
from covey.tasks.datasets.load import DATASETS, MANIFEST, data_folder, is_prepared, read_manifest, read_rows
from covey.tasks.reading import Row as RawRow
from covey.tasks.reading import Table, kind, names, read_table

Row = dict[str, Any]
MAX_EXAMPLES = 3  # example rows recorded per reason
# What converting a row of an unexpected shape may raise.
BAD_ROW = (ValueError, TypeError, LookupError, AttributeError, RecursionError, OverflowError)


@dataclass(frozen=True)
class Prepared:
    folder: Path
    manifest: dict[str, Any]


def prepare(dataset: Dataset, files: Sequence[str], folder: Path, revision: str | None = None) -> Prepared:
    """Write the set to `folder`, from local files, or else downloaded from its home (at a revision, if given)."""
    dropped, repeated = Tally(), Tally()
    with tempfile.TemporaryDirectory(prefix="covey-data-") as downloads:
        raw = local_files(dataset, files) if files else download_files(dataset, Path(downloads), revision)
        raw.sort(key=lambda file: dataset.sources.index(file.source))
        rows, passages, sources = _read(dataset, raw, dropped)
    rows = without_repeats(without_empty(rows, dropped), dropped, repeated)
    others, missing = _other_sets(dataset, folder)
    without_overlap(rows, {split: rows.get(split, []) for split in (TEST, VALIDATION)} | others, dropped)
    rows = {split: rows[split] for split in SPLITS if rows.get(split)}
    if not rows:
        reasons = [f"{count} {reason}" for counts in dropped.counts.values() for reason, count in counts.items()]
        raise InputError(f"no row of {dataset.name} is left\n  {'; '.join(reasons) or 'the files hold none'}")
    manifest: dict[str, Any] = {
        "name": dataset.name,
        "licence": dataset.licence,
        "home": dataset.home,
        "rows": {split: len(rows[split]) for split in rows},
        "sources": sources,
        "dropped": dropped.as_json(),
        "repeated_in_evaluation": repeated.as_json(),
        "overlap_checked_with": [split for split in (TEST, VALIDATION) if split in rows] + list(others),
        "overlap_not_checked_with": missing,
    }
    return Prepared(folder, write_set(dataset, rows, passages, manifest, folder))


def _read(
    dataset: Dataset, raw: Sequence[RawFile], dropped: Tally
) -> tuple[dict[str, list[Row]], list[dict[str, str]], list[dict[str, Any]]]:
    """Rows by split, passages to search, and the manifest's entries about the raw files."""
    tables = [(file, read_table(file.path, file.source.format)) for file in raw]
    answers = {
        _id(table, row): row.values for file, table in tables if file.source.split == ANSWERS for row in table.rows
    }
    corpus = [row.values for file, table in tables if file.source.split == CORPUS for row in table.rows]
    rows: dict[str, list[Row]] = {}
    passages: list[dict[str, str]] = []
    used: list[Values] = []
    seen: dict[str, str] = {}
    for file, table in tables:
        if file.source.split in SPLITS:
            for raw_row, split, row in _task_rows(dataset, file, table, answers, dropped):
                _set_id(dataset, table, raw_row, split, row, seen, len(rows.get(split, [])))
                rows.setdefault(split, []).append(row)
                used.append(raw_row.values)
    if dataset.corpus is not None:
        try:
            passages = dataset.corpus(used, corpus)
        except BAD_ROW as error:
            problem = f"{type(error).__name__}: {error!s:.200}"
            raise InputError(
                f"the passages of {dataset.name} cannot be read ({problem})\n  see {dataset.home}"
            ) from error
    sources = [
        {
            "split": file.source.split,
            "file": file.path.name,
            "from": file.origin,
            "rows": len(table.rows),
            "sha256": sha256(file.path),
        }
        for file, table in tables
    ]
    return rows, passages, sources


def _id(table: Table, row: RawRow) -> str:
    value = row.values.get("id")
    if not isinstance(value, str):
        raise table.mistake(row, f"id must be a string, got {kind(value)}")
    return value


def _task_rows(
    dataset: Dataset, file: RawFile, table: Table, answers: Mapping[Any, Values], dropped: Tally
) -> Iterator[tuple[RawRow, str, Row]]:
    for row in table.rows:
        values = row.values
        for column in dataset.columns:
            if not any(name in values for name in column.split("|")):
                expected = column.replace("|", " or ")
                raise table.mistake(row, f"no column {expected} (columns here: {names(values)})", f"see {dataset.home}")
        if answers:
            values = {**values, **answers.get(_id(table, row), {})}
        try:
            split, task_row = dataset.row(values, file.source.split)
            for name in ("question", "data_id"):
                if not isinstance(task_row.get(name, ""), str):
                    raise ValueError(f"{name} must be a string, got {kind(task_row[name])}")
        except SkippedRow as reason:
            dropped.add(file.source.split, str(reason), f"{table.path.name}, {table.unit} {row.number}")
        except BAD_ROW as error:
            problem = f"{type(error).__name__}: {error!s:.200}" if type(error) is not ValueError else str(error)
            raise table.mistake(row, f"not a row of {dataset.name} ({problem})") from error
        else:
            yield row, split, task_row


def _set_id(
    dataset: Dataset, table: Table, raw_row: RawRow, split: str, row: Row, seen: dict[str, str], index: int
) -> None:
    """Give a row a unique id. It starts with the set's name, because tasks of several sets may be mixed."""
    own = row.get("data_id") or f"{split}/{index}"
    data_id = own if own.startswith(dataset.name) else f"{dataset.name}/{own}"
    if data_id in seen:
        raise table.mistake(raw_row, f"the id {own!r} is also in {seen[data_id]}", "leave one of the two out")
    seen[data_id] = table.place(raw_row)
    row["data_id"] = data_id


def _other_sets(dataset: Dataset, folder: Path) -> tuple[dict[str, list[Row]], list[str]]:
    """The test rows of the sets that this one is evaluated on, next to it or in DATA_DIR; and the missing sets."""
    rows: dict[str, list[Row]] = {}
    missing = []
    for name in dataset.evaluated_on:
        places = [place for place in (folder.parent / name, data_folder(name)) if is_prepared(place)]
        if places:
            rows[name] = read_rows(DATASETS[name], read_manifest(name, places[0]), TEST, places[0])
        else:
            missing.append(name)
    return rows, missing


# -- Dropping rows -----------------------------------------------------------------------------------------------------


@dataclass
class Tally:
    """Counts of rows by split and reason, with the ids of the first few."""

    counts: dict[str, Counter[str]] = field(default_factory=dict)
    examples: dict[str, dict[str, list[str]]] = field(default_factory=dict)

    def add(self, split: str, reason: str, example: str) -> None:
        self.counts.setdefault(split, Counter())[reason] += 1
        shown = self.examples.setdefault(split, {}).setdefault(reason, [])
        if len(shown) < MAX_EXAMPLES:
            shown.append(example)

    def as_json(self) -> dict[str, Any]:
        return {
            split: {
                reason: {"rows": count, "first": self.examples[split][reason]}
                for reason, count in sorted(reasons.items())
            }
            for split, reasons in self.counts.items()
        }


def without_empty(rows: Mapping[str, list[Row]], dropped: Tally) -> dict[str, list[Row]]:
    kept: dict[str, list[Row]] = {split: [] for split in rows}
    for split in rows:
        for row in rows[split]:
            missing = next((column for column in ("question", "answer") if column in row and _empty(row[column])), None)
            if missing is None:
                kept[split].append(row)
            else:
                dropped.add(split, f"no {missing}", row["data_id"])
    return kept


def _empty(value: Any) -> bool:
    return value is None or (isinstance(value, str) and not value.strip()) or value == []


def without_repeats(rows: Mapping[str, list[Row]], dropped: Tally, repeated: Tally) -> dict[str, list[Row]]:
    kept: dict[str, list[Row]] = {}
    for split in rows:
        seen: dict[str, Row] = {}
        kept[split] = []
        for row in rows[split]:
            first = seen.setdefault(normalize_question(row["question"]), row)
            if first is not row:
                reason = "repeats a row" if _content(first) == _content(row) else "repeats a question"
                (dropped if split == TRAIN else repeated).add(split, reason, f"{row['data_id']} = {first['data_id']}")
            if first is row or split != TRAIN:
                kept[split].append(row)
    return kept


def _content(row: Row) -> str:
    return json.dumps({k: v for k, v in row.items() if k != "data_id"}, sort_keys=True)


def without_overlap(rows: dict[str, list[Row]], evaluation: Mapping[str, list[Row]], dropped: Tally) -> None:
    """Remove the training rows whose question is asked in one of the evaluation sets."""
    asked = {normalize_question(row["question"]): (name, row) for name in evaluation for row in evaluation[name]}
    kept = []
    for row in rows.get(TRAIN, []):
        if (match := asked.get(normalize_question(row["question"]))) is None:
            kept.append(row)
        else:
            dropped.add(TRAIN, f"asked in {match[0]}", f"{row['data_id']} = {match[1]['data_id']}")
    if TRAIN in rows:
        rows[TRAIN] = kept


# -- Writing: complete or not at all. The files are written to a temporary folder, synced and renamed ------------------


def write_set(
    dataset: Dataset,
    rows: Mapping[str, Sequence[Mapping[str, Any]]],
    passages: Sequence[Mapping[str, str]],
    manifest: Mapping[str, Any],
    folder: Path,
) -> dict[str, Any]:
    """Write the set and return its manifest, completed with the files written."""
    _check_place(folder)
    _check_splits(dataset, rows, folder)
    with writing(folder):
        folder.parent.mkdir(parents=True, exist_ok=True)
        new = Path(tempfile.mkdtemp(prefix=f".{folder.name}-", dir=folder.parent))
        try:
            for split in rows:
                _write_parquet(new / f"{split}.parquet", dataset, rows[split])
            if passages:
                lines = "".join(json.dumps(one, ensure_ascii=False) + "\n" for one in passages)
                (new / "corpus.jsonl").write_text(lines)
            counts = {f"{split}.parquet": len(rows[split]) for split in rows} | {"corpus.jsonl": len(passages)}
            outputs = {path.name: {"rows": counts[path.name], "sha256": sha256(path)} for path in sorted(new.iterdir())}
            complete = {**manifest, "outputs": outputs}
            (new / MANIFEST).write_text(json.dumps(complete, indent=2, ensure_ascii=False) + "\n")
            sync_tree(new)
            _swap(new, folder)
        finally:
            shutil.rmtree(new, ignore_errors=True)
    return complete


def _check_place(folder: Path) -> None:
    """Only replace what an earlier preparation wrote."""
    if folder.is_dir() and any(folder.iterdir()) and not (folder / MANIFEST).is_file():
        raise InputError(f"{folder} holds other files, which would be lost\n  fix: give another folder with --out")
    if folder.exists() and not folder.is_dir():
        raise InputError(f"{folder} is a file\n  fix: give a folder with --out")


def _check_splits(dataset: Dataset, rows: Mapping[str, object], folder: Path) -> None:
    """Refuse to replace a set by one with fewer splits."""
    try:
        before = read_manifest(dataset.name, folder)["rows"]
    except InputError:  # it does not exist yet, or is damaged and about to be replaced
        return
    if lost := {split: count for split, count in before.items() if split not in rows}:
        splits = " and ".join(f"{split} rows of an earlier preparation ({count})" for split, count in lost.items())
        raise InputError(
            f"{folder} holds {splits}, which the files given have none of: they would be lost\n"
            "  fix: give their files too, or another folder with --out, or delete that one"
        )


def _write_parquet(path: Path, dataset: Dataset, rows: Sequence[Mapping[str, Any]]) -> None:
    import pyarrow
    import pyarrow.parquet

    encoded = [
        {**row, **{name: json.dumps(row[name], ensure_ascii=False) for name in dataset.json_columns}} for row in rows
    ]
    columns = dict.fromkeys(name for row in encoded for name in row)
    table = {}
    for name in columns:
        try:
            table[name] = pyarrow.array([row.get(name) for row in encoded])
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
