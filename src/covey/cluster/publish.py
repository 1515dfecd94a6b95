"""The driver's part in a publication: tells learner and engines when to send and when to take. Weights never pass
through the driver."""

from __future__ import annotations

import asyncio
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import IO, Any, Protocol

from covey.cluster.actors import ActorLost, answer
from covey.errors import RunFailed

Lost = dict[int, Exception]  # engines that died meanwhile
PeerLost = Callable[[int, Exception], None]


class Sender(Protocol):
    """The learner, as far as weights go."""

    async def write(self, folder: Path, version: int) -> Any: ...

    async def meet(self, members: int) -> Any: ...

    async def join(self, meeting: Any) -> None: ...

    async def broadcast(self) -> None: ...


class Publisher:
    """By file, in memory or in the run's folder."""

    def __init__(self, folder: Path, lock: IO[str] | None = None) -> None:
        """`folder` is this run's own, and removed at its end; `lock` says until then that it is in use."""
        self.folder = folder
        self._lock = lock
        self.warn: Callable[[str], None] = print
        self.version: int | None = None  # what engines have
        self._sender: Sender | None = None
        self._notice: Any = None

    async def publish(self, sender: Sender, version: int, actors: Mapping[int, Any]) -> Lost:
        self._sender = sender
        self._notice = await sender.write(self.folder, version)
        self.version = version
        lost = await _all({index: actor.take.remote(self._notice) for index, actor in actors.items()})
        self._remove_older(version)
        return lost

    async def bring(self, actor: Any, peers: Mapping[int, Any], lost: PeerLost) -> None:
        """The weights of the moment to an engine that has none. `lost` is told of peers that turn out to be dead."""
        if self._notice is not None:
            await answer(actor.take.remote(self._notice))

    def _remove_older(self, version: int) -> None:
        """The newest stays: an engine may die and need it."""
        from covey.weights.transport import remove_older

        remove_older(self.folder, version)

    def close(self) -> None:
        shutil.rmtree(self.folder, ignore_errors=True)
        if self._lock is not None:
            self._lock.close()


class CollectivePublisher(Publisher):
    """By broadcast. Whenever engines have changed, a new group is made. Where a broadcast fails, a file does."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        self._members: dict[int, Any] = {}

    async def publish(self, sender: Sender, version: int, actors: Mapping[int, Any]) -> Lost:
        try:
            await self._together(sender, version, actors)
        except ActorLost as error:
            self.warn(f"the broadcast of version {version} was interrupted ({error}); sent by file")
        except RunFailed:
            raise
        except Exception as error:  # whatever gloo or NCCL say: the fallback decides whether the run can go on
            self.warn(f"the broadcast of version {version} failed ({_first_line(error)}); sent by file")
        else:
            self._sender, self._notice, self.version = sender, None, version
            if len(actors) == 1:  # nobody else has them should it die, and the learner's will soon be newer
                self._notice = await sender.write(self.folder, version)
                self._remove_older(version)
            return {}
        self._members = {}
        return await super().publish(sender, version, actors)

    async def _together(self, sender: Sender, version: int, actors: Mapping[int, Any]) -> None:
        if self._members != dict(actors):
            meeting = await sender.meet(len(actors) + 1)
            joins = [answer(actor.join.remote(meeting, rank)) for rank, actor in enumerate(actors.values(), start=1)]
            await _first_failure(sender.join(meeting), *joins)
            self._members = dict(actors)
        await _first_failure(sender.broadcast(), *(answer(actor.receive.remote(version)) for actor in actors.values()))

    async def bring(self, actor: Any, peers: Mapping[int, Any], lost: PeerLost) -> None:
        """From an engine that has them: the learner's may be newer by now. Where all died at once, from the learner."""
        if self.version is None:
            return
        for index, peer in peers.items():
            if self._notice is not None:
                break
            try:
                self._notice = await answer(peer.write.remote(self.folder, self.version))
            except ActorLost as error:
                lost(index, error)
        if self._notice is None:
            assert self._sender is not None
            self.warn(f"no engine is left with version {self.version}; its weights come from the learner as it is now")
            self._notice = await self._sender.write(self.folder, self.version)
        await super().bring(actor, peers, lost)


async def _all(calls: Mapping[int, Any]) -> Lost:
    """Everybody is waited for; who died is named."""
    found = await asyncio.gather(*map(answer, calls.values()), return_exceptions=True)
    lost: Lost = {}
    for index, result in zip(calls, found, strict=True):
        if isinstance(result, ActorLost):
            lost[index] = result
        elif isinstance(result, BaseException):
            raise result
    return lost


async def _first_failure(*parts: Any) -> None:
    """All of them, or the first that fails; then nobody waits for the others."""
    jobs = [asyncio.ensure_future(part) for part in parts]
    try:
        await asyncio.gather(*jobs)
    finally:
        for job in jobs:
            job.cancel()
        await asyncio.gather(*jobs, return_exceptions=True)


def _first_line(error: Exception) -> str:
    return (str(error).splitlines() or [type(error).__name__])[0][:200]
