"""Another machine's matrix products, on this machine.

`gfx90a` (MI200): its float16 and bfloat16 matrix instructions take subnormal inputs as zero and give zero for subnormal
results, sign kept; float32 products are left alone (numerical accuracy notes of the PyTorch documentation). A float16
gradient below 6.1e-5 vanishes in the next product there, and nowhere else.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Generator
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from surefoot.errors import WorkError

HALF = (torch.float16, torch.bfloat16)
_ATEN = torch.ops.aten
# Each product with the places of its two factors. An addend is no factor: the epilogue adds it in float32.
_FACTORS: dict[Any, tuple[int, int]] = {
    _ATEN.mm: (0, 1), _ATEN.bmm: (0, 1), _ATEN.mv: (0, 1), _ATEN.dot: (0, 1), _ATEN.vdot: (0, 1),
    _ATEN.addmm: (1, 2), _ATEN.addmm_: (1, 2), _ATEN.baddbmm: (1, 2), _ATEN.baddbmm_: (1, 2),
    _ATEN.addbmm: (1, 2), _ATEN.addbmm_: (1, 2), _ATEN.addmv: (1, 2), _ATEN.addmv_: (1, 2),
    _ATEN._addmm_activation: (1, 2), _ATEN._grouped_mm: (0, 1),
}  # fmt: skip
# In inference mode these arrive whole. Others must not be taken apart: some have kernels that round otherwise.
_COMPOSITES = {
    _ATEN.linear, _ATEN.matmul, _ATEN.einsum, _ATEN.tensordot, _ATEN.inner, _ATEN.linalg_matmul,
    _ATEN.linalg_multi_dot, _ATEN.chain_matmul, _ATEN.bilinear,
}  # fmt: skip
_FUSED = "_scaled_dot_product_"


@dataclass(frozen=True)
class Flushed:
    """How many values of matrix products were flushed to zero that another machine would have kept.

    Attributes:
        inputs: flushed values among the factors.
        outputs: flushed values among the results.
        values: all values that went in or came out, flushed or not.
    """

    inputs: int = 0
    outputs: int = 0
    values: int = 0

    @property
    def share(self) -> float:
        """Flushed values over all values; 0 when there was no product."""
        return (self.inputs + self.outputs) / self.values if self.values else 0.0


class FlushCounter:
    """Counts flushed values on the device and reads them only when asked."""

    def __init__(self) -> None:
        self._flushed: dict[tuple[str, str, torch.device], torch.Tensor] = {}
        self._values = {"forward": 0, "backward": 0}

    def add(self, side: Literal["inputs", "outputs"], subnormal: torch.Tensor) -> None:
        """Count one tensor of a product.

        Args:
            side: of the product.
            subnormal: bool, of any shape: True where the value is flushed and was not zero.
        """
        # A product inside a backward pass belongs to it, recomputed forwards included.
        phase = "backward" if torch._C._current_autograd_node() is not None else "forward"
        self._values[phase] += subnormal.numel()
        key = (phase, side, subnormal.device)
        count = subnormal.sum()
        self._flushed[key] = self._flushed[key] + count if key in self._flushed else count

    def read(self, phase: Literal["forward", "backward"]) -> Flushed:
        """Read one phase's counts from the device.

        Args:
            phase: "backward" is everything inside the backward pass: its share is that of flushed gradient values.

        Returns:
            The counts so far.
        """
        sums = {"inputs": 0, "outputs": 0}
        for (of, side, _), count in self._flushed.items():
            sums[side] += int(count) if of == phase else 0
        return Flushed(**sums, values=self._values[phase])


class Gfx90a(TorchDispatchMode):
    """While active, float16 and bfloat16 matrix products flush as MI200's do, in the forward and backward pass.

    Use it through `emulation`, which also writes out attention that Python code asks for.

    Attributes:
        needs_eager_attention: True: a fused attention kernel hides its products, so the model should write its
            attention out. What still calls `scaled_dot_product_attention` from Python is written out by `emulation`.
        counter: what was flushed.
    """

    needs_eager_attention: bool = True
    counter: FlushCounter

    def __init__(self) -> None:
        super().__init__()
        self.counter = FlushCounter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run one operation; its factors and results are flushed if it is a 16-bit product."""
        kwargs = kwargs or {}
        factors = _FACTORS.get(func.overloadpacket)
        if factors is not None:
            return (
                self._product(func, factors, args, kwargs) if args[factors[0]].dtype in HALF else func(*args, **kwargs)
            )
        if func._schema.name.startswith(f"aten::{_FUSED}") and args[0].dtype in HALF:
            raise WorkError(
                f"emulate: gfx90a cannot look into {func.overloadpacket}", hint="use `flash_attn: disabled` with it"
            )
        if func.overloadpacket in _COMPOSITES:
            # The function mode would turn the call back into the composite itself.
            with self, torch._C.DisableTorchFunction():
                return func.decompose(*args, **kwargs)
        return func(*args, **kwargs)

    def _product(self, func: Any, factors: tuple[int, int], args: Any, kwargs: dict[str, Any]) -> Any:
        args = list(args)
        for place in factors:
            args[place] = self._flush(args[place], "inputs")
        result = func(*args, **kwargs)
        if result.dtype not in HALF:  # a float32 result of 16-bit factors
            return result
        flushed = self._flush(result, "outputs")
        writes = any(returned.alias_info is not None for returned in func._schema.returns)
        return result.copy_(flushed) if writes else flushed

    def _flush(self, x: torch.Tensor, side: Literal["inputs", "outputs"]) -> torch.Tensor:
        small = is_subnormal(x)
        self.counter.add(side, small)
        return torch.where(small, torch.zeros_like(x).copysign_(x), x)


