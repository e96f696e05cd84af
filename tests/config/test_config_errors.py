from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from surefoot.config import all_keys, make_config
from surefoot.config.explain import OTHER_NAMES, unknown_key
from surefoot.errors import Problem, UserError

BASE = {"model_name_or_path": "m", "dataset": "d"}


def problem_of(given, purpose="train") -> Problem:
    with pytest.raises(UserError) as caught:
        make_config(BASE | given, purpose)
    assert len(caught.value.problems) == 1, caught.value
    return caught.value.problems[0]


@pytest.mark.parametrize(
    ("given", "message", "hint"),
    [
        ({"warmup_ratio": "0.1"}, "a number, but got the text '0.1'", "remove the quotes: `warmup_ratio: 0.1`"),
        ({"max_steps": "10"}, "a whole number, but got the text '10'", "remove the quotes: `max_steps: 10`"),
        ({"packing": "yes"}, "true or false, but got the text 'yes'", "`packing: true`"),
        ({"plot_loss": "False"}, "true or false", "`plot_loss: false`"),
        ({"plot_loss": "maybe"}, "true or false", "write true or false, without quotes"),
        ({"bf16": 1}, "true or false, but got the number 1", ""),
        ({"lora_rank": 8.0}, "a whole number, but got the number 8.0", "write `lora_rank: 8`"),
        ({"lora_rank": 8.5}, "a whole number, but got the number 8.5", ""),
        ({"lora_rank": True}, "a whole number, but got the switch true", ""),
        ({"learning_rate": True}, "a number, but got the switch true", ""),
        ({"run_name": 2024}, "a text, but got the number 2024", 'put it in quotes: `run_name: "2024"`'),
        ({"run_name": {"a": "b"}}, "a text, but got the mapping", "put the whole text in quotes; it has a colon in it"),
        ({"lora_target": ["q_proj", 1]}, "its items to be a text, but got the number 1", "quotes"),
        ({"lora_target": 3}, "names, as a list or separated by commas, but got the number 3", "quotes"),
        ({"lr_scheduler_kwargs": "x"}, "a mapping, but got the text 'x'", ""),
        ({"memory": "lots"}, "a whole number or auto, but got the text 'lots'", ""),
        ({"memory": 0}, "must be at least 1, but is 0", ""),
        ({"lora_rank": 0}, "must be at least 1, but is 0", ""),
        ({"num_train_epochs": 0}, "must be above 0, but is 0", ""),
        ({"warmup_ratio": 1.5}, "must be at most 1, but is 1.5", ""),
        ({"lora_dropout": 1}, "must be below 1, but is 1", ""),
        ({"learning_rate": float("nan")}, "must be a finite number", ""),
        ({"learning_rate": float("inf")}, "must be a finite number", ""),
        ({"cutoff_len": 0}, "must be at least 1, but is 0", ""),
        ({"max_samples": 0}, "must be at least 1, but is 0", ""),
        ({"val_size": -1}, "must be at least 0, but is -1", ""),
        ({"device": "mps"}, "must be auto, cpu, cuda or cuda:0", ""),
        ({"device": "cuda:x"}, "must be auto, cpu, cuda or cuda:0", ""),
        ({"stage": "sftt"}, "'sftt' is not a choice", "did you mean 'sft'? The choices are pt, sft."),
        ({"stage": "orpo"}, "'orpo' is not a choice", "`pref_loss: orpo`"),
        ({"lr_scheduler_type": "cosin"}, "'cosin' is not a choice", "did you mean 'cosine'?"),
        ({"flash_attn": "flash"}, "'flash' is not a choice", "The choices are auto, disabled, sdpa."),
        ({"report_to": "wandb,bogus"}, "'bogus' is not a choice", "tensorboard"),
        ({"compute_dtype": "fp8"}, "'fp8' is not a choice", "float32"),
        ({"seed": None}, "has no value", "its default is 42"),
        ({"flash_attn": "fa2"}, "'fa2' is not supported yet", "auto"),
        ({"deepspeed": "x.json"}, "x.json cannot be read", "name a JSON file"),
        ({"lora_rnk": 1}, "there is no such key", "`lora_rank`"),
        ({"learning-rate": 1}, "there is no such key", "did you mean `learning_rate`?"),
        ({"Bf16": True}, "there is no such key", "did you mean `bf16`?"),
        ({"evaluation_strategy": "no"}, "there is no such key", "did you mean `eval_strategy`?"),
        ({"precision": "fp16"}, "there is no such key", "did you mean `compute_dtype`?"),
        ({"zzzzqq": 1}, "there is no such key", "docs/keys.md"),
        ({3: 1}, "there is no such key", ""),
    ],
    ids=str,
)
def test_one_clear_problem(given, message, hint):
    (key,) = given
    problem = problem_of(given)
    assert problem.key == str(key)
    assert message in problem.message
    assert hint in problem.hint


