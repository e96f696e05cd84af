"""Is this step finite, and if not, what can be said of it before anything is changed?"""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from surefoot.errors import WorkError


@dataclass(frozen=True)
class StepCheck:
    """What an optimizer step looked like before its update.

    Attributes:
        step: the step, counted from 1.
        pass_losses: loss of each pass over the step's trained tokens, in nats; they add up to the step's loss.
        pass_rows: the row ids of each pass.
        grad_norm: L2 norm of the gradient, unscaled and before clipping.
        loss_scale: the factor that was on the loss.
    """

    step: int
    pass_losses: tuple[float, ...]
    pass_rows: tuple[tuple[str, ...], ...]
    grad_norm: float
    loss_scale: float

    @property
    def loss(self) -> float:
        """Token-mean loss of the step, in nats."""
        return sum(self.pass_losses)

    @property
    def loss_finite(self) -> bool:
        """True when every pass's loss is a number."""
        return all(_finite(loss) for loss in self.pass_losses)

    @property
    def finite(self) -> bool:
        """True when the step may be applied."""
        return self.loss_finite and _finite(self.grad_norm)


class NonFiniteStepError(WorkError):
    """A step was not finite; it was not applied."""

    def __init__(self, check: StepCheck, findings: dict[str, Any]) -> None:
        """Describe the step.

        Args:
            check: the step.
            findings: what was seen of it, from `inspect_step`.
        """
        self.check = check
        self.findings = findings
        super().__init__(describe(check, findings), hint=_hint(findings))


def gradient_norm(parameters: Iterable[torch.nn.Parameter], scale: float) -> torch.Tensor:
    """Take the L2 norm of all gradients, in float32: a float16 norm overflows at sums that are no fault.

    Args:
        parameters: those that are trained; gradients may be missing.
        scale: loss scale that the gradients still carry.

    Returns:
        The norm without the scale, float32 scalar on the gradients' device.
    """
    grads = [p.grad.float() for p in parameters if p.grad is not None]
    return torch.nn.utils.get_total_norm(grads, 2.0) / scale


@torch.no_grad()
def inspect_step(model: torch.nn.Module, check: StepCheck) -> dict[str, Any]:
    """Collect what a step that is not finite left behind: which weights, losses and gradients are bad.

    Args:
        model: with the step's gradients still in place.
        check: the step.

    Returns:
        "weights": names of weights that are not finite themselves; "bad_gradients" and "clean_gradients": names of
        trained parameters; "bad_passes": the row ids of each pass whose loss is not finite.
    """
    named = list(model.named_parameters())
    trained = [(name, p) for name, p in named if p.requires_grad and p.grad is not None]
    clean = [name for name, p in trained if _all_finite(p.grad)]
    return {
        "weights": [name for name, p in named if not _all_finite(p)],
        "bad_gradients": [name for name, _ in trained if name not in set(clean)],
        "clean_gradients": clean,
        "bad_passes": [
            list(rows) for loss, rows in zip(check.pass_losses, check.pass_rows, strict=True) if not _finite(loss)
        ],
    }


def describe(check: StepCheck, findings: dict[str, Any]) -> str:
    """Say in a few sentences what was not finite, and that nothing was lost."""
    lines = [
        f"step {check.step} is not finite: loss {check.loss:g}, grad norm {check.grad_norm:g}. It was not applied."
    ]
    weights, bad, clean = findings["weights"], findings["bad_gradients"], findings["clean_gradients"]
    if weights:
        lines.append(f"{len(weights)} weights are not finite themselves, first {weights[0]}.")
    if bad:
        lines.append(
            f"Gradients: {len(bad)} of {len(bad) + len(clean)} trained tensors are not finite, first {bad[0]}."
        )
    for rows in findings["bad_passes"]:
        lines.append(f"The loss is not finite over the rows {', '.join(rows[:8])}{' ...' if len(rows) > 8 else ''}.")
    return "\n".join(lines)


def append_event(journal: Path, event: dict[str, Any]) -> None:
    """Add one line to `guard.jsonl`; numbers that are not finite are written as null.

    Args:
        journal: the file; its folder is made if it is missing.
        event: with the fields of the journal's contract.
    """
    journal.parent.mkdir(parents=True, exist_ok=True)
    plain = {k: None if isinstance(v, float) and not _finite(v) else v for k, v in event.items()}
    with journal.open("a", encoding="utf-8") as handle:
        handle.write(json.dumps(plain, ensure_ascii=False, allow_nan=False) + "\n")
        handle.flush()
        os.fsync(handle.fileno())


def stopped_event(check: StepCheck, findings: dict[str, Any]) -> dict[str, Any]:
    """Compose the journal's line for a run that was stopped."""
    rows: Sequence[str] = [row for rows in findings["bad_passes"] for row in rows]
    return {
        "step": check.step,
        "event": "stopped",
        "class": "WEIGHTS" if findings["weights"] else None,
        "place": None,
        "module": findings["weights"][0].rpartition(".")[0] if findings["weights"] else None,
        "op": None,
        "phase": "backward" if check.loss_finite else "forward",
        "samples": rows,
        "evidence": describe(check, findings),
        "action": "stopped before the update",
        "verified": True,
        "steps_lost": 0,
        "loss": check.loss,
        "grad_norm": check.grad_norm,
        "loss_scale": check.loss_scale,
    }


def _hint(findings: dict[str, Any]) -> str:
    if findings["weights"]:
        return "they were loaded so, or the update before made them so: check the checkpoint, then learning_rate"
    return "the last checkpoint is untouched; `compute_dtype: float32` tells whether number range is the cause"


def _all_finite(tensor: torch.Tensor | None) -> bool:
    return tensor is None or not tensor.is_floating_point() or bool(tensor.isfinite().all())


def _finite(number: float) -> bool:
    return number - number == 0.0  # False for NaN and for both infinities
