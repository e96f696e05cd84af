"""Rows encoded while training: the same items whoever asks, shuffled anew each pass, read piece by piece."""

from __future__ import annotations

import json
from itertools import islice

import numpy as np
import pytest
from planted import PLANTED, Data, alpaca

from surefoot.data.stream import mix_rows, shuffled
from surefoot.errors import UserError

KEYS = {"streaming": True, "max_steps": 5}


@pytest.fixture
def data(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("SUREFOOT_CACHE", str(tmp_path / "cache"))
    return Data(tmp_path)


def take(stream, count):
    return [row_id for sample in islice(iter(stream), count) for row_id in sample.row_ids]


def test_two_iterators_give_the_same_and_each_pass_has_every_row(data):
    data.write("d", alpaca(30))
    stream = data.run(buffer_size=8, **KEYS).train
    once, again = take(stream, 90), take(stream, 90)
    assert once == again
    passes = [once[:30], once[30:60], once[60:]]
    assert all(sorted(ids) == sorted(f"d:{i}" for i in range(30)) for ids in passes)
    assert passes[0] != passes[1] != passes[2]
    assert take(data.run(buffer_size=8, seed=1, **KEYS).train, 30) != passes[0]


def test_a_stream_gives_the_tokens_of_the_table(data):
    data.write("d", PLANTED)
    table = {sample.row_ids: sample for sample in data.run().train}
    prepared = data.run(buffer_size=1, **KEYS)
    items = list(islice(iter(prepared.train), len(table)))
    assert [item.row_ids for item in items] == list(table)
    for item in items:
        assert item.input_ids.tolist() == table[item.row_ids].input_ids.tolist()
        assert item.labels.tolist() == table[item.row_ids].labels.tolist()
    told = prepared.report.to_json()
    assert told["streaming"] and told["rows_read"] == len(PLANTED) and told["dropped"]["no answer"] == 2


def test_held_out_rows_are_never_trained_on(data):
    data.write("d", [{"instruction": "no answer"}, *alpaca(20)])
    prepared = data.run(val_size=4, buffer_size=5, **KEYS)
    assert data.ids(prepared.evals[""]) == ["d:1", "d:2", "d:3", "d:4"]
    assert sorted(set(take(prepared.train, 50))) == sorted(f"d:{i}" for i in range(5, 21))


def test_a_stream_packs(data):
    data.write("d", alpaca(40))
    prepared = data.run(packing=True, neat_packing=True, preprocessing_batch_size=10, cutoff_len=120, **KEYS)
    packed = [sorted(s.row_ids) for s in islice(iter(prepared.train), 30)]
    table = data.run(packing=True, neat_packing=True, preprocessing_batch_size=10, cutoff_len=120).train
    expected = [sorted(s.row_ids) for s in table]
    assert all(rows in expected for rows in packed) and max(map(len, packed)) > 1


def test_local_files_are_not_read_whole(data, monkeypatch):
    lines = [json.dumps({"instruction": f"q {i}", "output": "a" * 2000}) for i in range(3000)]
    path = data.folder / "big.jsonl"
    path.write_text("\n".join(lines) + "\n{ broken at the end")
    monkeypatch.setattr("surefoot.data.json_rows.PIECE", 1 << 16)
    monkeypatch.setattr("surefoot.data.prepare.LOOKED_AT", 20)
    stream = data.run(str(path), buffer_size=4, preprocessing_batch_size=5, **KEYS).train
    assert len(take(stream, 50)) == 50
    with pytest.raises(UserError, match="line 3001"):
        take(stream, 3000)


def test_the_fingerprint_follows_settings_and_files(data):
    data.write("d", alpaca(5))
    first = data.run(**KEYS).train.fingerprint
    assert data.run(**KEYS).train.fingerprint == first
    assert data.run(**KEYS, seed=1).train.fingerprint != first
    assert data.run(**KEYS, cutoff_len=30).train.fingerprint != first
    data.write("d", alpaca(5, start=1))
    assert data.run(**KEYS).train.fingerprint != first


def test_a_stream_without_a_usable_row_ends(data):
    data.write("d", [{"instruction": "q", "output": ""}] * 3)
    with pytest.raises(UserError, match="none of the 3 rows can be used"):
        data.run(**KEYS)


def test_num_samples_cannot_be_streamed(data):
    data.write("d", alpaca(5), num_samples=2)
    with pytest.raises(UserError, match="num_samples"):
        data.run(**KEYS)


def rows_of(strategy, probabilities=None, sizes=(2, 4)):
    restart = [lambda size=size: enumerate("abcd"[:size]) for size in sizes]
    mixed = mix_rows([begin() for begin in restart], restart, strategy, probabilities, np.random.default_rng(0))
    return [f"{place}{row}" for place, _, row in mixed]


def test_strategies_of_a_stream():
    assert rows_of("concat") == ["0a", "0b", "1a", "1b", "1c", "1d"]
    assert rows_of("interleave_under") == ["0a", "1a", "0b", "1b"]
    assert rows_of("interleave_once") == ["0a", "1a", "0b", "1b", "1c", "1d"]
    assert rows_of("interleave_over") == ["0a", "1a", "0b", "1b", "0a", "1c", "0b", "1d", "0a"]
    assert sorted(rows_of("interleave_once", [0.5, 0.5])) == sorted(rows_of("concat"))
    assert set(rows_of("interleave_over", [0.9, 0.1])) == set(rows_of("concat"))


@pytest.mark.parametrize("size", [1, 3, 50])
def test_the_shuffle_buffer_keeps_every_item(size):
    items = list(shuffled(range(20), size, np.random.default_rng(0)))
    assert sorted(items) == list(range(20))
    assert (items == list(range(20))) is (size == 1)
