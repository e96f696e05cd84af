"""Linears over 4 and 8 bit weights against PEFT's and bitsandbytes' own, and weights made anew from their files."""

from __future__ import annotations

import copy
import math

import pytest
import torch

bnb = pytest.importorskip("bitsandbytes", reason="bitsandbytes is optional: pip install --no-deps bitsandbytes")

from helpers import save_tiny_model  # noqa: E402
from quantized_models import KINDS, NAMES, SHAPE, load, wrapped  # noqa: E402
from surefoot.config import make_config  # noqa: E402
from surefoot.errors import UserError  # noqa: E402
from surefoot.guard.checksum import WeightChecksums  # noqa: E402
from surefoot.model import quantized as quantized_module  # noqa: E402
from surefoot.model.islands import clear_island, hold_island_weights, set_island  # noqa: E402
from surefoot.model.lora_quantized import fuse_quantized  # noqa: E402
from surefoot.model.quantized import (  # noqa: E402
    bitsandbytes_config,
    dequantized,
    named_states,
    parameter_count,
    quantized_bytes_per_parameter,
    require_bitsandbytes,
    state_tensors,
)
from surefoot.model.source import model_config  # noqa: E402
from surefoot.model.variants import plain_lora  # noqa: E402

UP = "model.layers.1.mlp.up_proj"


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """Tiny models with biases, by dtype."""
    made = {}

    def folder(dtype):
        if dtype not in made:
            place = tmp_path_factory.mktemp("base")
            made[dtype] = save_tiny_model(place, dtype=dtype, **SHAPE)
        return made[dtype]

    return folder


def outputs_and_grads(model, autocast=None):
    ids = torch.arange(1, 21).view(2, 10)
    model.zero_grad()
    model.train()  # in evaluation bitsandbytes computes in bfloat16 on some CPUs, whatever the dtype
    with torch.autocast("cpu", dtype=autocast or torch.bfloat16, enabled=autocast is not None):
        loss = model(ids, labels=ids).loss
    loss.backward()
    return loss.detach(), {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}


# Bounds: the roundings of one step in that dtype (float16 2^-11, bfloat16 2^-8), a few of them in a row.
@pytest.mark.parametrize(
    ("dtype", "autocast", "bound"),
    [
        (torch.float32, None, 1e-5),
        (torch.bfloat16, None, 4e-2),
        (torch.float32, torch.bfloat16, 4e-2),
        (torch.float16, torch.float16, 2e-2),  # PEFT's 8 bit layer also rounds the scales
    ],
)
@pytest.mark.parametrize("kind", KINDS, ids=NAMES)
def test_equals_peft(folders, kind, dtype, autocast, bound):
    peft = wrapped(folders(dtype), kind, autocast or dtype)
    fused = copy.deepcopy(peft)
    assert fuse_quantized(fused) == 14 + 4
    loss, grads = outputs_and_grads(peft, autocast)
    our_loss, our_grads = outputs_and_grads(fused, autocast)
    assert abs(our_loss - loss) <= bound * loss
    assert our_grads.keys() == grads.keys() and any("lora_A" in name for name in grads)
    for name, grad in grads.items():
        assert our_grads[name].dtype == grad.dtype
        assert (our_grads[name] - grad).norm() <= bound * grad.norm(), name


def test_against_an_adapter_over_the_expanded_weight_in_double(folders):
    """Outputs and all gradients of one layer against the formula in float64."""
    model = wrapped(folders(torch.float32), KINDS[0])
    fuse_quantized(model)
    layer = model.get_base_model().model.layers[0].mlp.down_proj
    w = dequantized(layer.get_base_layer(), torch.float32).double()
    a, b = (part["default"].weight for part in (layer.lora_A, layer.lora_B))
    x = torch.randn(3, 5, 128, requires_grad=True)
    sent = torch.randn(3, 5, 64)
    layer(x).backward(sent)
    exact = [t.detach().double().requires_grad_() for t in (x, a, b)]
    y = exact[0] @ w.T + 2.0 * (exact[0] @ exact[1].T) @ exact[2].T
    y.backward(sent.double())
    torch.testing.assert_close(layer(x).double(), y, rtol=1e-5, atol=1e-5)
    for got, wanted in zip((x, a, b), exact, strict=True):
        torch.testing.assert_close(got.grad.double(), wanted.grad, rtol=1e-5, atol=1e-4)


