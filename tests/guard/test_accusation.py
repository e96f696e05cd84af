"""Faults that do not repeat are counted by device: one that has several is named, and only it."""

from __future__ import annotations

from surefoot.guard.memory import ACCUSED_AFTER, MOST_TRANSIENTS, TRANSIENT_WINDOW, Memory
from surefoot.guard.summary import summarize

BAD, GOOD = "rank 1 (node7, cuda:1)", "rank 0 (node7, cuda:0)"


def test_a_device_is_accused_once_after_its_third_fault_however_far_apart():
    memory = Memory()
    told = []
    for step in (5, 5000, 90_000, 200_000):
        assert memory.add_transient(step, BAD) == ""
        memory.transients.setdefault(GOOD, [77])
        told.append(memory.accusation(BAD))
    assert [bool(words) for words in told] == [n == ACCUSED_AFTER - 1 for n in range(4)]
    assert told[2].startswith(f"{BAD} had 3 faults that did not repeat, at steps 5, 5000, 90000; all other devices")
    assert "together had 1" in told[2]
    assert memory.accusation(GOOD) == ""


def test_faults_of_several_devices_do_not_stop_a_run_but_those_of_one_do():
    memory = Memory()
    for step in range(MOST_TRANSIENTS):
        assert memory.add_transient(step, BAD) == memory.add_transient(step, GOOD) == ""
    assert memory.add_transient(TRANSIENT_WINDOW - 1, BAD).endswith(BAD)
    assert memory.add_transient(TRANSIENT_WINDOW + MOST_TRANSIENTS, GOOD) == ""


def test_counts_outlive_a_resume_and_the_accusation_is_not_told_again():
    memory = Memory()
    for step in (1, 200, 400):
        memory.add_transient(step, BAD)
    state = memory.to_json()
    again = Memory()
    again.take_counts(state)
    assert again.transients == {BAD: [1, 200, 400]}
    again.add_transient(600, BAD)
    assert again.accusation(BAD) == ""
    older = Memory()
    older.take_counts(state | {"transients": [3, 9]})
    assert sum(map(len, older.transients.values())) == 2


def test_the_end_of_a_run_names_the_accused():
    words = f"{BAD} had 3 faults that did not repeat"
    lines = summarize([{"event": "alarm", "step": 3}, {"event": "accused", "step": 9, "action": words}])
    assert f"Accused: {words}." in lines
