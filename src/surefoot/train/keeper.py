"""What a run does when a step is not finite or far off: the guard's verdicts put into practice.

`guard/` finds the fault and its cure by running a step again; here the run is changed by them: the step is done again,
rows are left out, or the run goes back. Budgets keep a cure that does not hold from going round in circles.
"""

from __future__ import annotations

import contextlib
import shutil
import time
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

from surefoot.data.messages import Sample
from surefoot.guard.check import NonFiniteStepError, StepCheck, shown
from surefoot.guard.diagnosis import Diagnosis
from surefoot.guard.incident import write_incident
from surefoot.guard.journal import Journal
from surefoot.guard.memory import Memory
from surefoot.guard.plan import Change, Plan, apply_change, hold_change, write_plan
from surefoot.guard.scene import Scene
from surefoot.guard.seen import Seen
from surefoot.guard.summary import hint_for, summarize
from surefoot.guard.treat import Treatment, treat
from surefoot.model.randomness import get_random_state
from surefoot.train.cures import apply_treatment, diagnose_attempt, healthy_scenes, reload_weights
from surefoot.train.frozen import FrozenWeights, keeps_weights
from surefoot.train.integrity import Integrity
from surefoot.train.masters import Masters
from surefoot.train.rewind import RestorePoint, RestorePoints, take
from surefoot.train.shards import NoRoomError
from surefoot.train.spike import SpikeKeeper
from surefoot.train.step_times import StepTimes

if TYPE_CHECKING:
    from surefoot.config import Config
    from surefoot.train.loop import Run
    from surefoot.train.step import Attempt


