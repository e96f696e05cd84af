"""The fused LoRA linear against PEFT's own, in outputs, gradients and saved files."""

from __future__ import annotations

import copy

import pytest
import torch
from peft import LoraConfig, get_peft_model
from safetensors.torch import load_file

from helpers import tiny_llama
from surefoot.model.lora import FusedLoraLinear, fuse_lora


def wrapped(dtype=torch.float32, **settings):
    model = tiny_llama(attention_bias=True).to(dtype)
    config = LoraConfig(r=4, lora_alpha=8, target_modules=["q_proj", "down_proj"], init_lora_weights=False, **settings)
    torch.manual_seed(1)
    return get_peft_model(model, config)


def outputs_and_grads(model, autocast=None):
    ids = torch.arange(1, 21).view(2, 10)
    with torch.autocast("cpu", dtype=autocast or torch.bfloat16, enabled=autocast is not None):
        loss = model(ids, labels=ids).loss
    loss.backward()
    return loss.detach(), {n: p.grad for n, p in model.named_parameters() if p.grad is not None}


# Bounds: the roundings of one step in that dtype (float16 2^-11, bfloat16 2^-8), a few of them in a row.
@pytest.mark.parametrize(
    ("dtype", "autocast", "bound"),
    [
        (torch.float32, None, 1e-5),
        (torch.bfloat16, None, 4e-2),
        (torch.float32, torch.bfloat16, 4e-2),
        (torch.float16, torch.float16, 5e-3),
    ],
)
def test_equals_peft(dtype, autocast, bound):
    peft = wrapped(dtype)
    fused = copy.deepcopy(peft)
    assert fuse_lora(fused) == 4
    loss, grads = outputs_and_grads(peft, autocast)
    our_loss, our_grads = outputs_and_grads(fused, autocast)
    assert abs(our_loss - loss) <= bound * loss
    assert our_grads.keys() == grads.keys()
    for name, grad in grads.items():
        assert our_grads[name].dtype == grad.dtype
        assert (our_grads[name] - grad).norm() <= bound * grad.norm(), name


@pytest.mark.parametrize("settings", [{"use_dora": True}, {"lora_dropout": 0.3}, {"lora_bias": True}])
def test_other_cases_are_pefts_own(settings):
    peft = wrapped(**settings)
    fused = copy.deepcopy(peft)
    fuse_lora(fused)
    torch.manual_seed(2)
    loss, grads = outputs_and_grads(peft)
    torch.manual_seed(2)
    our_loss, our_grads = outputs_and_grads(fused)
    assert torch.equal(our_loss, loss)
    assert all(torch.equal(our_grads[name], grad) for name, grad in grads.items())


def test_switching_off_merging_and_saving_stay_pefts(tmp_path):
    peft = wrapped()
    fused = copy.deepcopy(peft)
    fuse_lora(fused)
    ids = torch.arange(1, 9)[None]
    with torch.no_grad():
        with peft.disable_adapter(), fused.disable_adapter():
            assert torch.equal(peft(ids).logits, fused(ids).logits)
        peft.save_pretrained(tmp_path / "peft")
        fused.save_pretrained(tmp_path / "fused")
        one, two = (load_file(tmp_path / n / "adapter_model.safetensors") for n in ("peft", "fused"))
        assert one.keys() == two.keys() and all(torch.equal(one[n], two[n]) for n in one)
        before = fused(ids).logits
        after = fused.merge_and_unload()(ids).logits
    torch.testing.assert_close(before, after, rtol=1e-4, atol=1e-5)


def test_only_plain_layers_are_taken():
    model = wrapped()
    fuse_lora(model)
    kinds = [type(m) for m in model.modules() if hasattr(m, "lora_A")]
    assert set(kinds) == {FusedLoraLinear}
