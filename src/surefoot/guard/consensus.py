"""All ranks decide alike about a step, from one sum over all of them.

Each rank adds its share to a small float64 vector: its squared gradient norm when it is finite, whether it is bad, its
own place in a bit mask, and a count for each reason. All ranks read the same sums, so that they take the same branch
without another word; a rank whose computation raised still takes part, or the others would wait for it for ever.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, get_args

import torch
import torch.distributed as dist

Reason = Literal["loss", "gradient", "exception"]
REASONS: tuple[Reason, ...] = get_args(Reason)
# A float64 counts exactly to 2^53: that many ranks have a bit of their own in one word.
RANKS_PER_WORD = 50


@dataclass(frozen=True)
class Verdict:
    """What all ranks agree on about a step.

    Attributes:
        bad: True when any rank's share of the step is not usable.
        ranks: the bad ranks.
        reasons: what was wrong, over all of them.
        norm: root of the finite ranks' summed squared norms. That is the step's gradient norm when each rank holds
            a shard of the gradient; for whole copies, hand in the squared norm divided by the number of ranks.
    """

    bad: bool
    ranks: tuple[int, ...]
    reasons: tuple[Reason, ...]
    norm: float

    @property
    def decision(self) -> Literal["APPLY", "REPLAY"]:
        """What every rank does next: apply the update, or run the step again with all others to find the cause."""
        return "REPLAY" if self.bad else "APPLY"


def payload(
    rank: int, ranks: int, square_norm: torch.Tensor, reasons: Mapping[Reason, torch.Tensor | bool]
) -> torch.Tensor:
    """Write one rank's share of the sums; nothing is read from the device.

    Args:
        rank: this rank.
        ranks: how many there are.
        square_norm: sum of this rank's squared gradients, scalar of any float dtype on any device.
        reasons: which reasons hold here, as bools on the host or the device; a norm that is not finite is added.

    Returns:
        float64 [2 + words + reasons] on the norm's device: square sum, bad ranks, bit mask, count of each reason.
    """
    square = square_norm.detach().double()
    found = dict(reasons)
    found["gradient"] = torch.as_tensor(found.get("gradient", False), device=square.device) | ~square.isfinite()
    counts = torch.stack([torch.as_tensor(found.get(name, False), device=square.device) for name in REASONS]).double()
    bad = counts.amax()
    mask = torch.zeros(math.ceil(ranks / RANKS_PER_WORD), dtype=torch.float64, device=square.device)
    mask[rank // RANKS_PER_WORD] = bad * 2.0 ** (rank % RANKS_PER_WORD)
    # A select: a product with 0 would keep the NaN.
    usable = torch.where(bad == 0, square, torch.zeros_like(square))
    return torch.cat([usable[None], bad[None], mask, counts])


def read_verdict(sums: Sequence[float]) -> Verdict:
    """Read what the summed payloads say.

    Args:
        sums: of all ranks' payloads, read from the device.

    Returns:
        The verdict: the same on every rank, since the sums are.
    """
    square, bad, *rest = sums
    words, counts = rest[: -len(REASONS)], rest[-len(REASONS) :]
    ranks = tuple(
        place * RANKS_PER_WORD + bit
        for place, word in enumerate(words)
        for bit in range(RANKS_PER_WORD)
        if int(word) >> bit & 1
    )
    reasons = tuple(name for name, count in zip(REASONS, counts, strict=True) if count)
    return Verdict(bad > 0, ranks, reasons, math.sqrt(square))


def agree(square_norm: torch.Tensor, reasons: Mapping[Reason, torch.Tensor | bool], group: Any = None) -> Verdict:
    """Decide about a step together with all other ranks: one all-reduce and one read.

    Args:
        square_norm: sum of this rank's squared gradients, scalar on a device that the group's backend can sum on.
        reasons: which reasons hold here.
        group: the process group; None for all ranks.

    Returns:
        The verdict, the same on every rank. Without a process group, this process's own.
    """
    if not (dist.is_available() and dist.is_initialized()):
        return read_verdict(payload(0, 1, square_norm, reasons).tolist())
    sums = payload(dist.get_rank(group), dist.get_world_size(group), square_norm, reasons)
    dist.all_reduce(sums, group=group)
    return read_verdict(sums.tolist())


def attempt(
    compute: Callable[[], None], parameters: Iterable[torch.nn.Parameter]
) -> tuple[dict[Reason, torch.Tensor | bool], Exception | None]:
    """Compute this rank's gradients; if that raises, leave zero gradients and the reason instead.

    The other ranks wait in the step's collectives for this one. With zeros in place of its gradients it can take part
    in all of them, and raise once everybody knows.

    Args:
        compute: leaves gradients in the parameters; holds no collective itself.
        parameters: those that are trained.

    Returns:
        The reasons for `agree`, and what was raised; the caller raises it after the verdict.
    """
    try:
        compute()
    except Exception as error:  # noqa: BLE001 - whatever this rank died of, the others must hear of it before it is raised
        for parameter in parameters:
            parameter.grad = torch.zeros_like(parameter)
        return {"exception": True}, error
    return {}, None
