"""SIGINT, SIGTERM and a lost terminal (SIGHUP) ask a run to save and stop after the step that it is in."""

from __future__ import annotations

import signal
import threading
import time
from types import FrameType, TracebackType

STOP_SIGNALS = [getattr(signal, name) for name in ("SIGINT", "SIGTERM", "SIGHUP") if hasattr(signal, name)]


class StopRequest:
    """Turns stop signals into a flag while it is entered; a second one interrupts at once.

    Attributes:
        requested: the number of the signal that came, or 0.
    """

    requested: int

    def __init__(self, echo: float = 0.0) -> None:
        """Wait to be entered.

        Args:
            echo: seconds in which a second one is the same again: a terminal sends Ctrl-C to all processes, and a
                launcher then sends it on to those that it started.
        """
        self.requested = 0
        self._echo, self._at = echo, 0.0
        self._before: dict[int, object] = {}

    def __enter__(self) -> StopRequest:
        if threading.current_thread() is threading.main_thread():
            self._before = {number: signal.signal(number, self._on_signal) for number in STOP_SIGNALS}
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)  # type: ignore[arg-type]

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        if not self.requested:
            self.requested, self._at = number, time.monotonic()
        elif time.monotonic() - self._at >= self._echo:
            raise KeyboardInterrupt
