"""What a training run tells those who listen: progress bars, logs, plots, trackers."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Protocol


@dataclass(frozen=True, slots=True)
class RunFacts:
    """What is known before the first step.

    Attributes:
        total_steps: optimizer steps in the whole run.
        epochs: passes over the data in the whole run; a fraction when `max_steps` ends inside one.
        samples: training items; None when they are streamed.
        samples_per_step: items that make one optimizer step (the last of an epoch may have fewer).
        trainable_parameters: numbers that the optimizer moves.
        total_parameters: numbers in the model.
        precision: in words, as "float16 autocast, float32 masters".
        device: as torch names it.
        resumed_from: optimizer steps that were already done; 0 for a fresh run.
    """

    total_steps: int
    epochs: float
    samples: int | None
    samples_per_step: int
    trainable_parameters: int
    total_parameters: int
    precision: str
    device: str
    resumed_from: int


@dataclass(frozen=True, slots=True)
class StepEvent:
    """One optimizer step that was applied, or the one that ended the run.

    Attributes:
        step: optimizer steps done, this one included; from 1.
        total_steps: optimizer steps in the whole run.
        epoch: passes over the data so far.
        loss: mean over the step's trained tokens, in nats; None when it is not finite.
        grad_norm: L2 norm of the gradient before clipping; None when it is not finite.
        learning_rate: of the first parameter group, as used by this step.
        tokens: real tokens since the start of the run.
        trained_tokens: tokens that carried loss since the start of the run.
        seconds: since training began in this process.
        tokens_per_second: real tokens of this step over its time.
        nonfinite: True when the loss or the gradient norm is NaN or infinite.
        passes: forward and backward passes that the step was made of.
        memory_gib: peak of device memory allocated so far; None on a CPU.
        loss_scale: the factor that was on the loss; None outside float16.
    """

    step: int
    total_steps: int
    epoch: float
    loss: float | None
    grad_norm: float | None
    learning_rate: float
    tokens: int
    trained_tokens: int
    seconds: float
    tokens_per_second: float
    nonfinite: bool
    passes: int
    memory_gib: float | None
    loss_scale: float | None = None


@dataclass(frozen=True, slots=True)
class EvalEvent:
    """The result of one evaluation.

    Attributes:
        step: optimizer steps done when it was made.
        total_steps: optimizer steps in the whole run.
        epoch: passes over the training data so far.
        name: of the evaluation set; empty when there is only one.
        loss: mean over the set's trained tokens, in nats; None when it is not finite.
        accuracy: share of trained tokens predicted first; None unless `compute_accuracy` asks for it.
        tokens: real tokens in the set.
        samples: items in the set.
        seconds: that the evaluation took.
        nonfinite: True when the loss is NaN or infinite.
    """

    step: int
    total_steps: int
    epoch: float
    name: str
    loss: float | None
    accuracy: float | None
    tokens: int
    samples: int
    seconds: float
    nonfinite: bool


@dataclass(frozen=True, slots=True)
class TrainResult:
    """How a run ended.

    Attributes:
        steps: optimizer steps done, those before a resume included.
        epoch: passes over the data.
        loss: mean of the step losses of this process, in nats; None when it did no step.
        seconds: training time of this process.
        samples: items trained on in this process.
        tokens: real tokens trained on in this process.
        stopped_by: empty when the run was done; "signal" or "early stopping" when it was ended before.
        best_step: the step whose evaluation was best, when `load_best_model_at_end` asked for it.
        memory_gib: peak of device memory allocated while training; None on a CPU.
        planned_memory_gib: what the plan gives for the largest pass that was run; None on a CPU.
    """

    steps: int
    epoch: float
    loss: float | None
    seconds: float
    samples: int
    tokens: int
    stopped_by: str = ""
    best_step: int | None = None
    memory_gib: float | None = None
    planned_memory_gib: float | None = None


class Listener(Protocol):
    """Anything that follows a run. Methods are called in the training process, between steps."""

    def started(self, facts: RunFacts) -> None:
        """The run is about to do its first step."""

    def stepped(self, event: StepEvent) -> None:
        """An optimizer step was applied, or found not finite."""

    def evaluated(self, event: EvalEvent) -> None:
        """An evaluation is done."""

    def saved(self, step: int, folder: Path) -> None:
        """A verified checkpoint stands in `folder`."""

    def rewound(self, step: int) -> None:
        """The steps after `step` were undone and will be done again."""

    def told(self, message: str) -> None:
        """Something that the person should read."""

    def finished(self, result: TrainResult) -> None:
        """The run is over and its result checked."""
