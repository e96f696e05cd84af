"""Parts of `surefoot setup` that do something: run a plan with questions, and `surefoot setup smoke`."""

from __future__ import annotations

import json
import re
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from surefoot.cli.outcome import exit_codes
from surefoot.errors import UserError

if TYPE_CHECKING:
    from surefoot.setup.plan import Plan, Step


def execute(plan: Plan, folder: Path, *, resume: bool, yes: bool) -> None:
    """Run a plan, asking before each step that needs root.

    Args:
        plan: the plan.
        folder: where it runs.
        resume: go on where an earlier run stopped.
        yes: answer every question with yes.

    Raises:
        WorkError: a step failed.
        typer.Exit: with 1; the plan waits for the person, and it was said for what.
        UserError: another run or another plan is under way there.
    """
    from surefoot.setup.run import WaitingError, run_plan

    def confirm(step: Step) -> bool:
        return yes or _ask(step)

    try:
        run_plan(plan, folder, resume=resume, confirm=confirm, say=say)
    except WaitingError as waiting:  # no error, but not done either
        say(str(waiting))
        raise typer.Exit(waiting.exit_code) from None


def say(text: str) -> None:
    """Print a line of progress, which never mixes with what goes to stdout."""
    print(text, file=sys.stderr, flush=True)


def _ask(step: Step) -> bool:
    """Show what would run as root and ask; where nobody can answer, the answer is no."""
    if not sys.stdin.isatty():
        return False
    print(f"\n{step.id} needs root: {step.title}\n{step.reason}", file=sys.stderr)
    for line in step.commands:
        print(f"    {line}", file=sys.stderr)
    try:
        return typer.confirm("Run these lines now?", default=False, err=True)
    except typer.Abort:
        raise KeyboardInterrupt from None


def smoke(
    device: Annotated[str, typer.Option(help="auto, cpu, cuda or cuda:N.")] = "auto",
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON document and nothing else.")] = False,
    debug: Annotated[bool, typer.Option("--debug", help="Show tracebacks.")] = False,
) -> None:
    """Train a tiny random model in each number format of the device, and check what comes out (1 when one fails)."""
    with exit_codes(debug=debug):
        if not re.fullmatch(r"auto|cpu|cuda(:\d+)?", device):
            raise UserError(f"cannot be {device!r}", hint="auto, cpu, cuda (AMD's too) or cuda:N", key="--device")
        if find_spec("torch") is None:
            hint = "take the environment that the plan has made: .venv/bin/surefoot setup smoke"
            raise UserError(f"{sys.executable} has no torch to train with", hint=hint)
        from surefoot.machine.device import choose_device

        choice = choose_device(device)
        if not as_json:
            print("Device: CPU, as asked." if device == "cpu" else choice.message, flush=True)

        import surefoot.use.smoke as test

        results = []
        for result in test.smoke(choice.device):
            results.append(result)
            if not as_json:
                mark = "ok  " if result.ok else "FAIL"
                print(f"{mark}  {result.dtype:9}  {result.detail}  ({result.seconds:.1f} s)", flush=True)
        good = all(result.ok for result in results)
        if as_json:
            parts = [result.to_json() for result in results]
            document = {"schema": "surefoot.smoke/1", "device": choice.device, "ok": good, "results": parts}
            print(json.dumps(document, ensure_ascii=False))
        if not good:
            raise typer.Exit(1)
