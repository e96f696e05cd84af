from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from parity.byte_tokenizers import byte_level_tokenizer
from surefoot.data.messages import Example, Message
from surefoot.data.pretrain import encode_documents
from surefoot.data.template import get_template


def documents(*texts: str) -> list[Example]:
    return [Example(f"d:{i}", (Message("user", text),), ()) for i, text in enumerate(texts)]


def prepared(name: str = "default", tokenizer: str = "plain") -> tuple[Any, Any]:
    loaded = byte_level_tokenizer(tokenizer)
    template = get_template(name, loaded)
    template.fix_tokenizer(loaded, missing="split")
    return template, loaded


@given(st.lists(st.text(alphabet="abc", max_size=9), max_size=8), st.integers(1, 12))
@settings(max_examples=60, deadline=None)
def test_blocks_are_the_documents_end_to_end_without_the_remainder(texts: list[str], size: int) -> None:
    template, tokenizer = prepared()
    found = encode_documents(documents(*texts), template, tokenizer, size, packing=True)
    ids = tokenizer("".join(text + "</s>" for text in texts if text), add_special_tokens=False)["input_ids"]
    joined = [i for row in found.rows for i in row.input_ids.tolist()]
    assert {len(row.input_ids) for row in found.rows} <= {size}
    assert joined == ids[: len(joined)]
    assert len(ids) - len(joined) == found.remainder < size
    assert len(found.dropped) == texts.count("")


def test_every_token_is_trained_the_document_end_too() -> None:
    template, tokenizer = prepared()
    assert tokenizer.pad_token == tokenizer.eos_token
    found = encode_documents(documents("abc", "de"), template, tokenizer, 7, packing=True)
    assert np.array_equal(found.rows[0].labels, found.rows[0].input_ids)
    assert found.rows[0].labels.tolist().count(tokenizer.eos_token_id) == 2
    assert found.rows[0].trained == 6


def test_a_block_names_the_documents_in_it() -> None:
    template, tokenizer = prepared()
    found = encode_documents(documents("abcd", "efg", "hi"), template, tokenizer, 4, packing=True)
    assert [row.row_id for row in found.rows] == ["d:0", "d:0..d:1", "d:1..d:2"]
    assert found.remainder == 0


def test_documents_one_by_one_are_cut() -> None:
    template, tokenizer = prepared()
    found = encode_documents(documents("abcdef", "ab"), template, tokenizer, 5, packing=False)
    texts = [tokenizer.decode(row.input_ids.tolist()) for row in found.rows]
    assert list(zip(texts, [row.cut for row in found.rows], strict=True)) == [("abcde", True), ("ab</s>", False)]


@pytest.mark.parametrize(("template", "end"), [("llama3", "<|end_of_text|>"), ("openchat-3.6", "<|eot_id|>")])
def test_the_document_end(template: str, end: str) -> None:
    chosen, tokenizer = prepared(template, "llama3")
    tokenizer.eos_token = "<|eot_id|>"
    found = encode_documents(documents("abc"), chosen, tokenizer, 9, packing=False)
    assert tokenizer.decode(found.rows[0].input_ids.tolist()) == f"abc{end}"


def test_bos_goes_over_a_blocks_first_token_or_before_a_document() -> None:
    template, tokenizer = prepared()
    tokenizer.add_bos_token = True
    blocks = encode_documents(documents("abcdefg"), template, tokenizer, 4, packing=True)
    assert [tokenizer.decode(row.input_ids.tolist()) for row in blocks.rows] == ["<s>bcd", "<s>fg</s>"]
    whole = encode_documents(documents("ab"), template, tokenizer, 9, packing=False)
    assert tokenizer.decode(whole.rows[0].input_ids.tolist()) == "<s>ab</s>"
