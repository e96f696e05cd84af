"""The settings of a replay: the incident's own, with what the person wants otherwise. The folder is not trusted."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from surefoot.config import load_config
from surefoot.errors import UserError

if TYPE_CHECKING:
    from surefoot.config import Config

SETTINGS = "resolved.yaml"


@dataclass(frozen=True)
class Request:
    """What shall differ from the run.

    Attributes:
        device: "auto" for the kind of device that it happened on, "cpu", "cuda" or "cuda:N".
        dtype: "float32", "bfloat16" or "float16" to compute in; None for the run's.
        model: folder or hub id of the base model; None for the YAML's.
        weights: a checkpoint with trained weights, for an incident that does not hold them.
        plan: a precision plan to apply instead of the one that was in force.
        trust_remote_code: allow the YAML to ask for code from the model's folder.
        overrides: `key=value`, stronger than the YAML.
    """

    device: str = "auto"
    dtype: Literal["float32", "bfloat16", "float16"] | None = None
    model: str | None = None
    weights: Path | None = None
    plan: Path | None = None
    trust_remote_code: bool = False
    overrides: tuple[str, ...] = ()


def replay_settings(folder: Path, request: Request) -> tuple[Config, list[str]]:
    """Read the settings of an incident and fit them to this machine. Sets what a known defect of it asks for.

    Args:
        folder: of the incident.
        request: what shall differ.

    Returns:
        The settings, and what a person should know of them.

    Raises:
        UserError: the folder has no settings, they cannot be used, or the base model is not on this machine.
    """
    yaml = folder / SETTINGS
    if not folder.is_dir():
        hint = "name a folder <output_dir>/surefoot/incidents/step-N"
        raise UserError(f"there is no folder {folder}", hint=hint)
    if not yaml.is_file():
        hint = "name a folder <output_dir>/surefoot/incidents/step-N, and copy all of it"
        raise UserError(f"{folder} is not an incident's folder: it has no {SETTINGS}", hint=hint)
    refuse_interpolation(yaml)
    changes, notes = [], []
    if request.dtype:
        changes += ["bf16=false", "fp16=false", f"compute_dtype={request.dtype}"]
    if request.model:
        changes.append(f"model_name_or_path={json.dumps(request.model)}")
    # Where to compute is the request's to say, and the folders of the other machine mean nothing here.
    changes += ["device=auto", "use_cpu=false", "no_cuda=false"]
    cfg = load_config(yaml, [*changes, *request.overrides], purpose="train")
    update: dict[str, Any] = {}
    if cfg.trust_remote_code and not request.trust_remote_code:
        update["trust_remote_code"] = False
        notes.append("The YAML asks to run code of the model's folder; not done without --trust-remote-code.")
    if cfg.cache_dir and not Path(cfg.cache_dir).is_dir():
        update["cache_dir"] = None
    cfg = cfg.model_copy(update=update) if update else cfg
    _require_models(cfg)
    _work_around(cfg, request.device)
    return cfg, notes


def refuse_interpolation(yaml: Path) -> None:
    """Refuse settings that would read this machine's environment: those that a run wrote hold plain values only.

    Args:
        yaml: the file.

    Raises:
        UserError: a value has a `${...}` that is not escaped. Files that are no YAML are left to the reader to refuse.
    """
    import yaml as reader

    try:
        content = reader.safe_load(yaml.read_text(encoding="utf-8"))
    except (reader.YAMLError, UnicodeDecodeError):
        return
    for text in _texts(content):
        if re.search(r"(?<!\\)(\\\\)*\$\{", text):
            raise UserError(f"{yaml} holds `{text[:60]}`, which no run writes", hint="write the value itself")


def _texts(value: Any) -> Iterator[str]:
    if isinstance(value, str):
        yield value
    elif isinstance(value, dict):
        for key, item in value.items():
            yield from _texts(key)
            yield from _texts(item)
    elif isinstance(value, list):
        for item in value:
            yield from _texts(item)


def _require_models(cfg: Config) -> None:
    """Say how to name a model that lies elsewhere on this machine."""
    wanted = [(cfg.model_name_or_path, "base model", "--model PATH")]
    wanted += [(path, "adapter", "adapter_name_or_path=[PATH]") for path in cfg.adapter_name_or_path or []]
    for path, what, how in wanted:
        assert path is not None
        local = path.startswith((".", "/", "~")) or path.count("/") > 1 or "\\" in path
        if local and not Path(path).expanduser().exists():
            raise UserError(
                f"the {what} of this incident, {path}, is not on this machine", hint=f"say where it is here: {how}"
            )


def _work_around(cfg: Config, device: str) -> None:
    """Set the environment that a run would get on this machine; its settings stay the incident's."""
    if device == "cpu":
        return
    from surefoot.run.workarounds import apply_plan, plan_for

    apply_plan(plan_for(cfg), cfg, os.environ)
