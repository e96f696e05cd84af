"""Tiny models over 4 and 8 bit weights, with PEFT's adapters."""

from __future__ import annotations

from typing import Any

import torch

from surefoot.config import make_config
from surefoot.model.load import read_weights
from surefoot.model.quantized import bitsandbytes_config
from surefoot.model.source import model_config

KINDS: list[dict[str, Any]] = [
    {"quantization_bit": 4},
    {"quantization_bit": 4, "double_quantization": False},
    {"quantization_bit": 4, "quantization_type": "fp4"},
    {"quantization_bit": 8},
]
NAMES = ["nf4-double", "nf4", "fp4-double", "int8"]
SHAPE = {"hidden_size": 64, "intermediate_size": 128, "attention_bias": True}  # more than one block of scales a row


def load(folder: Any, kind: dict[str, Any], dtype: torch.dtype = torch.float32) -> Any:
    """A model of a folder, quantised."""
    cfg = make_config(
        {"model_name_or_path": str(folder), "dataset": "rows", "template": "default", "output_dir": "out"} | kind
    )
    config = model_config(cfg)
    return read_weights(cfg, config, None, bitsandbytes_config(cfg, config, dtype, "cpu"), "cpu")


def wrapped(folder: Any, kind: dict[str, Any], dtype: torch.dtype = torch.float32, **settings: Any) -> Any:
    """The same with LoRA on two of a layer's seven linears, as PEFT makes it."""
    from peft import LoraConfig, get_peft_model

    model = load(folder, kind, dtype)
    torch.manual_seed(1)
    config = LoraConfig(r=4, lora_alpha=8, target_modules=["q_proj", "down_proj"], init_lora_weights=False, **settings)
    return get_peft_model(model, config)
