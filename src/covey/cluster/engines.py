"""Which engine gets a request: the one that has computed the beginning of its prompt, unless it has too much to do.

Attempts at a task begin with the same prompt, and later turns of an episode go on from it. Who was asked with a prompt
is its home; the home of the longest known beginning counts.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable, Coroutine, Mapping, Sequence
from typing import Any

from covey.cluster.actors import ActorLost, answer, end
from covey.cluster.publish import Publisher
from covey.errors import EpisodeError, RunFailed
from covey.protocols import Metrics
from covey.types import Completion, Sampling

SLACK = 8  # requests that a home may have more than whoever has the fewest
_BASE, _PRIME = 1_000_003, 2**61 - 1


class Router:
    def __init__(self) -> None:
        self._homes: dict[int, int] = {}  # hash of a whole prompt → engine

    def pick(self, prompt: Sequence[int], loads: Mapping[int, int]) -> int:
        """One of the engines in `loads`, which says how much each has to do."""
        idlest = min(loads, key=lambda engine: (loads[engine], engine))
        home, whole = None, 0
        for token in prompt:
            whole = (whole * _BASE + token + 1) % _PRIME
            home = self._homes.get(whole, home)
        if home is None or home not in loads:
            self._homes[whole] = idlest
            return idlest
        self._homes.setdefault(whole, home)
        return home if loads[home] <= loads[idlest] + SLACK else idlest

    def forget(self) -> None:
        """New weights: what engines have computed is void."""
        self._homes.clear()


# -- One engine in a process of its own, with its own copy of the model ------------------------------------------------

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
        from covey.weights.transport import read_notice

        await self._change(await asyncio.to_thread(read_notice, notice), notice.version)

    async def join(self, meeting: Any, rank: int) -> None:
        from covey.weights.transport import WeightGroup

        self._group = None  # an earlier one ends first
        self._group = await asyncio.to_thread(WeightGroup, meeting, rank, node_address())

    async def receive(self, version: int) -> None:
        """New weights from the group's broadcast."""
        await self._change(await asyncio.to_thread(self._group.receive), version)

    async def write(self, folder: Any, version: int) -> Any:
        """The weights that this engine has, for one that has none."""
        from covey.weights.transport import trained_weights, write_notice

        assert version == self.engine.version, f"asked for weights of version {version}, has {self.engine.version}"
        return await asyncio.to_thread(write_notice, trained_weights(self.model), folder, version)

    async def _change(self, weights: dict[str, Any], version: int) -> None:
        """Between two steps of the engine, all weights at once."""
        from covey.weights.transport import load_weights

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


# -- Several engines, each an actor in Ray, behind the protocol of one -------------------------------------------------
# consumes        requests; weights as the learner publishes them
# produces        answers, each of whole weights, every token with the version that drew it
# waits for       an engine that is there: one that died is replaced and given the weights of the moment
# is unblocked    by the replacement, or by the end of the run where replacements die too
#
# A request whose engine died is asked once more. Its random stream is its own: it gets the answer it would have had.

DEATHS = 3  # of one engine without an answer in between, after which the run fails
PULSE = 60.0  # seconds between two questions whether an engine is alive
HUNG = 600.0  # seconds without an answer to that; kernels may be compiled meanwhile


class EngineLost(EpisodeError):
    """A request's engine died, and so did the one that was asked again."""

    cause = "engine"


class Place:
    """Where an engine is, or will be again."""

    def __init__(self, index: int) -> None:
        self.index = index
        self.actor: Any = None  # None: being started
        self.pid = 0
        self.load = 0  # requests under way
        self.deaths = 0  # since its last answer


