"""Run a plan: each step skipped if it is done, else asked for, run, verified and written down, until one fails."""

from __future__ import annotations

import os
import shutil
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from surefoot.errors import UserError, WorkError
from surefoot.files import explain_disk_errors
from surefoot.setup import half_done
from surefoot.setup.command import run_bash
from surefoot.setup.journal import SCHEMA, Journal, as_document, as_plan, differences, locked
from surefoot.setup.plan import STATE_FOLDER, Plan, Step
from surefoot.setup.telling import telling, unreachable

if TYPE_CHECKING:
    from surefoot.machine.snapshot import Snapshot

JOURNAL = f"{STATE_FOLDER}/journal.jsonl"
VERIFY_SECONDS = 180.0  # a check is meant to take seconds; one that takes longer hangs
GIB = 2**30


class StepFailedError(WorkError):
    """A step failed, or its check did after it; the message has the telling lines, the hint what to do.

    Attributes:
        step: the step.
        code: the exit code of its commands; 0 when they ended well and the check failed.
        lines: the log's telling lines.
    """

    step: Step
    code: int
    lines: tuple[str, ...]

    def __init__(self, step: Step, code: int, lines: tuple[str, ...], message: str, hint: str) -> None:
        """Take what is known.

        Args:
            step: the step.
            code: the exit code of its commands.
            lines: the log's telling lines.
            message: what happened.
            hint: what to do.
        """
        super().__init__(message, hint=hint)
        self.step = step
        self.code = code
        self.lines = lines


class WaitingError(WorkError):
    """The plan cannot go on without the person: root, a new login or a restart. Nothing failed."""


@dataclass(frozen=True)
class _Run:
    """What every step of a run needs."""

    plan: Plan
    folder: Path
    journal: Journal
    lock: int
    confirm: Callable[[Step], bool]
    say: Callable[[str], None]
    look: Callable[[], Snapshot] | None

    def log_of(self, step: Step, kind: str = "") -> Path:
        """Return where a step's output goes: `NN-id.log`, that of its check `NN-id.verify.log`."""
        number = self.plan.steps.index(step) + 1
        return self.folder / STATE_FOLDER / "logs" / f"{number:02}-{step.id}{kind}.log"


def run_plan(
    plan: Plan,
    folder: Path,
    *,
    resume: bool,
    confirm: Callable[[Step], bool],
    say: Callable[[str], None],
    look: Callable[[], Snapshot] | None = None,
) -> None:
    """Run a plan's steps in order, each verified before the next.

    Args:
        plan: the plan.
        folder: where its commands run; its state goes below it.
        resume: go on with the plan that a journal there is bound to; False starts a new journal (steps whose checks
            pass are skipped all the same) and keeps the old one beside it.
        confirm: asked before a step that needs root; False leaves it to the person.
        say: called with a sentence for the person.
        look: captures the machine for the doctor when a step fails; None for the machine as it is.

    Raises:
        UserError: another run is at work there, or the journal is of another plan.
        StepFailedError: a step or its check failed; what was done before it stays done.
        WaitingError: the person must do something first; `resume` goes on behind it.
        WorkError: a step needs more disk than is free.
    """
    with locked(folder / STATE_FOLDER / "lock") as lock:
        began_before = (folder / JOURNAL).exists()
        journal = _open_journal(plan, folder, resume)
        if began_before and plan.wish.env in ("venv", "uv"):
            # Before any check, which a package that is half installed may pass.
            for sentence in half_done.clear(folder / plan.wish.folder):
                say(sentence)
        run = _Run(plan, folder, journal, lock, confirm, say, look)
        for step in plan.steps:
            _do(run, step)
        journal.write("end")
    say(f"All {len(plan.steps)} steps are done and verified.")


def plan_under_way(folder: Path) -> Plan | None:
    """Read the plan that a journal is bound to, so that it can be resumed without making it again.

    Args:
        folder: where it runs.

    Returns:
        The plan; None when nothing was begun there.

    Raises:
        UserError: the journal is damaged, or another version's.
    """
    document = Journal(folder / JOURNAL).plan
    return as_plan(document) if document else None


def _open_journal(plan: Plan, folder: Path, resume: bool) -> Journal:
    path = folder / JOURNAL
    document = as_document(plan)
    if not resume and path.exists():
        with explain_disk_errors(path):
            aside = path.with_name(f"journal-{time.strftime('%Y%m%d-%H%M%S')}-{os.getpid()}.jsonl")
            path.rename(aside)
    journal = Journal(path)
    if journal.plan is None:
        if resume:
            raise UserError(f"nothing was begun in {folder}", hint="leave out --resume", key="--resume")
        journal.write("plan", schema=SCHEMA, plan=document)
    elif changed := differences(journal.plan, document):
        raise UserError(
            f"the setup under way here is of another plan: {'; '.join(changed)}",
            hint="ask for what was asked for then, or leave out --resume to start anew", key="--resume",
        )  # fmt: skip
    else:
        journal.write("resumed", pid=os.getpid())
    return journal


