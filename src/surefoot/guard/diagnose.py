"""Which kind of fault made a step not finite: found by running the step again under one change at a time.

The experiments stop at the first answer: r0 facts of batch and weights, r1 the same again, r2 reference kernels, r3 a
lower loss scale, r4 float32. Each leaves a sentence of evidence.
"""

from __future__ import annotations

import math
from collections.abc import Generator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace

import torch

from surefoot.guard.check import StepCheck, shown
from surefoot.guard.checksum import WeightChecksums
from surefoot.guard.diagnosis import Diagnosis, Origin
from surefoot.guard.names import clean
from surefoot.guard.scene import Rerun, Scene
from surefoot.guard.trace import Peak, Trace, trace
from surefoot.model.compiled import compiled_layers
from surefoot.model.forward import base_of
from surefoot.model.quantized import holds_numbers, named_states
from surefoot.model.variants import in_float32, reference_kernels, without_compile

# r3 divides the loss scale by this, and again, until it is 1: a gradient that overflows by more is not the scale's.
SCALE_STEP = 2.0**8
# Values above a dtype's largest number divided by this are about to leave it as training goes on.
HEADROOM = 8.0


@dataclass
class Examination:
    """A step under examination, and what was found so far.

    Attributes:
        scene: the step.
        check: what was seen of it.
        checksums: of the frozen weights as they were loaded; None when nobody keeps them.
        evidence: a sentence for each experiment.
    """

    scene: Scene
    check: StepCheck
    checksums: WeightChecksums | None = None
    evidence: list[str] = field(default_factory=list)

    def diagnosis(self, fault: str, origin: Origin | None = None, **more: object) -> Diagnosis:
        """Name the fault, with the evidence so far."""
        fields: dict[str, object] = {}
        if origin is not None:
            fields = {
                "place": origin.place, "module": origin.module, "op": origin.op, "phase": origin.phase,
                "samples": origin.rows,
            }  # fmt: skip
            details = {"node": origin.node, "inputs": list(origin.inputs), "output": origin.output}
            fields["details"] = details | {"kind": origin.kind, "leaf": origin.leaf}
        details = {**fields.pop("details", {}), **more.pop("details", {})}  # type: ignore[dict-item]
        return Diagnosis(self.check.step, fault, evidence=tuple(self.evidence), details=details, **(fields | more))  # type: ignore[arg-type]


def diagnose(
    scene: Scene, check: StepCheck, checksums: WeightChecksums | None = None, *, updates: int = 1
) -> Diagnosis:
    """Find out why a step is not finite.

    Args:
        scene: the step as it stood; its weights are those it was computed with.
        check: what was seen of it.
        checksums: of the frozen weights as they were loaded, or None.
        updates: made in the run so far; without any, bad trained weights were loaded so.

    Returns:
        The fault, its place, and the evidence. Weights, gradients and random numbers are as before.

    Raises:
        torch.OutOfMemoryError: an experiment does not fit.
    """
    case = Examination(scene, check, checksums, [check.describe()])
    return _facts(case, updates) or _again(case) or _experiments(case)


def bad_leaves(model: torch.nn.Module) -> list[tuple[str, bool]]:
    """List the weights, scales of packed weights, and buffers that are not finite.

    Args:
        model: wrapped by PEFT or not.

    Returns:
        The name of each, as the model names it, and whether it is trained.
    """
    named = [(name, p, p.requires_grad) for name, p in model.named_parameters()]
    named += [(name, b, False) for name, b in model.named_buffers()]
    named += [(name, state, False) for name, state in named_states(model)]
    floating = [(name, t, trained) for name, t, trained in named if holds_numbers(t) and t.numel()]
    if not floating:
        return []
    # Rotary frequencies and masks are small; weights are read once. A sum would overflow, the peak does not.
    norms = [torch.linalg.vector_norm(t.detach(), float("inf"), dtype=torch.float32) for _, t, _ in floating]
    finite = torch.stack([norm.to(norms[0].device) for norm in norms]).isfinite().tolist()
    return [(name, trained) for (name, _, trained), fine in zip(floating, finite, strict=True) if not fine]


