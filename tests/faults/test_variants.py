"""The same faults in other places, models and ways of training: what holds is the mechanism, not the recipe."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
import torch
from fault_runs import close, pattern_rows, row
from plants import (
    MARK,
    OnceHook,
    add_to_loss,
    break_fused_attention,
    huge_product,
    huge_scores,
    huge_stream,
    replace_norm,
    root_of_zero,
    scaled,
)

from surefoot.train.run import turn_on_recompute

FEW = pattern_rows(8)
SCORES = {"op": "bmm", "phase": "forward", "place": "attention scores"}
PRODUCT = {"op": "mul", "phase": "forward", "place": "MLP product"}
ATTENTION_CURES = {"attention_fused", "island"}


def modules_of(outcome):
    return {change["module"] for change in outcome.changes}


def heals(outcome, reference, steps, module, kinds=ATTENTION_CURES, share=0.01):
    """One diagnosis, one verified action at this module, no step lost, and float32's loss at the end."""
    outcome.went_on(steps=steps)
    assert outcome.action["verified"] is True, outcome.story()
    assert modules_of(outcome) == {module} and {c["kind"] for c in outcome.changes} <= kinds, outcome.changes
    assert close(outcome.final_loss, reference.final_loss, share), (outcome.losses, reference.losses)


@pytest.mark.parametrize("layer", [0, 3])
def test_scores_in_another_layer(job, planted, in_float32, layer):
    model = planted(huge_scores(layer))
    outcome, reference = job(model, FEW).train(), in_float32(model, FEW)
    outcome.says("RANGE", module=f"model.layers.{layer}.self_attn", **SCORES)
    heals(outcome, reference, 4, f"model.layers.{layer}.self_attn")


@pytest.mark.parametrize("layer", [0, 3])
def test_product_in_another_layer(job, planted, in_float32, layer):
    model = planted(huge_product(layer, shrink=1e-3))
    outcome, reference = job(model, FEW).train(), in_float32(model, FEW)
    outcome.says("RANGE", module=f"model.layers.{layer}.mlp", **PRODUCT)
    heals(outcome, reference, 4, f"model.layers.{layer}.mlp", {"island"})


def test_stream_in_other_layers(job, planted, in_float32):
    model = planted(huge_stream(1, 3), "llama", mlp_bias=True, attention_bias=True)
    outcome, reference = job(model, FEW).train(), in_float32(model, FEW)
    outcome.says("RANGE", module="model.layers.3", op="add", phase="forward", place="residual stream")
    outcome.went_on(steps=4)
    assert {change["kind"] for change in outcome.changes} == {"region"}, outcome.changes
    assert close(outcome.final_loss, reference.final_loss)


def test_two_layers_at_once_take_one_action(job, planted, in_float32):
    model = planted(huge_scores(1, 3))
    outcome, reference = job(model, FEW).train(), in_float32(model, FEW)
    outcome.says("RANGE", module="model.layers.1.self_attn", **SCORES)
    outcome.went_on(steps=4)
    assert modules_of(outcome) == {"model.layers.1.self_attn", "model.layers.3.self_attn"}, outcome.changes
    for layer in (1, 3):
        assert f"model.layers.{layer}.self_attn" in outcome.action["action"]
    assert close(outcome.final_loss, reference.final_loss)


def test_scores_and_product_at_once_take_one_action(job, planted, in_float32):
    def both(weights):
        huge_scores(0)(weights)
        huge_product(2, shrink=1e-3)(weights)

    model = planted(both)
    outcome, reference = job(model, FEW).train(), in_float32(model, FEW)
    outcome.says("RANGE", module="model.layers.0.self_attn", **SCORES)
    outcome.went_on(steps=4)
    assert modules_of(outcome) == {"model.layers.0.self_attn", "model.layers.2.mlp"}, outcome.changes
    assert close(outcome.final_loss, reference.final_loss)


TRAINING = {
    "dropout adapters": {"lora_dropout": 0.1},
    "DoRA": {"use_dora": True},
    "full": {"finetuning_type": "full", "lora_rank": None, "lora_target": None, "learning_rate": 1e-4},
    "packed": {"per_device_train_batch_size": 4, "num_train_epochs": 2.0},
    "accumulated": {"gradient_accumulation_steps": 2, "num_train_epochs": 2.0, "memory": 24},
    "some targets": {"lora_target": "q_proj,v_proj"},
    "joined rows": {"packing_mode": "joined"},
}


@pytest.mark.parametrize("how", TRAINING)
def test_scores_in_other_ways_of_training(job, planted, in_float32, how):
    model = planted(huge_scores(2))
    rows = pattern_rows(8, unequal=how in ("packed", "accumulated"))
    # With dropout the two runs draw the same masks; their losses are compared all the same.
    outcome, reference = job(model, rows, **TRAINING[how]).train(), in_float32(model, rows, **TRAINING[how])
    outcome.says("RANGE", module="model.layers.2.self_attn", **SCORES)
    heals(outcome, reference, 4, "model.layers.2.self_attn")


