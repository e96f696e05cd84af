"""From encoded datasets to one table of training items: sampled, mixed and packed."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from surefoot.data.cache import cache_entry, cache_folder, fingerprint
from surefoot.data.encode import EncodedRow
from surefoot.data.messages import IGNORE_INDEX, Sample
from surefoot.data.packing import pack_rows
from surefoot.data.pretrain import cut_into_blocks
from surefoot.data.store import StoreWriter, TokenStore, is_store
from surefoot.data.table import TokenTable


@dataclass(frozen=True)
class Part:
    """One dataset of a mixture.

    Attributes:
        store: its usable rows, in the source's order.
        chosen: the rows to train on, by position in the source, in training order, some perhaps twice; int64.
    """

    store: TokenStore
    chosen: np.ndarray


@dataclass(frozen=True)
class PackSettings:
    """How rows are packed.

    Attributes:
        capacity: most tokens of an item.
        batch: rows that are packed among themselves (`preprocessing_batch_size`).
        joined: see `Sample.joined`.
        blocks: pt: documents are laid end to end and cut into items of exactly `capacity` tokens.
        bos_id: pt: the id that the first token of each block becomes; None = it stays.
    """

    capacity: int
    batch: int
    joined: bool
    blocks: bool
    bos_id: int | None


def lay_out_rows(parts: Sequence[Part], mixed: np.ndarray) -> np.ndarray:
    """Find the usable rows of a mixture.

    Args:
        parts: the datasets.
        mixed: positions in the parts' `chosen` laid end to end, int64 [rows].

    Returns:
        For each its position in the stores laid end to end, int64 [rows]; -1 = the row was dropped.
    """
    found, start = [], 0
    for part in parts:
        kept = part.store.origins[:, 1]
        places = np.searchsorted(kept, part.chosen)
        usable = np.zeros(len(places), dtype=bool)
        inside = places < len(kept)
        usable[inside] = kept[places[inside]] == part.chosen[inside]
        found.append(np.where(usable, places + start, -1))
        start += len(kept)
    return np.concatenate(found)[mixed]


def pack_table(
    rows: TokenTable, batches: Sequence[np.ndarray], settings: PackSettings, *, overwrite: bool = False
) -> tuple[TokenTable, int]:
    """Pack rows into items, kept in the cache.

    Args:
        rows: one row an item.
        batches: positions in `rows`; each batch is packed among itself.
        settings: how.
        overwrite: pack again even if the cache has the items.

    Returns:
        The packed items, and how many tokens were left over.
    """
    order = np.concatenate(batches).astype("<i8").tobytes() if batches else b""
    key = fingerprint("packed", rows.fingerprint, settings, [len(batch) for batch in batches], order)
    folder = cache_folder() / key
    if overwrite or not is_store(folder):
        left_over = 0
        with cache_entry(key) as temporary, StoreWriter(temporary, rows.names, joined=settings.joined) as writer:
            for batch in batches:
                samples, left = pack_samples([rows[item] for item in batch], settings)
                left_over += left
                for sample in samples:
                    writer.add_sample(sample)
            writer.finish({"fingerprint": key, "left_over": left_over})
    store = TokenStore(folder)
    return TokenTable([store]), int(store.meta["left_over"])


def pack_samples(rows: Sequence[Sample], settings: PackSettings) -> tuple[list[Sample], int]:
    """Pack one batch of rows.

    Args:
        rows: one row an item.
        settings: how.

    Returns:
        The items, and how many tokens were left over.
    """
    if settings.blocks:
        return cut_into_blocks(rows, settings.capacity, settings.bos_id)
    samples, too_long = pack_rows([_as_row(row) for row in rows], settings.capacity, joined=settings.joined)
    return samples, sum(len(row.input_ids) for row in too_long)


def _as_row(sample: Sample) -> EncodedRow:
    trained = int(np.count_nonzero(sample.labels[1:] != IGNORE_INDEX))
    return EncodedRow(sample.row_ids[0], sample.input_ids, sample.labels, False, trained)


def batches_of(positions: np.ndarray, size: int) -> Iterator[np.ndarray]:
    """Cut positions into batches of so many rows, the dropped ones (-1) included, and leave those out.

    Args:
        positions: as `lay_out_rows` gives them.
        size: rows of a batch.

    Yields:
        The usable positions of each batch.
    """
    for start in range(0, len(positions), size):
        batch = positions[start : start + size]
        yield batch[batch >= 0]
