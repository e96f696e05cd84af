"""An incident's folder: written whole, read back the same, and nothing of it trusted."""

from __future__ import annotations

import dataclasses
import json
import math
import zipfile

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from helpers import VOCABULARY, random_sample, tiny_llama
from surefoot.data.messages import Sample
from surefoot.errors import UserError
from surefoot.guard.diagnosis import Diagnosis
from surefoot.guard.incident import put_in_weights, read_incident, unlike_base, write_incident
from surefoot.guard.scene import Scene
from surefoot.guard.seen import Seen
from surefoot.model.attention import use_packed_attention
from surefoot.model.forward import LossForward
from surefoot.model.loss import LogitShape
from surefoot.model.randomness import get_random_state, set_random_state

FOUND = Diagnosis(
    12, "RANGE", "attention scores", "model.layers.1.self_attn", "bmm", "forward", ("rows:0",),
    ("Finite in float32.",), {"amax": float("inf"), "tried": ("r0", "r1")},
)  # fmt: skip


def joined_sample() -> Sample:
    ids = np.arange(3, 12, dtype=np.int32)
    return Sample(("rows:8", "rows:9"), ids, ids.copy(), (4, 5), joined=True)


def make_scene(trained="v_proj", dropout=0.0, seed=0) -> Scene:
    """A step of a tiny Llama of which some weights are trained."""
    model = tiny_llama(seed, attention_dropout=dropout)
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(trained in name)
    use_packed_attention(model)
    model.train()
    rng = np.random.default_rng(1)
    samples = (random_sample(rng, 9, 0), random_sample(rng, 14, 1), joined_sample())
    forward = LossForward(model, None, LogitShape(1.0, None), chunked=True)
    torch.manual_seed(5)
    return Scene(model, forward, "cpu", 12, samples, 20, 8.0, get_random_state("cpu"))


def write(folder, scene, **more):
    return write_incident(folder, scene, FOUND, yaml="seed: 3\n", plan={"changes": []}, **more)


def test_what_is_written_reads_back_the_same(tmp_path):
    scene = make_scene()
    place = write(tmp_path / "incidents", scene)
    read = read_incident(place)
    assert place.name == "step-12" and read.folder == place
    assert dataclasses.replace(read.diagnosis, details={}) == dataclasses.replace(FOUND, details={})
    assert read.diagnosis.details == {"amax": None, "tried": ["r0", "r1"]}
    for one, other in zip(scene.samples, read.samples, strict=True):
        assert (one.row_ids, one.segments, one.joined) == (other.row_ids, other.segments, other.joined)
        assert np.array_equal(one.input_ids, other.input_ids) and np.array_equal(one.labels, other.labels)
        assert other.input_ids.dtype == other.labels.dtype == np.int32
    assert (read.tokens_per_pass, read.loss_scale, read.packs, read.chunked, read.recompute) == (
        20, 8.0, True, True, False,
    )  # fmt: skip
    assert read.seen == Seen.of(scene.rerun())
    assert read.settings.read_text() == "seed: 3\n"
    assert {"surefoot", "torch", "transformers", "peft"} == set(read.versions)


def test_a_fresh_model_with_the_kept_weights_gives_the_same_step_bit_for_bit(tmp_path):
    scene = make_scene(dropout=0.3)
    with torch.no_grad():
        for parameter in scene.trained_parameters().values():
            parameter.add_(0.1)
    place = write(tmp_path, scene)
    read, fresh = read_incident(place), make_scene(dropout=0.3)
    put_in_weights(read, fresh.model)
    again = dataclasses.replace(
        fresh, samples=read.samples, tokens_per_pass=read.tokens_per_pass, loss_scale=read.loss_scale,
        random_state=read.random_state,
    ).rerun()  # fmt: skip
    assert Seen.of(again) == read.seen
    assert len(again.losses) == 2, "the step has two passes"
    torch.manual_seed(99)
    assert Seen.of(dataclasses.replace(fresh, random_state=get_random_state("cpu")).rerun()) != read.seen, (
        "dropout is on"
    )


def test_reading_does_not_disturb_the_random_numbers(tmp_path):
    place = write(tmp_path, make_scene())
    torch.manual_seed(1)
    expected = torch.rand(3)
    torch.manual_seed(1)
    read_incident(place)
    assert torch.equal(torch.rand(3), expected)


def test_a_second_incident_of_a_step_gets_a_name_of_its_own_and_leftovers_go(tmp_path):
    scene = make_scene()
    (tmp_path / ".step-3.1.tmp").mkdir(parents=True)
    assert [write(tmp_path, scene).name for _ in range(3)] == ["step-12", "step-12-2", "step-12-3"]
    assert {path.name for path in tmp_path.iterdir()} == {"step-12", "step-12-2", "step-12-3"}


def test_bad_numbers_are_kept_as_what_they_are(tmp_path):
    scene = make_scene()
    weight = dict(scene.model.named_parameters())["model.layers.0.mlp.up_proj.weight"]
    with torch.no_grad():
        weight[1, 2] = math.nan
    seen = Seen((math.inf, 1.0), (("rows:0",), ("rows:1",)), {"a": -math.inf, "b": math.nan, "c": 1.0})
    place = write(tmp_path, scene, seen=seen)
    record = json.loads((place / "incident.json").read_text())
    assert record["seen"]["losses"] == ["inf", 1.0]
    assert record["seen"]["gradients"] == {"a": "-inf", "b": "nan", "c": 1.0}
    read = read_incident(place)
    assert read.seen.bad_gradients == ("a", "b") and not read.seen.finite and read.seen.loss == math.inf
    assert read.bad_frozen == ("model.layers.0.mlp.up_proj.weight",)
    fresh = make_scene()
    put_in_weights(read, fresh.model)
    assert torch.equal(
        dict(fresh.model.named_parameters())["model.layers.0.mlp.up_proj.weight"].isnan(), weight.isnan()
    )


