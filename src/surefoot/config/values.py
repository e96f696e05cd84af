"""Types of values that the YAML writes in more than one way."""

from __future__ import annotations

import json
from typing import Annotated, Any, Literal, get_args

from pydantic import BeforeValidator

from surefoot.config import reasons as why


def split_names(value: Any) -> Any:
    """Make a list of a comma-separated text, as LLaMA-Factory does; anything else passes on to be judged."""
    if isinstance(value, str):
        return [part.strip() for part in value.split(",") if part.strip()]
    return value


def split_numbers(value: Any) -> Any:
    """Make a list of numbers of a comma-separated text or of one number."""
    if isinstance(value, str):
        try:
            return [float(part) for part in value.split(",") if part.strip()]
        except ValueError:
            return value
    if isinstance(value, (int, float)) and not isinstance(value, bool):
        return [float(value)]
    return value


def false_is_no(value: Any) -> Any:
    """Read the unquoted `no`, which YAML turns into false, as the word it was meant to be."""
    return "no" if value is False else value


def read_json(value: Any) -> Any:
    """Read a mapping that is written as JSON text, which the command line needs."""
    if isinstance(value, str) and value.lstrip().startswith("{"):
        try:
            return json.loads(value)
        except json.JSONDecodeError:
            return value
    return value


Names = Annotated[list[str], BeforeValidator(split_names)]
Numbers = Annotated[list[float], BeforeValidator(split_numbers)]
Settings = Annotated[dict[str, Any], BeforeValidator(read_json)]
SettingsOrPath = Annotated[dict[str, Any] | str, BeforeValidator(read_json)]

Interval = Annotated[Literal["no", "steps", "epoch"], BeforeValidator(false_is_no)]
SaveInterval = Annotated[Literal["no", "steps", "epoch", "best"], BeforeValidator(false_is_no)]
Dtype = Literal["auto", "float32", "bfloat16", "float16"]

Optimizer = Literal[
    "adamw_torch", "adamw_torch_fused", "adafactor", "sgd", "adagrad", "rmsprop",
    "adamw_torch_xla", "adamw_torch_npu_fused", "adamw_apex_fused", "adamw_anyprecision",
    "adamw_torch_4bit", "adamw_torch_8bit", "ademamix", "adamw_bnb_8bit", "adamw_8bit", "ademamix_8bit",
    "lion_8bit", "lion_32bit", "paged_adamw_32bit", "paged_adamw_8bit", "paged_ademamix_32bit",
    "paged_ademamix_8bit", "paged_lion_32bit", "paged_lion_8bit", "rmsprop_bnb", "rmsprop_bnb_8bit",
    "rmsprop_bnb_32bit", "galore_adamw", "galore_adamw_8bit", "galore_adafactor", "galore_adamw_layerwise",
    "galore_adamw_8bit_layerwise", "galore_adafactor_layerwise", "lomo", "adalomo", "grokadamw",
    "schedule_free_radam", "schedule_free_adamw", "schedule_free_sgd", "apollo_adamw", "apollo_adamw_layerwise",
    "stable_adamw",
]  # fmt: skip

WORKING_OPTIMIZERS = ("adamw_torch", "adamw_torch_fused", "adafactor", "sgd", "adagrad", "rmsprop")
REFUSED_OPTIMIZERS = {name: why.OPTIMIZER for name in get_args(Optimizer) if name not in WORKING_OPTIMIZERS}

Scheduler = Literal[
    "linear", "cosine", "cosine_with_restarts", "polynomial", "constant", "constant_with_warmup", "inverse_sqrt",
    "reduce_lr_on_plateau", "cosine_with_min_lr", "cosine_warmup_with_min_lr", "warmup_stable_decay",
]  # fmt: skip

Tracker = Literal[
    "none", "tensorboard", "wandb", "mlflow", "swanlab", "trackio",
    "all", "azure_ml", "clearml", "codecarbon", "comet_ml", "dagshub", "dvclive", "flyte", "neptune",
]  # fmt: skip
WORKING_TRACKERS = ("none", "all", "tensorboard", "wandb", "mlflow", "swanlab", "trackio")
REFUSED_TRACKERS = {name: why.TRACKER for name in get_args(Tracker) if name not in WORKING_TRACKERS}
Trackers = Annotated[list[Tracker], BeforeValidator(split_names)]
LogLevel = Literal["passive", "detail", "debug", "info", "warning", "error", "critical"]

DTYPE_NAMES = {"fp32": "float32", "bf16": "bfloat16", "fp16": "float16", "half": "float16", "float": "float32"}


def long_dtype(value: Any) -> Any:
    """Read the short names of precisions, `fp32`, `bf16` and `fp16`."""
    return DTYPE_NAMES.get(value, value) if isinstance(value, str) else value


ComputeDtype = Annotated[Dtype, BeforeValidator(long_dtype)]


def false_is_off(value: Any) -> Any:
    """Read the unquoted `off`, which YAML turns into false, as the word it was meant to be."""
    return "off" if value is False else value


GuardMode = Annotated[Literal["heal", "watch", "off"], BeforeValidator(false_is_off)]
