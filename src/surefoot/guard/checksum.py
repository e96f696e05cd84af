"""Frozen weights never change: an integer sum of their raw words names the tensor that did, and its file mends it."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from surefoot.guard.names import leaf_name
from surefoot.model.quantized import is_quantized, named_states, restore_quantized, state_tensors, weight_of
from surefoot.model.sharded import sharded
from surefoot.model.source import safetensors_header, weight_files

if TYPE_CHECKING:
    from torch import nn

# Widest first: eight bytes at a time need neither a cast nor a copy.
_WORDS = (torch.int64, torch.int32, torch.int16, torch.uint8)
# Narrower words are cast to int64 for their sum, on a CPU by a copy: so many of them at a time.
_CHUNK_WORDS = 2**22


class WeightChecksums:
    """Sums of a model's frozen parameters, taken once and compared later; a packed weight's scales are among them.

    A flipped bit changes its word by a power of two, so any single one changes the sum (modulo 2^64). The sums are
    taken on the device, one pass over each tensor, and read together.

    Args:
        model: the model, wrapped by PEFT or not.
    """

    def __init__(self, model: nn.Module) -> None:
        self._known = _sums(model)

    def changed(self, model: nn.Module) -> list[str]:
        """Name the frozen tensors whose bits are not what they were.

        A tensor that is held in another dtype or shape than before (an island was made of its module), or that was
        trained before, was changed on purpose: it is taken in as it is now.

        Args:
            model: the model of the constructor.

        Returns:
            Hugging Face names, in the model's order.
        """
        now = _sums(model)
        changed = []
        for name, (form, total) in now.items():
            known = self._known.get(name)
            if known is None or known[0] != form:
                self._known[name] = (form, total)
            elif known[1] != total:
                changed.append(name)
        return [leaf_name(name) for name in changed]

    def renew(self, model: nn.Module) -> None:
        """Take the present weights as right, after they were changed on purpose.

        Args:
            model: the model of the constructor.
        """
        self._known = _sums(model)

    def reload(self, model: nn.Module, name: str, model_folder: Path | str) -> bool:
        """Read a changed tensor from its file again, and keep that only if it is bit for bit what it was at first.

        The file may hold something else than the model did: an adapter was merged, or rows were replaced.

        Args:
            model: the model of the constructor.
            name: as `changed` gave it.
            model_folder: where the model was loaded from.

        Returns:
            True when the tensor is as it was; otherwise it is left as it is.
        """
        module, parameter = _place(model, weight_of(name))
        if parameter is None:
            return False
        written = [parameter.data, *(state_tensors(module).values() if is_quantized(module) else ())]
        damaged = [tensor.clone() for tensor in written]
        if reload_tensor(model, name, model_folder):
            _keep_pieces(model, parameter)
            if name not in self.changed(model):
                return True
        for tensor, before in zip(written, damaged, strict=True):
            tensor.copy_(before)
        _keep_pieces(model, parameter)
        return False


def reload_tensor(model: nn.Module, name: str, model_folder: Path | str) -> bool:
    """Read one parameter from its model's safetensors files again, in the dtype that it is held in.

    A packed weight is quantised again, scales and all, or read with them where the files hold it packed.

    Args:
        model: the model; the parameter is changed in place.
        name: Hugging Face name of the parameter, or of a packed weight's scales.
        model_folder: where the model was loaded from.

    Returns:
        False, with nothing changed, when no file holds a tensor of that name and shape: the model was converted
        while it was loaded, its vocabulary grew, or it came from elsewhere.

    Raises:
        UserError: a weight file is cut short.
    """
    name = weight_of(name)
    module, parameter = _place(model, name)
    if parameter is not None and is_quantized(module):
        return restore_quantized(module, lambda suffix: _stored(model_folder, name, suffix))
    if parameter is None or not parameter.is_floating_point():
        return False
    stored = read_tensor(model_folder, name)
    if stored is None or stored[1].shape != parameter.shape or not stored[1].is_floating_point():
        return False
    with torch.no_grad():
        parameter.data.copy_(stored[1].to(parameter.dtype))
    return True


def read_tensor(model_folder: Path | str, name: str) -> tuple[Path, torch.Tensor] | None:
    """Find a tensor in a model folder's safetensors files.

    Args:
        model_folder: the folder; anything else (a hub id) holds nothing.
        name: Hugging Face name. A file may know it with a longer or shorter prefix, if that is unambiguous.

    Returns:
        The file and the tensor as it is stored, on the CPU; None when it is not found.

    Raises:
        UserError: a weight file is cut short.
    """
    from safetensors import safe_open

    names = {key: file for file in weight_files(str(model_folder)) for key in safetensors_header(file)}
    key = name
    if key not in names:
        alike = [known for known in names if known.endswith(f".{name}") or name.endswith(f".{known}")]
        if len(alike) != 1:
            return None
        (key,) = alike
    with safe_open(names[key], framework="pt", device="cpu") as handle:
        return names[key], handle.get_tensor(key)


def word_sum(tensor: torch.Tensor) -> torch.Tensor:
    """Sum a tensor's raw memory as integers, modulo 2^64.

    Args:
        tensor: of any dtype.

    Returns:
        int64 scalar on the tensor's device.
    """
    flat = _flat(tensor)
    size, offset = (count * flat.element_size() for count in (flat.numel(), int(flat.storage_offset())))
    words = next(word for word in _WORDS if (size | offset) % word.itemsize == 0)
    raw = flat.view(words)
    if words == torch.int64:
        return raw.sum()
    return torch.stack([chunk.sum(dtype=torch.int64) for chunk in raw.split(_CHUNK_WORDS)]).sum()


def _flat(tensor: torch.Tensor) -> torch.Tensor:
    if tensor.is_contiguous():
        return tensor.reshape(-1)
    dense = sorted(range(tensor.ndim), key=lambda d: -tensor.stride(d))
    # A transposed weight lies in memory without gaps; only its order is another, and the sum does not mind.
    return tensor.permute(dense).contiguous().reshape(-1)


def _keep_pieces(model: nn.Module, parameter: nn.Parameter) -> None:
    """Put what was written into a gathered weight into this rank's piece of it."""
    held = sharded(model)
    if held is not None:
        held.write_back(next(name for name, p in model.named_parameters() if p is parameter))


