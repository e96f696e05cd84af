"""Treatments put into practice: a step is done again, rows are left out, weights are read again, a run goes back."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

import torch

from surefoot.data.batch import count_trained
from surefoot.data.messages import Sample
from surefoot.guard.check import StepCheck, shown
from surefoot.guard.checksum import WeightChecksums
from surefoot.guard.diagnose import diagnose
from surefoot.guard.diagnosis import Diagnosis
from surefoot.guard.names import clean
from surefoot.guard.plan import Plan
from surefoot.guard.scene import Scene
from surefoot.guard.treat import Treatment
from surefoot.model.randomness import set_random_state
from surefoot.model.source import model_path, weights_folder
from surefoot.train.masters import narrow_weights, widen

if TYPE_CHECKING:
    from surefoot.train.keeper import Keeper
    from surefoot.train.loop import Run

# Before the first infinity a run is degraded already (float16 near its end has a spacing of 32): an alarm this early
# starts again from step 0 with the plan, which also makes the plan the same for the whole run.
EARLY_STEPS = 50
EARLY_SHARE = 0.02


def diagnose_attempt(run: Run, scene: Scene, check: StepCheck, checksums: WeightChecksums | None) -> Diagnosis:
    """Find out what is wrong with a step, or with its update.

    Args:
        run: the run; the gate was closed unless the update itself is at fault.
        scene: the step.
        check: what was seen of it.
        checksums: of the frozen weights.

    Returns:
        The diagnosis.
    """
    if not check.finite:
        found = diagnose(scene, check, checksums, updates=run.state.step - run.guard.memory.steps_lost)
        return _blame_update(run, scene, found) if found.fault in ("MATH", "DATA") else found
    bad = [
        clean(name)
        for name, p in run.runner.trained.items()
        if not bool(p.detach().norm(dtype=torch.float32).isfinite())
    ]
    named = f", first {bad[0]}" if bad else ""
    evidence = (
        f"Loss and gradients are finite (norm {check.grad_norm:.4g}), the weights after the update are not{named}."
    )
    module = bad[0].rpartition(".")[0] if bad else None
    return Diagnosis(check.step, "OPTIMIZER", "optimizer", module, None, "optimizer", (), (evidence,), {"tensors": bad})


def _blame_update(run: Run, scene: Scene, found: Diagnosis) -> Diagnosis:
    """Blame the last update where no row is to blame: all are bad, and those of the steps beside as well."""
    rows = {row for sample in scene.samples for row in sample.row_ids}
    if run.state.step == run.guard.memory.steps_lost or set(found.samples) != rows:
        return found
    beside = healthy_scenes(run, scene)
    if not beside or any(other.rerun().finite for other in beside):
        return found
    steps = shown([str(other.step) for other in beside])
    evidence = (
        f"All rows of this step are not finite, and neither are steps {steps} at these weights: the last update made "
        "weights that no row can pass."
    )
    return replace(
        found, fault="OPTIMIZER", place="optimizer", phase="optimizer", samples=(), evidence=(*found.evidence, evidence)
    )


def healthy_scenes(run: Run, scene: Scene) -> list[Scene]:
    """Return two other steps at the same weights: those before, or those after the first."""
    total = run.schedule.total_steps
    near = [n for n in (scene.step - 1, scene.step - 2, scene.step + 1, scene.step + 2) if 1 <= n <= total][:2]
    steps = [(n, tuple(run.samples_of(n - 1))) for n in near]
    # Whole steps, also where the scene is one rank's share of its own.
    whole = replace(scene, step_tokens=None)
    return [replace(whole, step=n, samples=samples) for n, samples in steps if samples and count_trained(samples)]


def nothing_to_train(keeper: Keeper, run: Run, samples: Sequence[Sample]) -> None:
    """Pass over a step without a trained token; its place in the data counts, the schedule does not.

    Args:
        keeper: the run's guard.
        run: at the step before.
        samples: of the step; none when all were left out before.

    Raises:
        NonFiniteStepError: too many steps have nothing to train on.
    """
    step = run.state.step + 1
    rows = tuple(row for sample in samples for row in sample.row_ids)
    if samples:
        evidence = f"No token of step {step} carries a label: its loss would be 0 / 0. Rows {shown(rows)}."
        diagnosis = Diagnosis(step, "DATA", "loss", None, "div", "forward", rows, (evidence,))
        keeper.memory.add_alarm(step)
        keeper.journal.write("alarm", None, step=step)
        keeper.journal.write("diagnosis", diagnosis)
        if keeper.mode != "heal":
            keeper.stop(run, diagnosis, "stopped before the step")
        keeper.stop_if(run, diagnosis, keeper.memory.add_skip(step, run.schedule.total_steps))
        keeper.journal.write("action", diagnosis, action=f"passed over step {step}: {shown(rows)}", verified=True,
                           steps_lost=1)  # fmt: skip
        run.tell(f"Guard: {evidence} The step is passed over.")
    keeper.memory.steps_lost += 1
    run.state.step = step


def apply_treatment(
    keeper: Keeper, run: Run, scene: Scene, diagnosis: Diagnosis, treatment: Treatment, began: float
) -> None:
    """Do what a treatment says; afterwards the run stands where it goes on.

    Args:
        keeper: the run's guard.
        run: the run, its gate closed on the step.
        scene: the step.
        diagnosis: of it.
        treatment: to be applied.
        began: `time.perf_counter()` at the alarm.

    Raises:
        NonFiniteStepError: the treatment is to stop, or a budget is used up.
    """
    diagnosis = replace(diagnosis, evidence=(*diagnosis.evidence, *treatment.evidence))
    match treatment.kind:
        case "stop":
            keeper.stop(run, diagnosis, treatment.action)
        case "retry":
            count_transient(keeper, run, diagnosis)
        case "scale":
            assert treatment.loss_scale is not None
            run.runner.scale.lower_to(treatment.loss_scale)
            if warning := keeper.memory.add_scale_fall(scene.step):
                run.tell(f"Guard: {warning}")
        case "changes":
            keeper.stop_if(run, diagnosis, keeper.memory.room_for(treatment.changes))
            keeper.use_plan(run, Plan(treatment.changes))
            if _is_early(keeper, run, scene.step):
                redone = run.state.step
                keeper.go_back(run, 0)
                action = f"{treatment.action}; started again from step 0 with it"
                keeper.acted(run, diagnosis, action, treatment.verified, began, steps_redone=redone)
                return
        case "skip" if treatment.always:
            keeper.stop_if(run, diagnosis, keeper.memory.add_skip(diagnosis.step, run.schedule.total_steps))
            keeper.use_plan(run, Plan((), treatment.rows))
        case "skip":
            keeper.leave_out(run, diagnosis, diagnosis.step, treatment.rows)
        case "reload":
            reload_weights(keeper, run, diagnosis, began)
            return
        case "rewind":
            _undo_update(keeper, run, diagnosis, began)
            return
    set_random_state(scene.random_state, run.runner.device)
    lost = int(treatment.kind == "skip" and not run.samples_of(scene.step - 1))
    keeper.acted(run, diagnosis, treatment.action, treatment.verified, began, steps_lost=lost)


def device_at_fault(run: Run, diagnosis: Diagnosis) -> str:
    """Return the device that a fault was found on; of several ranks, which one's."""
    return run.runner.device if run.ranks.alone else run.ranks.names[diagnosis.details.get("rank", 0)]


