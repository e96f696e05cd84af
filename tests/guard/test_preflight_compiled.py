"""Before step 1 compiled layers are compared with eager ones: a wrong one is named, rounding is not."""

from __future__ import annotations

import pytest
import torch

from helpers import random_sample
from surefoot.guard import preflight_compiled
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


def test_of_long_rows_only_the_ends_are_run(scene, monkeypatch):
    monkeypatch.setattr(preflight_compiled, "MOST_TOKENS", 5)
    seen = []
    rerun = Scene.rerun
    monkeypatch.setattr(Scene, "rerun", lambda self, **how: seen.append(self.samples) or rerun(self, **how))
    assert check_compiled(scene) is None
    ends = [row.input_ids[-5:].tolist() for row in scene.samples[:2]]
    assert seen and all([row.input_ids.tolist() for row in rows] == ends for rows in seen)


def test_without_memory_for_the_judge_nothing_is_compiled(scene, monkeypatch):
    def full(*_):
        raise torch.OutOfMemoryError("no room")

    monkeypatch.setattr(preflight_compiled, "in_float32", full)
    plant(decoder_layers(scene.model)[1], lambda x: x * 1.5)
    finding = check_compiled(scene)
    assert finding is not None and "did not fit" in finding.diagnosis.evidence[0]
    assert len(finding.changes) == len(decoder_layers(scene.model))
