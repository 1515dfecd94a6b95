"""Several engines, each an actor in Ray, behind the protocol of one engine.

    consumes         requests; weights as the learner publishes them
    produces         completions, every token with the version that sampled it
    waits for        a live engine: one that died is replaced and gets the current weights
    is unblocked by  the replacement, or by the end of the run if replacements die too

A request whose engine died is sent to another one, once. Its random stream belongs to the request, so the completion is
the one it would have had.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Awaitable, Callable, Coroutine, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from covey.cluster.actors import ActorLost, kill, result
from covey.errors import EpisodeError, RunFailed
from covey.protocols import Metrics
from covey.types import Completion, ImageSpan, Sampling
from covey.weights.files import WeightManifest
from covey.weights.transport import FileTransport

if TYPE_CHECKING:
    from covey.weights.collective import Rendezvous

# -- Routing ---------------------------------------------------------------------------------------------------------

SLACK = 8  # an engine with a cached prefix may have this many more requests than the idlest engine
_BASE, _PRIME = 1_000_003, 2**61 - 1


class Router:
    """Sends a request to the engine that has computed the longest prefix of its prompt, unless that engine is much
    busier than the idlest one. The attempts at a task share their prompt, and later turns of an episode extend it."""

    def __init__(self) -> None:
        self._engine_of: dict[int, int] = {}  # hash of a whole prompt → engine

    def pick(self, prompt: Sequence[int], loads: Mapping[int, int]) -> int:
        """One of the engines in `loads`: engine → its number of requests."""
        idlest = min(loads, key=lambda engine: (loads[engine], engine))
        cached, prefix = None, 0
        for token in prompt:
            prefix = (prefix * _BASE + token + 1) % _PRIME
            cached = self._engine_of.get(prefix, cached)
        if cached is None or cached not in loads:
            self._engine_of[prefix] = idlest
            return idlest
        self._engine_of.setdefault(prefix, cached)
        return cached if loads[cached] <= loads[idlest] + SLACK else idlest

    def flush(self) -> None:
        """Forget all prefixes, because the engines' caches have been flushed."""
        self._engine_of.clear()


# -- One engine ------------------------------------------------------------------------------------------------------

BuildEngine = Callable[[int], tuple[Any, Any]]  # number of the engine → its model, and the engine


class RolloutActor:
    """One engine in a process of its own, with its own copy of the model. All calls run on one event loop, so requests
    are decoded together."""

    def __init__(self) -> None:
        self.paused = False
        self.model: Any = None
        self.engine: Any = None
        self._group: Any = None

    async def load(self, build: BuildEngine, index: int, threads: int) -> int:
        """Load the model. Returns the process id."""
        import torch

        torch.set_num_threads(threads)
        self.model, self.engine = build(index)
        return os.getpid()

    async def alive(self) -> None:
        """Return, if the process responds."""

    async def generate(self, token_ids: tuple[int, ...], sampling: Sampling) -> Completion:
        completion: Completion = await self.engine.generate(token_ids, sampling)
        return completion

    async def pause(self) -> None:
        self.paused = True
        await self.engine.pause()

    async def resume(self) -> None:
        self.paused = False
        await self.engine.resume()

    async def flush_cache(self) -> None:
        """Drop cached keys and values, but not the weights. A resumed run starts with an empty cache too."""
        await self.engine.publish(self.model, self.engine.version)

    async def close(self) -> None:
        self.engine.close()

    # -- covey.weights.transport.WeightReceiver ------------------------------------------------------------------------

    async def load_weights(self, manifest: WeightManifest) -> None:
        """Sampling continues while the file is read and checked."""
        from covey.weights.files import read_weights

        await self._swap_weights(await asyncio.to_thread(read_weights, manifest), manifest.version)

    async def join_group(self, rendezvous: Rendezvous, rank: int) -> None:
        from covey.weights.collective import WeightGroup

        self._group = None  # an earlier group ends first
        self._group = await asyncio.to_thread(WeightGroup, rendezvous, rank, node_address())

    async def receive_weights(self, version: int) -> None:
        await self._swap_weights(await asyncio.to_thread(self._group.receive), version)

    async def write_weights(self, folder: Path, version: int) -> WeightManifest:
        from covey.weights.files import write_weights
        from covey.weights.names import trained_weights

        assert version == self.engine.version, f"asked for weights of version {version}, has {self.engine.version}"
        return await asyncio.to_thread(write_weights, trained_weights(self.model), folder, version)

    async def _swap_weights(self, weights: dict[str, Any], version: int) -> None:
        """Load all weights at once, between two steps of the engine."""
        from covey.weights.names import load_weights

        if not self.paused:
            await self.engine.pause()
        await asyncio.to_thread(load_weights, self.model, weights)
        await self.engine.publish(self.model, version)
        if not self.paused:
            await self.engine.resume()


def node_address() -> str:
    """The address of this machine, as the others of the cluster see it."""
    import ray

    return str(ray.util.get_node_ip_address())


