"""Rebuild the sections of docs/results.md and their pictures from the committed records of studies.

.venv/bin/python benchmarks/publish_studies.py                      all of benchmarks/records/studies
.venv/bin/python benchmarks/publish_studies.py EXPORT/gsm8k.tar     first add the records of this archive

A finished record is not replaced by an unfinished one. Records of tiny models are refused.
"""

from __future__ import annotations

import argparse
import shutil
import tempfile
from collections.abc import Sequence
from pathlib import Path

from kit.report import IMAGES, ROOT
from studies.catalogue import STUDIES
from studies.pictures import draw
from studies.plan import Study
from studies.record import FINISHED, RECORDS, read_record, read_records, unpack
from studies.tables import Results, section
from tiny import write_section

PAGE = ROOT / "docs" / "results.md"


def add(archive: Path, records: Path) -> list[str]:
    """Copy the records of an archive to where their studies' records are; returns what was done."""
    lines = []
    with tempfile.TemporaryDirectory() as work:
        for path in unpack(archive, Path(work)):
            record = read_record(path)
            if record["tiny"]:
                raise SystemExit(f"{archive}: {path.name} is of a tiny model")
            target = records / record["study"] / path.name
            if record["status"] != FINISHED and target.is_file() and read_record(target)["status"] == FINISHED:
                lines.append(f"{record['study']}/{path.name}: kept, the new one is {record['status']}")
                continue
            target.parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(path, target)
            lines.append(f"{record['study']}/{path.name}: {record['status']}")
    return lines


def publish(study: Study, records: Path, page: Path, images: Path) -> str:
    results = Results.of(study, read_records(records / study.name))
    picture = images / f"study-{study.name}.png"
    if results.records:
        draw(results, picture)
    write_section(f"study-{study.name}", section(results, f"images/{picture.name}"), page)
    runs = len(results.everything)
    return f"{page.name}: {study.name}, {runs} of {len(study.experiments) * len(study.seeds)} runs"


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("archives", type=Path, nargs="*")
    for archive in parser.parse_args(argv).archives:
        print("\n".join(add(archive, RECORDS)))
    for study in STUDIES.values():
        print(publish(study, RECORDS, PAGE, IMAGES))


if __name__ == "__main__":
    main()
