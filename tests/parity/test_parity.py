"""Every vector that LLaMA-Factory gave: the same rows must become the same ids, labels, cuts, packs and curves.

Vectors are read from tests/parity/vectors, from ../shared/parity beside the repository where that exists, and from the
folder or file that SUREFOOT_PARITY names. An entry of a kind, template or tokenizer that is not known here fails.
"""

from __future__ import annotations

import json
import os
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from parity.byte_tokenizers import SPECIALS, byte_level_tokenizer
from surefoot.data.encode import EncodedRow, EncodeSettings, encode_example, split_budget
from surefoot.data.messages import Example, Message
from surefoot.data.packing import knapsack
from surefoot.data.template import Template, get_template
from surefoot.data.template_table import read_template_table

ROOT = Path(__file__).resolve().parents[2]
KINDS = ("infer_seqlen", "greedy_knapsack", "smooth", "template_render", "sft_encode")
UNLIMITED = 2048  # LLaMA-Factory's default cutoff_len, under which the sft_encode entries without one were made


def vector_files() -> list[Path]:
    places = [Path(__file__).parent / "vectors", ROOT.parent / "shared" / "parity"]
    if named := os.environ.get("SUREFOOT_PARITY"):
        places.append(Path(named))
        assert places[-1].exists(), f"SUREFOOT_PARITY names {named}, which does not exist"
    found = [path for place in places for path in ([place] if place.is_file() else sorted(place.glob("*.json")))]
    # The same file may lie in two places.
    return list({path.read_bytes(): path for path in found}.values())


@cache
def entries(kind: str) -> list[tuple[str, Any]]:
    """(where it stands, the entry) for all vectors of a kind."""
    found = []
    for path in vector_files():
        listed = json.loads(path.read_text(encoding="utf-8")).get(kind, [])
        found += [(f"{path.name}:{kind}[{i}]", entry) for i, entry in enumerate(listed)]
    return found


def named(kind: str) -> Any:
    """Parametrize a test with all vectors of a kind; one that finds none is a failure, not a skip."""
    found = entries(kind) or [("none", None)]

    def label(entry: Any) -> str:
        return f"-{entry['template']}" if isinstance(entry, dict) else ""

    return pytest.mark.parametrize("entry", [pytest.param(e, id=place + label(e)) for place, e in found])


def conversation(entry: dict[str, Any]) -> list[Message]:
    return [Message(m["role"], m["content"]) for m in entry["messages"]]


def open_template(entry: dict[str, Any], tokenizer_name: str, keys: set[str]) -> tuple[Template, Any]:
    args = entry.get("args") or {}
    unknown = set(args) - keys
    assert not unknown, f"this test does not know the arguments {sorted(unknown)}"
    tokenizer = byte_level_tokenizer(tokenizer_name)
    template_keys = {"default_system", "tool_format", "enable_thinking", "preserve_thinking"}
    wanted = {key: value for key, value in args.items() if key in template_keys}
    template = get_template(entry["template"], tokenizer, **wanted)
    template.fix_tokenizer(tokenizer, missing="split")
    return template, tokenizer


def test_there_are_vectors_of_every_kind_and_of_no_other() -> None:
    assert {kind: len(entries(kind)) > 0 for kind in KINDS} == dict.fromkeys(KINDS, True)
    kinds = {key for path in vector_files() for key in json.loads(path.read_text(encoding="utf-8"))}
    assert kinds - {"_how"} <= set(KINDS)


def test_split_budget() -> None:
    wrong = {}
    for place, (source, target, cutoff, *expected) in entries("infer_seqlen"):
        if split_budget(source, target, cutoff) != tuple(expected):
            wrong[place] = (source, target, cutoff, expected)
    assert wrong == {}
    assert len(entries("infer_seqlen")) >= 360


@named("greedy_knapsack")
def test_knapsack(entry: Any) -> None:
    lengths, capacity, expected = entry
    assert knapsack(lengths, capacity) == expected


@named("smooth")
def test_smooth(entry: Any) -> None:
    from surefoot.run.plots import smooth

    values, expected = entry
    assert list(smooth(values)) == pytest.approx(expected, abs=1e-9)  # given to nine decimals


@named("template_render")
def test_template_render(entry: dict[str, Any]) -> None:
    keys = {"enable_thinking", "preserve_thinking", "default_system", "tool_format", "discarding_history_cot"}
    template, tokenizer = open_template(entry, entry["tokenizer"], keys)
    messages, system, tools = conversation(entry), entry["system"] or "", entry.get("tools") or ""
    turns = template.encode_turns(
        tokenizer,
        messages,
        system,
        tools,
        drop_history_thoughts=bool(entry["args"].get("discarding_history_cot")),
    )
    assert [[tokenizer.decode(ids) for ids in pair] for pair in turns] == entry["turns"]
    assert [tokenizer.decode(i) for i in template.encode_oneturn(tokenizer, messages, system, tools)] == entry[
        "oneturn"
    ]
    found = {"eos": tokenizer.eos_token, "pad": tokenizer.pad_token, "efficient_eos": template.efficient_eos}
    assert found == {key: entry[key] for key in found}


@named("sft_encode")
def test_sft_encode(entry: dict[str, Any]) -> None:
    keys = {"cutoff_len", "train_on_prompt", "mask_history", "enable_thinking", "preserve_thinking", "default_system"}
    template, tokenizer = open_template(entry, entry.get("tokenizer") or tokenizer_of(entry["template"]), keys)
    args = entry["args"]
    messages = tuple(conversation(entry))
    example = Example("vector:0", messages[:-1], messages[-1:], entry["system"] or "", entry.get("tools") or "")
    settings = EncodeSettings(
        cutoff_len=args.get("cutoff_len", UNLIMITED),
        train_on_prompt=args.get("train_on_prompt", False),
        mask_history=args.get("mask_history", False),
    )
    row = encode_example(example, template, tokenizer, settings)
    assert isinstance(row, EncodedRow)
    trained = [i for i, label in enumerate(row.labels) if label != -100]
    assert len(row.input_ids) == len(row.labels) == entry["length"]
    assert tokenizer.decode(row.input_ids.tolist()) == entry["input"]
    assert trained == entry["trained_positions"]
    assert tokenizer.convert_ids_to_tokens(row.labels[trained].tolist()) == entry["label_tokens"]


def tokenizer_of(template: str) -> str:
    """The sft_encode entries do not say which tokenizer they were made with: the one that has the template's marks."""
    keys = read_template_table()[template]
    words = [*keys.get("stop", ()), *keys.get("marks", ())]
    fitting = [name for name, specials in SPECIALS.items() if words and set(words) <= {*specials, "<|eom_id|>"}]
    return fitting[0] if fitting else "plain"
