"""Fifty steps by every fast path and by the plain one: the same loss curve but for rounding, on neither side of it."""

from __future__ import annotations

from functools import partial

import numpy as np
import pytest

from helpers import random_table
from surefoot.model.compiled import CACHE_VARIABLE, compile_layers
from surefoot.model.variants import plain_lora, reference_kernels

STEPS = 50


@pytest.fixture
def fifty(settings, start, monkeypatch, tmp_path):
    """Run fifty steps of a LoRA in bfloat16 and return the losses."""
    monkeypatch.setenv(CACHE_VARIABLE, str(tmp_path / "compiled"))
    monkeypatch.setattr("surefoot.train.run.compile_layers", partial(compile_layers, backend="aot_eager"))

    def run(**keys):
        wanted = (
            settings
            | {
                "bf16": True,
                "max_steps": STEPS,
                "overwrite_output_dir": True,
                "learning_rate": 3e-3,
                "guard_preflight": False,
            }
            | keys
        )
        recorder, _ = start(wanted, random_table(64))
        assert len(recorder.losses) == STEPS
        return np.array(recorder.losses)

    return run


@pytest.fixture
def plain(fifty, monkeypatch):
    """The same fifty steps with written-out attention, PEFT's own LoRA and the model's own logits."""
    from surefoot.guard.scene import Scene

    fast = Scene.run_passes

    def by_reference(scene, *args, **kwargs):
        with reference_kernels(scene.model, scene.forward), plain_lora(scene.model):
            return fast(scene, *args, **kwargs)

    with monkeypatch.context() as patched:
        patched.setattr(Scene, "run_passes", by_reference)
        return fifty(compile=False)


def same_curve(ours, plain):
    """Residuals small against the loss, and on neither side: their mean within three standard errors of zero.

    Neighbouring residuals are not independent, so the standard error is that of ten blocks' means, and a mean below
    a thirty-second of one bfloat16 rounding passes too.
    """
    residual = ours - plain
    blocks = residual.reshape(10, -1).mean(1)
    assert np.abs(residual).max() <= 2**-6 * plain.max()
    assert abs(blocks.mean()) <= 3 * blocks.std(ddof=1) / np.sqrt(len(blocks)) + 2**-14 * plain.mean()
    assert np.abs(residual).max() > 0  # it was not the same code that ran twice


@pytest.mark.parametrize("keys", [{"compile": False}, {"compile": True}], ids=["fused", "compiled"])
def test_the_curve_is_the_plain_one(fifty, plain, keys):
    assert plain[-10:].mean() < plain[:10].mean()  # something was learnt
    same_curve(fifty(**keys), plain)
