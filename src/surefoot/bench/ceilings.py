"""What the device reaches at best, measured: memory copies and matrix products."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass

import torch

from surefoot.model import fp8

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
FP8 = "fp8"
ROUNDS = 5  # the best one counts: others share the machine
TRIALS = 3  # calls that say how long one takes
ROUND_SECONDS = 0.05  # at least, or the clock and the launch would be measured
# Sides of the square product are doubled until one takes this long: a slow CPU is done in seconds, a fast GPU is busy.
ENOUGH_SECONDS = 0.03
SMALLEST_SIDE = 256
LARGEST_SIDE = {"cpu": 2048, "cuda": 8192}
COPY_BYTES = {"cpu": 2**28, "cuda": 2**30}  # far beyond any cache
MOST_OUTPUTS = 2**28  # numbers in a product's result
SHAPE_SECONDS = 0.1  # one product with a layer's matrix is given fewer rows if it takes longer than this


@dataclass(frozen=True)
class Rate:
    """The rate of one matrix product.

    Attributes:
        dtype: "float32", "bfloat16", "float16" or "fp8".
        name: "square", or the layer's matrix.
        rows: of the left matrix: tokens.
        inputs: its width.
        outputs: width of the result.
        tflops: 10¹² operations a second; a multiplication with its addition is two.
    """

    dtype: str
    name: str
    rows: int
    inputs: int
    outputs: int
    tflops: float


@dataclass(frozen=True)
class Ceilings:
    """What the device reaches.

    Attributes:
        copy_gb_per_second: 10⁹ bytes read and written a second in a copy from its memory into its memory.
        squares: one large square product for each dtype.
        missing: dtypes that were not measured, with the reason.
    """

    copy_gb_per_second: float
    squares: tuple[Rate, ...]
    missing: dict[str, str]


def measure_ceilings(device: str, tell: Callable[[str], None]) -> Ceilings:
    """Measure copies and square products.

    Args:
        device: as torch names it.
        tell: called with a sentence for the person.

    Returns:
        The best of several rounds each.
    """
    tell("Measuring memory copies.")
    copies = copy_rate(device)
    squares, missing = [], {}
    for dtype in (*DTYPES, FP8):
        if dtype == FP8 and device == "cpu":
            missing[dtype] = "a CPU computes it through float32"
            continue
        tell(f"Measuring matrix products in {dtype}.")
        try:
            squares.append(square_rate(dtype, device))
        except torch.OutOfMemoryError:
            raise
        except (RuntimeError, ValueError) as error:  # as torch refuses what a device cannot do
            missing[dtype] = next(iter(str(error).strip().splitlines()), type(error).__name__)[:200]
    release(device)
    return Ceilings(copies, tuple(squares), missing)


def copy_rate(device: str) -> float:
    """Measure copies within the device's memory, in 10⁹ bytes read and written a second."""
    size = COPY_BYTES[torch.device(device).type]
    source = torch.ones(size // 4, dtype=torch.float32, device=device)
    target = torch.empty_like(source)
    return 2 * size / best_seconds(lambda: target.copy_(source), device) / 1e9


def square_rate(dtype: str, device: str) -> Rate:
    """Measure the product of two large square matrices.

    Args:
        dtype: a name in `DTYPES`, or "fp8".
        device: as torch names it.

    Returns:
        Its rate, at the largest side up to `LARGEST_SIDE` that a round has time for.

    Raises:
        RuntimeError: the device does not multiply this dtype.
    """
    side = SMALLEST_SIDE
    while side < LARGEST_SIDE[torch.device(device).type]:
        multiply = product(dtype, side, side, side, device)
        multiply()  # the first call chooses a kernel
        if min(seconds_of(multiply, 1, device) for _ in range(TRIALS)) > ENOUGH_SECONDS:
            break
        side *= 2
    return rate_of(dtype, "square", side, side, side, device)


def shape_rates(
    matrices: Iterable[tuple[str, int, int]], dtype: str, rows: int, expected: float, device: str
) -> list[Rate]:
    """Measure products with the shapes of a model's matrices.

    Args:
        matrices: name, inputs and outputs of each.
        dtype: to measure in; a matrix whose sides fp8 products do not take is left out there.
        rows: tokens of a pass; fewer are taken where a product would take long.
        expected: rate of the square product in TFLOP/s, to foresee that.
        device: as torch names it.

    Returns:
        The rates, matrices of one shape once, under all their names.
    """
    names: dict[tuple[int, int], list[str]] = {}
    for name, inputs, outputs in matrices:
        named = names.setdefault((inputs, outputs), [])
        if name not in named:
            named.append(name)
    found = []
    for (inputs, outputs), parts in names.items():
        if dtype == FP8 and (inputs % fp8.MULTIPLE or outputs % fp8.MULTIPLE):
            continue
        most = min(MOST_OUTPUTS // outputs, int(SHAPE_SECONDS * expected * 1e12 / (2 * inputs * outputs)))
        fitting = max(min(rows, most), 16)
        found.append(rate_of(dtype, ", ".join(parts), fitting, inputs, outputs, device))
    release(device)
    return found


def release(device: str) -> None:
    """Give a GPU's memory back that torch keeps for later, so that a job finds it as a fresh process does."""
    if device != "cpu":
        torch.cuda.empty_cache()


def rate_of(dtype: str, name: str, rows: int, inputs: int, outputs: int, device: str) -> Rate:
    """Measure one product, [rows, inputs] times [inputs, outputs]."""
    seconds = best_seconds(product(dtype, rows, inputs, outputs, device), device)
    return Rate(dtype, name, rows, inputs, outputs, 2 * rows * inputs * outputs / seconds / 1e12)


def product(dtype: str, rows: int, inputs: int, outputs: int, device: str) -> Callable[[], object]:
    """Make a product that can be called again and again, laid out as a linear layer's: weights by output."""
    held = DTYPES.get(dtype, torch.float32)
    x_TI = torch.randn(rows, inputs, dtype=held, device=device)
    w_OI = torch.randn(outputs, inputs, dtype=held, device=device)
    if dtype == FP8:
        narrow = fp8.encoding(x_TI.device)
        (x8_TI, scale_T1), (w8_OI, scale_O1) = fp8.to_rows(x_TI, narrow), fp8.to_rows(w_OI, narrow)
        scale_1O = scale_O1.T.contiguous()
        return lambda: fp8.product(x8_TI, scale_T1, w8_OI, scale_1O, torch.bfloat16)
    out_TO = torch.empty(rows, outputs, dtype=held, device=device)
    return lambda: torch.mm(x_TI, w_OI.T, out=out_TO)


def best_seconds(work: Callable[[], object], device: str) -> float:
    """Return the seconds that one call takes, in the best of several rounds."""
    work()
    once = min(seconds_of(work, 1, device) for _ in range(TRIALS))
    times = max(1, min(1000, int(ROUND_SECONDS / max(once, 1e-9))))
    return min(seconds_of(work, times, device) / times for _ in range(ROUNDS))


def seconds_of(work: Callable[[], object], times: int, device: str) -> float:
    """Return the seconds that some calls take together, until the device is done with them."""
    wait_for(device)
    began = time.perf_counter()
    for _ in range(times):
        work()
    wait_for(device)
    return time.perf_counter() - began


def wait_for(device: str) -> None:
    """Wait until a device has done its work; a CPU always has."""
    if device != "cpu":
        torch.cuda.synchronize(device)
