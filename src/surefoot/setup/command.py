"""A step's bash lines in a process group of their own: output into a log, progress on the terminal, stopped whole."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Generator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from surefoot.files import explain_disk_errors

_QUIET_SECONDS = 2.0
_GRACE_SECONDS = 4.0  # for pip to remove its temporary folders
TIMED_OUT = 124  # as coreutils' timeout says it

#: Messages in English, for the doctor and the reader of an issue; no questions that nobody can answer.
_ENVIRONMENT = {"LC_ALL": "C.UTF-8", "PIP_NO_INPUT": "1", "PIP_DISABLE_PIP_VERSION_CHECK": "1"}
#: Names the line that failed, behind what it printed; of a pipe all exit codes, and its last part.
_TRAP = 'trap \'printf "surefoot: exit code %s of: %s\\n" "${PIPESTATUS[*]}" "$BASH_COMMAND" >&2\' ERR'


def run_bash(
    lines: Sequence[str],
    folder: Path,
    log: Path,
    lock: int,
    *,
    label: str = "",
    seconds: float | None = None,
    terminal: bool = False,
) -> int:
    """Run bash lines in one shell under `set -euo pipefail`.

    Args:
        lines: the lines.
        folder: where they run.
        log: takes stdout and stderr; an older one is replaced.
        lock: a descriptor that the commands inherit.
        label: what the progress line calls them.
        seconds: after which they are stopped; None for never.
        terminal: let them read from the terminal (sudo asks for a password there), in its own process group.

    Returns:
        The exit code; 128 + N for a shell that signal N ended, TIMED_OUT when they were stopped.

    Raises:
        UserError: the log cannot be written.
        KeyboardInterrupt: Ctrl-C; the commands and all that they started were stopped.
    """
    with explain_disk_errors(log):
        log.parent.mkdir(parents=True, exist_ok=True)
        output = log.open("wb")
    with output, _stop_signals() as stops:
        process = subprocess.Popen(
            ["bash", "-euo", "pipefail", "-c", "\n".join([_TRAP, *lines])],
            cwd=folder,
            stdin=None if terminal else subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            env={**os.environ, **_ENVIRONMENT},
            pass_fds=(lock,),
            # A group of its own is stopped whole. Python 3.10 has no `process_group`; no thread of ours runs here.
            preexec_fn=None if terminal else os.setpgrp,
        )
        code = None
        try:
            with _Progress(label, log, shown=not terminal and sys.stderr.isatty()) as progress:
                code = _wait(process, stops, progress, seconds)
        finally:
            if code is None:
                _stop(process, stops, own_group=not terminal)
        if stops.asked:
            raise KeyboardInterrupt
    if code is None:
        return TIMED_OUT
    return code if code >= 0 else 128 - code


@dataclass
class _Stops:
    """How often a signal has asked to stop."""

    asked: int = 0


@contextlib.contextmanager
def _stop_signals() -> Generator[_Stops]:
    """Count SIGINT, SIGTERM and a closed terminal instead of being interrupted anywhere: each must stop the commands.

    Yields:
        The count.
    """
    stops = _Stops()

    def count(*_: object) -> None:
        stops.asked += 1

    # What is ignored stays so: nohup means it.
    signs = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
    before = {sign: signal.signal(sign, count) for sign in signs if signal.getsignal(sign) is not signal.SIG_IGN}
    try:
        yield stops
    finally:
        for sign, handler in before.items():
            signal.signal(sign, handler)


def _wait(process: subprocess.Popen[bytes], stops: _Stops, progress: _Progress, seconds: float | None) -> int | None:
    """Wait for a process; None when it must be stopped."""
    began = time.monotonic()
    while process.poll() is None:
        passed = time.monotonic() - began
        if stops.asked or (seconds is not None and passed >= seconds):
            return None
        progress.tell(passed)
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(timeout=0.1)
    return process.returncode


def _stop(process: subprocess.Popen[bytes], stops: _Stops, *, own_group: bool) -> None:
    """Stop commands and all that they started: asked first, then killed. A second Ctrl-C kills at once."""
    asked = stops.asked
    # bash goes on when its child ended well in spite of SIGINT, hence SIGTERM as well.
    for sign in (signal.SIGINT, signal.SIGTERM, signal.SIGKILL):
        with contextlib.suppress(ProcessLookupError):
            if own_group:
                os.killpg(process.pid, sign)
            else:
                process.send_signal(sign)
        ends = time.monotonic() + _GRACE_SECONDS
        while time.monotonic() < ends and stops.asked == asked:
            if _gone(process, own_group):
                return
            time.sleep(0.02)
    process.wait()


def _gone(process: subprocess.Popen[bytes], own_group: bool) -> bool:
    """Whether a process has ended, with all of its group."""
    ended = process.poll() is not None
    if not own_group:
        return ended
    try:
        os.killpg(process.pid, 0)
    except ProcessLookupError:
        return True
    return False


class _Progress:
    """A line on the terminal that tells how long a command runs and what it last said; none for a quick one."""

    def __init__(self, label: str, log: Path, *, shown: bool) -> None:
        """Show nothing yet.

        Args:
            label: what the command is called.
            log: its output.
            shown: False on a file or pipe, which would fill with it, and where a password may be asked for.
        """
        self._label = label
        self._log = log
        self._shown = shown
        self._status: Any = None

    def __enter__(self) -> _Progress:
        return self

    def __exit__(self, *_: object) -> None:
        if self._status is not None:
            self._status.stop()

    def tell(self, passed: float) -> None:
        """Bring the line up to date.

        Args:
            passed: seconds since the command began.
        """
        if not self._shown or passed < _QUIET_SECONDS:
            return
        from rich.console import Console
        from rich.text import Text

        text = Text(f"{self._label}  {passed // 60:.0f}:{int(passed) % 60:02}  {_last_line(self._log)}")
        if self._status is None:
            self._status = Console(stderr=True).status(text)
            self._status.start()
        self._status.update(text)


def _last_line(log: Path) -> str:
    with contextlib.suppress(OSError), log.open("rb") as handle:
        handle.seek(max(0, log.stat().st_size - 2000))
        words = handle.read().decode("utf-8", "replace").replace("\r", "\n").split("\n")
        return next((line.strip()[:80] for line in reversed(words) if line.strip()), "")
    return ""