def _facts(case: Examination, updates: int) -> Diagnosis | None:
    """r0: ids, weights, checksums."""
    rows = base_of(case.scene.model).get_input_embeddings().weight.shape[0]
    for sample in case.scene.samples:
        low, high = int(sample.input_ids.min()), int(sample.input_ids.max())
        if low < 0 or high >= rows:
            wrong = low if low < 0 else high
            case.evidence.append(
                f"r0: row {sample.row_ids[0]} has token id {wrong}; the model has {rows} embedding rows."
            )
            return case.diagnosis("DATA", place="embedding", samples=sample.row_ids, phase="forward")
    leaves = bad_leaves(case.scene.model)
    trained = [clean(name) for name, is_trained in leaves if is_trained]
    if trained and updates:
        case.evidence.append(f"r0: {len(trained)} trained weights are not finite, first {trained[0]}.")
        return case.diagnosis(
            "OPTIMIZER", place="optimizer", phase="optimizer", module=owner(trained[0]), details={"tensors": trained}
        )
    changed = case.checksums.changed(case.scene.model) if case.checksums else []
    if changed:
        case.evidence.append(f"r0: {changed[0]} is frozen, yet its checksum is not the one that it was loaded with.")
        return case.diagnosis("TRANSIENT", phase="forward", module=owner(changed[0]), details={"tensors": changed})
    if leaves:
        name = clean(leaves[0][0])
        case.evidence.append(f"r0: {name} is not finite as it was loaded.")
        return case.diagnosis(
            "WEIGHTS", phase="forward", module=owner(name), details={"tensors": [clean(n) for n, _ in leaves]}
        )
    case.evidence.append("r0: token ids, labels and all weights are in order.")
    return None


def _again(case: Examination) -> Diagnosis | None:
    """r1: the same again, up to three times; then with fresh memory filled with NaN."""
    first = case.scene.rerun()
    if not first.finite:
        case.evidence.append("r1: the same step, run again, is not finite again.")
        return None
    if any(not case.scene.rerun().finite for _ in range(2)):
        case.evidence.append("r1: the same step is finite at some times and not at others.")
        with _filled_memory():
            origin = trace(case.scene).origin
        return case.diagnosis("KERNEL", origin)
    with _filled_memory():
        filled = trace(case.scene)
    if filled.origin is not None:
        case.evidence.append(
            "r1: finite when run again; not when new memory is filled with NaN: memory is read unwritten."
        )
        return case.diagnosis("KERNEL", filled.origin, details={"uninitialised": True})
    # Only now: what stands in unwritten memory may be finite and as large. A NaN is in no norm of finite gradients.
    peak = max(first.peaks.values(), default=0.0)
    if math.isinf(case.check.grad_norm) and peak > 1e18:
        case.evidence.append(f"r1: every gradient is a number, but up to {peak:.1e}: their norm leaves float32.")
        return case.diagnosis("SPIKE", phase="backward", samples=_all_rows(case.scene))
    case.evidence.append("r1: the same step, run again three times, is finite: what happened was not in the numbers.")
    phase = "backward" if case.check.loss_finite else "forward"
    return case.diagnosis("TRANSIENT", phase=phase, module=bracket(case.check), samples=_bad_rows(case.check))


def _experiments(case: Examination) -> Diagnosis:
    scene = case.scene
    base = base_of(scene.model)
    layers = {name: base.get_submodule(name) for name in compiled_layers(scene.model)}
    if layers:
        with without_compile(scene.model):
            eager = scene.rerun()
        if eager.finite:
            return _compiled_only(case, layers)
        case.evidence.append("r2: the same without torch.compile is not finite either.")
    with without_compile(scene.model):
        found = trace(scene)
    origin = found.origin
    if origin is not None:
        case.evidence.append(_sentence(origin))
    if origin is not None and origin.mask_row:
        return case.diagnosis("DATA", origin)
    if origin is not None and origin.leaf is not None:
        return case.diagnosis("WEIGHTS", origin)
    scaled = _scale(case, origin)  # before r2: a marginal overflow may miss other kernels by luck
    if scaled is not None:
        return scaled
    with reference_kernels(scene.model, scene.forward):
        reference = scene.rerun()
    if reference.finite:
        case.evidence.append(
            f"r2: with written-out reference kernels in the same dtype it is finite (loss {reference.loss:.4g})."
        )
        return case.diagnosis("KERNEL", origin)
    case.evidence.append("r2: with written-out reference kernels in the same dtype it is not finite either.")
    return _range(case, origin, found) or _math_or_data(case, origin)