@pytest.mark.parametrize("how", ["dropout adapters", "DoRA", "full"])
def test_product_in_other_ways_of_training(job, planted, in_float32, how):
    model = planted(huge_product(1, shrink=1e-3))
    outcome, reference = job(model, FEW, **TRAINING[how]).train(), in_float32(model, FEW, **TRAINING[how])
    outcome.says("RANGE", module="model.layers.1.mlp", **PRODUCT)
    heals(outcome, reference, 4, "model.layers.1.mlp", {"island"})


@pytest.mark.parametrize("fault", ["scores", "product", "kernel"])
def test_recomputed_layers(job, planted, in_float32, monkeypatch, fault):
    """The forward runs again inside the backward; the phase must still be told right."""
    if fault == "kernel":
        rows = pattern_rows(4, length=100)
        run = job(rows=rows, flash_attn="sdpa")
        turn_on_recompute(run.model)
        break_fused_attention(monkeypatch, [run.module("model.layers.1.self_attn")])
        assert not run.rerun().finite
        outcome = run.train()
        outcome.says("KERNEL", module="model.layers.1.self_attn", op="BugBackward", phase="backward")
        outcome.went_on(steps=2)
        assert [c["kind"] for c in outcome.changes] == ["attention_eager"]
        return
    module, plant, facts = {
        "scores": ("model.layers.2.self_attn", huge_scores(2), SCORES),
        "product": ("model.layers.2.mlp", huge_product(2, shrink=1e-3), PRODUCT),
    }[fault]
    model = planted(plant)
    run, reference = job(model, FEW), in_float32(model, FEW)
    turn_on_recompute(run.model)
    outcome = run.train()
    outcome.says("RANGE", module=module, **facts)
    heals(outcome, reference, 4, module, {"attention_fused", "island"})


MODELS = {
    "tied head": ("qwen2", huge_scores(2), {"tie_word_embeddings": True}, "model.layers.2.self_attn", SCORES),
    "QK-norm": (
        "qwen3",
        lambda w: [w[f"model.layers.1.self_attn.{n}_norm.weight"].fill_(100.0) for n in "qk"],
        {"head_dim": 16},
        "model.layers.1.self_attn",
        SCORES,
    ),
    "Gemma 2 with a soft cap": (
        "gemma2",
        huge_product(1, shrink=1e-3),
        {"head_dim": 16, "query_pre_attn_scalar": 16},
        "model.layers.1.mlp",
        PRODUCT,
    ),
    "Mixtral router": (
        "mixtral",
        scaled("model.layers.1.mlp.gate.weight", 1e5),
        {"num_local_experts": 4, "num_experts_per_tok": 2},
        "model.layers.1.mlp.gate",
        {"phase": "forward", "place": "router"},
    ),
    "Qwen 3 MoE router": (
        "qwen3_moe",
        scaled("model.layers.1.mlp.gate.weight", 1e5),
        {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 64, "head_dim": 16},
        "model.layers.1.mlp.gate",
        {"phase": "forward", "place": "router"},
    ),
}


@pytest.mark.parametrize("name", MODELS)
def test_other_models(job, planted, in_float32, name):
    kind, plant, shape, module, facts = MODELS[name]
    model = planted(plant, kind, **shape)
    run, reference = job(model, FEW), in_float32(model, FEW)
    assert not run.rerun().finite and reference.error is None
    outcome = run.train()
    outcome.says("RANGE", module=module, **facts)
    outcome.went_on(steps=4)
    assert outcome.action["verified"] is True
    assert close(outcome.final_loss, reference.final_loss, 0.02), (outcome.losses, reference.losses)


@pytest.mark.parametrize("name", ["tied head", "QK-norm", "Gemma 2 with a soft cap", "Mixtral router"])
def test_other_models_in_health(job, planted, name):
    kind, _, shape, _, _ = MODELS[name]
    outcome = job(planted(None, kind, **shape), FEW).train()
    outcome.went_on(steps=4)
    assert not outcome.of("alarm") and not outcome.changes, outcome.story()


def test_an_infinite_slope_is_blamed_on_the_right_pass(job, monkeypatch):
    """Four passes a step; only the marked row's is bad, and it alone is left out."""
    add_to_loss(monkeypatch, root_of_zero, marked_only=True)
    rows = pattern_rows(16)
    rows[6] = row(6, [*rows[6].input_ids[:10], MARK, *rows[6].input_ids[11:]])
    outcome = job(
        rows=rows, gradient_accumulation_steps=2, memory=24, disable_shuffling=True, fp16=None, bf16=True
    ).train()  # fmt: skip
    outcome.says("MATH", module=None, phase="backward", place="loss", step=2, samples=["rows:6"])
    assert outcome.error is None and outcome.all_saved_finite and not outcome.changes, outcome.story()


