"""Products in 8-bit floats: as near as the encoding allows, and only where they may be."""

from __future__ import annotations

import pytest
import torch

from surefoot.model import fp8
from surefoot.model.lora_op import lora_linear

NO_FP8 = pytest.mark.skipif(
    not torch.cuda.is_available() or torch.cuda.get_device_capability() < (8, 9), reason="no GPU with fp8"
)
OCP, FNUZ = torch.float8_e4m3fn, torch.float8_e4m3fnuz


@pytest.mark.parametrize("dtype", [OCP, FNUZ])
def test_rows_come_back_within_half_a_step(dtype):
    x = torch.randn(7, 48, generator=torch.Generator().manual_seed(0)) * torch.logspace(-6, 6, 7)[:, None]
    rows, scale = fp8.to_rows(x, dtype)
    assert rows.dtype == dtype and scale.shape == (7, 1)
    # Three bits of mantissa: half a step is 2^-4 of a number; the smallest normal is 2^-6 (2^-7) of the unit.
    assert ((rows.float() * scale - x).abs() <= x.abs() * 2**-4 + scale * 2**-9).all()


def test_what_is_not_finite_stays_visible():
    x = torch.ones(3, 16)
    x[1, 2], x[2, 5] = float("inf"), float("nan")
    rows, scale = fp8.to_rows(x, OCP)
    product = fp8.product(rows, scale, *fp8.to_rows(torch.ones(16, 16), OCP), torch.float32)
    assert torch.isfinite(product[0]).all() and not torch.isfinite(product[1]).any()
    assert not torch.isfinite(product[2]).any()


def test_a_row_of_zeros_is_zero():
    rows, scale = fp8.to_rows(torch.zeros(2, 16), OCP)
    assert not (rows.float() * scale).any()


def test_sides_that_the_products_do_not_take():
    assert fp8.hold(torch.ones(16, 24)) is None and fp8.hold(torch.ones(24, 16)) is None


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=NO_FP8)])
def test_lora_linears_are_near_the_exact_ones(bias, device):
    """Outputs and gradients within what three bits of mantissa give, adapters' parts without that loss."""
    generator = torch.Generator().manual_seed(0)

    def draw(*shape, scale=1.0):
        return (torch.randn(*shape, generator=generator) * scale).to(device, torch.bfloat16)

    x, w = draw(64, 96).requires_grad_(), draw(128, 96, scale=0.1)
    b_O = draw(128) if bias else None
    adapters = [(draw(4, 96).requires_grad_(), draw(64, 4).requires_grad_(), 0.5) for _ in range(2)]
    leaves = [x, *(t for a, b, _ in adapters for t in (a, b))]
    probe = draw(64, 128)

    def run(narrow):
        y = torch.cat(lora_linear(x, w, b_O, adapters, narrow), dim=1)
        return y.detach(), *torch.autograd.grad((y * probe).sum(), leaves)

    for near, exact in zip(run(fp8.hold(w)), run(None), strict=True):
        gap = (near - exact).float().norm() / exact.float().norm()
        assert gap < 0.04 if near.shape == x.shape or near.shape == probe.shape else gap < 0.004
    assert not torch.equal(run(fp8.hold(w))[0], run(None)[0])
