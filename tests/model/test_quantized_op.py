"""Compiled layers over 4 and 8 bit weights: PEFT's numbers, one graph, and no expanded weight that stays."""

from __future__ import annotations

import contextlib
import copy

import numpy as np
import pytest
import torch
from torch._dynamo.backends.common import aot_autograd
from torch._dynamo.utils import counters
from torch._functorch.aot_autograd import make_boxed_func
from torch._functorch.partitioners import min_cut_rematerialization_partition
from torch.utils._python_dispatch import TorchDispatchMode

pytest.importorskip("bitsandbytes", reason="bitsandbytes is optional: pip install --no-deps bitsandbytes")

from helpers import random_sample, save_tiny_model
from quantized_models import KINDS, SHAPE, wrapped
from surefoot.data.batch import count_trained, pack
from surefoot.model.attention import use_packed_attention
from surefoot.model.compiled import CACHE_VARIABLE, compile_layers, compiled_layers, start_compiling
from surefoot.model.islands import clear_island, hold_island_weights, set_island
from surefoot.model.lora_quantized import FusedLora4bit, PackedLinear4bit, fuse_quantized
from surefoot.model.lora_quantized_op import Adapter, quantized_linear
from surefoot.model.probes import build_forward
from surefoot.model.quantized import is_quantized, packed_parts
from surefoot.model.variants import plain_lora, without_compile

QUICK = {"backend": "aot_eager"}  # as in test_compiled.py
STEPS = [(9, 5, 7), (4, 30), (3, 6, 12, 24, 2)]
LAYERS = ["model.layers.0", "model.layers.1"]


@pytest.fixture(autouse=True)
def compiler(monkeypatch, tmp_path):
    monkeypatch.setenv(CACHE_VARIABLE, str(tmp_path))
    torch._dynamo.reset()
    counters.clear()


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return save_tiny_model(tmp_path_factory.mktemp("base"), **SHAPE)


def trained(model, autocast=None):
    """The model and its forward, put together as a run does."""
    fuse_quantized(model)
    use_packed_attention(model.get_base_model())
    return model.train(), build_forward(model, autocast, upcast=False, label_smoothing=0.0)