@dataclass(frozen=True)
class ActorReceiver:
    """An engine's actor as a `WeightReceiver`: plain methods instead of Ray's `.remote()`."""

    actor: Any

    def load_weights(self, manifest: WeightManifest) -> Awaitable[None]:
        return result(self.actor.load_weights.remote(manifest))

    def join_group(self, rendezvous: Rendezvous, rank: int) -> Awaitable[None]:
        return result(self.actor.join_group.remote(rendezvous, rank))

    def receive_weights(self, version: int) -> Awaitable[None]:
        return result(self.actor.receive_weights.remote(version))

    def write_weights(self, folder: Path, version: int) -> Awaitable[WeightManifest]:
        return result(self.actor.write_weights.remote(folder, version))


# -- All engines -----------------------------------------------------------------------------------------------------

MAX_DEATHS = 3  # of one replica without a completion in between; one more ends the run
PULSE = 60.0  # seconds between two liveness checks of an engine
HUNG = 600.0  # seconds without a response to a check; kernels may be compiling meanwhile


class EngineLost(EpisodeError):
    """A request's engine died, and so did the one that the request was sent to again."""

    cause = "engine"


class Replica:
    """One of the engines. Its actor is replaced when it dies."""

    def __init__(self, index: int) -> None:
        self.index = index
        self.actor: Any = None  # None: being started
        self.pid = 0
        self.load = 0  # requests in progress
        self.deaths = 0  # since its last completion