@pytest.mark.parametrize("settings", [{"use_dora": True}, {"lora_dropout": 0.3}, {"lora_bias": True}])
def test_other_cases_are_pefts_own(folders, settings):
    peft = wrapped(folders(torch.float32), KINDS[0], **settings)
    fused = copy.deepcopy(peft)
    fuse_quantized(fused)
    torch.manual_seed(2)
    loss, grads = outputs_and_grads(peft)
    torch.manual_seed(2)
    our_loss, our_grads = outputs_and_grads(fused)
    torch.testing.assert_close(our_loss, loss)
    for name, grad in grads.items():
        torch.testing.assert_close(our_grads[name], grad, rtol=1e-4, atol=1e-6)


def test_plain_lora_is_pefts_forward_and_is_taken_back(folders):
    model = wrapped(folders(torch.float32), KINDS[0])
    fuse_quantized(model)
    kinds = [type(m) for m in model.modules()]
    with plain_lora(model):
        assert sum(type(m).__module__.startswith("peft.tuners.lora.bnb") for m in model.modules()) == 4
    assert [type(m) for m in model.modules()] == kinds


@pytest.mark.parametrize("kind", KINDS, ids=NAMES)
def test_round_trip_and_the_librarys_own_expansion(folders, kind):
    """What is expanded is near the file's weight, and is what bitsandbytes itself expands."""
    folder = folders(torch.float32)
    model, whole = load(folder, kind), load(folder, {})
    for name, module in model.named_modules():
        if not quantized_module.is_quantized(module):
            continue
        got, file = dequantized(module, torch.float32), whole.get_submodule(name).weight
        assert (got - file).norm() / file.norm() < {"int8": 0.01, "fp4-double": 0.2}.get(NAMES[KINDS.index(kind)], 0.12)
        if kind["quantization_bit"] == 4:
            own = bnb.functional.dequantize_4bit(module.weight.data, module.weight.quant_state)
        else:
            own = bnb.functional.int8_vectorwise_dequant(module.weight.data, module.weight.SCB)
        torch.testing.assert_close(got, own, rtol=1e-6, atol=1e-8)
        assert torch.equal(dequantized(module, torch.bfloat16), got.bfloat16())


@pytest.mark.parametrize("kind", KINDS, ids=NAMES)
def test_an_island_in_float32_expands_to_float32(folders, kind):
    """An MLP of 16 bit inputs computes what the same weights compute in float32, base layers without LoRA too."""
    model = wrapped(folders(torch.bfloat16), kind, torch.bfloat16)
    fuse_quantized(model)
    mlp = model.get_base_model().model.layers[0].mlp
    x = torch.randn(2, 7, 64, dtype=torch.bfloat16)
    before = {name: tensor.clone() for name, tensor in mlp.state_dict().items()}
    with torch.autocast("cpu", dtype=torch.bfloat16):
        rounded = mlp(x)
        set_island(mlp, torch.float32, keep_output=True)
        hold_island_weights(mlp)
        wide = mlp(x)
        clear_island(mlp)
    assert wide.dtype == torch.float32 and rounded.dtype == torch.bfloat16
    gate, up, down = (
        dequantized(part, torch.float32) for part in (mlp.gate_proj, mlp.up_proj, mlp.down_proj.base_layer)
    )
    h = torch.nn.functional.silu(x.float() @ gate.T) * (x.float() @ up.T)
    a, b = (part["default"].weight for part in (mlp.down_proj.lora_A, mlp.down_proj.lora_B))
    torch.testing.assert_close(wide, h @ down.T + 2.0 * (h @ a.T) @ b.T, rtol=1e-5, atol=1e-6)
    assert 1e-4 < (rounded - wide).norm() / wide.norm() < 5e-2, "the other path rounds"
    after = mlp.state_dict()
    assert all(torch.equal(after[name], tensor) for name, tensor in before.items()), "the packed bytes are as they were"


