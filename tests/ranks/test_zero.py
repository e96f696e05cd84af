"""ZeRO by DeepSpeed trains as one process does, drops a bad step on all ranks, and resumes on any number of them."""

from __future__ import annotations

import importlib.util
import shutil

import pytest
from crew import Fault, train
from test_ranks import assert_close, final_weights

from helpers import save_tiny_model

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("deepspeed") is None, reason="DeepSpeed is not installed: pip install --no-deps deepspeed"
)


def llama_factorys(stage: int, *, offload: bool = False) -> dict:
    """The settings that LLaMA-Factory ships for a stage, as its files hold them."""
    batch = ("train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps", "gradient_clipping")
    zero: dict = {"stage": stage, "overlap_comm": False, "contiguous_gradients": True}
    if stage < 3:
        zero |= {"allgather_partitions": True, "allgather_bucket_size": 5e8, "reduce_scatter": True}
        zero |= {"reduce_bucket_size": 5e8, "round_robin_gradients": True}
    else:
        zero |= {"sub_group_size": 1e9, "reduce_bucket_size": "auto", "stage3_prefetch_bucket_size": "auto"}
        zero |= {"stage3_param_persistence_threshold": "auto", "stage3_max_live_parameters": 1e9}
        zero |= {"stage3_max_reuse_distance": 1e9, "stage3_gather_16bit_weights_on_model_save": True}
    if offload:
        zero["offload_optimizer"] = {"device": "cpu", "pin_memory": True}
        if stage == 3:
            zero["offload_param"] = {"device": "cpu", "pin_memory": True}
    return dict.fromkeys(batch, "auto") | {
        "zero_allow_untested_optimizer": True, "bf16": {"enabled": "auto"}, "zero_optimization": zero,
        "fp16": {"enabled": "auto", "loss_scale": 0, "loss_scale_window": 1000, "initial_scale_power": 16,
                 "hysteresis": 2, "min_loss_scale": 1},
    }  # fmt: skip


FULL = {"finetuning_type": "full", "learning_rate": 1e-3}
LORA = {"max_grad_norm": 0.5}


@pytest.fixture(scope="module")
def alone(tiny, tmp_path_factory):
    """What one process makes of each kind of training."""
    made = {}
    for name, changes in (("lora", LORA), ("full", FULL)):
        place = tmp_path_factory.mktemp(name)
        settings = {
            "model_name_or_path": str(tiny), "dataset": "rows", "template": "default", "output_dir": str(place / "out"),
            "num_train_epochs": 2.0, "learning_rate": 1e-2, "save_strategy": "no", "report_to": "none", "seed": 3,
            "ddp_timeout": 40, "device": "cpu",
        }  # fmt: skip
        made[name] = train(place / "crew", 1, settings | changes)[0], final_weights(place / "out")
    return made


@pytest.mark.parametrize(
    ("stage", "world", "kind", "offload"),
    [
        (2, 2, "full", False), (2, 4, "lora", False), (1, 2, "full", False), (3, 2, "lora", False),
        *(pytest.param(*case, marks=pytest.mark.long) for case in (
            (2, 2, "lora", False), (2, 4, "full", False), (1, 2, "lora", False), (3, 2, "full", False),
            (2, 2, "full", True), (3, 2, "full", True),
        )),
    ],
)  # fmt: skip
def test_each_stage_trains_as_one_process_does(settings, tmp_path, alone, stage, world, kind, offload):
    """Twenty steps of unequal rows; in the last of an epoch most ranks have none."""
    changes = {"lora": LORA, "full": FULL}[kind]
    told = train(tmp_path / "crew", world, settings | changes | {"deepspeed": llama_factorys(stage, offload=offload)})
    one, weights = alone[kind]
    for member in told:
        assert member.error == ""
        assert member.losses == told[0].losses and len(member.losses) == 20
        assert member.losses == pytest.approx(one.losses, abs=1e-5)
        assert member.norms == pytest.approx(one.norms, rel=1e-3)
        assert not member.events
    assert_close(weights, final_weights(tmp_path / "out"))


@pytest.mark.parametrize(
    ("world", "fault", "changes"),
    [
        (2, Fault("gradient", 1, 3), {}), (2, Fault("weight", 1, 6), {}),
        *(pytest.param(*case, marks=pytest.mark.long) for case in (
            (4, Fault("gradient", 1, 5), {}), (2, Fault("loss", 0, 4), {}), (2, Fault("memory", 1, 3), {}),
            (2, Fault("gradient", 1, 6), FULL), (2, Fault("weight", 0, 6), FULL), (2, Fault("frozen", 1, 6), {}),
        )),
    ],
    ids=str,
)  # fmt: skip
def test_what_one_rank_suffers_is_mended_on_all(settings, tmp_path, alone, world, fault, changes):
    """Nothing of the bad step is applied anywhere; computed again it is sound, and the run is as it was."""
    told = train(
        tmp_path / "crew", world, settings | (changes or LORA) | {"deepspeed": llama_factorys(2)}, fault,
        ahead=world == 4,
    )  # fmt: skip
    one, weights = alone["full" if changes else "lora"]
    for member in told:
        assert member.error == ""
        assert member.losses == pytest.approx(one.losses, abs=1e-5)
        assert [event["event"] for event in member.events] == [event["event"] for event in told[0].events]
    assert_close(weights, final_weights(tmp_path / "out"))
    found = [event for event in told[0].events if event["event"] == "diagnosis"]
    if fault.kind == "memory":
        assert not found
        return
    assert [(event["class"], event["details"]["rank"]) for event in found] == [("TRANSIENT", fault.rank)]


