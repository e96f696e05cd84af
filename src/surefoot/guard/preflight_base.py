"""What the checks before step 1 share: the finding, few tokens to try things on, and quiet ways to run the model."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from surefoot.data.batch import count_trained, next_token_targets, pack, split_into_passes
from surefoot.data.messages import IGNORE_INDEX, Sample
from surefoot.guard.diagnosis import Diagnosis
from surefoot.guard.scene import Scene
from surefoot.model.quantized import holds_numbers
from surefoot.model.randomness import set_random_state

if TYPE_CHECKING:
    from surefoot.guard.plan import Change

# Gradient values taken of each trained tensor: enough to compare two gradients, small for any model.
SAMPLED_VALUES = 4096


@dataclass(frozen=True)
class Finding:
    """A fault found before the first step.

    Attributes:
        diagnosis: what it is, with its evidence; step 0.
        action: what the cure does, or what the person should do.
        serious: True when training on makes no sense.
        cure: heals it in place when it is called; None when the guard cannot.
        changes: of the precision plan that were tried and cure it.
    """

    diagnosis: Diagnosis
    action: str
    serious: bool
    cure: Callable[[], None] | None = None
    changes: tuple[Change, ...] = ()


def few_tokens(samples: Sequence[Sample], limit: int) -> tuple[Sample, ...]:
    """Choose the step's shortest samples that hold trained tokens, up to a number of tokens.

    Args:
        samples: of a step; at least one holds a trained token.
        limit: most tokens in all. When the shortest sample alone is longer, a stretch around its first trained
            token stands for it.

    Returns:
        At least one sample, in the step's order.
    """
    useful = [sample for sample in samples if count_trained([sample])]
    chosen: set[int] = set()
    used = 0
    for place in sorted(range(len(useful)), key=lambda i: (len(useful[i].input_ids), i)):
        if used + len(useful[place].input_ids) > limit:
            break
        chosen.add(place)
        used += len(useful[place].input_ids)
    if chosen:
        return tuple(useful[place] for place in sorted(chosen))
    return (shortened(min(useful, key=lambda sample: len(sample.input_ids)), limit),)


def shortened(sample: Sample, limit: int) -> Sample:
    """Cut one row's stretch around its first trained token out of a sample.

    Args:
        sample: holds a trained token.
        limit: most tokens.

    Returns:
        A sample of one segment, with a trained token.
    """
    first = int(np.flatnonzero(next_token_targets(sample) != IGNORE_INDEX)[0])
    ends = np.cumsum(sample.segments)
    segment = int(np.searchsorted(ends, first, side="right"))
    start, end = int(ends[segment]) - sample.segments[segment], int(ends[segment])
    start = max(start, first - limit // 2)
    end = min(end, start + limit)
    row_ids = sample.row_ids[segment : segment + 1] or sample.row_ids[:1]
    return Sample(row_ids, sample.input_ids[start:end], sample.labels[start:end], (end - start,))


@contextlib.contextmanager
def evaluating(model: Any) -> Generator[None, None, None]:
    """Run the model without dropout, noise and recomputation for a while; every module's mode is put back."""
    modes = [(module, module.training) for module in model.modules()]
    model.eval()
    try:
        yield
    finally:
        for module, training in modes:
            module.training = training


@torch.no_grad()
def mean_loss(scene: Scene, samples: Sequence[Sample]) -> float:
    """Compute the token-mean loss of some samples, forward only.

    Args:
        scene: the step; its model should be in evaluation mode.
        samples: hold at least one trained token.

    Returns:
        The loss, in nats.
    """
    losses = []
    for group in split_into_passes(samples, scene.tokens_per_pass):
        batch = pack(group).to(scene.device)
        if batch.targets_K.numel():
            losses.append(scene.forward(batch).loss)
    return float(torch.stack(losses).sum()) / count_trained(samples)


def sampled_gradient(scene: Scene, parts: Sequence[Sequence[Sample]]) -> tuple[float, torch.Tensor]:
    """Run parts of a step one after the other and add up what they give.

    Args:
        scene: the step; the loss is a mean over all of its trained tokens.
        parts: samples of each part; each part starts from the step's random numbers.

    Returns:
        The parts' losses together, in nats, and some thousand values of each trained tensor's gradient, unscaled, in
        float32 one after the other. No gradient is left behind.
    """
    loss, total = 0.0, None
    quiet = replace(scene, before_pass=None)
    for samples in parts:
        set_random_state(scene.random_state, scene.device)
        loss += float(torch.stack(quiet.run_passes(samples).losses).sum())
        picked = [_some(p) for p in scene.trained_parameters().values()]
        gradient = torch.cat([values.to(picked[0].device) for values in picked]) / scene.loss_scale
        total = gradient if total is None else total + gradient
        scene.model.zero_grad(set_to_none=True)
    assert total is not None
    return loss, total


def difference(one: torch.Tensor, other: torch.Tensor) -> float:
    """Return how far two gradients lie apart, as a share of the larger one's length; NaN when one is not finite."""
    longest = max(float(one.norm()), float(other.norm()))
    return float((one - other).norm()) / longest if longest else 0.0


def compute_dtype(scene: Scene) -> torch.dtype:
    """Return the dtype of the model's matrix products."""
    if scene.forward.autocast is not None:
        return scene.forward.autocast
    floats = [p.dtype for p in scene.forward.model.parameters() if holds_numbers(p)]
    return min(floats, key=lambda dtype: dtype.itemsize)


def ranges(numbers: Sequence[int]) -> str:
    """Write whole numbers for people, consecutive ones as a range: "3, 50-59"."""
    pieces: list[list[int]] = []
    for number in sorted(numbers):
        if pieces and number == pieces[-1][1] + 1:
            pieces[-1][1] = number
        else:
            pieces.append([number, number])
    return ", ".join(str(a) if a == b else f"{a}-{b}" for a, b in pieces)


def _some(parameter: torch.nn.Parameter) -> torch.Tensor:
    source = parameter if parameter.grad is None else parameter.grad
    flat = source.detach().reshape(-1)
    # An odd stride, so that it does not fall in step with the columns.
    values = flat[:: max(1, flat.numel() // SAMPLED_VALUES) | 1].float()
    return torch.zeros_like(values) if parameter.grad is None else values
