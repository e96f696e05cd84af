from __future__ import annotations

from functools import cache
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from parity.byte_tokenizers import byte_level_tokenizer
from surefoot.data.encode import (
    Dropped,
    EncodedRow,
    EncodeSettings,
    encode_batch,
    encode_example,
    split_budget,
)
from surefoot.data.messages import Example, Message
from surefoot.data.slots import tokenize_texts
from surefoot.data.template import Template, get_template
from surefoot.errors import UserError

LONG = EncodeSettings(cutoff_len=4096)
TEXTS = st.text(alphabet="ab é日\n<|>_imendt", max_size=12) | st.sampled_from(["<|im_end|>", " <|im_start|>user\n", ""])
SENTENCES = ["the cat sat on the mat", "a dog ran over the hill", "those cats and dogs ran and sat", "on and on it ran"]


@cache
def merging_tokenizer() -> Any:
    """A small byte-level BPE with merges, so that where a text is cut shows in its ids."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    backend = Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=330, initial_alphabet=alphabet, show_progress=False)
    backend.train_from_iterator(SENTENCES * 5, trainer)
    specials = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
    backend.add_special_tokens([AddedToken(text, special=True, normalized=False) for text in specials])
    return PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="<|endoftext|>")


@cache
def prepared(name: str) -> tuple[Template, Any]:
    tokenizer = merging_tokenizer() if name == "merging" else byte_level_tokenizer("qwen")
    template = get_template({"merging": "qwen", "glm4": "glm4"}.get(name, name), tokenizer)
    template.fix_tokenizer(tokenizer, missing="split")
    return template, tokenizer


def example(*turns: str, row: int = 0, system: str = "", tools: str = "") -> Example:
    messages = tuple(Message("user" if i % 2 == 0 else "assistant", text) for i, text in enumerate(turns))
    return Example(f"d:{row}", messages[:-1], messages[-1:], system, tools)


@st.composite
def examples(draw: st.DrawFn) -> list[Example]:
    rows = draw(st.lists(st.tuples(st.lists(TEXTS, min_size=1, max_size=7), TEXTS), max_size=6))
    return [example(*turns, row=i, system=system) for i, (turns, system) in enumerate(rows)]


def same(a: EncodedRow | Dropped, b: EncodedRow | Dropped) -> bool:
    if isinstance(a, Dropped) or isinstance(b, Dropped):
        return a == b
    return (
        (a.row_id, a.cut, a.trained) == (b.row_id, b.cut, b.trained)
        and np.array_equal(a.input_ids, b.input_ids)
        and np.array_equal(a.labels, b.labels)
    )


# --- tokenizing in batches


@given(st.lists(TEXTS, max_size=8), st.booleans())
@settings(max_examples=60, deadline=None)
def test_texts_become_the_ids_that_the_tokenizer_gives(texts: list[str], split: bool) -> None:
    for tokenizer in (merging_tokenizer(), prepared("qwen")[1]):
        tokenizer.split_special_tokens = split
        try:
            expected = [tokenizer.encode(text, add_special_tokens=False) for text in texts]
            assert tokenize_texts(tokenizer, texts) == expected
        finally:
            tokenizer.split_special_tokens = False


def test_a_backend_that_pads_is_not_used_directly() -> None:
    tokenizer = byte_level_tokenizer("qwen")
    tokenizer.backend_tokenizer.enable_padding()
    tokenizer.backend_tokenizer.enable_truncation(1)
    assert list(map(len, tokenize_texts(tokenizer, ["a", "abc"]))) == [1, 3]


@given(
    examples(),
    st.sampled_from(["qwen", "qwen3", "glm4", "merging", "default"]),
    st.integers(1, 80),
    st.booleans(),
)
@settings(max_examples=80, deadline=None)
def test_a_batch_equals_its_rows_one_by_one(rows: list[Example], name: str, cutoff: int, mask_history: bool) -> None:
    template, tokenizer = prepared(name)
    chosen = EncodeSettings(cutoff, mask_history=mask_history)
    together = encode_batch(rows, template, tokenizer, chosen)
    alone = [encode_example(row, template, tokenizer, chosen) for row in rows]
    assert len(together) == len(rows)
    assert all(map(same, together, alone))


@given(examples(), st.sampled_from(["qwen", "qwen3", "merging", "default"]))
@settings(max_examples=60, deadline=None)
def test_slots_are_tokenized_each_on_its_own(rows: list[Example], name: str) -> None:
    template, tokenizer = prepared(name)
    for row, encoded in zip(rows, encode_batch(rows, template, tokenizer, LONG), strict=True):
        if isinstance(encoded, Dropped):
            continue
        pieces = [p for pair in template.render_turns(row.prompt + row.response, row.system) for s in pair for p in s]
        ids = [
            i
            for p in pieces
            for i in (tokenizer.encode(p, add_special_tokens=False) if isinstance(p, str) else [tokenizer.eos_token_id])
        ]
        assert encoded.input_ids.tolist() == ids


# --- labels


@given(examples(), st.sampled_from(["qwen", "glm4", "default"]), st.integers(1, 120), st.booleans())
@settings(max_examples=80, deadline=None)
def test_labels_are_ids_or_ignored_and_rows_never_above_the_cutoff(
    rows: list[Example], name: str, cutoff: int, mask_history: bool
) -> None:
    template, tokenizer = prepared(name)
    for row in encode_batch(rows, template, tokenizer, EncodeSettings(cutoff, mask_history=mask_history)):
        if isinstance(row, Dropped):
            continue
        assert row.input_ids.dtype == row.labels.dtype == np.int32
        assert len(row.input_ids) == len(row.labels) <= cutoff
        trained = row.labels != -100
        wrong = trained & (row.labels != row.input_ids)
        # With efficient_eos a prompt's first position learns eos, which ends the answer before it.
        assert set(row.labels[wrong].tolist()) <= ({tokenizer.eos_token_id} if template.efficient_eos else set())
        assert row.trained == int(trained[1:].sum())


@given(examples(), st.sampled_from(["qwen", "default"]), st.integers(1, 120))
@settings(max_examples=60, deadline=None)
def test_cut_says_whether_anything_is_missing(rows: list[Example], name: str, cutoff: int) -> None:
    template, tokenizer = prepared(name)
    whole = encode_batch(rows, template, tokenizer, LONG)
    short = encode_batch(rows, template, tokenizer, EncodeSettings(cutoff))
    for a, b in zip(whole, short, strict=True):
        if isinstance(a, EncodedRow) and isinstance(b, EncodedRow):
            assert b.cut == (len(b.input_ids) < len(a.input_ids))
            assert not a.cut


def trained_text(row: EncodedRow | Dropped, tokenizer: Any) -> str:
    assert isinstance(row, EncodedRow)
    return tokenizer.decode(row.labels[row.labels != -100].tolist())


def test_answers_alone_are_trained_and_what_follows_them() -> None:
    template, tokenizer = prepared("qwen")
    row = example("Q1", "A1", "Q2", "A2")
    assert trained_text(encode_example(row, template, tokenizer, LONG), tokenizer) == "A1<|im_end|>\nA2<|im_end|>\n"
    last = EncodeSettings(4096, mask_history=True)
    assert trained_text(encode_example(row, template, tokenizer, last), tokenizer) == "A2<|im_end|>\n"


def test_train_on_prompt_trains_every_token_but_masked_answers() -> None:
    template, tokenizer = prepared("qwen")
    row = example("Q1", "A1", "Q2", "A2")
    every = encode_example(row, template, tokenizer, EncodeSettings(4096, train_on_prompt=True))
    assert isinstance(every, EncodedRow)
    assert np.array_equal(every.labels, every.input_ids)
    assert every.trained == len(every.input_ids) - 1
    last = encode_example(row, template, tokenizer, EncodeSettings(4096, train_on_prompt=True, mask_history=True))
    assert isinstance(last, EncodedRow)
    assert tokenizer.decode(last.input_ids[last.labels == -100].tolist()) == "A1<|im_end|>\n"


def test_train_on_prompt_is_refused_where_eos_is_learned_on_the_prompt() -> None:
    template, tokenizer = prepared("glm4")
    with pytest.raises(UserError) as caught:
        encode_batch([], template, tokenizer, EncodeSettings(10, train_on_prompt=True))
    assert caught.value.problems[0].key == "train_on_prompt"


def test_mask_history_keeps_the_last_turns_and_drops_earlier_thoughts() -> None:
    template, tokenizer = prepared("qwen3")
    thought = "<think>\nT\n</think>\n\n"
    row = example("Q1", thought + "A1", "Q2", thought + "A2")
    encoded = encode_example(row, template, tokenizer, EncodeSettings(60, mask_history=True))
    assert isinstance(encoded, EncodedRow)
    text = tokenizer.decode(encoded.input_ids.tolist())
    assert encoded.cut
    assert text.count("<think>") == 1
    assert text.endswith(f"{thought}A2<|im_end|>\n")


def test_an_answer_of_nothing_still_learns_to_end() -> None:
    template, tokenizer = prepared("default")
    assert trained_text(encode_example(example("Q", ""), template, tokenizer, LONG), tokenizer) == "<|endoftext|>\n"


# --- rows that cannot be used


def test_unusable_rows_are_dropped_with_a_reason_and_the_others_stay() -> None:
    template, tokenizer = prepared("qwen")
    user, answer = Message("user", "Q"), Message("assistant", "A")
    rows = [
        Example("d:0", (user,), ()),
        Example("d:1", (user, answer), (answer,)),
        Example("d:2", (user,), (answer, answer)),
        Example("d:3", (user,), (Message("function", "not json"),)),
        example("Q", "A", row=4, tools="[{"),
        example("Q", "A", row=5),
    ]
    found = encode_batch(rows, template, tokenizer, LONG)
    assert [(r.row_id, getattr(r, "reason", "used")) for r in found] == [
        ("d:0", "no answer"),
        ("d:1", "its turns do not alternate"),
        ("d:2", "more than one answer"),
        ("d:3", "a function turn is not valid JSON"),
        ("d:4", "its tools are not valid JSON"),
        ("d:5", "used"),
    ]
    assert isinstance(found[3], Dropped)
    assert "not json" in found[3].detail


# --- the budget


@given(st.integers(0, 3000), st.integers(0, 3000), st.integers(0, 3000))
def test_split_budget_keeps_what_fits_and_never_more(source: int, target: int, cutoff: int) -> None:
    source_kept, target_kept = split_budget(source, target, cutoff)
    assert 0 <= source_kept <= source
    assert 0 <= target_kept <= target
    assert source_kept + target_kept <= cutoff
    if source + target <= cutoff:
        assert (source_kept, target_kept) == (source, target)
    elif 2 * target < cutoff:
        assert target_kept == target


def test_split_budget_of_nothing() -> None:
    assert split_budget(0, 0, 0) == (0, 0)
