"""Weights, rows and trained parameters, looked at before anything is computed with them."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest
import torch
from preflight_scenes import rows, same_state, scene_of, state_of, tiny, with_lora

from surefoot.data.messages import Sample
from surefoot.guard.preflight import preflight
from surefoot.guard.preflight_leaves import check_rows, check_trainables, movable_share, scan_weights


def found(scene):
    return preflight(scene, tell=lambda message: None)


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_a_weight_that_is_no_number_is_named(value, dtype):
    model = with_lora(tiny(dtype=dtype))
    model.get_base_model().model.layers[1].self_attn.v_proj.base_layer.weight.data[3, 5] = value
    (finding,) = found(scene_of(model))
    assert (finding.diagnosis.fault, finding.diagnosis.module) == ("WEIGHTS", "model.layers.1.self_attn.v_proj")
    assert finding.diagnosis.details["leaf"] == "model.layers.1.self_attn.v_proj.weight"
    assert finding.serious and finding.cure is None and not finding.changes
    assert "1 of 512 values" in finding.diagnosis.evidence[0] and "[3, 5]" in finding.diagnosis.evidence[0]


def test_adapters_buffers_and_embeddings_are_scanned():
    model = with_lora(tiny())
    base = model.get_base_model()
    base.model.rotary_emb.inv_freq[1] = math.nan
    base.model.embed_tokens.weight.data[40, 2] = math.inf
    base.model.layers[0].mlp.up_proj.lora_A["default"].weight.data[0, 0] = math.nan
    finding = scan_weights(scene_of(model))
    assert set(finding.diagnosis.details["leaves"]) == {
        "model.embed_tokens.weight", "model.layers.0.mlp.up_proj.lora_A.weight", "model.rotary_emb.inv_freq",
    }  # fmt: skip
    assert finding.diagnosis.place == "embedding"


def test_a_mask_buffer_of_minus_infinity_is_legal():
    model = tiny()
    model.register_buffer("causal", torch.full((8, 8), -math.inf).triu(1))
    model.register_buffer("hidden", torch.full((3,), -math.inf))
    model.register_buffer("steps", torch.arange(4))
    model.register_buffer("small", torch.ones(4).to(torch.float8_e4m3fn))
    model.register_buffer("turns", torch.ones(4, dtype=torch.complex64))
    assert scan_weights(scene_of(model)) is None
    model.causal[0, 0] = math.nan
    assert scan_weights(scene_of(model)).diagnosis.details["leaf"] == "causal"
    model.causal[0, 0] = 0.0
    model.turns[2] = complex(0.0, math.inf)
    assert scan_weights(scene_of(model)).diagnosis.details["leaf"] == "turns"


@pytest.mark.parametrize("in_file", [True, False])
def test_the_evidence_says_whether_the_file_holds_it_too(tmp_path, in_file):
    from transformers import AutoModelForCausalLM

    model = tiny()
    if in_file:
        model.model.norm.weight.data[4] = math.nan
    model.save_pretrained(tmp_path)
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path)
    loaded.model.norm.weight.data[4] = math.nan
    evidence = scan_weights(scene_of(loaded)).diagnosis.evidence
    expected = "holds them there too" if in_file else "is finite there: it was damaged after it was read"
    assert f"model.safetensors and {expected}" in evidence[-1]


@pytest.mark.parametrize("bad", [97, 5000, -3])
def test_an_id_without_a_row_is_named_with_its_row(bad):
    samples = list(rows(4))
    ids = samples[2].input_ids.copy()
    ids[3] = bad
    samples[2] = replace(samples[2], input_ids=ids)
    (finding,) = found(scene_of(tiny(), tuple(samples)))
    assert (finding.diagnosis.fault, finding.diagnosis.samples) == ("DATA", ("rows:2",))
    assert finding.serious and f"token id {bad}, but the model has 97" in finding.diagnosis.evidence[0]


def test_the_row_is_told_apart_within_a_packed_item():
    one, two, three = rows(3)
    ids = np.concatenate([one.input_ids, two.input_ids, three.input_ids])
    labels = np.concatenate([one.labels, two.labels, three.labels])
    lengths = tuple(len(sample.input_ids) for sample in (one, two, three))
    packed = Sample(("a:0", "a:1", "a:2"), ids.copy(), labels, lengths)
    packed.input_ids[lengths[0]] = 97
    assert check_rows(scene_of(tiny(), (packed,))).diagnosis.samples == ("a:1",)
    packed.input_ids[lengths[0]] = 96
    packed.labels[-1] = 99
    finding = check_rows(scene_of(tiny(), (packed,)))
    assert finding.diagnosis.samples == ("a:2",) and "label 99" in finding.diagnosis.evidence[0]


def test_a_step_without_a_trained_token_names_its_rows():
    silent = tuple(replace(s, labels=np.full_like(s.labels, -100)) for s in rows(3))
    (finding,) = found(scene_of(tiny(), silent))
    assert (finding.diagnosis.fault, finding.diagnosis.place) == ("DATA", "loss")
    assert finding.diagnosis.samples == ("rows:0", "rows:1", "rows:2") and finding.serious


def test_float16_trainables_are_cured_in_place():
    model = with_lora(tiny(dtype=torch.float16))
    trained = [p for p in model.parameters() if p.requires_grad]
    for parameter in trained:
        parameter.data = parameter.data.half()
    scene = scene_of(model, autocast=torch.float16, loss_scale=2.0**16)
    optimizer = torch.optim.AdamW(trained, lr=1e-3)
    (finding,) = preflight(scene, tell=print, learning_rate=1e-3)
    assert (finding.diagnosis.fault, finding.diagnosis.place) == ("OPTIMIZER", "optimizer")
    assert "float16" in " ".join(finding.diagnosis.evidence) and finding.serious
    finding.cure()
    assert all(p.dtype == torch.float32 for p in trained)
    assert [id(p) for p in optimizer.param_groups[0]["params"]] == [
        id(p) for p in model.parameters() if p.requires_grad
    ], "the optimizer still knows them"
    assert preflight(scene, tell=print, learning_rate=1e-3) == []


@pytest.mark.parametrize("rate, fault", [(1e-5, "STAGNATION"), (1e-1, "OPTIMIZER"), (None, "STAGNATION")])
def test_bfloat16_masters_at_a_small_rate_stagnate(rate, fault):
    model = tiny(dtype=torch.bfloat16)
    scene = scene_of(model)
    finding = check_trainables(scene, rate)
    assert finding.diagnosis.fault == fault
    finding.cure()
    assert {p.dtype for p in model.parameters()} == {torch.float32}
    assert scene.forward.autocast == torch.bfloat16, "products stay what the person asked for"
    assert scene.rerun().finite
    assert check_trainables(scene, rate) is None


def test_bfloat16_adapters_without_autocast_are_cured_too():
    model = with_lora(tiny(dtype=torch.bfloat16))
    for parameter in model.parameters():
        if parameter.requires_grad:
            parameter.data = parameter.data.bfloat16()
    scene = scene_of(model)
    check_trainables(scene, 1e-4).cure()
    assert scene.forward.autocast is None and scene.rerun().finite
    assert {p.dtype for p in model.parameters() if p.requires_grad} == {torch.float32}


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("rate", [1e-5, 3e-4, 1e-3, 1e-2])
def test_the_movable_share_is_what_an_update_moves(dtype, rate):
    weights = (torch.randn(40_000, generator=torch.Generator().manual_seed(1)) * 0.05).to(dtype)
    up, down = ((weights.float() + sign * rate).to(dtype) != weights for sign in (1, -1))
    # Exactly half the distance rounds to even, and below a power of two numbers lie closer.
    assert movable_share([weights], rate) == pytest.approx(float((up | down).float().mean()), abs=0.02)
    assert movable_share([torch.zeros(10, dtype=dtype)], rate) == 1.0


def test_the_checks_leave_everything_as_it_was():
    model = with_lora(tiny(dtype=torch.bfloat16))
    scene = scene_of(model, autocast=torch.bfloat16)
    torch.manual_seed(99)
    model.get_base_model().model.layers[0].eval()  # a part that is not in training mode
    before = state_of(model)
    assert found(scene) == []
    assert same_state(before, state_of(model))
