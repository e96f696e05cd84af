"""What is wrong with a key or its value, in words, with the fix."""

from __future__ import annotations

import difflib
from collections.abc import Iterable
from typing import Any, Literal, get_args, get_origin

from pydantic import ValidationError

from surefoot.config.table import KeyInfo, all_keys, choices
from surefoot.errors import Problem

# Names that other tools or older versions of LLaMA-Factory use.
OTHER_NAMES = {
    "base_model": "model_name_or_path",
    "batch_size": "per_device_train_batch_size",
    "checkpoint_dir": "adapter_name_or_path",
    "dtype": "compute_dtype",
    "epochs": "num_train_epochs",
    "evaluation_strategy": "eval_strategy",
    "flash_attention": "flash_attn",
    "gradient_accumulation": "gradient_accumulation_steps",
    "image_resolution": "image_max_pixels",
    "load_in_4bit": "quantization_bit",
    "load_in_8bit": "quantization_bit",
    "lora_modules_to_save": "additional_target",
    "lora_r": "lora_rank",
    "lora_target_modules": "lora_target",
    "lr": "learning_rate",
    "lr_scheduler": "lr_scheduler_type",
    "max_seq_len": "cutoff_len",
    "max_seq_length": "cutoff_len",
    "max_source_length": "cutoff_len",
    "max_target_length": "cutoff_len",
    "micro_batch_size": "per_device_train_batch_size",
    "mixed_precision": "compute_dtype",
    "model": "model_name_or_path",
    "model_max_length": "cutoff_len",
    "modules_to_save": "additional_target",
    "name_module_trainable": "freeze_trainable_modules",
    "new_special_tokens": "add_special_tokens",
    "num_epochs": "num_train_epochs",
    "num_layer_trainable": "freeze_trainable_layers",
    "optimizer": "optim",
    "precision": "compute_dtype",
    "prompt_template": "template",
    "scheduler": "lr_scheduler_type",
    "system_prompt": "default_system",
    "target_modules": "lora_target",
    "tokens_per_pass": "memory",
    "torch_dtype": "compute_dtype",
    "use_cache": "use_kv_cache",
    "video_resolution": "video_max_pixels",
    "warmup": "warmup_steps",
}


def unknown_key(name: object) -> Problem:
    """Say that there is no such key, with the nearest ones in the hint."""
    known = list(all_keys())
    text = str(name)
    plain = text.strip().lower().replace("-", "_")
    near = [plain] if plain in known else []
    if plain in OTHER_NAMES:
        near = [OTHER_NAMES[plain]]
    near = near or difflib.get_close_matches(plain, known, n=3, cutoff=0.7)
    near = near or [key for key in known if len(plain) > 3 and plain in key][:3]
    hint = f"did you mean {any_of(near)}?" if near else "docs/keys.md lists every key; remove this one"
    return Problem("there is no such key", hint, key=text)


def type_problems(error: ValidationError) -> list[Problem]:
    """Turn pydantic's findings into one problem a key."""
    by_key: dict[str, list[Any]] = {}
    for finding in error.errors(include_url=False):
        by_key.setdefault(str(finding["loc"][0]), []).append(finding)
    problems = []
    for name, findings in by_key.items():
        limit = next((text for text in map(_limit, findings) if text), None)
        # Of the alternatives of a type, the one that got as far as an item of a list is what was meant.
        finding = max(findings, key=_inside_list)
        problem = _wrong_kind(all_keys()[name], finding["input"], _inside_list(finding))
        problems.append(Problem(limit, _example(all_keys()[name]), key=name) if limit else problem)
    return problems


def _inside_list(finding: Any) -> bool:
    return any(isinstance(part, int) for part in finding["loc"][1:])


def empty_value(info: KeyInfo) -> Problem:
    """Say that a key has no value although it needs one."""
    default = f"; its default is {shown(info.default)}" if info.default is not None else ""
    return Problem("has no value", f"give it one, or remove the line{default}", key=info.name)


VALUE_HINTS = {
    ("stage", "orpo"): "ORPO is `stage: dpo` with `pref_loss: orpo` in LLaMA-Factory; that is not there yet",
    ("stage", "simpo"): "SimPO is `stage: dpo` with `pref_loss: simpo` in LLaMA-Factory; that is not there yet",
    ("stage", "grpo"): "GRPO is not there; the stages that work are sft and pt",
    ("finetuning_type", "qlora"): "QLoRA is `finetuning_type: lora` with `quantization_bit: 4`; that is not there yet",
}
LIMITS = {
    "greater_than_equal": ("ge", "must be at least {limit}, but is {value}"),
    "greater_than": ("gt", "must be above {limit}, but is {value}"),
    "less_than_equal": ("le", "must be at most {limit}, but is {value}"),
    "less_than": ("lt", "must be below {limit}, but is {value}"),
}


