"""Weights, trainable dtypes and the optimizer's state (R12 to R16, R19, R20, R23)."""

from __future__ import annotations

import json
import math

import pytest
import torch
from fault_runs import close, pattern_rows
from plants import element, flip_bit, noisy_rows

from surefoot.data.batch import lay_out
from surefoot.errors import UserError, WorkError
from surefoot.train import frozen

V_PROJ = "model.layers.3.self_attn.v_proj"


def halve_trained(run, dtype):
    """Hold the trained parameters in 16 bits, as a wrong loader would."""
    for parameter in run.model.parameters():
        if parameter.requires_grad:
            parameter.data = parameter.data.to(dtype)


def trained_dtypes(outcome):
    return {p.dtype for p in outcome.loaded.model.parameters() if p.requires_grad}


def same_weights(one, other):
    return all(torch.equal(one.weights[name], other.weights[name]) for name in one.weights)


def test_r12_float16_trainables_are_made_float32(job):
    normal, run = job().train(), job()
    halve_trained(run, torch.float16)
    outcome = run.train()
    (found,) = outcome.of("preflight")
    assert found["class"] == "OPTIMIZER" and "float16" in found["evidence"], outcome.story()
    assert trained_dtypes(outcome) == {torch.float32}
    outcome.went_on(steps=8)
    assert close(outcome.final_loss, normal.final_loss)


@pytest.mark.parametrize("optim", ["adamw_torch", "adamw_torch_fused"])
def test_r13_an_optimizer_whose_epsilon_vanishes(job, optim):
    """With the look before step 1 this is R12; without it the first update makes NaN of finite gradients.

    Fused AdamW computes in float32 inside and is right; then there is nothing to heal.
    """
    run, normal = job(optim=optim, guard_preflight=False), job(optim=optim).train()
    halve_trained(run, torch.float16)
    outcome = run.train()
    if optim == "adamw_torch_fused":
        assert outcome.error is None and outcome.all_saved_finite
        return
    outcome.says("OPTIMIZER", phase="optimizer", place="optimizer", step=1)
    assert outcome.diagnosis["details"]["tensors"], "the tensors are named"
    assert trained_dtypes(outcome) == {torch.float32}
    outcome.went_on(steps=8)
    assert not outcome.changes and close(outcome.final_loss, normal.final_loss)


def test_r14_updates_below_half_a_unit(job, single_model):
    """Everything in bfloat16 and a learning rate of 1e-5: most weights do not move until the masters are float32."""
    flags = {"finetuning_type": "full", "learning_rate": 1e-5, "fp16": None, "bf16": True, "lora_target": None}
    run = job(single_model, guard_preflight=False, lora_rank=None, **flags)
    halve_trained(run, torch.bfloat16)
    before = {name: p.detach().clone() for name, p in run.model.named_parameters() if "proj" in name}
    outcome = run.train()
    outcome.says("STAGNATION", phase="optimizer", place="optimizer")
    assert outcome.error is None and trained_dtypes(outcome) == {torch.float32}, outcome.story()
    moved = [
        (dict(run.model.named_parameters())[name].float() != p.float()).float().mean() for name, p in before.items()
    ]
    assert sum(moved) / len(moved) > 0.9


def test_r15_a_nan_in_a_frozen_weight(job, planted):
    model = planted(element(f"{V_PROJ}.weight", float("nan"), 3, 5))
    run = job(model)
    assert not run.rerun().finite
    outcome = run.train()
    assert isinstance(outcome.error, WorkError) and not outcome.weights, outcome.story()
    assert not outcome.losses or all(loss is None for loss in outcome.losses.values())
    (found,) = [event for event in outcome.events if event["class"] == "WEIGHTS" and event["event"] != "stopped"]
    assert (found["module"], found["op"]) == (V_PROJ, None), outcome.story()
    assert f"{V_PROJ}.weight" in str(outcome.error)
    assert "model.safetensors" in f"{outcome.error}{found}", "the file is named"
    assert not outcome.changes


