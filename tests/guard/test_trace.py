"""Planted faults, each found at its module, operation, phase and place."""

from __future__ import annotations

import math
import re
from typing import Any

import numpy as np
import pytest
import torch
from guard_scenes import Wrapped, make_scene

from surefoot.guard.headroom import headroom
from surefoot.guard.trace import trace

HALF = torch.float16


def decoder(scene: Any) -> Any:
    return scene.forward.model.model


def base(linear: Any) -> Any:
    return linear.get_base_layer() if hasattr(linear, "get_base_layer") else linear


def plant_scores(scene: Any, layer: int = 2, size: float = 100.0) -> None:
    attention = decoder(scene).layers[layer].self_attn
    base(attention.q_proj).bias.data.fill_(size)
    base(attention.k_proj).bias.data.fill_(size)


def origin_of(scene: Any) -> Any:
    found = trace(scene)
    assert found.origin is not None
    return found.origin


class HalfNorm(torch.nn.Module):
    """An RMSNorm written in its input's own dtype."""

    def __init__(self, width: int, eps: float) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.ones(width), requires_grad=False)
        self.eps = eps

    def forward(self, x):
        x = x.half()
        return self.weight.half() * (x * torch.rsqrt((x * x).mean(-1, keepdim=True) + self.eps))


class Bug(torch.autograd.Function):
    """Right in the forward, NaN in the backward."""

    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, grad):
        return grad * math.nan


class Hidden(torch.autograd.Function):
    """A kernel that no dispatch mode sees: it writes through NumPy."""

    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, grad):
        made = torch.zeros_like(grad)
        made.numpy()[..., 0] = np.nan
        return made


class HiddenForward(torch.autograd.Function):
    """The same in the forward."""

    @staticmethod
    def forward(ctx, x):
        made = torch.empty_like(x)
        made.numpy()[...] = x.numpy()
        made.numpy()[..., 0] = np.inf
        return made

    @staticmethod
    def backward(ctx, grad):
        return grad


class Unfilled(torch.autograd.Function):
    """A kernel that leaves a part of its result unwritten."""

    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, grad):
        made = torch.empty_like(grad)
        made[:, 1:] = grad[:, 1:]
        return made


def insert(module: Any, function: Any) -> None:
    """Let a function see a module's input first."""
    module.register_forward_pre_hook(lambda m, args: (function(args[0]), *args[1:]))


@pytest.mark.parametrize(
    ("family", "dtype", "attention"),
    [
        ("llama", HALF, "sdpa"),
        ("qwen2", torch.float32, "sdpa"),
        ("qwen3", torch.bfloat16, "eager"),
        ("gemma2", HALF, "eager"),
        ("mixtral", torch.bfloat16, "sdpa"),
        ("qwen3_moe", HALF, "eager"),
    ],
)
def test_a_healthy_step_has_no_origin_and_gives_the_same_numbers(family, dtype, attention):
    scene = make_scene(family, dtype=dtype, attention=attention)
    found = trace(scene)
    assert found.origin is None
    assert found.rerun == scene.rerun()
    assert found.over == () and found.silent == ()
    assert not any(m._forward_hooks or m._forward_pre_hooks for m in scene.model.modules())


@pytest.mark.parametrize(
    ("lora", "rows", "recompute"), [("fused", 1, False), ("fused", 5, True), ("plain", 5, False), ("none", 1, True)]
)
def test_r1_scores_overflow_in_the_attention_of_one_layer(recompute, rows, lora):
    scene = make_scene("qwen2", rows=rows, lora=lora, recompute=recompute)
    plant_scores(scene)
    origin = origin_of(scene)
    assert (origin.module, origin.op, origin.phase) == ("model.layers.2.self_attn", "bmm", "forward")
    assert (origin.kind, origin.place, origin.node) == ("inf", "attention scores", None)
    assert len(origin.inputs) == 2
    for text in origin.inputs:
        low, high = (
            abs(float(number)) for number in re.fullmatch(r"float16 \[.*\] from (\S+) to (\S+)", text).groups()
        )
        assert 95 < max(low, high) < 145
    assert "+inf" in origin.output
    assert set(origin.rows) == {f"rows:{i}" for i in range(rows)}


def test_r1_in_other_layers_and_in_the_fused_kernels_reference():
    for layer in (0, 3):
        scene = make_scene("qwen2", attention="sdpa", stream=HALF)
        plant_scores(scene, layer)
        origin = origin_of(scene)
        assert (origin.module, origin.op) == (f"model.layers.{layer}.self_attn", "bmm")


