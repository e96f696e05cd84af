"""From raw rows to a block of token ids: the work that is spread over processes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from surefoot.data.catalog import DatasetEntry
from surefoot.data.converters import Convert, make_converter
from surefoot.data.encode import Dropped, EncodedRow, EncodeSettings, encode_batch
from surefoot.data.messages import Example, RowProblem
from surefoot.data.notes import NO_TRAINED_TOKEN
from surefoot.data.pretrain import encode_documents
from surefoot.data.suspicious import find_suspicious, is_unwritable, texts_of
from surefoot.data.template import Template

BROKEN_CHARACTERS = "half of a surrogate pair"


@dataclass(slots=True)
class Block:
    """What a run of rows became.

    Attributes:
        read: rows looked at.
        rows: positions of the rows that can be used, int64 [rows].
        lengths: their tokens, int32 [rows].
        trained: their tokens that carry loss, int32 [rows].
        cut: which of them lost tokens to cutoff_len, bool [rows].
        ids: their token ids end to end, int32 [tokens].
        labels: their labels end to end, int32 [tokens].
        dropped: (reason, position) of the rows that cannot be used.
        suspicious: (kind, position) of the usable rows with odd characters.
    """

    read: int
    rows: np.ndarray
    lengths: np.ndarray
    trained: np.ndarray
    cut: np.ndarray
    ids: np.ndarray
    labels: np.ndarray
    dropped: list[tuple[str, int]] = field(default_factory=list)
    suspicious: list[tuple[str, int]] = field(default_factory=list)


@dataclass(frozen=True)
class RowEncoder:
    """Turns raw rows of one dataset into token ids. Can be pickled, for another process.

    Attributes:
        entry: the dataset.
        stage: `sft` or `pt`.
        template: the chat template.
        tokenizer: a transformers tokenizer or a LightTokenizer.
        settings: cut-off, masks and so on.
        blocks: pt: documents stay whole and without bos, since they are cut into blocks later.
    """

    entry: DatasetEntry
    stage: str
    template: Template
    tokenizer: Any
    settings: EncodeSettings
    blocks: bool = False

    def encode(self, numbers: Sequence[int], rows: Sequence[Any]) -> Block:
        """Convert and tokenize some rows.

        Args:
            numbers: their positions in the dataset.
            rows: the rows as they were read.

        Returns:
            What became of each.
        """
        convert: Convert = make_converter(self.entry, self.stage)
        dropped: list[tuple[str, int]] = []
        suspicious: list[tuple[str, int]] = []
        examples: list[Example] = []
        for number, row in zip(numbers, rows, strict=True):
            row_id = f"{self.entry.name}:{number}"
            try:
                example = convert(row, row_id)
                if any(is_unwritable(text) for text in texts_of(example)):
                    raise RowProblem(BROKEN_CHARACTERS)
            except RowProblem as problem:
                dropped.append((problem.reason, number))
                continue
            found = dict.fromkeys(kind for text in texts_of(example) for kind in find_suspicious(text))
            suspicious += [(kind, number) for kind in found]
            examples.append(example)
        usable: list[EncodedRow] = []
        for result in self._tokenize(examples):
            if isinstance(result, Dropped):
                dropped.append((result.reason, row_number(result.row_id)))
            elif not result.trained:
                # It would add nothing to a token mean, and a step of such rows alone would have no mean at all.
                dropped.append((NO_TRAINED_TOKEN, row_number(result.row_id)))
            else:
                usable.append(result)
        return Block(
            read=len(rows),
            rows=np.array([row_number(row.row_id) for row in usable], dtype=np.int64),
            lengths=np.array([len(row.input_ids) for row in usable], dtype=np.int32),
            trained=np.array([row.trained for row in usable], dtype=np.int32),
            cut=np.array([row.cut for row in usable], dtype=bool),
            ids=_end_to_end([row.input_ids for row in usable]),
            labels=_end_to_end([row.labels for row in usable]),
            dropped=sorted(dropped, key=lambda pair: pair[1]),
            suspicious=suspicious,
        )

    def _tokenize(self, examples: list[Example]) -> list[EncodedRow | Dropped]:
        if self.stage != "pt":
            return encode_batch(examples, self.template, self.tokenizer, self.settings)
        documents = encode_documents(
            examples, self.template, self.tokenizer, self.settings.cutoff_len, for_blocks=self.blocks
        )
        return [*documents.rows, *documents.dropped]


def row_number(row_id: str) -> int:
    """The position in the dataset that ends a row id."""
    return int(row_id.rsplit(":", 1)[1])


def _end_to_end(rows: list[np.ndarray]) -> np.ndarray:
    return np.concatenate(rows, dtype=np.int32) if rows else np.empty(0, dtype=np.int32)
