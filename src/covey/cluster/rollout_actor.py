"""One engine in a process of its own, with its own copy of the model."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable
from typing import Any

from covey.types import Completion, Sampling

BuildEngine = Callable[[int], tuple[Any, Any]]  # number of the engine → its model, and the engine


class RolloutActor:
    """All calls run on one event loop, so requests are decoded together."""

    def __init__(self) -> None:
        self.paused = False
        self.model: Any = None
        self.engine: Any = None
        self._group: Any = None

    async def load(self, build: BuildEngine, index: int, threads: int) -> int:
        """The process id, once the model is there."""
        import torch

        torch.set_num_threads(threads)
        self.model, self.engine = build(index)
        return os.getpid()

    async def alive(self) -> None:
        """Answered by whoever is."""

    async def generate(self, token_ids: tuple[int, ...], sampling: Sampling) -> Completion:
        found: Completion = await self.engine.generate(token_ids, sampling)
        return found

    async def pause(self) -> None:
        self.paused = True
        await self.engine.pause()

    async def resume(self) -> None:
        self.paused = False
        await self.engine.resume()

    # -- weights -----------------------------------------------------------------------------------------------

    async def take(self, notice: Any) -> None:
        """New weights from a file. Sampling goes on while it is read and checked."""
        from covey.cluster.transport import read_notice

        await self._change(await asyncio.to_thread(read_notice, notice), notice.version)

    async def join(self, meeting: Any, rank: int) -> None:
        from covey.cluster.transport import WeightGroup

        self._group = None  # an earlier one ends first
        self._group = await asyncio.to_thread(WeightGroup, meeting, rank, node_address())

    async def receive(self, version: int) -> None:
        """New weights from the group's broadcast."""
        await self._change(await asyncio.to_thread(self._group.receive), version)

    async def write(self, folder: Any, version: int) -> Any:
        """The weights that this engine has, for one that has none."""
        from covey.cluster.transport import trained_weights, write_notice

        assert version == self.engine.version, f"asked for weights of version {version}, has {self.engine.version}"
        return await asyncio.to_thread(write_notice, trained_weights(self.model), folder, version)

    async def _change(self, weights: dict[str, Any], version: int) -> None:
        """Between two steps of the engine, all weights at once."""
        from covey.cluster.transport import load_weights

        if not self.paused:
            await self.engine.pause()
        await asyncio.to_thread(load_weights, self.model, weights)
        await self.engine.publish(self.model, version)
        if not self.paused:
            await self.engine.resume()

    async def forget(self) -> None:
        """The weights are the same; what was computed with them is void, so that a resumed run finds the same."""
        await self.engine.publish(self.model, self.engine.version)

    async def close(self) -> None:
        self.engine.close()


def node_address() -> str:
    """Of this machine, as the others of the cluster see it."""
    import ray

    return str(ray.util.get_node_ip_address())
