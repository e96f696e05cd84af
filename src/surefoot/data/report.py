"""The data report: what was read, what was dropped, cut or odd, and what one row looks like to the model."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np

from surefoot.data.messages import IGNORE_INDEX, Sample
from surefoot.data.notes import LOUD_SHARE, Listed, RowNotes

if TYPE_CHECKING:
    from rich.console import Console
    from rich.text import Text

SHOWN = 10  # row ids on the console for each reason
EXAMPLE = 3000  # characters of the example on the console
_VISIBLE = {code: 0x2400 + code for code in range(0x20) if code not in b"\t\n"} | {0x7F: 0x2421, 0x9B: 0xFFFD}
BAR = 40  # characters of the histogram's longest bar


@dataclass
class DataReport:
    """What the data is, before anything is trained on it.

    Attributes:
        train: what became of each training dataset's rows.
        evals: the same for the rows of each eval_dataset.
        lengths: tokens of each training item, int64 [items]; empty for a stream.
        eval_items: validation items by name.
        example_id: the row ids of the item shown.
        example: that item as text, in runs: (text, is it trained).
        cutoff_len: the longest row that is allowed, in tokens.
        packed: True when an item may hold several rows.
        left_over: tokens that packing left over.
        not_reached: rows read that the mixing strategy never came to.
        notes: sentences about what is odd with the data's description.
        streaming: True when rows are read while training, so that counts are of the first rows only.
    """

    train: list[RowNotes] = field(default_factory=list)
    evals: list[RowNotes] = field(default_factory=list)
    lengths: np.ndarray = field(default_factory=lambda: np.empty(0, dtype=np.int64))
    eval_items: dict[str, int] = field(default_factory=dict)
    example_id: str = ""
    example: list[tuple[str, bool]] = field(default_factory=list)
    cutoff_len: int = 0
    packed: bool = False
    left_over: int = 0
    not_reached: int = 0
    notes: list[str] = field(default_factory=list)
    streaming: bool = False

    def warnings(self) -> list[str]:
        """Sentences that a person must not miss."""
        loud = list(self.notes)
        for rows in [*self.train, *self.evals]:
            for what, count in (("dropped", rows.dropped_count), ("cut at cutoff_len", rows.truncated.count)):
                if rows.read and count > LOUD_SHARE * rows.read:
                    loud.append(
                        f"dataset '{rows.name}': {count:,} of {rows.read:,} rows ({count / rows.read:.0%}) were {what}"
                        + (f" = {self.cutoff_len}" if what != "dropped" else f" ({_reasons(rows)})")
                    )
            if rows.without_labels.count:
                loud.append(
                    f"dataset '{rows.name}': {_rows(rows.without_labels.count)} without a token to train, dropped"
                    f" ({_first_ids(rows.without_labels, rows.name)})"
                )
        return loud

    def to_json(self) -> dict[str, Any]:
        """The report as JSON: the design's contract first, then what is beyond it."""
        return {
            "rows_read": sum(rows.read for rows in self.train),
            "rows_used": sum(rows.used for rows in self.train),
            "dropped": _sum_counts([rows.dropped for rows in self.train]),
            "truncated": sum(rows.truncated.count for rows in self.train),
            "without_labels": sum(rows.without_labels.count for rows in self.train),
            "tokens": int(self.lengths.sum()) if len(self.lengths) else sum(rows.tokens for rows in self.train),
            "lengths": summarise(self.lengths),
            "trained_tokens": sum(rows.trained for rows in self.train),
            "items": len(self.lengths),
            "packed": self.packed,
            "streaming": self.streaming,
            "left_over_tokens": self.left_over,
            "rows_not_reached": self.not_reached,
            "over_long": sum(rows.truncated.count for rows in self.train),
            "suspicious": _sum_counts([rows.suspicious for rows in self.train]),
            "dropped_ids": _ids(self.train, lambda rows: rows.dropped),
            "truncated_ids": [i for rows in self.train for i in rows.truncated.ids(rows.name)],
            "without_labels_ids": [i for rows in self.train for i in rows.without_labels.ids(rows.name)],
            "suspicious_ids": _ids(self.train, lambda rows: rows.suspicious),
            "datasets": {rows.name: _dataset_json(rows) for rows in self.train},
            "eval_datasets": {rows.name: _dataset_json(rows) for rows in self.evals},
            "eval_items": self.eval_items,
            "example": {"row": self.example_id, "runs": [{"text": t, "trained": on} for t, on in self.example]},
            "warnings": self.warnings(),
        }

    def render(self, console: Console) -> None:
        """Print the report.

        Args:
            console: rich's.
        """
        from rich.markup import escape
        from rich.table import Table

        table = Table(title="Data report", title_justify="left", title_style="bold")
        table.add_column("dataset", overflow="fold")
        for heading in ("rows", "used", "dropped", "cut", "no label", "odd text"):
            table.add_column(heading, justify="right", no_wrap=True)
        for kind, group in (("", self.train), (" (eval)", self.evals)):
            for rows in group:
                odd = sum(listed.count for listed in rows.suspicious.values())
                numbers = (rows.read, rows.used, rows.dropped_count, rows.truncated.count, rows.without_labels.count)
                table.add_row(escape(rows.name + kind), *(f"{number:,}" for number in (*numbers, odd)))
        console.print(table)
        self._render_ids(console)
        self._render_lengths(console)
        if self.example:
            console.print("One example (green is trained):", self.example_id, highlight=False, markup=False)
            console.print(self.example_text())
        for warning in self.warnings():
            console.print(f"WARNING: {warning}", style="bold red", highlight=False, markup=False)

    def example_text(self) -> Text:
        """The example with its trained tokens in green, its middle left out where it is long."""
        from rich.text import Text

        text = Text()
        for run, trained in self.example:
            # Control characters are shown, not sent: they could do anything to a terminal.
            text.append(run.translate(_VISIBLE), style="green" if trained else "dim")
        if len(text) <= EXAMPLE:
            return text
        left_out = len(text) - EXAMPLE
        return Text.assemble(text[: EXAMPLE // 2], f"\n[... {left_out:,} characters ...]\n", text[-EXAMPLE // 2 :])

    def _render_ids(self, console: Console) -> None:
        for rows in [*self.train, *self.evals]:
            kinds: list[tuple[str, Listed]] = [(f"dropped, {why}", listed) for why, listed in rows.dropped.items()]
            kinds.append(("cut", rows.truncated))
            kinds += list(rows.suspicious.items())
            for what, listed in kinds:
                if listed.count:
                    line = f"  {what}: {listed.count:,} ({_first_ids(listed, rows.name)})"
                    console.print(line, highlight=False, markup=False)

    def _render_lengths(self, console: Console) -> None:
        if not len(self.lengths):
            return
        summary = summarise(self.lengths)
        trained = sum(rows.trained for rows in self.train)
        console.print(
            f"{len(self.lengths):,} training items of {summary['min']:,} to {summary['max']:,} tokens (median"
            f" {summary['median']:g}), {summary['total']:,} together; of the rows' tokens {trained:,} are trained",
            highlight=False,
        )
        most = max(bucket["items"] for bucket in summary["histogram"])
        for bucket in summary["histogram"]:
            bar = "█" * max(round(BAR * bucket["items"] / most), 1 if bucket["items"] else 0)
            console.print(f"  up to {bucket['up_to']:>7,} tokens {bucket['items']:>9,} {bar}", highlight=False)
        if self.left_over:
            console.print(f"  packing left {self.left_over:,} tokens over", highlight=False)
        if self.not_reached:
            console.print(f"  mixing never came to {self.not_reached:,} rows", highlight=False)


def summarise(lengths: np.ndarray) -> dict[str, Any]:
    """Describe lengths by a few numbers and a histogram whose buckets double.

    Args:
        lengths: tokens of each item, int64 [items].

    Returns:
        JSON values; empty for no items.
    """
    if not len(lengths):
        return {}
    edges = [32]
    while edges[-1] < lengths.max():
        edges.append(edges[-1] * 2)
    places = np.searchsorted(edges, lengths, side="left")
    counts = np.bincount(places, minlength=len(edges))
    first = int(places.min())
    return {
        "total": int(lengths.sum()),
        "min": int(lengths.min()),
        "mean": round(float(lengths.mean()), 2),
        "median": float(np.median(lengths)),
        "p95": float(np.percentile(lengths, 95)),
        "max": int(lengths.max()),
        "histogram": [{"up_to": edges[i], "items": int(counts[i])} for i in range(first, len(edges))],
    }


def decode_runs(sample: Sample, decode: Callable[[list[int]], str]) -> list[tuple[str, bool]]:
    """Turn an item back into text, cut where training starts and stops.

    Args:
        sample: the item.
        decode: token ids to text, special tokens shown.

    Returns:
        Runs of (text, is it trained), in order.
    """
    trained = sample.labels != IGNORE_INDEX
    edges = np.flatnonzero(np.diff(trained)) + 1
    pieces = np.split(np.arange(len(trained)), edges)
    return [(decode(sample.input_ids[piece].tolist()), bool(trained[piece[0]])) for piece in pieces if len(piece)]


def _dataset_json(rows: RowNotes) -> dict[str, Any]:
    return {
        "rows_read": rows.read,
        "rows_used": rows.used,
        "dropped": _sum_counts([rows.dropped]),
        "truncated": rows.truncated.count,
        "without_labels": rows.without_labels.count,
        "suspicious": _sum_counts([rows.suspicious]),
        "tokens": rows.tokens,
        "trained_tokens": rows.trained,
    }


def _sum_counts(groups: Sequence[dict[str, Listed]]) -> dict[str, int]:
    total: dict[str, int] = {}
    for group in groups:
        for reason, listed in group.items():
            total[reason] = total.get(reason, 0) + listed.count
    return total


def _ids(datasets: Sequence[RowNotes], group: Callable[[RowNotes], dict[str, Listed]]) -> dict[str, list[str]]:
    found: dict[str, list[str]] = {}
    for rows in datasets:
        for reason, listed in group(rows).items():
            found.setdefault(reason, []).extend(listed.ids(rows.name))
    return found


def _first_ids(listed: Listed, name: str) -> str:
    shown = ", ".join(listed.ids(name)[:SHOWN])
    return shown + (", ..." if listed.count > SHOWN else "")


def _reasons(rows: RowNotes) -> str:
    return ", ".join(f"{reason}: {listed.count:,}" for reason, listed in rows.dropped.items())


def _rows(count: int) -> str:
    return "1 row" if count == 1 else f"{count:,} rows"
