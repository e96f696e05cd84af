"""How much memory a run needs, and how many tokens one pass may therefore hold.

An estimate from shapes, to plan by: what a real run uses is measured by it and said.
"""

from __future__ import annotations

import math
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from surefoot.config import Config

GIB = 2**30
# Share of the free memory that the plan spends; the rest is for fragmentation and what the estimate misses.
SPENT_SHARE = 0.85
# A CPU gains nothing from passes beyond this, and loses its caches.
CPU_TOKENS = 8192
# Planned with where the system says nothing of its memory (Windows); `memory` in the YAML overrides the plan.
UNKNOWN_MEMORY = 4 * GIB
MASTER_BYTES = 4
ADAM_BYTES = 8


@dataclass(frozen=True)
class Shapes:
    """The sizes that memory depends on.

    Attributes:
        layers: decoder layers.
        hidden: model width.
        feed_forward: width of the MLP.
        attention: width of queries, keys and values together.
        vocabulary: rows of the head.
        parameters: numbers in the model.
        trainable: numbers that are trained.
        adapter_inputs: widths of the adapters' inputs in a layer, added up; 0 without adapters.
    """

    layers: int
    hidden: int
    feed_forward: int
    attention: int
    vocabulary: int
    parameters: int
    trainable: int
    adapter_inputs: int


@dataclass(frozen=True)
class MemoryPlan:
    """What a pass may hold.

    Attributes:
        tokens_per_pass: most tokens in one forward and backward pass.
        recompute: True when decoder layers forget their activations and compute them again.
        weights_gib: weights, masters, gradients and optimizer state.
        activations_gib: of a full pass.
        available_gib: memory that was free when the plan was made.
    """

    tokens_per_pass: int
    recompute: bool
    weights_gib: float
    activations_gib: float
    available_gib: float

    @property
    def memory_gib(self) -> float:
        """Estimated peak."""
        return self.weights_gib + self.activations_gib


def activation_bytes(shapes: Shapes, compute_bytes: int, *, recompute: bool) -> float:
    """Estimate the bytes of saved activations per token.

    A layer keeps the inputs of its products for the backward pass: two norms (in float32 as well), queries, keys,
    values and the attention's output, gate, up, their activation and product, the residual twice, and an
    adapter's copy of its input. With recompute only the layer's input stays, and one layer is alive at a time.

    Args:
        shapes: sizes of the model.
        compute_bytes: bytes of a number in matrix products.
        recompute: whether layers are computed again.

    Returns:
        Bytes per token.
    """
    layer = compute_bytes * (5 * shapes.hidden + 3 * shapes.attention + 4 * shapes.feed_forward + shapes.adapter_inputs)
    layer += 4 * 4 * shapes.hidden
    ends = 6 * 4 * shapes.hidden
    if recompute:
        return shapes.layers * compute_bytes * shapes.hidden + layer + ends
    return shapes.layers * layer + ends


def make_plan(
    cfg: Config,
    shapes: Shapes,
    *,
    compute_bytes: int,
    weight_bytes: int,
    free_bytes: int,
    longest: int,
    step_tokens: int,
    cpu: bool,
) -> MemoryPlan:
    """Choose the tokens of a pass and whether to recompute: no recompute if the longest row fits without it.

    Args:
        cfg: the YAML; a number as `memory` fixes the tokens of a pass.
        shapes: sizes of the model.
        compute_bytes: bytes of a number in matrix products.
        weight_bytes: bytes of a frozen weight.
        free_bytes: memory that is free for this run, the weights included.
        longest: tokens of the longest training item.
        step_tokens: tokens that a full optimizer step may have.
        cpu: True on a CPU.

    Returns:
        The plan.
    """
    fixed = weight_bytes * (shapes.parameters - shapes.trainable) + (2 * MASTER_BYTES + ADAM_BYTES) * shapes.trainable
    room = max(0.0, SPENT_SHARE * free_bytes - fixed)
    recompute = False
    per_token = activation_bytes(shapes, compute_bytes, recompute=False)
    if room < longest * per_token and not cfg.disable_gradient_checkpointing:
        recompute = True
        per_token = activation_bytes(shapes, compute_bytes, recompute=True)
    tokens = int(room / per_token)
    tokens = min(tokens, CPU_TOKENS) if cpu else tokens
    tokens = max(longest, min(tokens, step_tokens))
    if cfg.memory != "auto":
        tokens = int(cfg.memory)
    gib = (fixed / GIB, min(tokens, max(step_tokens, longest)) * per_token / GIB, free_bytes / GIB)
    return MemoryPlan(tokens, recompute, *(round(x, 3) for x in gib))


