"""An incident of a planted fault, written as a run writes it, and run again from its folder alone."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from functools import partial
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from typer.testing import CliRunner

from helpers import random_sample, save_tiny_model
from surefoot.cli.main import app
from surefoot.config import make_config
from surefoot.errors import UserError
from surefoot.guard.diagnosis import Diagnosis
from surefoot.guard.incident import write_incident
from surefoot.guard.scene import Scene
from surefoot.guard.seen import Seen
from surefoot.model.load import load_model
from surefoot.model.probes import build_forward
from surefoot.model.randomness import get_random_state
from surefoot.model.tokenizer import load_tokenizer
from surefoot.train.neftune import Neftune
from surefoot.train.run import turn_on_recompute
from surefoot.use.replay import judge, replay
from surefoot.use.replay_settings import Request

SCORES = "model.layers.1.self_attn"


def fault(kind="RANGE", module: str | None = SCORES, op: str | None = "bmm", samples=()):
    return Diagnosis(12, kind, None, module, op, "forward", samples, ("Seen.",))


@pytest.fixture(scope="module")
def healthy(tmp_path_factory):
    return save_tiny_model(tmp_path_factory.mktemp("healthy"))


@pytest.fixture(scope="module")
def overflowing(tmp_path_factory):
    """A model whose attention scores in layer 1 pass float16's largest number: 120 * 120 * 8 = 115200."""
    from safetensors.torch import load_file, save_file

    folder = save_tiny_model(tmp_path_factory.mktemp("overflowing"), attention_bias=True)
    weights = load_file(folder / "model.safetensors")
    for name in ("q_proj", "k_proj"):
        weights[f"{SCORES}.{name}.bias"].fill_(120.0)
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


def settings(model, tmp_path, **more):
    return {
        "model_name_or_path": str(model), "dataset": "rows", "template": "default", "report_to": "none",
        "output_dir": str(tmp_path / "out"), "learning_rate": 1e-2, "seed": 3, "flash_attn": "disabled",
    } | more  # fmt: skip


def step_of(cfg) -> Scene:
    """A step as a run has it before its update, with weights that training has moved."""
    loaded = load_model(cfg, load_tokenizer(cfg), "cpu")
    forward = build_forward(loaded.model, loaded.precision.autocast, upcast=False, label_smoothing=0.0)
    torch.manual_seed(7)
    with torch.no_grad():
        for parameter in loaded.model.parameters():
            if parameter.requires_grad:
                parameter.add_(0.05 * torch.randn_like(parameter))
    before_pass = None
    if cfg.neftune_noise_alpha:
        before_pass = Neftune(forward.model.get_input_embeddings(), cfg.neftune_noise_alpha).before_pass
    loaded.model.train()
    rng = np.random.default_rng(1)
    samples = tuple(random_sample(rng, length, row) for row, length in enumerate((6, 9, 14)))
    scale = 1024.0 if loaded.precision.loss_scaling else 1.0
    state = get_random_state("cpu")
    return Scene(loaded.model, forward, "cpu", 12, samples, 20, scale, state, before_pass)


def keep(scene, cfg, folder, diagnosis=None, plan=None, **more):
    return write_incident(folder, scene, diagnosis or fault(), yaml=cfg.to_yaml(), plan=plan or {}, **more)


@pytest.fixture
def incident(overflowing, tmp_path):
    """The overflow in float16."""
    cfg = make_config(settings(overflowing, tmp_path, fp16=True))
    return keep(step_of(cfg), cfg, tmp_path / "out" / "surefoot" / "incidents")


def quiet(message):
    pass


def run(folder, **request):
    return replay(folder, Request(**request), quiet)


def cli(*words):
    return CliRunner().invoke(app, ["replay", *map(str, words)])