def _frozen(model: nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    held = sharded(model)
    for name, parameter in model.named_parameters():
        # Of a sharded model each rank looks at its own pieces, whether they are gathered now or not.
        data = parameter.data if held is None or name not in held.pieces else held.pieces[name]
        # A tensor subclass (quantised, sharded) has no plain memory of its own; a meta tensor has none at all.
        if not parameter.requires_grad and type(data) is torch.Tensor and data.numel() and not data.is_meta:
            yield name, data
    yield from named_states(model)


@torch.no_grad()
def _sums(model: nn.Module) -> dict[str, tuple[tuple[torch.dtype, tuple[int, ...]], int]]:
    frozen = list(_frozen(model))
    by_device: dict[torch.device, list[int]] = {}
    for place, (_, tensor) in enumerate(frozen):
        by_device.setdefault(tensor.device, []).append(place)
    totals = [0] * len(frozen)
    for places in by_device.values():
        read = torch.stack([word_sum(frozen[place][1]) for place in places]).tolist()  # one read of the device
        for place, total in zip(places, read, strict=True):
            totals[place] = total
    return {
        name: ((tensor.dtype, tuple(tensor.shape)), total) for (name, tensor), total in zip(frozen, totals, strict=True)
    }


def _place(model: nn.Module, name: str) -> tuple[nn.Module, nn.Parameter | None]:
    """Return the module that holds a parameter, and the parameter; None for a name that there is not."""
    named = model.named_parameters(remove_duplicate=False)
    # A trained copy bears the name of the frozen weight that it stands for.
    found = next(((k, p) for k, p in named if leaf_name(k) == name and ".modules_to_save." not in k), None)
    return (model, None) if found is None else (model.get_submodule(found[0].rpartition(".")[0]), found[1])


def _stored(model_folder: Path | str, name: str, suffix: str) -> torch.Tensor | None:
    """Read a packed weight's tensor under its name in files; 8-bit scales lie beside the weight, not under it."""
    key = f"{name.rpartition('.')[0]}{suffix}" if suffix == ".SCB" else f"{name}{suffix}"
    stored = read_tensor(model_folder, key)
    return None if stored is None else stored[1]
