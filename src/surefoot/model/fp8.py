"""Frozen weights in 8-bit floats: matrix products at twice the speed, one scale a row.

Each weight is held twice, with scales a row of what it multiplies: by output for the forward product and, transposed,
by input for the gradient. Rows of activations and of gradients get their scale when they are made; a compiler joins
that with what made them. Sums are taken in float32.

Legend of tensor suffixes: T tokens, I inputs, O outputs, R rows, C columns.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from surefoot.errors import UserError

MULTIPLE = 16  # of a weight's sides, which the products of 8-bit floats ask for


@dataclass(frozen=True)
class Fp8Weight:
    """A frozen weight in 8-bit floats.

    Attributes:
        w_OI: for the forward product.
        scale_1O: float32; w_OI times it is the weight.
        wt_IO: transposed, for the gradient.
        scale_1I: float32; wt_IO times it is the weight.
    """

    w_OI: torch.Tensor
    scale_1O: torch.Tensor
    wt_IO: torch.Tensor
    scale_1I: torch.Tensor


def require(device: torch.device) -> None:
    """Refuse a device that does not multiply 8-bit floats.

    Args:
        device: of the model.

    Raises:
        UserError: it does not.
    """
    if device.type == "cuda" and torch.version.hip is not None:
        name = torch.cuda.get_device_properties(device).gcnArchName
        fits = name.startswith(("gfx94", "gfx95", "gfx120"))
    elif device.type == "cuda":
        major, minor = torch.cuda.get_device_capability(device)
        name, fits = f"compute capability {major}.{minor}", (major, minor) >= (8, 9)
    else:
        name, fits = "the CPU", False
    if not fits:
        message = f"8-bit products need an MI300 or later, an RX 9000, or an NVIDIA card from Ada on; this is {name}"
        raise UserError(message, hint="remove `fp8: true`", key="fp8")


def encoding(device: torch.device) -> torch.dtype:
    """Return the 8-bit float that a device multiplies.

    Args:
        device: of the weights. MI300's chips (gfx940 to gfx942) have an encoding of their own, without negative zero
            (AMD's instruction set document for CDNA 3); all later AMD chips, NVIDIA's and CPUs have the OCP one.

    Returns:
        The dtype with four bits of exponent.
    """
    if device.type == "cuda" and torch.version.hip is not None:
        chip = torch.cuda.get_device_properties(device).gcnArchName
        if chip.startswith("gfx94"):
            return torch.float8_e4m3fnuz
    return torch.float8_e4m3fn


def to_rows(x_RC: torch.Tensor, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    """Round each row to 8-bit floats under a scale of its own.

    Args:
        x_RC: any float; a row that is not finite stays that.
        dtype: from `encoding`.

    Returns:
        The rows [R, C] in `dtype` and their scales, float32 [R, 1]; their product is about `x_RC`.
    """
    limit = torch.finfo(dtype).max
    largest_R1 = x_RC.abs().amax(dim=1, keepdim=True).float()
    scale_R1 = largest_R1.clamp(min=1e-12) / limit
    return (x_RC.float() / scale_R1).clamp(-limit, limit).to(dtype), scale_R1


def hold(weight_OI: torch.Tensor) -> Fp8Weight | None:
    """Make the 8-bit copies of a weight.

    Args:
        weight_OI: a frozen weight, [outputs, inputs], any float.

    Returns:
        The copies; None where a side is no multiple of 16.
    """
    if any(side % MULTIPLE for side in weight_OI.shape):
        return None
    dtype = encoding(weight_OI.device)
    w_OI, scale_O1 = to_rows(weight_OI, dtype)
    wt_IO, scale_I1 = to_rows(weight_OI.T, dtype)
    return Fp8Weight(w_OI, scale_O1.T.contiguous(), wt_IO.contiguous(), scale_I1.T.contiguous())


def product(
    x_TI: torch.Tensor, scale_T1: torch.Tensor, w_OI: torch.Tensor, scale_1O: torch.Tensor, dtype: torch.dtype
) -> torch.Tensor:
    """Multiply two matrices of 8-bit floats.

    Args:
        x_TI: from `to_rows`.
        scale_T1: its scales.
        w_OI: 8-bit floats, row by row.
        scale_1O: its scales.
        dtype: of the result.

    Returns:
        x_TI @ w_OI.T with the scales on it, [T, O].
    """
    if x_TI.is_cuda:
        return torch._scaled_mm(
            x_TI, w_OI.T, scale_a=scale_T1, scale_b=scale_1O, out_dtype=dtype, use_fast_accum=torch.version.hip is None
        )
    return ((x_TI.float() * scale_T1) @ (w_OI.float() * scale_1O.T).T).to(dtype)
