"""The training curves, one PNG a quantity, under LLaMA-Factory's file names and with its smoothing."""

from __future__ import annotations

import io
import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from surefoot.files import write_bytes

BLUE = "#1f77b4"
RED = "#d62728"


@dataclass(frozen=True, slots=True)
class Curve:
    """One quantity over the run.

    Attributes:
        key: transformers' name for it, as "loss" or "eval_loss".
        steps: optimizer steps at which it was logged.
        values: what was logged, all finite.
        nonfinite: steps at which it, or the gradient norm, was NaN or infinite.
    """

    key: str
    steps: list[int]
    values: list[float]
    nonfinite: list[int]


def smooth(values: Sequence[float]) -> list[float]:
    """Smooth a curve by an exponential mean that starts at the first value.

    LLaMA-Factory's formula: the weight of the past is 1.8 * (sigmoid(0.05 * n) - 0.5) for n values, so short curves
    stay close to their points and long ones are smoothed by at most 0.9.

    Args:
        values: in the order of the steps.

    Returns:
        As many values.
    """
    if not values:
        return []
    weight = 1.8 * (1 / (1 + math.exp(-0.05 * len(values))) - 0.5)
    smoothed: list[float] = []
    last = float(values[0])
    for value in values:
        last = weight * last + (1 - weight) * value
        smoothed.append(last)
    return smoothed


def curves(entries: list[dict[str, Any]]) -> list[Curve]:
    """Find what can be plotted: the loss, and the loss and accuracy of every evaluation set.

    Args:
        entries: the lines of `trainer_log.jsonl`.

    Returns:
        One curve a quantity that has at least one point or one step at which it was not finite.
    """
    points: dict[str, list[tuple[int, float | None, bool]]] = {"loss": []}
    for entry in entries:
        prefix = f"eval_{entry['eval_name']}" if "eval_name" in entry else "eval"
        for field, key in (("loss", "loss"), ("eval_loss", f"{prefix}_loss"), ("accuracy", f"{prefix}_accuracy")):
            if field in entry:
                bad = entry[field] is None or bool(entry.get("nonfinite"))
                points.setdefault(key, []).append((entry["current_steps"], entry[field], bad))
    return [_curve(key, rows) for key, rows in points.items() if rows]


def _curve(key: str, rows: list[tuple[int, float | None, bool]]) -> Curve:
    finite = [(step, value) for step, value, _ in rows if value is not None]
    return Curve(
        key=key,
        steps=[step for step, _ in finite],
        values=[value for _, value in finite],
        nonfinite=[step for step, _, bad in rows if bad],
    )


def write_plots(folder: Path, entries: list[dict[str, Any]]) -> list[Path]:
    """Draw every curve of a run.

    Args:
        folder: the run directory; the files are `training_<quantity>.png`.
        entries: the lines of `trainer_log.jsonl`.

    Returns:
        The files written, the training loss first; none when nothing was logged.
    """
    paths = []
    for curve in curves(entries):
        path = folder / f"training_{curve.key.replace('/', '_')}.png"
        write_bytes(path, draw(curve, title=f"training {curve.key} of {folder.name}"))
        paths.append(path)
    return paths


def draw(curve: Curve, title: str) -> bytes:
    """Draw one curve.

    Args:
        curve: what to draw.
        title: above the plot.

    Returns:
        A PNG.
    """
    # The object interface: pyplot would keep every figure in a global list and choose a window system.
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure
    from matplotlib.ticker import MaxNLocator

    figure = Figure(figsize=(6.4, 4.8), layout="constrained")
    axes = figure.add_subplot(111)
    marker = "o" if len(curve.values) == 1 else None
    axes.plot(curve.steps, curve.values, color=BLUE, alpha=0.4, marker=marker, label="original")
    axes.plot(curve.steps, smooth(curve.values), color=BLUE, label="smoothed")
    for index, step in enumerate(curve.nonfinite):
        axes.axvline(step, color=RED, linestyle=":", label="NaN or infinite" if index == 0 else None)
    axes.set_title(title, fontsize=10, wrap=True)
    axes.set_xlabel("step")
    axes.set_ylabel(curve.key)
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    axes.grid(alpha=0.25)
    axes.legend()
    buffer = io.BytesIO()
    FigureCanvasAgg(figure).print_png(buffer)
    return buffer.getvalue()
