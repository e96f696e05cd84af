"""The step behind its gate: nothing that is not finite reaches the weights, and memory that runs out loses nothing."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from helpers import MemoryTable, random_table
from surefoot.guard import scene as scene_module
from surefoot.guard.check import NonFiniteStepError
from surefoot.train.gate import Gate


def journal(settings):
    lines = (Path(settings["output_dir"]) / "surefoot" / "guard.jsonl").read_text().splitlines()
    return [json.loads(line) for line in lines]


KINDS = {
    "adamw": lambda p: torch.optim.AdamW(p, 1e-2),
    "adamw_fused": lambda p: torch.optim.AdamW(p, 1e-2, fused=True),
    "sgd_momentum": lambda p: torch.optim.SGD(p, 1e-2, momentum=0.9),
    "adagrad": lambda p: torch.optim.Adagrad(p, 1e-2),
    "rmsprop": lambda p: torch.optim.RMSprop(p, 1e-2),
}


def parameters(seed=0):
    generator = torch.Generator().manual_seed(seed)
    return [torch.nn.Parameter(torch.randn(n, generator=generator)) for n in (5, 7)]


def steps(kind, bad_at):
    """Five updates, of which those in `bad_at` carry a NaN; then everything that the optimizer holds."""
    trained = parameters()
    optimizer = KINDS[kind](trained)
    gate = Gate(optimizer)
    generator = torch.Generator().manual_seed(1)
    for step in range(5):
        gradients = [torch.randn(p.shape, generator=generator) for p in trained]
        for p, gradient in zip(trained, gradients, strict=True):
            p.grad = gradient.clone()
        bad = step in bad_at
        if bad:
            trained[0].grad[2] = float("nan")
        assert float(gate.step(torch.tensor(float(bad)))) == 0.0
        if bad:
            gate.undo_counters()
    return trained, optimizer, generator


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("bad_at", [{0}, {2}, {0, 1, 4}])
def test_a_closed_gate_leaves_weights_moments_and_counters_bit_for_bit(kind, bad_at):
    gated, optimizer, _ = steps(kind, bad_at)
    trained = parameters()
    other = KINDS[kind](trained)
    generator = torch.Generator().manual_seed(1)
    for step in range(5):
        gradients = [torch.randn(p.shape, generator=generator) for p in trained]
        if step in bad_at:
            continue  # a run that never saw the step
        for p, gradient in zip(trained, gradients, strict=True):
            p.grad = gradient
        other.step()
    for a, b in zip(gated, trained, strict=True):
        assert torch.equal(a, b)
        state, expected = optimizer.state[a], other.state[b]
        assert state.keys() == expected.keys()
        for key, value in state.items():
            same = torch.equal(value, expected[key]) if isinstance(value, torch.Tensor) else value == expected[key]
            assert same, key


@pytest.mark.parametrize("kind", ["adamw", "sgd_momentum", "adagrad", "rmsprop"])
def test_an_update_that_makes_a_weight_infinite_is_not_kept_by_an_unfused_optimizer(kind):
    trained = parameters()
    for p in trained:
        p.data = torch.full_like(p, 3.4e38)
        p.grad = torch.full_like(p, -1.0)
    before = [p.detach().clone() for p in trained]
    optimizer = KINDS[kind](trained)
    for group in optimizer.param_groups:
        group["lr"], group["weight_decay"] = 3e37, 0.0
    gate = Gate(optimizer)
    assert float(gate.step(torch.tensor(0.0))) == 1.0
    assert all(torch.equal(p, old) for p, old in zip(trained, before, strict=True))


def test_guard_off_stops_before_the_update_and_says_so(settings, start, tmp_path):
    from safetensors.torch import load_file, save_file

    from helpers import save_tiny_model

    folder = save_tiny_model(tmp_path / "poisoned")
    weights = load_file(folder / "model.safetensors")
    weights["model.layers.1.mlp.up_proj.weight"][3, 5] = float("nan")
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    settings |= {"model_name_or_path": str(folder), "guard": "off"}
    with pytest.raises(NonFiniteStepError, match="step 1 is not finite"):
        start(settings)
    (event,) = journal(settings)
    assert (event["event"], event["class"], event["loss"]) == ("stopped", None, None)
    assert not list(Path(settings["output_dir"]).glob("*.safetensors")), "no adapter of a run that failed"


def test_looking_ahead_changes_no_bit(settings, start, monkeypatch):
    settings |= {"lora_dropout": 0.1, "save_strategy": "steps", "save_steps": 2, "max_steps": 6}
    usual, first = start(settings)
    from surefoot.train import loop

    init = loop.Run.__post_init__ if hasattr(loop.Run, "__post_init__") else None

    def ahead(run):
        run.looks_ahead = True

    assert init is None
    monkeypatch.setattr(loop.Run, "__post_init__", ahead, raising=False)
    early, second = start(settings | {"overwrite_output_dir": True})
    assert early.losses == usual.losses and early.saved_at == usual.saved_at
    other = dict(second.model.named_parameters())
    assert all(torch.equal(p, other[name]) for name, p in first.model.named_parameters())


def test_a_token_beyond_the_vocabulary_is_named(settings, start):
    table = random_table(8)
    table.samples[5].input_ids[2] = 4000
    with pytest.raises(ValueError, match="row rows:5 has token id 4000"):
        start(settings, MemoryTable(table.samples))


def test_out_of_memory_halves_the_pass_and_loses_nothing(settings, start, monkeypatch):
    settings |= {"guard_preflight": False}
    normal, _ = start(settings | {"lora_dropout": 0.0})
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: None)
    pack = scene_module.pack

    def too_large(samples, *rest, **more):
        if sum(len(s.input_ids) for s in samples) > 60:
            raise torch.OutOfMemoryError("planted")
        return pack(samples, *rest, **more)

    monkeypatch.setattr(scene_module, "pack", too_large)
    halved, _ = start(settings | {"overwrite_output_dir": True})
    assert any("Out of memory" in message for message in halved.messages)
    assert max(abs(a - b) for a, b in zip(halved.losses, normal.losses, strict=True)) < 1e-5


def test_one_row_too_large_is_a_clear_failure(settings, start, monkeypatch):
    def never(samples, *rest, **more):
        raise torch.OutOfMemoryError("planted")

    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: None)
    monkeypatch.setattr(scene_module, "pack", never)
    with pytest.raises(RuntimeError, match="does not fit"):
        start(settings | {"guard_preflight": False})
