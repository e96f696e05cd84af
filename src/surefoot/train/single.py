"""Rows one by one, for models whose rows cannot share a pass."""

from __future__ import annotations

from surefoot.data.messages import Sample
from surefoot.data.order import StepOrder


class SingleRows:
    """A step order whose packed items are taken apart into their rows.

    The steps hold the same rows, so the update is the same; only the passes are smaller.

    Args:
        order: the order with packed items.
    """

    def __init__(self, order: StepOrder) -> None:
        self.order = order
        self.samples = order.samples
        self.steps_per_epoch = order.steps_per_epoch

    def samples_of(self, step: int) -> list[Sample]:
        """Return the rows of a step, counted from 0, each as a sample of its own."""
        return [row for sample in self.order.samples_of(step) for row in take_apart(sample)]


def take_apart(sample: Sample) -> list[Sample]:
    """Split a packed item into its rows; a joined one cannot be split, for its rows see each other."""
    if len(sample.segments) == 1 or sample.joined:
        return [sample]
    rows, start = [], 0
    for row_id, length in zip(sample.row_ids, sample.segments, strict=True):
        part = slice(start, start + length)
        rows.append(Sample((row_id,), sample.input_ids[part], sample.labels[part], (length,)))
        start += length
    return rows
