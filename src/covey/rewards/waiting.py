"""Waiting on an event loop for what a thread works out."""

from __future__ import annotations

import asyncio
from concurrent.futures import Future
from contextlib import suppress
from typing import TypeVar

Result = TypeVar("Result")


async def result_of(future: Future[Result]) -> Result:
    """The same future may be awaited by many, on several event loops; whoever is cancelled does not cancel it."""
    loop = asyncio.get_running_loop()
    told = asyncio.Event()

    def tell(_: Future[Result]) -> None:
        with suppress(RuntimeError):  # the loop has closed: nobody waits any more
            loop.call_soon_threadsafe(told.set)

    future.add_done_callback(tell)
    await told.wait()
    return future.result()
