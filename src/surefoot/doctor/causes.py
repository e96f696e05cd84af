"""The causal graph: which finding explains which, and which root is the one to mend first.

An edge says that the cause, once found, accounts for the effect; it may hold under a condition only. Catalogue order
decides nothing but ties.
"""

from __future__ import annotations

import fnmatch
import re
from collections.abc import Callable, Mapping

from surefoot.doctor.clues import effective, uncovered
from surefoot.doctor.finding import LEVELS, Hit
from surefoot.machine.facts import Machine
from surefoot.machine.table import load_table

Condition = Callable[[Machine], bool]


def _only_integrated_lacks(m: Machine) -> bool:
    """The missing kernels are those of the integrated graphics; or they come first and spoil it for the card behind."""
    integrated = {g.gfx for g in m.visible if g.integrated}
    lacking = set(uncovered(m))
    if m.log_said(r"shared object initialization failed"):
        return bool(lacking & integrated) or not lacking
    return bool(lacking) and lacking <= integrated


def _only_integrated_unlisted(m: Machine) -> bool:
    """Whether hipBLASLt's list lacks the integrated graphics, and knows the discrete card."""
    listed = load_table().hipblaslt_targets(m.torch.rocm if m.torch else ())
    return all(effective(m, g.gfx) in listed for g in m.visible if not g.integrated)


def _at(m: Machine, pattern: str) -> int:
    found = re.search(pattern, m.dmesg)
    return found.start() if found else -1


def _fault_first(m: Machine) -> bool:
    """The page fault stands before the hang in the kernel's messages, or only the program told of the fault."""
    fault, hang = _at(m, r"page fault"), _at(m, r"ring \S+ timeout|GPU reset begin|MES might be")
    return fault >= 0 and (hang < 0 or fault < hang)


def _hang_first(m: Machine) -> bool:
    return not _fault_first(m)


def _stands_in_for(word: str) -> Condition:
    """A condition: one of the placeholders from PyPI has this word in its name."""

    def holds(m: Machine) -> bool:
        return any(
            word in dist.name and fnmatch.fnmatchcase(dist.name, row.name) and dist.version in row.versions
            for dist in m.dists.values()
            for row in load_table().placeholders
        )

    return holds


def _no_tensile_path(m: Machine) -> bool:
    return not (m.env("ROCBLAS_TENSILE_LIBPATH") or m.env("HIPBLASLT_TENSILE_LIBPATH"))


def _only_integrated_visible(m: Machine) -> bool:
    return all(g.integrated for g in m.visible)


def _rocm_path_astray(m: Machine) -> bool:
    """A variable that the compiler follows to ROCm points to nowhere: F70 names it, and nothing else is astray."""
    names = ("HIP_PATH", "ROCM_PATH", "ROCM_HOME", "HIP_DEVICE_LIB_PATH", "HIP_CLANG_PATH")
    return any((value := m.env(n)) and m.snapshot.absent(value) for n in names)


def _shared_memory_said(m: Machine) -> bool:
    return bool(m.log_said(r"/dev/shm|shared memory"))


def _bitsandbytes_only(m: Machine) -> bool:
    """The symbol that is missing is asked for by bitsandbytes' own library."""
    return bool(m.log_said(r"libbitsandbytes\S*\.so\S*: undefined symbol"))


#: cause → effects that it explains whenever both are found.
EDGES: dict[str, tuple[str, ...]] = {
    "F01": ("F03", "F12", "F13", "F20"),
    "F02": ("F01", "F03", "F13", "F20", "F27"),
    "F03": ("F13", "F20", "F27"),
    "F04": ("F03", "F07", "F13"),
    "F05": ("F03", "F13"),
    "F06": ("F03", "F07", "F08", "F13", "F14"),
    "F07": ("F03", "F13", "F14"),
    "F08": ("F03", "F13"),
    "F09": ("F03", "F13", "F87"),
    "F10": ("F03", "F13", "F87"),
    "F11": ("F03", "F13", "F87"),
    "F12": ("F86", "F87"),
    "F13": ("F20",),
    "F14": ("F13", "F86", "F87"),
    "F15": ("F86", "F87"),
    "F17": ("F18", "F86", "F87"),
    "F18": ("F86", "F87"),
    "F19": ("F84", "F86", "F87"),
    "F20": ("F21", "F23", "F25", "F27", "F31", "F32"),
    "F22": ("F21", "F23"),
    "F24": ("F21", "F23"),
    "F25": ("F21", "F23", "F27"),
    "F26": ("F21", "F23", "F24"),
    "F27": ("F112",),
    "F28": ("F84",),
    "F31": ("F30", "F32"),
    "F33": ("F30", "F31", "F32"),
    "F34": ("F21", "F25", "F87"),
    "F35": ("F37", "F46", "F48", "F51", "F67", "F80", "F81"),
    "F36": ("F35", "F37", "F51", "F55", "F67", "F80", "F81", "F123"),
    "F38": ("F35", "F36", "F39", "F102"),
    "F39": ("F35", "F36", "F102"),
    "F40": ("F35", "F39", "F102"),
    "F44": ("F42", "F43", "F45", "F48", "F52", "F56", "F57", "F86", "F111"),
    "F50": ("F43",),
    "F53": ("F102",),
    "F54": ("F55", "F56", "F57"),
    "F55": ("F43", "F45"),
    "F56": ("F45", "F46", "F66", "F86"),
    "F57": ("F45", "F46", "F56", "F86", "F115"),
    "F58": ("F45", "F46", "F56", "F57", "F62", "F86", "F87", "F92"),
    "F59": ("F61", "F87", "F103"),
    "F60": ("F82", "F89"),
    "F67": ("F69", "F70", "F79", "F82", "F109"),
    "F68": ("F67",),
    "F71": ("F70",),
    "F73": ("F74", "F77"),
    "F74": ("F77",),
    "F80": ("F116",),
    "F81": ("F80", "F116"),
    "F83": ("F84",),
    "F47": ("F86", "F87"),
    "F87": ("F84",),
    "F88": ("F84", "F86", "F87"),
    "F94": ("F43", "F45", "F84", "F93"),
    "F95": ("F84",),
    "F100": ("F01", "F03", "F13", "F20", "F34"),
    "F101": ("F30", "F31", "F32"),
    "F105": ("F67", "F69", "F93"),
    "F106": ("F56", "F67"),
    "F107": ("F35", "F36", "F37", "F123"),
    "F109": ("F82",),
    "F112": ("F84",),
    "F113": ("F20", "F25"),
    "F114": ("F03", "F09", "F13"),
    "F115": ("F45",),
    "F117": ("F21", "F23"),
    "F121": ("F118", "F122"),
    "F126": ("F93",),
    "F128": ("F93",),
    "F129": ("F84",),
    "F130": ("F84", "F112"),
    "F131": ("F01", "F20"),
}

