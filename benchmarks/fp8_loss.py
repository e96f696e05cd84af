"""Loss of `fp8: true` against bfloat16: real weights, real text, the same steps.

The quickstart's model (135 million parameters) goes on learning from this repository's English pages: next-token loss,
LoRA of rank 16 on all linear layers, packed, compiled. Both arms see the same rows in the same order. On a GPU it takes
a minute or two; torch multiplies the same 8-bit floats on a CPU, slowly. Exit code 1 when the mean losses differ by
more than half a percent.

    python benchmarks/fp8_loss.py [--steps 200] [--rows 8] [--length 256] [--rate 1e-4]
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "src"))

from speed import Rows, adapted, compile_model, say, surefoot_step, sync

from surefoot.data.messages import Sample
from surefoot.model.demo import resolve_model_path

ROOT = Path(__file__).parents[1]
MODEL = "demo:smollm2-135m-instruct"
BOUND = 0.005
SHOWN = 25  # steps that make one line of the table


def rows_of_pages(folder: str, length: int) -> Rows:
    """Cut the English pages into rows of one length; what is left at the end of a page is left out."""
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(folder)
    rows = []
    for page in sorted((ROOT / "docs").glob("*.md")):
        ids = tokenizer(page.read_text(encoding="utf-8"))["input_ids"] if not page.name.endswith(".zh.md") else []
        for start in range(0, len(ids) - length, length):
            part = np.array(ids[start : start + length], dtype=np.int32)
            rows.append(Sample((f"{page.stem}:{start}",), part, part.copy(), (length,)))
    return rows


def train_arm(name: str, folder: str, rows: Rows, options: argparse.Namespace, device: str) -> list[float]:
    """Train one arm and return its losses."""
    from transformers import AutoModelForCausalLM

    base: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16).to(device)
    base.config.use_cache = False
    torch.manual_seed(0)
    model = adapted(base)
    step, _ = surefoot_step(model, device, 64, options.rows * options.length, options.rate)
    compile_model(model, [], name == "fp8")
    order = np.random.default_rng(0)
    losses, began = [], time.perf_counter()
    for _ in range(options.steps):
        chosen = [rows[int(place)] for place in order.choice(len(rows), options.rows, replace=False)]
        losses.append(step(chosen))
    sync()
    say(f"{name}: {len(losses)} steps in {time.perf_counter() - began:.0f} s, compiling among it")
    return torch.stack(losses).tolist()


def main() -> int:
    """Train both arms and print their losses side by side."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--rows", type=int, default=8, help="rows a step")
    parser.add_argument("--length", type=int, default=256, help="tokens a row")
    parser.add_argument("--rate", type=float, default=1e-4, help="learning rate")
    options = parser.parse_args()
    device = "cuda:0" if torch.cuda.is_available() else "cpu"
    folder = resolve_model_path(MODEL)
    rows = rows_of_pages(folder, options.length)
    say(f"{device}, torch {torch.__version__}; {len(rows)} rows of {options.length} tokens")
    losses = {name: train_arm(name, folder, rows, options, device) for name in ("bf16", "fp8", "bf16 again")}
    say(f"{'steps':>9} {'bf16':>8} {'fp8':>8} {'off by':>8} {'bf16 again':>10}")
    for start in [*range(0, options.steps, SHOWN), None]:
        part = slice(None) if start is None else slice(start, start + SHOWN)
        one, other, again = (statistics.fmean(losses[name][part]) for name in ("bf16", "fp8", "bf16 again"))
        label = "all" if start is None else f"{start + 1}-{start + SHOWN}"
        say(f"{label:>9} {one:8.4f} {other:8.4f} {100 * (other / one - 1):+7.2f}% {100 * (again / one - 1):+9.2f}%")
    one, other = (statistics.fmean(losses[name]) for name in ("bf16", "fp8"))
    return 0 if abs(other / one - 1) <= BOUND else 1


if __name__ == "__main__":
    sys.exit(main())
