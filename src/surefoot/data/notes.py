"""What became of the rows of one dataset: counted, and named by their position."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import asdict, dataclass, field
from typing import Any

LISTED = 1000
"""So many rows of each kind are kept by position; beyond that they are only counted."""


@dataclass
class Listed:
    """Some rows: how many, and the first of them.

    Attributes:
        count: how many rows.
        rows: positions of the first LISTED of them in their dataset.
    """

    count: int = 0
    rows: list[int] = field(default_factory=list)

    def add(self, rows: Iterable[int]) -> None:
        """Count rows and keep the first ones' positions."""
        for row in rows:
            self.count += 1
            if len(self.rows) < LISTED:
                self.rows.append(row)

    def ids(self, name: str) -> list[str]:
        """The kept rows' ids."""
        return [f"{name}:{row}" for row in self.rows]


NO_TRAINED_TOKEN = "no trained token"
LOUD_SHARE = 0.1
"""More than this share of a dataset's rows dropped or cut is said loudly, and is an error with `strict_data`."""


@dataclass
class RowNotes:
    """What became of the rows of one dataset.

    Attributes:
        name: the dataset.
        read: rows looked at.
        used: rows that became token ids.
        tokens: their tokens.
        trained: their tokens that carry loss.
        dropped: rows that cannot be used, by reason.
        truncated: rows longer than cutoff_len, which lost tokens.
        suspicious: rows with characters that rarely belong into text, by kind.
    """

    name: str
    read: int = 0
    used: int = 0
    tokens: int = 0
    trained: int = 0
    dropped: dict[str, Listed] = field(default_factory=dict)
    truncated: Listed = field(default_factory=Listed)
    suspicious: dict[str, Listed] = field(default_factory=dict)

    def drop(self, reason: str, rows: Iterable[int]) -> None:
        """Note rows that cannot be used."""
        self.dropped.setdefault(reason, Listed()).add(rows)

    def suspect(self, kind: str, rows: Iterable[int]) -> None:
        """Note rows with suspicious characters."""
        self.suspicious.setdefault(kind, Listed()).add(rows)

    @property
    def without_labels(self) -> Listed:
        """Those of the dropped rows in which no token would be trained."""
        return self.dropped.get(NO_TRAINED_TOKEN, Listed())

    @property
    def dropped_count(self) -> int:
        """Rows dropped for any reason."""
        return sum(listed.count for listed in self.dropped.values())

    def to_json(self) -> dict[str, Any]:
        """All of it as JSON values."""
        return asdict(self)

    @classmethod
    def from_json(cls, kept: dict[str, Any]) -> RowNotes:
        """Read back what `to_json` gave."""
        notes = cls(**kept)
        notes.truncated = Listed(**kept["truncated"])
        notes.dropped = {reason: Listed(**listed) for reason, listed in kept["dropped"].items()}
        notes.suspicious = {kind: Listed(**listed) for kind, listed in kept["suspicious"].items()}
        return notes
