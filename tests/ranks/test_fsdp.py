"""A model in pieces (FSDP2) trains as a whole one: the same losses and weights, the same decisions of the guard."""

from __future__ import annotations

import shutil

import pytest
from crew import EVERY, Fault, train
from test_ranks import assert_close, final_weights

from helpers import save_tiny_model
from surefoot.train.checkpoint import PIECES

FULL = {"finetuning_type": "full", "learning_rate": 1e-3}
SHARD = {"fsdp": "full_shard auto_wrap", "fsdp_config": {"fsdp_version": 2, "state_dict_type": "SHARDED_STATE_DICT"}}
# Forty tokens a pass: with four ranks one has two passes where another has one, or none at all.
SHORT = {"memory": 40}


def said(event: dict) -> dict:
    """An event without what a clock says."""
    return {key: value for key, value in event.items() if key not in ("seconds", "time")}


def assert_same_run(told: list, alone, loss: float = 1e-5) -> None:
    """No rank failed, all saw the same numbers, and these are those of one process."""
    assert [member.error for member in told] == [""] * len(told)
    for member in told:
        assert member.losses == told[0].losses
        assert member.losses == pytest.approx(alone.losses, abs=loss)
        assert member.norms == pytest.approx(alone.norms, rel=1e-3)
        assert [said(event) for event in member.events] == [said(event) for event in told[0].events]


@pytest.fixture(scope="module")
def alone(tiny, tmp_path_factory):
    """What one process gives, for each way of training, and where its weights are."""
    place = tmp_path_factory.mktemp("alone")
    found = {}
    for name, changes in (("lora", {}), ("full", FULL)):
        settings = {
            "model_name_or_path": str(tiny), "dataset": "rows", "template": "default",
            "output_dir": str(place / name), "num_train_epochs": 2.0, "learning_rate": 1e-2, "save_strategy": "no",
            "report_to": "none", "seed": 3, "ddp_timeout": 40, "device": "cpu",
        }  # fmt: skip
        (member,) = train(place / f"crew-{name}", 1, settings | changes)
        assert member.error == "" and len(member.losses) == 20
        found[name] = (member, final_weights(place / name))
    return found


@pytest.mark.parametrize("kind", ["lora", "full"])
def test_two_and_four_processes_train_in_pieces_as_one_does(settings, tmp_path, alone, kind):
    """Twenty steps of unequal rows: ranks without a row, ranks with fewer passes, and the final files as usual."""
    from peft import PeftModel
    from transformers import AutoModelForCausalLM

    settings |= SHARD | (FULL if kind == "full" else {})
    member, weights = alone[kind]
    for world, more in ((2, {}), (4, SHORT)):
        out = tmp_path / f"out{world}"
        told = train(tmp_path / f"crew{world}", world, settings | more | {"output_dir": str(out)})
        assert_same_run(told, member)
        assert_close(weights, final_weights(out))
        assert any("sharded over" in message and "FSDP2" in message for message in told[0].messages)
        assert any("state_dict_type: Surefoot writes its own" in message for message in told[0].messages)
    model = AutoModelForCausalLM.from_pretrained(out if kind == "full" else settings["model_name_or_path"])
    if kind == "lora":
        model = PeftModel.from_pretrained(model, out)
    assert all(bool(p.isfinite().all()) for p in model.parameters())


@pytest.mark.parametrize(
    ("changes", "shape"),
    [
        ({"quantization_bit": 4}, {"hidden_size": 64, "intermediate_size": 128, "attention_bias": True}),
        ({"bf16": True, "lora_dropout": 0.1, "neftune_noise_alpha": 5.0}, {"tie_word_embeddings": True}),
        ({"additional_target": "embed_tokens,lm_head", "fsdp": "full_shard offload"}, {}),
    ],
    ids=["nf4", "bf16-tied", "embeddings-offload"],
)
def test_adapters_over_pieces_are_those_over_replicas(settings, tmp_path, changes, shape):
    """Dropout and noise are drawn by rank and step, so that two ranks are compared with two."""
    settings |= {"model_name_or_path": str(save_tiny_model(tmp_path / "model", **shape))} | changes
    replicas = train(tmp_path / "crew1", 2, settings | {"fsdp": None, "output_dir": str(tmp_path / "out1")})
    told = train(tmp_path / "crew2", 2, settings | {"fsdp": settings.get("fsdp", True)})
    assert_same_run(told, replicas[0])
    assert_close(final_weights(tmp_path / "out1"), final_weights(tmp_path / "out"))


@pytest.mark.parametrize("dtype", ["bf16", "fp16"])
def test_weights_that_are_gathered_in_16_bits_train_as_those_that_autocast_casts(settings, tmp_path, dtype):
    """The norms' weights are rounded as well, which replicas keep in float32: near, and not the same."""
    settings |= FULL | {dtype: True, "max_steps": 8}
    (alone,) = train(tmp_path / "crew1", 1, settings | {"output_dir": str(tmp_path / "out1")})
    told = train(tmp_path / "crew2", 2, settings | SHARD)
    assert [member.error for member in told] == ["", ""]
    assert told[0].losses == pytest.approx(alone.losses, abs=2e-3)
    assert told[0].norms == pytest.approx(alone.norms, rel=1e-2)
    assert not told[0].events


@pytest.mark.parametrize("kind", ["lora", "full"])
def test_recomputed_layers_and_kept_ones_give_the_same(settings, tmp_path, alone, kind):
    settings |= {"fsdp": True, "fsdp_config": {"reshard_after_forward": kind == "lora"}}
    settings |= FULL if kind == "full" else {}
    told = train(tmp_path / "crew", 2, settings, Fault("recompute", EVERY, 0), ahead=True)
    assert_same_run(told, alone[kind][0])
    assert_close(alone[kind][1], final_weights(tmp_path / "out"))


