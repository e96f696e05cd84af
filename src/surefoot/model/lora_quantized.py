"""Linears over a quantised base, with PEFT's LoRA or without, computed by one autograd function.

y = x Wᵀ + b + s (x Aᵀ) Bᵀ, where W exists only while it is multiplied by: it is expanded in the forward pass and once
more in the backward pass. As in `lora.py`, the rank-sized product is kept and the adapter's part accumulates inside the
matrix products. PEFT's forward over bitsandbytes copies the base's output, and makes the adapter's part as tensors of
full width.

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
from torch.nn import functional as F

from surefoot.model.quantized import dequantized


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
    """bitsandbytes' 4-bit linear, computed by the function below."""


class PackedLinear8bit(_Packed, Linear8bitLt):
    """bitsandbytes' 8-bit linear, computed by the function below."""


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
    a_RI = b_OR = None
    scale, rank_dtype = 1.0, compute
    if lora is not None:
        (adapter,) = lora.active_adapters
        a_RI, b_OR, scale = lora.lora_A[adapter].weight, lora.lora_B[adapter].weight, lora.scaling[adapter]
        rank_dtype = compute if autocast else a_RI.dtype
    with torch.autocast(device, enabled=False):
        y_TO = _QuantizedLinear.apply(x.to(compute).flatten(0, -2), base, a_RI, b_OR, scale, rank_dtype)
    return y_TO.view(*x.shape[:-1], y_TO.shape[-1])


class _QuantizedLinear(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x_TI: torch.Tensor,
        base: Any,
        a_RI: torch.Tensor | None,
        b_OR: torch.Tensor | None,
        scale: float,
        rank_dtype: torch.dtype,
    ) -> torch.Tensor:
        ctx.base, ctx.scale = base, scale
        w_OI = dequantized(base, x_TI.dtype)
        y_TO = F.linear(x_TI, w_OI, None if base.bias is None else base.bias.to(x_TI.dtype))
        del w_OI
        if a_RI is None or b_OR is None:
            return y_TO
        ctx.dtypes = a_RI.dtype, b_OR.dtype
        a_RI, b_OR = a_RI.to(rank_dtype), b_OR.to(rank_dtype)
        z_TR = torch.mm(x_TI.to(rank_dtype), a_RI.T) * scale
        ctx.save_for_backward(x_TI, a_RI, b_OR, z_TR)
        return _add_product(y_TO, z_TR, b_OR.T)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        dy_TO = grads[0]
        wanted, d_a_RI, d_b_OR = ctx.needs_input_grad, None, None
        dz_TR = a_RI = None
        saved = ctx.saved_tensors  # asked for once: recomputing layers hands them out once
        if saved:
            x_TI, a_RI, b_OR, z_TR = saved
            dy_rank_TO = dy_TO.to(z_TR.dtype)
            dz_TR = torch.mm(dy_rank_TO, b_OR) * ctx.scale
            d_b_OR = torch.mm(dy_rank_TO.T, z_TR).to(ctx.dtypes[1]) if wanted[3] else None
            d_a_RI = torch.mm(dz_TR.T, x_TI.to(z_TR.dtype)).to(ctx.dtypes[0]) if wanted[2] else None
        dx_TI = None
        if wanted[0]:
            dx_TI = torch.mm(dy_TO, dequantized(ctx.base, dy_TO.dtype))
            if dz_TR is not None and a_RI is not None:
                dx_TI = _add_product(dx_TI, dz_TR, a_RI)
        return dx_TI, None, d_a_RI, d_b_OR, None, None


def _add_product(y: torch.Tensor, left: torch.Tensor, right: torch.Tensor) -> torch.Tensor:
    """Return y + left @ right in y's dtype, in place where that is allowed; see `lora.py` for when it is not."""
    if y.dtype != left.dtype:
        return torch.addmm(y.to(left.dtype), left, right).to(y.dtype)
    return torch.addmm(y, left, right) if torch.compiler.is_compiling() else y.addmm_(left, right)
