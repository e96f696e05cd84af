"""ZeRO by DeepSpeed trains as one process does, drops a bad step on all ranks, and resumes on any number of them."""

from __future__ import annotations

import importlib.util

import pytest
from crew import train
from test_ranks import assert_close, final_weights

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
        (2, 2, "lora", False), (2, 2, "full", False), (2, 4, "lora", False), (2, 4, "full", False),
        (1, 2, "full", False), (3, 2, "lora", False), (3, 2, "full", False), (2, 2, "full", True), (3, 2, "full", True),
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