def step(model, forward, lengths=STEPS[0], round_to=64):
    rng = np.random.default_rng(0)
    rows = [random_sample(rng, length, place) for place, length in enumerate(lengths)]
    model.zero_grad(set_to_none=True)
    torch.manual_seed(3)
    loss = forward(pack(rows, round_to)).loss / count_trained(rows)
    loss.backward()
    return loss.detach(), {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


def same(ours, theirs, bound):
    assert abs(ours[0] - theirs[0]) <= bound * theirs[0]
    assert ours[1].keys() == theirs[1].keys() and len(theirs[1]) == 8
    for name, grad in theirs[1].items():
        assert ours[1][name].dtype == grad.dtype and grad.norm() > 0
        assert (ours[1][name] - grad).norm() <= bound * grad.norm(), name


# Bounds: a few roundings of float32 and of bfloat16 (2^-8) in a row.
@pytest.mark.parametrize(
    ("kind", "autocast", "bound"),
    [(KINDS[0], None, 1e-5), (KINDS[0], torch.bfloat16, 4e-2), (KINDS[3], torch.bfloat16, 4e-2)],
    ids=["nf4-float32", "nf4-bfloat16", "int8-bfloat16"],
)
def test_equals_eager_and_peft_and_compiles_once(folder, kind, autocast, bound):
    peft = wrapped(folder, kind, autocast or torch.float32).train()
    model, forward = trained(copy.deepcopy(peft), autocast)
    use_packed_attention(peft.get_base_model())
    peft_forward = copy.copy(forward)
    peft_forward.model = peft.get_base_model()
    told = []
    compile_layers(model, tell=told.append, **QUICK)
    for lengths in STEPS:
        ours = step(model, forward, lengths)
        with without_compile(model):
            same(ours, step(model, forward, lengths), bound)
        same(ours, step(peft, peft_forward, lengths), bound)
    # Layer 0, whose input needs no gradient, and the other.
    assert counters["stats"]["unique_graphs"] == 2 and not counters["graph_break"]
    assert compiled_layers(model) == LAYERS and len(told) == 1 and "Compiled 2" in told[0]


@pytest.mark.slow
def test_kernels_of_the_compiler(folder):
    """Real generated code, not only captured graphs: an MLP in autocast's 16 bits, as on a GPU."""
    model, _ = trained(wrapped(folder, KINDS[0], torch.bfloat16))
    mlp = model.get_base_model().model.layers[1].mlp
    wanted = [p for p in mlp.parameters() if p.requires_grad]
    compiled = torch.compile(mlp, fullgraph=True, dynamic=True)
    for tokens in (7, 20):
        x = torch.randn(1, tokens, 64, requires_grad=True)
        found = []
        for call in (mlp, compiled):
            with torch.autocast("cpu", dtype=torch.bfloat16):
                y = call(x)
            found.append([y, *torch.autograd.grad(y.float().square().sum(), [x, *wanted])])
        for eager, ours in zip(*found, strict=True):
            assert eager.norm() > 0 and (ours - eager).float().norm() <= 2e-2 * eager.float().norm()


def test_layers_that_are_computed_again(folder):
    model, forward = trained(wrapped(folder, KINDS[0]))
    plain = step(model, forward)
    model.get_base_model().gradient_checkpointing_enable({"use_reentrant": False})
    compile_layers(model, **QUICK)
    same(step(model, forward), plain, 1e-5)
    assert compiled_layers(model) == LAYERS


def expanded(tensors, model):
    """Those that could be an expanded weight: a float with its sizes, which are no symbols."""
    shapes = {tuple(sorted((m.out_features, m.in_features))) for m in model.modules() if is_quantized(m)}
    static = [t for t in tensors if t.is_floating_point() and all(type(size) is int for size in t.shape)]
    return [t for t in static if tuple(sorted(t.shape)) in shapes]


@pytest.mark.parametrize("kind", [KINDS[0], KINDS[3]], ids=["nf4", "int8"])
def test_no_expanded_weight_is_kept_for_the_backward_pass(folder, kind):
    kept, saved = [], []

    def forward_compiler(graph, inputs):
        (output,) = (node for node in graph.graph.nodes if node.op == "output")
        kept.extend(node.meta["val"] for node in output.args[0] if node is not None)
        return make_boxed_func(graph.forward)

    backend = aot_autograd(
        fw_compiler=forward_compiler, bw_compiler=lambda graph, inputs: make_boxed_func(graph.forward),
        partition_fn=min_cut_rematerialization_partition,
    )  # fmt: skip
    model, forward = trained(wrapped(folder, kind, torch.bfloat16), torch.bfloat16)
    compile_layers(model, backend=backend)
    ours = step(model, forward, round_to=96)  # no size of a weight
    assert compiled_layers(model) == LAYERS
    values = [value for value in kept if isinstance(value, torch.Tensor)]
    assert any(value.dtype in (torch.uint8, torch.int8) for value in values) and not expanded(values, model)
    with without_compile(model), torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(t) or t, lambda t: t):
        same(ours, step(model, forward, round_to=96), 4e-2)
    assert any(t.dtype in (torch.uint8, torch.int8) for t in saved)
    head = model.get_base_model().lm_head.weight
    assert not expanded([t for t in saved if t.shape != head.shape], model)


def test_what_peft_computes_itself(folder):
    model, forward = trained(wrapped(folder, KINDS[0], use_dora=True))
    compile_layers(model, **QUICK)
    loss, grads = step(model, forward)
    with without_compile(model):
        eager_loss, eager_grads = step(model, forward)
    assert abs(loss - eager_loss) <= 1e-5 * loss
    for name, grad in eager_grads.items():
        assert grad.norm() > 0 and (grads[name] - grad).norm() <= 1e-4 * grad.norm()


def test_adapters_off_evaluation_and_pefts_own_forward(folder):
    model, forward = trained(wrapped(folder, KINDS[0]))
    start_compiling(model.get_base_model().model.layers[1], **QUICK)
    plain = step(model, forward)
    rows = [random_sample(np.random.default_rng(0), length, place) for place, length in enumerate(STEPS[1])]
    with torch.no_grad():
        for adapters in (True, False):
            with contextlib.nullcontext() if adapters else model.disable_adapter():
                ours = forward(pack(rows, 64)).loss
                with without_compile(model):
                    assert abs(ours - forward(pack(rows, 64)).loss) <= 1e-5 * ours
    with plain_lora(model):
        same(step(model, forward), plain, 1e-5)
    same(step(model, forward), plain, 1e-6)
    assert compiled_layers(model) == LAYERS[1:]


