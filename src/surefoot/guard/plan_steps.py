"""How each kind of change in a precision plan is done to a model, and how it is taken back."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch

from surefoot.guard.plan import Change, find_module
from surefoot.model import compiled, islands
from surefoot.model.attention import EAGER_NAME, SDPA_NAME
from surefoot.model.forward import LossForward, base_of, trained_head
from surefoot.model.precision import DTYPES
from surefoot.model.structure import decoder_layers, rotary_of, units
from surefoot.model.variants import fuse_again, unfuse_lora

Undo = Callable[[], None]
_HEAD_OWNER = "logits in float32"
_REGIONS = "_surefoot_regions"  # in the decoder's own __dict__: first layer and dtype of each region change in force


def _attention(model: torch.nn.Module, forward: LossForward, change: Change) -> Undo:
    kernel = change.kind.removeprefix("attention_")
    base = base_of(model)
    own = base.config._attn_implementation
    if not change.module and own not in (SDPA_NAME, EAGER_NAME):  # rows run alone, by the model's own attention
        base.set_attn_implementation("sdpa" if kernel == "fused" else "eager")
        return partial(base.set_attn_implementation, own)
    modules = [find_module(model, change.module)] if change.module else _attention_modules(model)
    if not modules:
        raise ValueError("this model has no attention module that can be told")
    before = [islands.attention_kernel(module) for module in modules]

    def undo() -> None:
        for module, name in zip(modules, before, strict=True):
            islands.set_attention_kernel(module, name)

    try:
        for module in modules:
            islands.set_attention_kernel(module, kernel)
    except ValueError:
        undo()
        raise
    return undo


def _scores(model: torch.nn.Module, forward: LossForward, change: Change) -> Undo:
    module = find_module(model, change.module)
    islands.set_scores(module, DTYPES[change.dtype], rotary=rotary_of(model), owner=str(change))
    return partial(islands.clear_scores, module, owner=str(change))


def _island(model: torch.nn.Module, forward: LossForward, change: Change) -> Undo:
    module = find_module(model, change.module)
    base = base_of(model)
    if trained_head(base) in list(module.modules()) and module is not base:
        return _logits(model, forward, change)  # the chunked loss reads the head's weight and never calls the module
    keep = change.keep_output or _is_router(model, change.module)
    islands.set_island(module, DTYPES[change.dtype], keep_output=keep, rotary=rotary_of(model), owner=str(change))
    return partial(islands.clear_island, module, owner=str(change))


def _region(model: torch.nn.Module, forward: LossForward, change: Change) -> Undo:
    layers, layer = decoder_layers(model), find_module(model, change.module)
    if layer not in layers:
        raise ValueError(f"a region starts at a decoder layer, and {change.module} is none")
    entry = (layers.index(layer), DTYPES[change.dtype])
    regions = base_of(model).get_decoder().__dict__.setdefault(_REGIONS, [])
    regions.append(entry)
    _settle_regions(model, regions)

    def undo() -> None:
        regions.remove(entry)
        _settle_regions(model, regions)

    return undo


def _loss(model: torch.nn.Module, forward: LossForward, change: Change) -> Undo:
    return _with_head(forward, "chunked", False)


def _logits(model: torch.nn.Module, forward: LossForward, change: Change) -> Undo:
    if change.dtype != "float32":
        raise ValueError("logits are made in float32 or in the run's own dtype")
    return _with_head(forward, "upcast", True)


def _plain_lora(model: torch.nn.Module, forward: LossForward, change: Change) -> Undo:
    layers = unfuse_lora(find_module(model, change.module))
    if not layers:
        raise ValueError(f"{change.module or 'this model'} has no fused LoRA layer")
    return partial(fuse_again, layers)


def _compile_off(model: torch.nn.Module, forward: LossForward, change: Change) -> Undo:
    # A plan of a compiled run, used without `compile`, has nothing to do here.
    modules = [m for m in find_module(model, change.module).modules() if compiled.is_compiled(m)]
    calls = [module._compiled_call_impl for module in modules]
    for module in modules:
        compiled.stop_compiling(module)

    def undo() -> None:
        for module, call in zip(modules, calls, strict=True):
            module._compiled_call_impl = call

    return undo


def _float32(model: torch.nn.Module, forward: LossForward, change: Change) -> Undo:
    parts, autocast = units(model), forward.autocast

    def undo() -> None:
        forward.autocast = autocast
        for part in parts:
            islands.clear_island(part, owner=str(change))

    try:
        for part in parts:
            islands.set_island(part, torch.float32, keep_output=True, owner=str(change))
    except ValueError:
        undo()
        raise
    forward.autocast = None
    return undo


STEPS: dict[str, Callable[[torch.nn.Module, LossForward, Change], Undo]] = {
    "attention_fused": _attention,
    "attention_eager": _attention,
    "scores": _scores,
    "island": _island,
    "region": _region,
    "loss_reference": _loss,
    "logits_float32": _logits,
    "plain_lora": _plain_lora,
    "compile_off": _compile_off,
    "float32": _float32,
}


def hold(model: torch.nn.Module, change: Change) -> None:
    """Hold the weights of a change in float32; see `plan.hold_change`."""
    if change.dtype != "float32" or change.kind not in ("scores", "island", "float32"):
        return
    modules = units(model) if change.kind == "float32" else [find_module(model, change.module)]
    if change.kind == "scores":
        modules = islands.score_parts(modules[0])
    shared = _shared_parameters(model)
    for module in modules:
        if islands.has_island(module) and not isinstance(module, torch.nn.Embedding):
            islands.hold_island_weights(module, torch.float32, skip=shared)


def _settle_regions(model: torch.nn.Module, regions: list[tuple[int, torch.dtype]]) -> None:
    if not regions:
        islands.clear_region(model)
        base_of(model).get_decoder().__dict__.pop(_REGIONS, None)
        return
    # One stream has one dtype: float32 wins over bfloat16, and the lowest start over the others.
    dtype = torch.float32 if any(d == torch.float32 for _, d in regions) else regions[0][1]
    islands.set_region(model, min(first for first, _ in regions), dtype)


def _with_head(forward: LossForward, name: str, value: bool) -> Undo:
    """Set a switch of the loss; the head is an island where the model makes its logits itself, wanted in float32."""
    head, before = trained_head(forward.model), getattr(forward, name)
    had = islands.has_island(head, owner=_HEAD_OWNER)

    def settle(on: bool) -> None:
        islands.clear_island(head, owner=_HEAD_OWNER)
        if on:
            islands.set_island(head, torch.float32, keep_output=True, owner=_HEAD_OWNER)

    def undo() -> None:
        setattr(forward, name, before)
        settle(had)

    setattr(forward, name, value)
    settle(forward.upcast and not forward.chunked)
    return undo


def _attention_modules(model: torch.nn.Module) -> list[torch.nn.Module]:
    layers = decoder_layers(model)
    return [m for layer in layers for m in layer.modules() if type(m).__name__.endswith("Attention")]


def _is_router(model: torch.nn.Module, name: str) -> bool:
    """Tell whether a module weighs experts: its weights come in float32 anyway and must not be rounded again."""
    parent, _, own = name.rpartition(".")
    return own in ("gate", "router") and "experts" in find_module(model, parent)._modules


def _shared_parameters(model: torch.nn.Module) -> set[int]:
    seen: set[int] = set()
    shared: set[int] = set()
    for module in model.modules():
        for parameter in module._parameters.values():
            if parameter is not None:
                (shared if id(parameter) in seen else seen).add(id(parameter))
    return shared