@pytest.mark.parametrize("kind", ["lora", "full"])
def test_a_checkpoint_in_pieces_goes_on_with_another_number_of_ranks(settings, tmp_path, alone, kind):
    """Saved by four; gone on with by two in pieces, by two replicas, and alone. Evaluation does not disturb it."""
    settings |= {"save_strategy": "steps", "save_steps": 7, "val_size": 0.1, "eval_strategy": "steps", "eval_steps": 7}
    settings |= FULL if kind == "full" else {}
    member, weights = alone[kind]
    shared = tmp_path / "shared"
    four = train(tmp_path / "four", 4, settings | SHARD | {"output_dir": str(shared)})
    assert_same_run(four, member)
    for folder in shared.glob("checkpoint-*"):
        if folder.name != "checkpoint-7":
            shutil.rmtree(folder)
    for file in shared.glob("*.safetensors"):
        file.unlink()
    for world, shards in ((2, True), (2, None), (1, True)):
        out = tmp_path / f"out-{world}-{shards}"
        shutil.copytree(shared, out)
        told = train(tmp_path / f"crew-{world}-{shards}", world, settings | {"output_dir": str(out), "fsdp": shards})
        assert [one.error for one in told] == [""] * world
        assert [one.resumed_from for one in told] == [7] * world
        for one in told:
            assert one.losses == pytest.approx(member.losses[7:], abs=1e-5)
        assert_close(weights, final_weights(out))
    assert any("nothing to shard" in message for message in told[0].messages)
    # What is trained in pieces is kept in pieces, each rank's by itself; adapters are whole on every rank.
    assert (shared / "checkpoint-7" / PIECES).is_dir() == (kind == "full")


FAULTS = [
    ("lora", Fault("gradient", 1, 4)),  # recipe R27
    ("full", Fault("gradient", 1, 4)),
    ("full", Fault("loss", 1, 7)),
    ("lora", Fault("frozen", 1, 4)),
    ("full", Fault("weight", 1, 12)),
]


@pytest.mark.parametrize(("kind", "fault"), FAULTS, ids=str)
def test_what_a_rank_suffers_in_its_pieces_is_mended_on_all(settings, tmp_path, alone, kind, fault):
    settings |= SHARD | (FULL if kind == "full" else {})
    told = train(tmp_path / "crew", 2, settings, fault, ahead=True)
    assert_same_run(told, alone[kind][0])
    events = told[0].events
    assert {event["class"] for event in events if event["event"] == "diagnosis"} == {"TRANSIENT"}
    found = next(event for event in events if event["event"] == "diagnosis")
    assert found["details"]["rank"] == fault.rank
    if fault.kind in ("gradient", "loss"):
        assert any("Found on rank 1 (" in message for message in told[0].messages)


@pytest.mark.parametrize("kind", ["exception", "memory", "data"])
def test_an_exception_within_a_pass_ends_all_with_its_cause(settings, tmp_path, kind):
    told = train(tmp_path / "crew", 2, settings | SHARD, Fault(kind, 1, 4), ahead=True)
    assert ("does not fit" if kind == "memory" else "planted") in told[1].error
    assert not told[1].error.startswith("OtherRankError")
    assert told[0].error.startswith("OtherRankError: rank 1 (")
    assert max(member.seconds for member in told) < 30


def test_a_row_that_no_rank_can_compute_is_left_out_by_all(settings, tmp_path):
    fault = Fault("row", EVERY, 13)
    (alone,) = train(tmp_path / "one", 1, settings | FULL | {"output_dir": str(tmp_path / "out1")}, fault)
    told = train(tmp_path / "two", 2, settings | FULL | SHARD, fault)
    left_out = [event["samples"] for event in alone.events if event["event"] == "action"]
    assert left_out and alone.error == ""
    for member in told:
        assert member.error == ""
        assert [event["samples"] for event in member.events if event["event"] == "action"] == left_out
        assert member.losses == pytest.approx(alone.losses, abs=1e-5)


def test_where_the_whole_model_does_not_fit_a_bad_step_ends_the_run(settings, tmp_path):
    told = train(tmp_path / "crew", 2, settings | SHARD, Fault("no room", EVERY, 4))
    assert any("nothing is looked at before step 1" in message for message in told[0].messages)
    for member in told:
        assert member.error.startswith("NonFiniteStepError: step 4 is not finite")
        assert "Found on rank 1 (" in member.error and "1 of 28 trained tensors" in member.error
        assert "the whole model takes" in member.error
        assert len(member.losses) == 4, "the log shows the step that ended the run"


@pytest.mark.long
@pytest.mark.parametrize("fault", [Fault("stopped", 1, 3), Fault("killed", 1, 3), Fault("killed", 0, 3)], ids=str)
def test_a_rank_that_is_gone_in_a_pass_is_named(settings, tmp_path, fault):
    told = train(tmp_path / "crew", 2, settings | SHARD | {"ddp_timeout": 6}, fault)
    left = told[1 - fault.rank]
    assert left.error.startswith(f"OtherRankError: rank {fault.rank} (")
    assert ("does not answer" in left.error) or ("is gone" in left.error)
    assert left.seconds < 45


@pytest.mark.long
def test_compiled_layers_gather_their_weights_too(settings, tmp_path, alone):
    told = train(tmp_path / "crew", 2, settings | SHARD | {"compile": True})
    assert_same_run(told, alone["lora"][0])
    assert any("Compiled 2 decoder layers" in message for message in told[0].messages)
    assert not any("uncompiled" in message for message in told[0].messages)