def test_an_overflow_happens_again_at_the_same_place_and_not_in_float32(incident):
    again = run(incident)
    assert again.happens is True and not again.now.finite and not again.incident.seen.finite
    assert again.now.bad_gradients == again.incident.seen.bad_gradients
    assert (again.origin.module, again.origin.op, again.origin.phase) == (SCORES, "bmm", "forward")
    assert "At the same place." in again.reason and again.notes == ()
    wide = run(incident, dtype="float32")
    assert wide.happens is False and wide.now.finite and wide.origin is None
    assert "does not happen here" in wide.reason
    assert wide.notes == ("The loss scale is 1, as a run in this precision starts; it was 1024.",)


def test_a_finite_step_is_repeated_bit_for_bit(healthy, tmp_path):
    """Dropout, NEFTune, two passes, recomputed layers, a scale: every random number and every weight is back."""
    more = {"lora_dropout": 0.2, "neftune_noise_alpha": 5.0, "fp16": True}
    cfg = make_config(settings(healthy, tmp_path, **more))
    scene = step_of(cfg)
    turn_on_recompute(scene.model)
    place = keep(scene, cfg, tmp_path, fault("SPIKE", None, None))
    again = run(place)
    assert again.now == again.incident.seen
    assert len(again.now.losses) == 2 and again.incident.recompute
    assert again.happens is True and "the same loss" in again.reason


@pytest.mark.parametrize("kind", ["full", "freeze"])
def test_full_and_freeze_tuning_are_repeated_too(kind, healthy, tmp_path):
    cfg = make_config(settings(healthy, tmp_path, finetuning_type=kind, freeze_trainable_layers=1))
    again = run(keep(step_of(cfg), cfg, tmp_path, fault("SPIKE", None, None)))
    assert again.now == again.incident.seen


def test_rows_that_ran_alone_do_so_again(healthy, tmp_path):
    cfg = make_config(settings(healthy, tmp_path, flash_attn="auto"))
    scene = step_of(cfg)
    scene.forward.packs = scene.forward.chunked = False
    scene.forward.model.set_attn_implementation("sdpa")
    again = run(keep(replace(scene, tokens_per_pass=1), cfg, tmp_path, fault("SPIKE", None, None)))
    assert again.now == again.incident.seen and len(again.now.losses) == 3


def test_compiled_layers_are_compiled_again_and_traced_eagerly(overflowing, tmp_path, monkeypatch):
    from surefoot.model import compiled

    monkeypatch.setattr(compiled, "compile_layers", partial(compiled.compile_layers, backend="eager"))
    cfg = make_config(settings(overflowing, tmp_path, fp16=True, compile=True))
    scene = step_of(cfg)
    compiled.compile_layers(scene.model)
    again = run(keep(scene, cfg, tmp_path))
    assert again.incident.compiled == ("model.layers.0", "model.layers.1")
    assert again.happens is True and (again.origin.module, again.origin.op) == (SCORES, "bmm") and again.notes == ()
    assert run(again.incident.folder, overrides=("compile=false",)).notes[0].startswith("2 layers were compiled")


def test_the_plan_in_force_is_applied_and_another_can_be_tried(overflowing, tmp_path):
    from surefoot.guard.plan import Change, Plan, apply_change, write_plan

    cfg = make_config(settings(overflowing, tmp_path, fp16=True))
    scene = step_of(cfg)
    without = keep(scene, cfg, tmp_path / "without")
    island = Plan((Change("island", SCORES),))
    write_plan(tmp_path / "precision_plan.json", island)
    assert run(without, plan=tmp_path / "precision_plan.json").happens is False
    apply_change(scene.model, scene.forward, island.changes[0])
    place = keep(scene, cfg, tmp_path / "with", fault("SPIKE", None, None), island.to_json())
    again = run(place)
    assert again.incident.seen.finite and again.now == again.incident.seen


def test_the_model_may_lie_elsewhere(healthy, tmp_path):
    here, there = tmp_path / "here", tmp_path / "there"
    shutil.copytree(healthy, here)
    cfg = make_config(settings(here, tmp_path))
    place = keep(step_of(cfg), cfg, tmp_path, fault("SPIKE", None, None))
    here.rename(there)
    with pytest.raises(UserError, match="is not on this machine") as caught:
        run(place)
    assert "--model PATH" in caught.value.problems[0].hint
    again = run(place, model=str(there))
    assert again.now == again.incident.seen and again.notes == ()


