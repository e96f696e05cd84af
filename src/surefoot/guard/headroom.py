"""How near each module's outputs come to the end of their number format."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils._pytree import tree_leaves

from surefoot.guard.names import module_names
from surefoot.guard.scene import Scene
from surefoot.guard.trace_values import measurable


@dataclass(frozen=True)
class ModulePeak:
    """The largest value that a module gave out in a step.

    Attributes:
        module: Hugging Face name; "" for the model itself.
        dtype: of the output, as "float16".
        amax: largest magnitude; NaN when it held one.
        share: `amax` over the largest finite value of the dtype; 1 and more means that it does not fit.
    """

    module: str
    dtype: str
    amax: float
    share: float


def headroom(scene: Scene) -> list[ModulePeak]:
    """Run a step again and take the largest output of every module; kernels without a Python form are seen too.

    Nothing is read back from the device before the end.

    Args:
        scene: the step.

    Returns:
        One entry per module and dtype, those nearest to their format's end first; outputs with NaN before all.
    """
    peaks: dict[tuple[str, torch.dtype], torch.Tensor] = {}
    names = module_names(scene.model)

    @torch.no_grad()
    def look(module: torch.nn.Module, _args: Any, output: Any) -> None:
        for tensor in tree_leaves(output):
            if not measurable(tensor):
                continue
            values = tensor.detach().float() if tensor.element_size() == 1 else tensor.detach()
            low, high = torch.aminmax(values)
            amax = torch.maximum(low.double().abs(), high.double().abs())  # NaN stays NaN in both
            key = names[module], tensor.dtype
            peaks[key] = torch.maximum(peaks[key], amax) if key in peaks else amax

    handles = [module.register_forward_hook(look) for module in names]
    try:
        scene.rerun()
    finally:
        for handle in handles:
            handle.remove()
    if not peaks:
        return []
    amaxes = torch.stack(list(peaks.values())).tolist()
    table = [
        ModulePeak(name, str(dtype).removeprefix("torch."), amax, amax / torch.finfo(dtype).max)
        for (name, dtype), amax in zip(peaks, amaxes, strict=True)
    ]
    return sorted(table, key=lambda peak: -math.inf if math.isnan(peak.share) else -peak.share)
