"""Finite faults planted into real training runs with `guard: watch`: how soon the run stops, and what found them.

Where `spikes.py` judges the statistical detector alone, here the whole guard looks on: norms that must not change
between updates, the schedule's learning rate, checksums of frozen weights, and the detector for what is left. A fault
counts as found when the guard names it at the first faulty step or one of the two after it.

    python benchmarks/spikes.py --product [--quick] [--seeds train|test] [--workers N]
"""

from __future__ import annotations

import json
import os
import shutil
import sys
import tempfile
from collections import Counter
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from multiprocessing import get_context
from pathlib import Path
from types import SimpleNamespace
from typing import Any

os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests"))

import numpy as np
import torch
from spikes import LOST
from spikes_lab import SEEDS, SETTINGS, VOCABULARY, Setting, Text, pretrain, tiny_model

from helpers import MemoryTable
from surefoot.config import make_config
from surefoot.data.messages import Sample
from surefoot.errors import WorkError
from surefoot.model.load import load_model
from surefoot.train.run import run_training

NAMES = ("long rows, LoRA", "short rows, full", "batch 1, 8 tokens, LoRA", "high but sane LR", "uneven rows, LoRA")
HEALTHY = "none"
FAULTS = (
    "LR x100 for 5 steps", "second moment lost", "both moments lost", "bit, trained weight", "bit, frozen weight",
    "random labels", "random text",
)  # fmt: skip
PROVED = ("learning rate was changed", "moments were lost", "changed between two updates", "checksum has changed",
          "the labels are wrong")  # fmt: skip


@dataclass(frozen=True)
class Verdict:
    """What the guard made of one run.

    Attributes:
        setting: of the run.
        fault: planted.
        steps: done.
        at: the first faulty step.
        seen: step of the first diagnosis since the fault was planted; None for none.
        by: "proved", "statistical" or "not finite".
        false: steps of the diagnoses before it was planted.
    """

    setting: str
    fault: str
    steps: int
    at: int
    seen: int | None
    by: str = ""
    false: tuple[int, ...] = ()

    @property
    def in_time(self) -> bool:
        """Named before the first faulty step, at it, or at one of the two after it."""
        return self.seen is not None and self.seen <= self.at + 2


class Planter:
    """A listener that damages the run between two steps, with what any code in the process can reach."""

    def __init__(self, fault: str, at: int, model: Any, rng: np.random.Generator) -> None:
        from torch.optim.optimizer import register_optimizer_step_post_hook

        self.fault, self.at, self.model, self.rng = fault, at, model, rng
        self.optimizer: Any = None
        self.steps = 0
        self.handle = register_optimizer_step_post_hook(lambda optimizer, *_: setattr(self, "optimizer", optimizer))

    def __getattr__(self, name: str) -> Any:
        return lambda *_: None

    @torch.no_grad()
    def stepped(self, event: Any) -> None:
        """Plant before the next step's gradients are computed."""
        self.steps, coming = event.step, event.step + 1
        if self.fault.startswith("LR") and self.at <= coming < self.at + 5:
            for group in self.optimizer.param_groups:
                group["lr"] *= 100
        if coming != self.at:
            return
        for state in self.optimizer.state.values():
            for key in LOST.get(self.fault, ()):
                state[key].zero_()
        if self.fault.startswith("bit"):
            self._flip(trained="trained" in self.fault)

    def _flip(self, trained: bool) -> None:
        """Flip the top exponent bit of one number, drawn from all matrices of the kind."""
        weights = [p for p in self.model.parameters() if p.dim() == 2 and p.requires_grad == trained]
        at = int(self.rng.integers(0, sum(p.numel() for p in weights)))
        for weight in weights:
            if at < weight.numel():
                weight.data.view(-1).view(torch.int32)[at] ^= 1 << 30
                return
            at -= weight.numel()


def rows_of(setting: Setting, text: Text, seed: int, steps: int, fault: str, at: int) -> MemoryTable:
    """Draw the rows of all steps in their order; those of step `at` may be random, or their labels."""
    rng, samples = np.random.default_rng(1000 + seed), []
    for step in range(1, steps + 1):
        for ids in text.batch(setting, rng).numpy().astype(np.int32):
            drawn = np.random.default_rng((seed, len(samples))).integers(2, VOCABULARY, len(ids)).astype(np.int32)
            if (step, fault) == (at, "random text"):
                ids = drawn
            labels = drawn if (step, fault) == (at, "random labels") else ids.copy()
            labels[0] = -100
            samples.append(Sample((f"rows:{len(samples)}",), ids, labels, (len(ids),)))
    return MemoryTable(samples)


