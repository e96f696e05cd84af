"""All rules by id, in the catalogue's order."""

from __future__ import annotations

import re
from collections.abc import Callable
from types import ModuleType

from surefoot.doctor.finding import Hit
from surefoot.doctor.rules import (
    a_driver,
    b_access,
    c_libraries,
    c_python,
    d_kernels,
    e_build,
    f_running,
    g_platform,
    h_environment,
    i_other,
)
from surefoot.machine.facts import Machine

Rule = Callable[[Machine], Hit | None]
_MODULES = (
    a_driver,
    b_access,
    c_python,
    c_libraries,
    d_kernels,
    e_build,
    f_running,
    g_platform,
    h_environment,
    i_other,
)


def _rules_of(module: ModuleType) -> dict[str, Rule]:
    """Rules are the functions named f<number>; their name is their id."""
    return {
        n.upper(): f
        for n, f in vars(module).items()
        if re.fullmatch(r"f\d{2,3}", n) and f.__module__ == module.__name__
    }


def all_rules() -> dict[str, Rule]:
    """Collect the rules of every chapter.

    Returns:
        Id → rule, ordered by the id's number, which follows the dependency chain of the catalogue.
    """
    found: dict[str, Rule] = {}
    for module in _MODULES:
        found.update(_rules_of(module))
    return dict(sorted(found.items(), key=lambda item: int(item[0][1:])))
