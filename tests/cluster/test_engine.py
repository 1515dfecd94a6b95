"""Requests whose engine dies, and replacements, with actors that die on command."""

from __future__ import annotations

import asyncio
from collections.abc import Collection
from concurrent.futures import Future
from typing import Any

import pytest

from covey.cluster import engines as engine_module
from covey.cluster.engines import MAX_DEATHS, EngineLost, RayEngine
from covey.errors import RunFailed
from covey.types import Completion, Sampling, StopReason
from covey.weights.transport import CollectiveTransport, FileTransport

ray = pytest.importorskip("ray")


class Reference:
    def __init__(self) -> None:
        self.result: Future[Any] = Future()

    def future(self) -> Future[Any]:
        return self.result

    def done(self, value: Any = None) -> Reference:
        self.result.set_result(value)
        return self

    def die(self) -> Reference:
        self.result.set_exception(ray.exceptions.ActorDiedError())
        return self


class Method:
    def __init__(self, call: Any) -> None:
        self.remote = call


class Actor:
    """Takes requests; completes them or dies on command."""

    def __init__(self, number: int) -> None:
        self.number = number
        self.asked: list[Reference] = []
        self.calls: list[str] = []
        self.doomed = False
        self.generate = Method(self._generate)
        self.load_weights = Method(lambda manifest: self._note(f"load {manifest}"))
        self.join_group = Method(lambda rendezvous, rank: self._note("join"))
        self.receive_weights = Method(lambda version: self._note(f"receive {version}"))
        self.write_weights = Method(
            lambda folder, version: self._note("write", f"version {version}, from {self.number}")
        )
        self.held: dict[str, Reference] = {}  # calls that return when the test says so
        for name in ("pause", "resume", "flush_cache", "close", "alive"):
            setattr(self, name, Method(lambda name=name: self._note(name)))

    def _generate(self, token_ids: Any, sampling: Sampling) -> Reference:
        self.asked.append(Reference())
        return self.asked[-1].die() if self.doomed else self.asked[-1]

    def _note(self, what: str, value: Any = None) -> Reference:
        self.calls.append(what)
        if what in self.held:
            return self.held[what]
        return Reference().die() if self.doomed else Reference().done(value)

    def answer(self, at: int, token: int) -> None:
        self.asked[at].done(Completion((token,), (0.0,), (0,), StopReason.EOS))

    def die(self) -> None:
        self.doomed = True
        for reference in self.asked:
            if not reference.result.done():
                reference.die()


class Learner:
    async def write(self, folder: Any, version: int) -> str:
        return f"version {version}"


class Broadcaster(Learner):
    def __init__(self) -> None:
        self.calls: list[str] = []

    async def write(self, folder: Any, version: int) -> str:
        self.calls.append(f"write {version}")
        return f"version {version}, from the learner"

    async def rendezvous(self, members: int) -> int:
        return members

    async def join(self, rendezvous: int) -> None:
        self.calls.append(f"join {rendezvous}")

    async def broadcast(self) -> None:
        self.calls.append("broadcast")


class Fixture:
    """An engine over numbered actors, and its warnings."""

    def __init__(
        self,
        count: int,
        tmp_path: Any,
        monkeypatch: pytest.MonkeyPatch,
        colocated: bool = False,
        transport: type[FileTransport] = FileTransport,
        dead: Collection[int] = (),
    ) -> None:
        self.actors: list[Actor] = []
        self.dead = dead  # numbers of actors that die when they load
        self.doomed_from = 10**6  # actors from this number on die when they load
        self.ended: list[int] = []
        self.warnings: list[str] = []
        monkeypatch.setattr(engine_module, "kill", lambda actor: self.ended.append(actor.number))
        monkeypatch.setattr(engine_module, "_close_all", lambda actors: None)
        self.engine = RayEngine(
            count,
            self.spawn,
            self.load,
            transport(tmp_path / "weights"),
            colocated=colocated,
            warn=self.warnings.append,
        )

    def spawn(self, index: int) -> Actor:
        self.actors.append(Actor(len(self.actors)))
        return self.actors[-1]

    def load(self, index: int, actor: Actor) -> Reference:
        doomed = actor.number in self.dead or actor.number >= self.doomed_from
        return Reference().die() if doomed else Reference().done(1000 + actor.number)

    async def ask(self, *prompts: tuple[int, ...]) -> list[asyncio.Task[Completion]]:
        jobs = [asyncio.ensure_future(self.engine.generate(prompt, Sampling())) for prompt in prompts]
        await settle()
        return jobs


async def settle() -> None:
    for _ in range(50):
        await asyncio.sleep(0)


