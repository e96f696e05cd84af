"""Rows spread over processes give what one process gives, and a process that dies is noticed."""

from __future__ import annotations

import os

import pytest
from doubles import Dies, Refuses

from helpers import byte_tokenizer
from surefoot.data.catalog import DatasetEntry
from surefoot.data.encode import EncodeSettings
from surefoot.data.pool import LightTokenizer, count_workers, encode_in_order
from surefoot.data.rows import RowEncoder
from surefoot.data.template import get_template
from surefoot.errors import UserError, WorkError

ENTRY = DatasetEntry(name="d", kind="file", place="x")


def make(kind=RowEncoder, template="qwen3", stage="sft"):
    tokenizer = byte_tokenizer(("<pad>", "<s>", "</s>", "<|im_start|>", "<|im_end|>"))
    chosen = get_template(template, tokenizer, tool_format="qwen")
    chosen.fix_tokenizer(tokenizer, missing="split")
    return kind(ENTRY, stage, chosen, tokenizer, EncodeSettings(60))


def chunks(count=8, size=4):
    rows = [{"instruction": f"q {i}", "output": "a" * (i % 30)} for i in range(count * size)]
    rows[5] = {"instruction": "bell \x07", "output": "x"}
    for start in range(0, count * size, size):
        yield list(range(start, start + size)), rows[start : start + size], start / size


def plain(blocks):
    return [
        (block.read, block.dropped, block.suspicious, share, *(getattr(block, name).tolist() for name in ARRAYS))
        for block, share in blocks
    ]


ARRAYS = ("rows", "lengths", "trained", "cut", "ids", "labels")


@pytest.mark.parametrize("stage", ["sft", "pt"])
def test_two_processes_give_what_one_gives_in_the_same_order(stage):
    here = plain(encode_in_order(chunks(), make(stage=stage), 1))
    there = plain(encode_in_order(chunks(), make(stage=stage), 2))
    assert there == here and len(here) == 8
    assert here[1][2] == [("control characters", 5)]


def test_a_process_that_dies_is_an_error_and_not_a_hang():
    with pytest.raises(WorkError, match="preprocessing_num_workers: 1"):
        list(encode_in_order(chunks(), make(Dies), 2))


def test_an_error_in_a_process_keeps_its_hint():
    with pytest.raises(UserError) as error:
        list(encode_in_order(chunks(), make(Refuses), 2))
    assert (error.value.problems[0].hint, error.value.problems[0].key) == ("do that", "dataset")


def test_leaving_early_ends_the_processes():
    blocks = encode_in_order(chunks(40), make(), 2)
    next(blocks)
    blocks.close()


def test_few_rows_start_no_process(monkeypatch):
    monkeypatch.setattr("surefoot.data.pool.ProcessPoolExecutor", None)
    assert len(list(encode_in_order(chunks(4), make(), 2))) == 4


def test_the_light_tokenizer_answers_as_the_whole_one():
    encoder = make()
    light = LightTokenizer.of(encoder.tokenizer)
    assert isinstance(light, LightTokenizer)
    for name in ("bos_token_id", "eos_token_id", "bos_token", "eos_token", "unk_token_id"):
        assert getattr(light, name) == getattr(encoder.tokenizer, name)
    for token in ("<|im_end|>", "a", "no such token"):
        assert light.convert_tokens_to_ids(token) == encoder.tokenizer.convert_tokens_to_ids(token)
    encoder.tokenizer.backend_tokenizer.enable_truncation(5)
    assert LightTokenizer.of(encoder.tokenizer) is encoder.tokenizer


def test_never_more_processes_than_processors(monkeypatch):
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {0, 1, 2}, raising=False)
    assert [count_workers(n) for n in (None, 1, 2, 64)] == [3, 1, 2, 3]
