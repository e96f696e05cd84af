"""Before step 1: does the gradient add up, and is no infinity born that dies before anyone sees it?"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Generator
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch.nn.functional import cosine_similarity

from surefoot.data.batch import next_token_targets
from surefoot.data.messages import IGNORE_INDEX, Sample
from surefoot.guard.diagnosis import Diagnosis, Origin
from surefoot.guard.names import clean
from surefoot.guard.preflight_base import (
    Finding,
    compute_dtype,
    difference,
    evaluating,
    few_tokens,
    sampled_gradient,
    shortened,
)  # fmt: skip
from surefoot.guard.scene import Scene

if TYPE_CHECKING:
    from surefoot.guard.plan import Change
    from surefoot.guard.trace import Trace

SUM_TOKENS = 64
TRACE_TOKENS = 128
# Difference of two gradients that rounding explains, as a share of their length; the sum of a step's parts against
# the whole. A mean of means is off by a third and more.
ROUNDING = {torch.float32: 0.01, torch.float16: 0.05, torch.bfloat16: 0.1}
LOSS_ROUNDING = 1e-4  # relative, of a loss in float32
EXACT_ROUNDING = 0.02
# A change is kept when the small batch's loss and gradient are float32's.
SAME_LOSS = 0.01
SAME_DIRECTION = 0.999
MOST_ROUNDS = 3


def check_sum(scene: Scene) -> Finding | None:
    """Compare the gradient of a whole with the sum over its parts: rows in one pass and in two, labels in two halves.

    Args:
        scene: the first step.

    Returns:
        DATA, place "normaliser", when they differ by more than rounding; also with the model in float32.
    """
    from surefoot.model.variants import in_float32

    trial, experiments = _experiments(scene)
    tolerance = ROUNDING.get(compute_dtype(scene), ROUNDING[torch.bfloat16])
    slow = scene.device == "cpu" and compute_dtype(scene) == torch.float16  # ten times float32's time and more
    evidence, details = [], {}
    with evaluating(scene.model):
        for name, (whole, parts) in experiments.items():
            found = None if slow else _compare(trial, whole, parts)
            # Also when a gradient is not finite: the step's own check names that.
            if found is not None and not found.difference > tolerance:
                continue
            with in_float32(scene.model, scene.forward):
                exact = _compare(trial, whole, parts)
            found = found or exact
            if not exact.difference > EXACT_ROUNDING:
                continue
            details[name] = {"difference": found.difference, "difference_float32": exact.difference}
            if abs(exact.whole - exact.parts) <= LOSS_ROUNDING * abs(exact.whole):
                kernel = _kernel(scene, trial, whole, parts, found)
                if kernel is not None:
                    return kernel
            evidence.append(
                f"The gradient of {name} is off by {found.difference:.0%} of its length "
                f"({exact.difference:.0%} in float32; rounding explains {tolerance:.0%}); "
                f"the loss is {found.whole:.4g} against {found.parts:.4g}."
            )
    if not evidence:
        return None
    evidence.append("A loss that is summed over tokens adds up; a mean in each pass, or of each row, does not.")
    diagnosis = Diagnosis(
        0, "DATA", place="normaliser", phase="backward", evidence=tuple(evidence), details=details,
        samples=tuple(row for sample in trial.samples for row in sample.row_ids),
    )  # fmt: skip
    return Finding(diagnosis, "divide the summed loss once, by the trained tokens of the whole step", True)


def _kernel(scene: Scene, trial: Scene, whole: list[Sample], parts: list[list[Sample]], found: _Sum) -> Finding | None:
    """Look for the kernel that is to blame when losses add up and gradients do not: without it they do."""
    from surefoot.guard.plan import Change, applied

    tolerance = ROUNDING.get(compute_dtype(scene), ROUNDING[torch.bfloat16])
    for kind in ("attention_eager", "plain_lora", "loss_reference"):
        change = Change(kind, "")
        try:
            with applied(scene.model, scene.forward, [change]):
                without = _compare(trial, whole, parts)
        except ValueError:
            continue  # the model has no such part
        if without.difference <= tolerance:
            evidence = (
                f"The loss adds up over passes and rows, its gradient is off by {found.difference:.0%} of its length. "
                f"With {change} it is off by {without.difference:.2%}: the kernel that this replaces is wrong."
            )
            place = "attention" if kind == "attention_eager" else None
            rows = tuple(row for sample in trial.samples for row in sample.row_ids)
            diagnosis = Diagnosis(0, "KERNEL", place=place, phase="backward", evidence=(evidence,), samples=rows)
            return Finding(diagnosis, str(change), True, changes=(change,))
    return None


def check_silent_infinity(scene: Scene, tell: Callable[[str], None]) -> Finding | None:
    """Trace every operation of a small batch for an infinity that does not reach the loss.

    Args:
        scene: the first step.
        tell: called with a sentence when an infinity is part of the computation in float32 as well.

    Returns:
        RANGE with the module and operation; with changes of the plan when they give float32's loss and gradient.
    """
    from surefoot.guard.trace import trace
    from surefoot.model.variants import in_float32, without_dropout

    small = replace(scene, samples=few_tokens(scene.samples, TRACE_TOKENS))
    traced = trace(small)
    origin = traced.origin
    if origin is None or origin.kind == "leaf" or not traced.rerun.finite:
        return None  # what reaches the loss or a gradient stops the step itself
    dtype = compute_dtype(scene)
    with without_dropout(scene.model), in_float32(scene.model, scene.forward):
        exact = trace(small, watch_range=torch.finfo(dtype).max)
        reference = _Reference.of(small)
    if _same_in_float32(origin, exact.origin):
        tell(f"{_where(origin)} gives an infinity in float32 as well; it does not reach the loss.")
        return None
    if origin.place in ("attention scores", "attention mask"):
        # A large negative mask and a negative score make -inf, where softmax gives 0 as it should.
        with without_dropout(scene.model):
            if _Reference.of(small).agrees(reference):
                return None
    evidence = [
        f"{_where(origin)} gives {origin.output}" + (f" from {'; '.join(origin.inputs)}." if origin.inputs else "."),
        f"The loss is finite all the same ({traced.rerun.loss:.4g}; in float32 {reference.loss:.4g}), so that no step "
        "would show it.",
    ]
    with without_dropout(scene.model):
        changes, verdict = _find_changes(small, origin, exact, reference)
    evidence.append(verdict)
    diagnosis = Diagnosis(
        0, "RANGE", place=origin.place, module=origin.module, op=origin.op, phase=origin.phase, samples=origin.rows,
        evidence=tuple(evidence), details={"silent": True, "loss": traced.rerun.loss, "loss_float32": reference.loss},
    )  # fmt: skip
    if changes:
        return Finding(diagnosis, "run " + " and ".join(str(change) for change in changes), False, changes=changes)
    action = "use another implementation of this module, or compute_dtype: float32 (bfloat16 has the range as well)"
    return Finding(diagnosis, action, False)


@dataclass(frozen=True)
class _Sum:
    whole: float
    parts: float
    difference: float


@dataclass(frozen=True)
class _Reference:
    loss: float
    gradient: torch.Tensor

    @classmethod
    def of(cls, scene: Scene) -> _Reference:
        loss, gradient = sampled_gradient(scene, [scene.samples])
        return cls(loss, gradient)

    def cosine(self, other: _Reference) -> float:
        return float(cosine_similarity(self.gradient, other.gradient, dim=0))

    def agrees(self, other: _Reference) -> bool:
        off = abs(self.loss - other.loss) / max(abs(other.loss), 1e-9)
        return off <= SAME_LOSS and self.cosine(other) >= SAME_DIRECTION


def _experiments(scene: Scene) -> tuple[Scene, dict[str, tuple[list[Sample], list[list[Sample]]]]]:
    """Choose two short rows with unlike numbers of trained tokens, and what to run as a whole and in parts."""
    rows = sorted(few_tokens(scene.samples, 2 * SUM_TOKENS), key=lambda sample: len(sample.input_ids))
    first, second = shortened(rows[0], SUM_TOKENS), shortened(rows[-1], SUM_TOKENS)
    early, late = _split_labels(first)
    experiments = {}
    if early is not None:
        experiments["one row against its labels in two parts"] = ([first], [[early], [late]])
    few = late if early is None else early
    trial = replace(scene, samples=(few, second), before_pass=None)
    if scene.forward.packs:
        # One part a pass, whatever the room: the parts are run one by one.
        room = len(few.input_ids) + len(second.input_ids)
        trial = replace(trial, tokens_per_pass=max(room, scene.tokens_per_pass))
        experiments["two rows in one pass against one pass each"] = ([few, second], [[few], [second]])
    return trial, experiments


def _split_labels(sample: Sample) -> tuple[Sample | None, Sample]:
    """Part a row's trained tokens: the first quarter carries its labels in one copy, the rest in the other."""
    trained = np.flatnonzero(next_token_targets(sample) != IGNORE_INDEX) + 1  # where the label itself stands
    if len(trained) < 2:
        return None, sample
    border = int(trained[max(1, len(trained) // 4)])
    early, late = sample.labels.copy(), sample.labels.copy()
    early[border:] = IGNORE_INDEX
    late[:border] = IGNORE_INDEX
    return replace(sample, labels=early), replace(sample, labels=late)


def _compare(scene: Scene, whole: list[Sample], parts: list[list[Sample]]) -> _Sum:
    """Compare at the step's loss scale, or lower ones while a gradient overflows: that is no matter of sums."""
    while True:
        whole_loss, whole_gradient = sampled_gradient(scene, [whole])
        parts_loss, parts_gradient = sampled_gradient(scene, parts)
        found = _Sum(whole_loss, parts_loss, difference(whole_gradient, parts_gradient))
        if math.isfinite(found.difference) or scene.loss_scale <= 1.0:
            return found
        scene = replace(scene, loss_scale=max(1.0, scene.loss_scale / 2.0**8))


def _where(origin: Origin) -> str:
    return f"{origin.op} in {origin.module or 'the loss'} ({origin.phase} pass)"


def _same_in_float32(origin: Origin, exact: Origin | None) -> bool:
    if exact is None or (exact.module, exact.op) != (origin.module, origin.op):
        return False
    return "float16" not in exact.output  # also bfloat16: the module's own code computes in 16 bits


def _find_changes(small: Scene, origin: Origin, exact: Trace, reference: _Reference) -> tuple[tuple[Change, ...], str]:
    """Try islands around the module, and those of its kind, until the trace is clean and the numbers are float32's."""
    from surefoot.guard.trace import trace

    modules: list[str] = []
    found: Origin | None = origin
    with contextlib.ExitStack() as stack:
        for _ in range(MOST_ROUNDS):
            if found is None or not found.module or found.module in modules:
                break
            new = _alike(small, found.module, exact)
            stack.enter_context(_islands(small, [name for name in new if name not in modules]))
            modules += [name for name in new if name not in modules]
            found = trace(small).origin
        if not modules:
            return (), "No module holds the operation, so no part of the model can be run in float32 for it."
        named = ", ".join(modules[:4]) + (f" and {len(modules) - 4} more" if len(modules) > 4 else "")
        if found is not None:
            return (), f"With {named} in float32 it is born all the same: the module's own code computes in 16 bits."
        now = _Reference.of(small)
    verdict = (
        f"With {named} in float32 no infinity is born; the loss is {now.loss:.4g}, the gradient's cosine with "
        f"float32's {now.cosine(reference):.5f}."
    )
    if not now.agrees(reference):
        return (), verdict + " That is not float32's result, so it is not a cure."
    return tuple(_island(name) for name in modules), verdict


def _alike(scene: Scene, module: str, exact: Trace) -> list[str]:
    """Name the module and those of its class whose float32 values go beyond the dtype: one step instead of many."""
    modules = {clean(name): type(m) for name, m in scene.forward.model.named_modules()}
    kind = modules.get(module)
    over = {peak.module for peak in exact.over if peak.module and modules.get(peak.module) is kind}
    return [name for name in modules if name == module or name in over]


def _island(module: str) -> Change:
    from surefoot.guard.plan import Change

    return Change("island", module)


@contextlib.contextmanager
def _islands(scene: Scene, modules: list[str]) -> Generator[None, None, None]:
    from surefoot.guard.plan import apply_change, undo_change

    done = []
    try:
        for name in modules:
            change = _island(name)
            apply_change(scene.model, scene.forward, change)
            done.append(change)
        yield
    finally:
        for change in reversed(done):
            undo_change(scene.model, scene.forward, change)
