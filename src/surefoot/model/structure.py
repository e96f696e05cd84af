"""What a model is made of: its decoder layers, and what stands around them."""

from __future__ import annotations

import torch

from surefoot.model.forward import base_of


def decoder_layers(model: torch.nn.Module) -> list[torch.nn.Module]:
    """Return a model's decoder layers.

    Args:
        model: the model, wrapped by PEFT or not.

    Returns:
        The layers in order: the elements of the decoder's longest list of modules.
    """
    lists = [m for m in base_of(model).get_decoder().children() if isinstance(m, torch.nn.ModuleList)]
    return list(max(lists, key=len)) if lists else []


def rotary_of(model: torch.nn.Module) -> torch.nn.Module | None:
    """Return the module that makes cos and sin for all layers, or None."""
    children = base_of(model).get_decoder().named_children()
    return next((module for name, module in children if "rotary" in name), None)


def units(model: torch.nn.Module) -> list[torch.nn.Module]:
    """Split a model into the modules that together do all of its computing, each of which can be an island.

    Args:
        model: the model, wrapped by PEFT or not.

    Returns:
        Decoder layers, embeddings, final norm and head: what has weights or buffers outside of the layers.

    Raises:
        ValueError: a module around the layers has weights of its own.
    """
    layers = set(decoder_layers(model))
    found: list[torch.nn.Module] = []

    def walk(module: torch.nn.Module) -> None:
        if module in layers or not any(part in layers for part in module.modules()):
            if any(True for _ in module.parameters()) or any(True for _ in module.buffers()):
                found.append(module)
            return
        if module._parameters:
            raise ValueError(f"{type(module).__name__} has weights beside its layers; it cannot be cast part by part")
        for child in module.children():
            walk(child)

    walk(base_of(model))
    return found


def recomputes(module: torch.nn.Module) -> bool:
    """Tell whether a module is a decoder layer that hands itself to gradient checkpointing."""
    return any(kind.__name__ == "GradientCheckpointingLayer" for kind in type(module).__mro__)


def is_norm(module: torch.nn.Module) -> bool:
    """Tell whether a module has weights, none of them a matrix."""
    weights = list(module.parameters())
    return bool(weights) and all(weight.ndim <= 1 for weight in weights)


def mlp_of(layer: torch.nn.Module) -> torch.nn.Module | None:
    """Return a decoder layer's MLP, or None where it is not clear which child that is.

    Args:
        layer: the decoder layer.

    Returns:
        The only child with matrices that is no attention.
    """
    children = [
        child
        for name, child in layer.named_children()
        if not is_norm(child) and any(True for _ in child.parameters()) and "att" not in name.lower()
    ]
    return children[0] if len(children) == 1 else None