def test_r1_by_norms_of_queries_and_keys():
    scene = make_scene("qwen3")
    attention = decoder(scene).layers[1].self_attn
    attention.q_norm.weight.data.fill_(200.0)
    attention.k_norm.weight.data.fill_(200.0)
    origin = origin_of(scene)
    assert (origin.module, origin.op, origin.place) == ("model.layers.1.self_attn", "bmm", "attention scores")


def test_only_the_row_that_is_bad_is_named():
    scene = make_scene("qwen2", rows=5, tokens_per_pass=60)
    odd = scene.samples[3]
    odd.input_ids[:] = 7
    embedding = decoder(scene).embed_tokens.weight
    attention = decoder(scene).layers[0].self_attn
    embedding.data[7] = 0.0
    embedding.data[7, 0] = 1.0
    for sample in scene.samples:
        if sample is not odd:
            sample.input_ids[sample.input_ids == 7] = 8
    for projection in (attention.q_proj, attention.k_proj):
        base(projection).weight.data[:, 0] = 40.0
    embedding.data[[i for i in range(97) if i != 7], 0] = 0.0
    origin = origin_of(scene)
    assert (origin.module, origin.op, origin.rows) == ("model.layers.0.self_attn", "bmm", ("rows:3",))
    assert origin.pass_index == [odd.row_ids[0] in rows for rows in scene.rerun().rows].index(True)


@pytest.mark.parametrize(("family", "recompute"), [("qwen2", False), ("llama", True), ("gemma2", False)])
def test_r2_product_in_an_mlp(family, recompute):
    scene = make_scene(family, recompute=recompute)
    mlp = decoder(scene).layers[1].mlp
    base(mlp.gate_proj).weight.data.mul_(600)
    base(mlp.up_proj).weight.data.mul_(9000)
    origin = origin_of(scene)
    assert (origin.module, origin.op, origin.phase) == ("model.layers.1.mlp", "mul", "forward")
    assert (origin.kind, origin.place) == ("inf", "MLP product")


@pytest.mark.parametrize("family", ["mixtral", "qwen3_moe"])
def test_r2_product_among_experts_and_scores_of_a_router(family):
    scene = make_scene(family, stream=HALF)
    experts = decoder(scene).layers[1].mlp.experts
    experts.gate_up_proj.data.mul_(5000)
    origin = origin_of(scene)
    assert (origin.module, origin.op, origin.place) == ("model.layers.1.mlp.experts", "mul", "MLP product")
    scene = make_scene(family)
    decoder(scene).layers[1].mlp.gate.weight.data.fill_(60000.0)
    decoder(scene).layers[1].post_attention_layernorm.weight.data.fill_(5.0)
    origin = origin_of(scene)
    assert (origin.module, origin.op, origin.place) == ("model.layers.1.mlp.gate", "mm", "router")


@pytest.mark.parametrize("recompute", [False, True])
def test_r3_residual_stream(recompute):
    scene = make_scene("llama", recompute=recompute, mlp_bias=True, stream=HALF)
    for layer in (0, 1):
        base(decoder(scene).layers[layer].mlp.down_proj).bias.data[3] = 40000.0
    origin = origin_of(scene)
    assert (origin.module, origin.op, origin.place) == ("model.layers.1", "add", "residual stream")
    assert (origin.kind, origin.phase) == ("inf", "forward")


def test_r4_an_overflow_that_dies_in_silence():
    scene = make_scene("llama", stream=HALF)
    decoder(scene).layers[1].input_layernorm = HalfNorm(32, 1e-6)
    base(decoder(scene).layers[0].mlp.down_proj).weight.data.mul_(3e5)
    found = trace(scene)
    assert found.rerun.finite
    origin = found.origin
    assert (origin.module, origin.op, origin.place) == ("model.layers.1.input_layernorm", "mul", "norm")
    assert (origin.kind, origin.phase) == ("inf", "forward")


def test_r5_an_epsilon_that_half_precision_loses():
    scene = make_scene("llama", stream=HALF)
    decoder(scene).layers[0].input_layernorm = HalfNorm(32, 1e-8)
    decoder(scene).embed_tokens.weight.data[scene.samples[1].input_ids[2]] = 0.0
    origin = origin_of(scene)
    assert (origin.module, origin.op, origin.place) == ("model.layers.0.input_layernorm", "rsqrt", "norm")
    assert origin.rows == ("rows:1",)