def test_another_model_of_the_same_shape_is_noticed(healthy, tmp_path):
    cfg = make_config(settings(healthy, tmp_path))
    place = keep(step_of(cfg), cfg, tmp_path, fault("SPIKE", None, None))
    again = run(place, model=str(save_tiny_model(tmp_path / "other", seed=1)))
    assert again.now != again.incident.seen and "another base model" in again.notes[0]


def test_weights_that_were_not_kept_come_from_a_checkpoint(healthy, tmp_path):
    cfg = make_config(settings(healthy, tmp_path))
    scene = step_of(cfg)
    checkpoint = tmp_path / "out" / "checkpoint-11"
    scene.model.save_pretrained(checkpoint)
    place = keep(
        scene, cfg, tmp_path / "out" / "surefoot" / "incidents", fault("SPIKE", None, None), most_weight_bytes=1
    )
    with pytest.raises(UserError, match="too large") as caught:
        run(place)
    assert "checkpoint-11" in caught.value.problems[0].hint
    again = run(place, weights=checkpoint)
    assert again.now == again.incident.seen and str(checkpoint) in again.notes[0]


def test_bad_weights_are_put_back_as_they_were(healthy, tmp_path):
    cfg = make_config(settings(healthy, tmp_path))
    scene = step_of(cfg)
    weight = next(p for n, p in scene.model.named_parameters() if n.endswith("1.mlp.up_proj.base_layer.weight"))
    assert not weight.requires_grad
    with torch.no_grad():
        weight[3, 5] = float("nan")
    place = keep(scene, cfg, tmp_path, fault("WEIGHTS", "model.layers.1.mlp.up_proj", None))
    again = run(place)
    assert again.happens is True and again.origin.kind == "leaf" and again.origin.leaf.endswith("1.mlp.up_proj.weight")
    assert again.notes == ("1 weights were not finite themselves, and are so here: model.layers.1.mlp.up_proj.weight.",)


@pytest.mark.parametrize("worst", [4000, -1])
def test_a_token_id_that_no_row_has_is_not_run(healthy, tmp_path, worst):
    cfg = make_config(settings(healthy, tmp_path))
    scene = step_of(cfg)
    scene.samples[1].input_ids[2] = worst
    again = run(keep(scene, cfg, tmp_path, fault("DATA", None, None), seen=Seen((), (), {})))
    assert again.happens is True and again.now is None and again.runs == 0
    assert f"rows:1 has token id {worst}" in again.reason
    assert json.loads(json.dumps(again.to_json(), allow_nan=False))["now"] is None


def test_a_step_without_labels_is_named(healthy, tmp_path):
    cfg = make_config(settings(healthy, tmp_path))
    scene = step_of(cfg)
    for sample in scene.samples:
        sample.labels[:] = -100
    again = run(keep(scene, cfg, tmp_path, fault("DATA", None, None), seen=Seen((), (), {})))
    assert again.happens is True and "no token of the step carries a label" in again.reason


def test_a_passing_fault_is_tried_three_times(healthy, tmp_path):
    cfg = make_config(settings(healthy, tmp_path))
    seen = Seen((float("nan"),), (("rows:0",),), {})
    again = run(keep(step_of(cfg), cfg, tmp_path, fault("TRANSIENT", None, None), seen=seen))
    assert (again.happens, again.runs) == (False, 3) and "in 3 runs" in again.reason


def seen(loss, *gradients):
    return Seen((loss,), (("rows:0",),), {str(n): size for n, size in enumerate(gradients)})


