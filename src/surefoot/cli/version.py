"""`surefoot version`: one line."""

from __future__ import annotations

from surefoot import __version__


def version() -> None:
    """Print the version."""
    print(f"surefoot {__version__}")
