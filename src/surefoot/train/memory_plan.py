"""The memory of a run whose model is loaded: planned before its passes, and compared with what they took."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import torch

from surefoot.model.forecast import describe_run, plan_for
from surefoot.model.forward import LossForward, base_of
from surefoot.model.load import LoadedModel
from surefoot.model.memory import GIB, MemoryPlan, free_memory
from surefoot.model.shapes import read_shapes
from surefoot.train.events import TrainResult
from surefoot.train.loop import Run
from surefoot.train.shards import Shards

if TYPE_CHECKING:
    from surefoot.config import Config
    from surefoot.data.prepare import PreparedData


def plan_memory(
    cfg: Config,
    loaded: LoadedModel,
    forward: LossForward,
    data: PreparedData,
    device: str,
    shards: Shards | None = None,
) -> MemoryPlan:
    """Plan the passes of a run from the model as it is loaded and the memory that is free now.

    Args:
        cfg: the YAML.
        loaded: the model on its device.
        forward: how its loss is computed.
        data: the encoded data.
        device: where the model lives, as torch names it.
        shards: of a sharded model; its plan is the same on every rank.

    Returns:
        The plan.

    Raises:
        UserError: the longest row does not fit.
    """
    base = base_of(loaded.model)
    trained, total = loaded.parameters
    stored = base.get_input_embeddings().weight.dtype
    sizes = [(p.numel() * p.element_size(), p.requires_grad) for p in base.parameters()]
    frozen = None if cfg.quantization_bit else sum(size for size, trains in sizes if not trains)
    if device == "cpu":
        free = free_memory(device) + sum(size for size, _ in sizes)
    else:
        free = free_memory(device) + torch.cuda.memory_reserved(device)
    if shards is not None:
        free, frozen = min(shards.ranks.gather(free)), shards.frozen_bytes
        if shards.trains:  # moments and gradients are cut as well
            trained //= shards.model.world
    lengths = getattr(data.train, "lengths", None)
    longest, mean = float(cfg.cutoff_len), float(cfg.cutoff_len)  # of a stream: the longest that the YAML allows
    if lengths is not None:
        longest, mean = float(max(lengths)), float(sum(lengths) / len(lengths))
    model = describe_run(
        cfg, read_shapes(base.config.to_dict()), weight=stored.itemsize,
        compute=(loaded.precision.autocast or stored).itemsize, trained=trained, total=total,
        # Packed weights come with constants that are no parameters: those are counted from the sizes.
        frozen_bytes=frozen,
        chunked=forward.chunked, cpu=device == "cpu",
    )  # fmt: skip
    return plan_for(
        cfg, model, {"longest": longest, "mean": mean}, free_bytes=free, cpu=device == "cpu", alone=not forward.packs
    )


def words_of(plan: MemoryPlan) -> str:
    """Say what a plan computes again."""
    choice, layers = plan.choice, plan.model.shapes.layers
    parts = [f"{choice.layers} of {layers} decoder layers"] if choice.layers else []
    parts += [f"the MLPs of {choice.mlps} of {layers} decoder layers"] if choice.mlps else []
    host = "; their inputs wait in the host's memory, and they run uncompiled" if choice.offload else ""
    return f"To fit, {' and '.join(parts)} are recomputed in the backward pass{host}."


def with_memory(run: Run, result: TrainResult) -> TrainResult:
    """Add planned and measured memory to the result of a run on a GPU, and say when they differ by much.

    Args:
        run: after its last step.
        result: how it ended.

    Returns:
        The result with both figures; unchanged on a CPU.
    """
    runner = run.runner
    if runner.device == "cpu" or runner.plan is None or not runner.largest_pass:
        return result
    measured = torch.cuda.max_memory_allocated(runner.device) / GIB
    planned = runner.plan.peak_gib(runner.largest_pass, runner.most_passes)
    if abs(measured - planned) > 0.1 * planned:
        run.tell(f"Memory: planned {planned:.1f} GiB for this run's largest pass, measured {measured:.1f} GiB.")
    return replace(result, memory_gib=round(measured, 3), planned_memory_gib=round(planned, 3))
