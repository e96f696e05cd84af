"""One dataset as token ids in the cache: found there, or encoded now."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import islice
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np

from surefoot.data.cache import (
    cache_entry,
    cache_folder,
    fingerprint,
    template_fingerprint,
    tokenizer_fingerprint,
)
from surefoot.data.columns import check_columns
from surefoot.data.encode import EncodeSettings, check_settings
from surefoot.data.notes import RowNotes
from surefoot.data.pool import CHUNK, Chunk, count_workers, encode_in_order
from surefoot.data.rows import Block, RowEncoder
from surefoot.data.store import StoreWriter, TokenStore, is_store

if TYPE_CHECKING:
    from surefoot.config import Config
    from surefoot.data.catalog import DatasetEntry
    from surefoot.data.sources import RowSource
    from surefoot.data.template import Template

VERSION = 2
"""Part of every fingerprint: to be raised when the same rows become other tokens."""
CHUNK_CHARACTERS = 4_000_000  # a chunk of long documents holds fewer rows, so that memory stays bounded


class Progress(Protocol):
    """Hears how the preprocessing goes on."""

    def __call__(self, what: str, rows: int, share: float | None) -> None:
        """Take note.

        Args:
            what: the work, such as "tokenizing alpaca_en_demo".
            rows: rows done.
            share: how much of the work is done, from 0 to 1; None = cannot tell.
        """
        ...


def quiet(what: str, rows: int, share: float | None) -> None:
    """Hear nothing."""


@dataclass(frozen=True)
class Encoding:
    """How the rows of a run are encoded, the same for all its datasets.

    Attributes:
        stage: `sft` or `pt`.
        template: the chat template.
        tokenizer: the model's.
        settings: cut-off and masks.
        blocks: pt: documents are cut into blocks later.
        workers: most processes; None = as many as there are processors.
        overwrite: encode again even if the cache has the rows.
        progress: hears how it goes.
        fingerprint: of the template, the tokenizer and the settings.
    """

    stage: str
    template: Template
    tokenizer: Any
    settings: EncodeSettings
    blocks: bool
    workers: int | None
    overwrite: bool
    progress: Progress
    fingerprint: str

    @classmethod
    def of(cls, cfg: Config, tokenizer: Any, template: Template, progress: Progress = quiet) -> Encoding:
        """Take from the YAML what encoding needs."""
        settings = EncodeSettings(cfg.effective_cutoff_len, cfg.train_on_prompt, cfg.mask_history)
        check_settings(template, settings)
        blocks = cfg.stage == "pt" and cfg.packing
        parts = (cfg.stage, settings, blocks, tokenizer_fingerprint(tokenizer), template_fingerprint(template))
        return cls(
            cfg.stage,
            template,
            tokenizer,
            settings,
            blocks,
            cfg.preprocessing_num_workers,
            cfg.overwrite_cache,
            progress,
            fingerprint(*parts),
        )

    def encoder(self, entry: DatasetEntry) -> RowEncoder:
        """What encodes the rows of one dataset."""
        return RowEncoder(entry, self.stage, self.template, self.tokenizer, self.settings, self.blocks)


def encode_dataset(
    entry: DatasetEntry, source: RowSource, encoding: Encoding, first: int | None, chosen: np.ndarray | None
) -> TokenStore:
    """Encode a dataset, or find it in the cache.

    Args:
        entry: the dataset.
        source: its rows.
        encoding: how.
        first: only the first rows, so many; None = all.
        chosen: only these rows, by position; None = all.

    Returns:
        The rows that can be used, in the source's order; its meta has the notes on all of them.

    Raises:
        UserError: the rows cannot be read or lack a column, or the cache cannot be written.
    """
    check_columns(entry, source, encoding.stage)
    wanted = None if chosen is None else np.unique(chosen)
    key = fingerprint(
        VERSION,
        entry.shape,
        source.fingerprint(),
        encoding.fingerprint,
        first,
        None if wanted is None else wanted.tobytes(),
    )
    folder = cache_folder() / key
    if is_store(folder) and not encoding.overwrite:
        return TokenStore(folder)
    encoder = encoding.encoder(entry)
    notes = RowNotes(entry.name)
    what = f"tokenizing {entry.name}"
    encoding.progress(what, 0, 0.0)
    with cache_entry(key) as temporary, StoreWriter(temporary, [entry.name]) as writer:
        chunks = cut_into_chunks(source, first, wanted)
        for block, share in encode_in_order(chunks, encoder, count_workers(encoding.workers)):
            writer.add_rows(block.ids, block.labels, block.lengths, block.rows)
            take_notes(notes, block)
            encoding.progress(what, notes.read, share)
        writer.finish({"fingerprint": key, "notes": notes.to_json()})
    encoding.progress(what, notes.read, 1.0)
    return TokenStore(folder)


def notes_of(store: TokenStore) -> RowNotes:
    """The notes that were kept with the rows."""
    return RowNotes.from_json(store.meta["notes"])


def take_notes(notes: RowNotes, block: Block) -> None:
    """Add what became of a block's rows."""
    notes.read += block.read
    notes.used += len(block.rows)
    notes.tokens += int(block.lengths.sum())
    notes.trained += int(block.trained.sum())
    for reason, row in block.dropped:
        notes.drop(reason, [row])
    for kind, row in block.suspicious:
        notes.suspect(kind, [row])
    notes.truncated.add(block.rows[block.cut].tolist())


def cut_into_chunks(source: RowSource, first: int | None, wanted: np.ndarray | None) -> Iterator[Chunk]:
    """Read rows and hand them on in chunks.

    Args:
        source: the rows.
        first: stop after so many rows; None = never.
        wanted: positions of the rows to hand on, ascending, int64; None = all.

    Yields:
        Positions, rows and the share of the work that they end.
    """
    numbers: list[int] = []
    rows: list[Any] = []
    characters = 0
    for number, row in _wanted_rows(source.rows(), first, wanted):
        numbers.append(number)
        rows.append(row)
        characters += _characters(row)
        if len(rows) >= CHUNK or characters >= CHUNK_CHARACTERS:
            yield numbers, rows, _share(source, number, first, wanted)
            numbers, rows, characters = [], [], 0
    if rows:
        yield numbers, rows, 1.0


def _wanted_rows(rows: Iterable[Any], first: int | None, wanted: np.ndarray | None) -> Iterator[tuple[int, Any]]:
    if wanted is None:
        yield from islice(enumerate(rows), first)
        return
    positions = set(wanted.tolist())
    for number, row in islice(enumerate(rows), int(wanted[-1]) + 1):
        if number in positions:
            yield number, row


def _share(source: RowSource, number: int, first: int | None, wanted: np.ndarray | None) -> float | None:
    shares = [source.share()]
    if first is not None:
        shares.append((number + 1) / first)
    if wanted is not None:
        shares.append((number + 1) / (int(wanted[-1]) + 1))
    known = [share for share in shares if share is not None]
    return max(known) if known else None


def _characters(value: Any) -> int:
    """Characters of all the texts in a row."""
    if isinstance(value, str):
        return len(value)
    if isinstance(value, dict):
        return sum(map(_characters, value.values()))
    if isinstance(value, (list, tuple)):
        return sum(map(_characters, value))
    return 0
