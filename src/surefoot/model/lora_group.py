"""Which LoRA linears are computed together in compiled layers, and where their weights lie for it.

The frozen weights of queries, keys and values, which read the same input, are moved into one piece of memory, of which
each linear keeps its rows: one product forward and one backward instead of three. The linears keep their place, names
and values; that they are given the same input is looked at while a layer is traced. Gate and up read one input too,
but their gradients would first have to be written side by side, which costs more than it saves (H200, 16,384 tokens x
14,336: 1.1 ms a layer for the kernel that does it, 0.6 without; measured).
"""

from __future__ import annotations

from typing import Any

import torch

from surefoot.model import fp8
from surefoot.model.lora import FusedLoraLinear
from surefoot.model.lora_op import lora_linear

TOGETHER = ("q_proj", "k_proj", "v_proj")  # names that transformers gives them, side by side in one module


class LoraGroup:
    """LoRA linears with one input.

    Attributes:
        members: in the order of their rows.
        weight_OI: their frozen weights.
        narrow: the same in 8-bit floats, where products are taken in them.
        active: False when a member's weight is of another dtype by now, as for the guard, or when something stands
            in for a member's forward, which may give it another input than the others.
    """

    members: list[FusedLoraLinear]
    weight_OI: torch.Tensor
    narrow: fp8.Fp8Weight | None
    active: bool

    def __init__(self, members: list[FusedLoraLinear], *, narrow: bool = False) -> None:
        """Move the members' weights together, if they are more than one.

        Args:
            members: with frozen weights of one dtype, device and width.
            narrow: multiply in 8-bit floats.
        """
        self.members = members
        self._in_8_bits = narrow
        self._input: torch.Tensor | None = None
        self._ready: list[tuple[FusedLoraLinear, torch.Tensor]] = []
        self.active = True
        self._gather()

    def _gather(self) -> None:
        weights = _weights_of(self.members)
        self.weight_OI = weights[0].data if len(weights) == 1 else torch.cat([weight.data for weight in weights])
        self._outputs = [weight.shape[0] for weight in weights]
        if len(weights) > 1:
            for weight, rows in zip(weights, self.weight_OI.split(self._outputs), strict=True):
                weight.data = rows
        self._narrow()
        self._addresses = [weight.data_ptr() for weight in weights]

    def _narrow(self) -> None:
        self.narrow = fp8.hold(self.weight_OI) if self._in_8_bits else None
        self._versions = [weight._version for weight in _weights_of(self.members)]

    def look(self) -> None:
        """See whether the members still are what was grouped; before each call of a layer.

        Weights that the guard held in another dtype lie elsewhere afterwards: they are moved together again, or both
        pieces of memory would stay.
        """
        self._input, self._ready = None, []  # of a layer that left a member out
        plain = all(type(member) is FusedLoraLinear and "forward" not in vars(member) for member in self.members)
        moved = [weight.data_ptr() for weight in _weights_of(self.members)] != self._addresses
        if moved and plain and len({_kind(member) for member in self.members}) == 1:
            self._gather()
            moved = False
        if self.narrow is not None and [weight._version for weight in _weights_of(self.members)] != self._versions:
            self._narrow()  # a weight was read anew, as when the guard heals it
        self.active = plain and not moved

    def fits(self, compute: torch.dtype) -> bool:
        """Say whether all members are plain now and of one dtype with the products."""
        return self.active and self.weight_OI.dtype == compute and all(member.is_plain() for member in self.members)

    def output_of(self, member: FusedLoraLinear, x: torch.Tensor, compute: torch.dtype) -> torch.Tensor | None:
        """Return a member's output, and compute the others' beside it, or take it from there.

        Args:
            member: of this group.
            x: inputs, [..., inputs]; the members that follow are expected to be given the same tensor.
            compute: dtype of the products.

        Returns:
            Outputs, [..., outputs]; None where the others were given another tensor.
        """
        if not self._ready:
            self._input, self._ready = x, self._compute(x, compute)
        y = next((output for other, output in self._ready if other is member and self._input is x), None)
        # Given out or not: when each member was called once, nothing is left.
        self._ready = [(other, output) for other, output in self._ready if other is not member]
        if not self._ready:
            self._input = None
        return y

    def _compute(self, x: torch.Tensor, compute: torch.dtype) -> list[tuple[FusedLoraLinear, torch.Tensor]]:
        biases: list[torch.Tensor | None] = [_base_of(member).bias for member in self.members]
        bias_O = None
        if any(bias is not None for bias in biases):
            zeros = [torch.zeros(outputs, dtype=compute, device=x.device) for outputs in self._outputs]
            bias_O = torch.cat([z if b is None else b.to(compute) for b, z in zip(biases, zeros, strict=True)])
        ys_TO = lora_linear(
            x.to(compute).flatten(0, -2), self.weight_OI, bias_O,
            [member.adapter() for member in self.members], self.narrow,
        )  # fmt: skip
        return [(member, y_TO.unflatten(0, x.shape[:-1])) for member, y_TO in zip(self.members, ys_TO, strict=True)]


def group_lora(layer: torch.nn.Module, *, narrow: bool = False) -> list[LoraGroup]:
    """Make the groups of a decoder layer; a linear that has no company becomes a group of its own.

    Args:
        layer: with LoRA linears made by `fuse_lora`; changed in place.
        narrow: multiply with the frozen weights in 8-bit floats.

    Returns:
        The groups, none where the layer has no such linear; those of a layer that was compiled before are as they were.
    """
    grouped = [module.group for module in layer.modules() if isinstance(module, FusedLoraLinear) and module.group]
    if grouped:
        return list(dict.fromkeys(grouped))
    groups = []
    for parent in list(layer.modules()):
        children: dict[str, Any] = {
            name: child for name, child in parent.named_children() if type(child) is FusedLoraLinear and _fit(child)
        }
        members = [children[name] for name in TOGETHER if name in children]
        if len(members) == len(TOGETHER) and len({_kind(member) for member in members}) == 1:
            groups.append(LoraGroup(members, narrow=narrow))
            children = {name: child for name, child in children.items() if name not in TOGETHER}
        groups += [LoraGroup([child], narrow=narrow) for child in children.values()]
    for group in groups:
        for member in group.members:
            member.group = group
    return groups


def _fit(linear: FusedLoraLinear) -> bool:
    base = _base_of(linear)
    return type(base) is torch.nn.Linear and not base.weight.requires_grad


def _kind(linear: FusedLoraLinear) -> tuple[Any, ...]:
    (weight,) = _weights_of([linear])
    return weight.dtype, weight.device, weight.shape[1]


def _base_of(linear: FusedLoraLinear) -> Any:
    return linear.get_base_layer()


def _weights_of(linears: list[FusedLoraLinear]) -> list[torch.Tensor]:
    return [_base_of(linear).weight for linear in linears]
