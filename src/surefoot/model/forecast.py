"""A run's memory before anything of it is loaded: from the YAML and the model's config.json, without torch."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from surefoot.errors import UserError
from surefoot.model.activations import FLOAT32, Numerics
from surefoot.model.memory import OPTIMIZER_BYTES, MemoryModel, MemoryPlan, make_plan
from surefoot.model.shapes import Shapes, read_shapes
from surefoot.model.source import FLOAT_NAMES, model_config, model_path, safetensors_header

if TYPE_CHECKING:
    from surefoot.config import Config

FLOAT_BYTES = {"float64": 8, "float32": 4, "bfloat16": 2, "float16": 2}


def read_config(cfg: Config) -> dict[str, Any]:
    """Read a model's config.json as it is; one on the hub is read by transformers.

    Args:
        cfg: the YAML.

    Returns:
        Its keys and values.

    Raises:
        UserError: there is none, or it cannot be read.
    """
    file = Path(model_path(cfg)) / "config.json"
    if not file.is_file():
        return model_config(cfg).to_dict()
    try:
        found = json.loads(file.read_text(encoding="utf-8"))
        if not isinstance(found, dict):
            raise ValueError("it holds no object")
    except (OSError, ValueError) as error:
        hint = "copy or download the model again"
        raise UserError(f"{file} cannot be read: {error}", hint=hint, key="model_name_or_path") from error
    return found


def forecast(
    cfg: Config, lengths: Mapping[str, float], *, free_bytes: float, cpu: bool, numbers: tuple[int, int] | None = None
) -> MemoryPlan:
    """Plan a run's memory.

    Args:
        cfg: the YAML.
        lengths: "longest" and "mean" tokens of the training items.
        free_bytes: memory that is free for it.
        cpu: whether it would run on a CPU.
        numbers: trained ones and all, where they are known; else both are counted from the sizes.

    Returns:
        The plan.

    Raises:
        UserError: there is no configuration, it lacks a size, or the run does not fit.
    """
    return plan_for(cfg, model_of(cfg, cpu=cpu, numbers=numbers), lengths, free_bytes=free_bytes, cpu=cpu)


def model_of(cfg: Config, *, cpu: bool, numbers: tuple[int, int] | None = None) -> MemoryModel:
    """Put together what a YAML's run takes, from the model's config.json.

    Args:
        cfg: the YAML.
        cpu: whether it would run on a CPU.
        numbers: trained ones and all, where they are known; else both are counted from the sizes.

    Returns:
        The bytes.

    Raises:
        UserError: there is no configuration, or it lacks a size.
    """
    config = read_config(cfg)
    try:
        shapes = read_shapes(config)
    except (KeyError, TypeError, ValueError, ZeroDivisionError) as error:
        message = f"the config.json of {cfg.model_name_or_path} lacks a size: {error}"
        raise UserError(message, hint="is it a decoder-only model?", key="model_name_or_path") from error
    weight, compute = formats(cfg, stored_format(cfg, config))
    trained, total = numbers or (count_trained(cfg, shapes), 0)
    return describe_run(cfg, shapes, weight=weight, compute=compute, trained=trained, total=total, cpu=cpu)


def plan_for(
    cfg: Config,
    model: MemoryModel,
    lengths: Mapping[str, float],
    *,
    free_bytes: float,
    cpu: bool,
    alone: bool = False,
) -> MemoryPlan:
    """Plan the passes of a YAML's run.

    Args:
        cfg: the YAML.
        model: bytes of the run.
        lengths: "longest" and "mean" tokens of the training items.
        free_bytes: memory that is free for it.
        cpu: whether it runs on a CPU.
        alone: whether each row is a pass of its own.

    Returns:
        The plan.

    Raises:
        UserError: the longest item does not fit.
    """
    per_step = 1 if alone else cfg.per_device_train_batch_size * cfg.gradient_accumulation_steps
    longest = int(lengths["longest"])
    return make_plan(
        model, free_bytes=free_bytes, longest=longest, step_tokens=longest * per_step,
        usual_tokens=int(lengths["mean"] * per_step), tokens=None if cfg.memory == "auto" else cfg.memory,
        may_recompute=not cfg.disable_gradient_checkpointing, cpu=cpu,
    )  # fmt: skip


def describe_run(
    cfg: Config,
    shapes: Shapes,
    *,
    weight: int,
    compute: int,
    trained: int,
    total: int = 0,
    frozen_bytes: float | None = None,
    chunked: bool = True,
    cpu: bool = False,
) -> MemoryModel:
    """Put together what a YAML's run takes.

    Args:
        cfg: the YAML.
        shapes: sizes of the model.
        weight: bytes of a stored weight.
        compute: bytes of a number in matrix products.
        trained: numbers that are trained.
        total: numbers in the model, adapters included; 0 counts them from the sizes.
        frozen_bytes: of the weights that are not trained; None counts them.
        chunked: whether the loss is made in chunks.
        cpu: whether it runs on a CPU.

    Returns:
        The bytes.
    """
    adapter, full = cfg.finetuning_type == "lora", cfg.finetuning_type == "full"
    trained_head = full or any("head" in name or "embed" in name for name in cfg.additional_target or [])
    if frozen_bytes is None:
        base = total - (trained if adapter else 0) if total else shapes.parameters
        frozen_bytes = _frozen_bytes(cfg, shapes, base - (0 if adapter else trained), weight, compute)
    how = Numerics(
        compute=compute, stream=FLOAT32 if full else weight, weight=FLOAT32 if full else weight, whole=not adapter,
        adapted=adapted_linears(cfg, shapes) if adapter else frozenset(), rank=cfg.lora_rank,
        dropout=adapter and cfg.lora_dropout > 0, compiled=not cpu if cfg.compile is None else cfg.compile,
        written_out=cfg.flash_attn == "disabled", cpu=cpu,
    )  # fmt: skip
    last_layers = cfg.freeze_trainable_layers if cfg.finetuning_type == "freeze" else 0
    spread_out = cfg.use_llama_pro or cfg.freeze_extra_modules
    largest = max((x.inputs * x.outputs for x in shapes.linears), default=0)
    return MemoryModel(
        shapes, how, frozen_bytes, trained, OPTIMIZER_BYTES.get(cfg.optim, 8),
        alive_layers=min(shapes.layers, last_layers) if last_layers > 0 and not spread_out else shapes.layers,
        trained_head=trained_head, cast_head=compute < weight and shapes.tied,
        dequantized=largest if cfg.quantization_bit else 0, chunked=chunked,
    )  # fmt: skip


def formats(cfg: Config, stored: str) -> tuple[int, int]:
    """Return the bytes of a weight and of a number in matrix products, as `precision.choose_precision` decides."""
    wanted = cfg.compute_dtype
    if wanted == "auto":
        wanted = "bfloat16" if cfg.bf16 else "float16" if cfg.fp16 else stored
    compute = FLOAT_BYTES[wanted]
    return (FLOAT32 if wanted == "float32" and cfg.compute_dtype != "auto" else FLOAT_BYTES[stored]), compute


def stored_format(cfg: Config, config: Mapping[str, Any]) -> str:
    """Name the dtype of a model's weights: as most stored values are where the files are at hand, else as it says."""
    sizes: dict[str, int] = {}
    folder = Path(model_path(cfg))
    for file in [] if cfg.train_from_scratch else sorted(folder.glob("*.safetensors")):
        for entry in safetensors_header(file).values():
            name = FLOAT_NAMES.get(entry["dtype"], "")
            start, end = entry["data_offsets"]
            sizes[name] = sizes.get(name, 0) + end - start
    sizes.pop("", None)
    said = str(config.get("dtype") or config.get("torch_dtype") or "float32").removeprefix("torch.")
    return max(sizes, key=lambda name: sizes[name]) if sizes else said if said in FLOAT_BYTES else "float32"


