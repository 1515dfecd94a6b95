"""Asynchronous rollout (`mode=async`): groups are sampled while the learner learns, with bounded staleness and no
discards.

    Window             which groups may start, and which groups a step trains on: plain Python, without a clock
    BackgroundSource   samples groups as the window allows; a step takes complete ones
    ReplayBuffer       groups of earlier steps that are trained on again (`mode.max_uses`)
    group_to_json      groups in checkpoints

Every group gets a ticket when it starts. With B new groups in a step and a lead of L steps, which is
`mode.max_staleness`, less the `mode.max_uses - 1` steps that may train on the group again:

    start       while fewer than (v + L + 1) · B tickets were issued, v being the version that the engines sample with
    deadline    a group that starts with version v is trained on at step v + L at the latest
    a step      takes the B groups that completed first, unless a group that is missing or completed later would then
                miss its deadline: the step waits for those

A slow group may be overtaken as long as all deadlines are kept. Every ticket is trained on exactly once, by a step at
most L updates newer than its policy. L = 0 is synchronous training. Engines get new weights every few steps, at most
L + 1.

Why all deadlines can be kept: at most (t + 1) · B tickets have a deadline up to step t, and the steps up to t train on
(t + 1) · B groups.
"""

from __future__ import annotations

import asyncio
import base64
import random
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, fields, is_dataclass, replace
from functools import lru_cache
from numbers import Integral, Real
from typing import Any

from covey.images import has_images, is_image
from covey.rollout.collector import TrainingSource
from covey.streams import stream_seed
from covey.types import (
    Collected,
    Episode,
    Failure,
    Group,
    Image,
    ImageFile,
    ImageSpan,
    StopReason,
    Task,
    ToolUse,
    Turn,
)

DIGEST = "digest"  # of an image, in the JSON of a group

# -- Window ------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Ticket:
    number: int  # in the order of starting
    began: int  # the version of the weights that it started with
    deadline: int  # the last step that may train on it


class Window:
    def __init__(self, size: int, lead: int, *, step: int = 0, end: int | None = None) -> None:
        """`size` groups in a step, at most `lead` steps ahead. `end`: the number of steps of the run."""
        assert size > 0 and lead >= 0
        self.size = size
        self.lead = lead
        self.step = step
        self.version = step  # of the engines' weights
        self.end = end
        self.issued = step * size
        self.pending: dict[int, Ticket] = {}  # started and not complete
        self.complete: dict[int, Ticket] = {}  # not trained on yet, in the order of completion

    def begin(self) -> list[Ticket]:
        """Issue a ticket for every group that may start now."""
        last = self.version + self.lead + 1
        count = (last if self.end is None else min(last, self.end)) * self.size - self.issued
        tickets = [Ticket(self.issued + n, self.version, self.version + self.lead) for n in range(count)]
        self.issued += len(tickets)
        self.pending |= {ticket.number: ticket for ticket in tickets}
        return tickets

    def finish(self, number: int) -> None:
        self.complete[number] = self.pending.pop(number)

    def take(self) -> list[Ticket] | None:
        """The groups of this step, in the order of starting; None if the step has to wait."""
        chosen = self._due()
        if chosen is None:
            return None
        for ticket in self.complete.values():
            if len(chosen) == self.size:
                break
            chosen.setdefault(ticket.number, ticket)
        if len(chosen) < self.size:
            return None
        for number in chosen:
            del self.complete[number]
        return sorted(chosen.values(), key=lambda ticket: ticket.number)

    def _due(self) -> dict[int, Ticket] | None:
        """The groups that this step must take because the later steps up to their deadline have no room for them. None
        if one of them is not complete."""
        tickets = [*self.pending.values(), *self.complete.values()]
        chosen: dict[int, Ticket] = {}
        for t in sorted({ticket.deadline for ticket in tickets}):
            later = (t - self.step) * self.size
            missing = sum(ticket.deadline <= t for ticket in tickets) - later - len(chosen)
            for ticket in self.complete.values():
                if missing <= 0:
                    break
                if ticket.deadline <= t and ticket.number not in chosen:
                    chosen[ticket.number] = ticket
                    missing -= 1
            if missing > 0:
                return None
        return chosen

    def advance(self, step: int, version: int | None = None) -> None:
        """Go to the next step. `version`: that of the engines' weights, if not the step itself."""
        self.version, before = step if version is None else version, self.version
        assert step >= self.step and before <= self.version <= step <= self.version + self.lead
        self.step = step

    def state(self) -> dict[str, object]:
        """The state to checkpoint."""
        rows = [[t.number, t.began, t.deadline] for t in (*self.complete.values(), *self.pending.values())]
        return {"given": self.issued, "tickets": rows, "complete": list(self.complete)}

    def restore(self, given: int, tickets: Iterable[Iterable[int]], complete: Iterable[int]) -> list[Ticket]:
        """Restore a `state`. Complete groups stay complete; the others, which are returned, start again with the
        current weights."""
        self.issued = given
        stored = {ticket.number: ticket for ticket in (Ticket(*row) for row in tickets)}
        self.complete = {number: stored.pop(number) for number in complete}
        again = [replace(t, began=self.version, deadline=self.version + self.lead) for t in stored.values()]
        self.pending = {ticket.number: ticket for ticket in again}
        return again


