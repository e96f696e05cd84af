"""`surefoot-setup/journal.jsonl`: what a run of a plan did, one event a line, on disk before the next thing happens."""

from __future__ import annotations

import contextlib
import json
import os
import time
from collections.abc import Generator
from pathlib import Path
from typing import Any, Literal, get_args

from surefoot.errors import UserError
from surefoot.files import explain_disk_errors, sync_folder
from surefoot.setup.plan import Plan, Step, Wish

SCHEMA = "surefoot.setup.journal/1"
_PATIENCE_SECONDS = 1.0  # for what is about to end
Event = Literal["plan", "resumed", "skipped", "started", "done", "failed", "refused", "interrupted", "waiting", "end"]
#: A plan's parts that make it another plan. Words on reasons or the machine may differ when it is made again.
_IDENTITY = ("wish", "targets", "torch", "index", "constraints")
#: What the command line calls a part of the wish, where it is not the part's own name.
_OPTIONS = {"purposes": "--for"}


class Journal:
    """The journal of one state folder; the first line holds the plan that it is bound to.

    Attributes:
        path: the file.
        events: the whole lines, oldest first.
    """

    path: Path
    events: list[dict[str, Any]]

    def __init__(self, path: Path) -> None:
        """Read a journal, if there is one.

        Args:
            path: the file. A torn last line, which a killed run can leave, is dropped.

        Raises:
            UserError: the file is none of ours, or is damaged before its last line.
        """
        self.path = path
        self.events = []
        self._size = 0
        with explain_disk_errors(path):
            content = path.read_bytes() if path.exists() else b""
        for number, line in enumerate(content.splitlines(keepends=True), start=1):
            event = _event(line)
            if event is None:
                if line.endswith(b"\n"):
                    raise UserError(
                        f"line {number} of {path} is no event of a setup", hint="start anew: leave out --resume"
                    )
                break
            self.events.append(event)
            self._size += len(line)

    def write(self, event: Event, step: str = "", **more: Any) -> None:
        """Add one line, flushed to disk.

        Args:
            event: what happened.
            step: the id of the step that it is about; empty for the run as a whole.
            **more: the event's own facts; JSON values.

        Raises:
            UserError: the disk is full, or the place cannot be written to. The journal stays as it was.
        """
        assert event in get_args(Event), event
        line = {"at": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()), "event": event, "step": step, **more}
        data = (json.dumps(line, ensure_ascii=False, allow_nan=False) + "\n").encode()
        with explain_disk_errors(self.path):
            self.path.parent.mkdir(parents=True, exist_ok=True)
            with self.path.open("ab", buffering=0) as handle:
                try:
                    handle.truncate(self._size)  # what a killed run has torn
                    written = handle.write(data)
                    if written < len(data):  # the disk filled up on the way: this names the error
                        handle.write(data[written:])
                    os.fsync(handle.fileno())
                except OSError:
                    handle.truncate(self._size)
                    raise
            if not self.events:
                sync_folder(self.path.parent)
        self._size += len(data)
        self.events.append(line)

    def last(self, step: str) -> str:
        """Name the last thing that happened to a step; empty when nothing did."""
        return next((event["event"] for event in reversed(self.events) if event["step"] == step), "")

    @property
    def plan(self) -> dict[str, Any] | None:
        """The JSON document of the plan that the journal is bound to; None before the first line."""
        return self.events[0]["plan"] if self.events else None


def _event(line: bytes) -> dict[str, Any] | None:
    if not line.endswith(b"\n"):
        return None
    try:
        event = json.loads(line)
    except ValueError:
        return None
    return event if isinstance(event, dict) and "event" in event and "step" in event else None


def differences(old: dict[str, Any], new: dict[str, Any]) -> list[str]:
    """Say in what two plans differ.

    Args:
        old: a plan's JSON document.
        new: another's.

    Returns:
        One phrase a difference, for people; empty when one can go on where the other stopped.
    """
    wishes = [
        f"{_OPTIONS.get(name, f'--{name}')} was {old['wish'].get(name)!r} and is {value!r}"
        for name, value in new["wish"].items()
        if old["wish"].get(name) != value
    ]
    if wishes:
        return wishes  # all else follows from them
    found = [f"{name} was {old[name]!r} and is {new[name]!r}" for name in _IDENTITY if old[name] != new[name]]
    before, after = ({step["id"]: _deeds(step) for step in plan["steps"]} for plan in (old, new))
    found += [f"step {name} is gone" for name in before if name not in after]
    found += [f"step {name} is new" for name in after if name not in before]
    found += [f"step {name} does something else" for name in after if name in before and before[name] != after[name]]
    if not found and list(before) != list(after):
        found.append("the steps come in another order")
    return found


def _deeds(step: dict[str, Any]) -> list[Any]:
    return [step["id"], step["commands"], step["verify"]]


def as_document(plan: Plan) -> dict[str, Any]:
    """Write a plan as a journal holds it: JSON values only, so that it equals what is read back."""
    return json.loads(json.dumps(plan.to_json()))


def as_plan(document: dict[str, Any]) -> Plan:
    """Build the plan that a journal holds.

    Args:
        document: its JSON document.

    Returns:
        The plan.

    Raises:
        UserError: it was written by a Surefoot whose plans have other parts.
    """
    parts = {key: _frozen(value) for key, value in document.items() if key not in ("schema", "wish", "steps")}
    try:
        steps = tuple(Step(**{key: _frozen(value) for key, value in step.items()}) for step in document["steps"])
        return Plan(wish=Wish(**{k: _frozen(v) for k, v in document["wish"].items()}), steps=steps, **parts)
    except TypeError as error:
        raise UserError(
            f"the setup under way was begun by another version of Surefoot ({error})", hint="leave out --resume"
        ) from error


def _frozen(value: Any) -> Any:
    return tuple(value) if isinstance(value, list) else value


@contextlib.contextmanager
def locked(path: Path) -> Generator[int]:
    """Hold a state folder's lock file, so that one setup at a time works there.

    Commands of a step inherit the lock: while one that outlived a killed run is at work, no other run begins.

    Args:
        path: the lock file; made if it is missing.

    Yields:
        The descriptor to hand on to commands.

    Raises:
        UserError: another setup, or what a killed one left running, holds it; or it cannot be made.
    """
    import fcntl

    with explain_disk_errors(path):
        path.parent.mkdir(parents=True, exist_ok=True)
        handle = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
    try:
        ends = time.monotonic() + _PATIENCE_SECONDS
        while True:
            try:
                fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if time.monotonic() < ends:
                    time.sleep(0.05)
                    continue
                who = ", ".join(holders(path)) or "a process of another user"
                raise UserError(
                    f"another setup, or what a killed one has left running, is at work in {path.parent}: {who}",
                    hint="wait until it ends, or stop it (kill and these numbers)",
                ) from None
        yield handle
    finally:
        os.close(handle)


def holders(path: Path) -> list[str]:
    """Processes that have a file open, as `1234 (pip)`; only what this user may see."""
    found = []
    wanted = path.resolve()
    for process in sorted(Path("/proc").glob("[0-9]*"), key=lambda entry: int(entry.name)):
        with contextlib.suppress(OSError):  # it ended meanwhile, or is not ours to look at
            if int(process.name) != os.getpid() and any(
                link.readlink() == wanted for link in (process / "fd").iterdir()
            ):
                found.append(f"{process.name} ({(process / 'comm').read_text().strip()})")
    return found
