"""A Python interpreter that keeps its state between cells, like a notebook's. It belongs to one episode.

The process starts with the first cell. A cell that runs past its deadline, or over its memory or output, costs the
session: it is killed, and the next cell starts afresh and says so.
"""

from __future__ import annotations

import asyncio
import json
import os
from typing import TYPE_CHECKING

from covey.sandbox.outcome import Outcome
from covey.sandbox.process import Process

if TYPE_CHECKING:
    from covey.sandbox.sandbox import Sandbox

RESTARTED = "[the session was started afresh: variables and imports of earlier cells are gone]\n"


class Session:
    def __init__(self, sandbox: Sandbox) -> None:
        self._sandbox = sandbox
        self._process: Process | None = None
        self._commands = -1
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
        theirs, self._commands = os.pipe()
        try:
            self._process = self._sandbox.process({"role": "session", "commands": theirs}, pass_fds=(theirs,))
        finally:
            os.close(theirs)
        os.set_blocking(self._commands, False)
        self._cells = 0
        await self._process.ready()

    async def _cell(self, code: str, seconds: float) -> Outcome:
        process = self._process
        assert process is not None
        self._cells += 1
        timer = asyncio.get_running_loop().call_later(seconds, process.kill, "deadline")
        try:
            await self._send(json.dumps({"code": code}).encode() + b"\n")
            done = await self._done(process)
        finally:
            timer.cancel()
        out, err, truncated = process.output()
        killed = process.killed or ("output" if truncated else None)
        exit_code = None if killed else done if done is not None else process.exit_code()
        if killed or done is None:
            self._end()
        note = RESTARTED if self._lost else ""
        return Outcome(out, note + err, exit_code, killed == "deadline", truncated, killed, restarted=self._lost)

    async def _done(self, process: Process) -> int | None:
        """The exit code of the cell; None when the process ended instead."""
        while (message := await process.message()) is not None:
            if "killed" in message:
                process.killed = str(message["killed"])
            code = message.get("code")
            if message.get("done") == self._cells and isinstance(code, int):
                return code
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
            except BrokenPipeError:
                return  # the end of the process says the rest

    def _end(self) -> None:
        if self._process is not None:
            self._process.close()
            self._process = None
        if self._commands >= 0:
            os.close(self._commands)
            self._commands = -1
