"""Rebuild the tables of docs/benchmarks.md and their pictures from the committed records, after adding new ones.

.venv/bin/python benchmarks/publish.py                                 all of benchmarks/records (make bench-tables)
.venv/bin/python benchmarks/publish.py benchmarks/results/step-cpu.json    this one becomes the record of its table
"""

from __future__ import annotations

import argparse
import shutil
from pathlib import Path

from kit.report import RECORDS, read, write_page


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("results", type=Path, nargs="*")
    for path in parser.parse_args().results:
        shutil.copy(path, RECORDS / path.name)
    for path in sorted(RECORDS.glob("*.json")):
        write_page(read(path))
        print(f"docs/benchmarks.md: {path.stem}")


if __name__ == "__main__":
    main()
