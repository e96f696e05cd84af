"""The check of an optimizer step: computed on the device before the update, read by the host when it is there."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field

import torch

from surefoot.data.messages import Sample
from surefoot.errors import WorkError
from surefoot.guard.consensus import FLAGS, Flagged, first_to_blame, read_flags


@dataclass(frozen=True)
class StepCheck:
    """What an optimizer step looked like.

    Attributes:
        step: the step, counted from 1.
        pass_losses: loss of each pass over the step's trained tokens, in nats; they add up to the step's loss.
        pass_rows: the row ids of each pass.
        grad_norm: L2 norm of the gradient, unscaled and before clipping.
        norms: the same of each trained tensor, by parameter name.
        loss_scale: the factor that was on the loss.
        weights_finite: False when the update itself made a weight that is not a number.
        state_changed: weights or moments were others right before the update than right after the last one; the
            gate was closed on them.
        moments_lost: the update left moments smaller than it can have made them.
        chance: what the loss would be on average with labels drawn by lot, in nats; 0 when it is not known.
        samples: that made the step.
        flagged: which of several ranks found what; empty with one.
    """

    step: int
    pass_losses: tuple[float, ...]
    pass_rows: tuple[tuple[str, ...], ...]
    grad_norm: float
    norms: dict[str, float]
    loss_scale: float
    weights_finite: bool = True
    state_changed: bool = False
    moments_lost: bool = False
    chance: float = 0.0
    samples: tuple[Sample, ...] = ()
    flagged: Flagged = field(default_factory=dict)

    @property
    def leader(self) -> int:
        """The rank that looks for the cause of a fault: the first one that has it."""
        return first_to_blame(self.flagged)

    @property
    def loss(self) -> float:
        """Token-mean loss of the step, in nats."""
        return sum(self.pass_losses)

    @property
    def loss_finite(self) -> bool:
        """True when every pass's loss is a number."""
        return all(math.isfinite(loss) for loss in self.pass_losses)

    @property
    def finite(self) -> bool:
        """True when the gate let the update through."""
        return self.loss_finite and math.isfinite(self.grad_norm)

    @property
    def bad_tensors(self) -> list[str]:
        """Names of the trained tensors whose gradient is not finite."""
        return [name for name, norm in self.norms.items() if not math.isfinite(norm)]

    @property
    def bad_passes(self) -> list[tuple[str, ...]]:
        """The row ids of each pass whose loss is not finite."""
        pairs = zip(self.pass_losses, self.pass_rows, strict=True)
        return [rows for loss, rows in pairs if not math.isfinite(loss)]

    def describe(self) -> str:
        """Say in a few sentences what was not finite."""
        parts = [f"step {self.step} is not finite: loss {self.loss:g}, grad norm {self.grad_norm:g}."]
        bad = self.bad_tensors
        if bad:
            clean = len(self.norms) - len(bad)
            parts.append(f"{len(bad)} of {len(bad) + clean} trained tensors have bad gradients, first {bad[0]}.")
        for rows in self.bad_passes:
            parts.append(f"The loss is not finite over the rows {shown(rows)}.")
        return " ".join(parts)


class NonFiniteStepError(WorkError):
    """A step was not finite and could not be healed; it was not applied."""


