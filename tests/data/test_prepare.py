"""From the YAML's datasets to training items: the whole way, with planted bad rows."""

from __future__ import annotations

import json
import os
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from planted import PLANTED, Data, alpaca

from helpers import byte_tokenizer
from surefoot.data.encode import EncodeSettings, encode_example
from surefoot.data.messages import Example, Message, Sample
from surefoot.data.packing import knapsack
from surefoot.data.pretrain import block_bos, cut_into_blocks, encode_documents
from surefoot.data.template import get_template
from surefoot.errors import UserError


@pytest.fixture
def data(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("SUREFOOT_CACHE", str(tmp_path / "cache"))
    return Data(tmp_path)


def test_rows_become_the_tokens_that_the_template_gives(data):
    data.write("d", alpaca(3))
    prepared = data.run()
    assert data.ids(prepared.train) == ["d:0", "d:1", "d:2"]
    example = Example("d:1", (Message("user", "question 1"),), (Message("assistant", "answer 1"),))
    row = encode_example(example, data.template, data.tokenizer, EncodeSettings(200))
    sample = prepared.train[1]
    assert sample.input_ids.tolist() == row.input_ids.tolist() and sample.input_ids.dtype == np.int32
    assert sample.labels.tolist() == row.labels.tolist()
    assert sample.segments == (len(row.input_ids),) and not sample.joined
    assert prepared.train.lengths.tolist() == [len(s.input_ids) for s in prepared.train]
    assert prepared.train.max_token_id == max(s.input_ids.max() for s in prepared.train)


def test_planted_bad_rows_are_dropped_counted_and_named(data):
    data.write("d", PLANTED)
    prepared = data.run()
    told = prepared.report.to_json()
    assert (told["rows_read"], told["rows_used"]) == (16, 10)
    assert told["dropped"] == {
        "no answer": 2,
        "null content": 1,
        "wrong type": 2,
        "half of a surrogate pair": 1,
    }
    assert told["dropped_ids"]["no answer"] == ["d:6", "d:7"]
    assert told["dropped_ids"]["wrong type"] == ["d:9", "d:10"]
    assert told["truncated"] == told["over_long"] == 2 and told["truncated_ids"] == ["d:14", "d:15"]
    assert told["suspicious_ids"] == {
        "control characters": ["d:12"],
        "mixed encodings": ["d:12"],
        "U+FFFD replacement characters": ["d:13"],
    }
    assert data.ids(prepared.train) == ["d:0", "d:1", "d:2", "d:3", "d:4", "d:5", "d:12", "d:13", "d:14", "d:15"]
    assert told["rows_read"] == told["rows_used"] + sum(told["dropped"].values())
    assert told["tokens"] == int(prepared.train.lengths.sum())
    assert any("6 of 16 rows (38%) were dropped" in warning for warning in told["warnings"])
    assert any("2 of 16 rows (12%) were cut at cutoff_len = 200" in warning for warning in told["warnings"])
    json.dumps(told, allow_nan=False)


def test_strict_data_makes_what_is_said_loudly_an_error(data):
    bad = [*[{"instruction": "x"}] * 7, *[{"instruction": "long " * 60, "output": "x"}] * 7]
    data.write("d", [*alpaca(50), *bad])
    assert len(data.run().report.warnings()) == 2
    with pytest.raises(UserError) as error:
        data.run(strict_data=True)
    dropped, cut = error.value.problems
    assert "d:50" in dropped.message and "no answer" in dropped.message
    assert "d:57" in cut.message and "cutoff_len" in cut.message
    data.write("d", [*alpaca(50), bad[0], bad[-1]])
    assert len(data.run(strict_data=True).train) == 51


@pytest.mark.parametrize(
    ("rows", "keys", "said"),
    [
        ([], {}, "has no rows"),
        ([{"instruction": "x", "output": ""}] * 3, {}, "none of the 3 rows can be used: no answer: 3 (d:0, d:1, d:2)"),
        ([{"q": "x", "a": "y"}], {}, "no row has the column 'instruction' or 'input', 'output'; the columns are: q, a"),
        ([{"messages": []}], {}, '"formatting": "openai"'),
        ([1, 2], {}, "no row is an object"),
        ([{"instruction": "long " * 9, "output": "x" * 60}], {"cutoff_len": 1}, "all labels are masked"),
        (alpaca(2), {"stage": "pt"}, "packing left no training item"),
        (alpaca(3), {"val_size": 3}, "val_size"),
        (None, {"dataset": "e"}, "dataset 'e' is not in"),
        (None, {"dataset": None}, "the YAML names no data"),
    ],
)
def test_nothing_to_train_on_is_refused(data, rows, keys, said):
    data.write("d", alpaca(1) if rows is None else rows)
    with pytest.raises(UserError) as error:
        data.run(**keys)
    assert said in str(error.value)


def test_a_column_that_the_catalogue_names_must_be_there(data):
    data.write("d", alpaca(3), columns={"prompt": "instruction", "system": "sytem"})
    with pytest.raises(UserError, match="no row has the column 'sytem'"):
        data.run()


@pytest.mark.parametrize("entry", [{"ranking": True}, {"columns": {"kto_tag": "instruction"}}])
def test_datasets_of_other_stages_are_refused(data, entry):
    data.write("d", alpaca(3), **entry)
    with pytest.raises(UserError, match="stage: sft cannot train on"):
        data.run()


def test_max_samples_takes_the_first_rows_of_each_dataset(data):
    data.write("d", alpaca(5))
    data.write("e", alpaca(5))
    prepared = data.run("d,e", max_samples=2)
    assert data.ids(prepared.train) == ["d:0", "d:1", "e:0", "e:1"]
    assert prepared.report.to_json()["rows_read"] == 4


def test_num_samples_reads_only_the_rows_that_it_draws(data):
    data.write("d", [*alpaca(50), {"instruction": "x"}], num_samples=20)
    data.run()
    expected = np.random.RandomState(42).permutation(51)[:20]
    prepared = data.run()
    assert data.ids(prepared.train) == [f"d:{row}" for row in expected if row != 50]
    assert prepared.report.to_json()["rows_read"] == 20
    data.write("d", alpaca(3), num_samples=8)
    assert sorted(set(data.ids(data.run().train))) == ["d:0", "d:1", "d:2"] and len(data.run().train) == 8


def test_mixing_goes_by_rows_and_leaves_dropped_ones_out(data):
    data.write("d", [*alpaca(2), {"instruction": "x"}])
    data.write("e", alpaca(5))
    under = data.run("d,e", mix_strategy="interleave_under")
    assert data.ids(under.train) == ["d:0", "e:0", "d:1", "e:1", "e:2"]
    assert under.report.to_json()["rows_not_reached"] == 2
    over = data.run("d,e", mix_strategy="interleave_over")
    assert data.ids(over.train) == ["d:0", "e:0", "d:1", "e:1", "e:2", "d:0", "e:3", "d:1", "e:4"]
    assert over.train.fingerprint != under.train.fingerprint


@pytest.mark.parametrize(("val_size", "held_out"), [(0.25, 3), (4, 4)])
def test_val_size_splits_by_seed(data, val_size, held_out):
    data.write("d", alpaca(12))
    prepared, again, other = (
        data.run(val_size=val_size),
        data.run(val_size=val_size),
        data.run(val_size=val_size, seed=1),
    )
    ids = data.ids(prepared.evals[""])
    assert len(ids) == held_out and sorted([*ids, *data.ids(prepared.train)]) == sorted(f"d:{i}" for i in range(12))
    assert ids == data.ids(again.evals[""]) != data.ids(other.evals[""])
    assert prepared.report.to_json()["eval_items"] == {"": held_out}


def test_eval_datasets_together_or_each(data):
    for name in "def":
        data.write(name, alpaca(3))
    assert data.ids(data.run(eval_dataset="e,f").evals[""]) == ["e:0", "e:1", "e:2", "f:0", "f:1", "f:2"]
    evals = data.run(eval_dataset="e,f", eval_on_each_dataset=True).evals
    assert {name: data.ids(table) for name, table in evals.items()} == {
        "e": ["e:0", "e:1", "e:2"],
        "f": ["f:0", "f:1", "f:2"],
    }
    only = data.run(None, eval_dataset="e")
    assert only.train is None and len(only.evals[""]) == 3


def test_a_file_path_is_a_dataset_and_its_shape_is_seen(data):
    turns = [{"role": "user", "content": "Q"}, {"role": "assistant", "content": "A"}]
    theirs = [{"from": "human", "value": "Q"}, {"from": "gpt", "value": "A"}]
    for number, row in enumerate(
        [{"instruction": "Q", "output": "A"}, {"messages": turns}, {"conversations": theirs}, {"conversations": turns}]
    ):
        path = data.folder / f"rows{number}.jsonl"
        path.write_text(json.dumps(row))
        prepared = data.run(str(path))
        assert data.ids(prepared.train) == [f"{path}:0"]
        assert data.text(prepared.train[0]) == "Human: Q</s>\nAssistant:A</s>\n"


def test_packing_is_llama_factorys_knapsack_within_each_batch(data):
    data.write("d", [{"instruction": "x", "output": "y" * (7 * i % 50)} for i in range(30)])
    plain = data.run()
    lengths = {sample.row_ids[0]: len(sample.input_ids) for sample in plain.train}
    packed = data.run(packing=True, neat_packing=True, preprocessing_batch_size=10, cutoff_len=120)
    expected = []
    for start in range(0, 30, 10):
        rows = [lengths[f"d:{i}"] for i in range(start, start + 10) if f"d:{i}" in lengths]
        expected += [tuple(bin_) for bin_ in knapsack(rows, 119)]
    assert [sample.segments for sample in packed.train] == expected
    assert sorted(data.ids(packed.train)) == sorted(lengths)
    first = packed.train[0]
    starts = np.cumsum((0, *first.segments))
    for row_id, start, stop in zip(first.row_ids, starts[:-1], starts[1:], strict=True):
        alone = next(sample for sample in plain.train if sample.row_ids == (row_id,))
        assert first.input_ids[start:stop].tolist() == alone.input_ids.tolist()
        assert first.labels[start:stop].tolist() == alone.labels.tolist()
    assert not first.joined
    assert data.run(packing=True, packing_mode="joined").train[0].joined


@pytest.mark.parametrize(("packing", "size"), [(None, 32), (True, 31)])
def test_documents_are_cut_into_blocks(data, packing, size):
    documents = [{"text": "word " * count} for count in (3, 9, 20, 1)]
    data.write("d", documents)
    prepared = data.run(stage="pt", cutoff_len=32, packing=packing)
    stream = "".join(document["text"] + "</s>" for document in documents)
    ids = data.tokenizer(stream)["input_ids"]
    blocks = [ids[start : start + size] for start in range(0, len(ids) - size + 1, size)]
    assert [sample.input_ids.tolist() for sample in prepared.train] == blocks
    assert all(sample.labels.tolist() == sample.input_ids.tolist() for sample in prepared.train)
    assert prepared.train[0].row_ids == ("d:0..d:1",) and prepared.train[1].row_ids in {("d:1",), ("d:1..d:2",)}
    assert prepared.report.to_json()["left_over_tokens"] == len(ids) % size


@pytest.mark.parametrize("adds_bos", [True, False])
def test_blocks_are_cut_within_each_batch_of_rows(data, adds_bos):
    data.tokenizer.add_bos_token = adds_bos
    texts = ["word " * count for count in (3, 9, 20, 1, 30, 2)]
    data.write("d", [{"text": text} for text in texts])
    ours = data.run(stage="pt", cutoff_len=32, preprocessing_batch_size=4).train
    theirs = []
    for batch in (range(4), range(4, 6)):
        documents = [Example(f"d:{i}", (Message("user", texts[i]),), ()) for i in batch]
        rows = encode_documents(documents, data.template, data.tokenizer, 32, for_blocks=True).rows
        whole = [Sample((row.row_id,), row.input_ids, row.labels, (len(row.input_ids),)) for row in rows]
        theirs += cut_into_blocks(whole, 32, block_bos(data.tokenizer))[0]
    assert [(sample.row_ids, sample.input_ids.tolist()) for sample in ours] == [
        (sample.row_ids, sample.input_ids.tolist()) for sample in theirs
    ]
    bos = data.tokenizer.bos_token_id
    assert {sample.input_ids.tolist()[0] == bos for sample in ours} == {adds_bos}
    single = data.run(stage="pt", cutoff_len=32, packing=False).train[1]
    assert (single.input_ids.tolist()[0] == bos) is adds_bos and len(single.input_ids) == 32


def test_the_cache_answers_to_rows_settings_and_tokenizer_alone(data):
    data.write("d", alpaca(4))
    first = data.run()
    assert data.heard[0][0] == "tokenizing d" and data.heard[-1][1:] == (4, 1.0)
    data.heard.clear()
    again = data.run()
    assert data.heard == [] and again.train.fingerprint == first.train.fingerprint
    assert again.report.to_json() == first.report.to_json()
    data.run(overwrite_cache=True)
    assert data.heard != []
    for change in ({"cutoff_len": 20}, {"train_on_prompt": True}, {"max_samples": 3}):
        data.heard.clear()
        assert data.run(**change).train.fingerprint != first.train.fingerprint
        assert data.heard != []
    data.tokenizer.add_tokens(["question"])
    assert data.run().train.fingerprint != first.train.fingerprint
    data.tokenizer = byte_tokenizer()
    data.template.fix_tokenizer(data.tokenizer)
    assert data.run().train.fingerprint == first.train.fingerprint
    data.write("d", alpaca(4, start=1))
    assert data.run().train.fingerprint != first.train.fingerprint


def test_a_cache_that_cannot_be_written_says_what_to_set(data, monkeypatch, tmp_path):
    data.write("d", alpaca(1))
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("SUREFOOT_CACHE", str(tmp_path / "file"))
    with pytest.raises(UserError, match="SUREFOOT_CACHE"):
        data.run()


def test_what_killed_processes_left_is_swept_in_time(data, tmp_path):
    data.write("d", alpaca(1))
    old, new = (tmp_path / "cache" / "data" / f".{name}.1.tmp" for name in ("old", "new"))
    for folder in (old, new):
        folder.mkdir(parents=True)
    os.utime(old, (0, 0))
    data.run()
    assert not old.exists() and new.exists()


def test_a_failed_preparation_leaves_nothing_behind(data, tmp_path):
    (data.folder / "rows.jsonl").write_text('{"instruction": "Q", "output": "A"}\n{"instr')
    with pytest.raises(UserError, match="cut off"):
        data.run("data/rows.jsonl")
    assert not list((tmp_path / "cache").rglob("*.*"))


def test_tokenized_path_is_saved_once_and_then_loaded(data):
    data.write("d", PLANTED)
    made = data.run(tokenized_path="tokens", val_size=3)
    data.heard.clear()
    loaded = data.run(tokenized_path="tokens", val_size=3)
    assert data.heard == []
    assert data.ids(loaded.train) == data.ids(made.train) and data.ids(loaded.evals[""]) == data.ids(made.evals[""])
    for ours, theirs in zip(loaded.train, made.train, strict=True):
        assert ours.input_ids.tolist() == theirs.input_ids.tolist() and ours.labels.tolist() == theirs.labels.tolist()
    assert loaded.report.to_json() == made.report.to_json()


def test_tokens_of_another_model_template_or_rows_are_refused(data):
    data.write("d", alpaca(5))
    data.run(tokenized_path="tokens")
    with pytest.raises(UserError, match="made with cutoff_len: 200, and this run asks for 100"):
        data.run(tokenized_path="tokens", cutoff_len=100)
    data.write("d", alpaca(6))
    with pytest.raises(UserError, match="made from other rows: d"):
        data.run(tokenized_path="tokens")
    data.write("d", alpaca(5))
    template, data.template = data.template, get_template("vicuna", data.tokenizer)
    with pytest.raises(UserError, match="the template differs"):
        data.run(tokenized_path="tokens")
    data.template = template
    data.tokenizer.add_tokens(["question"])
    with pytest.raises(UserError, match="tokens was made with another model: the tokenizer differs"):
        data.run(tokenized_path="tokens")


def test_tokens_without_their_rows_can_be_used_and_it_is_said(data):
    data.write("d", alpaca(5))
    made = data.run(tokenized_path="tokens")
    (data.folder / "d.json").unlink()
    loaded = data.run(tokenized_path="tokens")
    assert data.ids(loaded.train) == data.ids(made.train)
    assert "could not be compared" in loaded.report.warnings()[0]


@pytest.mark.parametrize("damage", ["theirs", "other", "index", "arrays"])
def test_a_folder_that_holds_no_tokens_of_ours_is_refused(data, damage):
    data.write("d", alpaca(5))
    folder = Path("tokens")
    if damage in ("theirs", "other"):
        folder.mkdir()
        (folder / ("dataset_dict.json" if damage == "theirs" else "notes.txt")).write_text("{}")
    else:
        data.run(tokenized_path="tokens")
        (folder / ("surefoot_tokens.json" if damage == "index" else "train/ids.bin")).write_text("{")
    with pytest.raises(UserError) as error:
        data.run(tokenized_path="tokens")
    assert error.value.problems[0].key == "tokenized_path"


def test_conversations_with_tools_go_all_the_way(data):
    turns = [
        {"role": "system", "content": "S"},
        {"role": "user", "content": "Q"},
        {"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": {"x": 1}}}]},
        {"role": "tool", "content": "42"},
        {"role": "assistant", "content": "A"},
    ]
    broken = [turns[1], {"role": "assistant", "tool_calls": [{"function": {"no_name": 1}}]}]
    data.write("d", [{"messages": turns}, {"messages": broken}], formatting="openai")
    prepared = data.run(cutoff_len=1000)
    assert data.ids(prepared.train) == ["d:0"] and "42" in data.text(prepared.train[0])
    assert prepared.report.to_json()["rows_used"] == 1


