"""The optimizer's update behind a gate on the device: a step that is not finite changes nothing, not even a counter.

Fused optimizers obey an on-device `found_inf` themselves. For the others, parameters and state are copied before the
update and selected after it; never multiplied by 0 or 1, since 0 times NaN is NaN.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch


class Gate:
    """Applies one optimizer's updates, or leaves everything as it was.

    Attributes:
        optimizer: over the trained parameters.
        fused: True when the optimizer's own kernel is the gate.
    """

    optimizer: torch.optim.Optimizer
    fused: bool

    def __init__(
        self, optimizer: torch.optim.Optimizer, agree: Callable[[torch.Tensor], torch.Tensor] | None = None
    ) -> None:
        """Take an optimizer.

        Args:
            optimizer: over the trained parameters.
            agree: returns the largest of all ranks' numbers, where each holds pieces of the parameters only.
        """
        self._agree = agree
        self.optimizer = optimizer
        self.fused = all(group.get("fused") for group in optimizer.param_groups)
        self._before: dict[torch.Tensor, dict[str, Any]] = {}

    @torch.no_grad()
    def step(self, bad: torch.Tensor) -> torch.Tensor:
        """Update the weights unless the step is bad.

        Args:
            bad: 1.0 when nothing may change, else 0.0; float32 scalar on the weights' device.

        Returns:
            1.0 when the update of a good step made a weight that is not finite, else 0.0; float32 scalar. An
            optimizer that is not fused has then kept the weights from before.
        """
        parameters: list[torch.Tensor] = [p for group in self.optimizer.param_groups for p in group["params"]]
        if self.fused:
            # Read by the optimizer's `step`, as torch's GradScaler hands it over.
            self.optimizer.grad_scale = None  # type: ignore[attr-defined]
            self.optimizer.found_inf = bad  # type: ignore[attr-defined]
            self.optimizer.step()
            del self.optimizer.grad_scale, self.optimizer.found_inf  # type: ignore[attr-defined]
            return _any_bad(parameters)
        copies = [p.detach().clone() for p in parameters]
        self._before = {p: _copy(self.optimizer.state[p]) for p in parameters if p in self.optimizer.state}
        self.optimizer.step()
        weights_bad = _any_bad(parameters)
        if self._agree:
            weights_bad = self._agree(weights_bad)
        closed = torch.maximum(bad, weights_bad).bool()
        for parameter, copy in zip(parameters, copies, strict=True):
            parameter.copy_(torch.where(closed, copy, parameter))
            before = self._before.get(parameter, {})
            for key, value in self.optimizer.state[parameter].items():
                if isinstance(value, torch.Tensor) and isinstance(before.get(key), torch.Tensor):
                    value.copy_(torch.where(closed.to(value.device), before[key], value))
        return torch.where(bad.bool(), torch.zeros_like(bad), weights_bad)

    def undo_counters(self) -> None:
        """After a step was found bad: take back what an unfused optimizer counts on the host, and its first state."""
        if self.fused:
            return
        for group in self.optimizer.param_groups:
            for parameter in group["params"]:
                if parameter in self._before:
                    self.optimizer.state[parameter] = self._before[parameter]
                else:
                    self.optimizer.state.pop(parameter, None)
        self._before = {}


def _any_bad(parameters: list[torch.Tensor]) -> torch.Tensor:
    # L2, not the infinity norm, which takes a CPU ten times as long; a weight beyond 1e19 counts as infinite then.
    norms = torch.stack(torch._foreach_norm(parameters, 2.0, dtype=torch.float32))
    return (~norms.isfinite().all()).float()


def _copy(state: dict[str, Any]) -> dict[str, Any]:
    return {key: value.clone() if isinstance(value, torch.Tensor) else value for key, value in state.items()}
