"""Compiled layers compute what eager ones do, compile once whatever the rows' lengths, and fail out loud."""

from __future__ import annotations

import copy
import os
import subprocess
import sys

import numpy as np
import pytest
import torch
from torch._dynamo.utils import counters

from helpers import random_sample
from surefoot.data.batch import count_trained, pack
from surefoot.model.compiled import (
    CACHE_VARIABLE,
    compile_layers,
    compiled_layers,
    is_compiled,
    keep_compiled_code,
    start_compiling,
    stop_compiling,
)
from surefoot.model.islands import set_attention_kernel, set_island
from surefoot.model.structure import decoder_layers
from surefoot.model.variants import in_float32, reference_kernels, without_compile
from variant_models import adapted, tiny

# Captures and differentiates as inductor does, but makes no kernels: seconds instead of half a minute.
QUICK = {"backend": "aot_eager"}
STEPS = [(9, 5, 7), (4, 30), (20,), (8, 8, 8), (3, 6, 12, 24, 2)]
LAYERS = ["model.layers.0", "model.layers.1", "model.layers.2"]


@pytest.fixture(autouse=True)
def own_cache(monkeypatch, tmp_path):
    monkeypatch.setenv(CACHE_VARIABLE, str(tmp_path))


@pytest.fixture
def fresh_compiler():
    """For tests that count graphs; the others share what is compiled, which saves them seconds each."""
    torch._dynamo.reset()
    counters.clear()


def small(dtype=torch.float32, how="full"):
    return adapted(tiny("llama", dtype), how, dtype)


def rows_of(lengths, seed=0):
    rng = np.random.default_rng(seed)
    return [random_sample(rng, length, place) for place, length in enumerate(lengths)]


def step(model, forward, lengths, round_to=1):
    rows = rows_of(lengths)
    model.zero_grad(set_to_none=True)
    loss = forward(pack(rows, round_to)).loss / count_trained(rows)
    loss.backward()
    return loss.detach(), torch.cat([p.grad.flatten().float() for p in model.parameters() if p.grad is not None])


def distance(a, b):
    return float((a - b).norm() / b.norm())


def graphs():
    return counters["stats"]["unique_graphs"]


# How many graphs: layer 0, whose input needs no gradient, and the others; Gemma has two kinds of layer.
@pytest.mark.parametrize(
    ("family", "how", "most"),
    [
        ("llama", "lora", 2),
        ("qwen2", "full", 1),
        ("qwen3", "full", 1),
        ("gemma2", "full", 2),
        ("mixtral", "full", 1),
    ],
)
@pytest.mark.usefixtures("fresh_compiler")
def test_equals_eager_and_compiles_once(family, how, most):
    model, forward = adapted(tiny(family), how)
    told = []
    assert compile_layers(model, tell=told.append, **QUICK) == LAYERS
    for lengths in STEPS:
        with without_compile(model):
            loss, grad = step(model, forward, lengths)
        for round_to in (1, 64):
            our_loss, our_grad = step(model, forward, lengths, round_to)
            assert abs(our_loss - loss) <= 1e-5 * loss
            assert distance(our_grad, grad) <= 1e-5
    assert 1 <= graphs() <= most and not counters["graph_break"]
    assert compiled_layers(model) == LAYERS
    assert len(told) == 1 and "Compiled 3 decoder layers in" in told[0]


@pytest.mark.usefixtures("fresh_compiler")
def test_equals_eager_in_bfloat16_within_its_rounding():
    """As far from float32 as eager is, over some steps: in a single one either may be the luckier."""
    model, forward = adapted(tiny("llama", num_hidden_layers=1), "lora", autocast=torch.bfloat16)
    compile_layers(model, **QUICK)
    ours, eager = [], []
    for lengths in STEPS:
        with in_float32(model, forward):
            exact_loss, exact_grad = step(model, forward, lengths)
        with without_compile(model):
            loss, grad = step(model, forward, lengths)
        our_loss, our_grad = step(model, forward, lengths, 64)
        assert abs(our_loss - exact_loss) <= 2 * abs(loss - exact_loss) + 2**-8 * exact_loss
        ours.append(distance(our_grad, exact_grad))
        eager.append(distance(grad, exact_grad))
    assert sum(ours) <= 1.5 * sum(eager)
    assert graphs() == 1


