"""A moment of all-reduces before a model is loaded: are the sums right, and how fast are the links?

Sizes grow eightfold, so that every protocol of NCCL and RCCL is met: they take another one for small tensors. Each rank
checks every element. How long it may go on is agreed on by the slowest rank's clock, so that all do the same rounds.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from surefoot.errors import WorkError

if TYPE_CHECKING:
    import torch

    from surefoot.train.ranks import Ranks

SMALLEST, GROWTH = 256, 8  # float32 elements: 1 KiB, 8 KiB ...
LARGEST = {"cpu": 2**20, "cuda": 2**26}  # elements: 4 MiB, 256 MiB
SECONDS = {"cpu": 0.5, "cuda": 2.0}
ROUNDS = 20  # at most, of the largest size
LATENCY_ROUNDS = 3  # of the smallest size
RESIDUES = 127  # with up to 2,048 ranks every sum is a whole number below 2**24, which float32 holds exactly
LATE = 30.0  # seconds after which a person is told that something hangs; `ddp_timeout` ends it
STUCK = (
    "If it hangs: `surefoot doctor` (IOMMU, PCIe ACS, shared memory), NCCL_DEBUG=INFO, or NCCL_P2P_DISABLE=1 to see "
    "whether it is the way between the cards."
)
LOW_SHARE = 0.5  # of what the links should give: below it a person is told


@dataclass(frozen=True)
class LinkSpeed:
    """What the test found.

    Attributes:
        ranks: how many took part.
        latency: seconds of a 1 KiB all-reduce.
        bytes: of the largest tensor that was summed.
        seconds: one all-reduce of it took, on the slowest rank.
        took: seconds of the whole test.
    """

    ranks: int
    latency: float
    bytes: int
    seconds: float
    took: float

    @property
    def algorithm_gbs(self) -> float:
        """Bytes of the tensor over the time, 10⁹ a second."""
        return self.bytes / self.seconds / 1e9

    @property
    def bus_gbs(self) -> float:
        """What each link carried, as nccl-tests counts it: 2 (n - 1) / n of the tensor."""
        return self.algorithm_gbs * 2 * (self.ranks - 1) / self.ranks

    def describe(self) -> str:
        """Say it in one line."""
        size = f"{self.bytes / 2**20:.0f} MiB" if self.bytes >= 2**20 else f"{self.bytes / 1024:.0f} KiB"
        speed = f"{_number(self.bus_gbs)} GB/s bus ({_number(self.algorithm_gbs)} algorithm), "
        if self.bytes <= 4 * SMALLEST:
            speed = "nothing larger in the time that the test has, "
        return (
            f"All-reduce over {self.ranks} processes: sums right up to {size}, {speed}"
            f"latency {self.latency * 1e6:,.0f} us; {self.took:.1f} s."
        )


def test_links(ranks: Ranks, device: str, say: Callable[[str], None]) -> LinkSpeed | None:
    """Sum tensors over all ranks, check the sums and tell how fast it was; one process alone has nothing to test.

    Args:
        ranks: that have met.
        device: of this process.
        say: tells the person.

    Returns:
        What was found; None for one process.

    Raises:
        WorkError: a sum was wrong; the ranks that hold it are named.
    """
    if ranks.alone:
        return None
    late = threading.Timer(LATE, say, [f"The all-reduce test has not come back for {LATE:.0f} s. {STUCK}"])
    late.daemon = True
    late.start()
    try:
        speed = _measure(ranks, device)
    finally:
        late.cancel()
    say(speed.describe())
    for warning in (_too_slow(ranks, speed, device), _without_peers(device)):
        if warning:
            say(warning)
    return speed


def _measure(ranks: Ranks, device: str) -> LinkSpeed:
    import torch

    kind = "cpu" if device == "cpu" else "cuda"
    began = time.monotonic()
    budget, size = SECONDS[kind], SMALLEST
    seconds = _checked(ranks, size, device)  # the first makes the connections, and takes its time for that
    latency = min(_timed(ranks, torch.zeros(size, device=device)) for _ in range(LATENCY_ROUNDS))
    while size < LARGEST[kind] and _agreed(ranks, time.monotonic() - began) + GROWTH * latency < budget:
        seconds = _checked(ranks, size * GROWTH, device)
        size *= GROWTH
        if seconds * GROWTH > budget:
            break
    left = budget - _agreed(ranks, time.monotonic() - began)
    tensor = torch.zeros(size, device=device)
    for _ in range(min(ROUNDS, max(1, int(left / seconds)))):
        seconds = min(seconds, _timed(ranks, tensor))
    del tensor
    if kind == "cuda":
        torch.cuda.empty_cache()  # the model's plan counts on this memory
    return LinkSpeed(ranks.place.world, latency, 4 * size, seconds, time.monotonic() - began)


def pattern(rank: int, size: int, device: str) -> torch.Tensor:
    """What one rank gives: no two ranks the same, and no two neighbouring elements.

    Args:
        rank: which one.
        size: elements.
        device: where.

    Returns:
        float32 [size], whole numbers.
    """
    import torch

    return (torch.arange(size, device=device) % RESIDUES + 1).float() * (rank % RESIDUES + 1)


def _checked(ranks: Ranks, size: int, device: str) -> float:
    """Sum the pattern, look at every element, and return the slowest rank's seconds."""
    import torch

    given = pattern(ranks.place.rank, size, device)
    seconds = _timed(ranks, given)
    factor = sum(rank % RESIDUES + 1 for rank in range(ranks.place.world))
    right = torch.equal(given, pattern(0, size, device) * factor)
    bad = [rank for rank, good in enumerate(ranks.gather(right)) if not good]
    if bad:
        raise WorkError(
            f"an all-reduce of {4 * size:,} bytes gives wrong sums on {', '.join(ranks.names[rank] for rank in bad)}",
            hint="gradients would be wrong as well; run `surefoot doctor` on that machine (IOMMU, PCIe ACS, the "
            "protocol bug of RCCL on gfx950), and try NCCL_P2P_DISABLE=1 or NCCL_PROTO=Simple to see what it is",
        )
    return seconds


