"""What a rule returns and what the doctor reports."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

#: How bad a finding is, worst first: no GPU usable; results silently wrong; runs crash; runs are slow; worth knowing.
LEVELS = ("blocks", "wrong", "breaks", "slow", "note")


@dataclass(frozen=True)
class Hit:
    """A rule's answer.

    Attributes:
        evidence: sentences that quote the snapshot.
        values: words for the placeholders in the rule's text.
        seen: whether the failure itself was seen (in a log or the kernel's messages), not only its condition.
        level: one of LEVELS when it differs from the text's own.
        fix: fix lines instead of the text's own; a line that starts with `#` is for the reader, any other is a command.
    """

    evidence: tuple[str, ...]
    values: Mapping[str, str] = field(default_factory=dict)
    seen: bool = False
    level: str = ""
    fix: tuple[str, ...] = ()


@dataclass(frozen=True)
class Finding:
    """A hit with its text in the reader's language and its place in the causal graph.

    Attributes:
        id: F01 to F99 as in the catalogue, new ones from F100.
        level: one of LEVELS.
        title: what is the matter.
        mechanism: why it happens, one sentence.
        evidence: what in the snapshot shows it.
        fix: command lines; those that start with `#` are for the reader.
        confirm: what would confirm it.
        seen: whether the failure itself was seen.
        because_of: the id of the finding that explains this one, or None for a root.
    """

    id: str
    level: str
    title: str
    mechanism: str
    evidence: tuple[str, ...]
    fix: tuple[str, ...]
    confirm: str
    seen: bool
    because_of: str | None = None

    def to_json(self) -> dict[str, object]:
        """Write the stable JSON form."""
        return {
            "id": self.id,
            "level": self.level,
            "title": self.title,
            "mechanism": self.mechanism,
            "evidence": list(self.evidence),
            "fix": list(self.fix),
            "confirm": self.confirm,
            "seen": self.seen,
            "because_of": self.because_of,
        }


def hit(*evidence: str, **values: str) -> Hit:
    """Make a hit from a machine's condition."""
    return Hit(tuple(e for e in evidence if e), values)


def seen(*evidence: str, **values: str) -> Hit:
    """Make a hit from a failure that was itself seen."""
    return Hit(tuple(e for e in evidence if e), values, seen=True)
