"""Plain documents for the pt stage: ids of running text, in blocks or one by one."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from surefoot.data.encode import Dropped, EncodedRow
from surefoot.data.messages import Sample
from surefoot.data.slots import tokenize_texts
from surefoot.data.store import SPAN

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from surefoot.data.messages import Example
    from surefoot.data.template import Template


@dataclass(frozen=True, slots=True)
class EncodedDocuments:
    """What a batch of documents became.

    Attributes:
        rows: the documents, every token trained.
        dropped: documents without a text.
    """

    rows: list[EncodedRow]
    dropped: list[Dropped]


def encode_documents(
    examples: Sequence[Example],
    template: Template,
    tokenizer: PreTrainedTokenizerBase,
    cutoff_len: int,
    *,
    for_blocks: bool,
) -> EncodedDocuments:
    """Turn documents into ids for pretraining: the text and the document end, after a bos where the tokenizer adds one.

    As LLaMA-Factory does, but for one thing: every token is trained, the document end too. (There the end is masked
    where pad is eos, so that the model never learns to stop.)

    Args:
        examples: documents, each one user turn.
        template: the run's; llama3 has a document end of its own.
        tokenizer: the run's.
        cutoff_len: most tokens of a document.
        for_blocks: whether the documents are for `cut_into_blocks`: whole and without bos.

    Returns:
        The documents, and which were left out.
    """
    dropped = [Dropped(e.row_id, "no text") for e in examples if not e.prompt or not e.prompt[0].content]
    named = [(e.row_id, e.prompt[0].content) for e in examples if e.prompt and e.prompt[0].content]
    end = "<|end_of_text|>" if template.name == "llama3" else tokenizer.eos_token
    bos = "" if for_blocks or block_bos(tokenizer) is None else tokenizer.bos_token
    documents = tokenize_texts(tokenizer, [f"{bos}{text}{end}" for _, text in named])
    limit = None if for_blocks else cutoff_len
    rows = [
        _row(name, np.array(ids[:limit], np.int32), limit is not None and len(ids) > limit)
        for (name, _), ids in zip(named, documents, strict=True)
    ]
    return EncodedDocuments(rows, dropped)


def cut_into_blocks(documents: Sequence[Sample], size: int, bos_id: int | None) -> tuple[list[Sample], int]:
    """Lay documents end to end and cut them into blocks; attention crosses documents within a block.

    Args:
        documents: one document an item, encoded `for_blocks`.
        size: tokens of a block.
        bos_id: written over the first token of each block, as LLaMA-Factory does; None = it stays.

    Returns:
        The blocks, each named by its first and last document, and how many tokens at the end did not fill one.
    """
    ids = np.concatenate([document.input_ids for document in documents] or [np.empty(0, dtype=np.int32)])
    ends = np.cumsum([len(document.input_ids) for document in documents])
    blocks = []
    for start in range(0, len(ids) - size + 1, size):
        block = ids[start : start + size].copy()
        if bos_id is not None:
            block[0] = bos_id
        first, last = np.searchsorted(ends, [start, start + size - 1], side="right")
        names = list(dict.fromkeys((documents[first].row_ids[0], documents[last].row_ids[0])))
        blocks.append(Sample((SPAN.join(names),), block, block.copy(), (size,)))
    return blocks, len(ids) % size


def block_bos(tokenizer: PreTrainedTokenizerBase) -> int | None:
    """The id that starts each block or document; None for a tokenizer that adds none."""
    return tokenizer.bos_token_id if getattr(tokenizer, "add_bos_token", False) else None


def _row(name: str, ids: np.ndarray, cut: bool) -> EncodedRow:
    return EncodedRow(name, ids, ids.copy(), cut, max(len(ids) - 1, 0))
