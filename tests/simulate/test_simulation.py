"""Simulated time against time computed by hand."""

from __future__ import annotations

import pytest

from covey.simulate.hardware import DecodeCurve, Episodes, Turn
from covey.simulate.simulation import Deployment, StepResult, Workload, simulate


def work(*turns: Turn, groups: int = 1, attempts: int = 2, prompt: int = 0) -> Workload:
    return Workload(groups, attempts, Episodes((turns,), prompt))


def place(**changes: object) -> Deployment:
    settings = {
        "engines": 1,
        "shared": False,
        "lead": 0,
        "decode": DecodeCurve.line(0.1, 0.0),
        "prefill": 0.0,
        "capacity": 64,
        "learn": lambda tokens, longest: 3.0,
        "publish": 0.5,
    }
    return Deployment(**(settings | changes))  # type: ignore[arg-type]


def ends(steps: list[StepResult]) -> list[float]:
    return [step.ended for step in steps]


def test_a_synchronous_step_is_sampling_and_learning_and_publishing() -> None:
    """10 tokens at 0.1 s for both sequences at once: 1 s; then 3 s and 0.5 s."""
    steps = simulate(work(Turn(10)), place(), 3)
    assert ends(steps) == pytest.approx([4.5, 9.0, 13.5])
    assert [step.engines_busy for step in steps] == pytest.approx([1.0, 2.0, 3.0])
    assert {(step.age, step.age_max) for step in steps} == {(0.0, 0)}


def test_a_decoding_step_depends_on_the_batch_size() -> None:
    """0.1 s + 0.2 s for each of 4 sequences: 0.9 s a token, 5 tokens."""
    steps = simulate(work(Turn(5), attempts=4), place(decode=DecodeCurve.line(0.1, 0.2), publish=0.0), 1)
    assert ends(steps) == pytest.approx([4.5 + 3.0])


def test_a_smaller_batch_decodes_faster() -> None:
    """Answers of 2 and 6 tokens; with n of them a token takes n seconds. The first ends after 4 s, the second needs
    4 more tokens alone."""
    both = Workload(2, 1, Episodes(((Turn(2),), (Turn(6),)), 0))
    found = {
        simulate(both, place(decode=DecodeCurve.line(0.0, 1.0), publish=0.0), 1, seed=seed)[0].ended
        for seed in range(20)
    }
    # Drawn lengths are 2 and 2 (4 s), 2 and 6 (8 s), or 6 and 6 (12 s); then 3 s of learning.
    assert {round(seconds, 9) for seconds in found} == {7.0, 11.0, 15.0}


def test_requests_beyond_the_capacity_wait() -> None:
    steps = simulate(work(Turn(10), attempts=6), place(capacity=2, publish=0.0), 1)
    assert ends(steps) == pytest.approx([3 * 1.0 + 3.0])


def test_groups_are_distributed_over_engines() -> None:
    """Four groups of one on two engines, a second per sequence and token: two sequences each, 2 s a token."""
    four = work(Turn(3), groups=4, attempts=1)
    steps = simulate(four, place(engines=2, decode=DecodeCurve.line(0.0, 1.0), publish=0.0), 1)
    assert ends(steps) == pytest.approx([6.0 + 3.0])


def test_a_prompt_is_computed_once_for_its_group_and_a_tool_s_answer_for_each() -> None:
    """A prompt of 100 tokens at 0.01 s: 1 s. Two attempts: 10 tokens, a wait of 2 s, 20 given tokens each (0.2 s, one
    after the other), 10 tokens. Both stand still for either prefill."""
    played = work(Turn(10, wait=2.0, observation=20), Turn(10), prompt=100)
    steps = simulate(played, place(prefill=0.01, publish=0.0), 1)
    assert ends(steps) == pytest.approx([1.0 + 1.0 + 2.0 + 0.4 + 1.0 + 3.0])


