from __future__ import annotations

import pytest
import torch

from surefoot.use.merge_check import compare_logits


def logits(seed, size=1.0):
    return [torch.randn(12, 50, generator=torch.Generator().manual_seed(seed)) * size]


def plus(values, noise):
    return [values[0] + noise[0]]


BASE = logits(0, 3.0)
ADAPTED = plus(BASE, logits(1, 1.0))


def compare(reference, merged, base, saved="float32", computed="float32"):
    return compare_logits(reference, merged, base, saved=saved, computed=computed)


@pytest.mark.parametrize(("dtype", "noise"), [("float32", 1e-5), ("float16", 3e-3), ("bfloat16", 2e-2)])
def test_rounding_passes(dtype, noise):
    check = compare(ADAPTED, plus(ADAPTED, logits(2, noise)), BASE, dtype)
    assert check.ok and check.conclusive and check.finite and check.positions == 12


@pytest.mark.parametrize("saved", ["float32", "float16", "bfloat16"])
@pytest.mark.parametrize("computed", ["float32", "float16", "bfloat16"])
def test_an_adapter_left_out_or_added_twice_is_caught(saved, computed):
    assert not compare(ADAPTED, BASE, BASE, saved, computed).ok
    assert not compare(ADAPTED, plus(ADAPTED, logits(1, 1.0)), BASE, saved, computed).ok


def test_float32_lets_nothing_through_that_half_precision_would():
    merged = plus(ADAPTED, logits(2, 3e-2))
    assert compare(ADAPTED, merged, None, "bfloat16").ok
    assert not compare(ADAPTED, merged, None, "float32").ok


def test_an_adapter_too_small_for_the_dtype_is_said_to_be_inconclusive():
    adapted = plus(BASE, logits(1, 1e-2))
    check = compare(adapted, BASE, BASE, "bfloat16")
    assert check.ok and not check.conclusive
    assert not compare(adapted, BASE, BASE, "float32").ok


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_logits_that_are_not_finite_fail_and_the_report_stays_json(bad):
    merged = [ADAPTED[0].clone()]
    merged[0][3, 4] = bad
    check = compare(ADAPTED, merged, BASE, "bfloat16")
    assert not check.ok and not check.finite
    assert check.to_json()["max_abs_diff"] is None


def test_agreement_of_the_first_choice_is_counted():
    merged = [ADAPTED[0].clone()]
    merged[0][:3] *= -1
    assert compare(ADAPTED, merged, BASE).top1_agreement == pytest.approx(9 / 12)