def count_transient(keeper: Keeper, run: Run, diagnosis: Diagnosis) -> None:
    """Count a fault that did not repeat against its device, which is accused after a few of them.

    Args:
        keeper: the run's guard.
        run: the run.
        diagnosis: of the fault; `details["rank"]` says whose it is.

    Raises:
        NonFiniteStepError: the device had too many of them within a short time.
    """
    device = device_at_fault(run, diagnosis)
    too_many = keeper.memory.add_transient(diagnosis.step, device)
    if accusation := keeper.memory.accusation(device):
        keeper.journal.write("accused", diagnosis, action=accusation)
        run.tell(f"Guard: {accusation}.")
    keeper.stop_if(run, diagnosis, too_many)


def reload_weights(keeper: Keeper, run: Run, diagnosis: Diagnosis, began: float) -> None:
    """Read frozen weights that have changed in memory from their files again, and go back to before they had.

    Args:
        keeper: the run's guard.
        run: the run.
        diagnosis: `details["tensors"]` names the weights.
        began: `time.perf_counter()` at the alarm.

    Raises:
        NonFiniteStepError: a weight's file does not hold what was loaded, or it happens too often.
    """
    assert keeper.frozen is not None
    folder = weights_folder(model_path(run.cfg))
    names = diagnosis.details["tensors"]
    with run.whole():
        lost = [name for name in names if not keeper.frozen.sums.reload(run.model, name, folder)]
    if any(run.ranks.gather(bool(lost))):
        keeper.stop(run, diagnosis, f"stopped: {shown(lost or names)} cannot be read from its file as it was")
    count_transient(keeper, run, diagnosis)
    before = run.state.step
    at = keeper.go_back(run, min(before, keeper.frozen.sound_at))
    keeper.acted(run, diagnosis, f"read {shown(names)} from its file again", True, began, steps_redone=before - at)


def _undo_update(keeper: Keeper, run: Run, diagnosis: Diagnosis, began: float) -> None:
    if keeper.memory.alarms.count(diagnosis.step) > 1:
        keeper.stop(run, diagnosis, "stopped: the same update failed again")
    narrow = narrow_weights(run)
    before = run.state.step
    # Before the update that made the weights: this step's own, or the one before where its gradients are bad already.
    at = keeper.go_back(run, max(0, min(before, diagnosis.step - (1 if diagnosis.op is None else 2))))
    held = ""
    if narrow:
        widen(run)
        held = f"; {len(narrow)} trained tensors are float32 now"
    keeper.acted(run, diagnosis, f"went back to step {at}{held}", None, began, steps_redone=before - at)


def _is_early(keeper: Keeper, run: Run, step: int) -> bool:
    early = step <= max(EARLY_STEPS, EARLY_SHARE * run.schedule.total_steps)
    return early and step > 1 and keeper.points is not None