# -- Replay ------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class ReplayedGroup:
    group: Group
    uses: int  # steps that have trained on it


class ReplayBuffer:
    """A step of `size` groups has `fresh` new ones; the others are drawn from those of earlier steps, uniformly and
    without replacement. A group is trained on in at most `max_uses` steps, and not once a token of it is more than
    `lead` updates old. The first steps have fewer groups, because there are too few to draw from."""

    def __init__(self, size: int, max_uses: int, lead: int, seed: int) -> None:
        self.max_uses = max_uses
        self.lead = lead
        self.seed = seed
        self.fresh = fresh_groups(size, max_uses)
        self.drawn = size - self.fresh
        self.groups: dict[int, ReplayedGroup] = {}  # by ticket

    def draw(self, step: int) -> list[Group]:
        self.groups = {n: one for n, one in self.groups.items() if step - oldest_version(one.group) <= self.lead}
        rng = random.Random(stream_seed("reuse", self.seed, step))
        numbers = rng.sample(sorted(self.groups), min(self.drawn, len(self.groups)))
        drawn = [self.groups[number].group for number in numbers]
        for number in numbers:
            self._count_use(number)
        return drawn

    def add(self, groups: Iterable[tuple[int, Group]]) -> None:
        """Add groups that a step trains on for the first time."""
        for number, group in groups:
            self.groups[number] = ReplayedGroup(group, 0)
            self._count_use(number)

    def _count_use(self, number: int) -> None:
        one = self.groups.pop(number)
        if one.uses + 1 < self.max_uses:
            self.groups[number] = replace(one, uses=one.uses + 1)


