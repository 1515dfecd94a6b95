"""Bounded staleness without throwing anything away: who may begin, and who is trained on when. Plain Python, no clock.

Every group gets a ticket when it begins. With B groups in a step and a lead of L steps:

    begin       while fewer than (v + L + 1) · B tickets were given out, where v is the version that engines sample with
    deadline    a group that begins with version v is trained on at step v + L at the latest
    a step      takes B groups that are complete, in the order in which they became so, unless somebody who is still
                missing, or came later, would then miss a deadline: those are waited for

So a slow group may be overtaken, but only as long as everybody keeps their deadline; every ticket is trained on once,
and a policy is never older than L steps. L = 0 is training by turns. Engines get new weights every so many steps, at
most L + 1.

Why it works: at step s, of those with a deadline up to t at most (t + 1) · B tickets were given out, and that many
places there are up to t.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Iterable
from dataclasses import asdict, dataclass, replace
from functools import lru_cache
from typing import Any

from covey.rollout.collector import TrainingSource
from covey.streams import stream_seed
from covey.types import Collected, Episode, Failure, Group, StopReason, Task, ToolUse, Turn


@dataclass(frozen=True)
class Ticket:
    number: int  # in the order of beginning
    began: int  # the version of the weights it began with
    deadline: int  # the last step that may train on it


class Window:
    def __init__(self, size: int, lead: int, *, step: int = 0, end: int | None = None) -> None:
        """`size` groups in a step, `lead` steps ahead at most. `end`: the number of steps there will be."""
        assert size > 0 and lead >= 0
        self.size = size
        self.lead = lead
        self.step = step
        self.version = step  # of the engines' weights
        self.end = end
        self.given = step * size
        self.waiting: dict[int, Ticket] = {}  # neither trained on nor complete
        self.complete: dict[int, Ticket] = {}  # in the order in which they became so

    def begin(self) -> list[Ticket]:
        """Tickets for as many as may begin now."""
        last = self.version + self.lead + 1
        room = (last if self.end is None else min(last, self.end)) * self.size - self.given
        tickets = [Ticket(self.given + n, self.version, self.version + self.lead) for n in range(room)]
        self.given += len(tickets)
        self.waiting |= {ticket.number: ticket for ticket in tickets}
        return tickets

    def finish(self, number: int) -> None:
        self.complete[number] = self.waiting.pop(number)

    def take(self) -> list[Ticket] | None:
        """The groups of this step in the order of their beginning, or None where somebody has to be waited for."""
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
        """Who must be among this step's: of those with a deadline up to t, as many as later steps have no place for."""
        everybody = [*self.waiting.values(), *self.complete.values()]
        chosen: dict[int, Ticket] = {}
        for t in sorted({ticket.deadline for ticket in everybody}):
            later = (t - self.step) * self.size
            missing = sum(ticket.deadline <= t for ticket in everybody) - later - len(chosen)
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
        """It is this step's turn; engines have the weights of `version`, by default its own."""
        self.version, before = step if version is None else version, self.version
        assert step >= self.step and before <= self.version <= step <= self.version + self.lead
        self.step = step

    # -- what a checkpoint keeps -----------------------------------------------------------------------------------

    def state(self) -> dict[str, object]:
        rows = [[t.number, t.began, t.deadline] for t in (*self.complete.values(), *self.waiting.values())]
        return {"given": self.given, "tickets": rows, "complete": list(self.complete)}

    def restore(self, given: int, tickets: Iterable[Iterable[int]], complete: Iterable[int]) -> list[Ticket]:
        """Who was complete is so again. The others begin anew, with the weights of now; they are returned."""
        self.given = given
        all_of_them = {ticket.number: ticket for ticket in (Ticket(*row) for row in tickets)}
        self.complete = {number: all_of_them.pop(number) for number in complete}
        again = [replace(t, began=self.version, deadline=self.version + self.lead) for t in all_of_them.values()]
        self.waiting = {ticket.number: ticket for ticket in again}
        return again


