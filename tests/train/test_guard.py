"""The minimal guard: a step that is not finite never reaches the weights, and its report names what was seen."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from hypothesis import HealthCheck, given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st

from helpers import MemoryTable, random_table, save_tiny_model
from surefoot.guard.finite import NonFiniteStepError
from surefoot.train import step as step_module


def journal(settings):
    lines = (Path(settings["output_dir"]) / "surefoot" / "guard.jsonl").read_text().splitlines()
    return [json.loads(line) for line in lines]


def test_a_nan_weight_is_named(settings, start, tmp_path):
    from safetensors.torch import load_file, save_file

    folder = save_tiny_model(tmp_path / "poisoned")
    weights = load_file(folder / "model.safetensors")
    weights["model.layers.1.mlp.up_proj.weight"][3, 5] = float("nan")
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    settings["model_name_or_path"] = str(folder)
    with pytest.raises(NonFiniteStepError, match=r"layers\.1\.mlp\.up_proj"):
        start(settings)
    (event,) = journal(settings)
    assert (event["event"], event["class"], event["phase"], event["loss"]) == ("stopped", "WEIGHTS", "forward", None)
    assert not list(Path(settings["output_dir"]).glob("*.safetensors")), "no adapter of a run that failed"


@pytest.mark.parametrize("flags", [{}, {"bf16": True}, {"fp16": True}])
def test_a_bad_gradient_stops_before_the_update(settings, start, monkeypatch, flags):
    seen = {}
    norm = step_module.gradient_norm

    def plant(parameters, scale):
        parameters = list(parameters)
        if seen.setdefault("calls", 0) >= 2:
            parameters[4].grad.view(-1)[1] = float("inf")
        seen["calls"] += 1
        return norm(parameters, scale)

    monkeypatch.setattr(step_module, "gradient_norm", plant)
    with pytest.raises(NonFiniteStepError, match="step 3") as caught:
        start(settings | flags)
    assert len(caught.value.findings["bad_gradients"]) == 1
    assert journal(settings)[0]["phase"] == "backward"


def test_a_large_loss_scale_is_lowered_and_loses_nothing(settings, start, monkeypatch):
    settings |= {"fp16": True, "lora_dropout": 0.1}
    normal, _ = start(settings)
    monkeypatch.setattr("surefoot.train.loss_scale.START", 2.0**40)
    lowered, _ = start(settings | {"overwrite_output_dir": True})
    assert len(lowered.steps) == len(normal.steps)
    assert [round(a, 3) for a in lowered.losses] == [round(b, 3) for b in normal.losses]


@hypothesis_settings(max_examples=15, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    value=st.sampled_from([float("nan"), float("inf"), float("-inf")]),
    place=st.integers(0, 27),
    at=st.integers(1, 6),
    kind=st.sampled_from(["weight", "gradient"]),
    flags=st.sampled_from([{}, {"bf16": True}, {"fp16": True}, {"finetuning_type": "full"}]),
)
def test_no_fault_ends_well_or_saves_bad_weights(settings, start, value, place, at, kind, flags):
    from surefoot.train import loop

    apply, norm, count = loop.apply_step, step_module.gradient_norm, [0]

    def poison_weight(run, check):
        apply(run, check)
        if check.step == at:
            trained = [p for p in run.model.parameters() if p.requires_grad]
            trained[place % len(trained)].data.view(-1)[0] = value

    def poison_gradient(parameters, scale):
        parameters, count[0] = list(parameters), count[0] + 1
        if count[0] >= at:
            parameters[place % len(parameters)].grad.view(-1)[0] = value
        return norm(parameters, scale)

    with pytest.MonkeyPatch.context() as patch:
        if kind == "weight":
            patch.setattr(loop, "apply_step", poison_weight)
        else:
            patch.setattr(step_module, "gradient_norm", poison_gradient)
        from surefoot.errors import WorkError

        with pytest.raises(WorkError, match="not finite"):
            start(settings | flags | {"overwrite_output_dir": True, "save_strategy": "steps", "save_steps": 1})
    for file in Path(settings["output_dir"]).rglob("*.safetensors"):
        from safetensors.torch import load_file

        assert all(bool(t.isfinite().all()) for t in load_file(file).values()), file


def test_a_token_beyond_the_vocabulary_is_named(settings, start):
    table = random_table(8)
    table.samples[5].input_ids[2] = 4000
    with pytest.raises(ValueError, match="row rows:5 has token id 4000"):
        start(settings, MemoryTable(table.samples))


def test_out_of_memory_halves_the_pass_and_loses_nothing(settings, start, monkeypatch):
    normal, _ = start(settings | {"lora_dropout": 0.0})
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: None)
    pack = step_module.pack

    def too_large(samples):
        if sum(len(s.input_ids) for s in samples) > 60:
            raise torch.OutOfMemoryError("planted")
        return pack(samples)

    monkeypatch.setattr(step_module, "pack", too_large)
    halved, _ = start(settings | {"overwrite_output_dir": True})
    assert any("Out of memory" in message for message in halved.messages)
    assert max(abs(a - b) for a, b in zip(halved.losses, normal.losses, strict=True)) < 1e-5


def test_one_row_too_large_is_a_clear_failure(settings, start, monkeypatch):
    def never(samples):
        raise torch.OutOfMemoryError("planted")

    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: None)
    monkeypatch.setattr(step_module, "pack", never)
    with pytest.raises(RuntimeError, match="does not fit"):
        start(settings)