@pytest.mark.parametrize(
    ("given", "key", "part"),
    [
        ({"dataset": None}, "dataset", "is missing"),
        ({"val_size": 0.1, "eval_dataset": "e"}, "val_size", "`eval_dataset`"),
        ({"val_size": 1.0}, "val_size", "neither a share below 1 nor a whole number of rows"),
        ({"val_size": 0.1, "streaming": True, "max_steps": 5}, "val_size", "stream"),
        ({"max_samples": 5, "streaming": True, "max_steps": 5}, "max_samples", "`streaming`"),
        ({"streaming": True}, "streaming", "max_steps"),
        ({"streaming": True, "max_steps": 5, "tokenized_path": "t"}, "tokenized_path", "`streaming`"),
        ({"interleave_probs": "1.0"}, "interleave_probs", "simply joined"),
        (
            {"dataset": "a,b", "mix_strategy": "interleave_over", "interleave_probs": "1.0"},
            "interleave_probs",
            "1 shares for the 2",
        ),
        (
            {"dataset": "a,b", "mix_strategy": "interleave_over", "interleave_probs": "0.5,0.6"},
            "interleave_probs",
            "add up to 1.1",
        ),
        (
            {"dataset": "a,b", "mix_strategy": "interleave_over", "interleave_probs": [2, -1]},
            "interleave_probs",
            "shares",
        ),
        ({"cutoff_len": 1, "packing": True}, "cutoff_len", "at least 2"),
        ({"mask_history": True, "train_on_prompt": True}, "mask_history", "`train_on_prompt`"),
        ({"stage": "pt", "neat_packing": True}, "neat_packing", "`stage: sft`"),
        ({"stage": "pt", "mask_history": True}, "mask_history", "`stage: sft`"),
        ({"stage": "pt", "train_on_prompt": True}, "train_on_prompt", "`stage: sft`"),
        ({"finetuning_type": "full", "use_dora": True}, "use_dora", "not full"),
        ({"finetuning_type": "freeze", "use_rslora": True}, "use_rslora", "not freeze"),
        ({"finetuning_type": "full", "adapter_name_or_path": "a"}, "adapter_name_or_path", "not full"),
        ({"finetuning_type": "freeze", "freeze_trainable_layers": 0}, "freeze_trainable_layers", "nothing would train"),
        ({"lora_target": []}, "lora_target", "nothing would train"),
        ({"bf16": True, "fp16": True}, "fp16", "`bf16`"),
        ({"bf16": True, "fp16": True, "compute_dtype": "float32"}, "fp16", "`bf16`"),
        ({"do_train": False}, "do_train", "this command trains"),
        ({"report_to": "none,wandb"}, "report_to", "none and a tracker"),
        ({"logging_steps": 0}, "logging_steps", "above 0"),
        ({"save_steps": 0.0}, "save_steps", "above 0"),
        ({"save_steps": 2.5}, "save_steps", "2.5 is neither"),
        ({"warmup_steps": 2.5}, "warmup_steps", "2.5 is neither"),
        ({"eval_strategy": "steps"}, "eval_strategy", "no data to evaluate on"),
        ({"do_eval": True}, "do_eval", "no data to evaluate on"),
        ({"early_stopping_steps": 2}, "early_stopping_steps", "needs evaluation"),
        ({"load_best_model_at_end": True}, "load_best_model_at_end", "needs evaluation"),
        ({"save_strategy": "best"}, "save_strategy", "needs evaluation"),
        ({"metric_for_best_model": "rouge"}, "metric_for_best_model", "no metric rouge"),
        ({"metric_for_best_model": "eval_accuracy"}, "metric_for_best_model", "is not computed"),
        (
            {"load_best_model_at_end": True, "eval_strategy": "epoch", "val_size": 1},
            "load_best_model_at_end",
            "saves by steps and evaluates by epoch",
        ),
        (
            {
                "load_best_model_at_end": True,
                "eval_strategy": "steps",
                "val_size": 1,
                "eval_steps": 100,
                "save_steps": 250,
            },
            "load_best_model_at_end",
            "multiple",
        ),
        ({"use_cpu": True, "device": "cuda"}, "device", "`use_cpu`"),
        ({"fp8": True, "finetuning_type": "full"}, "fp8", "trains them"),
        ({"fp8": True, "quantization_bit": 4}, "fp8", "quantization_bit"),
        ({"fp8": True, "compile": False}, "fp8", "compiled layers"),
    ],
    ids=str,
)
def test_contradictions(given, key, part):
    problem = problem_of(given)
    assert problem.key == key
    assert part in problem.message


