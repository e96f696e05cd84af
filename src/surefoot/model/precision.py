"""In which number formats a model is held and computed."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from surefoot.config import Config

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


@dataclass(frozen=True)
class Precision:
    """The number formats of a run.

    Attributes:
        load: dtype to load the checkpoint in; None keeps the checkpoint's own.
        autocast: dtype of matrix products under autocast; None for no autocast.
        trainable: dtype of the trainable parameters.
        loss_scaling: True when float16 gradients need a loss scale.
    """

    load: torch.dtype | None
    autocast: torch.dtype | None
    trainable: torch.dtype
    loss_scaling: bool

    def __str__(self) -> str:
        compute = f"{_name(self.autocast)} autocast" if self.autocast else f"{_name(self.load) or 'checkpoint dtype'}"
        return f"{compute}, {_name(self.trainable)} trainable parameters"


def choose_precision(cfg: Config, checkpoint: torch.dtype) -> Precision:
    """Decide the number formats from the YAML and the checkpoint.

    As in LLaMA-Factory: `bf16` and `fp16` are autocast over weights in the checkpoint's dtype, with float32
    trainable parameters; neither means no autocast. `compute_dtype` is ours and wins.

    Args:
        cfg: the YAML; its `compute_dtype`, `bf16` and `fp16` are read.
        checkpoint: dtype that the weights are stored in.

    Returns:
        The decision.
    """
    wanted = cfg.compute_dtype
    if wanted == "auto":
        wanted = "bfloat16" if cfg.bf16 else "float16" if cfg.fp16 else "checkpoint"
    if wanted == "float32":
        return Precision(torch.float32, None, torch.float32, loss_scaling=False)
    if wanted == "checkpoint":
        # A float16 checkpoint without flags still computes in float16, so its gradients need the scale.
        half = checkpoint == torch.float16
        return Precision(None, torch.float16 if half else None, torch.float32, loss_scaling=half)
    compute = DTYPES[wanted]
    return Precision(None, compute, torch.float32, loss_scaling=compute == torch.float16)


def _name(dtype: torch.dtype | None) -> str:
    return "" if dtype is None else str(dtype).removeprefix("torch.")
