"""The training loop, from the first step to the last."""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from surefoot.data.batch import count_trained
from surefoot.data.messages import Sample
from surefoot.data.order import StepOrder
from surefoot.guard.finite import NonFiniteStepError, StepCheck
from surefoot.train.checkpoint import rotate, save_checkpoint
from surefoot.train.evaluate import evaluate
from surefoot.train.events import EvalEvent, Listener, StepEvent, TrainResult
from surefoot.train.randomness import get_random_state
from surefoot.train.schedule import Schedule
from surefoot.train.signals import StopRequest
from surefoot.train.step import StepRunner

if TYPE_CHECKING:
    from surefoot.config import Config
    from surefoot.data.table import TokenTable


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
        scheduler: of the learning rate.
        schedule: when to evaluate, save and stop.
        output_dir: where checkpoints go.
        fingerprint: what the run's numbers depend on.
        listeners: who hears of it.
        stop: set by SIGINT and SIGTERM.
        state: what was done so far.
    """

    cfg: Config
    model: Any
    tokenizer: Any
    order: StepOrder
    evals: dict[str, TokenTable]
    runner: StepRunner
    optimizer: torch.optim.Optimizer
    scheduler: Any
    schedule: Schedule
    output_dir: Path
    fingerprint: dict[str, str]
    listeners: Sequence[Listener]
    stop: StopRequest
    state: RunState = field(default_factory=RunState)


def train(run: Run) -> TrainResult:
    """Train until the last step, a stop signal, or the early stop.

    Args:
        run: ready to go; `run.state.step` steps of it are already done.

    Returns:
        How the run ended; the model holds its weights.

    Raises:
        NonFiniteStepError: a step's loss or gradient is not finite. It was not applied.
    """
    began, done_before = time.perf_counter(), run.state.step
    samples_before, tokens_before = run.state.samples, run.state.tokens
    losses: list[float] = []
    stopped_by = ""
    run.model.train()
    while run.state.step < run.schedule.total_steps and not stopped_by:
        samples = run.order.samples_of(run.state.step)
        step_began = time.perf_counter()
        try:
            check = run.runner.compute_gradients(run.state.step + 1, samples)
        except NonFiniteStepError as error:
            _tell_step(run, error.check, samples, began, step_began)
            raise
        learning_rate = run.scheduler.get_last_lr()[0]
        apply_step(run, check)
        commit(run, samples)
        losses.append(check.loss)
        _tell_step(run, check, samples, began, step_began, learning_rate)

        evaluated = run.schedule.evaluates_at(run.state.step)
        if evaluated:
            evaluate_all(run)
        if run.stop.requested:
            stopped_by = "signal"
        elif evaluated and run.cfg.early_stopping_steps:
            stopped_by = "early stopping" if run.state.evaluations_without_gain >= run.cfg.early_stopping_steps else ""
        if run.schedule.saves_at(run.state.step) or run.stop.requested or _just_best(run, evaluated):
            save(run)
    return TrainResult(
        steps=run.state.step,
        epoch=run.schedule.epoch_of(run.state.step),
        loss=sum(losses) / len(losses) if run.state.step > done_before else None,
        seconds=time.perf_counter() - began,
        samples=run.state.samples - samples_before,
        tokens=run.state.tokens - tokens_before,
        stopped_by=stopped_by,
        best_step=run.state.best_step,
    )


def apply_step(run: Run, check: StepCheck) -> None:
    """Clip the gradient and update the weights.

    Args:
        run: whose gradients were computed.
        check: that they are finite, with their norm.
    """
    assert check.finite
    limit = run.cfg.max_grad_norm
    if limit and limit > 0:
        grads = [p.grad for p in run.model.parameters() if p.grad is not None]
        factor = min(1.0, limit / (check.grad_norm + 1e-6))  # as torch.nn.utils.clip_grad_norm_
        if factor < 1.0:
            torch._foreach_mul_(grads, factor)
    run.optimizer.step()
    run.optimizer.zero_grad(set_to_none=True)


def commit(run: Run, samples: Sequence[Sample]) -> None:
    """Advance everything that only an applied step may advance: schedule, loss scale, data position, counters."""
    run.scheduler.step()
    run.runner.scale.applied()
    run.state.step += 1
    run.state.samples += len(samples)
    run.state.tokens += sum(len(sample.input_ids) for sample in samples)
    run.state.trained_tokens += count_trained(samples)


def evaluate_all(run: Run) -> None:
    """Evaluate every set, tell the numbers, and remember whether they are the best so far."""
    values: dict[str, float] = {}
    total_loss = total = 0.0
    for name, table in run.evals.items():
        numbers = evaluate(run.runner.forward, table, run.runner.device, run.runner.tokens_per_pass)
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


def save(run: Run) -> None:
    """Write a verified checkpoint and remove those beyond the limit."""
    tensors = None
    if not run.cfg.save_only_model:
        tensors = {
            "optimizer.pt": run.optimizer.state_dict(),
            "scheduler.pt": run.scheduler.state_dict(),
            "rng_state.pth": get_random_state(run.runner.device),
        }
    state = asdict(run.state) | {
        "epoch": run.schedule.epoch_of(run.state.step),
        "epochs": run.schedule.epochs,
        "total_steps": run.schedule.total_steps,
        "loss_scale": run.runner.scale.state(),
        "tokens_per_pass": run.runner.tokens_per_pass,
        "fingerprint": run.fingerprint,
    }
    folder = save_checkpoint(run.output_dir, run.state.step, run.model, run.tokenizer, tensors, state)
    keep = {folder}
    if run.cfg.load_best_model_at_end and run.state.best_step is not None:
        keep.add(run.output_dir / f"checkpoint-{run.state.best_step}")
    rotate(run.output_dir, run.cfg.save_total_limit, keep)
    for listener in run.listeners:
        listener.saved(run.state.step, folder)


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


def _tell_step(
    run: Run, check: StepCheck, samples: Sequence[Sample], began: float, step_began: float, rate: float | None = None
) -> None:
    now = time.perf_counter()
    on_gpu = run.runner.device != "cpu"
    event = StepEvent(
        step=check.step,
        total_steps=run.schedule.total_steps,
        epoch=run.schedule.epoch_of(check.step),
        loss=check.loss if check.loss_finite else None,
        grad_norm=check.grad_norm if math.isfinite(check.grad_norm) else None,
        learning_rate=run.scheduler.get_last_lr()[0] if rate is None else rate,
        tokens=run.state.tokens,
        trained_tokens=run.state.trained_tokens,
        seconds=now - began,
        tokens_per_second=sum(len(sample.input_ids) for sample in samples) / (now - step_began),
        nonfinite=not check.finite,
        passes=len(check.pass_losses),
        memory_gib=torch.cuda.max_memory_allocated(run.runner.device) / 2**30 if on_gpu else None,
    )
    for listener in run.listeners:
        listener.stepped(event)