def test_the_learner_counts_prompts_once_per_group() -> None:
    seen: list[tuple[float, float]] = []

    def learn(tokens: float, longest: float) -> float:
        seen.append((tokens, longest))
        return 1.0

    simulate(work(Turn(10, observation=5), Turn(7), groups=2, attempts=3, prompt=100), place(learn=learn), 1)
    assert seen == [(2 * 100 + 6 * 22, 122)]


@pytest.mark.parametrize(("learning", "sampling"), [(3.0, 1.0), (1.0, 3.0)])
def test_sampling_and_learning_at_once_take_as_long_as_the_slower(learning: float, sampling: float) -> None:
    tokens = round(sampling / 0.1)
    settings = place(lead=1, learn=lambda tokens, longest: learning, publish=0.0, capacity=2)
    steps = simulate(work(Turn(tokens)), settings, 12)
    gaps = [b - a for a, b in zip(ends(steps)[2:], ends(steps)[3:], strict=False)]
    assert gaps == pytest.approx([max(learning, sampling)] * len(gaps))


def test_on_shared_devices_sampling_pauses_while_the_learner_works() -> None:
    """Without tools a lead gains nothing: 1 s + 3 s + 0.5 s a step, as in synchronous mode."""
    steps = simulate(work(Turn(10)), place(shared=True, lead=1, capacity=2), 8)
    gaps = [b - a for a, b in zip(ends(steps), ends(steps)[1:], strict=False)]
    assert gaps == pytest.approx([4.5] * 7)


def test_on_shared_devices_tools_continue_while_the_learner_works() -> None:
    """A wait of 3 s after 1 s of sampling. By turns 1 + 3 + 3.5 s. With a lead of 2, three groups are sampled and wait
    together, 4 s, and three updates follow each other, in which the next three begin but cannot be sampled."""
    turn = Turn(10, wait=3.0)
    by_turns = simulate(work(turn), place(shared=True), 4)
    assert ends(by_turns) == pytest.approx([7.5, 15.0, 22.5, 30.0])
    ahead = simulate(work(turn), place(shared=True, lead=2), 6)
    assert ends(ahead) == pytest.approx([7.5, 11.0, 14.5, 22.0, 25.5, 29.0])


def test_the_age_of_a_token_is_that_of_the_weights_that_drew_it() -> None:
    """Lead 1, both groups sampled at once in 1 s: the second group is trained on after one update. The third begins
    with that update, at 4.5 s, and is drawn by 5.5 s, long before the second update at 8 s: it is one behind too."""
    steps = simulate(work(Turn(10)), place(lead=1), 4)
    assert [step.age for step in steps] == pytest.approx([0.0, 1.0, 1.0, 1.0])
    assert [step.age_max for step in steps] == [0, 1, 1, 1]


def test_new_weights_in_the_middle_of_an_answer_or_after_draining() -> None:
    """Answers of 100 tokens, 10 s; learning 3 s. Two groups one after the other (capacity 2): the first ends at 10 s,
    the update comes at 13 s, when 30 of the second group's 100 tokens are drawn."""
    in_flight = simulate(work(Turn(100)), place(lead=1, capacity=2, publish=0.0), 2)
    assert in_flight[1].age == pytest.approx(0.3)
    drained = simulate(work(Turn(100)), place(lead=1, capacity=2, publish=0.0, drain=True), 2)
    assert drained[0].ended == pytest.approx(20.0)  # the second group ends first
    assert drained[1].age == pytest.approx(1.0)


@pytest.mark.parametrize("lead", [0, 1, 3])
@pytest.mark.parametrize("shared", [False, True])
def test_no_policy_is_older_than_the_bound(lead: int, shared: bool) -> None:
    seen = tuple((Turn(n, wait=w, observation=3), Turn(9)) for n, w in [(3, 0.0), (40, 9.0), (10, 1.0), (7, 30.0)])
    steps = simulate(
        Workload(4, 3, Episodes(seen, 5)), place(engines=3, lead=lead, shared=shared, prefill=0.01, capacity=4), 60
    )
    assert max(step.age_max for step in steps) == lead
    assert all(step.age <= step.age_max + 1e-9 for step in steps)