def _limit(finding: Any) -> str | None:
    value = finding["input"]
    if finding["type"] in LIMITS:
        name, text = LIMITS[finding["type"]]
        limit = finding["ctx"][name]
        return text.format(limit=f"{limit:g}" if abs(limit) < 1e6 else f"{limit:.0f}", value=shown(value))
    if finding["type"] == "finite_number":
        return f"must be a finite number, but is {shown(value)}"
    if finding["type"] == "string_pattern_mismatch":
        return f"must be auto, cpu, cuda or cuda:0, cuda:1, …, but is {shown(value)}"
    return None


def _wrong_kind(info: KeyInfo, value: Any, inside_list: bool) -> Problem:
    words = choices(info.types)
    only_words = all(get_origin(kind) in (Literal, list) for kind in info.types)
    if words and only_words and isinstance(value, str):
        if (info.name, value) in VALUE_HINTS:
            return Problem(f"{shown(value)} is not a choice", VALUE_HINTS[info.name, value], key=info.name)
        working = [word for word in words if word not in info.refused]
        near = difflib.get_close_matches(value.lower(), [str(word) for word in working], n=1, cutoff=0.6)
        guess = f"did you mean {shown(near[0])}? " if near else ""
        hint = f"{guess}The choices are {', '.join(map(str, working))}."
        return Problem(f"{shown(value)} is not a choice", hint, key=info.name)
    noun = "its items to be" if inside_list else "to be"
    message = f"needs {noun} {expected(info, inside_list)}, but got {kind_of(value)} {shown(value)}"
    return Problem(message, _fix(info, value), key=info.name)


def _fix(info: KeyInfo, value: Any) -> str:
    numeric = int in info.types or float in info.types
    if numeric and isinstance(value, str) and _is_number(value):
        return f"remove the quotes: `{info.name}: {value.strip()}`"
    if info.types == (int,) and isinstance(value, float) and value.is_integer():
        return f"write `{info.name}: {int(value)}`"
    if bool in info.types and isinstance(value, str):
        meant = {"true": "true", "yes": "true", "on": "true", "1": "true"}.get(value.strip().lower())
        meant = meant or {"false": "false", "no": "false", "off": "false", "0": "false"}.get(value.strip().lower())
        return f"write `{info.name}: {meant}`, without quotes" if meant else "write true or false, without quotes"
    if info.text_only and isinstance(value, (int, float, bool)):
        return f'put it in quotes: `{info.name}: "{value}"`'
    if info.text_only and isinstance(value, dict):
        return "put the whole text in quotes; it has a colon in it"
    return _example(info)


def _example(info: KeyInfo) -> str:
    """Show a value that is allowed: the default, where there is one."""
    if info.default is None:
        return f"remove the line, or see what docs/keys.md says of `{info.name}`"
    return f"the default is `{info.name}: {shown(info.default)}`"


def _is_number(text: str) -> bool:
    try:
        float(text)
    except ValueError:
        return False
    return True


def expected(info: KeyInfo, inside_list: bool = False) -> str:
    """Name what a value of this key may be."""
    kinds: list[str] = []
    for kind in info.types:
        if inside_list and get_origin(kind) is list:
            kinds.append(_kind_name(get_args(kind)[0]))
        elif get_origin(kind) is Literal:
            kinds += [str(word) for word in get_args(kind)]
        else:
            kinds.append(_kind_name(kind))
    if "a number" in kinds:
        kinds = [kind for kind in kinds if kind != "a whole number"]
    return any_of(dict.fromkeys(kinds), quote=False)


def _kind_name(kind: Any) -> str:
    if get_origin(kind) is list:
        return "names, as a list or separated by commas" if get_args(kind)[0] is not float else "numbers"
    names = {bool: "true or false", int: "a whole number", float: "a number", str: "a text"}
    return names.get(kind, "a mapping")


def kind_of(value: Any) -> str:
    """Name what kind of value this is."""
    if isinstance(value, bool):
        return "the switch"
    names = {int: "the number", float: "the number", str: "the text", list: "the list", dict: "the mapping"}
    return names.get(type(value), "the value")


def shown(value: Any) -> str:
    """Write a value as YAML would, shortened if it is long."""
    if isinstance(value, bool):
        return "true" if value else "false"
    if value is None:
        return "null"
    text = repr(value)
    return text if len(text) <= 80 else text[:77] + "…"


def any_of(words: Iterable[str], quote: bool = True) -> str:
    """Join words with commas and a last "or"."""
    items = [f"`{word}`" if quote else word for word in words]
    return items[0] if len(items) == 1 else ", ".join(items[:-1]) + " or " + items[-1]
