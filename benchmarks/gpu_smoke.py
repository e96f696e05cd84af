"""The training path on a GPU: every tuning type and precision runs, packed equals single, resumed equals straight.

Random weights in Llama shapes of about one billion parameters, rows of short-chat lengths. Prints one table.

    python benchmarks/gpu_smoke.py [--steps 10]
"""

from __future__ import annotations

import argparse
import shutil
import sys
import tempfile
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests"))

import numpy as np

from helpers import MemoryTable, byte_tokenizer, random_sample
from surefoot.config import make_config
from surefoot.model.load import load_model
from surefoot.train.run import run_training

SHAPES = {
    "vocab_size": 32000, "hidden_size": 2048, "intermediate_size": 8192, "num_hidden_layers": 16,
    "num_attention_heads": 32, "num_key_value_heads": 8, "max_position_embeddings": 8192,
}  # fmt: skip


class Recorder:
    """A listener that keeps what a table needs."""

    def __init__(self) -> None:
        self.steps: list[Any] = []
        self.messages: list[str] = []

    def __getattr__(self, name: str) -> Any:
        return lambda *_: None

    def stepped(self, event: Any) -> None:
        """Keep the event."""
        self.steps.append(event)

    def told(self, message: str) -> None:
        """Keep the sentence."""
        self.messages.append(message)


def short_chats(count: int) -> MemoryTable:
    """Random rows whose lengths spread like short chats: mean near 193 tokens, the longest 1,024."""
    rng = np.random.default_rng(0)
    lengths = np.clip(rng.lognormal(5.0, 0.7, count), 16, 1024).astype(int)
    return MemoryTable([random_sample(rng, int(n), i) for i, n in enumerate(lengths)])


def run(folder: Path, table: MemoryTable, steps: int, **changes: Any) -> tuple[Recorder, float, float]:
    """Train; return the listener, tokens per second after the first two steps, and peak GiB."""
    settings = {
        "model_name_or_path": str(folder), "dataset": "rows", "template": "default",
        "output_dir": str(folder / "out"), "per_device_train_batch_size": 1, "gradient_accumulation_steps": 8,
        "max_steps": steps, "learning_rate": 1e-4, "save_strategy": "no", "report_to": "none", "lora_rank": 16,
        "overwrite_output_dir": True,
    }  # fmt: skip
    cfg = make_config(settings | changes)
    tokenizer = byte_tokenizer()
    torch.cuda.reset_peak_memory_stats()
    loaded = load_model(cfg, tokenizer, "cuda:0")
    recorder = Recorder()
    run_training(cfg, loaded, tokenizer, SimpleNamespace(train=table, evals={}), [recorder], "cuda:0")
    timed = recorder.steps[2:] or recorder.steps
    tokens = timed[-1].tokens - recorder.steps[1].tokens if len(recorder.steps) > 2 else timed[-1].tokens
    seconds = timed[-1].seconds - recorder.steps[1].seconds if len(recorder.steps) > 2 else timed[-1].seconds
    return recorder, tokens / seconds, torch.cuda.max_memory_allocated() / 2**30


def main() -> int:
    """Run the table; 1 when an equality does not hold."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=10)
    steps = parser.parse_args().steps
    from transformers import LlamaConfig, LlamaForCausalLM

    folder = Path(tempfile.mkdtemp())
    with torch.device("cuda:0"):
        LlamaForCausalLM(LlamaConfig(**SHAPES)).to(torch.bfloat16).save_pretrained(folder)
    torch.cuda.empty_cache()
    table = short_chats(8 * steps)
    cases: dict[str, dict[str, Any]] = {
        "lora bf16": {"bf16": True},
        "lora bf16, one row a pass": {"bf16": True, "memory": 1},
        "lora fp16": {"fp16": True},
        "lora checkpoint dtype": {},
        "lora fp32": {"compute_dtype": "float32"},
        "lora bf16, eager attention": {"bf16": True, "flash_attn": "disabled"},
        "full bf16": {"bf16": True, "finetuning_type": "full"},
        "freeze bf16": {"bf16": True, "finetuning_type": "freeze"},
    }
    print(f"{torch.cuda.get_device_name()}  torch {torch.__version__}")
    print(f"{'case':28} {'tokens/s':>9} {'GiB':>6} {'passes':>6}  first and last loss")
    losses = {}
    for name, changes in cases.items():
        recorder, speed, memory = run(folder, table, steps, **changes)
        losses[name] = [event.loss for event in recorder.steps]
        first = recorder.steps[0]
        print(
            f"{name:28} {speed:9.0f} {memory:6.1f} {first.passes:6}  {losses[name][0]:.4f} {losses[name][-1]:.4f}",
            *recorder.messages,
        )
    gap = max(abs(a - b) for a, b in zip(losses["lora bf16"], losses["lora bf16, one row a pass"], strict=True))
    print(f"packed against one row a pass, bf16: largest loss difference {gap:.2e}")
    began = time.perf_counter()
    straight, *_ = run(
        folder, table, steps, bf16=True, save_strategy="steps", save_steps=steps // 2, full_determinism=True
    )
    shutil.rmtree(folder / "out" / f"checkpoint-{steps}")
    (folder / "out" / "adapter_model.safetensors").unlink()
    resumed, *_ = run(
        folder, table, steps, bf16=True, save_strategy="steps", save_steps=steps // 2, full_determinism=True,
        overwrite_output_dir=False,
    )  # fmt: skip
    half = [event.loss for event in straight.steps[steps // 2 :]]
    same = half == [event.loss for event in resumed.steps]
    print(f"resumed equals straight, bit for bit: {same} ({time.perf_counter() - began:.0f} s)")
    return 0 if same and gap < 0.02 else 1


if __name__ == "__main__":
    sys.exit(main())
