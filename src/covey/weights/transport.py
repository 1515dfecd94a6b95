"""`WeightTransport`, and the transports that are not specific to vLLM.

In a cluster a transport runs in the driver, which only coordinates learner and engines: the weights do not pass through
it. Nothing here imports torch.
"""

from __future__ import annotations

import asyncio
import shutil
from collections.abc import Awaitable, Callable, Mapping
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any, Protocol

from covey.errors import RunFailed
from covey.weights.files import WeightManifest, remove_older

if TYPE_CHECKING:
    from covey.weights.collective import Rendezvous

Lost = dict[int, Exception]  # receivers that died meanwhile


class ReceiverLost(Exception):
    """The process behind a receiver has died or cannot be reached."""


class WeightTransport(Protocol):
    """Sends the learner's weights to the receivers, and returns when all of them have loaded the whole version."""

    async def publish(self, source: Any, version: int, receivers: Mapping[int, Any]) -> Lost:
        """`source`: what `learner.weights()` returns. The result names the receivers that died meanwhile."""
        ...

    def close(self) -> None: ...


class WeightSource(Protocol):
    """A learner in other processes. All of its ranks take part in each call."""

    async def write(self, folder: Path, version: int) -> WeightManifest: ...

    async def rendezvous(self, members: int) -> Rendezvous: ...

    async def join(self, rendezvous: Rendezvous) -> None: ...

    async def broadcast(self) -> None: ...


class WeightReceiver(Protocol):
    """An engine in another process. A call is sent at once; awaiting its result may raise `ReceiverLost`."""

    def load_weights(self, manifest: WeightManifest) -> Awaitable[None]: ...

    def join_group(self, rendezvous: Rendezvous, rank: int) -> Awaitable[None]: ...

    def receive_weights(self, version: int) -> Awaitable[None]: ...

    def write_weights(self, folder: Path, version: int) -> Awaitable[WeightManifest]:
        """Write the weights that this engine samples with, for a new engine that has none yet."""
        ...


class InProcessTransport:
    """The engine samples with the learner's own module, so nothing moves."""

    async def publish(self, source: Any, version: int, receivers: Mapping[int, Any]) -> Lost:
        assert all(module is source for module in receivers.values()), "the engine shares the learner's module"
        return {}

    def close(self) -> None:
        pass


class FileTransport:
    """The learner writes one file, every engine reads it. In shared memory all engines map the same pages."""

    def __init__(self, folder: Path, lock: IO[str] | None = None) -> None:
        """`folder` belongs to this run alone and is removed at its end. `lock` marks it as in use until then."""
        self.folder = folder
        self.warn: Callable[[str], None] = print
        self.version: int | None = None  # the last one published
        self._lock = lock
        self._source: WeightSource | None = None
        self._manifest: WeightManifest | None = None

    async def publish(self, source: WeightSource, version: int, receivers: Mapping[int, WeightReceiver]) -> Lost:
        self._source = source
        manifest = self._manifest = await source.write(self.folder, version)
        self.version = version
        loading = [receiver.load_weights(manifest) for receiver in receivers.values()]
        results = await asyncio.gather(*loading, return_exceptions=True)
        lost: Lost = {}
        for index, result in zip(receivers, results, strict=True):
            if isinstance(result, ReceiverLost):
                lost[index] = result
            elif isinstance(result, BaseException):
                raise result
        remove_older(self.folder, version)  # the newest stays, for an engine that replaces a dead one
        return lost

    async def catch_up(
        self,
        receiver: WeightReceiver,
        peers: Mapping[int, WeightReceiver],
        on_lost: Callable[[int, Exception], None],
    ) -> None:
        """Send the last published version to an engine that was started later. `on_lost` is called for peers that turn
        out to be dead."""
        if self._manifest is not None:
            await receiver.load_weights(self._manifest)

    def close(self) -> None:
        shutil.rmtree(self.folder, ignore_errors=True)
        if self._lock is not None:
            self._lock.close()


class CollectiveTransport(FileTransport):
    """Broadcasts the weights. The group is recreated whenever the engines have changed. If a broadcast fails, a file
    replaces it."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        self._members: dict[int, WeightReceiver] = {}

    async def publish(self, source: WeightSource, version: int, receivers: Mapping[int, WeightReceiver]) -> Lost:
        try:
            await self._broadcast(source, version, receivers)
        except ReceiverLost as error:
            self.warn(f"the broadcast of version {version} was interrupted ({error}); sent by file")
        except RunFailed:
            raise
        except Exception as error:  # whatever gloo or NCCL raise: the file decides whether the run can continue
            message = (str(error).splitlines() or [type(error).__name__])[0][:200]
            self.warn(f"the broadcast of version {version} failed ({message}); sent by file")
        else:
            self._source, self._manifest, self.version = source, None, version
            if len(receivers) == 1:  # if it dies, no peer has this version, and the learner's weights will be newer
                self._manifest = await source.write(self.folder, version)
                remove_older(self.folder, version)
            return {}
        self._members = {}
        return await super().publish(source, version, receivers)

    async def _broadcast(self, source: WeightSource, version: int, receivers: Mapping[int, WeightReceiver]) -> None:
        if self._members != dict(receivers):
            rendezvous = await source.rendezvous(len(receivers) + 1)
            joining = [receiver.join_group(rendezvous, rank) for rank, receiver in enumerate(receivers.values(), 1)]
            await _until_one_fails(source.join(rendezvous), *joining)
            self._members = dict(receivers)
        await _until_one_fails(source.broadcast(), *(one.receive_weights(version) for one in receivers.values()))

    async def catch_up(
        self,
        receiver: WeightReceiver,
        peers: Mapping[int, WeightReceiver],
        on_lost: Callable[[int, Exception], None],
    ) -> None:
        """Get the weights from an engine that has the version, since the learner's may be newer, or from the learner if
        all engines died at once."""
        if self.version is None:
            return
        for index, peer in peers.items():
            if self._manifest is not None:
                break
            try:
                self._manifest = await peer.write_weights(self.folder, self.version)
            except ReceiverLost as error:
                on_lost(index, error)
        if self._manifest is None:
            assert self._source is not None
            self.warn(f"no engine is left with version {self.version}; its weights come from the learner as it is now")
            self._manifest = await self._source.write(self.folder, self.version)
        await super().catch_up(receiver, peers, on_lost)


async def _until_one_fails(*calls: Awaitable[Any]) -> None:
    """Wait for all calls. The first failure is raised and the other calls are cancelled."""
    jobs = [asyncio.ensure_future(call) for call in calls]
    try:
        await asyncio.gather(*jobs)
    finally:
        for job in jobs:
            job.cancel()
        await asyncio.gather(*jobs, return_exceptions=True)
