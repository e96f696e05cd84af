"""Kernels that are wrong (R21, R25), compiled layers among them: another kernel cures them, precision never."""

from __future__ import annotations

import pytest
import torch
from fault_runs import close, pattern_rows
from plants import Bug, Unwritten, break_compiled, break_fused_attention

LONG = pattern_rows(8, length=100)  # torch's fused attention is used on a CPU beyond 96 tokens
FUSED = {"flash_attn": "sdpa", "num_train_epochs": 2.0}
DTYPES = [
    {}, {"fp16": None, "bf16": True}, {"fp16": None, "compute_dtype": "float32"}
]  # fmt: skip


@pytest.mark.parametrize("flags", DTYPES, ids=["fp16", "bf16", "fp32"])
def test_r21_a_kernel_that_writes_nan_into_the_query_gradient(job, monkeypatch, flags):
    normal = job(rows=LONG, **FUSED, **flags, guard="off").train()
    run = job(rows=LONG, **FUSED, **flags)
    break_fused_attention(monkeypatch, [run.module("model.layers.2.self_attn")])
    seen = run.rerun()
    bad = [name for name, peak in seen.peaks.items() if not peak < float("inf")]
    assert seen.loss_finite and 0 < len(bad) < len(seen.peaks), "the tensors behind the fault are clean"
    outcome = run.train()
    outcome.says("KERNEL", module="model.layers.2.self_attn", op="BugBackward", phase="backward", step=1)
    outcome.went_on(steps=8)
    assert [(c["kind"], c["module"]) for c in outcome.changes] == [("attention_eager", "model.layers.2.self_attn")]
    assert outcome.action["verified"] is True
    assert close(outcome.final_loss, normal.final_loss)


def test_r25_a_gradient_from_memory_that_nobody_wrote(job, monkeypatch):
    monkeypatch.setattr(Unwritten, "armed", False)
    run = job(rows=LONG, **FUSED, fp16=None, compute_dtype="float32", guard_preflight=False)
    break_fused_attention(monkeypatch, [run.module("model.layers.2.self_attn")], Unwritten)
    run.recorder.after_step.append(lambda step: setattr(Unwritten, "armed", True) if step == 3 else None)
    outcome = run.train()
    found = outcome.of("diagnosis")[0]
    got = {key: found[key] for key in ("class", "module", "op", "phase")}
    assert got == {
        "class": "KERNEL", "module": "model.layers.2.self_attn", "op": "UnwrittenBackward", "phase": "backward",
    }, outcome.story()  # fmt: skip
    assert outcome.error is None and outcome.all_saved_finite, outcome.story()
    assert {c["kind"] for c in outcome.changes} == {"attention_eager"}, outcome.changes


def test_a_fault_that_exists_only_compiled(job, monkeypatch):
    """Compile is switched off for that layer alone; the others stay compiled."""
    normal = job(rows=pattern_rows(8), fp16=None, compute_dtype="float32").train()
    run = job(rows=pattern_rows(8), fp16=None, compute_dtype="float32", compile=True, guard_preflight=False)
    layers = [run.module(f"model.layers.{i}") for i in range(4)]
    compiled = break_compiled(monkeypatch, [layers[1]])
    torch.compiler.reset()
    outcome = run.train()
    assert {id(layer) for layer in layers} <= {id(module) for module in compiled}, "the plant needs compiled layers"
    assert outcome.diagnosis["class"] == "KERNEL", outcome.story()
    assert outcome.diagnosis["module"] == "model.layers.1", outcome.story()
    outcome.went_on(steps=4)
    assert [(c["kind"], c["module"]) for c in outcome.changes] == [("compile_off", "model.layers.1")], outcome.changes
    assert [layer._compiled_call_impl is not None for layer in layers] == [True, False, True, True]
    assert close(outcome.final_loss, normal.final_loss, 1e-4)


def test_before_step_1_a_compiled_layer_that_differs_runs_eagerly(job, monkeypatch):
    run = job(rows=pattern_rows(8), fp16=None, compute_dtype="float32", compile=True)
    layers = [run.module(f"model.layers.{i}") for i in range(4)]
    break_compiled(monkeypatch, [layers[1]])
    torch.compiler.reset()
    outcome = run.train()
    (found,) = outcome.of("preflight")
    assert (found["class"], found["module"], found["op"]) == ("KERNEL", "model.layers.1", "torch.compile")
    assert outcome.error is None and not outcome.of("alarm")
    assert [layer._compiled_call_impl is not None for layer in layers] == [True, False, True, True]


def test_a_range_fault_in_compiled_layers_is_named_by_module_and_op(job, planted, monkeypatch):
    from plants import huge_scores

    run = job(planted(huge_scores(2)), rows=pattern_rows(8), compile=True)
    break_compiled(monkeypatch, [])
    torch.compiler.reset()
    outcome = run.train()
    outcome.says("RANGE", module="model.layers.2.self_attn", op="bmm", phase="forward", place="attention scores")
    outcome.went_on(steps=4)


def test_the_bug_is_one(job):
    x = torch.ones(2, 3, requires_grad=True)
    Bug.apply(x).sum().backward()
    assert x.grad is not None and int(x.grad.isnan().sum()) == 1