def test_a_request_is_sent_again_once_and_counts_once(tmp_path, monkeypatch) -> None:
    async def scene() -> None:
        fixture = Fixture(2, tmp_path, monkeypatch)
        await fixture.engine.publish(Learner(), 4)
        first, second = await fixture.ask((1,), (2,))
        zero, one = fixture.actors
        zero.die()
        one.answer(0, 20)
        await settle()
        fresh = fixture.actors[2]
        assert fixture.ended == [0] and fresh.calls == ["load version 4"]
        assert len(one.asked) + len(fresh.asked) == 2  # the one that was lost is asked again, once
        (one if len(one.asked) == 2 else fresh).answer(-1, 10)
        assert [(await job).token_ids for job in (first, second)] == [(10,), (20,)]
        assert (fixture.engine.reissued, fixture.engine.replaced) == (1, 1)
        assert fixture.engine.generated_tokens == 2
        assert fixture.engine.metrics() == {"cluster/reissued": 1.0, "cluster/replaced": 1.0}
        assert len(fixture.warnings) == 1 and "engine 0 died and is replaced" in fixture.warnings[0]

    asyncio.run(scene())


def test_a_request_whose_second_engine_dies_is_its_episodes_failure(tmp_path, monkeypatch) -> None:
    async def scene() -> None:
        fixture = Fixture(1, tmp_path, monkeypatch)
        await fixture.engine.publish(Learner(), 0)
        (job,) = await fixture.ask((1,))
        fixture.actors[0].die()
        await settle()
        fixture.actors[1].die()
        with pytest.raises(EngineLost):
            await job
        assert fixture.engine.reissued == 1 and EngineLost.cause == "engine"
        await settle()
        (again,) = await fixture.ask((2,))  # the run continues
        fixture.actors[2].answer(0, 7)
        assert (await again).token_ids == (7,)

    asyncio.run(scene())


def test_replacements_that_die_too_end_the_run(tmp_path, monkeypatch) -> None:
    async def scene() -> None:
        fixture = Fixture(1, tmp_path, monkeypatch)
        await fixture.engine.publish(Learner(), 0)
        fixture.doomed_from = 1
        (job,) = await fixture.ask((1,))
        fixture.actors[0].die()
        with pytest.raises(RunFailed, match=f"engine 0 died {MAX_DEATHS + 1} times without an answer"):
            await job
        assert len(fixture.actors) == 1 + MAX_DEATHS
        with pytest.raises(RunFailed):
            await fixture.engine.generate((2,), Sampling())

    asyncio.run(scene())


def test_an_engine_that_dies_while_it_starts_is_replaced(tmp_path, monkeypatch) -> None:
    async def scene() -> None:
        fixture = Fixture(2, tmp_path, monkeypatch, dead={1, 2})
        await fixture.engine.publish(Learner(), 0)
        assert [replica.pid for replica in fixture.engine.replicas] == [1000, 1003]
        assert fixture.ended == [1, 2] and fixture.engine.replaced == 2
        assert fixture.actors[3].calls == ["load version 0"]  # with the others
        assert all(text.startswith("engine 1 died and is replaced: ") for text in fixture.warnings)
        none = Fixture(1, tmp_path, monkeypatch, dead=range(99))
        with pytest.raises(RunFailed, match=f"engine 0 died {MAX_DEATHS + 1} times without an answer"):
            await none.engine.publish(Learner(), 0)

    asyncio.run(scene())


def test_engines_that_have_not_started_are_ended_after_an_error(tmp_path, monkeypatch) -> None:
    async def scene() -> None:
        fixture = Fixture(3, tmp_path, monkeypatch)
        _, (replica, actor, _), _ = fixture.engine._starting
        failed = Reference()
        failed.result.set_exception(RunFailed("the model cannot be loaded"))
        fixture.engine._starting[1] = (replica, actor, failed)
        with pytest.raises(RunFailed, match="cannot be loaded"):
            await fixture.engine.publish(Learner(), 0)
        closed: list[Actor] = []
        monkeypatch.setattr(engine_module, "_close_all", closed.extend)
        fixture.engine.close()
        assert sorted(actor.number for actor in closed) == [0, 1, 2]

    asyncio.run(scene())


def test_engines_with_their_own_devices_continue_while_the_learner_trains(tmp_path, monkeypatch) -> None:
    async def scene(colocated: bool) -> list[str]:
        fixture = Fixture(1, tmp_path, monkeypatch, colocated)
        await fixture.engine.publish(Learner(), 0)
        await fixture.engine.pause()
        await fixture.engine.publish(Learner(), 1)
        await fixture.engine.resume()
        await fixture.engine.publish(Learner(), 1)  # after an evaluation
        return fixture.actors[0].calls

    assert asyncio.run(scene(False)) == ["load version 0", "load version 1", "flush_cache"]
    assert asyncio.run(scene(True)) == ["load version 0", "pause", "load version 1", "resume", "flush_cache"]


