"""How evenly a step's samples are dealt to ranks: a simulation on lengths like alpaca's.

    python benchmarks/dealing.py [--steps 200] [--width 4096]

Lengths are log-normal, as those of alpaca-like rows are: a median of 70 tokens and a sigma of 0.55 are assumed, cut at
2,048.
A rank's share of a step is what its batch size times its accumulation asks for. Printed is how much longer the slowest
rank's tokens are than the mean, over all steps; dealing round robin, as samplers usually do, stands beside it.
"""

from __future__ import annotations

import argparse

import numpy as np

from surefoot.data.deal import cost_of, deal
from surefoot.data.messages import Sample

MEDIAN, SIGMA, CUTOFF = 70.0, 0.55, 2048
RANKS = (2, 4, 8, 16, 32, 64)
SHARES = (1, 2, 4, 8, 16, 32)
GOAL = 0.05


def lengths_of(rng: np.random.Generator, count: int) -> np.ndarray:
    """Draw lengths of rows, in tokens, int64 [count]."""
    return np.clip(np.exp(rng.normal(np.log(MEDIAN), SIGMA, count)), 8, CUTOFF).astype(np.int64)


def sample_of(length: int) -> Sample:
    """Make a row of a length; what stands in it does not matter."""
    ids = np.zeros(length, dtype=np.int32)
    return Sample(("rows:0",), ids, ids, (length,))


def excess(ranks: int, share: int, steps: int, width: int, seed: int = 0) -> tuple[float, float]:
    """Measure how far the slowest rank is above the mean, in tokens.

    Args:
        ranks: among which to deal.
        share: samples a rank in a step, on average.
        steps: to draw.
        width: of the model.
        seed: of the lengths.

    Returns:
        The mean over all steps of (slowest / mean - 1): dealt by cost, and round robin.
    """
    rng = np.random.default_rng(seed)
    found: list[tuple[float, float]] = []
    for _ in range(steps):
        samples = [sample_of(int(length)) for length in lengths_of(rng, ranks * share)]
        dealt = deal(samples, [cost_of(sample, width) for sample in samples], ranks)
        in_turn = [samples[rank::ranks] for rank in range(ranks)]
        tokens = [[sum(len(s.input_ids) for s in part) for part in way] for way in (dealt, in_turn)]
        found.append(tuple(max(way) / (sum(way) / ranks) - 1 for way in tokens))  # type: ignore[arg-type]
    by_cost, by_turn = np.mean(found, axis=0)
    return float(by_cost), float(by_turn)


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--width", type=int, default=4096)
    asked = parser.parse_args()
    print("slowest rank above the mean, in tokens a step: dealt by cost (round robin)")
    print("ranks " + "".join(f"{f'{share} a rank':>18}" for share in SHARES))
    holds = []
    for ranks in RANKS:
        row = [excess(ranks, share, asked.steps, asked.width) for share in SHARES]
        print(f"{ranks:>5} " + "".join(f"{f'{by_cost:.1%} ({in_turn:.0%})':>18}" for by_cost, in_turn in row))
        good = [share for share, (by_cost, _) in zip(SHARES, row, strict=True) if by_cost <= GOAL]
        holds.append(f"{ranks} ranks from {good[0]} a rank" if good else f"{ranks} ranks: never")
    print(f"within {GOAL:.0%}: {'; '.join(holds)}")


if __name__ == "__main__":
    main()
