"""Lazy import of torch, packages of extras and the commands that install them, and functions that the user names.

Importing torch takes seconds, and many commands only read the settings of algorithms. Modules that define algorithms
import it lazily:

    from covey.imports import torch
"""

from __future__ import annotations

import importlib
import importlib.metadata
import importlib.util
import json
import shlex
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from hashlib import blake2b
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit
from urllib.request import url2pathname

import covey
from covey.errors import Absent, InputError, describe_error, mark_user_code, nearest


class LazyModule(ModuleType):
    """Imports the module of the same name when an attribute is first used."""

    def __getattr__(self, name: str) -> Any:
        return getattr(importlib.import_module(self.__name__), name)


if TYPE_CHECKING:
    import torch as torch
else:
    torch = LazyModule("torch")


class LazyTable(Mapping[str, Any]):
    """Objects by name, each imported from its `module:attribute` when it is looked up."""

    def __init__(self, targets: Mapping[str, str]) -> None:
        self._targets = dict(targets)

    def __getitem__(self, name: str) -> Any:
        module, _, attribute = self._targets[name].partition(":")
        return getattr(importlib.import_module(module), attribute)

    def __contains__(self, name: object) -> bool:
        return name in self._targets

    def __iter__(self) -> Iterator[str]:
        return iter(self._targets)

    def __len__(self) -> int:
        return len(self._targets)


# -- Packages of extras ------------------------------------------------------------------------------------------------


def require(module: str, extra: str, need: str) -> Any:
    """Import a module that `extra` of Covey installs. `need` begins the error: what needs which package."""
    try:
        return importlib.import_module(module)
    except ImportError as error:
        raise Absent(f"{need}:  {install_extra(extra)}\n  ({error})") from error


def install_extra(extra: str, *, upgrade: bool = False) -> str:
    """The shell command that installs an extra into this installation of Covey.

    `pip install 'covey[lora]'` is right only for an installation from an index. For a clone, a folder or a repository,
    pip needs the same source again.
    """
    return install(*(["-U"] if upgrade else []), *_source(extra))


def install(*words: str) -> str:
    """`pip install WORDS` for this Python; the `pip` on the PATH may belong to another environment."""
    return shlex.join([sys.executable or "python", "-m", "pip", "install"]) + " " + " ".join(map(_quoted, words))


def _quoted(word: str) -> str:
    """Extras are always quoted: some shells treat the brackets as a pattern."""
    return f"'{word}'" if "[" in word and "'" not in word else shlex.quote(word)


def _source(extra: str) -> list[str]:
    """The arguments of pip: the source of this installation, with the extra."""
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
    """The clone that contains this code: CLONE/src/covey with CLONE/pyproject.toml."""
    source = Path(covey.__file__).resolve().parent.parent
    return source.parent if source.name == "src" and (source.parent / "pyproject.toml").is_file() else None


def _origin() -> dict[str, Any]:
    """pip's direct_url.json of an installation that is not from an index; otherwise empty."""
    try:
        text = importlib.metadata.distribution("covey").read_text("direct_url.json")
        origin = json.loads(text or "{}")
    except (importlib.metadata.PackageNotFoundError, ValueError):
        return {}
    return origin if isinstance(origin, dict) else {}


# -- Functions that the user names -------------------------------------------------------------------------------------

SOURCE = "__covey_source__"  # attribute of a user's module: the source that it was loaded from


def load_function(kind: str, name: str) -> Any:
    """The function of `module:function` or `file.py:function`. `kind` (reward, agent) is for messages."""
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
    """Turns sys.exit in the user's code into an InputError; otherwise covey would end with exit code 0."""
    try:
        yield
    except SystemExit as error:
        raise InputError(
            f"{what}: {describe_error(error)}\n  fix: return, or raise an exception that says what is wrong"
        ) from error


def _load_module(what: str, module: str) -> ModuleType:
    _make_importable(Path.cwd())
    try:
        found = importlib.import_module(module)
    except (Exception, SystemExit) as error:
        raise InputError(f"{what}: importing {module} failed ({describe_error(error)})") from error
    if found.__file__ is not None:
        path = Path(found.__file__)
        mark_user_code(path.parent if "." in module or hasattr(found, "__path__") else path)
    return found


def _load_file(what: str, path: Path) -> ModuleType:
    if not path.is_file():
        lines = [f"{what}: no such file {path}"]
        beside = [entry.name for entry in path.parent.glob("*.py")]
        if guess := nearest(path.name, beside):
            lines.append(f"  did you mean   {path.with_name(guess)}?")
        raise InputError("\n".join(lines))
    path = path.resolve()
    # One module per path: functions of one file share its globals, and files with the same name do not collide.
    module_name = f"covey_user_{path.stem}_{blake2b(str(path).encode(), digest_size=4).hexdigest()}"
    try:
        source = path.read_bytes()
    except OSError as error:
        raise InputError(f"{what}: {path} cannot be read ({error.strerror})") from error
    before = sys.modules.get(module_name)
    if before is not None and before.__dict__.get(SOURCE) == source:  # otherwise the file was edited: reload it
        return before
    _make_importable(path.parent)
    spec = importlib.util.spec_from_file_location(module_name, path)
    assert spec is not None  # always there for a file that ends in .py
    module = importlib.util.module_from_spec(spec)
    module.__dict__[SOURCE] = source
    sys.modules[module_name] = module
    try:
        # The loader could use cached bytecode of an earlier version with the same size and time.
        exec(compile(source, str(path), "exec"), module.__dict__)  # noqa: S102 - the user's own file
    except (Exception, SystemExit) as error:
        del sys.modules[module_name]
        raise InputError(f"{what}: running {path} failed ({describe_error(error)})") from error
    return module


def _make_importable(folder: Path) -> None:
    """Let a user's file import its neighbours. The folder is last in sys.path, so it shadows nothing."""
    if str(folder) not in sys.path:
        sys.path.append(str(folder))
