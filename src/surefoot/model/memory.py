"""How much memory a run needs, how many tokens one pass may therefore hold, and which layers are computed again.

Pure arithmetic on shapes, without torch. What a real run uses is measured by it, and said where the two differ.
"""

from __future__ import annotations

import math
import os
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

from surefoot.errors import UserError
from surefoot.model.activations import FLOAT32, LayerBytes, Numerics, end_bytes, layer_bytes
from surefoot.model.shapes import Shapes

GIB = 2**30
# Share of the free memory that the plan spends; the rest is for fragmentation and what the estimate misses.
SPENT_SHARE = 0.9
# A CPU gains nothing from passes beyond this, and loses its caches.
CPU_TOKENS = 8192
# Planned with where the system says nothing of its memory (Windows); `memory` in the YAML overrides the plan.
UNKNOWN_MEMORY = 4 * GIB
# Bytes of state for each trained number, by the YAML's `optim`: float32 moments. Adafactor keeps rows and columns only.
OPTIMIZER_BYTES = {"adamw_torch": 8, "adamw_torch_fused": 8, "adagrad": 4, "rmsprop": 4, "sgd": 0, "adafactor": 0}
LOSS_CHUNK_BYTES = 256 * 2**20  # of float32 logits, as `loss.CHUNK_BYTES`
LOSS_CHUNK_ROWS = 64  # at least, as `loss.MIN_CHUNK_ROWS`
# What a pass costs beside its tokens, in tokens: reading the weights twice takes as long as about 120 tokens of an 8B
# model on an H200 (16 GB at 4 TB/s against 67 us a token); small products and launches are counted as much again.
PASS_OVERHEAD = 256
OFFLOAD_COST = 1.0  # forward passes: waiting for the host; only ever compared with not fitting at all


@dataclass(frozen=True)
class Choice:
    """What is not kept for the backward pass.

    Attributes:
        layers: decoder layers that are computed again, the first ones.
        mlps: layers after them whose MLP alone is computed again.
        offload: whether the inputs of recomputed layers wait in the host's memory; such layers run uncompiled.
    """

    layers: int = 0
    mlps: int = 0
    offload: bool = False


