"""All ranks decide alike about a step, and know which of them was to blame.

Each rank writes its own findings into its column of a small matrix of zeros. The sum over all ranks, which rides on the
gradients' own, is the same everywhere, so that every rank takes the same branch without another word. A rank whose
computation raised takes part with zero gradients, or the others would wait for it for ever.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Literal, get_args

import torch

Flag = Literal["loss", "gradient", "exception", "stop"]
"""What is known before the gradients are summed: a loss or gradient here is not finite, the computation raised, or
this process was asked to stop."""
FLAGS: tuple[Flag, ...] = get_args(Flag)

Flagged = Mapping[str, tuple[int, ...]]
"""The ranks that raised each flag, in order; flags that nobody raised are left out."""


def write_flags(
    rank: int, ranks: int, raised: Mapping[Flag, torch.Tensor | bool], device: torch.device | str
) -> torch.Tensor:
    """Write one rank's flags; nothing is read from the device.

    Args:
        rank: this rank.
        ranks: how many there are.
        raised: which flags are up here, as bools on the host or scalars on the device.
        device: where the matrix shall be.

    Returns:
        float32 [flags, ranks]: 1.0 for a raised flag, 0.0 elsewhere.
    """
    flags_FR = torch.zeros(len(FLAGS), ranks, device=device)
    for place, name in enumerate(FLAGS):
        value = raised.get(name, False)
        if isinstance(value, torch.Tensor):
            flags_FR[place, rank] = value
        elif value:  # filled in on the device: a copy from the host would wait for it
            flags_FR[place, rank] = 1.0
    return flags_FR


def read_flags(names: Sequence[str], flags: Sequence[float], ranks: int) -> dict[str, tuple[int, ...]]:
    """Read which ranks raised which flags.

    Args:
        names: of the rows.
        flags: the rows of the summed matrix one after the other, on the host.
        ranks: how many there are.

    Returns:
        The ranks of each flag that is up.
    """
    rows = {name: flags[place * ranks : (place + 1) * ranks] for place, name in enumerate(names)}
    found = {name: tuple(rank for rank, value in enumerate(row) if value) for name, row in rows.items()}
    return {name: those for name, those in found.items() if those}


def first_to_blame(flagged: Flagged) -> int:
    """Return the lowest rank with a fault of its own; 0 when no rank alone is to blame."""
    return min((rank for name, those in flagged.items() if name != "stop" for rank in those), default=0)
