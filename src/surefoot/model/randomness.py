"""The state of every random generator that a run draws from, held so that `weights_only` loads can read it."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import torch


def get_random_state(device: str) -> dict[str, Any]:
    """Capture Python's, NumPy's and torch's generators.

    Args:
        device: of the run, as torch names it; a GPU's own generator is captured too.

    Returns:
        Numbers, strings and tensors only.
    """
    version, internal, gauss = random.getstate()
    kind, keys, position, has_gauss, cached = np.random.get_state()
    return {
        "python": [version, list(internal), gauss],
        "numpy": [kind, torch.from_numpy(np.asarray(keys, dtype=np.int64)), position, has_gauss, cached],
        "cpu": torch.get_rng_state(),
        "cuda": torch.cuda.get_rng_state(device) if device != "cpu" else None,
    }


def set_random_state(state: dict[str, Any], device: str) -> None:
    """Put the generators back where `get_random_state` found them.

    Args:
        state: what it returned.
        device: of the run, as torch names it.
    """
    version, internal, gauss = state["python"]
    random.setstate((version, tuple(internal), gauss))
    kind, keys, position, has_gauss, cached = state["numpy"]
    np.random.set_state((kind, keys.numpy().astype(np.uint32), position, has_gauss, cached))
    torch.set_rng_state(state["cpu"])
    if device != "cpu" and state["cuda"] is not None:
        torch.cuda.set_rng_state(state["cuda"], device)
