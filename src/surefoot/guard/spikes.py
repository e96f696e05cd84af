"""Finite divergence, told from a few numbers of every step: its loss, the norm of its gradient, and chance.

Steps that are not finite are the gate's business. This looks for what the gate cannot see: a step that is a number, and
wrong. Loss and norm are judged on a log scale against the last steps that were well: by their median, by how far the
upper part of them reaches, and by the largest of them. Only a rise counts. What lies far outside alarms at once, and
so do labels that fit no better than labels drawn by lot. Anything less is a suspicion, which experiments settle:
whether the labels are the tokens of the text at all, and whether the rows of the steps before cost more at the weights
as they are now. Hard batches leave those alone, damage does not. Slow divergence is left to a cumulative sum (CUSUM;
Page, 1954). What alarmed and what is not finite never enters the statistics.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal, NamedTuple, Protocol

from surefoot.guard.spike_scores import (
    FEWEST,
    LOSS_SPREAD_FLOOR,
    NATS_FLOOR,
    NORM_FLOOR,
    NORM_SPREAD_FLOOR,
    Noise,
    Score,
)

# What the window holds: the last half of the run (early losses fall fast), up to WINDOW steps, without the newest one.
WINDOW = 64
WARMUP = FEWEST  # steps in the window before loss and norm may alarm alone
KEPT = 256  # well steps remembered: a rollback of up to KEPT - 2 * WINDOW steps leaves the window as it was

# Thresholds. Chosen on the train seeds of benchmarks/spikes.py and frozen before the test seeds were run. "healthy" is
# the largest value over the healthy steps of the train seeds of what the line limits.
JUMP_EXCESS = 0.85  # log of loss over the window's largest; healthy 0.6
JUMP_EXCESS_FEW = 1.5  # and this much more over the window's number of steps
JUMP_PRODUCT, JUMP_PRODUCT_EXCESS = 5.0, 0.45  # excess × linear z, with at least this excess; healthy 4.0
JUMP_TIMES, JUMP_NATS = 2.5, 0.5  # and times the median (a hard batch may be twice as dear), and nats over it
NORM_JUMP_EXCESS, NORM_JUMP_Z = 4.6, 12.0  # a hundredfold norm; healthy 2.1 (high sane LR)
# Of the usual gain over chance, and less this over the root of the tokens: 7 healthy ones may have 0.03, 500 have 0.66.
BLIND_LEFT, BLIND_LEFT_FEW = 0.5, 1.35
BLIND_USUAL = 0.6  # and loss over chance is usually below this: something had been learnt
SUSPECT_LEFT = 0.7  # of the usual gain over chance
# The next four lines let 0.65 % of the healthy steps of the train seeds ask for the experiment that reruns rows.
SUSPECT_SUM = 4.2  # z of loss plus z of norm, each at most its cap
SUSPECT_LOSS_CAP, SUSPECT_NORM_CAP = 3.0, 5.0
SUSPECT_NORM_EXCESS, SUSPECT_NORM_Z = 0.25, 2.5  # the norm alone
SUSPECT_LOSS_EXCESS, SUSPECT_LOSS_Z = 0.05, 2.2  # the loss alone
SUSPECT_NATS = 0.05  # and loss this much over the median, where it rests on the loss
CONFIRM_RISE = 0.05  # log of what the rows of the steps before cost now over then; healthy -0.003 where suspected
EARLY_TIMES, EARLY_NATS = 3.0, 1.0  # in the first steps: loss over the median so far, and nats over it
EARLY_RISE = 0.7  # and this in place of CONFIRM_RISE: a rate that is just sane makes a bump too
TREND_SLACK, TREND_CAP, TREND_SUM = 1.0, 4.0, 10.0  # z of loss, at most cap, less slack, summed up; healthy 6.3
TREND_RISE = 0.25  # and log loss this much over the level before, in the mean
TREND_LONGEST = 64  # steps after which a rise is the new level

RELEARN = 32  # steps of the last WINDOW that were refused: whoever runs the detector has accepted the new level


class Experiments(Protocol):
    """What can be tried at a suspicious step."""

    def wrong_labels(self) -> bool:
        """Say whether half of the step's labels or more are not the tokens of the text."""
        ...

    def rise(self) -> float | None:
        """Say by how much the log loss of rows of the steps before has risen since; None when it cannot be told."""
        ...


