"""In which module of the model is the work that runs now? Forward, backward and recompute."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Generator, Iterator
from typing import Any

import torch
from torch.utils._pytree import tree_leaves

from surefoot.guard.diagnosis import Phase
from surefoot.guard.names import module_names
from surefoot.guard.places import Places, common_module

_STAMP = "surefoot_module"
# Autograd functions that only carry other operations: what runs inside them is reported, not they.
_TRANSPARENT = ("surefoot.", "torch.utils.checkpoint")


class ModuleTrail:
    """Follows a model's module calls, and stamps every autograd node with the module that made it.

    Attributes:
        stack: Hugging Face names of the modules that run now, outermost first.
        scoring: for each of them, whether an attention module's call is between its scores' product and its
            weighted sum: 0 before, 1 after the product, 2 after the softmax.
    """

    stack: list[str]
    scoring: list[int]

    def __init__(self, model: Any, places: Places) -> None:
        """Prepare for one model.

        Args:
            model: wrapped by PEFT or not.
            places: of the same model.
        """
        self._names = module_names(model)
        self._places = places
        self.stack, self.scoring = [], []

    @contextlib.contextmanager
    def hooked(self, look: Callable[[Any], None]) -> Generator[None, None, None]:
        """Hook every module for the time of the context.

        Args:
            look: called with what goes into a module, before it counts as running, and with what comes out of it,
                while it still does.

        Yields:
            Nothing.
        """
        handles = []
        try:
            for module in self._names:
                # First of the pre-hooks, last of the hooks, so that what other hooks compute counts to the module.
                enter, leave = functools.partial(self._enter, look), functools.partial(self._leave, look)
                handles.append(module.register_forward_pre_hook(enter, prepend=True, with_kwargs=True))
                # Always called, since recompute stops early by an exception.
                handles.append(module.register_forward_hook(leave, always_call=True))
            yield
        finally:
            for handle in handles:
                handle.remove()
            self.stack.clear()
            self.scoring.clear()

    def module_now(self) -> str | None:
        """Name the innermost module whose forward runs; None outside of every module."""
        return (self.stack[-1] or None) if self.stack else None

    def where(self) -> tuple[str | None, Phase, Any]:
        """Tell where the current operation runs.

        Returns:
            The module's name (None outside of every module, or when it is not known), the phase, and in the backward
            the autograd node; that is None while the engine itself adds gradients up.
        """
        if self.stack:
            return self.module_now(), "forward", None
        if torch._C._current_graph_task_id() == -1:
            return None, "forward", None
        node = torch._C._current_autograd_node()
        if torch.is_grad_enabled():
            # Recompute: transformers checkpoints a layer's forward without its hooks, so the layer itself is not on
            # the stack; the node that asked for its activations lies in it.
            return self._places.block_of(stamp_of(node)), "forward", None
        return stamp_of(node), "backward", node

    def note_op(self, name: str, product: bool, softmax: bool) -> bool | None:
        """Follow an attention module's forward through its products and softmax.

        Args:
            name: the operation.
            product: True for a product of batches of matrices.
            softmax: True for a softmax.

        Returns:
            True when the operation works on scores; None outside of an attention module.
        """
        if not self.stack or not self._places.is_attention(self.stack[-1]):
            return None
        state = self.scoring[-1]
        if product:
            self.scoring[-1] = {0: 1, 1: 1, 2: 0}[state]
            return state < 2
        if softmax:
            self.scoring[-1] = 2
            return True
        return state == 1

    def _enter(self, look: Callable[[Any], None], module: torch.nn.Module, args: Any, kwargs: Any) -> None:
        stamp((args, kwargs), self.module_now())
        look((args, kwargs))
        self.stack.append(self._names[module])
        self.scoring.append(0)

    def _leave(self, look: Callable[[Any], None], _module: torch.nn.Module, _args: Any, output: Any) -> None:
        stamp(output, self.module_now())
        look(output)
        if self.stack:
            self.stack.pop()
            self.scoring.pop()


def stamp(tree: Any, module: str | None) -> None:
    """Write a module's name on all autograd nodes behind some tensors that carry none yet.

    Args:
        tree: tensors in any nesting.
        module: the name; None for outside of every module.
    """
    todo: list[Any] = [leaf.grad_fn for leaf in tree_leaves(tree) if isinstance(leaf, torch.Tensor)]
    while todo:
        node = todo.pop()
        if node is None or _STAMP in node.metadata:
            continue
        node.metadata[_STAMP] = module
        todo.extend(next_node for next_node, _ in node.next_functions)


def stamp_of(node: Any) -> str | None:
    """Return the module that made an autograd node; None when it has no stamp, as in the loss."""
    return None if node is None else node.metadata.get(_STAMP)


def nodes_behind(loss: torch.Tensor) -> Iterator[Any]:
    """Walk all autograd nodes of a graph.

    Args:
        loss: its root.

    Yields:
        Each node once, without those that only add a gradient to a parameter.
    """
    seen, todo = set(), [loss.grad_fn]
    while todo:
        node = todo.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        todo.extend(next_node for next_node, _ in node.next_functions)
        if node.next_functions:
            yield node


def custom_name(node: Any) -> str | None:
    """Name a node that is somebody's own autograd function.

    Args:
        node: an autograd node, or None.

    Returns:
        Its name, as "BugBackward"; None for torch's own nodes and for functions that only carry other operations.
    """
    kind = type(node)
    if not issubclass(kind, torch.autograd.function.BackwardCFunction):
        return None
    origin = getattr(kind, "_forward_cls", kind).__module__
    return None if origin.startswith(_TRANSPARENT) else node.name()


def meeting_module(places: Places, makers: list[str | None]) -> str | None:
    """Name the module in which gradients meet that the engine adds up.

    Args:
        places: of the model.
        makers: the modules whose backward made them.

    Returns:
        The innermost module that holds all makers; a decoder layer where one of them stands in it alone.
    """
    known = [maker for maker in makers if maker]
    if not known:
        return None
    shared = common_module(known)
    # Gradients of two layers can only meet in the residual stream, at the later layer's input.
    return shared if shared in makers or places.block_of(shared) else places.block_of(known[-1]) or shared
