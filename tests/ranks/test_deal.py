"""Dealing a step's samples to ranks: nothing lost, nothing twice, never far from even."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from helpers import random_sample
from surefoot.data.deal import cost_of, deal
from surefoot.data.messages import Sample

costs_of_a_step = st.lists(st.integers(1, 2048), max_size=80)
ranks_of_a_run = st.integers(1, 64)


@given(costs=costs_of_a_step, ranks=ranks_of_a_run)
def test_every_item_comes_once_and_in_order(costs, ranks):
    shares = deal(range(len(costs)), costs, ranks)
    assert len(shares) == ranks
    assert sorted(item for share in shares for item in share) == list(range(len(costs)))
    assert all(share == sorted(share) for share in shares)
    assert deal(range(len(costs)), costs, ranks) == shares


@given(costs=costs_of_a_step, ranks=ranks_of_a_run)
def test_no_rank_is_more_than_one_item_from_another(costs, ranks):
    loads = [sum(costs[i] for i in share) for share in deal(range(len(costs)), costs, ranks)]
    assert max(loads) - min(loads) <= max(costs, default=0)


@given(costs=costs_of_a_step)
def test_one_rank_gets_all_as_they_come(costs):
    assert deal(costs, costs, 1) == [costs]


@pytest.mark.parametrize("ranks", [2, 4, 8, 16, 32, 64])
def test_alpaca_like_steps_are_even_from_eight_samples_a_rank(ranks):
    rng = np.random.default_rng(ranks)
    over = []
    for _ in range(20):
        lengths = np.clip(np.exp(rng.normal(np.log(70), 0.55, 8 * ranks)), 8, 2048).astype(int).tolist()
        loads = [sum(share) for share in deal(lengths, lengths, ranks)]
        over.append(max(loads) / (sum(loads) / ranks) - 1)
    assert np.mean(over) < 0.05


def test_attention_counts_within_rows_and_over_joined_ones():
    rng = np.random.default_rng(0)
    one = random_sample(rng, 100, 0)
    assert cost_of(one, 100) == pytest.approx(100 + 100**2 / 1200)
    packed = Sample(("a", "b"), one.input_ids, one.labels, (40, 60))
    assert cost_of(packed, 100) == pytest.approx(100 + (40**2 + 60**2) / 1200)
    joined = Sample(("a", "b"), one.input_ids, one.labels, (40, 60), joined=True)
    assert cost_of(joined, 100) == cost_of(one, 100)
