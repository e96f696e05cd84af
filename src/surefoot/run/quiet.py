"""A listener that does nothing, for those that care about some events only."""

from __future__ import annotations

from pathlib import Path

from surefoot.train.events import EvalEvent, Listener, RunFacts, StepEvent, TrainResult


class QuietListener(Listener):
    """Hears every event and does nothing about it."""

    def started(self, facts: RunFacts) -> None:
        """Do nothing."""

    def stepped(self, event: StepEvent) -> None:
        """Do nothing."""

    def evaluated(self, event: EvalEvent) -> None:
        """Do nothing."""

    def saved(self, step: int, folder: Path) -> None:
        """Do nothing."""

    def rewound(self, step: int) -> None:
        """Do nothing."""

    def told(self, message: str) -> None:
        """Do nothing."""

    def finished(self, result: TrainResult) -> None:
        """Do nothing."""
