"""Working out the values that follow from others, and filling in what a YAML leaves out."""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Any

from surefoot.config.key import TRAIN, Purpose
from surefoot.errors import Problem

Values = dict[str, Any]

# The settings that shape a run most: a person is told which value each of these got.
WORKING_SET = (
    "output_dir", "stage", "finetuning_type", "template", "dataset_dir", "cutoff_len", "learning_rate",
    "num_train_epochs", "per_device_train_batch_size", "gradient_accumulation_steps", "lr_scheduler_type",
    "warmup_ratio", "optim", "logging_steps", "save_steps", "seed",
)  # fmt: skip
LORA_SET = ("lora_rank", "lora_alpha", "lora_target")


def resolve(values: Values, given: Values, purpose: Purpose, source: Path | None) -> list[Problem]:
    """Make the values final, in place.

    Args:
        values: every key with its given or default value, types checked.
        given: what the person wrote.
        purpose: the command.
        source: the file that was read, for the name of the output folder.

    Returns:
        What the person should be told about it.
    """
    warnings: list[Problem] = []
    _home_folders(values)
    _precision(values, warnings)
    _same_thing_twice(values, given, warnings)
    _counts(values)
    _evaluation(values)
    if purpose in TRAIN:
        values["do_train"] = given.get("do_train", True) is not False
    if not values["lora_alpha"]:  # 0 too, as in LLaMA-Factory
        values["lora_alpha"] = 2 * values["lora_rank"]
    values["resize_vocab"] = bool(values["resize_vocab"] or values["add_tokens"] or values["add_special_tokens"])
    if values["neat_packing"]:
        values["packing"] = True
    elif values["packing"] is None:
        values["packing"] = values["stage"] == "pt"
    if values["dataset"] and len(set(values["dataset"])) < len(values["dataset"]):
        values["dataset"] = list(dict.fromkeys(values["dataset"]))
        warnings.append(Problem("names a data set twice; it is used once", "", key="dataset"))
    if not values["output_dir"]:
        values["output_dir"] = default_output_dir(values["model_name_or_path"], values["finetuning_type"], source)
    if purpose == "export" and not values["export_dir"]:
        values["export_dir"] = values["output_dir"].rstrip("/\\") + "-merged"
    return warnings


def _home_folders(values: Values) -> None:
    """Expand a leading ~, which a shell leaves alone inside a YAML."""
    keys = ("model_name_or_path", "output_dir", "export_dir", "dataset_dir", "tokenized_path", "cache_dir")
    for key in (*keys, "resume_from_checkpoint", "logging_dir", "precision_plan"):
        if isinstance(values.get(key), str) and values[key].startswith("~"):
            values[key] = os.path.expanduser(values[key])  # noqa: PTH111  (a Path would drop a last slash)
    if values["adapter_name_or_path"]:
        adapters = values["adapter_name_or_path"]
        values["adapter_name_or_path"] = [os.path.expanduser(path) for path in adapters]  # noqa: PTH111


def default_output_dir(model: str | None, finetuning_type: str, source: Path | None) -> str:
    """Name the folder of a run after its model, method and YAML, as `saves/smollm2-lora-quickstart`.

    Args:
        model: folder, hub id or demo name of the model.
        finetuning_type: lora, freeze or full.
        source: the YAML, if there is one.

    Returns:
        A relative path.
    """
    name = re.split(r"[/\\:]", (model or "").rstrip("/\\"))[-1]
    parts = [name or "model", finetuning_type] + ([source.stem] if source else [])
    return "saves/" + "-".join(re.sub(r"[^\w.+-]+", "_", part) for part in parts)


def filled_values(values: Values, given: Values, purpose: Purpose) -> Values:
    """Pick the values worth telling among those that the person left out.

    Args:
        values: the final values.
        given: what the person wrote.
        purpose: the command.

    Returns:
        key -> value.
    """
    if purpose not in TRAIN:
        return {key: values[key] for key in ("export_dir",) if purpose == "export" and given.get(key) is None}
    names = [name for name in WORKING_SET if given.get(name) is None]
    if values["finetuning_type"] == "lora":
        names += [name for name in LORA_SET if given.get(name) is None]
    moot = {"template"} if values["stage"] == "pt" else set()
    if values["max_steps"] > 0:
        moot.add("num_train_epochs")
    if values["warmup_steps"]:
        moot.add("warmup_ratio")
    if values["save_strategy"] != "steps":
        moot.add("save_steps")
    if values["logging_strategy"] != "steps":
        moot.add("logging_steps")
    return {name: values[name] for name in names if name not in moot}


def _precision(values: Values, warnings: list[Problem]) -> None:
    wanted = values["compute_dtype"]
    flagged = "bfloat16" if values["bf16"] else "float16" if values["fp16"] else "auto"
    if wanted == "auto":
        values["compute_dtype"] = flagged
        return
    if flagged not in ("auto", wanted):
        flag = "bf16" if values["bf16"] else "fp16"
        message = f"{wanted} wins over `{flag}: true`; the run computes in {wanted}"
        warnings.append(Problem(message, f"remove `{flag}: true` to silence this", key="compute_dtype"))
    values["bf16"], values["fp16"] = wanted == "bfloat16", wanted == "float16"


def _same_thing_twice(values: Values, given: Values, warnings: list[Problem]) -> None:
    if values["use_cpu"] or values["no_cuda"]:
        values["device"] = "cpu"
    if values["adafactor"]:
        if given.get("optim") not in (None, "adafactor"):
            warnings.append(Problem(f"wins over `optim: {given['optim']}`", "remove one of them", key="adafactor"))
        values["optim"] = "adafactor"
    trackers = [name for name in dict.fromkeys(values["report_to"] or []) if name != "none"]
    if values["use_swanlab"] and "swanlab" not in trackers:
        trackers.append("swanlab")
    values["report_to"] = trackers or ["none"]


def _counts(values: Values) -> None:
    """Zero means "none" where LLaMA-Factory takes it so, and whole numbers lose their point."""
    values["max_steps"] = values["max_steps"] or -1
    values["save_total_limit"] = values["save_total_limit"] or None
    if 0 < values["warmup_steps"] < 1:
        values["warmup_ratio"], values["warmup_steps"] = values["warmup_steps"], 0
    for key in ("logging_steps", "save_steps", "eval_steps", "warmup_steps"):
        value = values[key]
        if isinstance(value, float) and value >= 1 and value.is_integer():
            values[key] = int(value)


def _evaluation(values: Values) -> None:
    if values["eval_strategy"] != "no":
        values["do_eval"] = True
    if values["eval_strategy"] == "steps" and not values["eval_steps"]:
        values["eval_steps"] = values["logging_steps"]
    by_metric = values["load_best_model_at_end"] or values["early_stopping_steps"] or values["save_strategy"] == "best"
    if by_metric and values["metric_for_best_model"] is None:
        values["metric_for_best_model"] = "loss"
    metric = values["metric_for_best_model"]
    if metric is not None and values["greater_is_better"] is None:
        values["greater_is_better"] = not metric.endswith("loss")