def fresh_groups(size: int, max_uses: int) -> int:
    """The number of new groups in a step of `size` groups, if each group is used `max_uses` times."""
    return -(-size // max_uses)


def oldest_version(group: Group) -> int:
    """The version of the policy that sampled the oldest token."""
    versions = (version for episode in group.episodes for turn in episode.turns for version in turn.versions)
    return min(versions, default=0)  # a group without tokens has no learning signal


# -- Sampling in the background ----------------------------------------------------------------------------------------


class BackgroundSource(TrainingSource):
    """Groups start as soon as the window allows; a step takes complete ones.

        consumes         tasks in order; weights as they are published
        produces         the groups of each step, of bounded age
        waits for        groups that a step needs
        is unblocked by  a group that completes; new weights

    Zero-variance groups are set aside and not refilled: only the window decides which groups start."""

    def __init__(
        self, *arguments: Any, lead: int, steps: int, replay: ReplayBuffer | None = None, **settings: Any
    ) -> None:
        """`lead`: the most updates that a policy may be behind. `steps`: of the whole run. With `replay`, `batch`
        returns only the new tasks of a step."""
        super().__init__(*arguments, **settings)
        self.replay = replay
        if replay is not None:
            lead -= replay.max_uses - 1  # a group is young enough for all its uses
        self.batch = lru_cache(maxsize=lead + 2)(self.batch)  # called for every group of a step
        self.window = Window(len(self.batch(0)), lead, end=steps)
        self._groups: dict[int, Group] = {}  # complete, by ticket
        self._jobs: set[asyncio.Task[None]] = set()
        self._changed = asyncio.Event()
        self._error: BaseException | None = None
        self._restarts: list[Ticket] = []  # groups that were in progress when a checkpoint was written

    async def next(self) -> Collected:
        self._begin()
        while (tickets := self.window.take()) is None:
            if self._error is not None:
                raise self._error
            self._changed.clear()
            await self._changed.wait()
        fresh = {ticket.number: self._groups.pop(ticket.number) for ticket in tickets}
        replayed = [] if self.replay is None else self.replay.draw(self.step)
        if self.replay is not None:
            self.replay.add((number, kept) for number, group in fresh.items() for kept in self._sort([group])[0])
        return self._collected(list(fresh.values()), len(fresh), refills=0, reused=replayed)

    def _begin(self) -> None:
        tickets, self._restarts = [*self._restarts, *self.window.begin()], []
        for ticket in tickets:
            job = asyncio.get_running_loop().create_task(self._sample(ticket, *self._task(ticket.number)))
            self._jobs.add(job)
            job.add_done_callback(self._jobs.discard)

    async def _sample(self, ticket: Ticket, step: int, task: Task) -> None:
        try:
            (group,) = await self._collect([task], ("train", step))
            self._groups[ticket.number] = group
            self.window.finish(ticket.number)
        except Exception as error:  # ends the run: `next` raises it
            self._error = error
        finally:
            self._changed.set()

    def _task(self, number: int) -> tuple[int, Task]:
        step, place = divmod(number, self.window.size)
        return step, self.batch(step)[place]

    def policy_updated(self, version: int) -> None:
        super().policy_updated(version)
        self.window.advance(version, self.collector.engine.version)
        if self.window.issued:  # otherwise the run has not started
            self._begin()

    def close(self) -> None:
        for job in self._jobs:
            job.cancel()

    def state(self) -> dict[str, Any]:
        groups = {str(number): group_to_json(group) for number, group in self._groups.items()}
        replayed = {} if self.replay is None else self.replay.groups
        former = {str(number): [replay.uses, group_to_json(replay.group)] for number, replay in replayed.items()}
        kept = {"window": self.window.state(), "groups": groups, "former": former}
        if self.curriculum is None:
            return kept
        numbers = (*self.window.pending, *self.window.complete, *replayed)
        return kept | {"curriculum": self.curriculum.state({number // self.window.size for number in numbers})}

    def restore(self, state: dict[str, Any], step: int) -> None:
        super().restore(state, step)
        if "window" not in state:  # training was synchronous, or the groups sampled ahead do not fit the settings
            self.window = Window(self.window.size, self.window.lead, step=step, end=self.window.end)
            return
        self.window.advance(step)
        self._restarts = self.window.restore(**state["window"])
        self._groups = {int(n): group_from_json(self._task(int(n))[1], stored) for n, stored in state["groups"].items()}
        if self.replay is not None:
            for n, (uses, stored) in state["former"].items():
                self.replay.groups[int(n)] = ReplayedGroup(group_from_json(self._task(int(n))[1], stored), uses)


# -- Groups as JSON ----------------------------------------------------------------------------------------------------


def group_to_json(group: Group) -> dict[str, Any]:
    """A group without its task, which the caller knows. Images are stored once, by their hash."""
    images: dict[str, str] = {}
    baseline = None if group.baseline is None else _to_json(group.baseline, images)
    episodes = [_to_json(episode, images) for episode in group.episodes]
    return {"episodes": episodes, "baseline": baseline} | ({"images": images} if images else {})


def group_from_json(task: Task, stored: dict[str, Any]) -> Group:
    images = {digest: Image(digest, base64.b64decode(data)) for digest, data in stored.get("images", {}).items()}
    baseline = None if stored["baseline"] is None else _from_json(task, stored["baseline"], images)
    return Group(task, tuple(_from_json(task, episode, images) for episode in stored["episodes"]), baseline)


def _to_json(episode: Episode, images: dict[str, str]) -> dict[str, Any]:
    columns = {field.name: getattr(episode, field.name) for field in fields(episode) if field.name != "task"}
    stored: dict[str, Any] = _plain(columns, images)
    return stored


def _plain(value: Any, images: dict[str, str]) -> Any:
    """Dataclasses as dictionaries, numbers of NumPy as Python's. An image becomes its hash, and its bytes go to
    `images`."""
    if isinstance(value, Image):
        images[value.digest] = base64.b64encode(value.data).decode()
        return {DIGEST: value.digest}
    if is_dataclass(value):
        return {field.name: _plain(getattr(value, field.name), images) for field in fields(value)}
    if isinstance(value, Mapping):
        return {key: _plain(one, images) for key, one in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(one, images) for one in value]
    if isinstance(value, Real) and not isinstance(value, int | float):
        return int(value) if isinstance(value, Integral) else float(value)
    return value


def _from_json(task: Task, stored: dict[str, Any], images: Mapping[str, Image]) -> Episode:
    return Episode(
        task=task,
        turns=tuple(_turn(turn, images) for turn in stored["turns"]),
        messages=tuple(_message(message, images) for message in stored["messages"]),
        rewards=stored["rewards"],
        stop=None if stored["stop"] is None else StopReason(stored["stop"]),
        failure=None if stored["failure"] is None else Failure(**stored["failure"]),
        answer=stored["answer"],
        given=stored["given"],
        tools=tuple(ToolUse(**use) for use in stored["tools"]),
        seconds=stored["seconds"],
        cut_by=stored.get("cut_by"),
    )


def _message(stored: dict[str, Any], images: Mapping[str, Image]) -> dict[str, Any]:
    if not has_images(stored.get("content")):
        return stored
    parts = [{**part, "image": _image(part["image"], images)} if is_image(part) else part for part in stored["content"]]
    return {**stored, "content": parts}


def _image(stored: dict[str, Any], images: Mapping[str, Image]) -> Image | ImageFile:
    return images[stored[DIGEST]] if DIGEST in stored else ImageFile(**stored)


def _span(stored: dict[str, Any], images: Mapping[str, Image]) -> ImageSpan:
    grid = None if stored["grid"] is None else (stored["grid"][0], stored["grid"][1])
    return ImageSpan(images[stored["image"][DIGEST]], stored["start"], stored["length"], grid)


def _turn(stored: dict[str, Any], images: Mapping[str, Image]) -> Turn:
    columns: dict[str, Any] = {
        name: tuple(stored[name]) for name in ("prompt_ids", "completion_ids", "logprobs", "versions")
    }
    columns |= {name: stored.get(name) for name in ("reward", "state", "role")}  # older checkpoints do not have them
    spans = tuple(_span(span, images) for span in stored.get("images", ()))
    return Turn(**columns, stop=StopReason(stored["stop"]), trained=stored["trained"], images=spans)
