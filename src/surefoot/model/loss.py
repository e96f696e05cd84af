"""Cross-entropy of a linear head, a chunk of rows at a time: the whole logits matrix never exists.

For a frozen or trainable head weight W and hidden states x, the loss and its gradient for x (and W) are computed
together in the forward pass, since softmax gives both at once; the backward pass only scales them. Rows without a
label never reach the head: the caller passes trained rows alone.

Legend of tensor suffixes: K trained tokens, C rows of a chunk, M model width, V vocabulary.
"""

from __future__ import annotations

import warnings
from dataclasses import astuple, dataclass
from functools import cache
from typing import Any

import torch
from torch.nn import functional as F

# Bytes of float32 logits that a chunk may hold; 2k to 4k rows of a 32k vocabulary. Each chunk reads the head twice:
# where a GPU has memory to spare, four times as many rows make that a quarter of it.
CHUNK_BYTES = 256 * 2**20
LARGE_CHUNK_BYTES, LARGE_MEMORY = 2**30, 40 * 2**30
MIN_CHUNK_ROWS = 64
CHANCE_COLUMNS = 512  # of the vocabulary, evenly spread, that stand for all of it in the loss by chance


@dataclass(frozen=True)
class LogitShape:
    """What a model does to its logits after the head.

    Attributes:
        scale: factor on the head's output (Cohere multiplies by `logit_scale`, Granite divides).
        softcap: c in c · tanh(logits / c) (Gemma 2 and 3); None for none.
    """

    scale: float = 1.0
    softcap: float | None = None


@dataclass(frozen=True)
class LossSums:
    """Sums over the trained tokens of a pass, still on the device.

    Attributes:
        loss: sum of the token losses in nats, float32 scalar; carries the gradient.
        correct: tokens whose label is the most likely one, int64 scalar.
        chance: what `loss` would be on average with labels drawn by lot, float32 scalar; no gradient.
    """

    loss: torch.Tensor
    correct: torch.Tensor
    chance: torch.Tensor


