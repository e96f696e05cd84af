"""What a run does about finite damage: a loss or gradient norm that breaks away from what it was.

A step that is only suspicious is settled by experiments: are its labels the tokens of its text, and do rows of the
steps before cost more now? At an alarm the run goes back to before it. If the step's own rows are far off at those
weights too, they are to blame and left out; if not, the same steps are done again, and only when it happens again is
the learning rate halved.
"""

from __future__ import annotations

import math
import time
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from surefoot.data.batch import count_trained, pack, split_into_passes
from surefoot.data.messages import IGNORE_INDEX, Sample
from surefoot.guard.check import StepCheck, shown
from surefoot.guard.diagnosis import Diagnosis
from surefoot.guard.scene import Scene
from surefoot.guard.spike_scores import NATS_FLOOR
from surefoot.guard.spikes import Spike, SpikeDetector
from surefoot.model.randomness import get_random_state, set_random_state
from surefoot.model.variants import without_compile
from surefoot.train.shards import NoRoomError

if TYPE_CHECKING:
    from surefoot.train.keeper import Keeper
    from surefoot.train.loop import Run

MOST_ROLLBACKS = 3  # within ROLLBACK_WINDOW steps; later spikes are told, not treated
ROLLBACK_WINDOW = 1000
NEAR = 5  # steps: a spike this near to an earlier one is the same one come back
WARM_UP = 10  # steps over which a halved learning rate is taken up again
SLOWER = 0.5  # factor on the learning rate
CONTROL_STEPS, CONTROL_TOKENS = 3, 512  # whose rows an experiment runs again: so many steps, or enough trained tokens


class _Past(NamedTuple):
    """A step that was well: its rows, their trained tokens and their loss."""

    step: int
    samples: tuple[Sample, ...]
    tokens: int
    loss: float


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


@dataclass(frozen=True)
class _Trial:
    """The experiments that a run makes at a suspicious step. They change nothing in it.

    Attributes:
        run: the step's update is done.
        samples: of the step.
        past: the last steps that were well, the newest last.
    """

    run: Run
    samples: tuple[Sample, ...]
    past: list[_Past]

    def wrong_labels(self) -> bool:
        """Compare labels with the text: they are its tokens, or the end token where a template asks for it."""
        counts = [_count_wrong(sample, self.run.tokenizer.eos_token_id) for sample in self.samples]
        return 2 * sum(counts) >= max(1, count_trained(self.samples))

    def rise(self) -> float | None:
        """Run rows of the last well steps again, as they ran in training, and compare their log loss with that time.

        Of several ranks, the main one does.
        """
        try:
            return self.run.one_runs(0, self._rise)
        except NoRoomError as error:
            self.run.tell(f"Guard: no experiment: {error.problems[0].message}.")
            return None

    @torch.no_grad()
    def _rise(self) -> float | None:
        # The newest of these steps is left out where there are others: the update before it may be the bad one.
        chosen: list[_Past] = []
        for past in reversed(self.past[:-1] or self.past):
            chosen.append(past)
            if len(chosen) == CONTROL_STEPS or sum(p.tokens for p in chosen) >= CONTROL_TOKENS:
                break
        if not chosen:
            return None
        runner = self.run.runner
        state = get_random_state(runner.device)
        try:
            with without_compile(self.run.model):  # compiling a forward without gradients takes longer than all this
                now = self._loss_now([sample for past in chosen for sample in past.samples])
        except torch.OutOfMemoryError:
            self.run.tell("Guard: no memory is left for an experiment; going by the step's numbers alone.")
            return None
        finally:
            set_random_state(state, runner.device)
        tokens, then = sum(p.tokens for p in chosen), sum(p.loss * p.tokens for p in chosen)
        return math.log((now / tokens + NATS_FLOOR) / (then / tokens + NATS_FLOOR))

    def _loss_now(self, samples: list[Sample]) -> float:
        """Sum the token losses of samples, in nats."""
        runner, losses = self.run.runner, []
        for group in split_into_passes(samples, runner.tokens_per_pass):
            batch = pack(group, runner.forward.round_to).to(runner.device)
            if batch.targets_K.numel():
                if runner.before_pass:
                    runner.before_pass(batch)
                losses.append(runner.forward(batch).loss)
        return float(torch.stack(losses).sum())


