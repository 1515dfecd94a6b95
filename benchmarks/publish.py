"""Put measured results into docs/benchmarks.md and their pictures into docs/images.

.venv/bin/python benchmarks/publish.py benchmarks/results/*.json
"""

from __future__ import annotations

import argparse
from pathlib import Path

from kit.report import read, write_page


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("results", type=Path, nargs="+")
    for path in parser.parse_args().results:
        write_page(read(path))
        print(f"docs/benchmarks.md: {path.stem}")


if __name__ == "__main__":
    main()