class RayEngine:
    owns_weights = True  # each engine has its own copy

    def __init__(
        self,
        count: int,
        spawn: Callable[[int], Any],
        load: Callable[[int, Any], Any],
        transport: FileTransport,
        *,
        colocated: bool,
        warn: Callable[[str], None] = print,
    ) -> None:
        """`spawn(index)` creates an actor; `load(index, actor)` starts loading its model and returns a reference to its
        process id. `colocated`: engines pause while the learner works; otherwise they continue."""
        self.version = 0
        self.generated_tokens = 0
        self.reissued = 0  # requests sent again because their engine died
        self.replaced = 0  # engines started in place of a dead one
        self.colocated = colocated
        self.transport = transport
        self.warn = transport.warn = warn
        self.replicas = [Replica(index) for index in range(count)]
        self._spawn, self._load = spawn, load
        self._router = Router()
        self._paused = False
        self._failed: RunFailed | None = None
        self._changed = asyncio.Event()  # an engine has been replaced, or the run has failed
        self._weights_lock = asyncio.Lock()  # a replacement gets its weights before or after a publication
        self._jobs: set[asyncio.Task[None]] = set()
        spawned = [(replica, spawn(replica.index)) for replica in self.replicas]
        self._starting = [(replica, actor, load(replica.index, actor)) for replica, actor in spawned]

    def set_warn(self, warn: Callable[[str], None]) -> None:
        """Set the function that reports deaths of engines."""
        self.warn = self.transport.warn = warn

    def metrics(self) -> Metrics:
        return {"cluster/reissued": float(self.reissued), "cluster/replaced": float(self.replaced)}

    # -- requests ------------------------------------------------------------------------------------------------

    async def generate(
        self, token_ids: Sequence[int], sampling: Sampling, images: Sequence[ImageSpan] = ()
    ) -> Completion:
        assert not images, "refused when the run is prepared (check_vision)"
        for is_retry in (False, True):
            replica = await self._pick(token_ids)
            actor = replica.actor
            replica.load += 1
            try:
                completion: Completion = await result(actor.generate.remote(tuple(token_ids), sampling))
            except ActorLost as error:
                self._lost(replica, actor, error)
                self.reissued += not is_retry
                continue
            finally:
                replica.load -= 1
            replica.deaths = 0
            self.generated_tokens += len(completion.token_ids)
            return completion
        raise EngineLost("the engine died during the request, and so did the one that the request was sent to again")

    async def _pick(self, prompt: Sequence[int]) -> Replica:
        while not (loads := {r.index: r.load for r in self._live()}):
            self._changed.clear()
            self._check()
            await self._changed.wait()
        self._check()
        return self.replicas[self._router.pick(prompt, loads)]

    def _live(self) -> list[Replica]:
        return [replica for replica in self.replicas if replica.actor is not None]

    def _check(self) -> None:
        if self._failed is not None:
            raise self._failed

    # -- weights -------------------------------------------------------------------------------------------------

    async def publish(self, weights: Any, version: int) -> None:
        """`weights` is the learner, which sends them itself. Engines that die meanwhile are replaced, and the new ones
        get the weights by the same transport. Publishing the last version again only flushes the engines' caches."""
        await self._all_started()
        async with self._weights_lock:
            if version == self.transport.version:
                await self._call_all(lambda actor: actor.flush_cache.remote())
            else:
                actors = {replica.index: replica.actor for replica in self._live()}
                receivers = {index: ActorReceiver(actor) for index, actor in actors.items()}
                for index, error in (await self.transport.publish(weights, version, receivers)).items():
                    self._lost(self.replicas[index], actors[index], error)
            self.version = version
            self._router.flush()
        self._check()

    async def pause(self) -> None:
        """Engines with devices of their own keep sampling; they load new weights between two tokens."""
        if self.colocated:
            self._paused = True
            await self._call_all(lambda actor: actor.pause.remote())

    async def resume(self) -> None:
        if self._paused:
            self._paused = False
            await self._call_all(lambda actor: actor.resume.remote())

    async def _call_all(self, call: Callable[[Any], Any]) -> None:
        """Call all live engines. An engine that dies is replaced; its replacement is not called."""

        async def call_one(replica: Replica, actor: Any) -> None:
            try:
                await result(call(actor))
            except ActorLost as error:
                self._lost(replica, actor, error)

        await asyncio.gather(*(call_one(replica, replica.actor) for replica in self._live()))

    def close(self) -> None:
        for job in self._jobs:
            job.cancel()
        _close_all([*(actor for _, actor, _ in self._starting), *(replica.actor for replica in self._live())])
        for replica in self.replicas:
            replica.actor = None
        self.transport.close()

    # -- deaths and replacements -----------------------------------------------------------------------------------

    async def _all_started(self) -> None:
        if not self._starting:
            return
        starting, self._starting = self._starting, []
        try:
            while starting:
                replica, actor, loading = starting[0]
                try:
                    replica.pid = await result(loading)
                    replica.actor = actor
                except ActorLost as error:
                    kill(actor)
                    await self._start_another(replica, str(error), self._load_model)
                del starting[0]
        except BaseException:
            self._starting = starting  # `close` ends these too
            raise
        self._start(self._watch())

    async def _watch(self) -> None:
        """Check all engines regularly: a process that hangs raises no error, and its requests would wait forever."""
        while True:
            await asyncio.sleep(PULSE)
            await asyncio.gather(*(self._check_alive(replica, replica.actor) for replica in self._live()))

    async def _check_alive(self, replica: Replica, actor: Any) -> None:
        try:
            await asyncio.wait_for(result(actor.alive.remote()), HUNG)
        except ActorLost as error:
            self._lost(replica, actor, error)
        except TimeoutError:  # our own process may have been suspended: check once more
            try:
                await asyncio.wait_for(result(actor.alive.remote()), PULSE)
            except (ActorLost, TimeoutError):
                self._lost(replica, actor, ActorLost(f"it gave no sign of life for {HUNG:g} s"))

    def _start(self, work: Coroutine[Any, Any, None]) -> None:
        job = asyncio.get_running_loop().create_task(work)
        self._jobs.add(job)
        job.add_done_callback(self._jobs.discard)

    def _lost(self, replica: Replica, actor: Any, error: Exception) -> None:
        """Replace a dead engine. Several requests may report the same death; only the first report counts."""
        if replica.actor is not actor:
            return
        replica.actor = None
        kill(actor)  # an unreachable actor must not respond later
        self._start(self._replace(replica, str(error)))

    async def _replace(self, replica: Replica, why: str) -> None:
        try:
            await self._start_another(replica, why, self._load_model_and_weights)
        except Exception as error:
            self._failed = error if isinstance(error, RunFailed) else RunFailed(f"engine {replica.index}: {error}")
        finally:
            self._changed.set()

    async def _start_another(
        self, replica: Replica, why: str, prepare: Callable[[Replica, Any], Coroutine[Any, Any, None]]
    ) -> None:
        """Start actors until one is ready. Raises `RunFailed` after more than `MAX_DEATHS` deaths in a row."""
        while replica.actor is None:
            replica.deaths += 1
            if replica.deaths > MAX_DEATHS:
                raise RunFailed(f"engine {replica.index} died {replica.deaths} times without an answer: {why}")
            self.warn(f"engine {replica.index} died and is replaced: {why}")
            self.replaced += 1
            actor = self._spawn(replica.index)
            try:
                await prepare(replica, actor)
            except ActorLost as error:
                kill(actor)
                why = str(error)

    async def _load_model(self, replica: Replica, actor: Any) -> None:
        """Load a model before the first publication, which sends the weights."""
        replica.pid = await result(self._load(replica.index, actor))
        replica.actor = actor

    async def _load_model_and_weights(self, replica: Replica, actor: Any) -> None:
        replica.pid = await result(self._load(replica.index, actor))
        async with self._weights_lock:
            actors = {peer.index: peer.actor for peer in self._live()}
            peers = {index: ActorReceiver(peer) for index, peer in actors.items()}
            await self.transport.catch_up(
                ActorReceiver(actor),
                peers,
                lambda index, error: self._lost(self.replicas[index], actors[index], error),
            )
            paused = False
            while paused != self._paused:  # the others may be paused or resumed meanwhile
                paused = not paused
                await result((actor.pause if paused else actor.resume).remote())
            replica.actor = actor


def _close_all(actors: list[Any]) -> None:
    import ray

    if not ray.is_initialized():
        return
    if actors:
        ray.wait([actor.close.remote() for actor in actors], num_returns=len(actors), timeout=5)
    for actor in actors:
        kill(actor)
