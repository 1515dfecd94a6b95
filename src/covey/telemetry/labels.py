"""Tags and notes of a run: given when it starts (`logging.tags`, `logging.notes`), or changed later.

What a run starts with is in run.json, which its own process rewrites. Changes go to labels.json beside it, so that a
live run can be labelled too and no writer overwrites the other's file.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from covey.config.schema import LoggingConfig, check_tags
from covey.redact import hide_known
from covey.storage import write_whole

LABELS_FILE = "labels.json"
LONGEST_FILE = 1 << 20  # bytes; a larger one is not ours


def read_labels(folder: Path, run: Mapping[str, Any]) -> dict[str, Any]:
    """`tags` and `notes` of a run whose run.json says `run`. Values of another type count as none."""
    return _labels({name: run.get(name) for name in ("tags", "notes")} | _read(folder / LABELS_FILE))


def write_labels(folder: Path, tags: Sequence[str], notes: str) -> None:
    check_tags(tags, "tags")
    labels = {"tags": list(dict.fromkeys(tags)), "notes": notes}
    write_whole(folder / LABELS_FILE, hide_known(json.dumps(labels, indent=1)))


def relabel(folder: Path, logging: LoggingConfig) -> None:
    """For a resumed run: labels that its command gives anew are taken over; otherwise later changes stay."""
    from covey.config.read import load_yaml  # slow to import, and of no use to whoever only reads labels

    path = folder / "config.yaml"
    began = load_yaml(path) if path.exists() else None
    given = began.get("logging") if isinstance(began, dict) else None
    if _labels(vars(logging)) != _labels(given if isinstance(given, dict) else {}):
        write_labels(folder, logging.tags, logging.notes)


def _labels(found: Mapping[str, Any]) -> dict[str, Any]:
    tags, notes = found.get("tags"), found.get("notes")
    return {
        "tags": [tag for tag in tags if isinstance(tag, str)] if isinstance(tags, list) else [],
        "notes": notes if isinstance(notes, str) else "",
    }


def _read(path: Path) -> dict[str, Any]:
    """What was written last; nothing where there is no such file, or another's."""
    try:
        if path.is_symlink() or path.stat().st_size > LONGEST_FILE:  # a folder of somebody else must not show our files
            return {}
        found = json.loads(path.read_text(encoding="utf-8"))
        json.dumps(found, ensure_ascii=False).encode()  # half characters cannot be shown
    except (OSError, ValueError, RecursionError):
        return {}
    return found if isinstance(found, dict) else {}