def test_weights_that_are_too_large_are_not_kept_and_the_checkpoint_is_named(tmp_path):
    place = write(tmp_path, make_scene(), checkpoint="checkpoint-10", most_weight_bytes=64)
    assert not (place / "weights.st").exists()
    weights = read_incident(place).weights
    assert (weights["kept"], weights["checkpoint"]) == (False, "checkpoint-10") and weights["bytes"] > 64
    assert "checkpoint-10" in (place / "README.md").read_text()


def test_tied_and_shared_weights_can_be_kept(tmp_path):
    scene = make_scene(trained="")
    scene.model.model.layers[0].mlp.up_proj.weight.data = scene.model.model.layers[1].mlp.up_proj.weight.data
    place = write(tmp_path, scene)
    assert set(load_file(place / "weights.st")) == set(scene.trained_parameters())


def test_the_page_tells_a_person_what_happened_and_the_command(tmp_path):
    place = write(tmp_path / "my runs", make_scene())
    page = (place / "README.md").read_text()
    for text in (
        "Step 12: RANGE in model.layers.1.self_attn (bmm, forward): attention scores",
        "Finite in float32.",
        f"surefoot replay '{place}'",
        "--model PATH",
        "rows:0, rows:1, rows:8, rows:9",
    ):
        assert text in page


def test_another_base_model_is_recognised(tmp_path):
    read = read_incident(write(tmp_path, make_scene()))
    assert read.base_values and unlike_base(read, make_scene().model) == []
    assert unlike_base(read, make_scene().model.bfloat16()) == [], "rounding is no other model"
    random_ones = unlike_base(read, make_scene(seed=1).model)
    assert "model.embed_tokens.weight" in random_ones
    assert unlike_base(read, torch.nn.Linear(2, 2)) == list(read.base_values)


def test_weights_of_another_model_are_refused(tmp_path):
    read = read_incident(write(tmp_path, make_scene()))
    with pytest.raises(UserError, match="do not fit this model"):
        put_in_weights(read, make_scene(trained="up_proj").model)


def spoil_json(place, **changes):
    record = json.loads((place / "incident.json").read_text())
    (place / "incident.json").write_text(json.dumps(record | changes))


def save_arrays(place, **arrays):
    np.savez(place / "samples.npz", **arrays)


class Payload:
    """What a hostile pickle looks like: it calls a function when it is read."""

    called = False

    def __reduce__(self):
        return (setattr, (Payload, "called", True))


SPOILED = {
    "no folder": (lambda place: (place / "incident.json").unlink(), "not an incident's folder"),
    "no samples": (lambda place: (place / "samples.npz").unlink(), "has no samples.npz"),
    "no JSON": (lambda place: (place / "incident.json").write_text("{"), "not a whole incident"),
    "a list": (lambda place: (place / "incident.json").write_text("[]"), "not a whole incident"),
    "newer": (lambda place: spoil_json(place, format=2), "it has format 2"),
    "no losses": (lambda place: spoil_json(place, seen={}), "losses.* is missing"),
    "a class": (lambda place: spoil_json(place, diagnosis={"fault": "OOPS"}), "no class 'OOPS'"),
    "samples of other length": (lambda place: spoil_json(place, samples=[]), "it has no samples"),
    "cut arrays": (lambda place: (place / "samples.npz").write_bytes(b"PK\x03\x04"), "not a whole incident"),
    "short arrays": (lambda place: save_arrays(place, input_ids=np.arange(3), labels=np.arange(3)), "the 32 tokens"),
    "pickled arrays": (
        lambda place: save_arrays(place, input_ids=np.array([Payload()], object), labels=np.arange(3)),
        "not a whole incident",
    ),
    "pickled random state": (lambda place: torch.save({"cpu": Payload()}, place / "random_state.pt"), "no state of"),
    "a foreign random state": (lambda place: torch.save({"python": [3, [1], None]}, place / "random_state.pt"), "no s"),
}


@pytest.mark.parametrize("case", SPOILED)
def test_a_spoiled_folder_is_refused_and_runs_nothing(case, tmp_path):
    place = write(tmp_path, make_scene())
    spoil, message = SPOILED[case]
    spoil(place)
    before = get_random_state("cpu")
    with pytest.raises(UserError, match=message):
        read_incident(place)
    assert not Payload.called
    after = get_random_state("cpu")
    assert torch.equal(before["cpu"], after["cpu"]) and before["python"] == after["python"]


def test_a_whole_folder_holds_no_pickle_but_the_guarded_one(tmp_path):
    place = write(tmp_path, make_scene())
    with zipfile.ZipFile(place / "samples.npz") as arrays:
        assert set(arrays.namelist()) == {"input_ids.npy", "labels.npy"}
    np.load(place / "samples.npz", allow_pickle=False)
    state = torch.load(place / "random_state.pt", weights_only=True)
    set_random_state(state, "cpu")
    assert VOCABULARY > 12, "the samples' ids are real rows"