def _count_wrong(sample: Sample, end: int | None) -> int:
    """Count labels that are neither the text's token at their place nor the end token."""
    labels = sample.labels[1:]  # the first predicts nothing
    return int(((labels != IGNORE_INDEX) & (labels != sample.input_ids[1:]) & (labels != end)).sum())


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
        self._past: list[_Past] = []

    def look(self, run: Run, check: StepCheck, tokens: int) -> bool:
        """Judge a committed step.

        Args:
            run: the run.
            check: the step's numbers.
            tokens: that carried loss in it.

        Returns:
            True when the run was put back to an earlier step.

        Raises:
            NonFiniteStepError: nothing is trained any more.
        """
        spike = self._detector.observe(
            check.step, check.loss, check.grad_norm, tokens, check.chance, _Trial(run, check.samples, self._past)
        )
        if spike is None:
            self._past = [*self._past, _Past(check.step, check.samples, tokens, check.loss)][-CONTROL_STEPS - 1 :]
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
        if spike.dead:
            keeper.stop(run, diagnosis, "stopped: going on would change nothing")
        if keeper.mode != "heal":
            return False
        recent = [step for step in self._done.steps if step > spike.step - ROLLBACK_WINDOW]
        if len(recent) >= MOST_ROLLBACKS:
            keeper.journal.write("action", diagnosis, action=f"none: went back {len(recent)} times already")
            run.tell("Guard: went back often enough; going on as it is. Look at the learning rate.")
            return False
        self._treat(run, spike, diagnosis, check)
        return True

    def learning_rate_factor(self, step: int) -> float:
        """Return the factor on the rate of a step: a ramp after the rate was halved."""
        if self._done.warm_from is None:
            return 1.0
        return min(1.0, (step - self._done.warm_from) / WARM_UP)

    def forget_from(self, step: int) -> None:
        """Take the steps from `step` on out of the detector's memory."""
        self._detector.forget_from(step)
        self._past = [past for past in self._past if past.step < step]

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

    def _treat(self, run: Run, spike: Spike, diagnosis: Diagnosis, check: StepCheck) -> None:
        began, before = time.perf_counter(), run.state.step
        again = any(abs(spike.onset - step) <= NEAR for step in self._done.steps)
        done = replace(self._done, steps=[*self._done.steps, spike.onset])
        at = self._keeper.go_back(run, spike.onset - 1)
        self._done = done
        rows, why = self._rows_to_blame(run, spike, check)
        if rows:
            self._keeper.leave_out(run, diagnosis, spike.step, rows)
            action = f"went back to step {at} and left out {shown(rows)} at step {spike.step}: {why}"
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
    def _rows_to_blame(self, run: Run, spike: Spike, check: StepCheck) -> tuple[tuple[str, ...], str]:
        """Return the step's rows if they are to blame and why: wrong labels, or far off at the restored weights too."""
        if spike.wrong_labels:
            end = run.tokenizer.eos_token_id
            wrong = [sample for sample in check.samples if _count_wrong(sample, end)]
            return tuple(row for sample in wrong for row in sample.row_ids), "their labels are not their text"
        usual = self._detector.usual_loss()
        if spike.fault == "TREND" or not check.samples or usual is None or not check.loss > usual:
            return (), ""
        state = get_random_state(run.runner.device)
        scene = Scene(run.model, run.runner.forward, run.runner.device, spike.step, check.samples,
                      run.runner.tokens_per_pass, 1.0, state)  # fmt: skip
        try:
            with torch.enable_grad():
                loss = run.one_runs(0, lambda: scene.rerun().loss)
        except NoRoomError:
            return (), ""  # as told when the spike was judged
        set_random_state(state, run.runner.device)
        # Nearer to the spike than to what is usual, on the log scale that the detector works on.
        if not loss > (usual * check.loss) ** 0.5:
            return (), ""
        return tuple(row for sample in check.samples for row in sample.row_ids), "far off there too"
