from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from parity.byte_tokenizers import byte_level_tokenizer
from surefoot.data.messages import Example, Message, Sample
from surefoot.data.pretrain import block_bos, cut_into_blocks, encode_documents
from surefoot.data.template import get_template


def documents(*texts: str) -> list[Example]:
    return [Example(f"d:{i}", (Message("user", text),), ()) for i, text in enumerate(texts)]


def prepared(name: str = "default", tokenizer: str = "plain") -> tuple[Any, Any]:
    loaded = byte_level_tokenizer(tokenizer)
    template = get_template(name, loaded)
    template.fix_tokenizer(loaded, missing="split")
    return template, loaded


def blocks_of(texts: list[str], template: Any, tokenizer: Any, size: int) -> tuple[list[Sample], int, int]:
    """The blocks, the tokens left over, and the documents dropped."""
    found = encode_documents(documents(*texts), template, tokenizer, 3, for_blocks=True)
    whole = [Sample((row.row_id,), row.input_ids, row.labels, (len(row.input_ids),)) for row in found.rows]
    return *cut_into_blocks(whole, size, block_bos(tokenizer)), len(found.dropped)


@given(st.lists(st.text(alphabet="abc", max_size=9), max_size=8), st.integers(1, 12))
@settings(max_examples=60, deadline=None)
def test_blocks_are_the_documents_end_to_end_without_the_remainder(texts: list[str], size: int) -> None:
    template, tokenizer = prepared()
    blocks, remainder, dropped = blocks_of(texts, template, tokenizer, size)
    ids = tokenizer("".join(text + "</s>" for text in texts if text), add_special_tokens=False)["input_ids"]
    joined = [i for block in blocks for i in block.input_ids.tolist()]
    assert {len(block.input_ids) for block in blocks} <= {size}
    assert joined == ids[: len(joined)]
    assert len(ids) - len(joined) == remainder < size
    assert dropped == texts.count("")


def test_every_token_is_trained_the_document_end_too() -> None:
    template, tokenizer = prepared()
    assert tokenizer.pad_token == tokenizer.eos_token
    (block,), _, _ = blocks_of(["abc", "de"], template, tokenizer, 7)
    assert np.array_equal(block.labels, block.input_ids)
    assert block.labels.tolist().count(tokenizer.eos_token_id) == 2


def test_a_block_names_the_documents_in_it() -> None:
    template, tokenizer = prepared()
    blocks, remainder, _ = blocks_of(["abcd", "efg", "hi"], template, tokenizer, 4)
    assert [block.row_ids for block in blocks] == [("d:0",), ("d:0..d:1",), ("d:1..d:2",)]
    assert remainder == 0


def test_documents_one_by_one_are_cut() -> None:
    template, tokenizer = prepared()
    found = encode_documents(documents("abcdef", "ab"), template, tokenizer, 5, for_blocks=False)
    texts = [tokenizer.decode(row.input_ids.tolist()) for row in found.rows]
    assert list(zip(texts, [row.cut for row in found.rows], strict=True)) == [("abcde", True), ("ab</s>", False)]


@pytest.mark.parametrize(("template", "end"), [("llama3", "<|end_of_text|>"), ("openchat-3.6", "<|eot_id|>")])
def test_the_document_end(template: str, end: str) -> None:
    chosen, tokenizer = prepared(template, "llama3")
    tokenizer.eos_token = "<|eot_id|>"
    found = encode_documents(documents("abc"), chosen, tokenizer, 9, for_blocks=False)
    assert tokenizer.decode(found.rows[0].input_ids.tolist()) == f"abc{end}"


def test_bos_goes_over_a_blocks_first_token_or_before_a_document() -> None:
    template, tokenizer = prepared()
    tokenizer.add_bos_token = True
    blocks, _, _ = blocks_of(["abcdefg"], template, tokenizer, 4)
    assert [tokenizer.decode(block.input_ids.tolist()) for block in blocks] == ["<s>bcd", "<s>fg</s>"]
    whole = encode_documents(documents("ab"), template, tokenizer, 9, for_blocks=False)
    assert tokenizer.decode(whole.rows[0].input_ids.tolist()) == "<s>ab</s>"
