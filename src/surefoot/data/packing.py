"""Several short rows in one sample, so that passes are full."""

from __future__ import annotations

import bisect
from collections import defaultdict
from collections.abc import Iterable, Sequence

import numpy as np

from surefoot.data.encode import EncodedRow
from surefoot.data.messages import IGNORE_INDEX, Sample


def knapsack(lengths: Iterable[int], capacity: int) -> list[list[int]]:
    """Pack lengths into bins: each bin takes the largest length that still fits, again and again.

    The bins are those of LLaMA-Factory's greedy_knapsack, in its order; the work is near linear in the rows.

    Args:
        lengths: each from 0 to `capacity`.
        capacity: what a bin holds.

    Returns:
        The lengths in each bin, in the order in which they were put there.
    """
    lengths = list(lengths)
    return [[lengths[i] for i in bin_] for bin_ in pack_indices(lengths, capacity)]


def pack_indices(lengths: Sequence[int], capacity: int) -> list[list[int]]:
    """`knapsack`, as positions in `lengths`. Of equal lengths the last one is taken first.

    Args:
        lengths: each from 0 to `capacity`.
        capacity: what a bin holds.

    Returns:
        The positions in each bin, in the order in which they were put there.

    Raises:
        ValueError: a length is above the capacity; leave such rows out first.
    """
    waiting: dict[int, list[int]] = defaultdict(list)
    for position, length in enumerate(lengths):
        waiting[length].append(position)
    sizes = sorted(waiting)
    if sizes and sizes[-1] > capacity:
        raise ValueError(f"a row of {sizes[-1]} tokens does not fit into {capacity}")
    # below[i]: a size at or below sizes[i] that may still have rows; -1 when there is none. Links are shortened as they
    # are followed (union-find), so that used-up sizes cost nothing.
    below = list(range(len(sizes)))

    def largest_at_or_below(i: int) -> int:
        path = []
        while i >= 0 and below[i] != i:
            path.append(i)
            i = below[i]
        for step in path:
            below[step] = i
        return i

    bins: list[list[int]] = []
    left = len(lengths)
    while left:
        room, taken = capacity, []
        while (i := largest_at_or_below(bisect.bisect_right(sizes, room) - 1)) >= 0:
            rows = waiting[sizes[i]]
            taken.append(rows.pop())
            if not rows:
                below[i] = i - 1
            room -= sizes[i]
        bins.append(taken)
        left -= len(taken)
    return bins


def join_rows(rows: Sequence[EncodedRow], *, joined: bool = False) -> Sample:
    """A sample of several rows.

    Args:
        rows: at least one.
        joined: whether attention may cross from a row into the rows before it.

    Returns:
        The sample. Unless joined, the first label of each row is -100: alone, the row would have no token that
        predicts it.
    """
    labels = [row.labels for row in rows]
    if not joined:
        labels = [_without_first(label) for label in labels]
    return Sample(
        row_ids=tuple(row.row_id for row in rows),
        input_ids=np.concatenate([row.input_ids for row in rows]),
        labels=np.concatenate(labels),
        segments=tuple(len(row.input_ids) for row in rows),
        joined=joined,
    )


def pack_rows(
    rows: Sequence[EncodedRow], capacity: int, *, joined: bool = False
) -> tuple[list[Sample], list[EncodedRow]]:
    """Pack a batch of rows into samples of at most `capacity` tokens.

    Isolated (the default): no row sees another, for `packing` and `neat_packing` alike. LLaMA-Factory isolates with
    `neat_packing` alone; with plain `packing` its rows see those before them on some attention kernels and not on
    others. `joined` does what those kernels do, on all of them.

    Args:
        rows: the rows of one batch (LLaMA-Factory packs within `preprocessing_batch_size` rows).
        capacity: most tokens of a sample.
        joined: whether attention may cross from a row into the rows before it.

    Returns:
        The samples, and the rows that are too long for one.
    """
    fitting = [row for row in rows if len(row.input_ids) <= capacity]
    too_long = [row for row in rows if len(row.input_ids) > capacity]
    bins = pack_indices([len(row.input_ids) for row in fitting], capacity)
    return [join_rows([fitting[i] for i in bin_], joined=joined) for bin_ in bins], too_long


def _without_first(labels: np.ndarray) -> np.ndarray:
    if not len(labels) or labels[0] == IGNORE_INDEX:
        return labels
    labels = labels.copy()
    labels[0] = IGNORE_INDEX
    return labels