def test_an_engine_that_dies_while_weights_come_gets_them_when_it_is_back(tmp_path, monkeypatch) -> None:
    async def scene() -> None:
        fixture = Fixture(2, tmp_path, monkeypatch, colocated=True)
        await fixture.engine.publish(Learner(), 0)
        await fixture.engine.pause()
        fixture.actors[1].die()
        await fixture.engine.publish(Learner(), 1)
        await settle()
        assert fixture.actors[2].calls == ["load version 1", "pause"]  # the others stand still as well
        await fixture.engine.resume()
        assert fixture.actors[2].calls[-1] == "resume" and fixture.engine.version == 1

    asyncio.run(scene())


def test_a_peer_that_dies_while_it_gives_weights_is_replaced_itself(tmp_path, monkeypatch) -> None:
    """The newcomer gets them from the next peer, and its own death is not counted."""

    async def scene() -> None:
        fixture = Fixture(3, tmp_path, monkeypatch, transport=CollectiveTransport)
        learner = Broadcaster()
        await fixture.engine.publish(learner, 5)
        (job,) = await fixture.ask((1,))
        zero, one, two = fixture.actors
        one.held["write"] = Reference().die()
        zero.die()
        await settle()
        assert one.calls[-1] == "write" and two.calls[-1] == "write" and "write 5" not in learner.calls
        newcomers = fixture.actors[3:]
        assert [actor.calls[0] for actor in newcomers] == ["load version 5, from 2"] * 2
        assert [replica.deaths for replica in fixture.engine.replicas] == [1, 1, 0] and fixture.ended == [0, 1]
        job.cancel()

    asyncio.run(scene())


def test_an_engine_alone_gets_the_weights_of_its_version_again(tmp_path, monkeypatch) -> None:
    """After a broadcast no peer has them, and the learner's weights are newer."""

    async def scene() -> None:
        fixture = Fixture(1, tmp_path, monkeypatch, transport=CollectiveTransport)
        learner = Broadcaster()
        await fixture.engine.publish(learner, 5)
        assert learner.calls == ["join 2", "broadcast", "write 5"]
        await fixture.ask((1,))
        fixture.actors[0].die()
        await settle()
        assert fixture.actors[1].calls == ["load version 5, from the learner"]
        assert learner.calls == ["join 2", "broadcast", "write 5"]  # not once more

    asyncio.run(scene())


def test_a_newcomer_is_not_left_paused(tmp_path, monkeypatch) -> None:
    async def scene() -> None:
        fixture = Fixture(1, tmp_path, monkeypatch, colocated=True)
        await fixture.engine.publish(Learner(), 0)
        await fixture.ask((1,))
        await fixture.engine.pause()
        spawn, pausing = fixture.engine._spawn, Reference()

        def slow(index: int) -> Actor:
            actor = spawn(index)
            actor.held["pause"] = pausing
            return actor

        fixture.engine._spawn = slow
        fixture.actors[0].die()
        await settle()
        await fixture.engine.resume()
        pausing.done()
        await settle()
        assert fixture.actors[1].calls[:3] == ["load version 0", "pause", "resume"]

    asyncio.run(scene())


def test_calls_to_all_engines_go_to_those_alive_at_the_start(tmp_path, monkeypatch) -> None:
    """An engine whose death shows while others are being asked has no actor when its turn comes."""

    async def scene() -> None:
        fixture = Fixture(2, tmp_path, monkeypatch, colocated=True)
        await fixture.engine.publish(Learner(), 0)
        (job,) = await fixture.ask((1,))
        asked = [actor for actor in fixture.actors if actor.asked]
        pausing = asyncio.ensure_future(fixture.engine.pause())
        asyncio.get_running_loop().call_soon(asked[0].die)
        await pausing
        assert all("pause" in actor.calls for actor in fixture.actors[:2])
        job.cancel()

    asyncio.run(scene())


def test_an_engine_that_hangs_is_replaced(tmp_path, monkeypatch) -> None:
    """It hangs. The other engine is slow, and is kept."""
    monkeypatch.setattr(engine_module, "PULSE", 0.01)
    monkeypatch.setattr(engine_module, "HUNG", 0.2)

    async def scene() -> None:
        fixture = Fixture(2, tmp_path, monkeypatch)
        await fixture.engine.publish(Learner(), 1)
        (job,) = await fixture.ask((1, 2))
        first = next(actor for actor in fixture.actors if actor.asked)
        first.alive = Method(Reference)  # asked, and never answered
        while not fixture.ended:
            await asyncio.sleep(0.01)
        assert fixture.ended == [first.number]
        first.die()  # as it does when it is ended
        while not any(actor.asked for actor in fixture.actors if actor is not first):
            await asyncio.sleep(0.01)
        next(actor for actor in fixture.actors if actor is not first and actor.asked).answer(0, 7)
        assert (await job).token_ids == (7,)
        assert fixture.engine.replaced == 1 and "no sign of life for 0.2 s" in fixture.warnings[0]
        fixture.engine.close()

    asyncio.run(scene())