def make_run(setting: Setting, fault: str, seed: int, steps: int, model: str, text: Text) -> Verdict:
    """Train one run with a fault and read its journal."""
    rng = np.random.default_rng((seed, FAULTS.index(fault) if fault in FAULTS else 99))
    at = steps if fault == HEALTHY else int(rng.integers(steps // 3, steps - 5))
    out = Path(tempfile.mkdtemp())
    cfg = make_config(
        {
            "model_name_or_path": model, "dataset": "rows", "template": "default", "output_dir": str(out / "run"),
            "per_device_train_batch_size": setting.rows, "gradient_accumulation_steps": 1, "max_steps": steps,
            "learning_rate": setting.rate, "warmup_steps": setting.warmup, "weight_decay": 0.01,
            "lr_scheduler_type": "constant_with_warmup" if setting.constant else "cosine",
            "finetuning_type": "lora" if setting.lora else "full", "save_strategy": "no", "report_to": "none",
            "seed": seed, "compute_dtype": "float32", "disable_shuffling": True, "guard": "watch",
        }
        | ({"lora_rank": 4, "lora_target": "all"} if setting.lora else {})
    )  # fmt: skip
    tokenizer = tokenizer_of_characters()
    loaded = load_model(cfg, tokenizer, "cpu")
    planter = Planter(fault, at, loaded.model, rng)
    table = rows_of(setting, text, seed, steps, fault, at)
    try:
        run_training(cfg, loaded, tokenizer, SimpleNamespace(train=table, evals={}), [planter], "cpu")
    except WorkError:
        pass  # `guard: watch` stops the run; the journal says why
    finally:
        planter.handle.remove()
    journal = out / "run" / "surefoot" / "guard.jsonl"
    lines = [json.loads(line) for line in journal.read_text().splitlines()] if journal.is_file() else []
    shutil.rmtree(out)
    told = [(line["step"], _by(line)) for line in lines if line["event"] == "diagnosis"]
    # The damage is done while step at - 1 is told; checksums are looked at right after that and may see it there.
    since = [(step, by) for step, by in told if step >= at - (by == "proved")] if fault != HEALTHY else []
    false = tuple(step for step, by in told if (step, by) not in since)
    seen, by = since[0] if since else (None, "")
    return Verdict(setting.name, fault, planter.steps, at, seen, by, false)


def _by(line: dict[str, Any]) -> str:
    if any(words in line["evidence"] for words in PROVED):
        return "proved"
    return "statistical" if line["class"] in ("SPIKE", "TREND") else "not finite"


def tokenizer_of_characters() -> Any:
    """A tokenizer of as many tokens as the text has characters: a model folder must have one."""
    from tokenizers import Tokenizer, models
    from transformers import PreTrainedTokenizerFast

    words = Tokenizer(models.WordLevel({"<pad>": 0, "<s>": 1} | {f"c{i}": i for i in range(2, VOCABULARY)}, "<s>"))
    return PreTrainedTokenizerFast(tokenizer_object=words, pad_token="<pad>", bos_token="<s>", eos_token="<s>")


def save_base(folder: str, text: Text, steps: int) -> None:
    """Save the pretrained base model."""
    model = tiny_model()
    model.load_state_dict(pretrain(text, steps))
    model.save_pretrained(folder)
    tokenizer_of_characters().save_pretrained(folder)


def print_product(verdicts: list[Verdict]) -> bool:
    """Print the table; return whether the goals are met."""
    print("| Setting | Healthy steps | False alarms | " + " | ".join(FAULTS) + " |")
    print("| --- " * (3 + len(FAULTS)) + "|")
    healthy = [v for v in verdicts if v.fault == HEALTHY]
    for name in (*dict.fromkeys(v.setting for v in verdicts), "all"):
        own = [v for v in verdicts if name in (v.setting, "all")]
        calm = [v for v in own if v.fault == HEALTHY]
        cells = [_cell([v for v in own if v.fault == fault], percent=name == "all") for fault in FAULTS]
        steps, false = sum(v.steps for v in calm), sum(len(v.false) for v in calm)
        print(f"| {name} | {steps:,} | {false} | {' | '.join(cells)} |")
    planted = [v for v in verdicts if v.fault != HEALTHY]
    print("\nFound at the first faulty step, before it, or at one of the two after it / planted.")
    for fault in FAULTS:
        own = [v for v in planted if v.fault == fault]
        by = Counter(v.by for v in own if v.in_time)
        later = Counter(v.seen - v.at for v in own if v.in_time and v.seen is not None)
        late = sum(v.seen is not None and v.seen > v.at + 2 for v in own)
        print(f"{fault}: by {dict(by)}; steps later {dict(sorted(later.items()))}; seen too late {late}")
    for verdict in (v for v in verdicts if v.false):
        print(f"false alarm: {verdict}")
    steps, false = sum(v.steps for v in healthy), sum(len(v.false) for v in healthy)
    return false * 10_000 <= steps and sum(v.in_time for v in planted) >= 0.95 * len(planted)


def _cell(own: list[Verdict], percent: bool) -> str:
    if not own:
        return "-"
    found = sum(v.in_time for v in own)
    return f"{found / len(own):.1%}" if percent else f"{found}/{len(own)}"


def product_study(quick: bool, seeds: str, workers: int) -> bool:
    """Plant every fault into every setting's runs.

    Args:
        quick: one seed, short runs.
        seeds: "train" or "test".
        workers: processes.

    Returns:
        Whether at most one healthy step in 10,000 alarmed and 95 % of the faults were found in time.
    """
    text = Text()
    settings = [setting for setting in SETTINGS if setting.name in NAMES]
    folder = tempfile.mkdtemp()
    save_base(folder, text, 150 if quick else 900)
    chosen = SEEDS[seeds][: 1 if quick else None]
    jobs = [(s, fault, seed) for s in settings for fault in (HEALTHY, *FAULTS) for seed in chosen]
    jobs = [job for job in jobs if job[0].lora or job[1] != "bit, frozen weight"]  # full tuning freezes nothing
    with ProcessPoolExecutor(workers, get_context("spawn"), torch.set_num_threads, (1,)) as pool:
        futures = [
            pool.submit(make_run, s, fault, seed, (60 if quick else 400) if fault == HEALTHY else 60 if quick else 110,
                        folder, text)
            for s, fault, seed in jobs
        ]  # fmt: skip
        verdicts = []
        for future in futures:
            verdicts.append(future.result())
            if len(verdicts) % 20 == 0:
                print(f"{len(verdicts)} of {len(jobs)} runs", file=sys.stderr)
    shutil.rmtree(folder)
    return print_product(verdicts)