#: (cause, effect) → the condition under which the one explains the other.
CONDITIONAL: dict[tuple[str, str], Condition] = {
    ("F28", "F53"): _shared_memory_said,
    ("F41", "F43"): _stands_in_for("rocm"),
    ("F41", "F51"): _stands_in_for("triton"),
    ("F41", "F54"): _stands_in_for("rocm"),
    ("F41", "F55"): _stands_in_for("rocm"),
    ("F41", "F56"): _stands_in_for("device"),
    ("F41", "F57"): _stands_in_for("device"),
    ("F60", "F56"): _only_integrated_lacks,
    ("F60", "F57"): _only_integrated_lacks,
    ("F60", "F46"): _only_integrated_unlisted,
    ("F60", "F92"): _only_integrated_visible,
    ("F70", "F105"): _rocm_path_astray,
    ("F80", "F111"): _bitsandbytes_only,
    ("F81", "F111"): _bitsandbytes_only,
    ("F86", "F87"): _fault_first,
    ("F87", "F86"): _hang_first,
    ("F105", "F45"): _no_tensile_path,
}

#: Where new ids stand in the catalogue's dependency order.
PLACE: dict[str, float] = {
    "F100": 0.5,
    "F131": 0.6,
    "F114": 8.5,
    "F113": 19.5,
    "F117": 26.5,
    "F101": 29.5,
    "F102": 34.5,
    "F119": 34.6,
    "F120": 34.7,
    "F121": 33.5,
    "F122": 33.6,
    "F118": 33.7,
    "F107": 34.8,
    "F123": 36.5,
    "F110": 44.5,
    "F111": 44.6,
    "F115": 57.5,
    "F103": 61.5,
    "F105": 61.6,
    "F106": 61.7,
    "F116": 98.5,
}


def order(finding: str) -> float:
    """A finding's place in the dependency order."""
    return PLACE.get(finding, float(finding[1:]))


def rank(finding: str, level: str, seen: bool) -> tuple[float, ...]:
    """Sort key among findings that nothing explains, lowest first.

    Args:
        finding: its id.
        level: one of LEVELS.
        seen: whether the failure itself was seen.

    Returns:
        What keeps every GPU away comes first, by dependency order; then what was really seen to fail, before what is
        only bound to fail; then the worse level; catalogue order last.
    """
    if level == "blocks":
        return (0, order(finding))
    return (1, 0 if seen else 1, LEVELS.index(level), order(finding))


def explains(cause: str, effect: str, m: Machine) -> bool:
    """Tell whether one finding, if true, accounts for another."""
    if effect == "F137":  # a failed probe is what any other defect of the machine looks like from inside
        return cause != "F137"
    condition = CONDITIONAL.get((cause, effect))
    return effect in EDGES.get(cause, ()) or (condition is not None and condition(m))


def because_of(hits: Mapping[str, Hit], levels: Mapping[str, str], m: Machine) -> dict[str, str | None]:
    """Give every finding the finding that explains it.

    Args:
        hits: what the rules found, by id.
        levels: each one's level.
        m: the machine, for edges with a condition.

    Returns:
        Id → the id of its nearest explanation, or None for a root. There is no circle.
    """
    chosen: dict[str, str | None] = {}
    ranked = sorted(hits, key=lambda i: rank(i, levels[i], hits[i].seen))
    for effect in ranked:
        causes = [c for c in ranked if c != effect and explains(c, effect, m)]
        # Nearest first: a cause that another of the causes explains lies between the two.
        causes.sort(key=lambda c: not any(explains(other, c, m) for other in causes if other != c))
        chosen[effect] = next((c for c in causes if not _leads_to(chosen, c, effect)), None)
    return chosen


def _leads_to(chosen: Mapping[str, str | None], start: str, goal: str) -> bool:
    """Whether following explanations from `start` reaches `goal`."""
    here: str | None = start
    while here is not None:
        if here == goal:
            return True
        here = chosen.get(here)
    return False
