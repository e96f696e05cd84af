"""Items come back from disk as they went there, whatever they are made of."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from surefoot.data.messages import Sample
from surefoot.data.store import StoreWriter, TokenStore, is_store
from surefoot.data.table import TokenTable
from surefoot.errors import UserError

NAMES = ["d", "a:1", "../x..y.jsonl"]
row_ids = st.builds("{}:{}".format, st.sampled_from(NAMES), st.integers(0, 10**12))
spans = st.lists(row_ids, min_size=2, max_size=2, unique=True).map("..".join)
segment = st.tuples(row_ids | spans, st.integers(0, 5))


def sample_of(segments):
    lengths = tuple(length for _, length in segments)
    ids = np.arange(sum(lengths), dtype=np.int32) + 2**30
    return Sample(tuple(name for name, _ in segments), ids, np.where(ids % 2 == 0, ids, -100).astype(np.int32), lengths)


def same(ours, theirs):
    return (ours.row_ids, ours.segments, ours.joined) == (theirs.row_ids, theirs.segments, theirs.joined) and all(
        getattr(ours, name).tolist() == getattr(theirs, name).tolist() and getattr(ours, name).dtype == np.int32
        for name in ("input_ids", "labels")
    )


def write(folder, samples, fingerprint="f"):
    folder.mkdir()
    with StoreWriter(folder, NAMES) as writer:
        for sample in samples:
            writer.add_sample(sample)
        writer.finish({"fingerprint": fingerprint})
    return TokenStore(folder)


@settings(max_examples=50, deadline=None)
@given(items=st.lists(st.lists(segment, min_size=1, max_size=3), max_size=4))
def test_every_item_comes_back(items, tmp_path_factory):
    samples = [sample_of(segments) for segments in items]
    folder = tmp_path_factory.mktemp("s") / "store"
    store = write(folder, samples)
    assert is_store(folder) and len(store) == len(samples)
    assert all(same(store.sample(i), sample) for i, sample in enumerate(samples))
    assert store.lengths.tolist() == [len(sample.input_ids) for sample in samples]
    assert store.meta["max_token_id"] == max((int(s.input_ids.max()) for s in samples if len(s.input_ids)), default=-1)


def test_a_table_is_any_order_over_several_stores(tmp_path):
    samples = [sample_of([(f"d:{i}", i + 1)]) for i in range(5)]
    stores = [write(tmp_path / "a", samples[:2]), write(tmp_path / "b", samples[2:], "g")]
    table = TokenTable(stores)
    assert [s.row_ids[0] for s in table] == ["d:0", "d:1", "d:2", "d:3", "d:4"]
    chosen = table.select(np.array([4, 0, 4]))
    assert [s.row_ids[0] for s in chosen] == ["d:4", "d:0", "d:4"] and chosen.lengths.tolist() == [5, 1, 5]
    assert same(chosen[-1], samples[4])
    assert chosen.fingerprint != table.fingerprint == TokenTable(stores).fingerprint
    assert TokenTable(stores[:1]).fingerprint != TokenTable(stores[1:]).fingerprint
    with pytest.raises(IndexError):
        table[5]


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs Linux's always full device")
@pytest.mark.parametrize("name", ["ids.bin", "lengths.npy"])
def test_a_full_disk_is_said(tmp_path, name):
    (tmp_path / "store").mkdir()
    (tmp_path / "store" / name).symlink_to("/dev/full")
    samples = [sample_of([(f"d:{i}", 5)]) for i in range(100)]
    with pytest.raises(UserError, match="the disk is full"), StoreWriter(tmp_path / "store", NAMES) as writer:
        for sample in samples:
            writer.add_sample(sample)
        writer.finish({"fingerprint": "f"})


def test_what_is_no_store_is_not_taken_for_one(tmp_path):
    assert not is_store(tmp_path) and not is_store(tmp_path / "no")
    (tmp_path / "meta.json").write_text("{")
    assert not is_store(tmp_path)
    (tmp_path / "meta.json").write_text('{"format": 0}')
    assert not is_store(tmp_path)