def test_a_passing_fault_in_full_tuning_leaves_no_trace(job):
    flags = {"finetuning_type": "full", "lora_rank": None, "lora_target": None, "learning_rate": 1e-3}
    clean, run = job(rows=FEW, **flags).train(), job(rows=FEW, **flags)
    hook = OnceHook(run.module("model.layers.1.self_attn.o_proj"), float("inf"))
    run.recorder.after_step.append(lambda step: hook.arm() if step == 2 and not hook.fired else None)
    outcome = run.train()
    outcome.says("TRANSIENT", step=3)
    outcome.went_on(steps=4)
    assert all(torch.equal(outcome.weights[name], tensor) for name, tensor in clean.weights.items())


# --- early and late ---------------------------------------------------------------------------------------------

RARE = 40  # a token of one row only
LENGTH = 12


def rare_rows(count, place):
    rows = pattern_rows(count, length=LENGTH)
    rows[place] = row(place, [*rows[place].input_ids[:5], RARE, *rows[place].input_ids[6:]])
    return rows


def rare_overflow(weights):
    """Only the rare token's channel reaches queries and keys strongly enough to leave float16."""
    weights["model.embed_tokens.weight"][:, 5] = 0.0
    weights["model.embed_tokens.weight"][RARE, 5] = 30.0
    for name in ("q_proj", "k_proj"):
        weights[f"model.layers.0.self_attn.{name}.weight"][:, 5] = 30.0


@pytest.mark.parametrize("at", [4, 62])
def test_a_fault_that_comes_early_restarts_and_a_late_one_goes_on(job, planted, at):
    model, steps = planted(rare_overflow), max(8, at + 2)
    flags = {"disable_shuffling": True, "lora_target": "q_proj,v_proj"}
    rows = rare_rows(2 * steps, 2 * at - 1)
    run = job(model, rows, **flags)
    assert run.rerun(1).finite and not run.rerun(at).finite
    outcome = run.train()
    outcome.says("RANGE", module="model.layers.0.self_attn", step=at, **SCORES)
    outcome.went_on(steps=steps)
    told = [event.step for event in run.recorder.steps if not event.nonfinite]
    assert told.count(1) == (2 if at < 50 else 1), told
    if at > 50:
        assert told == sorted(told), "a late fault resumes at the same step"
        return
    plan = outcome.folder / "surefoot" / "precision_plan.json"
    again = [job(model, rows, precision_plan=str(plan), **flags).train() for _ in range(2)]
    for other in again:
        assert not other.of("alarm"), other.story()
        assert all(torch.equal(outcome.weights[name], tensor) for name, tensor in other.weights.items())


def test_a_hand_written_norm_late_in_the_run(job, planted):
    """The epsilon of R5 bites at step 61, when the zero row is met first."""

    def zero_row(weights):
        weights["model.embed_tokens.weight"][RARE] = 0.0

    rows = rare_rows(128, 121)
    run = job(planted(zero_row), rows, disable_shuffling=True, lora_target="v_proj")
    replace_norm(run.module("model"), "layers.0.input_layernorm", eps=1e-8)
    outcome = run.train()
    outcome.says("RANGE", module="model.layers.0.input_layernorm", op="rsqrt", phase="forward", place="norm", step=61)
    outcome.went_on(steps=64)
    told = [event.step for event in run.recorder.steps if not event.nonfinite]
    assert told == list(range(1, 65)), "every step once"


def test_watch_names_the_fault_and_stops(job, planted):
    outcome = job(planted(huge_scores(2)), FEW, guard="watch").train()
    outcome.says("RANGE", module="model.layers.2.self_attn", **SCORES)
    assert outcome.error is not None and "model.layers.2.self_attn" in str(outcome.error)
    assert outcome.of("stopped") and not outcome.of("action") and not outcome.weights


def test_off_stops_before_the_update(job, planted):
    run = job(planted(huge_scores(2)), FEW, guard="off")
    before = {name: p.detach().clone() for name, p in run.model.named_parameters() if p.requires_grad}
    outcome = run.train()
    assert outcome.error is not None and not outcome.weights and not outcome.of("diagnosis")
    assert all(torch.equal(p, before[name]) for name, p in run.model.named_parameters() if name in before)


def test_plants_of_this_file_are_where_they_say():
    assert len({(index, tuple(sample.input_ids)) for index, sample in enumerate(FEW)}) == 8
    assert np.count_nonzero(rare_rows(16, 7)[7].input_ids == RARE) == 1
    assert all(RARE not in sample.input_ids for sample in itertools.islice(rare_rows(16, 7), 7))
