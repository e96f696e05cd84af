"""The training loop, from the first step to the last."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import torch

from surefoot.data.batch import count_trained
from surefoot.data.messages import Sample
from surefoot.data.order import StepOrder
from surefoot.guard.check import NonFiniteStepError
from surefoot.model.randomness import get_random_state
from surefoot.train.clock import Clock
from surefoot.train.cures import nothing_to_train
from surefoot.train.evaluate import evaluate
from surefoot.train.events import EvalEvent, Listener, TrainResult
from surefoot.train.gate import Gate
from surefoot.train.ranks import Ranks
from surefoot.train.saving import Saver, save, saving_beside
from surefoot.train.schedule import Schedule
from surefoot.train.signals import StopRequest
from surefoot.train.step import Attempt, StepRunner

if TYPE_CHECKING:
    from surefoot.config import Config
    from surefoot.data.table import TokenTable
    from surefoot.train.keeper import Keeper
    from surefoot.train.sharded import Shards

T = TypeVar("T")


@dataclass
class RunState:
    """What a run has done so far; a checkpoint holds it.

    Attributes:
        step: optimizer steps applied.
        tokens: real tokens trained on.
        trained_tokens: those of them that carried loss.
        samples: items trained on.
        best_metric: of the evaluation that `metric_for_best_model` calls best; None before the first.
        best_step: when that was.
        evaluations_without_gain: in a row, for early stopping.
        evaluated_at: the step of the last evaluation; None before the first.
    """

    step: int = 0
    tokens: int = 0
    trained_tokens: int = 0
    samples: int = 0
    best_metric: float | None = None
    best_step: int | None = None
    evaluations_without_gain: int = 0
    evaluated_at: int | None = None


@dataclass
class Run:
    """Everything that a training run holds.

    Attributes:
        cfg: the YAML.
        model: the model, wrapped by PEFT or not.
        tokenizer: saved beside every checkpoint.
        order: which samples make each step.
        evals: evaluation sets by name.
        runner: computes a step's gradients.
        optimizer: over the trainable parameters.
        gate: lets its updates through, or not.
        scheduler: of the learning rate.
        schedule: when to evaluate, save and stop.
        output_dir: where checkpoints go.
        fingerprint: what the run's numbers depend on.
        listeners: who hears of it.
        stop: set by SIGINT and SIGTERM.
        guard: what is done about a step that is not finite, or far off.
        looks_ahead: compute a step's gradients while the verdict on the step before travels to the host.
        ranks: that train together.
        state: what was done so far.
        saver: of the checkpoint that is on its way to the disk.
        shards: of what is trained, where each rank holds a part of it; None where every rank holds all.
        gathered: while it is entered, the main rank can save weights, and the optimizer if asked: a collective where
            other ranks hold parts of them.
        alike: every rank evaluates, since none can without the others.
    """

    cfg: Config
    model: Any
    tokenizer: Any
    order: StepOrder
    evals: dict[str, TokenTable]
    runner: StepRunner
    optimizer: torch.optim.Optimizer
    gate: Gate
    scheduler: Any
    schedule: Schedule
    output_dir: Path
    fingerprint: dict[str, str]
    listeners: Sequence[Listener]
    stop: StopRequest
    guard: Keeper
    looks_ahead: bool = False
    ranks: Ranks = field(default_factory=Ranks)
    state: RunState = field(default_factory=RunState)
    saver: Saver = field(default_factory=Saver)
    shards: Shards | None = None
    gathered: Callable[[bool], AbstractContextManager[None]] = lambda optimizer: nullcontext()
    alike: bool = False

    def samples_of(self, done: int) -> list[Sample]:
        """Return the samples of the step after `done` steps, without those that the guard leaves out."""
        return self.guard.without_skipped(done + 1, self.order.samples_of(done))

    @property
    def cut(self) -> bool:
        """True where this rank holds only pieces of what is trained."""
        return self.runner.shards is not None and self.runner.shards.trains

    def whole(self) -> AbstractContextManager[None]:
        """Have the whole model on every rank, so that one can run it alone; all ranks must enter.

        Raises on entering where it does not fit (`NoRoomError`); nothing is done where nothing is sharded.
        """
        return nullcontext() if self.runner.shards is None else self.runner.shards.whole()

    def one_runs(self, rank: int, work: Callable[[], T]) -> T:
        """Let one rank run the model while the others wait, as `Ranks.on`.

        Args:
            rank: which one.
            work: holds no collective; returns plain data.

        Returns:
            What it returned, on every rank.
        """
        with self.whole():
            return self.ranks.on(rank, work)

    def tell(self, message: str) -> None:
        """Say a sentence to the person."""
        for listener in self.listeners:
            listener.told(message)


def train(run: Run) -> TrainResult:
    """Train until the last step, a stop signal, or the early stop.

    On a GPU the host computes a step's gradients while it waits for the verdict on the step before. That verdict
    has already gated the update on the device; schedule, loss scale, counters and data position advance when the
    host has read it.

    Args:
        run: ready to go; `run.state.step` steps of it are already done.

    Returns:
        How the run ended; the model holds its weights.

    Raises:
        NonFiniteStepError: a step was not finite and could not be healed. It was not applied.
    """
    with saving_beside(run):
        return _train(run)


def _train(run: Run) -> TrainResult:
    clock = Clock(run.state)
    losses: dict[int, float] = {}
    stopped_by = ""
    pending: Attempt | None = None
    run.model.train()
    while not stopped_by:
        attempt = next_attempt(run, pending) if pending is None or run.looks_ahead else None
        if pending is not None:
            check = pending.check.read()
            if "exception" in check.flagged:
                run.ranks.stop_for(pending.error)
            if not (check.finite and check.weights_finite):
                run.saver.finish(run)  # nothing else is under way while the guard looks for the cause
            try:
                passed = run.guard.settle(run, pending, check)
            except NonFiniteStepError:
                clock.tell(run, check, run.scheduler.get_last_lr()[0])  # the log shows the step that ended the run
                raise
            if not passed:
                pending = None
                losses = {step: loss for step, loss in losses.items() if step <= run.state.step}
                continue  # what was computed ahead stood on a step that was not
            losses[check.step] = check.loss
            clock.tell(run, check, _commit(run, pending))
            tokens, random_state = count_trained(pending.samples), attempt.scene.random_state if attempt else None
            if run.guard.watch(run, check, tokens, random_state):
                pending = None
                losses = {step: loss for step, loss in losses.items() if step <= run.state.step}
                continue
            stopping = bool(run.stop.requested) if run.ranks.alone else "stop" in check.flagged
            stopped_by = _between_steps(run, attempt, stopping)
        pending = attempt
        if pending is not None and not stopped_by:
            apply_step(run, pending)
        elif run.state.step >= run.schedule.total_steps:
            break
    return clock.result(run, [losses[step] for step in sorted(losses)], stopped_by)


def next_attempt(run: Run, pending: Attempt | None) -> Attempt | None:
    """Compute the gradients of the next step.

    Args:
        run: the run.
        pending: the attempt before it, applied behind the gate but not committed yet.

    Returns:
        The attempt; None when no step is left, or the guard must look at the step first.
    """
    done = run.state.step + (pending is not None)
    if done >= run.schedule.total_steps:
        return None
    try:
        if failed := run.saver.failure():  # surfaces here, as if this step's rows could not be read
            raise failed
        samples = run.samples_of(done)
    except Exception as error:
        if run.ranks.alone:
            raise
        return run.runner.compute(done + 1, (), error)  # so that the others hear of it
    if count_trained(samples) == 0:
        if pending is None:
            nothing_to_train(run.guard, run, samples)
        return None
    return run.runner.compute(done + 1, samples)


def apply_step(run: Run, attempt: Attempt) -> None:
    """Clip the gradient and update the weights, unless the gate on the device is closed.

    Args:
        run: whose gradients were computed.
        attempt: they are its.
    """
    check = attempt.check
    run.runner.finish_gradients(check, run.cfg.max_grad_norm)
    integrity = run.guard.integrity
    if integrity is not None:
        integrity.before_update(check)
        if not run.ranks.alone:  # what one rank finds closes every rank's gate
            check.bad = torch.maximum(check.bad, run.ranks.spread(check.bad).amax())
    factor = run.guard.learning_rate_factor(run)
    rates = [group["lr"] for group in run.optimizer.param_groups]
    for group, rate in zip(run.optimizer.param_groups, rates, strict=True):
        group["lr"] = rate if factor == 1.0 else rate * factor
    check.weights_bad = run.gate.step(check.bad)
    if integrity is not None:
        integrity.after_update(check)
    for group, rate in zip(run.optimizer.param_groups, rates, strict=True):
        group["lr"] = rate
    run.optimizer.zero_grad(set_to_none=True)
    check.start_reading(None if run.ranks.alone else run.ranks.spread)


def _commit(run: Run, attempt: Attempt) -> float:
    """Advance what only an applied step may advance; return the learning rate that it was applied with."""
    learning_rate = run.scheduler.get_last_lr()[0]
    samples = attempt.samples
    run.scheduler.step()
    run.runner.scale.applied()
    run.state.step += 1
    run.state.samples += len(samples)
    run.state.tokens += sum(len(sample.input_ids) for sample in samples)
    run.state.trained_tokens += count_trained(samples)
    return learning_rate


def _between_steps(run: Run, ahead: Attempt | None, stopping: bool) -> str:
    """Evaluate and save where the schedule says so; return what stops the run, if anything does."""
    stopped_by = ""
    run.saver.look(run)
    evaluated = run.schedule.evaluates_at(run.state.step)
    if evaluated:
        evaluate_all(run)
    if stopping:
        stopped_by = "signal"
    elif evaluated and run.cfg.early_stopping_steps:
        stopped_by = "early stopping" if run.state.evaluations_without_gain >= run.cfg.early_stopping_steps else ""
    if run.schedule.saves_at(run.state.step) or stopping or _just_best(run, evaluated):
        # Random numbers as they stood when this step ended, not after what was computed ahead.
        save(run, ahead.scene.random_state if ahead else get_random_state(run.runner.device))
    return stopped_by


def evaluate_all(run: Run) -> None:
    """Evaluate every set, tell the numbers, and remember whether they are the best so far.

    Of several ranks, the main one evaluates; all do where each holds a part of the weights.
    """
    values: dict[str, float] = {}
    total_loss = total = 0.0
    runner = run.runner
    for name, table in run.evals.items():
        work = partial(evaluate, runner.forward, table, runner.device, runner.tokens_per_pass)
        numbers = run.ranks.gather(run.ranks.wait_for(work))[0] if run.alike else run.ranks.on(0, work)
        event = EvalEvent(
            step=run.state.step,
            total_steps=run.schedule.total_steps,
            epoch=run.schedule.epoch_of(run.state.step),
            name=name,
            loss=numbers.loss if numbers.finite else None,
            accuracy=numbers.accuracy if run.cfg.compute_accuracy else None,
            tokens=numbers.tokens,
            samples=numbers.samples,
            seconds=numbers.seconds,
            nonfinite=not numbers.finite,
        )
        prefix = f"{name}_" if name else ""
        values |= {f"{prefix}loss": numbers.loss, f"{prefix}accuracy": numbers.accuracy}
        total_loss, total = total_loss + numbers.loss * numbers.samples, total + numbers.samples
        for listener in run.listeners:
            listener.evaluated(event)
    values.setdefault("loss", total_loss / total)
    run.state.evaluated_at = run.state.step
    _remember_best(run, values)


def _just_best(run: Run, evaluated: bool) -> bool:
    return evaluated and run.cfg.save_strategy == "best" and run.state.best_step == run.state.step


def _remember_best(run: Run, values: dict[str, float]) -> None:
    metric = (run.cfg.metric_for_best_model or "loss").removeprefix("eval_")
    value = values.get(metric, values["loss"])
    greater = run.cfg.greater_is_better
    greater = not metric.endswith("loss") if greater is None else greater
    best = run.state.best_metric
    # Written so that a NaN never counts as a gain.
    gained = math.isfinite(value) and (best is None or (value > best if greater else value < best))
    if gained:
        run.state.best_metric, run.state.best_step = value, run.state.step
    run.state.evaluations_without_gain = 0 if gained else run.state.evaluations_without_gain + 1