def _compiled_only(case: Examination, layers: dict[str, torch.nn.Module]) -> Diagnosis:
    case.evidence.append("r2: the same without torch.compile is finite: a compiled kernel is wrong.")
    guilty = []
    for name, layer in layers.items():
        with only_compiled(layers, layer):
            if not case.scene.rerun().finite:
                guilty.append(name)
    names = guilty or list(layers)
    case.evidence.append(f"r2: compiled alone, {shown(names)} {'is' if len(names) == 1 else 'are'} not finite.")
    phase = "backward" if case.check.loss_finite else "forward"
    return case.diagnosis("KERNEL", module=names[0], op="torch.compile", phase=phase, details={"compiled": names})


def _scale(case: Examination, origin: Origin | None) -> Diagnosis | None:
    """r3: a lower loss scale; only float16 has one, and only gradients feel it."""
    scale = case.scene.loss_scale
    if scale <= 1.0 or not case.check.loss_finite:
        return None
    while scale > 1.0:
        scale = max(1.0, scale / SCALE_STEP)
        if case.scene.rerun(loss_scale=scale).finite:
            case.evidence.append(f"r3: finite with the loss scale {scale:g} instead of {case.scene.loss_scale:g}.")
            return case.diagnosis("SCALE", origin, details={"finite_at": scale})
    case.evidence.append("r3: not finite with a loss scale of 1 either.")
    return None


def _range(case: Examination, origin: Origin | None, found: Trace) -> Diagnosis | None:
    """r4: float32; what is beyond the dtype's largest number there is what overflowed."""
    scene = case.scene
    narrow = narrowest(scene)
    if narrow is None:
        case.evidence.append("r4: the run is in float32 already.")
        return None
    with in_float32(scene.model, scene.forward):
        reference = scene.rerun()
    if not reference.finite:
        case.evidence.append("r4: in float32 it is not finite either.")
        return None
    limit = torch.finfo(narrow).max
    with reference_kernels(scene.model, scene.forward), in_float32(scene.model, scene.forward):
        watched = trace(scene, watch_range=limit / HEADROOM)
    peaks = [peak for peak in watched.over if peak.phase == "forward" and _ran_narrow(peak, found)]
    over = [peak for peak in peaks if peak.value > limit]
    case.evidence.append(f"r4: in float32 it is finite (loss {reference.loss:.4g}).")
    if over:
        most = max(over, key=lambda peak: peak.value)
        case.evidence.append(
            f"There the largest value is {most.value:.3g} in {most.op} of {most.module}; {narrow} ends at {limit:.3g}."
        )
    details = {
        "over": [_place_json(peak) for peak in over],
        "near": [_place_json(peak) for peak in peaks if peak.value <= limit],
        "dtype": str(narrow).removeprefix("torch."),
    }
    return case.diagnosis("RANGE", origin, details=details)


def _ran_narrow(peak: Peak, found: Trace) -> bool:
    """Say whether an operation ran in 16 bits in the step itself; one that only references have, by its module."""
    if (peak.module, peak.op) in found.narrow | found.wide:
        return (peak.module, peak.op) in found.narrow
    return any(module == peak.module for module, _ in found.narrow)


