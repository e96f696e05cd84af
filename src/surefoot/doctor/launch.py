"""What of a machine matters to several processes that are about to start on it."""

from __future__ import annotations

from surefoot.doctor.diagnose import diagnose
from surefoot.doctor.finding import Finding
from surefoot.errors import Problem, UserError
from surefoot.machine.snapshot import Snapshot

# Wrong sums; hangs (IOMMU, ACS); crashes (shared memory, open files, locked memory); slow links and variables.
COLLECTIVE = ("F85", "F83", "F28", "F94", "F95", "F98", "F104")
WRONG_SUMS = "F85"


def judge_launch(snapshot: Snapshot, *, workarounds: bool) -> list[Problem]:
    """Find what several processes will trip over on a machine, the worst first.

    Args:
        snapshot: what the machine showed.
        workarounds: whether the run applies workarounds for known defects; these are not named then.

    Returns:
        Warnings.

    Raises:
        UserError: gradients would be summed wrongly, and nothing is done about it.
    """
    found = [one for one in diagnose(snapshot).findings if one.id in COLLECTIVE]
    wrong = next((one for one in found if one.id == WRONG_SUMS), None)
    if wrong is not None and not workarounds:
        raise UserError.from_problems([_problem(wrong)])
    return [_problem(one) for one in found if one is not wrong]


def _problem(found: Finding) -> Problem:
    evidence = f" ({'; '.join(found.evidence)})" if found.evidence else ""
    return Problem(f"{found.id}: {found.title}{evidence}. {found.mechanism}", "; ".join(found.fix))
