"""Cross-entropy of logits and its gradient in one Triton kernel: 16-bit logits are read twice and overwritten once.

torch's own operations make about a dozen passes over float32 logits, some 50 bytes an element; this is 6 in 16 bits.
One program takes one row. Its first sweep keeps a running maximum and sum in each of many lanes, which meet only at
the end of the row; its second writes the gradient where the logits were, rounded once. `loss.plain_cross_entropy` is
the reference. Triton is imported here: only import this module where there is a GPU.

Legend of tensor suffixes: C rows, V vocabulary, R lanes, E neighbouring columns of a lane.
"""

from __future__ import annotations

from subprocess import CalledProcessError

import torch
import triton
import triton.language as tl
from triton.errors import TritonError

# What hinders the kernel where all else works: its own compile error, a chip that triton does not know
# (RuntimeError), no C compiler or no Python headers for the launcher, no folder to keep it in.
FAILURES = (TritonError, RuntimeError, CalledProcessError, OSError)
LANES = 256  # with 512, registers spill on sm_90 where the vocabulary is odd (Triton 3.7.1)
WIDTH = 8  # columns of a lane: 16 bytes of 16-bit logits
WARPS = 8  # 512 threads on a GPU with wavefronts of 64: the limit is 1024
LARGEST = tl.constexpr(3.4028234663852886e38)  # of float32


def cross_entropy_(
    logits_CV: torch.Tensor,
    targets_C: torch.Tensor,
    *,
    scale: float,
    softcap: float | None,
    smoothing: float,
    chance_stride: int,
) -> torch.Tensor:
    """Compute each row's cross-entropy, and overwrite the logits with its gradient for them.

    Args:
        logits_CV: what the head gave, float16, bfloat16 or float32, contiguous [rows, vocabulary]; overwritten.
        targets_C: token ids to predict, int64 [rows].
        scale: factor on the head's output.
        softcap: c in c · tanh(scaled logits / c), or None.
        smoothing: share of the target spread evenly over the vocabulary.
        chance_stride: every how many columns are read for the loss by chance.

    Returns:
        Float32 [rows, 3]: the loss, whether the target is the first of the largest logits, and the loss by chance.
    """
    rows, vocabulary = logits_CV.shape
    assert logits_CV.is_contiguous() and targets_C.shape == (rows,)
    targets_C = targets_C.contiguous()
    sums_C3 = torch.empty(rows, 3, dtype=torch.float32, device=logits_CV.device)
    with torch.cuda.device_of(logits_CV):
        cross_entropy_kernel[(rows,)](
            logits_CV, targets_C, sums_C3, vocabulary, scale, float(softcap or 0.0), smoothing, chance_stride,
            LANES, WIDTH, num_warps=WARPS,
        )  # fmt: skip
    return sums_C3


@triton.jit
def cross_entropy_kernel(
    logits_ptr,
    targets_ptr,
    sums_ptr,
    vocabulary: tl.constexpr,
    scale: tl.constexpr,
    softcap: tl.constexpr,  # 0 for none
    smoothing: tl.constexpr,
    chance_stride: tl.constexpr,
    lanes: tl.constexpr,
    width: tl.constexpr,
):
    """Do one row: see `cross_entropy_`. All numbers but the logits are float32; constants are part of the program."""
    row = tl.program_id(0).to(tl.int64)  # rows x vocabulary can pass 2^31
    logits_ptr += row * vocabulary
    target = tl.load(targets_ptr + row).to(tl.int32)
    # A target outside of the vocabulary gives a loss of NaN.
    inside = (target >= 0) & (target < vocabulary)
    target_logit = _shaped(tl.load(logits_ptr + target, mask=inside, other=float("nan")), scale, softcap)
    tile_RE = tl.arange(0, lanes)[:, None] * width + tl.arange(0, width)[None, :]

    # The columns that stand for all of the vocabulary: at most 1023, see `loss.by_chance`.
    seen = tl.arange(0, 1024) * chance_stride
    spread = _shaped(tl.load(logits_ptr + seen, mask=seen < vocabulary, other=0.0), scale, softcap)
    spread = tl.where(seen < vocabulary, spread, 0.0)
    spread_mean = tl.sum(spread, 0) / ((vocabulary + chance_stride - 1) // chance_stride)

    # The maximum stays finite: so an infinite logit gives an infinite sum, as in torch, and -inf - -inf never arises.
    max_R = tl.full([lanes], -LARGEST, tl.float32)
    sum_R = tl.zeros([lanes], tl.float32)
    before_R = tl.full([lanes], -LARGEST, tl.float32)  # largest logit of the columns before the target
    total_R = tl.zeros([lanes], tl.float32)
    for start in range(0, vocabulary, lanes * width):
        column_RE = start + tile_RE
        raw_RE = tl.load(logits_ptr + column_RE, mask=column_RE < vocabulary, other=0.0)
        x_RE = _shaped(raw_RE, scale, softcap)
        x_RE = tl.where(column_RE < vocabulary, x_RE, -float("inf"))
        new_R = tl.minimum(tl.maximum(max_R, tl.max(x_RE, 1)), LARGEST)
        sum_R = sum_R * tl.exp(max_R - new_R) + tl.sum(tl.exp(x_RE - new_R[:, None]), 1)
        max_R = new_R
        before_R = tl.maximum(before_R, tl.max(tl.where(column_RE < target, x_RE, -LARGEST), 1))
        if smoothing > 0.0:
            total_R += tl.sum(tl.where(column_RE < vocabulary, x_RE, 0.0), 1)

    largest = tl.max(max_R, 0)
    lse = largest + tl.log(tl.sum(sum_R * tl.exp(max_R - largest), 0))
    loss = lse - (1.0 - smoothing) * target_logit
    if smoothing > 0.0:
        loss -= smoothing * (tl.sum(total_R, 0) / vocabulary)
    first = (target_logit >= largest) & (target_logit > tl.max(before_R, 0))
    tl.store(sums_ptr + row * 3, loss)
    tl.store(sums_ptr + row * 3 + 1, tl.where(first, 1.0, 0.0))
    tl.store(sums_ptr + row * 3 + 2, lse - spread_mean)

    for start in range(0, vocabulary, lanes * width):
        column_RE = start + tile_RE
        raw_RE = tl.load(logits_ptr + column_RE, mask=column_RE < vocabulary, other=0.0)
        x_RE = _shaped(raw_RE, scale, softcap)
        grad_RE = tl.exp(x_RE - lse) - tl.where(column_RE == target, 1.0 - smoothing, 0.0)
        if smoothing > 0.0:
            grad_RE -= smoothing / vocabulary
        if softcap > 0.0:
            grad_RE *= 1.0 - (x_RE / softcap) * (x_RE / softcap)  # tanh's slope, from its value
        grad_RE *= scale
        tl.store(logits_ptr + column_RE, grad_RE.to(raw_RE.dtype), mask=column_RE < vocabulary)


@triton.jit
def _shaped(raw, scale: tl.constexpr, softcap: tl.constexpr):
    """Return logits as the model means them, in float32."""
    x = raw.to(tl.float32) * scale
    if softcap > 0.0:
        x = softcap * (2.0 * tl.sigmoid(x * (2.0 / softcap)) - 1.0)  # tanh u = 2 sigmoid(2u) - 1
    return x
