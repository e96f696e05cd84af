"""DeepSpeed's settings against themselves and the YAML: one clear message each, and nothing else is touched."""

from __future__ import annotations

import json

import pytest

from surefoot.config import make_config
from surefoot.config.zero import engine_settings, read_deepspeed
from surefoot.errors import UserError

BASE = {"model_name_or_path": "m", "dataset": "d", "gradient_accumulation_steps": 4, "per_device_train_batch_size": 2}


def problem_of(settings, **values):
    with pytest.raises(UserError) as caught:
        make_config(BASE | values | {"deepspeed": settings})
    (problem,) = caught.value.problems
    return problem


@pytest.mark.parametrize(
    ("settings", "values", "message", "hint"),
    [
        ({"zero_optimisation": {"stage": 2}}, {}, "there is no setting `zero_optimisation`", "`zero_optimization`"),
        ({"zero_optimization": {"stage": 4}}, {}, "has stage", ""),
        ({"train_micro_batch_size_per_gpu": 8}, {}, "is 8, but the YAML has `per_device_train_batch_size: 2`", "auto"),
        ({"gradient_accumulation_steps": 1}, {}, "is 1, but the YAML has `gradient_accumulation_steps: 4`", "auto"),
        ({"gradient_clipping": 0.5}, {}, "is 0.5, but the YAML has `max_grad_norm: 1.0`", "auto"),
        ({"bf16": {"enabled": True}}, {}, "`bf16.enabled` is true, but the YAML has `bf16: false`", "auto"),
        ({"bf16": {"enabled": False}}, {"bf16": True}, "is false, but the YAML has `bf16: true`", "auto"),
        ({"fp16": {"enabled": "auto", "loss_scale": 128}}, {"fp16": True}, "the loss scale is Surefoot's own", "0"),
        ({"optimizer": {"type": "AdamW"}}, {}, "`optimizer` cannot be set: the optimizer is the YAML's `optim`", ""),
        ({"scheduler": {"type": "WarmupLR"}}, {}, "`scheduler` cannot be set", "remove `scheduler`"),
        ({"tensor_parallel": {"autotp_size": 2}}, {}, "not supported here", "remove"),
        ({"zero_optimization": {"stage": 2, "offload_optimizer": {"device": "nvme"}}}, {}, "nvme", "cpu"),
        ({"zero_optimization": {"stage": 2, "offload_param": {"device": "cpu"}}}, {}, "is for stage 3, not 2", ""),
        ({"zero_optimization": {"stage": 2, "allgather_bucket_size": "auto"}}, {}, 'cannot be "auto"', "value"),
    ],
)
def test_one_clear_problem(settings, values, message, hint):
    problem = problem_of(settings, **values)
    assert problem.key == "deepspeed"
    assert message in problem.message
    assert hint in problem.hint


@pytest.mark.parametrize(
    ("stage", "values", "key"),
    [
        (1, {"optim": "adafactor"}, "optim"), (3, {"quantization_bit": 4}, "quantization_bit"),
        (3, {"use_dora": True}, "use_dora"), (3, {"compile": True}, "compile"),
    ],
)  # fmt: skip
def test_what_does_not_go_with_a_stage_is_named(stage, values, key):
    assert problem_of({"zero_optimization": {"stage": stage}}, **values).key == key


def test_what_agrees_or_is_off_is_no_problem():
    agreeing = {"train_micro_batch_size_per_gpu": 2, "gradient_clipping": 1, "bf16": {"enabled": True}}
    off = {"amp": {"enabled": False}, "flops_profiler": {"enabled": False}, "elasticity": None}
    make_config(BASE | {"bf16": True, "deepspeed": agreeing | off | {"zero_optimization": {"stage": 2}}})


def test_the_engine_gets_everything_else_untouched(tmp_path):
    file = tmp_path / "ds.json"
    zero = {
        "stage": 3,
        "overlap_comm": True,
        "reduce_bucket_size": "auto",
        "stage3_param_persistence_threshold": "auto",
    }
    file.write_text(json.dumps({"zero_optimization": zero, "steps_per_print": 7, "train_batch_size": "auto"}))
    cfg = make_config(BASE | {"deepspeed": str(file)})
    made = engine_settings(read_deepspeed(cfg.deepspeed), dict(cfg), 4, 64)
    assert made["zero_optimization"] == zero | {
        "reduce_bucket_size": 4096, "stage3_param_persistence_threshold": 640
    }  # fmt: skip
    assert made["steps_per_print"] == 7
    assert (made["train_micro_batch_size_per_gpu"], made["gradient_accumulation_steps"]) == (8, 1)
    assert made["gradient_clipping"] == 0.0, "Surefoot clips; DeepSpeed's own default is 1"


def test_a_batch_of_all_processes_must_be_the_yamls():
    cfg = make_config(BASE | {"deepspeed": {"train_batch_size": 16}})
    assert engine_settings(cfg.deepspeed, dict(cfg), 2, 64)
    with pytest.raises(UserError, match="is 16, but the YAML makes it 32: 2 samples x 4 x 4 processes"):
        engine_settings(cfg.deepspeed, dict(cfg), 4, 64)
