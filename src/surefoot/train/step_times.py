"""How long healthy steps take, before and after the precision plan changed."""

from __future__ import annotations

import time
from statistics import median

FEW_STEPS = 3  # healthy steps below which a step time says nothing
KEPT = 50


class StepTimes:
    """Times the steps of one run; what the guard takes for its experiments is left out."""

    def __init__(self) -> None:
        self._seconds: list[float] = []
        self._before: float | None = None
        self._began: float | None = None

    def healthy_step(self) -> None:
        """Count the time since the last healthy step."""
        now = time.perf_counter()
        if self._began is not None:
            self._seconds = [*self._seconds[-KEPT:], now - self._began]
        self._began = now

    def interrupted(self) -> None:
        """Leave the time until the next healthy step out."""
        self._began = None

    def changed(self) -> None:
        """The plan changed: steps take another time from now on."""
        self._before = median(self._seconds) if len(self._seconds) >= FEW_STEPS else None
        self._seconds = []

    def before_and_after(self) -> dict[str, float | None]:
        """Return medians in seconds for the journal's summary; nothing while there are too few steps."""
        if len(self._seconds) < FEW_STEPS:
            return {}
        return {"step_seconds_before": self._before, "step_seconds_after": median(self._seconds)}