def _timed(ranks: Ranks, tensor: torch.Tensor) -> float:
    """Sum a tensor in place; the slowest rank's seconds."""
    import torch
    import torch.distributed as dist

    if tensor.device.type == "cuda":
        torch.cuda.synchronize()
    began = time.perf_counter()
    ranks.wait_for(lambda: dist.all_reduce(tensor))  # `sum_` would time its copies as well
    if tensor.device.type == "cuda":
        torch.cuda.synchronize()
    return _agreed(ranks, time.perf_counter() - began)


def _agreed(ranks: Ranks, seconds: float) -> float:
    """Return the slowest rank's number, the same on all; on the host, so that no collective of the test is timed."""
    import torch

    return float(ranks.spread(torch.tensor([seconds], dtype=torch.float64)).max())


def _too_slow(ranks: Ranks, speed: LinkSpeed, device: str) -> str:
    """Compare with what the cards' links should give, where the table knows it and all are on one machine."""
    if device == "cpu":
        return ""
    import torch

    from surefoot.machine.table import load_table

    hosts = {name.partition("(")[2].partition(",")[0] for name in ranks.names}
    link = load_table().link_of(torch.cuda.get_device_name(device))
    expected = link.bus_gbs(speed.ranks) if link and len(hosts) == 1 else None
    if expected is None or speed.bus_gbs >= LOW_SHARE * expected:
        return ""
    return (
        f"warning: {_number(speed.bus_gbs)} GB/s is far below the {expected:.0f} GB/s that {speed.ranks} of these "
        "cards should reach; run `surefoot doctor` (IOMMU, PCIe ACS, NCCL_P2P_DISABLE)"
    )


def _without_peers(device: str) -> str:
    """Name cards of this machine that cannot reach each other's memory, of those that this process sees."""
    if device == "cpu":
        return ""
    import torch

    cards = range(torch.cuda.device_count())
    apart = [f"{a} and {b}" for a in cards for b in cards if a < b and not torch.cuda.can_device_access_peer(a, b)]
    if not apart:
        return ""
    more = f" and {len(apart) - 3} more pairs" if apart[3:] else ""
    return (
        f"warning: cards {', '.join(apart[:3])}{more} cannot reach each other's memory (no P2P), so that what they "
        "exchange goes through the host; `surefoot doctor` looks at IOMMU and PCIe ACS"
    )


def _number(value: float) -> str:
    return f"{value:.0f}" if value >= 100 else f"{value:.3g}"
