"""Groups that a step has learned from and a later one may learn from again, until they are too old or used up."""

from __future__ import annotations

import random
from collections.abc import Iterable
from dataclasses import dataclass, replace

from covey.rollout.streams import stream_seed
from covey.types import Group


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
