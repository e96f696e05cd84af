"""What stands behind a command's name: a YAML or a folder, then `key=value` or `--key value` in any mixture."""

from __future__ import annotations

from pathlib import Path

from surefoot.errors import UserError

# Options that a command declares are taken out by typer; everything else reaches us as it was typed.
PASS_THROUGH = {"allow_extra_args": True, "ignore_unknown_options": True}


def split_request(tokens: list[str], command: str) -> tuple[Path | None, list[str]]:
    """Tell the YAML or folder from the settings that follow it.

    Args:
        tokens: as typed, in order.
        command: its name, for the message.

    Returns:
        The path, or None when the first token is a setting already, and the settings.

    Raises:
        UserError: nothing was typed.
    """
    if not tokens:
        raise UserError(f"`surefoot {command}` needs a YAML", hint=f"surefoot {command} job.yaml [key=value ...]")
    first = tokens[0]
    if first.startswith("-") or ("=" in first and not Path(first).exists()):
        return None, tokens
    return Path(first), tokens[1:]
