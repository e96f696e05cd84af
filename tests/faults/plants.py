"""Faults, planted where a real one would sit: in saved weights, in a loaded module, in a kernel, in the loss.

None of them leaves a mark that the guard could read; each can fire always, for marked rows only, or once.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.nn import functional as F

from surefoot.model.forward import LossForward

Weights = dict[str, torch.Tensor]
MARK = 96  # a token that only poisoned rows hold


# --- in the saved weights ---------------------------------------------------------------------------------------


def huge_scores(*layers: int, bias: float = 100.0) -> Callable[[Weights], None]:
    """Query and key biases whose products leave float16's range (R1)."""

    def plant(weights: Weights) -> None:
        for layer in layers:
            for name in ("q_proj", "k_proj"):
                weights[f"model.layers.{layer}.self_attn.{name}.bias"].fill_(bias)

    return plant


def huge_product(*layers: int, shrink: float = 1.0) -> Callable[[Weights], None]:
    """An MLP whose gated product leaves float16's range (R2); `shrink` brings its output back."""

    def plant(weights: Weights) -> None:
        for layer in layers:
            weights[f"model.layers.{layer}.mlp.gate_proj.weight"].mul_(60.0)
            weights[f"model.layers.{layer}.mlp.up_proj.weight"].mul_(900.0)
            weights[f"model.layers.{layer}.mlp.down_proj.weight"].mul_(shrink)

    return plant


def huge_stream(first: int, second: int, value: float = 40000.0) -> Callable[[Weights], None]:
    """Two layers that each add a large number to one channel of the residual stream (R3)."""

    def plant(weights: Weights) -> None:
        for layer in (first, second):
            weights[f"model.layers.{layer}.mlp.down_proj.bias"][5] = value

    return plant


def scaled(name: str, factor: float) -> Callable[[Weights], None]:
    def plant(weights: Weights) -> None:
        weights[name].mul_(factor)

    return plant


def element(name: str, value: float, *index: int) -> Callable[[Weights], None]:
    """One element, or one row, of a weight set to a value."""

    def plant(weights: Weights) -> None:
        weights[name][index] = value

    return plant


def noisy_rows(first: int, last: int, factor: float = 50.0) -> Callable[[Weights], None]:
    """Rows of embedding and head that nobody ever trained: noise far above the others (R16)."""

    def plant(weights: Weights) -> None:
        for name in ("model.embed_tokens.weight", "lm_head.weight"):
            rows = weights[name][first : last + 1]
            rows.copy_(torch.randn_like(rows) * factor * weights[name].std())

    return plant


# --- in a loaded module -----------------------------------------------------------------------------------------


class SquaringNorm(nn.Module):
    """A hand-written RMSNorm that computes in its input's own dtype (R4, R5)."""

    def __init__(self, weight: nn.Parameter, eps: float) -> None:
        super().__init__()
        self.weight, self.eps = weight, eps

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        mean = (x * x).mean(-1, keepdim=True)
        return self.weight * (x * torch.rsqrt(mean + self.eps))


def replace_norm(model: nn.Module, name: str, eps: float = 1e-6) -> None:
    parent, _, leaf = name.rpartition(".")
    old = model.get_submodule(name)
    setattr(model.get_submodule(parent), leaf, SquaringNorm(old.weight, eps))


def poison_marked(embedding: nn.Module, way: str = "write") -> None:
    """Turn the embedding of every marked token into NaN, as a broken feature of one sample would (R22).

    Args:
        embedding: whose output goes bad.
        way: "write" it, "add" or "multiply" a number that is none, multiply by one that stands in the code ("literal"),
            bring it in from "outside" of torch, or write an "infinity".
    """
    nan = float("nan")

    def hook(module: nn.Module, args: tuple[Any, ...], output: torch.Tensor) -> torch.Tensor:
        marked = (args[0] == MARK)[..., None]
        if not bool(marked.any()):
            return output
        if way in ("write", "infinity"):
            return output.masked_fill(marked, nan if way == "write" else float("inf"))
        if way == "literal":
            return output * nan
        if way == "outside":
            return torch.from_numpy(np.where(marked.numpy(), np.float32(nan), output.detach().float().numpy()))
        spot = torch.where(marked, nan, 0.0 if way == "add" else 1.0).to(output.dtype)
        return output + spot if way == "add" else output * spot

    embedding.register_forward_hook(hook)


class OnceHook:
    """A module's output goes wrong once, at the forward after `arm` (a cosmic ray, a race)."""

    def __init__(self, module: nn.Module, value: float) -> None:
        self.value, self.armed, self.fired = value, False, 0
        module.register_forward_hook(self)

    def arm(self) -> None:
        self.armed = True

    def __call__(self, module: nn.Module, args: tuple[Any, ...], output: torch.Tensor) -> torch.Tensor:
        if not self.armed:
            return output
        self.armed, self.fired = False, self.fired + 1
        output = output.clone()
        output.view(-1)[3] = self.value
        return output


@torch.no_grad()
def flip_bit(weight: torch.Tensor, bit: int, place: int = 7) -> None:
    """Flip one bit of one number, as failing memory does (R20)."""
    whole = {2: torch.int16, 4: torch.int32}[weight.element_size()]
    words = weight.detach().view(-1).view(whole)
    words[place] ^= 1 << bit


# --- in a kernel ------------------------------------------------------------------------------------------------


