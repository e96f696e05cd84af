"""Packed attention: rows packed together compute what they compute alone, forward and backward."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from surefoot.data.batch import lay_out
from surefoot.model.attention import packed_eager, packed_sdpa

HEADS, KEY_HEADS, WIDTH = 4, 2, 8


def make_qkv(tokens, seed):
    generator = torch.Generator().manual_seed(seed)
    sizes = (HEADS, KEY_HEADS, KEY_HEADS)
    return [torch.randn(1, h, tokens, WIDTH, generator=generator, dtype=torch.float64).requires_grad_() for h in sizes]


def alone(q, k, v, window=None, softcap=None):
    """Plain attention, written out with an additive mask."""
    k, v = (x.repeat_interleave(HEADS // KEY_HEADS, dim=1) for x in (k, v))
    scores = q @ k.transpose(2, 3) / WIDTH**0.5
    if softcap:
        scores = softcap * torch.tanh(scores / softcap)
    places = torch.arange(q.shape[2])
    seen = places[:, None] >= places[None]
    if window:
        seen &= places[:, None] - places[None] < window
    return (scores.masked_fill(~seen, -torch.inf).softmax(-1) @ v).transpose(1, 2)


@settings(max_examples=40, deadline=None)
@given(
    lengths=st.lists(st.integers(1, 23), min_size=1, max_size=6),
    attention=st.sampled_from([packed_sdpa, packed_eager]),
    window=st.sampled_from([None, 1, 5]),
    softcap=st.sampled_from([None, 3.0]),
)
def test_packed_equals_alone(lengths, attention, window, softcap):
    q, k, v = make_qkv(sum(lengths), seed=sum(lengths))
    layout = lay_out(lengths)
    module = torch.nn.Identity()
    out, weights = attention(module, q, k, v, packed_layout=layout, sliding_window=window, softcap=softcap)
    parts = zip(*(x.split(list(lengths), dim=2) for x in (q, k, v)), strict=True)
    expected = torch.cat([alone(*part, window, softcap) for part in parts], dim=1)
    assert weights is None
    torch.testing.assert_close(out, expected, rtol=1e-5, atol=1e-5)
    probe = torch.randn(expected.shape, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    ours = torch.autograd.grad((out * probe).sum(), (q, k, v))
    theirs = torch.autograd.grad((expected * probe).sum(), (q, k, v))
    for a, b in zip(ours, theirs, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5)  # the written-out softmax is in float32


@given(lengths=st.lists(st.integers(1, 300), min_size=1, max_size=60))
def test_layout_numbers_every_token_once_and_pads_little(lengths):
    layout = lay_out(lengths)
    slots = torch.cat([bucket.flatten() for bucket in layout.buckets])
    assert torch.equal(slots[layout.slots_T], torch.arange(sum(lengths)))
    for bucket in layout.buckets:
        real = np.unique(bucket.numpy()).size
        assert real >= 0.75 * bucket.numel()


def test_a_model_with_attention_sinks_is_refused():
    q, k, v = make_qkv(3, 0)
    with pytest.raises(NotImplementedError, match="sinks"):
        packed_sdpa(torch.nn.Identity(), q, k, v, packed_layout=lay_out([3]), s_aux=torch.zeros(HEADS))


def test_without_a_layout_nothing_is_guessed():
    q, k, v = make_qkv(3, 0)
    with pytest.raises(NotImplementedError, match="layout"):
        packed_sdpa(torch.nn.Identity(), q, k, v)
