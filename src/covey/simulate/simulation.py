"""A discrete-event simulation of a run: engines, tools, the asynchronous window, and a learner.

    consumes    speeds of one device, a deployment, and a distribution of episodes
    produces    end, learner time, engine time and policy age of each step
    waits for   nothing: the clock jumps from event to event

The window is the one that training uses (rollout/asynchronous.py). Synchronous training is a window with a lead of 0:
a step takes all groups that were started, and none starts before the new weights arrive. If learner and engines share
devices, engines pause while the learner works; tools continue.
"""

from __future__ import annotations

import heapq
import math
import random
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cache

from covey.rollout.asynchronous import Window
from covey.simulate.hardware import DecodeCurve, Episodes, Turn


@dataclass(frozen=True)
class Workload:
    """What a step samples."""

    groups: int
    attempts: int
    episodes: Episodes


@dataclass(frozen=True)
class Deployment:
    """Engines and learner, their devices and speeds."""

    engines: int
    shared: bool  # engines and learner use the same devices
    lead: int  # steps that sampling may run ahead; 0: synchronous
    decode: DecodeCurve
    prefill: float  # seconds per prompt token
    capacity: int  # sequences that an engine decodes at once
    learn: Callable[[float, float], float]  # (tokens of the step, tokens of its longest row) → seconds
    publish: float  # seconds
    drain: bool = False  # finish running answers before new weights


@dataclass(frozen=True)
class StepResult:
    ended: float
    learning: float  # seconds of the learner
    age: float  # mean over tokens of the age of the policy that sampled them
    age_max: int
    engines_busy: float  # seconds of all engines since the start
    tokens: int


@dataclass
class _Episode:
    group: int
    turns: tuple[Turn, ...]
    engine: SimulatedEngine
    turn: int = 0
    versions: dict[int, float] = field(default_factory=dict)  # sampled tokens by weight version

    @property
    def sampled(self) -> int:
        return sum(turn.tokens for turn in self.turns)

    @property
    def length(self) -> int:
        return sum(turn.tokens + turn.observation for turn in self.turns)


@dataclass
class _Request:
    """One reply being decoded."""

    episode: _Episode
    tokens: int
    prefill: float  # seconds of the engine before its first token
    since: float = 0.0  # position of the engine when the current weight version took over


class SimulatedEngine:
    """An engine whose sequences all decode at the same pace, which depends on the batch size.

    So one number is the position of every sequence, and the next request to finish is on top of a heap.
    """

    def __init__(self, pace: Callable[[int], float], capacity: int) -> None:
        """`pace`: seconds of a decoding step by batch size. `capacity`: sequences decoded at once; others wait."""
        assert capacity > 0
        self.pace = pace
        self.capacity = capacity
        self.version = 0
        self.paused = False  # the learner has the device
        self.draining = False  # no new request starts
        self.busy = 0.0  # seconds
        self.plan = 0  # changes whenever `next_end` may change
        self._clock = 0.0
        self._position = 0.0  # tokens decoded by a sequence that was there from the start
        self._prefill = 0.0  # seconds of prefill before decoding continues
        self._active: list[tuple[float, int, _Request]] = []  # a heap by end position
        self._queue: deque[_Request] = deque()
        self._count = 0

    @property
    def load(self) -> int:
        return len(self._active) + len(self._queue)

    @property
    def drained(self) -> bool:
        return not self._active

    def add(self, request: _Request, now: float) -> None:
        self.advance(now)
        self._queue.append(request)
        self._admit()

    def advance(self, now: float) -> None:
        elapsed, self._clock = now - self._clock, now
        if self.paused or not self._active:
            return
        self.busy += elapsed
        prefilling = min(self._prefill, elapsed)
        self._prefill -= prefilling
        self._position += (elapsed - prefilling) / self.pace(len(self._active))

    def next_end(self) -> float:
        """When the next request finishes under the current plan."""
        if self.paused or not self._active:
            return math.inf
        left = max(0.0, self._active[0][0] - self._position)
        return self._clock + self._prefill + left * self.pace(len(self._active))

    def pop_ended(self, now: float) -> _Episode:
        """The episode whose request finishes at `next_end`."""
        self.advance(now)
        end, _, request = heapq.heappop(self._active)
        self._position = max(self._position, end)  # rounding
        self._record(request, end)
        self._admit()
        return request.episode

    def change(
        self, now: float, *, paused: bool | None = None, draining: bool | None = None, version: int | None = None
    ) -> None:
        self.advance(now)
        if version is not None:
            for _, _, request in self._active:
                self._record(request, self._position)
            self.version = version
        self.paused = self.paused if paused is None else paused
        self.draining = self.draining if draining is None else draining
        self._admit()

    def _record(self, request: _Request, until: float) -> None:
        """Count the tokens since the last change for the current weight version."""
        versions = request.episode.versions
        versions[self.version] = versions.get(self.version, 0.0) + max(0.0, until - request.since)
        request.since = until

    def _admit(self) -> None:
        while self._queue and len(self._active) < self.capacity and not self.draining:
            request = self._queue.popleft()
            self._prefill += request.prefill
            request.since = self._position
            self._count += 1
            heapq.heappush(self._active, (self._position + request.tokens, self._count, request))
        self.plan += 1


def simulate(
    workload: Workload, deployment: Deployment, steps: int, *, seed: int = 0, open_ended: bool = True
) -> list[StepResult]:
    """`open_ended`: the run continues after `steps`, so episodes of later steps are started too."""
    return _Simulation(workload, deployment, None if open_ended else steps, seed).run(steps)