@dataclass
class DeviceCheck:
    """A step's losses, norms and verdict while they are still on the device.

    Attributes:
        step: the step, counted from 1.
        names: of the trained tensors that have a gradient.
        rows: the row ids of each pass.
        loss_scale: the factor that was on the loss.
        losses_P: share of each pass in the step's loss, float32 [passes].
        norms_N: L2 norm of each tensor's gradient, without the scale, float32 [tensors].
        norm: L2 norm of all of them, float32 scalar.
        bad: 1.0 when the step must not be applied, else 0.0; float32 scalar, as fused optimizers want `found_inf`.
        weights_bad: 1.0 when the update made a weight that is not finite; float32 scalar.
        state_changed: 1.0 when the state was changed between two updates; float32 scalar.
        moments_lost: 1.0 when the update left moments smaller than it can have made them; float32 scalar.
        clip: what the unscaled gradients were multiplied by; float32 scalar.
        chance: what the step's loss would be with labels drawn by lot; float32 scalar, 0 when it is not known.
        samples: that made the step.
        flags_FR: what each of several ranks has found before the gradients were summed, float32 [flags, ranks].
    """

    step: int
    names: list[str]
    rows: list[tuple[str, ...]]
    loss_scale: float
    losses_P: torch.Tensor
    norms_N: torch.Tensor
    norm: torch.Tensor
    bad: torch.Tensor
    weights_bad: torch.Tensor
    state_changed: torch.Tensor
    moments_lost: torch.Tensor
    clip: torch.Tensor
    chance: torch.Tensor
    samples: tuple[Sample, ...] = ()
    flags_FR: torch.Tensor | None = None
    _copied: tuple[torch.Tensor, torch.cuda.Event | None] | None = None

    def start_reading(self, gather: Callable[[torch.Tensor], torch.Tensor] | None = None) -> None:
        """Start the copy to the host, without waiting for it.

        Args:
            gather: collects a vector of every rank, [ranks, numbers]; None with one. All ranks then read the first
                one's numbers, and who found what.
        """
        numbers = torch.cat(
            [self.losses_P, self.norms_N,
             torch.stack([self.norm, self.weights_bad, self.state_changed, self.moments_lost, self.chance])]
        )  # fmt: skip
        if gather is not None:
            assert self.flags_FR is not None
            all_RN = gather(numbers)
            numbers = torch.cat([all_RN[0], self.flags_FR.flatten(), all_RN[:, -4:-1].t().flatten()])
        if numbers.device.type != "cuda":
            self._copied = (numbers, None)
            return
        on_host = torch.empty(numbers.shape, dtype=numbers.dtype, pin_memory=True)
        on_host.copy_(numbers, non_blocking=True)
        event = torch.cuda.Event()
        event.record()
        self._copied = (on_host, event)

    def read(self) -> StepCheck:
        """Wait for the numbers and return them."""
        if self._copied is None:
            self.start_reading()
        assert self._copied
        numbers, event = self._copied
        if event is not None:
            event.synchronize()
        values = numbers.tolist()
        passes, tensors = len(self.losses_P), len(self.norms_N)
        losses, norms = values[:passes], values[passes : passes + tensors]
        norm, weights_bad, state_changed, moments_lost, chance, *flags = values[passes + tensors :]
        flagged: dict[str, tuple[int, ...]] = {}
        if self.flags_FR is not None:
            flagged = read_flags((*FLAGS, "weights", "state", "moments"), flags, self.flags_FR.shape[1])
            weights_bad, state_changed, moments_lost = (n in flagged for n in ("weights", "state", "moments"))
        return StepCheck(
            self.step,
            tuple(losses),
            tuple(self.rows),
            norm,
            dict(zip(self.names, norms, strict=True)),
            self.loss_scale,
            weights_finite=not weights_bad,
            state_changed=bool(state_changed),
            moments_lost=bool(moments_lost),
            chance=chance,
            samples=self.samples,
            flagged=flagged,
        )


def check_gradients(
    step: int,
    trained: dict[str, torch.nn.Parameter],
    losses: list[torch.Tensor],
    rows: list[tuple[str, ...]],
    loss_scale: float,
) -> DeviceCheck:
    """Judge a step's losses and gradients without reading anything back.

    The norms are taken in float32: a float16 norm overflows at sums that are no fault. They are those that clipping
    needs anyway, and each says whether its tensor is finite.

    Args:
        step: the step, counted from 1.
        trained: the trained parameters by name, with scaled gradients.
        losses: share of each pass in the step's loss, scalars.
        rows: the row ids of each pass.
        loss_scale: that the gradients still carry.

    Returns:
        The verdict, on the device.
    """
    named = [(name, p.grad) for name, p in trained.items() if p.grad is not None]
    norms_N = torch.stack(torch._foreach_norm([grad for _, grad in named], 2.0, dtype=torch.float32))
    return check_norms(step, [name for name, _ in named], norms_N, losses, rows, loss_scale)


def check_norms(
    step: int,
    names: list[str],
    norms_N: torch.Tensor,
    losses: list[torch.Tensor],
    rows: list[tuple[str, ...]],
    loss_scale: float,
) -> DeviceCheck:
    """Judge a step's losses and the norms of its gradients without reading anything back.

    Args:
        step: the step, counted from 1.
        names: of the trained tensors that have a gradient.
        norms_N: L2 norms of those, with the loss scale on them, float32 [tensors].
        losses: share of each pass in the step's loss, scalars.
        rows: the row ids of each pass.
        loss_scale: that the norms still carry.

    Returns:
        The verdict, on the device.
    """
    losses_P = torch.stack([loss.float() for loss in losses])
    norms_N = norms_N / loss_scale
    norm = torch.linalg.vector_norm(norms_N)
    bad = (~(norm.isfinite() & losses_P.isfinite().all())).float()
    none = torch.zeros_like(bad)
    return DeviceCheck(
        step, names, rows, loss_scale, losses_P, norms_N, norm, bad,
        weights_bad=none, state_changed=none, moments_lost=none, clip=torch.ones_like(norm), chance=none,
    )  # fmt: skip


def shown(rows: tuple[str, ...] | list[str], most: int = 8) -> str:
    """Write row ids for a sentence, the first few of many."""
    return ", ".join(rows[:most]) + (f" and {len(rows) - most} more" if len(rows) > most else "")
