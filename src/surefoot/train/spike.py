"""What a run does about finite damage: a loss or gradient norm that breaks away from what it was.

The run goes back to before it. If the step's own rows are far off at those weights too, they are to blame and left
out; if not, the same steps are done again, and only when it happens again is the learning rate halved.
"""

from __future__ import annotations

import time
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

import torch

from surefoot.guard.check import StepCheck, shown
from surefoot.guard.diagnosis import Diagnosis
from surefoot.guard.scene import Scene
from surefoot.guard.spikes import Spike, SpikeDetector
from surefoot.model.randomness import get_random_state, set_random_state

if TYPE_CHECKING:
    from surefoot.train.keeper import Keeper
    from surefoot.train.loop import Run

MOST_ROLLBACKS = 3  # within ROLLBACK_WINDOW steps; later spikes are told, not treated
ROLLBACK_WINDOW = 1000
NEAR = 5  # steps: a spike this near to an earlier one is the same one come back
WARM_UP = 10  # steps over which a halved learning rate is taken up again
SLOWER = 0.5  # factor on the learning rate


@dataclass
class Rollbacks:
    """What was done about spikes so far.

    Attributes:
        steps: onset of each spike that the run went back for.
        warm_from: step after which the rate is warmed up again; None when it is not.
        slowed: times the rate was halved.
    """

    steps: list[int] = field(default_factory=list)
    warm_from: int | None = None
    slowed: int = 0


class SpikeKeeper:
    """Watches a run's losses and gradient norms, and puts the run back when they break away."""

    def __init__(self, keeper: Keeper) -> None:
        """Take the run's guard.

        Args:
            keeper: it writes the journal and holds the restore points.
        """
        self._keeper = keeper
        self._detector = SpikeDetector()
        self._done = Rollbacks()

    def look(self, run: Run, check: StepCheck, tokens: int) -> bool:
        """Judge a committed step.

        Args:
            run: the run.
            check: the step's numbers.
            tokens: that carried loss in it.

        Returns:
            True when the run was put back to an earlier step.
        """
        spike = self._detector.observe(check.step, check.loss, check.grad_norm, tokens)
        if spike is None:
            return False
        keeper = self._keeper
        if keeper.memory_damaged(run, spike.step):
            return True  # a checksum names the cause; the spike is what it did
        evidence = (*spike.evidence, *keeper.seen_in_moments(run))
        diagnosis = Diagnosis(spike.step, spike.fault, phase="forward", evidence=evidence,
                              details={"onset": spike.onset})  # fmt: skip
        keeper.journal.write("alarm", None, step=spike.step, loss=check.loss, grad_norm=check.grad_norm)
        keeper.journal.write("diagnosis", diagnosis)
        run.tell(f"Guard: step {spike.step}: {' '.join(spike.evidence)}")
        if keeper.mode != "heal":
            return False
        recent = [step for step in self._done.steps if step > spike.step - ROLLBACK_WINDOW]
        if len(recent) >= MOST_ROLLBACKS:
            keeper.journal.write("action", diagnosis, action=f"none: went back {len(recent)} times already")
            run.tell("Guard: went back often enough; going on as it is. Look at the learning rate.")
            return False
        self._treat(run, spike, diagnosis, check.loss)
        return True

    def learning_rate_factor(self, step: int) -> float:
        """Return the factor on the rate of a step: a ramp after the rate was halved."""
        if self._done.warm_from is None:
            return 1.0
        return min(1.0, (step - self._done.warm_from) / WARM_UP)

    def forget_from(self, step: int) -> None:
        """Take the steps from `step` on out of the detector's memory."""
        self._detector.forget_from(step)

    def state(self) -> dict[str, Any]:
        """Return what a checkpoint must hold, as JSON."""
        done = self._done
        return {
            "detector": self._detector.state(), "steps": done.steps, "warm_from": done.warm_from, "slowed": done.slowed,
        }  # fmt: skip

    def resume(self, state: dict[str, Any]) -> None:
        """Take up a checkpoint's state."""
        self._detector = SpikeDetector.from_state(state["detector"])
        self._done = Rollbacks(list(state["steps"]), state["warm_from"], state["slowed"])

    def _treat(self, run: Run, spike: Spike, diagnosis: Diagnosis, spiked_loss: float) -> None:
        began, before = time.perf_counter(), run.state.step
        again = any(abs(spike.onset - step) <= NEAR for step in self._done.steps)
        done = replace(self._done, steps=[*self._done.steps, spike.onset])
        at = self._keeper.go_back(run, spike.onset - 1)
        self._done = done
        rows = () if spike.fault == "TREND" else self._rows_to_blame(run, spike, spiked_loss)
        if rows:
            self._keeper.leave_out(run, diagnosis, spike.onset, rows)
            action = f"went back to step {at} and left out {shown(rows)} at step {spike.onset}: far off there too"
        elif again or spike.fault == "TREND":
            run.scheduler.base_lrs = [rate * SLOWER for rate in run.scheduler.base_lrs]
            for group, rate in zip(run.optimizer.param_groups, run.scheduler.get_last_lr(), strict=True):
                group["lr"] = rate * SLOWER
            run.scheduler._last_lr = [group["lr"] for group in run.optimizer.param_groups]
            self._done.warm_from, self._done.slowed = at, self._done.slowed + 1
            action = f"went back to step {at}, halved the learning rate and warms it up over {WARM_UP} steps"
        else:
            action = f"went back to step {at} to do the same steps again"
        self._keeper.acted(run, replace(diagnosis, samples=rows), action, None, began, steps_redone=before - at)

    @torch.no_grad()
    def _rows_to_blame(self, run: Run, spike: Spike, spiked_loss: float) -> tuple[str, ...]:
        """Return the step's rows if they are far off at the restored weights as well."""
        samples = tuple(run.samples_of(spike.onset - 1))
        usual = self._detector.usual_loss()
        if not samples or usual is None or not spiked_loss > usual:
            return ()
        state = get_random_state(run.runner.device)
        scene = Scene(run.model, run.runner.forward, run.runner.device, spike.onset, samples,
                      run.runner.tokens_per_pass, 1.0, state)  # fmt: skip
        with torch.enable_grad():
            loss = scene.rerun().loss
        set_random_state(state, run.runner.device)
        # Nearer to the spike than to what is usual, on the log scale that the detector works on.
        if not loss > (usual * spiked_loss) ** 0.5:
            return ()
        return tuple(row for sample in samples for row in sample.row_ids)
