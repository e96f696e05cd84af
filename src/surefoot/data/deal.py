"""A step's samples dealt to the ranks that compute it together, so that none waits long for another."""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from typing import TYPE_CHECKING, TypeVar

if TYPE_CHECKING:
    from surefoot.data.messages import Sample

T = TypeVar("T")

# A decoder layer of width d has about 12 d² weights: 24 d² operations a token. Causal attention over a span of L tokens
# takes 2 d L a token (two products over L / 2 keys on average). So it costs as much as all else at L = 12 d.
ATTENTION_EVEN = 12


def cost_of(sample: Sample, width: int) -> float:
    """Estimate what a sample costs to compute.

    Args:
        sample: one training item.
        width: of the model's hidden states.

    Returns:
        Its tokens, and the share of them that attention costs on top.
    """
    spans = (len(sample.input_ids),) if sample.joined else sample.segments
    return len(sample.input_ids) + sum(length * length for length in spans) / (ATTENTION_EVEN * width)


def deal(items: Sequence[T], costs: Sequence[float], ranks: int) -> list[list[T]]:
    """Deal items so that the ranks' costs are about the same: the costliest first, each to the rank with the least.

    This is Graham's longest-processing-time rule (1969): the slowest rank is never above 4/3 of the best there is.

    Args:
        items: of one step.
        costs: of each.
        ranks: among which to deal.

    Returns:
        Each rank's items in the step's order; none where there are fewer items than ranks. The same on every machine.
    """
    loads = [(0.0, rank) for rank in range(ranks)]  # a heap already; ties go to the lowest rank
    shares: list[list[int]] = [[] for _ in range(ranks)]
    for place in sorted(range(len(items)), key=lambda i: (-costs[i], i)):
        load, rank = heapq.heappop(loads)
        shares[rank].append(place)
        heapq.heappush(loads, (load + costs[place], rank))
    return [[items[place] for place in sorted(share)] for share in shares]
