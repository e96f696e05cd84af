"""Before step 1: what the model and the batch hold, before anything is computed with them."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from surefoot.data.messages import IGNORE_INDEX, Sample
from surefoot.guard.checksum import read_tensor
from surefoot.guard.diagnosis import Diagnosis
from surefoot.guard.names import leaf_name, owner_name
from surefoot.guard.preflight_base import Finding, compute_dtype
from surefoot.guard.preflight_vocabulary import head_matrix, input_matrix
from surefoot.guard.scene import Scene
from surefoot.model.forward import base_of
from surefoot.model.quantized import holds_numbers, named_states, weight_of
from surefoot.model.sharded import sharded

SHOWN = 8
# AdamW moves a weight by about the learning rate at its first steps. When fewer weights than this could move at all, a
# run in 16 bits learns with a part of the model only.
MOVED_SHARE = 0.9
SAMPLED_WEIGHTS = 65_536
_CHUNK_VALUES = 2**22


@torch.no_grad()
def scan_weights(scene: Scene) -> Finding | None:
    """Look for values that are no numbers among all weights and buffers: one pass over each, one read of the device.

    Args:
        scene: the first step.

    Returns:
        WEIGHTS with the name of the first such tensor; None when all is finite.
    """
    bad = [(leaf_name(name), name, tensor) for name, tensor, is_bad in _judged(scene.model) if is_bad]
    if not bad:
        return None
    evidence = [_describe(name, tensor) for name, _, tensor in bad[:SHOWN]]
    if len(bad) > SHOWN:
        evidence.append(f"{len(bad) - SHOWN} more tensors are not finite.")
    first, full_name, _ = bad[0]
    evidence.append(_where_from(scene, first))
    owners = {input_matrix(scene.model).data_ptr(), head_matrix(scene.model).data_ptr()}
    diagnosis = Diagnosis(
        step=0,
        fault="WEIGHTS",
        place="embedding" if bad[0][2].data_ptr() in owners else None,
        module=owner_name(full_name) or None,
        evidence=tuple(piece for piece in evidence if piece),
        details={"leaf": first, "leaves": [name for name, _, _ in bad]},
    )
    return Finding(diagnosis, f"load whole weights: {first} is damaged in the checkpoint or was in memory", True)


def check_rows(scene: Scene) -> Finding | None:
    """Look for token ids without a row in the model, and for a step without a trained token.

    Args:
        scene: the first step.

    Returns:
        DATA with the row ids; None when the step can be computed.
    """
    rows, classes = input_matrix(scene.model).shape[0], head_matrix(scene.model).shape[0]
    evidence, named = [], []
    for sample in scene.samples:
        ids, labels = np.asarray(sample.input_ids), np.asarray(sample.labels)
        outside = np.flatnonzero((ids < 0) | (ids >= rows))
        unknown = np.flatnonzero((labels != IGNORE_INDEX) & ((labels < 0) | (labels >= classes)))
        if outside.size:
            row = _row_of(sample, int(outside[0]))
            named.append(row)
            evidence.append(
                f"Row {row} has token id {int(ids[outside[0]])}, but the model has {rows} embedding rows, "
                f"0 to {rows - 1}."
            )
        elif unknown.size:
            row = _row_of(sample, int(unknown[0]))
            named.append(row)
            evidence.append(
                f"Row {row} has label {int(labels[unknown[0]])}, but the head tells {classes} tokens apart, "
                f"0 to {classes - 1}."
            )
    if evidence:
        diagnosis = Diagnosis(
            0, "DATA", place="embedding", samples=tuple(named), evidence=_first(evidence), details={"rows": rows}
        )
        return Finding(diagnosis, "use the model's own tokenizer, or set `resize_vocab: true`, or drop these", True)
    if scene.trained_tokens:
        return None
    everyone = tuple(row for sample in scene.samples for row in sample.row_ids)
    tokens = sum(len(sample.input_ids) for sample in scene.samples)
    sentence = f"None of the step's {tokens} tokens carries a label: its loss is a mean over nothing."
    diagnosis = Diagnosis(0, "DATA", place="loss", samples=everyone, evidence=(sentence,))
    return Finding(diagnosis, "check these rows: is the answer empty, or cut off by cutoff_len?", True)


@torch.no_grad()
def check_trainables(scene: Scene, learning_rate: float | None) -> Finding | None:
    """Look for trained parameters that are held in 16 bits.

    Args:
        scene: the first step.
        learning_rate: the run's highest; None when it is not known.

    Returns:
        OPTIMIZER for float16, STAGNATION for bfloat16 whose weights could not move; None when all are wider.
    """
    held = sharded(scene.model)
    if held is not None and held.trains:
        return None  # what is gathered for a pass may be narrower than the pieces that are trained: those are float32
    short = {n: p for n, p in scene.trained_parameters().items() if p.dtype in (torch.float16, torch.bfloat16)}
    if not short:
        return None
    kinds = sorted({str(p.dtype).removeprefix("torch.") for p in short.values()})
    values, total = sum(p.numel() for p in short.values()), sum(p.numel() for p in scene.trained_parameters().values())
    first = next(iter(short))
    evidence = [f"{len(short)} trained tensors are held in {' and '.join(kinds)} ({values} of {total} values)."]
    details: dict[str, Any] = {"tensors": len(short), "values": values, "dtypes": kinds}
    share = None if learning_rate is None else movable_share(short.values(), learning_rate)
    if share is not None:
        details |= {"movable_share": share, "learning_rate": learning_rate}
        evidence.append(
            f"At learning rate {learning_rate:g} a step of AdamW could move {share:.1%} of them: for the others it is "
            "less than half the distance to the next number."
        )
    if "float16" in kinds:
        evidence.append("AdamW's epsilon of 1e-8 is 0 in float16, and float16 gradients cannot be unscaled safely.")
    stagnates = kinds == ["bfloat16"] and (share is None or share < MOVED_SHARE)
    diagnosis = Diagnosis(
        0,
        "STAGNATION" if stagnates else "OPTIMIZER",
        place="optimizer",
        module=owner_name(first) or None,
        phase="optimizer",
        evidence=tuple(evidence),
        details=details,
    )
    return Finding(diagnosis, "hold the trained parameters in float32", True, cure=lambda: hold_in_float32(scene))


def hold_in_float32(scene: Scene) -> None:
    """Cast 16-bit trained parameters to float32 in place; matrix products stay in the dtype that they had.

    The Parameter objects stay the same, since the optimizer knows them.

    Args:
        scene: its model and its forward are changed.
    """
    dtype = compute_dtype(scene)
    beside_adapters = False
    for name, parameter in scene.trained_parameters().items():
        if parameter.dtype in (torch.float16, torch.bfloat16):
            parameter.grad = None
            parameter.data = parameter.data.float()
            beside_adapters |= ".lora_" not in name
    if beside_adapters and scene.forward.autocast is None and dtype.itemsize == 2:
        # Weights of the model itself would meet activations of another dtype; a LoRA layer casts on its own.
        scene.forward.autocast = dtype


def movable_share(parameters: Any, step: float) -> float:
    """Return the share of values that a step of this size moves: at least half the distance to the next number.

    Args:
        parameters: 16-bit tensors; a sample of each is looked at.
        step: size of the update.

    Returns:
        From 0 to 1.
    """
    moved, values = [], 0
    for parameter in parameters:
        flat = parameter.detach().reshape(-1)
        sampled = flat[:: max(1, flat.numel() // SAMPLED_WEIGHTS) | 1]
        facts = torch.finfo(sampled.dtype)
        exponent = torch.frexp(sampled.float().abs().clamp_min(facts.tiny))[1]  # value = mantissa · 2^exponent, >= 1/2
        spacing = torch.ldexp(torch.full_like(exponent, facts.eps, dtype=torch.float32), exponent - 1)
        moved.append((step >= spacing / 2).sum())
        values += sampled.numel()
    device = moved[0].device
    return float(torch.stack([count.to(device) for count in moved]).sum()) / max(1, values)


def _judged(model: Any) -> Iterator[tuple[str, torch.Tensor, bool]]:
    """Yield every floating tensor of a model with whether it holds a value that is no number."""
    named = [(name, p.data, False) for name, p in model.named_parameters()]
    named += [(name, buffer, True) for name, buffer in model.named_buffers()]
    named += [(name, state, False) for name, state in named_states(model)]
    looked = [(name, t, is_buffer) for name, t, is_buffer in named if _can_look(t)]
    by_device: dict[torch.device, list[torch.Tensor]] = {}
    for _, tensor, _ in looked:
        real = torch.view_as_real(tensor) if tensor.is_complex() else tensor
        # A cast of one byte to two is small and exact; aminmax does not know float8.
        low, high = torch.aminmax(real.to(torch.float16) if real.element_size() == 1 else real)
        by_device.setdefault(tensor.device, []).append(torch.stack([low, high]).double())
    read = {device: iter(torch.stack(pairs).tolist()) for device, pairs in by_device.items()}
    for name, tensor, is_buffer in looked:
        low, high = next(read[tensor.device])
        # A buffer may be a mask: minus infinity is what it hides with.
        fine = math.isfinite(high) and (math.isfinite(low) or (is_buffer and low == -math.inf))
        fine = fine or (is_buffer and low == high == -math.inf)
        yield name, tensor, not fine


def _can_look(tensor: torch.Tensor) -> bool:
    return holds_numbers(tensor) and tensor.numel() > 0 and not tensor.is_meta


def _describe(name: str, tensor: torch.Tensor) -> str:
    count, first = 0, None
    flat = tensor.detach().reshape(-1)
    for start in range(0, flat.numel(), _CHUNK_VALUES):
        chunk = flat[start : start + _CHUNK_VALUES]
        places = (chunk.to(torch.float16) if chunk.element_size() == 1 else chunk).isfinite().logical_not().nonzero()
        count += len(places)
        first = start + int(places[0, 0]) if first is None and len(places) else first
    assert first is not None
    place = [int(i) for i in np.unravel_index(first, tuple(tensor.shape))] if tensor.ndim else []
    value = flat[first].item()
    return f"{name} holds {count} of {flat.numel()} values that are not finite, the first ({value}) at {place}."


def _where_from(scene: Scene, name: str) -> str:
    folder = str(getattr(base_of(scene.model).config, "_name_or_path", "") or "")
    if not folder or not Path(folder).is_dir():
        return ""
    found = read_tensor(folder, weight_of(name)) if any(Path(folder).glob("*.safetensors")) else None
    if found is None:
        return ""
    file, stored = found
    finite = bool((stored if stored.element_size() > 1 else stored.to(torch.float16)).isfinite().all())
    verdict = "is finite there: it was damaged after it was read" if finite else "holds them there too"
    return f"It comes from {file.name} and {verdict}."


def _row_of(sample: Sample, position: int) -> str:
    segment = int(np.searchsorted(np.cumsum(sample.segments), position, side="right"))
    return sample.row_ids[min(segment, len(sample.row_ids) - 1)]


def _first(evidence: Sequence[str]) -> tuple[str, ...]:
    more = len(evidence) - SHOWN
    return (*evidence[:SHOWN], *([f"{more} more rows are alike."] if more > 0 else []))
