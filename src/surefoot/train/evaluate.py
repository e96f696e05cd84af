"""Loss and accuracy over an evaluation set, as token means over the whole set."""

from __future__ import annotations

import math
import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from surefoot.data.batch import pack, split_into_passes
from surefoot.data.messages import Sample
from surefoot.errors import UserError
from surefoot.model.forward import LossForward

if TYPE_CHECKING:
    from surefoot.data.table import TokenTable


@dataclass(frozen=True)
class EvalNumbers:
    """What an evaluation found.

    Attributes:
        loss: mean over the set's trained tokens, in nats; may be NaN or infinite.
        accuracy: share of trained tokens that are predicted first.
        tokens: real tokens in the set.
        samples: items in the set.
        seconds: that it took.
    """

    loss: float
    accuracy: float
    tokens: int
    samples: int
    seconds: float

    @property
    def finite(self) -> bool:
        """True when the loss is a number."""
        return math.isfinite(self.loss)


@torch.no_grad()
def evaluate(forward: LossForward, table: TokenTable, device: str, tokens_per_pass: int) -> EvalNumbers:
    """Run a whole evaluation set through the model.

    Args:
        forward: the model's forward; it is put into evaluation mode and back.
        table: the encoded evaluation items.
        device: where the model lives, as torch names it.
        tokens_per_pass: most tokens in one pass.

    Returns:
        The numbers.

    Raises:
        UserError: no token of the set carries a label.
    """
    began = time.perf_counter()
    was_training = forward.model.training
    forward.model.eval()
    loss = torch.zeros((), dtype=torch.float64)
    correct = trained = tokens = 0
    try:
        for samples in _groups(table, tokens_per_pass):
            batch = pack(samples).to(device)
            tokens += batch.tokens
            if batch.targets_K.numel() == 0:
                continue
            sums = forward(batch)
            loss += sums.loss.double().cpu()
            correct += int(sums.correct)
            trained += batch.targets_K.numel()
    finally:
        forward.model.train(was_training)
    if not trained:
        hint = "give it rows with answers that cutoff_len leaves room for"
        raise UserError("no token of the evaluation set carries a label", hint=hint, key="eval_dataset")
    return EvalNumbers(float(loss) / trained, correct / trained, tokens, len(table), time.perf_counter() - began)


def _groups(table: TokenTable, tokens_per_pass: int, read_at_once: int = 256) -> Iterator[list[Sample]]:
    for start in range(0, len(table), read_at_once):
        samples = [table[i] for i in range(start, min(start + read_at_once, len(table)))]
        yield from split_into_passes(samples, tokens_per_pass)
