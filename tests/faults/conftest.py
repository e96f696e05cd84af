"""Jobs on tiny models with faults in them."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from fault_runs import Job, Outcome, pattern_rows, save_model
from plants import OptimizerPlant

BASE = {
    "dataset": "rows", "template": "default", "per_device_train_batch_size": 2, "gradient_accumulation_steps": 1,
    "num_train_epochs": 1.0, "learning_rate": 1e-2, "lr_scheduler_type": "constant", "save_strategy": "no",
    "report_to": "none", "seed": 3, "fp16": True, "flash_attn": "disabled", "lora_rank": 4, "lora_target": "all",
}  # fmt: skip
STD = 0.08  # of the weights: a model of this width learns within ten steps


@pytest.fixture(scope="session")
def half_model(tmp_path_factory) -> Path:
    """The healthy model, held in float16."""
    return save_model(tmp_path_factory.mktemp("half"), initializer_range=STD)


@pytest.fixture(scope="session")
def single_model(tmp_path_factory) -> Path:
    """The healthy model, held in float32."""
    return save_model(tmp_path_factory.mktemp("single"), dtype=torch.float32, initializer_range=STD)


@pytest.fixture
def planted(tmp_path) -> Callable[..., Path]:
    """Save a model with a plant in its weights."""
    numbers = itertools.count()

    def make(plant: Any = None, kind: str = "qwen2", **changes: Any) -> Path:
        return save_model(
            tmp_path / f"model-{next(numbers)}", kind, plant=plant, **({"initializer_range": STD} | changes)
        )

    return make


@pytest.fixture
def job(tmp_path, half_model) -> Callable[..., Job]:
    """Load a run: 8 steps of 2 rows, float16 autocast, eager attention, LoRA on all linears."""
    numbers = itertools.count()

    def make(model: Path | None = None, rows: Sequence[Any] | None = None, evals: Sequence[Any] = (), **changes: Any):
        settings = BASE | {
            "model_name_or_path": str(model or half_model),
            "output_dir": str(tmp_path / f"out-{next(numbers)}"),
        }
        settings = {key: value for key, value in (settings | changes).items() if value is not None}
        return Job(settings, pattern_rows(16) if rows is None else rows, evals)

    return make


@pytest.fixture
def in_float32(job) -> Callable[..., Outcome]:
    """The same run in float32, without a guard: what a cure is measured against."""

    def run(*args: Any, **changes: Any) -> Outcome:
        return job(*args, **changes, fp16=None, bf16=None, compute_dtype="float32", guard="off").train()

    return run


@pytest.fixture
def optimizer_plant():
    """Make an `OptimizerPlant` that is taken off again."""
    made: list[OptimizerPlant] = []

    def make(*args: Any) -> OptimizerPlant:
        made.append(OptimizerPlant(*args))
        return made[-1]

    yield make
    for plant in made:
        plant.remove()
