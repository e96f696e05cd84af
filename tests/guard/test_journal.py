"""The journal's lines, and the sentences that a run ends with."""

from __future__ import annotations

import json
import math

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from surefoot.errors import UserError
from surefoot.guard.diagnosis import Diagnosis
from surefoot.guard.journal import FIELDS, Journal, as_json, read_journal
from surefoot.guard.summary import summarize

RANGE = Diagnosis(
    7, "RANGE", "attention scores", "model.layers.2.self_attn", "bmm", "forward", ("rows:4",),
    ("Finite in float32.", "The product reaches 1.6e5."), {"amax": 1.6e5},
)  # fmt: skip
CONTRACT = {
    "step", "event", "class", "place", "module", "op", "phase", "samples", "evidence", "action", "verified",
    "steps_lost",
}  # fmt: skip


def test_a_line_has_the_contracts_fields_and_the_extras(tmp_path):
    journal = Journal(tmp_path / "surefoot" / "guard.jsonl")
    returned = journal.write("diagnosis", RANGE, verified=True, loss=float("nan"), grad_norm=2.5)
    (line,) = read_journal(journal.path)
    assert line == returned == journal.events[0]
    assert set(line) == CONTRACT | {"details", "loss", "grad_norm"}
    assert tuple(line)[: len(FIELDS)] == FIELDS
    assert (line["class"], line["op"], line["step"], line["loss"], line["grad_norm"]) == ("RANGE", "bmm", 7, None, 2.5)
    assert line["evidence"] == "Finite in float32. The product reaches 1.6e5."
    assert line["samples"] == ["rows:4"] and line["details"] == {"amax": 1.6e5} and line["verified"] is True


def test_an_alarm_without_a_class_needs_its_step(tmp_path):
    journal = Journal(tmp_path / "guard.jsonl")
    assert journal.write("alarm", None, step=3)["step"] == 3
    with pytest.raises(AssertionError, match="belongs to a step"):
        journal.write("alarm", None)


VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.tuples(inner, inner)
        | st.dictionaries(st.text(max_size=3) | st.integers(), inner, max_size=3)
    ),
    max_leaves=8,
)


@settings(max_examples=80, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(values=VALUES, text=st.text(max_size=20))
def test_any_details_become_one_strict_json_line(values, text, tmp_path):
    path = tmp_path / "guard.jsonl"
    path.unlink(missing_ok=True)
    journal = Journal(path)
    journal.write("action", Diagnosis(1, "DATA", evidence=(text,), details={"x": values}), action=text)
    journal.write("stopped", RANGE)
    raw = path.read_bytes().decode()
    assert raw.count("\n") == 2

    def refuse(word):
        raise AssertionError(f"{word} is no JSON")

    lines = [json.loads(line, parse_constant=refuse) for line in raw.split("\n")[:2]]
    assert lines == journal.events == read_journal(path)
    assert lines[0]["action"] == text


def test_numbers_of_other_libraries_are_written_as_numbers():
    assert as_json({"a": torch.tensor(2.0), "b": np.float32(0.5), "c": np.int64(3), "d": torch.tensor(math.inf)}) == {
        "a": 2.0, "b": 0.5, "c": 3, "d": None,
    }  # fmt: skip
    assert as_json((torch.float16, {"q", "p"})) == ["torch.float16", ["p", "q"]]


def test_half_a_line_of_a_killed_run_costs_no_other(tmp_path):
    journal = Journal(tmp_path / "guard.jsonl")
    journal.write("alarm", RANGE)
    with journal.path.open("a") as handle:
        handle.write('{"step": 8, "ev')
    Journal(journal.path).write("resumed", RANGE, step=9)
    assert [(event["step"], event["event"]) for event in read_journal(journal.path)] == [(7, "alarm"), (9, "resumed")]


def test_another_file_is_no_journal(tmp_path):
    other = tmp_path / "trainer_log.jsonl"
    other.write_text('{"loss": 1.0}\n')
    with pytest.raises(UserError, match="not a journal"):
        read_journal(other)
    assert read_journal(tmp_path / "missing.jsonl") == []


def test_a_place_that_cannot_be_written_is_said(tmp_path):
    (tmp_path / "surefoot").write_text("a file")
    with pytest.raises(UserError, match="a file stands where a folder must be"):
        Journal(tmp_path / "surefoot" / "guard.jsonl").write("alarm", RANGE)


def test_a_quiet_run_ends_without_a_word():
    assert summarize([]) == []


def test_the_end_tells_alarms_changes_and_cost(tmp_path):
    journal = Journal(tmp_path / "guard.jsonl")
    for step in (7, 9):
        data = step == 9
        found = Diagnosis(step, "DATA", samples=("rows:1",)) if data else RANGE
        journal.write("alarm", None, step=step)
        journal.write("diagnosis", found)
        action = "left out the row rows:1" if data else "computes in float32"
        journal.write(
            "action", found, action=action, verified=None if data else True, steps_lost=int(data), seconds=1.5,
            steps_redone=0 if data else 6, step_seconds_before=0.2, step_seconds_after=0.2 if data else 0.206,
        )  # fmt: skip
    assert summarize(journal.events) == [
        "Guard: 2 alarms, at steps 7, 9 (RANGE and DATA).",
        "Changed at step 7: computes in float32 [model.layers.2.self_attn], checked against float32; a step takes "
        "0.206 s instead of 0.2 s (+3.0%).",
        "Changed at step 9: left out the row rows:1; steps take as long as before.",
        "Cost: 1 step lost, 6 steps done again and 3.0 s of looking for the cause and checking the cure.",
    ]


def test_the_end_tells_what_stopped_the_run_and_what_was_found_before_it(tmp_path):
    journal = Journal(tmp_path / "guard.jsonl")
    journal.write("preflight", Diagnosis(0, "WEIGHTS", module="model.embed_tokens"))
    assert summarize(journal.events) == ["Guard: 1 finding before step 1: WEIGHTS in model.embed_tokens."]
    journal.write("alarm", RANGE)
    journal.write("stopped", RANGE, action="no cure agreed with float32")
    assert summarize(journal.events)[1:3] == [
        "Guard: 1 alarm, at step 7.",
        "Guard: stopped at step 7: no cure agreed with float32.",
    ]


def test_an_action_taken_again_after_a_restart_is_told_once(tmp_path):
    journal = Journal(tmp_path / "guard.jsonl")
    for _ in range(2):
        journal.write("action", RANGE, action="computes in float32", verified=True)
    assert sum(line.startswith("Changed") for line in summarize(journal.events)) == 1
