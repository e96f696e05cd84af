"""The doctor's page for people: PRIMARY first, its consequences folded under it, then what was fine."""

from __future__ import annotations

from typing import TYPE_CHECKING

from surefoot.doctor.diagnose import Report
from surefoot.doctor.finding import Finding

if TYPE_CHECKING:
    from rich.console import Console

_WORDS = {
    "en": {
        "primary": "PRIMARY",
        "healthy": "Nothing wrong was found.",
        "evidence": "Evidence",
        "why": "Why",
        "fix": "Fix",
        "confirm": "Confirms it",
        "follows": "follows from it",
        "also": "ALSO",
        "fine": "In order",
        "unknown": "Not known",
        "single": "consequence",
        "plural": "consequences",
    },
    "zh": {
        "primary": "首要原因",
        "healthy": "没有发现问题。",
        "evidence": "证据",
        "why": "原因",
        "fix": "修复",
        "confirm": "如何确认",
        "follows": "由它引起",
        "also": "另外",
        "fine": "正常",
        "unknown": "未知",
        "single": "个后果",
        "plural": "个后果",
    },
}


def render(report: Report, console: Console, language: str = "en", verbose: bool = False) -> None:
    """Print a report.

    Args:
        report: the diagnosis.
        console: where to print.
        language: `en` or `zh`.
        verbose: show consequences in full instead of one line each.
    """
    words = _WORDS[language]
    if report.primary is None:
        console.print(f"[bold green]{words['healthy']}[/bold green]")
    for finding in report.findings:
        if finding.because_of is None:
            mark = words["primary"] if finding is report.primary else words["also"]
            _whole(finding, console, words, mark)
            _consequences(finding, report, console, words, verbose)
    for title, lines in (
        (words["unknown"], [f"{u.what}: {u.why}" for u in report.unknown]),
        (words["fine"], list(report.fine)),
    ):
        if lines:
            console.print(f"[bold]{title}[/bold]")
            for line in lines:
                console.print(f"  {line}", markup=False, highlight=False)


def _whole(finding: Finding, console: Console, words: dict[str, str], mark: str) -> None:
    colour = {"blocks": "red", "breaks": "red", "wrong": "magenta", "slow": "yellow"}.get(finding.level, "cyan")
    console.print(f"[bold {colour}]{mark}  {finding.id}[/bold {colour}]  ", end="")
    console.print(finding.title, style="bold", markup=False, highlight=False)
    for label, lines in (
        (words["evidence"], finding.evidence),
        (words["why"], (finding.mechanism,)),
        (words["fix"], finding.fix),
        (words["confirm"], (finding.confirm,)),
    ):
        console.print(f"  [dim]{label}[/dim]")
        for line in lines:
            style = "green" if label == words["fix"] and not line.startswith("#") else ""
            console.print(f"    {line.removeprefix('# ')}", style=style, markup=False, highlight=False, soft_wrap=True)
    console.print()


def _consequences(root: Finding, report: Report, console: Console, words: dict[str, str], verbose: bool) -> None:
    """Print what follows from a root, indented by depth."""
    parents = {f.id: f.because_of for f in report.findings}
    below = [f for f in report.findings if f is not root and _leads(f.id, root.id, parents)]
    if not below:
        return
    noun = words["single"] if len(below) == 1 else words["plural"]
    console.print(f"  [dim]{len(below)} {noun}:[/dim]")
    for finding in below:
        if verbose:
            _whole(finding, console, words, words["follows"])
        else:
            console.print(f"    {finding.id}  {finding.title}", markup=False, highlight=False)
    console.print()


def _leads(start: str, goal: str, parents: dict[str, str | None]) -> bool:
    here = parents.get(start)
    while here is not None:
        if here == goal:
            return True
        here = parents.get(here)
    return False