@pytest.mark.parametrize(
    "given",
    [
        {"val_size": 0.999},
        {"val_size": 1},
        {"streaming": True, "max_steps": 5, "val_size": 100},
        {"dataset": "a,b", "mix_strategy": "interleave_under", "interleave_probs": "0.3,0.7"},
        {"finetuning_type": "freeze", "freeze_trainable_layers": 0, "freeze_extra_modules": "embed_tokens"},
        {"logging_strategy": "epoch", "logging_steps": 0},
        {"save_steps": 0.25},
        {
            "load_best_model_at_end": True,
            "eval_strategy": "steps",
            "val_size": 1,
            "eval_steps": 50,
            "save_steps": 100,
        },
        {"load_best_model_at_end": True, "eval_strategy": "epoch", "save_strategy": "epoch", "val_size": 1},
        {"load_best_model_at_end": True, "eval_strategy": "epoch", "save_strategy": "best", "val_size": 1},
        {"metric_for_best_model": "eval_mydata_loss", "val_size": 1},
        {"use_cpu": True, "device": "cpu"},
    ],
    ids=str,
)
def test_what_only_looks_like_a_contradiction(given):
    make_config(BASE | given)


def test_chat_cannot_draw_at_temperature_zero():
    assert problem_of({"temperature": 0}, "chat").key == "temperature"
    make_config(BASE | {"temperature": 0, "do_sample": False}, "chat")
    make_config(BASE | {"temperature": 0}, "train")


def test_all_problems_are_reported_together_in_the_order_of_the_file():
    values = {
        "warmup_ratio": "0.1",
        "bogus_key": 1,
        "optim": "lion_8bit",
        "val_size": 1.0,
        "eval_dataset": "e",
        "use_kt": True,
    }
    lines = {key: line for line, key in enumerate(values, start=1)}
    with pytest.raises(UserError) as caught:
        make_config(values, lines=lines)
    keys = [problem.key for problem in caught.value.problems]
    assert keys == [
        "warmup_ratio",
        "bogus_key",
        "optim",
        "val_size",
        "val_size",
        "use_kt",
        "model_name_or_path",
        "dataset",
    ]
    assert "(line 4)" in caught.value.problems[3].message
    assert all(key in str(caught.value) for key in keys)


def test_a_wrong_value_does_not_bring_more_problems_with_it():
    assert problem_of({"dataset": 3}).key == "dataset"  # and not "is missing" besides


def test_other_names_lead_to_keys_and_are_none_themselves():
    assert set(OTHER_NAMES.values()) <= set(all_keys())
    assert not set(OTHER_NAMES) & set(all_keys())


@settings(max_examples=100, deadline=None)
@given(key=st.sampled_from(sorted(all_keys())), place=st.integers(0, 40), letter=st.sampled_from("aeiouxyz_"))
def test_a_letter_too_many_still_leads_to_the_key(key, place, letter):
    misspelt = key[:place] + letter + key[place:]
    if misspelt in all_keys() or misspelt in OTHER_NAMES:
        return
    assert f"`{key}`" in unknown_key(misspelt).hint


@settings(max_examples=150, deadline=None)
@given(
    key=st.sampled_from(sorted(all_keys())),
    value=st.none() | st.booleans() | st.integers() | st.floats() | st.text() | st.lists(st.integers() | st.text())
    | st.dictionaries(st.text(), st.integers()) | st.dates() | st.binary(),
)  # fmt: skip
def test_no_value_brings_anything_but_a_clear_error(key, value):
    try:
        make_config(BASE | {key: value})
    except UserError as error:
        assert all(problem.key in all_keys() and problem.message for problem in error.problems)
