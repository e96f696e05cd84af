"""What an operation does in a model, told by the model's structure and its modules' names."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from surefoot.guard.diagnosis import Phase, Place
from surefoot.guard.names import module_names

PRODUCTS = frozenset({"mm", "bmm", "addmm", "baddbmm", "addbmm", "matmul", "mv", "addmv"})
SOFTMAXES = frozenset({"_softmax", "_log_softmax", "_safe_softmax", "softmax"})
_SCORE_OPS = frozenset(
    {"_softmax", "_safe_softmax", "_softmax_backward_data", "_safe_softmax_backward", "tanh_backward"}
)
_ATTENTION = ("attn", "attention")
_NORM = ("norm", "ln_", "layer_norm")
_MLP = ("mlp", "feed_forward", "feedforward", "ffn", "expert", "block_sparse_moe")
_ROUTER = ("router", "gate")


class Places:
    """Tells where in a model a module stands.

    Attributes:
        head: Hugging Face name of the module that makes the logits; None when the model has none.
    """

    head: str | None

    def __init__(self, model: Any) -> None:
        """Read the model's structure.

        Args:
            model: wrapped by PEFT or not.
        """
        names = module_names(model)
        self._classes: dict[str, str] = {}
        self._roles: dict[str, Place] = {}
        self._blocks: set[str] = set()
        for module, name in names.items():
            self._classes.setdefault(name, type(module).__name__.lower())
        for module in names:
            if isinstance(module, torch.nn.ModuleList):
                self._blocks |= {names[child] for child in module if _is_block(child)}
        head = _head(model)
        self.head = names.get(head) if head is not None else None
        for module, name in names.items():
            role = self._role(module, name)
            if role is not None:
                self._roles.setdefault(name, role)

    def block_of(self, module: str | None) -> str | None:
        """Name the decoder layer that a module is in, itself included.

        Args:
            module: Hugging Face name.

        Returns:
            The layer's name; None when it is in none.
        """
        while module:
            if module in self._blocks:
                return module
            module = module.rpartition(".")[0]
        return None

    def is_attention(self, module: str | None) -> bool:
        """Tell whether a module is an attention module itself, not a projection in it."""
        return module is not None and self._roles.get(module) == "attention"

    def place(
        self, module: str | None, op: str, phase: Phase, shape: Sequence[int], scored: bool | None = None
    ) -> Place | None:
        """Tell what an operation does.

        Args:
            module: the module that it ran in; None outside of every module.
            op: its aten name.
            phase: of the pass.
            shape: of the tensor that it made.
            scored: in an attention module's forward, whether the operation works on scores: the product of queries
                and keys has been taken and the weighted sum has not. None when that was not followed.

        Returns:
            The place; None when it cannot be told.
        """
        if module is None:
            return "loss"
        if module == self.head:
            return "logits"
        if module in self._blocks:
            return "residual stream"
        name = module
        while name:
            role = self._roles.get(name)
            if role == "attention" and name == module:
                return self._attention_place(op, phase, shape, scored)
            if role is not None:
                return role
            if name in self._blocks:
                return None
            name = name.rpartition(".")[0]
        # The decoder itself: masks are square, embeddings may be scaled there.
        if len(shape) >= 2 and shape[-1] == shape[-2] and op in ("add", "masked_fill", "where"):
            return "attention mask"
        return "embedding" if op in ("mul", "mul_", "embedding") else None

    def _attention_place(self, op: str, phase: Phase, shape: Sequence[int], scored: bool | None) -> Place:
        square = len(shape) >= 3 and shape[-1] == shape[-2]
        if op.rstrip("_") in _SCORE_OPS or op in _SCORE_OPS:
            return "attention scores"
        if phase == "forward" and scored is not None:
            return "attention scores" if scored else "attention"
        return "attention scores" if square else "attention"

    def _role(self, module: Any, name: str) -> Place | None:
        last = name.rpartition(".")[2].lower()
        kind = type(module).__name__.lower()
        if isinstance(module, torch.nn.Embedding):
            return "embedding"
        if name == "" or name in self._blocks or isinstance(module, torch.nn.ModuleList):
            return None
        if "rotary" in last or "rotary" in kind:
            return "attention"
        if any(word in last for word in _NORM) or kind.endswith("norm"):
            return "norm"
        if "router" in last or "router" in kind or (last in _ROUTER and self._is_moe(name.rpartition(".")[0])):
            return "router"
        if any(word in last for word in _ATTENTION) or kind.endswith(_ATTENTION):
            return "attention"
        if any(word in last for word in _MLP) or kind.endswith(("mlp", "experts")):
            return "MLP product"
        return None

    def _is_moe(self, name: str) -> bool:
        return f"{name}.experts" in self._classes


def common_module(names: Sequence[str | None]) -> str | None:
    """Name the innermost module that holds all of the given ones.

    Args:
        names: Hugging Face names; None or "" stands for outside of every module.

    Returns:
        Its name; None when nothing holds them all.
    """
    paths = [(name or "").split(".") for name in names]
    shared: list[str] = []
    for parts in zip(*paths, strict=False):
        if len(set(parts)) > 1:
            break
        shared.append(parts[0])
    return ".".join(shared) or None


def _is_block(module: Any) -> bool:
    """A decoder layer holds attention or another mixer, and more besides."""
    children = [name.lower() for name, _ in module.named_children()]
    return len(children) > 1 and any(
        word in name for name in children for word in (*_ATTENTION, "mixer", "mamba", "temporal_block", "mlp")
    ) and any(word in name for name in children for word in _NORM)  # fmt: skip


def _head(model: Any) -> Any:
    try:
        return model.get_output_embeddings()
    except (AttributeError, NotImplementedError):  # a model without a head, as in some tests
        return None
