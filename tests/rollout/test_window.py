"""Who begins and who is trained on when, with a clock that is made up."""

from __future__ import annotations

import heapq
import random
from collections.abc import Callable

import pytest

from covey.rollout.asynchronous import Window

Duration = Callable[[random.Random, int], float]


def simulate(
    steps: int, size: int, lead: int, duration: Duration, seed: int = 0, every: int = 1
) -> list[tuple[int, int, int, float]]:
    """(ticket, began, trained at, duration) of a whole run: learning takes 1, a group as long as `duration` says;
    engines get the weights of every so manieth step."""
    rng, window = random.Random(seed), Window(size, lead, end=steps)
    clock, running, found = 0.0, [], []
    lasts: dict[int, float] = {}
    for step in range(steps):
        window.advance(step, step - step % every)
        for ticket in window.begin():
            lasts[ticket.number] = duration(rng, ticket.number)
            heapq.heappush(running, (clock + lasts[ticket.number], ticket.number))
        while True:
            while running and running[0][0] <= clock:
                window.finish(heapq.heappop(running)[1])
            if (batch := window.take()) is not None:
                break
            clock = running[0][0]  # wait for the next one: there is one, or nobody could ever be taken
        found += [(t.number, t.began, step, lasts[t.number]) for t in batch]
        clock += 1.0
    assert not running and not window.pending and not window.complete
    return found


DURATIONS: dict[str, Duration] = {
    "equal": lambda rng, n: 1.0,
    "heavy-tailed": lambda rng, n: rng.paretovariate(0.8),
    "every seventh takes forever": lambda rng, n: 200.0 if n % 7 == 0 else 0.1,
    "the first of a step is the last": lambda rng, n: 50.0 if n % 4 == 0 else 0.0,
    "ever longer": lambda rng, n: n / 50,
    "ever shorter": lambda rng, n: max(0.0, 100 - n / 10),
}


@pytest.mark.parametrize("lead", [0, 1, 2, 5])
@pytest.mark.parametrize("name", DURATIONS)
def test_nobody_is_ever_older_than_the_lead_and_everybody_is_trained_on_once(name: str, lead: int) -> None:
    found = simulate(1500, 4, lead, DURATIONS[name])
    assert sorted(number for number, *_ in found) == list(range(1500 * 4))
    assert max(at - began for _, began, at, _ in found) <= lead


@pytest.mark.parametrize(("lead", "every"), [(1, 2), (3, 2), (3, 4), (6, 4)])
@pytest.mark.parametrize("name", DURATIONS)
def test_the_same_where_engines_get_weights_less_often(name: str, lead: int, every: int) -> None:
    found = simulate(600, 4, lead, DURATIONS[name], every=every)
    assert sorted(number for number, *_ in found) == list(range(600 * 4))
    assert max(at - began for _, began, at, _ in found) <= lead
    assert all(began % every == 0 for _, began, _, _ in found)


def test_ten_thousand_steps() -> None:
    found = simulate(10_000, 3, 3, DURATIONS["heavy-tailed"], seed=1)
    ages = [at - began for _, began, at, _ in found]
    assert sorted(number for number, *_ in found) == list(range(30_000))
    assert max(ages) == 3 and min(ages) == 0


def test_without_a_lead_it_is_training_by_turns() -> None:
    found = simulate(200, 4, 0, DURATIONS["heavy-tailed"])
    assert [(number, began) for number, began, *_ in found] == [(n, n // 4) for n in range(800)]
    assert all(began == at for _, began, at, _ in found)


def test_the_durations_of_what_is_trained_on_are_those_of_what_began() -> None:
    """Over any stretch of the run, up to the lead at its ends: short answers do not crowd out long ones."""
    found = simulate(3000, 4, 2, DURATIONS["heavy-tailed"], seed=2)
    by_training = sorted(found, key=lambda row: row[2])
    for start in range(0, 3000, 500):
        trained = {number for number, _, at, _ in by_training if start <= at < start + 500}
        began = set(range(start * 4, (start + 500) * 4))
        assert len(trained ^ began) <= 2 * 4 * 2 * 2  # the window at both ends, coming in and going out


def test_a_slow_group_is_overtaken_while_there_is_time_and_then_waited_for() -> None:
    window = Window(1, 2)
    assert [t.number for t in window.begin()] == [0, 1, 2]  # began at 0: deadline 2
    window.finish(2)
    assert [t.number for t in window.take() or []] == [2]
    window.advance(1)
    assert [t.number for t in window.begin()] == [3]
    window.finish(3)
    assert window.take() is None  # 0 and 1 both have to be trained on by step 2: one of them now
    window.finish(1)
    assert [t.number for t in window.take() or []] == [1]
    window.advance(2)
    assert window.take() is None
    window.finish(0)
    assert [t.number for t in window.take() or []] == [0]


def test_a_step_waits_for_its_full_number() -> None:
    window = Window(3, 1)
    window.begin()
    window.finish(5)
    window.finish(1)
    assert window.take() is None
    window.finish(4)
    assert [t.number for t in window.take() or []] == [1, 4, 5]


def test_the_end_lets_nobody_begin_in_vain() -> None:
    window = Window(2, 5, end=2)
    assert len(window.begin()) == 4
    window.advance(1)
    assert window.begin() == []


def test_a_restored_window_goes_on() -> None:
    window = Window(2, 1)
    window.begin()
    for number in (3, 0):
        window.finish(number)
    window.take()
    window.advance(1)
    window.begin()
    window.finish(4)
    again = Window(2, 1, step=1)
    state = window.state()
    anew = again.restore(**state)  # type: ignore[arg-type]
    assert [t.number for t in anew] == [1, 2, 5]
    assert {t.began for t in anew} == {1}
    assert list(again.complete) == [4]
    assert again.issued == 6
    for ticket in anew:
        again.finish(ticket.number)
    assert [t.number for t in again.take() or []] == [1, 4]
