"""The bars of `surefoot bench`: the ceilings, the step against its own, and where the time goes."""

from __future__ import annotations

import io
from typing import TYPE_CHECKING, Any

from surefoot.bench.measure import Figures
from surefoot.bench.profile import IDLE

if TYPE_CHECKING:
    from matplotlib.axes import Axes

BLUE = "#1f77b4"
GREY = "#c7c7c7"
COLOURS = {
    "GEMM": BLUE, "attention": "#ff7f0e", "elementwise": "#2ca02c", "copies": "#9467bd", "other": "#8c564b", IDLE: GREY
}  # fmt: skip


def draw(figures: Figures) -> bytes:
    """Draw everything that was measured.

    Args:
        figures: from `measure`.

    Returns:
        A PNG.
    """
    # The object interface, as in run/plots.py: pyplot would keep every figure in a global list.
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    job = figures.job
    rates = [*figures.ceilings.squares, *(job.shapes if job else ())]
    labels = [rate.dtype if rate.name == "square" else f"{_short(rate.name)} ({rate.dtype})" for rate in rates]
    heights = [max(2, len(rates)) * 0.32 + 0.6]
    heights += [1.3, len(COLOURS) * 0.32 + 0.6] if job else []
    figure = Figure(figsize=(8.0, sum(heights) + 0.9), layout="constrained")
    figure.suptitle(f"{figures.name} ({figures.torch})", fontsize=11)
    axes: list[Axes] = list(figure.subplots(len(heights), 1, squeeze=False, height_ratios=heights)[:, 0])
    copies = f"memory copies: {figures.ceilings.copy_gb_per_second:,.1f} GB/s"
    unit, factor = ("TFLOP/s", 1) if max(rate.tflops for rate in rates) >= 1 else ("GFLOP/s", 1000)
    speeds = [rate.tflops * factor for rate in rates]
    _bars(axes[0], labels, speeds, f"matrix products, {unit} ({copies})", [BLUE] * len(rates), ",.1f")
    if job:
        names = ["arithmetic ceiling", "this job"]
        speeds = [job.ceiling_tokens_per_second, job.tokens_per_second]
        title = f"tokens a second: {job.share:.1%} of the ceiling"
        _bars(axes[1], names, speeds, title, [GREY, BLUE], ",.0f")
        kinds = job.profile.kinds
        shown = [("between operators" if kind == IDLE and not job.profile.on_gpu else kind) for kind in kinds]
        title = f"one step, ms (profiled, {job.profile.wall_ms:,.0f} ms in all)"
        _bars(axes[2], shown, list(kinds.values()), title, [COLOURS[kind] for kind in kinds], ",.1f")
    buffer = io.BytesIO()
    FigureCanvasAgg(figure).print_png(buffer)
    return buffer.getvalue()


def _bars(axes: Any, labels: list[str], values: list[float], title: str, colours: list[str], form: str) -> None:
    """Draw horizontal bars, the first on top, each with its number."""
    places = range(len(values))
    bars = axes.barh(places, values, color=colours, height=0.7)
    axes.bar_label(bars, labels=[format(value, form) for value in values], padding=3, fontsize=9)
    axes.set_yticks(places, labels, fontsize=9)
    axes.invert_yaxis()
    axes.set_title(title, fontsize=10, loc="left")
    axes.margins(x=0.12)
    axes.grid(axis="x", alpha=0.25)
    axes.set_axisbelow(True)


def _short(names: str) -> str:
    first, _, more = names.partition(", ")
    return f"{first} …" if more else first