@pytest.mark.usefixtures("fresh_compiler")
def test_kernels_of_the_compiler():
    """Real generated code, not only captured graphs."""
    model, forward = adapted(tiny("llama", num_hidden_layers=1), "lora")
    compile_layers(model)
    for lengths in STEPS[:3]:
        with without_compile(model):
            loss, grad = step(model, forward, lengths)
        our_loss, our_grad = step(model, forward, lengths, 64)
        assert abs(our_loss - loss) <= 1e-5 * loss
        assert distance(our_grad, grad) <= 1e-5
    assert graphs() == 1


@pytest.mark.usefixtures("fresh_compiler")
def test_with_recompute():
    model, forward = small()
    forward.model.gradient_checkpointing_enable({"use_reentrant": False})
    model.train()
    loss, grad = step(model, forward, (9, 5, 7))
    compile_layers(model, **QUICK)
    for lengths in STEPS:
        our_loss, our_grad = step(model, forward, lengths)
    our_loss, our_grad = step(model, forward, (9, 5, 7))
    assert torch.equal(our_loss, loss) or abs(our_loss - loss) <= 1e-5 * loss
    assert distance(our_grad, grad) <= 1e-5
    assert compiled_layers(model) == LAYERS and graphs() <= 2


def test_dropout_of_adapters_is_drawn_and_drawn_again():
    model, forward = adapted(tiny("llama", num_hidden_layers=1), "dropout")
    compile_layers(model, **QUICK)
    model.train()
    torch.manual_seed(5)
    one = step(model, forward, (9, 5, 7))
    two = step(model, forward, (9, 5, 7))
    torch.manual_seed(5)
    again = step(model, forward, (9, 5, 7))
    assert torch.equal(one[1], again[1]) and not torch.equal(one[1], two[1])
    assert compiled_layers(model) == LAYERS[:1]


def test_what_peft_computes_in_its_own_way_is_right_compiled_or_not():
    model, forward = adapted(tiny("llama", num_hidden_layers=1), "dora")
    told = []
    compile_layers(model, tell=told.append, **QUICK)
    with without_compile(model):
        loss, grad = step(model, forward, (9, 5, 7))
    our_loss, our_grad = step(model, forward, (9, 5, 7), 64)
    assert abs(our_loss - loss) <= 1e-5 * loss and distance(our_grad, grad) <= 1e-5
    assert bool(compiled_layers(model)) != ("model.layers.0 runs uncompiled" in told[0])


def test_one_layer_alone_can_be_stopped():
    model, forward = small()
    compile_layers(model, **QUICK)
    stop_compiling(decoder_layers(model)[1])
    assert compiled_layers(model) == [LAYERS[0], LAYERS[2]]
    with without_compile(model):
        _, grad = step(model, forward, (9, 5, 7))
    assert distance(step(model, forward, (9, 5, 7), 16)[1], grad) <= 1e-5
    start_compiling(decoder_layers(model)[1], **QUICK)
    assert compiled_layers(model) == LAYERS
    assert distance(step(model, forward, (9, 5, 7), 16)[1], grad) <= 1e-5


class Stubborn(torch.nn.Module):
    """Does what no compiler can follow: takes a decision on a value."""

    def forward(self, x):
        return x * 1.0 if x.sum() > 0 else x + 0.0


def test_a_layer_that_cannot_be_compiled_runs_eagerly_and_says_so():
    model, forward = small()
    decoder_layers(model)[1].input_layernorm = torch.nn.Sequential(Stubborn(), decoder_layers(model)[1].input_layernorm)
    loss, grad = step(model, forward, (9, 5, 7))
    told = []
    compile_layers(model, tell=told.append, **QUICK)
    for _ in range(2):
        our_loss, our_grad = step(model, forward, (9, 5, 7), 64)
        assert abs(our_loss - loss) <= 1e-5 * loss and distance(our_grad, grad) <= 1e-5
    assert compiled_layers(model) == [LAYERS[0], LAYERS[2]]
    assert len(told) == 2 and told[0].startswith("model.layers.1 runs uncompiled: ")


def broken_backward(graph, inputs):
    """A compiler whose second graph, the backward one, fails."""
    broken_backward.calls += 1
    if broken_backward.calls == 2:
        raise RuntimeError("no such instruction")
    return graph.forward


def test_a_backward_graph_that_fails_shows_in_the_forward_pass():
    from torch._dynamo.backends.common import aot_autograd

    broken_backward.calls = 0
    model, forward = adapted(tiny("llama", num_hidden_layers=1), "full")
    loss, grad = step(model, forward, (9, 5, 7))
    told = []
    compile_layers(model, tell=told.append, backend=aot_autograd(fw_compiler=broken_backward))
    our_loss, our_grad = step(model, forward, (9, 5, 7))
    assert compiled_layers(model) == [] and "model.layers.0 runs uncompiled" in told[0]
    assert torch.equal(our_loss, loss) and torch.equal(our_grad, grad)


