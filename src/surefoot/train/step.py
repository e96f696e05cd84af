"""One optimizer step: its samples in as few passes as fit, checked on the device before anything is changed."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from surefoot.data.batch import PackedBatch, split_into_passes
from surefoot.data.messages import Sample
from surefoot.errors import WorkError
from surefoot.guard.check import DeviceCheck, check_gradients
from surefoot.guard.scene import Scene
from surefoot.model.forward import LossForward
from surefoot.model.memory import MemoryPlan
from surefoot.model.randomness import get_random_state, set_random_state
from surefoot.train.loss_scale import LossScale

MIN_PASS_TOKENS = 16


@dataclass(frozen=True)
class Attempt:
    """A step whose gradients stand in the parameters, not applied yet.

    Attributes:
        scene: what it takes to compute it again.
        check: the verdict on it, on the device.
    """

    scene: Scene
    check: DeviceCheck


@dataclass
class StepRunner:
    """What turns a step's samples into gradients.

    Attributes:
        model: the model, wrapped by PEFT or not.
        forward: how its loss is computed.
        device: where it lives, as torch names it.
        scale: the loss scale.
        tokens_per_pass: most tokens in one pass; halved when memory runs out.
        before_pass: called with each batch before it runs (NEFTune hears of the rows' lengths).
        tell: called with a sentence for the person.
        plan: of its memory.
        recompute_more: called when the longest row alone does not fit; returns False when it can do nothing.
        largest_pass: tokens of the largest pass that was run, and fitted.
        most_passes: of a step that was run.
        trained: the trained parameters by name.
    """

    model: Any
    forward: LossForward
    device: str
    scale: LossScale
    tokens_per_pass: int
    before_pass: Callable[[PackedBatch], None] | None = None
    tell: Callable[[str], None] = print
    plan: MemoryPlan | None = None
    recompute_more: Callable[[], bool] | None = None
    largest_pass: int = 0
    most_passes: int = 0
    trained: dict[str, torch.nn.Parameter] = field(init=False)

    def __post_init__(self) -> None:
        self.trained = {name: p for name, p in self.model.named_parameters() if p.requires_grad}

    def compute(self, step: int, samples: Sequence[Sample]) -> Attempt:
        """Leave a step's scaled gradients in the parameters, and their verdict on the device.

        The loss is the mean over all trained tokens of the step, however the samples are laid out in passes. A pass
        that does not fit is computed again with half the tokens and the same random numbers.

        Args:
            step: the step, counted from 1.
            samples: those that make it; at least one trained token among them.

        Returns:
            The attempt; nothing of it was read back from the device.

        Raises:
            WorkError: the longest sample alone does not fit into memory.
        """
        random_state = get_random_state(self.device)
        while True:
            scene = Scene(
                self.model, self.forward, self.device, step, tuple(samples), self.tokens_per_pass, self.scale.value,
                random_state, self.before_pass,
            )  # fmt: skip
            try:
                passes = scene.run_passes()
            except torch.OutOfMemoryError as error:
                self._shrink(samples, error)
                set_random_state(random_state, self.device)
                continue
            self._remember(samples)
            check = check_gradients(step, self.trained, passes.losses, passes.rows, self.scale.value)
            check.chance, check.samples = torch.stack(passes.chances).sum(), scene.samples
            return Attempt(scene, check)

    def finish_gradients(self, check: DeviceCheck, max_norm: float | None) -> None:
        """Take the loss scale off the gradients and clip them, on the device.

        Args:
            check: of the attempt whose gradients stand in the parameters.
            max_norm: longest gradient that is let through; None or 0 for no clipping.
        """
        grads = [p.grad for p in self.trained.values() if p.grad is not None]
        factor = torch.ones_like(check.norm)
        if max_norm and max_norm > 0:
            factor = (max_norm / (check.norm + 1e-6)).clamp_(max=1.0)  # as torch.nn.utils.clip_grad_norm_
            check.clip = factor
        elif not self.scale.enabled:
            return
        torch._foreach_mul_(grads, factor / check.loss_scale)

    def _shrink(self, samples: Sequence[Sample], error: BaseException) -> None:
        longest = max(len(sample.input_ids) for sample in samples)
        if self.tokens_per_pass > max(MIN_PASS_TOKENS, longest):
            self.tokens_per_pass = max(MIN_PASS_TOKENS, longest, self.tokens_per_pass // 2)
            remedy = f"{self.tokens_per_pass} tokens a pass"
        elif self.recompute_more is not None and self.recompute_more():
            remedy = "all decoder layers recomputed in the backward pass"
        else:
            raise WorkError(
                f"one row of {longest} tokens does not fit into the device's memory",
                hint="lower cutoff_len, or train fewer parameters",
            ) from error
        self.model.zero_grad(set_to_none=True)
        torch.cuda.empty_cache()
        self.tell(f"Out of memory: going on with {remedy}; the step is computed again.")

    def _remember(self, samples: Sequence[Sample]) -> None:
        passes = split_into_passes(samples, self.tokens_per_pass)
        self.largest_pass = max(self.largest_pass, *(sum(len(s.input_ids) for s in group) for group in passes))
        self.most_passes = max(self.most_passes, len(passes))
