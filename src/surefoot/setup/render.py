"""A plan as a page for people: what is there already, what is to be done and why, in lines that can be copied."""

from __future__ import annotations

from typing import TYPE_CHECKING

from surefoot.setup.plan import Plan, Step

if TYPE_CHECKING:
    from rich.console import Console


def render(plan: Plan, console: Console, verbose: bool = False) -> None:
    """Print a plan.

    Args:
        plan: the plan.
        console: where to print.
        verbose: also print each step's checks, undo and downloads.
    """

    def say(text: str, style: str = "") -> None:
        console.print(text, style=style, markup=False, highlight=False, soft_wrap=True)

    say(f"Plan for {plan.machine}", "bold")
    what = f"torch {plan.torch}" if plan.torch else "the newest nightly torch"
    say(f"{what} {_from(plan)}")
    for number, step in enumerate(plan.steps, start=1):
        if step.satisfied:
            say(f"{number:>3}  done  {step.id}: {step.satisfied}", "dim")
            continue
        say(f"\n{number:>3}  {step.id}: {step.title}" + _marks(step), "bold")
        say(f"     why: {step.reason}")
        for command in step.commands:
            say(command, "green")
        if verbose:
            for word, lines in (("check", step.verify), ("undo", step.undo), ("fetches", step.downloads)):
                say(f"     {word}:" if lines else f"     {word}: nothing")
                for line in lines:
                    say(line, "dim")
    for note in plan.notes:
        say(f"\nnote: {note}", "yellow")
    say("\n" + _sum(plan), "bold")


def _from(plan: Plan) -> str:
    if plan.wish.source == "source":
        return "built from source"
    return f"from {plan.index or 'the index that pip is set to'}"


def _marks(step: Step) -> str:
    marks = [name for name in ("root", "reboot", "login") if getattr(step, name)]
    words = {"root": "as root", "reboot": "then a restart", "login": "then a new login"}
    sizes = [f"{step.disk_gib:g} GiB"] if step.disk_gib >= 0.1 else []
    sizes += [f"{step.minutes:g} min"] if step.minutes >= 1 else []
    parts = [*(words[mark] for mark in marks), *sizes]
    return f"  ({', '.join(parts)})" if parts else ""


def _sum(plan: Plan) -> str:
    todo = plan.todo
    disk, minutes = sum(step.disk_gib for step in todo), sum(step.minutes for step in todo)
    root = [step.id for step in todo if step.root]
    words = f"{len(todo)} of {len(plan.steps)} steps to do, about {disk:.0f} GiB of disk and {minutes:.0f} minutes"
    return words + (f"; root for {', '.join(root)}" if root else "; nothing needs root")