def shapes_of(model: Any, trainable: int, adapter_inputs: int) -> Shapes:
    """Read a model's sizes from its configuration and parameters.

    Args:
        model: a transformers causal language model; its parameters may be on the meta device.
        trainable: numbers that are trained.
        adapter_inputs: widths of the adapters' inputs in a layer, added up.

    Returns:
        The sizes.
    """
    text = model.config.get_text_config()
    heads = text.num_attention_heads
    width = getattr(text, "head_dim", None) or text.hidden_size // heads
    key_heads = getattr(text, "num_key_value_heads", None) or heads
    feed_forward = getattr(text, "intermediate_size", None) or getattr(text, "n_inner", None) or 4 * text.hidden_size
    return Shapes(
        layers=text.num_hidden_layers,
        hidden=text.hidden_size,
        feed_forward=feed_forward,
        attention=width * (heads + 2 * key_heads),
        vocabulary=text.vocab_size,
        parameters=sum(p.numel() for p in model.parameters()),
        trainable=trainable,
        adapter_inputs=adapter_inputs,
    )


def adapter_inputs(model: Any) -> int:
    """Add up the widths of the adapters' inputs in a decoder layer, from a model that PEFT has wrapped."""
    widths = [m.in_features for m in model.modules() if hasattr(m, "lora_A") and hasattr(m, "in_features")]
    layers = max(1, model.config.get_text_config().num_hidden_layers)
    return sum(widths) // layers


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


def forecast(cfg: Config, lengths: Mapping[str, float], device: str) -> dict[str, Any]:
    """Plan a run's memory without loading a weight: the model is built without storage.

    Args:
        cfg: the YAML.
        lengths: "longest" and "mean" tokens of the training items.
        device: where the run would compute, as torch names it.

    Returns:
        "passes" (per optimizer step, on average), "tokens_per_pass", "recompute", "memory_gib",
        "available_gib", "trainable_parameters" and "parameters".

    Raises:
        UserError: the model or its adapter targets do not exist.
    """
    import torch
    from transformers import AutoModelForCausalLM

    from surefoot.model.adapters import prepare_trainables
    from surefoot.model.precision import DTYPES, choose_precision
    from surefoot.model.source import checkpoint_dtype, model_config

    config = model_config(cfg)
    stored = DTYPES.get(checkpoint_dtype(config, cfg), torch.float32)
    precision = choose_precision(cfg, stored)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config, trust_remote_code=cfg.trust_remote_code)
        fresh = cfg.model_copy(update={"adapter_name_or_path": None})
        wrapped = prepare_trainables(model, fresh, precision.trainable, resized=False)
    trainable = sum(p.numel() for p in wrapped.parameters() if p.requires_grad)
    per_step = cfg.per_device_train_batch_size * cfg.gradient_accumulation_steps
    compute = precision.autocast or precision.load or stored
    plan = make_plan(
        cfg, shapes_of(model, trainable, adapter_inputs(model)),
        compute_bytes=compute.itemsize, weight_bytes=(precision.autocast or precision.load or stored).itemsize,
        free_bytes=free_memory(device), longest=int(lengths["longest"]),
        step_tokens=int(per_step * lengths["longest"]), cpu=device == "cpu",
    )  # fmt: skip
    return {
        "passes": max(1, math.ceil(per_step * lengths["mean"] / plan.tokens_per_pass)),
        "tokens_per_pass": plan.tokens_per_pass,
        "recompute": plan.recompute,
        "memory_gib": round(plan.memory_gib, 3),
        "available_gib": plan.available_gib,
        "trainable_parameters": trainable,
        "parameters": sum(p.numel() for p in model.parameters()),
    }
