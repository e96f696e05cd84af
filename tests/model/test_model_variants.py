"""A model run another way for a while: what it computes then, and that nothing stays behind."""

from __future__ import annotations

import pytest
import torch

from surefoot.model.compiled import compile_layers, compiled_layers
from surefoot.model.forward import base_of
from surefoot.model.islands import set_attention_kernel, set_island
from surefoot.model.probes import build_forward
from surefoot.model.variants import in_float32, reference_kernels, without_compile, without_dropout
from variant_models import FAMILIES, adapted, fingerprint, in_dtype, same, step, tiny

F16, BF16 = torch.float16, torch.bfloat16


def assert_float32(model, forward, bound=1e-5, grad_bound=1e-5, **options):
    """The replay equals the same weights held in float32, computed without autocast by eager code."""
    wide = in_dtype(model, torch.float32)
    wanted_loss, wanted = step(wide, build_forward(wide, None, upcast=False, label_smoothing=0.0))
    before = fingerprint(model, forward)
    with in_float32(model, forward, **options):
        loss, grads = step(model, forward)
    assert abs(loss - wanted_loss) <= bound * wanted_loss
    same(grads, wanted, grad_bound)
    assert fingerprint(model, forward) == before
    return wanted_loss


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize(("dtype", "autocast"), [(F16, F16), (BF16, None)])
def test_in_float32_is_the_same_weights_in_float32(family, dtype, autocast):
    model, forward = adapted(tiny(family, dtype), "lora", autocast=autocast)
    wanted = assert_float32(model, forward)
    if family in ("llama", "gemma2"):
        rough, _ = step(model, forward, 256.0)
        assert abs(rough - wanted) > 1e-5 * wanted, "the 16-bit model must differ, or the test shows nothing"


@pytest.mark.parametrize("how", ["dropout", "dora", "full"])
@pytest.mark.parametrize("family", ["qwen2", "tied"])
def test_in_float32_with_other_trainables(family, how):
    assert_float32(*adapted(tiny(family, F16), how, autocast=F16))


@pytest.mark.parametrize("how", ["lora", "full"])
def test_in_float32_gives_16_bit_trainables_their_gradient(how):
    model, forward = adapted(tiny("qwen2", BF16), how, trainable=BF16)
    assert_float32(model, forward, grad_bound=2**-7)  # the gradient is rounded once, to bfloat16


@pytest.mark.parametrize("how", ["dropout", "full"])
def test_in_float32_under_recompute(how):
    model, forward = adapted(tiny("qwen3", F16), how, autocast=F16)
    base_of(model).activation_checkpointing_enable({"use_reentrant": False})
    assert_float32(model, forward)


def test_in_float32_may_recompute_to_save_memory():
    model, forward = adapted(tiny("mixtral", BF16), "dropout")
    assert_float32(model, forward, recompute=True)
    runs = []
    handle = base_of(model).get_decoder().layers[0].mlp.register_forward_pre_hook(lambda *_: runs.append(1))
    for options, times in (({}, 1), ({"recompute": True}, 2)):
        runs.clear()
        with in_float32(model, forward, **options):
            step(model, forward)
        assert len(runs) == times
    handle.remove()


def test_in_float32_overrides_islands_in_16_bits():
    model, forward = adapted(tiny("llama", F16), "lora", autocast=F16)
    wide = in_dtype(model, torch.float32)
    wanted, _ = step(wide, build_forward(wide, None, upcast=False, label_smoothing=0.0))
    set_island(base_of(model).model.layers[1].mlp, BF16)
    with in_float32(model, forward):
        loss, _ = step(model, forward)
    assert abs(loss - wanted) <= 1e-5 * wanted


def test_in_float32_turns_tf32_off_and_on_again():
    model, forward = adapted(tiny("llama", BF16), "lora")
    torch.set_float32_matmul_precision("high")
    try:
        with in_float32(model, forward):
            assert torch.backends.cuda.matmul.fp32_precision == "ieee"
        assert torch.get_float32_matmul_precision() == "high"
    finally:
        torch.set_float32_matmul_precision("highest")


