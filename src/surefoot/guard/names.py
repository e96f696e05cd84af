"""Names of modules and tensors as Hugging Face gives them, without what wrappers add."""

from __future__ import annotations

import re
from typing import Any

# What wrappers put in front of a name or between its parts: PEFT's model, data parallelism, torch.compile,
# activation checkpointing and sharding by wrapping.
_FRONT = re.compile(r"^(?:module\.|_orig_mod\.)*base_model(?:\.model(?=\.|$)|$)\.?")
_WRAPPERS = frozenset(
    {
        "_orig_mod", "_checkpoint_wrapped_module", "_fsdp_wrapped_module",
        "base_layer", "original_module", "token_adapter",
    }
)  # fmt: skip
_ADAPTER_PARTS = ("lora_", "oft_", "ia3_", "hada_", "lokr_", "vera_lambda_", "trainable_tokens_")


def clean(name: str) -> str:
    """Turn a name as PEFT gives it into the Hugging Face name.

    An adapter's part has no name there, so it is named by the module that it adapts:
    "base_model.model.model.layers.0.mlp.up_proj.lora_A.default.weight" becomes "model.layers.0.mlp.up_proj".

    Args:
        name: dotted name of a module or a tensor.

    Returns:
        The name in the model as it was before any wrapper; "" for the model itself.
    """
    kept, _ = _split(name)
    return kept


def leaf_name(name: str) -> str:
    """Name a weight or buffer so that a person finds it: in the base model's files or in the adapter's.

    Args:
        name: dotted name as `named_parameters` or `named_buffers` gives it.

    Returns:
        The Hugging Face name; for an adapter's weight the adapted module's name, then the part as PEFT saves it, as
        "model.layers.0.mlp.up_proj.lora_A.weight".
    """
    kept, adapter = _split(name)
    if not adapter:
        return kept
    part = adapter[0], *adapter[2:]  # after the part's kind comes the adapter's own name, which files leave out
    return ".".join((kept, *part) if kept else part)


def owner_name(name: str) -> str:
    """Name the module that holds a weight or buffer, as `clean` would.

    Args:
        name: dotted name of the tensor as `named_parameters` or `named_buffers` gives it.

    Returns:
        The module's Hugging Face name; "" for the model itself.
    """
    kept, adapter = _split(name)
    return kept if adapter else kept.rpartition(".")[0]


def module_names(model: Any) -> dict[Any, str]:
    """Name every module of a model.

    Args:
        model: wrapped by PEFT or not.

    Returns:
        Modules to Hugging Face names; PEFT's layers and their parts share the name of the module they adapt.
    """
    return {module: clean(name) for name, module in model.named_modules()}


def _split(name: str) -> tuple[str, tuple[str, ...]]:
    """Return the Hugging Face name and, apart from it, the parts from an adapter's on."""
    bare = _FRONT.sub("", name)
    if bare.startswith("module."):
        bare = bare.removeprefix("module.")
    kept: list[str] = []
    parts = iter(bare.split(".") if bare else ())
    for part in parts:
        if part in _WRAPPERS:
            continue
        if part == "modules_to_save":
            next(parts, None)  # the adapter's name
            continue
        if part.startswith(_ADAPTER_PARTS):
            return ".".join(kept), (part, *parts)
        kept.append(part)
    return ".".join(kept), ()
