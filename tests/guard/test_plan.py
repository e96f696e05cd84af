"""The precision plan: read, written, applied and taken back."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest
import torch

from helpers import tiny_llama
from surefoot.errors import UserError
from surefoot.guard.plan import (
    Change,
    Plan,
    apply_change,
    apply_plan,
    find_module,
    hold_change,
    read_plan,
    undo_change,
    write_plan,
)
from surefoot.model.compiled import compile_layers, compiled_layers
from surefoot.model.forward import base_of
from surefoot.model.variants import in_float32
from variant_models import adapted, fingerprint, rows, same, step, tiny

F16, F32 = torch.float16, torch.float32
LAYER = "model.layers.1"
CHANGES = [
    Change("attention_fused", f"{LAYER}.self_attn"),
    Change("attention_fused"),
    Change("attention_eager"),
    Change("scores", f"{LAYER}.self_attn"),
    Change("island", f"{LAYER}.self_attn"),
    Change("island", f"{LAYER}.mlp", keep_output=True),
    Change("island", f"{LAYER}.mlp.down_proj"),
    Change("island", f"{LAYER}.mlp", dtype="bfloat16"),
    Change("island", LAYER),
    Change("island", "lm_head"),
    Change("island", "model.norm"),
    Change("region", LAYER),
    Change("loss_reference"),
    Change("logits_float32"),
    Change("plain_lora"),
    Change("plain_lora", f"{LAYER}.self_attn"),
    Change("float32"),
]


@pytest.fixture(scope="module")
def qwen():
    return adapted(tiny("qwen2", F16), "lora", autocast=F16)


@pytest.mark.parametrize("change", CHANGES, ids=str)
def test_apply_and_undo(qwen, change):
    model, forward = qwen
    plain, grads = step(model, forward, 256.0)
    before = fingerprint(model, forward) if "_surefoot_undo" in vars(forward) else None
    apply_change(model, forward, change)
    loss, others = step(model, forward, 256.0)
    assert abs(loss - plain) <= 3e-2 * plain
    same(others, grads, 0.3)
    with pytest.raises(ValueError, match="already in force"):
        apply_change(model, forward, change)
    hold_change(model, change)
    held, _ = step(model, forward, 256.0)
    assert torch.equal(held, loss), "holding weights changes nothing"
    undo_change(model, forward, change)
    again, agains = step(model, forward, 256.0)
    assert torch.equal(again, plain) and all(torch.equal(agains[n], g) for n, g in grads.items())
    assert before is None or fingerprint(model, forward) == before
    with pytest.raises(ValueError, match="not in force"):
        undo_change(model, forward, change)


@pytest.mark.parametrize("change", [Change("float32"), Change("island", "lm_head"), Change("logits_float32")], ids=str)
@pytest.mark.parametrize("chunked", [True, False])
def test_the_head_is_made_in_float32_whoever_makes_the_logits(change, chunked):
    model, forward = adapted(tiny("tied", F16), "lora", autocast=F16)
    forward.chunked = chunked
    with torch.no_grad():
        base_of(model).model.norm.weight.mul_(4096.0)  # logits past 65504
        base_of(model).model.embed_tokens.weight.mul_(16.0)
    with in_float32(model, forward):
        wanted, _ = step(model, forward)
    before = step(model, forward)[0]
    assert not before.isfinite()
    apply_change(model, forward, change)
    hold_change(model, change)
    assert model.get_input_embeddings().weight.dtype == F16, "a tied head must not widen the embeddings"
    assert abs(step(model, forward)[0] - wanted) <= 2e-2 * wanted
    undo_change(model, forward, change)
    assert not step(model, forward)[0].isfinite()


def test_float32_is_the_float32_replay(qwen):
    model, forward = qwen
    with in_float32(model, forward):
        wanted, grads = step(model, forward)
    apply_plan(model, forward, [Change("float32")])
    loss, others = step(model, forward)
    undo_change(model, forward, Change("float32"))
    assert torch.equal(loss, wanted) and all(torch.equal(others[n], g) for n, g in grads.items())


def test_several_changes_lie_over_each_other(qwen):
    model, forward = qwen
    plain = step(model, forward, 256.0)[0]
    changes = [
        Change("region", "model.layers.2"), Change("region", LAYER), Change("island", f"{LAYER}.mlp"),
        Change("scores", f"{LAYER}.self_attn"), Change("island", f"{LAYER}.self_attn"), Change("loss_reference"),
        Change("logits_float32"), Change("float32"),
    ]  # fmt: skip
    losses = []
    for change in changes:
        losses.append(step(model, forward, 256.0)[0])
        apply_change(model, forward, change)
    step(model, forward, 256.0)
    for change, loss in zip(reversed(changes), reversed(losses), strict=True):
        undo_change(model, forward, change)
        assert torch.equal(step(model, forward, 256.0)[0], loss), change
    assert torch.equal(losses[0], plain)


def test_a_plan_is_applied_whole_or_not_at_all(qwen):
    model, forward = qwen
    plain = step(model, forward, 256.0)[0]
    for bad in (
        Change("island", "model.layers.9.mlp"),
        Change("scores", f"{LAYER}.mlp"),
        Change("region", "model.norm"),
    ):
        with pytest.raises(ValueError):
            apply_plan(model, forward, [Change("region", LAYER), bad])
        assert torch.equal(step(model, forward, 256.0)[0], plain)


def test_a_plan_makes_a_run_repeat_bitwise():
    results = []
    for _ in range(2):
        model, forward = adapted(tiny("qwen3", F16), "dropout", autocast=F16)
        apply_plan(model, forward, [Change("scores", f"{LAYER}.self_attn"), Change("island", "model.layers.0.mlp")])
        results.append(step(model, forward, 256.0))
    assert torch.equal(results[0][0], results[1][0])
    assert all(torch.equal(results[1][1][n], g) for n, g in results[0][1].items())


def test_router_weights_are_not_rounded_again():
    model, forward = adapted(tiny("mixtral", F16), "lora", autocast=F16)
    gate = find_module(model, f"{LAYER}.mlp.gate")
    seen = []
    gate.register_forward_hook(lambda m, i, o: seen.append((i[0].dtype, o[0].dtype, o[1].dtype)))
    apply_change(model, forward, Change("island", f"{LAYER}.mlp.gate"))
    step(model, forward)
    assert seen == [(F16, F32, F32)]


@pytest.mark.parametrize(("own", "change"), [("eager", "attention_fused"), ("sdpa", "attention_eager")])
def test_a_model_by_its_own_attention_is_switched_whole(own, change):
    model, forward = adapted(tiny("qwen2"), "lora")
    base, forward.packs = base_of(model), False
    base.set_attn_implementation(own)
    batch, trained = rows(lengths=(17,))
    plain = forward(batch).loss
    apply_change(model, forward, Change(change))
    assert base.config._attn_implementation == {"eager": "sdpa", "sdpa": "eager"}[own]
    assert abs(forward(batch).loss - plain) <= 1e-5 * plain
    undo_change(model, forward, Change(change))
    assert torch.equal(forward(batch).loss, plain) and trained
    with pytest.raises(ValueError, match="not by the packed one"):
        apply_change(model, forward, Change(change, f"{LAYER}.self_attn"))


def test_compile_off(qwen):
    model, forward = qwen
    names = compile_layers(model)
    apply_change(model, forward, Change("compile_off", LAYER))
    assert compiled_layers(model) == [n for n in names if n != LAYER]
    undo_change(model, forward, Change("compile_off", LAYER))
    assert compiled_layers(model) == names
    apply_change(model, forward, Change("compile_off"))
    assert compiled_layers(model) == []
    undo_change(model, forward, Change("compile_off"))
    for layer in base_of(model).model.layers:
        layer._compiled_call_impl = None


def test_find_module_looks_through_wrappers():
    from peft import LoraConfig, get_peft_model

    base = tiny_llama()
    layers = base.model.layers
    model = get_peft_model(
        base, LoraConfig(task_type="CAUSAL_LM", target_modules=["q_proj"], modules_to_save=["lm_head", "mlp"])
    )
    assert find_module(model, "") is base
    assert find_module(model, "model.layers.1") is layers[1]
    assert find_module(model, "model.layers.0.self_attn.q_proj") is layers[0].self_attn.q_proj
    trained = layers[1].mlp.modules_to_save["default"].up_proj
    assert find_module(model, "model.layers.1.mlp.up_proj") is trained
    with pytest.raises(UserError, match=r"self_atn\n.*did you mean model.layers.1.self_attn") as e:
        find_module(model, "model.layers.1.self_atn")
    assert e.value.exit_code == 2


def test_round_trip(tmp_path):
    plan = Plan(tuple(dict.fromkeys(CHANGES)), ("rows:3", "zeilen:7 ü"))
    write_plan(tmp_path / "deep" / "plan.json", plan)
    assert read_plan(tmp_path / "deep" / "plan.json") == plan
    assert Plan.from_json(json.loads(json.dumps(plan.to_json()))) == plan
    assert Plan.from_json({"changes": []}) == Plan()


@pytest.mark.parametrize(
    ("content", "words"),
    [
        ("", "is not JSON"),
        ("[]", "no list"),
        ("{}", "no list"),
        ('{"changes": {}}', "must be a list"),
        ('{"changes": [1]}', "change 0 is no mapping"),
        ('{"changes": [{"kind": "iland", "module": "x"}]}', "did you mean 'island'"),
        ('{"changes": [{"kind": "float32"}, {"kind": "island"}]}', r"change 1 \(island\) must name"),
        ('{"changes": [{"kind": "island", "module": 3}]}', "must name"),
        ('{"changes": [{"kind": ["island"], "module": "x"}]}', "has kind"),
        ('{"changes": [{"kind": "island", "module": "x", "dtype": "float16"}]}', "has dtype 'float16'"),
        ('{"changes": [{"kind": "island", "module": "x", "dtype": []}]}', "has dtype"),
        ('{"changes": [{"kind": "island", "module": "x", "keep_output": 1}]}', "true or false"),
        ('{"changes": [{"kind": "float32", "why": 1}]}', "unknown entry 'why'"),
        ('{"changes": [], "rows": []}', "unknown entry 'rows'"),
        ('{"changes": [], "skipped_rows": [1]}', "list of row ids"),
        ('{"changes": [], "version": 2}', "version 2"),
    ],
)
def test_a_bad_plan_is_refused(tmp_path, content, words):
    path = tmp_path / "plan.json"
    path.write_text(content)
    with pytest.raises(UserError, match=words) as error:
        read_plan(path)
    assert error.value.problems[0].key == "precision_plan" and str(path) in str(error.value)


def test_no_file(tmp_path):
    with pytest.raises(UserError, match="cannot be read"):
        read_plan(tmp_path / "none.json")


def test_a_plan_is_read_without_torch(tmp_path):
    write_plan(tmp_path / "plan.json", Plan((Change("island", "a.b"),)))
    code = (
        "import sys; sys.modules['torch'] = None\n"
        "from surefoot.guard.plan import read_plan\n"
        f"print(read_plan({str(tmp_path / 'plan.json')!r}).changes[0])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.stdout.strip() == "a.b in float32", done.stderr


def test_changes_speak_to_people():
    assert str(Change("island", "model.layers.2.self_attn")) == "model.layers.2.self_attn in float32"
    assert str(Change("region", "model.layers.3")) == (
        "residual stream in float32 from model.layers.3 to the final norm"
    )
    assert str(Change("attention_fused")) == "fused attention in the whole model"
    assert len({str(change) for change in CHANGES}) == len(CHANGES)