@dataclass(frozen=True)
class MemoryModel:
    """Bytes that a run takes.

    Attributes:
        shapes: sizes of the model.
        how: what its activations depend on.
        frozen_bytes: of all weights that are not trained.
        trained: numbers that are trained.
        optimizer_bytes: of state for each of them.
        alive_layers: layers that keep anything: those below the first trained weight do not.
        trained_head: whether the head is trained.
        cast_head: whether the head is held wider than it multiplies.
        dequantized: numbers in the largest frozen matrix that is unpacked at each use; 0 without quantisation.
        chunked: whether the loss is made in chunks; else all logits of a pass are.
    """

    shapes: Shapes
    how: Numerics
    frozen_bytes: float
    trained: int
    optimizer_bytes: int
    alive_layers: int
    trained_head: bool = False
    cast_head: bool = False
    dequantized: int = 0
    chunked: bool = True

    @cached_property
    def _layer(self) -> LayerBytes:
        return layer_bytes(self.shapes, self.how)

    @cached_property
    def _eager_layer(self) -> LayerBytes:
        return layer_bytes(self.shapes, replace(self.how, compiled=False))

    @property
    def trained_bytes(self) -> float:
        """Float32 masters and gradients, and the optimizer's state."""
        return (2 * FLOAT32 + self.optimizer_bytes) * self.trained

    def activation_bytes(self, tokens: int, choice: Choice, longest: int) -> float:
        """Compute what the decoder keeps in one pass, and what comes and goes in its backward pass.

        Args:
            tokens: in the pass.
            choice: what is computed again.
            longest: tokens of its longest row.

        Returns:
            Bytes at the beginning of the backward pass, when most is alive.
        """
        layer = self._eager_layer if choice.offload else self._layer
        attention = tokens * (layer.attention + longest * layer.scores) + layer.attention_casts
        mlp = tokens * layer.mlp + layer.mlp_casts
        whole = self.alive_layers - choice.layers - choice.mlps
        held = (0 if choice.offload else choice.layers * tokens * layer.entry) + choice.mlps * attention
        held += choice.mlps * tokens * layer.mlp_entry + whole * (attention + mlp)
        if not whole:  # one layer at a time is computed again and alive as a whole
            held += mlp if choice.mlps else attention + mlp
        unpacked = self.how.compute * self.dequantized
        return held + tokens * (layer.working + end_bytes(self.shapes, self.how)) + unpacked

    def loss_bytes(self, tokens: int) -> float:
        """Compute what the loss of a pass takes beside the hidden states, for a pass whose tokens all carry loss."""
        vocabulary, compute = self.shapes.vocabulary, self.how.compute
        head = vocabulary * self.shapes.hidden
        wide = 2 * compute + 2 * FLOAT32 + (FLOAT32 if self.shapes.softcap else 0)  # products, float32, exponentials
        rows = min(tokens, max(LOSS_CHUNK_ROWS, LOSS_CHUNK_BYTES // (FLOAT32 * vocabulary)))
        if not self.chunked:
            rows = tokens
        casts = compute * head if self.cast_head or (self.trained_head and compute < FLOAT32) else 0
        return rows * vocabulary * wide + casts + (2 * FLOAT32 * head if self.trained_head else 0)

    def peak_bytes(self, tokens: int, choice: Choice, longest: int, *, passes: int = 2) -> float:
        """Compute the most that is allocated at a time.

        Args:
            tokens: in the largest pass.
            choice: what is computed again.
            longest: tokens of its longest row.
            passes: of the step. In a single one gradients come while activations go.

        Returns:
            Bytes.
        """
        gradients = FLOAT32 * self.trained
        pass_bytes = self.activation_bytes(tokens, choice, longest) + self.loss_bytes(tokens)
        both = gradients + pass_bytes
        if passes < 2:
            both = max(pass_bytes, gradients + pass_bytes / max(1, self.alive_layers))
        return self.frozen_bytes + self.trained_bytes - gradients + both

    def cost(self, tokens: int, choice: Choice, usual: int) -> float:
        """Compute what a step costs beyond its arithmetic, as a share of that.

        Args:
            tokens: most in a pass.
            choice: what is computed again.
            usual: tokens of a step.

        Returns:
            Forward work that is done again over all work (the backward pass of frozen weights is as much as the
            forward one, that of trained weights twice as much), and the passes' own cost.
        """
        again = choice.layers + choice.mlps * self.shapes.mlp_share * (2 / 3 if self.how.compiled else 1)
        again = again / self.alive_layers + (OFFLOAD_COST if choice.offload else 0)
        return again / (3 if self.how.whole else 2) + math.ceil(usual / tokens) * PASS_OVERHEAD / usual


@dataclass(frozen=True)
class MemoryPlan:
    """What a pass may hold.

    Attributes:
        tokens_per_pass: most tokens in one forward and backward pass.
        choice: what is not kept for the backward pass.
        model: the bytes that it was planned with.
        longest: tokens of the longest row.
        planned_tokens: tokens that the figures are for: of a full pass, or of the longest row if that is more.
        passes: of a step that is as long as can be.
        available_bytes: that were free when the plan was made, the weights included.
    """

    tokens_per_pass: int
    choice: Choice
    model: MemoryModel
    longest: int
    planned_tokens: int
    passes: int
    available_bytes: float

    @property
    def recompute(self) -> bool:
        """Whether any layer computes anything again."""
        return self.choice.layers + self.choice.mlps > 0

    def peak_gib(self, tokens: int | None = None, passes: int | None = None) -> float:
        """Estimate the peak of a step.

        Args:
            tokens: in its largest pass; None for the planned one.
            passes: of the step; None for the planned number.

        Returns:
            GiB.
        """
        tokens, passes = tokens or self.planned_tokens, passes or self.passes
        longest = min(self.longest, tokens)
        return self.model.peak_bytes(tokens, self.choice, longest, passes=passes) / GIB

    def to_json(self) -> dict[str, Any]:
        """The plan as `surefoot check` gives it; sizes in GiB."""
        model, tokens, choice = self.model, self.planned_tokens, self.choice
        parts = {
            "weights_gib": model.frozen_bytes,
            "trained_gib": model.trained_bytes,
            "activations_gib": model.activation_bytes(tokens, choice, self.longest),
            "loss_gib": model.loss_bytes(tokens),
        }
        peak, available = self.peak_gib(), self.available_bytes / GIB
        return {
            "tokens_per_pass": self.tokens_per_pass,
            "recompute": self.recompute,
            "layers": model.shapes.layers,
            "recompute_layers": choice.layers,
            "recompute_mlps": choice.mlps,
            "offload": choice.offload,
            **{name: round(size / GIB, 3) for name, size in parts.items()},
            "memory_gib": round(peak, 3),
            "available_gib": round(available, 3),
            "spare_gib": round(available - peak, 3),
        }


def make_plan(
    model: MemoryModel,
    *,
    free_bytes: float,
    longest: int,
    step_tokens: int,
    usual_tokens: int | None = None,
    tokens: int | None = None,
    may_recompute: bool = True,
    cpu: bool = False,
) -> MemoryPlan:
    """Choose the tokens of a pass and what is computed again, so that a step costs least.

    Args:
        model: bytes of the run.
        free_bytes: memory that is free for it, the weights included.
        longest: tokens of the longest training item, which is one pass at least.
        step_tokens: tokens that a full optimizer step may have.
        usual_tokens: tokens that it has on average; None for as many.
        tokens: of a pass, as the YAML's `memory` fixes them: the run then starts even if they do not seem to fit.
        may_recompute: False to keep all activations on the device or the host (`disable_gradient_checkpointing`).
        cpu: True on a CPU.

    Returns:
        The plan.

    Raises:
        UserError: the longest item does not fit, whatever is done.
    """
    step_tokens = max(step_tokens, longest)
    usual = max(1, min(usual_tokens or step_tokens, step_tokens))
    ceiling = max(longest, min(step_tokens, CPU_TOKENS) if cpu else step_tokens)
    fixed = None if tokens is None else max(longest, min(tokens, step_tokens))
    best: tuple[float, int, Choice] | None = None
    for choice in _choices(model.alive_layers, may_recompute, host=not cpu):
        if best and choice.offload:
            break  # only when nothing else fits
        if best and model.cost(ceiling, choice, usual) >= best[0]:
            continue  # it would not be cheaper if a whole step fitted
        fits = _most_tokens(model, choice, SPENT_SHARE * free_bytes, fixed or longest, fixed or ceiling, longest)
        if not fits:
            continue
        cost = model.cost(fits, choice, usual)
        if best is None or cost < best[0] - 1e-12:
            best = (cost, fits, choice)
    if best is None:
        last = list(_choices(model.alive_layers, may_recompute, host=not cpu))[-1]
        if fixed is None and model.peak_bytes(longest, last, longest, passes=1) > free_bytes:
            raise does_not_fit(model, last, free_bytes, longest)
        best = (0.0, fixed or longest, last)
    _, planned, choice = best
    passes = math.ceil(step_tokens / planned)
    return MemoryPlan(tokens or planned, choice, model, longest, planned, passes, free_bytes)


def does_not_fit(model: MemoryModel, choice: Choice, free_bytes: float, longest: int) -> UserError:
    """Say what is missing, and what would help most.

    Args:
        model: bytes of the run.
        choice: the thriftiest that there is.
        free_bytes: memory that is free.
        longest: tokens of the longest item.

    Returns:
        The error.
    """
    need = model.peak_bytes(longest, choice, longest, passes=1)
    fixed = model.frozen_bytes + model.trained_bytes
    help_with = []
    if model.how.whole:
        help_with.append("train an adapter with `finetuning_type: lora`")
    elif model.frozen_bytes > free_bytes / 4 and not model.dequantized:
        help_with.append("hold the frozen weights in 4 bits with `quantization_bit: 4`")
    if need - fixed > fixed / 4:
        help_with.append("lower `cutoff_len`")
    help_with.append(
        "take a card with more memory or a smaller model (`memory: N`, tokens a pass, overrides this plan)"
    )
    return UserError(
        f"this run needs {need / GIB:.1f} GiB and {free_bytes / GIB:.1f} GiB are free: {(need - free_bytes) / GIB:.1f} "
        f"GiB are missing (weights {model.frozen_bytes / GIB:.1f}, what is trained {model.trained_bytes / GIB:.1f}, "
        f"one row of {longest} tokens {(need - fixed) / GIB:.1f})",
        hint="; or ".join(help_with),
        key="model_name_or_path",
    )


def free_memory(device: str) -> int:
    """Return the bytes that a run may use on a device: its free memory, or the system's available memory."""
    if device != "cpu":
        import torch

        return torch.cuda.mem_get_info(device)[0]
    table = Path("/proc/meminfo")
    if table.exists():
        return next(int(line.split()[1]) * 1024 for line in table.read_text().splitlines() if "MemAvailable:" in line)
    if hasattr(os, "sysconf"):  # macOS has no /proc: half of what is built in
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // 2
    return UNKNOWN_MEMORY


def _choices(layers: int, may_recompute: bool, *, host: bool) -> Iterator[Choice]:
    """Yield every mixture; last the thriftiest, which needs a host beside the device."""
    yield Choice()
    if not may_recompute:
        return
    for again in range(layers + 1):
        for mlps in range(layers - again + 1):
            if again or mlps:
                yield Choice(again, mlps)
    if host:
        yield Choice(layers, 0, offload=True)


def _most_tokens(model: MemoryModel, choice: Choice, budget: float, fewest: int, most: int, longest: int) -> int | None:
    """Return how many tokens of a pass fit, from `fewest` to `most`; None when the fewest do not."""

    def fits(tokens: int) -> bool:
        passes = 1 if tokens == most else 2
        return model.peak_bytes(tokens, choice, longest, passes=passes) <= budget

    if fits(most):
        return most
    if not fits(fewest):
        return None
    low, high = fewest, most
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if fits(middle) else (low, middle)
    return low
