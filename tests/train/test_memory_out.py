"""Out of memory in a run: the same loss and gradients in smaller passes, then recompute, then a clear end."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pytest
import torch

from helpers import random_sample
from surefoot.errors import WorkError
from surefoot.guard import scene as scene_module
from surefoot.model.activations import Numerics
from surefoot.model.memory import GIB, Choice, MemoryModel, MemoryPlan
from surefoot.model.recompute import turn_on_recompute
from surefoot.model.shapes import read_shapes
from surefoot.run.results import training_metrics
from surefoot.train.events import TrainResult
from surefoot.train.loss_scale import LossScale
from surefoot.train.run import with_memory
from surefoot.train.step import StepRunner
from variant_models import adapted, tiny


def a_runner(tokens=10_000, **more):
    model, forward = adapted(tiny("llama"), "dropout")
    said: list[str] = []
    return StepRunner(model, forward, "cpu", LossScale.for_run(False), tokens, tell=said.append, **more), said


def a_step(runner):
    rng = np.random.default_rng(0)
    samples = [random_sample(rng, length, row) for row, length in enumerate((30, 20, 25, 9))]
    torch.manual_seed(7)
    attempt = runner.compute(1, samples)
    return attempt.check, {name: p.grad.clone() for name, p in runner.trained.items()}


@pytest.fixture
def small_device(monkeypatch):
    """Let passes of more than so many tokens run out of memory, in the middle of the step."""
    limit = [10_000]
    pack = scene_module.pack

    def packed(samples, *rest, **more):
        if sum(len(sample.input_ids) for sample in samples) > limit[0]:
            raise torch.OutOfMemoryError("planted")
        return pack(samples, *rest, **more)

    monkeypatch.setattr(scene_module, "pack", packed)
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: None)
    return limit


def test_halved_passes_give_the_same_loss_and_gradients(small_device):
    runner, said = a_runner()
    runner.model.eval()  # dropout draws by place: other passes draw other numbers
    _, whole = a_step(runner)
    small_device[0], runner.tokens_per_pass = 45, 84
    _, halved = a_step(runner)
    assert runner.tokens_per_pass == 42 and len(said) == 1 and runner.most_passes == 3
    for name, grad in whole.items():
        torch.testing.assert_close(halved[name], grad, rtol=1e-5, atol=1e-6)


def test_recompute_comes_before_giving_up(small_device):
    runner, said = a_runner()
    _, whole = a_step(runner)

    def recompute_more():
        small_device[0] = 10_000
        turn_on_recompute(runner.model)
        return True

    runner.recompute_more, small_device[0], runner.tokens_per_pass = recompute_more, 10, 30
    runner.model.eval()
    a_step(runner)
    assert any("recomputed" in sentence for sentence in said) and runner.largest_pass == 84 and whole


def test_giving_up_is_clear(small_device):
    runner, _ = a_runner(recompute_more=lambda: False)
    small_device[0] = 10
    with pytest.raises(WorkError, match="one row of 30 tokens does not fit"):
        a_step(runner)


@pytest.mark.parametrize(("measured", "sentences"), [(1.05, 0), (0.95, 0), (1.2, 1), (0.7, 1)])
def test_a_plan_that_is_off_is_said_once_and_both_figures_are_recorded(monkeypatch, measured, sentences):
    shapes = read_shapes({"vocab_size": 999, "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2,
                          "num_attention_heads": 4})  # fmt: skip
    model = MemoryModel(shapes, Numerics(2, 2, 2, whole=True), 3 * GIB, 1000, 8, 2)
    plan = MemoryPlan(500, Choice(), model, 100, 500, 1, 9 * GIB)
    runner, said = SimpleNamespace(device="cuda:0", plan=plan, largest_pass=300, most_passes=2), []
    planned = plan.peak_gib(300, 2)
    monkeypatch.setattr(torch.cuda, "max_memory_allocated", lambda device: measured * planned * GIB)
    result = with_memory(SimpleNamespace(runner=runner, tell=said.append), TrainResult(1, 1.0, 2.0, 3.0, 4, 5))
    assert len(said) == sentences and all("planned 3.0 GiB" in sentence for sentence in said)
    metrics = training_metrics(result)
    assert metrics["train_memory_gib"] == pytest.approx(measured * planned, abs=1e-3)
    assert metrics["train_planned_memory_gib"] == pytest.approx(planned, abs=1e-3)
