"""What `surefoot bench` prints."""

from __future__ import annotations

from surefoot.bench.ceilings import Ceilings, Rate
from surefoot.bench.job import JobFigures
from surefoot.bench.measure import Figures
from surefoot.bench.profile import IDLE

NAME_WIDTH = 72  # of a kernel's name


def lines_of(figures: Figures) -> list[str]:
    """Write all figures as tables for a terminal.

    Args:
        figures: from `measure`.

    Returns:
        The lines.
    """
    lines = [f"{figures.name} ({figures.torch})", "", *ceiling_lines(figures.ceilings)]
    if figures.job is not None:
        lines += ["", *step_lines(figures.job), "", *profile_lines(figures.job)]
    return lines


def ceiling_lines(ceilings: Ceilings) -> list[str]:
    """Write what the device reaches."""
    return [
        "Measured ceilings",
        f"  {'memory copy, read and written':<50} {ceilings.copy_gb_per_second:>8,.1f} GB/s",
        *(rate_line(rate) for rate in ceilings.squares),
        *(f"  {dtype}: not measured: {reason}" for dtype, reason in ceilings.missing.items()),
    ]


def rate_line(rate: Rate) -> str:
    """Write one product's rate."""
    what = f"{rate.dtype} {rate.name}, {rate.rows} x {rate.inputs} x {rate.outputs}"
    return f"  {what:<50} {in_words(rate.tflops):>10}FLOP/s"


def in_words(tera: float) -> str:
    """Write a number of 10¹² with the prefix that suits it."""
    for prefix, factor in (("T", 1.0), ("G", 1e3)):
        if tera * factor >= 1:
            return f"{tera * factor:,.1f} {prefix}"
    return f"{tera * 1e6:,.1f} M"


def step_lines(job: JobFigures) -> list[str]:
    """Write the step against its ceiling."""
    work = job.arithmetic
    kind = f"{job.compiled_layers} decoder layers compiled" if job.compiled_layers else "not compiled"
    rates = f"{in_words(job.tflops)}FLOP/s in {job.dtype}"
    if job.frozen_dtype != job.dtype:
        rates += f", {in_words(job.frozen_tflops)}FLOP/s in {job.frozen_dtype} with frozen weights"
    memory = [f"  {'peak memory':<36} {job.memory_gib:>12,.2f} GiB"] if job.memory_gib is not None else []
    parts = {"frozen": work.frozen, "trained": work.trained, "attention": work.attention, "head": work.head}
    return [
        "Matrix products with the model's own shapes",
        *(rate_line(rate) for rate in job.shapes),
        "",
        f"One optimizer step, median of {job.steps} ({kind}, at most {job.passes} passes a step)",
        f"  {'tokens a step, mean':<36} {job.tokens:>12,.0f}, {job.trained_tokens:,.0f} of them trained",
        f"  {'time a step':<36} {job.ms:>12,.1f} ms",
        f"  {'speed':<36} {job.tokens_per_second:>12,.0f} tokens/s",
        *memory,
        f"  {'arithmetic a step':<36} {in_words(work.total / 1e12):>14}FLOP: "
        + ", ".join(f"{name} {flops / work.total:.0%}" for name, flops in parts.items()),
        f"  {'arithmetic ceiling':<36} {job.ceiling_tokens_per_second:>12,.0f} tokens/s, at {rates}",
        f"  {'share of the ceiling':<36} {job.share:>12.1%}",
    ]


def profile_lines(job: JobFigures) -> list[str]:
    """Write where the time goes."""
    profile = job.profile
    what = "kernels on the GPU" if profile.on_gpu else "operators on the CPU"
    idle = "idle" if profile.on_gpu else "between operators"
    lines = [f"Where the time goes: {what}, one profiled step of {profile.wall_ms:,.1f} ms"]
    for kind, ms in profile.kinds.items():
        lines.append(f"  {idle if kind == IDLE else kind:<20} {ms:>12,.1f} ms {ms / profile.wall_ms:>7.1%}")
    lines += ["", "The longest"]
    for name, kind, ms, calls in profile.top:
        lines.append(f"  {ms:>10,.1f} ms {calls:>6} x  {kind:<12} {name[:NAME_WIDTH]}")
    return lines
