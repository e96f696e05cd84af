"""DeepSpeed's settings: what is filled in from the YAML, what is refused, and what passes to its engine untouched."""

from __future__ import annotations

import difflib
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from surefoot.errors import Problem, UserError

Values = dict[str, Any]

BATCH, MICRO, STEPS = "train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps"
CLIPPING = "gradient_clipping"
# Read here and given to the engine as Surefoot runs it.
OURS = (BATCH, MICRO, STEPS, CLIPPING, "fp16", "bf16", "zero_force_ds_cpu_optimizer", "zero_optimization")
# What does work that Surefoot does itself, or cuts a run in a way that it does not know.
TAKEN = {
    "optimizer": "the optimizer is the YAML's `optim`, with its `learning_rate`, `weight_decay` and `adam_*`",
    "scheduler": "the schedule is the YAML's `lr_scheduler_type` and `warmup_ratio`",
    "amp": "the precision is the YAML's `bf16` and `fp16`",
    "torch_autocast": "the precision is the YAML's `bf16` and `fp16`",
    "data_types": "gradients are summed in the trained weights' float32",
    "gradient_allreduce_op": "a step's gradient is that of the token mean over all processes",
    "managed_gradient_accumulation": "passes are counted by Surefoot",
    "sparse_gradients": "gradients are dense here",
} | dict.fromkeys(
    ("tensor_parallel", "sequence_parallel_size", "data_parallel_size", "pipeline", "elasticity", "autotuning",
     "hybrid_engine", "compression_training", "progressive_layer_drop", "curriculum_learning", "data_efficiency",
     "eigenvalue", "sparse_attention", "flops_profiler", "compile", "quantize_training"),
    "it is not supported here",
)  # fmt: skip
PASSED = (
    "zero_allow_untested_optimizer", "steps_per_print", "wall_clock_breakdown", "memory_breakdown", "dump_state",
    "prescale_gradients", "gradient_predivide_factor", "communication_data_type", "disable_allgather",
    "seq_parallel_communication_data_type", "activation_checkpointing", "aio", "tensorboard", "wandb", "csv_monitor",
    "comet", "comms_logger", "checkpoint", "timers", "dataloader_drop_last", "use_data_before_expert_parallelism",
    "disable_python_gc",
)  # fmt: skip
AUTO = ("reduce_bucket_size", "stage3_prefetch_bucket_size", "stage3_param_persistence_threshold")
ELEMENTWISE = ("adamw_torch", "adamw_torch_fused", "sgd", "rmsprop")


