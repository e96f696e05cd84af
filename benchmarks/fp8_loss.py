"""Loss of `fp8: true` against bfloat16: real weights, real text, the same steps.

The quickstart's model goes on learning from this repository's English pages (next-token loss, LoRA as in the
quickstart). Both arms run compiled and in bfloat16 on the CPU, where torch multiplies the same 8-bit floats, if more
slowly than a GPU; the code is the product's own. Exit code 1 when the mean losses differ by more than half a percent.

    python benchmarks/fp8_loss.py [--steps 200] [key=value ...]
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
import time
from pathlib import Path

from cpu_quickstart import ROOT, Silent

from surefoot.config import load_config
from surefoot.data.prepare import prepare_data
from surefoot.data.template import get_template
from surefoot.model import fp8
from surefoot.model.load import load_model
from surefoot.model.tokenizer import load_tokenizer

BOUND = 0.005
SHOWN = 25  # steps that make one line of the table


def write_pages(folder: Path) -> None:
    """Write the English pages as rows of plain text, a paragraph or more each."""
    pages = [page for page in sorted((ROOT / "docs").glob("*.md")) if not page.name.endswith(".zh.md")]
    rows = [{"text": text} for page in pages for text in page.read_text(encoding="utf-8").split("\n## ")]
    (folder / "pages.json").write_text(json.dumps(rows), encoding="utf-8")
    info = {"pages": {"file_name": "pages.json", "columns": {"prompt": "text"}}}
    (folder / "dataset_info.json").write_text(json.dumps(info), encoding="utf-8")


def train_arm(name: str, folder: Path, steps: int, overrides: list[str]) -> list[float]:
    """Train one arm and return its losses."""
    from surefoot.train.loop import train
    from surefoot.train.run import assemble
    from surefoot.train.signals import StopRequest

    settings = [
        "stage=pt", f"dataset_dir={folder}", "dataset=pages", "template=default", "bf16=true", "compile=true",
        "compute_dtype=bfloat16", "learning_rate=1e-4", "cutoff_len=128", "gradient_accumulation_steps=2",
        f"max_steps={steps}", "guard_preflight=false", "save_strategy=no", "eval_strategy=no",
        "output_dir=/nonexistent",
    ]  # fmt: skip
    cfg = load_config(ROOT / "examples/quickstart.yaml", [*settings, *overrides])
    cfg = cfg.model_copy(update={"fp8": name == "fp8"})
    tokenizer = load_tokenizer(cfg)
    template = get_template(cfg.template, tokenizer, default_system=cfg.default_system)
    template.fix_tokenizer(tokenizer)
    data = prepare_data(cfg, tokenizer, template, progress=lambda *_: None)
    silent, began = Silent(), time.perf_counter()
    train(assemble(cfg, load_model(cfg, tokenizer, "cpu"), tokenizer, data, [silent], "cpu", StopRequest()))
    losses = [event.loss for event in silent.steps]
    print(f"{name}: {len(losses)} steps in {time.perf_counter() - began:.0f} s", flush=True)
    return losses


def main() -> int:
    """Train both arms and print their losses side by side."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("overrides", nargs="*", help="key=value, over the YAML, for both")
    options = parser.parse_args()
    fp8.require = lambda device: None  # the product asks for a GPU that is fast at it; here only losses are looked at
    losses: dict[str, list[float]] = {}
    with tempfile.TemporaryDirectory() as place:
        write_pages(Path(place))
        for name in ("bf16", "fp8"):
            losses[name] = train_arm(name, Path(place), options.steps, options.overrides)
    print(f"{'steps':>9} {'bf16':>8} {'fp8':>8} {'off by':>8}")
    for start in range(0, options.steps, SHOWN):
        one, other = (statistics.fmean(losses[name][start : start + SHOWN]) for name in ("bf16", "fp8"))
        print(f"{start + 1:4}-{start + SHOWN:4} {one:8.4f} {other:8.4f} {100 * (other / one - 1):+7.2f}%")
    one, other = (statistics.fmean(losses[name]) for name in ("bf16", "fp8"))
    print(f"{'all':>9} {one:8.4f} {other:8.4f} {100 * (other / one - 1):+7.2f}%")
    return 0 if abs(other / one - 1) <= BOUND else 1


if __name__ == "__main__":
    sys.exit(main())
