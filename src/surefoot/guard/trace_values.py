"""What a trace knows of tensors: their range, where a bad value in them comes from, whose tokens it touches."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.multiprocessing.reductions import StorageWeakRef

from surefoot.data.batch import PackedBatch
from surefoot.guard.diagnosis import Phase, Place
from surefoot.model.quantized import holds_numbers

# Entries of dead storages are swept out when a ledger has grown by this many.
_SWEEP = 20_000


@dataclass
class Fault:
    """Where bad values began, while the trace still runs.

    Attributes:
        order: number of the fault, in order of time.
        fields: of the `Origin` to be.
        in_loss: they reached a pass's loss.
        in_gradients: they reached a trained tensor's gradient.
        victim: the first autograd node whose result they spoilt in the backward pass.
    """

    order: int
    fields: dict[str, Any]
    in_loss: bool = False
    in_gradients: bool = False
    victim: str | None = None


@dataclass(frozen=True)
class Masked:
    """Infinities, or finite values far out of range, that a mask put there on purpose.

    Attributes:
        fill: the lowest value.
    """

    fill: float


@dataclass(frozen=True)
class Allocated:
    """Memory that was reserved and that nothing seen has written: what it holds is undefined.

    Attributes:
        module: the module that reserved it.
        node: the autograd node that reserved it.
        custom: name of the custom kernel's node; None when no custom kernel ran.
        phase: of the pass.
        place: of the operation.
    """

    module: str | None
    node: str | None
    custom: str | None
    phase: Phase
    place: Place | None


Mark = Fault | Masked | Allocated


@dataclass
class Ledger:
    """Marks on storages, and the module that last made each gradient. Storages may die; their entries then go."""

    _marks: dict[int, tuple[StorageWeakRef, Mark]] = field(default_factory=dict)
    _makers: dict[int, tuple[StorageWeakRef, str | None]] = field(default_factory=dict)
    _sweep_at: int = _SWEEP

    def mark(self, tensor: torch.Tensor) -> Mark | None:
        """Return the mark on a tensor's storage."""
        entry = self._marks.get(tensor.untyped_storage()._cdata)
        return None if entry is None or entry[0].expired() else entry[1]

    def set_mark(self, tensor: torch.Tensor, mark: Mark | None) -> None:
        """Mark a tensor's storage, or take its mark away when the tensor covers it."""
        storage = tensor.untyped_storage()
        if mark is not None:
            self._marks[storage._cdata] = (StorageWeakRef(storage), mark)
            self._sweep()
        elif storage._cdata in self._marks and tensor.numel() * tensor.element_size() >= storage.nbytes():
            del self._marks[storage._cdata]

    def set_maker(self, tensor: torch.Tensor, module: str | None) -> None:
        """Note the module whose backward made a gradient."""
        storage = tensor.untyped_storage()
        self._makers[storage._cdata] = (StorageWeakRef(storage), module)
        self._sweep()

    def knows(self, tensor: torch.Tensor) -> bool:
        """Tell whether a gradient was made by an operation that was seen."""
        entry = self._makers.get(tensor.untyped_storage()._cdata)
        return entry is not None and not entry[0].expired()

    def maker(self, tensor: torch.Tensor) -> str | None:
        """Return the module whose backward made a gradient."""
        return self._makers[tensor.untyped_storage()._cdata][1] if self.knows(tensor) else None

    def _sweep(self) -> None:
        if len(self._marks) + len(self._makers) < self._sweep_at:
            return
        self._marks = {key: entry for key, entry in self._marks.items() if not entry[0].expired()}
        self._makers = {key: entry for key, entry in self._makers.items() if not entry[0].expired()}
        self._sweep_at = len(self._marks) + len(self._makers) + _SWEEP


def measurable(value: Any) -> bool:
    """Tell whether a value is a tensor whose range can be taken."""
    return (
        isinstance(value, torch.Tensor)
        and holds_numbers(value)
        and not value.is_complex()
        and value.layout is torch.strided
        and value.device.type != "meta"
        and value.numel() > 0
    )


def extremes(tensor: torch.Tensor) -> tuple[float, float]:
    """Read a tensor's smallest and largest value; both are NaN when it holds one.

    The read waits for the device. That costs some tens of microseconds an operation, in a replay that runs once per
    incident, and buys that evidence is taken while the tensors still hold it.
    """
    flat = tensor.detach()
    if flat.element_size() == 1:
        flat = flat.float()  # no order is defined on 8-bit floats
    low, high = torch.aminmax(flat)
    return (low.item(), high.item()) if low.device.type == "cpu" else tuple(torch.stack((low, high)).tolist())


