"""Probes that run on the device, in a process of their own: each computes something small and compares it with fp64.

`python -m surefoot.doctor.probes DEVICE NAME...` prints one JSON object a line.
A crash ends the process, and the caller (`deep.py`) goes on behind it.
"""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch

#: Largest relative error that a right answer may have against fp64, by number format.
_TOLERANCE = {"float32": 2e-5, "bfloat16": 8e-3, "float16": 1e-3}


def _error(got: torch.Tensor, want: torch.Tensor) -> float:
    """Relative error in the Frobenius norm; infinite when something is not finite."""
    got = got.detach().double().cpu()
    if not bool(got.isfinite().all()):
        return math.inf
    return float((got - want).norm() / want.norm())


def _result(error: float, tolerance: float, **more: Any) -> dict[str, Any]:
    return {"ok": error <= tolerance, "error": None if math.isinf(error) else error, "tolerance": tolerance, **more}


def gemm(device: str, dtype: str) -> dict[str, Any]:
    """A product [384, 512] x [512, 320] in one number format, with gradients of both sides."""
    import torch

    kind = getattr(torch, dtype)
    make = torch.Generator().manual_seed(7)
    left = torch.randn(384, 512, generator=make, dtype=torch.float64).to(kind)
    right = torch.randn(512, 320, generator=make, dtype=torch.float64).to(kind)
    exact = [x.double().requires_grad_() for x in (left, right)]
    tried = [x.to(device).requires_grad_() for x in (left, right)]
    want, got = exact[0] @ exact[1], tried[0] @ tried[1]
    want.sum().backward()
    got.sum().backward()
    pairs = [(got, want), *((t.grad, e.grad) for t, e in zip(tried, exact, strict=True))]
    return _result(max(_error(g, w.detach()) for g, w in pairs if g is not None and w is not None), _TOLERANCE[dtype])


def narrow_gemm(device: str, dtype: str) -> dict[str, Any]:
    """LoRA's shapes: [512, 1024] x [1024, 16] and back, where some tile kernels read past the narrow side."""
    import torch

    kind = getattr(torch, dtype)
    make = torch.Generator().manual_seed(8)
    x = torch.randn(512, 1024, generator=make, dtype=torch.float64).to(kind)
    a = (torch.randn(1024, 16, generator=make, dtype=torch.float64) / 32).to(kind)
    b = torch.randn(16, 1024, generator=make, dtype=torch.float64).to(kind)
    want = (x.double() @ a.double()) @ b.double()
    got = (x.to(device) @ a.to(device)) @ b.to(device)
    return _result(_error(got, want), 2 * _TOLERANCE[dtype])


def attention(device: str, backend: str) -> dict[str, Any]:
    """Causal attention [2 samples, 4 heads, 128 tokens, 64 wide], forward and backward, through one SDPA backend."""
    import torch
    from torch.nn.attention import SDPBackend, sdpa_kernel
    from torch.nn.functional import scaled_dot_product_attention as attend

    kind = torch.bfloat16 if device != "cpu" else torch.float32
    make = torch.Generator().manual_seed(9)
    inputs = [torch.randn(2, 4, 128, 64, generator=make, dtype=torch.float64).to(kind) for _ in range(3)]
    exact = [x.double().requires_grad_() for x in inputs]
    scores = exact[0] @ exact[1].transpose(-1, -2) / 8.0
    want = scores.masked_fill(torch.ones(128, 128, dtype=torch.bool).triu(1), -math.inf).softmax(-1) @ exact[2]
    want.sum().backward()
    tried = [x.to(device).requires_grad_() for x in inputs]
    try:
        with sdpa_kernel(getattr(SDPBackend, backend)):
            got = attend(tried[0], tried[1], tried[2], is_causal=True)
            got.sum().backward()
    except RuntimeError as error:
        if "No available kernel" in str(error) or "No viable backend" in str(error):
            return {"ok": True, "skipped": "this backend has no kernel for this device"}
        raise
    pairs = [(got, want), *((t.grad, e.grad) for t, e in zip(tried, exact, strict=True))]
    return _result(
        max(_error(g, w.detach()) for g, w in pairs if g is not None and w is not None),
        5e-2 if kind == torch.bfloat16 else 1e-4,
    )


