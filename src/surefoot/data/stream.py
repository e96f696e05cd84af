"""Training items made while training, for rows that are too many to be encoded first."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import groupby, islice
from typing import Any

import numpy as np

from surefoot.data.assemble import PackSettings, pack_samples
from surefoot.data.cache import fingerprint
from surefoot.data.encoded import take_notes
from surefoot.data.messages import Sample
from surefoot.data.notes import RowNotes
from surefoot.data.rows import Block, RowEncoder
from surefoot.data.sources import RowSource
from surefoot.errors import UserError


@dataclass(frozen=True)
class StreamPart:
    """One dataset of a stream.

    Attributes:
        source: its rows.
        encoder: what encodes them.
    """

    source: RowSource
    encoder: RowEncoder


@dataclass
class TokenStream:
    """Training items, read and encoded as they are asked for.

    An iterator never ends: after the last row it begins again, shuffled differently. Two iterators give the same items.
    As in LLaMA-Factory, rows are shuffled within a buffer alone, and packed within a batch of rows.

    Attributes:
        parts: the datasets.
        strategy: how they are mixed, see `mixing.mix`.
        probabilities: how likely each is to give the next row; None = in turn.
        seed: of mixing and shuffling.
        buffer_size: items to shuffle among; 1 = the sources' order.
        batch: rows that are encoded, and packed, together.
        encoding_fingerprint: of all that decides how a row is encoded.
        pack: how rows are packed; None = one row an item.
        held_out: so many usable rows at the beginning are not for training.
        fingerprint: changes with the settings and with the size, the beginning or the end of any file.
    """

    parts: Sequence[StreamPart]
    strategy: str
    probabilities: Sequence[float] | None
    seed: int
    buffer_size: int
    batch: int
    encoding_fingerprint: str
    pack: PackSettings | None = None
    held_out: int = 0
    fingerprint: str = field(init=False)

    def __post_init__(self) -> None:
        entries = [part.encoder.entry.shape for part in self.parts]
        sources = [part.source.fingerprint(whole=False) for part in self.parts]
        plain = (self.strategy, self.probabilities, self.seed, self.buffer_size, self.batch, self.pack, self.held_out)
        self.fingerprint = fingerprint("stream", entries, sources, plain, self.encoding_fingerprint)

    def __iter__(self) -> Iterator[Sample]:
        round_number = 0
        while True:
            items = self.one_pass(round_number)
            first = next(items, None)
            if first is None:
                names = ", ".join(part.encoder.entry.name for part in self.parts)
                message = f"the stream of {names} has no row that can be used"
                raise UserError(message, hint="the data report says why each was dropped", key="dataset")
            yield first
            yield from items
            round_number += 1

    def one_pass(self, round_number: int = 0) -> Iterator[Sample]:
        """Every training item once.

        Args:
            round_number: the number of the pass, from 0; changes the shuffling.

        Returns:
            The items.
        """
        rng = np.random.default_rng((self.seed, round_number))
        return shuffled(self.one_pass_in_order(), self.buffer_size, rng)

    def one_pass_in_order(self) -> Iterator[Sample]:
        """Every training item once, as the sources have them, not shuffled."""
        return self._packed(islice(self.encoded_rows(), self.held_out, None))

    def encoded_rows(self, notes: Sequence[RowNotes] | None = None, limit: int | None = None) -> Iterator[Sample]:
        """Every usable row in reading order.

        Args:
            notes: one for each part, to be filled; None = keep none.
            limit: read so many rows; None = all.

        Yields:
            One row an item.
        """
        sources = [((number, row) for number, row in enumerate(part.source.rows())) for part in self.parts]
        restart = [lambda part=part: enumerate(part.source.rows()) for part in self.parts]
        mixed = mix_rows(sources, restart, self.strategy, self.probabilities, np.random.default_rng(self.seed))
        mixed = islice(mixed, limit)
        while batch := list(islice(mixed, self.batch)):
            # Neighbours from one dataset are encoded in one call; the order stays.
            for place, run in groupby(batch, key=lambda item: item[0]):
                rows = [(number, row) for _, number, row in run]
                block = self.parts[place].encoder.encode([number for number, _ in rows], [row for _, row in rows])
                if notes is not None:
                    take_notes(notes[place], block)
                yield from samples_of(block, self.parts[place].encoder.entry.name)

    def _packed(self, rows: Iterator[Sample]) -> Iterator[Sample]:
        if self.pack is None:
            yield from rows
            return
        while batch := list(islice(rows, self.batch)):
            yield from pack_samples(batch, self.pack)[0]


def samples_of(block: Block, name: str) -> Iterator[Sample]:
    """The usable rows of a block as items.

    Args:
        block: what a run of rows became.
        name: their dataset.

    Yields:
        One row an item.
    """
    stop = 0
    for row, length in zip(block.rows.tolist(), block.lengths.tolist(), strict=True):
        start, stop = stop, stop + length
        yield Sample((f"{name}:{row}",), block.ids[start:stop], block.labels[start:stop], (length,))


def shuffled(items: Iterable[Sample], size: int, rng: np.random.Generator) -> Iterator[Sample]:
    """Shuffle within a buffer: each item that is taken out makes room for the next one.

    Args:
        items: in any order.
        size: items in the buffer; 1 changes nothing.
        rng: of the draws.

    Yields:
        The items.
    """
    buffer: list[Sample] = []
    for item in items:
        if len(buffer) < size:
            buffer.append(item)
            continue
        place = int(rng.integers(size))
        yield buffer[place]
        buffer[place] = item
    for place in rng.permutation(len(buffer)) if size > 1 else range(len(buffer)):
        yield buffer[place]


def mix_rows(
    sources: Sequence[Iterator[tuple[int, Any]]],
    restart: Sequence[Any],
    strategy: str,
    probabilities: Sequence[float] | None,
    rng: np.random.Generator,
) -> Iterator[tuple[int, int, Any]]:
    """Mix rows whose number is not known; see `mixing.mix` for the strategies.

    Args:
        sources: (position, row) of each dataset.
        restart: for each dataset a function that begins it again.
        strategy: `concat` or one of `interleave_*`.
        probabilities: how likely each dataset is to give the next row; None = in turn.
        rng: of the draws.

    Yields:
        The dataset's place, the row's position in it, and the row.
    """
    if strategy == "concat" or len(sources) == 1:
        for place, source in enumerate(sources):
            for number, row in source:
                yield place, number, row
        return
    running, ended = list(sources), [False] * len(sources)
    for place in _draws(len(sources), probabilities, rng):
        if strategy == "interleave_once" and ended[place]:
            continue
        item = next(running[place], None)
        if item is None:
            ended[place] = True
            if strategy == "interleave_under" or all(ended):
                return
            if strategy == "interleave_once":
                continue
            running[place] = iter(restart[place]())
            item = next(running[place], None)
            if item is None:
                return  # an empty dataset
        yield place, *item


def _draws(count: int, probabilities: Sequence[float] | None, rng: np.random.Generator) -> Iterator[int]:
    while True:
        if probabilities is None:
            yield from range(count)
        else:
            yield from map(int, rng.choice(count, size=1000, p=probabilities))
