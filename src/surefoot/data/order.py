"""Which samples make optimizer step k: a pure function, so that resuming is an assignment."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from surefoot.data.messages import Sample
    from surefoot.data.stream import TokenStream
    from surefoot.data.table import TokenTable


class StepOrder(Protocol):
    """The samples of each optimizer step, in step order."""

    samples: int | None
    steps_per_epoch: int | None

    def samples_of(self, step: int) -> list[Sample]:
        """Return the samples of a step, counted from 0."""
        ...


class TableOrder:
    """Steps over a table that can be read at any place.

    Each epoch is a permutation seeded with `seed + epoch`, drawn as accelerate's seedable sampler draws it, so
    that the same seed gives the batches that transformers' Trainer would have seen. An epoch's last step holds
    what is left.

    Args:
        table: the encoded training items.
        samples_per_step: items per optimizer step.
        seed: of the permutations.
        shuffle: False keeps the table's own order in each epoch.
    """

    def __init__(self, table: TokenTable, samples_per_step: int, seed: int, shuffle: bool = True) -> None:
        self.table = table
        self.samples: int | None = len(table)
        self.samples_per_step = samples_per_step
        self.seed = seed
        self.shuffle = shuffle
        self.steps_per_epoch: int | None = math.ceil(len(table) / samples_per_step)
        self._epoch = -1
        self._order: list[int] = []

    def indices_of(self, step: int) -> list[int]:
        """Return the table positions of a step's samples.

        Args:
            step: counted from 0.

        Returns:
            Between 1 and `samples_per_step` positions.
        """
        assert self.steps_per_epoch
        epoch, place = divmod(step, self.steps_per_epoch)
        if epoch != self._epoch:
            self._order = self._permutation(epoch)
            self._epoch = epoch
        return self._order[place * self.samples_per_step : (place + 1) * self.samples_per_step]

    def samples_of(self, step: int) -> list[Sample]:
        """Return the samples of a step, counted from 0."""
        return [self.table[index] for index in self.indices_of(step)]

    def _permutation(self, epoch: int) -> list[int]:
        if not self.shuffle:
            return list(range(len(self.table)))
        import torch

        generator = torch.Generator().manual_seed(self.seed + epoch)
        return torch.randperm(len(self.table), generator=generator).tolist()


class StreamOrder:
    """Steps over a stream, which is read in order and again from its start when it ends.

    Args:
        stream: the encoded training items; reading it twice must give the same items.
        samples_per_step: items per optimizer step.
    """

    def __init__(self, stream: TokenStream, samples_per_step: int) -> None:
        self.stream = stream
        self.samples: int | None = None
        self.samples_per_step = samples_per_step
        self.steps_per_epoch: int | None = None
        self._next_step = 0
        self._items: Iterator[Sample] = iter(stream)

    def samples_of(self, step: int) -> list[Sample]:
        """Return the samples of a step, counted from 0; going back, or forward after a resume, rereads the stream."""
        if step < self._next_step:
            self._items, self._next_step = iter(self.stream), 0
        while self._next_step < step:
            self._take()
        return self._take()

    def _take(self) -> list[Sample]:
        self._next_step += 1
        taken = []
        for _ in range(self.samples_per_step):
            item = next(self._items, None)
            if item is None:
                self._items = iter(self.stream)
                item = next(self._items)
            taken.append(item)
        return taken
