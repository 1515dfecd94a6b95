"""torch, imported by the first use of one of its names.

The settings of an algorithm are fields of its classes, and many commands read settings without computing anything.
Importing torch takes seconds, so the modules of these classes take it from here:

    from covey.imports import torch
"""

from __future__ import annotations

import importlib
import importlib.metadata
import importlib.util
import json
import shlex
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from hashlib import blake2b
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit
from urllib.request import url2pathname

import covey
from covey.errors import InputError, count_as_users, nearest, said


class LazyModule(ModuleType):
    """Looks every name up in the module of its own name, which it imports first."""

    def __getattr__(self, name: str) -> Any:
        return getattr(importlib.import_module(self.__name__), name)


if TYPE_CHECKING:
    import torch as torch
else:
    torch = LazyModule("torch")


# -- The command that adds a missing package to this installation of Covey ---------------------------------------------
# Covey may run from a clone, or have been installed from a folder, a repository or an index. `pip install
# 'covey[lora]'` is right only for the last: for the others pip has to be given the same source again.


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


# -- A user's own function, by `module:function` or `file.py:function` -------------------------------------------------

SOURCE = "__covey_source__"  # in a module of a user's file: the text that it was made from


def load_function(kind: str, name: str) -> Any:
    """`kind` is what the function is for (reward, agent), for messages."""
    place, _, attribute = name.rpartition(":")
    module = (
        _load_file(f"{kind} {name}", Path(place).expanduser())
        if place.endswith(".py")
        else _load_module(f"{kind} {name}", place)
    )
    found = getattr(module, attribute, None)
    if found is not None:
        return found
    functions = sorted(
        key
        for key, value in vars(module).items()
        if callable(value) and getattr(value, "__module__", None) == module.__name__ and not key.startswith("_")
    )
    lines = [f"{kind} {name}: no function {attribute} in {place}"]
    if guess := nearest(attribute, functions):
        lines.append(f"  did you mean   {place}:{guess}?")
    lines.append(f"  functions there: {', '.join(functions) or 'none'}")
    raise InputError("\n".join(lines))


@contextmanager
def no_exit(what: str) -> Iterator[None]:
    """Around code of the user's that runs before training: a sys.exit there must not end covey as if all were well."""
    try:
        yield
    except SystemExit as error:
        raise InputError(
            f"{what}: {said(error)}\n  fix: return, or raise an exception that says what is wrong"
        ) from error


def _load_module(what: str, module: str) -> ModuleType:
    _make_importable(Path.cwd())
    try:
        found = importlib.import_module(module)
    except (Exception, SystemExit) as error:
        raise InputError(f"{what}: importing {module} failed ({said(error)})") from error
    if found.__file__ is not None:
        path = Path(found.__file__)
        count_as_users(path.parent if "." in module or hasattr(found, "__path__") else path)
    return found


def _load_file(what: str, path: Path) -> ModuleType:
    if not path.is_file():
        lines = [f"{what}: no such file {path}"]
        beside = [entry.name for entry in path.parent.glob("*.py")]
        if guess := nearest(path.name, beside):
            lines.append(f"  did you mean   {path.with_name(guess)}?")
        raise InputError("\n".join(lines))
    path = path.resolve()
    # One module per path: several functions of one file share its globals, and files of one name do not collide.
    module_name = f"covey_user_{path.stem}_{blake2b(str(path).encode(), digest_size=4).hexdigest()}"
    try:
        source = path.read_bytes()
    except OSError as error:
        raise InputError(f"{what}: {path} cannot be read ({error.strerror})") from error
    before = sys.modules.get(module_name)
    if before is not None and before.__dict__.get(SOURCE) == source:  # an edited file is loaded again
        return before
    _make_importable(path.parent)
    spec = importlib.util.spec_from_file_location(module_name, path)
    assert spec is not None  # a file that ends in .py always has one
    module = importlib.util.module_from_spec(spec)
    module.__dict__[SOURCE] = source
    sys.modules[module_name] = module
    try:
        # Not by the loader: it would take stored bytecode of an earlier version that was as long and as old.
        exec(compile(source, str(path), "exec"), module.__dict__)  # noqa: S102 - the user's own file
    except (Exception, SystemExit) as error:
        del sys.modules[module_name]
        raise InputError(f"{what}: running {path} failed ({said(error)})") from error
    return module


def _make_importable(folder: Path) -> None:
    """So that a user's file may import its neighbours. Last in line: it must not shadow anything installed."""
    if str(folder) not in sys.path:
        sys.path.append(str(folder))
