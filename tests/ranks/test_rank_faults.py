"""A fault on one rank: all take the same branch, the right one is named, and nobody hangs."""

from __future__ import annotations

import random

import pytest
from crew import EVERY, Fault, train

from surefoot.data.batch import count_trained
from surefoot.guard.incident import read_incident

MENDED = ("gradient", "loss", "memory", "weight", "frozen")
FATAL = ("exception", "data")
FULL_STEPS = [step for step in range(2, 20) if step != 10]  # in which every rank has rows


@pytest.fixture(scope="module")
def undisturbed(tiny, tmp_path_factory):
    place = tmp_path_factory.mktemp("undisturbed")
    settings = {
        "model_name_or_path": str(tiny), "dataset": "rows", "template": "default", "output_dir": str(place / "out"),
        "num_train_epochs": 2.0, "learning_rate": 1e-2, "save_strategy": "no", "report_to": "none", "seed": 3,
        "ddp_timeout": 40, "device": "cpu",
    }  # fmt: skip
    return train(place / "crew", 2, settings)[0]


def said(event: dict) -> dict:
    """An event without what a clock says."""
    return {key: value for key, value in event.items() if key not in ("seconds", "time")}


def cases() -> list[tuple[int, Fault]]:
    """How many ranks, and what happens to which of them: recipe R27, then ten drawn by lot."""
    rng = random.Random(27)
    chosen = [(2, Fault("gradient", 1, 3))]
    for world in (2, 4):
        chosen += [(world, Fault(kind, rng.randrange(world), rng.choice(FULL_STEPS))) for kind in MENDED]
    return chosen


@pytest.mark.parametrize(("world", "fault"), cases(), ids=str)
def test_what_one_rank_suffers_is_mended_on_all(settings, tmp_path, undisturbed, world, fault):
    told = train(tmp_path / "crew", world, settings, fault, ahead=world == 4)  # as on a CPU, and as on a GPU
    assert [member.error for member in told] == [""] * world
    for member in told:
        assert member.losses == told[0].losses
        assert member.losses == pytest.approx(undisturbed.losses, abs=1e-5), "done again, the run is as it was"
        assert [said(event) for event in member.events] == [said(event) for event in told[0].events]
    events = told[0].events
    if fault.kind == "memory":
        assert not events
        return
    assert {event["class"] for event in events if event["event"] == "diagnosis"} == {"TRANSIENT"}
    found = next(event for event in events if event["event"] == "diagnosis")
    assert found["details"]["rank"] == fault.rank
    if fault.kind != "frozen":  # what is frozen is looked at now and then, and before it is kept
        assert found["step"] in (fault.step, fault.step + 1)
    if fault.kind in ("gradient", "loss"):
        assert f"Found on rank {fault.rank} (" in found["evidence"]
        assert any(f"rank {fault.rank} (" in message for message in told[0].messages)


def test_a_rank_whose_faults_come_again_is_accused(settings, tmp_path, undisturbed):
    told = train(tmp_path / "crew", 2, settings, Fault("flaky", 1, 3))
    for member in told:
        assert member.error == ""
        assert member.losses == pytest.approx(undisturbed.losses, abs=1e-5)
        accused = [event["action"] for event in member.events if event["event"] == "accused"]
        assert len(accused) == 1 and accused[0].startswith("rank 1 (")
        assert "3 faults that did not repeat, at steps 3, 7, 11" in accused[0]
        assert "together had 0" in accused[0] and "surefoot doctor" in accused[0]
    assert any(
        message.startswith("Guard: rank 1 (") and "Take this card out" in message for message in told[0].messages
    )


@pytest.mark.parametrize("kind", FATAL)
@pytest.mark.parametrize("rank", [0, 1])
def test_an_exception_on_one_rank_ends_all_with_its_cause(settings, tmp_path, kind, rank):
    told = train(tmp_path / "crew", 2, settings, Fault(kind, rank, 4), ahead=rank == 1)
    assert "planted" in told[rank].error
    assert not told[rank].error.startswith("OtherRankError")
    other = told[1 - rank]
    assert other.error.startswith(f"OtherRankError: rank {rank} (")
    assert "planted" in other.error
    assert len(other.losses) == 3
    assert max(member.seconds for member in told) < 30


def test_a_full_disk_on_the_writing_rank_ends_all(settings, tmp_path):
    settings |= {"save_strategy": "steps", "save_steps": 2}
    told = train(tmp_path / "crew", 2, settings, Fault("disk", 0, 4))
    assert "disk is full" in told[0].error
    assert told[1].error.startswith("OtherRankError: rank 0 (")
    assert "disk is full" in told[1].error
    assert [folder.name for folder in (tmp_path / "out").glob("checkpoint-*")] == ["checkpoint-2"]


@pytest.mark.long
@pytest.mark.parametrize(
    "fault", [Fault("stopped", 1, 3), Fault("stopped", 0, 3), Fault("killed", 1, 3), Fault("killed", 0, 3)], ids=str
)
def test_a_rank_that_is_gone_or_stands_still_is_named(settings, tmp_path, fault):
    told = train(tmp_path / "crew", 2, settings | {"ddp_timeout": 6}, fault)
    left = told[1 - fault.rank]
    assert left.error.startswith(f"OtherRankError: rank {fault.rank} (")
    assert ("does not answer" in left.error) or ("is gone" in left.error)
    assert left.seconds < 45


def test_a_row_that_no_rank_can_compute_is_left_out_by_all(settings, tmp_path):
    """The same decision as one process takes, whichever rank the row fell to."""
    fault = Fault("row", EVERY, 13)
    alone = train(tmp_path / "one", 1, settings | {"output_dir": str(tmp_path / "out1")}, fault)[0]
    told = train(tmp_path / "two", 2, settings, fault)
    left_out = [event["samples"] for event in alone.events if event["event"] == "action"]
    assert alone.error == "" and left_out
    for member in told:
        assert member.error == ""
        assert [event["samples"] for event in member.events if event["event"] == "action"] == left_out
        assert member.losses == pytest.approx(alone.losses, abs=1e-5)
    kept = [read_incident(folder) for folder in (tmp_path / "out" / "surefoot" / "incidents").iterdir()]
    assert len(kept) == len(left_out)
    assert all(incident.step_tokens > count_trained(incident.samples) for incident in kept), "a share of the step"


def test_a_signal_to_one_rank_stops_all_after_the_same_step(settings, tmp_path, undisturbed):
    settings |= {"save_strategy": "steps", "save_steps": 50}
    told = train(tmp_path / "stopped", 2, settings, Fault("signal", 1, 6))
    assert [member.error for member in told] == ["", ""]
    done = len(told[0].losses)
    assert done == len(told[1].losses) and done in (6, 7)
    resumed = train(tmp_path / "resumed", 2, settings)
    assert [member.resumed_from for member in resumed] == [done, done]
    assert told[0].losses + resumed[0].losses == undisturbed.losses
