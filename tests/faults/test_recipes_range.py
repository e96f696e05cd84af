"""Number range: attention scores, MLP products, the residual stream, norms, the loss scale (R1 to R6, R24)."""

from __future__ import annotations

import pytest
import torch
from fault_runs import close, pattern_rows, row
from plants import element, huge_product, huge_scores, huge_stream, replace_norm, scaled

from surefoot.train.loss_scale import LossScale

ATTENTION_CURES = {"attention_fused", "island"}


def healed_by(outcome, kinds, module):
    """The plan holds changes of these kinds only, for this module only."""
    assert outcome.changes, outcome.story()
    assert {change["kind"] for change in outcome.changes} <= kinds, outcome.changes
    assert {change["module"] for change in outcome.changes} == {module}, outcome.changes
    assert outcome.action["verified"] is True, outcome.story()


def start_scale_at(monkeypatch, value):
    """A run whose loss scale stands at a value that somebody else left there."""
    monkeypatch.setattr(LossScale, "for_run", classmethod(lambda cls, enabled: cls(value if enabled else 1.0, enabled)))


def test_r1_scores_beyond_float16(job, planted, in_float32):
    model = planted(huge_scores(2))
    run, reference = job(model), in_float32(model)
    assert not run.rerun().loss_finite
    outcome = run.train()
    outcome.says(
        "RANGE", module="model.layers.2.self_attn", op="bmm", phase="forward", place="attention scores", step=1
    )  # fmt: skip
    outcome.went_on(steps=8)
    healed_by(outcome, ATTENTION_CURES, "model.layers.2.self_attn")
    assert close(outcome.final_loss, reference.final_loss), (outcome.losses, reference.losses)


def test_r1_the_headroom_was_really_short(job, planted):
    """The plant is range and nothing else: the same step in float32 is a number, and so is the healthy one."""
    model = planted(huge_scores(2))
    assert job(model, fp16=None, compute_dtype="float32").rerun().finite
    assert job().rerun().finite


def test_r2_mlp_product_beyond_float16(job, planted, in_float32):
    """As written: the product and, at this width, the block's output leave the range, so the stream is widened too."""
    model = planted(huge_product(1))
    run, reference = job(model), in_float32(model)
    assert not run.rerun().loss_finite
    outcome = run.train()
    outcome.says("RANGE", module="model.layers.1.mlp", op="mul", phase="forward", place="MLP product")
    outcome.went_on(steps=8)
    assert outcome.action["verified"] is True
    assert {change["kind"] for change in outcome.changes} <= {"island", "region"}
    assert close(outcome.final_loss, reference.final_loss), (outcome.losses, reference.losses)


def test_r2_one_island_is_enough_where_the_output_fits(job, planted, in_float32):
    model = planted(huge_product(1, shrink=1e-3))
    run, reference = job(model), in_float32(model)
    assert not run.rerun().loss_finite
    outcome = run.train()
    outcome.says("RANGE", module="model.layers.1.mlp", op="mul", phase="forward", place="MLP product")
    outcome.went_on(steps=8)
    healed_by(outcome, {"island"}, "model.layers.1.mlp")
    assert close(outcome.final_loss, reference.final_loss), (outcome.losses, reference.losses)


def test_r3_residual_stream_beyond_float16(job, planted, in_float32):
    """A leaf island cannot help: its output is rounded to float16 again and overflows at the addition."""
    model = planted(huge_stream(0, 1), "llama", mlp_bias=True, attention_bias=True)
    run, reference = job(model), in_float32(model)
    assert not run.rerun().loss_finite
    outcome = run.train()
    outcome.says("RANGE", module="model.layers.1", op="add", phase="forward", place="residual stream")
    outcome.went_on(steps=8)
    assert [change["kind"] for change in outcome.changes] == ["region"], outcome.changes
    assert outcome.action["verified"] is True
    assert close(outcome.final_loss, reference.final_loss), (outcome.losses, reference.losses)


