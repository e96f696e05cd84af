"""Islands, regions, scores and kernels of single modules: where they compute in float32, and what they leave alone."""

from __future__ import annotations

import copy

import pytest
import torch

from surefoot.model.compiled import compile_layers
from surefoot.model.forward import base_of
from surefoot.model.islands import (
    clear_island,
    clear_region,
    clear_scores,
    hold_island_weights,
    set_attention_kernel,
    set_island,
    set_region,
    set_scores,
)
from surefoot.model.structure import rotary_of
from surefoot.model.variants import in_float32
from variant_models import adapted, fingerprint, rows, same, step, tiny

F16, BF16, F32 = torch.float16, torch.bfloat16, torch.float32
SCALE = 256.0
# Roundings of one step in float16 (2^-11), some tens in a row; the loss is a mean over tokens. A float16 step's
# gradients of single tensors are themselves up to 14 % off float32 in these models, Gemma 2's most.
LOSS_BOUND, GRAD_BOUND = 5e-3, 0.1


def dtypes_seen(model, forward, *names):
    """The dtypes of the first input and first output of each named module in one step."""
    seen, handles = {}, []
    for name, module in base_of(model).named_modules():
        if name in names:

            def see(m, args, kwargs, out, name=name):
                first = args[0] if args else next(iter(kwargs.values()))
                seen[name] = (first.dtype, (out[0] if isinstance(out, tuple) else out).dtype)

            handles.append(module.register_forward_hook(see, with_kwargs=True))
    step(model, forward, SCALE)
    for handle in handles:
        handle.remove()
    return seen


def layer(model, index):
    return base_of(model).get_decoder().layers[index]


@pytest.mark.parametrize("family", ["llama", "qwen2", "qwen3", "gemma2", "mixtral", "neox"])
@pytest.mark.parametrize("part", ["attention", "mlp", "layer", "norm"])
def test_island_computes_in_float32_and_changes_healthy_results_to_rounding(family, part):
    model, forward = adapted(tiny(family, F16), "lora", autocast=F16)
    before = fingerprint(model, forward)
    loss, grads = step(model, forward, SCALE)
    attention = "attention" if family == "neox" else "self_attn"
    name = {"attention": attention, "mlp": "mlp", "layer": "", "norm": "input_layernorm"}[part]
    target = layer(model, 1).get_submodule(name)
    set_island(target, F32, rotary=rotary_of(model))
    prefix = next(n for n, m in base_of(model).named_modules() if m is target)
    inside = [f"{prefix}.{n}" for n, m in target.named_children() if hasattr(m, "base_layer")]
    outside = next(n for n, m in base_of(model).named_modules() if m is layer(model, 0)) + f".{attention}"
    seen = dtypes_seen(model, forward, prefix, outside, *inside)
    assert seen[prefix] == (F16, F16)
    assert seen[outside] == (F16, F16)
    assert all(seen[n] == (F32, F32) for n in inside)
    assert bool(inside) == (part == "attention" or (part == "mlp" and family != "mixtral"))
    other, others = step(model, forward, SCALE)
    assert abs(other - loss) <= LOSS_BOUND * loss
    same(others, grads, GRAD_BOUND)
    clear_island(target)
    assert fingerprint(model, forward) == before
    again, agains = step(model, forward, SCALE)
    assert torch.equal(again, loss) and all(torch.equal(agains[n], g) for n, g in grads.items())


@pytest.mark.parametrize("how", ["lora", "dropout", "dora", "full"])
@pytest.mark.parametrize("recompute", [False, True])
def test_all_layers_as_islands_equal_float32(how, recompute):
    model, forward = adapted(tiny("qwen2", F16), how, autocast=F16)
    if recompute:
        base_of(model).activation_checkpointing_enable({"use_reentrant": False})
    with in_float32(model, forward):
        wanted, wanted_grads = step(model, forward)
    base = base_of(model)
    for part in [base.model.embed_tokens, *base.model.layers, base.model.norm]:
        set_island(part, F32, keep_output=True)
    forward.autocast = None
    loss, grads = step(model, forward)
    assert abs(loss - wanted) <= 1e-5 * wanted
    same(grads, wanted_grads, 1e-5)


def test_islands_nest():
    model, forward = adapted(tiny("llama", F16), "lora", autocast=F16)
    set_island(layer(model, 1), F32)
    wanted, _ = step(model, forward, SCALE)
    set_island(layer(model, 1).self_attn, F32, rotary=rotary_of(model))
    set_island(layer(model, 1).self_attn.q_proj, F32)
    assert abs(step(model, forward, SCALE)[0] - wanted) <= 1e-3 * wanted
    set_island(layer(model, 1).mlp, BF16)
    seen = dtypes_seen(model, forward, "model.layers.1.mlp.down_proj", "model.layers.1.mlp", "model.layers.1")
    assert seen == {
        "model.layers.1.mlp.down_proj": (BF16, BF16), "model.layers.1.mlp": (F32, F32), "model.layers.1": (F16, F16)
    }  # fmt: skip


