"""Imported once by the process that the ranks are forked from: what every rank would else import for itself."""

from __future__ import annotations

import tempfile
from pathlib import Path

import crew  # noqa: F401
import transformers.models.llama.modeling_llama
import transformers.trainer_utils  # noqa: F401

from helpers import save_tiny_model
from surefoot.config import make_config
from surefoot.model.load import load_model
from surefoot.model.tokenizer import load_tokenizer

with tempfile.TemporaryDirectory() as folder:
    settings = {"dataset": "rows", "template": "default", "output_dir": folder, "device": "cpu"}
    cfg = make_config(settings | {"model_name_or_path": str(save_tiny_model(Path(folder) / "model"))})
    load_model(cfg, load_tokenizer(cfg), "cpu")  # no gradient is computed: a forked process could compute none then
