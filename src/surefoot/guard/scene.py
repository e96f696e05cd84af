"""One optimizer step as it stood: enough to run its passes again, as they were or under an experiment."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

import torch

from surefoot.data.batch import PackedBatch, count_trained, pack, split_into_passes
from surefoot.data.messages import Sample
from surefoot.model.forward import LossForward
from surefoot.model.randomness import set_random_state


class Watcher(Protocol):
    """Anything that looks on while a step runs again."""

    def pass_started(self, index: int, batch: PackedBatch) -> None:
        """The forward of a pass is about to run."""

    def backward_started(self, index: int, loss: torch.Tensor) -> None:
        """The backward of a pass is about to run from `loss`, a scalar with its graph, the loss scale on it."""


class Passes(NamedTuple):
    """What the passes of a step gave; nothing of it was read back from the device.

    Attributes:
        losses: each pass's share of the step's token-mean loss, unscaled scalars.
        rows: the row ids of each pass.
        chances: the same share of what the loss would be with labels drawn by lot.
    """

    losses: list[torch.Tensor]
    rows: list[tuple[str, ...]]
    chances: list[torch.Tensor]


@dataclass(frozen=True)
class StepLosses:
    """The losses of a step's passes, read by the host.

    Attributes:
        losses: each pass's share of the step's token-mean loss, in nats; they add up to it.
        rows: the row ids of each pass.
    """

    losses: tuple[float, ...]
    rows: tuple[tuple[str, ...], ...]

    @property
    def loss(self) -> float:
        """Token-mean loss of the step, in nats."""
        return sum(self.losses)

    @property
    def loss_finite(self) -> bool:
        """True when every pass's loss is a number."""
        return all(math.isfinite(loss) for loss in self.losses)


@dataclass(frozen=True)
class Rerun(StepLosses):
    """What a step gave when it ran again.

    Attributes:
        peaks: largest absolute value of each trained tensor's unscaled gradient, by parameter name; NaN when it
            holds one. Parameters without a gradient are left out.
        grads: the unscaled gradients by parameter name, float32 on the device; None unless they were asked for.
    """

    peaks: dict[str, float]
    grads: dict[str, torch.Tensor] | None = None

    @property
    def finite(self) -> bool:
        """True when all losses and all gradients are numbers."""
        return self.loss_finite and all(math.isfinite(peak) for peak in self.peaks.values())


@dataclass(frozen=True)
class Scene:
    """An optimizer step before its update, with everything that its numbers depend on but the weights themselves.

    Attributes:
        model: the model, wrapped by PEFT or not.
        forward: how its loss is computed.
        device: where it lives, as torch names it.
        step: the step, counted from 1.
        samples: those that make it.
        tokens_per_pass: most tokens in one pass.
        loss_scale: the factor on the loss.
        random_state: of all generators at the step's start, from `get_random_state`.
        before_pass: called with each batch before it runs (NEFTune hears of the rows' lengths).
        step_tokens: trained tokens of the whole step where `samples` are one rank's share; None when they are all.
    """

    model: Any
    forward: LossForward
    device: str
    step: int
    samples: tuple[Sample, ...]
    tokens_per_pass: int
    loss_scale: float
    random_state: dict[str, Any]
    before_pass: Callable[[PackedBatch], None] | None = None
    step_tokens: int | None = None

    @property
    def trained_tokens(self) -> int:
        """Tokens that carry loss in the whole step: the loss is a mean over them."""
        return count_trained(self.samples) if self.step_tokens is None else self.step_tokens

    def trained_parameters(self) -> dict[str, torch.nn.Parameter]:
        """Return the trained parameters by name, as the model names them."""
        return {name: p for name, p in self.model.named_parameters() if p.requires_grad}

    def run_passes(
        self,
        samples: Sequence[Sample] | None = None,
        loss_scale: float | None = None,
        watcher: Watcher | None = None,
    ) -> Passes:
        """Run forward and backward of every pass; the scaled gradients are left in the parameters.

        Args:
            samples: part of the step's samples; None for all. The loss stays a mean over the whole step's tokens.
            loss_scale: instead of the step's own.
            watcher: told of each pass.

        Returns:
            What they gave.

        Raises:
            torch.OutOfMemoryError: a pass does not fit.
        """
        trained = self.trained_tokens
        scale = self.loss_scale if loss_scale is None else loss_scale
        self.model.zero_grad(set_to_none=True)
        passes = Passes([], [], [])
        for group in split_into_passes(self.samples if samples is None else samples, self.tokens_per_pass):
            batch = pack(group, self.forward.round_to).to(self.device)
            if batch.targets_K.numel() == 0:
                continue  # rows without a label in this pass: they add nothing to a token mean
            if self.before_pass:
                self.before_pass(batch)
            if watcher:
                watcher.pass_started(len(passes.losses), batch)
            sums = self.forward(batch)
            loss = sums.loss / trained
            scaled = loss * scale
            if watcher:
                watcher.backward_started(len(passes.losses), scaled)
            scaled.backward()
            passes.losses.append(loss.detach())
            passes.rows.append(batch.row_ids)
            passes.chances.append(sums.chance / trained)
        return passes

    def rerun(
        self,
        *,
        samples: Sequence[Sample] | None = None,
        loss_scale: float | None = None,
        keep_grads: bool = False,
        watcher: Watcher | None = None,
    ) -> Rerun:
        """Run the step again from its own random numbers; no weight changes and no gradient is left behind.

        Args:
            samples: part of the step's samples; None for all.
            loss_scale: instead of the step's own.
            keep_grads: return the gradients.
            watcher: told of each pass.

        Returns:
            What came out.
        """
        set_random_state(self.random_state, self.device)
        losses, rows, _ = self.run_passes(samples, loss_scale, watcher)
        scale = self.loss_scale if loss_scale is None else loss_scale
        named = {name: p.grad for name, p in self.trained_parameters().items() if p.grad is not None}
        peaks = torch._foreach_norm(list(named.values()), float("inf"), dtype=torch.float32) if named else ()
        grads = {name: grad.float() / scale for name, grad in named.items()} if keep_grads else None
        self.model.zero_grad(set_to_none=True)
        return Rerun(
            tuple(torch.stack(losses).tolist()) if losses else (),
            tuple(rows),
            dict(zip(named, (torch.stack(list(peaks)) / scale).tolist() if peaks else (), strict=True)),
            grads,
        )
