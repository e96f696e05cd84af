"""`surefoot env`: versions and hardware for a bug report, free of secrets, names and paths."""

from __future__ import annotations

import json
from typing import Any

import typer

from surefoot.cli.outcome import exit_codes


def env(
    as_json: bool = typer.Option(False, "--json", help="Print one JSON document."),
    deep: bool = typer.Option(False, "--deep", help="Import torch and ask it for its devices (takes seconds)."),
    debug: bool = typer.Option(False, "--debug", help="Show tracebacks."),
) -> None:
    """Print versions, system and cards."""
    with exit_codes(debug=debug):
        from surefoot.run.snapshot import snapshot

        found = snapshot(with_torch=deep)
        print(json.dumps(found, indent=2) if as_json else "\n".join(_lines(found)))


def _lines(found: dict[str, Any]) -> list[str]:
    lines = []
    for key, value in found.items():
        if isinstance(value, dict):
            lines.append(f"{key}:")
            lines += [f"  {name}: {'-' if inner is None else inner}" for name, inner in value.items()]
        elif isinstance(value, list):
            lines.append(f"{key}: {'none' if not value else ''}".rstrip())
            lines += [f"  {inner}" for inner in value]
        else:
            lines.append(f"{key}: {'could not look' if value is None else value}")
    return lines
