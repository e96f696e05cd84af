from __future__ import annotations

import pytest
import torch

from surefoot.bench import ceilings


@pytest.fixture(autouse=True)
def small(monkeypatch):
    """A few milliseconds a measurement."""
    monkeypatch.setattr(ceilings, "ROUND_SECONDS", 0.001)
    monkeypatch.setattr(ceilings, "ENOUGH_SECONDS", 0.001)
    monkeypatch.setattr(ceilings, "SMALLEST_SIDE", 64)
    monkeypatch.setattr(ceilings, "COPY_BYTES", {"cpu": 2**20})


def test_all_dtypes_get_a_positive_rate_and_each_is_announced():
    said = []
    found = ceilings.measure_ceilings("cpu", said.append)
    assert found.copy_gb_per_second > 0
    assert [rate.dtype for rate in found.squares] == ["float32", "bfloat16", "float16"]
    assert all(rate.tflops > 0 and rate.rows == rate.inputs == rate.outputs for rate in found.squares)
    assert list(found.missing) == ["fp8"] and len(said) == 4


def test_a_dtype_that_the_device_refuses_is_said_and_the_others_are_measured(monkeypatch):
    real = ceilings.product

    def refusing(dtype, *sizes):
        if dtype == "float16":
            raise RuntimeError("not implemented for 'Half'\nmore")
        return real(dtype, *sizes)

    monkeypatch.setattr(ceilings, "product", refusing)
    found = ceilings.measure_ceilings("cpu", print)
    assert [rate.dtype for rate in found.squares] == ["float32", "bfloat16"]
    assert found.missing["float16"] == "not implemented for 'Half'"


def test_out_of_memory_is_no_missing_dtype(monkeypatch):
    def full(*_):
        raise torch.OutOfMemoryError("full")

    monkeypatch.setattr(ceilings, "product", full)
    with pytest.raises(torch.OutOfMemoryError):
        ceilings.measure_ceilings("cpu", print)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16", "fp8"])
def test_what_is_timed_is_the_product(dtype):
    torch.manual_seed(0)
    y_TO = ceilings.product(dtype, 32, 64, 48, "cpu")()
    torch.manual_seed(0)
    held = ceilings.DTYPES.get(dtype, torch.float32)
    expected_TO = torch.randn(32, 64, dtype=held).float() @ torch.randn(48, 64, dtype=held).float().T
    assert y_TO.shape == (32, 48)
    assert (y_TO.float() - expected_TO).norm() / expected_TO.norm() < 0.05


def test_shapes_are_measured_once_under_all_their_names_and_long_products_get_fewer_rows():
    matrices = [("q_proj", 64, 64), ("k_proj", 64, 32), ("o_proj", 64, 64), ("odd", 30, 30)]
    wide = ceilings.shape_rates(matrices, "float32", 128, 1.0, "cpu")
    assert [(rate.name, rate.rows) for rate in wide] == [("q_proj, o_proj", 128), ("k_proj", 128), ("odd", 128)]
    # 1e-7 TFLOP/s in a tenth of a second are 10,000 operations: one row of 64 x 64, but no fewer than 16 rows.
    narrow = ceilings.shape_rates(matrices, "fp8", 128, 1e-7, "cpu")
    assert [(rate.name, rate.rows) for rate in narrow] == [("q_proj, o_proj", 16), ("k_proj", 16)]
    assert all(rate.tflops > 0 for rate in (*wide, *narrow))