NAN = float("nan")
JUDGED = [
    ("RANGE", seen(NAN, NAN), seen(NAN, NAN), True),
    ("RANGE", seen(NAN, NAN), seen(2.0, 1.0), False),
    ("MATH", seen(2.0, NAN, 1.0), seen(2.0, NAN, 1.0), True),
    ("SPIKE", seen(9.0, 1.0), seen(9.05, 1.0), True),
    ("SPIKE", seen(9.0, 1.0), seen(9.5, 1.0), False),
    ("SPIKE", seen(9.0, 1.0), seen(NAN, 1.0), True),
    ("STAGNATION", seen(2.0, 1.0), seen(2.0, 1.0), None),
    ("OPTIMIZER", seen(2.0, 1.0), seen(NAN, NAN), None),
]


@pytest.mark.parametrize(("kind", "then", "now", "expected"), JUDGED)
def test_the_verdict_compares_what_can_be_compared(kind, then, now, expected):
    incident = SimpleNamespace(seen=then, diagnosis=fault(kind))
    happens, reason = judge(incident, now, 1)
    assert happens is expected and reason.endswith(".")


def test_the_command_prints_the_verdict_or_one_document(incident):
    said = cli(incident)
    assert said.exit_code == 0, said.output
    assert "It happens here too: the loss is not finite. At the same place." in said.stdout
    assert f"nan in {SCORES}" in said.stdout or f"inf in {SCORES}" in said.stdout
    said = cli(incident, "--dtype", "float32", "--device", "cpu", "--json")
    assert said.exit_code == 0, said.output
    document = json.loads(said.stdout)
    assert (document["happens"], document["then"]["loss"], document["class"]) == (False, "nan", "RANGE")
    assert document["now"]["bad_gradients"] == [] and document["precision"].startswith("float32")


def test_what_a_replay_cannot_tell_ends_with_1(healthy, tmp_path):
    cfg = make_config(settings(healthy, tmp_path))
    said = cli(keep(step_of(cfg), cfg, tmp_path, fault("STAGNATION", None, None)))
    assert said.exit_code == 1 and "the fault was in the update" in said.stdout


def test_bad_requests_end_with_2(incident, tmp_path):
    other = tmp_path / "other"
    other.mkdir()
    cases = [
        ((tmp_path / "missing",), "there is no folder"),
        ((other,), "not an incident's folder"),
        ((incident, "--dtype", "int8"), "there is no dtype 'int8'"),
        ((incident, "--device", "tpu"), "there is no device 'tpu'"),
        ((incident, "--weights", tmp_path / "missing"), "there is no folder"),
        ((incident, "--model", tmp_path / "missing"), "is not on this machine"),
        ((incident, "lora_rnak=3"), "lora_rank"),
    ]
    for words, message in cases:
        said = cli(*words)
        assert said.exit_code == 2 and message in said.stderr, (words, said.output)


@pytest.mark.parametrize("text", ["${oc.env:HOME}", "x${seed}", "\\\\${oc.env:HOME}"])
def test_settings_that_would_read_this_machine_are_refused(incident, text):
    yaml = incident / "resolved.yaml"
    yaml.write_text(yaml.read_text() + f"\nrun_name: '{text}'\n")
    with pytest.raises(UserError, match="which no run writes"):
        run(incident)


def test_a_text_that_only_looks_like_it_is_none(healthy, tmp_path):
    cfg = make_config(settings(healthy, tmp_path, default_system="\\\\\\${oc.env:HOME} costs ${x}"))
    again = run(keep(step_of(cfg), cfg, tmp_path, fault("SPIKE", None, None)))
    assert again.now == again.incident.seen


def test_code_of_the_models_folder_needs_the_yaml_and_the_flag(healthy, tmp_path, monkeypatch):
    cfg = make_config(settings(healthy, tmp_path) | {"trust_remote_code": True})
    place = keep(step_of(cfg), cfg, tmp_path, fault("SPIKE", None, None))
    asked = []

    def load(cfg, tokenizer, device):
        asked.append(cfg.trust_remote_code)
        return load_model(cfg, tokenizer, device)

    monkeypatch.setattr("surefoot.model.load.load_model", load)
    assert "not done without --trust-remote-code" in run(place).notes[0]
    assert run(place, **{"trust_remote_code": True}).notes == ()
    assert asked == [False, True]
