"""Slots of the batch on a GPU, against a simulated GPU that only knows the edits."""

from __future__ import annotations

import random

import pytest

from covey.rollout.embedded.scheduler import RequestState
from covey.rollout.embedded.slots import Slots
from covey.types import Sampling

COUNT = 24


def request(blocks: int = 1) -> RequestState:
    return RequestState((1, 2), Sampling(), blocks=list(range(blocks)))


def size(rows: int) -> int:
    return next(n for n in (1, 2, 4, 8, 12, 16, COUNT) if n >= rows)


class Device:
    """Requests and block counts by slot, changed only by edits."""

    def __init__(self) -> None:
        self.slots = Slots(COUNT)
        self.held: list[RequestState | None] = [None] * COUNT
        self.known = [0] * COUNT

    def arrange(self, rows: list[RequestState]) -> None:
        edits = self.slots.arrange(rows, size)
        before = list(zip(self.held, self.known, strict=True))
        for source, target in edits.moves:
            self.held[target], self.known[target] = before[source]
        for slot in edits.changed:
            self.held[slot], self.known[slot] = self.slots.requests[slot], 0
        for slot in edits.grown:
            row = self.slots.requests[slot]
            assert row is not None
            self.known[slot] = len(row.blocks)
        for source, target in edits.moves:
            assert source not in (t for _, t in edits.moves) and self.held[target] is not None
        assert self.held == self.slots.requests
        assert {row for row in self.held if row} == set(rows)
        assert all(n < size(len(rows)) for n, row in enumerate(self.held) if row)
        assert all(count == len(row.blocks) for row, count in zip(self.held, self.known, strict=True) if row)


@pytest.mark.parametrize("seed", range(20))
def test_edits_alone_keep_the_gpu_up_to_date(seed: int) -> None:
    rng, device = random.Random(seed), Device()
    rows: list[RequestState] = []
    for _ in range(60):
        rows = [row for row in rows if rng.random() < 0.8]
        rows += [request(rng.randint(1, 3)) for _ in range(min(rng.randint(0, 6), COUNT - len(rows)))]
        for row in rows:
            chance = rng.random()
            if chance < 0.2:
                row.blocks += [7]
            elif chance < 0.3:  # preempted, and admitted again
                row.blocks = [*row.blocks]
        if rng.random() < 0.1:
            device.slots.forget()
        device.arrange(rows)


def test_requests_that_stay_are_not_touched() -> None:
    device, rows = Device(), [request() for _ in range(5)]
    device.arrange(rows)
    edits = device.slots.arrange([*rows[:2], *rows[3:], late := request()], size)
    assert (edits.moves, edits.changed) == ([], [2]) and device.slots.requests[2] is late
    rows[0].blocks += [9]
    edits = device.slots.arrange([*rows[:2], *rows[3:], late], size)
    assert (edits.moves, edits.changed, edits.grown) == ([], [], [0])


def test_few_requests_move_together_so_that_a_smaller_batch_is_enough() -> None:
    device, rows = Device(), [request() for _ in range(12)]
    device.arrange(rows)
    device.arrange(left := [rows[3], rows[11]])
    assert {row for row in device.slots.requests[:2] if row} == set(left)


def test_forgotten_slots_are_sent_again_or_emptied() -> None:
    device, rows = Device(), [request() for _ in range(4)]
    device.arrange(rows)
    device.slots.forget()
    edits = device.slots.arrange(rows[:1], size)
    assert edits.changed == list(range(COUNT))
