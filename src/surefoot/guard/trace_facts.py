"""What an operation's schema says: what it writes, whether it makes values at all."""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

# Operations that put given values where they are told: an infinity they place is a mask's.
_FILLS = frozenset(
    {
        "full", "full_like", "new_full", "fill", "masked_fill", "masked_scatter", "where", "triu", "tril",
        "scalar_tensor", "constant_pad_nd", "index_fill", "scatter", "index_put", "_index_put_impl", "slice_scatter",
        "select_scatter",
    }
)  # fmt: skip
# Operations that only hand values on: a NaN among their results was among what they were given.
_MOVES = _FILLS | {
    "copy", "clone", "detach", "lift_fresh", "zero", "cat", "stack", "_to_copy", "embedding", "index_select", "index",
    "gather",
}  # fmt: skip
# Of finite numbers they make finite numbers or, beyond the range, infinities: never a NaN (0/0, inf - inf, 0 * inf
# and roots of negative numbers are the others', and sums' whose parts overflow).
_WITHOUT_NAN = frozenset(
    {
        "add", "sub", "rsub", "mul", "neg", "abs", "sign", "square", "relu", "clamp", "clamp_min", "clamp_max",
        "minimum", "maximum", "amax", "amin", "exp", "exp2", "sigmoid", "tanh", "silu", "gelu", "softplus", "erf",
        "sin", "cos", "_softmax",
    }
)  # fmt: skip
_ALLOCATIONS = frozenset(
    {"empty", "empty_like", "new_empty", "empty_strided", "new_empty_strided", "empty_permuted", "resize_"}
)
# Shares its input's memory, though its schema does not say so.
_SILENT_VIEWS = frozenset({"_unsafe_view"})
# In-place operations that do not read what they overwrite.
_OVERWRITES = frozenset(
    {"copy_", "fill_", "zero_", "normal_", "uniform_", "bernoulli_", "random_", "exponential_", "log_normal_"}
)


@dataclass(frozen=True)
class OpFacts:
    """Facts of one operation.

    Attributes:
        name: aten name without overload, or "library::name".
        view: True when it makes no values, only another look at a tensor.
        fills: True when it puts given values where it is told.
        allocates: True when it reserves memory without writing it.
        written: position and name of the arguments that it writes.
        reads_written: True when it reads them first.
        moves: True when it makes no values, only hands them on.
        without_nan: True when it makes no NaN of finite numbers.
    """

    name: str
    view: bool
    fills: bool
    allocates: bool
    written: tuple[tuple[int, str], ...]
    reads_written: bool
    moves: bool = False
    without_nan: bool = False

    @property
    def plain(self) -> str:
        """The name without the mark of an in-place operation."""
        return self.name.removesuffix("_") if not self.name.startswith("_") else self.name


@functools.cache
def op_facts(func: Any) -> OpFacts:
    """Read an operation's facts.

    Args:
        func: an overload, as a dispatch mode gets it.

    Returns:
        Its facts.
    """
    schema = func._schema
    name = schema.name.removeprefix("aten::")
    written = tuple(
        (index, argument.name)
        for index, argument in enumerate(schema.arguments)
        if argument.alias_info is not None and argument.alias_info.is_write
    )
    out_only = any(argument.kwarg_only and argument.is_out for argument in schema.arguments)
    aliases = any(result.alias_info is not None for result in schema.returns)
    return OpFacts(
        name=name,
        view=(aliases and not written) or name in _SILENT_VIEWS,
        fills=name.removesuffix("_") in _FILLS,
        allocates=name in _ALLOCATIONS,
        written=written,
        reads_written=bool(written) and not out_only and name not in _OVERWRITES,
        moves=(name if name.startswith("_") else name.removesuffix("_")) in _MOVES,
        without_nan=(name if name.startswith("_") else name.removesuffix("_")) in _WITHOUT_NAN,
    )


def tensors_in(values: Sequence[Any]) -> list[torch.Tensor]:
    """Collect the tensors among arguments or results, lists of them included."""
    found: list[torch.Tensor] = []
    for value in values:
        if isinstance(value, torch.Tensor):
            found.append(value)
        elif isinstance(value, (list, tuple)):
            found.extend(item for item in value if isinstance(item, torch.Tensor))
    return found


def tensors_written(facts: OpFacts, args: Sequence[Any], kwargs: dict[str, Any]) -> list[torch.Tensor]:
    """Collect the tensors that a call writes in place or by `out=`."""
    values = [
        kwargs[name] if name in kwargs else args[i] for i, name in facts.written if name in kwargs or i < len(args)
    ]
    return tensors_in(values)


def largest_scalar(args: Sequence[Any], kwargs: dict[str, Any]) -> float:
    """Return the largest magnitude among a call's plain numbers; 0 without one, infinity for an infinity."""
    return max((abs(number) for number in scalars_in(args, kwargs) if not math.isnan(number)), default=0.0)


def scalars_in(args: Sequence[Any], kwargs: dict[str, Any]) -> list[float]:
    """Collect a call's plain numbers."""
    return [float(v) for v in (*args, *kwargs.values()) if isinstance(v, (int, float)) and not isinstance(v, bool)]
