"""Attention over packed rows: gather to right-padded batches, plain causal attention, gather back.

Right padding under a causal mask never reaches a real token, so no mask and no varlen kernel is needed, and the
result is exact on every backend. Only attention sees the padding; everything else runs on packed tokens.

Legend of tensor suffixes: T packed tokens, N samples of a bucket, L longest sample of a bucket, H query heads,
G key/value heads, D head width, P slots of all buckets.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch.nn import functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

from surefoot.data.batch import AttentionLayout

if TYPE_CHECKING:
    from transformers import PreTrainedModel

SDPA_NAME = "surefoot_sdpa"
EAGER_NAME = "surefoot_eager"
# What `islands` writes on one attention module: "eager" or "fused", and the dtype of its scores.
KERNEL_ATTRIBUTE = "surefoot_attention_kernel"
SCORE_DTYPE_ATTRIBUTE = "surefoot_score_dtype"
# In 16 bits and up to this length, torch's fused CPU attention takes three times as long as the sums written out
# (8 rows of 55 tokens, 9 heads of 64, forward and backward: 21 ms against 6.5 ms; even at 128; measured).
CPU_EAGER_LENGTH = 96


def use_packed_attention(model: PreTrainedModel) -> str:
    """Switch a model from its own attention to the packed one, by transformers' attention interface.

    Args:
        model: a model that was loaded with "sdpa" or "eager" attention; changed in place.

    Returns:
        The name of its own attention, to switch back to. A model without softmax attention, or whose attention
        cannot be switched, keeps its own; `probes.check_packing` finds out what that means.
    """
    from transformers import AttentionInterface

    AttentionInterface.register(SDPA_NAME, packed_sdpa)
    AttentionInterface.register(EAGER_NAME, packed_eager)
    own = model.config._attn_implementation or "eager"
    # transformers refuses with a ValueError where it knows that a model cannot switch.
    with contextlib.suppress(ValueError):
        model.set_attn_implementation(EAGER_NAME if own == "eager" else SDPA_NAME)
    return own


def packed_sdpa(
    module: torch.nn.Module,
    query_1HTD: torch.Tensor,
    key_1GTD: torch.Tensor,
    value_1GTD: torch.Tensor,
    attention_mask: torch.Tensor | None = None,
    scaling: float | None = None,
    dropout: float = 0.0,
    **kwargs: Any,
) -> tuple[torch.Tensor, None]:
    """Causal attention within each packed row, through torch's fused kernels.

    Args:
        module: the attention module that calls; its `training` flag is already in `dropout`.
        query_1HTD: queries, [1, heads, tokens, width].
        key_1GTD: keys, [1, key heads, tokens, width].
        value_1GTD: values, [1, key heads, tokens, width].
        attention_mask: unused, since the layout says all; transformers passes None to a mask-free attention.
        scaling: factor on the scores; 1/sqrt(width) when None.
        dropout: share of attention weights that are dropped.
        **kwargs: `packed_layout` (an `AttentionLayout`), and the model's `sliding_window`, `softcap`, `s_aux`.

    Returns:
        The heads' outputs, [1, tokens, heads, width], and no weights.

    Raises:
        NotImplementedError: the model asks for attention sinks, or gave no layout.
    """
    chosen = getattr(module, KERNEL_ATTRIBUTE, None)
    if torch.compiler.is_compiling():
        attend = partial(_as_one_operator, chosen or "auto")
        return _in_score_dtype(module, attend, query_1HTD, key_1GTD, value_1GTD, scaling, dropout, kwargs), None
    short = chosen is None and _short_on_cpu(query_1HTD, kwargs.get("packed_layout"))
    attend = _written_out if short or chosen == "eager" or kwargs.get("softcap") is not None else _fused
    return _in_score_dtype(module, attend, query_1HTD, key_1GTD, value_1GTD, scaling, dropout, kwargs), None


def _fused(
    query_1HTD: torch.Tensor,
    key_1GTD: torch.Tensor,
    value_1GTD: torch.Tensor,
    scaling: float | None,
    dropout: float,
    kwargs: dict[str, Any],
) -> torch.Tensor:
    window = kwargs.get("sliding_window")

    def attend(q_NHLD: torch.Tensor, k_NGLD: torch.Tensor, v_NGLD: torch.Tensor) -> torch.Tensor:
        length = q_NHLD.shape[2]
        windowed = window is not None and length > window
        mask_LL = window_mask(length, window, q_NHLD.device) if windowed else None
        # Grouped heads only where the fused kernels take them; with a mask they would fall to the slow path.
        # So would float32, which flash attention does not take, and the memory-efficient kernel not grouped.
        grouped = q_NHLD.shape[1] != k_NGLD.shape[1]
        if grouped and (windowed or q_NHLD.device.type == "cpu" or q_NHLD.dtype == torch.float32):
            k_NGLD, v_NGLD, grouped = repeat_heads(k_NGLD, q_NHLD), repeat_heads(v_NGLD, q_NHLD), False
        with any_shape(q_NHLD.device):
            return F.scaled_dot_product_attention(
                q_NHLD, k_NGLD, v_NGLD, mask_LL, dropout, is_causal=not windowed, scale=scaling, enable_gqa=grouped
            )  # fmt: skip

    return _over_buckets(attend, query_1HTD, key_1GTD, value_1GTD, kwargs)


def packed_eager(
    module: torch.nn.Module,
    query_1HTD: torch.Tensor,
    key_1GTD: torch.Tensor,
    value_1GTD: torch.Tensor,
    attention_mask: torch.Tensor | None = None,
    scaling: float | None = None,
    dropout: float = 0.0,
    **kwargs: Any,
) -> tuple[torch.Tensor, None]:
    """Causal attention within each packed row, written out: scores, mask, softmax in float32, weighted sum.

    Args:
        module: the attention module that calls.
        query_1HTD: queries, [1, heads, tokens, width].
        key_1GTD: keys, [1, key heads, tokens, width].
        value_1GTD: values, [1, key heads, tokens, width].
        attention_mask: unused; see `packed_sdpa`.
        scaling: factor on the scores; 1/sqrt(width) when None.
        dropout: share of attention weights that are dropped.
        **kwargs: `packed_layout`, and the model's `sliding_window` and `softcap` (scores become
            softcap · tanh(scores / softcap), as in Gemma 2).

    Returns:
        The heads' outputs, [1, tokens, heads, width], and no weights.

    Raises:
        NotImplementedError: the model asks for attention sinks, or gave no layout.
    """
    forced = getattr(module, KERNEL_ATTRIBUTE, None) == "fused" and kwargs.get("softcap") is None
    attend = _fused if forced else _written_out
    if torch.compiler.is_compiling():
        attend = partial(_as_one_operator, "fused" if forced else "eager")
    return _in_score_dtype(module, attend, query_1HTD, key_1GTD, value_1GTD, scaling, dropout, kwargs), None


def _written_out(
    query_1HTD: torch.Tensor,
    key_1GTD: torch.Tensor,
    value_1GTD: torch.Tensor,
    scaling: float | None,
    dropout: float,
    kwargs: dict[str, Any],
) -> torch.Tensor:
    scale = scaling if scaling is not None else 1.0 / math.sqrt(query_1HTD.shape[-1])
    window, softcap = kwargs.get("sliding_window"), kwargs.get("softcap")

    def attend(q_NHLD: torch.Tensor, k_NGLD: torch.Tensor, v_NGLD: torch.Tensor) -> torch.Tensor:
        k_NHLD, v_NHLD = repeat_heads(k_NGLD, q_NHLD), repeat_heads(v_NGLD, q_NHLD)
        scores_NHLL = torch.matmul(q_NHLD, k_NHLD.transpose(2, 3)) * scale
        if softcap is not None:
            scores_NHLL = softcap * torch.tanh(scores_NHLL / softcap)
        allowed_LL = window_mask(q_NHLD.shape[2], window, q_NHLD.device)
        scores_NHLL = scores_NHLL.masked_fill(~allowed_LL, torch.finfo(scores_NHLL.dtype).min)
        weights_NHLL = F.softmax(scores_NHLL, dim=-1, dtype=torch.float32).to(q_NHLD.dtype)
        if dropout > 0.0:
            weights_NHLL = F.dropout(weights_NHLL, p=dropout)
        return torch.matmul(weights_NHLL, v_NHLD)

    return _over_buckets(attend, query_1HTD, key_1GTD, value_1GTD, kwargs)


def _as_one_operator(
    kernel: str,
    query_1HTD: torch.Tensor,
    key_1GTD: torch.Tensor,
    value_1GTD: torch.Tensor,
    scaling: float | None,
    dropout: float,
    kwargs: dict[str, Any],
) -> torch.Tensor:
    """Attend by the operator of `attention_op`; the layout is its tensors, as `compiled` hands it in."""
    from surefoot.model.attention_op import packed_attention  # which imports this module

    if kwargs.get("s_aux") is not None:
        raise NotImplementedError("attention sinks are not supported in packed attention")
    if dropout > 0.0:
        raise NotImplementedError("dropout of attention weights is not compiled")
    device = query_1HTD.device.type
    if torch.is_autocast_enabled(device):  # as autocast does for the products of the plain path
        dtype = torch.get_autocast_dtype(device)
        query_1HTD, key_1GTD, value_1GTD = query_1HTD.to(dtype), key_1GTD.to(dtype), value_1GTD.to(dtype)
    scale = scaling if scaling is not None else 1.0 / math.sqrt(query_1HTD.shape[-1])
    return packed_attention(
        query_1HTD, key_1GTD, value_1GTD, kwargs["packed_layout"], scale=float(scale),
        softcap=float(kwargs.get("softcap") or 0.0), window=int(kwargs.get("sliding_window") or 0), kernel=kernel,
    )  # fmt: skip


def _in_score_dtype(
    module: torch.nn.Module,
    attend: Callable[..., torch.Tensor],
    query_1HTD: torch.Tensor,
    key_1GTD: torch.Tensor,
    value_1GTD: torch.Tensor,
    scaling: float | None,
    dropout: float,
    kwargs: dict[str, Any],
) -> torch.Tensor:
    """Attend in the dtype that `islands.set_scores` asks for; the result has the values' dtype either way."""
    dtype = getattr(module, SCORE_DTYPE_ATTRIBUTE, None)
    if dtype is None:
        return attend(query_1HTD, key_1GTD, value_1GTD, scaling, dropout, kwargs)
    with torch.autocast(query_1HTD.device.type, enabled=False):
        inputs = (tensor.to(dtype) for tensor in (query_1HTD, key_1GTD, value_1GTD))
        return attend(*inputs, scaling, dropout, kwargs).to(value_1GTD.dtype)


