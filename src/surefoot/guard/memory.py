"""What the guard has decided in a run, and the budgets beyond which a cure is none."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from surefoot.guard.plan import Change, Plan

MOST_CHANGES = 16  # of the precision plan in one run
MOST_ALARMS_A_STEP = 4  # then no cure holds
MOST_TRANSIENTS = 3  # of one device among TRANSIENT_WINDOW steps; more than these stop the run
TRANSIENT_WINDOW = 100
ACCUSED_AFTER = 3  # of one device in the whole run, however far apart: it is named as the likely cause
MOST_SKIPS_IN_A_ROW = 3
MOST_SKIPPED_SHARE = 0.01  # of the run's steps, and at least MOST_SKIPS_IN_A_ROW
FALLING_SCALE = 3  # alarms of class SCALE among SCALE_WINDOW steps: a scale on its way down announces a divergence
SCALE_WINDOW = 200


@dataclass
class Memory:
    """What must be known after a resume.

    Attributes:
        changes: of the precision plan in force.
        skipped_rows: left out wherever they come up.
        skipped_at: rows left out at one step only, by step.
        alarms: steps that raised an alarm, one entry each time.
        transients: by device, with its rank and host, the steps of alarms that did not come back.
        skips: steps at which rows were left out.
        scale_falls: steps at which the loss scale was lowered.
        steps_lost: optimizer steps that were not applied.
        embeddings_mended: frozen embedding rows were replaced, so that the adapter must bring them along.
    """

    changes: tuple[Change, ...] = ()
    skipped_rows: tuple[str, ...] = ()
    skipped_at: dict[int, tuple[str, ...]] = field(default_factory=dict)
    alarms: list[int] = field(default_factory=list)
    transients: dict[str, list[int]] = field(default_factory=dict)
    skips: list[int] = field(default_factory=list)
    scale_falls: list[int] = field(default_factory=list)
    steps_lost: int = 0
    embeddings_mended: bool = False

    def plan(self) -> Plan:
        """Return what another run needs to be made with the same cures from its start."""
        return Plan(self.changes, self.skipped_rows, dict(self.skipped_at))

    def rows_left_out(self, step: int) -> set[str]:
        """Return the rows that a step, counted from 1, must do without."""
        return {*self.skipped_rows, *self.skipped_at.get(step, ())}

    def add_alarm(self, step: int) -> str:
        """Count an alarm; return why the run must stop, or nothing."""
        self.alarms.append(step)
        if self.alarms.count(step) <= MOST_ALARMS_A_STEP:
            return ""
        return f"stopped: {MOST_ALARMS_A_STEP} cures at this step did not hold"

    def room_for(self, changes: tuple[Change, ...]) -> str:
        """Return why changes may not be added to the plan, or nothing."""
        if len(self.changes) + len(changes) <= MOST_CHANGES:
            return ""
        return f"stopped: the plan holds {len(self.changes)} changes already"

    def add_transient(self, step: int, device: str) -> str:
        """Count a fault that did not repeat; return why the run must stop, or nothing."""
        steps = self.transients.setdefault(device, [])
        steps.append(step)
        recent = [earlier for earlier in steps if earlier > step - TRANSIENT_WINDOW]
        if len(recent) <= MOST_TRANSIENTS:
            return ""
        return f"stopped: {len(recent)} faults that do not repeat within {TRANSIENT_WINDOW} steps on {device}"

    def accusation(self, device: str) -> str:
        """Name a device that has just had its last fault too many; empty before, and after it was named once."""
        steps = self.transients.get(device, [])
        if len(steps) != ACCUSED_AFTER:
            return ""
        others = sum(len(found) for name, found in self.transients.items() if name != device)
        return (
            f"{device} had {len(steps)} faults that did not repeat, at steps {', '.join(map(str, steps))}; all other "
            f"devices together had {others}. Take this card out of the run and test it: `surefoot doctor --deep`"
        )

    def add_skip(self, step: int, total_steps: int) -> str:
        """Count a step that rows were left out of; return why the run must stop, or nothing."""
        self.skips.append(step)
        skips = set(self.skips)
        in_a_row = all(step - back in skips for back in range(MOST_SKIPS_IN_A_ROW + 1))
        if not in_a_row and len(skips) <= max(MOST_SKIPS_IN_A_ROW, MOST_SKIPPED_SHARE * total_steps):
            return ""
        return f"stopped: rows had to be left out at {len(skips)} steps; that is no cure"

    def add_scale_fall(self, step: int) -> str:
        """Count a lowered loss scale; return a warning when it is falling, or nothing."""
        self.scale_falls.append(step)
        recent = [earlier for earlier in self.scale_falls if earlier > step - SCALE_WINDOW]
        if len(recent) < FALLING_SCALE:
            return ""
        return f"The loss scale was lowered {len(recent)} times within {SCALE_WINDOW} steps: gradients are growing."

    def to_json(self) -> dict[str, Any]:
        """Return what a checkpoint must hold."""
        return {
            "plan": self.plan().to_json(), "alarms": list(self.alarms),
            "transients": {device: list(steps) for device, steps in self.transients.items()},
            "skips": list(self.skips), "scale_falls": list(self.scale_falls), "steps_lost": self.steps_lost,
            "embeddings_mended": self.embeddings_mended,
        }  # fmt: skip

    def take_counts(self, state: dict[str, Any]) -> None:
        """Take up a checkpoint's counts; its plan is applied by the caller."""
        self.alarms, found = list(state["alarms"]), state["transients"]
        if isinstance(found, list):  # of a version that counted all devices together
            found = {"a device before": found} if found else {}
        self.transients = {device: list(steps) for device, steps in found.items()}
        self.skips, self.scale_falls = list(state["skips"]), list(state["scale_falls"])
        self.steps_lost, self.embeddings_mended = state["steps_lost"], state["embeddings_mended"]
