"""The data report: its JSON contract, what is said loudly, and what a person sees."""

from __future__ import annotations

import io

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console

from surefoot.data.messages import Sample
from surefoot.data.notes import LISTED, Listed, RowNotes
from surefoot.data.report import DataReport, decode_runs, summarise


def make_report():
    rows = RowNotes("d", read=20, used=17, tokens=900, trained=300)
    rows.drop("no answer", [3, 7, 9])
    rows.suspect("control characters", [4])
    rows.truncated.add([11])
    rows.drop("no trained token", [12])
    runs = [("Q [b]", False), ("A", True)]
    return DataReport(
        train=[rows],
        lengths=np.array([40, 50, 700]),
        example_id="d:0",
        example=runs,
        cutoff_len=700,
        eval_items={"": 2},
    )


def test_json_has_the_contracts_keys():
    told = make_report().to_json()
    contract = {
        "rows_read": 20,
        "rows_used": 17,
        "dropped": {"no answer": 3, "no trained token": 1},
        "truncated": 1,
        "without_labels": 1,
        "tokens": 790,
    }
    assert {key: told[key] for key in contract} == contract
    assert told["lengths"]["max"] == 700 and told["dropped_ids"] == {
        "no answer": ["d:3", "d:7", "d:9"],
        "no trained token": ["d:12"],
    }


def test_only_more_than_a_tenth_is_loud():
    report = make_report()
    told = report.warnings()
    assert len(told) == 2 and "4 of 20 rows (20%) were dropped (no answer: 3, no trained token: 1)" in told[0]
    report.train[0].read = 41
    assert ["without a token to train" in warning for warning in report.warnings()] == [True]


@pytest.mark.parametrize("colour", [True, False])
def test_what_a_person_sees(colour):
    console = Console(file=io.StringIO(), width=100, force_terminal=colour, color_system="standard" if colour else None)
    make_report().render(console)
    text = console.file.getvalue()
    for part in (
        "Data report",
        "no answer: 3 (d:3, d:7, d:9)",
        "cut: 1 (d:11)",
        "WARNING: dataset 'd'",
        "up to",
        "Q [b]",
    ):
        assert part in text
    assert ("\x1b[32mA" in text) is colour


def test_a_long_or_wild_example_does_no_harm():
    report = make_report()
    report.example = [("[bold]\x1b[2J" + "a" * 5000, False), ("\x9bz", True)]
    shown = report.example_text().plain
    assert "\x1b" not in shown and "\x9b" not in shown and "␛[2J" in shown and shown.startswith("[bold]")
    assert len(shown) < 3100 and shown.endswith("z")


def test_notes_survive_json_and_list_only_the_first():
    notes = make_report().train[0]
    assert RowNotes.from_json(notes.to_json()) == notes
    listed = Listed()
    listed.add(range(LISTED + 5))
    assert listed.count == LISTED + 5 and len(listed.rows) == LISTED


@given(st.lists(st.integers(0, 5000), max_size=50))
def test_the_histogram_counts_every_item_once(lengths):
    told = summarise(np.array(lengths, dtype=np.int64))
    if not lengths:
        assert told == {}
        return
    assert sum(bucket["items"] for bucket in told["histogram"]) == len(lengths)
    lower = 0
    for bucket in told["histogram"]:
        inside = [n for n in lengths if (lower < n or lower == 0) and n <= bucket["up_to"]]
        assert len(inside) == bucket["items"] or lower == 0
        lower = bucket["up_to"]
    assert (told["min"], told["max"], told["total"]) == (min(lengths), max(lengths), sum(lengths))


def test_runs_are_cut_where_training_starts_and_stops():
    ids = np.arange(6, dtype=np.int32)
    labels = np.array([-100, -100, 2, 3, -100, 5], dtype=np.int32)
    runs = decode_runs(Sample(("d:0",), ids, labels, (6,)), lambda run: "".join(map(str, run)))
    assert runs == [("01", False), ("23", True), ("4", False), ("5", True)]
