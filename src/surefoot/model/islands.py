"""Parts of a model that compute in another number format than the rest.

An island is a module that casts what it is given, computes in its own dtype, and casts back what it gives. A region
is a stretch of the residual stream, from one decoder layer to the final norm. Both are laid over a module's `forward`
on the instance and taken off again; parameters keep their identity and, until `hold_island_weights`, their bytes.

The products of an island's backward pass run when the island is left; they are IEEE float32 as long as nobody turns
TF32 on for the whole process, which Surefoot never does.
"""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Callable, Collection
from dataclasses import dataclass, field
from functools import partial
from types import MethodType
from typing import Any

import torch

from surefoot.model.attention import EAGER_NAME, KERNEL_ATTRIBUTE, SCORE_DTYPE_ATTRIBUTE, SDPA_NAME
from surefoot.model.forward import base_of
from surefoot.model.recast import (
    CASTABLE,
    cast_floats,
    cast_mask,
    first_float,
    has_weights_to_cast,
    ieee_float32,
    replace_first_float,
    weights_in,
)
from surefoot.model.structure import decoder_layers, is_norm, recomputes

_STATE = "_surefoot_precision"  # in a module's own __dict__
SCORE_PARTS = ("q_proj", "k_proj", "q_norm", "k_norm")


@dataclass
class Region:
    """A stretch of the residual stream.

    Attributes:
        dtype: of the stream inside.
        outside: dtype of the stream before it, seen when it is entered; None before the first forward.
    """

    dtype: torch.dtype
    outside: torch.dtype | None = None


@dataclass
class Island:
    """How one module computes.

    Attributes:
        dtype: it computes in.
        keep_output: its output stays in that dtype; else it becomes the first floating input's.
        rotary: the model's rotary embedding, to make cos and sin in `dtype`: those of a 16-bit model come rounded.
        region: the region that ends with this module: the output gets the dtype that the stream had before.
    """

    dtype: torch.dtype
    keep_output: bool = False
    rotary: torch.nn.Module | None = None
    region: Region | None = None


@dataclass
class _State:
    """All that lies over a module's forward.

    Attributes:
        before: an instance's `forward` that stood there already, as accelerate leaves one.
        islands: by who set them; the last one counts.
        held: parameters that were cast once and for all, with the dtype that they came from.
        enters: the region that begins at this module's input.
        within: the region that this module is a 16-bit block of.
        rotary: makes cos and sin anew in float32 for scores in float32.
    """

    before: Callable[..., Any] | None
    islands: dict[str, Island] = field(default_factory=dict)
    held: list[tuple[torch.nn.Parameter, torch.dtype]] = field(default_factory=list)
    enters: Region | None = None
    within: Region | None = None
    rotary: torch.nn.Module | None = None

    @property
    def island(self) -> Island | None:
        return next(reversed(self.islands.values())) if self.islands else None

    @property
    def empty(self) -> bool:
        return not (self.islands or self.enters or self.within or self.rotary)


def set_island(
    module: torch.nn.Module,
    dtype: torch.dtype,
    *,
    keep_output: bool = False,
    rotary: torch.nn.Module | None = None,
    owner: str = "",
) -> None:
    """Let a module, its children included, compute in a dtype.

    Inside, autocast is off, floating inputs are cast, weights are cast while they are used, and float32 products are
    IEEE. May be set and cleared while no graph lives.

    Args:
        module: a part of one decoder layer, a whole layer, a norm, an embedding or the head; changed in place.
        dtype: to compute in.
        keep_output: leave the output in `dtype`; else it is cast to the dtype of the first floating input.
        rotary: the model's rotary embedding, for a module that is handed rounded cos and sin beside `position_ids`.
        owner: who sets it; islands of several owners lie over each other, the last one set counts.

    Raises:
        ValueError: the module holds decoder layers, which recompute would run outside of the island.
    """
    if any(recomputes(part) for part in module.modules() if part is not module):
        raise ValueError(
            f"{type(module).__name__} holds decoder layers: give each layer an island, or the whole model float32"
        )
    state = _state_of(module)
    state.islands.pop(owner, None)
    state.islands[owner] = Island(dtype, keep_output, rotary)


