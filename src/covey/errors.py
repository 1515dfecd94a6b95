"""A user's mistake, told so that it can be mended: what is wrong, where, and the fix."""

from __future__ import annotations

import difflib
import sysconfig
import traceback
from collections.abc import Iterable
from pathlib import Path


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
    """An error of others' code in a line. A SystemExit says nothing of itself but a number: where it came from does."""
    if not isinstance(error, SystemExit):
        return f"{type(error).__name__}: {error}"
    frames = traceback.extract_tb(error.__traceback__)
    installed = (*map(sysconfig.get_path, ("stdlib", "purelib", "platlib")), str(Path(__file__).parent))
    own = [frame for frame in frames if not frame.filename.startswith(("<", *installed))] or frames
    place = f" at {own[-1].filename}, line {own[-1].lineno}" if own else ""
    return f"SystemExit: sys.exit({error.code!r}) was called{place}"


def nearest(word: str, known: Iterable[str]) -> str | None:
    """The known word that was probably meant, if one is close enough."""
    found = difflib.get_close_matches(word, list(known), n=1, cutoff=0.6)
    return found[0] if found else None


def unknown(kind: str, word: str, known: Iterable[str]) -> InputError:
    """`unknown reward  exat` with the nearest match and the list to choose from."""
    names = sorted(known)
    lines = [f"unknown {kind}  {word}"]
    if guess := nearest(word, names):
        lines.append(f"  did you mean   {guess}?")
    lines.append(f"  known: {', '.join(names)}")
    return InputError("\n".join(lines))
