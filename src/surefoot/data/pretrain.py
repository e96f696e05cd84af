"""Plain documents for the pt stage: ids of running text, in blocks or one by one."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from surefoot.data.encode import Dropped, EncodedRow
from surefoot.data.slots import tokenize_texts

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from surefoot.data.messages import Example
    from surefoot.data.template import Template


@dataclass(frozen=True, slots=True)
class EncodedDocuments:
    """What a batch of documents became.

    Attributes:
        rows: blocks or documents, every token trained.
        dropped: documents without a text.
        remainder: tokens at the batch's end that did not fill a block, and are left out.
    """

    rows: list[EncodedRow]
    dropped: list[Dropped]
    remainder: int


def encode_documents(
    examples: Sequence[Example],
    template: Template,
    tokenizer: PreTrainedTokenizerBase,
    cutoff_len: int,
    *,
    packing: bool,
) -> EncodedDocuments:
    """Turn documents into ids for pretraining.

    Each document is its text and the document end. With `packing` the documents of this batch are joined and cut into
    blocks; attention crosses documents within a block. A tokenizer that adds bos puts it over the first token of each
    block, or before each document without `packing`. All as LLaMA-Factory does, but for one thing: every token is
    trained, the document end too. (There the end is masked where pad is eos, so that the model never learns to stop.)

    Args:
        examples: documents, each one user turn. Blocks are cut within this batch: `preprocessing_batch_size` documents.
        template: the run's; llama3 has a document end of its own.
        tokenizer: the run's.
        cutoff_len: tokens of a block, or most tokens of a document.
        packing: whether to join and cut into blocks.

    Returns:
        The blocks or documents, and what was left out.
    """
    dropped = [Dropped(e.row_id, "no text") for e in examples if not e.prompt or not e.prompt[0].content]
    named = [(e.row_id, e.prompt[0].content) for e in examples if e.prompt and e.prompt[0].content]
    end = "<|end_of_text|>" if template.name == "llama3" else tokenizer.eos_token
    adds_bos = bool(getattr(tokenizer, "add_bos_token", False)) and tokenizer.bos_token_id is not None
    bos = tokenizer.bos_token if adds_bos and not packing else ""
    documents = tokenize_texts(tokenizer, [f"{bos}{text}{end}" for _, text in named])
    if not packing:
        rows = [
            _row(name, np.array(ids[:cutoff_len], np.int32), len(ids) > cutoff_len)
            for (name, _), ids in zip(named, documents, strict=True)
        ]
        return EncodedDocuments(rows, dropped, remainder=0)

    stream = np.array([token for ids in documents for token in ids], dtype=np.int32)
    ends = np.cumsum([len(ids) for ids in documents])
    whole = len(stream) // cutoff_len * cutoff_len
    rows = []
    for start in range(0, whole, cutoff_len):
        block = stream[start : start + cutoff_len].copy()
        if adds_bos:
            block[0] = tokenizer.bos_token_id
        first, last = np.searchsorted(ends, [start, start + cutoff_len - 1], side="right")
        names = named[first][0] if first == last else f"{named[first][0]}..{named[last][0]}"
        rows.append(_row(names, block, cut=False))
    return EncodedDocuments(rows, dropped, remainder=len(stream) - whole)


def _row(name: str, ids: np.ndarray, cut: bool) -> EncodedRow:
    return EncodedRow(name, ids, ids.copy(), cut, max(len(ids) - 1, 0))
