"""Packed attention as one operator: what the plain packed path gives, forward and backward, with the kernels' own."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from surefoot.data.batch import lay_out
from surefoot.model.attention import packed_eager, packed_sdpa
from surefoot.model.attention_op import packed_attention

HEADS, KEY_HEADS, WIDTH = 4, 2, 8
DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU"))]


def make_qkv(tokens, seed, dtype, device="cpu", width=WIDTH):
    generator = torch.Generator().manual_seed(seed)
    sizes = (HEADS, KEY_HEADS, KEY_HEADS)
    made = [torch.randn(1, tokens, h, width, generator=generator, dtype=torch.float64).to(dtype) for h in sizes]
    return [x.to(device).transpose(1, 2).requires_grad_() for x in made]


def by_operator(qkv, layout, kernel="auto", window=None, softcap=None):
    scale = qkv[0].shape[-1] ** -0.5
    return packed_attention(
        *qkv, layout.tensors, scale=scale, softcap=softcap or 0.0, window=window or 0, kernel=kernel
    )


def with_grads(out, qkv):
    probe = torch.randn(out.shape, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    return out.detach(), *torch.autograd.grad((out * probe.to(out)).sum(), qkv)


@settings(max_examples=40, deadline=None)
@given(
    lengths=st.lists(st.integers(1, 23), min_size=1, max_size=6),
    padding=st.sampled_from([0, 1, 5]),
    kernel=st.sampled_from(["auto", "eager", "fused"]),
    window=st.sampled_from([None, 1, 5]),
    softcap=st.sampled_from([None, 3.0]),
    dtype=st.sampled_from([torch.float32, torch.float64, torch.bfloat16]),
)
def test_equals_the_plain_path(lengths, padding, kernel, window, softcap, dtype):
    layout = lay_out(lengths, padding)
    qkv = make_qkv(sum(lengths) + padding, sum(lengths), dtype)
    plain = packed_eager if kernel == "eager" else packed_sdpa
    other = plain(torch.nn.Identity(), *qkv, packed_layout=layout, sliding_window=window, softcap=softcap)[0]
    ours = with_grads(by_operator(qkv, layout, kernel, window, softcap), qkv)
    assert ours[0].is_contiguous() and not ours[0][:, sum(lengths) :].any()
    # Softmax and, for a soft cap, all of it is float32 in either; bfloat16 rounds each of a few results by 2^-9.
    bound = 0.03 if dtype == torch.bfloat16 else 1e-5
    for a, b in zip(ours, with_grads(other, qkv), strict=True):
        assert (a - b).norm() <= bound * (b.norm() + 1.0), (a - b).abs().max()


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("window", [None, 48])
@pytest.mark.parametrize("lengths", [[130, 96, 100, 31], [64, 64, 64], [200], [1024, 1024]])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_kernels_of_the_device(device, window, lengths, dtype):
    """Rows long enough for a GPU's kernels, against float64; rows of one length need no gathering."""
    layout = lay_out(lengths, 3)
    qkv = make_qkv(sum(lengths) + 3, 0, dtype, device, width=64)
    exact = [x.detach().cpu().double().requires_grad_() for x in qkv]
    expected, _ = packed_eager(torch.nn.Identity(), *exact, packed_layout=layout, sliding_window=window)
    sent = (layout.index_S.to(device), layout.shapes_2B, layout.bounds_N.to(device))
    out = packed_attention(*qkv, sent, scale=64**-0.5, window=window or 0, kernel="fused")
    bound = 0.01 if dtype == torch.bfloat16 else 1e-4 if device == "cuda" else 1e-5
    real = slice(0, sum(lengths))  # what padding gets from a kernel that takes it for a row is nobody's business
    for a, b in zip(with_grads(out[:, real], qkv), with_grads(expected[:, real], exact), strict=True):
        assert (a.cpu() - b).norm() <= bound * b.norm()


def test_the_operator_is_what_the_compiler_takes_it_for():
    layout = lay_out([5, 3, 9], 2)
    qkv = make_qkv(19, 0, torch.float64)
    qkv = [x.detach() for x in qkv]
    arguments = (*qkv, *layout.tensors, 0.3, 0.0, 0, "auto")
    tests = ("test_schema", "test_faketensor")  # gradients are not the operator's but the function's around it
    torch.library.opcheck(torch.ops.surefoot.packed_attention.default, arguments, test_utils=tests)
    results = torch.ops.surefoot.packed_attention(*arguments)
    backward = (torch.ones_like(results[0]), *results, *arguments)
    torch.library.opcheck(torch.ops.surefoot.packed_attention_backward.default, backward, test_utils=tests)
