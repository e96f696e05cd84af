"""`fsdp` and `fsdp_config`: LLaMA-Factory's and accelerate's ways to write them, and what is refused by name."""

from __future__ import annotations

import json

import pytest

from surefoot.config import make_config
from surefoot.config.sharding import Sharding, settled, sharding_of
from surefoot.errors import UserError

RUN = {"model_name_or_path": "m", "dataset": "d", "template": "default", "output_dir": "o"}


def read(environ: dict | None = None, **keys: object) -> Sharding | None:
    return sharding_of(make_config(RUN | keys), environ or {})


@pytest.mark.parametrize("fsdp", [None, False, "", [], "false"])
def test_nothing_asked_for_is_no_sharding(fsdp):
    assert read(fsdp=fsdp) is None


@pytest.mark.parametrize("fsdp", [True, "true", "full_shard", "full_shard auto_wrap", ["full_shard", "auto_wrap"]])
def test_all_ways_to_ask_for_it(fsdp):
    assert read(fsdp=fsdp) == Sharding()


@pytest.mark.parametrize(
    ("keys", "wanted"),
    [
        ({"fsdp": "full_shard offload"}, Sharding(offload=True)),
        ({"fsdp": "shard_grad_op"}, Sharding(reshard_after_forward=False)),
        ({"fsdp": True, "fsdp_config": {"reshard_after_forward": False}}, Sharding(reshard_after_forward=False)),
        ({"fsdp": True, "fsdp_config": {"fsdp_reshard_after_forward": "false"}}, Sharding(reshard_after_forward=False)),
        ({"fsdp": True, "fsdp_config": {"fsdp_sharding_strategy": "SHARD_GRAD_OP"}}, Sharding(False)),
        ({"fsdp": True, "fsdp_config": {"fsdp_offload_params": True, "fsdp_version": 2}}, Sharding(offload=True)),
        ({"fsdp": True, "fsdp_config": {"activation_checkpointing": True, "version": 1}}, Sharding()),
    ],
)
def test_settings_that_change_something(keys, wanted):
    assert read(**keys) == wanted


@pytest.mark.parametrize("suffix", [".json", ".yaml"])
def test_settings_from_a_file_or_of_accelerate(tmp_path, suffix):
    file = tmp_path / f"fsdp{suffix}"
    file.write_text(json.dumps({"distributed_type": "FSDP", "fsdp_config": {"fsdp_offload_params": True}}))
    assert read(fsdp=True, fsdp_config=str(file)) == Sharding(offload=True)


@pytest.mark.parametrize(
    ("keys", "words"),
    [
        ({"fsdp": "full_shard auto"}, "fsdp: has no option auto"),
        ({"fsdp": "hybrid_shard"}, "fsdp: hybrid_shard is not there"),
        ({"fsdp": "no_shard"}, "leave `fsdp` out"),
        ({"fsdp": True, "fsdp_config": {"reshard": 1}}, "fsdp_config: has no setting reshard"),
        ({"fsdp": True, "fsdp_config": {"reshard_after_forward": "often"}}, "reshard_after_forward is often"),
        ({"fsdp": True, "fsdp_config": {"xla": True}}, "XLA is not supported"),
        ({"fsdp": True, "fsdp_config": "nowhere.json"}, "nowhere.json cannot be read"),
        ({"fsdp": True, "fp8": True}, "fp8"),
        ({"fsdp": True, "finetuning_type": "full", "optim": "adafactor"}, "optim: adafactor looks at whole matrices"),
    ],
)
def test_what_cannot_be_met_is_refused_by_name(keys, words):
    with pytest.raises(UserError) as caught:
        read(**keys)
    assert words in str(caught.value)


def test_the_launchers_variables_count_where_the_yaml_says_nothing():
    environ = {"ACCELERATE_USE_FSDP": "true", "FSDP_VERSION": "2", "FSDP_RESHARD_AFTER_FORWARD": "false",
               "FSDP_OFFLOAD_PARAMS": "true", "FSDP_AUTO_WRAP_POLICY": "TRANSFORMER_BASED_WRAP"}  # fmt: skip
    assert read(environ) == Sharding(reshard_after_forward=False, offload=True)
    assert read(environ, fsdp="full_shard") == Sharding()
    assert read(environ, fsdp=False) is None
    assert read({"ACCELERATE_USE_FSDP": "false"}) is None


def test_settings_without_effect_are_told():
    assert settled({"fsdp_state_dict_type": "FULL_STATE_DICT", "fsdp_version": 2}) == [
        "state_dict_type: Surefoot writes its own checkpoints, and final weights whole"
    ]
