"""The optimizer and its schedule, by LLaMA-Factory's names, from torch and transformers."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch

from surefoot.errors import UserError

if TYPE_CHECKING:
    from surefoot.config import Config

# Parameters without weight decay, as transformers' Trainer chooses them: biases and norms.
NO_DECAY = re.compile(r"bias$|layernorm|rmsnorm|(?:^|\.)norm(?:$|\.)|_norm(?:$|\.)", re.IGNORECASE)


def build_optimizer(
    model: torch.nn.Module, cfg: Config, trained: Mapping[str, torch.nn.Parameter] | None = None
) -> torch.optim.Optimizer:
    """Build the YAML's optimizer over the trainable parameters.

    Args:
        model: its parameters that require gradients are optimized, in the order of their names.
        cfg: the YAML; `optim`, `learning_rate`, `weight_decay`, `adam_*` and `optim_args` are read.
        trained: pieces of the parameters, to be optimized instead, by their names; None for the model's own.

    Returns:
        The optimizer, with two groups: with and without weight decay.

    Raises:
        UserError: the optimizer is unknown here, or its arguments are.
    """
    if trained is None:
        trained = {name: p for name, p in model.named_parameters() if p.requires_grad}
    ordered = sorted(trained.items())
    groups = [
        {"params": [p for name, p in ordered if not NO_DECAY.search(name)], "weight_decay": cfg.weight_decay},
        {"params": [p for name, p in ordered if NO_DECAY.search(name)], "weight_decay": 0.0},
    ]
    kind, fixed = _optimizer_class(cfg)
    arguments = fixed | _optimizer_arguments(cfg.optim_args)
    try:
        return kind([group for group in groups if group["params"]], lr=cfg.learning_rate, **arguments)
    except TypeError as error:  # an argument that this optimizer does not have
        raise UserError(
            f"{cfg.optim} does not take these arguments: {error}", hint="remove or rename them", key="optim_args"
        ) from error


def build_scheduler(optimizer: torch.optim.Optimizer, cfg: Config, total_steps: int) -> Any:
    """Build the YAML's learning-rate schedule.

    Args:
        optimizer: whose rate it sets.
        cfg: the YAML; `lr_scheduler_type`, `lr_scheduler_kwargs`, `warmup_steps` and `warmup_ratio` are read.
        total_steps: optimizer steps of the run.

    Returns:
        The schedule; one `step()` per optimizer step.

    Raises:
        UserError: the schedule's own arguments are wrong.
    """
    from transformers import get_scheduler

    warmup = warmup_steps(cfg, total_steps)
    extra = dict(cfg.lr_scheduler_kwargs or {})
    if cfg.lr_scheduler_type == "warmup_stable_decay":
        stable = (total_steps - warmup) // 3  # as LLaMA-Factory: a third at the top, the rest down
        extra = {"num_stable_steps": stable, "num_decay_steps": total_steps - warmup - stable} | extra
    try:
        return get_scheduler(cfg.lr_scheduler_type, optimizer, warmup, total_steps, extra)
    except (TypeError, ValueError) as error:
        raise UserError(
            f"{cfg.lr_scheduler_type}: {error}", hint="check its arguments", key="lr_scheduler_kwargs"
        ) from error


def warmup_steps(cfg: Config, total_steps: int) -> int:
    """Return the steps of warm-up: `warmup_steps` if given, else `warmup_ratio` of the run, rounded up."""
    if cfg.warmup_steps >= 1:
        return int(cfg.warmup_steps)
    return math.ceil(total_steps * (cfg.warmup_steps or cfg.warmup_ratio or 0.0))


def _optimizer_class(cfg: Config) -> tuple[Any, dict[str, Any]]:
    betas = {"betas": (cfg.adam_beta1, cfg.adam_beta2), "eps": cfg.adam_epsilon}
    optim = torch.optim
    if cfg.optim == "adafactor":
        from transformers.optimization import Adafactor

        return Adafactor, {"scale_parameter": False, "relative_step": False}
    kinds: dict[str, tuple[Any, dict[str, Any]]] = {
        # Fused: one kernel, arithmetic in float32, and it obeys a gate on the device (see `gate.Gate`).
        "adamw_torch": (optim.AdamW, betas | {"fused": True}),
        "adamw_torch_fused": (optim.AdamW, betas | {"fused": True}),
        "sgd": (optim.SGD, {}),
        "adagrad": (optim.Adagrad, {}),
        "rmsprop": (optim.RMSprop, {}),
    }
    if cfg.optim not in kinds:
        raise UserError(
            f"the optimizer {cfg.optim} is not built in",
            hint=f"use one of {', '.join([*kinds, 'adafactor'])}",
            key="optim",
        )
    return kinds[cfg.optim]


def _optimizer_arguments(text: str | None) -> dict[str, Any]:
    """Read `optim_args`, as "momentum=0.9,nesterov=true"."""
    arguments: dict[str, Any] = {}
    for part in (text or "").replace(" ", "").split(","):
        if not part:
            continue
        name, equals, value = part.partition("=")
        if not equals:
            raise UserError(f"{part!r} is not name=value", hint="write momentum=0.9,nesterov=true", key="optim_args")
        arguments[name] = {"true": True, "false": False}.get(value.lower(), value)
        if isinstance(arguments[name], str):
            try:
                arguments[name] = float(value)
            except ValueError as error:
                message = f"{value!r} is neither a number nor true or false"
                raise UserError(message, hint="write momentum=0.9,nesterov=true", key="optim_args") from error
    return arguments