def test_r15_without_the_look_before_step_1(job, planted):
    outcome = job(planted(element(f"{V_PROJ}.weight", float("nan"), 3, 5)), guard_preflight=False).train()
    outcome.says("WEIGHTS", module=V_PROJ, op=None, phase="forward", step=1)
    assert isinstance(outcome.error, WorkError) and not outcome.weights and not outcome.changes


@pytest.mark.parametrize("small", [True, False], ids=["looked at each step", "found by its NaN"])
def test_r15_a_nan_that_only_the_memory_holds_is_read_again_from_the_file(job, monkeypatch, small):
    """The file is healthy, so the weight is read again, and the run is the one that never had the fault."""
    if not small:
        monkeypatch.setattr(frozen, "BYTES_A_STEP", 1)  # this model is large then: its weights are looked at rarely
    run, clean = job(), job().train()
    weight = run.module(V_PROJ).get_base_layer().weight

    def poison(step):
        if step == 3 and not done:
            done.append(step)
            weight.data[3, 5] = float("nan")

    done: list[int] = []
    run.recorder.after_step.append(poison)
    outcome = run.train()
    assert outcome.diagnosis["class"] in ("WEIGHTS", "TRANSIENT"), outcome.story()
    assert (outcome.diagnosis["module"], outcome.diagnosis["step"]) == (V_PROJ, 3 if small else 4)
    outcome.went_on(steps=8)
    assert same_weights(outcome, clean) and not outcome.changes


def test_r16_rows_that_nobody_trained(job, planted):
    model = planted(noisy_rows(50, 59))
    rows = pattern_rows(16)
    run = job(model, [*rows])
    outcome = run.train()
    (found,) = [event for event in outcome.of("preflight") if event["place"] in ("embedding", "logits")]
    assert found["class"] == "WEIGHTS", outcome.story()
    assert found["module"] in ("model.embed_tokens", "lm_head")
    assert "50-59" in f"{found['evidence']}{found['action']}{found['details']}", found
    outcome.went_on(steps=8)
    for name in ("model.embed_tokens", "lm_head"):
        norms = run.module(name).weight.float().norm(dim=1)
        assert norms[50:60].max() < 3 * norms[:50].median(), name
    assert next(iter(outcome.losses.values())) < 2 * math.log(97)


def test_r19_a_checkpoint_without_its_moments_is_not_gone_on_from(job, tmp_path):
    """Checkpoints are verified: one whose optimizer file was changed is refused, the one before is taken."""
    flags = {"save_strategy": "steps", "save_steps": 2, "output_dir": str(tmp_path / "run")}
    whole = job(**(flags | {"output_dir": str(tmp_path / "whole")})).train()
    job(max_steps=6, **flags).train()
    for file in (tmp_path / "run" / "checkpoint-6").rglob("optimizer.pt"):
        state = torch.load(file, weights_only=True)
        for moments in state["state"].values():
            moments["exp_avg_sq"].zero_()
        torch.save(state, file)
    for file in (tmp_path / "run").glob("*.safetensors"):
        file.unlink()
    run = job(resume_from_checkpoint=True, resume_anyway=True, **flags)
    outcome = run.train()
    assert min(outcome.losses) == 5, "goes on from checkpoint-4"
    assert any("checkpoint-6" in message for message in run.recorder.messages)
    assert outcome.error is None and same_weights(outcome, whole)


def test_r19_a_cursor_off_by_one_is_refused(job, tmp_path):
    flags = {"save_strategy": "steps", "save_steps": 2, "output_dir": str(tmp_path / "run")}
    job(max_steps=6, **flags).train()
    state = tmp_path / "run" / "checkpoint-6"
    changed = 0
    for file in state.rglob("*.json"):
        content = json.loads(file.read_text())
        if isinstance(content, dict) and content.get("step") == 6:
            file.write_text(json.dumps(content | {"step": 5}))
            changed += 1
    assert changed, "the checkpoint says its step somewhere"
    with pytest.raises(UserError, match=r"damaged|differs|changed|not whole|digest|does not match|checkpoint-6"):
        job(resume_from_checkpoint=str(state), resume_anyway=True, **flags).train()