@pytest.mark.parametrize("family", FAMILIES)
def test_reference_kernels_equal_the_normal_path(family):
    model, forward = adapted(tiny(family), "lora")
    before = fingerprint(model, forward)
    loss, grads = step(model, forward)
    with reference_kernels(model, forward):
        other, others = step(model, forward)
    assert abs(loss - other) <= 1e-5 * loss
    same(others, grads, 1e-4)
    assert fingerprint(model, forward) == before


def test_reference_kernels_use_no_kernel_of_ours(monkeypatch):
    model, forward = adapted(tiny("qwen2"), "lora")
    set_attention_kernel(base_of(model).model.layers[0].self_attn, "fused")

    def fail(*args, **kwargs):
        raise AssertionError("not the reference")

    monkeypatch.setattr("surefoot.model.lora._LoraLinear.apply", fail)
    monkeypatch.setattr("surefoot.model.loss._LinearCrossEntropy.apply", fail)
    monkeypatch.setattr(torch.nn.functional, "scaled_dot_product_attention", fail)
    with pytest.raises(AssertionError):
        step(model, forward)
    with reference_kernels(model, forward):
        step(model, forward)


def test_reference_kernels_keep_the_dtype():
    model, forward = adapted(tiny("llama", F16), "lora", autocast=F16)
    seen = set()
    base_of(model).model.layers[0].mlp.down_proj.register_forward_hook(lambda m, i, o: seen.add(o.dtype))
    with reference_kernels(model, forward):
        step(model, forward, 256.0)
    assert seen == {F16}


def test_both_at_once():
    model, forward = adapted(tiny("gemma2", F16), "lora", autocast=F16)
    before = fingerprint(model, forward)
    with in_float32(model, forward):
        loss, grads = step(model, forward)
    with reference_kernels(model, forward), in_float32(model, forward):
        other, others = step(model, forward)
    assert abs(loss - other) <= 1e-5 * loss
    same(others, grads, 1e-4)
    assert fingerprint(model, forward) == before


@pytest.mark.parametrize("variant", [in_float32, reference_kernels])
def test_an_error_inside_leaves_nothing_behind(variant):
    model, forward = adapted(tiny("qwen3moe", F16), "dropout", autocast=F16)
    before = fingerprint(model, forward)
    handle = base_of(model).model.layers[1].mlp.register_forward_hook(lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError), variant(model, forward):
        step(model, forward)
    handle.remove()
    assert fingerprint(model, forward) == before


@pytest.mark.parametrize("family", ["llama", "mixtral", "neox"])
def test_without_dropout(family):
    changes = {"attention_dropout": 0.3, "hidden_dropout": 0.3, "router_jitter_noise": 0.1}
    model, forward = adapted(tiny(family, **changes), "dropout")
    before = fingerprint(model, forward)
    random = step(model, forward)[0]
    with without_dropout(model):
        assert model.training
        torch.manual_seed(9)
        state = torch.get_rng_state()
        loss = step(model, forward)[0]
        torch.manual_seed(5)
        assert torch.equal(torch.get_rng_state(), _state_after_step(model, forward)), "no random number was drawn"
    assert loss != random and not torch.equal(state, torch.get_rng_state())
    model.eval()
    assert abs(step(model, forward)[0] - loss) <= 1e-6 * loss
    model.train()
    assert fingerprint(model, forward) == before


def _state_after_step(model, forward):
    step(model, forward)  # which seeds with 5 itself
    return torch.get_rng_state()


def test_without_compile():
    model, forward = adapted(tiny("llama"), "lora")
    names = compile_layers(model)
    assert names == [f"model.layers.{i}" for i in range(3)] == compiled_layers(model)
    calls = []
    for module in base_of(model).model.layers:  # in the place of what torch.compile made, which takes a minute
        module._compiled_call_impl = lambda *a, m=module, **k: (calls.append(1), m._call_impl(*a, **k))[1]
    step(model, forward)
    assert calls
    before = fingerprint(model, forward)
    for variant in (without_compile(model), in_float32(model, forward), reference_kernels(model, forward)):
        calls.clear()
        with variant:
            assert compiled_layers(model) == []
            step(model, forward)
        assert not calls
        assert fingerprint(model, forward) == before
