"""How the preprocessing goes on, for the person who waits: bars on a terminal, plain lines in a file."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from types import TracebackType

    from rich.console import Console
    from rich.progress import Progress as Bars
    from rich.progress import TaskID

PLAIN_SECONDS = 10.0
"""Without a terminal: at least this long between two lines about one piece of work."""


class PreprocessingProgress:
    """Shows each piece of work that `prepare_data` reports; used as a context, so that bars leave the screen."""

    def __init__(self, console: Console | None) -> None:
        """Take a console; None shows nothing."""
        self._console = console
        self._bars: Bars | None = None
        self._tasks: dict[str, TaskID] = {}
        self._last_line: dict[str, float] = {}
        self._done: set[str] = set()

    def __enter__(self) -> PreprocessingProgress:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._bars is not None:
            self._bars.stop()
            self._bars = None

    def __call__(self, what: str, rows: int, share: float | None) -> None:
        """Show how far a piece of work is.

        Args:
            what: the work.
            rows: rows done.
            share: from 0 to 1; None = cannot tell.
        """
        if self._console is None:
            return
        if self._console.is_terminal:
            self._show(self._console, what, rows, share)
            return
        now = time.monotonic()
        over = share == 1.0 and what not in self._done
        if over or now - self._last_line.setdefault(what, now) >= PLAIN_SECONDS:
            self._last_line[what] = now
            self._done |= {what} if over else set()
            part = "" if share is None else f" ({share:.0%})"
            self._console.print(f"{what}: {rows:,} rows{part}", highlight=False, markup=False, soft_wrap=True)

    def _show(self, console: Console, what: str, rows: int, share: float | None) -> None:
        if self._bars is None:
            self._bars = _make_bars(console)
            self._bars.start()
        if what not in self._tasks:
            self._tasks[what] = self._bars.add_task(what, total=None if share is None else 1.0, rows=0)
        self._bars.update(self._tasks[what], completed=share or 0.0, rows=rows)


def _make_bars(console: Console) -> Bars:
    from rich.progress import BarColumn, TextColumn, TimeElapsedColumn
    from rich.progress import Progress as Bars

    rows = TextColumn("{task.fields[rows]:,} rows")
    return Bars(
        TextColumn("{task.description}", markup=False),
        BarColumn(bar_width=20),
        rows,
        TimeElapsedColumn(),
        console=console,
    )
