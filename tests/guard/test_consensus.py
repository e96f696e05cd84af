"""Flags that ranks raise about a step: the sum names exactly those who raised them."""

from __future__ import annotations

import torch
from hypothesis import given
from hypothesis import strategies as st

from surefoot.guard.check import DeviceCheck
from surefoot.guard.consensus import FLAGS, first_to_blame, read_flags, write_flags


@given(
    ranks=st.sampled_from([1, 2, 8, 130]),
    raised=st.sets(st.tuples(st.sampled_from(FLAGS), st.integers(0, 129)), max_size=6),
)
def test_the_sum_names_exactly_who_raised_what(ranks, raised):
    raised = {(name, rank) for name, rank in raised if rank < ranks}
    flags_FR = torch.zeros(len(FLAGS), ranks)
    for rank in range(ranks):
        own = {name: torch.tensor(True) for name, who in raised if who == rank}
        flags_FR += write_flags(rank, ranks, own, "cpu")
    flagged = read_flags(FLAGS, flags_FR.flatten().tolist(), ranks)
    assert {(name, rank) for name, those in flagged.items() for rank in those} == raised
    assert first_to_blame(flagged) == min((rank for name, rank in raised if name != "stop"), default=0)


def test_all_ranks_read_the_first_ones_numbers_and_everybodys_findings():
    """Rank 1 of 3 has seen a changed state, rank 2 lost moments; the norm is rank 0's."""

    def check(norm: float, state: float, moments: float) -> DeviceCheck:
        one = torch.ones(())
        return DeviceCheck(
            1, ["w"], [("rows:0",)], 1.0, one[None], one[None] * norm, one * norm, one * 0, one * 0, one * state,
            one * moments, one, one, flags_FR=write_flags(0, 3, {"stop": True}, "cpu"),
        )  # fmt: skip

    checks = [check(2.0, 0.0, 0.0), check(2.1, 1.0, 0.0), check(2.2, 0.0, 1.0)]
    vectors: list[torch.Tensor] = []
    for each in checks:  # what each would send
        each.start_reading(lambda own: (vectors.append(own), own[None].repeat(3, 1))[1])
    for each in checks:
        each.start_reading(lambda own: torch.stack(vectors))
        read = each.read()
        assert (read.grad_norm, read.norms) == (2.0, {"w": 2.0})
        assert read.state_changed and read.moments_lost and read.weights_finite
        assert read.flagged == {"stop": (0,), "state": (1,), "moments": (2,)}
        assert read.leader == 1
