"""What was there before training is left alone by the collector; what comes after is not, and nothing stays frozen."""

from __future__ import annotations

import gc
import weakref

from surefoot.train.garbage import startup_frozen


class Ring:
    """Refers to itself, so that only the collector can free it."""

    def __init__(self) -> None:
        self.itself = self


def test_only_new_rings_are_collected():
    frozen_before = gc.get_freeze_count()
    old = Ring()
    with startup_frozen():
        of_old = weakref.ref(old)
        del old
        of_new = weakref.ref(Ring())
        gc.collect()
        assert of_old() is not None
        assert of_new() is None
    gc.collect()
    assert of_old() is None
    assert gc.get_freeze_count() == frozen_before == 0
