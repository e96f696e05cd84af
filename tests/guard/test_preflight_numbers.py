"""Normalisers that do not add up and infinities that die unseen, in many kinds of models; sound ones pass."""

from __future__ import annotations

from dataclasses import replace
from types import MethodType

import pytest
import torch
from preflight_scenes import rows, same_state, scene_of, state_of, tiny, with_lora
from torch import nn

from surefoot.guard.plan import apply_change
from surefoot.guard.preflight import preflight
from surefoot.guard.preflight_numbers import check_silent_infinity, check_sum
from surefoot.guard.trace import trace
from surefoot.model.forward import LossForward
from surefoot.model.variants import in_float32

KINDS = {
    "qwen2": {}, "llama": {"tie_word_embeddings": True}, "qwen3": {}, "gemma2": {"sliding_window": 64},
    "gemma3_text": {"sliding_window": 64}, "mixtral": {"num_local_experts": 4}, "gpt_neox": {},
}  # fmt: skip
PRECISIONS = {
    "float32": (torch.float32, None, 1.0), "bf16": (torch.bfloat16, torch.bfloat16, 1.0),
    "fp16": (torch.float16, torch.float16, 2.0**16), "bf16 no autocast": (torch.bfloat16, None, 1.0),
}  # fmt: skip


def job(kind="qwen2", precision="float32", *, lora=True, packs=True, samples=None, **changes):
    dtype, autocast, scale = PRECISIONS[precision]
    model = tiny(kind, dtype=dtype, **(KINDS[kind] | changes))
    model = with_lora(model) if lora else model
    for parameter in model.parameters():
        if parameter.requires_grad and autocast:
            parameter.data = parameter.data.float()
    return scene_of(model, samples, autocast=autocast, packs=packs, loss_scale=scale)


def mean_in_each_pass(self, batch):
    sums = LossForward.__call__(self, batch)
    return replace(sums, loss=sums.loss / max(1, batch.targets_K.numel()) * 20)


def mean_of_each_row(self, batch):
    """Right for passes, wrong for rows: every row of a pass counts the same."""
    hidden_KM = self.hidden(batch).index_select(0, batch.trained_K)
    logits_KV = nn.functional.linear(hidden_KM.float(), self.model.lm_head.weight.float())
    each_K = nn.functional.cross_entropy(logits_KV, batch.targets_K, reduction="none")
    ends = torch.tensor(batch.layout.lengths).cumsum(0)
    row_K = torch.bucketize(batch.trained_K, ends, right=True)
    total = sum(each_K[row_K == r].mean() for r in row_K.unique())
    return replace(LossForward.__call__(self, batch), loss=total * 10)


def planted(scene, call):
    """A forward of its own class, since Python looks `__call__` up on the class."""
    kind = type("Planted", (LossForward,), {"__call__": call})
    return replace(scene, forward=kind(**vars(scene.forward)))


@pytest.mark.parametrize("call", [mean_in_each_pass, mean_of_each_row])
@pytest.mark.parametrize("precision", ["float32", "bf16", "fp16"])
@pytest.mark.parametrize("packs", [True, False])
def test_a_mean_where_a_sum_belongs_is_found(call, precision, packs):
    scene = planted(job("qwen2", precision, packs=packs), call)
    finding = check_sum(scene)
    assert (finding.diagnosis.fault, finding.diagnosis.place) == ("DATA", "normaliser")
    assert finding.serious and finding.diagnosis.samples and not finding.changes
    for numbers in finding.diagnosis.details.values():
        assert min(numbers["difference"], numbers["difference_float32"]) > 0.2


def test_one_row_or_one_label_is_enough():
    (only,) = rows(1)
    assert check_sum(planted(job(samples=(only,)), mean_in_each_pass)) is not None
    labels = only.labels.copy()
    labels[:-1] = -100
    last = replace(only, labels=labels)
    assert check_sum(planted(job(samples=(last, rows(2)[1])), mean_in_each_pass)) is not None
    assert check_sum(job(samples=(last,))) is None


@pytest.mark.parametrize("kind", sorted(KINDS))
@pytest.mark.parametrize("precision", sorted(PRECISIONS))
def test_sound_models_pass_every_check(kind, precision):
    for lora in (True, False):
        scene = job(kind, precision, lora=lora, samples=rows(5, seed=3))
        if precision == "bf16 no autocast" and not lora:
            scene.model.float()  # 16-bit masters are a finding of their own
        before, told = state_of(scene.model), []
        assert preflight(scene, tell=told.append, learning_rate=1e-2) == [] and not told
        assert same_state(before, state_of(scene.model))


