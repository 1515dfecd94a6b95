"""What stood before a run is left alone by the collector, and is its business again afterwards."""

from __future__ import annotations

import gc
import weakref

import pytest

from covey.training.interrupts import set_aside

pytestmark = pytest.mark.usefixtures("nothing_is_frozen")


class Ring:
    def __init__(self) -> None:
        self.itself = self


def test_old_things_are_set_aside_and_new_garbage_is_found() -> None:
    old = Ring()
    old_seen = weakref.ref(old)
    with set_aside():
        assert gc.get_freeze_count() > 10_000
        del old
        new = weakref.ref(Ring())
        gc.collect()
        assert new() is None
        assert old_seen() is not None
    assert gc.get_freeze_count() == 0
    gc.collect()
    assert old_seen() is None


def test_also_after_an_error() -> None:
    with pytest.raises(KeyboardInterrupt), set_aside():
        raise KeyboardInterrupt
    assert gc.get_freeze_count() == 0


def test_who_froze_before_ends_it() -> None:
    with set_aside():
        with set_aside():
            assert gc.get_freeze_count() > 0
        assert gc.get_freeze_count() > 0
    assert gc.get_freeze_count() == 0