def clear_island(module: torch.nn.Module, *, owner: str = "") -> None:
    """Take an island off; weights that were held in its dtype get their own back, exactly.

    Args:
        module: as it was given to `set_island`; nothing happens when it has no island of that owner.
        owner: who set it.
    """
    state = module.__dict__.get(_STATE)
    if state is None:
        return
    state.islands.pop(owner, None)
    if not state.islands:
        for parameter, dtype in state.held:
            parameter.data = parameter.data.to(dtype)
        state.held.clear()
    _drop_if_empty(module)


def has_island(module: torch.nn.Module, *, owner: str | None = None) -> bool:
    """Tell whether a module is an island now: of one owner, or of any."""
    state: _State | None = module.__dict__.get(_STATE)
    return state is not None and (bool(state.islands) if owner is None else owner in state.islands)


def hold_island_weights(
    module: torch.nn.Module, dtype: torch.dtype = torch.float32, *, skip: Collection[int] = ()
) -> None:
    """Cast an island's frozen 16-bit weights once instead of at every use: exact, 2 more bytes a parameter.

    Call it while no graph lives; `clear_island` gives the weights back as they were.

    Args:
        module: an island in `dtype`.
        dtype: float32; a narrower one would lose digits for good.
        skip: `id` of parameters to leave alone, as those that another module shares.

    Raises:
        ValueError: another dtype, or no island.
    """
    state = module.__dict__.get(_STATE)
    if dtype != torch.float32 or state is None or state.island is None or state.island.dtype != dtype:
        raise ValueError("weights are held for islands in float32 only: any other cast is not exact")
    for parameter in module.parameters():
        # No gradient, so no optimizer knows it; its identity stays all the same.
        if parameter.requires_grad or parameter.dtype not in CASTABLE or parameter.dtype == dtype:
            continue
        if id(parameter) not in skip:
            state.held.append((parameter, parameter.dtype))
            parameter.data = parameter.data.to(dtype)


def set_region(model: torch.nn.Module, first_layer: int, dtype: torch.dtype) -> None:
    """Keep the residual stream in a dtype from one decoder layer's input to the final norm.

    Norms there compute in that dtype; attention and MLP get their input in the dtype that the stream had before, cast
    once, and their outputs are added to the wide stream. The final norm's output is the model's own dtype again.

    Args:
        model: the model, wrapped by PEFT or not; changed in place. A region that it has is replaced.
        first_layer: the first decoder layer of the region, from 0.
        dtype: of the stream.

    Raises:
        ValueError: there is no such layer.
    """
    layers = decoder_layers(model)
    if not 0 <= first_layer < len(layers):
        raise ValueError(f"the model has decoder layers 0 to {len(layers) - 1}, but no {first_layer}")
    clear_region(model)
    region = Region(dtype)
    _state_of(layers[first_layer]).enters = region
    for layer in layers[first_layer:]:
        for part in layer.children():
            if is_norm(part):
                _state_of(part).islands["region"] = Island(dtype, keep_output=True)
            elif any(True for _ in part.parameters()):
                _state_of(part).within = region
    for part in base_of(model).get_decoder().children():
        if is_norm(part):
            _state_of(part).islands["region"] = Island(dtype, region=region)


def clear_region(model: torch.nn.Module) -> None:
    """Take a region off; nothing happens when the model has none."""
    decoder = base_of(model).get_decoder()
    for part in [*decoder.children(), *(m for layer in decoder_layers(model) for m in (layer, *layer.children()))]:
        state = part.__dict__.get(_STATE)
        if state is not None:
            state.enters = state.within = None
            clear_island(part, owner="region")