def test_an_island_in_a_compiled_layer(folder):
    """What the guard heals a packed MLP with: it expands to float32 there, and is 16 bit again afterwards."""
    model, forward = trained(wrapped(folder, KINDS[0], torch.bfloat16), torch.bfloat16)
    layer = model.get_base_model().model.layers[1]
    start_compiling(layer, **QUICK)
    before = step(model, forward)
    mlp = layer.mlp
    seen = []
    mlp.down_proj.register_forward_hook(lambda module, args, y: seen.append(y.dtype))
    set_island(mlp, torch.float32, keep_output=True)
    hold_island_weights(mlp)
    ours = step(model, forward)
    with without_compile(model):
        same(ours, step(model, forward), 4e-2)
    assert set(seen) == {torch.float32} and ours[0] != before[0]
    clear_island(mlp)
    same(step(model, forward), before, 1e-6)
    assert compiled_layers(model) == LAYERS[1:]


@pytest.mark.parametrize("biased", [True, False])
@pytest.mark.parametrize("kind", [KINDS[0], KINDS[3]], ids=["nf4-double", "int8"])
def test_the_operators_say_what_they_give(folder, kind, biased):
    """Shapes and dtypes without values, with adapter and without, adapter's products in another dtype or not."""
    linear = wrapped(folder, kind).get_base_model().model.layers[0].mlp.up_proj
    tensors, *layout = packed_parts(linear)
    x, dy = torch.randn(5, 64).bfloat16(), torch.randn(5, 128).bfloat16()
    bias = torch.randn(128).bfloat16() if biased else None
    for rank_dtype in (None, torch.bfloat16, torch.float32):
        a, b, z = (
            None if rank_dtype is None else torch.randn(s, dtype=rank_dtype) for s in ((3, 64), (128, 3), (5, 3))
        )
        operators, tests = torch.ops.surefoot, ("test_schema", "test_faketensor")
        torch.library.opcheck(operators.quantized_linear.default, (x, tensors, *layout, bias, a, b), test_utils=tests)
        for needs in (True, False):
            torch.library.opcheck(
                operators.quantized_linear_backward.default,
                (dy, tensors, *layout, None if a is None else x, z, a, b, needs),
                test_utils=tests,
            )


def test_adapters_products_in_float32_over_16_bit_inputs_compiled(folder):
    """Without autocast: inputs in bfloat16, adapters in float32, as PEFT computes it."""
    linear = wrapped(folder, KINDS[0]).get_base_model().model.layers[0].mlp.up_proj
    packed = packed_parts(linear)
    a, b = torch.randn(3, 64, requires_grad=True), torch.randn(128, 3, requires_grad=True)
    x = torch.randn(7, 64).bfloat16().requires_grad_()

    def run(x, a, b):
        return quantized_linear(x, packed, None, Adapter(a, b, 2.0, torch.float32))

    found = []
    for call in (run, torch.compile(run, fullgraph=True, dynamic=True, **QUICK)):
        y = call(x, a, b)
        found.append([y, *torch.autograd.grad(y.float().square().sum(), (x, a, b))])
    for eager, compiled in zip(*found, strict=True):
        assert compiled.dtype == eager.dtype and compiled.float().norm() > 0
        torch.testing.assert_close(compiled, eager, rtol=2**-7, atol=1e-3)


def test_who_watches_operations_sees_the_products(folder):
    """Eagerly, and from compiled layers too: the guard's trace needs them one by one."""
    seen = set()

    class Watcher(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            seen.add(str(func))
            return func(*args, **(kwargs or {}))

    model, forward = trained(wrapped(folder, KINDS[0]))
    assert {FusedLora4bit, PackedLinear4bit} <= {type(module) for module in model.modules()}
    compile_layers(model, **QUICK)
    step(model, forward)
    with Watcher():
        step(model, forward)
    assert "aten.addmm_.default" in seen and not any("quantized_linear" in name for name in seen)
