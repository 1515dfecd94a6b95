"""The worker's side of the channel: settings first, then requests, any number at once, until the engine has gone."""

from __future__ import annotations

import asyncio
import functools
import socket
from collections.abc import Callable
from typing import Any, Protocol

from covey.rollout.vllm.channel import Message, frame, receive_async

COMMANDS = ("generate", "load_file", "load_begin", "load_bucket", "load_end", "sleep", "wake")


class Backend(Protocol):
    """What samples. Every command is a coroutine of this name; what it returns is the answer."""

    async def generate(self, prompt: list[int], sampling: Message) -> Message: ...

    async def load_file(self, path: str, digest: str) -> None: ...

    async def load_begin(self) -> None: ...

    async def load_bucket(self, handle: Message, layout: list[Message]) -> None: ...

    async def load_end(self) -> None: ...

    async def sleep(self) -> None: ...

    async def wake(self, what: list[str]) -> None: ...

    def close(self) -> None: ...


async def serve(connection: socket.socket, start: Callable[[Message], Backend]) -> None:
    reader, writer = await asyncio.open_connection(sock=connection)
    settings = await receive_async(reader)
    if settings is None:
        return
    try:
        backend = start(settings)
    except Exception as error:
        writer.write(frame({"id": 0, "error": _words(error)}))
        await writer.drain()
        raise
    writer.write(frame({"id": 0, "done": {}}))
    tasks: dict[int, asyncio.Task[None]] = {}
    try:
        while (message := await receive_async(reader)) is not None:
            number = message.pop("id")
            do = message.pop("do")
            if do == "abort":
                if number in tasks:
                    tasks[number].cancel()
                continue
            assert do in COMMANDS, do
            if do != "generate":  # what was aborted is out of the way before weights change
                await _cancelled(tasks)
            task = asyncio.create_task(_answer(writer, number, getattr(backend, do), message))
            tasks[number] = task
            task.add_done_callback(functools.partial(tasks.pop, number))  # the task itself is pop's default
    finally:
        backend.close()


async def _cancelled(tasks: dict[int, asyncio.Task[None]]) -> None:
    ending = [task for task in tasks.values() if task.cancelling()]
    if ending:
        await asyncio.wait(ending)


async def _answer(writer: asyncio.StreamWriter, number: int, command: Callable[..., Any], given: Message) -> None:
    try:
        answer: Message = {"id": number, "done": await command(**given) or {}}
    except Exception as error:
        answer = {"id": number, "error": _words(error)}
    writer.write(frame(answer))
    await writer.drain()


def _words(error: Exception) -> str:
    cause = error.__cause__ or error
    return f"{type(cause).__name__}: {cause}"