def set_scores(
    module: torch.nn.Module, dtype: torch.dtype, *, rotary: torch.nn.Module | None = None, owner: str = "scores"
) -> None:
    """Make an attention's scores in a dtype, and leave the rest of it as it is.

    Queries, keys, their norms, the rotation and the softmax compute in `dtype`; value and output projections stay.

    Args:
        module: the attention module; changed in place.
        dtype: of the scores.
        rotary: the model's rotary embedding, as for `set_island`.
        owner: as for `set_island`.

    Raises:
        ValueError: queries and keys come from a joint projection, or the attention is not Surefoot's packed one.
    """
    name = type(module).__name__
    if not all(isinstance(getattr(module, part, None), torch.nn.Module) for part in SCORE_PARTS[:2]):
        raise ValueError(f"{name} has no projections of its own for queries and keys: make all of it an island")
    _refuse_other_attention(module)
    for part in score_parts(module):
        set_island(part, dtype, keep_output=True, owner=owner)
    _state_of(module).rotary = rotary
    module.__dict__[SCORE_DTYPE_ATTRIBUTE] = dtype


def clear_scores(module: torch.nn.Module, *, owner: str = "scores") -> None:
    """Take `set_scores` back."""
    for part in score_parts(module):
        clear_island(part, owner=owner)
    module.__dict__.pop(SCORE_DTYPE_ATTRIBUTE, None)
    state = module.__dict__.get(_STATE)
    if state is not None:
        state.rotary = None
        _drop_if_empty(module)


def set_attention_kernel(module: torch.nn.Module, name: str | None) -> None:
    """Choose how one attention module computes.

    Args:
        module: the attention module; changed in place.
        name: "eager" for the sums written out, "fused" for torch's fused attention whatever the length, None for the
            model's own choice.

    Raises:
        ValueError: an unknown name, an attention that is not Surefoot's packed one, or "fused" for an attention whose
            scores are soft-capped, which no fused kernel does.
    """
    if name is None:
        module.__dict__.pop(KERNEL_ATTRIBUTE, None)
        return
    if name not in ("eager", "fused"):
        raise ValueError(f'{name} is no attention kernel: "eager" or "fused"')
    _refuse_other_attention(module)
    if name == "fused" and getattr(module, "attn_logit_softcapping", None) is not None:
        raise ValueError(f"{type(module).__name__} soft-caps its scores, which no fused attention does")
    module.__dict__[KERNEL_ATTRIBUTE] = name


def attention_kernel(module: torch.nn.Module) -> str | None:
    """Return the kernel that was chosen for one attention module, or None."""
    return module.__dict__.get(KERNEL_ATTRIBUTE)


def _forward(self: torch.nn.Module, *args: Any, **kwargs: Any) -> Any:
    """Stand in for a module's forward while something lies over it."""
    state: _State = self.__dict__[_STATE]
    inner = state.before or partial(type(self).forward, self)
    if state.enters is not None:
        hidden = first_float((args, kwargs))
        if hidden is not None:
            state.enters.outside = hidden.dtype
        args, kwargs = replace_first_float(args, kwargs, state.enters.dtype)
    island = state.island
    if island is not None:
        return _run_island(self, island, inner, args, kwargs)
    if state.within is not None and state.within.outside is not None:
        args, kwargs = replace_first_float(args, kwargs, state.within.outside)
    if state.rotary is not None:
        kwargs = _with_exact_positions(self, state.rotary, self.__dict__[SCORE_DTYPE_ATTRIBUTE], kwargs)
    return inner(*args, **kwargs)


