"""PEFT's LoRA linear, computed by one autograd function.

y = x Wᵀ + b + s (x Aᵀ) Bᵀ. PEFT's own forward makes the adapter's part as a tensor of its own, scales it and adds it:
three passes over outputs of full width, and as many again in the backward pass. Here the scale goes onto the rank-sized
product and the rest accumulates inside the matrix products. Everything else about the layer (saving, merging, switching
adapters) stays PEFT's.

Legend of tensor suffixes: T tokens, I inputs, O outputs, R rank.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from peft.tuners.lora.layer import Linear
from torch.nn import functional as F

if TYPE_CHECKING:
    from surefoot.model.lora_group import LoraGroup


class FusedLoraLinear(Linear):
    """A LoRA linear whose plain case is one autograd function; any other case is PEFT's own forward.

    Attributes:
        group: in a compiled layer, the linears that are computed together with this one.
    """

    group: LoraGroup | None = None

    def forward(self, x: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        """Compute the layer.

        Args:
            x: inputs, [..., inputs].
            *args: as PEFT's forward; anything here is left to it.
            **kwargs: as PEFT's forward; anything here is left to it.

        Returns:
            Outputs, [..., outputs], in the base layer's dtype.
        """
        if args or kwargs or not self.is_plain():
            return super().forward(x, *args, **kwargs)
        base = self.get_base_layer()
        a_RI, b_OR, scale = self.adapter()
        device = x.device.type
        if torch.is_autocast_enabled(device):
            compute = torch.get_autocast_dtype(device)
            rank_dtype = compute
        else:
            compute, rank_dtype = x.dtype, a_RI.dtype
        with torch.autocast(device, enabled=False):
            if torch.compiler.is_compiling() and self.group and rank_dtype == compute and self.group.fits(compute):
                y = self.group.output_of(self, x, compute)
                if y is not None:
                    return y
            y_TO = _LoraLinear.apply(
                x.to(compute).flatten(0, -2), base.weight, base.bias, a_RI, b_OR, scale, rank_dtype
            )
        return y_TO.view(*x.shape[:-1], y_TO.shape[-1])

    def __getstate__(self) -> dict[str, Any]:
        """Leave the group out of copies: their weights lie elsewhere."""
        return {name: value for name, value in super().__getstate__().items() if name != "group"}

    def adapter(self) -> tuple[torch.Tensor, torch.Tensor, float]:
        """Return A [rank, inputs], B [outputs, rank] and the scale of the one active adapter."""
        (name,) = self.active_adapters
        a: Any = self.lora_A[name]
        b: Any = self.lora_B[name]
        # float(): a number that torch's compiler first meets inside one autograd function is lost to the next.
        return a.weight, b.weight, float(self.scaling[name])

    def is_plain(self) -> bool:
        """Say whether this is the plain case now: one adapter, frozen float base, nothing else in between."""
        if self.disable_adapters or self.merged or len(self.active_adapters) != 1:
            return False
        adapter = self.active_adapters[0]
        base = self.get_base_layer()
        return (
            adapter in self.lora_A
            and adapter not in self.lora_variant
            and type(base) is torch.nn.Linear
            and not base.weight.requires_grad
            and (base.bias is None or not base.bias.requires_grad)
            and self.lora_B[adapter].bias is None
            and (isinstance(self.lora_dropout[adapter], torch.nn.Identity) or not self.training)
        )


def fuse_lora(model: torch.nn.Module) -> int:
    """Let every plain LoRA linear of a model compute itself by one function.

    The layers keep their place, parameters and names; only their class becomes the subclass above, which is
    layout-compatible by construction, so that PEFT need not be told at each way of making or loading an adapter.

    Args:
        model: a PEFT model; changed in place.

    Returns:
        The number of layers.
    """
    layers = [module for module in model.modules() if type(module) is Linear]
    for layer in layers:
        layer.__class__ = FusedLoraLinear
    return len(layers)


def unfuse_lora(model: torch.nn.Module) -> None:
    """Give LoRA linears PEFT's own forward back, which calls each of its modules: DeepSpeed fetches weights then.

    Args:
        model: changed in place.
    """
    for module in model.modules():
        if type(module) is FusedLoraLinear:
            module.__class__ = Linear  # type: ignore[assignment]  # the class that `fuse_lora` took it from


class _LoraLinear(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x_TI: torch.Tensor,
        w_OI: torch.Tensor,
        bias_O: torch.Tensor | None,
        a_RI: torch.Tensor,
        b_OR: torch.Tensor,
        scale: float,
        rank_dtype: torch.dtype,
    ) -> torch.Tensor:
        ctx.scale, ctx.dtypes = scale, (a_RI.dtype, b_OR.dtype)
        w_OI, a_RI, b_OR = w_OI.to(x_TI.dtype), a_RI.to(rank_dtype), b_OR.to(rank_dtype)
        y_TO = F.linear(x_TI, w_OI, None if bias_O is None else bias_O.to(x_TI.dtype))
        z_TR = torch.mm(x_TI.to(rank_dtype), a_RI.T) * scale
        y_TO = _add_product(y_TO, z_TR, b_OR.T)
        ctx.save_for_backward(x_TI, w_OI, a_RI, b_OR, z_TR)
        return y_TO

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        x_TI, w_OI, a_RI, b_OR, z_TR = ctx.saved_tensors
        a_dtype, b_dtype = ctx.dtypes
        dy_TO = grads[0]
        dy_rank_TO = dy_TO.to(z_TR.dtype)
        dz_TR = torch.mm(dy_rank_TO, b_OR).mul_(ctx.scale)
        d_b_OR = torch.mm(dy_rank_TO.T, z_TR).to(b_dtype) if ctx.needs_input_grad[4] else None
        d_a_RI = torch.mm(dz_TR.T, x_TI.to(z_TR.dtype)).to(a_dtype) if ctx.needs_input_grad[3] else None
        dx_TI = None
        if ctx.needs_input_grad[0]:
            dx_TI = _add_product(torch.mm(dy_TO, w_OI), dz_TR, a_RI)
        return dx_TI, None, None, d_a_RI, d_b_OR, None, None


def _add_product(y: torch.Tensor, left: torch.Tensor, right: torch.Tensor) -> torch.Tensor:
    """Return y + left @ right in y's dtype; in place where the dtypes agree.

    Never in place while torch compiles: torch 2.11 takes an in-place result of a compiled function's forward for a
    constant, and every gradient becomes zero without a word (measured; 2.13 does not). The compiler reuses y itself.
    """
    if y.dtype == left.dtype:
        return torch.addmm(y, left, right) if torch.compiler.is_compiling() else y.addmm_(left, right)
    return torch.addmm(y.to(left.dtype), left, right).to(y.dtype)
