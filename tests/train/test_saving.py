"""Checkpoints are written while training goes on: the same bits, one at a time, and no error is lost."""

from __future__ import annotations

import os
import signal
import threading
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from safetensors.torch import load_file

from surefoot.errors import UserError, WorkError
from surefoot.train import checkpoint as checkpoint_module
from surefoot.train import saving
from surefoot.train.checkpoint import find_checkpoints, read_checkpoint
from surefoot.train.clock import Clock
from surefoot.train.ranks import Ranks

LONG = 30.0  # seconds that a step is waited for; none takes one
SAVE = {"save_strategy": "steps", "save_steps": 2}


@pytest.fixture
def steps(monkeypatch):
    """The steps that were told, and a way to do something at one of them; the thread can wait for them."""

    class Steps:
        def __init__(self):
            self.done, self.at, self.seen = 0, {}, threading.Condition()

        def wait_for(self, step):
            with self.seen:
                assert self.seen.wait_for(lambda: self.done >= step, LONG), f"step {step} did not come"

    steps, tell = Steps(), Clock.tell

    def told(self, run, check, rate):
        tell(self, run, check, rate)
        with steps.seen:
            steps.done = check.step
            steps.seen.notify_all()
        steps.at.pop(check.step, lambda: None)()

    monkeypatch.setattr(Clock, "tell", told)
    return steps


def before_saving(monkeypatch, look):
    """Do something in the thread when a checkpoint's weights are about to be written."""
    save = checkpoint_module.save_model

    def slow(folder, *rest, **more):
        look(int(folder.name.split(".")[1].rpartition("-")[2]))
        save(folder, *rest, **more)

    monkeypatch.setattr(checkpoint_module, "save_model", slow)


def contents(out):
    """Weights and optimizer of every checkpoint, and the final weights."""
    found = {}
    for folder in [*find_checkpoints(out), out]:
        found |= {f"{folder.name} {k}": v for f in folder.glob("*.safetensors") for k, v in load_file(f).items()}
        if (folder / "optimizer.pt").exists():
            state = torch.load(folder / "optimizer.pt", weights_only=True)["state"]
            found |= {f"{folder.name} {i} {k}": v for i, entry in state.items() for k, v in entry.items()}
    return found


@pytest.mark.parametrize("changes", [{}, {"finetuning_type": "full", "learning_rate": 1e-3}], ids=["lora", "full"])
def test_training_goes_on_and_what_is_written_is_what_was(settings, start, tmp_path, monkeypatch, steps, changes):
    settings |= SAVE | changes
    with monkeypatch.context() as patch:
        patch.setattr(saving, "free_host_memory", lambda: 0)
        waiting, _ = start(settings | {"output_dir": str(tmp_path / "waiting")})
    assert sum("while training waits" in message for message in waiting.messages) == 1
    before_saving(monkeypatch, lambda step: steps.wait_for(min(step + 1, 6)))
    aside, _ = start(settings)
    assert waiting.saved_at == aside.saved_at == [2, 4, 6]
    assert not any("while training waits" in message for message in aside.messages)
    one, other = contents(tmp_path / "waiting"), contents(Path(settings["output_dir"]))
    names = {name.replace("waiting", "out") for name in one}
    assert names == set(other) and len(names) > 20
    assert all(other[name.replace("waiting", "out")].equal(one[name]) for name in one)


def test_a_disk_slower_than_the_steps_makes_them_wait(settings, start, monkeypatch, steps):
    writing, out = [], Path(settings["output_dir"])

    def look(step):
        writing.append(step)
        assert [f.name.split(".")[1] for f in out.glob(".checkpoint-*.tmp")] == [f"checkpoint-{step}"]
        steps.wait_for(min(step + 1, 6))

    before_saving(monkeypatch, look)
    recorder, _ = start(settings | SAVE | {"save_steps": 1, "save_total_limit": 2})
    assert recorder.saved_at == writing == [1, 2, 3, 4, 5, 6]
    assert [read_checkpoint(folder).step for folder in find_checkpoints(out)] == [5, 6]


