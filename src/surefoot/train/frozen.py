"""When frozen weights are compared with their checksums, and since when they are known to be sound."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any

from surefoot.guard.check import StepCheck
from surefoot.guard.checksum import WeightChecksums

if TYPE_CHECKING:
    from surefoot.train.loop import Run

CHECKSUM_EVERY = 200  # steps on a GPU, where reading the sums waits for it
CHECKSUM_SHARE = 0.01  # of a step's time, elsewhere: small models are checked after every step


class FrozenWeights:
    """The frozen weights of one run.

    Attributes:
        sums: their checksums.
        sound_at: step after which they were right.
    """

    sums: WeightChecksums
    sound_at: int

    def __init__(self, model: Any, step: int) -> None:
        """Take the sums.

        Args:
            model: whose frozen weights are watched.
            step: that was committed last.
        """
        began = time.perf_counter()
        self.sums = WeightChecksums(model)
        self.sound_at = step
        self._seconds = time.perf_counter() - began
        self._last_step = time.perf_counter()

    def due(self, run: Run, check: StepCheck) -> bool:
        """Say whether to look at them after a step.

        Args:
            run: the run.
            check: of the step that was committed last.

        Returns:
            True when it is time, when the network is dead, or when weights are about to be kept.
        """
        if check.grad_norm == 0.0 or keeps_weights(run, check.step):
            return True
        if run.runner.device != "cpu":
            return check.step % CHECKSUM_EVERY == 0
        now = time.perf_counter()
        step_seconds, self._last_step = now - self._last_step, now
        every = self._seconds / max(CHECKSUM_SHARE * step_seconds, 1e-9)
        return check.step - self.sound_at >= min(CHECKSUM_EVERY, every)

    def changed(self, model: Any, step: int) -> list[str]:
        """Look at them now.

        Args:
            model: whose weights they are.
            step: that was committed last; if nothing changed they are sound after it.

        Returns:
            Names of the tensors that changed.
        """
        began = time.perf_counter()
        names = self.sums.changed(model)
        self._seconds = min(self._seconds, time.perf_counter() - began)  # the first one was cold
        if not names:
            self.sound_at = step
        return names


def keeps_weights(run: Run, step: int) -> bool:
    """Say whether a step's weights are saved."""
    return run.schedule.saves_at(step) or step == run.schedule.total_steps
