"""Known defects of this machine, worked around before torch starts, said and kept in the run's record."""

from __future__ import annotations

from collections.abc import MutableMapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from surefoot.machine.device import cards_in_sight
from surefoot.machine.workarounds import Workaround, apply_environment, plan_workarounds, recorded_environment

if TYPE_CHECKING:
    from surefoot.config import Config


def plan_for(cfg: Config, root: Path = Path("/")) -> list[Workaround]:
    """Choose the workarounds for this machine and a YAML; only a machine with an AMD card is looked at.

    Args:
        cfg: the YAML.
        root: where the file system begins; another folder in tests.

    Returns:
        The workarounds; empty with `workarounds: false` and on a CPU run.
    """
    if not cfg.workarounds or cfg.device == "cpu" or not any(card.startswith("AMD") for card in cards_in_sight(root)):
        return []
    from surefoot.machine.capture import capture
    from surefoot.machine.facts import Machine

    return plan_workarounds(Machine(capture(root)), cfg.model_dump())


def apply_plan(
    plan: list[Workaround], cfg: Config, environ: MutableMapping[str, str]
) -> tuple[Config, list[dict[str, Any]]]:
    """Change the environment and the settings; to be called before torch is imported.

    Args:
        plan: from `plan_for`.
        cfg: the YAML.
        environ: the environment to change, in real life `os.environ`.

    Returns:
        The settings that the run takes, and what the run's record says of each workaround.
    """
    record = []
    for entry in plan:
        changed = apply_environment([entry], environ)
        record.append({"id": entry.id, "line": entry.line, "environment": changed, "config": dict(entry.set_config)})
    settings = {key: value for entry in plan for key, value in entry.set_config.items()}
    if settings:
        # compute_dtype was resolved from the flags; it follows a change of theirs.
        names = {"bf16": "bfloat16", "fp16": "float16"}
        flag = next((name for name in names if settings.get(name) is True), None)
        if flag:
            settings["compute_dtype"] = names[flag]
        cfg = cfg.model_copy(update=settings)
    return cfg, record


def environment_record(record: list[dict[str, Any]], environ: MutableMapping[str, str]) -> dict[str, Any]:
    """Compose what the run's record keeps: the workarounds, and the variables that the process really got."""
    return {"workarounds": record, "environment": recorded_environment(environ)}
