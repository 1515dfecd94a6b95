"""covey data: prepares, shows and checks data sets and files."""

from __future__ import annotations

import textwrap
from collections.abc import Sequence
from pathlib import Path

from covey.app.compose import CommandLine, compose_command
from covey.cli.parse import parse
from covey.errors import InputError, unknown
from covey.images import plain_text
from covey.types import Task

USAGE = """\
covey data prepare NAME ... [--from FILE ...] [--out DIR]   a public data set → Parquet and manifest.json
covey data show    [NAME_OR_FILE] [-n 2] [key=value ...]    statistics and samples; without a name: all data sets
covey data check   FILE ... [--demonstrations]              errors in files, by line

  --from    raw files, patterns or folders; `train=FILE` names the split of a file. Without it, the files are
            downloaded from their public source
  --out     the folder to write; default DATA_DIR/NAME (DATA_DIR defaults to `data`), where `covey train data=NAME`
            looks for it
  --revision  for a set on the hub: a branch, a tag or a commit. The manifest names the commit and each file's sha256

Examples
  covey data prepare gsm8k
  covey data prepare math --from MATH/train.parquet math500.jsonl
  covey data show bfcl 'data.options.categories=[parallel]' -n 1
  covey data check train.jsonl test.jsonl
"""
COMMANDS = ("prepare", "show", "check")
CLIP = 1200  # characters of a message that are shown


def main(argv: list[str]) -> int:
    if not argv:
        print(USAGE)
        return 0
    if argv[0] not in COMMANDS:
        raise unknown("command of covey data", argv[0], COMMANDS)
    return {"prepare": _prepare, "show": _show, "check": _check}[argv[0]](argv[1:])


# -- prepare ----------------------------------------------------------------------------------------------------------


def _prepare(argv: list[str]) -> int:
    from covey.tasks import DATASETS
    from covey.tasks.datasets.load import data_folder
    from covey.tasks.datasets.prepare import prepare

    files, rest = _after("--from", argv)
    args = parse(rest, values=("--out", "--revision"))
    names, out = [*args.positional, *args.settings], args.value("--out")
    if not names:
        raise InputError(f"name a data set: {', '.join(DATASETS)}")
    for name in names:
        if name not in DATASETS:
            raise unknown("data set", name, DATASETS)
    if len(names) > 1 and out is not None:
        raise InputError("--out is the folder of one set: name one, or set DATA_DIR")
    revision = args.value("--revision")
    if revision is not None and (files or len(names) > 1):
        raise InputError("--revision is for one set on the hub: name one, and no files")
    for name in names:
        prepared = prepare(DATASETS[name], files, Path(out).expanduser() if out else data_folder(name), revision)
        _print_manifest(prepared.folder, prepared.manifest)
    return 0


def _after(flag: str, argv: Sequence[str]) -> tuple[list[str], list[str]]:
    """The words after a flag up to the next flag, and all others."""
    values: list[str] = []
    rest: list[str] = []
    inside = False
    for word in argv:
        if word == flag or word.startswith(f"{flag}="):
            inside = True
            values += [word.partition("=")[2]] if "=" in word else []
        elif inside and not word.startswith("-"):
            values.append(word)
        else:
            inside = False
            rest.append(word)
    if flag in argv and not values:
        raise InputError(f"{flag} wants files after it")
    return values, rest


def _print_manifest(folder: Path, manifest: dict[str, object]) -> None:
    rows: dict[str, int] = manifest["rows"]  # type: ignore[assignment]
    print(f"{manifest['name']}: {', '.join(f'{count:,} {split}' for split, count in rows.items())} rows in {folder}")
    outputs: dict[str, dict[str, int]] = manifest["outputs"]  # type: ignore[assignment]
    if "corpus.jsonl" in outputs:
        print(f"  {outputs['corpus.jsonl']['rows']:,} passages to search in: {folder / 'corpus.jsonl'}")
    for key, what in (("dropped", "dropped from"), ("repeated_in_evaluation", "reported in")):
        tally: dict[str, dict[str, dict[str, object]]] = manifest[key]  # type: ignore[assignment]
        for split, reasons in tally.items():
            for reason, rows_found in reasons.items():
                first: list[str] = rows_found["first"]  # type: ignore[assignment]
                print(f"  {what} {split}: {rows_found['rows']:,} ({reason}), for example {first[0]}")
    checked: list[str] = manifest["overlap_checked_with"]  # type: ignore[assignment]
    if "train" in rows and checked:
        print(f"  no training question occurs in {', '.join(checked)}")
    absent: list[str] = manifest["overlap_not_checked_with"]  # type: ignore[assignment]
    if absent:
        print(f"  not compared with its test set {', '.join(absent)}: prepare that first, then this again")


