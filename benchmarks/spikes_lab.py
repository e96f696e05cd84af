"""What `spikes.py` trains: its settings, its text, and a plain loop that answers the detector's experiments."""

from __future__ import annotations

import importlib
import inspect
import math
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch

from surefoot.guard.spike_scores import NATS_FLOOR
from surefoot.model.loss import LossSums, logits_cross_entropy
from surefoot.train.spike import CONTROL_STEPS, CONTROL_TOKENS

VOCABULARY = 98  # 96 characters after <pad> and <s>
SEEDS = {"train": (0, 1, 2, 3), "test": (300, 301, 302, 303, 304)}
HARD_MODULES = ("argparse", "tarfile", "inspect", "typing", "pickletools", "turtle", "decimal", "locale", "mimetypes")


@dataclass(frozen=True)
class Setting:
    """One kind of healthy training run.

    Attributes:
        name: in the table.
        source: "docs" (English about Python), "templates" (sentences of few words, which are learnt well) or
            "rows" (48 rows of docs, over and over, until they are known by heart).
        rows: rows of a step.
        length: tokens of a row.
        rate: peak learning rate.
        lora: train LoRA adapters of rank 4 instead of all weights.
        warmup: steps until the rate's peak.
        steps: of the run.
        hard: share of steps whose batch is of a harder kind of text.
        uneven: rows of 4 tokens up to `length`.
        resumed: "" (never), "state" (the detector goes through its JSON), or "bare" (a new detector, as from a
            checkpoint without its state).
        constant: keep the rate at its peak instead of a cosine down to a tenth.
    """

    name: str
    source: str
    rows: int
    length: int
    rate: float
    lora: bool = False
    warmup: int = 20
    steps: int = 500
    hard: float = 0.0
    uneven: bool = False
    resumed: str = ""
    constant: bool = False

    def rate_at(self, step: int) -> float:
        """Learning rate of a step counted from 1."""
        if step <= self.warmup:
            return self.rate * step / self.warmup
        if self.constant:
            return self.rate
        done = (step - self.warmup) / (self.steps - self.warmup)
        return self.rate * (0.1 + 0.45 * (1 + math.cos(math.pi * done)))


SETTINGS = (
    Setting("long rows, full", "docs", 4, 128, 1e-3),
    Setting("long rows, LoRA", "docs", 4, 128, 3e-3, lora=True),
    Setting("short rows, LoRA", "templates", 8, 16, 5e-3, lora=True),
    Setting("short rows, full", "templates", 8, 16, 1e-3),
    Setting("batch 1, 8 tokens, LoRA", "docs", 1, 8, 1e-3, lora=True, steps=800),
    Setting("batch 1, 8 tokens, full", "templates", 1, 8, 5e-4, steps=800),
    Setting("high but sane LR", "docs", 4, 64, 6e-3, constant=True),
    Setting("LR warm-up rise", "docs", 4, 64, 8e-3, warmup=150),
    Setting("resumed", "templates", 4, 32, 1e-3, resumed="state"),
    Setting("resumed, no detector state", "docs", 4, 32, 3e-3, lora=True, resumed="bare"),
    Setting("hard but clean batches", "docs", 4, 64, 1e-3, hard=0.01),
    Setting("known by heart", "rows", 4, 32, 3e-3, steps=700),
    Setting("uneven rows, LoRA", "docs", 1, 160, 3e-3, lora=True, uneven=True),
)


# --- text ---------------------------------------------------------------------------------------------------------


class Text:
    """Three sources of real or made characters as token ids."""

    def __init__(self) -> None:
        from pydoc_data.topics import topics

        self.docs = encode("\n".join(topics.values()))
        self.hard = encode("\n".join(inspect.getsource(importlib.import_module(name)) for name in HARD_MODULES))
        words = "red blue small old wild calm", "fox bird cloud river child stone", "sees likes follows hears finds"
        rng = np.random.default_rng(7)
        pick = [[list_.split()[i] for i in rng.integers(0, len(list_.split()), 9000)] for list_ in (*words, *words[:2])]
        self.templates = encode("".join(f"the {a} {b} {c} a {d} {e}.\n" for a, b, c, d, e in zip(*pick, strict=True)))
        self.known = [self._cut(self.docs, np.random.default_rng(i), 160) for i in range(48)]

    def batch(self, setting: Setting, rng: np.random.Generator) -> torch.Tensor:
        """Draw the ids of one step, int64 [rows, length]."""
        length = int(rng.integers(4, setting.length + 1)) if setting.uneven else setting.length
        if setting.source == "rows":
            return torch.stack([self.known[i][:length] for i in rng.integers(0, len(self.known), setting.rows)])
        source = self.hard if rng.random() < setting.hard else getattr(self, setting.source)
        return torch.stack([self._cut(source, rng, length) for _ in range(setting.rows)])

    @staticmethod
    def _cut(source: np.ndarray, rng: np.random.Generator, length: int) -> torch.Tensor:
        start = int(rng.integers(0, len(source) - length))
        return torch.from_numpy(source[start : start + length])


def encode(text: str) -> np.ndarray:
    """Turn printable ASCII and newlines into ids from 2."""
    return np.array([2 + (95 if c == "\n" else ord(c) - 32) for c in text if c == "\n" or 32 <= ord(c) < 127])


