"""Cross-entropy of a linear head, a chunk of rows at a time: the whole logits matrix never exists.

For a frozen or trainable head weight W and hidden states x, the loss and its gradient for x (and W) are computed
together in the forward pass, since softmax gives both at once; the backward pass only scales them. Rows without a
label never reach the head: the caller passes trained rows alone.

Legend of tensor suffixes: K trained tokens, C rows of a chunk, M model width, V vocabulary.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch.nn import functional as F

# Bytes of float32 logits that a chunk may hold; 2k to 4k rows of a 32k vocabulary.
CHUNK_BYTES = 256 * 2**20
MIN_CHUNK_ROWS = 64


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
    """

    loss: torch.Tensor
    correct: torch.Tensor


def chunk_rows(vocabulary: int) -> int:
    """Choose how many rows of logits to hold at once."""
    return max(MIN_CHUNK_ROWS, CHUNK_BYTES // (4 * vocabulary))


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
        The summed loss and the count of correct predictions.
    """
    if upcast:
        hidden_KM = hidden_KM.float()
    loss, correct = _LinearCrossEntropy.apply(hidden_KM, weight_VM, bias_V, targets_K, shape, label_smoothing)
    return LossSums(loss, correct)


def logits_cross_entropy(logits_KV: torch.Tensor, targets_K: torch.Tensor, label_smoothing: float = 0.0) -> LossSums:
    """Sum the cross-entropy of logits that the model itself has made.

    Args:
        logits_KV: logits of the trained tokens, [tokens, vocabulary].
        targets_K: token ids to predict, int64 [tokens].
        label_smoothing: share of the target spread evenly over the vocabulary.

    Returns:
        The summed loss and the count of correct predictions.
    """
    logits_KV = logits_KV.float()
    loss = F.cross_entropy(logits_KV, targets_K, reduction="sum", label_smoothing=label_smoothing)
    return LossSums(loss, (logits_KV.detach().argmax(-1) == targets_K).sum())


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
    ) -> tuple[torch.Tensor, torch.Tensor]:
        want_hidden, want_weight, want_bias = ctx.needs_input_grad[:3]
        head_VM = weight_VM.to(hidden_KM.dtype)
        offset_V = None if bias_V is None else bias_V.to(hidden_KM.dtype)
        d_hidden_KM = torch.empty_like(hidden_KM) if want_hidden else None
        d_weight_VM = torch.zeros_like(weight_VM, dtype=torch.float32) if want_weight else None
        d_bias_V = torch.zeros_like(bias_V, dtype=torch.float32) if want_bias and bias_V is not None else None
        loss = torch.zeros((), dtype=torch.float32, device=hidden_KM.device)
        correct = torch.zeros((), dtype=torch.int64, device=hidden_KM.device)
        rows = chunk_rows(weight_VM.shape[0])
        for start in range(0, hidden_KM.shape[0], rows):
            chunk = slice(start, start + rows)
            x_CM, y_C = hidden_KM[chunk], targets_K[chunk]
            chunk_loss, chunk_correct, d_logits_CV = _chunk(x_CM, head_VM, offset_V, y_C, shape, smoothing)
            loss += chunk_loss
            correct += chunk_correct
            d_CV = d_logits_CV.to(hidden_KM.dtype)
            if d_hidden_KM is not None:
                torch.mm(d_CV, head_VM, out=d_hidden_KM[chunk])
            if d_weight_VM is not None:
                d_weight_VM += torch.mm(d_CV.T, x_CM)
            if d_bias_V is not None:
                d_bias_V += d_logits_CV.sum(0)
        ctx.save_for_backward(d_hidden_KM, d_weight_VM, d_bias_V)
        ctx.dtypes = (weight_VM.dtype, None if bias_V is None else bias_V.dtype)
        ctx.mark_non_differentiable(correct)
        return loss, correct

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
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return a chunk's summed loss, its correct count, and d loss / d (head output) as float32 [rows, vocabulary]."""
    logits_CV = F.linear(x_CM, head_VM, offset_V).float()
    if shape.scale != 1.0:
        logits_CV = logits_CV * shape.scale
    if shape.softcap is not None:
        logits_CV = shape.softcap * torch.tanh(logits_CV / shape.softcap)
    # loss = lse - (1 - e) · logit[y] - e · mean(logits), since log p = logit - lse.
    lse_C = torch.logsumexp(logits_CV, dim=-1)
    loss = (lse_C - (1.0 - smoothing) * logits_CV.gather(1, y_C[:, None])[:, 0]).sum()
    if smoothing:
        loss = loss - smoothing * logits_CV.mean(-1).sum()
    correct = (logits_CV.argmax(-1) == y_C).sum()
    slope_CV = None if shape.softcap is None else 1.0 - (logits_CV / shape.softcap) ** 2  # of tanh, from its value
    d_CV = logits_CV.sub_(lse_C[:, None]).exp_()  # in place: the logits are not needed any more
    d_CV.scatter_add_(1, y_C[:, None], torch.full_like(d_CV[:, :1], smoothing - 1.0))
    if smoothing:
        d_CV -= smoothing / d_CV.shape[1]
    if slope_CV is not None:
        d_CV *= slope_CV
    if shape.scale != 1.0:
        d_CV *= shape.scale
    return loss, correct, d_CV