def test_the_last_owner_counts():
    model, forward = adapted(tiny("llama", F16), "lora", autocast=F16)
    mlp, name = layer(model, 0).mlp, "model.layers.0.mlp.down_proj"
    set_island(mlp, BF16, owner="first")
    set_island(mlp, F32, owner="second")
    assert dtypes_seen(model, forward, name)[name][0] == F32
    clear_island(mlp, owner="second")
    assert dtypes_seen(model, forward, name)[name][0] == BF16
    clear_island(mlp, owner="first")
    assert "forward" not in vars(mlp)


def test_bf16_island_has_the_range():
    model, forward = adapted(tiny("llama", F16), "lora", autocast=F16)
    mlp = layer(model, 1).mlp
    with torch.no_grad():
        mlp.gate_proj.base_layer.weight.mul_(400.0)
        mlp.up_proj.base_layer.weight.mul_(400.0)
        mlp.down_proj.base_layer.weight.mul_(1e-3)
        mlp.down_proj.lora_B["default"].weight.zero_()
    assert not step(model, forward)[0].isfinite()
    with in_float32(model, forward):
        wanted, _ = step(model, forward)
    set_island(mlp, BF16)
    assert abs(step(model, forward)[0] - wanted) <= 0.05 * wanted


@pytest.mark.parametrize("how", ["island", "scores", "fused"])
def test_large_biases_in_attention_stay_exact(how):
    model, forward = adapted(tiny("qwen2", F16), "lora", autocast=F16)
    attention = layer(model, 1).self_attn
    with torch.no_grad():
        for part in (attention.q_proj, attention.k_proj):
            part.base_layer.bias.copy_(torch.randn(part.base_layer.bias.shape).sign() * 130)
    assert not step(model, forward, SCALE)[0].isfinite(), "130² · 8 must be past 65504"
    with in_float32(model, forward):
        wanted, wanted_grads = step(model, forward)
    before = fingerprint(model, forward)
    if how == "island":
        set_island(attention, F32, rotary=rotary_of(model))
    elif how == "scores":
        set_scores(attention, F32, rotary=rotary_of(model))
    else:
        set_attention_kernel(attention, "fused")
    loss, grads = step(model, forward, SCALE)
    error = abs(loss - wanted) / wanted
    if how == "fused":  # queries are rounded to float16 first: this is why its results must be verified
        assert error.isfinite()
        return
    assert error <= LOSS_BOUND
    a, b = (torch.cat([g[n].flatten() for n in wanted_grads]) for g in (grads, wanted_grads))
    assert torch.cosine_similarity(a, b, 0) > 0.999
    seen = dtypes_seen(model, forward, *(f"model.layers.1.self_attn.{n}_proj" for n in "qkvo"))
    wide = (F16, F32) if how == "scores" else (F32, F32)
    narrow = (F16, F16) if how == "scores" else (F32, F32)
    assert [seen[f"model.layers.1.self_attn.{n}_proj"] for n in "qkvo"] == [wide, wide, narrow, narrow]
    if how == "island":
        clear_island(attention)
    else:
        clear_scores(attention)
    assert fingerprint(model, forward) == before


@pytest.mark.parametrize("family", ["qwen3", "gemma2", "gemma3", "mixtral"])
def test_scores_change_healthy_results_to_rounding(family):
    model, forward = adapted(tiny(family, F16), "dropout", autocast=F16)
    loss, grads = step(model, forward, SCALE)
    set_scores(layer(model, 0).self_attn, F32, rotary=rotary_of(model))
    other, others = step(model, forward, SCALE)
    assert other != loss and abs(other - loss) <= LOSS_BOUND * loss
    same(others, grads, GRAD_BOUND)


def test_positions_are_made_in_float32():
    model, forward = adapted(tiny("gemma3", BF16), "lora")
    attention = layer(model, 0).self_attn
    seen = []
    attention.register_forward_hook(lambda m, a, k, o: None, with_kwargs=True)
    inner = attention.forward
    vars(attention)["forward"] = lambda *a, **k: (seen.append(k["position_embeddings"]), inner(*a, **k))[1]
    step(model, forward)
    set_island(attention, F32, rotary=rotary_of(model))
    step(model, forward)
    rounded, exact = seen
    assert exact[0].dtype == F32 and not torch.equal(exact[0], rounded[0].float())
    assert all(torch.equal(e.to(BF16), r) for e, r in zip(exact, rounded, strict=True))


