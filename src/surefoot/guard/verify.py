"""Is a change a cure? Finite is not correct: loss and gradients must be those of a float32 replay.

bfloat16 removed every NaN of an attention overflow and learned no more than skipping the batches did
(facts: eval loss +0.68 against +0.66; measured); such a change is refused here.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from surefoot.guard.plan import Change, applied
from surefoot.guard.scene import Rerun, Scene
from surefoot.model.variants import in_float32, reference_kernels, without_dropout

LOSS_TOLERANCE = 1e-2  # relative, against float32
COSINE = 0.999  # of the whole gradient
NEAR_COSINE = 0.995  # enough where only the whole model in float32 does better: the rest is 16-bit noise elsewhere
TENSOR_COSINE = 0.99  # of each tensor that holds at least TENSOR_SHARE of the gradient's norm
TENSOR_SHARE = 0.05
HEALTHY_TOLERANCE = 2e-2  # relative change of a healthy batch's loss that rounding explains


@dataclass(frozen=True)
class Verdict:
    """Whether a change was accepted, and by which numbers.

    Attributes:
        accepted: True when it may be kept.
        sentence: what was compared.
        cosine: of the whole gradient with the reference's; None when it was refused for another reason.
    """

    accepted: bool
    sentence: str
    cosine: float | None = None


def reference_of(scene: Scene, *, same_dtype: bool) -> Rerun:
    """Run a step as it should have come out, without dropout.

    Args:
        scene: the step.
        same_dtype: with reference kernels in the run's own dtype, for a faulty kernel; else in float32.

    Returns:
        Loss and gradients to compare with.
    """
    kernels = reference_kernels if same_dtype else in_float32
    with without_dropout(scene.model), kernels(scene.model, scene.forward):
        return scene.rerun(keep_grads=True)


def verify(scene: Scene, changes: Sequence[Change], reference: Rerun, healthy: Sequence[Scene]) -> Verdict:
    """Compare a step under changes with its reference, and healthy batches with themselves.

    Args:
        scene: the step that was not finite.
        changes: to be judged; applied for the time of the test only.
        reference: of the same step, from `reference_of`.
        healthy: steps that were finite, at the weights of now.

    Returns:
        The verdict.
    """
    name = " and ".join(str(change) for change in changes)
    with applied(scene.model, scene.forward, changes):
        with without_dropout(scene.model):
            result = scene.rerun(keep_grads=True)
        if not result.finite:
            return Verdict(False, f"{name}: not finite.")
        if not scene.rerun().finite:
            return Verdict(False, f"{name}: not finite with dropout.")
    gap = abs(result.loss - reference.loss) / max(abs(reference.loss), 1e-6)
    cosine, worst_name, worst = compare(result, reference)
    numbers = f"{name}: loss {result.loss:.5g} against {reference.loss:.5g}, gradient cosine {cosine:.5f}"
    if gap > LOSS_TOLERANCE or not cosine > COSINE:
        close = gap <= LOSS_TOLERANCE and worst > TENSOR_COSINE
        return Verdict(False, f"{numbers}: finite, but not the same step.", cosine if close else None)
    if not worst > TENSOR_COSINE:
        return Verdict(False, f"{numbers}, but only {worst:.4f} for {worst_name}.")
    for other in healthy:
        sentence = _changes_healthy(other, changes)
        if sentence:
            return Verdict(False, f"{numbers}; {sentence}")
    checked = f"; {len(healthy)} healthy batches keep their loss" if healthy else ""
    return Verdict(True, f"{numbers}{checked}.")


@torch.no_grad()
def compare(result: Rerun, reference: Rerun) -> tuple[float, str, float]:
    """Compare two gradients.

    Args:
        result: with gradients.
        reference: with gradients of the same tensors.

    Returns:
        The cosine of the whole gradients; the tensor with the worst one among those that matter, and its cosine.
    """
    assert result.grads is not None and reference.grads is not None
    if result.grads.keys() != reference.grads.keys():
        return float("nan"), "", float("nan")
    rows = []
    for name, theirs in reference.grads.items():
        ours = result.grads[name].double()
        theirs = theirs.double()
        rows.append(torch.stack([(ours * theirs).sum(), ours.square().sum(), theirs.square().sum()]))
    dots, ours_2, theirs_2 = torch.stack(rows).cpu().unbind(1)
    floor = 1e-300
    whole = float(dots.sum() / (ours_2.sum() * theirs_2.sum()).sqrt().clamp_min(floor))
    if float(theirs_2.sum()) == 0.0:
        return 1.0 if float(ours_2.sum()) == 0.0 else 0.0, "", 1.0
    matters = theirs_2 >= TENSOR_SHARE**2 * theirs_2.sum()
    each = torch.where(matters, dots / (ours_2 * theirs_2).sqrt().clamp_min(floor), torch.ones_like(dots))
    place = int(each.argmin())
    return whole, list(reference.grads)[place], float(each[place])


def _changes_healthy(scene: Scene, changes: Sequence[Change]) -> str:
    """Return why a healthy batch is not what it was; empty when it is, or has come nearer to float32."""
    with without_dropout(scene.model):
        before = scene.rerun()
        if not before.finite:
            return ""  # not healthy itself at these weights
        with applied(scene.model, scene.forward, changes):
            after = scene.rerun()
        if abs(after.loss - before.loss) <= HEALTHY_TOLERANCE * abs(before.loss):
            return ""
        with in_float32(scene.model, scene.forward):
            right = scene.rerun()
    if abs(after.loss - right.loss) <= abs(before.loss - right.loss):
        return ""
    return f"but the loss of healthy step {scene.step} goes from {before.loss:.5g} to {after.loss:.5g}."
