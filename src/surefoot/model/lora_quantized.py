"""Linears over a quantised base, with PEFT's LoRA or without, computed by one function.

PEFT's forward over bitsandbytes copies the base's output, and makes the adapter's part as tensors of full width.
Everything computes in the dtype that autocast asks for, else in the input's: bitsandbytes' own forward would compute in
the dtype of its configuration, also inside a module that shall be float32. 8-bit weights are expanded as well: the
library's own product would round the inputs to 8 bits, and cast them to float16 before, where large ones overflow.

Legend of tensor suffixes: T tokens, I inputs, O outputs, R rank.
"""

from __future__ import annotations

from typing import Any

import torch
from bitsandbytes.nn import Linear4bit, Linear8bitLt
from peft.tuners.lora import bnb as peft_bnb

from surefoot.model.lora_quantized_op import Adapter, quantized_linear
from surefoot.model.quantized import packed_parts


class _Packed(torch.nn.Module):
    """The forward of a quantised linear without an adapter."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Compute x Wᵀ + b.

        Args:
            x: inputs, [..., inputs].

        Returns:
            Outputs, [..., outputs], in the compute dtype.
        """
        return _linear(self, x)


class _Fused(torch.nn.Module):
    """The forward of PEFT's LoRA over one: its plain case is one autograd function, any other is PEFT's own."""

    def forward(self, x: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        """Compute the layer.

        Args:
            x: inputs, [..., inputs].
            *args: as PEFT's forward; anything here is left to it.
            **kwargs: as PEFT's forward; anything here is left to it.

        Returns:
            Outputs, [..., outputs].
        """
        if args or kwargs or not _is_plain(self):
            return super().forward(x, *args, **kwargs)
        base: Any = self.get_base_layer()  # type: ignore[operator]
        return _linear(base, x, self)


class PackedLinear4bit(_Packed, Linear4bit):
    """bitsandbytes' 4-bit linear, computed by Surefoot's function."""


class PackedLinear8bit(_Packed, Linear8bitLt):
    """bitsandbytes' 8-bit linear, computed by Surefoot's function."""


class FusedLora4bit(_Fused, peft_bnb.Linear4bit):
    """PEFT's LoRA over a 4-bit linear."""


class FusedLora8bit(_Fused, peft_bnb.Linear8bitLt):
    """PEFT's LoRA over an 8-bit linear."""


_FORWARD: dict[type, type] = {
    Linear4bit: PackedLinear4bit,
    Linear8bitLt: PackedLinear8bit,
    peft_bnb.Linear4bit: FusedLora4bit,
    peft_bnb.Linear8bitLt: FusedLora8bit,
}


def fuse_quantized(model: torch.nn.Module) -> int:
    """Let a model's quantised linears, and the LoRA layers over them, compute by one function.

    As `fuse_lora`: only their class changes, to a subclass of the same layout.

    Args:
        model: loaded with quantised weights, wrapped by PEFT or not; changed in place.

    Returns:
        The number of modules.
    """
    found = [module for module in model.modules() if type(module) in _FORWARD]
    for module in found:
        module.__class__ = _FORWARD[type(module)]
    return len(found)


def _is_plain(layer: Any) -> bool:
    if layer.disable_adapters or layer.merged or len(layer.active_adapters) != 1:
        return False
    adapter = layer.active_adapters[0]
    bias = layer.get_base_layer().bias
    return (
        adapter in layer.lora_A
        and adapter not in layer.lora_variant
        and (bias is None or not bias.requires_grad)
        and layer.lora_B[adapter].bias is None
        and (isinstance(layer.lora_dropout[adapter], torch.nn.Identity) or not layer.training)
    )


def _linear(base: Any, x: torch.Tensor, lora: Any = None) -> torch.Tensor:
    device = x.device.type
    autocast = torch.is_autocast_enabled(device)
    compute = torch.get_autocast_dtype(device) if autocast else x.dtype
    adapter = None
    if lora is not None:
        (name,) = lora.active_adapters
        # float(): as in `lora.py`.
        a_RI, b_OR, scale = lora.lora_A[name].weight, lora.lora_B[name].weight, float(lora.scaling[name])
        adapter = Adapter(a_RI, b_OR, scale, compute if autocast else a_RI.dtype)
    bias_O = None if base.bias is None else base.bias.to(compute)
    with torch.autocast(device, enabled=False):
        y_TO = quantized_linear(x.to(compute).flatten(0, -2), packed_parts(base), bias_O, adapter)
    return y_TO.view(*x.shape[:-1], y_TO.shape[-1])
