"""The pure function: a snapshot in, findings with one PRIMARY out."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from surefoot.doctor.causes import because_of, order, rank
from surefoot.doctor.clues import amd_wanted
from surefoot.doctor.finding import Finding, Hit
from surefoot.doctor.fixes import device_command, standard_values
from surefoot.doctor.rules.catalogue import all_rules
from surefoot.doctor.texts import evidence_in, load_texts, sentence
from surefoot.doctor.training import training_hits, unseen_in
from surefoot.machine.facts import Machine
from surefoot.machine.snapshot import Snapshot

SCHEMA = "surefoot.doctor/1"
#: Findings about AMD's driver and its nodes: noise where nobody means to use an AMD GPU.
_AMD_DRIVER = frozenset({*(f"F{n:02d}" for n in range(2, 28)), "F114", "F117"})


@dataclass(frozen=True)
class Unknown:
    """Something the doctor could not look at, or could not explain, and what follows from that."""

    what: str
    why: str


@dataclass(frozen=True)
class Report:
    """A diagnosis.

    Attributes:
        primary: the one cause to mend first, or None.
        findings: every finding, PRIMARY first, then by rank, consequences behind their cause.
        unknown: what could not be looked at or explained.
        fine: sentences on what was looked at and is in order.
    """

    primary: Finding | None
    findings: tuple[Finding, ...]
    unknown: tuple[Unknown, ...]
    fine: tuple[str, ...]

    @property
    def exit_code(self) -> int:
        """0 healthy, 1 with findings."""
        return 1 if self.findings else 0

    def to_json(self) -> dict[str, object]:
        """Write the stable JSON document of `surefoot doctor --json`."""
        return {
            "schema": SCHEMA,
            "primary": self.primary.to_json() if self.primary else None,
            "findings": [finding.to_json() for finding in self.findings],
            "unknown": [{"what": u.what, "why": u.why} for u in self.unknown],
            "fine": list(self.fine),
        }


def diagnose(snapshot: Snapshot, language: str = "en", config: Mapping[str, Any] | None = None) -> Report:
    """Find what keeps a machine from training, and the one cause behind it.

    Args:
        snapshot: what the machine showed; nothing else is looked at.
        language: `en` or `zh`.
        config: the training YAML's keys, to find what would go wrong with it here; None for none.

    Returns:
        The findings, with their causes and fixes for this machine.
    """
    m = Machine(snapshot)
    hits = {rule_id: found for rule_id, rule in all_rules().items() if (found := rule(m))}
    if not amd_wanted(m):
        hits = {i: h for i, h in hits.items() if i not in _AMD_DRIVER}
    if config:
        hits = {i: h for i, h in hits.items() if h.seen or i not in unseen_in(m, config)}
        for rule_id, found in training_hits(m, config).items():
            hits.setdefault(rule_id, found)
    texts = load_texts()
    levels = {i: h.level or texts[i]["level"] for i, h in hits.items()}
    causes = because_of(hits, levels, m)
    ranked = sorted(hits, key=lambda i: rank(i, levels[i], hits[i].seen))
    roots = [i for i in ranked if causes[i] is None]
    values = standard_values(m) if hits else {}
    made = {i: _finding(m, i, hits[i], levels[i], causes[i], values, language) for i in ranked}
    ordered = [made[i] for root in roots for i in (root, *_below(root, ranked, causes))]
    # A failure counts as explained by a finding that saw it or that keeps every GPU away, not by a mere side remark.
    explained = any(h.seen or levels[i] in ("blocks", "wrong", "breaks") for i, h in hits.items())
    unknown = tuple(
        Unknown(evidence_in(u.what, language), evidence_in(u.why, language)) for u in _unknown(m, explained)
    )
    fine = tuple(evidence_in(line, language) for line in _fine(m))
    return Report(made[roots[0]] if roots else None, tuple(ordered), unknown, fine)


def _below(root: str, ranked: list[str], causes: Mapping[str, str | None]) -> list[str]:
    """Consequences of a root, at any depth, in dependency order."""
    found = []
    for effect in ranked:
        here = causes[effect]
        while here is not None and here != root:
            here = causes[here]
        if here == root:
            found.append(effect)
    return sorted(found, key=order)


def _finding(
    m: Machine, rule_id: str, found: Hit, level: str, cause: str | None, values: Mapping[str, str], language: str
) -> Finding:
    text = load_texts()[rule_id]
    words = {**values, **found.values}
    if "lacking" in words:
        words["device_command"] = device_command(m, words["lacking"])
    lines = [sentence(sentence(line, words, language), words, language) for line in found.fix or text["fix"]]
    return Finding(
        id=rule_id,
        level=level,
        title=sentence(text["title"], words, language),
        mechanism=sentence(text["why"], words, language),
        evidence=tuple(evidence_in(line, language) for line in found.evidence),
        fix=tuple(re.sub(r"^(#\s*)+", "# ", line) for line in lines if line),
        confirm=sentence(text["confirm"], words, language),
        seen=found.seen,
        because_of=cause,
    )


_FAILURE = (
    r"^.*(Error\b|ERROR|error:|failed|Failed|fatal|Traceback|Segmentation fault|Aborted|core dumped|"
    r"undefined symbol|cannot open shared|is_available\(?\)?\W+False|No HIP GPUs).*$"
)


def _unknown(m: Machine, explained: bool) -> list[Unknown]:
    """List what nobody could look at although it would matter on this machine, and a failure that nothing explains."""
    result = []
    if m.log and not explained:
        lines = re.findall(_FAILURE, m.log, re.M)
        line = next((x.group(0) for x in reversed(list(re.finditer(_FAILURE, m.log, re.M)))), "") if lines else ""
        if line:
            result.append(Unknown("cause", f"cause unknown; decisive fact: {line.strip()[:300]}"))
    if not m.pci_looked and not m.has_amd and not m.has_nvidia:
        result.append(Unknown("graphics cards", "the PCI bus could not be listed: whether a GPU is here is not known"))
    if not m.dists_known and m.torch is None:
        result.append(Unknown("Python packages", "could not be looked at: whether torch is installed is not known"))
    if not (m.has_amd or (m.torch and m.torch.flavour == "rocm")):
        return result
    if not m.dmesg:
        dmesg = m.snapshot.raw.get("dmesg")
        why = str(dmesg.get("error", "")) if isinstance(dmesg, dict) else ""
        result.append(
            Unknown(
                "kernel messages",
                f"not readable {why}: firmware, hang and memory error messages were not checked".replace("  ", " "),
            )
        )
    for name in ("rocminfo", "amd-smi", "rocm-smi"):
        answer = m.snapshot.command(name)
        if answer and answer.error == "timeout":
            result.append(Unknown(name, "gave no answer within its time limit: the GPU or its driver may hang"))
    if m.module_loaded is None:
        result.append(Unknown("amdgpu module", "not captured: whether the driver is loaded is not known"))
    for path in ("/dev/kfd", *(f"/dev/dri/renderD{g.render_minor}" for g in m.reachable if g.render_minor > 0)):
        node = m.snapshot.node(path)
        if node is not None and not node.open:
            result.append(Unknown(path, "was not opened: whether this process may use it is not known"))
        elif node is None and not m.snapshot.absent(path) and not m.wsl:
            result.append(Unknown(path, f"could not be looked at {m.snapshot.error(path)}".strip()))
    if m.torch and m.torch.flavour == "rocm" and not m.torch.targets and not m.torch.split:
        result.append(Unknown("torch's kernels", "which GPU targets this torch was compiled for could not be read"))
    return result


def _fine(m: Machine) -> list[str]:
    """Say in a few sentences what was looked at and is in order."""
    result = []
    for gpu in m.visible:
        node = m.snapshot.node(f"/dev/dri/renderD{gpu.render_minor}")
        if node and node.open == "ok":
            product = gpu.row.products[0] if gpu.row else ""
            result.append(
                f"{gpu.name} ({product} family, {gpu.compute_units} CUs) can be opened"
                if product
                else f"{gpu.name} can be opened"
            )
    if m.module_loaded:
        version = m.snapshot.text("/sys/module/amdgpu/version") or "the kernel's own"
        result.append(f"amdgpu is loaded ({version}, kernel {m.kernel})")
    if m.torch:
        kind = {"rocm": f"ROCm, HIP {m.torch.hip}", "cuda": f"CUDA {m.torch.cuda}", "cpu": "CPU only"}[m.torch.flavour]
        result.append(f"torch {m.torch.version} ({kind}) on Python {m.python.get('version')}")
        good = [t for t in m.targets if m.covers(t)]
        if good:
            result.append(f"torch has kernels for {', '.join(good)}")
    return result
