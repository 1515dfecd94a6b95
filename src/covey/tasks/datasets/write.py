"""A prepared set on disk, whole or absent: written beside, synced, renamed."""

from __future__ import annotations

import json
import os
import shutil
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from covey.errors import InputError
from covey.storage import sha256, sync_tree, writing
from covey.tasks.datasets.dataset import Dataset
from covey.tasks.datasets.load import MANIFEST, read_manifest


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
