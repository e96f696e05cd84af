"""Faults over a base in 4 and 8 bits: named where they are, and healed as over 16 bits."""

from __future__ import annotations

import math

import pytest
import torch
from fault_runs import close
from plants import break_compiled, element, huge_product, scaled

pytest.importorskip("bitsandbytes", reason="bitsandbytes is optional: pip install --no-deps bitsandbytes")

from surefoot.errors import WorkError
from surefoot.model.quantized import dequantized, state_tensors

MLP, V_PROJ = "model.layers.1.mlp", "model.layers.2.self_attn.v_proj"


def same_weights(one, other):
    a, b = one.weights, other.weights
    return a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)


@pytest.mark.parametrize("bits", [4, 8])
def test_a_product_beyond_float16_is_healed_over_packed_weights(job, planted, in_float32, bits):
    model = planted(huge_product(1, shrink=1e-3))
    run, reference = job(model, quantization_bit=bits), in_float32(model, quantization_bit=bits)
    assert not run.rerun().loss_finite
    outcome = run.train()
    outcome.says("RANGE", module=MLP, op="mul", phase="forward", place="MLP product")
    outcome.went_on(steps=8)
    assert {(change["kind"], change["module"]) for change in outcome.changes} == {("island", MLP)}, outcome.changes
    assert outcome.action["verified"] is True
    assert close(outcome.final_loss, reference.final_loss), (outcome.losses, reference.losses)


def test_the_same_in_compiled_layers(job, planted, in_float32, monkeypatch):
    """As over 16 bits: the layer with the island runs eagerly from then on, the others compiled."""
    model = planted(huge_product(1, shrink=1e-3))
    reference = in_float32(model, quantization_bit=4)
    run = job(model, quantization_bit=4, compile=True)
    break_compiled(monkeypatch, [])
    torch.compiler.reset()
    outcome = run.train()
    outcome.says("RANGE", module=MLP, op="mul", phase="forward", place="MLP product")
    outcome.went_on(steps=8)
    wanted = {("island", MLP), ("compile_off", "model.layers.1")}
    assert {(change["kind"], change["module"]) for change in outcome.changes} == wanted, outcome.changes
    layers = [run.module(f"model.layers.{i}") for i in range(4)]
    assert [layer._compiled_call_impl is not None for layer in layers] == [True, False, True, True]
    assert close(outcome.final_loss, reference.final_loss), (outcome.losses, reference.losses)


def test_a_base_product_beyond_float16_is_laid_to_its_own_module(job, planted, in_float32):
    """The matrix product over the packed weight itself overflows: a weight of the file, not a scale, is too large."""
    model = planted(scaled("model.layers.1.mlp.up_proj.weight", 2e5), dtype=torch.bfloat16)
    run, reference = job(model, quantization_bit=4), in_float32(model, quantization_bit=4)
    assert not run.rerun().loss_finite
    outcome = run.train()
    assert outcome.diagnosis["class"] == "RANGE", outcome.story()
    assert outcome.diagnosis["module"] == f"{MLP}.up_proj" and outcome.diagnosis["op"] in ("mm", "addmm", "addmm_")
    outcome.went_on(steps=8)
    assert outcome.action["verified"] is True
    assert close(outcome.final_loss, reference.final_loss), (outcome.losses, reference.losses)


@pytest.mark.parametrize(("bits", "part"), [(4, ""), (4, "absmax"), (4, "nested_offset"), (8, "SCB")])
def test_damaged_memory_is_found_by_checksum_and_quantised_again(job, half_model, bits, part):
    """A byte of the packed weight, or of what it means nothing without: the run is the one that never had the fault."""
    clean, run = job(half_model, quantization_bit=bits).train(), job(half_model, quantization_bit=bits)
    base = run.module(V_PROJ).get_base_layer()
    before = dequantized(base, torch.float32)
    target = state_tensors(base)[part] if part else base.weight.data
    name = f"{V_PROJ}.weight" + (f"[{part}]" if part else "")
    done: list[int] = []

    def flip(step):
        if step == 3 and not done:
            done.append(step)
            target.view(-1).view(torch.uint8)[-1] ^= 64

    run.recorder.after_step.append(flip)
    outcome = run.train()
    assert outcome.error is None, outcome.story()
    found = [event for event in outcome.events if event["class"] == "TRANSIENT"]
    assert found and {event["module"] for event in found} == {V_PROJ}, outcome.story()
    assert any(name in str(event["evidence"]) + str(event["action"]) for event in found), outcome.story()
    assert torch.equal(dequantized(base, torch.float32), before)
    assert same_weights(outcome, clean) and not outcome.changes


@pytest.mark.parametrize(("bits", "preflight"), [(4, True), (8, False)])
def test_a_nan_of_the_file_is_named_by_the_scale_that_it_went_into(job, planted, bits, preflight):
    model = planted(element(f"{V_PROJ}.weight", float("nan"), 3, 5))
    outcome = job(model, quantization_bit=bits, guard_preflight=preflight).train()
    assert isinstance(outcome.error, WorkError) and not outcome.weights, outcome.story()
    assert not outcome.losses or all(loss is None for loss in outcome.losses.values())
    (found,) = [event for event in outcome.events if event["class"] == "WEIGHTS" and event["event"] != "stopped"]
    assert (found["module"], found["op"]) == (V_PROJ, None), outcome.story()
    assert f"{V_PROJ}.weight[" in str(outcome.error), outcome.error
    assert not preflight or "holds them there too" in str(found["evidence"])


def test_a_healthy_run_raises_no_alarm(job, half_model):
    outcome = job(half_model, quantization_bit=4).train()
    outcome.went_on(steps=8)
    assert not outcome.events and math.isfinite(outcome.final_loss), outcome.story()
