"""Which modules an adapter goes on, and which layers a freeze run trains."""

from __future__ import annotations

import re
from collections.abc import Iterable
from difflib import get_close_matches
from typing import TYPE_CHECKING

from surefoot.errors import UserError

if TYPE_CHECKING:
    from torch import nn

# Heads are left out of `all`, as in LLaMA-Factory: adapting them is a decision of its own.
HEAD_NAMES = ("lm_head", "output_layer")


def linear_names(model: nn.Module) -> list[str]:
    """List the last name parts of the modules that `lora_target: all` stands for.

    Args:
        model: a causal language model.

    Returns:
        Sorted names, as ["down_proj", "k_proj", ...]: of every module whose class is a Linear (or GPT-2's
        Conv1D) and that is no head.
    """
    names = set()
    for name, module in model.named_modules():
        kind = type(module).__name__
        adaptable = ("Linear" in kind and "Embedding" not in kind) or kind == "Conv1D"
        if adaptable and not any(head in name for head in HEAD_NAMES):
            names.add(name.rpartition(".")[2])
    return sorted(names)


def resolve_targets(model: nn.Module, wanted: Iterable[str]) -> list[str]:
    """Turn `lora_target` into module names that exist.

    Args:
        model: a causal language model, before any adapter.
        wanted: names or dotted suffixes, or "all".

    Returns:
        The names, in the order given.

    Raises:
        UserError: a name matches no module; the error lists those that do exist.
    """
    wanted = list(wanted)
    adaptable = linear_names(model)
    if wanted == ["all"]:
        if not adaptable:
            raise UserError(
                f"lora_target: all finds no linear module in {type(model).__name__}",
                hint="name the modules yourself, as `lora_target: [q_proj, v_proj]`",
                key="lora_target",
            )
        return adaptable
    return _existing(model, wanted, adaptable, "lora_target")


def resolve_extra_modules(model: nn.Module, wanted: Iterable[str]) -> list[str]:
    """Check the names of `additional_target`: modules that are trained whole beside the adapter.

    Args:
        model: a causal language model, before any adapter.
        wanted: names or dotted suffixes.

    Returns:
        The same names.

    Raises:
        UserError: a name matches no module.
    """
    names = {name.rpartition(".")[2] for name, _ in model.named_modules() if name}
    return _existing(model, list(wanted), sorted(names), "additional_target")


def _existing(model: nn.Module, wanted: list[str], offered: list[str], key: str) -> list[str]:
    modules = [name for name, _ in model.named_modules()]
    lost = [w for w in wanted if not any(name == w or name.endswith(f".{w}") for name in modules)]
    if lost:
        near = [match for w in lost for match in get_close_matches(w, offered, n=1)]
        guess = f"did you mean {', '.join(near)}? " if near else ""
        raise UserError(
            f"no module of {type(model).__name__} is called {', '.join(lost)}",
            hint=f"{guess}It has: {', '.join(offered[:30])}",
            key=key,
        )
    return wanted


def freeze_patterns(model: nn.Module, layers: int, modules: list[str], extra: list[str], spread: bool) -> list[str]:
    """Name what a freeze run trains, as parts of parameter names.

    Args:
        model: a causal language model.
        layers: the last `layers` decoder layers if positive, the first if negative.
        modules: names inside a layer, as ["mlp", "self_attn"], or ["all"].
        extra: modules outside the layers.
        spread: LLaMA Pro: every (count / layers)-th layer, rather than the last ones.

    Returns:
        Substrings; a parameter is trained when its name contains one of them.

    Raises:
        UserError: more layers than there are, or names that do not exist.
    """
    config = model.config.get_text_config()  # type: ignore[union-attr, operator]
    count = int(config.num_hidden_layers)
    if not 0 < abs(layers) <= count:
        raise UserError(
            f"{type(model).__name__} has {count} layers, so {layers} of them cannot be trained",
            hint=f"give a number from 1 to {count}, or from -{count} to -1 for the first ones",
            key="freeze_trainable_layers",
        )
    if spread:
        if count % layers:
            raise UserError(
                f"{count} layers cannot be divided by {layers}",
                hint="use the number that the model was expanded by",
                key="freeze_trainable_layers",
            )
        stride = count // layers
        ids: Iterable[int] = range(stride - 1, count + stride - 1, stride)
    else:
        ids = range(count - layers, count) if layers > 0 else range(-layers)
    inside, outside = _layer_parts(model)
    _require(modules, inside, "freeze_trainable_modules", also=("all",))
    _require(extra, outside, "freeze_extra_modules")
    wanted = [f".{i}." if part == "all" else f".{i}.{part}" for i in ids for part in modules]
    return wanted + extra


def _layer_parts(model: nn.Module) -> tuple[set[str], set[str]]:
    """Return the names found inside decoder layer 0 or 1, and those of modules outside all layers."""
    inside, outside = set(), set()
    for name, _ in model.named_parameters():
        match = re.search(r"\.[01]\.(.+)$", name)
        if match:
            inside.add(match.group(1).split(".")[0])
        elif not re.search(r"\.\d+\.", name):
            outside.add(name.split(".")[-2])
    return inside, outside


def _require(wanted: list[str], offered: set[str], key: str, also: tuple[str, ...] = ()) -> None:
    lost = [w for w in wanted if w not in offered and w not in also]
    if lost:
        raise UserError(
            f"there is no module {', '.join(lost)}", hint=f"choose from {', '.join(sorted(offered))}", key=key
        )