def test_an_error_of_the_layer_itself_is_not_swallowed():
    model, forward = small()
    compile_layers(model, **QUICK)
    step(model, forward, (9, 5, 7))

    def out_of_memory(*_args, **_kwargs):
        raise torch.OutOfMemoryError("planted")

    layer = decoder_layers(model)[1]
    layer._compiled_call_impl.call = out_of_memory
    with pytest.raises(torch.OutOfMemoryError, match="planted"):
        step(model, forward, (9, 5, 7))
    assert is_compiled(layer)


@pytest.mark.parametrize("name", ["eager", "fused"])
def test_kernel_overrides_and_islands_reach_compiled_layers(name):
    """What is changed after compiling is what runs: the compiled code is not taken for the new case."""
    model, forward = small(dtype=torch.bfloat16)
    compile_layers(model, **QUICK)
    plain, _ = step(model, forward, (9, 5, 7), 64)
    layer = decoder_layers(model)[1]
    set_attention_kernel(layer.self_attn, name)
    set_island(layer, torch.float32)
    with without_compile(model):
        loss, grad = step(model, forward, (9, 5, 7))
    our_loss, our_grad = step(model, forward, (9, 5, 7), 64)
    # The other layers round to 8 bits either way; without the island the gradient is farther off.
    assert abs(our_loss - loss) <= 2**-8 * loss and distance(our_grad, grad) <= 2**-5
    assert our_loss != plain


def test_replays_of_the_guard_run_on_padded_passes_too():
    model, forward = small()
    compile_layers(model, **QUICK)
    loss, grad = step(model, forward, (9, 5, 7), 64)
    for variant in (in_float32, reference_kernels):
        with variant(model, forward):
            other_loss, other_grad = step(model, forward, (9, 5, 7), 64)
        assert abs(other_loss - loss) <= 1e-5 * loss and distance(other_grad, grad) <= 1e-4
    assert compiled_layers(model) == LAYERS


def test_who_watches_operations_sees_those_of_compiled_layers():
    from torch.utils._python_dispatch import TorchDispatchMode

    seen = set()

    class Watcher(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            seen.add(str(func))
            return func(*args, **(kwargs or {}))

    model, forward = small()
    compile_layers(model, **QUICK)
    step(model, forward, (9, 5, 7))
    with Watcher():
        step(model, forward, (9, 5, 7))
    assert "aten.silu.default" in seen and "surefoot.packed_attention.default" not in seen


def test_evaluation_and_copies():
    model, forward = small()
    compile_layers(model, **QUICK)
    loss, _ = step(model, forward, (9, 5, 7))
    with torch.no_grad():
        rows = rows_of((9, 5, 7))
        assert abs(forward(pack(rows)).loss / count_trained(rows) - loss) <= 1e-5 * loss
    assert compiled_layers(copy.deepcopy(model)) == []


def test_compiled_code_is_kept_where_the_person_wants_it(monkeypatch, tmp_path):
    monkeypatch.setenv(CACHE_VARIABLE, "mine")
    keep_compiled_code()
    assert os.environ[CACHE_VARIABLE] == "mine"
    monkeypatch.delenv(CACHE_VARIABLE)
    monkeypatch.setenv("SUREFOOT_CACHE", str(tmp_path / "cache"))
    keep_compiled_code()
    assert os.environ[CACHE_VARIABLE] == str(tmp_path / "cache" / "compiled")
    monkeypatch.delenv(CACHE_VARIABLE)
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("SUREFOOT_CACHE", str(tmp_path / "file"))
    keep_compiled_code()
    assert CACHE_VARIABLE not in os.environ


def test_importing_changes_nothing():
    code = (
        "import os; before = dict(os.environ); import surefoot.model.compiled, surefoot.model.attention, sys;"
        "assert before == dict(os.environ) and 'torch._inductor.compile_fx' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


def test_evaluation_runs_compiled_too():
    """Without gradients, in evaluation mode, after training steps: the same loss, and no layer falls back to eager."""
    model, forward = small(how="lora")
    told = []
    compile_layers(model, tell=told.append, **QUICK)
    step(model, forward, STEPS[0])
    model.eval()
    rows = rows_of(STEPS[1])
    with torch.no_grad():
        ours = forward(pack(rows, 64)).loss
        with without_compile(model):
            assert abs(ours - forward(pack(rows)).loss) <= 1e-5 * ours
    assert compiled_layers(model) == LAYERS and len(told) == 1
