"""LoRA linears of one input as one operator, for compiled layers.

y = z Bᵀ + x [W1; W2; ...]ᵀ with z = x [A1; A2; ...]ᵀ, where B holds the adapters' own B on its diagonal, their scales
multiplied in. Everything that is added is added inside a matrix product: torch takes the sum so far as the product's
C, which costs a kernel that waits for its inputs anyway next to nothing, while a compiler that sees the parts makes a
copy of y first (40 ms of a step of 1,180 on an H200, 8B shapes, 16,384 tokens; measured). The rank-sized
product comes first, so that only the whole sum is rounded. The members' gradients are laid side by side in the
operator as well: a compiler joins that with the rotation of queries and keys into one slow kernel.

Legend of tensor suffixes: T tokens, I inputs, O outputs of all members, R ranks of all members.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from surefoot.model import fp8

_FORWARD = "surefoot::lora_linear"
_BACKWARD = "surefoot::lora_linear_backward"
_Adapters = Sequence[tuple[torch.Tensor, torch.Tensor, float]]


def lora_linear(
    x_TI: torch.Tensor,
    w_OI: torch.Tensor,
    bias_O: torch.Tensor | None,
    adapters: _Adapters,
    narrow: fp8.Fp8Weight | None = None,
) -> tuple[torch.Tensor, ...]:
    """Compute LoRA linears that share an input.

    Args:
        x_TI: inputs in the dtype of the products.
        w_OI: the frozen weights, one member's rows after the other's; in the same dtype.
        bias_O: frozen, or None.
        adapters: for each member A [rank, inputs], B [outputs, rank] and the scale, in any float dtype.
        narrow: the same weights in 8-bit floats, to multiply with those instead.

    Returns:
        For each member its outputs, [tokens, outputs]; views of one tensor.
    """
    scales = tuple(scale for *_, scale in adapters)
    held = (None,) * 4 if narrow is None else (narrow.w_OI, narrow.scale_1O, narrow.wt_IO, narrow.scale_1I)
    if not torch.is_grad_enabled():
        b_matrices = [b_OR for _, b_OR, _ in adapters]
        y_TO = _parts(x_TI, w_OI, bias_O, held, scales, [a_RI for a_RI, *_ in adapters], b_matrices)[0]
        return y_TO.split([b_OR.shape[0] for b_OR in b_matrices], dim=1)
    a_and_b = [tensor for a_RI, b_OR, _ in adapters for tensor in (a_RI, b_OR)]
    return _LoraLinears.apply(x_TI, w_OI, bias_O, *held, scales, *a_and_b)


def _parts(
    x_TI: torch.Tensor,
    w_OI: torch.Tensor,
    bias_O: torch.Tensor | None,
    held: Sequence[torch.Tensor | None],
    scales: Sequence[float],
    a_matrices: Sequence[torch.Tensor],
    b_matrices: Sequence[torch.Tensor],
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return outputs, rank products, and the members' A and B in one piece each."""
    a_RI = torch.cat([a.to(x_TI.dtype) for a in a_matrices])
    parts = [(b * scale).to(x_TI.dtype) for b, scale in zip(b_matrices, scales, strict=True)]
    b_OR = parts[0] if len(parts) == 1 else torch.block_diag(*parts)
    narrow_OI, scale_1O = held[:2]
    x8_TI, scale_T1 = (None, None) if narrow_OI is None else fp8.to_rows(x_TI, narrow_OI.dtype)
    w_OI = w_OI if narrow_OI is None else narrow_OI
    # By itself: a recomputed MLP needs the last linear's rank product again, and not its outputs.
    z_TR = torch.mm(x_TI, a_RI.T)
    y_TO = torch.ops.surefoot.lora_linear(x_TI, x8_TI, scale_T1, w_OI, scale_1O, bias_O, z_TR, b_OR)
    return y_TO, z_TR, a_RI, b_OR


class _LoraLinears(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x_TI: torch.Tensor,
        w_OI: torch.Tensor,
        bias_O: torch.Tensor | None,
        narrow_OI: torch.Tensor | None,
        scale_1O: torch.Tensor | None,
        narrow_IO: torch.Tensor | None,
        scale_1I: torch.Tensor | None,
        scales: tuple[float, ...],
        *a_and_b: torch.Tensor,
    ) -> tuple[torch.Tensor, ...]:
        held = (narrow_OI, scale_1O, narrow_IO, scale_1I)
        y_TO, z_TR, a_RI, b_OR = _parts(x_TI, w_OI, bias_O, held, scales, a_and_b[::2], a_and_b[1::2])
        ctx.scales, ctx.dtypes = scales, [tensor.dtype for tensor in a_and_b]
        ctx.ranks, ctx.outputs = [a.shape[0] for a in a_and_b[::2]], [b.shape[0] for b in a_and_b[1::2]]
        ctx.narrow = narrow_IO is not None
        weight = (w_OI,) if narrow_IO is None else (narrow_IO, scale_1I)
        ctx.save_for_backward(x_TI, a_RI, b_OR, z_TR, *weight)
        return y_TO.split(ctx.outputs, dim=1)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        x_TI, a_RI, b_OR, z_TR, *weight = ctx.saved_tensors
        d_ys_TO = [grad.contiguous() for grad in grads]
        narrow: tuple[torch.Tensor | None, ...] = (None, None)
        if ctx.narrow and ctx.needs_input_grad[0]:
            d_ys_TO = [torch.cat(d_ys_TO, dim=1)] if len(d_ys_TO) > 1 else d_ys_TO
            narrow = fp8.to_rows(d_ys_TO[0], weight[0].dtype)
        scale_1I = weight[1] if ctx.narrow else None
        d_x_TI, d_a_RI, d_b_OR = torch.ops.surefoot.lora_linear_backward(
            d_ys_TO, *narrow, x_TI, weight[0], scale_1I, a_RI, b_OR, z_TR, ctx.needs_input_grad[0]
        )
        d_adapters: list[torch.Tensor] = []
        rank = output = 0
        for place, (ranks, outputs, scale) in enumerate(zip(ctx.ranks, ctx.outputs, ctx.scales, strict=True)):
            d_a, d_b = d_a_RI[rank : rank + ranks], d_b_OR[output : output + outputs, rank : rank + ranks] * scale
            d_adapters += [d_a.to(ctx.dtypes[2 * place]), d_b.to(ctx.dtypes[2 * place + 1])]
            rank, output = rank + ranks, output + outputs
        return d_x_TI if ctx.needs_input_grad[0] else None, *(None,) * 7, *d_adapters


