"""A user's mistake, told so that it can be mended: what is wrong, where, and the fix."""

from __future__ import annotations

import os
import re
import sysconfig
import traceback
from collections.abc import Iterable, Sequence
from contextlib import suppress
from functools import cache
from pathlib import Path

from covey.suggest import nearest as nearest

FRAME = re.compile(r'^ *File "(.+)", line (\d+), in .+\n?(.*)', re.MULTILINE)  # of a traceback, as Python writes it


class InputError(ValueError):
    """Wrong input of the user's. The command line prints its text as it is and starts nothing."""


class Absent(InputError):
    """Something that is not on this machine but may be on the one the run is for: a file, a model of the hub."""


class RunFailed(RuntimeError):
    """A run that had started could not go on; its text says why and what to try."""


class LearnerLost(RunFailed):
    """A process of the learner died, and with it what was learned since the last checkpoint."""


class EpisodeError(Exception):
    """What the infrastructure did wrong in one episode, which is then left out and counted by `cause`."""

    cause = "agent"


class NamedFailure(EpisodeError):
    """One whose cause is said when it is raised."""

    def __init__(self, cause: str, message: str) -> None:
        super().__init__(cause, message)  # both: an exception is pickled by its arguments
        self.cause = cause
        self.message = message

    def __str__(self) -> str:
        return self.message


def said(error: BaseException) -> str:
    """An error of the user's code: its type, its message, and the line of that code it was raised at."""
    error = first_error(error)
    text = f"{type(error).__name__}: {message_of(error)}".removesuffix(": ")
    return with_place(text, place_of(error))


def with_place(text: str, place: str) -> str:
    if not place:
        return text
    return f"{text}\n  at {place}" if "\n" in text else f"{text} at {place}"


def message_of(error: BaseException) -> str:
    """An error's text. That of a SystemExit is only a number; an exception class of the user's may raise in __str__."""
    if isinstance(error, SystemExit):
        return f"sys.exit({error.code!r}) was called"
    try:
        return str(error)
    except Exception:
        return "(its message cannot be shown)"


def place_of(error: BaseException) -> str:
    """`my_rewards.py, line 12: return int(text)`: the innermost line of the user's own code; empty where an error did
    not pass through any."""
    frames = traceback.extract_tb(first_error(error).__traceback__)
    return _place([(frame.filename, frame.lineno or 0, frame.line or "") for frame in frames])


def place_in(trace: str) -> str:
    """The same from the text of a traceback, where that is all there is."""
    return _place([(name, int(number), line.strip()) for name, number, line in FRAME.findall(trace)])


def _place(frames: Sequence[tuple[str, int, str]]) -> str:
    """`frames`: file, line and source line of each, the innermost last."""
    found = [frame for frame in frames if _is_the_users(frame[0])]
    if not found:
        return ""
    name, number, line = found[-1]
    path = Path(name)
    with suppress(OSError, ValueError):  # a folder that was deleted; a file elsewhere, which is named in full
        path = path.relative_to(Path.cwd())
    return f"{path}, line {number}" + (f": {line}" if line else "")


_users_code: set[str] = set()  # installed packages and modules that the user named


def count_as_users(path: Path) -> None:
    """An installed package, or a module, that the user named (`module:function`) is theirs, as a file of theirs is."""
    _users_code.add(str(path))
    _is_the_users.cache_clear()


@cache
def _is_the_users(filename: str) -> bool:
    """Neither Python's, nor Covey's, nor a library's."""
    if filename.startswith("<"):
        return filename.startswith(("<ipython-input", "<stdin>"))
    others = map(sysconfig.get_path, ("stdlib", "platstdlib", "purelib", "platlib"))
    return _lies_in(filename, _users_code) or not _lies_in(filename, (*others, str(Path(__file__).parent)))


def _lies_in(filename: str, places: Iterable[str]) -> bool:
    return any(filename == place or filename.startswith(f"{place}{os.sep}") for place in places)


def first_error(error: BaseException) -> BaseException:
    """The error inside the groups that asyncio wraps around it."""
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return error


def unknown(kind: str, word: str, known: Iterable[str], prefix: str = "") -> InputError:
    """`unknown reward  exat` with what was probably meant and the list to choose from. `prefix`: what the name is typed
    after, shown with the suggestion."""
    names = sorted(known)
    lines = [f"unknown {kind}  {word}"]
    if guess := nearest(word, names, kind):
        lines.append(f"  did you mean   {prefix}{guess}?")
    lines.append(f"  known: {', '.join(names)}")
    return InputError("\n".join(lines))
