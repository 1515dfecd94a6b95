"""A Python interpreter that keeps its state between cells, like a notebook's. It belongs to one episode.

The process starts with the first cell. A cell that runs past its deadline, or over its memory or output, costs the
session: it is killed, and the next cell starts afresh and says so.

Between two cells the interpreter is stopped, with its threads, and every other process that a cell started is killed:
a session that waits for its next cell uses no processor (`inside/cells.py`).
"""

from __future__ import annotations

import asyncio
import json
import os
from contextlib import suppress
from typing import TYPE_CHECKING

from covey.sandbox.outcome import Outcome
from covey.sandbox.process import Process

if TYPE_CHECKING:
    from covey.sandbox.sandbox import Sandbox

RESTARTED = "[the session was started afresh: variables and imports of earlier cells are gone]\n"
LEFT_ONE = "[a process that this cell left running was ended]\n"
LEFT = "[{} processes that this cell left running were ended]\n"


class Session:
    def __init__(self, sandbox: Sandbox) -> None:
        self._sandbox = sandbox
        self._process: Process | None = None
        self._commands = -1  # cells, to the interpreter
        self._turns = -1  # a byte, to its keeper: wake the interpreter
        self._cells = 0
        self._lost = False  # what earlier cells had defined
        self._busy = asyncio.Lock()

    async def execute(self, code: str, seconds: float | None = None) -> Outcome:
        """Run a cell. The value of a last expression is printed, as in a notebook."""
        async with self._busy, self._sandbox.gate:
            limit = self._sandbox.limits.seconds if seconds is None else seconds
            try:
                if self._process is not None and self._process.ended:  # between two cells
                    self._lost = True
                    self._end()
                if self._process is None:
                    await self._start()
                outcome = await self._cell(code, limit)
            except BaseException:
                self._lost = self._lost or self._cells > 0
                self._end()
                raise
            self._lost = self._process is None
            return outcome

    async def close(self) -> None:
        self._end()

    async def __aenter__(self) -> Session:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    async def _start(self) -> None:
        theirs: list[int] = []
        try:
            reader, self._commands = os.pipe()
            theirs.append(reader)
            reader, self._turns = os.pipe()
            theirs.append(reader)
            request = {"role": "session", "commands": theirs[0], "turns": theirs[1]}
            self._process = self._sandbox.process(request, pass_fds=tuple(theirs))
        finally:
            for file in theirs:
                os.close(file)
        os.set_blocking(self._commands, False)
        self._cells = 0
        await self._process.ready()

    async def _cell(self, code: str, seconds: float) -> Outcome:
        process = self._process
        assert process is not None
        self._cells += 1
        timer = asyncio.get_running_loop().call_later(seconds, process.kill, "deadline")
        try:
            with suppress(BrokenPipeError):  # the end of the process says the rest
                os.write(self._turns, b"\n")
                await self._send(json.dumps({"code": code}).encode() + b"\n")
            done = await self._done(process)
        finally:
            timer.cancel()
        out, err, truncated = process.output()
        killed = process.killed or ("output" if truncated else None)
        exit_code = None if killed else done[0] if done is not None else process.exit_code()
        if killed or done is None:
            self._end()
        note = RESTARTED if self._lost else ""
        if done is not None and done[1]:
            err += LEFT_ONE if done[1] == 1 else LEFT.format(done[1])
        return Outcome(out, note + err, exit_code, killed == "deadline", truncated, killed, restarted=self._lost)

    async def _done(self, process: Process) -> tuple[int, int] | None:
        """The cell's exit code and how many processes were ended with it; None when the session ended instead."""
        while (message := await process.message()) is not None:
            if "killed" in message:
                process.killed = str(message["killed"])
            if message.get("done") == self._cells:
                return message["code"], message["ended"]
        return None

    async def _send(self, data: bytes) -> None:
        loop = asyncio.get_running_loop()
        process = self._process
        assert process is not None
        while data:
            try:
                data = data[os.write(self._commands, data) :]
            except BlockingIOError:  # it reads again when what it does now is done, or it is killed
                writable = asyncio.Event()
                loop.add_writer(self._commands, writable.set)
                try:
                    await writable.wait()
                finally:
                    loop.remove_writer(self._commands)

    def _end(self) -> None:
        if self._process is not None:
            self._process.close()
            self._process = None
        for file in (self._commands, self._turns):
            if file >= 0:
                os.close(file)
        self._commands = self._turns = -1