def test_unpacked_recomputed_and_noisy_runs_pass():
    from surefoot.train.neftune import Neftune
    from surefoot.train.run import turn_on_recompute

    scene = job("qwen2", "bf16", packs=False)
    assert preflight(scene, tell=print) == []
    scene = job("qwen2", "fp16")
    turn_on_recompute(scene.model)
    noise = Neftune(scene.forward.model.get_input_embeddings(), 5.0)
    assert preflight(replace(scene, before_pass=noise.before_pass), tell=print) == []


class SquaringNorm(nn.Module):
    """Computes in its input's own dtype, so that squares overflow, or in float16 whatever comes in."""

    def __init__(self, weight, always_half=False):
        super().__init__()
        self.weight, self.always_half = weight, always_half

    def forward(self, x):
        own = x.half() if self.always_half else x
        mean = (own * own).mean(-1, keepdim=True)
        return (self.weight * (own * torch.rsqrt(mean + 1e-6))).to(x.dtype)


def with_squares(kind, layers, *, always_half=False, lora=True, factor=4000.0):
    scene = job(kind, "fp16", lora=lora, samples=rows(3, seed=5))
    base = scene.forward.model
    with torch.no_grad():
        base.get_input_embeddings().weight.mul_(factor)
    for layer in layers:
        block = base.model.layers[layer]
        block.input_layernorm = SquaringNorm(block.input_layernorm.weight, always_half)
    return replace(scene, loss_scale=2.0**8)


@pytest.mark.parametrize("kind", ["qwen2", "llama", "qwen3"])
@pytest.mark.parametrize("layers", [(1,), (0, 1)])
def test_an_infinity_that_dies_in_a_norm_is_found_and_cured(kind, layers):
    scene = with_squares(kind, layers, lora=True)
    seen = scene.rerun()
    assert seen.finite, "nothing else would show it"
    finding = check_silent_infinity(scene, print)
    name = f"model.layers.{layers[0]}.input_layernorm"
    found = finding.diagnosis
    assert (found.fault, found.module, found.op, found.phase, found.place) == ("RANGE", name, "mul", "forward", "norm")
    assert {change.module for change in finding.changes} == {f"model.layers.{n}.input_layernorm" for n in layers}
    assert all((change.kind, change.dtype) == ("island", "float32") for change in finding.changes)
    for change in finding.changes:
        apply_change(scene.model, scene.forward, change)
    assert check_silent_infinity(scene, print) is None


def test_a_module_that_insists_on_16_bits_is_named_without_a_change():
    finding = check_silent_infinity(with_squares("qwen2", (1,), always_half=True), print)
    assert finding.diagnosis.module == "model.layers.1.input_layernorm"
    assert finding.changes == () and "16 bits" in finding.diagnosis.evidence[-1]


def test_an_infinity_by_design_is_told_and_is_no_finding():
    scene = job("qwen2", "fp16")

    def forward(self, hidden_states):
        dead = torch.log(hidden_states.float() * 0.0).mean() * 0.0
        return type(self).forward(self, hidden_states) + torch.nan_to_num(dead).detach()

    norm = scene.forward.model.model.norm
    norm.forward = MethodType(forward, norm)
    told: list[str] = []
    assert check_silent_infinity(scene, told.append) is None
    assert len(told) == 1 and "model.norm" in told[0] and "log" in told[0]


def test_masked_scores_of_minus_infinity_are_legal():
    """The model's own eager attention adds float16's lowest number to negative scores, which rounds to -inf."""
    model = with_lora(tiny("qwen2", dtype=torch.float16))
    for layer in model.get_base_model().model.layers:
        layer.self_attn.q_proj.base_layer.bias.data.fill_(8.0)
        layer.self_attn.k_proj.base_layer.bias.data.fill_(-8.0)
    model.get_base_model().set_attn_implementation("eager")
    scene = scene_of(model, autocast=torch.float16, packs=False, loss_scale=2.0**8)
    assert "-inf" in trace(scene).origin.output
    assert preflight(scene, tell=print) == []


def test_a_loud_infinity_is_left_to_the_step_itself():
    scene = job("qwen2", "fp16")
    scene.forward.model.model.layers[1].self_attn.q_proj.base_layer.bias.data.fill_(3e4)
    scene.forward.model.model.layers[1].self_attn.k_proj.base_layer.bias.data.fill_(3e4)
    assert not scene.rerun().finite
    assert preflight(scene, tell=print) == []


def test_the_float32_of_the_check_is_float32():
    """The check rests on it: a small difference in 16 bits is gone."""
    scene = job("qwen2", "bf16")
    with in_float32(scene.model, scene.forward):
        loss = scene.rerun().loss
    assert loss != scene.rerun().loss
