"""Packed attention as one operator, for compiled layers: the compiler sees a single call with the packed tensors.

The layout of a pass, new at each step, stays data: index tensors, of which no shape inside the graph depends. For
the backward pass only packed tensors are kept (queries, keys, values, outputs and each query's log-sum-exp).

On NVIDIA cards in 16 bits torch's flash kernel takes the packed rows as they are. Elsewhere rows are gathered into
right-padded batches, and the kernels' own backward passes are called on what is gathered again. A padding slot there
has an output gradient of zero, and the log-sum-exp of its row's last token, which bounds its scores: it adds exactly
nothing. Long rows of one length are a batch already: cuDNN, where there is a Hopper card, takes half of flash's time
for them (H200, 4 x 4096, 32 heads of 128: 0.9 ms against 1.7 forward, 2.8 against 5.5 backward; measured).

Legend of tensor suffixes: T packed tokens, S entries of the layout's index, N rows of a bucket, L slots of a row,
H query heads, G key/value heads, D head width, P slots of all buckets.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch.nn import functional as F

from surefoot.data.batch import split_index
from surefoot.model.attention import CPU_EAGER_LENGTH, any_shape, repeat_heads, window_mask

# What torch._fused_sdp_choice returns, as torch.nn.attention.SDPBackend numbers them.
_FLASH, _EFFICIENT = 1, 2
_LSE_BLOCK = 32  # the memory-efficient CUDA kernel pads rows of its log-sum-exp to a multiple of this

# cuDNN makes a plan for each shape it meets (see `attention.any_shape`): only for lengths that come again.
_CUDNN_LENGTH, _CUDNN_MULTIPLE = 1024, 128

_INPUTS = (
    "Tensor query, Tensor key, Tensor value, Tensor index, Tensor shapes, Tensor bounds, "
    "float scale, float softcap, int window, str kernel"
)


_FORWARD, _BACKWARD = "surefoot::packed_attention", "surefoot::packed_attention_backward"


def packed_attention(
    query_1HTD: torch.Tensor,
    key_1GTD: torch.Tensor,
    value_1GTD: torch.Tensor,
    layout: tuple[torch.Tensor, torch.Tensor, torch.Tensor],
    *,
    scale: float,
    softcap: float = 0.0,
    window: int = 0,
    kernel: str = "auto",
) -> torch.Tensor:
    """Causal attention within each packed row, as one operator.

    Args:
        query_1HTD: queries, [1, heads, tokens, width].
        key_1GTD: keys, [1, key heads, tokens, width].
        value_1GTD: values, [1, key heads, tokens, width].
        layout: `AttentionLayout.tensors`.
        scale: factor on the scores.
        softcap: of the scores; 0 for none.
        window: most tokens that a query sees; 0 for all.
        kernel: "auto", "eager" (scores written out) or "fused".

    Returns:
        The heads' outputs, [1, tokens, heads, width].
    """
    inputs = (query_1HTD, key_1GTD, value_1GTD, *layout, scale, softcap, window, kernel)
    if not torch.is_grad_enabled():
        return torch.ops.surefoot.packed_attention(*inputs)[0]
    return _PackedAttention.apply(*inputs)


@dataclass(frozen=True)
class _How:
    """Numbers of one attention.

    Attributes:
        scale: factor on the scores.
        softcap: of the scores; 0 for none.
        window: most tokens that a query sees; 0 for all.
        kernel: "auto", "eager" or "fused".
    """

    scale: float
    softcap: float
    window: int
    kernel: str

    def sides(self, length: int) -> dict[str, int]:
        """Return the window as the flash kernel takes it; none where it hides nothing."""
        return {"window_size_left": self.window - 1, "window_size_right": 0} if self.windowed(length) else {}

    def windowed(self, length: int) -> bool:
        """Tell whether the window hides anything in rows of this length."""
        return 0 < self.window < length


def _attend(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    index: torch.Tensor,
    shapes: torch.Tensor,
    bounds: torch.Tensor,
    scale: float,
    softcap: float,
    window: int,
    kernel: str,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return outputs [1, T, H, D] and, for the kernels that keep one, the log-sum-exp [1, H, T]."""
    how = _How(scale, softcap, window, kernel)
    plan = _Plan(index, shapes, query.shape[2])
    if _takes_packed(query, value, plan, how):
        q_THD, k_TGD, v_TGD = (x[0].transpose(0, 1) for x in (query, key, value))
        out_THD, lse_HT = _packed_forward(q_THD, k_TGD, v_TGD, bounds, plan, how)
        return out_THD[None], lse_HT[None]
    outs_PHD, lses_PH = [], []
    with torch.autocast(query.device.type, enabled=False):
        for bucket in range(len(plan.parts[0])):
            q, k, v = (plan.gather(x[0].transpose(0, 1), bucket) for x in (query, key, value))
            out_NHLD, lse_NHL = _forward(_choose(q, k, v, plan, how), q, k, v, how)
            outs_PHD.append(out_NHLD.transpose(1, 2).flatten(0, 1))
            lses_PH.append(lse_NHL.transpose(1, 2).flatten(0, 1))
    return plan.scatter(outs_PHD)[None], plan.scatter(lses_PH).T.contiguous()[None]