@pytest.mark.parametrize("offload", [False, pytest.param(True, marks=pytest.mark.long)])
def test_a_sum_that_overflows_on_its_way_is_dropped_by_all(settings, tmp_path, alone, offload):
    """Every share is finite, but DeepSpeed was told to send gradients as float16."""
    narrow = llama_factorys(2, offload=offload) | {"communication_data_type": "fp16"}
    told = train(tmp_path / "crew", 2, settings | LORA | {"deepspeed": narrow}, Fault("huge", 1, 3))
    for member in told:
        assert member.error == ""
        assert [event["class"] for event in member.events if event["event"] == "diagnosis"] == ["TRANSIENT"]
        assert member.losses == pytest.approx(alone["lora"][0].losses, abs=1e-2)


@pytest.mark.parametrize("kind", ["gradient", "exception"])
def test_stage_3_ends_on_all_ranks_with_the_right_one_named(settings, tmp_path, kind):
    told = train(tmp_path / "crew", 2, settings | {"deepspeed": llama_factorys(3)}, Fault(kind, 1, 3))
    assert [len(member.losses) for member in told] == [2, 2]
    assert max(member.seconds for member in told) < 40
    if kind == "exception":
        assert told[1].error.startswith("IndexError: planted")
        assert told[0].error.startswith("OtherRankError: rank 1 (") and "planted" in told[0].error
        return
    for member in told:
        assert member.error.startswith("NonFiniteStepError: step 3 is not finite")
        assert "lora_A" in member.error and "Found on rank 1 (" in member.error and "not applied" in member.error
    assert "rank" in told[0].events[-1] and told[0].events[-1]["event"] == "stopped"


@pytest.mark.parametrize("stage", [2, pytest.param(3, marks=pytest.mark.long)])
def test_a_checkpoint_goes_on_with_as_many_ranks_with_more_and_without_deepspeed(settings, tmp_path, stage):
    settings |= {"save_strategy": "steps", "save_steps": 7, "max_steps": 12, "val_size": 0.1, "eval_strategy": "steps"}
    settings |= {"eval_steps": 7, "deepspeed": llama_factorys(stage)}
    straight = train(tmp_path / "straight", 2, settings)
    assert straight[0].error == "" and straight[0].losses == straight[1].losses
    weights = final_weights(tmp_path / "out")
    for world, changes in ((2, {}), (4, {}), (1, {"deepspeed": None})):
        (tmp_path / "out" / "checkpoint-12" / "surefoot" / "manifest.json").unlink()
        for file in (tmp_path / "out").glob("*.safetensors"):
            file.unlink()
        told = train(tmp_path / f"resumed{world}", world, settings | changes)
        for member in told:
            assert (member.error, member.resumed_from) == ("", 7)
            assert member.losses == pytest.approx(straight[0].losses[7:], abs=1e-5)
        if world == 2:
            assert told[0].losses == straight[0].losses[7:]
            again = final_weights(tmp_path / "out")
            assert all(weights[name].equal(again[name]) for name in weights)
        assert_close(weights, final_weights(tmp_path / "out"))


def test_a_run_that_goes_on_can_go_back_to_where_it_went_on(settings, tmp_path):
    """The point to go back to was taken before DeepSpeed cut the optimizer's state, which is not empty there."""
    settings |= {"save_strategy": "steps", "save_steps": 7, "max_steps": 12, "deepspeed": llama_factorys(2)}
    straight = train(tmp_path / "straight", 2, settings)
    shutil.rmtree(tmp_path / "out" / "checkpoint-12")
    for file in (tmp_path / "out").glob("*.safetensors"):
        file.unlink()
    told = train(tmp_path / "resumed", 2, settings, Fault("weight", 1, 9))
    for member in told:
        assert (member.error, member.resumed_from) == ("", 7)
        assert [event["class"] for event in member.events if event["event"] == "diagnosis"] == ["TRANSIENT"]
        assert member.losses == straight[0].losses[7:]


@pytest.mark.long
@pytest.mark.parametrize("stage", [2, 3])
@pytest.mark.parametrize("kind", ["killed", "stopped"])
def test_a_rank_that_is_gone_or_stands_still_is_named(settings, tmp_path, stage, kind):
    changes = {"ddp_timeout": 6, "deepspeed": llama_factorys(stage)}
    told = train(tmp_path / "crew", 2, settings | changes, Fault(kind, 1, 3))
    assert told[0].error.startswith("OtherRankError: rank 1 (") and "does not answer" in told[0].error
    assert told[0].seconds < 45


@pytest.mark.long
@pytest.mark.parametrize("stage", [2, 3])
def test_tied_embeddings_are_saved_once(settings, tmp_path, stage):
    settings |= FULL | {"model_name_or_path": str(save_tiny_model(tmp_path / "tied", tie_word_embeddings=True))}
    alone = train(tmp_path / "one", 1, settings | {"output_dir": str(tmp_path / "out1")})
    told = train(tmp_path / "crew", 2, settings | {"deepspeed": llama_factorys(stage)})
    assert [member.error for member in alone + told] == [""] * 3
    assert told[0].losses == pytest.approx(alone[0].losses, abs=1e-5)
    assert_close(final_weights(tmp_path / "out1"), final_weights(tmp_path / "out"))
