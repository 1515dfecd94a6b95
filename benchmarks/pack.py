"""Packs the packages of requirements-gpu.txt into one archive, for a GPU machine without a package index.

    .venv/bin/python benchmarks/pack.py [--python-version 3.12] [--out .carry/packages.tar.xz]

On that machine:  tar xf packages.tar.xz && PYTHONPATH=$PWD/site-packages python benchmarks/gpu.py

The folder must be named site-packages: dill, which TRL's datasets use, treats modules elsewhere as the user's code and
tries to pickle them. Unused parts of pyarrow and pandas are excluded; with them the archive would be twice as large.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import tarfile
import tempfile
from pathlib import Path

REQUIREMENTS = Path(__file__).parent / "requirements-gpu.txt"
FROM_SOURCE = "antlr4-python3-runtime"  # pure Python, published as source only
LEFT_OUT = (
    "pyarrow/include/*",
    "pyarrow/tests/*",
    "pyarrow/src/*",
    "pyarrow/*flight*",
    "pyarrow/*s3*",
    "pyarrow/*.py[xd]",
    "pyarrow/*.pxi",
    "pandas/tests/*",
    "bin/*",
    "*/__pycache__/*",
)


def install(version: str, folder: Path, wheels: Path) -> None:
    """Download wheels for Linux and the given Python version, independent of this machine."""
    pip = [sys.executable, "-m", "pip", "--disable-pip-version-check", "-q"]
    pinned = next(line for line in REQUIREMENTS.read_text().splitlines() if line.startswith(FROM_SOURCE))
    subprocess.run([*pip, "wheel", "--no-deps", "--wheel-dir", str(wheels), pinned], check=True)
    command = [*pip, "install", "--no-deps", "--only-binary=:all:", "--python-version", version]
    command += ["--find-links", str(wheels), "--target", str(folder), "-r", str(REQUIREMENTS)]
    subprocess.run(command, check=True)


def wanted(path: Path, folder: Path) -> bool:
    inside = path.relative_to(folder)
    return path.is_file() and not any(matches(inside, pattern) for pattern in LEFT_OUT)


def matches(path: Path, pattern: str) -> bool:
    """`folder/*` is everything below the folder."""
    return any(part.match(pattern) for part in (path, *path.parents))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--python-version", default="3.12", help="of the GPU machine")
    parser.add_argument("--out", type=Path, default=Path(".carry/packages.tar.xz"))
    chosen = parser.parse_args()
    with tempfile.TemporaryDirectory() as work:
        folder = Path(work, "site-packages")
        install(chosen.python_version, folder, Path(work, "wheels"))
        chosen.out.parent.mkdir(parents=True, exist_ok=True)
        with tarfile.open(chosen.out, "w:xz") as archive:
            for path in sorted(folder.rglob("*")):
                if wanted(path, folder):
                    archive.add(path, Path("site-packages", path.relative_to(folder)))
    print(f"{chosen.out}: {chosen.out.stat().st_size / 2**20:.1f} MiB")


if __name__ == "__main__":
    main()
