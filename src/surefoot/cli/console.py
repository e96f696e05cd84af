"""rich's consoles: messages go to stderr, results to stdout."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rich.console import Console


def make_console(*, stderr: bool, quiet: bool = False) -> Console:
    """Make a console on stderr or stdout; a quiet one shows nothing."""
    from rich.console import Console

    return Console(stderr=stderr, quiet=quiet)
