"""What a step gave, kept so that another machine's can be compared with it."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

from surefoot.guard.check import StepCheck
from surefoot.guard.scene import Rerun, StepLosses

Number = float | str
"""As JSON has no word for them, numbers that are not finite are written "nan", "inf" and "-inf"."""


@dataclass(frozen=True)
class Seen(StepLosses):
    """Losses and gradients of a step.

    Attributes:
        gradients: a number a trained tensor that is not finite when its gradient is not: the largest absolute value,
            or the L2 norm.
    """

    gradients: dict[str, float]

    @classmethod
    def of(cls, rerun: Rerun) -> Seen:
        """Take it from a step that ran again."""
        return cls(rerun.losses, rerun.rows, dict(rerun.peaks))

    @classmethod
    def of_check(cls, check: StepCheck) -> Seen:
        """Take it from the check that raised the alarm."""
        return cls(check.pass_losses, check.pass_rows, dict(check.norms))

    @property
    def bad_gradients(self) -> tuple[str, ...]:
        """Names of the trained tensors whose gradient is not finite."""
        return tuple(name for name, size in self.gradients.items() if not math.isfinite(size))

    @property
    def finite(self) -> bool:
        """True when all losses and all gradients are numbers."""
        return self.loss_finite and not self.bad_gradients

    def to_json(self) -> dict[str, Any]:
        """Write it as JSON values."""
        return {
            "loss": number_text(self.loss),
            "losses": [number_text(loss) for loss in self.losses],
            "rows": [list(rows) for rows in self.rows],
            "gradients": {name: number_text(size) for name, size in self.gradients.items()},
        }

    @classmethod
    def from_json(cls, record: dict[str, Any]) -> Seen:
        """Read it back; what is no number raises ValueError or TypeError."""
        return cls(
            tuple(float(loss) for loss in record["losses"]),
            tuple(tuple(str(row) for row in rows) for rows in record["rows"]),
            {str(name): float(size) for name, size in record["gradients"].items()},
        )


def number_text(value: float) -> Number:
    """Write a number for JSON, those that are not finite as "nan", "inf" and "-inf"."""
    return float(value) if math.isfinite(value) else str(float(value))
