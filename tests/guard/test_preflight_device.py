"""Matrix products that lose small numbers or long sums are seen; sound ones are not suspected."""

from __future__ import annotations

import math

import pytest
import torch
from preflight_scenes import scene_of, tiny, with_lora

from surefoot.guard.preflight_device import (
    SUM_TOLERANCE,
    check_products,
    keeps_small_gradients,
    keeps_small_inputs,
    sum_error,
)
from surefoot.model.emulate import emulation


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_this_machine_is_sound(dtype):
    assert sum_error("cpu", dtype) < SUM_TOLERANCE / 3
    assert check_products(scene_of(with_lora(tiny(dtype=dtype)), autocast=dtype)) is None
    if dtype == torch.float16:
        assert keeps_small_inputs("cpu", dtype) == keeps_small_gradients("cpu", dtype) == 1.0


def test_an_emulated_mi200_is_seen_in_both_directions():
    with emulation("gfx90a"):
        finding = check_products(scene_of(tiny(dtype=torch.float16), autocast=torch.float16))
    assert (finding.diagnosis.fault, finding.diagnosis.op) == ("KERNEL", "mm") and not finding.serious
    assert finding.diagnosis.details["kept"] == {"forward": 0.0, "backward": 0.0}
    assert "bf16" in finding.action
    with emulation("gfx90a"):
        assert check_products(scene_of(tiny(), autocast=torch.bfloat16)) is None
        assert check_products(scene_of(tiny())) is None


class LossyBackward(torch.autograd.Function):
    """As hipBLASLt on gfx90a: the forward keeps subnormals, the backward does not."""

    @staticmethod
    def forward(ctx, left, right):
        ctx.save_for_backward(right)
        return left @ right

    @staticmethod
    def backward(ctx, *grads):
        (right,) = ctx.saved_tensors
        tiny_value = torch.finfo(grads[0].dtype).tiny
        return torch.where(grads[0].abs() < tiny_value, 0.0, grads[0]) @ right.T, None


def test_a_backward_that_flushes_is_told_from_a_forward_that_does():
    assert keeps_small_inputs("cpu", torch.float16, LossyBackward.apply) == 1.0
    assert keeps_small_gradients("cpu", torch.float16, LossyBackward.apply) == 0.0


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_a_sum_held_in_16_bits_is_seen(dtype):
    def stagnating(left, right):
        total = torch.zeros(left.shape[0], right.shape[1], dtype=dtype)
        for k in range(left.shape[1]):
            total = total + left[:, k, None] * right[None, k]
        return total

    assert sum_error("cpu", dtype, stagnating) > 2 * SUM_TOLERANCE
    assert not sum_error("cpu", dtype, lambda a, b: (a @ b) * math.inf) <= SUM_TOLERANCE