@pytest.mark.parametrize("chunked", [True, False])
def test_r6_a_loss_scale_out_of_range(chunked):
    scene = make_scene("llama", loss_scale=2.0**32, chunked=chunked)
    found = trace(scene)
    origin = found.origin
    assert found.rerun.loss_finite and not found.rerun.finite
    assert (origin.module, origin.op, origin.phase, origin.place) == (None, "_to_copy", "backward", "loss")
    assert origin.node is not None
    assert origin.inputs[0].startswith("float32") and "float16" in origin.output


def test_backward_gradients_that_meet_in_the_residual_stream():
    scene = make_scene("llama", stream=HALF, loss_scale=2.0**10)
    # Two branches whose gradients are in range, and their sum is not.
    layer = decoder(scene).layers[2]

    class Push(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return x.clone()

        @staticmethod
        def backward(ctx, grad):
            return torch.full_like(grad, 40000.0)

    Push.__module__ = "surefoot.test"  # transparent
    insert(layer.mlp, Push.apply)
    decoder(scene).layers[3].register_forward_pre_hook(lambda m, args: (Push.apply(args[0]), *args[1:]))
    layer.post_attention_layernorm.forward = lambda x: x
    origin = origin_of(scene)
    assert (origin.module, origin.op, origin.phase) == ("model.layers.2", "add", "backward")
    assert origin.place == "residual stream"


@pytest.mark.parametrize("dtype", [HALF, torch.float32])
def test_r7_a_root_of_zero_in_the_loss(dtype):
    scene = make_scene("llama", dtype=dtype)

    def change(loss, hidden):
        return loss + ((0.0 * hidden.float()) ** 2).sum().sqrt()

    origin = origin_of(Wrapped.around(scene, change))
    assert (origin.module, origin.op, origin.phase) == (None, "div", "backward")
    assert (origin.node, origin.place) == ("SqrtBackward0", "loss")


@pytest.mark.parametrize("recompute", [False, True])
def test_r11_a_row_that_a_mask_has_emptied(recompute):
    scene = make_scene("llama", dtype=torch.float32, rows=1, recompute=recompute)
    attention = decoder(scene).layers[2].self_attn
    plain = type(attention).forward

    def forward(hidden_states, *args, **kwargs):
        scores = torch.zeros(1, 4, hidden_states.shape[1], hidden_states.shape[1])
        mask = torch.full_like(scores, -math.inf).triu(1)
        mask[:, :, 3] = -math.inf
        weights = torch.softmax(scores + mask, -1)
        out, other = plain(attention, hidden_states, *args, **kwargs)
        return out + 0.0 * weights.sum(), other

    attention.forward = forward
    origin = origin_of(scene)
    assert (origin.module, origin.op, origin.kind) == ("model.layers.2.self_attn", "_softmax", "nan")
    assert origin.mask_row and origin.place == "attention mask"


def test_infinite_masks_that_do_no_harm_are_legal():
    scene = make_scene("llama", dtype=torch.float32, rows=1)
    attention = decoder(scene).layers[2].self_attn
    plain = type(attention).forward
    constant = torch.tensor(-math.inf)

    def forward(hidden_states, *args, **kwargs):
        scores = torch.zeros(1, 4, hidden_states.shape[1], hidden_states.shape[1])
        allowed = torch.ones_like(scores, dtype=torch.bool).tril()
        scores = torch.where(allowed, scores, constant).to(torch.float16).float().clone()
        mask = torch.full_like(scores, float("-inf")).triu(1)
        weights = torch.softmax(scores + mask, -1)
        out, other = plain(attention, hidden_states, *args, **kwargs)
        return out + 0.0 * weights.sum(), other

    attention.forward = forward
    assert trace(scene).origin is None


@pytest.mark.parametrize(
    ("lora", "dtype", "value"),
    [
        ("fused", HALF, math.nan),
        ("plain", HALF, math.inf),
        ("none", torch.float32, math.nan),
        ("fused", torch.float32, math.inf),
    ],
)
def test_r15_a_bad_weight(lora, dtype, value):
    scene = make_scene("qwen2", lora=lora, dtype=dtype)
    base(decoder(scene).layers[3].self_attn.v_proj).weight.data[1, 2] = value
    origin = origin_of(scene)
    assert (origin.kind, origin.leaf) == ("leaf", "model.layers.3.self_attn.v_proj.weight")
    assert (origin.module, origin.op, origin.phase) == ("model.layers.3.self_attn.v_proj", None, "forward")


def test_r15_in_an_adapter_an_embedding_a_norm_and_a_head():
    scene = make_scene("llama")
    decoder(scene).layers[1].mlp.up_proj.lora_B["default"].weight.data[0, 0] = math.nan
    origin = origin_of(scene)
    assert (origin.leaf, origin.module) == ("model.layers.1.mlp.up_proj.lora_B.weight", "model.layers.1.mlp.up_proj")
    scene = make_scene("llama", lora="none")
    decoder(scene).embed_tokens.weight.data[int(scene.samples[0].input_ids[1])] = math.nan
    origin = origin_of(scene)
    assert (origin.leaf, origin.place) == ("model.embed_tokens.weight", "embedding")
    assert "rows:0" in origin.rows
    scene = make_scene("llama")
    decoder(scene).norm.weight.data[0] = math.nan
    assert origin_of(scene).leaf == "model.norm.weight"
    scene = make_scene("llama")
    scene.forward.model.lm_head.weight.data[5, 0] = math.inf
    assert (origin_of(scene).leaf, origin_of(scene).place) == ("lm_head.weight", "logits")


@pytest.mark.parametrize(
    ("function", "recompute", "dtype"), [(Bug, True, HALF), (Bug, False, torch.float32), (Hidden, True, HALF)]
)
def test_r21_a_custom_backward(function, recompute, dtype):
    name = f"{function.__name__}Backward"
    scene = make_scene("llama", dtype=dtype, recompute=recompute)
    insert(decoder(scene).layers[2].mlp, function.apply)
    origin = origin_of(scene)
    assert (origin.op, origin.node, origin.phase) == (name, name, "backward")
    assert origin.module == "model.layers.2.mlp"
    assert origin.kind == "nan"


def test_a_custom_forward_that_nobody_sees():
    scene = make_scene("llama", dtype=torch.float32)
    mlp = decoder(scene).layers[1].mlp
    plain = mlp.forward
    mlp.forward = lambda x: plain(HiddenForward.apply(x))
    origin = origin_of(scene)
    assert (origin.module, origin.op, origin.phase) == ("model.layers.1.mlp", "HiddenForwardBackward", "forward")


def test_r25_memory_that_a_kernel_left_unwritten():
    scene = make_scene("llama", dtype=torch.float32)
    insert(decoder(scene).layers[2].mlp, Unfilled.apply)
    before = torch.are_deterministic_algorithms_enabled(), torch.utils.deterministic.fill_uninitialized_memory
    torch.use_deterministic_algorithms(True)
    try:
        origin = origin_of(scene)
    finally:
        torch.use_deterministic_algorithms(before[0])
        torch.utils.deterministic.fill_uninitialized_memory = before[1]
    assert (origin.module, origin.op, origin.phase) == ("model.layers.2.mlp", "UnfilledBackward", "backward")


@pytest.mark.parametrize("dtype", [HALF, torch.float32])
def test_r26_an_infinity_in_the_branch_that_is_not_taken(dtype):
    scene = make_scene("llama", dtype=dtype)

    def change(loss, hidden):
        wild = hidden.float().sum(-1) * 0.0 + 200.0
        return loss + torch.where(wild > 100, torch.zeros_like(wild), wild.exp()).sum()

    found = trace(Wrapped.around(scene, change))
    origin = found.origin
    assert found.rerun.loss_finite and not found.rerun.finite
    assert (origin.op, origin.phase, origin.kind, origin.node) == ("exp", "forward", "inf", "ExpBackward0")
    assert (origin.module, origin.place) == (None, "loss")


def test_logits_out_of_range_belong_to_the_head():
    for chunked in (True, False):
        scene = make_scene("llama", chunked=chunked)
        scene.forward.model.lm_head.weight.data.mul_(4e6).clamp_(-6e4, 6e4)
        origin = origin_of(scene)
        assert (origin.module, origin.op, origin.place) == ("lm_head", "mm", "logits")
        assert origin.kind == "inf"


def test_of_two_infinities_the_harmful_one_is_blamed():
    scene = make_scene("qwen2")
    decoder(scene).layers[0].register_forward_hook(
        lambda m, a, out: out + torch.exp(out.detach() * 0 + 200).reciprocal()
    )
    plant_scores(scene, layer=1)
    found = trace(scene)
    assert (found.origin.module, found.origin.op) == ("model.layers.1.self_attn", "bmm")
    assert [(o.module, o.op) for o in found.silent] == [("model.layers.0", "exp")]


def test_peaks_beyond_a_range_name_every_operation_and_no_mask():
    scene = make_scene("qwen2", dtype=torch.float32, lora="none")
    plant_scores(scene, layer=1)
    plant_scores(scene, layer=3)
    found = trace(scene, watch_range=65504.0)
    assert found.origin is None
    forward = [peak for peak in found.over if peak.phase == "forward"]
    assert [(peak.module, peak.op) for peak in forward] == [(f"model.layers.{i}.self_attn", "bmm") for i in (1, 3)]
    assert {peak.place for peak in forward} == {"attention scores"}
    assert all(65504 < peak.value < 1e6 for peak in forward)
    assert not found.narrow


def test_operations_in_half_precision_are_known():
    narrow = trace(make_scene("qwen2")).narrow
    assert ("model.layers.1.self_attn", "bmm") in narrow
    assert ("model.layers.1.mlp", "mul") in narrow
    assert not any(module and module.endswith("norm") and op != "_to_copy" for module, op in narrow)


def test_headroom_lists_modules_by_what_is_left():
    scene = make_scene("llama")
    decoder(scene).layers[1].register_forward_hook(lambda m, a, out: out.half() * 0 + 60000)
    table = headroom(scene)
    assert (table[0].module, table[0].dtype) == ("model.layers.1", "float16")
    assert table[0].share == pytest.approx(60000 / 65504, rel=1e-3)
    assert {"model.layers.2.self_attn.q_proj", "model.norm"} <= {peak.module for peak in table}


@pytest.mark.parametrize("settings", [{"lora_dropout": 0.3}, {"use_dora": True}, {"modules_to_save": ["lm_head"]}])
def test_every_kind_of_adapter_has_hugging_face_names(settings):
    def make():
        return make_scene("qwen2", adapter=settings, recompute=True)

    assert trace(make()).origin is None
    scene = make()
    plant_scores(scene, layer=1)
    origin = origin_of(scene)
    assert (origin.module, origin.op, origin.place) == ("model.layers.1.self_attn", "bmm", "attention scores")
    scene = make()
    base(decoder(scene).layers[1].mlp.up_proj).weight.data[0, 0] = math.nan
    assert origin_of(scene).leaf == "model.layers.1.mlp.up_proj.weight"
    scene = make()
    base(decoder(scene).layers[3].self_attn.v_proj).weight.data.fill_(60000.0)
    origin = origin_of(scene)
    assert (origin.module, origin.place) == ("model.layers.3.self_attn.v_proj", "attention")


def test_tied_heads_and_an_older_layout_of_layers():
    scene = make_scene("qwen2", tie_word_embeddings=True, lora="none")
    scene.forward.model.lm_head.weight.data.mul_(4e6).clamp_(-6e4, 6e4)
    origin = origin_of(scene)
    assert (origin.module, origin.op, origin.place) == ("lm_head", "mm", "logits")
    scene = make_scene("gpt_neox", lora="none", stream=HALF)
    scene.forward.model.gpt_neox.layers[1].attention.query_key_value.bias.data.fill_(150.0)
    origin = origin_of(scene)
    assert (origin.module, origin.place) == ("gpt_neox.layers.1.attention", "attention scores")
    scene = make_scene("gpt_neox", lora="none", stream=HALF)
    for layer in (0, 1):
        scene.forward.model.gpt_neox.layers[layer].mlp.dense_4h_to_h.bias.data[3] = 40000.0
    origin = origin_of(scene)
    assert (origin.module, origin.op, origin.place) == ("gpt_neox.layers.1", "add", "residual stream")


def test_a_passing_fault_is_traced_in_the_run_where_it_happens():
    scene = make_scene("llama", dtype=torch.float32)
    calls = []

    def flicker(module, args, output):
        calls.append(1)
        return output * math.nan if len(calls) == 1 else output

    decoder(scene).layers[2].mlp.register_forward_hook(flicker)
    found = trace(scene)
    assert (found.origin.module, found.origin.op, found.origin.kind) == ("model.layers.2.mlp", "mul", "nan")
    assert not found.rerun.finite and trace(scene).origin is None
