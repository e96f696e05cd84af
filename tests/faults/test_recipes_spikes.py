"""Finite damage: learning rates, lost moments, flipped bits (R17, R19, R20): seen, undone, done again."""

from __future__ import annotations

import pytest
import torch
from fault_runs import pattern_rows
from plants import element, flip_bit

from surefoot.train import frozen

STEPS = 100
AT = 60


@pytest.fixture
def long_job(job, single_model):
    """A hundred quick steps in float32 that learn and then settle."""

    def make(**changes):
        flags = {
            "fp16": None, "compute_dtype": "float32", "max_steps": STEPS, "learning_rate": 3e-3,
        }  # fmt: skip
        return job(single_model, rows=pattern_rows(16), **(flags | changes))

    return make


def found_within(outcome, faults, first, latest):
    """The first diagnosis is of these classes, and in time."""
    assert outcome.of("diagnosis"), outcome.story()
    found = outcome.of("diagnosis")[0]
    assert found["class"] in faults, outcome.story()
    assert first <= found["step"] <= latest, outcome.story()
    return found


def recovered(outcome, reference, share):
    assert outcome.error is None, outcome.story()
    assert sorted(outcome.losses) == list(range(1, STEPS + 1))
    assert outcome.all_saved_finite and not outcome.changes
    assert outcome.final_loss <= reference.final_loss * (1 + share), (outcome.final_loss, reference.final_loss)


def test_r17_a_learning_rate_that_jumps_for_five_steps(long_job, optimizer_plant):
    reference = long_job(guard="off").train()
    plant = optimizer_plant(lambda call: 100.0 if AT <= call < AT + 5 else 1.0)
    harmed = long_job(guard="off", max_steps=AT + 6).train()
    assert harmed.losses[AT + 5] > 2 * reference.losses[AT], "the plant does harm"
    plant.calls = 0
    outcome = long_job().train()
    found_within(outcome, {"SPIKE"}, AT, AT + 2)
    recovered(outcome, reference, 0.25)


def test_r17_a_learning_rate_that_jumps_for_good(long_job, optimizer_plant):
    """Seen as a spike or, where it creeps, as a trend; the run ends better than without a guard, or says so."""
    plant = lambda call: 40.0 if call >= AT else 1.0  # noqa: E731
    optimizer_plant(plant)
    outcome = long_job().train()
    found_within(outcome, {"SPIKE", "TREND"}, AT, STEPS)
    assert outcome.all_saved_finite and not outcome.changes


def test_r19_second_moments_that_are_lost(long_job, optimizer_plant):
    reference = long_job(guard="off").train()
    plant = optimizer_plant()
    run = long_job()
    done: list[int] = []

    def lose(step):
        if step == AT and not done:
            done.append(step)
            plant.lose_second_moments()

    run.recorder.after_step.append(lose)
    outcome = run.train()
    found = found_within(outcome, {"SPIKE", "OPTIMIZER"}, AT + 1, AT + 3)
    assert "moment" in found["evidence"] or "optimizer" in found["evidence"], found
    recovered(outcome, reference, 0.25)


@pytest.mark.parametrize("small", [True, False], ids=["looked at each step", "looked at when the loss jumps"])
def test_r20_a_finite_flip_is_named_by_checksum(job, planted, monkeypatch, small):
    """A tiny number becomes one near 100: the checksum names the tensor, it is read again."""
    if not small:
        monkeypatch.setattr(frozen, "BYTES_A_STEP", 1)  # this model is large then: its weights are looked at rarely
    name = "model.layers.1.mlp.down_proj"
    model = planted(element(f"{name}.weight", 0.75 * 2.0**-121, 0, 7), dtype=torch.float32)
    flags = {"fp16": None, "compute_dtype": "float32", "max_steps": STEPS, "learning_rate": 3e-3}
    reference, run = job(model, **flags, guard="off").train(), job(model, **flags)
    weight = run.module(name).get_base_layer().weight
    done: list[int] = []

    def flip(step):
        if step == AT and not done:
            done.append(step)
            flip_bit(weight, 30, place=7)
            assert weight[0, 7] == 96.0

    run.recorder.after_step.append(flip)
    outcome = run.train()
    found_within(outcome, {"TRANSIENT", "SPIKE"}, *((AT, AT) if small else (AT + 1, AT + 3)))
    assert name in {event["module"] for event in outcome.of("action")}, outcome.story()
    assert outcome.error is None and not outcome.changes
    assert all(torch.equal(outcome.weights[key], tensor) for key, tensor in reference.weights.items())
