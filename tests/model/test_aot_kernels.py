"""Every Triton kernel of ours compiles well for the chips that we name, AMD's first of all; no GPU is needed."""

from __future__ import annotations

import importlib
import os
import sys
from dataclasses import replace
from pathlib import Path

import pytest

triton = pytest.importorskip("triton", reason="triton is not installed")
tl = pytest.importorskip("triton.language")
sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "benchmarks"))

aot = importlib.import_module("aot_report")
BY_NAME = {target.name: target for target in aot.TARGETS}
pytestmark = pytest.mark.skipif(os.environ.get("TRITON_INTERPRET") == "1", reason="the interpreter compiles nothing")


@pytest.fixture(autouse=True)
def nothing_compiled_before(tmp_path, monkeypatch):
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))


def test_every_kernel_compiles_for_every_chip_without_a_fault():
    outcomes = aot.report()
    assert {"gfx90a", "gfx942", "gfx950", "gfx1100", "gfx1201", "sm_90"} == {o.target.name for o in outcomes}
    assert [fault for outcome in outcomes for fault in outcome.faults()] == []
    assert len(aot.table(outcomes).splitlines()) == 2 + len(outcomes)
    assert all(outcome.vgprs > 8 for outcome in outcomes)


@triton.jit
def matrix_product(a_ptr, b_ptr, c_ptr, inner: tl.constexpr, side: tl.constexpr, step: tl.constexpr):
    rows, columns, depth = tl.arange(0, side), tl.arange(0, side), tl.arange(0, step)
    total = tl.zeros([side, side], tl.float32)
    for start in range(0, inner, step):
        a = tl.load(a_ptr + rows[:, None] * inner + start + depth[None, :])
        b = tl.load(b_ptr + (start + depth[:, None]) * side + columns[None, :])
        total = tl.dot(a, b, total)
    tl.store(c_ptr + rows[:, None] * side + columns[None, :], total)


def product(side, step, warps, dtype="bf16"):
    pointers = {"a_ptr": f"*{dtype}", "b_ptr": f"*{dtype}", "c_ptr": "*fp32"}
    return aot.Variant("product", matrix_product, pointers, {"inner": 1024, "side": side, "step": step}, warps)


@pytest.mark.parametrize("name", ["gfx942", "gfx1201", "sm_90"])
def test_matrix_instructions_are_counted(name):
    outcome = aot.compile_for(product(64, 32, 4), BY_NAME[name])
    assert outcome.matrix is not None and outcome.matrix > 0
    assert outcome.faults() == []


def test_a_matrix_product_without_matrix_instructions_is_a_fault():
    (fault,) = aot.compile_for(product(32, 16, 4, "fp32"), BY_NAME["gfx1100"]).faults()
    assert "without matrix instructions" in fault


def test_spills_and_too_much_shared_memory_are_faults():
    outcome = aot.compile_for(product(256, 128, 4), BY_NAME["gfx942"])
    assert outcome.spills and outcome.lds > 64 * 1024
    assert len(outcome.faults()) == 2


def test_spills_on_nvidia_are_a_fault():
    (fault,) = aot.compile_for(product(256, 32, 4), BY_NAME["sm_90"]).faults()
    assert "scratch" in fault


def test_more_threads_than_a_workgroup_has_is_a_fault():
    outcome = aot.Outcome("any", BY_NAME["gfx942"], 16, 20, 20, 0, 0, 0, None)
    assert outcome.faults() == []
    assert replace(outcome, target=BY_NAME["gfx1100"], warps=32).faults() == []
    assert len(replace(outcome, warps=32).faults()) == 1