def _forward(
    x_TI: torch.Tensor,
    x8_TI: torch.Tensor | None,
    scale_T1: torch.Tensor | None,
    w_OI: torch.Tensor,
    scale_1O: torch.Tensor | None,
    bias_O: torch.Tensor | None,
    z_TR: torch.Tensor,
    b_OR: torch.Tensor,
) -> torch.Tensor:
    if x8_TI is not None and scale_T1 is not None and scale_1O is not None:
        y_TO = fp8.product(x8_TI, scale_T1, w_OI, scale_1O, x_TI.dtype).addmm_(z_TR, b_OR.T)
        return y_TO if bias_O is None else y_TO.add_(bias_O)
    y_TO = torch.mm(z_TR, b_OR.T) if bias_O is None else torch.addmm(bias_O, z_TR, b_OR.T)
    return y_TO.addmm_(x_TI, w_OI.T)


def _backward(
    d_ys_TO: Sequence[torch.Tensor],
    d_y8_TO: torch.Tensor | None,
    scale_T1: torch.Tensor | None,
    x_TI: torch.Tensor,
    weight: torch.Tensor,
    scale_1I: torch.Tensor | None,
    a_RI: torch.Tensor,
    b_OR: torch.Tensor,
    z_TR: torch.Tensor,
    needs_d_x: bool,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return the gradients of x, A and B; `weight` is [O, I], or in 8-bit floats [I, O]."""
    d_y_TO = d_ys_TO[0] if len(d_ys_TO) == 1 else torch.cat(list(d_ys_TO), dim=1)
    d_z_TR = torch.mm(d_y_TO, b_OR)
    d_a_RI, d_b_OR = wide_product(d_z_TR.T, x_TI), wide_product(d_y_TO.T, z_TR)
    if not needs_d_x:
        return d_y_TO.new_empty(0), d_a_RI, d_b_OR
    if d_y8_TO is not None and scale_T1 is not None and scale_1I is not None:
        d_x_TI = fp8.product(d_y8_TO, scale_T1, weight, scale_1I, d_y_TO.dtype).addmm_(d_z_TR, a_RI)
    else:
        d_x_TI = torch.mm(d_z_TR, a_RI).addmm_(d_y_TO, weight)
    return d_x_TI, d_a_RI, d_b_OR


def wide_product(left: torch.Tensor, right: torch.Tensor) -> torch.Tensor:
    """Return left @ right as it was summed up: in float32 where the kernels give that out."""
    wide = wide_dtype(left)
    return torch.mm(left, right) if wide == left.dtype else torch.mm(left, right, out_dtype=wide)


def wide_dtype(tensor: torch.Tensor) -> torch.dtype:
    """Return the dtype of `wide_product` for matrices like this one."""
    wide = tensor.device.type == "cuda" and torch.version.hip is None and tensor.element_size() == 2
    return torch.float32 if wide else tensor.dtype


def _fake(x_TI: Any, x8: Any, scale: Any, w_OI: Any, scale_w: Any, bias: Any, z: Any, b: Any) -> Any:
    del x8, scale, scale_w, bias, z, b
    return x_TI.new_empty(x_TI.shape[0], w_OI.shape[0])


def _fake_backward(
    d_ys: Any, d_y8: Any, scale: Any, x_TI: Any, w: Any, scale_w: Any, a_RI: Any, b_OR: Any, z: Any, needs: bool
) -> tuple[torch.Tensor, ...]:
    del d_y8, scale, w, scale_w, z
    d_x = torch.empty_like(x_TI) if needs else x_TI.new_empty(0)
    wide = wide_dtype(x_TI)
    return d_x, torch.empty_like(a_RI, dtype=wide), torch.empty_like(b_OR, dtype=wide)


torch.library.define(
    _FORWARD,
    "(Tensor x, Tensor? x8, Tensor? x_scale, Tensor w, Tensor? w_scale, Tensor? bias, Tensor z, Tensor b) -> Tensor",
)
torch.library.define(
    _BACKWARD,
    "(Tensor[] dys, Tensor? dy8, Tensor? dy_scale, Tensor x, Tensor w, Tensor? w_scale, Tensor a, Tensor b, Tensor z, "
    "bool needs_dx) -> (Tensor, Tensor, Tensor)",
)
torch.library.impl(_FORWARD, "CompositeExplicitAutograd", _forward)
torch.library.impl(_BACKWARD, "CompositeExplicitAutograd", _backward)
torch.library.register_fake(_FORWARD, _fake)
torch.library.register_fake(_BACKWARD, _fake_backward)
