"""Several processes train as one does: the same losses, the same weights, also across a resume."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from crew import SECONDS, server, take_turns, train
from safetensors.torch import load_file

from surefoot.cli.launch import free_port


def final_weights(out: Path) -> dict:
    return load_file(next(out.glob("*model.safetensors")))


def assert_close(one: dict, other: dict) -> None:
    assert one.keys() == other.keys()
    for name in one:
        assert (one[name] - other[name]).abs().max() < 1e-4, name


@pytest.mark.parametrize(
    "changes",
    [{"max_grad_norm": 0.5}, {"finetuning_type": "full", "learning_rate": 1e-3}, {"optim": "adafactor"}],
    ids=["lora", "full", "adafactor"],
)
def test_two_and_four_processes_train_as_one_does(settings, tmp_path, changes):
    """Twenty steps of unequal rows; the last of an epoch has a single sample, so that most ranks have none."""
    told = {}
    for world in (1, 2, 4):
        here = settings | changes | {"output_dir": str(tmp_path / f"out{world}")}
        told[world] = train(tmp_path / f"crew{world}", world, here)
        assert [member.error for member in told[world]] == [""] * world
    alone = told[1][0]
    assert len(alone.losses) == 20
    for world in (2, 4):
        for member in told[world]:
            assert member.losses == told[world][0].losses, "all ranks see the same numbers"
            assert member.losses == pytest.approx(alone.losses, abs=1e-5)
            assert member.norms == pytest.approx(alone.norms, rel=1e-3)
            assert not member.events
        assert_close(final_weights(tmp_path / "out1"), final_weights(tmp_path / f"out{world}"))


def test_a_checkpoint_of_four_goes_on_with_two_and_with_one(settings, tmp_path):
    settings |= {"save_strategy": "steps", "save_steps": 7, "val_size": 0.1, "eval_strategy": "steps", "eval_steps": 7}
    straight = train(tmp_path / "straight", 1, settings)[0]
    settings |= {"output_dir": str(tmp_path / "shared")}
    train(tmp_path / "four", 4, settings)
    shared = tmp_path / "shared"
    saved = sorted(int(folder.name.rpartition("-")[2]) for folder in shared.glob("checkpoint-*"))
    assert saved == [7, 14, 20], "written once, by one rank"
    for world in (2, 1):
        for folder in shared.glob("checkpoint-*"):
            if folder.name != "checkpoint-7":
                for file in sorted(folder.rglob("*"), reverse=True):
                    file.rmdir() if file.is_dir() else file.unlink()
                folder.rmdir()
        told = train(tmp_path / f"resumed{world}", world, settings)
        for member in told:
            assert (member.error, member.resumed_from) == ("", 7)
            assert member.losses == pytest.approx(straight.losses[7:], abs=1e-5)
        assert_close(final_weights(tmp_path / "out"), final_weights(shared))


def test_a_run_with_noise_resumes_bit_for_bit(settings, tmp_path):
    """Each rank draws its dropout from seed, step and rank."""
    settings |= {"lora_dropout": 0.2, "save_strategy": "steps", "save_steps": 6, "max_steps": 12}
    straight = train(tmp_path / "straight", 2, settings)
    weights = final_weights(tmp_path / "out")
    stopped = tmp_path / "out"
    for file in stopped.glob("*.safetensors"):
        file.unlink()
    (stopped / "checkpoint-12" / "surefoot" / "manifest.json").unlink()
    resumed = train(tmp_path / "resumed", 2, settings)
    assert [member.resumed_from for member in resumed] == [6, 6]
    assert resumed[0].losses == straight[0].losses[6:]
    again = final_weights(tmp_path / "out")
    assert all(weights[name].equal(again[name]) for name in weights)


def test_another_size_of_the_step_is_another_run(settings, tmp_path):
    settings |= {"save_strategy": "steps", "save_steps": 5, "max_steps": 5}
    train(tmp_path / "two", 2, settings)
    state = json.loads((tmp_path / "out" / "checkpoint-5" / "surefoot" / "state.json").read_text())
    assert state["fingerprint"]["samples_per_step"] == "8"
    told = train(tmp_path / "again", 2, settings | {"per_device_train_batch_size": 3, "max_steps": 5})
    assert "samples_per_step (8 then, 12 now)" in told[0].error
    assert told[1].error.startswith("OtherRankError: rank 0 ")


@pytest.mark.parametrize("fails", [False, True])
def test_data_is_prepared_once_and_waited_for_without_a_timeout(tmp_path, fails):
    port = free_port()
    crew = [server().Process(target=take_turns, args=(rank, port, fails, str(tmp_path))) for rank in range(2)]
    for process in crew:
        process.start()
    for process in crew:
        process.join(SECONDS)
    first, second = ((tmp_path / f"{rank}.txt").read_text() for rank in range(2))
    if fails:
        assert first.startswith("UserError: planted")
        assert second.startswith("OtherRankError: rank 0 (") and "planted" in second
    else:
        assert (first, second) == ("first", "by the first")