def chunk_rows(vocabulary: int, memory: int = 0) -> int:
    """Choose how many rows of logits to hold at once.

    Args:
        vocabulary: columns.
        memory: of the GPU in bytes; 0 on a CPU.

    Returns:
        Rows of a chunk.
    """
    bytes_held = LARGE_CHUNK_BYTES if memory >= LARGE_MEMORY else CHUNK_BYTES
    return max(MIN_CHUNK_ROWS, bytes_held // (4 * vocabulary))


def _memory_of(tensor: torch.Tensor) -> int:
    return torch.cuda.get_device_properties(tensor.device).total_memory if tensor.is_cuda else 0


def linear_cross_entropy(
    hidden_KM: torch.Tensor,
    weight_VM: torch.Tensor,
    bias_V: torch.Tensor | None,
    targets_K: torch.Tensor,
    *,
    shape: LogitShape = LogitShape(),
    label_smoothing: float = 0.0,
    upcast: bool = False,
) -> LossSums:
    """Sum the cross-entropy of `hidden @ weight.T + bias` against the targets.

    Args:
        hidden_KM: final hidden states of the trained tokens, [tokens, width].
        weight_VM: head weight, [vocabulary, width]; multiplied in `hidden_KM`'s dtype.
        bias_V: head bias, [vocabulary], or None.
        targets_K: token ids to predict, int64 [tokens].
        shape: scale and soft cap of the logits.
        label_smoothing: share of the target spread evenly over the vocabulary, as in transformers' LabelSmoother.
        upcast: multiply in float32 whatever the hidden states' dtype.

    Returns:
        The summed loss, the count of correct predictions, and the loss by chance.
    """
    if upcast:
        hidden_KM = hidden_KM.float()
    return LossSums(*_LinearCrossEntropy.apply(hidden_KM, weight_VM, bias_V, targets_K, shape, label_smoothing))


def logits_cross_entropy(logits_KV: torch.Tensor, targets_K: torch.Tensor, label_smoothing: float = 0.0) -> LossSums:
    """Sum the cross-entropy of logits that the model itself has made.

    Args:
        logits_KV: logits of the trained tokens, [tokens, vocabulary].
        targets_K: token ids to predict, int64 [tokens].
        label_smoothing: share of the target spread evenly over the vocabulary.

    Returns:
        The summed loss, the count of correct predictions, and the loss by chance.
    """
    logits_KV = logits_KV.float()
    loss = F.cross_entropy(logits_KV, targets_K, reduction="sum", label_smoothing=label_smoothing)
    seen_KV = logits_KV.detach()
    chance = by_chance(seen_KV, torch.logsumexp(seen_KV, dim=-1))
    return LossSums(loss, (seen_KV.argmax(-1) == targets_K).sum(), chance)


def by_chance(logits_CV: torch.Tensor, lse_C: torch.Tensor) -> torch.Tensor:
    """Sum what the tokens would cost on average with labels drawn by lot from the vocabulary.

    Args:
        logits_CV: float32 [tokens, vocabulary].
        lse_C: their log of the sum of exponentials, [tokens].

    Returns:
        The sum in nats, a scalar; of a large vocabulary only evenly spread columns are read.
    """
    return (lse_C - logits_CV[:, :: _chance_stride(logits_CV.shape[1])].mean(-1)).sum()


def _chance_stride(vocabulary: int) -> int:
    return max(1, vocabulary // CHANCE_COLUMNS)


class _LinearCrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        hidden_KM: torch.Tensor,
        weight_VM: torch.Tensor,
        bias_V: torch.Tensor | None,
        targets_K: torch.Tensor,
        shape: LogitShape,
        smoothing: float,
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        want_hidden, want_weight, want_bias = ctx.needs_input_grad[:3]
        head_VM = weight_VM.to(hidden_KM.dtype)
        offset_V = None if bias_V is None else bias_V.to(hidden_KM.dtype)
        d_hidden_KM = torch.empty_like(hidden_KM) if want_hidden else None
        d_weight_VM = torch.zeros_like(weight_VM, dtype=torch.float32) if want_weight else None
        d_bias_V = torch.zeros_like(bias_V, dtype=torch.float32) if want_bias and bias_V is not None else None
        loss = torch.zeros((), dtype=torch.float32, device=hidden_KM.device)
        correct = torch.zeros((), dtype=torch.int64, device=hidden_KM.device)
        chance = torch.zeros_like(loss)
        rows = chunk_rows(weight_VM.shape[0], _memory_of(hidden_KM))
        for start in range(0, hidden_KM.shape[0], rows):
            chunk = slice(start, start + rows)
            x_CM, y_C = hidden_KM[chunk], targets_K[chunk]
            sums, d_logits_CV = _chunk(x_CM, head_VM, offset_V, y_C, shape, smoothing)
            loss += sums.loss
            correct += sums.correct
            chance += sums.chance
            d_CV = d_logits_CV.to(hidden_KM.dtype)
            if d_hidden_KM is not None:
                torch.mm(d_CV, head_VM, out=d_hidden_KM[chunk])
            if d_weight_VM is not None:
                d_weight_VM += torch.mm(d_CV.T, x_CM)
            if d_bias_V is not None:
                d_bias_V += d_logits_CV.sum(0, dtype=torch.float32)
        ctx.save_for_backward(d_hidden_KM, d_weight_VM, d_bias_V)
        ctx.dtypes = (weight_VM.dtype, None if bias_V is None else bias_V.dtype)
        ctx.mark_non_differentiable(correct, chance)
        return loss, correct, chance

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        scale = grads[0]
        d_hidden_KM, d_weight_VM, d_bias_V = ctx.saved_tensors
        weight_dtype, bias_dtype = ctx.dtypes
        return (
            # Scaled in float32: in float16 the factor 1/tokens itself could vanish before the product is taken.
            None if d_hidden_KM is None else (d_hidden_KM.float() * scale).to(d_hidden_KM.dtype),
            None if d_weight_VM is None else (d_weight_VM * scale).to(weight_dtype),
            None if d_bias_V is None else (d_bias_V * scale).to(bias_dtype),
            None,
            None,
            None,
        )


def _chunk(
    x_CM: torch.Tensor,
    head_VM: torch.Tensor,
    offset_V: torch.Tensor | None,
    y_C: torch.Tensor,
    shape: LogitShape,
    smoothing: float,
) -> tuple[LossSums, torch.Tensor]:
    """Return a chunk's sums, and d loss / d (head output), float32 or the hidden states' dtype [rows, vocabulary]."""
    logits_CV = F.linear(x_CM, head_VM, offset_V)
    watched = torch._C._len_torch_dispatch_stack() > 0  # whoever watches each operation must see the plain ones
    kind = (logits_CV.device, logits_CV.dtype, logits_CV.shape[1], shape, smoothing)
    if logits_CV.is_cuda and not watched and kernel_is_right(*kind):
        return fused_cross_entropy(logits_CV, y_C, shape, smoothing)
    return plain_cross_entropy(logits_CV, y_C, shape, smoothing)


def plain_cross_entropy(
    logits_CV: torch.Tensor, y_C: torch.Tensor, shape: LogitShape, smoothing: float
) -> tuple[LossSums, torch.Tensor]:
    """Compute cross-entropy and its gradient by torch's own operations: on a CPU, and as the kernel's reference.

    Args:
        logits_CV: what the head gave, [rows, vocabulary]; float32 ones are overwritten.
        y_C: token ids to predict, int64 [rows].
        shape: scale and soft cap.
        smoothing: share of the target spread evenly over the vocabulary.

    Returns:
        The sums, and d loss / d logits as float32 [rows, vocabulary].
    """
    logits_CV = logits_CV.float()
    if shape.scale != 1.0:
        logits_CV = logits_CV * shape.scale
    if shape.softcap is not None:
        logits_CV = shape.softcap * torch.tanh(logits_CV / shape.softcap)
    # loss = lse - (1 - e) · logit[y] - e · mean(logits), since log p = logit - lse.
    lse_C = torch.logsumexp(logits_CV, dim=-1)
    loss = (lse_C - (1.0 - smoothing) * logits_CV.gather(1, y_C[:, None])[:, 0]).sum()
    if smoothing:
        loss = loss - smoothing * logits_CV.mean(-1).sum()
    sums = LossSums(loss, (logits_CV.argmax(-1) == y_C).sum(), by_chance(logits_CV, lse_C))
    slope_CV = None if shape.softcap is None else 1.0 - (logits_CV / shape.softcap) ** 2  # of tanh, from its value
    d_CV = logits_CV.sub_(lse_C[:, None]).exp_()  # in place: the logits are not needed any more
    d_CV.scatter_add_(1, y_C[:, None], torch.full_like(d_CV[:, :1], smoothing - 1.0))
    if smoothing:
        d_CV -= smoothing / d_CV.shape[1]
    if slope_CV is not None:
        d_CV *= slope_CV
    if shape.scale != 1.0:
        d_CV *= shape.scale
    return sums, d_CV


def fused_cross_entropy(
    logits_CV: torch.Tensor, y_C: torch.Tensor, shape: LogitShape, smoothing: float
) -> tuple[LossSums, torch.Tensor]:
    """Compute cross-entropy by our kernel, which puts the gradient where the logits were, in their dtype.

    Args:
        logits_CV: what the head gave, [rows, vocabulary] on a GPU; overwritten.
        y_C: token ids to predict, int64 [rows].
        shape: scale and soft cap.
        smoothing: share of the target spread evenly over the vocabulary.

    Returns:
        The sums, and d loss / d logits.
    """
    from surefoot.model.loss_kernel import cross_entropy_

    stride = _chance_stride(logits_CV.shape[1])
    sums_C3 = cross_entropy_(
        logits_CV, y_C, scale=shape.scale, softcap=shape.softcap, smoothing=smoothing, chance_stride=stride
    )
    loss, correct, chance = sums_C3.sum(0)
    return LossSums(loss, correct.long(), chance), logits_CV


@cache
def kernel_is_right(
    device: torch.device, dtype: torch.dtype, vocabulary: int, shape: LogitShape, smoothing: float
) -> bool:
    """Try our kernel against torch's operations on two rows, once for each way it is compiled; warn where it fails.

    Args:
        device: a GPU.
        dtype: of the logits.
        vocabulary: columns.
        shape: scale and soft cap.
        smoothing: label smoothing.

    Returns:
        True where it may be used.
    """
    if dtype not in (torch.float16, torch.bfloat16, torch.float32):
        return False
    try:
        from surefoot.model.loss_kernel import FAILURES
    except ImportError as error:
        return _goes_without(device, str(error))
    logits_CV = torch.arange(2 * vocabulary, device=device).view(2, vocabulary).sin().mul(4).to(dtype)
    y_C = torch.tensor([vocabulary - 1, vocabulary // 2], device=device)
    wanted, wanted_CV = plain_cross_entropy(logits_CV.clone(), y_C, shape, smoothing)
    try:
        found, found_CV = fused_cross_entropy(logits_CV, y_C, shape, smoothing)
    except torch.OutOfMemoryError:
        raise
    except FAILURES as error:
        return _goes_without(device, str(error).strip() or type(error).__name__)
    same = torch.allclose(found_CV.float(), wanted_CV, rtol=0.02, atol=1e-6)
    same = same and all(torch.isclose(f, w, rtol=1e-4) for f, w in zip(astuple(found), astuple(wanted), strict=True))
    return same or _goes_without(device, "its numbers are not those of torch's operations")


def _goes_without(device: torch.device, reason: str) -> bool:
    warnings.warn(f"The loss on {device} runs without its fused kernel: {reason.splitlines()[0][:300]}", stacklevel=3)
    return False