def adapted_linears(cfg: Config, shapes: Shapes) -> frozenset[str]:
    """Name the linears of a layer that `lora_target` puts adapters on."""
    wanted = [name.rpartition(".")[2] for name in cfg.lora_target]
    return frozenset(x.name for x in shapes.linears if "all" in wanted or x.name in wanted)


def count_trained(cfg: Config, shapes: Shapes) -> int:
    """Count the numbers that a YAML trains, from the sizes."""
    if cfg.finetuning_type == "full":
        return shapes.parameters
    if cfg.finetuning_type == "freeze":
        modules = list(cfg.freeze_trainable_modules)
        mlp, attention = ("all" in modules or any(part in name for name in modules) for part in ("mlp", "attn"))
        layer = shapes.expert_parameters if mlp else 0
        layer += sum(x.inputs * x.outputs for x in shapes.linears if (mlp if x.in_mlp else attention))
        return min(abs(cfg.freeze_trainable_layers), shapes.layers) * layer
    names = adapted_linears(cfg, shapes)
    ranks = sum(cfg.lora_rank * (x.inputs + x.outputs) for x in shapes.linears if x.name in names)
    extra = sum("head" in name or "embed" in name for name in cfg.additional_target or [])
    return shapes.layers * ranks + extra * shapes.vocabulary * shapes.hidden


def _frozen_bytes(cfg: Config, shapes: Shapes, frozen: int, weight: int, compute: int) -> float:
    """Count frozen weights: linears as narrow as they multiply, the rest as stored; quantised ones packed."""
    linears = min(frozen, shapes.layers * sum(x.inputs * x.outputs for x in shapes.linears))
    each: float = min(weight, compute)
    if cfg.fp8:
        each += 2.0  # the copies of `model/fp8.py`, one for each direction
    if cfg.quantization_bit:
        from surefoot.model.quantized import quantized_bytes_per_parameter

        each = quantized_bytes_per_parameter(cfg.quantization_bit, cfg.double_quantization)
    head = 0 if shapes.tied else min(frozen - linears, shapes.vocabulary * shapes.hidden)
    return linears * each + head * min(weight, compute) + (frozen - linears - head) * weight
