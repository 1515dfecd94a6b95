"""Carries folders (a model, data) to a machine that takes only small uploads: pieces with checksums, and a manifest.

    python benchmarks/pack_model.py split MODELS/qwen2.5-coder-0.5b-instruct --out .carry [--mib 56]
    python benchmarks/pack_model.py join .carry --hold /tmp/pieces --to MODELS

`split` writes NAME.json and NAME.000, NAME.001, …, the parts of one tar archive of the folder. Bring the manifest with
every upload, and as many pieces as fit. `join` copies the pieces that came with this upload to --hold, checks them, and
unpacks the folder into --to once all are there; until then its exit code is 75 and it lists what is missing. Files that
changed on the way are refused. Both need only Python's own library.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import shutil
import sys
import tarfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

MISSING = 75
CHUNK = 1 << 20


class Pieces:
    """A file to write to, whose content goes into files of at most `size` bytes."""

    def __init__(self, folder: Path, name: str, size: int) -> None:
        self.folder, self.name, self.size = folder, name, size
        self.made: list[Path] = []
        self.left = 0

    def write(self, data: bytes) -> int:
        rest = memoryview(data)
        while rest:
            if self.left == 0:
                self.made.append(self.folder / f"{self.name}.{len(self.made):03d}")
                self.made[-1].write_bytes(b"")
                self.left = self.size
            part, rest = rest[: self.left], rest[self.left :]
            with self.made[-1].open("ab") as file:
                file.write(part)
            self.left -= len(part)
        return len(data)


class Joined:
    """The pieces in their order, read as one file."""

    def __init__(self, paths: Sequence[Path]) -> None:
        self.chunks = self._read(paths)
        self.rest = b""

    def _read(self, paths: Sequence[Path]) -> Iterator[bytes]:
        for path in paths:
            with path.open("rb") as file:
                while chunk := file.read(CHUNK):
                    yield chunk

    def read(self, size: int) -> bytes:
        while len(self.rest) < size and (chunk := next(self.chunks, b"")):
            self.rest += chunk
        data, self.rest = self.rest[:size], self.rest[size:]
        return data


def digest(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def split(folder: Path, out: Path, size: int) -> Path:
    """Write the pieces and the manifest, whose path is returned."""
    out.mkdir(parents=True, exist_ok=True)
    name = folder.resolve().name
    for old in out.glob(f"{name}.[0-9][0-9][0-9]"):
        old.unlink()
    pieces = Pieces(out, name, size)
    files = {}
    with tarfile.open(fileobj=pieces, mode="w|") as tar:
        for path in sorted(folder.rglob("*")):
            if path.is_file():
                inside = path.relative_to(folder)
                tar.add(path, f"{name}/{inside}", filter=_plain)
                files[str(inside)] = digest(path)
    manifest = out / f"{name}.json"
    about = {"name": name, "pieces": {path.name: digest(path) for path in pieces.made}, "files": files}
    manifest.write_text(json.dumps(about, indent=1) + "\n")
    return manifest


def _plain(entry: tarfile.TarInfo) -> tarfile.TarInfo:
    """Without owner and time: the same folder gives the same pieces."""
    entry.uid = entry.gid = entry.mtime = 0
    entry.uname = entry.gname = ""
    entry.mode = 0o644
    return entry


def join(manifest: Path, hold: Path, to: Path) -> list[str]:
    """Keep the pieces that are here; unpack the folder if none is missing. Returns the missing ones."""
    about: dict[str, Any] = json.loads(manifest.read_text())
    hold.mkdir(parents=True, exist_ok=True)
    for piece, expected in about["pieces"].items():
        arrived = manifest.parent / piece
        if arrived.is_file():
            if digest(arrived) != expected:
                raise SystemExit(
                    f"{arrived} is damaged: its sha256 is not that of {manifest.name}\n  fix: bring it again"
                )
            if arrived.resolve() != (hold / piece).resolve():
                shutil.copyfile(arrived, hold / piece)
    missing = [
        piece
        for piece, expected in about["pieces"].items()
        if not (hold / piece).is_file() or digest(hold / piece) != expected
    ]
    if not missing:
        with tarfile.open(fileobj=Joined([hold / piece for piece in about["pieces"]]), mode="r|") as tar:
            tar.extractall(to, filter="data")
        folder = to / about["name"]
        if wrong := [file for file, expected in about["files"].items() if digest(folder / file) != expected]:
            raise SystemExit(f"{folder}: {', '.join(wrong)} differ from what was packed")
    return missing


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True)
    one = commands.add_parser("split")
    one.add_argument("folder", type=Path)
    one.add_argument("--out", type=Path, default=Path(".carry"))
    one.add_argument("--mib", type=float, default=56, help="largest piece")
    two = commands.add_parser("join")
    two.add_argument("pieces", type=Path, help="the folder of the manifests and the pieces that came with this upload")
    two.add_argument("--hold", type=Path, required=True, help="where pieces are kept between uploads")
    two.add_argument("--to", type=Path, required=True, help="where the folders are unpacked")
    options = parser.parse_args(argv)
    if options.command == "split":
        manifest = split(options.folder, options.out, int(options.mib * (1 << 20)))
        about = json.loads(manifest.read_text())
        print(f"{manifest}: {len(about['files'])} files in {len(about['pieces'])} pieces")
        return 0
    found = {path: join(path, options.hold, options.to) for path in sorted(options.pieces.glob("*.json"))}
    if not found:
        raise SystemExit(f"{options.pieces} has no manifest (NAME.json of split)")
    for path, missing in found.items():
        name = path.stem
        print(f"{name}: {len(missing)} pieces are missing: {' '.join(missing)}" if missing else f"{options.to / name}")
    return MISSING if any(found.values()) else 0


if __name__ == "__main__":
    sys.exit(main())
