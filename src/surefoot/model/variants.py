"""A model run another way for a while, to find out by experiment what is wrong with it. All is put back afterwards."""

from __future__ import annotations

import contextlib
from collections.abc import Generator
from functools import partial
from typing import Any

import torch
from torch.utils.checkpoint import checkpoint

from surefoot.model.attention import EAGER_NAME, KERNEL_ATTRIBUTE, SDPA_NAME
from surefoot.model.forward import LossForward, base_of, trained_head
from surefoot.model.islands import clear_island, has_island, set_island
from surefoot.model.recast import ieee_float32
from surefoot.model.structure import decoder_layers, recomputes, units

FUSED_NAMES = ("FusedLoraLinear", "FusedLora4bit", "FusedLora8bit")
_OWNER = "float32 replay"
_RANDOM_WORDS = ("dropout", "pdrop", "layerdrop", "jitter_noise")  # in attributes that hold a probability


@contextlib.contextmanager
def in_float32(model: torch.nn.Module, forward: LossForward, *, recompute: bool = False) -> Generator[None]:
    """Compute everything in IEEE float32 from the weights as they are held, which 16 bits to float32 leaves exact.

    Weights are cast while they are used, a layer at a time; a trained 16-bit parameter gets its gradient in its own
    dtype. Layers run eagerly. Attention and loss keep their kernels.

    Args:
        model: the model, wrapped by PEFT or not.
        forward: how its loss is computed.
        recompute: forget the layers' activations and float32 weights, and make them again in the backward pass: where
            the replay does not fit otherwise.

    Yields:
        Nothing.
    """
    base, autocast = base_of(model), forward.autocast
    # Islands in 16 bits inside a layer would still be that; the last island set on a module counts.
    parts = [*units(model), *(m for m in base.modules() if has_island(m))]
    with contextlib.ExitStack() as stack:
        stack.callback(setattr, forward, "autocast", autocast)
        forward.autocast = None
        stack.enter_context(without_compile(model))
        stack.enter_context(ieee_float32())
        if recompute:
            stack.enter_context(_recomputing(base))
        for part in dict.fromkeys(parts):
            stack.callback(clear_island, part, owner=_OWNER)
            set_island(part, torch.float32, keep_output=True, owner=_OWNER)
        yield


@contextlib.contextmanager
def reference_kernels(model: torch.nn.Module, forward: LossForward) -> Generator[None]:
    """Compute everything by the plainest code in the same dtype: to tell a faulty kernel from a faulty number.

    Attention is written out, LoRA is PEFT's own, experts run one after the other, the model makes its logits itself,
    and nothing is compiled. Islands and regions stay.

    Args:
        model: the model, wrapped by PEFT or not.
        forward: how its loss is computed.

    Yields:
        Nothing.
    """
    base = base_of(model)
    with contextlib.ExitStack() as stack:
        stack.enter_context(without_compile(model))
        stack.enter_context(_eager_attention(base))
        stack.enter_context(_plain_experts(base))
        stack.enter_context(plain_lora(model))
        if forward.chunked:
            stack.callback(setattr, forward, "chunked", True)
            forward.chunked = False
            if forward.upcast:  # which the chunked loss does by itself
                head = trained_head(base)
                stack.callback(clear_island, head, owner=_OWNER)
                set_island(head, torch.float32, keep_output=True, owner=_OWNER)
        yield


@contextlib.contextmanager
def without_compile(model: torch.nn.Module) -> Generator[None]:
    """Run every compiled module eagerly.

    Args:
        model: the model, wrapped by PEFT or not.

    Yields:
        Nothing.
    """
    compiled = [(m, m._compiled_call_impl) for m in model.modules() if m._compiled_call_impl is not None]
    try:
        for module, _ in compiled:
            module._compiled_call_impl = None
        yield
    finally:
        for module, call in compiled:
            module._compiled_call_impl = call


@contextlib.contextmanager
def without_dropout(model: torch.nn.Module) -> Generator[None]:
    """Set every dropout probability, and a router's jitter, to 0; the model stays in training mode.

    Args:
        model: the model, wrapped by PEFT or not.

    Yields:
        Nothing.
    """
    changed: list[tuple[torch.nn.Module, str, float]] = []
    for module in model.modules():
        names = [n for n, v in vars(module).items() if isinstance(v, float) and any(w in n for w in _RANDOM_WORDS)]
        if isinstance(module, torch.nn.modules.dropout._DropoutNd):
            names.append("p")
        changed += [(module, name, getattr(module, name)) for name in names]
    try:
        for module, name, _ in changed:
            setattr(module, name, 0.0)
        yield
    finally:
        for module, name, share in changed:
            setattr(module, name, share)


@contextlib.contextmanager
def plain_lora(model: torch.nn.Module) -> Generator[None]:
    """Compute LoRA linears by PEFT's own forward.

    Args:
        model: the model, or a part of it.

    Yields:
        Nothing.
    """
    layers = unfuse_lora(model)
    try:
        yield
    finally:
        fuse_again(layers)


def unfuse_lora(model: torch.nn.Module) -> list[tuple[torch.nn.Module, type]]:
    """Give fused LoRA linears PEFT's own forward, and return them with the class they had, for `fuse_again`."""
    # Without a look at PEFT where there is none: its import takes seconds.
    layers = [(m, type(m)) for m in model.modules() if type(m).__name__ in FUSED_NAMES]
    for layer, fused in layers:
        layer.__class__ = fused.__bases__[-1]  # PEFT's; what stands before it is our forward
    return layers


def fuse_again(layers: list[tuple[torch.nn.Module, type]]) -> None:
    """Take `unfuse_lora` back."""
    for layer, fused in layers:
        layer.__class__ = fused


@contextlib.contextmanager
def _eager_attention(base: Any) -> Generator[None]:
    own = base.config._attn_implementation
    eager = EAGER_NAME if own in (SDPA_NAME, EAGER_NAME) else "eager"
    chosen = [(m, m.__dict__.pop(KERNEL_ATTRIBUTE)) for m in base.modules() if KERNEL_ATTRIBUTE in m.__dict__]
    switched = False
    try:
        if own != eager:
            # transformers refuses with a ValueError where a model has one attention only, which is then plain.
            with contextlib.suppress(ValueError):
                base.set_attn_implementation(eager)
                switched = True
        yield
    finally:
        if switched:
            base.set_attn_implementation(own)
        for module, name in chosen:
            module.__dict__[KERNEL_ATTRIBUTE] = name


@contextlib.contextmanager
def _plain_experts(base: Any) -> Generator[None]:
    config = base.config.get_text_config()
    own = getattr(config, "_experts_implementation_internal", None)
    try:
        if own is not None:
            config._experts_implementation_internal = "eager"
        yield
    finally:
        if own is not None:
            config._experts_implementation_internal = own


@contextlib.contextmanager
def _recomputing(base: Any) -> Generator[None]:
    """Turn recompute on for the decoder layers. transformers' own switch would leave hooks behind."""
    names = ("gradient_checkpointing", "_gradient_checkpointing_func")
    layers = [vars(layer) for layer in decoder_layers(base) if recomputes(layer)]
    before = [{name: own[name] for name in names if name in own} for own in layers]
    try:
        for own in layers:
            own.update(zip(names, (True, partial(checkpoint, use_reentrant=False)), strict=True))
        yield
    finally:
        for own, flags in zip(layers, before, strict=True):
            for name in names:
                own.pop(name, None)
            own.update(flags)