# --- training -----------------------------------------------------------------------------------------------------


class Numbers(NamedTuple):
    """What the detector hears of a step: its loss, gradient norm before clipping, trained tokens, loss by chance."""

    loss: float
    norm: float
    tokens: int
    chance: float

    @property
    def finite(self) -> bool:
        """True when the guard's gate would let it through."""
        return math.isfinite(self.loss) and math.isfinite(self.norm)


class Trainer:
    """A plain loop: AdamW, the gradient clipped at 1. It answers the detector's experiments as a real run does.

    Attributes:
        past: ids, trained tokens and loss of the last steps, the newest last.
        asked: times that rows of the steps before were run again.
    """

    past: list[tuple[torch.Tensor, int, float]]
    asked: int

    def __init__(self, base: dict[str, torch.Tensor] | None, setting: Setting, seed: int) -> None:
        """Make the model.

        Args:
            base: weights to begin with; None for new ones.
            setting: what to train, and how.
            seed: of the weights and of all that is drawn.
        """
        torch.manual_seed(seed)
        self.model = tiny_model()
        if base:
            self.model.load_state_dict(base)
        if setting.lora:
            from peft import LoraConfig, get_peft_model

            lora = LoraConfig(r=4, lora_alpha=8, target_modules="all-linear")
            self.model = get_peft_model(self.model, lora)
        self.trained = [p for p in self.model.parameters() if p.requires_grad]
        self.optimizer = torch.optim.AdamW(self.trained, lr=setting.rate, weight_decay=0.01, fused=True)
        self.past = []
        self.asked = 0
        self._labels: torch.Tensor | None = None

    def step(self, ids: torch.Tensor, rate: float, labels: torch.Tensor | None = None) -> Numbers:
        """Take one step; return its numbers."""
        self.optimizer.param_groups[0]["lr"] = rate
        tokens, self._labels = trained_tokens(ids), labels
        sums = self._sums(ids, ids if labels is None else labels)
        loss = sums.loss / tokens
        self.optimizer.zero_grad()
        loss.backward()
        norm = torch.nn.utils.clip_grad_norm_(self.trained, 1.0)
        numbers = Numbers(loss.item(), norm.item(), tokens, sums.chance.item() / tokens)
        if numbers.finite:
            self.optimizer.step()  # as the guard's gate does
        self.past = [*self.past, (ids, tokens, numbers.loss)][-CONTROL_STEPS - 2 :]
        return numbers

    def wrong_labels(self) -> bool:
        """Say whether the last step's labels were not its text."""
        return self._labels is not None

    @torch.no_grad()
    def rise(self) -> float | None:
        """Run rows of the steps before again; return by how much their log loss has risen."""
        self.asked += 1
        chosen: list[tuple[torch.Tensor, int, float]] = []
        for past in reversed(self.past[:-2] or self.past[:-1]):
            chosen.append(past)
            if len(chosen) == CONTROL_STEPS or sum(tokens for _, tokens, _ in chosen) >= CONTROL_TOKENS:
                break
        if not chosen:
            return None
        tokens, then = sum(n for _, n, _ in chosen), sum(n * loss for _, n, loss in chosen)
        now = sum(self._sums(ids, ids).loss.item() for ids, _, _ in chosen)
        return math.log((now / tokens + NATS_FLOOR) / (then / tokens + NATS_FLOOR))

    def _sums(self, ids: torch.Tensor, labels: torch.Tensor) -> LossSums:
        logits = self.model(input_ids=ids, use_cache=False).logits[:, :-1]
        return logits_cross_entropy(logits.flatten(0, 1), labels[:, 1:].flatten())

    def state(self) -> tuple[Any, Any, Any]:
        """Copy everything that a step changes."""
        weights = {name: p.detach().clone() for name, p in self.model.named_parameters()}
        moments = {p: {k: v.clone() for k, v in s.items()} for p, s in self.optimizer.state.items()}
        return weights, moments, (self.past, self.asked)

    @torch.no_grad()
    def restore(self, state: tuple[Any, Any, Any]) -> None:
        """Go back to a copy."""
        weights, moments, (self.past, self.asked) = state
        for name, p in self.model.named_parameters():
            p.copy_(weights[name])
        for p, s in moments.items():
            for k, v in s.items():
                self.optimizer.state[p][k].copy_(v)


def tiny_model() -> Any:
    """A Llama of two layers, width 48."""
    from transformers import LlamaConfig, LlamaForCausalLM

    shape = {"hidden_size": 48, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4}
    return LlamaForCausalLM(LlamaConfig(vocab_size=VOCABULARY, num_key_value_heads=2, pad_token_id=0, **shape))


def pretrain(text: Text, steps: int) -> dict[str, torch.Tensor]:
    """Train the base that every run starts from."""
    setting = Setting("base", "docs", 16, 64, 5e-3, steps=steps)
    trainer, rng = Trainer(None, setting, 0), np.random.default_rng(0)
    for step in range(1, steps + 1):
        trainer.step(text.batch(setting, rng), setting.rate_at(step))
    return {name: value.clone() for name, value in trainer.model.state_dict().items()}


def trained_tokens(ids: torch.Tensor) -> int:
    """Tokens with a label: all but each row's first."""
    return ids.shape[0] * (ids.shape[1] - 1)