def _attend_backward(
    grad: torch.Tensor,
    out: torch.Tensor,
    lse: torch.Tensor,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    index: torch.Tensor,
    shapes: torch.Tensor,
    bounds: torch.Tensor,
    scale: float,
    softcap: float,
    window: int,
    kernel: str,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return the gradients of query, key and value."""
    how = _How(scale, softcap, window, kernel)
    plan = _Plan(index, shapes, query.shape[2])
    if _takes_packed(query, value, plan, how):
        q_THD, k_TGD, v_TGD = (x[0].transpose(0, 1) for x in (query, key, value))
        found = _packed_backward(grad[0], q_THD, k_TGD, v_TGD, out[0], lse[0], bounds, plan, how)
        d_query, d_key, d_value = (part.transpose(0, 1)[None] for part in found)
        return d_query, d_key, d_value
    grads: tuple[list[torch.Tensor], ...] = ([], [], [])
    with torch.autocast(query.device.type, enabled=False):
        for bucket in range(len(plan.parts[0])):
            q, k, v = (plan.gather(x[0].transpose(0, 1), bucket) for x in (query, key, value))
            # The padding slots' gradient must be zero, not their last token's: those were never read.
            d, o = plan.gather(grad[0], bucket, blank=True), plan.gather(out[0], bucket)
            l_NHL = plan.gather(lse[0].T, bucket)
            name = _choose(q, k, v, plan, how)
            for found, part in zip(grads, _backward(name, d, q, k, v, o, l_NHL, how), strict=True):
                found.append(part.transpose(1, 2).flatten(0, 1))
    d_query, d_key, d_value = (plan.scatter(parts).transpose(0, 1)[None] for parts in grads)
    return d_query, d_key, d_value


class _Plan:
    """The layout of one pass, as the operator needs it."""

    def __init__(self, index_S: torch.Tensor, shapes_2B: torch.Tensor, tokens: int) -> None:
        self.index_S, self.shapes_2B = index_S, shapes_2B
        numbers = shapes_2B.tolist()
        slots = sum(rows * length for rows, length in zip(numbers[::2], numbers[1::2], strict=True))
        real = index_S.shape[0] - slots
        self.longest = max(numbers[1::2])
        self.padding = tokens - real
        self.longest_span = max(self.longest, self.padding)
        # Rows of one length, in packed order: already a batch, with nothing to gather.
        self.as_it_is = len(numbers) == 2 and slots == real

    @cached_property
    def parts(self) -> tuple[tuple[torch.Tensor, ...], torch.Tensor]:
        """Buckets and slots, as `split_index` gives them; not made where packed rows are taken as they are."""
        return split_index(self.index_S, self.shapes_2B)

    def gather(self, x_THD: torch.Tensor, place: int, *, blank: bool = False) -> torch.Tensor:
        """Return a bucket of packed rows as [N, H, L, ...]; `blank` puts zero into padding slots."""
        bucket_NL = self.parts[0][place]
        if self.as_it_is:
            rows = x_THD[: bucket_NL.numel()]
        else:
            rows = x_THD.index_select(0, bucket_NL.flatten())
            if blank:
                rows = rows * self._real(place).view(-1, *[1] * (rows.ndim - 1))
        return rows.unflatten(0, bucket_NL.shape).transpose(1, 2)

    def scatter(self, parts_P: list[torch.Tensor]) -> torch.Tensor:
        """Return all buckets' slots as packed tokens, contiguous, with zero for padding tokens."""
        x_P = parts_P[0] if len(parts_P) == 1 else torch.cat(parts_P)
        x_T = x_P if self.as_it_is else x_P.index_select(0, self.parts[1])
        if self.padding:
            x_T = F.pad(x_T, (0,) * (2 * x_T.ndim - 1) + (self.padding,))
        return x_T.contiguous()

    def _real(self, place: int) -> torch.Tensor:
        """Tell which slots of a bucket hold a token of their own: all but repetitions of the slot before."""
        bucket_NL = self.parts[0][place]
        real_NL = torch.ones_like(bucket_NL, dtype=torch.bool)
        real_NL[:, 1:] = bucket_NL[:, 1:] != bucket_NL[:, :-1]
        return real_NL.flatten()


def _takes_packed(query: torch.Tensor, value: torch.Tensor, plan: _Plan, how: _How) -> bool:
    """Say whether torch's flash kernel takes the packed rows without any gathering; alike in both passes."""
    if not query.is_cuda or torch.version.hip is not None or plan.as_it_is or how.kernel == "eager" or how.softcap:
        return False
    width = query.shape[-1]
    fits = query.element_size() == 2 and width % 8 == 0 and width <= 256 and width == value.shape[-1]
    return fits and torch.cuda.get_device_capability(query.device)[0] >= 8 and torch.backends.cuda.flash_sdp_enabled()


def _packed_forward(
    q_THD: torch.Tensor, k_TGD: torch.Tensor, v_TGD: torch.Tensor, bounds_N: torch.Tensor, plan: _Plan, how: _How
) -> tuple[torch.Tensor, torch.Tensor]:
    out_THD, lse_HT, *_ = torch.ops.aten._flash_attention_forward(
        q_THD, k_TGD, v_TGD, bounds_N, bounds_N, plan.longest_span, plan.longest_span, 0.0, True, False,
        scale=how.scale, **how.sides(plan.longest_span),
    )  # fmt: skip
    return out_THD, lse_HT


def _packed_backward(
    d_THD: torch.Tensor, q_THD: torch.Tensor, k_TGD: torch.Tensor, v_TGD: torch.Tensor, out_THD: torch.Tensor,
    lse_HT: torch.Tensor, bounds_N: torch.Tensor, plan: _Plan, how: _How,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:  # fmt: skip
    seed = torch.empty(2, dtype=torch.uint64, device=q_THD.device)  # of dropout, which there is none of
    return torch.ops.aten._flash_attention_backward(
        d_THD.contiguous(), q_THD, k_TGD, v_TGD, out_THD, lse_HT, bounds_N, bounds_N, plan.longest_span,
        plan.longest_span, 0.0, True, seed, seed, scale=how.scale, **how.sides(plan.longest_span),
    )  # fmt: skip


def _cudnn_fits(q: torch.Tensor, plan: _Plan, how: _How) -> bool:
    """Say whether rows are of a kind that cuDNN's attention is made for."""
    if not q.is_cuda or torch.version.hip is not None or not plan.as_it_is or how.windowed(q.shape[2]):
        return False
    length, width = q.shape[2:]
    fits = q.element_size() == 2 and length % _CUDNN_MULTIPLE == 0 and length >= _CUDNN_LENGTH and width in (64, 128)
    # Its backward pass adds in no fixed order.
    allowed = torch.backends.cuda.cudnn_sdp_enabled() and not torch.are_deterministic_algorithms_enabled()
    return fits and allowed and torch.cuda.get_device_capability(q.device)[0] == 9


def _choose(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, plan: _Plan, how: _How) -> str:
    """Choose what computes a bucket; by nothing that changes between forward and backward pass."""
    cpu, windowed = q.device.type == "cpu", how.windowed(q.shape[2])
    short = how.kernel == "auto" and cpu and q.element_size() == 2 and plan.longest <= CPU_EAGER_LENGTH
    if how.kernel == "eager" or how.softcap or short or q.shape[-1] != v.shape[-1]:
        return "written out"
    if cpu:
        return "written out" if windowed else "cpu"
    if _cudnn_fits(q, plan, how):
        return "cudnn"
    if windowed and torch.version.hip is not None:
        return "written out"
    grouped = q.shape[1] != k.shape[1] and q.element_size() == 2
    if not grouped:
        k, v = repeat_heads(k, q), repeat_heads(v, q)
    with any_shape(q.device):
        choice = torch._fused_sdp_choice(q, k, v, is_causal=True, enable_gqa=grouped)
    if choice == _FLASH and q.shape[-1] % 8 == 0:
        return "flash"
    return "efficient" if choice == _EFFICIENT and not windowed else "written out"


def _forward(name: str, q: Any, k: Any, v: Any, how: _How) -> tuple[torch.Tensor, torch.Tensor]:
    if name == "written out":
        out_NHLD = torch.matmul(_weights(q, k, how)[0].to(q.dtype), repeat_heads(v, q))
        return out_NHLD, torch.zeros(out_NHLD.shape[:3], dtype=_lse_dtype(q), device=q.device)
    if name == "flash" and not how.windowed(q.shape[2]):
        return torch.ops.aten._scaled_dot_product_flash_attention(q, k, v, 0.0, True, False, scale=how.scale)[:2]
    if name == "flash":
        q, k, v = (x.transpose(1, 2) for x in (q, k, v))
        length = q.shape[1]
        out, lse, *_ = torch.ops.aten._flash_attention_forward(
            q, k, v, None, None, length, length, 0.0, True, False, scale=how.scale, **how.sides(length)
        )
        return out.transpose(1, 2), lse
    if name == "cudnn":
        out, lse, *_ = torch.ops.aten._scaled_dot_product_cudnn_attention(
            q, k, v, None, True, 0.0, True, False, scale=how.scale
        )
        return out, lse[..., 0]
    k, v = repeat_heads(k, q), repeat_heads(v, q)
    if name == "cpu":
        return torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(q, k, v, 0.0, True, scale=how.scale)
    out, lse, *_ = torch.ops.aten._scaled_dot_product_efficient_attention(
        q, k, v, None, True, 0.0, True, scale=how.scale
    )
    return out, lse[:, :, : q.shape[2]]


def _backward(name: str, d: Any, q: Any, k: Any, v: Any, out: Any, lse: Any, how: _How) -> tuple[Any, Any, Any]:
    if name == "written out":
        return _written_out_backward(d, q, k, v, how)
    length = q.shape[2]
    # Of dropout, which there is none of: the kernels want tensors of the type that their forward pass gives.
    seed = torch.empty(2, dtype=torch.int64 if torch.version.hip or name != "flash" else torch.uint64, device=q.device)
    lse = lse.contiguous()
    if name == "flash" and not how.windowed(length):
        return torch.ops.aten._scaled_dot_product_flash_attention_backward(
            d, q, k, v, out, lse, None, None, length, length, 0.0, True, seed, seed, scale=how.scale
        )
    if name == "flash":
        parts = (x.transpose(1, 2) for x in (d, q, k, v, out))
        grads = torch.ops.aten._flash_attention_backward(
            *parts, lse, None, None, length, length, 0.0, True, seed, seed, scale=how.scale, **how.sides(length)
        )
        d_q, d_k, d_v = (x.transpose(1, 2) for x in grads)
        return d_q, d_k, d_v
    if name == "cudnn":
        return torch.ops.aten._scaled_dot_product_cudnn_attention_backward(
            d, q, k, v, out, lse[..., None], seed[0], seed[0], None, None, None, length, length, 0.0, True,
            scale=how.scale,
        )  # fmt: skip
    keys = k
    k, v = repeat_heads(k, q), repeat_heads(v, q)
    if name == "cpu":
        d_q, d_k, d_v = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward(
            d, q, k, v, out, lse, 0.0, True, scale=how.scale
        )
    else:
        if torch.version.hip is None:
            lse = F.pad(lse, (0, -length % _LSE_BLOCK), value=float("inf"))
        d_q, d_k, d_v, _ = torch.ops.aten._scaled_dot_product_efficient_attention_backward(
            d, q, k, v, None, out, lse, seed[0], seed[0], 0.0, [True, True, True, False], True, scale=how.scale
        )
    return d_q, _sum_heads(d_k, keys), _sum_heads(d_v, keys)


def _weights(q: Any, k: Any, how: _How) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Return attention weights in float32, and where scores are capped the slope of the cap."""
    scores = torch.matmul(q, repeat_heads(k, q).transpose(2, 3)) * how.scale
    slope = None
    if how.softcap:
        capped = torch.tanh(scores / how.softcap)
        scores, slope = how.softcap * capped, 1.0 - capped * capped
    allowed_LL = window_mask(q.shape[2], how.window or None, q.device)
    scores = scores.masked_fill(~allowed_LL, torch.finfo(scores.dtype).min)
    return F.softmax(scores, dim=-1, dtype=torch.float32), slope


def _written_out_backward(d: Any, q: Any, k: Any, v: Any, how: _How) -> tuple[Any, Any, Any]:
    weights, slope = _weights(q, k, how)
    d_v = torch.matmul(weights.to(q.dtype).transpose(2, 3), d)
    d_weights = torch.matmul(d, repeat_heads(v, q).transpose(2, 3)).float()
    d_scores = torch.ops.aten._softmax_backward_data(d_weights, weights, -1, torch.float32).to(q.dtype)
    if slope is not None:
        d_scores = d_scores * slope
    d_scores = d_scores * how.scale
    d_q = torch.matmul(d_scores, repeat_heads(k, q))
    d_k = torch.matmul(d_scores.transpose(2, 3), q)
    return d_q, _sum_heads(d_k, k), _sum_heads(d_v, v)


def _sum_heads(x_NHLD: torch.Tensor, like_NGLD: torch.Tensor) -> torch.Tensor:
    groups = like_NGLD.shape[1]
    return x_NHLD if x_NHLD.shape[1] == groups else x_NHLD.unflatten(1, (groups, -1)).sum(2)


def _lse_dtype(q: torch.Tensor) -> torch.dtype:
    return torch.float64 if q.dtype == torch.float64 else torch.float32


class _PackedAttention(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, *inputs: Any) -> torch.Tensor:
        out, lse = torch.ops.surefoot.packed_attention(*inputs)
        ctx.save_for_backward(out, lse, *inputs[:6])
        ctx.numbers = inputs[6:]
        return out

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        d_qkv = torch.ops.surefoot.packed_attention_backward(grads[0], *ctx.saved_tensors, *ctx.numbers)
        return (*d_qkv, *(None,) * 7)


def _fake(query: Any, key: Any, value: Any, *_: Any) -> tuple[torch.Tensor, torch.Tensor]:
    tokens, heads = query.shape[2], query.shape[1]
    out = query.new_empty(1, tokens, heads, value.shape[-1])
    return out, query.new_empty(1, heads, tokens, dtype=_lse_dtype(query))


def _fake_backward(grad: Any, out: Any, lse: Any, *inputs: Any) -> tuple[torch.Tensor, ...]:
    return tuple(x.new_empty(1, x.shape[2], x.shape[1], x.shape[3]).transpose(1, 2) for x in inputs[:3])


# Not `custom_op`: its own wrapping in Python would be run at each call, and short chats wait for the host.
torch.library.define(_FORWARD, f"({_INPUTS}) -> (Tensor, Tensor)")
torch.library.define(_BACKWARD, f"(Tensor grad, Tensor out, Tensor lse, {_INPUTS}) -> (Tensor, Tensor, Tensor)")
torch.library.impl(_FORWARD, "CompositeExplicitAutograd", _attend)
torch.library.impl(_BACKWARD, "CompositeExplicitAutograd", _attend_backward)
torch.library.register_fake(_FORWARD, _fake)
torch.library.register_fake(_BACKWARD, _fake_backward)
