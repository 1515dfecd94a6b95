"""Sampling while the learner learns: groups begin as soon as the window lets them, a step takes those that are done.

consumes        tasks in their order, weights as they are published
produces        the groups of each step, with policies of bounded age (`window.py`)
waits for       groups that are missing from a step
is unblocked    by a group that is complete, and by new weights
"""

from __future__ import annotations

import asyncio
from dataclasses import replace
from functools import lru_cache
from typing import Any

from covey.rollout.collector import TrainingSource
from covey.rollout.reuse import Kept, Reuse
from covey.rollout.stored import group_from_json, group_to_json
from covey.rollout.window import Ticket, Window
from covey.types import Collected, Group, Task


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