def window_mask(length: int, window: int | None, device: torch.device) -> torch.Tensor:
    """Which keys each query may see: itself and what came before, `window` tokens at most.

    Args:
        length: tokens of the row.
        window: most tokens seen, itself included; None for all.
        device: of the result.

    Returns:
        bool [length, length], True where query i may see key j.
    """
    allowed_LL = torch.ones(length, length, dtype=torch.bool, device=device).tril()
    return allowed_LL if window is None else allowed_LL.triu(1 - window)


def _over_buckets(attend: Any, q_1HTD: Any, k_1GTD: Any, v_1GTD: Any, kwargs: dict[str, Any]) -> torch.Tensor:
    layout: AttentionLayout | None = kwargs.get("packed_layout")
    if layout is None:
        raise NotImplementedError("this model does not hand its attention the packed layout")
    if kwargs.get("s_aux") is not None:
        raise NotImplementedError("attention sinks are not supported in packed attention")
    if len(layout.lengths) == 1:
        return attend(q_1HTD, k_1GTD, v_1GTD).transpose(1, 2)
    q_THD, k_TGD, v_TGD = (x[0].transpose(0, 1) for x in (q_1HTD, k_1GTD, v_1GTD))
    outputs_PHD = []
    for bucket_NL in layout.buckets:
        q, k, v = (_gather(x_THD, bucket_NL) for x_THD in (q_THD, k_TGD, v_TGD))
        outputs_PHD.append(attend(q, k, v).transpose(1, 2).flatten(0, 1))
    out_PHD = torch.cat(outputs_PHD) if len(outputs_PHD) > 1 else outputs_PHD[0]
    out_THD = out_PHD.index_select(0, layout.slots_T)
    return (F.pad(out_THD, (0, 0, 0, 0, 0, layout.padding)) if layout.padding else out_THD)[None]


