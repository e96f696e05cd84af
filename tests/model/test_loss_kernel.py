"""The loss kernel against torch: on a GPU where there is one, else in Triton's interpreter in a process of its own."""

from __future__ import annotations

import math
import os
import subprocess
import sys

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode

from surefoot.model import loss as loss_module
from surefoot.model.loss import (
    LogitShape,
    chunk_rows,
    fused_cross_entropy,
    kernel_is_right,
    linear_cross_entropy,
    plain_cross_entropy,
)

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
DEVICE = "cpu" if INTERPRETED else "cuda"
PLAIN, DTYPES = LogitShape(), [torch.float32, torch.float16, torch.bfloat16]
on_a_gpu = pytest.mark.skipif(INTERPRETED or not torch.cuda.is_available(), reason="no GPU")
runs_here = pytest.mark.skipif(
    not INTERPRETED and not torch.cuda.is_available(), reason="no GPU: test_all_of_it_in_tritons_interpreter runs it"
)


@pytest.mark.skipif(INTERPRETED or torch.cuda.is_available(), reason="the others run")
def test_all_of_it_in_tritons_interpreter():
    pytest.importorskip("triton", "3.7", reason="no triton, or one whose interpreter fails with numpy 2.4")
    outcome = subprocess.run(
        [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "-k", "not tritons_interpreter", __file__],
        env={**os.environ, "TRITON_INTERPRET": "1"}, capture_output=True, text=True,
    )  # fmt: skip
    assert outcome.returncode == 0, outcome.stdout[-5000:] + outcome.stderr[-2000:]
    assert " passed" in outcome.stdout


def made_logits(rows, vocabulary, dtype, spread=3.0):
    generator = torch.Generator().manual_seed(rows * 1000 + vocabulary)
    logits = (spread * torch.randn(rows, vocabulary, generator=generator)).to(dtype)
    return logits.to(DEVICE), torch.randint(vocabulary, (rows,), generator=generator).to(DEVICE)


