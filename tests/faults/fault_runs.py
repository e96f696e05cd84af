"""Training runs with a fault in them: a small Qwen2-like model, a table, and what a person finds afterwards.

The plants (plants.py) change the saved weights, the table, or the loaded model between `load_model` and
`run_training`; the guard sees nothing of the harness.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch

from helpers import MemoryTable
from surefoot.config import make_config
from surefoot.data.messages import Sample
from surefoot.data.order import TableOrder
from surefoot.errors import UserError, WorkError
from surefoot.guard.scene import Rerun, Scene
from surefoot.model.load import load_model
from surefoot.model.probes import build_forward
from surefoot.model.randomness import get_random_state
from surefoot.model.tokenizer import load_tokenizer
from surefoot.train.run import run_training

VOCABULARY = 97
TOKENS = 24
BASE = "base_model.model."


def small_tokenizer() -> Any:
    """At most 97 tokens: the special ones and single bytes."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())[: VOCABULARY - 8]
    tokenizer = Tokenizer(
        models.BPE(vocab={t: i for i, t in enumerate(["<pad>", "<s>", "</s>", *alphabet])}, merges=[])
    )
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, pad_token="<pad>", bos_token="<s>", eos_token="</s>", padding_side="right"
    )


SHAPE = {
    "vocab_size": VOCABULARY, "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 4,
    "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 256, "pad_token_id": 0,
    "bos_token_id": 1, "eos_token_id": 2, "tie_word_embeddings": False,
}  # fmt: skip


def save_model(
    folder: Path,
    kind: str = "qwen2",
    *,
    dtype: torch.dtype = torch.float16,
    seed: int = 0,
    plant: Callable[[dict[str, torch.Tensor]], None] | None = None,
    **changes: Any,
) -> Path:
    """Save a random model of one of transformers' architectures, with a plant in its weights."""
    from transformers import AutoConfig, AutoModelForCausalLM

    torch.manual_seed(seed)
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(kind, **(SHAPE | changes)), dtype=torch.float32)
    if plant:
        with torch.no_grad():
            plant(dict(model.named_parameters()))
    model.to(dtype).save_pretrained(folder)
    small_tokenizer().save_pretrained(folder)
    return folder


def row(index: int, tokens: Sequence[int], untrained: int = 4) -> Sample:
    """One row; its first tokens carry no label."""
    ids = np.array(tokens, dtype=np.int32)
    labels = ids.copy()
    labels[:untrained] = -100
    return Sample((f"rows:{index}",), ids, labels, (len(ids),))