def any_shape(device: torch.device) -> contextlib.AbstractContextManager[Any]:
    """Leave out cuDNN's attention, which builds a plan for each new shape: packed rows have new shapes every step.

    Measured on an H200, 1B shapes, bf16: 1,600 tokens/s while plans are built, 11,600 once all are.

    Args:
        device: of the tensors.

    Returns:
        A context; attention is left to torch's other kernels inside.
    """
    if device.type != "cuda":
        return contextlib.nullcontext()
    return sdpa_kernel([SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH])


def _short_on_cpu(query: torch.Tensor, layout: AttentionLayout | None) -> bool:
    if query.device.type != "cpu" or layout is None:
        return False
    return query.element_size() == 2 and max(layout.lengths) <= CPU_EAGER_LENGTH


def _gather(x_THD: torch.Tensor, bucket_NL: torch.Tensor) -> torch.Tensor:
    rows_SHD = x_THD.index_select(0, bucket_NL.flatten())
    return rows_SHD.view(*bucket_NL.shape, *x_THD.shape[1:]).transpose(1, 2)


def repeat_heads(x_NGLD: torch.Tensor, like_NHLD: torch.Tensor) -> torch.Tensor:
    """Return keys or values [N, G, L, D] with each head as often as queries [N, H, L, D] share it."""
    times = like_NHLD.shape[1] // x_NGLD.shape[1]
    return x_NGLD if times == 1 else x_NGLD.repeat_interleave(times, dim=1)