def test_scores_refuse_a_joint_projection():
    model, _ = adapted(tiny("neox"), "lora")
    with pytest.raises(ValueError, match="no projections of its own"):
        set_scores(layer(model, 0).attention, F32)
    assert "forward" not in vars(layer(model, 0).attention)


def test_an_island_may_not_hold_layers():
    model, _ = adapted(tiny("llama"), "lora")
    with pytest.raises(ValueError, match="holds decoder layers"):
        set_island(base_of(model).model, F32)


@pytest.mark.parametrize("autocast", [F16, None])
@pytest.mark.parametrize("family", ["llama", "gemma2", "mixtral", "neox"])
@pytest.mark.parametrize("recompute", [False, True])
def test_region(family, autocast, recompute):
    dtype = autocast or BF16
    model, forward = adapted(tiny(family, dtype), "lora", autocast=autocast)
    if recompute:
        base_of(model).activation_checkpointing_enable({"use_reentrant": False})
    before = fingerprint(model, forward)
    loss, grads = step(model, forward, SCALE)
    set_region(model, 1, F32)
    base = base_of(model)
    names = {id(m): n for n, m in base.named_modules()}
    attention = "attention" if family == "neox" else "self_attn"
    norm = base.get_decoder().final_layer_norm if family == "neox" else base.get_decoder().norm
    layers = [names[id(m)] for m in base.get_decoder().layers]
    blocks = [f"{n}.{part}" for n in layers[1:] for part in (attention, "mlp")]
    seen = dtypes_seen(model, forward, *layers, *blocks, names[id(norm)])
    assert [seen[n] for n in layers] == [(dtype, dtype), (dtype, F32), (F32, F32)]
    assert seen[names[id(norm)]] == (F32, dtype)
    inputs = {n: out for n, (_, out) in seen.items() if n in blocks}
    assert set(inputs.values()) == {dtype}, "attention and MLP compute as they did"
    factor = 1 if dtype == F16 else 8
    other, others = step(model, forward, SCALE)
    assert abs(other - loss) <= factor * LOSS_BOUND * loss
    same(others, grads, factor * GRAD_BOUND)
    clear_region(model)
    assert fingerprint(model, forward) == before
    assert torch.equal(step(model, forward, SCALE)[0], loss)


def test_region_cures_a_residual_overflow_that_an_island_does_not():
    model, forward = adapted(tiny("qwen2", F16, num_hidden_layers=4), "lora", autocast=F16)
    for index in (0, 1):
        down = layer(model, index).mlp.down_proj.base_layer
        down.bias = torch.nn.Parameter(torch.zeros(32, dtype=F16), requires_grad=False)
        down.bias.data[3] = 40000.0
    assert not step(model, forward)[0].isfinite()
    set_island(layer(model, 1).mlp, F32)
    assert not step(model, forward)[0].isfinite()
    clear_island(layer(model, 1).mlp)
    with in_float32(model, forward):
        wanted, _ = step(model, forward)
    set_region(model, 1, F32)
    loss, grads = step(model, forward)
    assert abs(loss - wanted) <= LOSS_BOUND * wanted
    assert all(g.isfinite().all() for g in grads.values())


def test_island_in_a_region_takes_and_gives_the_wide_stream():
    model, forward = adapted(tiny("llama", F16), "lora", autocast=F16)
    set_region(model, 1, F32)
    set_island(layer(model, 2).mlp, F32)
    name = "model.layers.2.mlp"
    assert dtypes_seen(model, forward, name)[name] == (F32, F32)


@pytest.mark.parametrize("how", ["lora", "full"])
def test_held_weights_give_the_same_and_come_back(how):
    model, forward = adapted(tiny("qwen2", F16), how, autocast=F16)
    before = fingerprint(model, forward)
    attention = layer(model, 1).self_attn
    trained = [p for p in attention.parameters() if p.requires_grad]
    set_island(attention, F32)
    loss, grads = step(model, forward, SCALE)
    hold_island_weights(attention, F32)
    frozen = [p for p in attention.parameters() if not p.requires_grad]
    assert all(p.dtype == F32 for p in frozen) and (frozen or how == "full")
    assert [id(p) for p in trained] == [id(p) for p in attention.parameters() if p.requires_grad]
    other, others = step(model, forward, SCALE)
    assert torch.equal(other, loss) and all(torch.equal(others[n], g) for n, g in grads.items())
    clear_island(attention)
    assert fingerprint(model, forward) == before


def test_weights_held_need_an_island_in_float32():
    model, _ = adapted(tiny("llama", F16), "lora")
    with pytest.raises(ValueError, match="float32 only"):
        hold_island_weights(layer(model, 0).mlp, F32)
    set_island(layer(model, 0).mlp, BF16)
    with pytest.raises(ValueError, match="float32 only"):
        hold_island_weights(layer(model, 0).mlp, BF16)


