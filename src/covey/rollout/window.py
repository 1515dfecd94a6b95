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

from collections.abc import Iterable
from dataclasses import dataclass, replace


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
