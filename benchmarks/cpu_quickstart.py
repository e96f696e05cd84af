"""Tokens per second of the quickstart job: Surefoot against transformers' Trainer + PEFT, same settings, same run.

Both train the same adapter on the same rows in the same order, on the CPU, in one process, taking turns. The peer is
given its best setting (no gradient checkpointing, which LLaMA-Factory turns on) and its usual one beside it.

    python benchmarks/cpu_quickstart.py [--steps 8] [--rounds 3] [key=value ...]
"""

from __future__ import annotations

import argparse
import sys
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch

from surefoot.config import load_config
from surefoot.data.prepare import prepare_data
from surefoot.model.load import load_model
from surefoot.model.tokenizer import load_tokenizer

ROOT = Path(__file__).resolve().parents[1]


class Silent:
    """A listener that keeps step events and says nothing."""

    def __init__(self) -> None:
        self.steps: list[Any] = []

    def __getattr__(self, name: str) -> Any:
        return lambda *_: None

    def stepped(self, event: Any) -> None:
        """Keep the event."""
        self.steps.append(event)


def surefoot_seconds(cfg: Any, loaded: Any, tokenizer: Any, data: Any, steps: int) -> tuple[float, int, list[float]]:
    """Train `steps` steps; return seconds, real tokens and losses."""
    from surefoot.train.loop import train
    from surefoot.train.run import assemble
    from surefoot.train.signals import StopRequest

    silent = Silent()
    cfg = cfg.model_copy(
        update={"save_strategy": "no", "eval_strategy": "no", "max_steps": steps, "output_dir": "/nonexistent"}
    )
    run = assemble(cfg, loaded, tokenizer, data, [silent], "cpu", StopRequest())
    began = time.perf_counter()
    result = train(run)
    return time.perf_counter() - began, result.tokens, [event.loss for event in silent.steps]


def trainer_seconds(cfg: Any, loaded: Any, data: Any, steps: int, checkpointing: bool) -> tuple[float, list[float]]:
    """Train `steps` steps with transformers' Trainer on the same rows; return seconds and losses."""
    from transformers import DataCollatorForSeq2Seq, Trainer, TrainingArguments

    rows = [data.train[i] for i in range(len(data.train))]
    rows = [
        {"input_ids": r.input_ids.tolist(), "labels": r.labels.tolist(), "attention_mask": [1] * len(r.input_ids)}
        for r in rows
    ]
    model = loaded.model
    base = model.get_base_model()
    base.set_attn_implementation("sdpa")
    if checkpointing:
        model.enable_input_require_grads()
    arguments = TrainingArguments(
        output_dir="/tmp/peer", max_steps=steps, per_device_train_batch_size=cfg.per_device_train_batch_size,
        gradient_accumulation_steps=cfg.gradient_accumulation_steps, learning_rate=cfg.learning_rate,
        lr_scheduler_type=cfg.lr_scheduler_type, warmup_steps=cfg.warmup_ratio, seed=cfg.seed, data_seed=cfg.seed,
        logging_steps=1, save_strategy="no", report_to=[], use_cpu=True, disable_tqdm=True, remove_unused_columns=False,
        gradient_checkpointing=checkpointing,
        gradient_checkpointing_kwargs={"use_reentrant": False} if checkpointing else None,
    )  # fmt: skip
    collator = DataCollatorForSeq2Seq(loaded.tokenizer, pad_to_multiple_of=8, label_pad_token_id=-100)
    trainer = Trainer(model=model, args=arguments, train_dataset=rows, data_collator=collator)
    began = time.perf_counter()
    trainer.train()
    seconds = time.perf_counter() - began
    return seconds, [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]


def main() -> int:
    """Measure and print one table; 1 when Surefoot is below 1.5 times the peer's best."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=8)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("overrides", nargs="*", help="key=value, over the YAML, for both")
    options = parser.parse_args()
    rows = f"dataset_dir={ROOT}/examples/quickstart/rows"
    cfg = load_config(ROOT / "examples/quickstart.yaml", [rows, *options.overrides])
    tokenizer = load_tokenizer(cfg)
    from surefoot.data.template import get_template

    template = get_template(cfg.template, tokenizer, default_system=cfg.default_system)
    template.fix_tokenizer(tokenizer)
    data = prepare_data(cfg, tokenizer, template, progress=lambda *_: None)

    times: dict[str, list[float]] = {"surefoot": [], "Trainer + PEFT": [], "Trainer + PEFT, checkpointing": []}
    losses: dict[str, list[float]] = {}
    tokens = 0
    for _ in range(options.rounds):
        for name in times:
            loaded = load_model(cfg, tokenizer, "cpu")
            if name == "surefoot":
                seconds, tokens, losses[name] = surefoot_seconds(cfg, loaded, tokenizer, data, options.steps)
            else:
                peer = SimpleNamespace(model=loaded.model, tokenizer=tokenizer)
                seconds, losses[name] = trainer_seconds(cfg, peer, data, options.steps, "checkpointing" in name)
            times[name].append(seconds)
    best = {name: min(values) for name, values in times.items()}
    layout = f"{cfg.per_device_train_batch_size} row(s) x {cfg.gradient_accumulation_steps} accumulated"
    threads = torch.get_num_threads()
    print(f"\n{layout}, {options.steps} steps, {tokens} real tokens, {threads} threads, best of {options.rounds}")
    print(f"{'path':32} {'s':>7} {'tokens/s':>9} {'ours is':>8}  first and last loss")
    for name, seconds in best.items():
        ratio = f"{seconds / best['surefoot']:.2f}x" if name != "surefoot" else ""
        print(
            f"{name:32} {seconds:7.2f} {tokens / seconds:9.1f} {ratio:>8}  {losses[name][0]:.4f} {losses[name][-1]:.4f}"
        )
    return 0 if best["Trainer + PEFT"] / best["surefoot"] >= 1.5 else 1


if __name__ == "__main__":
    sys.exit(main())