# -- Groups as JSON and back, for checkpoints. Without the task: who stores a group knows which one it belongs to ------


def group_to_json(group: Group) -> dict[str, Any]:
    baseline = None if group.baseline is None else _to_json(group.baseline)
    return {"episodes": [_to_json(episode) for episode in group.episodes], "baseline": baseline}


def group_from_json(task: Task, stored: dict[str, Any]) -> Group:
    baseline = None if stored["baseline"] is None else _from_json(task, stored["baseline"])
    return Group(task, tuple(_from_json(task, episode) for episode in stored["episodes"]), baseline)


def _to_json(episode: Episode) -> dict[str, Any]:
    found = asdict(episode)
    del found["task"]
    return found


def _from_json(task: Task, stored: dict[str, Any]) -> Episode:
    return Episode(
        task=task,
        turns=tuple(map(_turn, stored["turns"])),
        messages=tuple(stored["messages"]),
        rewards=stored["rewards"],
        stop=None if stored["stop"] is None else StopReason(stored["stop"]),
        failure=None if stored["failure"] is None else Failure(**stored["failure"]),
        answer=stored["answer"],
        given=stored["given"],
        tools=tuple(ToolUse(**use) for use in stored["tools"]),
        seconds=stored["seconds"],
        cut_by=stored.get("cut_by"),
    )


def _turn(stored: dict[str, Any]) -> Turn:
    columns = {name: tuple(stored[name]) for name in ("prompt_ids", "completion_ids", "logprobs", "versions")}
    return Turn(**columns, stop=StopReason(stored["stop"]), trained=stored["trained"])


# -- Groups that a step has learned from and a later one may learn from again, until they are too old or used up -------


@dataclass(frozen=True)
class Kept:
    group: Group
    uses: int  # steps that have learned from it


class Reuse:
    """Each step of `size` groups has `fresh` new ones; the others are drawn from those of former steps, evenly and
    without repetition. A group is learned from in `max_uses` steps at most, and never when one of its tokens is more
    than `lead` updates old. At first there are too few to draw from, and steps are smaller."""

    def __init__(self, size: int, max_uses: int, lead: int, seed: int) -> None:
        self.max_uses = max_uses
        self.lead = lead
        self.seed = seed
        self.fresh = fresh_groups(size, max_uses)
        self.drawn = size - self.fresh
        self.kept: dict[int, Kept] = {}  # by ticket

    def draw(self, step: int) -> list[Group]:
        self.kept = {n: kept for n, kept in self.kept.items() if step - oldest(kept.group) <= self.lead}
        chance = random.Random(stream_seed("reuse", self.seed, step))
        numbers = chance.sample(sorted(self.kept), min(self.drawn, len(self.kept)))
        found = [self.kept[number].group for number in numbers]
        for number in numbers:
            self._used(number)
        return found

    def add(self, groups: Iterable[tuple[int, Group]]) -> None:
        """What a step is learning from for the first time."""
        for number, group in groups:
            self.kept[number] = Kept(group, 0)
            self._used(number)

    def _used(self, number: int) -> None:
        kept = self.kept.pop(number)
        if kept.uses + 1 < self.max_uses:
            self.kept[number] = replace(kept, uses=kept.uses + 1)


