"""Before step 1 compiled layers are compared with eager ones: a wrong one is named, rounding is not."""

from __future__ import annotations

import pytest
import torch

from helpers import random_sample
from surefoot.guard.preflight_compiled import check_compiled
from surefoot.guard.scene import Scene
from surefoot.model.compiled import CACHE_VARIABLE, compile_layers
from surefoot.model.randomness import get_random_state
from surefoot.model.structure import decoder_layers
from variant_models import adapted, tiny


@pytest.fixture
def scene(monkeypatch, tmp_path):
    import numpy as np

    monkeypatch.setenv(CACHE_VARIABLE, str(tmp_path))
    model, forward = adapted(tiny("llama"), "lora", autocast=torch.bfloat16)
    compile_layers(model, backend="aot_eager")
    rng = np.random.default_rng(0)
    rows = tuple(random_sample(rng, length, place) for place, length in enumerate((7, 12, 30)))
    return Scene(model, forward, "cpu", 1, rows, 64, 1.0, get_random_state("cpu"))


class _Wrong(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, grad):
        return grad * 0


def plant(layer, change):
    compiled = layer._compiled_call_impl
    right = compiled.call
    compiled.call = lambda *args, **kwargs: change(right(*args, **kwargs))


def test_sound_layers_pass_also_in_bfloat16(scene):
    assert check_compiled(scene) is None


@pytest.mark.parametrize("change", [_Wrong.apply, lambda x: x * 1.5, lambda x: x * float("nan")])
def test_a_wrong_layer_is_named_and_left_to_eager(scene, change):
    plant(decoder_layers(scene.model)[1], change)
    finding = check_compiled(scene)
    assert finding is not None and finding.diagnosis.fault == "KERNEL"
    assert [(c.kind, c.module) for c in finding.changes] == [("compile_off", "model.layers.1")]
