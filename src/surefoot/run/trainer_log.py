"""`trainer_log.jsonl`: one line for each logged stretch of steps and each evaluation, with LLaMA-Factory's fields.

The file is standard JSON always. A loss or gradient norm that is NaN or infinite stands there as null beside
`"nonfinite": true`, never as 0 and never left out.
"""

from __future__ import annotations

import json
from datetime import timedelta
from pathlib import Path
from typing import Any

from surefoot.files import explain_disk_errors, write_text
from surefoot.run.quiet import QuietListener
from surefoot.run.window import LogPoint, LogWindow
from surefoot.train.events import EvalEvent, RunFacts, StepEvent, TrainResult


class TrainerLog(QuietListener):
    """Writes the log while the run goes on; a resumed run goes on in the same file.

    Attributes:
        entries: every line of the file so far, those before a resume included.
    """

    entries: list[dict[str, Any]]

    def __init__(self, path: Path, window: LogWindow) -> None:
        """Name the file and say when to log.

        Args:
            path: of the file.
            window: this listener's own.
        """
        self.entries = []
        self._path = path
        self._window = window
        self._total_steps = 0
        self._resumed_from = 0
        self._seconds = 0.0
        self._first: StepEvent | None = None

    def started(self, facts: RunFacts) -> None:
        """Take up the file: lines beyond the resumed step belong to steps that will be done again, so they go."""
        self._window.start(facts)
        self._total_steps = facts.total_steps
        self._resumed_from = facts.resumed_from
        self.entries = read_log(self._path, last_step=facts.resumed_from) if facts.resumed_from else []
        write_text(self._path, "".join(_line(entry) for entry in self.entries))

    def stepped(self, event: StepEvent) -> None:
        """Log the stretch that this step ends, if it ends one."""
        self._first = self._first or event
        self._seconds = event.seconds
        for point in self._window.push(event):
            self._append(self._step_entry(point))

    def rewound(self, step: int) -> None:
        """Take the lines of undone steps out of the file."""
        self._window.rewound(step)
        kept = [entry for entry in self.entries if entry["current_steps"] <= step]
        if len(kept) < len(self.entries):
            self.entries = kept
            write_text(self._path, "".join(_line(entry) for entry in kept))

    def evaluated(self, event: EvalEvent) -> None:
        """Log an evaluation; one that a killed process has logged already is not logged twice."""
        entry: dict[str, Any] = {"eval_loss": event.loss}
        if event.name:
            entry["eval_name"] = event.name
        if event.accuracy is not None:
            entry["accuracy"] = event.accuracy
        if self._first is None and self._has_evaluation(event):
            return
        entry |= {"epoch": _tidy(event.epoch), **self._timing(event.step, self._seconds)}
        self._append({**self._steps(event.step), **entry, **({"nonfinite": True} if event.nonfinite else {})})

    def finished(self, result: TrainResult) -> None:
        """Log the last stretch, though it is shorter than `logging_steps`, and close the run as LLaMA-Factory does."""
        last = self._window.flush()
        if last:
            self._append(self._step_entry(last[0]))
            return
        if result.stopped_by == "signal":
            return  # the run goes on later, and so does its log
        if self._first is None and self.entries and "eval_loss" not in self.entries[-1]:
            return  # a run that was over before it was resumed: its closing line is there
        timing = self._timing(result.steps, result.seconds)
        self._append({**self._steps(result.steps), "epoch": _tidy(result.epoch), **timing})

    def failed(self) -> None:
        """Log what is waiting when the run ends by an error."""
        for point in self._window.flush():
            self._append(self._step_entry(point))

    def _has_evaluation(self, event: EvalEvent) -> bool:
        step_and_set = (event.step, event.name)
        logged = ((e["current_steps"], e.get("eval_name", "")) for e in self.entries if "eval_loss" in e)
        return step_and_set in logged

    def _step_entry(self, point: LogPoint) -> dict[str, Any]:
        entry: dict[str, Any] = {
            **self._steps(point.step),
            "loss": point.loss,
            "grad_norm": point.grad_norm,
            "lr": point.learning_rate,
            "epoch": _tidy(point.epoch),
            **self._timing(point.step, point.seconds),
            "total_tokens": point.tokens,
        }
        throughput = self._throughput(point)
        if throughput is not None:
            entry["throughput"] = throughput
        if point.memory_gib is not None:
            entry["vram_allocated"] = round(point.memory_gib, 2)
        if point.loss_scale is not None:
            entry["loss_scale"] = point.loss_scale
        if point.nonfinite:
            entry["nonfinite"] = True
        return entry

    def _throughput(self, point: LogPoint) -> float | None:
        """Real tokens a second of this process so far; a resumed run is measured from its first step on."""
        if self._resumed_from == 0:
            return round(point.tokens / point.seconds, 2) if point.seconds > 0 else None
        assert self._first is not None
        seconds = point.seconds - self._first.seconds
        return round((point.tokens - self._first.tokens) / seconds, 2) if seconds > 0 else None

    def _steps(self, step: int) -> dict[str, Any]:
        return {"current_steps": step, "total_steps": self._total_steps}

    def _timing(self, step: int, seconds: float) -> dict[str, Any]:
        done = step - self._resumed_from
        remaining = seconds / done * (self._total_steps - step) if done > 0 else 0.0
        return {
            "percentage": round(100 * step / self._total_steps, 2) if self._total_steps else 100.0,
            "elapsed_time": str(timedelta(seconds=int(seconds))),
            "remaining_time": str(timedelta(seconds=int(remaining))),
        }

    def _append(self, entry: dict[str, Any]) -> None:
        self.entries.append(entry)
        with explain_disk_errors(self._path), self._path.open("a", encoding="utf-8") as handle:
            handle.write(_line(entry))


def read_log(path: Path, last_step: int | None = None) -> list[dict[str, Any]]:
    """Read a log back.

    Args:
        path: of the file; a missing file is an empty log.
        last_step: leave out lines of later steps; None reads all.

    Returns:
        Its lines. One that is not a JSON object is left out: a killed process can leave half a line behind.
    """
    if not path.exists():
        return []
    entries = []
    for line in path.read_text(encoding="utf-8", errors="replace").splitlines():
        try:
            entry = json.loads(line)
        except json.JSONDecodeError:
            continue
        if not isinstance(entry, dict) or not isinstance(entry.get("current_steps"), int):
            continue
        if last_step is None or entry["current_steps"] <= last_step:
            entries.append(entry)
    return entries


def _line(entry: dict[str, Any]) -> str:
    return json.dumps(entry, ensure_ascii=False, allow_nan=False) + "\n"


def _tidy(epoch: float) -> float:
    return round(epoch, 6)
