"""A training YAML as the doctor reads it: its keys as they stand, and the two files it may name.

Whether the keys themselves are right is for `surefoot check` to say; the doctor must work with a YAML that has faults.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from surefoot.errors import UserError


def read_job(path: Path) -> dict[str, Any]:
    """Read a training YAML.

    Args:
        path: the YAML.

    Returns:
        Its keys and values. A `deepspeed` file is replaced by its content; a local model adds `head_dim` and
        `model_parameters`.

    Raises:
        UserError: the YAML cannot be read or holds no mapping.
    """
    import yaml

    try:
        loaded = yaml.safe_load(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise UserError(f"{path} cannot be read: {error.strerror}", hint="name a training YAML") from error
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise UserError(f"{path} is not YAML: {error}", hint="name a training YAML") from error
    if not isinstance(loaded, dict):
        raise UserError(f"{path} holds no mapping", hint="a training YAML has `key: value` lines")
    job = {str(key): value for key, value in loaded.items()}
    if isinstance(job.get("deepspeed"), str):
        job["deepspeed"] = _json(Path(job["deepspeed"])) or job["deepspeed"]
    return {**model_facts(Path(str(job.get("model_name_or_path", "")))), **job}


def model_facts(folder: Path) -> dict[str, Any]:
    """Width of the attention heads and number of parameters of a local model; empty for any other."""
    config = _json(folder / "config.json")
    if not config:
        return {}
    facts: dict[str, Any] = {}
    heads, hidden = config.get("num_attention_heads"), config.get("hidden_size")
    if isinstance(config.get("head_dim"), int):
        facts["head_dim"] = config["head_dim"]
    elif isinstance(heads, int) and isinstance(hidden, int) and heads > 0:
        facts["head_dim"] = hidden // heads
    index = _json(folder / "model.safetensors.index.json").get("metadata", {})
    size = index.get("total_size") if isinstance(index, dict) else None
    if not isinstance(size, int):
        size = sum(file.stat().st_size for file in folder.glob("*.safetensors"))
    bytes_each = 4 if config.get("torch_dtype", config.get("dtype")) == "float32" else 2
    return {**facts, "model_parameters": size / bytes_each} if size else facts


def _json(path: Path) -> dict[str, Any]:
    """A JSON file's mapping; empty when it is missing, unreadable or something else."""
    try:
        loaded = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return loaded if isinstance(loaded, dict) else {}
