"""A linear over a packed weight, with one LoRA adapter or none: an autograd function, and its operators.

y = s (x Aᵀ) Bᵀ + b + x Wᵀ, where W exists only while it is multiplied by: it is expanded in the forward pass and once
more in the backward pass. The scale goes onto B, and all that is added is added inside the matrix products.

In compiled layers each pass is one operator. A compiler that sees the expansions takes the second for the first: it
keeps every W of the model for the backward pass, in 16 bits (seen in torch 2.11's and 2.13's graphs). Eagerly the same
code runs without one, so that the guard sees each product.

Legend of tensor suffixes: T tokens, I inputs, O outputs, R rank.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
from torch.nn import functional as F

from surefoot.model.lora_op import wide_dtype, wide_product
from surefoot.model.quantized import Packed, expand

_FORWARD = "surefoot::quantized_linear"
_BACKWARD = "surefoot::quantized_linear_backward"
_Layout = tuple[str, list[int], list[int]]  # the numbers of a `Packed`


class Adapter(NamedTuple):
    """One LoRA adapter.

    Attributes:
        a_RI: in any float dtype.
        b_OR: in any float dtype.
        scale: on their product.
        dtype: that their products are computed in.
    """

    a_RI: torch.Tensor
    b_OR: torch.Tensor
    scale: float
    dtype: torch.dtype


def quantized_linear(
    x_TI: torch.Tensor, packed: Packed, bias_O: torch.Tensor | None, adapter: Adapter | None
) -> torch.Tensor:
    """Compute the linear.

    Args:
        x_TI: inputs in the dtype of the products.
        packed: the frozen weight.
        bias_O: frozen, in the inputs' dtype, or None.
        adapter: or None.

    Returns:
        Outputs, [tokens, outputs], in the inputs' dtype.
    """
    layout = packed.kind, packed.blocks, packed.shape
    a_RI = b_OR = None
    how = 1.0, x_TI.dtype
    if adapter is not None:
        a_RI, b_OR, how = adapter.a_RI, adapter.b_OR, (adapter.scale, adapter.dtype)
    # Asked here: where no gradient is wanted, torch's tracer counts a function's open list of arguments wrongly.
    wanted = any(tensor is not None and tensor.requires_grad for tensor in (x_TI, a_RI, b_OR))
    if not (wanted and torch.is_grad_enabled()):
        return _computed(x_TI, a_RI, b_OR, bias_O, how, layout, packed.tensors)[0]
    return _QuantizedLinear.apply(x_TI, a_RI, b_OR, bias_O, how, layout, *packed.tensors)


def _computed(
    x_TI: torch.Tensor,
    a_RI: torch.Tensor | None,
    b_OR: torch.Tensor | None,
    bias_O: torch.Tensor | None,
    how: tuple[float, torch.dtype],
    layout: _Layout,
    tensors: Sequence[torch.Tensor],
) -> tuple[torch.Tensor, ...]:
    """Return the outputs and, with an adapter, what the backward pass needs: its rank product, A, and B with scale."""
    run = torch.ops.surefoot.quantized_linear if torch.compiler.is_compiling() else _forward
    if a_RI is None or b_OR is None:
        return run(x_TI, tensors, *layout, bias_O, None, None)[:1]
    scale, dtype = how
    a_RI, b_OR = a_RI.to(dtype), (b_OR * scale).to(dtype)
    return *run(x_TI, tensors, *layout, bias_O, a_RI, b_OR), a_RI, b_OR


class _QuantizedLinear(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x_TI: torch.Tensor,
        a_RI: torch.Tensor | None,
        b_OR: torch.Tensor | None,
        bias_O: torch.Tensor | None,
        how: tuple[float, torch.dtype],
        layout: _Layout,
        *tensors: torch.Tensor,
    ) -> torch.Tensor:
        y_TO, *products = _computed(x_TI, a_RI, b_OR, bias_O, how, layout, tensors)
        ctx.scale, ctx.layout, ctx.parts = how[0], layout, len(tensors)
        ctx.dtypes = None
        if a_RI is not None and b_OR is not None:
            ctx.dtypes, products = (a_RI.dtype, b_OR.dtype), [x_TI, *products]
        ctx.save_for_backward(*tensors, *products)
        return y_TO

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        saved = ctx.saved_tensors  # asked for once: recomputing layers hands them out once
        tensors, products = saved[: ctx.parts], saved[ctx.parts :]
        x_TI, z_TR, a_RI, b_OR = products or (None,) * 4
        kind, blocks, shape = ctx.layout
        needs_d_x = ctx.needs_input_grad[0]
        run = torch.ops.surefoot.quantized_linear_backward if torch.compiler.is_compiling() else _backward
        d_x_TI, d_a_RI, d_b_OR = run(
            grads[0].contiguous(), tensors, kind, blocks, shape, x_TI, z_TR, a_RI, b_OR, needs_d_x
        )
        d_adapter: tuple[torch.Tensor | None, ...] = (None, None)
        if ctx.dtypes is not None:
            d_adapter = d_a_RI.to(ctx.dtypes[0]), (d_b_OR * ctx.scale).to(ctx.dtypes[1])
        return d_x_TI if needs_d_x else None, *d_adapter, *(None,) * (3 + ctx.parts)


def _forward(
    x_TI: torch.Tensor,
    tensors: Sequence[torch.Tensor],
    kind: str,
    blocks: Sequence[int],
    shape: Sequence[int],
    bias_O: torch.Tensor | None,
    a_RI: torch.Tensor | None,
    b_OR: torch.Tensor | None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return outputs and the adapter's rank product, empty without one."""
    w_OI = expand(tensors, kind, blocks, shape, x_TI.dtype)
    if a_RI is None or b_OR is None:
        return F.linear(x_TI, w_OI, bias_O), x_TI.new_empty(0)
    z_TR = torch.mm(x_TI.to(a_RI.dtype), a_RI.T)
    if z_TR.dtype != x_TI.dtype:
        y_TO = F.linear(x_TI, w_OI, bias_O)
        return torch.addmm(y_TO.to(z_TR.dtype), z_TR, b_OR.T).to(x_TI.dtype), z_TR
    y_TO = torch.mm(z_TR, b_OR.T) if bias_O is None else torch.addmm(bias_O, z_TR, b_OR.T)
    return y_TO.addmm_(x_TI, w_OI.T), z_TR


