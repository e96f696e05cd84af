"""The factor that keeps float16 gradients above their smallest number."""

from __future__ import annotations

from dataclasses import asdict, dataclass

# Grows as torch's GradScaler does (Micikevicius et al., 2018, section 3.2), but starts two bits lower: from 2**16 small
# LoRA runs overflowed within their first steps, from 2**14 none of them did (measured). The floor is ours: below 1 the
# scale would shrink gradients, and GradScaler without a floor reaches 0 and skips every step for ever.
START = 2.0**14
GROWTH_INTERVAL = 2000
CEILING = 2.0**24
FLOOR = 1.0


@dataclass
class LossScale:
    """A loss scale that halves when gradients overflow and doubles after many clean steps.

    Attributes:
        value: the factor on the loss; 1 when nothing is scaled.
        enabled: False outside float16.
        clean_steps: applied steps since the last change.
    """

    value: float
    enabled: bool
    clean_steps: int = 0

    @classmethod
    def for_run(cls, enabled: bool) -> LossScale:
        """Start a run's scale."""
        return cls(START if enabled else 1.0, enabled)

    def lower_to(self, value: float) -> None:
        """Go on with a lower scale after an overflow."""
        self.value = max(FLOOR, value)
        self.clean_steps = 0

    def repair(self) -> bool:
        """Put a scale that was saved out of bounds back to its start; True when it was."""
        lawful = FLOOR <= self.value <= CEILING if self.enabled else self.value == 1.0
        if not lawful:
            self.value, self.clean_steps = (START if self.enabled else 1.0), 0
        return not lawful

    def applied(self) -> None:
        """Count an applied step, and double the scale after enough of them."""
        self.clean_steps += 1
        if self.enabled and self.clean_steps >= GROWTH_INTERVAL and self.value < CEILING:
            self.value *= 2.0
            self.clean_steps = 0

    def state(self) -> dict[str, float | bool | int]:
        """Return what a checkpoint must hold."""
        return asdict(self)