class RayEngine:
    owns_weights = True  # its weights are copies

    def __init__(
        self,
        count: int,
        spawn: Callable[[int], Any],
        load: Callable[[int, Any], Any],
        publisher: Publisher,
        *,
        colocated: bool,
        warn: Callable[[str], None] = print,
    ) -> None:
        """`spawn(index)` makes an actor, `load(index, actor)` is its reference to the process id once it has a model.
        `colocated`: engines stand still while the learner learns; else they go on."""
        self.version = 0
        self.generated_tokens = 0
        self.on_finished: Callable[[], None] = lambda: None  # called for every answer
        self.reissued = 0  # requests asked again because their engine died
        self.replaced = 0  # engines started in place of one that died
        self.colocated = colocated
        self.publisher = publisher
        self.warn = publisher.warn = warn
        self.places = [Place(index) for index in range(count)]
        self._spawn, self._load = spawn, load
        self._router = Router()
        self._paused = False
        self._failed: RunFailed | None = None
        self._changed = asyncio.Event()  # an engine is there again, or the run has failed
        self._weights_lock = asyncio.Lock()  # a replacement takes its weights before or after a publication
        self._jobs: set[asyncio.Task[None]] = set()
        self._starting = [(place, spawn(place.index)) for place in self.places]
        self._loading = [load(place.index, actor) for place, actor in self._starting]

    def tell(self, warn: Callable[[str], None]) -> None:
        """Where to say that engines die, from now on."""
        self.warn = self.publisher.warn = warn

    def metrics(self) -> Metrics:
        return {"cluster/reissued": float(self.reissued), "cluster/replaced": float(self.replaced)}

    # -- requests ----------------------------------------------------------------------------------------------

    async def generate(self, token_ids: Sequence[int], sampling: Sampling) -> Completion:
        for again in (False, True):
            place = await self._pick(token_ids)
            actor = place.actor
            place.load += 1
            try:
                found: Completion = await answer(actor.generate.remote(tuple(token_ids), sampling))
            except ActorLost as error:
                self._lost(place, actor, error)
                self.reissued += not again
                continue
            finally:
                place.load -= 1
            place.deaths = 0
            self.generated_tokens += len(found.token_ids)
            self.on_finished()
            return found
        raise EngineLost("the engine died while it answered, and so did the one that was asked again")

    async def _pick(self, prompt: Sequence[int]) -> Place:
        while not (there := {p.index: p.load for p in self.places if p.actor is not None}):
            self._changed.clear()
            self._check()
            await self._changed.wait()
        self._check()
        return self.places[self._router.pick(prompt, there)]

    def _check(self) -> None:
        if self._failed is not None:
            raise self._failed

    # -- weights -----------------------------------------------------------------------------------------------

    async def publish(self, weights: Any, version: int) -> None:
        """`weights` are the learner's, which sends them itself. Engines that die meanwhile are replaced, and get them
        from where the others got theirs."""
        await self._all_started()
        async with self._weights_lock:
            if version == self.publisher.version:
                await self._everybody(lambda actor: actor.forget.remote())
            else:
                actors = {place.index: place.actor for place in self.places if place.actor is not None}
                for index, error in (await self.publisher.publish(weights, version, actors)).items():
                    self._lost(self.places[index], actors[index], error)
            self.version = version
            self._router.forget()
        self._check()

    async def pause(self) -> None:
        """Where engines have devices of their own they go on sampling: new weights come between two tokens."""
        if self.colocated:
            self._paused = True
            await self._everybody(lambda actor: actor.pause.remote())

    async def resume(self) -> None:
        if self._paused:
            self._paused = False
            await self._everybody(lambda actor: actor.resume.remote())

    async def _everybody(self, call: Callable[[Any], Any]) -> None:
        """Of this moment: one of them may die, and another come, before all have been asked."""

        async def one(place: Place, actor: Any) -> None:
            try:
                await answer(call(actor))
            except ActorLost as error:
                self._lost(place, actor, error)

        await asyncio.gather(*(one(place, place.actor) for place in self.places if place.actor is not None))

    def close(self) -> None:
        for job in self._jobs:
            job.cancel()
        actors = [actor for _, actor in self._starting] + [p.actor for p in self.places if p.actor is not None]
        _close_all(actors)
        for place in self.places:
            place.actor = None
        self.publisher.close()

    # -- who comes and goes ------------------------------------------------------------------------------------

    async def _all_started(self) -> None:
        starting, self._starting = self._starting, []
        for (place, actor), loading in zip(starting, self._loading, strict=True):
            try:
                place.pid = await answer(loading)
                place.actor = actor
            except ActorLost as error:
                end(actor)
                await self._start_another(place, str(error), self._load_model)
        self._loading = []
        if starting:
            self._start(self._watch())

    async def _watch(self) -> None:
        """A process that stands still is there, and would never be missed: its requests would wait for ever."""
        while True:
            await asyncio.sleep(PULSE)
            await asyncio.gather(*(self._feel(place, place.actor) for place in self.places if place.actor is not None))

    async def _feel(self, place: Place, actor: Any) -> None:
        try:
            await asyncio.wait_for(answer(actor.alive.remote()), HUNG)
        except ActorLost as error:
            self._lost(place, actor, error)
        except TimeoutError:
            if not await self._answers(actor):  # our own process may have been the one that stood still
                self._lost(place, actor, ActorLost(f"it gave no sign of life for {HUNG:g} s"))

    async def _answers(self, actor: Any) -> bool:
        try:
            await asyncio.wait_for(answer(actor.alive.remote()), PULSE)
        except (ActorLost, TimeoutError):
            return False
        return True

    def _start(self, work: Coroutine[Any, Any, None]) -> None:
        job = asyncio.get_running_loop().create_task(work)
        self._jobs.add(job)
        job.add_done_callback(self._jobs.discard)

    def _lost(self, place: Place, actor: Any, error: Exception) -> None:
        """Several requests notice; the first of them has it replaced."""
        if place.actor is not actor:
            return
        place.actor = None
        end(actor)  # one that only cannot be reached must not answer later
        self._start(self._replace(place, str(error)))

    async def _replace(self, place: Place, why: str) -> None:
        try:
            await self._start_another(place, why, self._equip)
        except Exception as error:
            failed = error if isinstance(error, RunFailed) else RunFailed(f"engine {place.index}: {error}")
            self._failed = failed
        finally:
            self._changed.set()

    async def _start_another(
        self, place: Place, why: str, prepare: Callable[[Place, Any], Coroutine[Any, Any, None]]
    ) -> None:
        """Until one is ready, or `DEATHS` of them in a row have died."""
        while place.actor is None:
            place.deaths += 1
            if place.deaths > DEATHS:
                raise RunFailed(f"engine {place.index} died {place.deaths} times without an answer: {why}")
            self.warn(f"engine {place.index} died and is replaced: {why}")
            self.replaced += 1
            actor = self._spawn(place.index)
            try:
                await prepare(place, actor)
            except ActorLost as error:
                end(actor)
                why = str(error)

    async def _load_model(self, place: Place, actor: Any) -> None:
        """Before the first publication, which brings the weights."""
        place.pid = await answer(self._load(place.index, actor))
        place.actor = actor

    async def _equip(self, place: Place, actor: Any) -> None:
        """A model, the weights of the moment, and a seat among the others."""
        place.pid = await answer(self._load(place.index, actor))
        async with self._weights_lock:
            peers = {p.index: p.actor for p in self.places if p.actor is not None}
            await self.publisher.bring(
                actor, peers, lambda index, error: self._lost(self.places[index], peers[index], error)
            )
            paused = False
            while paused != self._paused:  # the others may be paused or resumed meanwhile
                paused = not paused
                await answer((actor.pause if paused else actor.resume).remote())
            place.actor = actor


def _close_all(actors: list[Any]) -> None:
    import ray

    if not ray.is_initialized():
        return
    ray.wait([actor.close.remote() for actor in actors], num_returns=len(actors), timeout=5) if actors else None
    for actor in actors:
        end(actor)