class _Simulation:
    def __init__(self, workload: Workload, deployment: Deployment, end: int | None, seed: int) -> None:
        self.workload = workload
        self.deployment = deployment
        self.window = Window(workload.groups, deployment.lead, end=end)
        pace = cache(deployment.decode.seconds)  # called at every event
        self.engines = [SimulatedEngine(pace, deployment.capacity) for _ in range(deployment.engines)]
        self.draw = random.Random(f"simulation {seed}")
        self.now = 0.0
        self.learning = False
        self.done: list[StepResult] = []
        self._groups: dict[int, list[_Episode]] = {}
        self._missing: dict[int, int] = {}  # group → episodes that are not finished
        self._events: list[tuple[float, int, Callable[[], None]]] = []
        self._count = 0
        self._when_drained: Callable[[], None] | None = None

    def run(self, steps: int) -> list[StepResult]:
        self._start_groups()
        while len(self.done) < steps:
            assert self._events, "the simulation has stalled"
            self.now, _, callback = heapq.heappop(self._events)
            callback()
        return self.done

    # -- sampling --

    def _start_groups(self) -> None:
        for ticket in self.window.begin():
            engine = min(self.engines, key=lambda e: e.load)  # one engine per group, which computes the prompt once
            drawn = [self.draw.choice(self.workload.episodes.examples) for _ in range(self.workload.attempts)]
            episodes = [_Episode(ticket.number, turns, engine) for turns in drawn]
            self._groups[ticket.number] = episodes
            self._missing[ticket.number] = len(episodes)
            for attempt, episode in enumerate(episodes):
                self._request(episode, new_tokens=0 if attempt else self.workload.episodes.prompt)

    def _request(self, episode: _Episode, new_tokens: int) -> None:
        request = _Request(episode, episode.turns[episode.turn].tokens, new_tokens * self.deployment.prefill)
        episode.engine.add(request, self.now)
        self._schedule_end(episode.engine)

    def _schedule_end(self, engine: SimulatedEngine) -> None:
        """Schedule the engine's next end; the event is ignored if the plan changes before it."""
        end, plan = engine.next_end(), engine.plan
        if end < float("inf"):
            self._at(end, lambda: self._request_ended(engine) if engine.plan == plan else None)

    def _request_ended(self, engine: SimulatedEngine) -> None:
        episode = engine.pop_ended(self.now)
        self._schedule_end(engine)
        turn = episode.turns[episode.turn]
        episode.turn += 1
        if episode.turn < len(episode.turns):
            self._at(self.now + turn.wait, lambda: self._request(episode, turn.observation))
        else:
            self._at(self.now + turn.wait, lambda: self._episode_ended(episode))
        if self._when_drained is not None:
            self._check_drained()

    def _episode_ended(self, episode: _Episode) -> None:
        self._missing[episode.group] -= 1
        if not self._missing[episode.group]:
            self.window.finish(episode.group)
            self._learn()

    # -- learning --

    def _learn(self) -> None:
        if self.learning or (tickets := self.window.take()) is None:
            return
        self.learning = True
        episodes = [episode for ticket in tickets for episode in self._groups.pop(ticket.number)]
        prompt = self.workload.episodes.prompt
        tokens = sum(episode.length for episode in episodes) + prompt * len(tickets)
        seconds = self.deployment.learn(tokens, prompt + max(episode.length for episode in episodes))

        def start() -> None:
            if self.deployment.shared:
                self._change_engines(paused=True)
            self._at(self.now + seconds, lambda: self._learned(episodes, seconds))

        if self.deployment.shared:
            self._after_draining(start)
        else:
            start()

    def _learned(self, episodes: list[_Episode], seconds: float) -> None:
        def publish() -> None:
            self._at(self.now + self.deployment.publish, lambda: self._published(episodes, seconds))

        if self.deployment.shared:
            publish()
        else:
            self._after_draining(publish)

    def _published(self, episodes: list[_Episode], seconds: float) -> None:
        step = len(self.done)
        self._change_engines(paused=False, draining=False, version=step + 1)
        ages = [(step - version, tokens) for e in episodes for version, tokens in e.versions.items() if tokens > 0]
        sampled = sum(episode.sampled for episode in episodes)
        mean_age = sum(age * tokens for age, tokens in ages) / sampled
        busy = sum(engine.busy for engine in self.engines)
        self.done.append(StepResult(self.now, seconds, mean_age, max(age for age, _ in ages), busy, sampled))
        self.learning = False
        self.window.advance(step + 1)
        self._start_groups()
        self._learn()

    def _after_draining(self, callback: Callable[[], None]) -> None:
        if not self.deployment.drain:
            callback()
            return
        self._change_engines(draining=True)
        self._when_drained = callback
        self._check_drained()

    def _check_drained(self) -> None:
        if all(engine.drained for engine in self.engines):
            assert self._when_drained is not None
            callback, self._when_drained = self._when_drained, None
            callback()

    def _change_engines(
        self, *, paused: bool | None = None, draining: bool | None = None, version: int | None = None
    ) -> None:
        for engine in self.engines:
            engine.change(self.now, paused=paused, draining=draining, version=version)
            self._schedule_end(engine)

    def _at(self, when: float, callback: Callable[[], None]) -> None:
        self._count += 1
        heapq.heappush(self._events, (when, self._count, callback))
