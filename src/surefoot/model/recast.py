"""Computing in another number format for a while: casting what goes in, and the weights while they are used."""

from __future__ import annotations

import contextlib
from collections.abc import Generator, Iterator
from typing import Any

import torch

# Weights that a cast means something for. A quantised base holds bytes, which its layers expand to the inputs' dtype.
CASTABLE = (torch.float16, torch.bfloat16, torch.float32)


def cast_floats(tree: Any, dtype: torch.dtype, only: torch.dtype | None = None) -> Any:
    """Cast every floating tensor in nested tuples, lists and dicts.

    Args:
        tree: tensors and anything else; everything else is passed on as it is.
        dtype: to cast to.
        only: cast tensors of this dtype alone; None for all.

    Returns:
        The same structure.
    """
    if isinstance(tree, torch.Tensor):
        cast = tree.dtype in CASTABLE and (only is None or tree.dtype == only)
        return tree.to(dtype) if cast else tree
    if isinstance(tree, tuple):
        parts = [cast_floats(part, dtype, only) for part in tree]
        return type(tree)(*parts) if hasattr(tree, "_fields") else tuple(parts)
    if type(tree) is list:
        return [cast_floats(part, dtype, only) for part in tree]
    if type(tree) is dict:
        return {key: cast_floats(part, dtype, only) for key, part in tree.items()}
    return tree


def cast_mask(mask: Any, dtype: torch.dtype) -> Any:
    """Cast an additive attention mask so that what it hides stays hidden.

    A mask made in float16 hides with -65504, which a float32 score may exceed; one made in float32 hides with a
    number that becomes -inf in bfloat16, and a row of those has no softmax.

    Args:
        mask: additive mask; a bool mask, None or anything else is passed on.
        dtype: to cast to.

    Returns:
        The mask, with the lowest finite number of `dtype` wherever it held the lowest of its own.
    """
    if not isinstance(mask, torch.Tensor) or mask.dtype not in CASTABLE or mask.dtype == dtype:
        return mask
    hidden = mask <= torch.finfo(mask.dtype).min
    return mask.to(dtype).masked_fill(hidden, torch.finfo(dtype).min)


def first_float(tree: Any) -> torch.Tensor | None:
    """Return the first floating tensor in nested tuples, lists and dicts, or None."""
    return next(_floats(tree), None)


def replace_first_float(args: tuple[Any, ...], kwargs: dict[str, Any], dtype: torch.dtype) -> tuple[Any, Any]:
    """Cast the first floating tensor of a call, which is the hidden states by transformers' custom.

    Args:
        args: the call's positional arguments.
        kwargs: the call's named arguments.
        dtype: to cast to.

    Returns:
        The arguments, new where something changed.
    """
    for place, value in enumerate(args):
        if isinstance(value, torch.Tensor) and value.dtype in CASTABLE:
            return (*args[:place], value.to(dtype), *args[place + 1 :]), kwargs
    for key, value in kwargs.items():
        if isinstance(value, torch.Tensor) and value.dtype in CASTABLE:
            return args, kwargs | {key: value.to(dtype)}
    return args, kwargs


@contextlib.contextmanager
def weights_in(module: torch.nn.Module, dtype: torch.dtype) -> Generator[None]:
    """Let a module and its children see their weights in a dtype; the parameters themselves are not touched.

    A trained parameter's cast carries its graph, so that the gradient arrives at the parameter in its own dtype.
    float32 buffers stay: they hold what is computed in float32 by design, as rotary frequencies.

    Args:
        module: whose weights to cast.
        dtype: to cast to.

    Yields:
        Nothing.
    """
    replaced: list[tuple[dict[str, Any], str, Any]] = []
    made: dict[int, torch.Tensor] = {}
    try:
        for part in module.modules():
            for store, narrow_only in ((part._parameters, False), (part._buffers, True)):
                for name, tensor in store.items():
                    if not _needs_cast(tensor, dtype, narrow_only):
                        continue
                    if id(tensor) not in made:
                        made[id(tensor)] = tensor.to(dtype)  # type: ignore[union-attr]
                    replaced.append((store, name, tensor))
                    store[name] = made[id(tensor)]  # type: ignore[assignment]
        yield
    finally:
        for store, name, tensor in replaced:
            store[name] = tensor


def has_weights_to_cast(module: torch.nn.Module, dtype: torch.dtype) -> bool:
    """Tell whether a module holds weights in another dtype than this one."""
    return any(_needs_cast(p, dtype, False) for p in module.parameters()) or any(
        _needs_cast(b, dtype, True) for b in module.buffers()
    )


@contextlib.contextmanager
def ieee_float32() -> Generator[None]:
    """Compute float32 products in float32: no TF32, nor the xf32 of MI300, whose sums are biased.

    Yields:
        Nothing.
    """
    stores = [torch.backends.cuda.matmul, torch.backends.mkldnn.matmul]  # type: ignore[attr-defined]
    if not all(hasattr(store, "fp32_precision") for store in stores):  # before torch 2.9
        before = torch.get_float32_matmul_precision()
        torch.set_float32_matmul_precision("highest")
        try:
            yield
        finally:
            torch.set_float32_matmul_precision(before)
        return
    changed = [(store, store.fp32_precision) for store in stores if store.fp32_precision not in ("none", "ieee")]
    try:
        for store, _ in changed:
            store.fp32_precision = "ieee"
        yield
    finally:
        for store, precision in changed:
            store.fp32_precision = precision


def _needs_cast(tensor: torch.Tensor | None, dtype: torch.dtype, narrow_only: bool) -> bool:
    if tensor is None or tensor.dtype not in CASTABLE or tensor.dtype == dtype:
        return False
    return not (narrow_only and tensor.dtype == torch.float32)


def _floats(tree: Any) -> Iterator[torch.Tensor]:
    if isinstance(tree, torch.Tensor):
        if tree.dtype in CASTABLE:
            yield tree
    elif isinstance(tree, (tuple, list)):
        for part in tree:
            yield from _floats(part)
    elif isinstance(tree, dict):
        for part in tree.values():
            yield from _floats(part)
