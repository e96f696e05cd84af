from __future__ import annotations

import pytest

from parity.byte_tokenizers import byte_level_tokenizer
from surefoot.data.special_tokens import fitting_templates
from surefoot.data.template import get_template
from surefoot.errors import UserError


def test_eos_pad_and_stop_words_are_set_as_the_template_needs() -> None:
    tokenizer = byte_level_tokenizer("llama3")
    before = len(tokenizer)
    added = get_template("llama3", tokenizer).fix_tokenizer(tokenizer)
    assert (added, len(tokenizer) - before) == ([], 0)
    assert (tokenizer.eos_token, tokenizer.pad_token) == ("<|eot_id|>", "<|eot_id|>")
    assert tokenizer.convert_tokens_to_ids("<|eom_id|>") in tokenizer.all_special_ids


def test_a_pad_token_that_is_there_stays() -> None:
    tokenizer = byte_level_tokenizer("qwen")
    get_template("qwen", tokenizer).fix_tokenizer(tokenizer)
    assert (tokenizer.eos_token, tokenizer.pad_token) == ("<|im_end|>", "<|endoftext|>")


def test_extra_special_tokens_that_are_there_stay() -> None:
    tokenizer = byte_level_tokenizer("llama3")
    tokenizer.add_special_tokens({"extra_special_tokens": ["<mine>"]})
    get_template("llama3", tokenizer).fix_tokenizer(tokenizer)
    assert {"<mine>", "<|eom_id|>"} <= set(tokenizer.all_special_tokens)


@pytest.mark.parametrize(
    ("template", "lacking"),
    [("chatml", ["<|im_end|>", "<|im_start|>"]), ("llama3", ["<|start_header_id|>"]), ("baichuan", ["<reserved_102>"])],
)
def test_marks_that_would_fall_into_pieces_are_refused(template: str, lacking: list[str]) -> None:
    tokenizer = byte_level_tokenizer("phi")
    before = tokenizer.get_vocab()
    with pytest.raises(UserError) as caught:
        get_template(template, tokenizer).fix_tokenizer(tokenizer)
    problem = caught.value.problems[0]
    assert problem.key == "template"
    assert all(mark in problem.message for mark in lacking)
    assert "phi" in problem.hint and "resize_vocab" in problem.hint
    assert (tokenizer.get_vocab(), tokenizer.eos_token) == (before, "<|endoftext|>")


def test_marks_are_added_when_the_vocabulary_may_grow() -> None:
    tokenizer = byte_level_tokenizer("plain")
    template = get_template("qwen", tokenizer)
    assert template.fix_tokenizer(tokenizer, missing="add") == ["<|im_end|>", "<|im_start|>"]
    assert len(tokenizer("<|im_start|><|im_end|>", add_special_tokens=False)["input_ids"]) == 2
    assert template.fix_tokenizer(tokenizer) == []


def test_split_adds_stop_words_alone() -> None:
    tokenizer = byte_level_tokenizer("plain")
    assert get_template("qwen", tokenizer).fix_tokenizer(tokenizer, missing="split") == ["<|im_end|>"]
    assert len(tokenizer("<|im_start|>", add_special_tokens=False)["input_ids"]) > 1


def test_a_tokenizer_without_eos_gets_one() -> None:
    tokenizer = byte_level_tokenizer("plain")
    tokenizer.eos_token = None
    with pytest.raises(UserError, match=r"<\|endoftext\|>"):
        get_template("vicuna", tokenizer).fix_tokenizer(tokenizer)
    assert get_template("vicuna", tokenizer).fix_tokenizer(tokenizer, missing="add") == ["<|endoftext|>"]
    assert tokenizer.eos_token == tokenizer.pad_token == "<|endoftext|>"


def test_split_special_tokens_is_no_reason_to_refuse() -> None:
    tokenizer = byte_level_tokenizer("qwen")
    tokenizer.split_special_tokens = True
    assert get_template("qwen", tokenizer).fix_tokenizer(tokenizer) == []


def test_stop_ids_are_eos_and_the_stop_words_that_exist() -> None:
    tokenizer = byte_level_tokenizer("llama3")
    template = get_template("llama3", tokenizer)
    template.fix_tokenizer(tokenizer)
    assert template.stop_ids(tokenizer) == tokenizer.convert_tokens_to_ids(["<|eot_id|>", "<|eom_id|>"])


def test_templates_that_a_tokenizer_fits() -> None:
    assert fitting_templates(byte_level_tokenizer("llama3"))[:1] == ["llama3"]
    assert fitting_templates(byte_level_tokenizer("plain")) == []
    assert len(fitting_templates(byte_level_tokenizer("qwen"), most=3)) == 3
