"""The engine that a request is routed to."""

from __future__ import annotations

from covey.cluster.engines import SLACK, Router


def test_attempts_at_a_task_and_later_turns_go_to_one_engine() -> None:
    router = Router()
    assert router.pick((1, 2, 3), {0: 0, 1: 0}) == 0
    assert router.pick((1, 2, 3), {0: 1, 1: 0}) == 0
    assert router.pick((1, 2, 4), {0: 2, 1: 0}) == 1  # a common prefix that no request consisted of
    assert router.pick((1, 2, 3, 9, 9, 5), {0: 2, 1: 1}) == 0  # extends the first
    assert router.pick((1, 2, 4, 7), {0: 0, 1: 3}) == 1


def test_the_longest_known_prefix_decides() -> None:
    router = Router()
    assert router.pick((5,), {0: 0, 1: 9}) == 0
    router.flush()
    assert router.pick((5, 6), {0: 9, 1: 0}) == 1
    assert router.pick((5,), {0: 0, 1: 1}) == 0
    assert router.pick((5, 6, 7), {0: 0, 1: 1}) == 1


def test_busy_and_dead_engines_are_avoided() -> None:
    router = Router()
    assert router.pick((1,), {0: 0, 1: 0}) == 0
    assert router.pick((1,), {0: SLACK, 1: 0}) == 0
    assert router.pick((1,), {0: SLACK + 1, 1: 0}) == 1
    assert router.pick((1,), {1: 5, 2: 6}) == 1  # engine 0 is being replaced
    router.flush()
    assert router.pick((1,), {0: 3, 1: 2}) == 1
