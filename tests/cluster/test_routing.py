"""Which engine gets a request."""

from __future__ import annotations

from covey.cluster.engines import SLACK, Router


def test_attempts_at_a_task_and_later_turns_go_to_one_engine() -> None:
    router = Router()
    assert router.pick((1, 2, 3), {0: 0, 1: 0}) == 0
    assert router.pick((1, 2, 3), {0: 1, 1: 0}) == 0
    assert router.pick((1, 2, 4), {0: 2, 1: 0}) == 1  # begins alike, but nobody was asked with that beginning alone
    assert router.pick((1, 2, 3, 9, 9, 5), {0: 2, 1: 1}) == 0  # goes on from the first
    assert router.pick((1, 2, 4, 7), {0: 0, 1: 3}) == 1


def test_the_longest_known_beginning_counts() -> None:
    router = Router()
    assert router.pick((5,), {0: 0, 1: 9}) == 0
    router.flush()
    assert router.pick((5, 6), {0: 9, 1: 0}) == 1
    assert router.pick((5,), {0: 0, 1: 1}) == 0
    assert router.pick((5, 6, 7), {0: 0, 1: 1}) == 1


def test_not_where_there_is_much_more_to_do_and_not_where_nobody_is() -> None:
    router = Router()
    assert router.pick((1,), {0: 0, 1: 0}) == 0
    assert router.pick((1,), {0: SLACK, 1: 0}) == 0
    assert router.pick((1,), {0: SLACK + 1, 1: 0}) == 1
    assert router.pick((1,), {1: 5, 2: 6}) == 1  # engine 0 is being replaced
    router.flush()
    assert router.pick((1,), {0: 3, 1: 2}) == 1
