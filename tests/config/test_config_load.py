from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from surefoot.config import Config, load_config, make_config
from surefoot.errors import UserError

TUTORIAL = """\
model_name_or_path: {model}
dataset: alpaca_en_demo
template: llama3
finetuning_type: lora
lora_target: all
bf16: false
fp16: {fp16}
{more}
optim: adamw_torch
lr_scheduler_type: cosine
warmup_ratio: 0.1
max_grad_norm: 1.0
logging_steps: 10
save_steps: 500
plot_loss: true
overwrite_cache: false
preprocessing_num_workers: 4
"""
BASE = {"model_name_or_path": "m", "dataset": "d"}


def write(folder: Path, text: str, name: str = "job.yaml") -> Path:
    path = folder / name
    path.write_text(text, encoding="utf-8")
    return path


def keys_of(warnings) -> list[str]:
    return [problem.key for problem in warnings]


@pytest.mark.parametrize(
    ("fp16", "more", "dtype"), [("true", "", "float16"), ("false", "compute_dtype: float32", "float32")]
)
def test_the_yaml_of_the_tutorials_loads_as_it_stands(tmp_path, fp16, more, dtype):
    text = TUTORIAL.format(model="meta-llama/Meta-Llama-3-8B-Instruct", fp16=fp16, more=more)
    config = load_config(write(tmp_path, text, "llama3_lora.yaml"))
    assert config.do_train is True
    assert config.stage == "sft"
    assert config.dataset == ["alpaca_en_demo"]
    assert config.lora_target == ["all"]
    assert (config.lora_rank, config.lora_alpha) == (8, 16)
    assert config.compute_dtype == dtype
    assert config.output_dir == "saves/Meta-Llama-3-8B-Instruct-lora-llama3_lora"
    assert config.warnings == []
    assert config.source == tmp_path / "llama3_lora.yaml"
    assert config.filled == {
        "output_dir": config.output_dir,
        "stage": "sft",
        "dataset_dir": "data",
        "cutoff_len": 2048,
        "learning_rate": 5e-5,
        "num_train_epochs": 3.0,
        "per_device_train_batch_size": 8,
        "gradient_accumulation_steps": 1,
        "seed": 42,
        "lora_rank": 8,
        "lora_alpha": 16,
    }


def test_numbers_follow_omegaconf(tmp_path):
    text = "model_name_or_path: m\ndataset: d\nlearning_rate: 1e-4\nadam_epsilon: 1.0E-9\nweight_decay: .5\n"
    text += "max_steps: 1_000\n"
    config = load_config(write(tmp_path, text))
    assert (config.learning_rate, config.adam_epsilon, config.weight_decay, config.max_steps) == (1e-4, 1e-9, 0.5, 1000)


def test_interpolation(tmp_path, monkeypatch):
    monkeypatch.setenv("SUREFOOT_TEST_FOLDER", "/models")
    text = "model_name_or_path: ${oc.env:SUREFOOT_TEST_FOLDER}/x\ndataset: d\n"
    text += "seed: 7\ndata_seed: ${seed}\nrun_name: s${seed}"
    config = load_config(write(tmp_path, text), ["seed=8"])
    assert (config.model_name_or_path, config.data_seed, config.run_name) == ("/models/x", 8, "s8")


def test_unquoted_no_and_off_are_the_words_that_they_were_meant_to_be(tmp_path):
    text = "model_name_or_path: m\ndataset: d\nsave_strategy: no\neval_strategy: no\nlogging_strategy: no\nguard: off\n"
    config = load_config(write(tmp_path, text))
    assert (config.save_strategy, config.eval_strategy, config.logging_strategy, config.guard) == (
        "no",
        "no",
        "no",
        "off",
    )


@pytest.mark.parametrize("key", ["lr_scheduler_type", "optim", "stage"])
def test_false_is_no_word_elsewhere(key):
    with pytest.raises(UserError, match=key):
        make_config(BASE | {key: False})


@pytest.mark.parametrize("key", ["save_strategy", "guard"])
def test_yes_is_no_word(key):
    with pytest.raises(UserError, match=key):
        make_config(BASE | {key: True})


@pytest.mark.parametrize("value", ["a, b ,c", ["a", "b", "c"], "a,b,c,"])
@pytest.mark.parametrize("key", ["dataset", "lora_target", "adapter_name_or_path", "add_tokens", "additional_target"])
def test_names_are_a_list_or_have_commas(key, value):
    assert getattr(make_config(BASE | {key: value}), key) == ["a", "b", "c"]


def test_shares_are_a_list_or_have_commas():
    mixed = BASE | {"dataset": "a,b", "mix_strategy": "interleave_under"}
    assert make_config(mixed | {"interleave_probs": "0.25, 0.75"}).interleave_probs == [0.25, 0.75]
    assert make_config(mixed | {"interleave_probs": [0, 1]}).interleave_probs == [0.0, 1.0]
    assert make_config(mixed | {"dataset": "a", "interleave_probs": 1}).interleave_probs == [1.0]