def test_a_copy_of_the_model_has_islands_of_its_own():
    model, _ = adapted(tiny("llama", F16), "lora", autocast=F16)
    set_island(layer(model, 1).mlp, F32)
    other = copy.deepcopy(model)
    with torch.no_grad():
        layer(other, 1).mlp.down_proj.base_layer.weight.zero_()
    x = torch.randn(1, 3, 32, dtype=F16)
    assert layer(model, 1).mlp(x).abs().sum() > 0
    assert vars(layer(other, 1).mlp)["forward"].__self__ is layer(other, 1).mlp


@pytest.mark.parametrize(("mask_dtype", "dtype"), [(F16, F32), (F32, BF16)])
def test_a_mask_hides_in_the_island_too(mask_dtype, dtype):
    """A row of its own attention: the mask is a tensor, and a score past 65504 must not see through it."""
    model = tiny("qwen2", F16 if mask_dtype == F16 else F32)
    model.set_attn_implementation("eager")
    attention = model.model.layers[0].self_attn
    with torch.no_grad():
        for part in (attention.q_proj, attention.k_proj):
            part.bias.fill_(150.0)
    x = torch.randn(1, 6, 32, dtype=mask_dtype)
    mask = torch.full((6, 6), torch.finfo(mask_dtype).min, dtype=mask_dtype).triu(1)[None, None]
    cos_sin = (torch.ones(1, 6, 8, dtype=mask_dtype), torch.zeros(1, 6, 8, dtype=mask_dtype))
    set_island(attention, dtype)
    _, weights = attention(hidden_states=x, position_embeddings=cos_sin, attention_mask=mask)
    assert weights.isfinite().all()
    assert weights.triu(1).abs().max() == 0


@pytest.mark.parametrize("name", ["eager", "fused"])
@pytest.mark.parametrize("own", ["sdpa", "eager"])
def test_a_kernel_of_one_attention(name, own, monkeypatch):
    model, forward = adapted(tiny("qwen2", BF16, attn_implementation=own), "lora")
    loss, _ = step(model, forward)
    calls = []
    plain = torch.nn.functional.scaled_dot_product_attention
    monkeypatch.setattr(
        torch.nn.functional, "scaled_dot_product_attention", lambda *a, **k: (calls.append(1), plain(*a, **k))[1]
    )
    step(model, forward)
    normal = len(calls)  # 0: rows this short are written out on a CPU in 16 bits
    set_attention_kernel(layer(model, 1).self_attn, name)
    other, _ = step(model, forward)
    buckets = len(rows()[0].layout.buckets)
    assert len(calls) - normal == (buckets if name == "fused" else 0)
    assert abs(other - loss) <= 8 * LOSS_BOUND * loss
    set_attention_kernel(layer(model, 1).self_attn, None)
    assert torch.equal(step(model, forward)[0], loss)


def test_kernels_that_cannot_be():
    model, _ = adapted(tiny("gemma2"), "lora")
    with pytest.raises(ValueError, match="soft-caps"):
        set_attention_kernel(layer(model, 0).self_attn, "fused")
    with pytest.raises(ValueError, match="no attention kernel"):
        set_attention_kernel(layer(model, 0).self_attn, "flash")
    model.get_base_model().set_attn_implementation("eager")
    with pytest.raises(ValueError, match="by eager attention"):
        set_attention_kernel(layer(model, 0).self_attn, "eager")


def nearer(loss, this, other):
    return abs(loss - this) < abs(loss - other)


def test_an_island_in_a_compiled_layer():
    """Set after the layer was compiled, and cleared again: dynamo notices both."""
    model, forward = adapted(tiny("llama", F16, num_hidden_layers=1), "lora", autocast=F16)
    mlp = layer(model, 0).mlp
    plain = step(model, forward, SCALE)
    set_island(mlp, F32)
    wanted, grads = step(model, forward, SCALE)
    assert wanted != plain[0]
    clear_island(mlp)
    compile_layers(model, backend="eager")
    # Compiled, sums are taken in another order: a few roundings of float16, far less than an island changes.
    assert nearer(step(model, forward, SCALE)[0], plain[0], wanted)
    set_island(mlp, F32)
    loss, others = step(model, forward, SCALE)
    assert nearer(loss, wanted, plain[0])
    assert all((others[n] - g).norm() <= 2**-7 * g.norm() for n, g in grads.items())
    clear_island(mlp)
    assert nearer(step(model, forward, SCALE)[0], plain[0], wanted)
    torch._dynamo.reset()
