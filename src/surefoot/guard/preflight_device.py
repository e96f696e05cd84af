"""Before step 1: does this device's matrix product do what it says, with numbers so small and sums so long?"""

from __future__ import annotations

from collections.abc import Callable

import torch

from surefoot.guard.diagnosis import Diagnosis
from surefoot.guard.preflight_base import Finding, compute_dtype
from surefoot.guard.scene import Scene

SIZE = 64
LENGTH = 4096
# A sum of 4096 products that is held in 16 bits on the way is off by half; float32 sums are off by rounding the result.
SUM_TOLERANCE = 0.03

Product = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]


def check_products(scene: Scene) -> Finding | None:
    """Probe matrix products of the run's dtype on its device.

    MI200 (gfx90a) takes float16 and bfloat16 subnormals as zero in its matrix instructions; since torch 2.7 the
    backward pass meets that too (pytorch issue 182952), so that float16 gradients below 6.1e-5 vanish.

    Args:
        scene: the first step.

    Returns:
        KERNEL when long sums or subnormals are lost; None when products are sound, or in float32.
    """
    dtype = compute_dtype(scene)
    if dtype not in (torch.float16, torch.bfloat16):
        return None
    off = sum_error(scene.device, dtype)
    if not off <= SUM_TOLERANCE:
        sentence = (
            f"A {str(dtype).removeprefix('torch.')} product that sums {LENGTH} positive terms is off by {off:.1%}; "
            f"rounding explains {SUM_TOLERANCE:.0%}."
        )
        diagnosis = Diagnosis(0, "KERNEL", op="mm", phase="forward", evidence=(sentence,), details={"sum_error": off})
        return Finding(diagnosis, "this device's products cannot be trusted: run `surefoot doctor`", True)
    if dtype == torch.bfloat16:  # its subnormals lie below 1e-38: nothing that is trained is so small
        return None
    kept = {"forward": keeps_small_inputs(scene.device, dtype), "backward": keeps_small_gradients(scene.device, dtype)}
    lost = [phase for phase, share in kept.items() if share < 1.0]
    return _flushed(scene, lost, kept) if lost else None


def sum_error(device: str, dtype: torch.dtype, product: Product = torch.mm) -> float:
    """Compare a long sum of positive products with float32's.

    Args:
        device: as torch names it.
        dtype: of the factors.
        product: to probe.

    Returns:
        Largest relative difference; NaN when the product is not finite.
    """
    generator = torch.Generator().manual_seed(0)
    left, right = (torch.rand(shape, generator=generator) + 0.5 for shape in ((SIZE, LENGTH), (LENGTH, SIZE)))
    left, right = left.to(device, dtype), right.to(device, dtype)
    exact = left.double().cpu() @ right.double().cpu()
    return float(((product(left, right).double().cpu() - exact) / exact).abs().max())


def keeps_small_inputs(device: str, dtype: torch.dtype, product: Product = torch.mm) -> float:
    """Multiply subnormal numbers by one.

    Args:
        device: as torch names it.
        dtype: of the factors.
        product: to probe.

    Returns:
        Share of them that come out as they went in.
    """
    small = torch.finfo(dtype).tiny / 2
    x = torch.full((SIZE, SIZE), small, dtype=dtype, device=device)
    with torch.no_grad():
        y = product(x, torch.eye(SIZE, dtype=dtype, device=device))
    return float((y == x).float().mean())


def keeps_small_gradients(device: str, dtype: torch.dtype, product: Product = torch.mm) -> float:
    """Send subnormal gradients back through a product with the identity.

    Args:
        device: as torch names it.
        dtype: of the factors.
        product: to probe.

    Returns:
        Share of them that arrive as they were.
    """
    x = torch.ones(SIZE, SIZE, dtype=dtype, device=device, requires_grad=True)
    with torch.enable_grad():
        y = product(x, torch.eye(SIZE, dtype=dtype, device=device))
    sent = torch.full_like(y, torch.finfo(dtype).tiny / 2)
    (arrived,) = torch.autograd.grad(y, x, sent)
    return float((arrived == sent).float().mean())


def _flushed(scene: Scene, lost: list[str], kept: dict[str, float]) -> Finding:
    dtype = compute_dtype(scene)
    tiny = torch.finfo(dtype).tiny
    evidence = tuple(
        f"Of {'numbers' if phase == 'forward' else 'gradients'} of {tiny / 2:.2g} (subnormal), "
        f"{1.0 - kept[phase]:.0%} become 0 in a {phase} product on {scene.device}."
        for phase in lost
    )
    phase = "backward" if "backward" in lost else "forward"
    diagnosis = Diagnosis(0, "KERNEL", op="mm", phase=phase, evidence=evidence, details={"kept": kept})
    cure = None
    action = f"use bf16: true, or keep the loss scale high: float16 gradients below {tiny:.1e} are lost here"
    if scene.device != "cpu" and torch.version.hip and _kept_by_rocblas(scene.device, dtype):
        action = "use rocBLAS instead of hipBLASLt, which keeps them in the backward pass"
        cure = use_rocblas
    return Finding(diagnosis, action, False, cure=cure)


def use_rocblas() -> None:
    """Let this process take its matrix products from rocBLAS (torch calls it "cublas")."""
    torch.backends.cuda.preferred_blas_library("cublas")


def _kept_by_rocblas(device: str, dtype: torch.dtype) -> bool:
    before = torch.backends.cuda.preferred_blas_library()
    use_rocblas()
    try:
        return keeps_small_gradients(device, dtype) == 1.0
    finally:
        torch.backends.cuda.preferred_blas_library(before)