def fresh_groups(size: int, max_uses: int) -> int:
    """How many of a step's groups are new where each is used so often."""
    return -(-size // max_uses)


def oldest(group: Group) -> int:
    """The version of the policy that drew its oldest token."""
    versions = (version for episode in group.episodes for turn in episode.turns for version in turn.versions)
    return min(versions, default=0)  # a group without a token teaches nothing: none needs it


# -- Sampling while the learner learns: groups begin as soon as the window lets them, a step takes those that are done--
# consumes        tasks in their order, weights as they are published
# produces        the groups of each step, with policies of bounded age (`window.py`)
# waits for       groups that are missing from a step
# is unblocked    by a group that is complete, and by new weights


class BackgroundSource(TrainingSource):
    """Groups that teach nothing are set aside and not replaced: who begins is the window's matter alone."""

    def __init__(self, *given: Any, lead: int, steps: int, reuse: Reuse | None = None, **named: Any) -> None:
        """`lead`: steps that a policy may be behind. `steps`: of the whole run. With `reuse`, `batch` gives the new
        tasks of a step only."""
        super().__init__(*given, **named)
        self.reuse = reuse
        self.batch = lru_cache(maxsize=lead + 2)(self.batch)  # asked for every group of a step
        self.window = Window(len(self.batch(0)), lead, end=steps)
        self._groups: dict[int, Group] = {}
        self._jobs: set[asyncio.Task[None]] = set()
        self._changed = asyncio.Event()
        self._error: BaseException | None = None
        self._again: list[Ticket] = []  # of an earlier process, whose groups were under way

    async def next(self) -> Collected:
        self._begin()
        while (tickets := self.window.take()) is None:
            if self._error is not None:
                raise self._error
            self._changed.clear()
            await self._changed.wait()
        fresh = {ticket.number: self._groups.pop(ticket.number) for ticket in tickets}
        found = self._collected(list(fresh.values()), len(fresh), refills=0)
        return found if self.reuse is None else self._with_former(found, fresh, self.reuse)

    def _with_former(self, found: Collected, fresh: dict[int, Group], reuse: Reuse) -> Collected:
        former = reuse.draw(self.step)
        number_of = {id(episode): number for number, group in fresh.items() for episode in group.episodes}
        reuse.add((number_of[id(group.episodes[0])], group) for group in found.groups)
        self.taken = (*self.taken, *(group.task for group in former))
        return replace(found, groups=(*found.groups, *former), reused=len(former))

    def _begin(self) -> None:
        tickets, self._again = [*self._again, *self.window.begin()], []
        for ticket in tickets:
            job = asyncio.get_running_loop().create_task(self._play(ticket))
            self._jobs.add(job)
            job.add_done_callback(self._jobs.discard)

    async def _play(self, ticket: Ticket) -> None:
        try:
            step, task = self._task(ticket.number)
            (group,) = await self._collect([task], ("train", step))
            self._groups[ticket.number] = group
            self.window.finish(ticket.number)
        except Exception as error:  # what ends the run: whoever waits for groups is told
            self._error = error
        finally:
            self._changed.set()

    def _task(self, number: int) -> tuple[int, Task]:
        step, place = divmod(number, self.window.size)
        return step, self.batch(step)[place]

    def policy_updated(self, version: int) -> None:
        super().policy_updated(version)
        self.window.advance(version, self.collector.engine.version)
        if self.window.given:  # otherwise the run has not begun
            self._begin()

    def close(self) -> None:
        for job in self._jobs:
            job.cancel()

    # -- what a checkpoint keeps -----------------------------------------------------------------------------------

    def state(self) -> dict[str, Any]:
        groups = {str(number): group_to_json(group) for number, group in self._groups.items()}
        kept = {} if self.reuse is None else self.reuse.kept
        former = {str(number): [k.uses, group_to_json(k.group)] for number, k in kept.items()}
        return {"window": self.window.state(), "groups": groups, "former": former}

    def restore(self, state: dict[str, Any], step: int) -> None:
        if not state:  # nothing was sampled ahead: training was synchronous, or what was sampled no longer fits
            self.window = Window(self.window.size, self.window.lead, step=step, end=self.window.end)
            return
        self.window.advance(step)
        self._again = self.window.restore(**state["window"])
        self._groups = {int(n): group_from_json(self._task(int(n))[1], one) for n, one in state["groups"].items()}
        if self.reuse is not None:
            for n, (uses, one) in state["former"].items():
                self.reuse.kept[int(n)] = Kept(group_from_json(self._task(int(n))[1], one), uses)
