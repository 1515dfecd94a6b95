"""What can go wrong with a call. The call was made once, or never begun; nothing is tried again."""

from __future__ import annotations

from covey.errors import RunFailed, with_place

SHOWN = 10  # lines of what a process printed last


class WorkerError(Exception):
    """A call that brought no value."""


class WorkerTimeout(WorkerError):
    def __init__(self, function: str, seconds: float) -> None:
        super().__init__(function, seconds)  # all arguments: an exception is pickled by them
        self.function = function
        self.seconds = seconds

    def __str__(self) -> str:
        return f"{self.function} took longer than {self.seconds:g} s"


class WorkerDied(WorkerError):
    def __init__(self, function: str, how: str, tail: str = "") -> None:
        """`how`: "SIGSEGV", "exit code 3"; `tail`: the last that it printed."""
        super().__init__(function, how, tail)
        self.function = function
        self.how = how
        self.tail = tail

    def __str__(self) -> str:
        lines = self.tail.splitlines()
        fatal = [place for place, line in enumerate(lines) if line.startswith("Fatal Python error")]
        shown = lines[fatal[-1] :][:SHOWN] if fatal else lines[-SHOWN:]  # there the innermost call comes first
        return f"the process of {self.function} ended: {self.how}" + "".join(f"\n  | {line}" for line in shown)


class RemoteError(WorkerError):
    """The function's own exception, as text: not every exception can be sent. `place`: the line that raised it."""

    def __init__(self, type_name: str, message: str, traceback: str = "", place: str = "") -> None:
        super().__init__(type_name, message, traceback, place)
        self.type_name = type_name
        self.message = message
        self.traceback = traceback
        self.place = place

    def __str__(self) -> str:
        return with_place(f"{self.type_name}: {self.message}".removesuffix(": "), self.place)


class WorkersGone(RunFailed):
    """There are no workers any more, and there will be none: the pool was closed, or its template process ended."""
