"""Writing settings back as a YAML that loads to the same settings."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any

from surefoot.config.table import GROUPS, KeyInfo, all_keys

if TYPE_CHECKING:
    from surefoot.config.schema import Config

HEADER = "# The settings of this run, as Surefoot understood them. Keys that are not here have their defaults.\n"


def write_yaml(config: Config) -> str:
    """Write every setting that works, and others where they differ from their defaults.

    Args:
        config: checked settings.

    Returns:
        YAML text, in the sections of LLaMA-Factory's examples.
    """
    from omegaconf import OmegaConf

    text = HEADER
    for group in GROUPS:
        rows = [info for info in all_keys().values() if info.group == group and _worth_writing(info, config)]
        open_rows = {info.name: _escaped(getattr(config, info.name)) for info in rows if not info.secret}
        hidden = [info.name for info in rows if info.secret]
        if open_rows or hidden:
            text += f"\n### {group}\n"
        if open_rows:
            text += OmegaConf.to_yaml(OmegaConf.create(open_rows))
        text += "".join(f"# {name}: (set, and kept secret)\n" for name in hidden)
    return text


def _worth_writing(info: KeyInfo, config: Config) -> bool:
    value = getattr(config, info.name)
    if info.name == "packing":  # derived from the stage unless it was asked for, and asking for it costs a token
        return config.given.get("packing") is not None
    if info.status == "works":
        return value is not None or info.default is not None
    return value != info.default


def _escaped(value: Any) -> Any:
    """Keep `${` from being taken for an interpolation: a backslash before it, and those that stand there doubled."""
    if isinstance(value, str):
        return re.sub(r"(\\*)\$\{", lambda found: found[1] * 2 + "\\${", value)
    if isinstance(value, list):
        return [_escaped(item) for item in value]
    if isinstance(value, dict):
        return {key: _escaped(item) for key, item in value.items()}
    return value
