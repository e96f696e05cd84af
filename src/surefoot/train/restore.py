"""Saved weights back into a model that stands ready, bit for bit."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from surefoot.errors import UserError


@torch.no_grad()
def load_trained_weights(model: Any, folder: Path) -> None:
    """Copy a checkpoint's weights into a model's own parameters.

    The parameters stay the same objects, since the optimizer holds them.

    Args:
        model: a transformers or PEFT model of the same shape.
        folder: a verified checkpoint.

    Raises:
        UserError: a tensor is missing there or has another shape.
    """
    if hasattr(model, "peft_config"):
        _load_adapter(model, folder)
    else:
        _load_whole(model, folder)


def _load_adapter(model: Any, folder: Path) -> None:
    from peft import set_peft_model_state_dict
    from safetensors.torch import load_file

    result = set_peft_model_state_dict(model, load_file(folder / "adapter_model.safetensors"))
    trained = {name for name, p in model.named_parameters() if p.requires_grad}
    _refuse(folder, sorted(trained & set(result.missing_keys)) + sorted(result.unexpected_keys))


def _load_whole(model: Any, folder: Path) -> None:
    """Read a whole model through transformers, which undoes what saving did to names and layouts."""
    # float32 holds every 16-bit value exactly, and copying it back into 16 bits restores it.
    fresh = type(model).from_pretrained(folder, dtype=torch.float32, use_safetensors=True)
    saved = dict(fresh.named_parameters()) | dict(fresh.named_buffers())
    own = dict(model.named_parameters()) | dict(model.named_buffers())
    _refuse(folder, sorted(name for name, p in own.items() if name not in saved or saved[name].shape != p.shape))
    for name, tensor in own.items():
        tensor.copy_(saved[name])


def _refuse(folder: Path, names: list[str]) -> None:
    if names:
        raise UserError(
            f"{folder} does not fit this run: {names[0]} is on one side only, or has another shape",
            hint="resume with the settings that it was made with",
            key="resume_from_checkpoint",
        )
