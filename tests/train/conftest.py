"""Runs on tiny models, assembled as `surefoot train` assembles them."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from helpers import MemoryTable, random_table, save_tiny_model
from surefoot.config import make_config
from surefoot.model.load import load_model
from surefoot.model.tokenizer import load_tokenizer
from surefoot.train.run import run_training


class Recorder:
    """A listener that keeps everything that it hears."""

    def __init__(self) -> None:
        self.steps: list[Any] = []
        self.evals: list[Any] = []
        self.saved_at: list[int] = []
        self.messages: list[str] = []
        self.rewound_to: list[int] = []
        self.facts: Any = None
        self.result: Any = None

    def started(self, facts):
        self.facts = facts

    def stepped(self, event):
        self.steps.append(event)

    def evaluated(self, event):
        self.evals.append(event)

    def saved(self, step, folder):
        self.saved_at.append(step)

    def rewound(self, step):
        self.steps = [event for event in self.steps if event.step <= step]
        self.rewound_to.append(step)

    def told(self, message):
        self.messages.append(message)

    def finished(self, result):
        self.result = result

    @property
    def losses(self) -> list[float]:
        return [event.loss for event in self.steps]


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory):
    return save_tiny_model(tmp_path_factory.mktemp("tiny"))


@pytest.fixture
def settings(tiny_model, tmp_path):
    """The YAML of a tiny LoRA run as a mapping, to be changed and given to `start`."""
    return {
        "model_name_or_path": str(tiny_model),
        "dataset": "rows",
        "template": "default",
        "output_dir": str(tmp_path / "out"),
        "per_device_train_batch_size": 2,
        "gradient_accumulation_steps": 2,
        "num_train_epochs": 1.0,
        "learning_rate": 1e-2,
        "save_strategy": "no",
        "report_to": "none",
        "seed": 3,
    }


@pytest.fixture
def start():
    """Run a training from settings and a table; returns the recorder and the loaded model."""

    def run(settings: dict[str, Any], train: MemoryTable | None = None, evals: dict[str, MemoryTable] | None = None):
        cfg = make_config(settings)
        tokenizer = load_tokenizer(cfg)
        loaded = load_model(cfg, tokenizer, "cpu")
        recorder = Recorder()
        data = SimpleNamespace(train=train or random_table(24), evals=evals or {})
        run_training(cfg, loaded, tokenizer, data, [recorder], "cpu")
        return recorder, loaded

    return run
