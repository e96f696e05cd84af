"""How far a step's loss or gradient norm lies above those of the steps before, on a log scale."""

from __future__ import annotations

import math
from typing import NamedTuple

FEWEST = 10  # steps that numbers are compared with, at least
NATS_FLOOR = 0.1  # added to a loss before its log: from 0.001 to 0.01 nats is no event
NORM_FLOOR = 1e-12  # added to a norm before its log
LOSS_SPREAD_FLOOR, NORM_SPREAD_FLOOR = 0.05, 0.1  # of the log


class Score(NamedTuple):
    """How far a number lies above the window.

    Attributes:
        value: the number.
        z: log of it over the window's median, in spreads.
        excess: log of it over the window's largest.
        linear_z: distance to the median in spreads on the linear scale, which suits the few tokens of a tiny batch.
        median: the window's, on the linear scale.
        spread: of the window, upwards, on the linear scale.
        largest: the window's, on the linear scale.
        steps: in the window.
    """

    value: float
    z: float
    excess: float
    linear_z: float
    median: float
    spread: float
    largest: float
    steps: int

    def sentence(self, name: str) -> str:
        """Say it in words."""
        return (
            f"{name} {self.value:.4g} where the last {self.steps} steps had median {self.median:.4g} and spread "
            f"{self.spread:.2g}, at most {self.largest:.4g} (z = {self.z:.3g} on the log scale)"
        )


class Noise(NamedTuple):
    """What the numbers of tokens say of the scatter of this step and of those in the window.

    A mean over n tokens scatters as 1 / sqrt(n). Steps of more tokens than usual are not trusted more, since their
    scatter comes from the data. All of it is trivial where every step has the same number of tokens.

    Attributes:
        weights: of each step in the window, for its distance from the median; None for 1.
        logs: of this step's tokens over those of each step in the window; None for 0.
        few: places in the window of the steps with fewer tokens than usual; empty where they tell nothing.
        many: places of the others.
        gap: log of the usual tokens of the many over those of the few.
        stretch: of the spread, for this step.
    """

    weights: list[float] | None
    logs: list[float] | None
    few: list[int]
    many: list[int]
    gap: float
    stretch: float

    @classmethod
    def of(cls, log_tokens: float, past: list[float]) -> Noise:
        """Compare the log of a step's trained tokens with those of the steps in the window."""
        if past.count(log_tokens) == len(past):
            return cls(None, None, [], [], 0.0, 1.0)
        ordered = sorted(past)
        usual = ordered[len(past) // 2]
        weights = [1.0 if n >= usual else math.exp((n - usual) / 2) for n in past]
        logs = [log_tokens - n for n in past]
        few = [i for i, n in enumerate(past) if n < usual]
        many = [i for i, n in enumerate(past) if n >= usual]
        gap = ordered[(len(few) + len(past)) // 2] - ordered[len(few) // 2]
        stretch = math.exp(max(0.0, usual - log_tokens) / 2)
        return cls(weights, logs, few if len(few) >= FEWEST else [], many, gap, stretch)

    def score(self, value: float, log: float, past: list[float], offset: float, floor: float) -> Score:
        """Compare a number with the window's.

        The spread is the larger of two one-sided estimates that agree for a normal distribution (its 75th percentile
        lies 0.6745 sigma above the median, its 90th 1.2816): the median deviation of the upper half, and one that
        sees a heavy tail.

        Args:
            value: linear.
            log: of value + offset.
            past: the same of each step in the window.
            offset: added before the log.
            floor: least spread of the log.

        Returns:
            The score; with unequal tokens the window's numbers are as they would be with this step's.
        """
        count = len(past)
        if self.logs is not None:
            slope = self._slope(past)
            past = [entry + slope * more for entry, more in zip(past, self.logs, strict=True)]
        ordered = sorted(past)
        middle = ordered[count // 2]
        if self.weights is None:
            deviations = [entry - middle for entry in ordered]
        else:
            deviations = sorted([(entry - middle) * weight for entry, weight in zip(past, self.weights, strict=True)])
        upper, tail = deviations[round(0.75 * count)], deviations[min(count - 1, round(0.9 * count))]
        spread = max(upper / 0.6745, tail / 1.2816, floor)
        spread *= self.stretch * (1.0 + 4.0 / count)  # few steps know their spread badly
        base = math.exp(middle)
        linear = base * math.expm1(min(spread, 50.0))
        return Score(
            value, (log - middle) / spread, log - ordered[-1], (value + offset - base) / linear,
            base - offset, linear, math.exp(ordered[-1]) - offset, count,
        )  # fmt: skip

    def _slope(self, past: list[float]) -> float:
        """Estimate how a log grows with that of a step's tokens: 0 to -0.6 (the norm of pure noise goes as n^-0.5)."""
        if not self.few or self.gap <= 0.0:
            return 0.0
        low, high = (sorted([past[i] for i in part])[len(part) // 2] for part in (self.few, self.many))
        return max(-0.6, min(0.0, (high - low) / self.gap))