def _run_island(
    module: torch.nn.Module, island: Island, inner: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Any:
    like = first_float((args, kwargs))
    target = None if island.keep_output else like.dtype if like is not None else _own_dtype(module)
    if island.region is not None:
        target = island.region.outside
    checkpoints = recomputes(module) and module.gradient_checkpointing  # type: ignore[attr-defined]
    if checkpoints and module.training and torch.is_grad_enabled():
        # The layer would hand only its own forward to be computed again: without the casts around it.
        again = partial(_compute, module, island, inner, kwargs)
        output = module._gradient_checkpointing_func(again, *args)  # type: ignore[operator]
    else:
        output = _compute(module, island, inner, kwargs, *args)
    return output if target is None else cast_floats(output, target, only=island.dtype)


def _compute(
    module: torch.nn.Module, island: Island, inner: Callable[..., Any], kwargs: dict[str, Any], *args: Any
) -> Any:
    like = first_float((args, kwargs))
    device = like.device if like is not None else next(iter(module.parameters())).device
    if island.rotary is not None:
        kwargs = _with_exact_positions(module, island.rotary, island.dtype, kwargs)
    mask = cast_mask(kwargs.get("attention_mask"), island.dtype)
    args, kwargs = cast_floats((args, kwargs), island.dtype)
    if mask is not None:
        kwargs = kwargs | {"attention_mask": mask}
    if type(module) is torch.nn.Embedding and not module.weight.requires_grad:
        return inner(*args, **kwargs).to(island.dtype)  # a lookup rounds nothing: cast its rows, not the whole table
    own, flag = module.__dict__, "gradient_checkpointing"
    before = own.get(flag)
    if recomputes(module):
        own[flag] = False
    try:
        nothing = contextlib.nullcontext()
        cast = weights_in(module, island.dtype) if has_weights_to_cast(module, island.dtype) else nothing
        exact = nothing if torch.compiler.is_compiling() else ieee_float32()  # the switch is no part of a graph
        with torch.autocast(device.type, enabled=False), cast, exact:
            return inner(*args, **kwargs)
    finally:
        if recomputes(module):
            own.pop(flag, None)
            if before is not None:
                own[flag] = before


def _with_exact_positions(
    module: torch.nn.Module, rotary: torch.nn.Module, dtype: torch.dtype, kwargs: dict[str, Any]
) -> dict[str, Any]:
    """Make cos and sin anew: rounded to 16 bits they would turn a large query by its last digits."""
    rounded, positions = kwargs.get("position_embeddings"), kwargs.get("position_ids")
    first = first_float(rounded)
    if (
        first is None
        or positions is None
        or first.dtype == dtype
        or torch.finfo(first.dtype).eps <= torch.finfo(dtype).eps
    ):
        return kwargs
    kind = getattr(module, "layer_type", None)
    by_kind = "layer_type" in inspect.signature(type(rotary).forward).parameters
    arguments = {"layer_type": kind} if by_kind else {}
    made = rotary.forward(torch.empty(0, dtype=dtype, device=first.device), positions, **arguments)
    return kwargs | {"position_embeddings": made}


def _state_of(module: torch.nn.Module) -> _State:
    state = module.__dict__.get(_STATE)
    if state is None:
        state = module.__dict__[_STATE] = _State(module.__dict__.get("forward"))
        module.__dict__["forward"] = MethodType(_forward, module)  # a bound method follows a deep copy
    return state


def _drop_if_empty(module: torch.nn.Module) -> None:
    state: _State | None = module.__dict__.get(_STATE)
    if state is None or not state.empty:
        return
    del module.__dict__[_STATE], module.__dict__["forward"]
    if state.before is not None:
        module.__dict__["forward"] = state.before


def _own_dtype(module: torch.nn.Module) -> torch.dtype | None:
    return next((p.dtype for p in module.parameters() if p.dtype in CASTABLE), None)


def score_parts(module: torch.nn.Module) -> list[torch.nn.Module]:
    """Return the children that make an attention's queries and keys."""
    parts = (getattr(module, name, None) for name in SCORE_PARTS)
    return [part for part in parts if isinstance(part, torch.nn.Module)]


def _refuse_other_attention(module: torch.nn.Module) -> None:
    implementation = getattr(getattr(module, "config", None), "_attn_implementation", None)
    if implementation not in (SDPA_NAME, EAGER_NAME):
        raise ValueError(f"{type(module).__name__} computes by {implementation} attention, not by the packed one")