def read_deepspeed(value: dict[str, Any] | str) -> dict[str, Any]:
    """Return DeepSpeed's settings as the YAML names them.

    Args:
        value: of the key `deepspeed`: a mapping, or the path of a JSON file.

    Returns:
        The settings, with their "auto".

    Raises:
        UserError: there is no such file, or it holds no mapping.
    """
    if isinstance(value, dict):
        return value
    try:
        found = json.loads(Path(value).read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise UserError(f"{value} cannot be read: {error}", hint="name a JSON file", key="deepspeed") from error
    if not isinstance(found, dict):
        raise UserError(f"{value} holds no mapping", hint="name a JSON file of DeepSpeed's", key="deepspeed")
    return found


def stage_of(settings: dict[str, Any]) -> int:
    """Return ZeRO's stage; without the section it is 0, as DeepSpeed has it."""
    return int(settings.get("zero_optimization", {}).get("stage", 0))


def offloads(settings: dict[str, Any]) -> bool:
    """Say whether anything waits in the host's memory."""
    zero = settings.get("zero_optimization", {})
    return any(_device(zero, what) != "none" for what in ("offload_optimizer", "offload_param"))


def deepspeed_problems(values: Values) -> Iterator[Problem]:
    """Check DeepSpeed's settings by themselves and against the YAML.

    Args:
        values: every key of the YAML with its final value.

    Yields:
        What is wrong; no process has to be started to know it.
    """
    if values["deepspeed"] is None:
        return
    if values["fsdp"]:
        yield Problem("does not go with `deepspeed`: both would cut the model", "remove one of them", key="fsdp")
    try:
        settings = read_deepspeed(values["deepspeed"])
    except UserError as error:
        yield from error.problems
        return
    yield from _sections(settings)
    zero = settings.get("zero_optimization", {})
    if not isinstance(zero, dict) or zero.get("stage", 0) not in (0, 1, 2, 3):
        yield _problem(f"`zero_optimization` has stage {zero!r}", 'write `"stage": 2`, say')
        return
    yield from _zero(zero)
    yield from _numbers(settings, values)
    yield from _against(stage_of(settings), values)


def engine_settings(settings: dict[str, Any], values: Values, world: int, width: int) -> dict[str, Any]:
    """Fill DeepSpeed's settings in for its engine.

    The engine sees one pass a step: Surefoot makes a step of passes itself. Clipping and the loss scale are Surefoot's
    too, and so is mixed precision: trained weights are float32, which is what the engine holds.

    Args:
        settings: from `read_deepspeed`, without problems.
        values: of the YAML; `per_device_train_batch_size` and `gradient_accumulation_steps` are read.
        world: processes of the run.
        width: of the model's hidden states, from which "auto" sizes follow as in transformers.

    Returns:
        What `deepspeed.initialize` takes.

    Raises:
        UserError: the batch of all processes is another than the YAML's.
    """
    samples = values["per_device_train_batch_size"] * values["gradient_accumulation_steps"]
    if settings.get(BATCH, "auto") not in ("auto", samples * world):
        raise UserError(
            f"`{BATCH}` is {settings[BATCH]}, but the YAML makes it {samples * world}: "
            f"{values['per_device_train_batch_size']} samples x {values['gradient_accumulation_steps']} x {world} "
            "processes",
            hint="write \"auto\", or change the YAML", key="deepspeed",
        )  # fmt: skip
    sizes = dict(zip(AUTO, (width * width, int(0.9 * width * width), 10 * width), strict=True))
    zero = {k: sizes[k] if v == "auto" else v for k, v in settings.get("zero_optimization", {}).items()}
    passed = {key: value for key, value in settings.items() if key in PASSED}
    return passed | {
        "zero_optimization": zero, MICRO: samples, STEPS: 1, CLIPPING: 0.0,
        "fp16": {"enabled": False}, "bf16": {"enabled": False},
        "zero_allow_untested_optimizer": True, "zero_force_ds_cpu_optimizer": False,
    }  # fmt: skip


def _sections(settings: dict[str, Any]) -> Iterator[Problem]:
    """Check that every key of the file is known and not what Surefoot does itself."""
    for key, value in settings.items():
        off = value in (None, False) or (isinstance(value, dict) and value.get("enabled") is False)
        if key in TAKEN and not off:
            yield _problem(f"`{key}` cannot be set: {TAKEN[key]}", f"remove `{key}`")
        elif key not in TAKEN and key not in PASSED and key not in OURS:
            near = difflib.get_close_matches(key, (*PASSED, *OURS, *TAKEN), 1)
            yield _problem(f"there is no setting `{key}`", f"did you mean `{near[0]}`?" if near else f"remove `{key}`")


def _zero(zero: dict[str, Any]) -> Iterator[Problem]:
    for key, value in zero.items():
        if value == "auto" and key not in AUTO:
            yield _problem(f'`zero_optimization.{key}` cannot be "auto"', "write a value, or remove it")
    for what in ("offload_optimizer", "offload_param"):
        if _device(zero, what) not in ("none", "cpu"):
            yield _problem(f"`{what}` to {_device(zero, what)} is not supported", 'write `"device": "cpu"`')
    if _device(zero, "offload_param") != "none" and zero.get("stage") != 3:
        yield _problem(f"`offload_param` is for stage 3, not {zero.get('stage', 0)}", "remove it")
    for key, harmless in (("zenflow", None), ("zero_hpz_partition_size", 1), ("mics_shard_size", -1)):
        if zero.get(key, harmless) != harmless:
            yield _problem(f"`zero_optimization.{key}` is not supported", "remove it")


def _numbers(settings: dict[str, Any], values: Values) -> Iterator[Problem]:
    """Check explicit values against the YAML, as transformers does."""
    for key, name in ((MICRO, "per_device_train_batch_size"), (STEPS, STEPS), (CLIPPING, "max_grad_norm")):
        if (value := settings.get(key, "auto")) not in ("auto", values[name]):
            yield _contradiction(f"`{key}` is {value}", name, values[name])
    for section in ("bf16", "fp16"):
        wanted = settings.get(section, {}).get("enabled", "auto")
        # A YAML without a word leaves the choice to the device, which DeepSpeed's `false` does as well.
        if wanted not in ("auto", values[section]):
            yield _contradiction(f"`{section}.enabled` is {str(wanted).lower()}", section, str(values[section]).lower())
    if settings.get("fp16", {}).get("loss_scale", 0) not in (0, "auto"):
        message = f"`fp16.loss_scale` is {settings['fp16']['loss_scale']}, but the loss scale is Surefoot's own"
        yield _problem(message, "write 0")
    if settings.get("zero_force_ds_cpu_optimizer") is True and offloads(settings):
        message = "`zero_force_ds_cpu_optimizer` asks for an optimizer that is compiled at its first step"
        yield _problem(message, "remove it: torch's own AdamW runs on the host as well")


def _against(stage: int, values: Values) -> Iterator[Problem]:
    """Check what does not go with sharding."""
    if stage and values["optim"] not in ELEMENTWISE:
        message = f"{values['optim']} cannot be cut: DeepSpeed lays all weights end to end"
        yield Problem(message, f"use one of {', '.join(ELEMENTWISE)}", key="optim")
    if stage < 3:
        return
    hint = "use ZeRO stage 2, or remove it"
    for key in ("quantization_bit", "use_dora", "fp8", "load_best_model_at_end"):
        if values[key]:
            yield Problem("does not go with ZeRO stage 3, where no process holds the weights", hint, key=key)
    if values["compile"] is True:
        yield Problem("does not go with ZeRO stage 3, which fetches weights between operations", hint, key="compile")


def _device(zero: dict[str, Any], what: str) -> str:
    return (zero.get(what) or {}).get("device") or "none"


def _contradiction(theirs: str, key: str, ours: Any) -> Problem:
    return _problem(f"{theirs}, but the YAML has `{key}: {ours}`", 'write "auto" there, or change the YAML')


def _problem(message: str, hint: str) -> Problem:
    return Problem(message, hint, key="deepspeed")
