"""One optimizer step: its samples in as few passes as fit, checked before anything is changed."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from surefoot.data.batch import PackedBatch, count_trained, pack, split_into_passes
from surefoot.data.messages import Sample
from surefoot.errors import UserError, WorkError
from surefoot.guard.finite import NonFiniteStepError, StepCheck, gradient_norm, inspect_step
from surefoot.model.forward import LossForward
from surefoot.train.loss_scale import LossScale
from surefoot.train.randomness import get_random_state, set_random_state

MIN_PASS_TOKENS = 16


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
    """

    model: Any
    forward: LossForward
    device: str
    scale: LossScale
    tokens_per_pass: int
    before_pass: Callable[[PackedBatch], None] | None = None
    tell: Callable[[str], None] = print

    def compute_gradients(self, step: int, samples: Sequence[Sample]) -> StepCheck:
        """Leave a step's gradients in the parameters and check them.

        The loss is the mean over all trained tokens of the step, however the samples are laid out in passes. A
        float16 gradient that overflows is computed again with half the loss scale; a pass that does not fit is
        computed again with half the tokens. Both repeat the same random numbers, so nothing is lost.

        Args:
            step: the step, counted from 1.
            samples: those that make it.

        Returns:
            The finite step, with gradients unscaled.

        Raises:
            NonFiniteStepError: the loss or the gradient is not finite at any loss scale.
            UserError: the samples hold no trained token.
            WorkError: the longest sample alone does not fit into memory.
        """
        random_state = get_random_state(self.device)
        while True:
            self.model.zero_grad(set_to_none=True)
            check = self._try(step, samples)
            if check is not None and check.finite:
                self._unscale()
                return check
            if check is not None and not (check.loss_finite and self.scale.lower()):
                raise NonFiniteStepError(check, inspect_step(self.model, check))
            set_random_state(random_state, self.device)

    def _try(self, step: int, samples: Sequence[Sample]) -> StepCheck | None:
        """Run all passes; None when memory ran out and the passes were made smaller."""
        trained = count_trained(samples)
        if trained == 0:
            rows = ", ".join(row for sample in samples for row in sample.row_ids)
            raise UserError(f"step {step} holds no trained token (rows {rows})", hint="check the labels of these rows")
        losses, rows = [], []
        try:
            for group in split_into_passes(samples, self.tokens_per_pass):
                batch = pack(group).to(self.device)
                if batch.targets_K.numel() == 0:
                    continue  # rows without a label in this pass: they add nothing to a token mean
                if self.before_pass:
                    self.before_pass(batch)
                loss = self.forward(batch).loss / trained
                (loss * self.scale.value).backward()
                losses.append(loss.detach())
                rows.append(batch.row_ids)
        except torch.OutOfMemoryError as error:
            self._shrink(samples, error)
            return None
        norm = gradient_norm(self._trained(), self.scale.value)
        # One read of the device for the whole step.
        *losses_read, norm_read = torch.stack([*losses, norm.to(losses[0].device)]).tolist()
        return StepCheck(step, tuple(losses_read), tuple(rows), norm_read, self.scale.value)

    def _shrink(self, samples: Sequence[Sample], error: BaseException) -> None:
        longest = max(len(sample.input_ids) for sample in samples)
        if self.tokens_per_pass <= max(MIN_PASS_TOKENS, longest):
            raise WorkError(
                f"one row of {longest} tokens does not fit into the device's memory",
                hint="lower cutoff_len, or train fewer parameters",
            ) from error
        self.tokens_per_pass = max(MIN_PASS_TOKENS, longest, self.tokens_per_pass // 2)
        self.model.zero_grad(set_to_none=True)
        torch.cuda.empty_cache()
        self.tell(f"Out of memory: going on with {self.tokens_per_pass} tokens a pass; the step is computed again.")

    def _trained(self) -> list[torch.nn.Parameter]:
        return [p for p in self.model.parameters() if p.requires_grad]

    def _unscale(self) -> None:
        if self.scale.enabled:
            grads = [p.grad for p in self._trained() if p.grad is not None]
            torch._foreach_mul_(grads, 1.0 / self.scale.value)