def in_float64(logits, targets, shape, smoothing):
    leaf = logits.double().requires_grad_()
    shaped = leaf * shape.scale
    if shape.softcap is not None:
        shaped = shape.softcap * torch.tanh(shaped / shape.softcap)
    loss = F.cross_entropy(shaped, targets, reduction="sum", label_smoothing=smoothing)
    columns = shaped[:, :: max(1, shaped.shape[1] // 512)]
    chance = (shaped.logsumexp(-1) - columns.mean(-1)).sum()
    return loss.detach(), (shaped.argmax(-1) == targets).sum(), chance.detach(), torch.autograd.grad(loss, leaf)[0]


@runs_here
@settings(max_examples=30, deadline=None)
@given(
    rows=st.integers(1, 4),
    vocabulary=st.sampled_from([2, 3, 17, 511, 512, 1000, 1024, 2047, 2048, 2049, 4099, 7001]),
    dtype=st.sampled_from(DTYPES),
    scale=st.sampled_from([1.0, 0.25, 2.0]),
    softcap=st.sampled_from([None, 10.0, 30.0]),
    smoothing=st.sampled_from([0.0, 0.1]),
)
def test_equals_float64_and_torchs_operations(rows, vocabulary, dtype, scale, softcap, smoothing):
    logits, targets = made_logits(rows, vocabulary, dtype)
    shape = LogitShape(scale, softcap)
    loss, correct, chance, grad = in_float64(logits, targets, shape, smoothing)
    plain, _ = plain_cross_entropy(logits.clone(), targets, shape, smoothing)
    found, found_grad = fused_cross_entropy(logits, targets, shape, smoothing)
    assert found_grad.data_ptr() == logits.data_ptr() and found_grad.dtype == dtype
    for ours in (found, plain):
        torch.testing.assert_close(ours.loss.double(), loss, rtol=1e-5, atol=1e-5)
        torch.testing.assert_close(ours.chance.double(), chance, rtol=1e-5, atol=1e-5)
        assert int(ours.correct) == int(correct)
    # One rounding of the result; the interpreter cuts bfloat16 off instead, which is twice as much.
    rounding = {torch.float32: 1e-5, torch.float16: 2.0**-10, torch.bfloat16: 2.0**-7}[dtype]
    torch.testing.assert_close(found_grad.double(), grad, rtol=rounding, atol=1e-7 if dtype == torch.float16 else 1e-6)


@runs_here
@pytest.mark.parametrize("dtype", DTYPES)
def test_the_targets_gradient_is_rounded_once(dtype):
    # A target that is nearly certain: p rounded first is 1, and p - 1 would be 0.
    logits = torch.zeros(1, 64, dtype=dtype, device=DEVICE)
    logits[0, 5] = 12.0
    wanted = -63 / (63 + math.exp(12.0))
    _, grad = fused_cross_entropy(logits, torch.tensor([5], device=DEVICE), PLAIN, 0.0)
    assert float(grad[0, 5]) == pytest.approx(wanted, rel=0.01)


NAN, INF = float("nan"), float("inf")


@runs_here
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("softcap", [None, 10.0])
@pytest.mark.parametrize(
    "planted",
    [{5: NAN}, {700: NAN}, {3: INF}, {900: INF}, {3: INF, 900: INF}, {900: -INF}, {3: -INF}, {3: INF, 4: NAN}],
)
def test_what_is_not_finite_shows_as_in_torchs_operations(dtype, softcap, planted):
    logits, _ = made_logits(2, 1000, dtype)
    for column, value in planted.items():
        logits[0, column] = value
    targets = torch.tensor([3, 4], device=DEVICE)
    for row in (0, 1):  # the row beside it stays clean
        one, target = logits[row : row + 1], targets[row : row + 1]
        plain, plain_grad = plain_cross_entropy(one.clone(), target, LogitShape(1.0, softcap), 0.0)
        found, grad = fused_cross_entropy(one.clone(), target, LogitShape(1.0, softcap), 0.0)
        torch.testing.assert_close(found.loss, plain.loss, equal_nan=True)
        torch.testing.assert_close(grad.float(), plain_grad, equal_nan=True, rtol=0.01, atol=1e-6)


@runs_here
def test_a_row_of_nothing_but_minus_infinity_and_a_target_outside_are_not_finite():
    logits = torch.full((1, 3000), -INF, device=DEVICE)
    found, grad = fused_cross_entropy(logits, torch.tensor([1], device=DEVICE), PLAIN, 0.0)
    assert found.loss.isnan() and grad.isnan().all()
    for outside in (-100, 3000):
        logits = torch.zeros(1, 3000, device=DEVICE)
        assert fused_cross_entropy(logits, torch.tensor([outside], device=DEVICE), PLAIN, 0.0)[0].loss.isnan()


@runs_here
@pytest.mark.parametrize(("target", "correct"), [(1, 1), (2500, 0), (7, 0)])
def test_of_equal_logits_the_first_is_the_prediction(target, correct):
    logits = torch.zeros(1, 3001, dtype=torch.bfloat16, device=DEVICE)
    logits[0, [1, 2, 2500]] = 5.0
    assert int(fused_cross_entropy(logits, torch.tensor([target], device=DEVICE), PLAIN, 0.0)[0].correct) == correct


@runs_here
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_whole_loss_and_its_gradients_are_those_of_torchs_operations(dtype, monkeypatch):
    generator = torch.Generator().manual_seed(0)
    make = lambda *size: torch.randn(*size, generator=generator).to(DEVICE, dtype).requires_grad_()  # noqa: E731
    leaves = (make(9, 16), make(301, 16), make(301))
    targets = torch.randint(301, (9,), generator=generator).to(DEVICE)
    monkeypatch.setattr(loss_module, "chunk_rows", lambda *_: 4)

    def run(fused):
        calls = []
        with monkeypatch.context() as patch:
            patch.setattr(loss_module, "kernel_is_right", lambda *_: fused)
            if fused:  # on a CPU the plain path is the one that is taken
                counted = lambda *args: calls.append(1) or fused_cross_entropy(*args)  # noqa: E731
                patch.setattr(loss_module, "plain_cross_entropy", counted)
                patch.setattr(loss_module, "fused_cross_entropy", counted)
            sums = linear_cross_entropy(*leaves, targets, shape=LogitShape(0.5, 20.0), label_smoothing=0.1)
        assert len(calls) == (3 if fused else 0)
        return sums.loss.detach(), sums.correct, sums.chance, *torch.autograd.grad(sums.loss * 0.1, leaves)

    rtol = 1e-5 if dtype == torch.float32 else 0.05
    for ours, theirs in zip(run(True), run(False), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=rtol, atol=rtol / 10)


def on_trial(vocabulary=700, dtype=torch.bfloat16, device=DEVICE):
    return kernel_is_right.__wrapped__(torch.device(device), dtype, vocabulary, LogitShape(0.5, 20.0), 0.1)


@runs_here
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("vocabulary", [2, 700, 4099, 32_000])
def test_the_kernel_passes_its_trial(vocabulary, dtype, recwarn):
    assert on_trial(vocabulary, dtype)
    assert not recwarn.list


@runs_here
@pytest.mark.parametrize("error", [RuntimeError("no C compiler\nat all"), OSError("no C compiler")])
def test_a_kernel_that_does_not_run_is_named_and_not_used(monkeypatch, error):
    def fail(*_):
        raise error

    monkeypatch.setattr(loss_module, "fused_cross_entropy", fail)
    with pytest.warns(UserWarning, match="without its fused kernel: no C compiler$"):
        assert not on_trial()


@runs_here
def test_a_full_memory_is_no_verdict(monkeypatch):
    def fail(*_):
        raise torch.OutOfMemoryError("full")

    monkeypatch.setattr(loss_module, "fused_cross_entropy", fail)
    with pytest.raises(torch.OutOfMemoryError):
        on_trial()


@runs_here
@pytest.mark.parametrize("wrong", ["gradient", "one gradient", "loss", "nan"])
def test_a_kernel_that_computes_wrong_numbers_is_not_used(monkeypatch, wrong):
    def faulty(logits, *args):
        sums, grad = fused_cross_entropy(logits, *args)
        if wrong == "gradient":
            grad.mul_(1.05)
        elif wrong == "one gradient":
            grad[1, 350] += 0.1
        elif wrong == "nan":
            grad[0, 0] = NAN
        else:
            sums.loss.mul_(1.01)
        return sums, grad

    monkeypatch.setattr(loss_module, "fused_cross_entropy", faulty)
    with pytest.warns(UserWarning, match="its numbers are not those"):
        assert not on_trial()


def test_without_triton_it_is_said_and_the_plain_operations_are_used(monkeypatch):
    monkeypatch.setitem(sys.modules, "surefoot.model.loss_kernel", None)
    with pytest.warns(UserWarning, match="without its fused kernel"):
        assert not on_trial(device="cpu")
    assert not on_trial(device="cpu", dtype=torch.float64)


class Names(TorchDispatchMode):
    def __init__(self):
        super().__init__()
        self.seen = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.seen.append(func.name())
        return func(*args, **(kwargs or {}))


@on_a_gpu
def test_who_watches_each_operation_sees_plain_ones(monkeypatch):
    def refuse(*_):
        raise AssertionError("the kernel ran")

    hidden, weight = torch.randn(4, 8, device="cuda"), torch.randn(11, 8, device="cuda")
    monkeypatch.setattr(loss_module, "fused_cross_entropy", refuse)
    monkeypatch.setattr(loss_module, "kernel_is_right", lambda *_: True)
    with Names() as names:
        linear_cross_entropy(hidden, weight, None, torch.arange(4, device="cuda"))
    assert "aten::logsumexp" in names.seen
    with pytest.raises(AssertionError, match="the kernel ran"):
        linear_cross_entropy(hidden, weight, None, torch.arange(4, device="cuda"))


@on_a_gpu
def test_more_than_two_billion_logits():
    vocabulary = 128_256
    rows = 2**31 // vocabulary + 3
    if torch.cuda.mem_get_info()[0] < 3 * 2 * rows * vocabulary:
        pytest.skip("too little free GPU memory")
    logits = torch.zeros(rows, vocabulary, dtype=torch.bfloat16, device="cuda")
    last, target = made_logits(1, vocabulary, torch.bfloat16)
    logits[-1:] = last
    wanted, wanted_grad = plain_cross_entropy(last, target, PLAIN, 0.0)
    targets = torch.zeros(rows, dtype=torch.int64, device="cuda")
    targets[-1:] = target
    found, grad = fused_cross_entropy(logits, targets, PLAIN, 0.0)
    torch.testing.assert_close(found.loss, wanted.loss + (rows - 1) * math.log(vocabulary), rtol=1e-5, atol=0.0)
    torch.testing.assert_close(grad[-1:].float(), wanted_grad, rtol=0.01, atol=1e-7)


@on_a_gpu
def test_a_real_sized_chunk():
    vocabulary = 128_256
    logits, targets = made_logits(min(512, chunk_rows(vocabulary)), vocabulary, torch.bfloat16)
    wanted, wanted_grad = plain_cross_entropy(logits.clone(), targets, PLAIN, 0.0)
    found, grad = fused_cross_entropy(logits, targets, PLAIN, 0.0)
    torch.testing.assert_close(found.loss, wanted.loss, rtol=1e-5, atol=0.0)
    torch.testing.assert_close(found.chance, wanted.chance, rtol=1e-5, atol=0.0)
    assert int(found.correct) == int(wanted.correct)
    torch.testing.assert_close(grad.float(), wanted_grad, rtol=2.0**-8, atol=1e-9)
