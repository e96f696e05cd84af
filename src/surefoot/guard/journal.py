"""`guard.jsonl`: what the guard saw and did, one event a line, each on disk before the next step runs."""

from __future__ import annotations

import json
import math
import os
from pathlib import Path
from typing import Any, Literal, get_args

from surefoot.errors import UserError
from surefoot.files import explain_disk_errors, write_text
from surefoot.guard.diagnosis import Diagnosis

Event = Literal["alarm", "preflight", "diagnosis", "action", "resumed", "stopped", "accused"]
FIELDS = (
    "step", "event", "class", "place", "module", "op", "phase", "samples", "evidence", "action", "verified",
    "steps_lost", "details",
)  # fmt: skip
"""What every line has, in this order; an event's own numbers follow."""


class Journal:
    """The run's `surefoot/guard.jsonl`.

    Args:
        path: the file. It and its folder are made by the first event; a resumed run goes on in the same file.
        writes: False for a rank that only remembers, because another one writes the file.
    """

    def __init__(self, path: Path, *, writes: bool = True) -> None:
        self.path = path
        self.writes = writes
        self.events: list[dict[str, Any]] = []

    def keep(self, count: int) -> None:
        """Go on after the first lines of the file: the others are of steps that will be done again.

        Args:
            count: lines to keep; 0 removes the file. A line that is not whole is left out.

        Raises:
            UserError: a folder stands in its place.
        """
        if not self.path.exists():
            return
        if self.path.is_dir():
            raise UserError(f"{self.path} is a folder", hint="move it away: the guard writes its journal there")
        self.events = read_journal(self.path)[:count] if count else []
        if not self.writes:
            return
        if self.events:
            write_text(self.path, "".join(json.dumps(event, ensure_ascii=False) + "\n" for event in self.events))
        else:
            self.path.unlink()

    def write(
        self,
        event: Event,
        diagnosis: Diagnosis | None,
        *,
        step: int | None = None,
        action: str = "",
        verified: bool | None = None,
        steps_lost: int = 0,
        **more: Any,
    ) -> dict[str, Any]:
        """Add one line, flushed to disk.

        Args:
            event: what happened.
            diagnosis: the fault that it is about; None for an alarm whose class is not known yet.
            step: the step, counted from 1; None for the diagnosis's own.
            action: what was done, as a sentence for a person; empty when nothing was.
            verified: whether the action was checked against float32 and held; None when it was not checked.
            steps_lost: optimizer steps that were skipped, or undone and not done again.
            **more: the event's own facts, as `loss`, `grad_norm`, `loss_scale`, `seconds`, `steps_redone`.

        Returns:
            The line as it was written: JSON values only, numbers that are not finite as None.

        Raises:
            UserError: the disk is full, or the place cannot be written to.
        """
        assert event in get_args(Event), event
        assert diagnosis is not None or step is not None, "an event belongs to a step"
        assert not set(more) & set(FIELDS), "a field of the contract is no extra"
        found = diagnosis
        line = {
            "step": step if step is not None or found is None else found.step,
            "event": event,
            "class": found.fault if found else None,
            "place": found.place if found else None,
            "module": found.module if found else None,
            "op": found.op if found else None,
            "phase": found.phase if found else None,
            "samples": found.samples if found else (),
            "evidence": " ".join(found.evidence) if found else "",
            "action": action,
            "verified": verified,
            "steps_lost": steps_lost,
            "details": found.details if found else {},
        } | more
        plain = as_json(line)
        with explain_disk_errors(self.path):
            if self.writes:
                self._append(json.dumps(plain, ensure_ascii=False, allow_nan=False))
        self.events.append(plain)
        return plain

    def _append(self, text: str) -> None:
        self.path.parent.mkdir(parents=True, exist_ok=True)
        with self.path.open("ab+") as handle:
            if handle.tell() and not _ends_a_line(self.path):
                text = f"\n{text}"  # a killed run left half a line: it must not swallow this one
            handle.write(f"{text}\n".encode())
            handle.flush()
            os.fsync(handle.fileno())


def read_journal(path: Path) -> list[dict[str, Any]]:
    """Read the events of a run, oldest first.

    Args:
        path: of a `guard.jsonl`; a missing file is a run without events.

    Returns:
        One mapping a line. Half a line, which a killed run can leave, is passed over.

    Raises:
        UserError: the file is not text, or none of ours.
    """
    try:
        lines = path.read_bytes().decode("utf-8").split("\n") if path.exists() else []
    except UnicodeDecodeError as error:
        raise UserError(f"{path} is not text", hint="name the guard.jsonl of a run") from error
    events = []
    for line in lines:
        try:
            event = json.loads(line)
        except ValueError:
            continue
        if not isinstance(event, dict) or "event" not in event:
            raise UserError(f"{path} is not a journal of the guard", hint="name the guard.jsonl of a run")
        events.append(event)
    return events


def as_json(value: Any) -> Any:
    """Make a value writable as JSON: tuples become lists, numbers that are not finite become None.

    Args:
        value: nested mappings and sequences of plain values; anything else is written as its text, since a journal
            must not fail in the middle of a rescue.

    Returns:
        JSON values only.
    """
    if isinstance(value, dict):
        return {str(key): as_json(item) for key, item in value.items()}
    if isinstance(value, list | tuple | set | frozenset):
        return [as_json(item) for item in (sorted(value, key=str) if isinstance(value, set | frozenset) else value)]
    if isinstance(value, float):
        return float(value) if math.isfinite(value) else None
    if value is None or isinstance(value, str | bool | int):
        return value
    if getattr(value, "ndim", None) == 0:
        return as_json(value.item())  # a NumPy or torch scalar
    return str(value)


def _ends_a_line(path: Path) -> bool:
    with path.open("rb") as handle:
        handle.seek(-1, os.SEEK_END)
        return handle.read(1) == b"\n"