@pytest.mark.parametrize("name", ["model.layers.1.mlp.up_proj", "model.layers.3.self_attn.o_proj", "lm_head"])
def test_r20_a_flipped_exponent_bit_is_found_by_checksum_and_mended(job, single_model, name):
    """float32, so the flipped number is near 1e37: infinite losses, or a dead network with the loss at ln V.

    A gradient norm of exactly 0 is an alarm of its own. The tensor is read again, exactly.
    """
    flags = {"fp16": None, "compute_dtype": "float32", "lora_dropout": 0.1}
    clean, run = job(single_model, **flags).train(), job(single_model, **flags)
    module = run.module(name)
    weight = module.get_base_layer().weight if hasattr(module, "get_base_layer") else module.weight
    done: list[int] = []

    def flip(step):
        if step == 3 and not done:
            done.append(step)
            flip_bit(weight, 30)

    run.recorder.after_step.append(flip)
    outcome = run.train()
    outcome.says("TRANSIENT", module=name)
    assert outcome.diagnosis["step"] in (3, 4)
    assert f"{name}.weight" in outcome.diagnosis["evidence"]
    outcome.went_on(steps=8)
    assert same_weights(outcome, clean) and not outcome.changes


def test_r20_a_flip_that_nothing_shows_is_found_before_the_run_ends(job, single_model):
    """Loss and gradients stay plausible; only the checksum can see it, and the run must not end well without."""
    flags = {"fp16": None, "compute_dtype": "float32"}
    run = job(single_model, **flags)
    weight = run.module("model.layers.2.self_attn.q_proj").get_base_layer().weight
    run.recorder.after_step.append(lambda step: flip_bit(weight, 30) if step == 3 and not done else None)
    done: list[int] = []
    run.recorder.after_step.append(lambda step: done.append(step) if step == 3 else None)
    outcome = run.train()
    assert "model.layers.2.self_attn.q_proj" in {event["module"] for event in outcome.events}, outcome.story()
    assert not outcome.changes


def test_r23_a_head_that_lost_its_tie(job, planted):
    run = job(planted(tie_word_embeddings=True))
    base = run.model.get_base_model()
    base.lm_head.weight = torch.nn.Parameter(base.lm_head.weight.detach().clone(), requires_grad=False)
    outcome = run.train()
    (found,) = outcome.of("preflight")
    assert (found["class"], found["module"]) == ("WEIGHTS", "lm_head"), outcome.story()
    outcome.went_on(steps=8)
    assert base.lm_head.weight.data_ptr() == base.get_input_embeddings().weight.data_ptr(), "tied again"


def test_r23_rows_that_leak_into_each_other_run_alone(job):
    """Attention that ignores where rows begin: packed and single differ, so rows are not packed, and it is said."""
    from transformers import AttentionInterface

    from surefoot.model.attention import EAGER_NAME, packed_eager

    run, single = job(fp16=None, compute_dtype="float32"), job(fp16=None, compute_dtype="float32", memory=24)

    def leaky(module, query, key, value, mask=None, scaling=None, dropout=0.0, **kwargs):
        kwargs["packed_layout"] = lay_out((query.shape[2],))
        return packed_eager(module, query, key, value, mask, scaling, dropout, **kwargs)

    try:
        AttentionInterface.register(EAGER_NAME, leaky)
        outcome = run.train()
    finally:
        AttentionInterface.register(EAGER_NAME, packed_eager)
    expected = single.train()
    assert any("not packed" in message for message in run.recorder.messages)
    outcome.went_on(steps=8)
    assert not outcome.of("alarm") and close(outcome.final_loss, expected.final_loss, 1e-4)
