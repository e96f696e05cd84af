"""Events as a training loop would send them."""

from __future__ import annotations

from surefoot.train.events import EvalEvent, RunFacts, StepEvent, TrainResult


def facts(total_steps=10, epochs=1.0, resumed_from=0) -> RunFacts:
    return RunFacts(
        total_steps=total_steps, epochs=epochs, samples=40, samples_per_step=4, trainable_parameters=8,
        total_parameters=100, precision="float32", device="cpu", resumed_from=resumed_from,
    )  # fmt: skip


def step(number, loss=1.0, *, total_steps=10, epochs=1.0, grad_norm=0.5, nonfinite=False) -> StepEvent:
    return StepEvent(
        step=number, total_steps=total_steps, epoch=epochs * number / total_steps, loss=loss, grad_norm=grad_norm,
        learning_rate=1e-4, tokens=100 * number, trained_tokens=50 * number, seconds=2.0 * number,
        tokens_per_second=50.0, nonfinite=nonfinite, passes=1, memory_gib=None,
    )  # fmt: skip


def evaluation(number, loss=1.0, name="", accuracy=None, nonfinite=False) -> EvalEvent:
    return EvalEvent(
        step=number, total_steps=10, epoch=number / 10, name=name, loss=loss, accuracy=accuracy, tokens=100, samples=8,
        seconds=2.0, nonfinite=nonfinite,
    )  # fmt: skip


def result(steps=10, stopped_by="") -> TrainResult:
    return TrainResult(steps=steps, epoch=1.0, loss=1.25, seconds=20.0, samples=40, tokens=1000, stopped_by=stopped_by)