def test_settings_may_be_json_text():
    config = make_config(BASE | {"lr_scheduler_kwargs": '{"num_cycles": 2}'})
    assert config.lr_scheduler_kwargs == {"num_cycles": 2}


def test_null_is_the_same_as_leaving_out():
    values = {
        "packing": None,
        "resume_from_checkpoint": None,
        "report_to": None,
        "output_dir": None,
        "lora_alpha": None,
    }
    config = make_config(BASE | values)
    assert (config.packing, config.report_to, config.output_dir, config.lora_alpha) == (
        False,
        ["none"],
        "saves/m-lora",
        16,
    )
    assert make_config(BASE | {"enable_thinking": None}).enable_thinking is None  # a value of its own


@pytest.mark.parametrize(
    ("given", "derived"),
    [
        ({"lora_rank": 64}, {"lora_alpha": 128}),
        ({"lora_rank": 64, "lora_alpha": 0}, {"lora_alpha": 128}),
        ({"lora_alpha": 5}, {"lora_alpha": 5}),
        ({"stage": "pt"}, {"packing": True}),
        ({"stage": "pt", "packing": False}, {"packing": False}),
        ({"neat_packing": True}, {"packing": True}),
        ({"bf16": True}, {"compute_dtype": "bfloat16"}),
        ({"compute_dtype": "fp16"}, {"compute_dtype": "float16", "fp16": True, "bf16": False}),
        ({"compute_dtype": "bf16"}, {"compute_dtype": "bfloat16", "bf16": True}),
        ({}, {"compute_dtype": "auto", "report_to": ["none"], "device": "auto"}),
        ({"use_cpu": True}, {"device": "cpu"}),
        ({"no_cuda": True, "device": "auto"}, {"device": "cpu"}),
        ({"adafactor": True}, {"optim": "adafactor"}),
        ({"use_swanlab": True}, {"report_to": ["swanlab"]}),
        ({"use_swanlab": True, "report_to": "none"}, {"report_to": ["swanlab"]}),
        ({"use_swanlab": True, "report_to": "swanlab,wandb"}, {"report_to": ["swanlab", "wandb"]}),
        ({"eval_strategy": "steps", "val_size": 2, "logging_steps": 7}, {"eval_steps": 7, "do_eval": True}),
        ({"eval_strategy": "epoch", "val_size": 2}, {"eval_steps": None, "do_eval": True}),
        ({"warmup_steps": 0.1}, {"warmup_ratio": 0.1, "warmup_steps": 0}),
        ({"warmup_steps": 20}, {"warmup_steps": 20, "warmup_ratio": 0.0}),
        ({"max_steps": 0}, {"max_steps": -1}),
        ({"save_total_limit": 0}, {"save_total_limit": None}),
        ({"save_steps": 100.0}, {"save_steps": 100}),
        ({"add_tokens": "<a>"}, {"resize_vocab": True}),
        ({"metric_for_best_model": "eval_loss"}, {"greater_is_better": False}),
        (
            {"metric_for_best_model": "accuracy", "compute_accuracy": True, "val_size": 1, "do_eval": True},
            {"greater_is_better": True},
        ),
        (
            {"early_stopping_steps": 3, "eval_strategy": "epoch", "val_size": 1},
            {"metric_for_best_model": "loss", "greater_is_better": False},
        ),
    ],
)
def test_values_that_follow_from_others(given, derived):
    config = make_config(BASE | given)
    assert {key: getattr(config, key) for key in derived} == derived


def test_whole_numbers_stay_whole():
    config = make_config(BASE | {"val_size": 1, "logging_steps": 5, "warmup_steps": 3})
    assert all(isinstance(value, int) for value in (config.val_size, config.logging_steps, config.warmup_steps))


@pytest.mark.parametrize(
    ("given", "length"),
    [
        ({}, 100),
        ({"packing": True}, 99),
        ({"neat_packing": True}, 99),
        ({"stage": "pt"}, 100),
        ({"packing": False}, 100),
    ],
)
def test_asking_for_packing_costs_a_token_as_in_llamafactory(given, length, tmp_path):
    config = make_config(BASE | {"cutoff_len": 100} | given)
    assert config.effective_cutoff_len == length
    assert load_config(write(tmp_path, config.to_yaml())).effective_cutoff_len == length


@pytest.mark.parametrize(
    ("model", "folder"),
    [
        ("demo:smollm2-135m-instruct", "smollm2-135m-instruct"),
        ("/models/Qwen2.5-0.5B/", "Qwen2.5-0.5B"),
        ("org/a b?c", "a_b_c"),
        ("C:\\models\\x", "x"),
        ("/", "model"),
    ],
)
def test_the_output_folder_is_named_after_model_method_and_yaml(model, folder, tmp_path):
    path = write(tmp_path, f"dataset: d\nfinetuning_type: full\nmodel_name_or_path: '{model}'", "my job.yaml")
    assert load_config(path).output_dir == f"saves/{folder}-full-my_job"


