from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from surefoot.data.encode import EncodedRow
from surefoot.data.packing import join_rows, knapsack, pack_indices, pack_rows

LENGTHS = st.integers(1, 40).flatmap(lambda c: st.tuples(st.lists(st.integers(0, c), max_size=60), st.just(c)))


def slow_greedy(lengths: list[int], capacity: int) -> list[list[int]]:
    """The definition: of the rows left, put in the largest that fits; of equal ones the last."""
    left, bins = list(range(len(lengths))), []
    while left:
        taken: list[int] = []
        while fitting := [i for i in left if lengths[i] + sum(lengths[j] for j in taken) <= capacity]:
            best = max(fitting, key=lambda i: (lengths[i], i))
            taken.append(best)
            left.remove(best)
        bins.append(taken)
    return bins


def row(length: int, number: int = 0, first_label: int = -100) -> EncodedRow:
    ids = np.arange(length, dtype=np.int32) + 100 * number
    labels = ids.copy()
    labels[:1] = first_label
    return EncodedRow(f"d:{number}", ids, labels, cut=False, trained=max(length - 1, 0))


@given(LENGTHS)
def test_packs_are_those_of_the_definition(case: tuple[list[int], int]) -> None:
    lengths, capacity = case
    bins = pack_indices(lengths, capacity)
    assert bins == slow_greedy(lengths, capacity)
    assert sorted(i for bin_ in bins for i in bin_) == list(range(len(lengths)))
    assert knapsack(lengths, capacity) == [[lengths[i] for i in bin_] for bin_ in bins]


def test_equal_lengths_are_taken_from_the_last_on() -> None:
    assert pack_indices([5, 3, 5, 5], 10) == [[3, 2], [0, 1]]


def test_a_row_above_the_capacity_is_refused_by_the_packer_and_told_by_pack_rows() -> None:
    with pytest.raises(ValueError, match="12 tokens"):
        knapsack([3, 12], 10)
    samples, too_long = pack_rows([row(3, 0), row(12, 1), row(4, 2)], 10)
    assert [sample.row_ids for sample in samples] == [("d:2", "d:0")]
    assert [r.row_id for r in too_long] == ["d:1"]


def test_segments_follow_the_rows() -> None:
    sample = join_rows([row(3, 0), row(2, 1)])
    assert sample.segments == (3, 2)
    assert sample.input_ids.tolist() == [0, 1, 2, 100, 101]
    assert sample.input_ids.dtype == sample.labels.dtype == np.int32
    assert not sample.joined


@pytest.mark.parametrize(("joined", "expected"), [(False, [-100, 1, -100, 101]), (True, [0, 1, 100, 101])])
def test_a_rows_first_label_counts_only_where_the_row_before_is_seen(joined: bool, expected: list[int]) -> None:
    first, second = row(2, 0, first_label=0), row(2, 1, first_label=100)
    assert join_rows([first, second], joined=joined).labels.tolist() == expected
    assert second.labels.tolist() == [100, 101]


def test_example_of_llama_factory() -> None:
    # cutoff_len 16: packs of 15, rows of 5, 8, 2, 9 and 15 tokens
    rows = [row(n, i) for i, n in enumerate((5, 8, 2, 9, 15))]
    samples, _ = pack_rows(rows, 15)
    assert [sample.segments for sample in samples] == [(15,), (9, 5), (8, 2)]