def pattern_rows(count: int, *, length: int = TOKENS, seed: int = 0, unequal: bool = False) -> list[Sample]:
    """Rows that a small model can learn: each walks round a ring of ten tokens with a step of its own."""
    rng = np.random.default_rng(seed)
    rows = []
    for index in range(count):
        start, stride = int(rng.integers(10)), int(rng.integers(1, 3))
        own = length - int(rng.integers(0, length // 2)) if unequal else length
        rows.append(row(index, [30 + (start + stride * i) % 10 for i in range(own)]))
    return rows


class Recorder:
    """A listener that keeps everything that it hears, and calls the plants that wait for a step."""

    def __init__(self) -> None:
        self.steps: list[Any] = []
        self.evals: list[Any] = []
        self.messages: list[str] = []
        self.rewinds: list[int] = []
        self.after_step: list[Callable[[int], None]] = []

    def started(self, facts):
        pass

    def stepped(self, event):
        self.steps.append(event)
        self._ends(len(self.steps) <= 20 * event.total_steps)
        for call in self.after_step:
            call(event.step)

    def evaluated(self, event):
        self.evals.append(event)

    def saved(self, step, folder):
        pass

    def rewound(self, step):
        self.rewinds.append(step)

    def told(self, message):
        self.messages.append(message)
        self._ends(len(self.messages) <= 60)

    def _ends(self, still: bool) -> None:
        assert still, f"the run goes round and round: {self.messages[-3:]}"

    def finished(self, result):
        pass


class Outcome:
    """What a run left behind."""

    def __init__(self, folder: Path, recorder: Recorder, loaded: Any, error: Exception | None) -> None:
        self.folder, self.recorder, self.loaded, self.error = folder, recorder, loaded, error
        journal = folder / "surefoot" / "guard.jsonl"
        self.events = [json.loads(line) for line in journal.read_text().splitlines()] if journal.is_file() else []

    def of(self, event: str) -> list[dict[str, Any]]:
        return [entry for entry in self.events if entry["event"] == event]

    @property
    def diagnosis(self) -> dict[str, Any]:
        """The one and only diagnosis."""
        found = self.of("diagnosis")
        assert len(found) == 1, f"{len(found)} diagnoses: {self.story()}"
        return found[0]

    @property
    def action(self) -> dict[str, Any]:
        """The one and only action."""
        found = self.of("action")
        assert len(found) == 1, f"{len(found)} actions: {self.story()}"
        return found[0]

    @property
    def changes(self) -> list[dict[str, Any]]:
        """Precision and kernel changes of the plan; empty when none was written."""
        path = self.folder / "surefoot" / "precision_plan.json"
        return json.loads(path.read_text())["changes"] if path.is_file() else []

    @property
    def losses(self) -> dict[int, float | None]:
        """Loss of every step as it was last done."""
        return {event.step: event.loss for event in self.recorder.steps}

    @property
    def final_loss(self) -> float:
        """Mean over the last two steps."""
        last = [loss for _, loss in sorted(self.losses.items())][-2:]
        assert all(loss is not None for loss in last), last
        return sum(last) / len(last)  # type: ignore[arg-type]

    @property
    def weights(self) -> dict[str, torch.Tensor]:
        """Everything that was saved at the end."""
        from safetensors.torch import load_file

        return {n: t for file in sorted(self.folder.glob("*.safetensors")) for n, t in load_file(file).items()}

    @property
    def all_saved_finite(self) -> bool:
        from safetensors.torch import load_file

        files = list(self.folder.rglob("*.safetensors"))
        return all(bool(t.isfinite().all()) for file in files for t in load_file(file).values())

    def story(self) -> str:
        """The events in short, for a failed assertion."""
        keys = ("step", "event", "class", "place", "module", "op", "phase", "samples", "action", "verified", "evidence")
        lines = [" ".join(f"{k}={e.get(k)!r}" for k in keys) for e in self.events]
        return "\n".join([f"error={self.error!r}", *lines])

    def says(self, fault: str, **facts: Any) -> None:
        """Assert what the one diagnosis says."""
        got = self.diagnosis
        wanted = {"class": fault} | facts
        assert {key: got[key] for key in wanted} == wanted, self.story()

    def went_on(self, *, steps: int, lost: int = 0) -> None:
        """Assert that the run did all its steps, saved numbers only, and logged no made-up zero."""
        assert self.error is None, self.story()
        assert sorted(self.losses) == list(range(1, steps + 1)), self.story()
        assert self.weights, "nothing was saved"
        assert self.all_saved_finite
        assert all(loss is None or loss > 0 for loss in self.losses.values())
        assert max((entry["steps_lost"] or 0 for entry in self.events), default=0) == lost, self.story()


class Job:
    """A run that is loaded and not yet started; plants go onto `model`."""

    def __init__(self, settings: dict[str, Any], rows: Sequence[Sample], evals: Sequence[Sample] = ()) -> None:
        self.cfg = make_config(settings)
        self.tokenizer = load_tokenizer(self.cfg)
        self.loaded = load_model(self.cfg, self.tokenizer, "cpu")
        self.table = MemoryTable(rows)
        self.evals = {"": MemoryTable(evals)} if evals else {}
        self.recorder = Recorder()

    @property
    def model(self) -> Any:
        return self.loaded.model

    def module(self, name: str) -> Any:
        """A module by its Hugging Face name."""
        return self.model.get_submodule(BASE + name if hasattr(self.model, "peft_config") else name)

    def scene(self, step: int = 1, *, loss_scale: float | None = None, tokens_per_pass: int = 10_000) -> Scene:
        """An optimizer step of this run, without the guard."""
        per_step = self.cfg.per_device_train_batch_size * self.cfg.gradient_accumulation_steps
        order = TableOrder(self.table, per_step, self.cfg.seed, shuffle=not self.cfg.disable_shuffling)
        forward = build_forward(
            self.model, self.loaded.precision.autocast, upcast=self.cfg.upcast_lmhead_output, label_smoothing=0.0
        )
        scale = (2.0**16 if self.loaded.precision.loss_scaling else 1.0) if loss_scale is None else loss_scale
        samples = tuple(order.samples_of(step - 1))
        self.model.train()
        return Scene(self.model, forward, "cpu", step, samples, tokens_per_pass, scale, get_random_state("cpu"))

    def rerun(self, step: int = 1, **changes: Any) -> Rerun:
        """What the step gives without a guard."""
        return self.scene(step, **changes).rerun()

    def train(self) -> Outcome:
        """Run it; an honest failure is part of the outcome, a wrong request is not."""
        error = None
        try:
            data = SimpleNamespace(train=self.table, evals=self.evals)
            run_training(self.cfg, self.loaded, self.tokenizer, data, [self.recorder], "cpu")
        except UserError:
            raise
        except WorkError as failure:
            error = failure
        return Outcome(Path(self.cfg.output_dir), self.recorder, self.loaded, error)


def close(value: float, reference: float, share: float = 0.01) -> bool:
    """Both are numbers, and not further apart than a share of the reference."""
    return math.isfinite(value) and abs(value - reference) <= share * abs(reference)
