"""Tensors that no operation of a step has made: weights and buffers, found again by their memory."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch.multiprocessing.reductions import StorageWeakRef

from surefoot.guard.names import leaf_name, owner_name
from surefoot.model.forward import base_of, trained_head
from surefoot.model.quantized import named_states


@dataclass(frozen=True)
class Leaf:
    """A weight or buffer.

    Attributes:
        name: as a person finds it.
        owner: Hugging Face name of the module that holds it.
        buffer: True for a buffer.
        start: its first byte in its storage.
        end: the byte after its last.
    """

    name: str
    owner: str
    buffer: bool
    start: int
    end: int


class Leaves:
    """A model's weights and buffers by storage, so that views of them are known too."""

    def __init__(self, model: Any) -> None:
        """Register a model's tensors.

        Args:
            model: wrapped by PEFT or not.
        """
        self._by_storage: dict[int, list[Leaf]] = {}
        for name, tensor in model.named_parameters():
            self._add(name, tensor, buffer=False)
        for name, tensor in model.named_buffers():
            self._add(name, tensor, buffer=True)
        for name, tensor in named_states(model):
            self._add(name, tensor, buffer=False)

    def find(self, tensor: torch.Tensor) -> Leaf | None:
        """Find the weight or buffer that a tensor is, or is a view of.

        Args:
            tensor: any tensor.

        Returns:
            The leaf; None for a tensor that an operation made.
        """
        known = self._by_storage.get(tensor.untyped_storage()._cdata)
        if known is None:
            return None
        start = tensor.storage_offset() * tensor.element_size()
        return next((leaf for leaf in known if leaf.start <= start < leaf.end), None)

    def _add(self, name: str, tensor: torch.Tensor, *, buffer: bool) -> None:
        if tensor.layout is not torch.strided or tensor.device.type == "meta":
            return
        start = int(tensor.storage_offset()) * tensor.element_size()
        leaf = Leaf(leaf_name(name), owner_name(name), buffer, start, start + tensor.numel() * tensor.element_size())
        self._by_storage.setdefault(tensor.untyped_storage()._cdata, []).append(leaf)


class HeadWeights:
    """The head's weight and its casts: the chunked loss multiplies by them outside of the head's module."""

    def __init__(self, model: Any) -> None:
        """Register a model's head.

        Args:
            model: wrapped by PEFT or not.
        """
        self._storages: dict[int, StorageWeakRef] = {}
        try:
            weight = trained_head(base_of(model)).weight
        except (AttributeError, NotImplementedError):  # a model without a head, or with one of its own making
            return
        self._keep(weight)

    def holds(self, tensor: torch.Tensor) -> bool:
        """Tell whether a tensor is the head's weight, a view or a cast of it."""
        entry = self._storages.get(tensor.untyped_storage()._cdata)
        return entry is not None and not entry.expired()

    def follow(self, source: torch.Tensor, copy: torch.Tensor) -> None:
        """Take note that a tensor was cast or copied."""
        if self.holds(source):
            self._keep(copy)

    def _keep(self, tensor: torch.Tensor) -> None:
        storage = tensor.untyped_storage()
        self._storages[storage._cdata] = StorageWeakRef(storage)
