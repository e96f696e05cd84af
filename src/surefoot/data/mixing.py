"""Which rows of which dataset come in which order: sampling, mixing and the validation split, as index arithmetic.

The draws are LLaMA-Factory's: mixing is done by the `datasets` library on row numbers, the split and `num_samples` draw
from NumPy as it does.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from surefoot.errors import UserError


def choose_rows(rows: int, num_samples: int | None, max_samples: int | None, rng: np.random.RandomState) -> np.ndarray:
    """Choose rows of one dataset: `num_samples` at random (some twice if it has fewer), of these `max_samples`.

    Args:
        rows: how many the dataset has.
        num_samples: the catalogue entry's number; None = all, in order.
        max_samples: the YAML's limit; None = no limit.
        rng: shared by the datasets of a run and drawn from in their order.

    Returns:
        Row numbers in training order, int64 [chosen].
    """
    if num_samples is None:
        chosen = np.arange(rows)
    else:
        chosen = rng.permutation(rows)[:num_samples]
        if len(chosen) < num_samples:
            chosen = np.concatenate([chosen, rng.choice(rows, num_samples - len(chosen))])
    return chosen[:max_samples].astype(np.int64)


def mix(sizes: Sequence[int], strategy: str, probabilities: Sequence[float] | None, seed: int) -> np.ndarray:
    """Put the rows of several datasets into one order.

    Args:
        sizes: rows of each dataset, each at least 1.
        strategy: `concat`, `interleave_under` (until one runs out), `interleave_over` (until all have run out, the
            short ones repeat) or `interleave_once` (until all have run out, none repeats).
        probabilities: how likely each dataset is to give the next row; None = in turn.
        seed: of the draws.

    Returns:
        Positions in the datasets laid end to end, int64 [rows].
    """
    if strategy == "concat" or len(sizes) == 1:
        return np.arange(sum(sizes), dtype=np.int64)
    from datasets import Dataset, interleave_datasets

    stop = {
        "interleave_under": "first_exhausted",
        "interleave_over": "all_exhausted",
        "interleave_once": "all_exhausted_without_replacement",
    }[strategy]
    starts = np.concatenate([[0], np.cumsum(sizes)])
    numbered = [
        Dataset.from_dict({"row": np.arange(start, start + size)}) for start, size in zip(starts, sizes, strict=False)
    ]
    share = None if probabilities is None else list(probabilities)
    mixed = interleave_datasets(numbered, probabilities=share, seed=seed, stopping_strategy=stop)  # type: ignore[arg-type]
    return np.asarray(mixed["row"], dtype=np.int64)


def split(items: int, val_size: float, seed: int) -> tuple[np.ndarray, np.ndarray]:
    """Set a part of the training items aside for validation, drawn as `datasets`' train_test_split draws it.

    Args:
        items: how many there are.
        val_size: below 1 a share, from 1 on a number of items.
        seed: of the draw.

    Returns:
        Positions of the training items and of the validation items, in drawn order, int64.

    Raises:
        UserError: one of the two would be empty.
    """
    held_out = int(val_size) if val_size >= 1 else math.ceil(val_size * items)
    if not 0 < held_out < items:
        raise UserError(
            f"val_size {val_size:g} of {items} training items leaves {max(items - held_out, 0)} to train on",
            hint="lower val_size, or name an eval_dataset",
            key="val_size",
        )
    order = np.random.default_rng(seed).permutation(items).astype(np.int64)
    return order[held_out:], order[:held_out]
