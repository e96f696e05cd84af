"""Finite divergence, told from two numbers of every step: its loss and the norm of its gradient.

Steps that are not finite are the gate's business. This looks for what the gate cannot see: a step that is a number, and
wrong. Both numbers are judged on a log scale against the last steps that were well: by their median, by how far the
upper part of them reaches, and by the largest of them. Only a rise counts. A hard batch is one dear step, so one step
alarms only when it lies far outside; damaged weights stay damaged, so two steps in a row need much less. Slow
divergence is left to a cumulative sum (CUSUM; Page, 1954). What alarmed and what is not finite never enters the
statistics.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

# What the window holds: the last half of the run (early losses fall fast), up to WINDOW steps, without the newest one.
WINDOW = 64
WARMUP = 10  # steps in the window before anything may alarm
KEPT = 256  # well steps remembered: a rollback of up to KEPT - 2 * WINDOW steps leaves the window as it was
NATS_FLOOR = 0.1  # added to a loss before its log: from 0.001 to 0.01 nats is no event
NORM_FLOOR = 1e-12  # added to a norm before its log
LOSS_SPREAD_FLOOR, NORM_SPREAD_FLOOR = 0.05, 0.1  # of the log

# Thresholds. Chosen on the train seeds of benchmarks/spikes.py (29,200 healthy steps of 13 settings, no alarm) and
# frozen before the test seeds were run. "healthy" is the largest value over those steps of what the line limits.
JUMP_EXCESS = 0.85  # log of loss over the window's largest; healthy 0.6
JUMP_EXCESS_FEW = 1.5  # and this much more over the window's number of steps
JUMP_PRODUCT, JUMP_PRODUCT_EXCESS = 5.0, 0.45  # excess × linear z, with at least this excess; healthy 4.0
JUMP_TIMES, JUMP_NATS = 2.5, 0.5  # and times the median (a hard batch may be twice as dear), and nats over it
NORM_JUMP_EXCESS, NORM_JUMP_Z = 4.6, 12.0  # a hundredfold norm; healthy 2.1 (high sane LR)
PAIR_Z = 4.2  # in each of two steps: z of loss plus z of norm, each at most its cap; healthy 3.8
PAIR_LOSS_CAP, PAIR_NORM_CAP = 3.0, 5.0  # a loss alone is not enough: two hard batches may follow each other
PAIR_NORM_EXCESS, PAIR_NORM_Z = 0.25, 2.5  # in each of two steps: the norm alone; healthy 0.15
PAIR_LOSS_EXCESS, PAIR_LOSS_Z = 0.4, 2.8  # in each of two steps: the loss alone; healthy 0.12 above z 2, z 2.4
TRIPLE_LOSS_EXCESS, TRIPLE_LOSS_Z = 0.05, 2.2  # in each of three steps: the loss alone; healthy 0.03, z 1.8
ROW_NATS = 0.05  # and loss this much over the median, where these rest on the loss
TREND_SLACK, TREND_CAP, TREND_SUM = 1.0, 4.0, 10.0  # z of loss, at most cap, less slack, summed up; healthy 6.3
TREND_RISE = 0.25  # and log loss this much over the level before, in the mean
TREND_LONGEST = 64  # steps after which a rise is the new level

RELEARN = 32  # steps of the last WINDOW that were refused: whoever runs the detector has accepted the new level


@dataclass(frozen=True)
class Spike:
    """A finite step, or a run of them, that healthy training does not make.

    Attributes:
        fault: SPIKE for a jump, TREND for a slow rise.
        step: where it was seen.
        onset: the first bad step, estimated. The update before it may have done the damage.
        evidence: sentences that a person can check.
    """

    fault: Literal["SPIKE", "TREND"]
    step: int
    onset: int
    evidence: tuple[str, ...]


class SpikeDetector:
    """Watches the steps of one run."""

    def __init__(self) -> None:
        """Start without statistics."""
        self._well: list[_Step] = []
        self._refused: list[_Step] = []

    def observe(self, step: int, loss: float, grad_norm: float, tokens: int | None = None) -> Spike | None:
        """Look at the next step, before or after its update.

        Args:
            step: the step, counted from 1; larger than those before it.
            loss: its token-mean loss, in nats.
            grad_norm: L2 norm of its gradient, unscaled and before clipping.
            tokens: its trained tokens, where they are known for every step: few tokens make a noisy step.

        Returns:
            What is wrong with it; None when nothing is, and for a step that is not finite.
        """
        if not (math.isfinite(loss) and math.isfinite(grad_norm)):
            return None
        if self._refused and sum(s.step >= step - WINDOW for s in self._refused) >= RELEARN:
            self._well, self._refused = [], []
        log_loss, log_norm = math.log(max(loss, 0.0) + NATS_FLOOR), math.log(grad_norm + NORM_FLOOR)
        log_tokens = 0.0 if tokens is None else math.log(max(1, tokens))
        window = _window(self._well[:-1])
        if len(window) < WARMUP:
            self._well.append(_Step(step, log_loss, log_norm, log_tokens, 0.0, -1.0, 0.0, 0.0, -1.0, 0.0, step))
            return None
        noise = _Noise.of(log_tokens, [s.log_tokens for s in window])
        of_loss = noise.score(loss, log_loss, [s.log_loss for s in window], NATS_FLOOR, LOSS_SPREAD_FLOOR)
        of_norm = noise.score(grad_norm, log_norm, [s.log_norm for s in window], NORM_FLOOR, NORM_SPREAD_FLOOR)
        cusum, onset = self._cumulate(step, loss, log_loss, log_tokens, of_loss.z)
        scores = of_loss.z, of_loss.excess, loss - of_loss.median, of_norm.z, of_norm.excess
        now = _Step(step, log_loss, log_norm, log_tokens, *scores, cusum, onset)
        spike = _collapse(step, of_loss, of_norm) or _jump(step, of_loss, of_norm)
        spike = spike or _row(now, self._last(step), of_loss, of_norm) or self._trend(now, loss)
        if spike:
            self._refuse(now, spike.onset)
        else:
            self._well.append(now)
            del self._well[:-KEPT]
        return spike

    def forget_from(self, step: int) -> None:
        """Forget this step and all after it: the run goes back to before it.

        Args:
            step: the first that will be taken again.
        """
        self._well = [s for s in self._well if s.step < step]
        self._refused = [s for s in self._refused if s.step < step]

    def usual_loss(self) -> float | None:
        """Return the median loss of the window, in nats; None while too few steps are known."""
        losses = sorted(s.log_loss for s in _window(self._well))
        return math.exp(losses[len(losses) // 2]) - NATS_FLOOR if len(losses) >= WARMUP else None

    def state(self) -> dict[str, Any]:
        """Return all that it knows, for a checkpoint: lists of numbers that JSON can hold."""
        return {"well": [list(s) for s in self._well], "refused": [list(s) for s in self._refused]}

    @classmethod
    def from_state(cls, state: Mapping[str, Any]) -> SpikeDetector:
        """Go on from a checkpoint.

        Args:
            state: from `state`, through JSON or not.

        Returns:
            A detector that answers as the saved one would.
        """
        detector = cls()
        detector._well = [_Step(*numbers) for numbers in state["well"]]
        detector._refused = [_Step(*numbers) for numbers in state["refused"]]
        return detector

    def _last(self, step: int) -> list[_Step]:
        """Return up to two steps right before this one, newest first, refused or not; one may be missing between."""
        row: list[_Step] = []
        for seen in sorted((*self._well[-2:], *self._refused[-2:]), reverse=True)[:2]:
            if step - seen.step > 2:
                break
            row.append(seen)
            step = seen.step
        return row

    def _refuse(self, now: _Step, onset: int) -> None:
        """Keep a bad step, and those since its onset, out of the statistics."""
        before = self._before(onset)
        self._refused = [*self._refused, *self._well[len(before) :], now][-KEPT:]
        self._well = before

    def _before(self, onset: int) -> list[_Step]:
        """Return the well steps before a step."""
        end = len(self._well)
        while end and self._well[end - 1].step >= onset:
            end -= 1
        return self._well[:end]

    def _cumulate(self, step: int, loss: float, log_loss: float, log_tokens: float, z: float) -> tuple[float, int]:
        """Return the cumulative sum with this step in it, and the first step that it counts.

        While it is above zero it is measured against the level before its onset, which therefore stands still.
        """
        last = self._well[-1]
        if last.cusum <= 0.0 or step - last.onset > TREND_LONGEST:
            return max(0.0, min(z, TREND_CAP) - TREND_SLACK), step
        before = _window(self._before(last.onset))
        if len(before) >= WARMUP:
            noise = _Noise.of(log_tokens, [s.log_tokens for s in before])
            z = noise.score(loss, log_loss, [s.log_loss for s in before], NATS_FLOOR, LOSS_SPREAD_FLOOR).z
        return max(0.0, last.cusum + min(z, TREND_CAP) - TREND_SLACK), last.onset

    def _trend(self, now: _Step, loss: float) -> Spike | None:
        """A rise that went on until the cumulative sum said so, to a level that is clearly above."""
        if now.cusum < TREND_SUM:
            return None
        earlier = self._before(now.onset)
        since = [*(s.log_loss for s in self._well[len(earlier) :]), now.log_loss]
        before = sorted(s.log_loss for s in _window(earlier))
        level, mean = before[len(before) // 2], sum(since) / len(since)
        if min(mean, now.log_loss) - level < TREND_RISE:
            return None
        words = (
            f"loss {loss:.4g}; since step {now.onset} it was {math.exp(mean) - NATS_FLOOR:.4g} in the mean of "
            f"{len(since)} steps, where the {len(before)} steps before had median {math.exp(level) - NATS_FLOOR:.4g} "
            f"(cumulative sum {now.cusum:.3g}, alarm at {TREND_SUM:g})"
        )
        return Spike("TREND", now.step, now.onset, (words,))


class _Step(NamedTuple):
    """A step that was seen: its numbers, their scores, and the cumulative sum after it with its first step."""

    step: int
    log_loss: float
    log_norm: float
    log_tokens: float
    loss_z: float
    loss_excess: float
    loss_nats: float
    norm_z: float
    norm_excess: float
    cusum: float
    onset: int


class _Score(NamedTuple):
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


class _Noise(NamedTuple):
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
    def of(cls, log_tokens: float, past: list[float]) -> _Noise:
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
        return cls(weights, logs, few if len(few) >= WARMUP else [], many, gap, stretch)

    def score(self, value: float, log: float, past: list[float], offset: float, floor: float) -> _Score:
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
        return _Score(
            value, (log - middle) / spread, log - ordered[-1], (value + offset - base) / linear,
            base - offset, linear, math.exp(ordered[-1]) - offset, count,
        )  # fmt: skip

    def _slope(self, past: list[float]) -> float:
        """Estimate how a log grows with that of a step's tokens: 0 to -0.6 (the norm of pure noise goes as n^-0.5)."""
        if not self.few or self.gap <= 0.0:
            return 0.0
        low, high = (sorted([past[i] for i in part])[len(part) // 2] for part in (self.few, self.many))
        return max(-0.6, min(0.0, (high - low) / self.gap))


def _window(steps: Sequence[_Step]) -> Sequence[_Step]:
    """Return the last half of the steps, at least WARMUP and at most WINDOW."""
    return steps[-min(WINDOW, max(WARMUP, len(steps) // 2)) :]


def _collapse(step: int, loss: _Score, norm: _Score) -> Spike | None:
    """A gradient of exactly 0 while there is a loss: the network is cut, or the gradient is lost on its way."""
    if norm.value > 0.0 or norm.median <= NORM_FLOOR or loss.value < max(NATS_FLOOR, 0.5 * loss.median):
        return None
    words = f"the gradient norm is exactly 0 where the last {norm.steps} steps had median {norm.median:.4g}"
    return Spike("SPIKE", step, step, (words, f"the loss is {loss.value:.4g}, so there is something to learn"))


def _jump(step: int, loss: _Score, norm: _Score) -> Spike | None:
    """One step far outside."""
    far = loss.excess >= JUMP_EXCESS + JUMP_EXCESS_FEW / loss.steps
    far = far or (loss.excess >= JUMP_PRODUCT_EXCESS and loss.excess * loss.linear_z >= JUMP_PRODUCT)
    if far and loss.value >= max(JUMP_TIMES * loss.median, loss.median + JUMP_NATS):
        return Spike("SPIKE", step, step, (loss.sentence("loss"), norm.sentence("gradient norm")))
    if norm.excess >= NORM_JUMP_EXCESS and norm.z >= NORM_JUMP_Z:
        return Spike("SPIKE", step, step, (norm.sentence("gradient norm"), loss.sentence("loss")))
    return None


def _row(now: _Step, before: Sequence[_Step], loss: _Score, norm: _Score) -> Spike | None:
    """Two or three steps in a row outside."""
    pair, triple = [now, *before[:1]], [now, *before]
    if len(pair) < 2:
        return None
    dear = min(s.loss_nats for s in pair) >= ROW_NATS
    onset = before[0]
    if dear and all(min(s.loss_z, PAIR_LOSS_CAP) + min(s.norm_z, PAIR_NORM_CAP) >= PAIR_Z for s in pair):
        words = "loss and gradient norm were high in the step before too"
    elif all(s.norm_z >= PAIR_NORM_Z and s.norm_excess >= PAIR_NORM_EXCESS for s in pair):
        words = "the gradient norm was above all of them in the step before too"
    elif dear and all(s.loss_z >= PAIR_LOSS_Z and s.loss_excess >= PAIR_LOSS_EXCESS for s in pair):
        words = "the loss was above all of them in the step before too"
    elif len(triple) == 3 and all(
        s.loss_z >= TRIPLE_LOSS_Z and s.loss_excess >= TRIPLE_LOSS_EXCESS and s.loss_nats >= ROW_NATS for s in triple
    ):
        words, onset = "the loss was above all of them in the two steps before too", before[1]
    else:
        return None
    row = f"{words} (step {before[0].step}: z = {before[0].loss_z:.3g} of the loss, {before[0].norm_z:.3g} of the norm)"
    return Spike("SPIKE", now.step, onset.step, (loss.sentence("loss"), norm.sentence("gradient norm"), row))
