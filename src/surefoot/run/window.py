"""When a step is logged, and the mean loss that the log shows: `logging_steps` and kin as transformers has them."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

from surefoot.train.events import RunFacts, StepEvent

Strategy = Literal["no", "steps", "epoch"]


@dataclass(frozen=True, slots=True)
class LogPoint:
    """What the log says about a stretch of optimizer steps.

    Attributes:
        step: the last optimizer step of the stretch.
        epoch: passes over the data so far.
        loss: mean of the stretch's step losses, in nats; None when a loss was not finite.
        grad_norm: of the last step, before clipping; None when it was not finite.
        learning_rate: of the last step.
        tokens: real tokens since the start of the run.
        seconds: since training began in this process.
        nonfinite: True when a loss or gradient norm of the stretch was NaN or infinite.
        memory_gib: peak of device memory so far; None on a CPU.
        loss_scale: of the last step; None outside float16.
    """

    step: int
    epoch: float
    loss: float | None
    grad_norm: float | None
    learning_rate: float
    tokens: int
    seconds: float
    nonfinite: bool
    memory_gib: float | None
    loss_scale: float | None = None


class LogWindow:
    """Gathers steps until it is time to log. A step that is not finite is logged at once, on its own."""

    def __init__(self, strategy: Strategy, every: float, first_step: bool) -> None:
        """Take the YAML's wish.

        Args:
            strategy: `logging_strategy`.
            every: `logging_steps`; below 1 it is a share of the whole run.
            first_step: `logging_first_step`.
        """
        self._strategy: Strategy = strategy
        self._every = every
        self._first_step = first_step
        self._waiting: list[StepEvent] = []
        self._epochs_done = 0

    def start(self, facts: RunFacts) -> None:
        """Settle what depends on the length of the run."""
        if self._every < 1:
            self._every = max(1, math.ceil(facts.total_steps * self._every))
        done = facts.resumed_from / max(facts.total_steps, 1)
        self._epochs_done = _whole_epochs(done * facts.epochs)
        self._waiting = []

    def push(self, event: StepEvent) -> list[LogPoint]:
        """Take one step.

        Args:
            event: the step.

        Returns:
            What has to be logged now: usually nothing, or one point; two when a step that is not finite ends a stretch
            of good ones, so that the good steps' mean is still shown.
        """
        if event.nonfinite:
            return [*self.flush(), _point([event])]
        self._waiting.append(event)
        return self.flush() if self._is_due(event) else []

    def rewound(self, step: int) -> None:
        """Forget waiting steps that were undone."""
        self._waiting = [event for event in self._waiting if event.step <= step]

    def flush(self) -> list[LogPoint]:
        """Give what is waiting as a point, though it is not yet due; nothing under `logging_strategy: no`."""
        waiting, self._waiting = self._waiting, []
        return [_point(waiting)] if waiting and self._strategy != "no" else []

    def _is_due(self, event: StepEvent) -> bool:
        epochs_before, self._epochs_done = self._epochs_done, _whole_epochs(event.epoch)
        if event.step == 1 and self._first_step:
            return True
        if self._strategy == "epoch":
            return self._epochs_done > epochs_before or event.step == event.total_steps
        return self._strategy == "steps" and event.step % self._every == 0


def _whole_epochs(epoch: float) -> int:
    """Epochs that are over; the small term forgives the rounding of step / steps-an-epoch."""
    return math.floor(epoch + 1e-6)


def _point(events: list[StepEvent]) -> LogPoint:
    last = events[-1]
    losses = [event.loss for event in events if event.loss is not None]
    return LogPoint(
        step=last.step,
        epoch=last.epoch,
        loss=math.fsum(losses) / len(losses) if len(losses) == len(events) else None,
        grad_norm=last.grad_norm,
        learning_rate=last.learning_rate,
        tokens=last.tokens,
        seconds=last.seconds,
        nonfinite=last.nonfinite,
        memory_gib=last.memory_gib,
        loss_scale=last.loss_scale,
    )