def _backward(
    d_y_TO: torch.Tensor,
    tensors: Sequence[torch.Tensor],
    kind: str,
    blocks: Sequence[int],
    shape: Sequence[int],
    x_TI: torch.Tensor | None,
    z_TR: torch.Tensor | None,
    a_RI: torch.Tensor | None,
    b_OR: torch.Tensor | None,
    needs_d_x: bool,
    *,
    product: Callable[[torch.Tensor, torch.Tensor], torch.Tensor] = torch.mm,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return the gradients of x, A and B; empty is what nobody needs."""
    d_z_TR, d_a_RI, d_b_OR = None, d_y_TO.new_empty(0), d_y_TO.new_empty(0)
    if x_TI is not None and z_TR is not None and b_OR is not None:
        d_rank_TO = d_y_TO.to(z_TR.dtype)
        d_z_TR = torch.mm(d_rank_TO, b_OR)
        d_a_RI, d_b_OR = product(d_z_TR.T, x_TI.to(z_TR.dtype)), product(d_rank_TO.T, z_TR)
    if not needs_d_x:
        return d_y_TO.new_empty(0), d_a_RI, d_b_OR
    w_OI = expand(tensors, kind, blocks, shape, d_y_TO.dtype)
    if d_z_TR is None or a_RI is None:
        return torch.mm(d_y_TO, w_OI), d_a_RI, d_b_OR
    if d_z_TR.dtype != d_y_TO.dtype:
        d_x_TI = torch.mm(d_y_TO, w_OI).to(d_z_TR.dtype)
        return torch.addmm(d_x_TI, d_z_TR, a_RI).to(d_y_TO.dtype), d_a_RI, d_b_OR
    return torch.mm(d_z_TR, a_RI).addmm_(d_y_TO, w_OI), d_a_RI, d_b_OR


def _fake(x_TI: Any, tensors: Any, kind: Any, blocks: Any, shape: Any, bias: Any, a_RI: Any, b: Any) -> Any:
    del tensors, kind, blocks, bias, b
    y_TO = x_TI.new_empty(x_TI.shape[0], shape[0])
    return y_TO, x_TI.new_empty(0) if a_RI is None else a_RI.new_empty(x_TI.shape[0], a_RI.shape[0])


def _fake_backward(
    d_y_TO: Any, tensors: Any, kind: Any, blocks: Any, shape: Any, x: Any, z: Any, a_RI: Any, b_OR: Any, needs: bool
) -> tuple[torch.Tensor, ...]:
    del tensors, kind, blocks, x, z
    d_x_TI = d_y_TO.new_empty(d_y_TO.shape[0], shape[1]) if needs else d_y_TO.new_empty(0)
    if a_RI is None:
        return d_x_TI, d_y_TO.new_empty(0), d_y_TO.new_empty(0)
    wide = wide_dtype(a_RI)
    return d_x_TI, torch.empty_like(a_RI, dtype=wide), torch.empty_like(b_OR, dtype=wide)


_WEIGHT = "Tensor[] packed, str kind, int[] blocks, int[] shape"
torch.library.define(_FORWARD, f"(Tensor x, {_WEIGHT}, Tensor? bias, Tensor? a, Tensor? b) -> (Tensor, Tensor)")
torch.library.define(
    _BACKWARD,
    f"(Tensor dy, {_WEIGHT}, Tensor? x, Tensor? z, Tensor? a, Tensor? b, bool needs_dx) -> (Tensor, Tensor, Tensor)",
)
torch.library.impl(_FORWARD, "CompositeExplicitAutograd", _forward)
torch.library.impl(_BACKWARD, "CompositeExplicitAutograd", partial(_backward, product=wide_product))
torch.library.register_fake(_FORWARD, _fake)
torch.library.register_fake(_BACKWARD, _fake_backward)