@dataclass(frozen=True)
class Spike:
    """A finite step, or a run of them, that healthy training does not make.

    Attributes:
        fault: SPIKE for a jump, TREND for a slow rise.
        step: where it was seen.
        onset: the first step whose update may have done damage, or the step itself when it is only its numbers that
            are wrong.
        evidence: sentences that a person can check.
        wrong_labels: the labels are to blame, by experiment.
        dead: so many steps in a row had a gradient of exactly 0 that no more is to be hoped for.
    """

    fault: Literal["SPIKE", "TREND"]
    step: int
    onset: int
    evidence: tuple[str, ...]
    wrong_labels: bool = False
    dead: bool = False


class SpikeDetector:
    """Watches the steps of one run."""

    def __init__(self) -> None:
        """Start without statistics."""
        self._well: list[_Step] = []
        self._refused: list[_Step] = []

    def observe(
        self,
        step: int,
        loss: float,
        grad_norm: float,
        tokens: int | None = None,
        chance: float = 0.0,
        experiments: Experiments | None = None,
    ) -> Spike | None:
        """Look at the next step, after its update.

        Args:
            step: the step, counted from 1; larger than those before it.
            loss: its token-mean loss, in nats.
            grad_norm: L2 norm of its gradient, unscaled and before clipping.
            tokens: its trained tokens, where they are known for every step: few tokens make a noisy step.
            chance: what its loss would be on average with labels drawn by lot, in nats; 0 where it is not known.
            experiments: asked at a suspicious step; without them it does not alarm.

        Returns:
            What is wrong with it; None when nothing is, and for a step that is not finite.
        """
        if not (math.isfinite(loss) and math.isfinite(grad_norm)):
            return None
        if self._refused and sum(s.step >= step - WINDOW for s in self._refused) >= RELEARN:
            self._well, self._refused = [], []
        log_loss, log_norm = math.log(max(loss, 0.0) + NATS_FLOOR), math.log(grad_norm + NORM_FLOOR)
        log_tokens = 0.0 if tokens is None else math.log(max(1, tokens))
        now = _Step(step, log_loss, log_norm, log_tokens, 0.0, step, loss / chance if chance > 0.0 else 0.0)
        window = _window(self._well[:-1])
        if grad_norm == 0.0 and self._is_dead(now):
            words = f"the gradient was exactly 0 for {RELEARN} steps with a loss: nothing is trained any more"
            spike: Spike | None = Spike("SPIKE", step, step, (words,), dead=True)
        elif len(window) < WARMUP:
            spike = self._early(now, loss, experiments)
        else:
            noise = Noise.of(log_tokens, [s.log_tokens for s in window])
            of_loss = noise.score(loss, log_loss, [s.log_loss for s in window], NATS_FLOOR, LOSS_SPREAD_FLOOR)
            of_norm = noise.score(grad_norm, log_norm, [s.log_norm for s in window], NORM_FLOOR, NORM_SPREAD_FLOOR)
            cusum, onset = self._cumulate(step, loss, log_loss, log_tokens, of_loss.z)
            now = now._replace(cusum=cusum, onset=onset)
            left = _left(now, window)
            spike = _collapse(step, of_loss, of_norm) or _jump(step, of_loss, of_norm)
            spike = spike or _blind(now, left, of_loss, chance)
            far = spike is not None or _suspect(of_loss, of_norm)
            if experiments and (far or left <= SUSPECT_LEFT):
                numbers = Spike("SPIKE", step, step, (of_loss.sentence("loss"), of_norm.sentence("gradient norm")))
                spike = _try(spike or numbers, experiments, CONFIRM_RISE if far else None) or spike
            spike = spike or self._trend(now, loss)
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

    def _is_dead(self, now: _Step) -> bool:
        """Say whether this step and those before, well or not, had a loss and a gradient of exactly 0."""
        last = sorted((*self._well[1 - RELEARN :], *self._refused[1 - RELEARN :]))[1 - RELEARN :]
        zero, none = math.log(NORM_FLOOR), math.log(2 * NATS_FLOOR)
        return len(last) == RELEARN - 1 and all(s.log_norm <= zero and s.log_loss > none for s in (*last, now))

    def _early(self, now: _Step, loss: float, experiments: Experiments | None) -> Spike | None:
        """Judge one of the first steps, which there is too little to compare with: only an experiment may alarm."""
        losses = sorted(s.log_loss for s in self._well)
        if not losses or not experiments:
            return None
        usual = math.exp(losses[len(losses) // 2]) - NATS_FLOOR
        if loss < max(EARLY_TIMES * usual, usual + EARLY_NATS):
            return None
        words = f"loss {loss:.4g} where the first {len(losses)} steps had median {usual:.4g}"
        return _try(Spike("SPIKE", now.step, now.step, (words,)), experiments, EARLY_RISE)

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
            noise = Noise.of(log_tokens, [s.log_tokens for s in before])
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
    """A step that was seen: its numbers, the cumulative sum after it with its first step, and loss over chance."""

    step: int
    log_loss: float
    log_norm: float
    log_tokens: float
    cusum: float
    onset: int
    blindness: float


def _window(steps: Sequence[_Step]) -> Sequence[_Step]:
    """Return the last half of the steps, at least WARMUP and at most WINDOW."""
    return steps[-min(WINDOW, max(WARMUP, len(steps) // 2)) :]


def _collapse(step: int, loss: Score, norm: Score) -> Spike | None:
    """A gradient of exactly 0 while there is a loss: the network is cut, or the gradient is lost on its way."""
    if norm.value > 0.0 or norm.median <= NORM_FLOOR or loss.value < max(NATS_FLOOR, 0.5 * loss.median):
        return None
    words = f"the gradient norm is exactly 0 where the last {norm.steps} steps had median {norm.median:.4g}"
    return Spike("SPIKE", step, step, (words, f"the loss is {loss.value:.4g}, so there is something to learn"))


def _jump(step: int, loss: Score, norm: Score) -> Spike | None:
    """One step far outside."""
    far = loss.excess >= JUMP_EXCESS + JUMP_EXCESS_FEW / loss.steps
    far = far or (loss.excess >= JUMP_PRODUCT_EXCESS and loss.excess * loss.linear_z >= JUMP_PRODUCT)
    if far and loss.value >= max(JUMP_TIMES * loss.median, loss.median + JUMP_NATS):
        return Spike("SPIKE", step, step, (loss.sentence("loss"), norm.sentence("gradient norm")))
    if norm.excess >= NORM_JUMP_EXCESS and norm.z >= NORM_JUMP_Z:
        return Spike("SPIKE", step, step, (norm.sentence("gradient norm"), loss.sentence("loss")))
    return None


def _left(now: _Step, window: Sequence[_Step]) -> float:
    """Return how much is left of what labels usually gain over chance; 1.0 where nothing is known of it.

    The gain is 1 - loss / chance: about 0 for labels drawn by lot, whatever the model, and most of 1 for those of a
    text that the model has learnt to tell.
    """
    shares = sorted(s.blindness for s in window if s.blindness > 0.0)
    if now.blindness <= 0.0 or len(shares) < WARMUP or shares[len(shares) // 2] > BLIND_USUAL:
        return 1.0
    return (1.0 - now.blindness) / (1.0 - shares[len(shares) // 2])


def _blind(now: _Step, left: float, loss: Score, chance: float) -> Spike | None:
    """Labels that fit no better than by chance. Over few tokens that happens in odd texts too."""
    if left > BLIND_LEFT - BLIND_LEFT_FEW * math.exp(-now.log_tokens / 2):
        return None
    words = (
        f"labels drawn by lot would cost {chance:.4g}: what the labels gain over chance is "
        f"{100 * max(0.0, left):.0f} % of the usual"
    )
    return Spike("SPIKE", now.step, now.step, (loss.sentence("loss"), words))


def _suspect(loss: Score, norm: Score) -> bool:
    """Say whether a step is worth an experiment."""
    if norm.z >= SUSPECT_NORM_Z and norm.excess >= SUSPECT_NORM_EXCESS:
        return True
    if loss.value - loss.median < SUSPECT_NATS:
        return False
    if loss.z >= SUSPECT_LOSS_Z and loss.excess >= SUSPECT_LOSS_EXCESS:
        return True
    return min(loss.z, SUSPECT_LOSS_CAP) + min(norm.z, SUSPECT_NORM_CAP) >= SUSPECT_SUM


def _try(spike: Spike, experiments: Experiments, least_rise: float | None) -> Spike | None:
    """Run the experiments at a step, that for damage only with a least rise; None when they show nothing.

    Damage shows in rows of the steps before too; the update of the step before has done it, or something older.
    """
    if experiments.wrong_labels():
        words = "half of the labels or more are not the tokens of the text: the labels are wrong"
        return replace(spike, evidence=(*spike.evidence, words), wrong_labels=True)
    rise = None if least_rise is None else experiments.rise()
    if rise is None or least_rise is None or rise < least_rise:
        return None
    words = f"rows of the steps before cost {math.exp(rise):.3g} times what they did then: the weights are damaged"
    return replace(spike, onset=max(1, spike.step - 1), evidence=(*spike.evidence, words))
