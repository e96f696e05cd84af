"""Before step 1: the guard's preflight, and what is done about its findings."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

from surefoot.data.batch import count_trained
from surefoot.errors import WorkError
from surefoot.guard.plan import Plan
from surefoot.guard.preflight import Finding, preflight
from surefoot.guard.preflight_compiled import check_compiled
from surefoot.guard.scene import Scene
from surefoot.model.randomness import get_random_state, set_random_state
from surefoot.train.gate import Gate
from surefoot.train.optimizer import build_optimizer, build_scheduler
from surefoot.train.shards import NoRoomError

if TYPE_CHECKING:
    from surefoot.train.loop import Run


def look_before_training(run: Run) -> None:
    """Check data, weights and precision on the first step's samples, then let the guard take its first restore point.

    Args:
        run: assembled. With `guard: heal` a finding's cure is applied; weights, random numbers and gradients are
            otherwise as before.

    Raises:
        NonFiniteStepError: a finding that makes training senseless and has no cure, or must not be cured.
    """
    random_state = get_random_state(run.runner.device)
    run.guard.repair_scale(run)
    try:
        with run.whole():
            _look(run, random_state)
    except NoRoomError as error:
        run.tell(f"Guard: nothing is looked at before step 1: {error.problems[0].message}.")
    run.guard.start(run, random_state)


def _look(run: Run, random_state: dict[str, Any]) -> None:
    if run.guard.mode != "off" and run.cfg.guard_preflight and run.state.step == 0:
        samples = tuple(run.samples_of(0))
        runner = run.runner
        if not run.ranks.alone:  # all look at the same rows, and find the same
            samples = tuple(runner.share_of(samples, 0))
        if count_trained(samples) > 0:
            scene = Scene(run.model, runner.forward, runner.device, 1, samples, runner.tokens_per_pass,
                          runner.scale.value, random_state, runner.before_pass)  # fmt: skip
            if compiled := _alike(run, [found] if (found := check_compiled(scene)) else []):
                _act(run, compiled[0])
            for finding in _alike(run, preflight(scene, tell=run.tell, learning_rate=run.cfg.learning_rate)):
                _act(run, finding)
            _take_up_new_parameters(run)
            run.model.zero_grad(set_to_none=True)
        set_random_state(random_state, run.runner.device)


def _alike(run: Run, findings: list[Finding]) -> list[Finding]:
    """Return the findings; of several ranks, refuse to go on where one has found what another has not."""
    found = run.ranks.gather([f"{f.diagnosis.fault} {f.diagnosis.module or f.diagnosis.place}" for f in findings])
    odd = next((rank for rank, those in enumerate(found) if those != found[0]), None)
    if odd is not None:
        raise WorkError(
            f"the look before step 1 found {', '.join(found[0]) or 'nothing'} on {run.ranks.names[0]}, but "
            f"{', '.join(found[odd]) or 'nothing'} on {run.ranks.names[odd]}",
            hint="the same arithmetic must give the same on both: run `surefoot doctor` there, or leave that card out",
        )
    return findings


def _take_up_new_parameters(run: Run) -> None:
    """Build the optimizer again if a cure has put other parameters in place (a head tied to its embedding)."""
    if run.cut:
        return  # no cure is applied there
    trained = {name: p for name, p in run.model.named_parameters() if p.requires_grad}
    if [id(p) for p in trained.values()] == [id(p) for p in run.runner.trained.values()]:
        return
    run.runner.trained = trained
    run.optimizer = build_optimizer(run.model, run.cfg)
    run.gate = Gate(run.optimizer)
    run.scheduler = build_scheduler(run.optimizer, run.cfg, run.schedule.total_steps)


def _act(run: Run, finding: Finding) -> None:
    guard, diagnosis = run.guard, finding.diagnosis
    if finding.cure is not None and run.runner.shards is not None:
        # A cure puts other tensors in the places of weights, where torch holds its pieces.
        finding = replace(finding, cure=None, action="It cannot be cured while fsdp shards the model.")
    heals = guard.mode == "heal" and (finding.cure is not None or bool(finding.changes))
    action = finding.action if heals or not finding.serious else "stopped before step 1"
    guard.journal.write("preflight", diagnosis, action=action, verified=True if heals else None)
    where = f" in {diagnosis.module}" if diagnosis.module else ""
    run.tell(f"Guard: before step 1: {diagnosis.fault}{where}. {' '.join(diagnosis.evidence)} {finding.action}")
    if heals:
        if finding.cure is not None:
            finding.cure()
            guard.memory.embeddings_mended |= diagnosis.details.get("frozen") is True
        if finding.changes:
            guard.use_plan(run, Plan(tuple(finding.changes)))
    elif finding.serious:
        guard.stop(run, diagnosis, "stopped before step 1")
