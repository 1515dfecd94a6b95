"""The command that adds a missing package to this installation of Covey.

Covey may run from a clone, or have been installed from a folder, a repository or an index. `pip install 'covey[lora]'`
is right only for the last: for the others pip has to be given the same source again.
"""

from __future__ import annotations

import importlib.metadata
import json
import shlex
import sys
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit
from urllib.request import url2pathname

import covey


def install_extra(extra: str, *, upgrade: bool = False) -> str:
    """The command that installs an extra of Covey's, as a line for a shell."""
    return install(*(["-U"] if upgrade else []), *_source(extra))


def install(*words: str) -> str:
    """`pip install WORDS` for the Python that runs now. The `pip` on the PATH may be another environment's."""
    return shlex.join([sys.executable or "python", "-m", "pip", "install"]) + " " + " ".join(map(_quoted, words))


def _quoted(word: str) -> str:
    """An extra is always quoted, as some shells take the brackets for a pattern."""
    return f"'{word}'" if "[" in word and "'" not in word else shlex.quote(word)


def _source(extra: str) -> list[str]:
    """What pip is told to install: where this Covey came from, with the extra."""
    if (clone := _clone()) is not None:
        return ["-e", f"{clone}[{extra}]"]
    origin = _origin()
    url = str(origin.get("url", ""))
    if "dir_info" in origin and (folder := Path(url2pathname(urlsplit(url).path))).is_dir():
        return [f"{folder}[{extra}]"]
    if isinstance(vcs := origin.get("vcs_info"), dict):
        return [f"covey[{extra}] @ {vcs['vcs']}+{url}@{vcs['commit_id']}"]
    return [f"covey[{extra}] @ {url}"] if "archive_info" in origin else [f"covey[{extra}]"]


def _clone() -> Path | None:
    """The clone that this code is in: CLONE/src/covey beside CLONE/pyproject.toml."""
    source = Path(covey.__file__).resolve().parent.parent
    return source.parent if source.name == "src" and (source.parent / "pyproject.toml").is_file() else None


def _origin() -> dict[str, Any]:
    """What pip wrote down of a package that is not from an index (direct_url.json of its metadata); else nothing."""
    try:
        text = importlib.metadata.distribution("covey").read_text("direct_url.json")
        found = json.loads(text or "{}")
    except (importlib.metadata.PackageNotFoundError, ValueError):
        return {}
    return found if isinstance(found, dict) else {}
