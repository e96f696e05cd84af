"""What lies in parts on all ranks, gathered on the main one: collectives that end in the host's memory there."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from surefoot.train.ranks import Ranks


def gather_states(own: list[dict[str, Any]], ranks: Ranks) -> list[list[dict[str, Any]]]:
    """Collect the optimizer's states of all ranks' flat tensors.

    Args:
        own: of this rank, by flat tensor; alike in keys and sizes on all ranks.
        ranks: of the run.

    Returns:
        Those of all, [ranks][flat tensors]; on the main rank only they are there.
    """
    import torch.distributed as dist

    world = ranks.place.world
    states: list[list[dict[str, Any]]] = [[{} for _ in own] for _ in range(world)]
    for flat, state in enumerate(own):
        for key, value in state.items():
            if not isinstance(value, torch.Tensor) or value.ndim == 0:  # the count of steps
                for rank in range(world):
                    states[rank][flat][key] = value
                continue
            part = value.detach().cpu()
            parts = [torch.empty_like(part) for _ in range(world)] if ranks.is_main else None
            ranks.wait_for(lambda part=part, parts=parts: dist.gather(part, parts, dst=0))
            for rank, theirs in enumerate(parts or ()):
                states[rank][flat][key] = theirs
    return states


def gather_weights(model: Any, ranks: Ranks, *, everything: bool) -> dict[str, torch.Tensor]:
    """Collect the weights that are saved from a model that ZeRO stage 3 has cut, one after the other.

    Args:
        model: wrapped by PEFT or not.
        ranks: of the run.
        everything: of an adapter's model, also what is frozen.

    Returns:
        By name; on the main rank only they hold something.
    """
    from deepspeed import zero

    weights: dict[str, torch.Tensor] = {}
    held: dict[int, torch.Tensor] = {}  # tied weights stay one tensor
    for name, parameter in model.named_parameters(remove_duplicate=False):
        if hasattr(model, "peft_config") and not everything and not parameter.requires_grad:
            continue
        if id(parameter) not in held:
            with zero.GatheredParameters([parameter]):
                held[id(parameter)] = parameter.detach().cpu().clone() if ranks.is_main else torch.empty(0)
        weights[name] = held[id(parameter)]
    return weights
