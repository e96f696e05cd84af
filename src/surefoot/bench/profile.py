"""Where one step's time goes, from torch's profiler: kernels of AMD and NVIDIA cards, or a CPU's operators, by kind."""

from __future__ import annotations

import re
import time
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import torch

from surefoot.bench.ceilings import wait_for

KINDS = ("GEMM", "attention", "elementwise", "copies", "other")
IDLE = "idle"
TOP = 12
# First match counts, on lower-case names. Kernels that a compiler fused are named after all that is in them, and
# attention kernels are often built from GEMM libraries. "cijk" is Tensile's, in rocBLAS and hipBLASLt; "attn_fwd" and
# "bwd_kernel_dk" are AOTriton's, "fmha" Composable Kernel's and CUTLASS's, "nvjet" cuBLAS's, "dot_do_o" cuDNN's.
KERNELS = (
    ("other", re.compile(r"nccl|rccl")),
    ("elementwise", re.compile(r"^triton_(poi|red|per|for|mix)_")),
    (
        "attention",
        re.compile(r"flash|fmha|attn|attention|sdpa|bwd_kernel_(dk|dq|fuse)|bwd_preprocess|dot_do_o|convert_dq"),
    ),
    ("GEMM", re.compile(r"gemm|gemv|cijk|rocblas|hipblas|cublas|nvjet|cutlass|xmma|splitk|wgmma|triton_tem|triton_mm")),
    ("copies", re.compile(r"memcpy|memset|copybuffer|fillbuffer|copydevice|direct_copy|catarray|batchedcopy")),
    (
        "elementwise",
        re.compile(
            r"elementwise|vectorized|triton|functor|reduce|softmax|norm|index|gather|scatter|adam|multi_tensor"
            r"|cross_entropy|distribution|embedding|fill|dropout|sort|scan"
        ),
    ),
)
OPERATORS = (
    ("attention", re.compile(r"attention|sdpa")),
    ("GEMM", re.compile(r"::_?(addmm|mm|bmm|baddbmm|addbmm|matmul|linear\w*|mkldnn_linear|scaled_mm|int_mm)_?$|gemm")),
    ("copies", re.compile(r"::_?(copy|to_copy|to|clone|cat|contiguous|stack|split_with_sizes_copy)_?$")),
    ("elementwise", re.compile(r"^(aten|prims|fused)::|^torch-compiled|compiledfunction|compiledfxgraph|cpp_fused")),
)


@dataclass(frozen=True)
class Profile:
    """One profiled step.

    Attributes:
        on_gpu: True when kernels were watched, False when a CPU's operators were.
        wall_ms: the step's time, a little more than without the profiler.
        kinds: milliseconds by kind, "idle" last: nothing ran on the device, or on a CPU no operator.
        top: the longest kernels or operators: name, kind, milliseconds, calls.
    """

    on_gpu: bool
    wall_ms: float
    kinds: dict[str, float]
    top: tuple[tuple[str, str, float, int], ...]


def profile_step(work: Callable[[], object], device: str) -> Profile:
    """Run one step under torch's profiler.

    Args:
        work: the step.
        device: as torch names it.

    Returns:
        Where its time went.
    """
    from torch.profiler import ProfilerActivity
    from torch.profiler import profile as record

    on_gpu = device != "cpu"
    activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if on_gpu else [])]
    wait_for(device)
    with record(activities=activities, acc_events=True) as found:
        began = time.perf_counter()
        work()
        wait_for(device)
        wall_ms = (time.perf_counter() - began) * 1e3
    events: list[Any] = list(found.events() or ())
    return of_kernels(events, wall_ms) if on_gpu else of_operators(events, wall_ms)


def of_kernels(events: Iterable[Any], wall_ms: float) -> Profile:
    """Sort what ran on a GPU; events of the host are passed over."""
    kernels = [event for event in events if is_kernel(event)]
    busy_ms = union_of((event.time_range.start, event.time_range.end) for event in kernels) / 1e3
    times = [(event.name, event.time_range.end - event.time_range.start) for event in kernels]
    return summed(times, kind_of_kernel, True, wall_ms, busy_ms)


def of_operators(events: Iterable[Any], wall_ms: float) -> Profile:
    """Sort what ran on a CPU, each operator without those that it called."""
    times = [(event.name, event.self_cpu_time_total) for event in events]
    return summed(times, kind_of_operator, False, wall_ms, sum(microseconds for _, microseconds in times) / 1e3)


def summed(
    times: Iterable[tuple[str, float]], kind_of: Callable[[str], str], on_gpu: bool, wall_ms: float, busy_ms: float
) -> Profile:
    """Add up times by kind and by name.

    Args:
        times: name and microseconds of each event.
        kind_of: sorts a name.
        on_gpu: whether these are kernels.
        wall_ms: the step's time.
        busy_ms: the part of it in which something ran.

    Returns:
        The profile.
    """
    kinds: Counter[str] = Counter(dict.fromkeys(KINDS, 0.0))  # type: ignore[arg-type]
    names: Counter[str] = Counter()
    calls: Counter[str] = Counter()
    for name, microseconds in times:
        kinds[kind_of(name)] += microseconds / 1e3  # type: ignore[assignment]
        names[name] += microseconds / 1e3  # type: ignore[assignment]
        calls[name] += 1
    top = tuple((name, kind_of(name), float(ms), calls[name]) for name, ms in names.most_common(TOP))
    return Profile(on_gpu, wall_ms, {**kinds, IDLE: max(0.0, wall_ms - busy_ms)}, top)


def is_kernel(event: Any) -> bool:
    """Tell whether a profiler's event ran on the GPU; ranges that a program marks show there too and hold kernels."""
    marked = getattr(event, "is_user_annotation", False) or event.name.startswith(("##", "Torch-Compiled Region"))
    return event.device_type == torch.autograd.DeviceType.CUDA and not marked


def union_of(spans: Iterable[tuple[float, float]]) -> float:
    """Return the length of what spans cover together; kernels of several streams overlap."""
    covered, reached = 0.0, float("-inf")
    for begin, end in sorted(spans):
        covered += max(0.0, end - max(begin, reached))
        reached = max(reached, end)
    return covered


def kind_of_kernel(name: str) -> str:
    """Sort a GPU kernel by its name."""
    return next((kind for kind, pattern in KERNELS if pattern.search(name.lower())), "other")


def kind_of_operator(name: str) -> str:
    """Sort a CPU operator by its name."""
    return next((kind for kind, pattern in OPERATORS if pattern.search(name.lower())), "other")
