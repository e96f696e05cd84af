"""Back to an earlier step in the same process: the steps that are done again end in the same bits."""

from __future__ import annotations

import signal
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from surefoot.train.clock import Clock
from surefoot.train.keeper import Keeper

KINDS = [{"finetuning_type": "lora", "lora_dropout": 0.1}, {"finetuning_type": "full"}]


def final_weights(folder):
    return {n: t for file in sorted(Path(folder).glob("*.safetensors")) for n, t in load_file(file).items()}


def same_bits(one, other):
    return one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)


def go_back_once(patch, at, before):
    """After step `at`, for the first time, put the run back to at most `before` steps."""
    watch, done = Keeper.watch, []

    def and_back(self, run, check, *rest):
        if check.step == at and not done:
            done.append(self.go_back(run, before))
            return True
        return watch(self, run, check, *rest)

    patch.setattr(Keeper, "watch", and_back)
    return done


@pytest.mark.parametrize("changes", KINDS, ids=["lora", "full"])
@pytest.mark.parametrize(("before", "lands_at"), [(6, 4), (1, 0), (0, 0)])
def test_going_back_and_on_equals_never_having_gone(settings, start, tmp_path, monkeypatch, changes, before, lands_at):
    settings |= changes | {"num_train_epochs": 2.0, "save_strategy": "steps", "save_steps": 4}
    start(settings)
    other = settings | {"output_dir": str(tmp_path / "back")}
    done = go_back_once(monkeypatch, 7, before)
    recorder, _ = start(other)
    assert done == [lands_at] == recorder.rewound_to
    assert same_bits(final_weights(settings["output_dir"]), final_weights(other["output_dir"]))


@pytest.mark.parametrize("changes", KINDS, ids=["lora", "full"])
@pytest.mark.parametrize("before", [5, 2, 0])
def test_going_back_after_a_resume(settings, start, tmp_path, monkeypatch, changes, before):
    """The checkpoint's weights, not the base model's, come back; and the very start can still be reached."""
    settings |= changes | {"num_train_epochs": 2.0, "save_strategy": "steps", "save_steps": 2}
    start(settings)
    other = settings | {"output_dir": str(tmp_path / "resumed")}
    with monkeypatch.context() as patch:
        tell = Clock.tell
        stop = lambda *a: (tell(*a), signal.raise_signal(signal.SIGTERM) if a[2].step == 4 else None)  # noqa: E731
        patch.setattr(Clock, "tell", stop)
        assert start(other)[0].result.steps == 4
    done = go_back_once(monkeypatch, 6, before)
    recorder, _ = start(other)
    assert recorder.facts.resumed_from == 4 and done == [{5: 4, 2: 2, 0: 0}[before]]
    assert same_bits(final_weights(settings["output_dir"]), final_weights(other["output_dir"]))
