"""One engine under a made-up clock: all sequences of its batch get their tokens at the same pace, which the size of the
batch decides. So one number says how far everybody has come, and the next to end is the top of a heap.
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
from covey.simulate.hardware import Decode, Episodes, Turn


@dataclass
class Answer:
    """One reply that is being decoded."""

    tokens: int
    prefill: float  # seconds of the engine before its first token
    whose: object  # the episode, for who is told of the end
    versions: dict[int, float] = field(default_factory=dict)  # tokens by the version of the weights that drew them
    since: float = 0.0  # where the engine was when this version began to draw it


class SimulatedEngine:
    def __init__(self, pace: Callable[[int], float], capacity: int) -> None:
        """`pace`: seconds of a decoding step by its sequences. `capacity`: sequences decoded together; others wait."""
        assert capacity > 0
        self.pace = pace
        self.capacity = capacity
        self.version = 0
        self.paused = False  # somebody else has the device
        self.draining = False  # answers end, none begin
        self.busy = 0.0  # seconds
        self.stamp = 0  # changes with every change of plan
        self._clock = 0.0
        self._done = 0.0  # tokens that a sequence would have which was there from the start
        self._stall = 0.0  # seconds of prefill before anybody gets a token
        self._active: list[tuple[float, int, Answer]] = []  # by where they end
        self._queue: deque[Answer] = deque()
        self._count = 0

    @property
    def load(self) -> int:
        return len(self._active) + len(self._queue)

    @property
    def drained(self) -> bool:
        return not self._active

    def add(self, answer: Answer, now: float) -> None:
        self.advance(now)
        self._queue.append(answer)
        self._admit()

    def advance(self, now: float) -> None:
        elapsed, self._clock = now - self._clock, now
        if self.paused or not self._active:
            return
        self.busy += elapsed
        stalled = min(self._stall, elapsed)
        self._stall -= stalled
        self._done += (elapsed - stalled) / self.pace(len(self._active))

    def next_end(self) -> float:
        """When the next answer ends, if nothing changes before."""
        if self.paused or not self._active:
            return math.inf
        left = max(0.0, self._active[0][0] - self._done)
        return self._clock + self._stall + left * self.pace(len(self._active))

    def pop_ended(self, now: float) -> Answer:
        """The answer whose end `next_end` said."""
        self.advance(now)
        end, _, answer = heapq.heappop(self._active)
        self._done = max(self._done, end)  # rounding
        self._draw(answer, end)
        self._admit()
        return answer

    def change(
        self, now: float, *, paused: bool | None = None, draining: bool | None = None, version: int | None = None
    ) -> None:
        self.advance(now)
        if version is not None:
            for _, _, answer in self._active:
                self._draw(answer, self._done)
            self.version = version
        self.paused = self.paused if paused is None else paused
        self.draining = self.draining if draining is None else draining
        self._admit()

    def _draw(self, answer: Answer, until: float) -> None:
        """What was drawn since the last change is of the weights of now."""
        answer.versions[self.version] = answer.versions.get(self.version, 0.0) + max(0.0, until - answer.since)
        answer.since = until

    def _admit(self) -> None:
        while self._queue and len(self._active) < self.capacity and not self.draining:
            answer = self._queue.popleft()
            self._stall += answer.prefill
            answer.since = self._done
            self._count += 1
            heapq.heappush(self._active, (self._done + answer.tokens, self._count, answer))
        self.stamp += 1


# -- A run under a made-up clock: engines, tools, the real window of `mode=async`, and a learner -----------------------
# consumes        figures of one device, a split of the devices, answers' lengths
# produces        seconds of each step, how busy everybody was, how old the policies were
# waits for       nothing: time jumps from event to event
#
# By turns is the window with a lead of 0: a step takes all that began, and nothing begins before the weights are there.
# Where learner and engines share devices, engines stand still while the learner learns; tools go on.


@dataclass(frozen=True)
class Work:
    """What a step is made of."""

    groups: int
    attempts: int
    episodes: Episodes


@dataclass(frozen=True)
class Place:
    """Who works where, and how fast."""

    engines: int
    shared: bool  # the engines' devices are the learner's
    lead: int  # steps that a policy may be behind; 0: by turns
    decode: Decode
    prefill: float  # seconds for a token of a prompt
    capacity: int  # sequences that an engine decodes together
    learn: Callable[[float, float], float]  # tokens of the step, tokens of its longest row → seconds
    publish: float  # seconds
    drain: bool = False  # answers are finished before weights change


@dataclass(frozen=True)
class Step:
    """What is known of one step when it is over."""

    ended: float
    learning: float  # seconds of the learner
    age: float  # of the policies that drew its tokens, mean over tokens
    age_max: int
    engines_busy: float  # seconds of all engines up to now
    tokens: int


@dataclass
class _Episode:
    group: int
    turns: tuple[Turn, ...]
    engine: SimulatedEngine
    at: int = 0
    versions: dict[int, float] = field(default_factory=dict)

    @property
    def sampled(self) -> int:
        return sum(turn.tokens for turn in self.turns)

    @property
    def length(self) -> int:
        return sum(turn.tokens + turn.given for turn in self.turns)


def simulate(work: Work, place: Place, steps: int, *, seed: int = 0, endless: bool = True) -> list[Step]:
    """So many steps; `endless`: further ones would follow, so that episodes of those begin too."""
    return _Simulation(work, place, None if endless else steps, seed).run(steps)


class _Simulation:
    def __init__(self, work: Work, place: Place, end: int | None, seed: int) -> None:
        self.work = work
        self.place = place
        self.window = Window(work.groups, place.lead, end=end)
        pace = cache(place.decode.seconds)  # asked at every event
        self.engines = [SimulatedEngine(pace, place.capacity) for _ in range(place.engines)]
        self.draw = random.Random(f"simulation {seed}")
        self.now = 0.0
        self.learning = False
        self.done: list[Step] = []
        self._groups: dict[int, list[_Episode]] = {}
        self._missing: dict[int, int] = {}
        self._events: list[tuple[float, int, Callable[[], None]]] = []
        self._count = 0
        self._when_drained: Callable[[], None] | None = None

    def run(self, steps: int) -> list[Step]:
        self._begin()
        while len(self.done) < steps:
            assert self._events, "nothing is under way"
            self.now, _, happen = heapq.heappop(self._events)
            happen()
        return self.done

    # -- sampling ---------------------------------------------------------------------------------------------------

    def _begin(self) -> None:
        for ticket in self.window.begin():
            engine = min(self.engines, key=lambda e: e.load)  # a group stays together: its prompt is computed once
            drawn = [self.draw.choice(self.work.episodes.seen) for _ in range(self.work.attempts)]
            episodes = [_Episode(ticket.number, turns, engine) for turns in drawn]
            self._groups[ticket.number] = episodes
            self._missing[ticket.number] = len(episodes)
            for at, episode in enumerate(episodes):
                self._ask(episode, new_tokens=0 if at else self.work.episodes.prompt)

    def _ask(self, episode: _Episode, new_tokens: int) -> None:
        answer = Answer(episode.turns[episode.at].tokens, new_tokens * self.place.prefill, episode)
        episode.engine.add(answer, self.now)
        self._look_at(episode.engine)

    def _look_at(self, engine: SimulatedEngine) -> None:
        """Be there when its next answer ends, unless its plan changes before."""
        end, stamp = engine.next_end(), engine.stamp
        if end < float("inf"):
            self._at(end, lambda: self._ended(engine) if engine.stamp == stamp else None)

    def _ended(self, engine: SimulatedEngine) -> None:
        answer = engine.pop_ended(self.now)
        self._look_at(engine)
        episode = answer.whose
        assert isinstance(episode, _Episode)
        for version, tokens in answer.versions.items():
            episode.versions[version] = episode.versions.get(version, 0.0) + tokens
        turn = episode.turns[episode.at]
        episode.at += 1
        if episode.at < len(episode.turns):
            self._at(self.now + turn.wait, lambda: self._ask(episode, turn.given))
        else:
            self._at(self.now + turn.wait, lambda: self._over(episode))
        if self._when_drained is not None:
            self._drained()

    def _over(self, episode: _Episode) -> None:
        self._missing[episode.group] -= 1
        if not self._missing[episode.group]:
            self.window.finish(episode.group)
            self._learn()

    # -- learning ---------------------------------------------------------------------------------------------------

    def _learn(self) -> None:
        if self.learning or (tickets := self.window.take()) is None:
            return
        self.learning = True
        episodes = [episode for ticket in tickets for episode in self._groups.pop(ticket.number)]
        prompt = self.work.episodes.prompt
        tokens = sum(episode.length for episode in episodes) + prompt * len(tickets)
        seconds = self.place.learn(tokens, prompt + max(episode.length for episode in episodes))

        def start() -> None:
            if self.place.shared:
                self._change(paused=True)
            self._at(self.now + seconds, lambda: self._learned(episodes, seconds))

        if self.place.shared:
            self._after_draining(start)
        else:
            start()

    def _learned(self, episodes: list[_Episode], seconds: float) -> None:
        def publish() -> None:
            self._at(self.now + self.place.publish, lambda: self._published(episodes, seconds))

        if self.place.shared:
            publish()
        else:
            self._after_draining(publish)

    def _published(self, episodes: list[_Episode], seconds: float) -> None:
        step = len(self.done)
        self._change(paused=False, draining=False, version=step + 1)
        drawn = [(step - version, tokens) for e in episodes for version, tokens in e.versions.items() if tokens > 0]
        sampled = sum(episode.sampled for episode in episodes)
        age = sum(behind * tokens for behind, tokens in drawn) / sampled
        busy = sum(engine.busy for engine in self.engines)
        oldest = max(behind for behind, _ in drawn)
        self.done.append(Step(self.now, seconds, age, oldest, busy, sampled))
        self.learning = False
        self.window.advance(step + 1)
        self._begin()
        self._learn()

    def _after_draining(self, then: Callable[[], None]) -> None:
        if not self.place.drain:
            then()
            return
        self._change(draining=True)
        self._when_drained = then
        self._drained()

    def _drained(self) -> None:
        if all(engine.drained for engine in self.engines):
            assert self._when_drained is not None
            then, self._when_drained = self._when_drained, None
            then()

    def _change(self, *, paused: bool | None = None, draining: bool | None = None, version: int | None = None) -> None:
        for engine in self.engines:
            engine.change(self.now, paused=paused, draining=draining, version=version)
            self._look_at(engine)

    def _at(self, when: float, happen: Callable[[], None]) -> None:
        self._count += 1
        heapq.heappush(self._events, (when, self._count, happen))
