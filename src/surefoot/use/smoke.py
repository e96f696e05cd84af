"""A smoke test of training: a tiny random Llama takes LoRA steps as `surefoot train` makes them, in each dtype."""

from __future__ import annotations

import math
import tempfile
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from torch.nn import functional as F

from surefoot.config import make_config
from surefoot.data.messages import IGNORE_INDEX, Sample
from surefoot.errors import UserError, WorkError
from surefoot.machine.gfx import base_name
from surefoot.machine.table import load_table
from surefoot.model.load import load_model
from surefoot.run.quiet import QuietListener
from surefoot.train.before import look_before_training
from surefoot.train.events import StepEvent
from surefoot.train.loop import Run, train
from surefoot.train.run import assemble
from surefoot.train.signals import StopRequest

STEPS = 12
ROWS = 8
ROW_TOKENS = 32
LEARNING_RATE = 1e-2
#: Width, head and rank as small as real kernels take them: heads of 64, and a LoRA operand 16 wide.
SHAPES = {
    "vocab_size": 512, "hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 2, "num_attention_heads": 2,
    "num_key_value_heads": 1, "max_position_embeddings": 64, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip
RANK = 16
#: Largest distance of the first loss from float64, as a share of it. Measured on a CPU: 6e-8, 5e-6, 5e-7.
TOLERANCE = {"float32": 1e-4, "bfloat16": 1e-2, "float16": 2e-3}
FALLS_TO = 0.9  # of the first loss, or less; measured on a CPU: 0.74


@dataclass(frozen=True)
class SmokeResult:
    """How training went in one dtype.

    Attributes:
        dtype: of the matrix products.
        ok: whether all that was looked at is right.
        detail: what was seen, or what is wrong.
        losses: of the steps, in nats.
        seconds: that it took.
    """

    dtype: str
    ok: bool
    detail: str
    losses: tuple[float, ...]
    seconds: float

    def to_json(self) -> dict[str, Any]:
        """Write the JSON form."""
        return asdict(self)


def dtypes_of(device: str) -> tuple[str, ...]:
    """Name the dtypes in which a device multiplies matrices by itself.

    Args:
        device: as torch names it.

    Returns:
        float32, and bfloat16 and float16 where the chip has them; AMD's by the GPU table, since torch says yes for
        bfloat16 on every ROCm build. A chip that is not in the table is tried in all.
    """
    if device == "cpu":
        return "float32", "bfloat16", "float16"
    if torch.version.hip:
        row = load_table().gpu(base_name(torch.cuda.get_device_properties(device).gcnArchName))
        has = {"bfloat16": row is None or row.bf16 != "no", "float16": row is None or row.fp16 != "no"}
    else:
        has = {"bfloat16": torch.cuda.get_device_capability(device)[0] >= 8, "float16": True}  # from Ampere on
    return ("float32", *(dtype for dtype, there in has.items() if there))


def smoke(device: str) -> Iterator[SmokeResult]:
    """Train in each dtype of a device, and check the first loss, the first update and that the loss falls.

    Args:
        device: as torch names it.

    Yields:
        One result a dtype, as it becomes known.
    """
    with tempfile.TemporaryDirectory(prefix="surefoot-smoke-") as name:
        folder = Path(name)
        rows = _Rows()
        expected = _save_model(folder / "model", rows)
        for dtype in dtypes_of(device):
            began = time.monotonic()
            losses: tuple[float, ...] = ()
            try:
                losses, update = _train(folder, rows, dtype, device)
                wrong, seen = _judge(dtype, losses, expected, update)
            except (UserError, WorkError, RuntimeError) as error:  # RuntimeError: as torch reports a device's refusal
                wrong, seen = [next(iter(str(error).strip().splitlines()), type(error).__name__)[:300]], ""
            yield SmokeResult(dtype, not wrong, "; ".join(wrong) or seen, losses, round(time.monotonic() - began, 2))


class _Rows:
    """A few random rows in memory, read as the loop reads any token table."""

    fingerprint = "smoke"

    def __init__(self) -> None:
        rng = np.random.default_rng(0)
        self.lengths = np.full(ROWS, ROW_TOKENS)
        self.max_token_id = SHAPES["vocab_size"] - 1
        self.rows = [self._row(place, rng) for place in range(ROWS)]

    @staticmethod
    def _row(place: int, rng: np.random.Generator) -> Sample:
        ids = rng.integers(3, SHAPES["vocab_size"], ROW_TOKENS).astype(np.int32)
        labels = np.where(np.arange(ROW_TOKENS) < ROW_TOKENS // 4, IGNORE_INDEX, ids).astype(np.int32)
        return Sample((f"smoke:{place}",), ids, labels, (ROW_TOKENS,))

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> Sample:
        return self.rows[index]


class _Losses(QuietListener):
    """Keeps the losses."""

    def __init__(self) -> None:
        self.losses: list[float] = []

    def stepped(self, event: StepEvent) -> None:
        """Keep a step's loss."""
        self.losses.append(math.nan if event.loss is None else event.loss)


class _Tokenizer:
    """Stands for a tokenizer where only the size of the vocabulary is asked for: nothing is encoded or saved."""

    def __len__(self) -> int:
        return SHAPES["vocab_size"]


def _save_model(folder: Path, rows: _Rows) -> float:
    """Make the model, save it, and compute its loss over all rows in float64 by transformers' own forward."""
    from transformers import LlamaConfig, LlamaForCausalLM
    from transformers.utils import logging

    logging.disable_progress_bar()
    torch.manual_seed(0)
    model = LlamaForCausalLM(LlamaConfig(**SHAPES))
    model.save_pretrained(folder)
    model = model.double().eval()
    ids_RT = torch.tensor(np.stack([row.input_ids for row in rows.rows]), dtype=torch.long)
    labels_RT = torch.tensor(np.stack([row.labels for row in rows.rows]), dtype=torch.long)
    with torch.no_grad():
        logits_RTV = model(input_ids=ids_RT).logits
    # Not by `labels=`, which makes the logits float32.
    return float(
        F.cross_entropy(logits_RTV[:, :-1].flatten(0, 1), labels_RT[:, 1:].flatten(), ignore_index=IGNORE_INDEX)
    )


def _train(folder: Path, rows: _Rows, dtype: str, device: str) -> tuple[tuple[float, ...], str]:
    """Train as `surefoot train` does; return the losses, and what is wrong with the first update."""
    cfg = make_config(
        {
            "model_name_or_path": str(folder / "model"), "dataset": "smoke", "template": "default", "device": device,
            "output_dir": str(folder / dtype), "per_device_train_batch_size": ROWS, "gradient_accumulation_steps": 1,
            "max_steps": STEPS, "learning_rate": LEARNING_RATE, "lr_scheduler_type": "constant", "lora_rank": RANK,
            "cutoff_len": ROW_TOKENS, "save_strategy": "no", "report_to": "none", "compute_dtype": dtype,
            # Nothing is healed here: what is wrong shall be seen.
            "guard": "watch", "guard_preflight": False, "compile": False, "seed": 0,
        }
    )  # fmt: skip
    tokenizer: Any = _Tokenizer()
    listener = _Losses()
    loaded = load_model(cfg, tokenizer, device)
    data: Any = SimpleNamespace(train=rows, evals={})
    run = assemble(cfg, loaded, tokenizer, data, [listener], device, StopRequest())
    look_before_training(run)
    before = {name: p.detach().double().cpu() for name, p in run.runner.trained.items()}
    _advance(run, 1)
    update = _wrong_update(run, before)
    _advance(run, STEPS - 1)
    return tuple(listener.losses), update


def _advance(run: Run, steps: int) -> None:
    run.schedule = replace(run.schedule, total_steps=run.state.step + steps)
    train(run)


def _wrong_update(run: Run, before: dict[str, torch.Tensor]) -> str:
    """Compare the first update with AdamW's formula in float64 (Loshchilov and Hutter, 2019, algorithm 2).

    Args:
        run: after its first step; the optimizer's moments hold that step's gradient.
        before: the trained weights before it, float64.

    Returns:
        What is wrong; empty when nothing is.
    """
    moved = 0
    names = {id(p): name for name, p in run.runner.trained.items()}
    for group in run.optimizer.param_groups:
        (beta1, beta2), rate = group["betas"], group["lr"]
        for parameter in group["params"]:
            name, state = names[id(parameter)], run.optimizer.state[parameter]
            gradient = state["exp_avg"].double().cpu() / (1 - beta1)
            second = state["exp_avg_sq"].double().cpu() / (1 - beta2)
            start, now = before[name], parameter.detach().double().cpu()
            wanted = start * (1 - rate * group["weight_decay"]) - rate * gradient / (second.sqrt() + group["eps"])
            # Float32 rounds weights at 6e-8 of their size; AdamW's first step is about as long as the rate.
            if not torch.allclose(now, wanted, rtol=1e-6, atol=1e-4 * rate):
                return f"the optimizer's update of {name} is off by {float((now - wanted).abs().max()):.1e}"
            if not torch.allclose(second, gradient.square(), rtol=1e-4, atol=1e-30):
                return f"the optimizer's moments of {name} do not belong to one gradient"
            moved += int((now != start).sum())
    return "" if moved else "the optimizer moved no weight"


def _judge(dtype: str, losses: tuple[float, ...], expected: float, update: str) -> tuple[list[str], str]:
    """Say what is wrong, and what was seen."""
    wrong = [update] if update else []
    if len(losses) != STEPS or not all(math.isfinite(loss) for loss in losses):
        return [*wrong, f"of {STEPS} steps {sum(map(math.isfinite, losses))} have a finite loss"], ""
    first, last = losses[0], losses[-1]
    off = abs(first - expected) / expected
    if off > TOLERANCE[dtype]:
        wrong.append(f"the first loss is {first:.5f}, and in float64 {expected:.5f}")
    if last > FALLS_TO * first:
        wrong.append(f"the loss does not fall: {first:.3f}, and after {STEPS} steps {last:.3f}")
    return wrong, f"loss {first:.3f} -> {last:.3f} in {STEPS} steps; first {off:.0e} from float64; update right"
