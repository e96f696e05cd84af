"""Parts that are computed again: the same loss and gradients, random numbers included, eager and compiled."""

from __future__ import annotations

import copy

import pytest
import torch

from surefoot.model.compiled import compile_layers, compiled_layers
from surefoot.model.islands import clear_island, set_island
from surefoot.model.memory import Choice
from surefoot.model.recompute import recompute, recomputed, turn_on_recompute
from surefoot.model.structure import decoder_layers, mlp_of
from variant_models import FAMILIES, adapted, step, tiny

BF16 = torch.bfloat16
CHOICES = [Choice(0, 3), Choice(1, 1), Choice(3), Choice(3, 0, offload=True)]


def assert_same(first, second, tolerance=0.0):
    assert float((first[0] - second[0]).abs()) <= tolerance * float(first[0].abs())
    assert first[1].keys() == second[1].keys()
    for name, grad in first[1].items():
        assert float((grad - second[1][name]).abs().max()) <= tolerance * float(grad.abs().max() + 1e-6), name


def count_mlp_calls(model):
    """Count how often the products at the end of the MLPs are asked for."""
    calls = []
    for layer in decoder_layers(model):
        last = [m for m in mlp_of(layer).modules() if not list(m.children())][-1]
        last.register_forward_hook(lambda *_: calls.append(1))
    return calls


@pytest.mark.parametrize("choice", CHOICES, ids=str)
@pytest.mark.parametrize(("family", "how"), [("llama", "dropout"), ("gemma2", "lora"), ("mixtral", "full")])
def test_eager_parts_give_the_same_bits(family, how, choice):
    model, forward = adapted(tiny(family, BF16), how, autocast=BF16)
    kept = step(model, forward)
    recompute(model, choice)
    assert recomputed(model) == (choice.layers, choice.mlps)
    assert_same(kept, step(model, forward))


@pytest.mark.parametrize("family", sorted(FAMILIES))
def test_the_mlp_of_every_family_is_found(family):
    for layer in decoder_layers(tiny(family)):
        assert mlp_of(layer) is layer.mlp


def test_an_mlp_runs_twice_in_training_and_once_else():
    model, forward = adapted(tiny("llama"), "full")
    recompute(model, Choice(1, 1))
    calls = count_mlp_calls(model)
    step(model, forward)
    assert len(calls) == 3 + 2
    calls.clear()
    model.eval()
    step(model, forward)
    assert len(calls) == 3


@pytest.mark.parametrize(
    ("family", "how", "choice"), [("llama", "lora", Choice(1, 1)), ("llama", "dropout", Choice(0, 3))]
)
def test_compiled_layers_trace_what_is_recomputed(family, how, choice):
    """With fullgraph: a layer that did not trace would say so and run eagerly."""
    said: list[str] = []
    model, forward = adapted(tiny(family), how)
    recompute(model, choice)
    eager = step(model, forward)
    torch._dynamo.reset()
    compile_layers(model, tell=said.append, backend="aot_eager")
    compiled = step(model, forward)
    assert len(compiled_layers(model)) == 3 and not any("uncompiled" in sentence for sentence in said), said
    # Grouped products add up in another order; a float32 difference, where other random numbers would be none.
    assert_same(eager, compiled, tolerance=1e-4)


def test_offloaded_layers_run_uncompiled():
    model, forward = adapted(tiny("llama"), "lora")
    kept = step(model, forward)
    compile_layers(model, backend="aot_eager")
    recompute(model, Choice(3, 0, offload=True))
    assert compiled_layers(model) == []
    assert_same(kept, step(model, forward), tolerance=1e-5)


def test_inside_an_island_nothing_of_an_mlp_is_recomputed():
    """Its weights are cast only while the forward pass runs; computed again they would be others."""
    model, forward = adapted(tiny("llama", BF16), "full", trainable=BF16)
    layers = decoder_layers(model)
    for part in (layers[0], mlp_of(layers[1])):
        set_island(part, torch.float32)
    kept = step(model, forward)
    for part in (layers[0], mlp_of(layers[1])):
        clear_island(part)
    recompute(model, Choice(0, 3))
    for part in (layers[0], mlp_of(layers[1])):
        set_island(part, torch.float32)
    calls = count_mlp_calls(model)
    assert_same(kept, step(model, forward))
    assert len(calls) == 3 + 1
    for part in (layers[0], mlp_of(layers[1])):
        clear_island(part)
    calls.clear()
    step(model, forward)
    assert len(calls) == 3 + 3


def test_a_copy_of_the_model_recomputes_its_own_mlps():
    model, _ = adapted(tiny("llama"), "full")
    recompute(model, Choice(0, 3))
    other = copy.deepcopy(model)
    with torch.no_grad():
        for p in mlp_of(decoder_layers(other)[0]).parameters():
            p.zero_()
    x = torch.randn(1, 3, 32)
    assert float(mlp_of(decoder_layers(other)[0])(x).detach().abs().max()) == 0.0
    assert float(mlp_of(decoder_layers(model)[0])(x).detach().abs().max()) > 0.0


def test_all_layers_may_be_turned_on_after_some():
    model, forward = adapted(tiny("llama"), "lora")
    kept = step(model, forward)
    recompute(model, Choice(1, 1))
    turn_on_recompute(model)
    assert recomputed(model)[0] == 3
    assert_same(kept, step(model, forward))
