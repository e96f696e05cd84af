"""The smallest cure for a diagnosed fault: rungs chosen by its class, each accepted by `verify` or passed over."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

import torch

from surefoot.guard.check import shown
from surefoot.guard.diagnosis import Diagnosis
from surefoot.guard.plan import Change, applied
from surefoot.guard.scene import Rerun, Scene
from surefoot.guard.verify import NEAR_COSINE, reference_of, verify
from surefoot.model.compiled import compiled_layers
from surefoot.model.forward import base_of
from surefoot.model.variants import without_compile

Kind = Literal["retry", "scale", "changes", "skip", "reload", "rewind", "stop"]


@dataclass(frozen=True)
class Treatment:
    """What is to be done.

    Attributes:
        kind: run the step again as it was; with another loss scale; with changes kept from now on; without some
            rows; after reloading weights; from before the last update; or not at all.
        action: the same in words, for the journal.
        changes: to be kept.
        rows: to be left out.
        always: leave the rows out wherever they come up again; else at this step only.
        loss_scale: to go on with.
        tensors: frozen weights to be read from their files again.
        verified: True when the cure was tried and matched its reference.
        evidence: a sentence for each cure that was tried.
    """

    kind: Kind
    action: str
    changes: tuple[Change, ...] = ()
    rows: tuple[str, ...] = ()
    always: bool = False
    loss_scale: float | None = None
    tensors: tuple[str, ...] = ()
    verified: bool = False
    evidence: tuple[str, ...] = ()


def treat(scene: Scene, diagnosis: Diagnosis, healthy: Sequence[Scene], kept: Sequence[Change] = ()) -> Treatment:
    """Choose the cure for a fault.

    Args:
        scene: the step as it stood.
        diagnosis: of it.
        healthy: other steps at the same weights, to see that a change leaves them alone.
        kept: changes that the run has taken already; none of them is tried again.

    Returns:
        The treatment; nothing is changed yet.
    """
    match diagnosis.fault:
        case "SCALE":
            return _lower_scale(scene)
        case "RANGE":
            return _first_accepted(scene, range_rungs(scene, diagnosis), healthy, kept, same_dtype=False)
        case "KERNEL":
            return _first_accepted(scene, kernel_rungs(diagnosis), healthy, kept, same_dtype=True)
        case "TRANSIENT":
            tensors = tuple(diagnosis.details.get("tensors", ()))
            if tensors:
                return Treatment("reload", f"read {shown(tensors)} from its file again", tensors=tensors)
            return Treatment("retry", "ran the step again", verified=True)
        case "MATH" | "DATA":
            return _without_rows(scene, diagnosis, kept)
        case "OPTIMIZER":
            return Treatment("rewind", "went back to before the update")
        case _:
            return Treatment("stop", "stopped before the update")


def _lower_scale(scene: Scene) -> Treatment:
    scale, tried = scene.loss_scale, []
    while scale > 1.0:
        scale /= 2.0
        if scene.rerun(loss_scale=scale).finite:
            words = f"loss scale {scene.loss_scale:g} lowered to {scale:g}"
            return Treatment("scale", words, loss_scale=scale, verified=True, evidence=tuple(tried))
    return Treatment("stop", "stopped: no loss scale makes the step finite")


def range_rungs(scene: Scene, diagnosis: Diagnosis) -> Iterator[tuple[Change, ...]]:
    """List what may cure an overflow, the smallest change first; each rung covers every place that overflows.

    Args:
        scene: the step.
        diagnosis: its class is RANGE.

    Yields:
        Changes to be tried together.
    """
    ladders: dict[str, list[Change]] = {}
    lowest: int | None = None
    over, near = diagnosis.details.get("over", ()), diagnosis.details.get("near", ())
    places = [{"module": diagnosis.module, "place": diagnosis.place}, *over]
    for place in places:
        target, layer = _target(scene, place["module"], place["place"])
        if place["place"] == "residual stream" or target == "":
            if layer is not None:  # else beyond the layers, where the region reaches anyhow
                lowest = layer if lowest is None else min(layer, lowest)
            continue
        if target not in ladders or place["place"] != "attention scores":
            ladders[target] = _ladder(scene, target, place["place"])
    if ladders:
        # An island's output is cast back; where that has little room left, the stream must be wide as well.
        starts = [layer for layer in (_layer_of(scene, target) for target in ladders) if layer is not None]
        streams = [_layer_of(scene, place["module"]) for place in near if place["place"] == "residual stream"]
        if starts and any(layer is not None and layer >= min(starts) for layer in streams):
            lowest = min(starts) if lowest is None else min(lowest, *starts)
    region = () if lowest is None else (Change("region", _layer_name(scene, lowest)),)
    longest = max((len(ladder) for ladder in ladders.values()), default=1)
    for rung in range(longest):
        yield (*(ladder[min(rung, len(ladder) - 1)] for ladder in ladders.values()), *region)
    if ladders:
        # Outputs that leave the range too: they stay in float32, and so does the stream that they are added to.
        layers = [layer for layer in (_layer_of(scene, target) for target in ladders) if layer is not None]
        start = min([*layers, *([] if lowest is None else [lowest])], default=None)
        wide = tuple(Change("island", target, keep_output=True) for target in ladders if _is_module(target))
        logits = tuple(change for ladder in ladders.values() for change in ladder if change.kind == "logits_float32")
        yield (*wide, *logits, *(() if start is None else (Change("region", _layer_name(scene, start)),)))
    yield (Change("float32", ""),)


def kernel_rungs(diagnosis: Diagnosis) -> Iterator[tuple[Change, ...]]:
    """List which kernel to do without, the most likely one first.

    Args:
        diagnosis: its class is KERNEL.

    Yields:
        Changes to be tried together.
    """
    compiled = diagnosis.details.get("compiled", ())
    if compiled:
        yield tuple(Change("compile_off", name) for name in compiled)
    attention = diagnosis.module if diagnosis.module and "attn" in diagnosis.module else None
    if attention:
        yield (Change("attention_eager", attention),)
    yield (Change("attention_eager", ""),)
    yield (Change("plain_lora", ""),)
    yield (Change("loss_reference", ""),)
    yield (Change("attention_eager", ""), Change("plain_lora", ""), Change("loss_reference", ""))


def _first_accepted(
    scene: Scene,
    rungs: Iterator[tuple[Change, ...]],
    healthy: Sequence[Scene],
    kept: Sequence[Change],
    *,
    same_dtype: bool,
) -> Treatment:
    with without_compile(scene.model):
        reference: Rerun = reference_of(scene, same_dtype=same_dtype)
    tried: list[str] = []
    nearest: tuple[float, tuple[Change, ...]] = (NEAR_COSINE, ())
    for rung in rungs:
        changes = tuple(change for change in dict.fromkeys(rung) if change not in kept)
        if not changes:
            continue
        if any(change.kind == "float32" for change in changes) and nearest[1]:
            tried.append(f"Nothing short of float32 everywhere comes nearer than cosine {nearest[0]:.5f}.")
            return _change(nearest[1], tried)
        try:
            with contextlib.nullcontext() if same_dtype else without_compile(scene.model):
                verdict = verify(scene, changes, reference, healthy)
        except (ValueError, torch.OutOfMemoryError) as error:  # a model without these parts; a copy that does not fit
            tried.append(f"{' and '.join(map(str, changes))}: cannot be done here ({error}).")
            continue
        tried.append(verdict.sentence)
        if verdict.accepted:
            return _change((*changes, *_compile_off(scene, changes)), tried)
        if verdict.cosine is not None and verdict.cosine > nearest[0]:
            nearest = (verdict.cosine, changes)
    return Treatment("stop", "stopped: no change gives the step that the reference gives", evidence=tuple(tried))


def _compile_off(scene: Scene, changes: tuple[Change, ...]) -> tuple[Change, ...]:
    """Let compiled layers run eagerly whose inside has changed: that is how the change was verified."""
    compiled = set(compiled_layers(scene.model))
    if any(change.module == "" and change.kind != "logits_float32" for change in changes):
        return tuple(Change("compile_off", name) for name in sorted(compiled))
    layers = {_layer_of(scene, change.module) for change in changes if change.kind != "compile_off"}
    if any(change.kind == "region" for change in changes):
        lowest = min(layer for layer in layers if layer is not None)
        layers = {_layer_of(scene, name) for name in compiled if (_layer_of(scene, name) or 0) >= lowest}
    names = [_layer_name(scene, layer) for layer in sorted(layer for layer in layers if layer is not None)]
    return tuple(Change("compile_off", name) for name in names if name in compiled)


def _change(changes: tuple[Change, ...], tried: list[str]) -> Treatment:
    words = " and ".join(str(change) for change in changes)
    return Treatment("changes", words, changes=changes, verified=True, evidence=tuple(tried))


def _without_rows(scene: Scene, diagnosis: Diagnosis, kept: Sequence[Change]) -> Treatment:
    tried: tuple[str, ...] = ()
    if diagnosis.place == "attention mask":
        # A row that a mask has emptied has no float32 replay either; plain causal attention has no such row.
        swap = (Change("attention_fused", ""),)
        if swap[0] not in kept:
            if _finite_under(scene, swap):
                return Treatment("changes", f"{swap[0]}: no row is empty there", changes=swap, verified=True)
            tried = (f"{swap[0]}: not finite.",)
    rows = set(diagnosis.samples)
    rest = [sample for sample in scene.samples if not rows & set(sample.row_ids)]
    always = diagnosis.fault == "DATA"
    if not rest:
        words = f"left out the whole step: {shown(diagnosis.samples)}"
        return Treatment("skip", words, rows=diagnosis.samples, always=always, verified=True, evidence=tried)
    finite = scene.rerun(samples=rest).finite
    words = f"left out {shown(diagnosis.samples)}"
    kind: Kind = "skip" if finite else "stop"
    return Treatment(kind, words, rows=diagnosis.samples, always=always, verified=finite, evidence=tried)


def _finite_under(scene: Scene, changes: Sequence[Change]) -> bool:
    try:
        with applied(scene.model, scene.forward, changes):
            return scene.rerun().finite
    except ValueError:  # a model that has not these parts
        return False


def _ladder(scene: Scene, target: str, place: str | None) -> list[Change]:
    if place == "logits":
        return [Change("logits_float32", "")]
    if place == "attention scores":
        return [Change("attention_fused", target), Change("scores", target), Change("island", target)]
    narrow = [Change("island", target, dtype="bfloat16")] if scene.device != "cpu" else []
    return [*narrow, Change("island", target)]


def _target(scene: Scene, module: str | None, place: str | None) -> tuple[str, int | None]:
    """Return the part of a decoder layer that a module belongs to, and the layer's number."""
    layer = _layer_of(scene, module or "")
    if layer is None:
        return (module or "", None)
    prefix = _layer_name(scene, layer)
    inside = (module or "")[len(prefix) :].strip(".")
    return (f"{prefix}.{inside.split('.')[0]}" if inside else "", layer)


def _layer_of(scene: Scene, module: str) -> int | None:
    prefix = layers_prefix(scene)
    rest = module[len(prefix) + 1 :] if module.startswith(f"{prefix}.") else ""
    number = rest.split(".")[0]
    return int(number) if number.isdigit() else None


def layers_prefix(scene: Scene) -> str:
    """Return the name of the list of decoder layers, as "model.layers"."""
    base = base_of(scene.model)
    wanted = base.get_decoder().layers
    return next(name for name, module in base.named_modules() if module is wanted)


def _layer_name(scene: Scene, layer: int | None) -> str:
    return f"{layers_prefix(scene)}.{layer or 0}"


def _is_module(target: str) -> bool:
    return bool(target) and target != "lm_head"
