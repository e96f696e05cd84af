"""At which steps a run evaluates, saves and ends, counted as transformers' Trainer counts them."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

from surefoot.data.order import StepOrder
from surefoot.errors import UserError

if TYPE_CHECKING:
    from surefoot.config import Config


@dataclass(frozen=True)
class Schedule:
    """The step counts of a run.

    Attributes:
        total_steps: optimizer steps of the run.
        steps_per_epoch: optimizer steps of an epoch; None for a stream.
        epochs: passes over the data in the whole run; 1 for a stream.
        save_every: steps between checkpoints; 0 for none but those asked for otherwise.
        eval_every: steps between evaluations; 0 for none.
        save_at_end: whether the last step saves.
        eval_delay: steps (or epochs, with evaluation by epoch) before the first evaluation.
    """

    total_steps: int
    steps_per_epoch: int | None
    epochs: float
    save_every: int
    eval_every: int
    save_at_end: bool
    eval_delay: float

    def evaluates_at(self, step: int) -> bool:
        """Say whether the sets are evaluated after a step, counted from 1."""
        if not self.eval_every or self._position(step) < self.eval_delay:
            return False
        return step % self.eval_every == 0

    def saves_at(self, step: int) -> bool:
        """Say whether a checkpoint is written after a step, counted from 1."""
        if self.save_at_end and step == self.total_steps:
            return True
        return bool(self.save_every) and step % self.save_every == 0

    def epoch_of(self, step: int) -> float:
        """Return how many passes over the data `step` steps are; for a stream, the share of the run."""
        return step / (self.steps_per_epoch or self.total_steps)

    def _position(self, step: int) -> float:
        by_epoch = self.steps_per_epoch is not None and self.eval_every == self.steps_per_epoch
        return self.epoch_of(step) if by_epoch else step


def make_schedule(cfg: Config, order: StepOrder, *, evaluates: bool) -> Schedule:
    """Count a run's steps.

    Args:
        cfg: the YAML.
        order: the run's data.
        evaluates: False when there is nothing to evaluate on.

    Returns:
        The schedule.

    Raises:
        UserError: a stream without `max_steps`, which has no end.
    """
    per_epoch = order.steps_per_epoch
    if cfg.max_steps > 0:
        total = cfg.max_steps
    elif per_epoch is None:
        raise UserError("a streamed dataset has no known end", hint="set `max_steps`", key="max_steps")
    else:
        total = math.ceil(cfg.num_train_epochs * per_epoch)
    an_epoch = per_epoch or total
    by = {"no": 0, "best": 0, "epoch": an_epoch}
    save_every = by.get(cfg.save_strategy, _steps(cfg.save_steps, total))
    eval_every = by.get(cfg.eval_strategy, _steps(cfg.eval_steps or cfg.logging_steps, total)) if evaluates else 0
    return Schedule(
        total_steps=total,
        steps_per_epoch=per_epoch,
        epochs=total / per_epoch if per_epoch else 1.0,
        save_every=save_every,
        eval_every=eval_every,
        save_at_end=cfg.save_strategy in ("steps", "epoch"),
        eval_delay=cfg.eval_delay or 0.0,
    )


def _steps(given: float, total: int) -> int:
    """Read a number of steps; below 1 it is a share of the run, as in transformers."""
    return max(1, math.ceil(total * given)) if given < 1 else int(given)