def _do(run: _Run, step: Step) -> None:
    """Bring one step to its end, or raise what stops the plan."""
    why = _already_done(run, step)
    if why:
        run.say(f"skip  {step.id}: {why}")
        run.journal.write("skipped", step.id, why=why)
        return
    if step.reboot or (step.login and not step.root):
        _wait(run, step, "the machine must be started again" if step.reboot else "a new login is needed")
    if step.root and not run.confirm(step):
        _wait(run, step, "it needs root, which was not allowed")
    _require_disk(run, step)
    run.say(f"run   {step.id}: {step.title}")
    began = time.monotonic()
    try:
        run.journal.write("started", step.id, pid=os.getpid(), log=str(run.log_of(step).relative_to(run.folder)))
        code = run_bash(step.commands, run.folder, run.log_of(step), run.lock, label=step.id, terminal=step.root)
        checked = not step.verify or (code == 0 and _verified(run, step))
    except KeyboardInterrupt:
        run.journal.write("interrupted", step.id, seconds=round(time.monotonic() - began, 1))
        run.say(f"stopped in step {step.id}; its commands were stopped too. --resume goes on with it")
        raise
    seconds = round(time.monotonic() - began, 1)
    if code == 0 and checked:
        run.journal.write("done", step.id, seconds=seconds)
        run.say(f"done  {step.id} ({_clock(seconds)})")
    elif code == 0 and step.login:
        _wait(run, step, "a new login is needed before it shows")
    else:
        _fail(run, step, code, seconds)


def _already_done(run: _Run, step: Step) -> str:
    """Say which fact shows that a step is done; empty when it is to do."""
    if step.satisfied:
        return step.satisfied
    if step.verify:
        return "its check passes already" if _verified(run, step) else ""
    return "done before, as the journal says" if run.journal.last(step.id) in ("done", "skipped") else ""


def _verified(run: _Run, step: Step) -> bool:
    log = run.log_of(step, ".verify")
    return run_bash(step.verify, run.folder, log, run.lock, label=f"checking {step.id}", seconds=VERIFY_SECONDS) == 0


def _wait(run: _Run, step: Step, why: str) -> None:
    """Stop for the person.

    Args:
        run: the run.
        step: what waits.
        why: what is needed.

    Raises:
        WaitingError: always.
    """
    run.journal.write("waiting", step.id, why=why)
    commands = [f"    {line}" for line in step.commands]
    raise WaitingError(
        "\n".join([f"stopped before step {step.id} ({step.title}): {why}. {step.reason}".strip(), *commands]),
        hint=f"{'run these lines' if commands else 'do that'} yourself, then `surefoot setup --run --resume` goes on",
    )


def _require_disk(run: _Run, step: Step) -> None:
    if not step.disk_gib:
        return
    # What needs root goes into the system's own folders.
    place = Path("/") if step.root else run.folder / run.plan.wish.folder
    while not place.exists():
        place = place.parent
    with explain_disk_errors(place):
        free = shutil.disk_usage(place).free / GIB
    if free >= step.disk_gib:
        return
    run.journal.write("refused", step.id, need_gib=step.disk_gib, free_gib=round(free, 2))
    raise WorkError(
        f"step {step.id} needs {step.disk_gib:.1f} GiB, and the disk of {place} has {free:.1f} GiB free; "
        "it was not begun",
        hint="free some space, then `surefoot setup --run --resume`; or set up in a folder on another disk",
    )


def _fail(run: _Run, step: Step, code: int, seconds: float) -> None:
    """Write a failure down and raise it with what its log tells.

    Args:
        run: the run.
        step: what failed.
        code: of its commands; 0 when its check failed.
        seconds: that it took.

    Raises:
        StepFailedError: always.
    """
    path = run.log_of(step) if code else run.log_of(step, ".verify")
    log = path.read_text(encoding="utf-8", errors="replace")[-2_000_000:] if path.exists() else ""
    lines = telling(log, code)
    shown = path.relative_to(run.folder)
    if code:
        what = f"step {step.id} ({step.title}) failed with exit code {code} after {_clock(seconds)}"
    else:
        what = f"step {step.id} ({step.title}) ended without an error, but its check fails"
    note = ""
    try:
        run.journal.write("failed", step.id, code=code, seconds=seconds, telling=list(lines), log=str(shown))
    except UserError as error:  # a full disk may be why the step failed: its last word in the journal is `started`
        note = f"\nThe journal could not be written either: {error}"
    verdict = _verdict(run, log)
    undo = [f"    {line}" for line in step.undo]
    if unreachable(lines):
        verdict.append("if a host cannot be reached: begin anew with `surefoot setup --run --index URL`, which skips")
        verdict.append("what is done; or fetch all elsewhere with `surefoot setup bundle` and give it as --offline")
    hint = [*verdict, "mend that, then `surefoot setup --run --resume` goes on with this step"]
    if undo:
        hint += ["to undo what it may have done:", *undo]
    told = "\n".join(f"    {line}" for line in lines or ("it printed nothing",))
    raise StepFailedError(step, code, lines, f"{what}\n{told}\n  Whole log: {shown}{note}", hint="\n".join(hint))


def _verdict(run: _Run, log: str) -> list[str]:
    """Ask the doctor about a log: what it saw there, else what is wrong with the machine as a whole."""
    from surefoot.doctor.diagnose import diagnose

    if run.look is None:
        from surefoot.machine.capture import capture

        python = run.folder / run.plan.wish.folder / "bin" / "python"
        snapshot = capture(python=python if python.exists() else None)
    else:
        snapshot = run.look()
    snapshot.raw["log"] = log
    report = diagnose(snapshot)
    seen = [finding for finding in report.findings if finding.seen]
    # Before torch is in place, what is wrong with the machine as a whole is what the plan is about to mend.
    whole = run.journal.last("torch") in ("done", "skipped")
    grave = [finding for finding in report.findings if whole and finding.level in ("blocks", "breaks", "wrong")]
    if not (seen or grave):
        return ["The doctor knows no cause for this log."]
    finding = (seen or grave)[0]
    where = "says of this log" if seen else "does not know this log, but finds on this machine"
    fix = [f"    {line.removeprefix('# ')}" for line in finding.fix]
    return [f"The doctor {where}: {finding.id} {finding.title}", *fix]


def _clock(seconds: float) -> str:
    return f"{seconds:.0f} s" if seconds < 90 else f"{seconds // 60:.0f} min {seconds % 60:.0f} s"