def emulation(machine: Literal["none", "gfx90a"]) -> contextlib.AbstractContextManager[Gfx90a | None]:
    """Return the context in which a run computes as another machine does.

    Enter it outside of any other dispatch mode, so that a tracer sees the flushed numbers.

    Args:
        machine: "none", or the architecture to emulate.

    Returns:
        A context; it gives None for "none", else the mode with its counter.
    """
    return _gfx90a() if machine == "gfx90a" else contextlib.nullcontext()


@contextlib.contextmanager
def _gfx90a() -> Generator[Gfx90a, None, None]:
    with _WriteOutAttention(), Gfx90a() as mode:
        yield mode


def is_subnormal(x: torch.Tensor) -> torch.Tensor:
    """Tell where a floating tensor's values are neither zero nor normal; bool of the same shape."""
    return (x.abs() < torch.finfo(x.dtype).smallest_normal) & (x != 0)


class _WriteOutAttention(TorchFunctionMode):
    """Replaces fused 16-bit attention by its sums, whose products the dispatch mode can see.

    torch's own reference kernel would not do: it multiplies in float32.
    """

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is F.scaled_dot_product_attention:
            query = args[0] if args else kwargs["query"]
            if query.dtype in HALF or (query.dtype == torch.float32 and torch.is_autocast_enabled(query.device.type)):
                return _written_out(*args, **kwargs)
        return func(*args, **kwargs)


def _written_out(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attn_mask: torch.Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> torch.Tensor:
    """Compute what `scaled_dot_product_attention` documents, scores in the inputs' dtype, softmax in float32."""
    if torch.is_autocast_enabled(query.device.type):  # the products below would be cast anyway, the softmax would not
        dtype = torch.get_autocast_dtype(query.device.type)
        query, key, value = query.to(dtype), key.to(dtype), value.to(dtype)
    if enable_gqa:
        times = query.shape[-3] // key.shape[-3]
        key, value = key.repeat_interleave(times, -3), value.repeat_interleave(times, -3)
    scores = query @ key.transpose(-2, -1) * (1 / math.sqrt(query.shape[-1]) if scale is None else scale)
    if is_causal:
        attn_mask = torch.ones(scores.shape[-2:], dtype=torch.bool, device=scores.device).tril()
    if attn_mask is not None and attn_mask.dtype == torch.bool:
        scores = scores.masked_fill(~attn_mask, float("-inf"))
    elif attn_mask is not None:
        scores = scores + attn_mask
    weights = F.softmax(scores, -1, dtype=torch.float32).to(query.dtype)
    return F.dropout(weights, dropout_p) @ value