def subnormals(device: str) -> dict[str, Any]:
    """Whether fp16 subnormals survive a matrix product: MI200's matrix units flush them to zero."""
    import torch

    tiny = torch.full((64, 64), 2.0**-20, dtype=torch.float16, device=device)  # below 2^-14, fp16's smallest normal
    got = (tiny @ torch.eye(64, dtype=torch.float16, device=device)).double().cpu()
    flushed = bool((got == 0).all())
    return {
        "ok": not flushed,
        "flushed": flushed,
        "error": float((got - 2.0**-20).abs().max() / 2.0**-20),
        "tolerance": 0.0,
    }


def nf4(device: str) -> dict[str, Any]:
    """A round trip through bitsandbytes' NF4, if it is installed."""
    import importlib.util

    import torch

    if importlib.util.find_spec("bitsandbytes") is None:
        return {"ok": True, "skipped": "bitsandbytes is not installed"}
    from bitsandbytes import functional

    weights = torch.randn(256, 256, generator=torch.Generator().manual_seed(3)).to(torch.bfloat16)
    packed, state = functional.quantize_4bit(weights.to(device), quant_type="nf4")
    back = functional.dequantize_4bit(packed, state)
    return _result(_error(back, weights.double()), 0.15)


def copies(device: str) -> dict[str, Any]:
    """A 32 MiB copy to the device, to each other device and back: every byte must come home."""
    import torch

    data = torch.randint(0, 256, (1 << 25,), dtype=torch.uint8, generator=torch.Generator().manual_seed(5))
    wrong = {}
    for target in [
        device,
        *(f"cuda:{i}" for i in range(torch.cuda.device_count()) if device != "cpu" and f"cuda:{i}" != device),
    ]:
        there = data.to(device).to(target)
        different = int((there.cpu() != data).sum())
        if different:
            wrong[target] = different
    return {"ok": not wrong, "error": float(sum(wrong.values())), "tolerance": 0.0, "wrong_bytes": wrong}


def compiled(device: str) -> dict[str, Any]:
    """One small layer (RMS norm, product, SiLU) through torch.compile, against fp64."""
    import torch

    def layer(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        normed = x * torch.rsqrt(x.float().pow(2).mean(-1, keepdim=True) + 1e-6).to(x.dtype)
        return torch.nn.functional.silu(normed @ w)

    kind = torch.bfloat16 if device != "cpu" else torch.float32
    make = torch.Generator().manual_seed(11)
    x = torch.randn(64, 128, generator=make, dtype=torch.float64).to(kind)
    w = (torch.randn(128, 128, generator=make, dtype=torch.float64) / 11).to(kind)
    want = layer(x.double(), w.double())
    got = torch.compile(layer)(x.to(device), w.to(device))
    return _result(_error(got, want), 5e-2 if kind == torch.bfloat16 else 1e-4)


PROBES: dict[str, Callable[[str], dict[str, Any]]] = {
    "gemm float32": lambda d: gemm(d, "float32"),
    "gemm bfloat16": lambda d: gemm(d, "bfloat16"),
    "gemm float16": lambda d: gemm(d, "float16"),
    "lora gemm bfloat16": lambda d: narrow_gemm(d, "bfloat16"),
    "lora gemm float16": lambda d: narrow_gemm(d, "float16"),
    "sdpa math": lambda d: attention(d, "MATH"),
    "sdpa flash": lambda d: attention(d, "FLASH_ATTENTION"),
    "sdpa efficient": lambda d: attention(d, "EFFICIENT_ATTENTION"),
    "fp16 subnormals": subnormals,
    "nf4 round trip": nf4,
    "copy checksum": copies,
    "compiled layer": compiled,
}


def run(device: str, names: list[str]) -> Iterator[dict[str, Any]]:
    """Run probes one by one.

    Args:
        device: `cpu` or `cuda:N`.
        names: keys of PROBES.

    Yields:
        First `{"start": name}`, then the probe's result with its name.
    """
    for name in names:
        yield {"start": name}
        try:
            result = PROBES[name](device)
        except Exception as error:  # noqa: BLE001 - whatever a broken stack throws is this probe's finding
            result = {"ok": False, "raised": f"{type(error).__name__}: {str(error).strip()[:400]}"}
        yield {"probe": name, **result}


def main() -> None:
    """Print one JSON object a line for `DEVICE NAME...`."""
    device, *names = sys.argv[1:]
    for line in run(device, names or list(PROBES)):
        print(json.dumps(line), flush=True)


if __name__ == "__main__":
    main()