@pytest.mark.parametrize("last", [False, True], ids=["on the way", "at the end"])
def test_a_full_disk_ends_the_run_at_the_next_step(settings, start, monkeypatch, steps, last):
    broken_at = 6 if last else 4

    def look(step):
        if step == broken_at:
            raise OSError(28, "No space left on device")

    before_saving(monkeypatch, look)
    if not last:  # the step after it begins when the thread has failed
        steps.at[5] = lambda: [
            thread.join() for thread in threading.enumerate() if thread.name.startswith("checkpoint")
        ]
    with pytest.raises(UserError, match=f"the disk is full: .*checkpoint-{broken_at}"):
        start(settings | SAVE)
    assert steps.done <= broken_at + 1
    assert [f.name for f in Path(settings["output_dir"]).iterdir() if "checkpoint" in f.name] == [
        f"checkpoint-{step}" for step in range(2, broken_at, 2)
    ]


def test_weights_that_are_written_wrong_are_not_kept(settings, start, monkeypatch):
    write = checkpoint_module.save_model

    def flawed(folder, model, tokenizer, *, weights, **more):
        if "checkpoint-4" in folder.name:
            weights = {name: tensor * float("nan") if "lora_A" in name else tensor for name, tensor in weights.items()}
        write(folder, model, tokenizer, weights=weights, **more)

    monkeypatch.setattr(checkpoint_module, "save_model", flawed)
    with pytest.raises(WorkError, match=r"lora_A.* is not finite"):
        start(settings | SAVE)
    assert [f.name for f in find_checkpoints(Path(settings["output_dir"]))] == ["checkpoint-2"]


def test_ctrl_c_while_a_checkpoint_is_written(settings, start, monkeypatch, steps):
    """One signal: the checkpoint under way is finished, then the one of the stop."""
    before_saving(monkeypatch, lambda step: steps.wait_for(3) if step == 2 else None)
    steps.at[3] = lambda: os.kill(os.getpid(), signal.SIGINT)
    recorder, _ = start(settings | SAVE)
    assert recorder.result.stopped_by == "signal"
    assert recorder.saved_at == [2, recorder.result.steps]
    assert [read_checkpoint(f).step for f in find_checkpoints(Path(settings["output_dir"]))] == recorder.saved_at


def test_a_second_ctrl_c_leaves_the_checkpoint_before(settings, start, monkeypatch, steps):
    interrupted = threading.Event()

    def twice():
        os.kill(os.getpid(), signal.SIGINT)
        os.kill(os.getpid(), signal.SIGINT)

    give_up = saving.Saver.abandon
    monkeypatch.setattr(
        saving.Saver, "abandon", lambda *given: (given[0]._given_up.set(), interrupted.set(), give_up(*given))
    )
    before_saving(monkeypatch, lambda step: interrupted.wait(LONG) if step == 4 else None)
    steps.at[5] = twice
    with pytest.raises(KeyboardInterrupt):
        start(settings | SAVE)
    out = Path(settings["output_dir"])
    assert [f.name for f in out.iterdir() if "checkpoint" in f.name] == ["checkpoint-2"]


def test_another_error_lets_the_checkpoint_become_whole(settings, start, monkeypatch, steps):
    def fail():
        raise ValueError("planted")

    before_saving(monkeypatch, lambda step: steps.wait_for(3) if step == 2 else None)
    steps.at[3] = fail
    with pytest.raises(ValueError, match="planted"):
        start(settings | SAVE)
    assert [read_checkpoint(f).step for f in find_checkpoints(Path(settings["output_dir"]))] == [2]


def test_a_failure_that_nobody_has_raised_yet_is_raised_by_the_wait():
    """A step that was computed ahead with it may never be looked at: a stop signal ends the run before."""
    saver, told = saving.Saver(), []
    run = SimpleNamespace(ranks=Ranks(), listeners=[SimpleNamespace(saved=lambda *what: told.append(what))])
    saver.begin(lambda: int("planted"), aside=True)
    saver.expect(2, Path("checkpoint-2"))
    deadline = time.monotonic() + LONG
    while saver.failure() is None:
        assert time.monotonic() < deadline
        saver.look(run)
    assert isinstance(saver.failure(), ValueError)
    with pytest.raises(ValueError, match="planted"):
        saver.finish(run)
    assert not told