def is_bad(low: float, high: float) -> bool:
    """Tell whether a range speaks of NaN or an infinity."""
    return not (math.isfinite(low) and math.isfinite(high))


def say(tensor: torch.Tensor, low: float, high: float) -> str:
    """Describe a tensor in a phrase: dtype, shape, range, and how many values are not finite."""
    head = f"{str(tensor.dtype).removeprefix('torch.')} {list(tensor.shape)}"
    if not is_bad(low, high):
        return f"{head} from {low:.6g} to {high:.6g}"
    values = tensor.detach().float() if tensor.element_size() == 1 else tensor.detach()
    counts = {
        "NaN": int(values.isnan().sum()), "+inf": int(values.isposinf().sum()), "-inf": int(values.isneginf().sum())
    }  # fmt: skip
    bad = " and ".join(f"{count} {name}" for name, count in counts.items() if count)
    rest = values.numel() - sum(counts.values())
    if not rest:
        return f"{head} with {bad} of {values.numel()} values"
    finite = values.isfinite()
    low = values.where(finite, torch.inf).amin().item()
    high = values.where(finite, -torch.inf).amax().item()
    return f"{head} with {bad} of {values.numel()} values, the rest from {low:.6g} to {high:.6g}"


def bad_rows(tensor: torch.Tensor, batch: PackedBatch, chunk_start: int | None = None) -> tuple[str, ...]:
    """Name the rows of a pass whose tokens are bad in a tensor.

    Args:
        tensor: any of the pass's tensors.
        batch: the pass.
        chunk_start: first trained token of a chunk of logits; None for any other tensor.

    Returns:
        Row ids, in packed order; all of the pass when the tensor has no dimension that tokens can be read from.
    """
    starts = batch.position_ids_1T[0] == 0
    if int(starts.sum()) != len(batch.row_ids):
        return batch.row_ids
    row_of_T = starts.long().cumsum(0) - 1
    found = _tokens(tensor, batch, chunk_start)
    if found is None:
        return batch.row_ids
    dims, tokens = found
    values = tensor.detach().float() if tensor.element_size() == 1 else tensor.detach()
    bad = ~values.isfinite()
    others = [d for d in range(bad.ndim) if d not in dims]
    flags = bad.any(dim=others) if others else bad
    rows = row_of_T[tokens[flags.reshape(tokens.shape)]].unique().tolist()
    return tuple(batch.row_ids[row] for row in rows) or batch.row_ids


def _tokens(tensor: torch.Tensor, batch: PackedBatch, chunk: int | None) -> tuple[list[int], torch.Tensor] | None:
    """Find a tensor's token dimensions, and the packed position of each place along them."""
    shape, total = list(tensor.shape), batch.tokens
    trained = batch.trained_K
    positions_T = torch.arange(total, device=tensor.device)
    if len(shape) == 4 and shape[0] == 1:
        for dim in (2, 1):  # [1, heads, tokens, width] in attention, [1, tokens, heads, width] before it
            if shape[dim] == total:
                return [dim], positions_T
    if len(shape) == 3 and shape[0] == total and shape[1] != shape[2]:
        return [0], positions_T  # [tokens, heads, width] before it is gathered
    for bucket_NL in batch.layout.buckets:
        rows, longest = bucket_NL.shape
        if len(shape) == 4 and shape[0] == rows and longest in (shape[1], shape[2]):
            return [0, 2 if shape[2] == longest else 1], bucket_NL
        if len(shape) == 3 and rows * longest > 1 and shape[0] % rows == 0 and shape[0] > 1 and longest == shape[1]:
            heads = shape[0] // rows  # a batched product lays rows and heads end to end
            return [0, 1], bucket_NL.repeat_interleave(heads, dim=0)
        if len(shape) == 2 and len(batch.layout.buckets) == 1 and shape[0] == rows * longest != total:
            return [0], bucket_NL.flatten()
    for dim in (1, 0) if len(shape) == 3 and shape[0] == 1 else range(len(shape)):
        if shape[dim] == total:
            return [dim], positions_T
    if chunk is not None and len(shape) == 2:
        return [0], trained[chunk : chunk + shape[0]]
    return ([0], trained) if shape and shape[0] == len(trained) else None


def only_empty_rows(args: Sequence[Any], result: torch.Tensor) -> bool:
    """Tell whether every NaN of a softmax stands in a row that held nothing but -inf.

    Args:
        args: of the call: scores and dimension.
        result: what it gave.

    Returns:
        True when nothing else was wrong.
    """
    scores, dim = args[0], args[1]
    empty = (scores.detach() == -math.inf).all(dim=dim, keepdim=True)
    return bool((~result.detach().isnan() | empty).all())