def _math_or_data(case: Examination, origin: Origin | None) -> Diagnosis:
    bad = [sample for sample in case.scene.samples if not _sample_finite(case.scene, sample)]
    rows = tuple(row for sample in bad for row in sample.row_ids)
    if bad:
        case.evidence.append(
            f"Run one by one, {len(bad)} of {len(case.scene.samples)} samples are not finite: {shown(rows)}."
        )
    given = origin is not None and (origin.given or origin.kind == "leaf")
    if given:
        case.evidence.append("No arithmetic on finite numbers makes this: it was put there.")
    found = case.diagnosis("DATA" if given else "MATH", origin)
    return replace(found, samples=rows or found.samples or _all_rows(case.scene))


def _sample_finite(scene: Scene, sample: object) -> bool:
    part: Rerun = scene.rerun(samples=[sample])  # type: ignore[list-item]
    return part.finite


def narrowest(scene: Scene) -> torch.dtype | None:
    """Return the 16-bit dtype that a step computes in; None when it is in float32 throughout."""
    if scene.forward.autocast is not None:
        return scene.forward.autocast
    for parameter in scene.model.parameters():
        if parameter.dtype in (torch.float16, torch.bfloat16):
            return parameter.dtype
    return None


def bracket(check: StepCheck) -> str | None:
    """Name the module between clean and bad gradients (level 0): the fault of a backward pass lies there.

    Gradients made before the fault, nearer the loss, are clean. Names come in the model's forward order.

    Args:
        check: the step.

    Returns:
        The module of the last bad tensor in forward order; None when all are bad or all are clean.
    """
    bad = check.bad_tensors
    if not bad or len(bad) == len(check.norms):
        return None
    return owner(clean(bad[-1]))


def owner(tensor: str) -> str:
    """Return the module that a tensor's name belongs to."""
    return tensor.rpartition(".")[0]


@contextmanager
def only_compiled(layers: dict[str, torch.nn.Module], kept: torch.nn.Module) -> Generator[None]:
    """Run one compiled layer compiled and the others not."""
    saved = {layer: layer._compiled_call_impl for layer in layers.values()}
    try:
        for layer in saved:
            if layer is not kept:
                layer._compiled_call_impl = None
        yield
    finally:
        for layer, call in saved.items():
            layer._compiled_call_impl = call


@contextmanager
def _filled_memory() -> Generator[None]:
    """Let torch fill new memory with NaN, as its deterministic mode can; errors of that mode become warnings."""
    import warnings

    deterministic, warn_only = (
        torch.are_deterministic_algorithms_enabled(),
        torch.is_deterministic_algorithms_warn_only_enabled(),
    )
    fill = torch.utils.deterministic.fill_uninitialized_memory  # type: ignore[attr-defined]
    try:
        torch.use_deterministic_algorithms(True, warn_only=True)
        torch.utils.deterministic.fill_uninitialized_memory = True  # type: ignore[attr-defined]
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", UserWarning)
            yield
    finally:
        torch.use_deterministic_algorithms(deterministic, warn_only=warn_only)
        torch.utils.deterministic.fill_uninitialized_memory = fill  # type: ignore[attr-defined]


def _sentence(origin: Origin) -> str:
    what = {"inf": "infinity", "nan": "NaN", "leaf": "bad leaf"}[origin.kind]
    where = origin.module or "the loss"
    if origin.kind == "leaf":
        tensor = origin.leaf or f"a tensor that {where} was given ({origin.output}), no weight of the model"
        return f"The first bad value is in {tensor}, which no operation made."
    inputs = "; ".join(origin.inputs) or "none"
    node = f" ({origin.node})" if origin.node else ""
    born = f"The first {what} is born in the {origin.phase} pass, in {origin.op}{node} of {where}"
    return f"{born}: inputs {inputs}; output {origin.output}."


def _place_json(peak: Peak) -> dict[str, object]:
    return {
        "module": peak.module,
        "op": peak.op,
        "place": peak.place,
        "value": peak.value if math.isfinite(peak.value) else None,
    }


def _all_rows(scene: Scene) -> tuple[str, ...]:
    return tuple(row for sample in scene.samples for row in sample.row_ids)


def _bad_rows(check: StepCheck) -> tuple[str, ...]:
    return tuple(row for rows in check.bad_passes for row in rows)
