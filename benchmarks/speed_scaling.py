"""How cost grows: tokens per second against the length of rows (512 to 32k) and against samples packed into a step.

Surefoot's compiled step on Llama-3-8B shapes with LoRA r=16, random bfloat16 weights, one GPU. Lengths are measured
with 16,384 tokens a step (one row, where it is longer: there all MLPs are recomputed, as it would not fit otherwise);
samples with rows of 193 tokens. The result is one JSON file, and a plot of it wherever matplotlib is.

    python benchmarks/speed_scaling.py --out scaling.json [--layers 32]
    python benchmarks/speed_scaling.py --plot scaling.json scaling.svg
"""

from __future__ import annotations

import argparse
import itertools
import json
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch

sys.path.insert(0, str(Path(__file__).resolve().parent))
from speed import SHAPES, TINY, Rows, compile_model, make_model, say, surefoot_step, sync

from surefoot.data.messages import Sample
from surefoot.model.memory import Choice
from surefoot.model.recompute import recompute

LENGTHS = [512, 1024, 2048, 4096, 8192, 16384, 32768]
SAMPLES = [1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64]
FITTING = 16384  # tokens of a step that fit without recompute
SHORT = 193  # tokens: the mean of short chats
CLIFF = 2.0  # neighbouring points may differ by no more


def rows(count: int, length: int, vocabulary: int) -> Rows:
    """Random ids, all of them trained but a third."""
    rng = np.random.default_rng(length)
    made = []
    for place in range(count):
        ids = rng.integers(0, vocabulary, length).astype(np.int32)
        labels = ids.copy()
        labels[: length // 3] = -100
        made.append(Sample((f"row:{place}",), ids, labels, (length,)))
    return made


def speed_of(step: Any, made: Rows, seconds: float) -> float:
    """Tokens per second over at least three steps, two steps apart for warming up."""
    for _ in range(2):
        step(made)
    sync()
    began, steps = time.perf_counter(), 0
    while steps < 3 or time.perf_counter() - began < seconds:
        step(made)
        sync()
        steps += 1
    return steps * sum(len(row.input_ids) for row in made) / (time.perf_counter() - began)


def cliffs(points: dict[int, float]) -> list[str]:
    """Name neighbours whose speeds differ by more than CLIFF."""
    pairs = itertools.pairwise(points.items())
    return [f"{a} to {b}: {x:,.0f} to {y:,.0f}" for (a, x), (b, y) in pairs if max(x, y) > CLIFF * min(x, y)]


def measure(arguments: argparse.Namespace) -> int:
    """Measure both curves and write them."""
    device = "cuda:0" if torch.cuda.is_available() else "cpu"
    shapes = TINY if arguments.tiny else SHAPES | {"num_hidden_layers": arguments.layers}
    shapes = shapes | {"max_position_embeddings": max(LENGTHS)}
    model = make_model(shapes, device)
    lengths = [16, 32, 64] if arguments.tiny else LENGTHS
    largest = max(FITTING, *lengths) if not arguments.tiny else 128
    step, _ = surefoot_step(model, device, 64, largest)
    if device != "cpu":
        compile_model(model, [], narrow=False)
    where = torch.cuda.get_device_name() if device != "cpu" else "CPU"
    found: dict[str, Any] = {"device": where, "torch": torch.__version__, "layers": shapes["num_hidden_layers"]}
    for name, points in (
        ("length", {n: (max(1, (128 if arguments.tiny else FITTING) // n), n) for n in lengths}),
        ("samples", {k: (k, SHORT) for k in ([1, 2] if arguments.tiny else SAMPLES)}),
    ):
        curve: dict[int, float] = {}
        for at, (count, length) in points.items():
            recompute(model, Choice(0, shapes["num_hidden_layers"] if count * length > FITTING else 0))
            try:
                curve[at] = speed_of(step, rows(count, length, shapes["vocab_size"]), arguments.seconds)
            except torch.OutOfMemoryError:
                say(f"{name} {at}: out of memory")
                model.zero_grad(set_to_none=True)
                torch.cuda.empty_cache()
                continue
            say(f"{name:8} {at:6} {curve[at]:10,.0f} tokens/s")
        found[name] = curve
        say(f"{name}: cliffs {cliffs(curve) or 'none'}")
    arguments.out.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
    return 0


def plot(source: Path, target: Path) -> int:
    """Draw the curves of a result."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    found = json.loads(source.read_text(encoding="utf-8"))
    figure, axes = pyplot.subplots(1, 2, figsize=(10, 3.6), layout="constrained", sharey=True)
    labels = ("tokens of a row (16,384 tokens a step, or one row)", f"samples of {SHORT} tokens packed into a step")
    for axis, name, label in zip(axes, ("length", "samples"), labels, strict=True):
        points = {int(at): speed for at, speed in found[name].items()}
        axis.plot(list(points), list(points.values()), marker="o")
        axis.set_xscale("log", base=2)
        axis.set_xticks(list(points), [f"{at:,}" for at in points], fontsize=8)
        axis.minorticks_off()
        axis.set_ylim(0, None)
        axis.set_xlabel(label)
        axis.grid(alpha=0.3)
    axes[0].set_ylabel("tokens per second")
    figure.suptitle(f"Llama-3-8B shapes, {found['layers']} layers, LoRA r=16, bf16, compiled: {found['device']}")
    pyplot.rcParams["svg.hashsalt"] = "scaling"
    figure.savefig(target, metadata={"Date": None} if target.suffix == ".svg" else None)
    return 0


def main() -> int:
    """Measure or draw."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--out", type=Path, default=Path("scaling.json"))
    parser.add_argument("--plot", type=Path, nargs=2, metavar=("JSON", "PICTURE"))
    parser.add_argument("--layers", type=int, default=32)
    parser.add_argument("--seconds", type=float, default=1.5, help="least time for a point")
    parser.add_argument("--tiny", action="store_true", help="a model of three small layers, to try the script")
    arguments = parser.parse_args()
    return plot(*arguments.plot) if arguments.plot else measure(arguments)


if __name__ == "__main__":
    sys.exit(main())
