"""A tiny model, and the settings of a run of twenty uneven steps."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from helpers import save_tiny_model

sys.path[:0] = [str(Path(__file__).parent), str(Path(__file__).parents[1] / "e2e")]


@pytest.fixture(scope="session")
def tiny(tmp_path_factory):
    return save_tiny_model(tmp_path_factory.mktemp("ranks") / "model")


@pytest.fixture
def settings(tiny, tmp_path):
    return {
        "model_name_or_path": str(tiny), "dataset": "rows", "template": "default", "output_dir": str(tmp_path / "out"),
        "num_train_epochs": 2.0, "learning_rate": 1e-2, "save_strategy": "no", "report_to": "none", "seed": 3,
        "ddp_timeout": 40, "device": "cpu",
    }  # fmt: skip