def test_layers_that_are_computed_again_give_the_same_gradients(folders):
    model = wrapped(folders(torch.float32), KINDS[0])
    fuse_quantized(model)
    loss, grads = outputs_and_grads(model)
    model.get_base_model().gradient_checkpointing_enable({"use_reentrant": False})
    again, grads_again = outputs_and_grads(model)
    assert torch.equal(again, loss) and all(torch.equal(grads_again[name], grad) for name, grad in grads.items())


@pytest.mark.parametrize("kind", KINDS, ids=NAMES)
def test_compiles_into_one_graph_with_the_same_gradients(folders, kind):
    model = wrapped(folders(torch.bfloat16), kind, torch.bfloat16)
    fuse_quantized(model)
    mlp = model.get_base_model().model.layers[0].mlp
    x = torch.randn(2, 7, 64, dtype=torch.bfloat16, requires_grad=True)
    found = []
    for run in (mlp, torch.compile(mlp, backend="aot_eager", fullgraph=True, dynamic=True)):
        with torch.autocast("cpu", dtype=torch.bfloat16):
            y = run(x)
        wanted = [x, *(p for p in mlp.parameters() if p.requires_grad)]
        found.append([y, *torch.autograd.grad(y.float().square().sum(), wanted)])
    assert len(found[0]) == 4 and all(float(grad.float().norm()) > 0 for grad in found[0])
    for eager, compiled in zip(*found, strict=True):
        assert (compiled - eager).float().norm() <= 1e-2 * eager.float().norm()


@pytest.mark.parametrize("kind", KINDS, ids=NAMES)
@pytest.mark.parametrize("dtype", [torch.float16, torch.float32])
def test_every_damaged_part_is_named_and_made_anew_from_the_file(folders, kind, dtype):
    folder = folders(dtype)
    model = wrapped(folder, kind, dtype)
    fuse_quantized(model)
    sums = WeightChecksums(model)
    base = model.get_base_model().get_submodule(UP)
    parts = {f"{UP}.weight": base.weight.data} | {f"{UP}.weight[{k}]": v for k, v in state_tensors(base).items()}
    before = {name: tensor.clone() for name, tensor in parts.items()}
    assert len(parts) == (2 if kind["quantization_bit"] == 8 else 6 if kind.get("double_quantization", True) else 3)
    for name, tensor in parts.items():
        tensor.view(-1).view(torch.uint8)[0] ^= 64
        assert sums.changed(model) == [name]
        assert sums.reload(model, name, folder), name
        assert sums.changed(model) == []
    assert all(torch.equal(tensor, before[name]) for name, tensor in parts.items())


def test_damage_that_the_file_cannot_mend_is_left_as_it_is(folders, tmp_path):
    other = save_tiny_model(tmp_path, seed=5, hidden_size=64, intermediate_size=128, attention_bias=True)
    model = load(folders(torch.float32), KINDS[0])
    sums = WeightChecksums(model)
    scales = state_tensors(model.get_submodule(UP))["absmax"]
    scales[0] ^= 64
    damaged = scales.clone()
    name = f"{UP}.weight[absmax]"
    assert not sums.reload(model, name, other)
    assert torch.equal(scales, damaged) and sums.changed(model) == [name]


