"""The draws are those of the `datasets` library and of LLaMA-Factory's use of NumPy."""

from __future__ import annotations

import numpy as np
import pytest

from surefoot.data.mixing import choose_rows, mix, split
from surefoot.errors import UserError


def test_rows_in_order_up_to_max_samples():
    rng = np.random.RandomState(0)
    assert choose_rows(5, None, None, rng).tolist() == [0, 1, 2, 3, 4]
    assert choose_rows(5, None, 3, rng).tolist() == [0, 1, 2]
    assert choose_rows(5, None, 9, rng).tolist() == [0, 1, 2, 3, 4]


def test_num_samples_draws_as_the_global_generator_would():
    np.random.seed(42)  # what LLaMA-Factory draws from
    expected = np.random.permutation(10)[:4].tolist()
    assert choose_rows(10, 4, None, np.random.RandomState(42)).tolist() == expected
    assert choose_rows(10, 4, 2, np.random.RandomState(42)).tolist() == expected[:2]


def test_num_samples_beyond_the_size_takes_every_row_and_repeats_some():
    chosen = choose_rows(4, 10, None, np.random.RandomState(1))
    assert len(chosen) == 10 and sorted(chosen[:4]) == [0, 1, 2, 3] and set(chosen) == {0, 1, 2, 3}


@pytest.mark.parametrize(
    ("strategy", "expected"),
    [
        ("concat", [0, 1, 2, 3, 4, 5, 6, 7]),
        ("interleave_under", [0, 3, 1, 4, 2, 5]),
        ("interleave_over", [0, 3, 1, 4, 2, 5, 0, 6, 1, 7]),
        ("interleave_once", [0, 3, 1, 4, 2, 5, 6, 7]),
    ],
)
def test_strategies_in_turn(strategy, expected):
    assert mix([3, 5], strategy, None, 0).tolist() == expected


def test_probabilities():
    once = mix([30, 500], "interleave_under", [0.5, 0.5], 3)
    again = mix([30, 500], "interleave_under", [0.5, 0.5], 3)
    other = mix([30, 500], "interleave_under", [0.5, 0.5], 4)
    assert once.tolist() == again.tolist() != other.tolist()
    assert len(once) == len(set(once.tolist()))
    over = mix([3, 50], "interleave_over", [0.5, 0.5], 3)
    assert set(over.tolist()) == set(range(53)) and len(over) > 53


@pytest.mark.parametrize("val_size", [0.1, 0.34, 3, 1])
def test_the_split_is_train_test_split(val_size):
    from datasets import Dataset

    expected = Dataset.from_dict({"row": list(range(20))}).train_test_split(
        test_size=int(val_size) if val_size >= 1 else val_size, seed=7
    )
    train, held_out = split(20, val_size, 7)
    assert train.tolist() == expected["train"]["row"][:]
    assert held_out.tolist() == expected["test"]["row"][:]


@pytest.mark.parametrize(("items", "val_size"), [(5, 5), (1, 0.5), (3, 10)])
def test_a_split_that_leaves_nothing_is_refused(items, val_size):
    with pytest.raises(UserError, match="val_size"):
        split(items, val_size, 0)