class Keeper:
    """The guard of one run.

    Attributes:
        mode: "heal", "watch" or "off".
        journal: the run's `guard.jsonl`.
        memory: what was decided so far.
        frozen: the frozen weights; None before the start and with `guard: off`.
        points: to go back to; None unless it heals.
        integrity: watches that nobody else changes the state; None before the start and with `guard: off`.
    """

    mode: str
    journal: Journal
    memory: Memory
    frozen: FrozenWeights | None
    points: RestorePoints | None
    integrity: Integrity | None

    def __init__(self, cfg: Config, *, writes: bool = True) -> None:
        """Take the settings.

        Args:
            cfg: the YAML; `guard`, `output_dir` and `model_name_or_path` are read.
            writes: False on a rank whose files another one writes.
        """
        self._writes = writes
        self.mode = cfg.guard
        self.memory = Memory()
        self._cfg = cfg
        self._folder = Path(cfg.output_dir) / "surefoot"
        self.journal = Journal(self._folder / "guard.jsonl", writes=writes)
        self.frozen = None
        self.points = None
        self.integrity = None
        self._masters: Masters | None = None
        self._spikes = SpikeKeeper(self)
        self._open: tuple[Diagnosis, float] | None = None
        self._incident: Path | None = None
        self._birth: RestorePoint | None = None
        self._times = StepTimes()

    def repair_scale(self, run: Run) -> None:
        """Put back a loss scale that multiplies every gradient to nothing, before anything is judged by gradients.

        Args:
            run: assembled, and restored if it goes on from a checkpoint.
        """
        if self.mode == "off":
            return
        scale, step = run.runner.scale, run.state.step + 1
        was = scale.value
        if scale.repair():
            evidence = f"The loss scale stands at {was:g}, where it multiplies every gradient to nothing."
            diagnosis = Diagnosis(step, "SCALE", "loss", None, None, "backward", (), (evidence,))
            self.journal.write("alarm", None, step=step, loss_scale=was)
            self.journal.write("diagnosis", diagnosis)
            self.acted(run, diagnosis, f"loss scale put back to {scale.value:g}", True, time.perf_counter())

    def remember_birth(self, run: Run, random_state: dict[str, Any]) -> None:
        """Before a checkpoint is restored: remember how the run began, to be able to start again from step 0.

        Args:
            run: as `assemble` has built it.
            random_state: of all generators now.
        """
        self._birth = take(run, random_state, with_weights=False)

    def start(self, run: Run, random_state: dict[str, Any]) -> None:
        """Get ready before the first step.

        Args:
            run: assembled, and restored if it goes on from a checkpoint.
            random_state: of all generators now.
        """
        if self.mode == "off":
            return
        self.frozen = FrozenWeights(run.model, run.state.step)
        self._masters = Masters(run, self)
        self.integrity = Integrity(run, self)
        if self.mode == "heal":
            self.points = RestorePoints(run, random_state, self._birth)

    def use_plan(self, run: Run, plan: Plan) -> None:
        """Apply a precision plan and keep it for the whole run.

        Args:
            run: whose model is changed.
            plan: from `precision_plan`, a checkpoint, or a treatment.
        """
        for change in plan.changes:
            if change not in self.memory.changes:
                self._keep_change(run, change)
        self.memory.skipped_rows = tuple(dict.fromkeys((*self.memory.skipped_rows, *plan.skipped_rows)))
        self.memory.skipped_at |= plan.skipped_at
        if self.frozen:
            self.frozen.sums.renew(run.model)  # islands hold their weights in another dtype
        if self._writes:
            write_plan(self._folder / "precision_plan.json", self.memory.plan())
        self._times.changed()

    def without_skipped(self, step: int, samples: list[Sample]) -> list[Sample]:
        """Leave out the rows that the guard has set aside.

        Args:
            step: counted from 1.
            samples: of that step.

        Returns:
            The others.
        """
        rows = self.memory.rows_left_out(step)
        return [sample for sample in samples if not rows & set(sample.row_ids)] if rows else samples

    def settle(self, run: Run, attempt: Attempt, check: StepCheck) -> bool:
        """Let a step pass, or do something about it.

        Args:
            run: the run.
            attempt: applied behind the gate.
            check: what came of it.

        Returns:
            True when the step was applied; False when it must be computed again, from wherever the run stands now.

        Raises:
            NonFiniteStepError: nothing can be done about it.
        """
        if self.integrity and self.integrity.mend(check):
            self._step_began = None
            return False
        if check.finite and check.weights_finite:
            self._times.healthy_step()
            if self._open is not None:
                self._resumed(run, check)
            return True
        run.gate.undo_counters()
        run.model.zero_grad(set_to_none=True)
        if self.integrity:
            self.integrity.forget()
        began = time.perf_counter()
        self._times.interrupted()
        no_more = self.memory.add_alarm(check.step)
        ranks, leader, scene = run.ranks, check.leader, attempt.scene
        where = "" if ranks.alone else f" Found on {ranks.names[leader]}."
        if self.mode == "off":
            hint = "`guard: heal` names the cause and mends it where it can"
            self._stop_unexplored(check, f"{check.describe()}{where} It was not applied.", hint)
        seen = ranks.on(leader, lambda: attempt.seen(check))
        run.tell(f"Guard: {seen.describe()}{where} Nothing was applied; looking for the cause.")
        self.journal.write("alarm", None, step=check.step, loss=check.loss, grad_norm=check.grad_norm,
                           loss_scale=check.loss_scale, bad_tensors=len(seen.bad_tensors),
                           tensors=len(seen.norms))  # fmt: skip
        if run.runner.shards is not None and self.frozen and self.memory_damaged(run, run.state.step):
            return False  # a piece of a frozen weight has changed, on whichever rank it lies
        with contextlib.ExitStack() as gathered:
            try:
                gathered.enter_context(run.whole())
            except NoRoomError as error:
                why = f"The cause was not looked for: {error.problems[0].message}."
                self._stop_unexplored(
                    check, f"{seen.describe()}{where} It was not applied. {why}", error.problems[0].hint
                )
            diagnosis, treatment = self._look_into(run, scene, check, seen, where, no_more)
        apply_treatment(self, run, scene, diagnosis, treatment, began)
        return False

    def _stop_unexplored(self, check: StepCheck, message: str, hint: str) -> NoReturn:
        self.journal.write("stopped", None, step=check.step, action="stopped before the update", loss=check.loss,
                           grad_norm=check.grad_norm, loss_scale=check.loss_scale)  # fmt: skip
        raise NonFiniteStepError(message, hint=hint)

    def _look_into(
        self, run: Run, scene: Scene, check: StepCheck, seen: StepCheck, where: str, no_more: str
    ) -> tuple[Diagnosis, Treatment]:
        """Let the rank at fault find the cause of a bad step, and a treatment."""
        ranks, leader = run.ranks, check.leader
        sums = self.frozen.sums if self.frozen else None
        diagnosis = ranks.on(leader, lambda: diagnose_attempt(run, scene, seen, sums))
        if where:
            diagnosis = replace(diagnosis, evidence=(*diagnosis.evidence, where.strip()),
                                details=diagnosis.details | {"rank": leader, "ranks": check.flagged})  # fmt: skip
        self.journal.write("diagnosis", diagnosis)
        self._incident = ranks.on(leader, lambda: self._keep_incident(scene, diagnosis, seen))
        if self.mode == "watch":
            self.stop(run, diagnosis, "stopped before the update, as `guard: watch` asks")
        self.stop_if(run, diagnosis, no_more)
        kept = self.memory.changes
        return diagnosis, ranks.on(leader, lambda: treat(scene, diagnosis, healthy_scenes(run, scene), kept))

    def watch(self, run: Run, check: StepCheck, tokens: int, random_state: dict[str, Any] | None) -> bool:
        """After a committed step: look for finite damage, and take restore points.

        Args:
            run: the run.
            check: the step's numbers.
            tokens: that carried loss in it.
            random_state: of all generators as the step left them; None reads them now.

        Returns:
            True when the run was put back to an earlier step.
        """
        if self.mode == "off":
            return False
        if self._spikes.look(run, check, tokens):
            return True
        if self.frozen and self.frozen.due(run, check) and self.memory_damaged(run, check.step):
            return True
        if keeps_weights(run, check.step) and self.integrity and self.integrity.mend_at_rest(check):
            return True
        if self._masters:
            self._masters.look(run, check.step)
        if self.points and self.points.due(check.step):
            self.points.add(run, random_state or get_random_state(run.runner.device))
        return False

    def memory_damaged(self, run: Run, step: int) -> bool:
        """Compare frozen weights with their checksums; mend what changed and go back to before it.

        Args:
            run: the run.
            step: committed last.

        Returns:
            True when the run was put back to an earlier step.
        """
        began = time.perf_counter()
        if self.frozen is None:
            return False
        sound_at = self.frozen.sound_at
        found = run.ranks.gather(self.frozen.changed(run.model, step))
        leader = next((rank for rank, names in enumerate(found) if names), None)
        if leader is None:
            return False
        self.frozen.sound_at, changed = sound_at, found[leader]  # a rank whose own weights are sound goes back as well
        where = {} if run.ranks.alone else {"rank": leader}
        evidence = f"{shown(changed)} {'is' if len(changed) == 1 else 'are'} frozen, yet its checksum has changed."
        diagnosis = Diagnosis(step, "TRANSIENT", module=changed[0].rpartition(".")[0], phase="forward",
                              evidence=(evidence,), details={"tensors": changed} | where)  # fmt: skip
        self.journal.write("alarm", None, step=step)
        self.journal.write("diagnosis", diagnosis)
        if self.mode != "heal":
            self.stop(run, diagnosis, "stopped: the memory of this device is not reliable")
        reload_weights(self, run, diagnosis, began)
        return True

    def go_back(self, run: Run, before: int) -> int:
        """Put the run to a restore point with at most `before` steps done; return its step."""
        assert self.points is not None
        at = run.ranks.same("the restore point", self.points.go_back(run, before))
        if self.frozen:
            self.frozen.sound_at = min(self.frozen.sound_at, at)
        if self.integrity:
            self.integrity.forget()
        self._spikes.forget_from(at + 1)
        return at

    def seen_in_moments(self, run: Run) -> tuple[str, ...]:
        """Return a sentence if the optimizer has lost its moments since the last restore point."""
        if self.points and self.points.moments_lost(run):
            return (
                "The optimizer's second moments have shrunk faster than an update can shrink them: they were lost.",
            )
        return ()

    def learning_rate_factor(self, run: Run) -> float:
        """Return what the schedule's rate is multiplied by: below 1 while a run that went back warms up again."""
        return self._spikes.learning_rate_factor(run.state.step + 1)

    def state(self) -> dict[str, Any]:
        """Return what a checkpoint must hold, as JSON."""
        return self.memory.to_json() | {"events": len(self.journal.events), "spikes": self._spikes.state()}

    def resume(self, run: Run, state: dict[str, Any]) -> None:
        """Take up a checkpoint's state: the plan is applied, lines of undone steps leave the journal.

        Args:
            run: whose model is changed.
            state: as `state` gave it.
        """
        plan = Plan.from_json(state["plan"])
        if plan != Plan():
            self.use_plan(run, plan)
        self.memory.take_counts(state)
        self._spikes.resume(state["spikes"])
        self.journal.keep(state["events"])

    def clear(self) -> None:
        """Before a run that starts anew: remove what an overwritten one has left."""
        self.journal.keep(0)
        if not self._writes:
            return
        (self._folder / "precision_plan.json").unlink(missing_ok=True)
        shutil.rmtree(self._folder / "incidents", ignore_errors=True)

    def went_back(self, state: dict[str, Any]) -> None:
        """Forget what only undone steps have taught; the plan and the alarms stay."""
        self._spikes.resume(state["spikes"])
        self.memory.steps_lost = state["steps_lost"]

    def stop(self, run: Run, diagnosis: Diagnosis, action: str) -> None:
        """End the run over a fault.

        Args:
            run: the run.
            diagnosis: of the fault.
            action: why it ends, for the journal.

        Raises:
            NonFiniteStepError: always.
        """
        self.journal.write("stopped", diagnosis, action=action)
        where = f" in {diagnosis.module}" if diagnosis.module else ""
        op = f", {diagnosis.op}" if diagnosis.op else ""
        again = f"; `surefoot replay {self._incident}` repeats it" if self._incident else ""
        raise NonFiniteStepError(
            f"step {diagnosis.step}: {diagnosis.fault}{where}{op}. {' '.join(diagnosis.evidence)} {action}.",
            hint=f"{hint_for(diagnosis)}{again}",
        )

    def stop_if(self, run: Run, diagnosis: Diagnosis, why: str) -> None:
        """End the run if there is a reason to.

        Args:
            run: the run.
            diagnosis: of the fault.
            why: it ends; empty to go on.
        """
        if why:
            self.stop(run, diagnosis, why)

    def leave_out(self, run: Run, diagnosis: Diagnosis, step: int, rows: tuple[str, ...]) -> None:
        """Leave rows out of one step."""
        self.stop_if(run, diagnosis, self.memory.add_skip(step, run.schedule.total_steps))
        self.use_plan(run, Plan((), (), {step: rows}))

    def acted(
        self,
        run: Run,
        diagnosis: Diagnosis,
        action: str,
        verified: bool | None,
        began: float,
        steps_redone: int = 0,
        steps_lost: int = 0,
    ) -> None:
        """Tell and journal what was done.

        Args:
            run: the run.
            diagnosis: of the fault.
            action: what was done.
            verified: whether it was checked; None when it could not be.
            began: `time.perf_counter()` at the alarm.
            steps_redone: steps that were undone and are done again.
            steps_lost: steps that will not be applied.
        """
        seconds = time.perf_counter() - began
        self.journal.write("action", diagnosis, action=action, verified=verified, seconds=seconds,
                           steps_redone=steps_redone, steps_lost=steps_lost)  # fmt: skip
        self._open = (diagnosis, began)
        where = f" in {diagnosis.module}" if diagnosis.module else ""
        op = f" ({diagnosis.op})" if diagnosis.op else ""
        run.tell(f"Guard: step {diagnosis.step}: {diagnosis.fault}{where}{op}. {action[0].upper()}{action[1:]}.")

    def closing(self) -> list[str]:
        """Tell at the end of a run what was changed and what it cost."""
        events = [dict(event) for event in self.journal.events]
        acted = [event for event in events if event["event"] == "action"]
        if acted and self.memory.changes:
            acted[-1] |= self._times.before_and_after()
        return summarize(events)

    def _keep_incident(self, scene: Scene, diagnosis: Diagnosis, check: StepCheck) -> Path:
        plan = self.memory.plan().to_json()
        return write_incident(
            self._folder / "incidents", scene, diagnosis, yaml=self._cfg.to_yaml(), plan=plan, seen=Seen.of_check(check)
        )

    def _keep_change(self, run: Run, change: Change) -> None:
        apply_change(run.model, run.runner.forward, change)
        if run.runner.shards is None:  # pieces keep their dtype: an island casts them at every use
            hold_change(run.model, change)
        self.memory.changes = (*self.memory.changes, change)

    def _resumed(self, run: Run, check: StepCheck) -> None:
        assert self._open is not None
        diagnosis, began = self._open
        if check.step < diagnosis.step:
            return  # on the way back to it
        self._open = None
        self.journal.write("resumed", diagnosis, loss=check.loss, grad_norm=check.grad_norm,
                           seconds=time.perf_counter() - began)  # fmt: skip
