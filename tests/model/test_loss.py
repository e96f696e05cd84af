"""The chunked loss against torch's own cross-entropy: values and gradients."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.nn import functional as F

from surefoot.model import loss as loss_module
from surefoot.model.loss import LogitShape, linear_cross_entropy, logits_cross_entropy


def reference(hidden, weight, bias, targets, shape, smoothing):
    logits = F.linear(hidden, weight, bias) * shape.scale
    if shape.softcap is not None:
        logits = shape.softcap * torch.tanh(logits / shape.softcap)
    return F.cross_entropy(logits, targets, reduction="sum", label_smoothing=smoothing), logits


@settings(max_examples=40, deadline=None)
@given(
    tokens=st.integers(1, 40),
    vocabulary=st.integers(2, 61),
    scale=st.sampled_from([1.0, 0.25, 2.0]),
    softcap=st.sampled_from([None, 10.0, 30.0]),
    smoothing=st.sampled_from([0.0, 0.1]),
    with_bias=st.booleans(),
    chunk=st.integers(1, 50),
)
def test_equals_torch_in_value_and_gradients(tokens, vocabulary, scale, softcap, smoothing, with_bias, chunk):
    generator = torch.Generator().manual_seed(tokens * 100 + vocabulary)
    make = lambda *size: torch.randn(*size, generator=generator, dtype=torch.float64).requires_grad_()  # noqa: E731
    hidden, weight = make(tokens, 8), make(vocabulary, 8)
    bias = make(vocabulary) if with_bias else None
    targets = torch.randint(vocabulary, (tokens,), generator=generator)
    shape = LogitShape(scale, softcap)
    leaves = [t for t in (hidden, weight, bias) if t is not None]
    expected, logits = reference(hidden, weight, bias, targets, shape, smoothing)
    expected_grads = torch.autograd.grad(expected * 0.3, leaves)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(loss_module, "chunk_rows", lambda *_: chunk)
        found = linear_cross_entropy(hidden, weight, bias, targets, shape=shape, label_smoothing=smoothing)
        grads = torch.autograd.grad(found.loss * 0.3, leaves)
    torch.testing.assert_close(found.loss.double(), expected, rtol=1e-5, atol=1e-5)
    assert int(found.correct) == int((logits.argmax(-1) == targets).sum())
    # The mean over all labels that a token could have had.
    by_lot = (logits.logsumexp(-1, keepdim=True) - logits).mean(-1).sum()
    torch.testing.assert_close(found.chance.double(), by_lot, rtol=1e-5, atol=1e-4)
    assert not found.chance.requires_grad
    for ours, theirs in zip(grads, expected_grads, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-5)


def test_chance_of_a_large_vocabulary_is_near_the_mean_over_all_of_it():
    generator = torch.Generator().manual_seed(0)
    logits = 3 * torch.randn(16, 100_003, generator=generator)
    whole = (logits.logsumexp(-1, keepdim=True) - logits).mean(-1).sum()
    sums = logits_cross_entropy(logits, torch.zeros(16, dtype=torch.int64))
    torch.testing.assert_close(sums.chance, whole, rtol=0.02, atol=0.0)


def test_frozen_head_gets_no_gradient_and_costs_no_buffer():
    hidden = torch.randn(5, 8, requires_grad=True)
    weight = torch.randn(11, 8)
    linear_cross_entropy(hidden, weight, None, torch.arange(5)).loss.backward()
    assert weight.grad is None
    assert hidden.grad is not None


def test_half_precision_gradient_survives_a_tiny_factor():
    # 1/tokens of a large step is below float16's smallest normal; the loss scale brings it back in one product.
    hidden = torch.randn(4, 8, dtype=torch.float16, requires_grad=True)
    weight = torch.randn(11, 8, dtype=torch.float16)
    found = linear_cross_entropy(hidden, weight, None, torch.arange(4))
    (found.loss / 1e6 * 2.0**16).backward()
    assert (hidden.grad != 0).float().mean() > 0.9


def test_a_nan_stays_a_nan():
    hidden = torch.randn(4, 8)
    hidden[2, 3] = float("nan")
    assert linear_cross_entropy(hidden, torch.randn(11, 8), None, torch.arange(4)).loss.isnan()
