"""A user's own function, by `module:function` or `file.py:function`."""

from __future__ import annotations

import importlib
import importlib.util
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from hashlib import blake2b
from pathlib import Path
from types import ModuleType
from typing import Any

from covey.errors import InputError, count_as_users, nearest, said

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