# -- show -------------------------------------------------------------------------------------------------------------


def _show(argv: list[str]) -> int:
    args = parse(argv, values=("-n", "--config", "--config-name"))
    if len(args.positional) > 1:
        raise InputError("show one data set or file at a time")
    count = args.integer("-n", 2, least=0)
    if not args.positional:
        return _list_all()
    name = args.positional[0]
    if Path(name).suffix and (Path(name).exists() or "/" in name):
        from covey.tasks.files import read_tasks

        tasks = read_tasks("covey data show", name)
        _print_split(Path(name).name, tasks, count)
        return 0
    return _show_named(name, args, count)


def _show_named(name: str, args: CommandLine, count: int) -> int:
    from covey.tasks import DATASETS, load_tasks

    composed = compose_command(args, settings=[f"data.name={name}", *args.settings])
    tasks = load_tasks(composed.config.data, composed.config.seed)
    print(tasks.description)
    if name in DATASETS:
        print(f"{DATASETS[name].about}; {DATASETS[name].licence}; {DATASETS[name].home}")
    print(f"reward {tasks.reward}")
    for text in tasks.warnings:
        print(f"warning: {text}")
    for split, rows in (("training", tasks.train), ("validation", tasks.validation)):
        if rows:
            print()
            _print_split(split, rows, count)
    return 0


def _print_split(name: str, tasks: Sequence[Task], count: int) -> None:
    from covey.tasks.check import QUANTILES, statistics

    stats = statistics(tasks)
    heads = "".join(f"{head:>8}" for head in ("min", *(f"{q:.0%}" for q in QUANTILES[1:-1]), "max"))
    print(f"{name}: {stats.rows:,} tasks")
    print(f"  columns     {', '.join(f'{column} ({kind})' for column, kind in stats.columns.items()) or 'none'}")
    print(f"  characters  {heads}")
    for label, lengths in (("question", stats.question), ("answer", stats.answer)):
        if lengths:
            print(f"    {label:10}{''.join(f'{length:>8,}' for length in lengths)}")
    for place in sorted({round(i * (len(tasks) - 1) / max(1, count - 1)) for i in range(count)}):
        _print_task(tasks[place])


def _print_task(task: Task) -> None:
    print(f"\n  {task.id}")
    for message in task.messages:
        content = plain_text(message["content"])
        clipped = content if len(content) <= CLIP else f"{content[:CLIP]}… ({len(content) - CLIP:,} more characters)"
        print(textwrap.indent(f"[{message['role']}] {clipped}", "  | ", lambda line: True))
    if task.answer is not None:
        print(f"  answer: {task.answer}")


def _list_all() -> int:
    from covey.tasks import DATASETS, GENERATED
    from covey.tasks.datasets.load import data_folder, is_prepared, read_manifest

    for name, dataset in DATASETS.items():
        there = is_prepared(data_folder(name))
        rows = read_manifest(name)["rows"] if there else dataset.rows
        counts = ", ".join(f"{count:,} {split}" for split, count in rows.items())
        print(f"{name:16}{dataset.about}")
        print(
            f"{'':16}{counts} ({'prepared' if there else 'not prepared'}); reward {dataset.reward}; {dataset.licence}"
        )
    print(f"\ngenerated: {', '.join(GENERATED)}")
    return 0


# -- check ------------------------------------------------------------------------------------------------------------


def _check(argv: list[str]) -> int:
    from covey.tasks.check import check_files

    args = parse(argv, switches=("--demonstrations",))
    files = [*args.positional, *args.settings]
    if not files:
        raise InputError("name the files to check")
    report = check_files(files, demonstrations=args.has("--demonstrations"))
    for mistake in report.mistakes:
        print(mistake)
    for remark in report.remarks:
        print(f"remark: {remark}")
    rows = ", ".join(f"{path} {count:,} rows" for path, count in report.rows.items())
    count = len(report.mistakes)
    result = f"{count} mistakes" if count > 1 else "1 mistake" if count else "good"
    print(f"{rows or 'nothing could be read'}: {result}")
    return 1 if count else 0