@pytest.mark.parametrize("storage", [torch.uint8, torch.bfloat16])
@pytest.mark.parametrize("kind", KINDS, ids=NAMES)
def test_a_quantised_checkpoint_is_loaded_held_as_bytes_and_mended(folders, tmp_path, kind, storage):
    """As LLaMA-Factory and others store them: also in a floating dtype, which no cast must ever touch."""
    from transformers import AutoModelForCausalLM, BitsAndBytesConfig

    config = BitsAndBytesConfig(
        load_in_4bit=kind["quantization_bit"] == 4, load_in_8bit=kind["quantization_bit"] == 8,
        bnb_4bit_quant_type=kind.get("quantization_type", "nf4"),
        bnb_4bit_use_double_quant=kind.get("double_quantization", True), bnb_4bit_quant_storage=storage,
    )  # fmt: skip
    source = AutoModelForCausalLM.from_pretrained(folders(torch.float32), quantization_config=config)
    expected = {n: dequantized(m, torch.float32) for n, m in source.named_modules() if quantized_module.is_quantized(m)}
    source.save_pretrained(tmp_path)
    model = load(tmp_path, {})
    for name, weight in expected.items():
        module = model.get_submodule(name)
        assert not module.weight.is_floating_point()
        assert torch.equal(dequantized(module, torch.float32), weight)
    sums = WeightChecksums(model)
    base = model.get_submodule(UP)
    parts = {f"{UP}.weight": base.weight.data} | {f"{UP}.weight[{k}]": v for k, v in state_tensors(base).items()}
    for name, tensor in parts.items():
        tensor.view(-1).view(torch.uint8)[0] ^= 64
        assert sums.changed(model) == [name]
        assert sums.reload(model, name, tmp_path), name
    assert torch.equal(dequantized(base, torch.float32), expected[UP])


@pytest.mark.parametrize(("kind", "bits", "double"), [(KINDS[0], 4, True), (KINDS[1], 4, False), (KINDS[3], 8, False)])
def test_bytes_per_parameter_are_those_that_are_held(tmp_path, kind, bits, double):
    model = load(save_tiny_model(tmp_path, hidden_size=512, intermediate_size=1024, num_hidden_layers=1), kind)
    linears = [m for m in model.modules() if quantized_module.is_quantized(m)]
    held = sum(m.weight.numel() * m.weight.element_size() for m in linears)
    held += sum(t.numel() * t.element_size() for n, t in named_states(model) if "quant_map" not in n)
    values = sum(m.in_features * m.out_features for m in linears)
    assert math.isclose(held / values, quantized_bytes_per_parameter(bits, double), rel_tol=0.01)


def test_parameters_are_counted_unpacked(folders):
    whole = load(folders(torch.float32), {})
    wanted = sum(p.numel() for p in whole.parameters())
    assert parameter_count(whole) == wanted
    assert {parameter_count(load(folders(torch.float32), kind)) for kind in KINDS} == {wanted}


def test_without_the_package_the_one_command_is_named(monkeypatch):
    monkeypatch.setattr(quantized_module.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(UserError, match="need the package bitsandbytes") as caught:
        require_bitsandbytes("cpu")
    assert "quantization_bit" in str(caught.value)
    assert '-m pip install --no-deps "bitsandbytes>=' in str(caught.value)


@pytest.mark.parametrize("failure", [RuntimeError("no kernel for gfx906"), NotImplementedError(), None])
def test_a_library_that_does_not_work_here_is_refused_in_its_own_words(monkeypatch, failure):
    def broken(packed, state):
        if failure:
            raise failure
        return torch.zeros(state.shape)

    monkeypatch.setattr(bnb.functional, "dequantize_4bit", broken)
    with pytest.raises(UserError, match=r"gfx906|NotImplementedError|computes wrongly") as caught:
        require_bitsandbytes("cpu")
    assert "quantization_bit" in str(caught.value)


def test_a_checkpoint_of_another_method_is_refused_by_name(folders):
    cfg = make_config(
        {"model_name_or_path": str(folders(torch.float32)), "dataset": "rows", "template": "default", "output_dir": "o"}
    )
    config = model_config(cfg)
    config.quantization_config = {"quant_method": "gptq", "bits": 4}
    with pytest.raises(UserError, match="quantised by gptq"):
        bitsandbytes_config(cfg, config, torch.float32, "cpu")