def test_precision_that_wins_says_so():
    config = make_config(BASE | {"compute_dtype": "float32", "fp16": True})
    assert (config.compute_dtype, config.fp16, config.bf16) == ("float32", False, False)
    assert keys_of(config.warnings) == ["compute_dtype"]
    assert "`fp16: true`" in config.warnings[0].message
    assert make_config(BASE | {"compute_dtype": "float16", "fp16": True}).warnings == []


def test_a_data_set_named_twice_is_used_once_and_said():
    config = make_config(BASE | {"dataset": "a,b,a"})
    assert config.dataset == ["a", "b"]
    assert keys_of(config.warnings) == ["dataset"]


def test_keys_without_effect_are_told_one_line_a_reason():
    values = {
        "ddp_find_unused_parameters": False,
        "ddp_bucket_cap_mb": 25,
        "dataloader_num_workers": 4,
        "gradient_checkpointing": False,
    }
    config = make_config(BASE | values | {"deepspeed": None})
    assert sorted(keys_of(config.warnings)) == [
        "dataloader_num_workers", "ddp_find_unused_parameters, ddp_bucket_cap_mb",
    ]  # fmt: skip
    assert all(problem.message.startswith("nothing to do. ") for problem in config.warnings)


@pytest.mark.parametrize(
    ("given", "key"),
    [
        ({"packing": True}, "packing"),
        ({"neat_packing": True, "packing": False}, "neat_packing"),
        ({"neat_packing": True, "packing_mode": "joined"}, "packing_mode"),
        ({"adafactor": True, "optim": "sgd"}, "adafactor"),
    ],
)
def test_deviations_and_overruled_keys_are_told(given, key):
    assert key in keys_of(make_config(BASE | given).warnings)


@pytest.mark.parametrize(
    "given", [{"neat_packing": True}, {"stage": "pt"}, {"packing": True, "packing_mode": "joined"}]
)
def test_no_deviation_no_warning(given):
    assert make_config(BASE | given).warnings == []


def test_extra_keys_are_ignored_on_request_and_listed(monkeypatch):
    monkeypatch.setenv("ALLOW_EXTRA_ARGS", "1")
    config = make_config(BASE | {"bogus": 1})
    assert keys_of(config.warnings) == ["bogus"]
    monkeypatch.setenv("ALLOW_EXTRA_ARGS", "yes")  # not one of LLaMA-Factory's words for true
    with pytest.raises(UserError, match="bogus"):
        make_config(BASE | {"bogus": 1})


TRAIN_YAML = BASE | {
    "stage": "dpo",
    "deepspeed": "ds.json",
    "learning_rate": 1e-4,
    "streaming": True,
    "template": "qwen",
    "do_eval": True,
    "use_galore": True,
    "ddp_timeout": 5,
}


@pytest.mark.parametrize("purpose", ["chat", "export"])
def test_a_training_yaml_works_for_chat_and_export(purpose):
    config = make_config(TRAIN_YAML, purpose)
    assert (config.template, config.learning_rate, config.purpose) == ("qwen", 1e-4, purpose)
    assert config.warnings == []
    with pytest.raises(UserError):
        make_config(TRAIN_YAML, "train")


def test_chat_needs_only_a_model():
    assert make_config({"model_name_or_path": "m"}, "chat").filled == {}
    with pytest.raises(UserError, match="model_name_or_path"):
        make_config({}, "chat")


def test_export_gets_a_folder_beside_the_run():
    config = make_config({"model_name_or_path": "m", "output_dir": "out/run/"}, "export")
    assert config.export_dir == "out/run-merged"
    assert config.filled == {"export_dir": "out/run-merged"}
    assert make_config({"model_name_or_path": "m", "export_dir": "x"}, "export").filled == {}


def test_a_typo_or_wrong_type_is_an_error_for_chat_too():
    with pytest.raises(UserError) as caught:
        make_config(BASE | {"lerning_rate": 1, "warmup_ratio": "0.1"}, "chat")
    assert {problem.key for problem in caught.value.problems} == {"lerning_rate", "warmup_ratio"}


def test_settings_cannot_be_changed():
    config = make_config(BASE)
    with pytest.raises(ValueError, match="frozen"):
        config.learning_rate = 1.0


def test_settings_do_not_share_their_lists():
    first, second = make_config(BASE), make_config(BASE)
    first.lora_target.append("x")
    assert second.lora_target == ["all"]
    assert Config.model_fields["lora_target"].default == ["all"]


def test_reading_a_bad_yaml_imports_neither_torch_nor_transformers(tmp_path):
    path = write(tmp_path, "model_name_or_path: m\nbogus: 1\n")
    code = f"""
import sys
from pathlib import Path
import surefoot.config
assert "omegaconf" not in sys.modules and "yaml" not in sys.modules
try:
    surefoot.config.load_config(Path({str(path)!r}), ["seed=1"])
except surefoot.errors.UserError as error:
    assert len(error.problems) == 2, error
else:
    raise SystemExit("no error")
heavy = {{"torch", "transformers", "datasets", "peft", "numpy", "pyarrow"}} & set(sys.modules)
assert not heavy, heavy
"""
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)
