"""What a run does about finite spikes: experiments change nothing, wrong labels are left out, dead gradients end it."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch

from helpers import MemoryTable, random_table
from surefoot.guard import spikes
from surefoot.guard.check import NonFiniteStepError
from surefoot.train import loop, spike

STEPS = 40


@pytest.fixture
def quick(settings, tmp_path):
    """Steps of one row that repeat; the output folder is new for each run."""
    count = iter(range(100))
    return lambda **changes: settings | {
        "max_steps": STEPS, "per_device_train_batch_size": 1, "gradient_accumulation_steps": 1, "learning_rate": 1e-3,
        "guard_preflight": False, "compute_dtype": "float32", "disable_shuffling": True,
        "output_dir": str(tmp_path / f"out-{next(count)}"),
    } | changes  # fmt: skip


def events(settings, kind):
    path = Path(settings["output_dir"]) / "surefoot" / "guard.jsonl"
    found = [json.loads(line) for line in path.read_text().splitlines()] if path.is_file() else []
    return [event for event in found if event["event"] == kind]


def trained(loaded):
    return [p.detach().clone() for p in loaded.model.parameters() if p.requires_grad]


def same_rows(count, seed=0):
    """One row again and again, so that it is learnt."""
    (sample,) = random_table(1, seed, shortest=30, longest=30).samples
    return [type(sample)((f"rows:{i}",), sample.input_ids, sample.labels, sample.segments) for i in range(count)]


@pytest.mark.parametrize("ahead", [False, True])
def test_an_experiment_at_every_step_changes_no_bit(quick, start, monkeypatch, ahead):
    asked = []

    def suspect(loss, norm):
        asked.append(loss.value)
        return True

    flags = {"lora_dropout": 0.1, "neftune_noise_alpha": 5.0}
    reference, plain = start(quick(guard="off", **flags), random_table(STEPS))
    monkeypatch.setattr(spikes, "_suspect", suspect)
    monkeypatch.setattr(loop.Run, "__post_init__", lambda run: setattr(run, "looks_ahead", ahead), raising=False)
    monkeypatch.setattr(spikes, "CONFIRM_RISE", float("inf"))
    watched, loaded = start(quick(guard="watch", **flags), random_table(STEPS))
    assert len(asked) > STEPS // 2
    assert watched.losses == reference.losses
    assert all(torch.equal(a, b) for a, b in zip(trained(plain), trained(loaded), strict=True))


def test_rows_of_the_steps_before_show_damage_and_nothing_else(quick, start, monkeypatch):
    """On healthy steps their loss has not risen; when the last update was spoilt, it has."""
    rises = []
    observe = spikes.SpikeDetector.observe

    def spy(self, step, loss, norm, tokens, chance, trial):
        if step > 3:
            rises.append(trial.rise())
        return observe(self, step, loss, norm, tokens, chance, trial)

    apply = loop.apply_step

    def spoil(run, attempt):
        apply(run, attempt)
        if attempt.check.step == STEPS:
            run.guard.integrity = None  # it would see this by itself
            with torch.no_grad():
                for p in run.runner.trained.values():
                    p += 0.3 * torch.randn(p.shape, generator=torch.Generator().manual_seed(0))

    monkeypatch.setattr(spikes.SpikeDetector, "observe", spy)
    monkeypatch.setattr(loop, "apply_step", spoil)
    start(quick(finetuning_type="full", learning_rate=1e-2, guard="watch"), MemoryTable(same_rows(STEPS)))
    assert max(rises[:-1]) < spikes.CONFIRM_RISE < rises[-1]


@pytest.mark.parametrize("mode", ["heal", "watch"])
def test_labels_that_are_not_the_text_are_named_and_left_out(quick, start, mode):
    samples = same_rows(STEPS)
    bad = samples[29]
    drawn = np.random.default_rng(1).integers(3, bad.input_ids.max(), len(bad.labels)).astype(np.int32)
    labels = np.where(bad.labels == -100, -100, drawn)
    samples[29] = type(bad)(bad.row_ids, bad.input_ids, labels, bad.segments)
    settings = quick(finetuning_type="full", learning_rate=1e-2, guard=mode)
    recorder, _ = start(settings, MemoryTable(samples))
    found = events(settings, "diagnosis")[0]
    assert (found["class"], found["step"]) == ("SPIKE", 30)
    assert "the labels are wrong" in found["evidence"]
    left_out = [event for event in events(settings, "action") if "rows:29" in event["action"]]
    assert bool(left_out) == (mode == "heal")
    if mode == "heal":
        assert [event.step for event in recorder.steps] == [s for s in range(1, STEPS + 1) if s != 30]


def test_templates_end_tokens_are_no_wrong_labels(quick):
    class Tokenizer:
        eos_token_id = 2

    class Run:
        tokenizer = Tokenizer()

    (sample,) = same_rows(1)
    labels = np.where(sample.labels == -100, -100, 2).astype(np.int32)
    ends = type(sample)(sample.row_ids, sample.input_ids, labels, sample.segments)
    assert not spike._Trial(Run(), (ends,), []).wrong_labels()
    moved = type(sample)(sample.row_ids, sample.input_ids, np.where(labels == 2, 9, -100), sample.segments)
    assert spike._Trial(Run(), (moved,), []).wrong_labels()


@pytest.mark.parametrize("mode", ["heal", "watch"])
def test_gradients_that_are_exactly_zero_for_good_end_the_run(quick, start, monkeypatch, mode):
    compute = loop.StepRunner.compute

    def dead(self, step, samples):
        attempt = compute(self, step, samples)
        if step > 20:
            attempt.check.norms_N.zero_()
            attempt.check.norm.zero_()
            for p in self.trained.values():
                p.grad.zero_()
        return attempt

    monkeypatch.setattr(loop.StepRunner, "compute", dead)
    settings = quick(guard=mode, max_steps=200)
    with pytest.raises(NonFiniteStepError, match="exactly 0 for 32 steps") as error:
        start(settings, random_table(200))
    assert error.value.exit_code == 1
    assert events(settings, "stopped")
