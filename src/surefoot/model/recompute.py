"""Computing parts of a model again in the backward pass, rather than keeping what they need for it."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from types import MethodType
from typing import Any

import torch
from torch.utils.checkpoint import (
    CheckpointPolicy,
    checkpoint,
    create_selective_checkpoint_contexts,
    noop_context_fn,
)

from surefoot.model.compiled import stop_compiling
from surefoot.model.forward import base_of
from surefoot.model.islands import has_island
from surefoot.model.memory import Choice
from surefoot.model.structure import decoder_layers, mlp_of

_LAYER = "surefoot_layer"  # in the own __dict__ of an MLP that is computed again: the layer that it belongs to


def recompute(model: Any, choice: Choice) -> None:
    """Let a plan's layers and MLPs forget their activations.

    Args:
        model: the model, wrapped by PEFT or not; changed in place, once.
        choice: what the plan does not keep.
    """
    layers = decoder_layers(model)
    if choice.layers:
        turn_on_recompute(model, offload=choice.offload)
        for layer in layers[choice.layers :]:
            layer.gradient_checkpointing = False  # type: ignore[assignment]
    for layer in layers[choice.layers : choice.layers + choice.mlps]:
        mlp = mlp_of(layer)
        if mlp is not None:
            _recompute_mlp(layer, mlp)


def turn_on_recompute(model: Any, *, offload: bool = False) -> None:
    """Let every decoder layer forget its activations and compute them again in the backward pass.

    Args:
        model: the model, wrapped by PEFT or not; changed in place.
        offload: keep the layers' inputs in the host's memory.
    """
    base = base_of(model)
    # transformers 6 keeps the first name only, older ones know the second.
    enable = getattr(base, "activation_checkpointing_enable", None) or base.gradient_checkpointing_enable
    enable({"use_reentrant": False})
    for layer in decoder_layers(base):
        layer.gradient_checkpointing = True  # type: ignore[assignment]
        if offload:
            stop_compiling(layer)  # hooks on what is saved are no part of a graph
            layer._gradient_checkpointing_func = _on_host  # type: ignore[assignment]


def recomputed(model: Any) -> tuple[int, int]:
    """Count the layers, and the MLPs of other layers, that are computed again."""
    layers = decoder_layers(model)
    whole = [layer for layer in layers if getattr(layer, "gradient_checkpointing", False)]
    return len(whole), sum(_LAYER in vars(part) for layer in layers for part in layer.children())


def _on_host(function: Callable[..., Any], *args: Any) -> Any:
    """Compute a layer again from inputs that wait in the host's memory.

    What the layer itself saves is the checkpoint's business; only its inputs pass through these hooks.
    """
    pinned = any(isinstance(x, torch.Tensor) and x.is_cuda for x in args)
    with torch.autograd.graph.save_on_cpu(pin_memory=pinned):
        return checkpoint(function, *args, use_reentrant=False)


def _recompute_mlp(layer: torch.nn.Module, mlp: torch.nn.Module) -> None:
    if "forward" in vars(mlp):
        return  # something stands in for it already
    vars(mlp)[_LAYER] = layer
    vars(mlp)["forward"] = MethodType(_forward, mlp)  # a bound method: copies of the model get their own


def _forward(self: torch.nn.Module, *args: Any, **kwargs: Any) -> Any:
    """Stand in for an MLP's forward."""
    layer = vars(self)[_LAYER]
    # Inside an island weights are cast only while the forward pass runs: to compute again, they would be others.
    if not self.training or not torch.is_grad_enabled() or has_island(layer) or has_island(self):
        return type(self).forward(self, *args, **kwargs)
    # The compiler cuts the graph by its operations' tags. torch 2.11 tags none inside an autograd function, which LoRA
    # linears are, so that all their outputs would be kept; with a policy each operation is asked for, wherever it is.
    tags = _tag_all if torch.compiler.is_compiling() else noop_context_fn
    return checkpoint(partial(type(self).forward, self), *args, use_reentrant=False, context_fn=tags, **kwargs)


def _tag_all() -> Any:
    return create_selective_checkpoint_contexts(_again)


def _again(*_: Any, **__: Any) -> CheckpointPolicy:
    return CheckpointPolicy.PREFER_RECOMPUTE