row = st.one_of(
    st.none(),
    st.integers(),
    st.text(max_size=3),
    st.fixed_dictionaries(
        {},
        optional={
            "instruction": st.none() | st.text(max_size=5) | st.integers(),
            "input": st.none() | st.text(max_size=5),
            "output": st.none() | st.text(max_size=5) | st.lists(st.text(max_size=2), max_size=2),
        },
    ),
)


@settings(max_examples=40, deadline=None)
@given(rows=st.lists(row, max_size=8))
def test_whatever_the_rows_are_each_is_used_or_dropped_with_a_reason(rows, tmp_path_factory):
    data = Data(tmp_path_factory.mktemp("rows"))
    data.write("d", [*alpaca(1), *rows])
    told = data.run().report.to_json()
    assert told["rows_read"] == len(rows) + 1 == told["rows_used"] + sum(told["dropped"].values())
    assert sum(map(len, told["dropped_ids"].values())) == sum(told["dropped"].values())


@pytest.mark.parametrize("name", ["alpaca_en_demo", "sharegpt_demo", "openai_demo"])
def test_the_example_datasets_are_whole(data, name):
    examples = Path(__file__).parents[2] / "examples" / "data"
    prepared = data.run(name, dataset_dir=str(examples), cutoff_len=4000)
    told = prepared.report.to_json()
    assert told["rows_used"] == told["rows_read"] == len(prepared.train) and not told["suspicious"]
    assert told["dropped"] == {} and told["truncated"] == 0