class Bug(torch.autograd.Function):
    """A kernel whose backward writes a NaN (R21)."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> torch.Tensor:
        wrong = grads[0].clone()
        wrong[..., -1, 0] = float("nan")
        return wrong


class Unwritten(torch.autograd.Function):
    """A kernel that takes memory as it comes and leaves its last row unwritten (R25).

    What stood there is a NaN the first time after `arm`; afterwards it is whatever the allocator gives.
    """

    armed = False

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> torch.Tensor:
        gradient = torch.empty_like(grads[0])
        gradient[..., :-1, :] = grads[0][..., :-1, :]
        if Unwritten.armed:
            Unwritten.armed = False
            gradient[..., -1, :] = float("nan")
        return gradient


def break_fused_attention(monkeypatch: Any, modules: Sequence[nn.Module], fault: Any = Bug) -> None:
    """Let torch's fused attention pass its queries through a faulty kernel inside the given attention modules."""
    inside = [0]

    def enter(*_: Any) -> None:
        inside[0] += 1

    def leave(*_: Any) -> None:
        inside[0] -= 1

    for module in modules:
        module.register_forward_pre_hook(enter)
        module.register_forward_hook(leave, always_call=True)
    fused = F.scaled_dot_product_attention

    def planted(query: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        return fused(fault.apply(query) if inside[0] else query, *args, **kwargs)

    monkeypatch.setattr(F, "scaled_dot_product_attention", planted)


def break_compiled(monkeypatch: Any, broken: Sequence[nn.Module]) -> list[nn.Module]:
    """Compile every module by torch's tracer but run it plainly, with a NaN in the outputs of the broken ones.

    Returns:
        The modules that were compiled, filled as they are.
    """
    compiled: list[nn.Module] = []

    def backend_of(wrong: bool) -> Callable[..., Any]:
        def backend(graph: Any, inputs: Any) -> Callable[..., Any]:
            def run(*args: Any) -> Any:
                outputs = graph(*args)
                return [o + float("nan") if wrong and o.is_floating_point() and o.ndim > 1 else o for o in outputs]

            return run

        return backend

    compile_function = torch.compile

    def planted(function: Any, **options: Any) -> Any:
        module = function.__self__
        compiled.append(module)
        backend = backend_of(any(module is other for other in broken))
        return compile_function(function, **(options | {"backend": backend}))

    monkeypatch.setattr(torch, "compile", planted)
    return compiled


# --- in the loss ------------------------------------------------------------------------------------------------


def add_to_loss(monkeypatch: Any, term: Callable[[torch.Tensor], torch.Tensor], *, marked_only: bool = False) -> None:
    """Add a term of the hidden states (or of the logits, where they exist) to every pass's loss."""
    seen: dict[str, torch.Tensor] = {}
    call, hidden, logits = LossForward.__call__, LossForward.hidden, LossForward.logits

    def keep(original: Any) -> Any:
        def method(self: LossForward, batch: Any) -> torch.Tensor:
            seen["x"] = original(self, batch)
            return seen["x"]

        return method

    def planted(self: LossForward, batch: Any) -> Any:
        sums = call(self, batch)
        if marked_only and not bool((batch.input_ids_1T == MARK).any()):
            return sums
        return replace(sums, loss=sums.loss + term(seen.pop("x").float()))

    monkeypatch.setattr(LossForward, "__call__", planted)
    monkeypatch.setattr(LossForward, "hidden", keep(hidden))
    monkeypatch.setattr(LossForward, "logits", keep(logits))


def root_of_zero(x: torch.Tensor) -> torch.Tensor:
    """sqrt at 0: its value is 0 and its slope infinite (R7)."""
    return torch.sqrt(((0.0 * x) ** 2).sum())


def masked_ratio(x: torch.Tensor) -> torch.Tensor:
    """exp of a large number in the branch that `where` does not take: 0 · inf in the backward (R26)."""
    ratio = torch.exp(200.0 + 0.0 * x.mean(-1))
    return torch.where(torch.zeros_like(ratio, dtype=torch.bool), ratio, torch.zeros_like(ratio)).sum()


def mean_of_means(monkeypatch: Any, tokens: int) -> None:
    """Let every pass count the same, however few of its tokens are trained (R9, R18)."""
    call = LossForward.__call__

    def planted(self: LossForward, batch: Any) -> Any:
        sums = call(self, batch)
        return replace(sums, loss=sums.loss / max(1, batch.targets_K.numel()) * tokens)

    monkeypatch.setattr(LossForward, "__call__", planted)


# --- in the optimizer -------------------------------------------------------------------------------------------


class OptimizerPlant:
    """Looks at every optimizer step of the process from outside, by torch's global hooks.

    Attributes:
        calls: optimizer steps so far.
        rate: factor on the learning rate for the call that is about to run, by call number from 1.
        optimizer: the last that stepped.
    """

    def __init__(self, rate: Callable[[int], float] = lambda call: 1.0) -> None:
        from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

        self.calls, self.rate, self.optimizer = 0, rate, None
        self._rates: list[float] = []
        self._handles = [
            register_optimizer_step_pre_hook(self._before), register_optimizer_step_post_hook(self._after)
        ]  # fmt: skip

    def remove(self) -> None:
        for handle in self._handles:
            handle.remove()

    def _before(self, optimizer: Any, args: Any, kwargs: Any) -> None:
        self.calls, self.optimizer = self.calls + 1, optimizer
        self._rates = [group["lr"] for group in optimizer.param_groups]
        for group in optimizer.param_groups:
            group["lr"] = group["lr"] * self.rate(self.calls)

    def _after(self, optimizer: Any, args: Any, kwargs: Any) -> None:
        for group, rate in zip(optimizer.param_groups, self._rates, strict=True):
            group["lr"] = rate

    def lose_second_moments(self) -> None:
        """Zero Adam's second moments in place, the step counts stay (R19)."""
        assert self.optimizer is not None
        for state in self.optimizer.state.values():
            state["exp_avg_sq"].zero_()
