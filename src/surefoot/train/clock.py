"""What a run tells of its steps: times, tokens a second, and the result at the end."""

from __future__ import annotations

import math
import time
from typing import TYPE_CHECKING

import torch

from surefoot.guard.check import StepCheck
from surefoot.train.events import StepEvent, TrainResult

if TYPE_CHECKING:
    from surefoot.train.loop import Run, RunState


class Clock:
    """Times a run from its first step in this process."""

    def __init__(self, state: RunState) -> None:
        """Start.

        Args:
            state: what was done before this process.
        """
        self._began = self._last = time.perf_counter()
        self._samples, self._tokens, self._tokens_told = state.samples, state.tokens, state.tokens

    def tell(self, run: Run, check: StepCheck, learning_rate: float) -> None:
        """Tell the listeners of a step, committed or the last of a run that cannot go on.

        Args:
            run: the run.
            check: the step's numbers.
            learning_rate: that it was applied with.
        """
        now = time.perf_counter()
        on_gpu = run.runner.device != "cpu"
        event = StepEvent(
            step=check.step,
            total_steps=run.schedule.total_steps,
            epoch=run.schedule.epoch_of(check.step),
            loss=check.loss if check.loss_finite else None,
            grad_norm=check.grad_norm if math.isfinite(check.grad_norm) else None,
            learning_rate=learning_rate,
            tokens=run.state.tokens,
            trained_tokens=run.state.trained_tokens,
            seconds=now - self._began,
            tokens_per_second=max(0, run.state.tokens - self._tokens_told) / (now - self._last),
            nonfinite=not check.finite,
            passes=len(check.pass_losses),
            memory_gib=torch.cuda.max_memory_allocated(run.runner.device) / 2**30 if on_gpu else None,
            loss_scale=check.loss_scale if run.runner.scale.enabled else None,
        )
        self._last, self._tokens_told = now, run.state.tokens
        for listener in run.listeners:
            listener.stepped(event)

    def result(self, run: Run, losses: list[float], stopped_by: str) -> TrainResult:
        """Sum up.

        Args:
            run: after its last step.
            losses: of the steps of this process, without those that were undone.
            stopped_by: as in `TrainResult`.

        Returns:
            How the run ended.
        """
        return TrainResult(
            steps=run.state.step,
            epoch=run.schedule.epoch_of(run.state.step),
            loss=sum(losses) / len(losses) if losses else None,
            seconds=time.perf_counter() - self._began,
            samples=run.state.samples - self._samples,
            tokens=run.state.tokens - self._tokens,
            stopped_by=stopped_by,
            best_step=run.state.best_step,
        )
