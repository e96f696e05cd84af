"""What `chat` and `export` are pointed at: a YAML, a run directory, one of its checkpoints, or a model folder."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from surefoot.config import Config, load_config
from surefoot.errors import UserError

RESOLVED = Path("surefoot/resolved.yaml")


@dataclass(frozen=True, slots=True)
class Target:
    """Where the settings come from, and which of them the place itself decides.

    Attributes:
        yaml: the settings; None when there are only overrides.
        overrides: `key=value`, in front of what the person typed.
    """

    yaml: Path | None
    overrides: tuple[str, ...]


def load_target(path: Path | None, overrides: Sequence[str], purpose: Literal["chat", "export"]) -> Config:
    """Read the settings for a trained model.

    Args:
        path: a YAML or JSON file, a run directory, a checkpoint in one, a folder with a model; or None.
        overrides: `key=value` or `--key value`, stronger than everything else.
        purpose: of the settings.

    Returns:
        The checked settings.

    Raises:
        UserError: the path is none of these, or the settings are wrong.
    """
    if path is not None and not path.exists():
        raise UserError(f"there is no file or folder {path}", hint="name a run directory, a model folder or a YAML")
    target = find_target(path) if path is not None and path.is_dir() else Target(path, ())
    return load_config(target.yaml, [*target.overrides, *overrides], purpose=purpose)


def find_target(folder: Path) -> Target:
    """Work out what a folder is.

    Args:
        folder: one that exists.

    Returns:
        The settings to start from.

    Raises:
        UserError: it holds neither an adapter nor a model.
    """
    resolved = next((place / RESOLVED for place in (folder, folder.parent) if (place / RESOLVED).is_file()), None)
    if (folder / "adapter_config.json").is_file():
        if resolved is None:
            raise UserError(
                f"{folder} holds an adapter, but not the settings that it was trained with (surefoot/resolved.yaml)",
                hint=f"name a YAML with model_name_or_path and template, and add adapter_name_or_path={folder}",
            )
        return Target(resolved, (f"adapter_name_or_path=[{_quoted(folder)}]", f"output_dir={_quoted(folder)}"))
    if (folder / "config.json").is_file():
        # What is merged or fully trained is a model of its own: the run's base and adapter are in it already.
        own = (f"model_name_or_path={_quoted(folder)}", "adapter_name_or_path=null", f"output_dir={_quoted(folder)}")
        return Target(resolved, own) if resolved else Target(None, (own[0], own[2]))
    if resolved is not None:
        raise UserError(f"the run in {folder} has not saved a model yet", hint="wait for it, or resume its training")
    raise UserError(f"{folder} holds neither an adapter nor a model", hint="name a run directory or a YAML")


def _quoted(folder: Path) -> str:
    """Write a path so that no character of it means anything to YAML: a folder may be called `null` or `a,b`."""
    return json.dumps(str(folder), ensure_ascii=False)