def test_r4_an_infinity_that_dies_silently(job, planted, in_float32):
    """Loss and gradients are numbers all along, so only the look before step 1 can see it."""
    model = planted(scaled("model.embed_tokens.weight", 1000.0))
    run = job(model)
    replace_norm(run.module("model"), "layers.1.input_layernorm")
    seen: list[float] = []
    handle = run.module("model.layers.1.input_layernorm").register_forward_pre_hook(
        lambda module, args: seen.append(float((args[0] * args[0]).detach().amax()))
    )
    assert run.rerun().finite and set(seen) == {float("inf")}
    handle.remove()
    outcome = run.train()
    (found,) = [event for event in outcome.of("preflight") if event["class"] == "RANGE"]
    got = {key: found[key] for key in ("module", "op", "phase", "place")}
    assert got == {
        "module": "model.layers.1.input_layernorm", "op": "mul", "phase": "forward", "place": "norm"
    }, outcome.story()  # fmt: skip
    assert found["action"]
    outcome.went_on(steps=8)
    assert {change["module"] for change in outcome.changes} == {"model.layers.1.input_layernorm"}, outcome.changes


def test_r5_an_epsilon_that_float16_does_not_have(job, planted):
    model = planted(element("model.embed_tokens.weight", 0.0, 40))
    rows = pattern_rows(16)
    rows[0] = row(0, [*rows[0].input_ids[:20], 40, *rows[0].input_ids[21:]])
    run, reference = job(model, rows), job(model, rows, fp16=None, compute_dtype="float32", guard="off")
    for each in (run, reference):
        replace_norm(each.module("model"), "layers.0.input_layernorm", eps=1e-8)
    step = next(step for step in range(1, 9) if not run.rerun(step).finite)
    outcome, expected = run.train(), reference.train()
    outcome.says(
        "RANGE", module="model.layers.0.input_layernorm", op="rsqrt", phase="forward", place="norm", step=step
    )  # fmt: skip
    outcome.went_on(steps=8)
    healed_by(outcome, {"island"}, "model.layers.0.input_layernorm")
    assert close(outcome.final_loss, expected.final_loss), (outcome.losses, expected.losses)


def test_r6_a_loss_scale_too_high(job, planted, monkeypatch):
    model = planted(scaled("lm_head.weight", 2.0))
    normal = job(model).train()
    assert normal.error is None and not normal.of("alarm"), normal.story()
    start_scale_at(monkeypatch, 2.0**24)
    run = job(model)
    at_start = run.rerun(loss_scale=2.0**24)
    assert at_start.loss_finite and not at_start.finite
    assert run.rerun(loss_scale=2.0**12).finite
    outcome = run.train()
    outcome.says("SCALE", module=None, op="_to_copy", phase="backward", place="loss", step=1)
    outcome.went_on(steps=8)
    assert not outcome.changes, "a loss scale is no reason for another precision"
    assert close(outcome.final_loss, normal.final_loss)


def test_r24_a_loss_scale_that_collapsed(job, monkeypatch):
    """Every gradient vanishes: the loss looks alive and nothing is learned. The scale has a floor, and is put back."""
    normal = job().train()
    start_scale_at(monkeypatch, 2.0**-140)
    run = job()
    gone = run.rerun(loss_scale=2.0**-140)
    assert gone.loss_finite and not max(gone.peaks.values()) > 0.0
    outcome = run.train()
    outcome.says("SCALE", step=1)
    assert not outcome.of("preflight"), "gradients that the scale has rounded away are no kernel's fault"
    outcome.went_on(steps=8)
    assert close(outcome.final_loss, normal.final_loss)


@pytest.mark.parametrize("flags", [{}, {"bf16": True, "fp16": None}, {"compute_dtype": "float32", "fp16": None}])
def test_a_healthy_run_says_nothing(job, flags):
    outcome = job(**flags).train()
    outcome.went_on(steps=8)
    assert outcome.events == [], outcome.story()
    assert isinstance(outcome.weights, dict) and all(t.dtype == torch.float32 for t in outcome.weights.values())
